"""What is to be done about what happened to a worker."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from etlstage.errors import FailureCause
from etlstage.supervisor.lifecycle.events import SupervisorEvent

__all__ = (
    "Fail",
    "Feed",
    "GiveUp",
    "Instruction",
    "Retire",
    "SetTimer",
    "Spawn",
    "Stop",
    "Tell",
)


class Spawn(NamedTuple):
    """Start the worker's program; answer with WorkerStarted or StartFailed."""

    worker: str
    start: int
    max_messages: float
    """Messages after which it is worn."""


class Feed(NamedTuple):
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


class Stop(NamedTuple):
    """Stop the process, step by step; answer with WorkerExited when it is gone."""

    worker: str
    patient: bool
    """Whether it may end by itself once its stdin is closed."""


class SetTimer(NamedTuple):
    """Answer with TimerRang at that time; it replaces the worker's last timer."""

    worker: str
    at: float | None
    """Seconds on the caller's clock, or None for no timer."""


class Tell(NamedTuple):
    """Let the host know, and the log."""

    event: SupervisorEvent


class GiveUp(NamedTuple):
    """Answer all messages, now and later, with an error: no worker is left."""

    worker: str
    """The last one."""
    reason: str
    """Why it is not started again, as a part of a sentence."""


Instruction: TypeAlias = Spawn | Feed | Fail | Retire | Stop | SetTimer | Tell | GiveUp
