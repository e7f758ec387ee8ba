"""
What can happen to the workers of a stage, and what is to be done about it.

The supervisor passes events to :class:`~etlstage.supervisor.lifecycle.pool.PoolState`
and performs the instructions that it returns. Most events go to its host as well: they
happen once per start of a worker or more rarely, never per message.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from etlstage.errors import FailureCause, StageError, WorkerLost

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
    """A worker's program was started."""

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
    """The time of the worker's last ``SetTimer`` has come."""

    worker: str
    idle_since: float | None = None
    """Since when the worker has been idle, in seconds; None if it is busy."""
    needed: bool = True
    """Whether a worker that waits for its restart would have anything to do."""


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
    """A worker's process has ended; processes that it left behind may still run."""

    worker: str
    pid: int
    status: int
    """Exit status, negative for a signal; 256: the host process has reaped it."""
    lost: int
    """Number of messages that it held."""
    answered: int = 0
    """Number of messages that it has answered in its life."""
    retried: int = 0
    """How many of the messages it held are to be tried by other workers."""
    failed: int = 0
    """How many of the messages it held have now failed for good."""
    tries: int = 0
    """How often the message that is suspected now has failed alone; 0 for a batch."""
    progress: bool = False
    """It had given more of a round of extraction than all workers before it."""
    untouched: bool = False
    """It had read nothing of what it held."""
    unknown: int = 0
    """Messages that it may have processed or not: what it held, unless untouched, and
    what it had answered as a load worker that failed, as it may not have stored it."""
    all_answered: bool = False
    """It had answered all that it held, and committed none of it."""
    stopped: bool = False
    """It was stopped, without any fault of its own."""
    late: int = 0
    """Bytes that it wrote after it had failed; they are dropped."""
    doubtful: int = 0
    """Messages whose reply may be another's, or that may be loaded twice, or not."""
    doubt: StageError | None = None
    """The error of a load worker that failed while it ended: what it had answered may
    not be loaded, or the end of its share is not committed; or of a worker that failed
    without a message to explain it. Else None; doubts for any other reason are in the
    log."""
    fate: str = ""
    """What became of it, such as ``was killed by SIGSEGV``."""
    cause: str = ""
    """The error that it died of, such as ``KeyError: 'date'``, if it is known."""


class RemainsEnded(NamedTuple):
    """Processes that a worker left behind were killed, or their output was dropped."""

    worker: str
    pid: int
    """Pid of the worker, which is gone."""
    killed: int
    """How many processes had not ended in time."""
    late: int = 0
    """Bytes that came on its stdout after its end."""
    doubtful: int = 0
    """Number of messages that a load worker answered, and that may not be loaded."""
    doubt: WorkerLost | None = None
    """The reason: some of these processes may have been loading them."""


class WorkerSilent(NamedTuple):
    """A worker has not answered for long; it may have a reason, or never answer."""

    worker: str
    pid: int
    seconds: float
    """How long it has not answered."""
    hint: str
    """What it did instead, in terms of its dialect, and what may be wrong."""
    progressing: bool = False
    """It reports progress."""


class WorkerRestarting(NamedTuple):
    """A worker is to be restarted."""

    worker: str
    delay: float
    """Seconds from now until the restart."""


class WorkerFailedPermanently(NamedTuple):
    """A worker failed permanently: too many restarts without progress."""

    worker: str
    error: Exception


class DemandSeen(NamedTuple):
    """Messages wait for a worker."""

    waiting: int


class ScaleRequested(NamedTuple):
    """The number of workers is to change."""

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
    """Stop the process, step by step; answer with WorkerExited once it is gone."""

    worker: str
    patient: bool
    """Whether it may end by itself once its stdin is closed."""


class SetTimer(NamedTuple):
    """Answer with WorkerTimerRang at a time; this replaces the worker's last timer."""

    worker: str
    at: float | None
    """Seconds on the caller's clock, or None for no timer."""


class Publish(NamedTuple):
    """Report an event to the host, the log and the meter."""

    event: SupervisorEvent


class GiveUp(NamedTuple):
    """End all messages, now and later, with an error: all workers failed."""

    worker: str
    """The last worker that failed."""
    reason: str
    """Why it is not restarted, as a part of a sentence."""


Instruction: TypeAlias = (
    Spawn | FeedWorker | Fail | Retire | StopWorker | SetTimer | Publish | GiveUp
)
