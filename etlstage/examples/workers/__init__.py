"""Example workers, one folder per language; each file is a program of its own."""
