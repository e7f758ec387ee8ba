"""
The messages of a stage, without I/O: from submission to outcome.

There is a *submission* per caller. It owns the messages that wait, and their outcomes
until these are collected (``submission.py``, with lanes by key in ``keyed.py``, and
outputs that are passed on as they come in ``round.py``). There is a *backlog* per
stage. It owns the submissions, the suspects, and the assignment of lanes to workers.
There is a *dispatcher* per process. It owns the table of the exchanges that its worker
has open. ``giving.py`` decides what it opens next, ``retry.py`` what becomes of
exchanges that were lost or rejected.

An exchange is in one place at a time: it waits in its submission, is a suspect in the
backlog, is kept back in ``giving.py``, or is open in the table of one dispatcher. It
ends with exactly one outcome, which :meth:`Submission.deliver
<etlstage.supervisor.exchange.submission.Submission.deliver>` takes.

Time is passed as an argument, and sessions are not known: the input and the output are
events of ``protocol/events.py``.
"""
