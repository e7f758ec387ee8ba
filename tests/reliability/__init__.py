"""
Measure what the simulation finds: planted bugs, and the seeds that were run.

``python -m tests.reliability`` writes ``tests/RELIABILITY.md``.
"""
