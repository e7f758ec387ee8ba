from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etlstage.errors import EtlstageError
from etlstage.messages import Position
from etlstage.stage.policy import BatchPolicy
from etlstage.supervisor.exchange.backlog import Backlog
from etlstage.supervisor.exchange.exchange import Exchange, Outcome
from etlstage.supervisor.exchange.giving import ripe_at
from etlstage.supervisor.exchange.submission import AnyOrder, InputOrder, Submission

DEAD = EtlstageError("all backlogers are gone")


def submission() -> Submission:
    """Return a submission without callbacks."""
    return Submission(lambda: None)


def outcomes(caller: Submission) -> list[Outcome]:
    """Return what a caller collects, without positions."""
    return [item for item in caller.collect() if isinstance(item, Outcome)]


def answered(taken: Exchange, *, reply: bytes = b"") -> Outcome:
    """Return an outcome with two outputs for each message: itself and ``reply``."""
    groups: list[tuple[bytes, ...]] = [(message, reply) for message in taken.messages]
    size = sum(len(m) + len(reply) for m in taken.messages)
    return Outcome(taken.start, taken.messages, groups, taken.size, size)


# --- any sequence of steps -----------------------------------------------------------

messages = st.lists(st.binary(max_size=9), max_size=8)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("feed"), messages),
        st.tuples(st.just("take"), st.integers(1, 6), st.integers(1, 20)),
        st.tuples(st.just("batch"), st.integers(1, 6), st.integers(1, 20)),
        st.tuples(st.just("deliver"), st.integers(0, 99), st.booleans()),
        st.tuples(st.just("collect")),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=300)
@given(steps=steps, dies=st.booleans())
def test_in_whatever_order_nothing_is_lost(
    steps: list[tuple[object, ...]], *, dies: bool
) -> None:
    """Order, counts and bytes are right at every step and at the end."""
    calls: list[int] = []
    s = Submission(lambda: calls.append(1))
    fed: list[bytes] = []
    pending: list[Exchange] = []
    collected: list[Outcome] = []

    def deliver(index: int, *, lost: bool) -> None:
        taken = pending.pop(index % len(pending))
        if lost:
            taken.fail(DEAD)
        else:
            s.deliver(answered(taken, reply=b"abc"))

    def check() -> None:
        count = sum(len(a.messages) for a in collected)
        assert [m for a in collected for m in a.messages] == fed[:count]
        assert s.held == len(fed) - count
        in_hands = sum(len(t.messages) for t in pending)
        assert s.in_flight == in_hands
        assert s.waiting <= s.held - in_hands
        assert s.waiting_bytes >= 0
        assert s.held_bytes >= s.waiting_bytes

    for step in steps:
        match step:
            case ("feed", list(run)):
                s.feed(run, 0.0)
                fed += run
            case ("take" | "batch" as how, int(count), int(size)) if s.waiting:
                take = s.take if how == "take" else s.take_batch
                taken = take(count, size)
                assert 1 <= len(taken.messages) <= count
                assert taken.size == sum(map(len, taken.messages))
                assert taken.size <= size or len(taken.messages) == 1
                assert list(taken.messages) == fed[taken.start :][: len(taken.messages)]
                pending.append(taken)
            case ("deliver", int(index), bool(lost)) if pending:
                deliver(index, lost=lost)
            case ("collect",):
                collected += outcomes(s)
        check()
    assert not s.finished
    if dies:
        s.fail(DEAD)
    while s.waiting:
        pending.append(s.take(3, 10))
    while pending:
        deliver(0, lost=False)
    s.feed([b"late"], 0.0)
    fed.append(b"late")
    if not dies:
        pending.append(s.take(1, 1))
        deliver(0, lost=False)
    s.close()
    collected += outcomes(s)
    check()

    assert [m for a in collected for m in a.messages] == fed
    assert (s.held, s.held_bytes, s.waiting, s.waiting_bytes) == (0, 0, 0, 0)
    assert s.finished
    assert not s.stalled
    assert all(
        len(a.messages) == len(a.replies)
        and (a.error is not None) == (a.replies == [()] * len(a.replies))
        for a in collected
    )
    assert calls


def test_batch_is_filled_as_far_as_it_may() -> None:
    """It spans several feeds, and keeps its limit to the byte."""
    s = submission()
    for run in [[b"1", b"22"], [b"333"], [b"4444"]]:
        s.feed(run, 0.0)

    assert s.take_batch(9, 6).messages == [b"1", b"22", b"333"]
    assert s.take_batch(9, 3).messages == [b"4444"]


def test_what_is_given_back_is_taken_again() -> None:
    """First, as if it had never been taken; it has waited long enough."""
    s = submission()
    s.feed([b"1", b"22", b"333"], 5.0)
    taken = s.take(2, 99)
    first, second = taken.split(1)
    s.give_back(second)
    s.give_back(first.split(1)[1])

    assert (s.waiting, s.waiting_bytes, s.oldest) == (2, 5, -math.inf)
    again = s.take_batch(9, 99)
    assert (again.start, again.messages, again.size) == (1, [b"22", b"333"], 5)


def test_what_is_given_back_goes_to_its_place() -> None:
    """After earlier messages that were given back first."""
    s = submission()
    s.feed([b"1", b"2", b"3"], 5.0)
    first, second = s.take(1, 9), s.take(1, 9)
    s.give_back(first)
    s.give_back(second)

    assert s.take_batch(9, 99).messages == [b"1", b"2", b"3"]


def test_nothing_is_given_back_to_the_dead() -> None:
    """No worker will come: it fails with the same error as all others."""
    s = submission()
    s.feed([b"1"], 0.0)
    taken = s.take(1, 9)
    s.fail(DEAD)
    s.give_back(taken)
    s.close()

    assert [a.error for a in outcomes(s)] == [DEAD]
    assert (s.waiting, s.in_flight, s.finished) == (0, 0, True)


def test_only_the_next_answer_wakes_the_consumer() -> None:
    """A reply that waits for an earlier one is not reported yet."""
    calls: list[str] = []
    s = Submission(lambda: calls.append("woken"))
    s.feed([b"1", b"2"], 0.0)
    first, second = s.take(1, 9), s.take(1, 9)
    s.deliver(answered(second))
    assert calls == []
    assert s.collect() == []
    s.deliver(answered(first))

    assert calls == ["woken"]
    assert [a.messages for a in outcomes(s)] == [[b"1"], [b"2"]]


def test_time_of_the_oldest_moves_on() -> None:
    """It is the time of the run that is next."""
    s = submission()
    s.feed([b"1", b"2"], 1.0)
    s.feed([b"3"], 2.0)
    s.take(1, 9)
    assert s.oldest == 1.0
    s.take(1, 9)

    assert s.oldest == 2.0


def test_nothing_fed_changes_nothing() -> None:
    """An empty run is not waited for."""
    s = submission()
    s.feed([], 0.0)
    s.close()

    assert s.finished
    assert not s.waiting


def test_replies_that_no_one_reads_stall() -> None:
    """From more than the limit on, until they are collected."""
    s = Submission(lambda: None, max_unread=5)
    s.feed([b"1", b"2", b"3"], 0.0)
    s.deliver(answered(s.take(1, 9), reply=b"1234"))
    assert not s.stalled
    s.deliver(answered(s.take(1, 9)))
    assert s.stalled
    s.collect()

    assert not s.stalled


# --- several callers -----------------------------------------------------------------


def test_callers_take_turns() -> None:
    """Each is first equally often; those without messages are left out."""
    backlog = Backlog()
    callers = [submission() for _ in range(3)]
    for caller in callers:
        backlog.open(caller)
    for caller in callers[:2]:
        caller.feed([b"x"], 0.0)
    first = [backlog.in_turn(0)[0] for _ in range(30)]

    assert {id(s) for s in first} == {id(s) for s in callers[:2]}
    assert min(first.count(s) for s in callers[:2]) >= 10


def test_stalled_caller_gets_no_turn() -> None:
    """Its messages wait; those of others don't."""
    backlog = Backlog()
    s = Submission(lambda: None, max_unread=0)
    backlog.open(s)
    s.feed([b"1", b"2"], 0.0)
    s.deliver(answered(s.take(1, 9)))
    assert backlog.in_turn(0) == []
    s.collect()

    assert backlog.in_turn(0) == [s]


def test_caller_that_is_gone_has_nothing_waiting() -> None:
    """A worker that has some of its messages gets no more."""
    backlog = Backlog()
    s = submission()
    backlog.open(s)
    s.feed([b"1", b"2"], 0.0)
    taken = s.take(1, 9)
    backlog.drop(s)
    s.deliver(answered(taken))

    assert backlog.in_turn(0) == []
    assert (s.waiting, s.waiting_bytes, s.closed) == (0, 0, True)


def test_dead_backlog_answers_everybody() -> None:
    """Callers that wait, that feed later, and that come later."""
    backlog = Backlog()
    early, late = submission(), submission()
    backlog.open(early)
    early.feed([b"1", b"2"], 0.0)
    backlog.fail(DEAD)
    early.feed([b"3"], 0.0)
    backlog.open(late)
    late.feed([b"4"], 0.0)

    for s, expected in (early, [b"1", b"2", b"3"]), (late, [b"4"]):
        answers = outcomes(s)
        assert [m for a in answers for m in a.messages] == expected
        assert {a.error for a in answers} == {DEAD}
        assert (s.held, s.held_bytes) == (0, 0)


def test_dropped_twice_is_a_bug() -> None:
    """It must not pass unnoticed."""
    backlog = Backlog()
    s = submission()
    backlog.open(s)
    backlog.drop(s)

    with pytest.raises(ValueError, match="not in deque"):
        backlog.drop(s)


# --- positions among the messages ----------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(
    runs=st.lists(st.integers(0, 3), max_size=6),
    batch=st.integers(1, 4),
    order=st.randoms(use_true_random=False),
    ordered=st.booleans(),
)
def test_position_is_a_barrier(
    runs: list[int], batch: int, order: Random, ordered: bool
) -> None:
    """Exactly the messages before it precede it, in any order of batches (issue 14)."""
    s = Submission(lambda: None, order=None if ordered else AnyOrder())
    total = 0
    for n, count in enumerate(runs):
        s.feed([b"x"] * count, 0.0)
        total += count
        s.mark(Position((n, total)))
    s.feed([b"y"] * 2, 0.0)
    s.close()
    taken = []
    while s.waiting:
        taken.append(s.take_batch(batch, 99))
    order.shuffle(taken)
    seen: list[object] = []
    ended: set[int] = set()
    for exchange in [None, *taken]:
        if exchange is not None:
            s.deliver(answered(exchange))
        for item in s.collect():
            if isinstance(item, Position):
                assert isinstance(item.value, tuple)
                assert ended == set(range(item.value[1]))
                seen.append(item.value[0])
            else:
                ended |= set(range(item.start, item.start + len(item.messages)))

    assert seen == list(range(len(runs)))
    assert ended == set(range(total + 2))
    assert s.finished
    assert (s.held, s.held_bytes) == (0, 0)


def test_between_positions_outcomes_come_as_they_end() -> None:
    """Only messages after an open position wait for those before it (issue 14)."""
    s = Submission(lambda: None, order=AnyOrder())
    s.feed([b"1", b"2"], 0.0)
    s.mark(Position("here"))
    s.feed([b"3", b"4"], 0.0)
    first, second, third, fourth = (s.take(1, 9) for _ in range(4))
    for exchange in second, fourth:
        s.deliver(answered(exchange))
    assert [item.messages for item in outcomes(s)] == [[b"2"]]
    s.deliver(answered(first))
    assert [type(item) for item in s.collect()] == [Outcome, Position, Outcome]
    s.deliver(answered(third))
    assert [item.messages for item in outcomes(s)] == [[b"3"]]


def test_what_is_held_behind_a_position_is_bounded() -> None:
    """Only what leads to the position is given out; replies are read (issue 14)."""
    backlog = Backlog()
    s = Submission(lambda: None, max_unread=4, max_reply=0, order=AnyOrder())
    backlog.open(s)
    s.feed([b"1", b"2"], 0.0)
    s.mark(Position("here"))
    s.feed([b"3", b"4"], 0.0)
    first, _, third = (s.take(1, 9) for _ in range(3))
    s.deliver(answered(third, reply=b"long"))
    assert backlog.in_turn(0) == []
    assert not s.over_limit
    s.give_back(first)  # its worker was lost
    assert backlog.in_turn(0) == [s]


def test_in_order_reading_stops_when_there_is_something_to_collect() -> None:
    """Not before: the consumer needs the first result to go on."""
    s = Submission(lambda: None, max_unread=4, max_reply=0)
    s.feed([b"1", b"2"], 0.0)
    first, second = s.take(1, 9), s.take(1, 9)
    s.deliver(answered(second, reply=b"long"))
    assert not s.over_limit
    s.deliver(answered(first))
    assert s.over_limit
    s.abandon()
    assert not s.over_limit


def test_batch_in_front_of_a_position_waits_for_nothing() -> None:
    """Later messages can't join it (issue 14)."""
    s = submission()
    s.feed([b"1"], 7.0)
    assert ripe_at(s, BatchPolicy(size=9, seconds=2.0)) == 9.0
    s.mark(Position("here"))
    assert ripe_at(s, BatchPolicy(size=9, seconds=2.0)) == 0.0
    s.take_batch(9, 99)
    s.feed([b"2"], 8.0)
    assert ripe_at(s, BatchPolicy(size=9, seconds=2.0)) == 10.0


# --- withheld ------------------------------------------------------------------------


@pytest.mark.parametrize("order", [InputOrder, AnyOrder])
@settings(deadline=None, max_examples=300)
@given(seed=st.integers(0, 2**32))
def test_what_is_withheld_is_behind_no_position(
    order: type[InputOrder | AnyOrder], seed: int
) -> None:
    """Taken messages end; a position is passed exactly if all before it have ended."""
    dice, fed, marks = Random(seed), 0, list[int]()  # noqa: S311
    s, held, ended = (
        Submission(lambda: None, order=order()),
        list[Exchange](),
        set[int](),
    )
    withheld_at, passed, seen = dice.randrange(20), list[int](), set[int]()

    def feed() -> None:
        nonlocal fed
        count = dice.randrange(1, 4)
        s.feed([b"%d" % n for n in range(fed, fed + count)], 0.0)
        fed += count
        if dice.random() < 0.5:
            marks.append(fed)
            s.mark(Position(fed))

    def collect() -> None:
        for item in s.collect():
            if isinstance(item, Position):
                assert isinstance(item.value, int)
                passed.append(item.value)
                assert set(range(item.value)) <= ended
            else:
                seen.update(range(item.start, item.start + len(item.messages)))

    def end(exchange: Exchange) -> None:
        ended.update(range(exchange.start, exchange.start + len(exchange.messages)))
        s.deliver(answered(exchange))

    for step in range(40):
        if step == withheld_at:
            s.withhold()
        match dice.randrange(5):
            case 0:
                feed()
            case 1 if s.waiting:
                held.append(s.take(dice.randrange(1, 4), 99))
            case 2 if held:
                end(held.pop(dice.randrange(len(held))))
            case 3 if held:
                s.give_back(held.pop(dice.randrange(len(held))))
            case _:
                collect()
    s.close()
    assert not s.waiting
    for exchange in held:
        end(exchange)
    collect()
    assert s.finished
    assert (s.in_flight, seen <= ended) == (0, True)
    assert passed == marks[: len(passed)]


def test_failure_is_reported_before_it_may_be_collected() -> None:
    """Who commits a later position has to know of the failure (issue 25)."""
    caller, failures = submission(), list[Outcome]()
    caller.on_failure = failures.append
    caller.feed([b"one", b"two", b"three"], 0.0)
    first, second, third = (caller.take(1, 99) for _ in range(3))
    third.fail(DEAD)
    assert [failure.start for failure in failures] == [2]
    assert not outcomes(caller)
    for taken in (second, first):
        caller.deliver(answered(taken))
    assert [outcome.start for outcome in outcomes(caller)] == [0, 1, 2]
    assert len(failures) == 1
