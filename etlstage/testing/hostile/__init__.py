"""
A program that misbehaves by its plan.

``kinds.py`` has what can go wrong, and which of it happens when, ``marked.py`` has the
bytes; ``worker.py`` decides what is done next, and ``program.py``
is a process that does it.

The program runs apart from etlstage, in a bare interpreter, so the modules know each other
as neighbours only. They import what they need when they need it: a restart should
cost the supervisor's time and not ours.
"""
