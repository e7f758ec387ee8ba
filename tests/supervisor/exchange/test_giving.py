"""What a worker is given next: batches when they are ripe, and messages on request."""

from __future__ import annotations

import pytest

from etlstage.errors import Attempt, EtlstageError
from etlstage.protocol.events import Added, Ended, Opened
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import BatchPolicy, Stage
from etlstage.supervisor.exchange.backlog import Backlog
from etlstage.supervisor.exchange.dispatch import Dispatcher
from etlstage.supervisor.exchange.giving import ripe_at
from etlstage.supervisor.exchange.submission import Submission


def filled(*messages: bytes, at: float = 100.0) -> Submission:
    """Return a submission with waiting messages."""
    submission = Submission(lambda: None)
    submission.feed(list(messages), at)
    return submission


# --- when a batch is ripe -------------------------------------------------------------


def test_batch_waits_for_the_time_of_its_first_message() -> None:
    """Three seconds from when it was fed."""
    assert ripe_at(filled(b"1", b"2"), BatchPolicy(seconds=3)) == 103.0


@pytest.mark.parametrize(
    "policy", [BatchPolicy(size=2), BatchPolicy(bytes=4), BatchPolicy(size=1)]
)
def test_full_batch_is_ripe(policy: BatchPolicy) -> None:
    """By count or by bytes, exactly at the limit."""
    assert ripe_at(filled(b"12", b"34"), policy) == 0.0


def test_batch_below_its_bounds_is_not_ripe() -> None:
    """It is one message, or one byte, short."""
    assert ripe_at(filled(b"12", b"34"), BatchPolicy(size=3, bytes=5)) == 101.0


def test_last_batch_is_ripe() -> None:
    """No more messages will come."""
    submission = filled(b"1")
    submission.close()

    assert ripe_at(submission, BatchPolicy(seconds=3600)) == 0.0


# --- a worker that asks -------------------------------------------------------------


class Asking:
    """A worker that asks for each message, and the messages that wait for it."""

    def __init__(self, *messages: bytes, size: int = 3, **dialect: bool) -> None:
        self.stage = Stage(
            name="t",
            worker=("true",),
            dialect=MarkerDialect(mode=Mode.BATCH_WORKER, **dialect),  # type: ignore[arg-type]
            batch=BatchPolicy(size=size),
            window=9,
        )
        self.caller = filled(*messages)
        self.backlog = Backlog()
        self.backlog.open(self.caller)
        self.dispatcher = Dispatcher(self.stage, self.backlog)

    def suspect(self, count: int) -> None:
        """Have the worker try a lost exchange, as no other worker may be started."""
        self.backlog.suspects.append(self.caller.take(count, 99))
        self.backlog.orphaned = True

    def ask(self, owed: int = 1) -> list[bytes] | None:
        """Return the next message; an empty list ends its batch, None: nothing."""
        event = self.dispatcher.next(100.0, owed, room=1)
        assert event is None or isinstance(event, Opened | Added)
        return None if event is None else list(event.messages)

    def answer(self) -> None:
        """End the worker's current batch."""
        front = self.dispatcher.open.ranges[0]
        self.dispatcher.ended(Ended(front.first, [()]), 0)


def test_batch_that_is_tried_alone_is_given_one_by_one() -> None:
    """With each request one message, and nothing after the last."""
    worker = Asking(b"1", b"2", b"3", size=9)
    worker.suspect(2)

    assert [worker.ask(owed) for owed in (0, 1, 1)] == [[b"1"], [b"2"], []]


def test_batch_that_is_lost_again_is_lost_whole() -> None:
    """Including messages that its worker had not asked for yet."""
    worker = Asking(b"1", b"2", b"3", size=9)
    worker.suspect(3)
    worker.ask(owed=0)
    died = Attempt("t-1", 7, "died")
    worker.dispatcher.lose(died, lambda _: EtlstageError(), owed=1, untouched=False)

    parts = [list(part.messages) for part in worker.backlog.suspects]
    assert sorted(message for part in parts for message in part) == [b"1", b"2", b"3"]


def test_rest_of_a_batch_that_was_answered_early_is_given_back() -> None:
    """The worker is lost before its reply is proven; the rest was never sent."""
    worker = Asking(b"1", b"2", b"3", size=9)
    worker.suspect(3)
    worker.ask(owed=0)
    died = Attempt("t-1", 7, "died")
    worker.dispatcher.lose(died, lambda _: EtlstageError(), owed=0, untouched=False)

    fresh = Dispatcher(worker.stage, worker.backlog)
    opened = [fresh.next(100.0, owed, room=1) for owed in (0, 1, 1)]
    assert [list(e.messages) for e in opened if e is not None] == [
        [b"1"],
        [b"2"],
        [b"3"],
    ]


def test_who_can_not_try_a_suspect_goes_on() -> None:
    """A fresh worker will try it."""
    worker = Asking(b"1", b"2", b"3")
    worker.ask(owed=0)
    worker.suspect(1)
    worker.backlog.orphaned = False
    assert worker.ask() == []
    worker.answer()

    assert worker.ask(owed=0) == [b"3"]


def test_worker_that_is_to_go_opens_no_batch() -> None:
    """It completes its current batch."""
    worker = Asking(b"1", b"2", b"3")
    worker.ask(owed=0)
    worker.dispatcher.giving.retiring = True
    assert worker.ask() == []
    worker.answer()

    assert worker.ask(owed=0) is None
