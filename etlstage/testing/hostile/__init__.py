"""
A program that misbehaves as it is told.

``program.py`` is the worker; ``plan.py`` says which fault happens when, and
``acts.py`` does what is done at once, where ``output.py`` forms the replies.

It runs apart from etlstage, in a bare interpreter, so the modules know each other
as neighbours only. They import what they need when they need it: a restart should
cost the supervisor's time and not ours.
"""
