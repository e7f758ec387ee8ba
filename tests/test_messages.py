"""Runs of messages and replies, and texts about them."""

from __future__ import annotations

import sys

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etlstage.columns import OVERHEAD as COLUMN_OVERHEAD
from etlstage.columns import Column, Replies
from etlstage.messages import (
    MOST_TEXT,
    OVERHEAD,
    AnnotatedRun,
    Run,
    Singles,
    check_code,
    check_text,
    concatenated,
    cost_of,
    counted,
    joined,
    plain,
    refuse_one,
    size_of,
    sound,
)

MESSAGES = [b"one", b"", b"three"]
COLUMN = Column(pa.array(MESSAGES, pa.binary()))


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 messages"), (1, "1 message"), (2, "2 messages"), (4000, "4,000 messages")],
)
def test_a_count_is_reported_with_its_noun(count: int, words: str) -> None:
    """One message is not "1 messages"."""
    assert counted(count, "message") == words


def test_a_count_of_what_has_a_plural_of_its_own() -> None:
    """The plural of "reply" is not "replys"."""
    assert counted(1, "reply", "replies") == "1 reply"
    assert counted(2, "reply", "replies") == "2 replies"


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
    """They stay in the container that they were in."""
    assert plain(AnnotatedRun(COLUMN, key=[7, 8, 9])) is COLUMN
    assert plain(MESSAGES) is MESSAGES


@pytest.mark.parametrize("run", [MESSAGES, COLUMN, AnnotatedRun(COLUMN)])
def test_size_is_that_of_the_messages(run: Run) -> None:
    """Their container does not matter, and no marker counts."""
    assert size_of(run) == 8


def test_cost_is_that_of_memory() -> None:
    """An object takes far more than a short message has; Arrow does not (issue 10)."""
    assert cost_of(MESSAGES) == 8 + 3 * OVERHEAD
    assert cost_of(COLUMN) == cost_of(AnnotatedRun(COLUMN)) == 8 + 3 * COLUMN_OVERHEAD
    for length in range(2, 100):
        size = sys.getsizeof(b"x" * length)
        assert -(-size // 16) * 16 + 8 <= length + OVERHEAD


def test_joined_groups_are_held_as_before() -> None:
    """A list of groups becomes a list, replies in Arrow become a column."""
    groups = [(b"a", b"b"), (), (b"c",)]

    assert joined(groups) == [b"a", b"b", b"c"]
    column = joined(Replies.of(groups))
    assert isinstance(column, Column)
    assert list(column) == [b"a", b"b", b"c"]


@given(
    replies=st.lists(st.sampled_from([(b"a",), (b"b",), ()]), max_size=12),
    start=st.integers(-14, 14),
    end=st.none() | st.integers(-14, 14),
)
def test_replies_of_one_message_may_have_gaps(
    replies: list[tuple[bytes, ...]], start: int, end: int | None
) -> None:
    """They behave as a list of them would, whatever the slice (issue 10)."""
    gaps = [place for place, reply in enumerate(replies) if not reply]
    found = Singles([message for reply in replies for message in reply], gaps)
    assert (list(found), len(found)) == (replies, len(replies))
    assert repr(found) == f"<Singles replies={len(replies)}>"
    assert [found[at] for at in range(-len(replies), len(replies))] == replies * 2
    part = found[start:end]
    assert list(part) == replies[start:end]
    assert list(part[1:3]) == replies[start:end][1:3]
    assert joined(part) == [message for reply in part for message in reply]


def test_runs_of_one_kind_stay_of_that_kind() -> None:
    """Runs of two kinds become a list."""
    assert concatenated([b"a"], [b"b"]) == [b"a", b"b"]
    assert isinstance(concatenated(COLUMN, COLUMN), Column)
    assert concatenated(COLUMN, [b"b"]) == [*MESSAGES, b"b"]
    first = AnnotatedRun(COLUMN, key=(1, 2, 3), row=[4, 5, 6])
    run = concatenated(first, AnnotatedRun(COLUMN[:1], key=[7]))
    assert isinstance(run, AnnotatedRun)
    assert run.columns == {"key": [1, 2, 3, 7]}
    assert isinstance(run.messages, Column)
    assert [*run] == [*MESSAGES, MESSAGES[0]]


# --- what callers give ---------------------------------------------------------------


@pytest.mark.parametrize(
    "run", [MESSAGES, tuple(MESSAGES), [bytearray(b"one"), b"", memoryview(b"three")]]
)
def test_messages_of_a_caller_become_a_list_of_bytes(run: object) -> None:
    """The caller may reuse the list and the buffers (issue 10)."""
    messages, error = sound(run)

    assert (messages, error) == (MESSAGES, None)
    assert messages is not run
    assert set(map(type, messages)) == {bytes}


@pytest.mark.parametrize("run", [COLUMN, AnnotatedRun(COLUMN, key=[7, 8, 9])])
def test_columns_of_a_caller_stay_columns(run: Run) -> None:
    """An object for each message would cost more than the message."""
    messages, error = sound(run)

    assert error is None
    assert plain(messages) is COLUMN


def test_what_comes_before_a_mistake_is_sound() -> None:
    """Columns beside the messages are cut with them (issue 10)."""
    run = AnnotatedRun([b"a", b"b", "c", b"d"], key=[1, 2, 3, 4])  # type: ignore[list-item]
    messages, error = sound(run, 10)

    assert list(messages) == [b"a", b"b"]
    assert isinstance(messages, AnnotatedRun)
    assert messages.columns == {"key": [1, 2]}
    assert str(error) == "message 13 is str, expected bytes"


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (b"abc", "expected a run of messages, got bytes"),
        ({b"abc"}, "expected a run of messages, got set"),
        (None, "expected a run of messages, got None"),
        (AnnotatedRun([b"a"], key=[]), "column key does not hold a value for each"),
        (AnnotatedRun([b"a"], key=5), "column key does not hold a value for each"),  # type: ignore[arg-type]
        (Column(pa.array(["a"])), "expected an Arrow array of binary, got string"),
        (Column(pa.array([None], pa.binary())), "message is null in 1 of 1"),
    ],
)
def test_what_is_no_run_is_reported(run: object, text: str) -> None:
    """No message of it is accepted (issue 10)."""
    messages, error = sound(run)

    assert len(messages) == 0
    assert str(error).startswith(text)


@pytest.mark.parametrize("one", ["abc", b"abc", bytearray(b"abc")])
def test_one_message_is_no_list_of_messages(one: object) -> None:
    """Its letters would be taken for messages."""
    with pytest.raises(TypeError, match=r"put a single message in a list: \[message"):
        refuse_one(one)
    refuse_one([one])


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("1", TypeError),
        (True, TypeError),
        (2**63, ValueError),
        (-(2**63) - 1, ValueError),
    ],
)
def test_code_that_can_not_be_sent(code: object, kind: type[Exception]) -> None:
    """A frame holds whole numbers of 64 bits (issue 22)."""
    with pytest.raises(kind, match=r"^code is "):
        check_code(code)
    assert [check_code(-(2**63)), check_code(2**63 - 1)] == [-(2**63), 2**63 - 1]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (b"shout", TypeError),
        ("\ud800", ValueError),
        ("ä" * (MOST_TEXT // 2) + "a", ValueError),
    ],
)
def test_text_that_can_not_be_sent(text: object, kind: type[Exception]) -> None:
    """It must be UTF-8, and has a limit in bytes (issue 22)."""
    with pytest.raises(kind, match=r"^event "):
        check_text("event", text)
    check_text("event", "ä" * (MOST_TEXT // 2))
