"""Faults from outside, that befall any worker: a launch that wraps another."""
