"""
A program that misbehaves according to its plan.

``kinds.py`` has the faults, and when they happen, ``marked.py`` handles the bytes,
``worker.py`` decides what is done next, and ``program.py`` is a process that does it.

The program runs apart from etlstage, in a bare interpreter, so the modules use relative
imports only. They import what they need when they need it: the time of a restart
should be the supervisor's, not the program's.
"""
