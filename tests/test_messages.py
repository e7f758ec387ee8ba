"""What travels between stages, and words for it."""

from __future__ import annotations

import pyarrow as pa
import pytest

from etlstage.columns import Column, Replies
from etlstage.messages import (
    AnnotatedRun,
    Run,
    concatenated,
    counted,
    joined,
    plain,
    size_of,
)

MESSAGES = [b"one", b"", b"three"]
COLUMN = Column(pa.array(MESSAGES, pa.binary()))


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 messages"), (1, "1 message"), (2, "2 messages"), (4000, "4,000 messages")],
)
def test_a_count_is_told_with_its_noun(count: int, words: str) -> None:
    """One message is not "1 messages"."""
    assert counted(count, "message") == words


def test_what_is_beside_messages_is_sliced_with_them() -> None:
    """A key stays with its message."""
    run = AnnotatedRun(MESSAGES, key=[7, 8, 9])

    rest = run[1:]
    assert list(rest) == [b"", b"three"]
    assert rest.columns == {"key": [8, 9]}
    assert rest[0] == b""
    assert len(run) == 3
    assert run.size == 8
    assert repr(run) == "<AnnotatedRun messages=3 columns=key>"


def test_plain_messages_have_nothing_beside_them() -> None:
    """They are held as before."""
    assert plain(AnnotatedRun(COLUMN, key=[7, 8, 9])) is COLUMN
    assert plain(MESSAGES) is MESSAGES


@pytest.mark.parametrize("run", [MESSAGES, COLUMN, AnnotatedRun(COLUMN)])
def test_size_is_that_of_the_messages(run: Run) -> None:
    """However they are held; no marker counts."""
    assert size_of(run) == 8


def test_joined_groups_are_held_as_before() -> None:
    """A list of groups as a list, replies in Arrow as a column."""
    groups = [(b"a", b"b"), (), (b"c",)]

    assert joined(groups) == [b"a", b"b", b"c"]
    column = joined(Replies.of(groups))
    assert isinstance(column, Column)
    assert list(column) == [b"a", b"b", b"c"]


def test_runs_of_one_kind_stay_of_that_kind() -> None:
    """Of two kinds, a list is what both can be."""
    assert concatenated([b"a"], [b"b"]) == [b"a", b"b"]
    assert isinstance(concatenated(COLUMN, COLUMN), Column)
    assert concatenated(COLUMN, [b"b"]) == [*MESSAGES, b"b"]
