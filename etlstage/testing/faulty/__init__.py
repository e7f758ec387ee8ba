"""Faults that any worker has from outside: a launch that wraps another."""
