"""
Whether replies belong to the exchanges that they are counted for.

Where the k-th reply answers the k-th exchange, a worker that writes one too many or
too few shifts all that follow, and nothing in the bytes tells. So what comes is held
back in *blocks*, and a block is released when it has been shown to add up: the worker
owes nothing, has read all that it was given, and waits for more, or has been quiet for
as long as it is used to take. A block that does not add up is taken back as a whole:
nobody knows which of its replies belongs where, so nobody is blamed, and its messages
are tried in lock-step.

What this costs is a pause per block, so blocks grow with the age of the process, and
are bounded in messages, bytes and time. Where processes are lost, what each of them
holds back has to be done again: no block is longer then than a share of their life. A
block of one message that ends because there is no more input is released at once,
unless the process is young or the stage goes in lock-step: a caller waits for it.
Should a fault show later, then that message is *doubtful*.

How a worker shows that it waits is a matter of ``supervisor/verifier.py``; here is
what is held back, how much may be, and how long to wait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from etlstage.supervisor.exchange.exchange import Exchange, Outcome

__all__ = ("Answered", "Block")

_YOUNG: Final = 4  # blocks of a process behind which a quiet time is waited for
_GROWTH: Final = 4
_MOST: Final = 65536  # messages
_OF_LIFE: Final = 8  # blocks, in the messages behind which a process is lost
_BYTES: Final = 8 * 1024 * 1024  # messages, and replies that wait
_SECONDS: Final = 0.25
_QUIET: Final = 0.005  # seconds: a shorter pause may be the scheduler's
_LONGEST_QUIET: Final = 1.0
_PACE: Final = 1.5  # quiet times, in the longest that an exchange took
_SHARE: Final = 0.05  # of the time of a block, that a quiet time may add

_Held: TypeAlias = tuple[Exchange, Outcome]
"""The outcome of (a part of) an exchange."""


class Answered(NamedTuple):
    """What some exchanges that ended were about."""

    exchanges: int = 0
    messages: int = 0
    size: int = 0
    """Bytes of the messages."""
    reply_size: int = 0
    """Bytes of the replies."""

    def without(self, again: Sequence[Exchange]) -> Answered:
        """Return the same without what is to be tried again."""
        return self._replace(
            messages=self.messages - sum(exchange.left for exchange in again),
            size=self.size - sum(exchange.size for exchange in again),
        )


class Block:
    """
    Holds back the outcomes of one process until they are known to be right.

    Args:
        bounded: Whether it ends; else it is released as things come, and never proven.
        alone: Whether each exchange is a block: what a load worker has done can't be
            taken back, nor what an extract worker has written.
        first: Messages in the first block of a process.
        life: Messages behind which processes before this one were lost.

    """

    def __init__(
        self,
        *,
        bounded: bool = True,
        alone: bool = False,
        first: int = 1,
        life: float = math.inf,
    ) -> None:
        self._bounded = bounded
        self._life = life
        self._alone = alone
        self._limit = first
        self._count = 0  # blocks that were released
        self._held: list[_Held] = []
        self._given = 0  # messages
        self._bytes = 0
        self._began = 0.0  # when its first message was given
        self._closed = False
        self._exchanges = self._size = self._reply_size = 0  # of what is held back
        self._reply_bound: float = _BYTES
        self._turn = 0.0  # when the oldest exchange that is owed became it
        self._longest = 0.0  # seconds that an exchange took, at most
        self.took: float = 0.0
        """What the last answer took, in seconds, from the moment that its turn came."""
        self.messages: int = 0
        """How many messages are held back."""
        self.overfull: bool = False
        """More replies are held back than memory is meant for."""
        self.total: int = 0
        """Messages that the process was given in its life."""
        self.doubted: bool = False
        """It does not add up."""
        self.hushed: bool = False
        """That a quiet time has passed is all that speaks for it."""
        self._last = 0  # messages of the last block, if it was hushed
        self.unproven: int = 0
        """Messages that were released, and a fault could still show."""

    @property
    def holds(self) -> bool:
        """Whether anything is held back."""
        return bool(self._held)

    @property
    def several(self) -> bool:
        """Whether more than one exchange is held back."""
        return self._exchanges > 1

    @property
    def questionable(self) -> int:
        """
        Messages that were released and may be wrong, should a fault show now.

        What follows a quiet time tells that it was too short. Not so a fault in the
        next block: the one that was hushed came before it.
        """
        return self.unproven + (0 if self._held else self._last)

    @property
    def begun(self) -> bool:
        """Whether anything was given in this block, answered or not."""
        return self._given > 0

    def room(self, now: float, *, step: bool) -> int:
        """
        Return how many messages may still be given, before this block ends.

        Args:
            now: The time, in seconds.
            step: Whether the stage goes in lock-step.

        """
        if not self._bounded:
            return _MOST
        limit = 1 if step or self._alone else self._limit
        if self._closed or self._given >= limit:
            return 0
        if self._given and (self._bytes >= _BYTES or now - self._began >= _SECONDS):
            return 0
        return limit - self._given

    def close(self) -> None:
        """Let nothing more into this block."""
        self._closed = True

    def give(self, messages: int, size: int, now: float) -> None:
        """Take note of messages that are given to the worker, and their bytes."""
        if not self._given:
            self._began = now
        self._given += messages
        self._bytes += size
        self.total += messages

    def withdraw(self, messages: int, size: int) -> None:
        """Undo :meth:`give`: they can't be sent."""
        self._given -= messages
        self._bytes -= size
        self.total -= messages

    def turn(self, now: float) -> None:
        """Take note that the worker, which owed nothing, is given something."""
        if now - self._turn >= _LONGEST_QUIET:
            # It had the time to write what nobody asked for, and did not.
            self.unproven = self._last = 0
        self._turn = now

    def answered(self, exchanges: int, now: float) -> None:
        """Take note of answers, and of the time that they took."""
        self.took = now - self._turn
        self._longest = max(self._longest, self.took)
        self._turn = now
        self._exchanges += exchanges

    def hold(self, exchange: Exchange, outcome: Outcome) -> None:
        """Hold back the outcome of (a part of) an exchange."""
        _, messages, _, size, reply_size, *_ = outcome
        self._held.append((exchange, outcome))
        self._bytes += reply_size
        bound = exchange.submission.max_unread
        if bound < self._reply_bound:
            self._reply_bound = bound
        self.messages += len(messages)
        self._size += size
        self._reply_size += reply_size
        self.overfull = self._reply_size > self._reply_bound

    def quiet(self, now: float, *, step: bool) -> float:
        """
        Return how long the worker must be quiet if there is nothing to give it.

        Args:
            now: The time, in seconds.
            step: Whether the stage goes in lock-step.

        Returns:
            Seconds; 0 to release the block at once.

        """
        if self._count < _YOUNG:
            return self.pace
        if step:
            return max(_QUIET / 5, math.ldexp(self.pace, _YOUNG - self._count))
        if self._exchanges > 1:
            return min(self.pace, _SHARE * (now - self._began))
        return 0.0

    def end(self) -> None:
        """Begin the next block: what is given from now on is of that one."""
        self._count += 1
        share = max(1.0, max(self._life, self.total) / _OF_LIFE)
        self._limit = int(min(_MOST, self._limit * _GROWTH, share))
        self._given = self._bytes = 0
        self._closed = False

    def release(self, *, proven: bool) -> tuple[list[_Held], Answered]:
        """
        Remove what is held back, to be delivered.

        Args:
            proven: Whether it is known to be right.

        Returns:
            The exchanges, as they are now, each with the outcome of its next part;
            and what they are about.

        """
        total = Answered(self._exchanges, self.messages, self._size, self._reply_size)
        self.unproven = 0 if proven else self.unproven + total.messages
        self._last = total.messages if self.hushed else 0
        self.hushed = False
        return self._empty(), total

    def take_back(self) -> list[Exchange]:
        """Remove what is held back, as the exchanges that it was, in their order."""
        return [exchange.of(outcome) for exchange, outcome in self._empty()]

    @property
    def pace(self) -> float:
        """Seconds behind which a worker that had more to say would have said it."""
        return min(max(_QUIET, _PACE * self._longest), _LONGEST_QUIET)

    def _empty(self) -> list[_Held]:
        held, self._held = self._held, []
        self._reply_bound = _BYTES
        self.overfull = False
        self.messages = self._exchanges = self._size = self._reply_size = 0
        return held
