"""What is held back, how much of it, and how long a worker must be quiet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etlstage.errors import Attempt
from etlstage.supervisor.exchange.exchange import Exchange, Outcome
from etlstage.supervisor.exchange.pairing import Answered, Block
from etlstage.supervisor.exchange.submission import Submission


def exchange(count: int = 1, size: int = 1) -> Exchange:
    """Return an exchange of messages that are all the same."""
    caller = Submission(lambda: None)
    return Exchange(caller, 7, [b"x" * size] * count, count * size)


def outcome(of: Exchange, reply_size: int = 0) -> Outcome:
    """Return what it comes to: no outputs."""
    return Outcome(of.start, of.messages, [()] * len(of.messages), of.size, reply_size)


def fill(block: Block, count: int, now: float = 0.0) -> None:
    """Give messages, have them answered, and end the block."""
    block.give(count, count, now)
    block.answered(count, now)
    block.hold(exchange(count), outcome(exchange(count)))
    block.end()


def test_blocks_grow_with_the_age_of_a_process() -> None:
    """Up to a bound."""
    block, limits = Block(), []
    for _ in range(10):
        limits.append(room := block.room(0.0, step=False))
        fill(block, room)
        block.release(proven=True)

    assert limits == [1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 65536]


def test_blocks_are_a_share_of_the_life_of_processes_that_are_lost() -> None:
    """Or of what this one has done so far: it may outlive them (issue 13)."""
    block, limits = Block(life=100), []
    for _ in range(16):
        limits.append(room := block.room(0.0, step=False))
        fill(block, room)
        block.release(proven=True)

    assert limits == [1, 4, *[12] * 9, 14, 15, 17, 19, 22]
    for _ in range(99):
        fill(block, block.room(0.0, step=False))
        block.release(proven=True)
    assert block.room(0.0, step=False) == 65536


def test_block_begins_with_what_it_is_given() -> None:
    """And ends with its release."""
    block = Block()
    assert not block.begun
    block.give(1, 1, 0.0)
    assert block.begun
    block.end()
    assert not block.begun


def test_block_of_several_exchanges() -> None:
    """One that is alone needs no comparison with others (issue 12)."""
    block = Block(first=2)
    for several in (False, True):
        block.give(1, 1, 0.0)
        block.answered(1, 0.0)
        block.hold(exchange(), outcome(exchange()))
        assert block.several is several
    block.release(proven=True)
    assert not block.several


def test_replies_are_held_back_within_what_their_caller_allows() -> None:
    """He would wait for room that is not used."""
    caller = Submission(lambda: None, max_unread=10)
    caller.feed([b"x"], 0.0)
    taken = caller.take(1, 9)
    block = Block()
    block.hold(taken, outcome(taken, reply_size=10))
    assert not block.overfull
    block.hold(taken, outcome(taken, reply_size=1))
    assert block.overfull
    block.release(proven=True)
    assert not block.overfull


def test_first_block_has_a_window() -> None:
    """A worker may wait for as many as the definition promises."""
    assert Block(first=5).room(0.0, step=False) == 5


@pytest.mark.parametrize(("alone", "step"), [(True, False), (False, True)])
def test_block_of_one(alone: bool, step: bool) -> None:
    """Where nothing can be taken back, and in lock-step, however old the process is."""
    block = Block(alone=alone)
    for _ in range(6):
        fill(block, 1)
        block.release(proven=True)

    assert block.room(0.0, step=step) == 1
    block.give(1, 1, 0.0)
    assert block.room(0.0, step=step) == 0


def test_bytes_and_time_bound_a_block() -> None:
    """The replies that wait count, too."""
    block = Block(first=100)
    block.give(1, 4_000_000, 0.0)
    assert block.room(0.2, step=False) == 99
    assert block.room(0.25, step=False) == 0
    block.hold(exchange(), outcome(exchange(), reply_size=4_400_000))
    assert block.room(0.0, step=False) == 0


def test_unbounded_block_never_ends() -> None:
    """Where a reply names its exchange there is nothing to prove."""
    block = Block(bounded=False)
    block.give(10**6, 10**9, 0.0)

    assert block.room(99.0, step=True) > 0


def test_what_can_not_be_sent_takes_no_room() -> None:
    """It was given to nobody."""
    block = Block()
    block.give(1, 1, 0.0)
    block.withdraw(1, 1)

    assert block.room(0.0, step=False) == 1
    assert not block.total


def test_release_says_what_it_was() -> None:
    """And leaves nothing behind."""
    block = Block()
    first = exchange(2, 5)
    block.give(2, 10, 0.0)
    block.answered(2, 1.0)
    block.hold(first, outcome(first, reply_size=3))

    held, total = block.release(proven=True)
    assert [(e.start, o.size) for e, o in held] == [(7, 10)]
    assert total == Answered(exchanges=2, messages=2, size=10, reply_size=3)
    assert block.release(proven=True) == ([], Answered())


def test_what_is_taken_back_has_its_history() -> None:
    """It is the exchange that it was."""
    block, attempt = Block(), Attempt("t-1", 1, "died")
    tried = exchange()
    tried.attempts, tried.tries, tried.refusals = (attempt,), 1, 2
    block.hold(tried, outcome(tried))

    assert block.take_back() == [tried]
    assert not block.holds


def test_what_is_not_proven_is_counted_until_it_is() -> None:
    """By the next proof, or by a worker that was idle for long enough."""
    block = Block()
    for proven, unproven in ((False, 1), (False, 2), (True, 0), (False, 1)):
        fill(block, 1)
        block.release(proven=proven)
        assert block.unproven == unproven
    block.turn(0.001)
    assert block.unproven == 1
    block.turn(9.0)
    assert block.unproven == 0


def test_fault_behind_a_quiet_time_tells_that_it_was_too_short() -> None:
    """One in the next block does not: what was hushed came before it."""
    block = Block()
    fill(block, 1)
    block.hushed = True
    block.release(proven=True)
    assert (block.unproven, block.questionable) == (0, 1)
    fill(block, 1)
    assert block.questionable == 0
    block.release(proven=True)
    assert block.questionable == 0


def test_young_process_must_be_quiet() -> None:
    """For as long as it is used to take, within bounds."""
    block = Block()
    assert block.quiet(0.0, step=False) == 0.005
    block.turn(0.0)
    block.answered(1, 0.1)
    assert block.quiet(0.1, step=False) == pytest.approx(0.15)
    block.turn(0.1)
    block.answered(1, 5.0)
    assert block.quiet(5.0, step=False) == 1.0


def test_old_process_waits_a_little_behind_several() -> None:
    """A twentieth of the time of the block; a lone message has somebody who waits."""
    block = Block()
    for _ in range(4):
        fill(block, 1)
        block.release(proven=True)
    block.give(1, 1, 1.0)
    block.answered(1, 1.0)
    assert block.quiet(1.0, step=False) == 0.0
    block.answered(1, 1.0)
    assert block.quiet(1.02, step=False) == pytest.approx(0.001)


def test_quiet_time_decays_in_lock_step() -> None:
    """It never ends."""
    block, waits = Block(), []
    for _ in range(9):
        waits.append(block.quiet(0.0, step=True))
        fill(block, 1)
        block.release(proven=True)

    assert waits == [0.005] * 5 + [0.0025, 0.00125, 0.001, 0.001]


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=20))
def test_nothing_is_held_twice_or_lost(acts: list[tuple[int, bool]]) -> None:
    """Released or taken back, each message is there once."""
    block, given, seen = Block(), 0, 0
    for count, kept in acts:
        fill(block, count)
        given += count
        if kept:
            held, total = block.release(proven=True)
            seen += sum(len(o.messages) for _, o in held)
            assert total.messages == sum(len(e.messages) for e, _ in held)
        else:
            seen += sum(e.left for e in block.take_back())
    assert (seen, block.messages, block.total) == (given, 0, given)
