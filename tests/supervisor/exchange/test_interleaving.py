"""
Exchanges with ids, against both sides of a dialect that ends them in any order.

Bytes move in pieces of any size; workers answer in any order, refuse, are cancelled and
die. Every message must have one outcome, and never another's.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import ClassVar

from etlstage.errors import Attempt, InvalidMessage, WorkerLost, WorkerRefusal
from etlstage.protocol.base import Shape, Side
from etlstage.protocol.events import (
    Added,
    Cancelled,
    Ended,
    Opened,
    Ready,
)
from etlstage.stage import BatchPolicy, ErrorPolicy
from etlstage.supervisor.exchange.backlog import Backlog
from etlstage.supervisor.exchange.dispatch import Dispatcher
from etlstage.supervisor.exchange.exchange import Outcome
from etlstage.supervisor.exchange.submission import AnyOrder, Submission
from tests.dice import diced
from tests.supervisor.exchange.test_dispatch import give, stage
from tests.supervisor.exchange.test_named import end, refuse
from tests.supervisor.toy import ToyDialect, ToySession

LOST = WorkerLost("lost", stage="t")
NO = WorkerRefusal("no", stage="t", code=1, reason="no")


class Worker:
    """A dispatcher and both sides of its session, with the bytes in between."""

    def __init__(self, backlog: Backlog, number: int, retries: int) -> None:
        run = stage(dialect=ToyDialect(), on_error=ErrorPolicy(retries=retries))
        self.dispatcher = Dispatcher(run, backlog, number, in_order=False)
        self.ours = ToySession(Side.SUPERVISOR)
        self.theirs = ToySession(Side.WORKER)
        self.to_worker = self.to_us = b""
        self.open: dict[int, bytes] = {}
        self.begun: set[int] = set()
        self.theirs.send(Ready(), 0.0)
        self.to_us += b"".join(self.theirs.data_to_send())


class Interleaving:
    """Several workers and callers; anything may happen at any time."""

    def __init__(self, dice: Random) -> None:
        self.dice = dice
        self.backlog = Backlog()
        self.retries = dice.randint(0, 2)
        count = dice.randint(1, 3)
        self.workers = [Worker(self.backlog, n, self.retries) for n in range(count)]
        self.callers: list[tuple[Submission, list[bytes], list[Outcome]]] = []
        self.now = 0.0

    def submit(self) -> None:
        """Submit messages that can be distinguished."""
        order = self.dice.choice([None, AnyOrder()])
        caller = Submission(lambda: None, order=order)
        count = self.dice.randint(1, 4)
        messages = [b"%d.%d" % (len(self.callers), n) for n in range(count)]
        self.backlog.open(caller)
        caller.feed(messages, self.now)
        caller.close()
        self.callers.append((caller, messages, []))

    def pump(self) -> None:
        """Give a worker one exchange, if there is room."""
        self._give(self._anyone)

    def deliver(self) -> None:
        """Deliver some bytes to a worker."""
        self._to_worker(self._anyone, self.dice.randint(1, 60))

    def answer(self) -> None:
        """Have a worker refuse one of its exchanges, or answer a part of it."""
        worker = self._anyone
        if not worker.open:
            return
        id_ = self.dice.choice(sorted(worker.open))
        message = worker.open[id_]
        if self.dice.random() < 0.5:
            if id_ in worker.begun:
                return
            worker.begun.add(id_)
            worker.theirs.send(Added(id_, [b"first " + message]), self.now)
        else:
            del worker.open[id_]
            worker.theirs.send(Ended.refused(id_, 1, "no"), self.now)
        worker.to_us += b"".join(worker.theirs.data_to_send())

    def answer_several(self) -> None:
        """Have a worker end several of its exchanges at once, in any order."""
        worker = self._anyone
        count = self.dice.randint(0, len(worker.open))
        self._end(worker, self.dice.sample(sorted(worker.open), count))

    def receive(self) -> None:
        """Deliver some bytes from a worker."""
        self._to_us(self._anyone, self.dice.randint(1, 200))

    def cancel(self) -> None:
        """Cancel an exchange that took too long; late outputs belong to no message."""
        worker = self._anyone
        for id_ in worker.dispatcher.expired(self.now, 0.0)[:1]:
            worker.ours.send(Cancelled(id_, 0, "too slow"), self.now)
            worker.to_worker += b"".join(worker.ours.data_to_send())
            attempt = Attempt("t-1", 1, "too slow")
            worker.dispatcher.lose_one(id_, attempt, lambda _: LOST)

    def die(self) -> None:
        """Lose a worker, and put another in its place."""
        index = self.dice.randrange(len(self.workers))
        dispatcher = self.workers[index].dispatcher
        # Only a worker that has read no exchange may count as untouched.
        untouched = self.dice.random() < 0.5 and not self.workers[index].open
        owed = dispatcher.open.count
        died = Attempt("t-1", 1, "died")
        dispatcher.lose(died, lambda _: LOST, owed=owed, untouched=untouched)
        self.workers[index] = Worker(self.backlog, index, self.retries)

    def go_away(self) -> None:
        """Have a caller give up."""
        if self.callers:
            index = self.dice.randrange(len(self.callers))
            self.backlog.drop(self.callers.pop(index)[0])

    ACTS: ClassVar = (
        *(submit, pump, deliver, answer, answer_several, receive),
        *(cancel, die, go_away),
    )

    def pairing_is_right(self) -> None:
        """Check that no outcome comes twice, or belongs to another message."""
        for caller, messages, outcomes in self.callers:
            outcomes += [o for o in caller.collect() if isinstance(o, Outcome)]
            places = [o.start for o in outcomes]
            assert len(set(places)) == len(places)
            for start, run, *_ in outcomes:
                assert run == messages[start : start + len(run)]
            for outcome in outcomes:
                if outcome.error is None:
                    replies = [(b"first " + m, b"last " + m) for m in outcome.messages]
                    assert list(outcome.replies) == replies

    def complete(self) -> None:
        """Answer everything; check that every message has its outcome."""
        for _ in range(1000):
            if all(caller.finished for caller, *_ in self.callers):
                break
            for worker in self.workers:
                self._to_us(worker, 10_000)
                while self._give(worker):
                    pass
                self._to_worker(worker, 10_000)
                self._end(worker, list(worker.open))
            # Suspects wait for a fresh worker.
            if self.backlog.suspects:
                for worker in self.workers:
                    self._to_us(worker, 10_000)
                dispatcher, died = self.workers[0].dispatcher, Attempt("t-1", 1, "died")
                owed = dispatcher.open.count
                dispatcher.lose(died, lambda _: LOST, owed=owed, untouched=False)
                self.workers[0] = Worker(self.backlog, 0, self.retries)
            self.pairing_is_right()
        self.pairing_is_right()
        for caller, messages, outcomes in self.callers:
            assert caller.finished
            assert sum(len(o.messages) for o in outcomes) == len(messages)
            assert caller.in_flight == caller.held == caller.held_bytes == 0

    def _end(self, worker: Worker, ids: list[int]) -> None:
        for id_ in ids:
            message = worker.open.pop(id_)
            rest = () if id_ in worker.begun else (b"first " + message,)
            worker.theirs.send(Ended(id_, [(*rest, b"last " + message)]), self.now)
        worker.to_us += b"".join(worker.theirs.data_to_send())

    @property
    def _anyone(self) -> Worker:
        return self.dice.choice(self.workers)

    def _give(self, worker: Worker) -> bool:
        given = give(worker.dispatcher, worker.ours, self.now)
        worker.to_worker += b"".join(worker.ours.data_to_send())
        return given

    def _to_worker(self, worker: Worker, size: int) -> None:
        data, worker.to_worker = worker.to_worker[:size], worker.to_worker[size:]
        worker.theirs.receive_data(data, self.now)
        for event in worker.theirs.events_received():
            if isinstance(event, Opened):
                worker.open[event.first] = event.messages[0]
            elif isinstance(event, Cancelled):
                worker.open.pop(event.id, None)

    def _to_us(self, worker: Worker, size: int) -> None:
        data, worker.to_us = worker.to_us[:size], worker.to_us[size:]
        worker.ours.receive_data(data, self.now)
        for event in worker.ours.events_received():
            match event:
                case Added(id_, outputs):
                    worker.dispatcher.added(id_, outputs)
                case Ended(id_, _, [_]):
                    refuse(worker.dispatcher, id_, NO)
                case Ended(id_, [group]):
                    end(worker.dispatcher, [(id_, group)], len(data))


@diced(16)
def test_every_message_has_one_outcome_and_never_anothers(dice: Random) -> None:
    """Whatever happens, in any order."""
    made = Interleaving(dice)
    for _ in range(dice.randint(1, 60)):
        dice.choice(Interleaving.ACTS)(made)
        made.pairing_is_right()
    made.complete()


# --- single cases ---------------------------------------------------------------------


def dispatcher(**policies: object) -> tuple[Dispatcher, Backlog]:
    """Return a dispatcher, and its backlog."""
    backlog = Backlog()
    run = replace(stage(dialect=ToyDialect()), **policies)  # type: ignore[arg-type]
    return Dispatcher(run, backlog, in_order=False), backlog


def fed(backlog: Backlog, *messages: bytes) -> Submission:
    """Return a submission of these messages."""
    caller = Submission(lambda: None, order=AnyOrder())
    backlog.open(caller)
    caller.feed(list(messages), 0.0)
    caller.close()
    return caller


def test_refused_exchange_is_opened_again_if_it_may_be() -> None:
    """Under a new id, before waiting messages; the last refusal ends it."""
    d, backlog = dispatcher(on_error=ErrorPolicy(retries_refused=1))
    caller = fed(backlog, b"a", b"b")
    d.next(0.0, 0, 1)
    refuse(d, 1, NO)
    assert d.next(0.0, 0, 1) == Opened(2, [b"a"])
    refuse(d, 2, NO)
    (outcome,) = caller.collect()
    assert isinstance(outcome, Outcome)
    assert (outcome.error, outcome.messages) == (NO, [b"a"])


def test_batch_is_one_exchange() -> None:
    """It waits until it is ripe; its reply is that of its last message."""

    class Batches(ToyDialect):
        shape = Shape.BATCH

    backlog = Backlog()
    policy = BatchPolicy(size=2, seconds=5)
    d = Dispatcher(stage(dialect=Batches(), batch=policy), backlog, in_order=False)
    caller = Submission(lambda: None)
    backlog.open(caller)
    caller.feed([b"a"], 1.0)
    assert d.next(2.0, 0, 1) is None
    assert d.giving.due == 6.0
    caller.feed([b"b"], 2.0)
    assert d.next(2.0, 0, 1) == Opened(1, [b"a", b"b"], each=False)
    end(d, [(1, (b"ab",))], 2)

    (outcome,) = caller.collect()
    assert isinstance(outcome, Outcome)
    assert list(outcome.replies) == [(), (b"ab",)]


def test_deadline_that_has_come_has_come_for_its_exchange() -> None:
    """However sums are rounded: else the timer would ring again at once, forever."""
    d, backlog = dispatcher()
    fed(backlog, b"a")
    d.next(0.1, 0, 1)
    due = 0.1 + 0.7

    assert due - 0.7 < 0.1
    assert d.expired(due, 0.7) == [1]


def test_messages_around_one_that_can_not_be_sent_are_sent() -> None:
    """They have already been taken, and would otherwise wait forever."""

    class Batches(ToyDialect):
        shape = Shape.BATCH

    backlog = Backlog()
    run = stage(dialect=Batches(), batch=BatchPolicy(size=3))
    d = Dispatcher(run, backlog, in_order=False)
    fed(backlog, b"a", b"b", b"c")
    d.next(0.0, 0, 1)
    d.refused(InvalidMessage("is too long", index=1))

    assert d.next(0.0, 0, 1) == Opened(1, [b"a"], each=False)
    assert d.next(0.0, 1, 0) is None
    assert d.next(0.0, 1, 1) == Opened(2, [b"c"], each=False)
