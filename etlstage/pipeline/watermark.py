"""How far a stage has come when its answers may arrive in any order."""

from __future__ import annotations

__all__ = ("Watermark",)


class Watermark:
    """Counts the messages of which none before has no outcome."""

    def __init__(self) -> None:
        self.low = 0
        """All messages before this place have their outcome."""
        self._ahead: dict[int, int] = {}

    def rise(self, start: int, count: int) -> None:
        """Note the outcome of ``count`` messages, one or more, from ``start`` on."""
        if start != self.low:
            self._ahead[start] = count
            return
        self.low += count
        while self._ahead and (count := self._ahead.pop(self.low, 0)):
            self.low += count
