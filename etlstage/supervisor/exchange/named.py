"""
What one worker is given that works at several exchanges at once.

Each exchange has a number, and ends when the worker says so, in any order. None of
them stands in the way of another: one that takes too long is cancelled by itself, and
one that is refused is its own matter.

What is opened at once has consecutive numbers, and one range of ``table.py`` stands for
all of it; what ends of that at once is one outcome.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from etlstage.errors import Attempt, PayloadTooBig
from etlstage.messages import OVERHEAD, Groups, Run, StageKind, cost_of, size_of
from etlstage.protocol.events import Added, Cancelled, Ended, Event, Opened
from etlstage.stage.policy import Order
from etlstage.stage.stage import Stage
from etlstage.supervisor.exchange.backlog import Backlog
from etlstage.supervisor.exchange.batch import take_ripe
from etlstage.supervisor.exchange.dialogue import Dialogue
from etlstage.supervisor.exchange.dispatch import SLICE, Dispatcher
from etlstage.supervisor.exchange.exchange import Exchange, Outcome, Refused
from etlstage.supervisor.exchange.retry import LastError, Loss, carry_out, judge
from etlstage.supervisor.exchange.table import Part, Range, Table

__all__ = ("NamedDispatcher",)


_MOST: Final = 4096  # exchanges opened at once


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
        self._keyed = stage.order is Order.KEY
        self._open = Table()
        self._begun: dict[int, _Begun] = {}  # replies that go on
        self._dialogues: dict[int, Dialogue] = {}  # those that are open, by turns
        self._last = 0  # a number that was sent is never used again
        self._now = 0.0

    @property
    def held(self) -> int:
        """Messages that the worker has and did not answer."""
        if not self._batches:
            return self._open.count
        return sum(item.exchange.left for item in self._open)

    @property
    def busy(self) -> bool:
        """Whether the worker has an exchange that has not ended."""
        return bool(self._open.count)

    @property
    def stalled(self) -> bool:
        """Whether no more outputs are to be read before some are consumed."""
        return any(item.exchange.submission.flooded for item in self._open)

    @property
    def oldest(self) -> float | None:
        """When the exchange was opened that has been open for longest, in seconds."""
        return self._open.oldest

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
        return [Added(id_, chunks, ended)]

    def unwanted(self) -> list[Cancelled]:
        """Return, once, what cancels exchanges that nobody waits for any more."""
        gone = [
            Cancelled(id_, *item.exchange.submission.parting)
            for item in self._open
            if item.exchange.submission.streams and item.exchange.submission.forgotten
            for id_ in item.numbers
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
        if (item := self._open.find(id_)) is None:
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
        self, event: Ended, reply_size: int, now: float, refused: Refused | None = None
    ) -> None:
        """
        Take the ends of exchanges; of those that are not open nothing is taken.

        Args:
            event: What has ended.
            reply_size: Bytes of memory that the replies take.
            now: The time, in seconds.
            refused: To which of these exchanges the worker said no.

        """
        groups, before = event.groups, self._open.count
        for part in self._open.end(event.first, len(groups)):
            at = part.first - event.first
            some = groups if part.many == len(groups) else groups[at : at + part.many]
            if self._begun:
                some = self._with_begun(part, some)
            self._hold(part, some, reply_size, refused, at)
            reply_size = 0
            if self._dialogues:
                self._note_ends(range(part.first, part.first + part.many))
        self._alone = self._alone and before == self._open.count
        self.block.answered(before - self._open.count, now)

    def expired(self, now: float, limit: float) -> list[int]:
        """Return the exchanges that have been open for ``limit`` seconds or longer."""
        # In the words in which the deadline was set: the difference may be rounded to
        # what has not come yet, and the deadline would ring for ever.
        late = [item.numbers for item in self._open if item.since + limit <= now]
        return list(chain.from_iterable(late))

    def postpone(self, seconds: float, now: float) -> None:
        """Give all that is open more time: nothing was read for so long."""
        for item in self._open:
            item.since = min(item.since + seconds, now)

    def lose(self, attempt: Attempt, error: LastError, *, untouched: bool) -> Loss:
        """Let others try what the worker held; see :meth:`Dispatcher.lose`."""
        ids = list(self._dialogues)
        kept = [part.of.exchange for id_ in ids for part in self._open.end(id_, 1)]
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
        first, caller = self._last + 1, exchange.submission
        dialogue = caller if isinstance(caller, Dialogue) else None
        each = not self._batches and dialogue is None
        count = len(exchange.messages) if each else 1
        self._last += count
        self._open.add(Range(first, count, exchange, self._now))
        if dialogue is None:
            return (Opened(first, exchange.messages, each),)
        self._dialogues[first] = dialogue
        return (Opened(first, (), each=False, ended=False, event=dialogue.event),)

    def _give(self, room: int, now: float) -> Sequence[Event] | None:
        callers = self._backlog.in_turn(self._number)
        if self._keyed:
            # Who has several exchanges may end them in any order: one of each lane.
            callers = [caller for caller in callers if not caller.in_flight]
        exchange: Exchange | None = None
        if self._batches:
            exchange, self.due = take_ripe(callers, self._stage.batch, now)
        elif callers:
            alone = self._keyed or callers[0].stalled
            share = 1 if alone else -(-room // len(callers))
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

    def _with_begun(self, part: Part, groups: Groups) -> Groups:
        """Return groups with what came of them before, in front of each."""
        whole = list(groups)
        for place in range(part.many):
            begun = self._begun.pop(part.first + place, None)
            if begun is not None:
                whole[place] = (*begun.outputs, *whole[place])
        return whole

    def _hold(
        self,
        part: Part,
        groups: Groups,
        reply_size: int,
        refused: Refused | None,
        at: int,
    ) -> None:
        """Hold back the outcome of exchanges that were opened, and have ended, at once."""
        exchange = self._exchange_of(part)
        mine = refused.among(at, at + part.many) if refused is not None else None
        if mine and part.many == 1:
            # A batch is refused as a whole, and so is a single message.
            ((_, error),) = mine
            self.block.hold(exchange, exchange.failed(error))
            return
        size = reply_size + OVERHEAD * sum(map(len, groups))
        outcome = Outcome(
            exchange.start, exchange.messages, groups, exchange.size, size
        )
        if mine:
            outcome = outcome._replace(refused=mine)
        self.block.hold(exchange, outcome)

    def _exchange_of(self, part: Part) -> Exchange:
        """Return so many of the exchanges that were opened at once."""
        range_, first, count = part
        whole = range_.exchange
        if self._batches or count == len(whole.messages):
            return whole
        at = first - range_.began
        messages = whole.messages[at : at + count]
        return Exchange(whole.submission, whole.start + at, messages, size_of(messages))

    def _take_back(self) -> Exchange:
        range_ = self._open.pop()
        self._last = range_.first - 1  # nothing was sent: no number was used
        return range_.exchange

    def _close(self, id_: int) -> Exchange | None:
        for part in self._open.end(id_, 1):
            self._begun.pop(id_, None)
            self._note_ends([id_])
            return self._exchange_of(part)
        return None

    def _note_ends(self, ids: Iterable[int]) -> None:
        self._alone = False
        for id_ in ids:
            self._dialogues.pop(id_, None)

    def _let_go(self) -> list[Exchange]:
        # Each of them may have been the culprit, and is tried by itself.
        held = [
            self._exchange_of(Part(item, id_, 1))
            for item in self._open
            for id_ in item.numbers
        ]
        self._open.clear()
        self._begun.clear()
        self._dialogues.clear()
        self._alone = False
        return held
