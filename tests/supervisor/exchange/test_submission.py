from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etlstage.messages import Position
from etlstage.supervisor.exchange.submission import (
    Answer,
    Marks,
    Submission,
    Taken,
    Watermark,
    Work,
    unanswered,
)

DEAD = RuntimeError("all workers are gone")


def submission() -> Submission:
    """Return one that calls nobody."""
    return Submission(lambda: None)


def answered(taken: Taken, *, reply: bytes = b"") -> Answer:
    """Return the answer to what a worker took: each message and ``reply``."""
    groups: list[tuple[bytes, ...]] = [(message, reply) for message in taken.messages]
    size = sum(len(m) + len(reply) for m in taken.messages)
    return Answer(taken.start, taken.messages, groups, taken.size, size)


# --- any order -----------------------------------------------------------------------

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
    """Order, counts and bytes balance at every step and at the end."""
    calls: list[int] = []
    s = Submission(lambda: calls.append(1))
    fed: list[bytes] = []
    pending: list[Taken] = []
    collected: list[Answer] = []

    def deliver(index: int, *, lost: bool) -> None:
        taken = pending.pop(index % len(pending))
        s.deliver(
            unanswered(taken.start, taken.messages, taken.size, DEAD)
            if lost
            else answered(taken, reply=b"abc")
        )

    def check() -> None:
        count = sum(len(a.messages) for a in collected)
        assert [m for a in collected for m in a.messages] == fed[:count]
        assert s.held == len(fed) - count
        in_hands = sum(len(t.messages) for t in pending)
        assert s.waiting <= s.held - in_hands
        assert s.waiting_bytes >= 0
        assert s.held_bytes >= s.waiting_bytes
        if s.waiting:
            assert s.next_size == len(fed[len(fed) - s.waiting])

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
                assert taken.messages == fed[taken.start :][: len(taken.messages)]
                pending.append(taken)
            case ("deliver", int(index), bool(lost)) if pending:
                deliver(index, lost=lost)
            case ("collect",):
                collected += s.collect()
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
    collected += s.collect()
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
    """It spans what was fed at several times, and its bound is kept to the byte."""
    s = submission()
    for run in [[b"1", b"22"], [b"333"], [b"4444"]]:
        s.feed(run, 0.0)

    assert s.take_batch(9, 6).messages == [b"1", b"22", b"333"]
    assert s.take_batch(9, 3).messages == [b"4444"]


def test_what_is_given_back_is_taken_again() -> None:
    """First, and as if it had never been taken; it has waited long enough."""
    s = submission()
    s.feed([b"1", b"22", b"333"], 5.0)
    taken = s.take(2, 99)
    s.give_back(Taken(s, 1, taken.messages[1:], 2))
    s.give_back(Taken(s, 1, [], 0))

    assert (s.waiting, s.waiting_bytes, s.oldest) == (2, 5, -math.inf)
    assert s.take_batch(9, 99) == Taken(s, 1, [b"22", b"333"], 5)


def test_only_the_next_answer_wakes_the_consumer() -> None:
    """An answer that has to wait for one before it is no news."""
    calls: list[str] = []
    s = Submission(lambda: calls.append("woken"))
    s.feed([b"1", b"2"], 0.0)
    first, second = s.take(1, 9), s.take(1, 9)
    s.deliver(answered(second))
    assert calls == []
    assert s.collect() == []
    s.deliver(answered(first))

    assert calls == ["woken"]
    assert [a.messages for a in s.collect()] == [[b"1"], [b"2"]]


def test_time_of_the_oldest_moves_on() -> None:
    """It is that of the run whose turn it is."""
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


def test_replies_that_nobody_reads_stall() -> None:
    """From more than the bound on, until they are collected."""
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
    """Each of them is first as often as the others; those with nothing are left out."""
    work = Work()
    callers = [submission() for _ in range(3)]
    for caller in callers:
        work.open(caller)
    for caller in callers[:2]:
        caller.feed([b"x"], 0.0)
    first = [work.waiting(0)[0] for _ in range(30)]

    assert {id(s) for s in first} == {id(s) for s in callers[:2]}
    assert min(first.count(s) for s in callers[:2]) >= 10


def test_stalled_caller_gets_no_turn() -> None:
    """Its messages wait; those of others don't."""
    work = Work()
    s = Submission(lambda: None, max_unread=0)
    work.open(s)
    s.feed([b"1", b"2"], 0.0)
    s.deliver(answered(s.take(1, 9)))
    assert work.waiting(0) == []
    s.collect()

    assert work.waiting(0) == [s]


def test_caller_that_is_gone_has_nothing_waiting() -> None:
    """Who holds a part of its messages asks in vain for more."""
    work = Work()
    s = submission()
    work.open(s)
    s.feed([b"1", b"2"], 0.0)
    taken = s.take(1, 9)
    work.drop(s)
    s.deliver(answered(taken))

    assert work.waiting(0) == []
    assert (s.waiting, s.waiting_bytes, s.closed) == (0, 0, True)


def test_dead_work_answers_everybody() -> None:
    """Who waits, who feeds later, and who comes later."""
    work = Work()
    early, late = submission(), submission()
    work.open(early)
    early.feed([b"1", b"2"], 0.0)
    work.fail(DEAD)
    early.feed([b"3"], 0.0)
    work.open(late)
    late.feed([b"4"], 0.0)

    for s, expected in (early, [b"1", b"2", b"3"]), (late, [b"4"]):
        answers = s.collect()
        assert [m for a in answers for m in a.messages] == expected
        assert {a.error for a in answers} == {DEAD}
        assert (s.held, s.held_bytes) == (0, 0)


def test_dropped_twice_is_a_bug() -> None:
    """Nobody forgets the same caller twice unnoticed."""
    work = Work()
    s = submission()
    work.open(s)
    work.drop(s)

    with pytest.raises(ValueError, match="not in deque"):
        work.drop(s)


# --- positions -----------------------------------------------------------------------


def test_positions_are_due_when_nothing_before_them_is_left() -> None:
    """Once, and in order; some may stand at one place."""
    marks = Marks()
    for place, value in [(0, "a"), (3, "b"), (3, "c"), (5, "d")]:
        marks.add(place, Position(value))

    assert marks.due(0) == [Position("a")]
    assert marks.due(2) == []
    assert marks.due(4) == [Position("b"), Position("c")]
    assert len(marks) == 1
    assert marks.due(9) == [Position("d")]
    assert not marks


def test_gap_holds_a_watermark_down() -> None:
    """However much has its outcome behind it."""
    mark = Watermark()
    mark.rise(2, 5)
    mark.rise(8, 1)
    assert mark.low == 0
    mark.rise(0, 2)
    assert mark.low == 7
    mark.rise(7, 1)
    assert mark.low == 9


@given(st.lists(st.integers(1, 4), max_size=8), st.randoms())
def test_watermark_in_any_order_comes_to_the_end(
    sizes: list[int], random: Random
) -> None:
    """And is never above a message without an outcome."""
    places = [(sum(sizes[:n]), size) for n, size in enumerate(sizes)]
    random.shuffle(places)
    mark = Watermark()
    done: set[int] = set()
    for start, size in places:
        mark.rise(start, size)
        done.update(range(start, start + size))
        assert done.issuperset(range(mark.low))
        assert mark.low not in done
