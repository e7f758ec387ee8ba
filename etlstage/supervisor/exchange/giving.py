"""
What one worker is given next, and when.

The order is: messages around one that could not be sent; a suspect, if the worker is
idle and fresh; refused messages that are tried again; messages that callers have
submitted, in turn. There is no table here and no session: ``dispatch.py`` opens what
:meth:`Giving.next` returns, and reports how much is open.

A batch is given when it is ripe. A worker that asks for each message is given one
message after the other, until the batch is full or no message has come for too long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from etlstage.errors import InvalidMessage
from etlstage.protocol.base import Shape
from etlstage.stage.policy import BatchPolicy, Order
from etlstage.stage.stage import Stage
from etlstage.supervisor.exchange.backlog import Backlog
from etlstage.supervisor.exchange.exchange import Exchange
from etlstage.supervisor.exchange.submission import Submission

__all__ = ("SLICE", "Giving", "ripe_at", "take_ripe")

# The work per slice costs as much as a thousand short messages do. But the allocator
# returns a buffer of more than half a megabyte to the kernel at once, and getting fresh
# pages costs more than filling them. A batch of Spark, 10,000 rows of about a hundred
# bytes, is two slices.
SLICE: Final = 640 * 1024  # bytes taken at once
_MOST: Final = 65536  # exchanges opened at once


class Giving:
    """
    Decides what one worker is given.

    Attributes:
        due: When :meth:`next` may return something although nothing new was submitted,
            in seconds, or None.
        retiring: Set it to begin nothing new.
        filled: The last exchange took all the room: nothing more can be given.
        full: The batch for which the worker asks is to end.
        cut: Set it to end that batch although the worker may have more.
        alone: The worker is busy with a suspect, or a refused batch that is retried.
        again: Exchanges that were taken and not sent yet.
        retried: Exchanges that were refused or cancelled, and are to be sent once more.

    """

    def __init__(
        self, stage: Stage, backlog: Backlog, number: int, *, in_order: bool
    ) -> None:
        shape = stage.dialect.shape
        self.due: float | None = None
        self.retiring: bool = False
        self.filled: bool = False
        self.full: bool = False
        self.cut: bool = False
        self.alone: bool = False
        self.again: deque[Exchange] = deque()
        self.retried: deque[Exchange] = deque()
        self._policy = stage.batch
        self._backlog = backlog
        self._number = number
        self._batches = shape.batches
        self._asks = shape is Shape.ASKED_BATCH
        self._in_order = in_order
        self._commits = shape is Shape.COMMITTED
        # If exchanges may end in any order, only one of each lane may be open.
        self._one_a_lane = stage.order is Order.KEY and not in_order
        self._fresh = True  # it was given nothing but suspects
        self._closes_at = 0.0  # when the batch that is filled ends, at the latest
        self._rest: Exchange | None = None  # what to give next of a batch tried alone

    @property
    def idle(self) -> bool:
        """Whether there is nothing to give or to end, however much room there is."""
        if self._batches or not self._in_order:
            return False  # open exchanges may end by time alone
        if self.again or self.retried or self._backlog.suspects:
            return False
        for submission in self._backlog.submissions:  # noqa: SIM110 - quicker
            if submission.waiting:
                return False
        return True

    def next(self, now: float, owed: int, opened: int, room: float) -> Exchange | None:
        """
        Return what to open, or None if there is nothing to do now.

        ``opened`` exchanges are open, of which the worker has not answered ``owed``; it
        may be given ``room`` more.
        """
        self.due, self.filled = None, False
        if not owed:
            # Reset by the answer, not the end: the next messages may be its proof.
            self.alone = False
            if self._rest is not None:
                self._spare_rest()
        if room < 1:
            return None
        count = int(min(room, _MOST))
        if self._commits and self._backlog.in_step:
            count = 1
        if self.again:
            return self._first(self.again, count)
        backlog = self._backlog
        may_try = not (self.retiring or self.alone)
        may_try = may_try and (self._fresh or backlog.orphaned)
        if backlog.suspects and may_try and backlog.has_suspect(self._number):
            if opened:
                return None  # wait until it is idle: no other worker may come for it
            self.alone = True
            return self._begun(backlog.take_suspect(self._number))
        if self.alone:
            return None
        while self.retried:
            exchange = self.retried.popleft()
            if not exchange.submission.abandoned:
                self.alone = self._asks
                return self._begun(exchange)
        return None if self.retiring else self._take(count, now)

    def more(self, batch: Exchange, now: float) -> Exchange | None:
        """
        Return the next message of a batch for which the worker asks.

        None: the batch is :attr:`full`, or else the worker has to wait, until
        :attr:`due`.
        """
        self.due, self.filled, self.full = None, False, True
        waiting = batch.submission
        if self.cut or len(batch.messages) >= self._policy.size:
            return None
        if self.alone:
            if self._rest is None:
                return None
            more, rest = self._rest.split(1)
            self._rest = rest if rest.left else None
            return more
        if waiting.waiting and not self.retiring:
            follows = waiting.can_follow(batch, self._policy.bytes)
            return waiting.take(1, SLICE) if follows else None
        self.full = waiting.closed or self.retiring or now >= self._closes_at
        self.due = None if self.full else self._closes_at
        return None

    def put_back(self, unsent: Exchange, error: InvalidMessage) -> Exchange:
        """
        Take back an exchange that was to be opened; return its unsendable message.

        ``unsent`` is what was returned last; ``error`` has the index of the message.
        """
        self.filled = False  # there is room for others
        before, rest = unsent.split(error.index)
        culprit, behind = rest.split(1)
        if self._asks:
            self.alone = False
            self._spare_rest()
        parts = [part for part in (before, behind) if part.left]
        if self._batches and behind.left:
            # They are a separate batch, for which there may be no room now.
            behind.submission.give_back(parts.pop())
        self.again.extend(parts)
        self.alone = self.alone and bool(parts)
        return culprit

    def lost(self, owed: list[Exchange]) -> None:
        """Join the rest of a batch to the part that a lost worker had not answered."""
        self.alone = False
        rest, self._rest = self._rest, None
        if rest is None:
            return
        if owed:
            rest.submission.extend(owed[-1], rest)
        else:
            rest.submission.give_back(rest)

    def unsent(self) -> list[Exchange]:
        """Remove and return what was taken and is not with the worker."""
        unsent = [*self.again, *self.retried]
        self.again.clear()
        self.retried.clear()
        return unsent

    def _take(self, count: int, now: float) -> Exchange | None:
        """Take what callers have submitted: a batch, or many single messages."""
        callers = self._backlog.in_turn(self._number)
        if self._one_a_lane:
            callers = [caller for caller in callers if not caller.in_flight]
        if self._asks:
            self._closes_at = now + self._policy.seconds
            self.cut = False
            taken = callers[0].take(1, SLICE) if callers else None
        elif self._batches:
            taken, self.due = take_ripe(callers, self._policy, now)
        elif not callers:
            return None
        else:
            share = count
            if not self._in_order:
                alone = self._one_a_lane or callers[0].stalled
                share = 1 if alone else -(-count // len(callers))
            taken = callers[0].take(share, SLICE)
            self.filled = len(taken.messages) == count
        if taken is not None:
            self._fresh = False
        return taken

    def _begun(self, exchange: Exchange | None) -> Exchange | None:
        """Return the exchange, or its first message if the worker asks for each."""
        if exchange is None or not self._asks:
            return exchange
        self.cut = False
        if len(exchange.messages) == 1:
            return exchange
        first, self._rest = exchange.split(1)
        return first

    def _first(self, waiting: deque[Exchange], count: int) -> Exchange:
        """Remove and return what waits first, up to ``count`` messages."""
        first = waiting[0]
        taken = first if self._batches else first.take(count, SLICE)
        if taken is first or not first.left:
            waiting.popleft()
        return taken

    def _spare_rest(self) -> None:
        """Give back messages that the worker did not ask for before it answered."""
        rest, self._rest = self._rest, None
        if rest is not None:
            rest.submission.give_back(rest)


def take_ripe(
    submissions: Sequence[Submission], policy: BatchPolicy, now: float
) -> tuple[Exchange | None, float | None]:
    """Return a ripe batch, or else the time at which the next one is ripe, if ever."""
    due: float | None = None
    for submission in submissions:
        ripe = ripe_at(submission, policy)
        if ripe <= now:
            return submission.take_batch(policy.size, policy.bytes), None
        due = ripe if due is None else min(ripe, due)
    return None, due


def ripe_at(submission: Submission, policy: BatchPolicy) -> float:
    """Return the time from which the waiting messages make a batch, in seconds."""
    if (
        submission.bounded
        or submission.waiting >= policy.size
        or submission.waiting_bytes >= policy.bytes
    ):
        return 0.0
    return submission.oldest + policy.seconds
