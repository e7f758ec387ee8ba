"""
What one worker is given, and what becomes of it.

The connection asks :meth:`Dispatcher.next` what to send and tells what has ended; what
is sent is in the words of the dialect's events. There is no I/O, and no session.

The k-th reply answers the k-th exchange: here a message, in ``batch.py`` a batch. A
dialect that ends its exchanges in any order names them; then ``named.py`` decides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from etlstage.errors import Attempt, EtlstageError, InvalidMessage
from etlstage.messages import Groups, Run, StageKind
from etlstage.protocol.events import Event, MessagesPassed
from etlstage.stage.stage import Stage
from etlstage.supervisor.exchange.backlog import Backlog
from etlstage.supervisor.exchange.exchange import Exchange, Outcome, Refused
from etlstage.supervisor.exchange.pairing import Answered, Block
from etlstage.supervisor.exchange.retry import (
    LastError,
    Loss,
    carry_out,
    judge,
    judge_rounds,
    refused,
)
from etlstage.supervisor.exchange.window import Window

__all__ = ("SLICE", "Dispatcher")

# What is done once for a slice costs as much as a thousand short messages do; but a
# buffer of more than half a megabyte the allocator gives back to the kernel at once,
# and to be given fresh pages is dearer than to fill them. A batch of Spark's, 10,000
# rows of about a hundred bytes, is two slices.
SLICE: Final = 640 * 1024  # bytes taken at once
_IN_FLIGHT: Final = 2 * 1024 * 1024  # bytes that a window may hold


class Dispatcher:
    """
    Gives single messages, as many ahead as the window allows.

    Args:
        stage: Of the worker.
        backlog: Where to take messages from.
        number: The worker's.

    Attributes:
        block: What the worker has answered, held back until that is known to be right.
        due: When :meth:`next` may have something although nothing new was submitted,
            in seconds, or None.
        retiring: Set it to begin nothing new.
        sated: As much was given last as there was room for: nothing more can be.

    """

    _batches = False
    _concurrent = False
    _streams = False

    def __init__(self, stage: Stage, backlog: Backlog, number: int = 0) -> None:
        self.block: Block = Block(
            bounded=stage.dialect.counts,
            alone=stage.kind is not StageKind.TRANSFORM,
            first=stage.window or 1,
            life=backlog.life,
        )
        self.due: float | None = None
        self.retiring = False
        self.sated: bool = False
        self._stage = stage
        self._backlog = backlog
        self._number = number
        fixed = stage.window
        if fixed is None and stage.kind is not StageKind.TRANSFORM:
            fixed = 1
        self._window = Window(fixed)
        self._held: deque[Exchange] = deque()
        self._held_bytes = 0
        self._again: deque[Exchange] = deque()  # taken, and not sent yet
        self._retried: deque[Exchange] = deque()  # refused, and to be sent once more
        self._refused: Refused | None = None  # of what is being paired
        self._fresh = True  # it was given nothing but suspects
        self._answered_any = False
        self._alone = False  # what is held is a suspect
        self._now = 0.0

    @property
    def held(self) -> int:
        """Messages that the worker has, and whose outcome is not known for sure."""
        return self.block.messages + sum(exchange.left for exchange in self._held)

    @property
    def busy(self) -> bool:
        """Whether the worker has an exchange that has not ended."""
        return bool(self._held)

    @property
    def stalled(self) -> bool:
        """Whether no more outputs are to be read before some are consumed."""
        return bool(self._held) and self._held[0].submission.flooded

    @property
    def forgotten(self) -> bool:
        """Whether the worker is busy for somebody who is gone, and can't be told."""
        if not self._held:
            return False
        oldest = self._held[0].submission
        return oldest.streams and oldest.forgotten

    @property
    def idle(self) -> bool:
        """Whether there is nothing to give or to end, however much room there is."""
        if self._batches or self._concurrent:
            return False  # time alone ends what is open
        return self._backlog.empty and not (self._again or self._retried)

    def awaited(self, _room: float) -> bool:
        """Return whether the worker, which has an exchange, waits for us all the same."""
        return False

    @property
    def step(self) -> bool:
        """Whether the worker is given one exchange at a time, and each is proven."""
        return self._backlog.in_step

    def next(self, now: float, owed: int, room: float) -> Sequence[Event] | None:
        """
        Return what to send, or None if there is nothing to do now.

        Args:
            now: The time, in seconds.
            owed: Exchanges that the worker has not ended.
            room: How many more it may be given.

        """
        self._now, self.sated, step = now, False, self._backlog.in_step
        room = min(room, self.block.room(now, step=step))
        if room <= 0:
            return None
        if self._again:
            return self._begin(self._again.popleft())
        if self._backlog.suspects:
            if (suspect := self._next_suspect(owed)) is not None:
                return self._begin(suspect)
            if self._awaits_suspect(owed):
                return None
        room = min(room, (1 if step else self._window.size) - owed)
        if room <= 0 or (self._held and self._held_bytes >= _IN_FLIGHT):
            return None
        if self._alone or (self.retiring and not self._retried):
            return None
        if not (owed or self._window.fixed):
            self._window.started(now)
        if self._retried:
            return self._begin(self._retried.popleft())
        return self._give(int(room), now)

    def refused(self, error: InvalidMessage) -> None:
        """Take note that what was to be sent last can't be: not one message was."""
        self.sated = False  # for others there is room
        exchange = self._take_back()
        before, rest = exchange.split(error.index)
        culprit, behind = rest.split(1)
        self._refuse(culprit, error)
        self._again.extend(part for part in (before, behind) if part.left)
        self._alone = self._alone and bool(self._again)

    def passed(self, outputs: Run) -> None:
        """Pass on outputs of the oldest exchange, which has not ended."""
        self._held[0].submission.pass_on(outputs)

    def finish(self, now: float) -> None:
        """End the exchange of a worker that has written all."""
        if self._held:
            self.answered([()], 0, now)

    def answered(
        self,
        groups: Groups,
        reply_size: int,
        now: float,
        refused: Refused | None = None,
    ) -> None:
        """
        Take replies to the oldest exchanges, to be held back until the release.

        Args:
            groups: The replies.
            reply_size: Bytes of memory that they take.
            now: The time, in seconds.
            refused: To which of these exchanges the worker said no.

        """
        self._refused, at, count = refused, 0, len(groups)
        if not self._window.fixed:
            self._window.answered(count, now)
        self.block.answered(count, now)
        while at < count:
            outcome = self._pair(groups, at, reply_size)
            reply_size = 0
            at += 1 if self._batches else len(outcome.messages)

    def release(self, *, proven: bool = True) -> Answered:
        """
        Deliver what is held back.

        Args:
            proven: Whether it is known to be right.

        """
        held, total = self.block.release(proven=proven)
        for exchange, outcome in held:
            if outcome.error is None and not outcome.refused.places:
                exchange.submission.deliver(outcome)
            else:
                total = total.without(self._take_no(exchange, outcome))
        if held:
            self._answered_any = True
            self._backlog.step_on(total.messages)
        return total

    def abandon(self, error: EtlstageError) -> int:
        """End all that the worker holds with ``error``; return how much it was."""
        count = self.held
        for exchange in (*self.block.take_back(), *self._let_go(), *self._unsent()):
            exchange.fail(error)
        return count

    @property
    def doubtful(self) -> int:
        """Messages whose outcomes were delivered, or their effects had, too early."""
        block = self.block
        if not block.doubted:
            return 0
        loads = self._stage.kind is StageKind.LOAD
        return block.questionable + (block.messages if loads else 0)

    def lose(
        self,
        attempt: Attempt,
        error: LastError,
        *,
        untouched: bool,
    ) -> Loss:
        """
        Let others try what the worker held: it is lost.

        Args:
            attempt: How it was lost.
            error: Makes the error of a message from all attempts at it.
            untouched: Whether the worker had read nothing of what it was given.

        """
        if self._stage.kind is StageKind.EXTRACT:
            rounds = [*self.block.take_back(), *self._let_go()]
            return self._lose_rounds(rounds, attempt, error, untouched=untouched)
        count = self.held
        self._backlog.lost(self.block.total)
        first = not self._answered_any
        answered, held = self.block.take_back(), self._let_go()
        for exchange in self._unsent():
            exchange.submission.give_back(exchange)
        blamed, innocent = held, answered
        if self.block.doubted:
            self._backlog.go_in_step()
            # Which of several is at fault nobody knows; what came behind them is not.
            blamed, innocent = answered, held
        many = len(blamed) if self._batches else sum(e.left for e in blamed)
        if untouched or (many > 1 and self.block.doubted):
            blamed, innocent = [], [*answered, *held]
        found = judge(
            blamed,
            attempt,
            retries=self._stage.on_error.retries,
            batches=self._batches,
            first=first,
            concurrent=self._concurrent,
        )
        # What was tried alone is again.
        found.suspects.extend(e for e in innocent if e.attempts)
        found.innocent.extend(e for e in innocent if not e.attempts)
        if self._backlog.failed:
            # Who should try it? What goes back ends there.
            found.failed.extend(found.suspects)
            found.suspects.clear()
        return carry_out(found, count, error, self._backlog.suspects)

    def _lose_rounds(
        self,
        rounds: Sequence[Exchange],
        attempt: Attempt,
        error: LastError,
        *,
        untouched: bool = False,
    ) -> Loss:
        """Have rounds asked again, as often as a worker is restarted in vain."""
        count = 0 if self._streams else len(rounds)
        tries = self._stage.restart.max
        found, progress = judge_rounds(
            rounds, attempt, retries=tries, untouched=untouched
        )
        loss = carry_out(found, count, error, self._backlog.suspects)
        return loss._replace(progress=progress)

    # --- for the other kinds of exchanges -------------------------------------

    def _begin(self, exchange: Exchange) -> Sequence[Event]:
        """Take note of an exchange that is given; return what to send for it."""
        messages, size = exchange.messages, exchange.size
        self._held.append(exchange)
        self._held_bytes += size
        self.block.give(len(messages), size, self._now)
        return (MessagesPassed(messages),)

    def _give(self, room: int, now: float) -> Sequence[Event] | None:
        for submission in self._backlog.in_turn(self._number):
            self._fresh = False
            exchange = submission.take(room, SLICE)
            self.sated = len(exchange.messages) == room
            return self._begin(exchange)
        return None

    def _pair(self, groups: Groups, at: int, reply_size: int) -> Outcome:
        """Hold back, and return, the outcome of the next replies from ``at`` on."""
        held = self._held[0]
        messages, size, first = held.messages, held.size, held.at
        start, left = held.start + first, len(messages) - first
        count = min(left, len(groups) - at)
        if count == left:
            self._held.popleft()
            self._alone = False
        else:
            size = size * count // left
            held.at += count
            held.size -= size
        if first or count != left:
            messages = messages[first : first + count]
        self._held_bytes -= size
        if len(groups) != count:
            groups = groups[at : at + count]
        outcome = Outcome(start, messages, groups, size, reply_size)
        if self._refused is not None:
            outcome = outcome.refusing(self._refused, at)
        self.block.hold(held, outcome)
        return outcome

    def _next_suspect(self, owed: int) -> Exchange | None:
        """Take a suspect if the worker is idle and fresh, or nobody fresh may come."""
        if owed or self.block.holds or not self._may_try:
            return None
        suspect = self._backlog.take_suspect(self._number)
        if suspect is not None:
            self._alone = True
            self.block.close()
        return suspect

    def _awaits_suspect(self, owed: int) -> bool:
        """Return whether to get idle, for a suspect that nobody else may come to try."""
        busy = owed or self.block.holds
        return bool(busy and self._may_try and self._backlog.has_suspect(self._number))

    @property
    def _may_try(self) -> bool:
        if self.retiring or self._alone:
            return False
        return self._fresh or self._backlog.orphaned

    def _take_back(self) -> Exchange:
        exchange = self._held.pop()
        self._held_bytes -= exchange.size
        self.block.withdraw(exchange.left, exchange.size)
        return exchange

    def _refuse(self, culprit: Exchange, refused: InvalidMessage) -> None:
        error = InvalidMessage(
            f"stage {self._stage.name}: {refused}"
            f" (message {culprit.start + 1} of its input)",
            index=0,
        )
        culprit.fail(error)

    def _let_go(self) -> list[Exchange]:
        held = [exchange.rest() for exchange in self._held]
        self._held.clear()
        self._held_bytes = 0
        self._alone = False
        return held

    def _take_no(self, exchange: Exchange, outcome: Outcome) -> list[Exchange]:
        """End what a worker refused, or have it tried again; return that."""
        # To try a round again would double what was passed on already.
        streams = exchange.submission.streams
        retries = 0 if streams else self._stage.on_error.retries_refused
        ended, again = refused(exchange, outcome, retries=retries)
        for part in ended:
            exchange.submission.deliver(part)
        self._retried.extendleft(reversed(again))
        return again

    def _unsent(self) -> list[Exchange]:
        unsent = [*self._again, *self._retried]
        self._again.clear()
        self._retried.clear()
        return unsent
