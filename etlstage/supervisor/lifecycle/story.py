"""What is told of a worker in errors: who it was, and what happened to it last."""

from __future__ import annotations

from collections import deque
from typing import Final

from etlstage.errors import StageFailed
from etlstage.messages import counted
from etlstage.supervisor.lifecycle.events import WorkerExited

__all__ = ("History", "failure", "fate_of", "named")

_LENGTH: Final = 16  # events of a history; five starts that fail


class History:
    """Keeps the last events of one worker, over all its starts."""

    def __init__(self) -> None:
        self._events: deque[tuple[float, str]] = deque(maxlen=_LENGTH)

    def note(self, now: float, text: str) -> None:
        """Add what happened at ``now``, in seconds."""
        self._events.append((now, text))

    def tell(self, now: float) -> tuple[str, ...]:
        """Return what happened and how long ago, oldest first."""
        return tuple(f"{text} {now - at:.2f} s ago" for at, text in self._events)


def named(worker: str, pid: int | None) -> str:
    """Return a worker as errors call it."""
    return f"worker {worker}" if pid is None else f"worker {worker} (pid {pid})"


def fate_of(event: WorkerExited) -> str:
    """Return what became of a worker, and what it leaves."""
    parts = [event.fate or f"ended with status {event.status}"]
    if event.answered:
        parts.append(f"{counted(event.answered, 'message')} answered")
    if event.lost:
        parts.append(f"{event.lost} held")
    return ", ".join(parts)


def failure(stage: str, end: str, story: tuple[str, ...]) -> StageFailed:
    """Return the error of a worker that is not started again."""
    error = StageFailed(f"stage {stage}: {end}; not restarted again", stage=stage)
    error.story = tuple(f"event: {event}" for event in story)
    return error
