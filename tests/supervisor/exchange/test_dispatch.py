"""
Dispatchers against the worker's side of the protocol, both in memory.

The worker here answers in any mode, takes bytes in pieces of any size and stops now and
then; time is a number. ``pump`` stands for the supervisor around the dispatcher.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etlstage.errors import Attempt, EtlstageError, InvalidMessage, WorkerRefusal
from etlstage.messages import StageKind
from etlstage.protocol.base import DialectSession, Limits, Paired, Side
from etlstage.protocol.events import (
    Added,
    Ended,
    Failed,
    Opened,
    Wanted,
)
from etlstage.protocol.kcl.settings import KclDialect
from etlstage.protocol.marker import MarkerProtocol, Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import BatchPolicy, ErrorPolicy, ReplyContract, Stage
from etlstage.stage.contract import Checker
from etlstage.supervisor.exchange.backlog import Backlog
from etlstage.supervisor.exchange.dispatch import Dispatcher
from etlstage.supervisor.exchange.exchange import Outcome, Refusals
from etlstage.supervisor.exchange.submission import Submission
from tests.staged import staged
from tests.supervisor.refusing import refusing

MODES = (Mode.SINGLE, Mode.BATCH_SUPERVISOR, Mode.BATCH_WORKER)
LOST = EtlstageError("lost")


def refusal() -> WorkerRefusal:
    """Return the error of a message that a worker rejected."""
    error = WorkerRefusal("no", stage="t", code=0, reason="no")
    error.attempts = (Attempt("t-1", 1, "no"),)
    return error


def stage(mode: Mode = Mode.SINGLE, **settings: object) -> Stage:
    """Return a stage that is never started."""
    dialect = settings.pop("dialect", MarkerDialect(mode=mode))
    return staged(("true",), dialect=dialect, **settings)


@dataclass
class Peer:
    """A worker in memory; answers each exchange with its messages, joined by ``+``."""

    stage: Stage
    size: int = 3
    """Number of messages that it wants in a batch that it fills."""
    protocol: MarkerProtocol = field(init=False)
    batches: list[list[bytes]] = field(default_factory=list)
    refusals: Counter[bytes] = field(default_factory=Counter)
    """How often it refused a message on its own; a ``maybe`` is refused once only."""
    answered: int = 0
    _held: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert isinstance(self.stage.dialect, MarkerDialect)
        self.protocol = self.stage.dialect.open(Side.WORKER, Limits())

    def take(self, data: bytes) -> bytes:
        """Return the worker's answer to some bytes."""
        self.protocol.receive_data(data)
        for event in self.protocol.events_received():
            match event:
                case Opened(_, messages, each, ended):
                    for message in messages:
                        self._take_message(message)
                    if ended and not each:
                        self._answer()
                case Added(_, messages, ended):
                    for message in messages:
                        self._take_message(message)
                    if ended:
                        self._answer()
                case Failed(error):
                    raise AssertionError(str(error))
        return b"".join(self.protocol.data_to_send())

    def _take_message(self, message: bytes) -> None:
        self._held.append(message)
        mode = self.protocol.mode
        if mode is Mode.SINGLE:
            self._answer()
        elif mode is Mode.BATCH_WORKER:
            full = len(self._held) == self.size
            assert isinstance(self.stage.dialect, MarkerDialect)
            if not full or self.stage.dialect.bnc_after_last:
                self.protocol.send(Wanted())
            if full:
                self._answer()

    def _answer(self) -> None:
        self.answered += 1
        if any(self._refuses(message) for message in self._held):
            if len(self._held) == 1:
                self.refusals.update(self._held)
            self._held = []
            self.protocol.send(Ended.refused(self.answered, 0, "no"))
            return
        self.batches.append(self._held)
        reply = b"+".join(self._held)
        # Some get no output, some one, some two.
        group = (reply,) * (len(reply) % 3)
        self._held = []
        self.protocol.send(Ended(self.answered, [group]))

    def _refuses(self, message: bytes) -> bool:
        return message.startswith(b"no") or (
            message.startswith(b"maybe") and not self.refusals[message]
        )


def give(dispatcher: Dispatcher, session: DialectSession, now: float) -> bool:
    """Give the session the next event; return whether there was one."""
    idle = dispatcher.giving.idle
    event = dispatcher.next(now, session.owed, session.room)
    if event is None:
        return False
    assert not idle, "there was nothing to give"
    try:
        session.send(event, now)
    except InvalidMessage as error:
        dispatcher.refused(error)
    return True


class Line:
    """
    A dispatcher, its session, and a peer, with the bytes in between.

    Received replies end at once or, with ``blocks``, once their block is proven: the
    peer reads everything that is written, and writes nothing unsolicited.
    """

    def __init__(self, run: Stage, *, size: int = 3, blocks: bool = False) -> None:
        self.backlog = Backlog()
        life = self.backlog.life if blocks else None
        self.protocol = run.dialect.open(
            Side.SUPERVISOR,
            Limits(),
            batch=run.batch.size,
            window=run.window,
            life=life,
        )
        self.dispatcher = Dispatcher(run, self.backlog)
        self.peer = Peer(run, size)
        self.to_worker = bytearray()
        self.to_us = bytearray()
        self.most_owed = 0

    def submission(self) -> Submission:
        """Open a submission."""
        submission = Submission(lambda: None)
        self.backlog.open(submission)
        return submission

    def give(self, now: float) -> bool:
        """Give the session the next event for the worker."""
        return give(self.dispatcher, self.protocol, now)

    def pump(self, now: float = 0.0) -> None:
        """Give the worker everything that it may have."""
        while self.give(now):
            self.to_worker += b"".join(self.protocol.data_to_send())
            self.most_owed = max(self.most_owed, self.protocol.owed)

    def move(self, size: int, now: float = 0.0) -> bool:
        """Move up to ``size`` bytes each way; return whether there were any."""
        data, self.to_worker = self.to_worker[:size], self.to_worker[size:]
        self.to_us += self.peer.take(bytes(data))
        reply, self.to_us = self.to_us[:size], self.to_us[size:]
        self.protocol.receive_data(bytes(reply), now)
        self._take(len(reply))
        self.pump(now)
        self._prove(now)
        return bool(data or reply or self.to_us or self.to_worker)

    def answer(
        self, *groups: tuple[bytes, ...], refused: Refusals | None = None
    ) -> int:
        """End the oldest exchanges; return their number of messages."""
        front = self.dispatcher.open.ranges[0]
        ended = Ended(front.first, list(groups))
        return self.dispatcher.ended(ended, 0, refused).messages

    def _take(self, size: int) -> None:
        for event in self.protocol.events_received():
            assert isinstance(event, Ended), event
            places = [refusal.place for refusal in event.refusals]
            refused = refusing((place, refusal()) for place in places)
            self.dispatcher.ended(event, size + event.overhead, refused)
            size = 0

    def _prove(self, now: float) -> None:
        """Report how the worker's input drains, until that has no more effect."""
        session, at = self.protocol, now
        while isinstance(session, Paired) and session.wants_unread:
            if session.input_unread(len(self.to_worker), at):
                session.output_dry(at)
            self.to_worker += b"".join(session.data_to_send())
            if self.to_us:
                return
            self._take(0)
            self.pump(now)
            if self.to_worker:
                return
            at += 1.0


def outcome(
    answers: Iterable[object],
) -> Iterator[tuple[bytes, tuple[bytes, ...], bool]]:
    """Yield each message, its outputs, and whether it failed."""
    for answer in answers:
        assert isinstance(answer, Outcome)
        rows = zip(answer.messages, answer.replies, answer.errors, strict=True)
        for message, group, error in rows:
            yield message, group, error is not None


def policies() -> st.SearchStrategy[BatchPolicy]:
    """Draw batch policies that suit a worker whose batches have three messages."""
    return st.builds(
        BatchPolicy,
        size=st.integers(1, 3),
        bytes=st.integers(1, 30),
    )


message = st.one_of(
    st.sampled_from([b"", b"a", b"bc", b"def"]),
    st.sampled_from([b"ba\nd", b"\0", b"\x17bad", b"bad\x05", b"no"]),
)


def fails(message: bytes) -> bool:
    """Return whether a message can't be sent, or is refused."""
    return message == b"no" or any(c in message for c in b"\n\0\x17\x05")


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@settings(deadline=None, max_examples=150)
@pytest.mark.no_cover
@given(data=st.data())
def test_every_message_is_answered_in_order(mode: Mode, data: st.DataObject) -> None:
    """For any chunks, callers, bad messages, window and policy."""
    policy = data.draw(policies())
    dialect = MarkerDialect(mode=mode, eob_then_eom=data.draw(st.booleans()))
    window = data.draw(st.none() | st.integers(1, 5))
    run = stage(dialect=dialect, batch=policy, window=window)
    line = Line(run, blocks=data.draw(st.booleans()))
    callers = [line.submission() for _ in range(data.draw(st.integers(1, 3)))]
    fed: list[list[bytes]] = [[] for _ in callers]
    answers: list[list[object]] = [[] for _ in callers]
    now = 0.0
    for _ in range(data.draw(st.integers(0, 8))):
        index = data.draw(st.integers(0, len(callers) - 1))
        messages = data.draw(st.lists(message, max_size=5))
        callers[index].feed(messages, now)
        fed[index] += messages
        line.pump(now)
        for size in data.draw(st.lists(st.integers(1, 9), max_size=4)):
            line.move(size, now)
        now += data.draw(st.sampled_from([0.0, 0.4, 2.0]))
    for caller in callers:
        caller.close()
    line.pump(now)
    while line.move(data.draw(st.integers(1, 9)), now):
        pass

    for index, caller in enumerate(callers):
        answers[index] += caller.collect()
        assert caller.finished
        assert (caller.held_bytes, caller.waiting, caller.waiting_bytes) == (0, 0, 0)
        seen = list(outcome(answers[index]))
        assert [m for m, _, _ in seen] == fed[index]
        assert [failed for _, _, failed in seen] == list(map(fails, fed[index]))
    assert line.dispatcher.held == line.protocol.owed == 0
    if window is not None:
        assert line.most_owed <= window
    if mode.batches:
        # Nothing was answered twice, and each batch kept within the policy.
        sent = [m for batch in line.peer.batches for m in batch]
        good = [m for run in fed for m in run if not fails(m)]
        assert sorted(sent) == sorted(good)
        assert all(len(batch) <= policy.size for batch in line.peer.batches)
        assert all(
            len(batch) == 1 or sum(map(len, batch)) <= policy.bytes
            for batch in line.peer.batches
        )


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@settings(deadline=None, max_examples=100)
@pytest.mark.no_cover
@given(data=st.data())
def test_what_a_dead_worker_held_is_given_back_whole(
    mode: Mode, data: st.DataObject
) -> None:
    """The worker dies at any byte; each message has one outcome."""
    policy = data.draw(policies())
    dialect = MarkerDialect(mode=mode, eob_then_eom=data.draw(st.booleans()))
    line = Line(
        stage(dialect=dialect, batch=policy, window=data.draw(st.integers(1, 6)))
    )
    caller = line.submission()
    messages = data.draw(st.lists(st.sampled_from([b"", b"a", b"bcd"]), min_size=1))
    caller.feed(messages, 0.0)
    caller.close()
    line.pump()
    for size in data.draw(st.lists(st.integers(1, 9), max_size=9)):
        line.move(size)
    held = line.dispatcher.held
    assert line.dispatcher.fail_all(LOST, line.protocol.owed) == held
    assert line.dispatcher.held == 0
    line.backlog.fail(LOST)
    answers = caller.collect()

    assert caller.finished
    assert caller.held_bytes == 0
    assert [m for m, _, _ in outcome(answers)] == messages
    failed = [a for a in answers if isinstance(a, Outcome) and a.error is not None]
    assert sum(len(a.messages) for a in failed) >= held
    assert {a.error for a in failed} <= {LOST}


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@settings(deadline=None, max_examples=100)
@pytest.mark.no_cover
@given(data=st.data())
def test_refused_messages_are_tried_as_often_as_they_may_be(
    mode: Mode, data: st.DataObject
) -> None:
    """One by one, while the others of their batches are answered, within the window."""
    drawn = data.draw(st.lists(st.sampled_from([b"a", b"no", b"maybe"]), max_size=12))
    messages = [b"%s %d" % (word, n) for n, word in enumerate(drawn)]
    retries = data.draw(st.integers(0, 2))
    window = data.draw(st.integers(1, 4))
    run = stage(
        mode,
        batch=data.draw(policies()),
        window=window,
        on_error=ErrorPolicy(retries_refused=retries),
    )
    line = Line(run)
    caller = line.submission()
    caller.feed(messages, 0.0)
    caller.close()
    line.pump()
    while line.move(data.draw(st.integers(1, 9))):
        pass

    said = list(outcome(caller.collect()))
    assert [m for m, _, _ in said] == messages
    for message, _, failed in said:
        word = message.split()[0]
        assert failed == (word == b"no" or (word == b"maybe" and not retries))
        wanted = {b"no": 1 + retries, b"maybe": 1, b"a": 0}[word]
        assert line.peer.refusals[message] == wanted
    assert line.most_owed <= window


def test_error_of_a_refused_message_shows_every_attempt() -> None:
    """Including those in batches."""
    line = Line(stage(Mode.BATCH_SUPERVISOR, batch=BatchPolicy(size=3)))
    caller = line.submission()
    caller.feed([b"1", b"no", b"3"], 0.0)
    line.pump()
    while line.move(100):
        pass
    _, refused, _ = caller.collect()

    assert isinstance(refused, Outcome)
    assert isinstance(refused.error, WorkerRefusal)
    assert len(refused.error.attempts) == 3  # in batches of three and of two, and alone
    # A refused batch may be processed in part; a message refused alone is not.
    assert line.backlog.unknown_outcomes == 3 + 2


def test_worker_may_refuse_a_batch_before_it_has_all_of_it() -> None:
    """Messages that it did not ask for were not refused."""
    backlog = Backlog()
    caller = Submission(lambda: None)
    backlog.open(caller)
    caller.feed([b"no", b"b", b"c"], 0.0)
    backlog.suspects.append(caller.take(3, 99))
    dispatcher = Dispatcher(stage(Mode.BATCH_WORKER), backlog)
    given = Opened(1, [b"no"], each=False, ended=False)
    assert dispatcher.next(0.0, 0, 1) == given
    refused = refusal()
    answered = dispatcher.ended(Ended(1, [()]), 0, refusing([(0, refused)]))
    dispatcher.next(0.0, 0, 0)
    assert (answered.messages, answered.size) == (1, 2)
    assert caller.waiting == 2
    (outcome,) = caller.collect()
    assert isinstance(outcome, Outcome)
    assert (outcome.messages, outcome.error) == ([b"no"], refused)


def test_refusals_stay_among_the_replies_that_they_came_with() -> None:
    """Consecutive replies have one outcome, whichever were refused."""
    line = Line(stage(window=9))
    caller = line.submission()
    caller.feed([b"a", b"b", b"c", b"d"], 0.0)
    line.pump()
    first, last = refusal(), refusal()
    groups: list[tuple[bytes, ...]] = [(), (b"B",), (b"C",), ()]
    refused = refusing([(0, first), (3, last)])
    assert line.answer(*groups, refused=refused) == 4
    (outcome,) = [x for x in caller.collect() if isinstance(x, Outcome)]
    assert list(outcome.errors) == [first, None, None, last]
    assert caller.held_bytes == 0


def test_refusals_that_go_with_others_are_shared_out() -> None:
    """Like replies: each caller gets its own, numbered within its own messages."""
    line = Line(stage(window=9))
    callers = [line.submission() for _ in range(3)]
    for caller in callers:
        caller.feed([b"a", b"b"], 0.0)
    line.pump()
    refused = refusing((n, refusal()) for n in (1, 2, 5))
    line.answer(*[()] * 6, refused=refused)
    failed = [[f for _, _, f in outcome(caller.collect())] for caller in callers]
    assert sorted(failed) == [[False, True], [False, True], [True, False]]


def test_refusals_are_answers_to_the_window() -> None:
    """A worker that refuses everything is not fed in lock-step."""
    line = Line(stage())
    line.submission().feed([b"no"] * 100, 0.0)
    line.pump()
    while line.move(1000):
        pass
    assert line.most_owed > 10


@pytest.mark.parametrize("mode", [Mode.SINGLE, Mode.BATCH_SUPERVISOR])
def test_refused_message_of_a_caller_that_is_gone(mode: Mode) -> None:
    """Nothing of it is tried again, as no one awaits the outcome (issue 22)."""
    policies = {"on_error": ErrorPolicy(retries_refused=3), "window": 9}
    line = Line(stage(mode, batch=BatchPolicy(size=2), **policies))
    caller = line.submission()
    caller.feed([b"no", b"no"], 0.0)
    caller.close()
    line.give(0.0)
    line.backlog.drop(caller)
    many = 2 if mode is Mode.SINGLE else 1
    no = refusing((n, refusal()) for n in range(many))
    assert line.answer(*[()] * many, refused=no) == 2
    assert not line.dispatcher.giving.retried
    assert not line.give(0.0)


def test_caller_that_goes_before_its_refused_message_is_tried_again() -> None:
    """The message of the next caller is given instead (issue 22)."""
    line = Line(stage(on_error=ErrorPolicy(retries_refused=3), window=1))
    gone, caller = line.submission(), line.submission()
    gone.feed([b"no"], 0.0)
    line.give(0.0)
    line.answer((), refused=refusing([(0, refusal())]))
    line.backlog.drop(gone)
    assert line.dispatcher.next(0.0, 0, 1) is None
    caller.feed([b"b"], 0.0)
    assert line.dispatcher.next(0.0, 0, 1) == Opened(2, [b"b"])


def test_what_is_to_be_tried_again_survives_the_worker() -> None:
    """Another worker gets it, with its history, however long it is."""
    run = stage(on_error=ErrorPolicy(retries_refused=1), window=1)
    line = Line(run)
    caller = line.submission()
    long = b"no" * 500_000
    caller.feed([long], 0.0)
    line.give(0.0)
    refused = refusal()
    line.answer((), refused=refusing([(0, refused)]))
    died = Attempt("t-1", 1, "died")
    line.dispatcher.lose(died, lambda _: LOST, owed=0, untouched=False)
    assert caller.waiting == 1
    other = Dispatcher(run, line.backlog, 1)
    assert other.next(0.0, 0, 1) is not None
    other.ended(Ended(1, [()]), 0, refusing([(0, refused)]))
    (outcome,) = caller.collect()
    assert isinstance(outcome, Outcome)
    assert outcome.error is refused


def test_the_kth_reply_answers_the_kth_message() -> None:
    """Replies that arrive together are shared out; sizes are accounted for."""
    line = Line(stage(window=100))
    first, second = line.submission(), line.submission()
    first.feed([b"a", b"b"], 0.0)
    second.feed([b"c"], 0.0)
    line.pump()
    line.answer((b"1",), (), (b"3", b"4"))

    # The caller that came last was served first.
    replies = [group for _, group, _ in outcome(second.collect())]
    assert replies == [(b"1",)]
    replies = [group for _, group, _ in outcome(first.collect())]
    assert replies == [(), (b"3", b"4")]
    assert first.held_bytes == second.held_bytes == 0


def test_slice_bounds_what_is_taken_at_once() -> None:
    """A worker gets up to 640 KiB at a time, or one message that is longer."""
    line = Line(stage(window=100))
    caller = line.submission()
    caller.feed([b"x" * 200_000] * 10, 0.0)

    assert line.give(0.0)
    assert line.dispatcher.held == 2
    assert not line.dispatcher.giving.filled  # there is room for more
    caller.feed([b"y" * 1_000_000], 0.0)
    line.pump()
    assert line.dispatcher.held == 11


def test_who_has_nothing_to_give_need_not_be_asked() -> None:
    """Except for batches, which end by time; a refused run is given anew (issue 13)."""
    line = Line(stage(window=1))
    assert line.dispatcher.giving.idle
    line.submission().feed([b"good", b"bad\0", b"good"], 0.0)
    assert not line.dispatcher.giving.idle
    line.pump()
    while line.move(100):
        pass
    assert line.dispatcher.giving.idle
    assert not Line(stage(Mode.BATCH_SUPERVISOR)).dispatcher.giving.idle
    assert not Line(stage(Mode.BATCH_WORKER)).dispatcher.giving.idle


def test_feeder_that_waits_looks_again_as_messages_are_given() -> None:
    """In a dialect with commits nothing has ended by then, but there is room."""
    looks: list[bool] = []
    backlog, caller = Backlog(), Submission(lambda: looks.append(True))
    backlog.open(caller)
    run = staged(("true",), kind=StageKind.LOAD, dialect=KclDialect())
    dispatcher = Dispatcher(run, backlog)
    caller.feed([b"a", b"b"], 0.0)
    looks.clear()

    dispatcher.next(0.0, 0, 1)
    assert looks == []
    caller.feeder_waits = True
    dispatcher.next(0.0, 1, 1)
    assert (looks, caller.feeder_waits) == ([True], False)


def test_batch_waits_until_it_is_ripe() -> None:
    """``due`` is the time to ask again."""
    policy = BatchPolicy(size=2, seconds=5)
    line = Line(stage(Mode.BATCH_SUPERVISOR, batch=policy))
    caller = line.submission()
    caller.feed([b"1"], 100.0)
    assert not line.give(101.0)
    assert line.dispatcher.giving.due == 105.0
    assert line.give(105.0)

    assert line.protocol.data_to_send() == [b"1\n\x17"]


def test_batch_of_another_caller_may_be_ripe_first() -> None:
    """``due`` is the earliest time of all callers."""
    policy = BatchPolicy(size=2, seconds=5)
    line = Line(stage(Mode.BATCH_SUPERVISOR, batch=policy, window=1))
    for at in 103.0, 101.0, 102.0:
        line.submission().feed([b"1"], at)
    assert not line.give(104.0)

    assert line.dispatcher.giving.due == 106.0


def test_worker_that_asks_gets_eob_when_time_is_over() -> None:
    """The first message of its batch waits no longer."""
    policy = BatchPolicy(size=9, seconds=5)
    line = Line(stage(Mode.BATCH_WORKER, batch=policy), size=9)
    line.submission().feed([b"1"], 100.0)
    line.pump(100.0)
    line.move(99, 101.0)
    assert line.dispatcher.giving.due == 105.0
    assert not line.give(104.0)
    assert line.give(105.0)

    assert line.protocol.data_to_send() == [b"\x17"]


def test_worker_that_asks_gets_nothing_of_a_caller_that_is_gone() -> None:
    """Its batch is closed instead."""
    line = Line(stage(Mode.BATCH_WORKER, batch=BatchPolicy(size=9)), size=9)
    caller = line.submission()
    caller.feed([b"1", b"2", b"3"], 0.0)
    line.pump()
    line.backlog.drop(caller)
    while line.move(99):
        pass

    assert line.peer.batches == [[b"1"]]


def test_worker_that_asks_after_its_last_message_gets_nothing() -> None:
    """As the protocol page has it, that BNC asks for nothing."""
    dialect = MarkerDialect(mode=Mode.BATCH_WORKER, bnc_after_last=True)
    line = Line(stage(dialect=dialect, batch=BatchPolicy(size=2)), size=2)
    caller = line.submission()
    caller.feed([b"1", b"2", b"3"], 0.0)
    caller.close()
    line.pump()
    while line.move(1):
        pass

    assert line.peer.batches == [[b"1", b"2"], [b"3"]]
    assert len(list(outcome(caller.collect()))) == 3


def promising(run: Stage) -> Line:
    """Return a line for a stage with a contract."""
    line = Line(run)
    line.backlog.checker = Checker(run.expect)
    return line


def test_reply_that_took_longer_than_it_may() -> None:
    """Of two callers' messages the oldest one fails, and only that one (issue 26)."""
    line = promising(stage(Mode.SINGLE, expect=ReplyContract(max_seconds=1), window=9))
    callers = [line.submission() for _ in range(2)]
    for caller in callers:
        caller.feed([b"a", b"b"], 0.0)
        caller.close()
    line.pump()
    line.dispatcher.time_oldest(4, 1.0)  # just within the limit
    line.dispatcher.time_oldest(3, 2.0)
    line.dispatcher.time_oldest(2, 3.0)
    line.answer((b"1",))
    line.answer((b"2",), (b"3",), refused=refusing([(1, refusal())]))
    line.answer((b"4",))
    first, second = (list(outcome(caller.collect())) for caller in callers)
    # The caller that came last was served first.
    assert [failed for _, _, failed in first] == [True, False]
    assert [failed for _, _, failed in second] == [False, True]
    assert line.backlog.checker is not None
    assert line.backlog.checker.found == {"max_seconds": 1}


def test_nothing_is_timed_without_a_contract() -> None:
    """However long a reply takes (issue 26)."""
    line = Line(stage(Mode.SINGLE))
    caller = line.submission()
    caller.feed([b"a"], 0.0)
    line.pump()
    line.dispatcher.time_oldest(1, 1e9)
    line.dispatcher.time_each(Ended(1, [()]), 1e9)
    line.answer((b"1",))
    assert [failed for _, _, failed in outcome(caller.collect())] == [False]


def test_exchanges_that_overlap_are_timed_each() -> None:
    """Each from when it was opened (issue 26)."""
    run = stage(Mode.SINGLE, expect=ReplyContract(max_seconds=1), window=9)
    backlog = Backlog(Checker(run.expect))
    dispatcher = Dispatcher(run, backlog, in_order=False)
    caller = Submission(lambda: None)
    backlog.open(caller)
    caller.feed([b"a", b"b"], 0.0)
    caller.close()
    for now in (0.0, 1.5):
        assert dispatcher.next(now, 0, 1) is not None
    ended = Ended(1, [(b"1",), (b"2",), (b"3",)])  # the third is not open
    dispatcher.time_each(ended, 2.0)
    dispatcher.ended(ended, 0)
    assert [failed for _, _, failed in outcome(caller.collect())] == [True, False]
