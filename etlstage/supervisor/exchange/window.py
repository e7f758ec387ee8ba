"""How much is sent ahead of the replies to one worker."""

from __future__ import annotations

from typing import Final

__all__ = ("Window",)

_HORIZON: Final = 0.05
"""Seconds of work that an automatic window holds. A slow worker then holds few
messages, which others can take; a fast one so many that the pipe never runs dry."""
_WIDEST: Final = 65536  # exchanges


class Window:
    """
    Bounds the exchanges sent ahead of their EOP.

    Args:
        fixed: The bound, or None to follow the worker's speed: four times as many
            when it answered a whole window in less than half a horizon, half as many
            when that took longer than one.

    """

    def __init__(self, fixed: int | None) -> None:
        self.size: int = fixed or 1
        self.fixed: bool = fixed is not None
        self._answered = 0
        self._since = 0.0

    def started(self, now: float) -> None:
        """Take note that the worker, so far idle, was given something."""
        self._answered = 0
        self._since = now

    def answered(self, count: int, now: float) -> None:
        """Take note of answers, and adjust."""
        if self.fixed:
            return
        self._answered += count
        if self._answered < self.size:
            return
        took = now - self._since
        if took < _HORIZON / 2:
            self.size = min(_WIDEST, self.size * 4)
        elif took > _HORIZON:
            self.size = max(1, self.size // 2)
        self.started(now)
