"""
The exchanges of one worker: what it is given, and what becomes of that.

The link asks :meth:`Dispatcher.next` what to send, and reports what has ended. Both are
in terms of the dialect's events, in which each exchange has a number. There is no I/O
and no session here. ``giving.py`` decides what is given next, ``table.py`` keeps what
is open, and ``retry.py`` decides what becomes of exchanges that were lost or refused.

The dialect decides when an exchange ends. An answered exchange may stay open for long,
while it is not known yet whether the answer is right. The number of outstanding replies
tells which were answered: all open exchanges except that many of the newest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple

from etlstage.errors import Attempt, EtlstageError, InvalidMessage, PayloadTooBig
from etlstage.messages import Groups, Run, StageKind, cost_of, size_of
from etlstage.protocol.base import Shape
from etlstage.protocol.events import Added, Cancelled, Ended, Opened
from etlstage.stage.stage import Stage
from etlstage.supervisor.exchange.backlog import Backlog
from etlstage.supervisor.exchange.exchange import (
    NONE_SLOW,
    Exchange,
    Outcome,
    Refusals,
)
from etlstage.supervisor.exchange.giving import Giving
from etlstage.supervisor.exchange.retry import (
    Judgement,
    LastError,
    Loss,
    carry_out,
    judge,
    judge_rounds,
    refused,
    tried,
)
from etlstage.supervisor.exchange.round import Dialogue, Round
from etlstage.supervisor.exchange.table import OpenRange, RangePart, Table

__all__ = ("Answered", "Dispatcher")


class Answered(NamedTuple):
    """Totals of some exchanges that ended."""

    exchanges: int = 0
    messages: int = 0
    size: int = 0
    """Bytes of the messages."""


@dataclass(slots=True)
class _Begun:
    """The part of a reply that was received so far."""

    outputs: list[bytes] = field(default_factory=list)
    cost: int = 0
    """Bytes of memory that the outputs take."""


def _of_unnamed(fate: str) -> Attempt:
    return Attempt("", 0, fate)


class Dispatcher:
    """
    Holds the exchanges of one worker process over its whole life.

    ``attempt`` returns the worker's attempt at a message, given how it failed.

    Attributes:
        open: The exchanges that have not ended.
        dialogues: Exchanges that callers keep open, by number; they take turns.
        given: Messages that the process was given in its life.
        bound: Bytes of replies that may wait at most, as the caller of the exchange
            that was opened last has it.

    """

    def __init__(
        self,
        stage: Stage,
        backlog: Backlog,
        number: int = 0,
        *,
        in_order: bool = True,
        attempt: Callable[[str], Attempt] = _of_unnamed,
    ) -> None:
        shape = stage.dialect.shape
        self.giving: Giving = Giving(stage, backlog, number, in_order=in_order)
        self.given: int = 0
        self.bound: float = 0.0
        self._stage = stage
        self._backlog = backlog
        self._in_order = in_order
        self._attempt = attempt
        self._streams = shape is Shape.STREAM
        self._asks = shape is Shape.ASKED_BATCH
        self._batches = shape.batches
        self._commits = shape is Shape.COMMITTED
        self.open: Table = Table()
        self._begun: dict[int, _Begun] = {}  # incomplete replies, by number
        self._slow: dict[int, float] = {}  # seconds that slow replies took, by number
        self.dialogues: dict[int, Dialogue] = {}
        self._last = 0  # number used last; one that was sent is never used again
        self._answered_any = False
        self._adding = False  # what was sent last continues a batch

    @property
    def held(self) -> int:
        """Number of messages that the worker has and whose outcome is not certain."""
        if self._streams:
            return 0  # nothing was given to it
        if not self._batches:
            return self.open.count
        return sum(len(item.exchange.messages) for item in self.open.ranges)

    def answered(self, owed: int) -> int:
        """Return how many messages of the open exchanges have been answered."""
        count = self.open.count - owed
        if not self._batches or not self._in_order:
            return count
        items = islice(self.open.ranges, count)
        return sum(len(item.exchange.messages) for item in items)

    @property
    def stalled(self) -> bool:
        """Whether reading has to wait until some outputs are consumed."""
        ranges = self.open.ranges
        if not ranges:
            return self._streams  # before a round begins, output has no place to go
        if self._in_order:
            return ranges[0].exchange.submission.over_limit
        return any(item.exchange.submission.over_limit for item in ranges)

    @property
    def abandoned(self) -> bool:
        """Whether the worker is busy with a round whose caller is gone."""
        ranges = self.open.ranges
        caller = ranges[0].exchange.submission if ranges else None
        return isinstance(caller, Round) and caller.abandoned

    @property
    def oldest(self) -> float | None:
        """When the oldest open exchange was opened, in seconds; None: none is open."""
        return self.open.ranges[0].since if self.open.ranges else None

    # --- what is sent ---------------------------------------------------------

    def next(self, now: float, owed: int, room: float) -> Opened | Added | None:
        """
        Return what to send, or None if there is nothing to do now.

        ``room`` is how many more exchanges may be opened, or, if the worker asks for
        each message, how many messages it may be given.
        """
        if self._asks and owed:
            return self._fill(now) if room >= 1 else None
        exchange = self.giving.next(now, owed, self.open.count, room)
        return None if exchange is None else self._begin(exchange, now)

    def refused(self, error: InvalidMessage) -> None:
        """Take back what was to be sent last: one of its messages can't be sent."""
        if self._adding:
            batch = self.open.ranges[-1]
            before, culprit = batch.exchange.split(len(batch.exchange.messages) - 1)
            batch.exchange = before
            self.given -= 1
            self.giving.cut = True  # the batch ends before the unsendable message
        else:
            range_ = self.open.pop()
            self._last = range_.first - 1  # nothing was sent: no number was used
            self.dialogues.pop(range_.first, None)
            self.given -= len(range_.exchange.messages)
            culprit = self.giving.put_back(range_.exchange, error)
        place = f"(message {culprit.start + 1} of its input)"
        text = f"stage {self._stage.name}: {error} {place}"
        culprit.fail(InvalidMessage(text, index=0))

    def next_added(self) -> Added | None:
        """Return, once, what a caller adds to its exchange; callers take turns."""
        id_ = next((i for i, one in self.dialogues.items() if one.has_input), None)
        if id_ is None:
            return None
        self.dialogues[id_] = dialogue = self.dialogues.pop(id_)
        chunks, ended = dialogue.take_input()
        return Added(id_, chunks, ended)

    def cancellations(self) -> list[Cancelled]:
        """Close exchanges whose callers are gone; return, once, what cancels them."""
        gone = [
            Cancelled(id_, *caller.cancel_reason)
            for item in self.open.ranges
            if isinstance(caller := item.exchange.submission, Round)
            and caller.abandoned
            for id_ in item.numbers
        ]
        for cancelled in gone:
            self._close(cancelled.id)
        return gone

    # --- what is received -------------------------------------------------------

    def added(self, id_: int, outputs: Run) -> None:
        """
        Take outputs of an exchange that has not ended; ignore them if it is not open.

        Raises:
            PayloadTooBig: If they take more memory than a reply may.

        """
        if (item := self.open.find(id_)) is None:
            return
        if isinstance(caller := item.exchange.submission, Round):
            caller.pass_on(outputs)
            return
        begun = self._begun.setdefault(id_, _Begun())
        begun.cost += cost_of(outputs)
        if begun.cost > (most := self._stage.max_reply):
            raise PayloadTooBig(
                f"reply takes more than {most} bytes of memory and has not ended yet;"
                " see max_reply"
            )
        begun.outputs.extend(outputs)

    def ended(
        self, event: Ended, reply_size: int, refused: Refusals | None = None
    ) -> Answered:
        """
        Deliver exchanges that have ended; return totals of all that is not tried again.

        Exchanges that are not open are ignored. ``reply_size`` is the memory that the
        replies take, in bytes; ``refused`` has the exchanges that the worker rejected.
        """
        first, groups, before = event.first, event.groups, self.open.count
        messages = size = 0
        rest = reply_size  # attributed to the first part
        for part in self.open.end(first, len(groups)):
            at, many = part.first - first, part.many
            some = groups if many == len(groups) else groups[at : at + many]
            if self._begun:
                some = self._with_begun(part, some)
            mine = None if refused is None else refused.among(at, at + many)
            slow = self._slow_in(part) if self._slow else NONE_SLOW
            exchange, outcome = self._outcome(part, some, rest, mine)
            rest = 0
            messages += len(outcome.messages)
            size += outcome.size
            if mine:
                whole = self._batches and len(outcome.messages) > 1
                for again in self._take_no(exchange, outcome, slow):
                    self._backlog.unknown_outcomes += again.left * whole
                    messages -= again.left
                    size -= again.size
            else:
                if self._backlog.checker is not None:
                    outcome = self._checked(exchange, outcome, slow)
                exchange.submission.deliver(outcome)
            if self.dialogues:
                for id_ in range(part.first, part.first + many):
                    self.dialogues.pop(id_, None)
        count = before - self.open.count
        if count:
            self._answered_any = self._backlog.answered = True
            if not self._commits:
                self._backlog.step_on(messages)
        return Answered(count, messages, size)

    def time_oldest(self, owed: int, seconds: float) -> None:
        """Record how long the oldest of ``owed`` exchanges took, if too long."""
        checker = self._backlog.checker
        if checker is not None and checker.is_slow(seconds):
            numbers = chain.from_iterable(item.numbers for item in self.open.ranges)
            number = next(islice(numbers, self.open.count - owed, None))
            self._slow[number] = seconds

    def time_each(self, event: Ended, now: float) -> None:
        """Record how long each exchange that has ended was open, if too long."""
        if (checker := self._backlog.checker) is None:
            return
        for number in range(event.first, event.first + len(event.groups)):
            item = self.open.find(number)
            if item is not None and checker.is_slow(seconds := now - item.since):
                self._slow[number] = seconds

    def expired(self, now: float, limit: float) -> list[int]:
        """Return the exchanges that have been open for ``limit`` seconds or longer."""
        # Computed as the deadline was set: the difference of the times may be rounded
        # below the limit, and then the deadline would ring for ever.
        ranges = self.open.ranges
        late = [item.numbers for item in ranges if item.since + limit <= now]
        return list(chain.from_iterable(late))

    def postpone(self, seconds: float, now: float) -> None:
        """Give all open exchanges ``seconds`` more: nothing was read meanwhile."""
        for item in self.open.ranges:
            item.since = min(item.since + seconds, now)

    # --- losses -------------------------------------------------------------------

    def fail_all(self, error: EtlstageError, owed: int) -> int:
        """End all messages that the worker holds with ``error``; return how many."""
        count = self.held
        for exchange in (*self._let_go(owed), *self.giving.unsent()):
            exchange.fail(error)
        return count

    def lose(
        self,
        attempt: Attempt,
        error: LastError,
        *,
        owed: int,
        untouched: bool,
        mispaired: int | None = None,
    ) -> Loss:
        """
        Let other workers try what a lost worker held.

        Args:
            attempt: How the worker was lost.
            error: Makes the error of a message from all attempts at it.
            owed: Number of exchanges that it had not answered.
            untouched: Whether the worker had read nothing of what it was given.
            mispaired: How many exchanges, the oldest open ones, can't be matched to
                replies; None if it was not lost for that reason.

        """
        if mispaired is not None:
            owed = self.open.count - mispaired  # surplus replies answer no exchange
        ids = list(self.dialogues)
        kept = [part.of.exchange for id_ in ids for part in self.open.end(id_, 1)]
        self.dialogues.clear()
        # With a dialogue open, no other exchange is certain to be at fault.
        self._answered_any = self._answered_any or bool(kept)
        if self._stage.kind is StageKind.EXTRACT:
            return self._lose_rounds(
                self._let_go(owed), attempt, error, untouched=untouched
            )
        if self._commits:
            return self._lose_in_order(attempt, error, owed, untouched=untouched)
        loss = self._lose_others(attempt, error, owed, untouched, mispaired)
        if not kept:
            return loss
        own = self._lose_rounds(kept, attempt, error, untouched=untouched)
        held, retried = loss.held + own.held, loss.retried + own.retried
        return Loss(held, retried, loss.failed + own.failed, loss.tries)

    def lose_one(self, id_: int, attempt: Attempt, error: LastError) -> Loss:
        """Have one cancelled exchange tried again; the worker lives on."""
        exchange = self._close(id_)
        assert exchange is not None, "what is not open can't be cancelled"
        self._backlog.unknown_outcomes += exchange.left
        dialogue = exchange.submission
        if isinstance(dialogue, Dialogue):
            dialogue.expired = True
            exchange.fail(error((attempt,)))
            return Loss(1, 0, 1)
        if self._stage.kind is StageKind.EXTRACT:
            return self._lose_rounds([exchange], attempt, error)
        retries, batches = self._stage.on_error.retries, self._batches
        found = judge([exchange], attempt, retries=retries, batches=batches, first=True)
        # It needs no fresh worker: this one lives, and no other message is affected.
        return carry_out(found, exchange.left, error, self.giving.retried)

    # --- inside -------------------------------------------------------------------

    def _begin(self, exchange: Exchange, now: float) -> Opened:
        first, caller, messages = self._last + 1, exchange.submission, exchange.messages
        self._adding = False
        self.given += len(messages)
        self.bound = caller.max_unread
        if not (self._batches or self._streams or isinstance(caller, Dialogue)):
            count = len(messages)
            self._last += count
            self.open.add(OpenRange(first, count, exchange, now))
            if self._commits:
                self._backlog.step_on(count)
                if caller.feeder_waits:
                    caller.feeder_waits = False
                    caller.wake()  # there is room, though nothing has ended
            return Opened(first, messages)
        self._last = first
        self.open.add(OpenRange(first, 1, exchange, now))
        if isinstance(caller, Dialogue):
            self.dialogues[first] = caller
            return Opened(first, (), each=False, ended=False, event=caller.event)
        if self._batches:
            return Opened(first, messages, each=False, ended=not self._asks)
        self.giving.filled = False  # the reader has waited for this: look again
        return Opened(first, (), each=False)

    def _fill(self, now: float) -> Added | None:
        range_ = self.open.ranges[-1]
        more = self.giving.more(range_.exchange, now)
        self._adding = more is not None
        if more is None:
            return Added(range_.first, (), ended=True) if self.giving.full else None
        self.given += more.left
        more.submission.extend(range_.exchange, more)
        return Added(range_.first, more.messages)

    def _outcome(
        self, part: RangePart, groups: Groups, reply_size: int, refused: Refusals | None
    ) -> tuple[Exchange, Outcome]:
        """Return the exchange that a part belongs to, and the part's outcome."""
        range_, first, many = part
        exchange = range_.exchange
        messages, start, size = exchange.messages, exchange.start, exchange.size
        if not self._batches and many < len(messages):
            at = first - range_.began
            start += at
            left = len(messages) - at
            messages = messages[at : at + many]
            if self._in_order:  # what is left is one piece
                size = size * many // left
                exchange.size -= size
                exchange.at = at + many
            else:
                size = size_of(messages)
        outcome = Outcome(start, messages, groups, size, reply_size)
        if not refused:
            return exchange, outcome
        if many == 1:
            # A batch is refused as a whole, and so is a single message.
            ((_, error),) = refused
            return exchange, outcome._replace(groups=(), error=error)
        return exchange, outcome._replace(refused=refused)

    def _take_no(
        self, exchange: Exchange, outcome: Outcome, slow: Mapping[int, float]
    ) -> list[Exchange]:
        """End what a worker refused, or have it tried again; return the latter."""
        # Trying a round again would duplicate what was passed on already.
        streams = isinstance(exchange.submission, Round)
        retries = 0 if streams else self._stage.on_error.retries_refused
        ended, again = refused(exchange, outcome, retries=retries)
        for part in ended:
            exchange.submission.deliver(self._checked(exchange, part, slow))
        if exchange.submission.abandoned:
            return []
        self.giving.retried.extendleft(reversed(again))
        return again

    def _slow_in(self, part: RangePart) -> dict[int, float]:
        """Return, once, how long slow replies took, by the messages' places."""
        place = part.of.exchange.start - part.of.began
        numbers = range(part.first, part.first + part.many)
        return {n + place: self._slow.pop(n) for n in numbers if n in self._slow}

    def _checked(
        self, exchange: Exchange, outcome: Outcome, slow: Mapping[int, float]
    ) -> Outcome:
        checker = self._backlog.checker
        if checker is None or isinstance(exchange.submission, Round):
            return outcome
        before, attempt = exchange.attempts, self._attempt
        return outcome.checked(
            checker, self._stage, slow, lambda fate: (*before, attempt(fate))
        )

    def _with_begun(self, part: RangePart, groups: Groups) -> Groups:
        whole = list(groups)
        for place in range(part.many):
            begun = self._begun.pop(part.first + place, None)
            if begun is not None:
                whole[place] = (*begun.outputs, *whole[place])
        return whole

    def _close(self, id_: int) -> Exchange | None:
        """End one exchange without an outcome; return it if it was open."""
        for part in self.open.end(id_, 1):
            self._begun.pop(id_, None)
            self.dialogues.pop(id_, None)
            return self._piece(part.of, id_)
        return None

    def _piece(self, range_: OpenRange, id_: int) -> Exchange:
        """Return one of the exchanges of a range."""
        whole = range_.exchange
        if self._batches or len(whole.messages) == 1:
            return whole
        at = id_ - range_.began
        messages = whole.messages[at : at + 1]
        return Exchange(whole.submission, whole.start + at, messages, size_of(messages))

    def _let_go(self, owed: int) -> list[Exchange]:
        """Remove and return all that is open, cut at the first unanswered message."""
        held: list[Exchange] = []
        answered = self.open.count - owed  # the oldest ones, if they end in order
        for item in self.open.ranges:
            if not self._in_order:
                # Each of them may have been the culprit, and is tried alone.
                held += [self._piece(item, id_) for id_ in item.numbers]
                continue
            rest = item.exchange.rest()
            if not self._batches and 0 < answered < item.count:
                held += rest.split(answered)
            else:
                held.append(rest)
            answered -= item.count
        self.open.clear()
        self._begun.clear()
        self.dialogues.clear()
        self.giving.lost(held if owed else [])
        return held

    def _lose_others(
        self,
        attempt: Attempt,
        error: LastError,
        owed: int,
        untouched: bool,
        mispaired: int | None,
    ) -> Loss:
        count, opened = self.held, self.open.count
        self._backlog.record_loss(self.given)
        everything = self._let_go(owed)
        answered, held = _cut(everything, opened - owed, batches=self._batches)
        if self._batches and not self._backlog.closed:
            # Halves of refused batches: joined again, they would be refused again.
            halves = (e for e in self.giving.retried if not e.submission.abandoned)
            self._backlog.suspects.extend(halves)
            self.giving.retried.clear()
        for exchange in self.giving.unsent():
            exchange.submission.give_back(exchange)
        blamed, innocent = held, answered
        first = not (self._answered_any or answered)
        if mispaired is not None:
            first = not self._answered_any
            self._backlog.go_in_step()
            # It is unknown which of the answered is at fault; those after them are not.
            blamed, innocent = answered, held
        many = len(blamed) if self._batches else sum(e.left for e in blamed)
        if untouched or (many > 1 and mispaired is not None):
            blamed, innocent = [], [*answered, *held]
        found = judge(
            blamed,
            attempt,
            retries=self._stage.on_error.retries,
            batches=self._batches,
            first=first,
            concurrent=not self._in_order,
        )
        # What was tried alone before is tried alone again.
        found.suspects.extend(e for e in innocent if e.attempts)
        found.innocent.extend(e for e in innocent if not e.attempts)
        if self._backlog.closed:
            # Nothing is tried again; what is given back ends in its submission.
            found.failed.extend(found.suspects)
            found.suspects.clear()
        return carry_out(found, count, error, self._backlog.suspects)

    def _lose_in_order(
        self, attempt: Attempt, error: LastError, owed: int, *, untouched: bool
    ) -> Loss:
        """
        Have all that no position covers given again, in the order of its places.

        If a suspect were tried first, and alone, a position that covers it would also
        cover messages before it that are not done. So all messages up to the last
        suspect are given one by one; a worker that dies with a single unanswered
        message shows which one is at fault.
        """
        count, opened = self.held, self.open.count
        answered, held = _cut(self._let_go(owed), opened - owed, batches=False)
        for exchange in self.giving.unsent():
            exchange.submission.give_back(exchange)
        failed: list[Exchange] = []
        if held and not untouched:
            self._backlog.go_in_step(sum(e.left for e in (*answered, *held)))
            if sum(e.left for e in held) == 1:
                held = [tried(held[0], attempt)]
                if held[0].tries > self._stage.on_error.retries:
                    failed, held = held, failed
        found = Judgement([], [*answered, *held], failed)
        loss = carry_out(found, count, error, self._backlog.suspects)
        tries = max((e.tries for e in (*held, *failed)), default=0)
        return loss._replace(tries=tries)

    def _lose_rounds(
        self,
        rounds: Sequence[Exchange],
        attempt: Attempt,
        error: LastError,
        *,
        untouched: bool = False,
    ) -> Loss:
        """Request rounds again, as often as a worker may be restarted in vain."""
        count = 0 if self._streams else len(rounds)
        tries = self._stage.restart.max
        found, progress = judge_rounds(
            rounds, attempt, retries=tries, untouched=untouched
        )
        loss = carry_out(found, count, error, self._backlog.suspects)
        return loss._replace(progress=progress)


def _cut(
    held: Iterable[Exchange], answered: int, *, batches: bool
) -> tuple[list[Exchange], list[Exchange]]:
    """Return the first exchanges, which were ``answered``, and the others."""
    before: list[Exchange] = []
    behind: list[Exchange] = []
    for exchange in held:
        (before if answered > 0 else behind).append(exchange)
        answered -= 1 if batches else len(exchange.messages)
    return before, behind
