"""
One caller's messages on their way to the workers, and their outcomes on the way back.

A submission moves runs and counters; it has no clock and does no I/O. Its caller waits
for a callback. A separate object determines the order in which outcomes are collected.

A position is a barrier: outcomes of messages after it are not collected before the
position itself, even if outcomes come in any order, and no batch has messages from both
sides of it. Outcomes that are held back after an open barrier count as unread, so they
are bounded like all others.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from etlstage.errors import EtlstageError
from etlstage.messages import Position, Run, concatenated, size_of
from etlstage.supervisor.exchange.exchange import Exchange, Outcome

__all__ = ("AnyOrder", "Collected", "InputOrder", "ResultOrder", "Submission")

Collected: TypeAlias = Outcome | Position


class InputOrder:
    """Outcomes are collected in the order of the messages."""

    def __init__(self) -> None:
        self._outcomes: dict[int, Outcome] = {}
        self._next = 0  # place of the first message that was not collected

    def add(self, outcome: Outcome, limit: float) -> bool:
        """Add an outcome; return whether it may be collected now."""
        self._outcomes[outcome.start] = outcome
        return outcome.start == self._next

    def collectable(self, limit: float) -> bool:
        """Return whether there are outcomes due before the position at ``limit``."""
        return self._next in self._outcomes and self._next < limit

    def collect(self, limit: float) -> list[Outcome]:
        """Return, once, the outcomes due before the position at ``limit``."""
        collected: list[Outcome] = []
        while self._next < limit:
            outcome = self._outcomes.pop(self._next, None)
            if outcome is None:
                break
            collected.append(outcome)
            self._next += len(outcome.messages)
        return collected

    def awaits(self, place: int, limit: float) -> bool:
        """Return whether the caller can't continue without the message at ``place``."""
        return place == self._next

    def release(self, limit: float) -> None:
        """Let outcomes before the next position, at ``limit``, be collected."""


class AnyOrder:
    """Outcomes are collected as they come, but never across a position."""

    def __init__(self) -> None:
        self._outcomes: dict[int, Outcome] = {}
        self._behind: dict[int, Outcome] = {}  # after the first open position

    def add(self, outcome: Outcome, limit: float) -> bool:
        """Add an outcome; return whether it may be collected now."""
        due = outcome.start < limit
        (self._outcomes if due else self._behind)[outcome.start] = outcome
        return due

    def collectable(self, limit: float) -> bool:
        """Return whether there are outcomes due before the position at ``limit``."""
        return bool(self._outcomes)

    def collect(self, limit: float) -> list[Outcome]:
        """Return, once, the outcomes due before the position at ``limit``."""
        collected, self._outcomes = list(self._outcomes.values()), {}
        return collected

    def awaits(self, place: int, limit: float) -> bool:
        """Return whether the caller can't continue without the message at ``place``."""
        return place < limit < math.inf

    def release(self, limit: float) -> None:
        """Let outcomes before the next position, at ``limit``, be collected."""
        for start in [start for start in self._behind if start < limit]:
            self._outcomes[start] = self._behind.pop(start)


ResultOrder: TypeAlias = InputOrder | AnyOrder


class Submission:
    """
    One caller's messages: fed in order, taken by any worker, ended in some order.

    Args:
        on_outcome: Called when :meth:`collect` has something new.
        max_unread: Bytes of uncollected replies; beyond that, workers are given no
            further message except the one whose outcome is collected next.
        max_reply: Bytes that may come beyond ``max_unread`` for messages that were
            given already; with still more, nothing is read until some are collected.
        order: The order in which outcomes are collected; by default that of the
            messages.
        keyed: Whether one worker is to take all of it: a lane of one key or several.

    """

    def __init__(
        self,
        on_outcome: Callable[[], None],
        *,
        max_unread: float = math.inf,
        max_reply: float = math.inf,
        order: ResultOrder | None = None,
        keyed: bool = False,
    ) -> None:
        self.keyed = keyed
        self._on_outcome = on_outcome
        self.max_unread = max_unread
        self._flood = max_unread + max_reply
        self._unread = 0
        self._order: ResultOrder = order or InputOrder()
        self._waiting: deque[Exchange] = deque()
        # Positions, each with the number of messages before it; and these numbers.
        self._marks: deque[tuple[int, Position]] = deque()
        self._cuts: set[int] = set()
        self._limit: float = math.inf  # place of the first open position
        self._collected = 0
        self._total = 0
        self._dead: EtlstageError | None = None
        self.on_failure: Callable[[Outcome], None] | None = None
        """Called at once with each outcome that has an error; it is collected later."""
        self.abandoned: bool = False
        """Its caller is gone."""
        self.closed: bool = False
        """No more will be fed."""
        self.withheld: bool = False
        """No worker is given any more of it; workers finish what they have."""
        self.feeder_waits: bool = False
        """The feeder waits until messages are taken; unset when they are."""
        self.waiting: int = 0
        """Messages that no worker has taken."""
        self.waiting_bytes: int = 0
        self.in_flight: int = 0
        """Messages that were taken and have not ended."""
        self.held: int = 0
        """Messages that were fed and not collected."""
        self.held_bytes: int = 0
        """Bytes of these messages and of the replies to them."""

    @property
    def finished(self) -> bool:
        """Whether everything was fed, has ended and was collected."""
        if self.withheld:
            return self.spent and not self.at_position
        return self.closed and not self.held and not self._marks

    @property
    def spent(self) -> bool:
        """Whether nothing more can be collected before the next position."""
        # An outcome after a dropped message is never collected.
        ended = self.closed and not self.in_flight
        return ended and not self._order.collectable(self._limit)

    @property
    def stalled(self) -> bool:
        """Whether the consumer must take replies first."""
        return self._unread > self.max_unread

    @property
    def takeable(self) -> bool:
        """Whether a worker may take messages, where there are any."""
        # The consumer may be waiting for a message that a lost worker held.
        if self._unread <= self.max_unread:
            return True
        return self._order.awaits(self._waiting[0].next, self._limit)

    @property
    def over_limit(self) -> bool:
        """Whether nothing more is to be read for it until some is collected."""
        # Replies to messages sent ahead are still read, or other callers would have to
        # wait; but only up to a bound. Reading never stops while the consumer has
        # nothing to collect, or it could not continue either.
        if self._unread <= self._flood or self.abandoned:
            return False
        return self._order.collectable(self._limit)

    @property
    def at_position(self) -> bool:
        """Whether a position is due next, which :meth:`pass_mark` has to remove."""
        return bool(self._marks) and self._collected == self._marks[0][0]

    @property
    def bounded(self) -> bool:
        """Whether nothing that is still to be fed can join what waits first."""
        return self.closed or bool(
            self._marks and self._waiting and self._marks[-1][0] > self._waiting[0].next
        )

    @property
    def oldest(self) -> float:
        """When the longest waiting message was fed, in seconds."""
        return self._waiting[0].since

    def feed(self, messages: Run, now: float) -> None:
        """Append messages."""
        if not len(messages) or self.withheld:
            return
        exchange = Exchange(self, self._total, messages, size_of(messages), since=now)
        self._total += len(messages)
        self.held += len(messages)
        self.held_bytes += exchange.size
        if self._dead is not None:
            self.in_flight += len(messages)
            exchange.fail(self._dead)
            return
        self._waiting.append(exchange)
        self.waiting += len(messages)
        self.waiting_bytes += exchange.size

    def mark(self, position: Position) -> None:
        """Have ``position`` collected after all messages fed so far."""
        if self.withheld:
            return  # it comes after dropped messages
        self._marks.append((self._total, position))
        self._cuts.add(self._total)
        self._limit = self._marks[0][0]
        self._on_outcome()

    def pass_mark(self) -> Position:
        """Remove and return the position that is next; see :attr:`at_position`."""
        place, position = self._marks.popleft()
        if not self._marks or self._marks[0][0] > place:
            self._cuts.discard(place)
        self._limit = self._marks[0][0] if self._marks else math.inf
        self._order.release(self._limit)
        return position

    def close(self) -> None:
        """Promise that no more will be fed."""
        self.closed = True
        if self.finished:  # else more is to come, which wakes the caller
            self._on_outcome()

    def wake(self) -> None:
        """Call the caller back."""
        self._on_outcome()

    def take(self, count: int, size: int) -> Exchange:
        """Remove and return up to ``count`` messages and ``size`` bytes, or one."""
        first = self._waiting[0]
        if len(first.messages) == 1:  # however long: it keeps its history
            taken, number = first, 1
        else:
            taken = first.take(count, size)
            number = len(taken.messages)
        if taken is first or first.at == len(first.messages):
            self._waiting.popleft()
        self.waiting -= number
        self.waiting_bytes -= taken.size
        self.in_flight += number
        return taken

    def take_batch(self, count: int, size: int) -> Exchange:
        """Remove and return as many messages as fit; one always does."""
        batch = self.take(count, size)
        while self._waiting and batch.left < count and self.can_follow(batch, size):
            self.extend(batch, self.take(count - batch.left, size - batch.size))
        return batch

    def can_follow(self, batch: Exchange, size: int) -> bool:
        """Return whether the next message can join a batch of up to ``size`` bytes."""
        end, first = batch.start + len(batch.messages), self._waiting[0]
        adjacent = first.next == end and end not in self._cuts
        return adjacent and batch.size + len(first.messages[first.at]) <= size

    def extend(self, batch: Exchange, more: Exchange) -> None:
        """Append the messages that follow a batch to it."""
        batch.messages = concatenated(batch.messages, more.messages)
        batch.size += more.size

    def give_back(self, exchange: Exchange) -> None:
        """Put back messages that were taken: they wait again, at their places."""
        if not exchange.left or self.abandoned:
            return
        if self._dead is not None:
            exchange.fail(self._dead)
            return
        if self.withheld:
            self.in_flight -= exchange.left
            self._drop(exchange)
            self._on_outcome()
            return
        at = 0
        while at < len(self._waiting) and self._waiting[at].next < exchange.next:
            at += 1
        exchange.since = -math.inf
        self._waiting.insert(at, exchange)
        self.waiting += exchange.left
        self.waiting_bytes += exchange.size
        self.in_flight -= exchange.left

    def deliver(self, outcome: Outcome) -> None:
        """Take the outcome of an exchange; exchanges may end in any order."""
        size = outcome.reply_size
        self.in_flight -= len(outcome.messages)
        self.held_bytes += size
        self._unread += size
        if outcome.error is not None and self.on_failure is not None:
            self.on_failure(outcome)
        if self._order.add(outcome, self._limit) or self.withheld:
            self._on_outcome()

    def collect(self) -> list[Collected]:
        """
        Return, once, what is due: outcomes, and positions after what precedes them.

        Positions are always in order; outcomes are if the caller wants that.
        """
        collected: list[Collected] = []
        while True:
            collected += self.collect_up_to_mark()
            if not self.at_position:
                return collected
            collected.append(self.pass_mark())

    def collect_up_to_mark(self) -> list[Outcome]:
        """Return, once, the outcomes that are due before the next position."""
        collected = self._order.collect(self._limit)
        for outcome in collected:
            self._collected += len(outcome.messages)
            self.held -= len(outcome.messages)
            self.held_bytes -= outcome.size + outcome.reply_size
            self._unread -= outcome.reply_size
        return collected

    def abandon(self) -> None:
        """Drop all that waits: an open batch is not filled with it any more."""
        self._waiting.clear()
        self.waiting = self.waiting_bytes = 0
        self.closed = self.abandoned = True

    def withhold(self) -> None:
        """Drop what no worker has taken, and all that is fed from now on."""
        self.withheld = True
        for exchange in self._waiting:
            self._drop(exchange)
        self._waiting.clear()
        self.waiting = self.waiting_bytes = 0
        self._on_outcome()

    def _drop(self, exchange: Exchange) -> None:
        self.held -= exchange.left
        self.held_bytes -= exchange.size

    def fail(self, error: EtlstageError) -> None:
        """End all that waits, and all that is still fed, with ``error``."""
        self._dead = error
        waiting, self._waiting = self._waiting, deque()
        self.waiting = self.waiting_bytes = 0
        for exchange in waiting:
            self.in_flight += exchange.left
            exchange.fail(error)
