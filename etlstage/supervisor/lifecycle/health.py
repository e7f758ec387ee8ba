"""Whether a stage can do its work now, in a word and with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from etlstage.messages import counted
from etlstage.supervisor.lifecycle.transition import State
from etlstage.supervisor.lifecycle.worker import WorkerLife

__all__ = ("Health", "Silence", "examine")


class Health(NamedTuple):
    """How a stage is."""

    state: Literal["starting", "ready", "degraded", "failed"]
    """*starting* until a worker is ready; *ready* when all are; *degraded* when some
    are not, or messages go one at a time; *failed* when none is left, or it is
    closed."""
    reason: str = ""
    """Why it is not ready; empty if it is."""


class Silence(NamedTuple):
    """For whose answer it is waited."""

    worker: str
    seconds: float
    """For how long."""
    received: int
    """Bytes that have come of it."""


def examine(lives: Sequence[WorkerLife], now: float) -> Health:
    """
    Return how a stage is that has not ended.

    Args:
        lives: Of the workers that there are to be.
        now: The time, in seconds.

    """
    running = [life for life in lives if life.state is State.RUNNING or life.retiring]
    troubled = [life for life in lives if life not in running and _troubled(life)]
    if troubled:
        told = "; ".join(_tell(life, now) for life in troubled)
        workers = counted(len(lives), "worker")
        return Health("degraded", f"{len(running)} of {workers} running: {told}")
    if lives and not running:
        names = ", ".join(life.name for life in lives)
        return Health("starting", f"waits for {names} to be ready")
    return Health("ready")


def _troubled(life: WorkerLife) -> bool:
    """Return whether a worker that does not run has run, or has tried to."""
    return life.state is not State.STARTING or life.starts > 1


def _tell(life: WorkerLife, now: float) -> str:
    match life.state:
        case State.BACKOFF:
            # Read from another thread, it may have rung in this moment.
            wait = max(0.0, (life.timer or now) - now)
            return f"{life.name} is restarted in {wait:.1f} s"
        case State.FATAL | State.EXITED:
            return life.end
        case _:
            return f"{life.name} is being replaced"
