"""
What one worker is given that works at several exchanges at once.

Each exchange has a number, and ends when the worker says so, in any order. None of
them stands in the way of another: one that takes too long is cancelled by itself, and
one that is refused is its own matter.

What is opened at once has consecutive numbers, and one object stands for all of it;
what ends of that at once is one outcome.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from etlstage.errors import Attempt, EtlstageError, PayloadTooBig
from etlstage.messages import OVERHEAD, Run, StageKind, cost_of, size_of
from etlstage.protocol.events import (
    Event,
    ExchangeCancelled,
    ExchangeOpened,
    ExchangesEnded,
    ExchangesOpened,
    OutputOf,
)
from etlstage.stage.stage import Stage
from etlstage.supervisor.exchange.backlog import Backlog
from etlstage.supervisor.exchange.batch import take_ripe
from etlstage.supervisor.exchange.dialogue import Dialogue
from etlstage.supervisor.exchange.dispatch import SLICE, Dispatcher
from etlstage.supervisor.exchange.exchange import Exchange, Outcome
from etlstage.supervisor.exchange.retry import LastError, Loss, carry_out, judge

__all__ = ("NamedDispatcher",)


_MOST: Final = 4096  # exchanges opened at once


@dataclass(slots=True, eq=False)
class _Opened:
    """What was opened at once: an exchange for each message, or for all of them."""

    exchange: Exchange
    first: int
    """Number of the first one."""
    since: float


@dataclass(slots=True)
class _Begun:
    """What has come of a reply."""

    outputs: list[bytes] = field(default_factory=list)
    cost: int = 0
    """Bytes of memory that these take."""


class NamedDispatcher(Dispatcher):
    """Opens as many exchanges as there is room for; see :class:`Dispatcher`."""

    _concurrent = True

    def __init__(self, stage: Stage, backlog: Backlog, number: int = 0) -> None:
        super().__init__(stage, backlog, number)
        self._batches = stage.dialect.shape.batches
        self._open: dict[int, _Opened] = {}
        self._begun: dict[int, _Begun] = {}  # replies that go on
        self._dialogues: dict[int, Dialogue] = {}  # those that are open, by turns
        self._last = 0  # a number is never used again
        self._now = 0.0

    @property
    def held(self) -> int:
        """Messages that the worker has and did not answer."""
        if not self._batches:
            return len(self._open)
        return sum(item.exchange.left for item in self._open.values())

    @property
    def busy(self) -> bool:
        """Whether the worker has an exchange that has not ended."""
        return bool(self._open)

    @property
    def stalled(self) -> bool:
        """Whether no more outputs are to be read before some are consumed."""
        opened = {*self._open.values()}
        return any(item.exchange.submission.flooded for item in opened)

    @property
    def oldest(self) -> float | None:
        """When the exchange was opened that has been open for longest, in seconds."""
        return next((item.since for item in self._open.values()), None)

    @property
    def lasts(self) -> bool:
        """Whether there is an exchange that its caller keeps open."""
        return bool(self._dialogues)

    def said(self) -> list[Event]:
        """Return, once, what a caller adds to its exchange; each has its turn."""
        id_ = next((i for i, said in self._dialogues.items() if said.speaks), None)
        if id_ is None:
            return []
        self._dialogues[id_] = dialogue = self._dialogues.pop(id_)
        chunks, ended = dialogue.take_said()
        events: list[Event] = [OutputOf(id_, chunks)] if chunks else []
        return [*events, ExchangesEnded([(id_, ())])] if ended else events

    def unwanted(self) -> list[ExchangeCancelled]:
        """Return, once, what cancels exchanges that nobody waits for any more."""
        gone = [
            ExchangeCancelled(id_, *item.exchange.submission.parting)
            for id_, item in self._open.items()
            if item.exchange.submission.streams and item.exchange.submission.forgotten
        ]
        for cancelled in gone:
            self._close(cancelled.id)
        return gone

    def next(self, now: float, owed: int, room: float) -> Sequence[Event] | None:
        """Return exchanges to open, of one caller, or None."""
        self.due = None
        self._now = now
        self.sated = False
        if room < 1:
            return None
        count = int(min(room, _MOST))
        if self._again:  # what stood around a message that can't be sent
            return self._begin(self._first(self._again, count))
        if self._retried and not self._alone:
            return self._begin(self._retried.popleft())
        if self._alone or self.retiring:
            return None
        if self._backlog.suspects:
            if (suspect := self._next_suspect(owed)) is not None:
                return self._begin(suspect)
            if self._awaits_suspect(owed):
                return None
        return self._give(count, now)

    def passed_by(self, id_: int, outputs: Run) -> None:
        """
        Take outputs of an exchange that has not ended; one that is gone has none.

        Raises:
            PayloadTooBig: If they take more memory than a reply may.

        """
        if (item := self._open.get(id_)) is None:
            return
        if item.exchange.submission.streams:
            item.exchange.submission.pass_on(outputs)
            return
        begun = self._begun.setdefault(id_, _Begun())
        begun.cost += cost_of(outputs)
        if begun.cost > (most := self._stage.max_reply):
            raise PayloadTooBig(
                f"reply takes more than {most} bytes of memory, with no end yet;"
                " see max_reply"
            )
        begun.outputs.extend(outputs)

    def ended(
        self, ends: Iterable[tuple[int, tuple[bytes, ...]]], reply_size: int, now: float
    ) -> None:
        """Take replies by the numbers of their exchanges."""
        count, first, behind = len(self._open), 0, 0
        opened: _Opened | None = None
        groups: list[tuple[bytes, ...]] = []
        close, begun = self._open.pop, self._begun
        for id_, group in ends:
            if (item := close(id_, None)) is None:
                continue
            if begun and id_ in begun:
                group = (*begun.pop(id_).outputs, *group)
            if item is opened and id_ == behind:
                groups.append(group)
            else:
                if opened is not None:
                    self._hold(opened, first, groups, reply_size)
                    reply_size = 0
                opened, first, groups = item, id_, [group]
            behind = id_ + 1
        if opened is not None:
            self._hold(opened, first, groups, reply_size)
            self._note_ends(id_ for id_, _ in ends)
        self.block.answered(count - len(self._open), now)

    def refused_by(self, id_: int, error: EtlstageError, now: float) -> None:
        """End an exchange that the worker refused, if it is still open."""
        if (exchange := self._close(id_)) is not None:
            self.block.answered(1, now)
            self.block.hold(exchange, exchange.failed(error))

    def expired(self, now: float, limit: float) -> list[int]:
        """Return the exchanges that have been open for ``limit`` seconds or longer."""
        # In the words in which the deadline was set: the difference may be rounded to
        # what has not come yet, and the deadline would ring for ever.
        return [id_ for id_, item in self._open.items() if item.since + limit <= now]

    def postpone(self, seconds: float, now: float) -> None:
        """Give all that is open more time: nothing was read for so long."""
        for item in {*self._open.values()}:
            item.since = min(item.since + seconds, now)

    def lose(self, attempt: Attempt, error: LastError, *, untouched: bool) -> Loss:
        """Let others try what the worker held; see :meth:`Dispatcher.lose`."""
        ids = list(self._dialogues)
        kept = [self._open.pop(id_).exchange for id_ in ids]
        # Of what is left, none is known for sure to be at fault.
        self._answered_any = self._answered_any or bool(kept)
        loss = super().lose(attempt, error, untouched=untouched)
        if not kept:
            return loss
        own = self._lose_rounds(kept, attempt, error, untouched=untouched)
        held, retried = loss.held + own.held, loss.retried + own.retried
        return Loss(held, retried, loss.failed + own.failed, loss.tries)

    def lose_one(
        self,
        id_: int,
        attempt: Attempt,
        error: LastError,
    ) -> Loss:
        """Have one exchange tried again, which was cancelled; the worker lives on."""
        exchange = self._close(id_)
        assert exchange is not None, "what is not open can't be cancelled"
        dialogue = exchange.submission
        if isinstance(dialogue, Dialogue):
            dialogue.expired = True
            exchange.fail(error((attempt,)))
            return Loss(1, 0, 1)
        if self._stage.kind is StageKind.EXTRACT:
            return self._lose_rounds([exchange], attempt, error)
        found = judge(
            [exchange],
            attempt,
            retries=self._stage.on_error.retries,
            batches=self._batches,
            first=True,
        )
        # No fresh worker need come for it: this one lives, and others don't suffer.
        return carry_out(found, exchange.left, error, self._retried)

    def _begin(self, exchange: Exchange) -> Sequence[Event]:
        first, kind, caller = (
            self._last + 1,
            self._stage.kind.value,
            exchange.submission,
        )
        each = not self._batches and not isinstance(caller, Dialogue)
        self._last += len(exchange.messages) if each else 1
        numbers = range(first, self._last + 1)
        opened = _Opened(exchange, first, self._now)
        self._open.update(dict.fromkeys(numbers, opened))
        if each:
            return (ExchangesOpened(first, exchange.messages, kind),)
        if isinstance(caller, Dialogue):
            self._dialogues[first] = caller
            return (ExchangeOpened(first, (), kind, ended=False, event=caller.event),)
        return (ExchangeOpened(first, exchange.messages, kind),)

    def _give(self, room: int, now: float) -> Sequence[Event] | None:
        callers = self._backlog.in_turn(self._number)
        exchange: Exchange | None = None
        if self._batches:
            exchange, self.due = take_ripe(callers, self._stage.batch, now)
        elif callers:
            share = 1 if callers[0].stalled else -(-room // len(callers))
            exchange = callers[0].take(share, SLICE)
            self.sated: bool = len(exchange.messages) == room
        if exchange is None:
            return None
        self._fresh = False
        return self._begin(exchange)

    def _first(self, waiting: deque[Exchange], count: int) -> Exchange:
        """Remove and return what waits first, but not more than there is room for."""
        first = waiting[0]
        taken = first if self._batches else first.take(count, SLICE)
        if taken is first or not first.left:
            waiting.popleft()
        return taken

    def _hold(
        self,
        opened: _Opened,
        first: int,
        groups: list[tuple[bytes, ...]],
        reply_size: int,
    ) -> None:
        """Hold back the outcome of exchanges that were opened, and have ended, at once."""
        part = self._part(opened, first, len(groups))
        size = reply_size + OVERHEAD * sum(map(len, groups))
        outcome = Outcome(part.start, part.messages, groups, part.size, size)
        self.block.hold(part, outcome)

    def _part(self, opened: _Opened, first: int, count: int = 1) -> Exchange:
        """Return so many of the exchanges that were opened at once."""
        whole = opened.exchange
        if self._batches or count == len(whole.messages):
            return whole
        at = first - opened.first
        messages = whole.messages[at : at + count]
        return Exchange(whole.submission, whole.start + at, messages, size_of(messages))

    def _take_back(self) -> Exchange:
        opened = self._open[self._last]
        for id_ in range(opened.first, self._last + 1):
            del self._open[id_]
        return opened.exchange

    def _close(self, id_: int) -> Exchange | None:
        opened = self._open.pop(id_, None)
        if opened is None:
            return None
        self._begun.pop(id_, None)
        self._note_ends([id_])
        return self._part(opened, id_)

    def _note_ends(self, ids: Iterable[int]) -> None:
        self._alone = False
        if self._dialogues:
            for id_ in ids:
                self._dialogues.pop(id_, None)

    def _let_go(self) -> list[Exchange]:
        # Each of them may have been the culprit, and is tried by itself.
        held = [self._part(item, id_) for id_, item in self._open.items()]
        self._open.clear()
        self._begun.clear()
        self._dialogues.clear()
        self._alone = False
        return held
