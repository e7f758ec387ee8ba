"""Several exchanges at once, each ended by its id."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from etlstage.errors import (
    Attempt,
    EtlstageError,
    InvalidMessage,
    PayloadTooBig,
    RemoteProtocolError,
    WorkerLost,
)
from etlstage.messages import OVERHEAD, StageKind
from etlstage.protocol.events import (
    Added,
    Cancelled,
    Ended,
    Event,
    Opened,
)
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import BatchPolicy, ErrorPolicy, Order, RestartPolicy, Stage
from etlstage.supervisor.exchange.backlog import Backlog
from etlstage.supervisor.exchange.dispatch import Dispatcher
from etlstage.supervisor.exchange.exchange import Outcome
from etlstage.supervisor.exchange.retry import LastError, Loss
from etlstage.supervisor.exchange.round import Dialogue, Round
from etlstage.supervisor.exchange.submission import Submission
from tests.supervisor.refusing import refusing

CANCELLED = Attempt("t-1", 7, "took too long")
REFUSED = RemoteProtocolError("refused")


class Worker:
    """A dispatcher, and the exchanges that it has opened."""

    def __init__(
        self,
        *messages: bytes,
        retries: int = 0,
        max_reply: int = 1 << 20,
        **settings: object,
    ) -> None:
        self.submission = Submission(lambda: None)
        self.submission.feed(list(messages), 0.0)
        self.backlog = Backlog()
        self.backlog.join(0)
        self.backlog.open(self.submission)
        policy = ErrorPolicy(retries=retries)
        stage = Stage(
            name="t",
            worker=("true",),
            on_error=policy,
            max_reply=max_reply,
            **settings,  # type: ignore[arg-type]
        )
        self.dispatcher = Dispatcher(stage, self.backlog, in_order=False)

    def open(self, now: float = 0.0, room: float = 1) -> Sequence[Event]:
        """Return the events sent, until there is nothing more to send."""
        sent: list[Event] = []
        while event := self.dispatcher.next(now, self.dispatcher.open.count, room):
            sent.append(event)
        return sent

    def suspect(self) -> None:
        """Have another worker be lost with the first message."""
        other = Dispatcher(self.dispatcher._stage, self.backlog, 1, in_order=False)
        other.next(0.0, 0, 1)
        lose(other, lambda _: WorkerLost("x", stage="t"))

    def lose(self, id_: int) -> Loss:
        """Cancel an exchange."""
        return self.dispatcher.lose_one(
            id_, CANCELLED, lambda attempts: WorkerLost(attempts[-1].error, stage="t")
        )

    @property
    def replies(self) -> dict[bytes, object]:
        """The outcome of each message: its outputs, or the error's text."""
        return {
            outcome.messages[0]: str(outcome.error or outcome.replies[0])
            for outcome in self.submission.collect()
            if isinstance(outcome, Outcome)
        }


def in_runs(ends: list[tuple[int, tuple[bytes, ...]]]) -> list[Ended]:
    """Return the ends, with consecutive ids in one event."""
    found: list[Ended] = []
    for id_, group in ends:
        if found and id_ == found[-1].first + len(found[-1].groups):
            found[-1] = found[-1]._replace(groups=[*found[-1].groups, group])
        else:
            found.append(Ended(id_, [group]))
    return found


def end(
    dispatcher: Dispatcher,
    ends: list[tuple[int, tuple[bytes, ...]]],
    reply_size: int,
) -> tuple[int, int]:
    """End exchanges; return the number of messages delivered, and their bytes."""
    messages = size = 0
    for event in in_runs(ends):
        answered = dispatcher.ended(event, reply_size)
        messages, size = messages + answered.messages, size + answered.size
        reply_size = 0
    return messages, size


def refuse(dispatcher: Dispatcher, id_: int, error: EtlstageError) -> tuple[int, int]:
    """Refuse an exchange; return the same as :func:`end`."""
    answered = dispatcher.ended(Ended(id_, [()]), 0, refusing([(0, error)]))
    return answered.messages, answered.size


def lose(dispatcher: Dispatcher, error: LastError) -> Loss:
    """Lose the worker with everything that it has."""
    owed = dispatcher.open.count
    return dispatcher.lose(CANCELLED, error, owed=owed, untouched=False)


def opened(number: int, *messages: bytes) -> Opened:
    """Return the event that opens an exchange for each message."""
    return Opened(number, [*messages])


def test_each_message_is_an_exchange_with_a_number() -> None:
    """As many as there are messages."""
    w = Worker(b"a", b"b")

    assert w.open() == [opened(1, b"a"), opened(2, b"b")]
    assert w.dispatcher.held == 2
    assert w.dispatcher.open.count == 2


def test_what_there_is_room_for_is_opened_at_once() -> None:
    """Consecutive exchanges that end together are one outcome (issue 15)."""
    w = Worker(b"a", b"bb", b"c", b"d", b"e")
    assert w.open(room=4) == [opened(1, b"a", b"bb", b"c", b"d"), opened(5, b"e")]
    w.dispatcher.added(3, [b"C0"])

    assert end(w.dispatcher, [(2, (b"B",)), (3, (b"C1",)), (1, ())], 9) == (3, 4)
    assert end(w.dispatcher, [(4, (b"D",)), (5, (b"E",))], 9) == (2, 2)

    assert w.submission.collect() == [
        Outcome(0, [b"a"], [()], 1),
        Outcome(1, [b"bb", b"c"], [(b"B",), (b"C0", b"C1")], 3, 9),
        Outcome(3, [b"d"], [(b"D",)], 1, 9),
        Outcome(4, [b"e"], [(b"E",)], 1),
    ]
    assert w.submission.held_bytes == w.submission.in_flight == 0


def test_callers_share_the_room() -> None:
    """A caller with much to do does not block the others (issue 15)."""
    w = Worker(b"a", b"b", b"c", b"d")
    other = Submission(lambda: None)
    other.feed([b"1", b"2", b"3"], 0.0)
    w.backlog.open(other)

    taken = []
    for room in (4, 2):
        event = w.dispatcher.next(0.0, 0, room)
        taken.append(event)
    assert taken == [opened(1, b"1", b"2"), opened(3, b"a")]


def test_caller_that_takes_no_replies_is_given_what_it_waits_for() -> None:
    """One message at a time, whatever the room (issue 15)."""
    w = Worker(b"a", b"b", b"c")
    w.submission.max_unread = 0
    w.dispatcher.next(0.0, 0, 1)
    w.dispatcher.ended(Ended(1, [(b"A",)]), 1)
    assert w.open(room=9) == []
    w.submission.collect()
    w.submission.max_unread = -1

    assert w.open(room=9) == [opened(2, b"b")]


@pytest.mark.parametrize("room", [0, 0.5])
def test_nothing_is_opened_without_room(room: float) -> None:
    """The worker's session reports the room."""
    assert Worker(b"a").open(room=room) == []


def test_exchanges_end_in_any_order() -> None:
    """Each reply belongs to the message with its id, and includes earlier outputs."""
    w = Worker(b"a", b"b")
    w.open()

    w.dispatcher.added(1, [b"A0"])
    assert end(w.dispatcher, [(2, (b"B",))], 1) == (1, 1)
    assert end(w.dispatcher, [(1, (b"A1",))], 1) == (1, 1)
    assert w.replies == {b"a": "(b'A0', b'A1')", b"b": "(b'B',)"}
    assert not w.dispatcher.open.count


def test_outputs_that_come_one_by_one_are_a_reply_all_the_same() -> None:
    """The only limit, where a dialect passes outputs on one by one (issue 10)."""
    w = Worker(b"a", max_reply=4 * OVERHEAD)
    w.open()

    for _ in range(4):
        w.dispatcher.added(1, [b""])
    with pytest.raises(PayloadTooBig, match="reply takes more than 224 bytes of"):
        w.dispatcher.added(1, [b""])


def test_end_of_what_is_not_open_means_nothing() -> None:
    """The exchange was cancelled before the worker knew."""
    w = Worker(b"a")
    w.open()

    w.dispatcher.added(9, [b"x"])
    assert end(w.dispatcher, [(9, (b"x",))], 1) == (0, 0)
    assert refuse(w.dispatcher, 9, REFUSED) == (0, 0)
    assert w.dispatcher.held == 1


def test_refusal_is_a_matter_of_one_exchange() -> None:
    """The others continue."""
    w = Worker(b"a", b"b")
    w.open()

    assert refuse(w.dispatcher, 1, REFUSED) == (1, 1)
    assert refuse(w.dispatcher, 1, REFUSED) == (0, 0)
    end(w.dispatcher, [(2, ())], 0)
    assert w.replies == {b"a": "refused", b"b": "()"}


@pytest.mark.parametrize("room", [1, 2])
def test_exchange_that_takes_too_long_is_lost_alone(room: int) -> None:
    """Its age is known; the worker lives on with the others."""
    w = Worker(b"a", b"b")
    w.open(now=5.0, room=room)

    assert w.dispatcher.oldest == 5.0
    assert w.dispatcher.expired(6.9, 2.0) == []
    assert w.dispatcher.expired(7.0, 2.0) == [1, 2]
    assert w.lose(1) == Loss(1, retried=0, failed=1, tries=0)
    assert w.dispatcher.held == 1
    assert w.replies == {b"a": "took too long"}


def test_what_is_not_open_is_not_lost() -> None:
    """Cancelling it is a bug of the caller."""
    with pytest.raises(AssertionError, match="what is not open can't be cancelled"):
        Worker(b"a").lose(1)


@pytest.mark.parametrize("room", [1, 2])
def test_everything_open_is_lost_with_the_worker(room: int) -> None:
    """Each may be the culprit, and is tried alone."""
    w = Worker(b"a", b"b", retries=1)
    w.open(room=room)

    loss = lose(w.dispatcher, lambda _: WorkerLost("x", stage="t"))
    assert loss == Loss(2, retried=2, failed=0, tries=1)
    assert [s.messages for s in w.backlog.suspects] == [[b"a"], [b"b"]]
    assert not w.dispatcher.open.count


def test_streamed_outputs_are_passed_on_at_once() -> None:
    """Before the end of their round; a round that no one wants is cancelled."""
    w = Worker()
    one = Round(lambda: None, b"request", max_unread=100)
    w.backlog.open(one)
    w.open()

    w.dispatcher.added(1, [b"x"])
    assert one.outputs() == [[b"x"]]
    assert not w.dispatcher.stalled
    assert w.dispatcher.cancellations() == []
    one.abandon()
    reason = "the caller has gone"
    assert w.dispatcher.cancellations() == [Cancelled(1, 0, reason)]
    assert w.dispatcher.cancellations() == []


def test_round_that_takes_too_long_is_asked_again() -> None:
    """As often as a worker may be restarted in vain; the worker lives on."""
    w = Worker(
        kind=StageKind.EXTRACT,
        dialect=MarkerDialect(mode=Mode.CYCLIC),
        restart=RestartPolicy(max=1),
    )
    asked = Round(lambda: None, b"request", max_unread=100)
    w.backlog.open(asked)

    assert w.open() == [Opened(1, [b"request"])]
    assert w.lose(1) == Loss(1, retried=1, failed=0, tries=0)
    assert w.open() == [Opened(2, [b"request"])]
    assert w.lose(2) == Loss(1, retried=0, failed=1, tries=0)
    assert str(asked.error) == "took too long"


def test_who_can_not_try_a_suspect_goes_on() -> None:
    """A fresh worker will try it."""
    w = Worker(b"a", b"b", b"c", retries=1)
    w.dispatcher.next(0.0, 0, 1)
    w.suspect()

    assert w.dispatcher.next(0.0, 1, 1) == opened(2, b"c")


def test_message_that_took_too_long_is_opened_beside_others() -> None:
    """The worker lives on, so no fresh one has to come for it (issue 15)."""
    w = Worker(b"a", b"b", b"c", retries=1)
    w.open(room=2)
    w.lose(1)

    assert not w.backlog.suspects
    assert w.dispatcher.next(0.0, 1, 1) == opened(4, b"a")


def test_message_that_can_not_be_sent_is_taken_back() -> None:
    """None of its bytes were sent, so there was no exchange."""
    w = Worker(b"a")
    w.open()

    w.dispatcher.refused(InvalidMessage("contains a marker", index=0))
    assert not w.dispatcher.open.count
    (text,) = w.replies.values()
    assert text == "stage t: contains a marker (message 1 of its input)"


def test_messages_around_one_that_can_not_be_sent_are_opened() -> None:
    """As many as there is room for, under the same ids (issue 15)."""
    w = Worker(b"a", b"b", b"c", b"d", b"e")
    assert w.dispatcher.next(0.0, 0, 5) == opened(1, b"a", b"b", b"c", b"d", b"e")

    assert w.dispatcher.giving.filled
    w.dispatcher.refused(InvalidMessage("is too long", index=1))
    assert not w.dispatcher.giving.filled

    assert not w.dispatcher.open.count
    assert w.dispatcher.next(0.0, 0, 2) == opened(1, b"a")
    assert w.dispatcher.next(0.0, 1, 2) == opened(2, b"c", b"d")
    assert w.dispatcher.next(0.0, 3, 2) == opened(4, b"e")
    assert w.dispatcher.next(0.0, 4, 2) is None
    end(w.dispatcher, [(1, ())], 0)
    culprit = "stage t: is too long (message 2 of its input)"
    assert w.replies == {b"a": "()", b"b": culprit}


def lost(attempts: tuple[Attempt, ...]) -> WorkerLost:
    """Return an error with the text of the last attempt."""
    return WorkerLost(attempts[-1].error, stage="t")


def dialogue(w: Worker, event: str = "") -> Dialogue:
    """Return a dialogue that waits for that worker."""
    opened = Dialogue(lambda: None, event, max_waiting=100)
    w.backlog.open(opened)
    return opened


def test_dialogue_is_opened_before_anything_is_sent() -> None:
    """Its caller's messages are sent in turn with those of others, and then the end."""
    w = Worker()
    one, other = dialogue(w, "chat"), dialogue(w)
    assert not w.dispatcher.dialogues
    assert w.open() == [
        Opened(1, (), each=False, ended=False, event="chat"),
        Opened(2, (), each=False, ended=False),
    ]
    assert (
        len(w.dispatcher.dialogues),
        w.dispatcher.held,
        w.dispatcher.next_added(),
    ) == (
        2,
        2,
        None,
    )

    for caller in (one, other):
        caller.write(b"a")
    assert w.dispatcher.next_added() == Added(1, [b"a"])
    one.write(b"b")
    assert w.dispatcher.next_added() == Added(2, [b"a"])
    one.end()
    assert w.dispatcher.next_added() == Added(1, [b"b"], ended=True)
    other.end()
    assert w.dispatcher.next_added() == Added(2, [], ended=True)
    assert w.dispatcher.next_added() is None

    w.dispatcher.ended(Ended(1, [(b"x",), ()]), 0)
    assert (one.finished, one.outputs()) == (True, [[b"x"]])
    assert not w.dispatcher.dialogues


def test_dialogue_of_a_lost_worker_fails_and_messages_are_suspects() -> None:
    """Any of them may be at fault, so the lone message is tried again, too."""
    w = Worker(b"m")
    said, silent = dialogue(w), dialogue(w)
    assert len(w.open()) == 3
    said.write(b"x")
    w.dispatcher.next_added()

    loss = lose(w.dispatcher, lost)

    assert loss == Loss(3, retried=2, failed=1, tries=1)
    assert str(said.error) == "took too long"
    assert (silent.error, silent.waiting) == (None, 1)
    assert [s.messages for s in w.backlog.suspects] == [[b"m"]]
    assert not w.dispatcher.dialogues


def test_dialogue_that_takes_too_long_is_not_tried_again() -> None:
    """Its caller is notified, and can distinguish that from a loss."""
    w = Worker()
    slow = dialogue(w)
    w.open()
    assert w.lose(1) == Loss(1, retried=0, failed=1)
    assert (slow.expired, str(slow.error)) == (True, "took too long")


def test_dialogue_that_no_one_wants_is_cancelled_with_its_reason() -> None:
    """And its caller's messages are no longer sent."""
    w = Worker()
    left = dialogue(w)
    w.open()
    left.write(b"x")
    left.cancel_reason = 7, "client gone"
    w.backlog.drop(left)
    assert w.dispatcher.cancellations() == [Cancelled(1, 7, "client gone")]
    assert w.dispatcher.next_added() is None


@pytest.mark.parametrize("room", [1, 2])
def test_exchanges_have_more_time_when_nothing_was_read(room: int) -> None:
    """But no exchange is dated into the future."""
    w = Worker(b"a", b"b")
    w.open(0.0, room=room)
    w.dispatcher.postpone(5.0, now=3.0)
    assert w.dispatcher.oldest == 3.0
    w.dispatcher.postpone(5.0, now=30.0)
    assert w.dispatcher.oldest == 8.0


def test_one_exchange_of_each_lane_is_open() -> None:
    """Messages with the same key are processed one after the other (issue 22)."""
    worker = Worker(b"a", b"b", order=Order.KEY)
    second = Submission(lambda: None, keyed=True)
    second.feed([b"c", b"d"], 0.0)
    worker.submission.keyed = True
    worker.backlog.open(second)

    opened = [[*event.messages] for event in worker.open(room=4)]  # type: ignore[union-attr,misc]
    assert sorted(opened) == [[b"a"], [b"c"]]

    worker.dispatcher.ended(Ended(1, [(), ()]), 0)
    opened = [[*event.messages] for event in worker.open(room=4)]  # type: ignore[union-attr,misc]
    assert sorted(opened) == [[b"b"], [b"d"]]


def test_one_of_a_run_may_be_refused() -> None:
    """The others are answered."""
    worker = Worker(b"a", b"b", b"c")
    worker.open(room=3)

    refused = refusing([(1, REFUSED)])
    worker.dispatcher.ended(Ended(1, [(b"A",), (), (b"C",)]), 0, refused)

    (outcome,) = worker.submission.collect()
    assert isinstance(outcome, Outcome)
    assert list(outcome.errors) == [None, REFUSED, None]
    assert list(outcome.replies) == [(b"A",), (), (b"C",)]


def test_messages_of_a_batch_are_held_until_it_ends() -> None:
    """Each message counts, though a batch is one exchange."""
    dialect = MarkerDialect(mode=Mode.BATCH_SUPERVISOR)
    worker = Worker(b"a", b"b", dialect=dialect, batch=BatchPolicy(size=2))
    worker.open(room=1)
    assert (worker.dispatcher.held, worker.dispatcher.open.count) == (2, 1)

    end(worker.dispatcher, [(1, ())], 0)

    assert (worker.dispatcher.held, worker.dispatcher.open.count) == (0, 0)
