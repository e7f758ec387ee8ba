"""Tests of what the testing kit knows about each dialect."""
