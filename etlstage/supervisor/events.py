"""What a supervisor tells its host."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

__all__ = ("SupervisorEvent", "WorkerExited", "WorkerFailed", "WorkerStarted")


class WorkerStarted(NamedTuple):
    """A worker's program runs."""

    worker: str
    pid: int


class WorkerFailed(NamedTuple):
    """A worker is given up: it broke the protocol, or did not answer in time."""

    worker: str
    pid: int
    error: Exception


class WorkerExited(NamedTuple):
    """A worker's process has ended and been reaped."""

    worker: str
    pid: int
    status: int
    """Exit status, negative for a signal."""
    lost: int
    """Messages that it held."""


SupervisorEvent: TypeAlias = WorkerStarted | WorkerFailed | WorkerExited
