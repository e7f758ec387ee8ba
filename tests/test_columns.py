"""Messages and replies that are held in Arrow are sequences like lists."""

from __future__ import annotations

from itertools import product

import pyarrow as pa
import pytest

from etlstage import columns
from etlstage.columns import (
    Column,
    Epoch,
    Replies,
    array_of,
    content,
    extent,
    from_zero,
    one_of,
)
from tests.protocol.marker.twins import TWINS, using

MESSAGES = [b"one", b"", b"three"]


def column(*messages: bytes) -> Column:
    """Return messages as a column."""
    return Column(pa.array(messages, pa.binary()))


@pytest.fixture
def three() -> Column:
    """Return three messages, sliced from a longer column."""
    return column(b"cut", *MESSAGES)[1:]


def test_fingerprint_of_a_column_is_that_of_its_messages(three: Column) -> None:
    """Slices don't change it, but the places where messages end do."""
    whole = three.fingerprint((0, 0))
    assert three[1:].fingerprint(three[:1].fingerprint((0, 0))) == whole
    assert three[:0].fingerprint(whole) == whole
    assert column(b"one", b"thre", b"e").fingerprint((0, 0)) != whole
    assert column(b"one", b"", b"threE").fingerprint((0, 0)) != whole


def test_column_is_a_sequence_of_messages(three: Column) -> None:
    """Length, elements, slices, order."""
    assert len(three) == 3
    assert list(three) == MESSAGES
    assert three[2] == b"three"
    assert list(three[1:]) == [b"", b"three"]
    assert list(three + column(b"four")) == [*MESSAGES, b"four"]


def test_column_knows_its_size(three: Column) -> None:
    """Only the messages of a slice count."""
    assert three.size == 8
    assert three.longest == 5
    assert column().size == column().longest == 0
    assert repr(three) == "<Column messages=3 bytes=8>"


def test_content_is_what_is_in_the_column(three: Column) -> None:
    """The messages follow each other without a separator."""
    assert content(three.array) == b"onethree"
    assert content(column().array) == content(column(b"").array) == b""
    assert extent(three.array) == 8


GROUPS: list[tuple[bytes, ...]] = [(b"a",), (), (b"b", b"c")]


def test_replies_are_a_sequence_of_groups() -> None:
    """None, one or many messages each."""
    replies = Replies.of(GROUPS)

    assert list(replies) == GROUPS
    assert replies[-1] == (b"b", b"c")
    assert list(replies[1:]) == GROUPS[1:]
    assert list(replies[1:].messages) == [b"b", b"c"]
    assert repr(replies) == "<Replies replies=3 messages=3>"
    assert Replies.of(replies) is replies
    with pytest.raises(IndexError):
        replies[3]


def test_replies_of_one_message_each_need_no_offsets(three: Column) -> None:
    """The messages are the replies."""
    replies = Replies(three.array)

    assert list(replies) == [(message,) for message in MESSAGES]
    assert list(replies[1:].messages) == MESSAGES[1:]
    assert replies.owners is None


def test_replies_know_whose_a_message_is() -> None:
    """``owners`` has the number of each message's reply."""
    owners = Replies.of(GROUPS).owners

    assert owners is not None
    assert owners.to_pylist() == [0, 2, 2]


def test_replies_are_taken_in_order() -> None:
    """A slice with a step is not supported."""
    with pytest.raises(AssertionError, match="replies are taken in order"):
        Replies.of(GROUPS)[::2]


def test_first_piece_begins_at_zero() -> None:
    """Each further piece begins where the one before it ends."""
    assert from_zero(pa.array([2, 2, 5])).to_pylist() == [0, 2, 2, 5]


def test_replies_can_be_emptied() -> None:
    """The replies at the given places lose their messages; others keep theirs."""
    values = pa.array([b"a", b"b", b"c", b"d"], pa.binary())
    assert [*Replies(values).emptied([1, 3])] == [(b"a",), (), (b"c",), ()]
    offsets = pa.array([0, 1, 3, 3, 4], pa.int32())
    emptied = Replies(values, offsets).emptied([0])
    assert [*emptied] == [(), (b"b", b"c"), (), (b"d",)]
    assert [*emptied[1:2]] == [(b"b", b"c")]


def test_messages_keep_their_order_over_runs() -> None:
    """Small runs and big ones make one column."""
    epoch = Epoch()
    runs = [[b"a"], [b"b" * 200_000], [b"%d" % n for n in range(20_000)], [b"", b"\0"]]
    for run in runs:
        epoch.add(run, sum(map(len, run)))
    messages = [message for run in runs for message in run]
    assert epoch.messages == len(messages)
    assert epoch.size == sum(map(len, messages))
    assert epoch.binary().to_pylist() == messages


def test_large_columns_are_kept_as_they_are() -> None:
    """Their place between lists is kept, too."""
    epoch, column = Epoch(), Column(pa.array([b"x"] * 600, pa.binary()))
    for run in ([b"a"], column, [b"b"]):
        epoch.add(run, len(run))
    assert epoch.binary().num_chunks == 3
    assert epoch.binary().to_pylist() == [b"a", *column, b"b"]


def test_string_that_is_no_utf8_is_null() -> None:
    """One undecodable message costs none of its neighbours."""
    epoch = Epoch()
    epoch.add(["é".encode(), b"\xff", b"x"], 4)
    assert epoch.strings().to_pylist() == ["é", None, "x"]


def test_empty_epoch_has_empty_columns() -> None:
    """An epoch without messages still is two columns."""
    assert Epoch().binary().to_pylist() == []
    assert Epoch().strings().to_pylist() == []


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([b"a", b"", b"bc"], pa.binary()),
        ((b"a", b"bc"), pa.binary()),
        ([b"a", None, b""] * 5, pa.binary()),
        ([b"a", "x"], pa.string()),
        (["é", "", "x"], pa.string()),
        ([None, "x"], pa.string()),
        ([], pa.string()),
        ([1, None, -(2**63)], pa.int64()),
        ([2**31 - 1, -(2**31)], pa.int32()),
        ([0.5, None, float("inf"), -0.0], pa.float64()),
        ([True, None, False] * 5, pa.bool_()),
        ([], pa.int64()),
        ([1, 2.5], pa.float64()),
        ([[1], None], pa.list_(pa.int64())),
    ],
)
def test_values_in_arrow(
    values: list[object], kind: pa.DataType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are what Arrow itself makes of them, compiled or not, few or many."""
    for twin, before in product(TWINS, (0, columns._SPARED)):
        monkeypatch.setattr(columns._Spared, "count", before)
        with using(twin):
            made = array_of(values, kind)
        made.validate(full=True)
        assert made == pa.array(values, kind)


@pytest.mark.parametrize("before", [0, columns._SPARED])
def test_zero_keeps_its_sign(before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow's arrays are equal without it, so compare the text (issue 23)."""
    monkeypatch.setattr(columns._Spared, "count", before)
    for kind in (pa.float32(), pa.float64()):
        made = array_of([-0.0, 0.0, None], kind)
        assert repr(made.to_pylist()) == "[-0.0, 0.0, None]"


@pytest.mark.parametrize("value", [2**31, -(2**63) - 1, "1"])
def test_values_of_another_type_are_refused_by_arrow(
    value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is Arrow's own."""
    monkeypatch.setattr(columns._Spared, "count", 0)
    with pytest.raises((pa.ArrowInvalid, OverflowError)) as ours:
        array_of([value], pa.int32())
    with pytest.raises(type(ours.value)):
        pa.array([value], pa.int32())


def test_one_value_in_arrow() -> None:
    """Text, bytes or an integer."""
    assert one_of(7) == pa.scalar(7)
    assert one_of("é") == pa.scalar("é")
    assert one_of(b"x") == pa.scalar(b"x", pa.binary())
