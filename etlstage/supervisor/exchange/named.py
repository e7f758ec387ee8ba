"""
What one worker is given that works at several exchanges at once.

Each exchange has a number, and ends when the worker says so, in any order. None of
them stands in the way of another: one that takes too long is cancelled by itself, and
one that is refused is its own matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from etlstage.errors import Attempt, EtlstageError, PayloadTooBig
from etlstage.messages import OVERHEAD, Groups, Run, StageKind, cost_of
from etlstage.protocol.events import (
    Event,
    ExchangeCancelled,
    ExchangeOpened,
    ExchangesEnded,
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


@dataclass(slots=True)
class _Open:
    exchange: Exchange
    since: float
    outputs: list[bytes] = field(default_factory=list)
    cost: int = 0  # bytes of memory that these take


class NamedDispatcher(Dispatcher):
    """Opens as many exchanges as there is room for; see :class:`Dispatcher`."""

    _concurrent = True

    def __init__(self, stage: Stage, backlog: Backlog, number: int = 0) -> None:
        super().__init__(stage, backlog, number)
        self._batches = stage.dialect.shape.batches
        self._open: dict[int, _Open] = {}
        self._dialogues: dict[int, Dialogue] = {}  # those that are open, by turns
        self._last = 0  # a number is never used again
        self._now = 0.0

    @property
    def held(self) -> int:
        """Messages that the worker has and did not answer."""
        return sum(item.exchange.left for item in self._open.values())

    @property
    def busy(self) -> bool:
        """Whether the worker has an exchange that has not ended."""
        return bool(self._open)

    @property
    def stalled(self) -> bool:
        """Whether no more outputs are to be read before some are consumed."""
        return any(item.exchange.submission.flooded for item in self._open.values())

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
        """Return an exchange to open, or None."""
        self.due = None
        self._now = now
        if room < 1:
            return None
        if self._again:  # what stood around a message that can't be sent
            return self._begin(self._again.popleft())
        if self._retried and not self._alone:
            return self._begin(self._retried.popleft())
        if self._alone or self.retiring:
            return None
        if self._backlog.suspects:
            if (suspect := self._next_suspect(owed)) is not None:
                return self._begin(suspect)
            if self._awaits_suspect(owed):
                return None
        return self._give(1, now)

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
        else:
            item.cost += cost_of(outputs)
            if item.cost > (most := self._stage.max_reply):
                raise PayloadTooBig(
                    f"reply takes more than {most} bytes of memory, with no end yet;"
                    " see max_reply"
                )
            item.outputs.extend(outputs)

    def ended(
        self, ends: Iterable[tuple[int, tuple[bytes, ...]]], reply_size: int, now: float
    ) -> None:
        """Take replies by the numbers of their exchanges."""
        ended = 0
        for id_, group in ends:
            if (item := self._close(id_)) is None:
                continue
            ended += 1
            exchange = item.exchange
            groups: Groups = [(*item.outputs, *group)]
            outcome = Outcome(
                exchange.start,
                exchange.messages,
                groups,
                exchange.size,
                reply_size + OVERHEAD * len(groups[0]),
            )
            self.block.hold(exchange, outcome)
            reply_size = 0
        self.block.answered(ended, now)

    def refused_by(self, id_: int, error: EtlstageError, now: float) -> None:
        """End an exchange that the worker refused, if it is still open."""
        if (item := self._close(id_)) is not None:
            self.block.answered(1, now)
            self.block.hold(item.exchange, item.exchange.failed(error))

    def expired(self, now: float, limit: float) -> list[int]:
        """Return the exchanges that have been open for ``limit`` seconds or longer."""
        # In the words in which the deadline was set: the difference may be rounded to
        # what has not come yet, and the deadline would ring for ever.
        return [id_ for id_, item in self._open.items() if item.since + limit <= now]

    def postpone(self, seconds: float, now: float) -> None:
        """Give all that is open more time: nothing was read for so long."""
        for item in self._open.values():
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
        """Let others try one exchange, which was cancelled; the worker lives on."""
        item = self._close(id_)
        assert item is not None, "what is not open can't be cancelled"
        dialogue = item.exchange.submission
        if isinstance(dialogue, Dialogue):
            dialogue.expired = True
            item.exchange.fail(error((attempt,)))
            return Loss(1, 0, 1)
        if self._stage.kind is StageKind.EXTRACT:
            return self._lose_rounds([item.exchange], attempt, error)
        found = judge(
            [item.exchange],
            attempt,
            retries=self._stage.on_error.retries,
            batches=self._batches,
            first=True,
        )
        suspects = self._backlog.suspects
        return carry_out(found, item.exchange.left, error, suspects)

    def _begin(self, exchange: Exchange) -> Sequence[Event]:
        self._last += 1
        self._open[self._last] = _Open(exchange, self._now)
        kind, dialogue = self._stage.kind.value, exchange.submission
        if isinstance(dialogue, Dialogue):
            self._dialogues[self._last] = dialogue
            event = dialogue.event
            return (ExchangeOpened(self._last, (), kind, ended=False, event=event),)
        return (ExchangeOpened(self._last, exchange.messages, kind),)

    def _give(self, _room: int, now: float) -> Sequence[Event] | None:
        if self._batches:
            submissions = self._backlog.in_turn(self._number)
            batch, self.due = take_ripe(submissions, self._stage.batch, now)
            if batch is not None:
                self._fresh = False
                return self._begin(batch)
            return None
        for submission in self._backlog.in_turn(self._number):
            self._fresh = False
            return self._begin(submission.take(1, SLICE))
        return None

    def _take_back(self) -> Exchange:
        return self._open.pop(self._last).exchange

    def _close(self, id_: int) -> _Open | None:
        item = self._open.pop(id_, None)
        if item is not None:
            self._alone = False
            self._dialogues.pop(id_, None)
        return item

    def _let_go(self) -> list[Exchange]:
        held = [item.exchange for item in self._open.values()]
        self._open.clear()
        self._dialogues.clear()
        self._alone = False
        return held
