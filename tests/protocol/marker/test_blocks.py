"""How many messages a block may have, and how long a worker must be quiet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etlstage.protocol.marker.blocks import BlockSizing, Terms


def fill(blocks: BlockSizing, count: int, now: float = 0.0) -> None:
    """Give messages, have them answered, and end the block."""
    blocks.give(count, count, now)
    blocks.answered(0, now)
    blocks.end()


def limits(blocks: BlockSizing, count: int) -> list[int]:
    """Return how many messages each of the next blocks may have."""
    found = []
    for _ in range(count):
        found.append(room := blocks.room(0.0))
        fill(blocks, room)
    return found


def test_blocks_grow_with_the_age_of_a_process() -> None:
    """Up to a limit."""
    grown = [1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 65536]
    assert limits(BlockSizing(Terms()), 10) == grown


def test_first_block_is_a_window() -> None:
    """Where the window is fixed."""
    assert limits(BlockSizing(Terms(first=8)), 2) == [8, 32]


def test_blocks_are_a_share_of_the_life_of_processes() -> None:
    """Of earlier processes' lives, or of this one's so far, as it may outlive them."""
    found = limits(BlockSizing(Terms(life=100)), 16)
    assert found == [1, 4, *[12] * 9, 14, 15, 17, 19, 22]


@pytest.mark.parametrize("alone", [False, True])
def test_block_is_one_message_in_lock_step_or_alone(alone: bool) -> None:
    """However old the process is."""
    blocks = BlockSizing(Terms(alone=alone))
    blocks.step = not alone
    assert limits(blocks, 6) == [1] * 6


def test_block_is_bounded_in_bytes_of_messages_and_replies() -> None:
    """To 8 MiB, waiting replies included, but at least one message."""
    blocks = BlockSizing(Terms(first=10))
    blocks.give(1, 4 * 1024 * 1024, 0.0)
    assert blocks.room(0.0) == 9
    blocks.answered(4 * 1024 * 1024, 0.0)
    assert blocks.room(0.0) == 0


def test_block_is_bounded_in_time() -> None:
    """To a quarter of a second from its first message."""
    blocks = BlockSizing(Terms(first=10))
    assert blocks.room(9.0) == 10
    blocks.give(1, 1, 9.0)
    assert (blocks.room(9.24), blocks.room(9.25)) == (9, 0)


def test_replies_that_wait_are_bounded_by_their_consumer() -> None:
    """Until they are released."""
    blocks = BlockSizing(Terms(first=10))
    blocks.bound = 100
    blocks.give(2, 1, 0.0)
    assert not blocks.answered(100, 0.0)
    assert blocks.answered(1, 0.0)
    blocks.release()
    assert not blocks.answered(100, 0.0)


def test_quiet_time_of_a_young_process_follows_its_pace() -> None:
    """It is 1.5 times the longest exchange, at least 5 ms and at most 1 s."""
    blocks = BlockSizing(Terms(first=9))
    assert blocks.quiet(0.0, several=False) == 0.005
    blocks.turn(0.0)
    blocks.answered(0, 0.02)
    assert blocks.quiet(0.02, several=False) == pytest.approx(0.03)
    blocks.answered(0, 5.0)
    assert blocks.quiet(5.0, several=True) == 1.0


def test_quiet_time_behind_the_first_blocks() -> None:
    """A share of the time of a block of several messages, none for a single one."""
    blocks = BlockSizing(Terms())
    limits(blocks, 4)
    blocks.give(9, 9, 10.0)
    assert blocks.quiet(10.08, several=True) == pytest.approx(0.004)
    assert blocks.quiet(10.08, several=False) == 0.0


def test_quiet_time_decays_in_lock_step() -> None:
    """Down to a millisecond, but never to zero."""
    blocks = BlockSizing(Terms())
    blocks.step = True
    limits(blocks, 4)
    found = []
    for _ in range(4):
        found.append(blocks.quiet(0.0, several=False))
        fill(blocks, 1)
    assert found == [0.005, 0.0025, 0.00125, 0.001]


def test_worker_is_rested_behind_the_longest_quiet_time() -> None:
    """Counted from the oldest exchange's turn, or from the last reply."""
    blocks = BlockSizing(Terms())
    blocks.turn(3.0)
    assert (blocks.turn(3.9), blocks.turn(5.0)) == (False, True)
    blocks.answered(0, 9.9)
    assert (blocks.turn(15.9), blocks.turn(24.0)) == (False, True)


@given(st.integers(1, 100), st.floats(1, 1e6), st.lists(st.integers(1, 10**6)))
def test_there_is_always_room_in_a_fresh_block(
    first: int, life: float, taken: list[int]
) -> None:
    """And messages given use it up, however long the life."""
    blocks = BlockSizing(Terms(first=first, life=life))
    for count in taken:
        assert blocks.room(0.0) >= 1
        assert not blocks.given
        count = min(count, blocks.room(0.0))
        room = blocks.room(0.0)
        blocks.give(count, 0, 0.0)
        assert blocks.room(0.0) == room - count
        assert blocks.given
        blocks.end()
    assert blocks.room(0.0) >= 1
