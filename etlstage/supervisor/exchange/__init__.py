"""
The messages of a stage, without I/O: from submission to outcome.

Who owns what. A *submission* is one caller's: it owns the messages that wait, and their
outcomes until they are collected (``submission.py``, with lanes by key in ``keyed.py``,
and outputs that are passed on as they come in ``round.py``). The *backlog* is one for
each stage: it owns the submissions, the suspects, and which worker takes from a lane.
A *dispatcher* is one for each process: it owns the table of the exchanges that its
worker has open. What it opens next is decided in ``giving.py``, what becomes of
exchanges that were lost or rejected in ``retry.py``.

An exchange is in one place at a time: it waits in its submission, is a suspect in the
backlog, is kept back in ``giving.py`` or is open in the table of one dispatcher. It
leaves them by exactly one outcome, which :meth:`Submission.deliver
<etlstage.supervisor.exchange.submission.Submission.deliver>` takes.

Time comes as an argument, and sessions are not known: in and out go the events of
``protocol/events.py``.
"""
