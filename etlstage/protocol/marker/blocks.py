"""
Decides how much a worker is given ahead, and how much of its replies is held back.

Replies are released in *blocks*; ``proof.py`` decides when a block is proven. This file
decides its size and the pauses. Each block costs a pause, so blocks grow with the age
of a process. Messages that are held back must be processed again if the process is
lost, so no block is longer than a share of the life of the processes before it. A block
is bounded in messages, in bytes (messages, and replies that wait) and in time.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

__all__ = ("LONGEST_QUIET", "BlockSizing", "Terms", "Window")

_YOUNG: Final = 4  # blocks of a process that end with a full quiet time
_GROWTH: Final = 4
_MOST: Final = 65536  # messages
_OF_LIFE: Final = 8  # blocks in the expected life of a process
_BYTES: Final = 8 * 1024 * 1024  # messages, and replies that wait
_SECONDS: Final = 0.25
_QUIET: Final = 0.005  # seconds: a shorter pause may be the scheduler's
LONGEST_QUIET: Final = 1.0
_PACE: Final = 1.5  # quiet time, as a multiple of the longest time of an exchange
_SHARE: Final = 0.05  # of the time of a block: the most that a quiet time adds to it
_HORIZON: Final = 0.05  # seconds of work that a worker should have ahead
_WIDEST: Final = 65536  # exchanges


class Terms(NamedTuple):
    """What a session must know about its stage when it is opened."""

    first: int = 1
    """Messages in the first block of a process: the window, if it is fixed."""
    life: float = math.inf
    """Number of messages after which earlier processes were lost."""
    alone: bool = False
    """Each exchange is a block: the effects of a load worker can't be taken back, nor
    the output of an extract worker."""
    loads: bool = False
    """No byte is written in advance: if the input ended after it, a worker might load
    the part of a message that it has."""


class BlockSizing:
    """
    Counts what a process is given and answers, a block at a time.

    Attributes:
        step: Set to True while the stage runs in lock-step: each message is a block.
        bound: Set to the bytes of replies that may wait for their consumer.
        total: Messages that the process was given in its life.
        given: Messages that it was given in this block.

    """

    def __init__(self, terms: Terms) -> None:
        self.step: bool = False
        self.bound: float = math.inf
        self.total: int = 0
        self.given: int = 0
        self._life = terms.life
        self._alone = terms.alone
        self._limit = terms.first
        self._count = 0  # blocks that have ended
        self._bytes = 0  # of the messages of this block, and the replies to them
        self._replies = 0  # bytes of replies that wait
        self._began = 0.0  # when the first message of this block was given
        self._turn = 0.0  # when the oldest unanswered exchange became the oldest
        self._longest = 0.0  # seconds that an exchange took, at most

    @property
    def pace(self) -> float:
        """Seconds after which a worker that had more to write would have written it."""
        return min(max(_QUIET, _PACE * self._longest), LONGEST_QUIET)

    def room(self, now: float) -> int:
        """Return how many messages may still be given before this block ends."""
        limit = 1 if self.step or self._alone else self._limit
        if self.given >= limit:
            return 0
        if self.given and (self._bytes >= _BYTES or now - self._began >= _SECONDS):
            return 0
        return limit - self.given

    def give(self, messages: int, size: int, now: float) -> None:
        """Count messages that are given to the worker, and their bytes."""
        if not self.given:
            self._began = now
        self.given += messages
        self._bytes += size
        self.total += messages

    def turn(self, now: float) -> bool:
        """
        Begin the time of the exchange that is the oldest now.

        Returns whether a worker that was idle until now had enough time to write
        everything.
        """
        rested, self._turn = now - self._turn, now
        return rested >= LONGEST_QUIET and rested >= _PACE * self._longest

    def answered(self, size: int, now: float) -> bool:
        """
        Count the bytes of replies that wait, and the time that they took.

        Returns whether they exceed the bounds on memory.
        """
        took, self._turn = now - self._turn, now
        self._longest = max(self._longest, took)
        self._bytes += size
        self._replies += size
        return self._replies > _BYTES or self._replies > self.bound

    def quiet(self, now: float, *, several: bool) -> float:
        """
        Return for how many seconds the worker must be quiet if it is given nothing.

        ``several``: more than one exchange is held back. 0: release the block at once.
        """
        if self._count < _YOUNG:
            return self.pace
        if self.step:
            return max(_QUIET / 5, math.ldexp(self.pace, _YOUNG - self._count))
        if several:
            return min(self.pace, _SHARE * (now - self._began))
        return 0.0

    def end(self) -> None:
        """Begin the next block: messages given from now on belong to it."""
        self._count += 1
        share = max(1.0, max(self._life, self.total) / _OF_LIFE)
        self._limit = int(min(_MOST, self._limit * _GROWTH, share))
        self.given = self._bytes = 0

    def release(self) -> None:
        """Count no reply as waiting any more."""
        self._replies = 0


class Window:
    """
    Bounds the exchanges sent ahead of their replies.

    A slow worker then holds few messages, so that other workers can take the rest; a
    fast one holds so many that its pipe never runs dry.

    Args:
        fixed: The bound, or None to follow the worker's speed: four times as many
            when it answered a whole window in less than half of 50 ms, half as many
            when that took longer.

    """

    def __init__(self, fixed: int | None) -> None:
        self.size: int = fixed or 1
        self.fixed: bool = fixed is not None
        self._answered = 0
        self._since = 0.0

    def started(self, now: float) -> None:
        """Begin to measure: the worker, so far idle, is given something."""
        self._answered = 0
        self._since = now

    def answered(self, count: int, now: float) -> None:
        """Count answers, and adjust."""
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
