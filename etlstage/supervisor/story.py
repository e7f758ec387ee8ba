"""The last things that happened to a worker, for every error that is about it."""

from __future__ import annotations

from collections import deque
from typing import Final

__all__ = ("Story",)

_LENGTH: Final = 16  # events; five starts that fail


class Story:
    """Keeps the last events of one worker, over all its starts."""

    def __init__(self) -> None:
        self._events: deque[tuple[float, str]] = deque(maxlen=_LENGTH)

    def note(self, now: float, text: str) -> None:
        """Add what happened at ``now``, in seconds."""
        self._events.append((now, text))

    def tell(self, now: float) -> tuple[str, ...]:
        """Return what happened and how long ago, oldest first."""
        return tuple(f"{text} {now - at:.2f} s ago" for at, text in self._events)
