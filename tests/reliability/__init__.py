"""
What the simulation finds, by figures: bugs that are planted, and seeds that were run.

``python -m tests.reliability`` writes ``tests/RELIABILITY.md``.
"""
