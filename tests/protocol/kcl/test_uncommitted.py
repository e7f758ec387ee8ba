"""Records that no checkpoint covers."""

from __future__ import annotations

import json
from datetime import date
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etlstage.errors import InvalidMessage
from etlstage.messages import AnnotatedRun
from etlstage.protocol.kcl.checkpoint import (
    SHARD_END,
    TRIM_HORIZON,
    ShardPosition,
    position_of,
)
from etlstage.protocol.kcl.uncommitted import Uncommitted


def opened(stored: str = TRIM_HORIZON) -> Uncommitted:
    """Return a shard without open records."""
    return Uncommitted("s-1", ShardPosition(stored))


def give(open_: Uncommitted, first: int, numbers: list[int]) -> None:
    """Give records of one byte."""
    run = AnnotatedRun([b"x"] * len(numbers), sequence=numbers)
    open_.give(first, run, open_.ranks(run))


@pytest.mark.parametrize(
    ("stored", "begin"), [(TRIM_HORIZON, 1), ("41", 42), (SHARD_END, 1)]
)
def test_messages_are_counted(stored: str, begin: int) -> None:
    """From the stored position on, so that repeated messages get the same numbers."""
    assert opened(stored).ranks([b"a", b"b"]) == [(begin, 0), (begin + 1, 0)]


def test_counting_goes_on() -> None:
    """After what was given, not after what was committed."""
    open_ = opened()
    open_.give(1, [b"a", b"b"], open_.ranks([b"a", b"b"]))

    assert open_.ranks([b"c"]) == [(3, 0)]
    assert open_.largest == ShardPosition("2")


@pytest.mark.parametrize(
    ("columns", "index", "text"),
    [
        (
            {"sequence": [5, 5]},
            1,
            "its sequence number is 5, 0, expected more than 5, 0",
        ),
        ({"sequence": [6, 5]}, 1, "expected more than 6, 0"),
        ({"sequence": [3]}, 0, "expected more than 4, 0"),
        ({"sequence": [5, 5], "sub": [1, 0]}, 1, "expected more than 5, 1"),
        ({"sequence": [5, None]}, 1, "is None, expected a decimal number"),
        ({"sequence": ["x"]}, 0, "is 'x', expected a decimal number"),
        ({"sequence": [5], "sub": [-1]}, 0, "is 5, expected a decimal number"),
        ({"sequence": [SHARD_END]}, 0, "expected a decimal number"),
        ({"sequence": [TRIM_HORIZON]}, 0, "expected a decimal number"),
        ({"partition": ["a", None]}, 1, "its partition key is None, expected text"),
        ({"partition": ["", "a"]}, 0, "is 0 characters, expected text of 1 to 256"),
        ({"partition": ["a" * 257]}, 0, "is 257 characters"),
        (
            {"sequence": [5, 6], "sub": [0, "0"]},
            1,
            "its sub-sequence number is '0', expected a whole number",
        ),
        ({"sub": [0.5]}, 0, "its sub-sequence number is 0.5"),
        ({"arrival": [1, None, "2026-01-01"]}, 2, "its arrival is '2026-01-01'"),
        ({"arrival": [date(2026, 1, 1)]}, 0, "its arrival is datetime.date"),
        ({"behind": [float("nan")]}, 0, "its delay behind the end of the shard is nan"),
        ({"behind": [1.0, float("inf")]}, 1, "is inf, expected a whole number"),
        ({"arrival": [0, 1 << 63]}, 1, "expected a whole number of at most 64 bits"),
        ({"arrival": [0.5, -(1 << 63) - 1]}, 0, "its arrival is 0.5"),
        ({"arrival": [-(1 << 63) - 1]}, 0, "a whole number of at most 64 bits"),
        ({"arrival": [-(10**5000)]}, 0, "its arrival is a number of too many digits"),
        ({"sequence": [10**5000]}, 0, "number is a number of too many digits"),
    ],
)
def test_records_that_are_none_are_refused(
    columns: dict[str, list[object]], index: int, text: str
) -> None:
    """Before a child sees them, with shard, row, value and remedy (issue 25)."""
    open_ = opened("1")
    give(open_, 1, [2, 4])
    messages = [b"x"] * len(next(iter(columns.values())))
    with pytest.raises(InvalidMessage, match=text) as caught:
        open_.ranks(AnnotatedRun(messages, **columns))

    assert caught.value.index == index
    assert str(caught.value).startswith(f"shard s-1: record {index}: ")


def test_whole_numbers_may_be_floats() -> None:
    """A frame with missing values has no others (issue 25)."""
    run = AnnotatedRun([b"x"] * 2, sub=[0.0, None], arrival=[1.0, None])
    assert opened().ranks(run) == [(1, 0), (2, 0)]


@pytest.mark.parametrize("least", [-(1 << 63), -float(1 << 63)])
def test_least_number_of_64_bits_is_whole(least: float) -> None:
    """As any other that daemons can hold (issue 25)."""
    run = AnnotatedRun([b"x"] * 2, arrival=[least, (1 << 63) - 1])
    assert opened().ranks(run) == [(1, 0), (2, 0)]


@pytest.mark.parametrize("sub", [5.0, True, Decimal(5)])
def test_sub_sequence_numbers_become_whole_numbers(sub: object) -> None:
    """A position that is stored as JSON is read again (issue 25)."""
    open_ = opened()
    run = AnnotatedRun([b"x"], sequence=["7"], sub=[sub])
    open_.give(1, run, open_.ranks(run))

    assert type(open_.largest.sub) is int
    assert position_of(json.loads(json.dumps(open_.largest))) == ("7", sub)


def test_records_put_as_one_rise_by_their_sub_sequence_numbers() -> None:
    """And they are committed one by one."""
    open_ = opened()
    run = AnnotatedRun([b"x"] * 3, sequence=[5, 5, 6], sub=[0, 1, None])
    open_.give(1, run, open_.ranks(run))

    assert open_.commit(ShardPosition("5", 0)) == (1, 1)
    assert open_.commit(ShardPosition("5", 1)) == (2, 1)


def test_what_is_committed_may_come_again() -> None:
    """Those are covered; later records must follow the ones given."""
    open_ = opened("5")
    run = AnnotatedRun([b"x"] * 4, sequence=[4, 5, 6, 7])
    ranks = open_.ranks(run)
    assert open_.covers(ranks) == 2

    open_.give(1, run[2:], ranks[2:])
    with pytest.raises(InvalidMessage, match="expected more than 7, 0"):
        open_.ranks(AnnotatedRun([b"x"] * 2, sequence=[5, 7]))


def test_nothing_is_given() -> None:
    """An empty list opens nothing."""
    open_ = opened()
    open_.give(9, [], [])

    assert (open_.count, open_.last, open_.commit(ShardPosition("1"))) == (0, 0, (1, 0))


@given(st.lists(st.integers(1, 5), max_size=6), st.lists(st.integers(0, 40)))
def test_each_record_is_committed_once(sizes: list[int], steps: list[int]) -> None:
    """In order, whatever positions are committed."""
    open_, last = opened(), 0
    for size in sizes:
        give(open_, last + 1, [10 * at for at in range(last + 1, last + size + 1)])
        last += size
    done = at = 0
    for step in steps:
        at += step
        first, count = open_.commit(ShardPosition(str(at)))
        assert count == min(at // 10, last) - done
        assert not count or first == done + 1
        done += count
        assert open_.count == open_.size == last - done
