"""A deadline that can be moved at any time without a system call."""

from __future__ import annotations

import math
from collections.abc import Callable

import anyio
import anyio.lowlevel

__all__ = ("Deadline",)


class Deadline:
    """
    Calls back once a deadline has passed.

    Moving the deadline away, as each reply does, costs nothing: the sleeper finds
    out when it wakes at the old one.

    Args:
        ring: Called with the time, in seconds; it may set the alarm again.

    """

    def __init__(self, ring: Callable[[float], None]) -> None:
        self._ring = ring
        self._at = math.inf
        self._sleeps_until = -math.inf
        self._nearer = anyio.Event()

    def set(self, at: float | None) -> None:
        """Ring at ``at``, in seconds on anyio's clock; None: don't."""
        self._at = math.inf if at is None else at
        if self._at < self._sleeps_until:
            self._nearer.set()

    async def run(self, *others: Deadline) -> None:
        """Sleep and ring until cancelled; one task is enough for several deadlines."""
        deadlines = (self, *others)
        while True:
            now, rang = anyio.current_time(), False
            for deadline in deadlines:
                if now >= deadline._at:
                    deadline._at, rang = math.inf, True
                    deadline._ring(now)
            if rang:
                # Whoever sets it to a time that has passed must not stop the loop.
                await anyio.lowlevel.checkpoint()
                continue
            nearer, until = anyio.Event(), min(d._at for d in deadlines)
            for deadline in deadlines:
                deadline._nearer, deadline._sleeps_until = nearer, until
            with anyio.CancelScope(deadline=until):
                await nearer.wait()
            for deadline in deadlines:
                deadline._sleeps_until = -math.inf
