"""Which positions a checkpoint may have: a test for each row of the rules."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etlstage.protocol.kcl.checkpoint import (
    AT_TIMESTAMP,
    DEPENDENCY,
    ILLEGAL_ARGUMENT,
    LATEST,
    SHARD_END,
    SHUTDOWN,
    TRIM_HORIZON,
    CommitVerdict,
    ShardPosition,
    Standing,
    error_name,
    judge,
    position_of,
    rank,
    rank_of,
)

MIDDLE = Standing(ShardPosition("10"), ShardPosition("20", 3))
AT_END = MIDDLE._replace(ended=True)
FRESH = Standing(ShardPosition(TRIM_HORIZON), ShardPosition(TRIM_HORIZON))
DONE = CommitVerdict()
ILLEGAL = CommitVerdict(error=ILLEGAL_ARGUMENT)
END = CommitVerdict(ShardPosition(SHARD_END))


def stored(sequence: str, sub: int = 0) -> CommitVerdict:
    """Return the verdict that a position is to be stored."""
    return CommitVerdict(ShardPosition(sequence, sub))


@pytest.mark.parametrize(
    ("sequence", "sub", "standing", "verdict"),
    [
        pytest.param(None, None, MIDDLE, stored("20", 3), id="all delivered"),
        pytest.param(None, 2, MIDDLE, stored("20", 3), id="sub alone says nothing"),
        pytest.param("15", None, MIDDLE, stored("15"), id="in between"),
        pytest.param("15", 7, MIDDLE, stored("15", 7), id="with sub"),
        pytest.param("20", 3, MIDDLE, stored("20", 3), id="the largest"),
        pytest.param("20", 4, MIDDLE, ILLEGAL, id="sub beyond the largest"),
        pytest.param("21", 0, MIDDLE, ILLEGAL, id="beyond the largest"),
        pytest.param("10", 0, MIDDLE, DONE, id="equal to the last one"),
        pytest.param("10", 1, MIDDLE, stored("10", 1), id="sub behind the last one"),
        pytest.param("9", 9, MIDDLE, ILLEGAL, id="before the last one"),
        pytest.param("15", -1, MIDDLE, ILLEGAL, id="negative sub"),
        pytest.param("None", None, MIDDLE, ILLEGAL, id="trap: the text None"),
        pytest.param("", None, MIDDLE, ILLEGAL, id="empty"),
        pytest.param("1_5", None, MIDDLE, ILLEGAL, id="as Python writes numbers"),
        pytest.param("+15", None, MIDDLE, ILLEGAL, id="signed"),
        pytest.param("\u0661\u0665", None, MIDDLE, ILLEGAL, id="digits beyond ASCII"),
        pytest.param("1" * 129, None, MIDDLE, ILLEGAL, id="129 digits"),
        pytest.param(SHARD_END, None, MIDDLE, ILLEGAL, id="end, too early"),
        pytest.param(TRIM_HORIZON, None, MIDDLE, ILLEGAL, id="sentinel too low"),
        pytest.param(LATEST, None, MIDDLE, ILLEGAL, id="another, too low"),
        pytest.param(None, None, FRESH, DONE, id="nothing was ever delivered"),
        pytest.param(TRIM_HORIZON, None, FRESH, DONE, id="the initial one"),
        pytest.param(AT_TIMESTAMP, None, FRESH, ILLEGAL, id="below the initial one"),
        pytest.param(None, None, AT_END, END, id="end: all"),
        pytest.param(SHARD_END, None, AT_END, END, id="end: by name"),
        pytest.param("20", 3, AT_END, END, id="end: the last number is news"),
        pytest.param("15", 0, AT_END, stored("15"), id="end: in between"),
        pytest.param("21", 0, AT_END, stored("21"), id="end: anything up to it"),
        pytest.param("9", 0, AT_END, ILLEGAL, id="end: before the last one"),
    ],
)
def test_rules(
    sequence: str | None, sub: int | None, standing: Standing, verdict: CommitVerdict
) -> None:
    """As the client library answers."""
    assert judge(sequence, sub, standing) == verdict


def test_last_number_that_was_stored_before_does_not_end_the_shard() -> None:
    """A common trap: success is answered, and the children never start."""
    last = ShardPosition("20")
    standing = Standing(stored=last, largest=last, ended=True)

    assert judge("20", 0, standing) == DONE
    assert judge(None, None, standing) == END


def test_end_of_a_shard_is_stored_once() -> None:
    """A second time there is nothing to do."""
    end = ShardPosition(SHARD_END)
    standing = Standing(stored=end, largest=ShardPosition("20"), ended=True)

    assert judge(None, None, standing) == DONE


def test_order_of_positions() -> None:
    """Sentinels sort below and above all numbers, and numbers not as text."""
    order = [
        *map(ShardPosition, (AT_TIMESTAMP, TRIM_HORIZON, LATEST, "0", "9")),
        *(ShardPosition("10"), ShardPosition("10", 1), ShardPosition("9" * 128)),
        ShardPosition(SHARD_END),
    ]

    assert all(rank(one) < rank(other) for one, other in pairwise(order))


@pytest.mark.no_cover
@given(
    st.integers(0, 40), st.integers(0, 40), st.integers(0, 40), st.none() | st.text()
)
def test_a_stored_position_never_goes_back(
    start: int, given_: int, asked: int, text: str | None
) -> None:
    """Nor does it exceed what was delivered, whatever position is asked for."""
    begin, largest = ShardPosition(str(start)), ShardPosition(str(start + given_))
    for sequence in (str(asked), text):
        position, _ = judge(sequence, None, Standing(begin, largest))
        if position is not None:
            assert rank(begin) < rank(position) <= rank(largest)


@pytest.mark.parametrize(
    ("value", "position"),
    [
        (None, ShardPosition(TRIM_HORIZON)),
        ("5", ShardPosition("5")),
        (["5", 2], ShardPosition("5", 2)),
        (ShardPosition(SHARD_END), ShardPosition(SHARD_END)),
    ],
)
def test_positions_are_plain_json(value: object, position: ShardPosition) -> None:
    """The pipeline stores them as JSON."""
    assert position_of(value) == position


@pytest.mark.parametrize("value", [5, {"at": 5}, ["5"], "five", ["5", -1]])
def test_other_positions_are_refused(value: object) -> None:
    """Those of another dialect, for example."""
    with pytest.raises(ValueError, match="is not a position in a shard"):
        position_of(value)
    assert rank_of("five") is None


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (SHUTDOWN, SHUTDOWN),
        ("NullPointerException", "NullPointerException"),
        ("no checkpoint store configured", DEPENDENCY),
        ("", DEPENDENCY),
        ("Fähler", DEPENDENCY),
    ],
)
def test_errors_are_answered_with_a_name(error: str, name: str) -> None:
    """Clients compare names; a sentence is not one (issue 25)."""
    assert error_name(error) == name
