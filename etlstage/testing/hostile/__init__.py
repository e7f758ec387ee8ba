"""A program that misbehaves as it is told; see ``program.py``."""
