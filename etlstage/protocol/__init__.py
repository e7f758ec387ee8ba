"""
Dialects without I/O: bytes in, events out.

A dialect decides what bytes mean and what may follow what. It never reads, writes,
waits or logs; the supervisor, the worker SDK and the tests all drive the same objects.
"""
