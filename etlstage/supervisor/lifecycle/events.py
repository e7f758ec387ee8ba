"""
What can happen to the workers of a stage, and what is to be done about it.

The supervisor hands events to :class:`~etlstage.supervisor.lifecycle.pool.PoolState`
and performs the instructions that it returns. Most events go to its host as well: they
happen once per life of a worker or more rarely, never per message.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from etlstage.errors import FailureCause, WorkerLost

__all__ = (
    "AliveSeen",
    "DemandSeen",
    "Event",
    "Fail",
    "FeedWorker",
    "GiveUp",
    "Instruction",
    "Publish",
    "RemainsEnded",
    "Retire",
    "ScaleRequested",
    "SetTimer",
    "Spawn",
    "StartFailed",
    "StopRequested",
    "StopWorker",
    "WorkerExited",
    "WorkerFailed",
    "WorkerFailedPermanently",
    "WorkerReady",
    "WorkerRestarting",
    "WorkerSilent",
    "WorkerStarted",
    "WorkerTimerRang",
    "WorkerWorn",
)


class WorkerStarted(NamedTuple):
    """A worker's program runs."""

    worker: str
    pid: int
    start: int = 1
    """1 for the first start of this worker, 2 for its first restart, and so on."""


class StartFailed(NamedTuple):
    """A worker's program can't be run."""

    worker: str
    error: Exception


class WorkerReady(NamedTuple):
    """A worker has announced that it is ready."""

    worker: str
    pid: int


class AliveSeen(NamedTuple):
    """A worker has sent a heartbeat."""

    worker: str


class WorkerTimerRang(NamedTuple):
    """The time has come that a ``SetTimer`` named."""

    worker: str
    idle_since: float | None = None
    """Since when the worker has had nothing to do, in seconds; None if it has."""


class WorkerFailed(NamedTuple):
    """A worker is at fault and is stopped: it broke the protocol, or was too slow."""

    worker: str
    pid: int
    error: Exception
    cause: FailureCause = "silent"


class WorkerWorn(NamedTuple):
    """A worker is to be replaced although nothing is wrong with it."""

    worker: str
    reason: str
    """Such as ``answered 1000 messages``."""


class WorkerExited(NamedTuple):
    """A worker's process has ended and been reaped."""

    worker: str
    pid: int
    status: int
    """Exit status, negative for a signal."""
    lost: int
    """Messages that it held."""
    answered: int = 0
    """Messages that it has answered in its life."""
    retried: int = 0
    """Messages that others are to try, of those that it held."""
    failed: int = 0
    """Messages that have now failed once too often, of those that it held."""
    tries: int = 0
    """How often the message that is suspected now has failed alone; 0 for a batch."""
    progress: bool = False
    """It had given some of what it held, more than all before it."""
    untouched: bool = False
    """It had read nothing of what it held."""
    stopped: bool = False
    """It was stopped, without any fault of its own."""
    late: int = 0
    """Bytes that it wrote after it had failed; they are dropped."""
    doubtful: int = 0
    """Messages whose reply may be another's, or that may not be loaded, or twice."""
    doubt: WorkerLost | None = None
    """Why what a load worker has answered may not be loaded: it failed while it ended.
    None if it did not; what is doubtful for another reason is in the log."""
    fate: str = ""
    """What became of it, such as ``was killed by SIGSEGV``."""
    cause: str = ""
    """The error that it died of, such as ``KeyError: 'date'``, where it is known."""


class RemainsEnded(NamedTuple):
    """What a worker left behind had to be killed, or wrote what was dropped."""

    worker: str
    pid: int
    """Of the worker, which is gone."""
    killed: int
    """Processes that had not ended in time."""
    late: int = 0
    """Bytes that came on its stdout behind its end."""
    doubtful: int = 0
    """Messages that a load worker has answered, and that may not be loaded."""
    doubt: WorkerLost | None = None
    """Why: some of these processes may have been loading them."""


class WorkerSilent(NamedTuple):
    """A worker has not answered for long; it may have a reason, or never answer."""

    worker: str
    pid: int
    seconds: float
    """For how long."""
    hint: str
    """What it did instead, in its dialect, and what may be wrong."""
    progressing: bool = False
    """It reports progress."""


class WorkerRestarting(NamedTuple):
    """A worker is to be started again."""

    worker: str
    delay: float
    """How long from now, in seconds."""


class WorkerFailedPermanently(NamedTuple):
    """A worker failed permanently: too many restarts without progress."""

    worker: str
    error: Exception


class DemandSeen(NamedTuple):
    """Messages wait for a worker."""

    waiting: int


class ScaleRequested(NamedTuple):
    """There are to be so many workers from now on."""

    workers: int


class StopRequested(NamedTuple):
    """The supervisor is to stop all workers."""

    patient: bool = True
    """Whether they may end by themselves once their stdin is closed."""


Event: TypeAlias = (
    WorkerStarted
    | StartFailed
    | WorkerReady
    | AliveSeen
    | WorkerTimerRang
    | WorkerFailed
    | WorkerWorn
    | WorkerExited
    | RemainsEnded
    | DemandSeen
    | ScaleRequested
    | StopRequested
)
"""What :class:`~etlstage.supervisor.lifecycle.pool.PoolState` handles."""

SupervisorEvent: TypeAlias = (
    WorkerStarted
    | StartFailed
    | WorkerReady
    | WorkerFailed
    | WorkerWorn
    | WorkerExited
    | RemainsEnded
    | WorkerSilent
    | WorkerRestarting
    | WorkerFailedPermanently
)
"""What a supervisor reports to its host."""


# --- instructions ------------------------------------------------------------


class Spawn(NamedTuple):
    """Start the worker's program; answer with WorkerStarted or StartFailed."""

    worker: str
    start: int
    max_messages: float
    """Messages after which it is worn."""


class FeedWorker(NamedTuple):
    """Give the worker messages from now on."""

    worker: str


class Fail(NamedTuple):
    """Declare the worker at fault; answer with WorkerFailed."""

    worker: str
    reason: str
    """What it did wrong, as a part of a sentence."""
    cause: FailureCause


class Retire(NamedTuple):
    """Give the worker no more messages; when it has answered those it has, stop it."""

    worker: str


class StopWorker(NamedTuple):
    """Stop the process, step by step; answer with WorkerExited when it is gone."""

    worker: str
    patient: bool
    """Whether it may end by itself once its stdin is closed."""


class SetTimer(NamedTuple):
    """Answer with WorkerTimerRang at that time; it replaces the worker's last timer."""

    worker: str
    at: float | None
    """Seconds on the caller's clock, or None for no timer."""


class Publish(NamedTuple):
    """Let the host know, and the log."""

    event: SupervisorEvent


class GiveUp(NamedTuple):
    """Answer all messages, now and later, with an error: all workers failed."""

    worker: str
    """The last one."""
    reason: str
    """Why it is not started again, as a part of a sentence."""


Instruction: TypeAlias = (
    Spawn | FeedWorker | Fail | Retire | StopWorker | SetTimer | Publish | GiveUp
)
