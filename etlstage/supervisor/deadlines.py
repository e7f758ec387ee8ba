"""
Deadlines for a worker's answers, and what it means to miss them.

An answer is due from the moment its turn has come, or, if exchanges end in any order,
from the moment its exchange was opened. Nothing here acts: the link arms and pauses the
deadlines and, when they ring, asks what has been missed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import anyio
import anyio.lowlevel

from etlstage.stage.policy import Timeouts

__all__ = ("Deadline", "ResponseDeadlines")

_SILENCE: Final = 30.0  # seconds without an answer until that is reported
_TIMES: Final = 10  # progress alone is reported after that many times the deadline


class Deadline:
    """
    Calls back once a deadline has passed.

    Postponing the deadline, as each reply does, costs nothing: the sleeping task finds
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
        """Ring at ``at``, in seconds on anyio's clock; None: don't ring."""
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
                # A deadline that is set to a time in the past must not stop the loop.
                await anyio.lowlevel.checkpoint()
                continue
            nearer, until = anyio.Event(), min(d._at for d in deadlines)
            for deadline in deadlines:
                deadline._nearer, deadline._sleeps_until = nearer, until
            with anyio.CancelScope(deadline=until):
                await nearer.wait()
            for deadline in deadlines:
                deadline._sleeps_until = -math.inf


class BusyTime:
    """Adds up the time in which any worker of a stage holds a message."""

    def __init__(self) -> None:
        self._holding = 0
        self._since = 0.0
        self._total = 0.0

    def begin(self, now: float) -> None:
        """Count one more worker that holds messages."""
        if not self._holding:
            self._since = now
        self._holding += 1

    def end(self, now: float) -> None:
        """Count one worker less."""
        self._holding -= 1
        if not self._holding:
            self._total += now - self._since

    def until(self, now: float) -> float:
        """Return the time so far, in seconds."""
        return self._total + (now - self._since if self._holding else 0.0)


class ResponseDeadlines(Deadline):
    """
    Tracks whether one worker has to answer, and by when.

    Args:
        timeouts: The timeouts of the stage.
        ring: Called when there may be something to report, or a deadline has passed.
        in_order: Whether its exchanges end in the order in which they were opened:
            then progress that it reports gives it more time.
        now: The time, in seconds.
        busy: Counts the time in which it holds messages.

    Attributes:
        asked_at: Since when an answer is due; None if none is.
        turn_at: The same, but not moved by reports of progress.
        idle_since: Since when the worker has had nothing to do; None while it is busy.

    """

    def __init__(
        self,
        timeouts: Timeouts,
        ring: Callable[[float], None],
        *,
        in_order: bool,
        now: float,
        busy: BusyTime,
    ) -> None:
        super().__init__(ring)
        self._timeouts = timeouts
        self._in_order = in_order
        self.asked_at: float | None = None
        self.turn_at: float = 0.0
        self.idle_since: float | None = now
        self._busy = busy
        self._gone = False
        self._armed = False  # it is set to ring
        self._heard_at = 0.0  # when the worker last answered or reported progress
        # `_heard_at`, or `turn_at`, for which silence, or only progress, was reported.
        self._silent_since: float | None = None
        self._progressing_since: float | None = None

    def arm(self, now: float, since: float | None, *, busy: bool) -> None:
        """Restart the worker's time, from ``since``; None: no answer is due."""
        self.turn_at = self._heard_at = now
        self.asked_at = since
        if busy:
            if self.idle_since is not None and not self._gone:
                self._busy.begin(now)
            self.idle_since = None
        elif self.idle_since is None:
            self.idle_since = now
            if not self._gone:
                self._busy.end(now)
        # Each reply makes something else due, later than before: that is found out when
        # it rings too early.
        if since is not None and not self._armed:
            self.look_again()

    def close(self, now: float) -> None:
        """Count the worker as idle: it is gone, whatever it holds."""
        if self.idle_since is None and not self._gone:
            self._busy.end(now)
        self._gone = True

    def progressed(self, now: float) -> float | None:
        """
        Restart the time of an answer: the worker reports progress.

        Returns for how many seconds it has only reported progress, if that is to be
        logged.
        """
        self._heard_at = now
        if self.asked_at is None:
            self.turn_at = now
            return None
        self.asked_at = now
        limit, took = self._timeouts.message, now - self.turn_at
        if limit is None or took < _TIMES * limit:
            return None
        if self._progressing_since == self.turn_at:
            return None
        self._progressing_since = self.turn_at
        return took

    def pause(self) -> None:
        """Expect nothing while the worker waits for us."""
        self.asked_at = None

    @property
    def limit(self) -> float | None:
        """Seconds that an answer may take; None: no limit."""
        limit, total = self._timeouts.message, self._timeouts.total
        if not self._in_order and total is not None:
            limit = total if limit is None else min(limit, total)
        return limit

    @property
    def shown_limit(self) -> str:
        """The limit, with the name of its setting."""
        limit = self.limit
        name = "message" if limit == self._timeouts.message else "total"
        return f"{limit:g} s (timeout.{name})"

    def look_again(self) -> None:
        """Ring when the next report or deadline is due."""
        self._armed = self.asked_at is not None
        if self._armed:
            reported = self._silent_since == self._heard_at
            silent_at = math.inf if reported else self._heard_at + _SILENCE
            self.set(min(silent_at, self._missed_at))

    def missed(self, now: float) -> str | None:
        """Return the limit within which an answer did not come, if it is missed now."""
        self._armed = False
        if self._missed_at > now:
            return None
        total = self._total
        if total is not None and now >= self.turn_at + total:
            return f"{total:g} s (timeout.total), whatever progress it reported"
        return self.shown_limit

    def silent(self, now: float) -> bool:
        """Return, once, whether the worker was silent for 30 seconds."""
        if self._silent_since == self._heard_at or self._heard_at + _SILENCE > now:
            return False
        self._silent_since = self._heard_at
        return True

    @property
    def _total(self) -> float | None:
        """Seconds that an answer may take in spite of progress; None: no limit."""
        return self._timeouts.total if self._in_order else None

    @property
    def _missed_at(self) -> float:
        if self.asked_at is None:
            return math.inf
        limit, total = self.limit, self._total
        at = math.inf if limit is None else self.asked_at + limit
        return at if total is None else min(at, self.turn_at + total)
