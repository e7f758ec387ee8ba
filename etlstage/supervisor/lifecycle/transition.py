"""
The states of a worker, and which events lead from one to which.

What the states mean for a worker's life is drawn in ``pool.py``; which of the allowed
states an event leads to is decided in ``worker.py``. One change comes with no event of
its own: a worn worker goes from RUNNING to STOPPING when the others can spare it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final, TypeAlias

from etlstage.supervisor.lifecycle.events import (
    AliveSeen,
    Event,
    RemainsEnded,
    StartFailed,
    StopRequested,
    TimerRang,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
    WorkerStarted,
    WorkerWorn,
)

__all__ = ("TRANSITIONS", "State")


class State(Enum):
    """Where a worker is in its life."""

    EXITED = "exited"
    """There is no process, and none is wanted."""
    STARTING = "starting"
    """The process runs, or is about to; it is not ready."""
    RUNNING = "running"
    """It is given messages."""
    STOPPING = "stopping"
    """It is given no more; its process is on its way out."""
    BACKOFF = "backoff"
    """It is started again when the delay is over."""
    FATAL = "fatal"
    """It failed permanently: too many restarts without progress."""


_GONE: Final = frozenset({State.EXITED, State.BACKOFF, State.STARTING, State.FATAL})
_S: TypeAlias = State

TRANSITIONS: Final[Mapping[tuple[State, type[Event]], frozenset[State]]] = {
    (_S.STARTING, WorkerStarted): frozenset({_S.STARTING, _S.RUNNING}),
    (_S.STARTING, StartFailed): _GONE,
    (_S.STARTING, WorkerReady): frozenset({_S.RUNNING}),
    (_S.STARTING, AliveSeen): frozenset({_S.STARTING}),
    (_S.STARTING, TimerRang): frozenset({_S.STARTING}),
    (_S.STARTING, WorkerFailed): frozenset({_S.STOPPING}),
    (_S.STARTING, WorkerExited): _GONE,
    (_S.STARTING, StopRequested): frozenset({_S.STOPPING}),
    (_S.RUNNING, WorkerReady): frozenset({_S.RUNNING}),
    (_S.RUNNING, AliveSeen): frozenset({_S.RUNNING}),
    (_S.RUNNING, TimerRang): frozenset({_S.RUNNING}),
    (_S.RUNNING, WorkerFailed): frozenset({_S.STOPPING}),
    (_S.RUNNING, WorkerWorn): frozenset({_S.RUNNING}),
    (_S.RUNNING, WorkerExited): _GONE,
    (_S.RUNNING, StopRequested): frozenset({_S.STOPPING}),
    (_S.STOPPING, StartFailed): _GONE,
    (_S.STOPPING, WorkerReady): frozenset({_S.STOPPING}),
    (_S.STOPPING, AliveSeen): frozenset({_S.STOPPING}),
    (_S.STOPPING, WorkerFailed): frozenset({_S.STOPPING}),
    (_S.STOPPING, WorkerWorn): frozenset({_S.STOPPING}),
    (_S.STOPPING, WorkerExited): _GONE,
    (_S.STOPPING, StopRequested): frozenset({_S.STOPPING}),
    (_S.BACKOFF, TimerRang): frozenset({_S.STARTING}),
    (_S.BACKOFF, StopRequested): frozenset({_S.EXITED}),
    (_S.EXITED, StopRequested): frozenset({_S.EXITED}),
    (_S.FATAL, StopRequested): frozenset({_S.FATAL}),
    # What an earlier start has left behind.
    **{(state, RemainsEnded): frozenset({state}) for state in State},
}
"""Into which states each event may lead; an event that is not here can't happen."""
