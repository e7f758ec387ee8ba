from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etlstage.columns import Column, Replies
from etlstage.errors import InvalidMessage
from etlstage.messages import AnnotatedRun
from etlstage.protocol.base import Limits, Side
from etlstage.protocol.events import Ended, Event
from etlstage.protocol.marker import MarkerProtocol, Markers, Mode, framing
from etlstage.protocol.marker.columnar import (
    encode_column,
    framing_of,
    split_column,
    split_replies,
)
from etlstage.testing.strategies import MARKER_SETS, chunkings, messages
from tests.protocol import strategies as draw
from tests.protocol.marker.twins import TWINS, using
from tests.protocol.words import Messages, tell

LIMIT = 1 << 20
marker_sets = st.sampled_from(MARKER_SETS)


def column(messages: list[bytes]) -> Column:
    """Return messages as an Arrow column, a slice of a larger array."""
    around = pa.array([b"before", *messages, b"behind"], pa.binary())
    return Column(around.slice(1, len(messages)))


def encoded(messages: list[bytes], markers: Markers, limit: int) -> object:
    """Return the list path's encoding of messages in Python, or its error."""
    try:
        with using("in Python"):
            return framing.encode_run(messages, markers, limit=limit)
    except InvalidMessage as refused:
        return (str(refused), refused.index)


def split(data: bytes, markers: Markers) -> object:
    """Return the list path's split of bytes in Python, or its error."""
    try:
        with using("in Python"):
            return framing.split_groups(data, markers)
    except framing.Unterminated as error:
        return (str(error), error.groups)


@given(data=st.data(), markers=marker_sets, limit=st.sampled_from([3, LIMIT]))
@draw.moderate
def test_messages_are_framed_as_by_the_list_path(
    data: st.DataObject, markers: Markers, limit: int
) -> None:
    """The same bytes, or the same error about the same message."""
    any_message = messages(markers) | draw.garbage(markers)
    run = data.draw(st.lists(any_message, max_size=5))
    for way in TWINS:
        try:
            with using(way):
                found: object = encode_column(column(run), markers, limit=limit)
        except InvalidMessage as refused:
            found = (str(refused), refused.index)
        assert found == encoded(run, markers, limit)


@given(data=st.data(), markers=marker_sets)
@draw.unmeasured
def test_replies_are_split_as_by_the_list_path(
    data: st.DataObject, markers: Markers
) -> None:
    """With none, one or many messages, empty or broken, whatever follows the last."""
    one = st.builds(lambda message: (message,), messages(markers))
    group = one if markers.eop == markers.eom else one | st.just(()) | many(markers)
    groups = data.draw(st.lists(group, max_size=5))
    wire = framing.encode_groups(groups, markers, limit=LIMIT) if groups else b""
    wire = wire[: data.draw(st.integers(0, len(wire)))] + data.draw(
        st.just(b"") | draw.garbage(markers)
    )
    for way in TWINS:
        for splits in split_column, framing.split_groups:
            try:
                with using(way):
                    replies, rest, count = splits(wire, markers)
                found: object = ([*replies], rest, count)
            except framing.Unterminated as error:
                found = (str(error), error.groups)
            assert found == split(wire, markers)


@pytest.mark.parametrize(
    ("wire", "markers"),
    [
        (b"a\nb", Markers()),
        (b"a\nb\nc", Markers(eop=b"\n")),
        (b"a\n\0b\n\0", Markers()),
        (b"a\n\0b\n\0\0", Markers()),
        (b"\0a\n\0", Markers()),
        (b"a\nb\n--c\n---", Markers(eop=b"--")),
        (b"a\nb\n\0\0c\n\0d", Markers()),
        (b"a\n\nb\n\n--c\n\n---", MARKER_SETS[3]),
        (b"a\n\n\nb\n\n--", MARKER_SETS[3]),
    ],
)
@pytest.mark.parametrize("way", TWINS)
def test_replies_are_split_in_each_way(way: str, wire: bytes, markers: Markers) -> None:
    """One example for each way of splitting."""
    with using(way):
        replies, rest, count = split_column(wire, markers)
    assert ([*replies], rest, count) == split(wire, markers)


@given(data=st.data(), markers=marker_sets)
@draw.unmeasured
def test_refusals_are_found_as_by_the_list_path(
    data: st.DataObject, markers: Markers
) -> None:
    """Among replies of any kind, sound or broken."""
    wire = data.draw(draw.garbage(markers))
    with using("in Python"):
        expected = framing.split_replies(wire, markers)
    for way in TWINS:
        with using(way):
            found = split_replies(wire, markers)
        assert [*found.groups] == expected.groups
        assert found[1:4] == expected[1:4]
        assert str(found.broken) == str(expected.broken)


def test_replies_with_refusals_among_them_stay_in_arrow() -> None:
    """A refusal does not cost an object for each message around it."""
    wire = b"a\n\0no\x15b\nc\n\0\0never\x15d"
    found = split_replies(wire, Markers())
    assert isinstance(found.groups, Replies)
    assert [*found.groups] == [(b"a",), (), (b"b", b"c"), (), ()]
    assert found[1:] == (b"d", 3, [(1, b"no"), (4, b"never")], None)
    one_to_one = split_replies(b"a\nno\x15b\n", Markers(eop=b"\n"))
    assert isinstance(one_to_one.groups, Replies)
    assert [*one_to_one.groups] == [(b"a",), (), (b"b",)]


@pytest.mark.parametrize("wire", [b"a\n\0b\0c\n\0", b"no\x15a\n\0b\0c\n\0"])
def test_what_comes_before_a_broken_reply_is_sound(wire: bytes) -> None:
    """Reasons of refusals, too; anything later is ignored."""
    found = split_replies(wire, Markers())
    assert [*found.groups][-1] == (b"a",)
    assert isinstance(found.broken, framing.Unterminated)
    assert str(found.broken) == "message without EOM before EOP"


def many(markers: Markers) -> st.SearchStrategy[tuple[bytes, ...]]:
    """Draw a reply of several messages."""
    return st.lists(messages(markers), max_size=4).map(tuple)


@pytest.mark.parametrize(
    "groups",
    [
        [(b"a",), (b"",), (b"ccc",), (b"d",)],
        [(b"a", b"b"), (), (b"",), (b"c", b"", b"d")],
        [(), (), (), ()],
    ],
)
@pytest.mark.parametrize("start", [0, 1, 3, 4])
@pytest.mark.parametrize("stop", [0, 2, 4, 9])
def test_slice_of_replies_knows_their_messages(
    groups: list[tuple[bytes, ...]], start: int, stop: int
) -> None:
    """A slice has just its own messages, each with the reply it belongs to."""
    wire = framing.encode_groups(groups, Markers(), limit=LIMIT)
    replies, _, _ = split_column(wire, Markers())
    assert isinstance(replies, Replies)
    part, expected = replies[start:stop], groups[start:stop]
    assert [*part] == expected
    assert part.values.to_pylist() == [m for group in expected for m in group]
    owners = [n for n, group in enumerate(expected) for _ in group]
    found = part.owners
    assert (found.to_pylist() if found is not None else [*range(len(part))]) == owners
    assert [*Replies.of(expected)] == expected
    assert Replies.of(part) is part


def test_list_goes_the_way_of_lists() -> None:
    """Messages that are retried may be a list instead of a column."""
    assert encode_column([b"a", b"b"], Markers(), limit=9) == b"a\nb\n"
    assert repr(Replies.of([(b"a", b"b"), ()])) == "<Replies replies=2 messages=2>"


@given(data=st.data(), markers=marker_sets)
@draw.moderate
def test_session_in_columns_sees_what_one_in_lists_sees(
    data: st.DataObject, markers: Markers
) -> None:
    """However the replies are cut into reads, faults included."""
    runs = st.lists(messages(markers), min_size=1, max_size=4)
    sent = data.draw(st.lists(runs, min_size=1, max_size=3))
    chunks = data.draw(draw.garbage(markers).flatmap(chunkings))
    limits = data.draw(st.sampled_from([Limits(), Limits(4)]))
    seen = []
    for held in (list, column):
        protocol = MarkerProtocol(
            Side.SUPERVISOR, Mode.SINGLE, markers, limits=limits, framing_of=framing_of
        )
        log: list[object] = []
        for run in sent:
            try:
                tell(protocol, Messages(held(run)))
            except InvalidMessage as refused:
                log.append((str(refused), refused.index))
        log.append(b"".join(protocol.data_to_send()))
        for chunk in chunks:
            protocol.receive_data(chunk)
            log += map(comparable, protocol.events_received())
        seen.append((log, protocol.state, protocol.owed))
    assert seen[0] == seen[1]


def test_column_with_something_beside_it_is_still_one() -> None:
    """It costs no object for each message, and keeps its annotations."""
    protocol = MarkerProtocol(
        Side.SUPERVISOR, Mode.SINGLE, Markers(), framing_of=framing_of
    )
    tell(protocol, Messages(AnnotatedRun(column([b"a", b"b"]), key=[1, 2])))
    assert b"".join(protocol.data_to_send()) == b"a\nb\n"
    protocol.receive_data(b"x\n\0y\n\0")
    (event,) = protocol.events_received()
    assert isinstance(event, Ended)
    assert isinstance(event.groups, Replies)


def comparable(event: Event) -> object:
    """Return the part of an event that does not depend on how its messages are held."""
    if isinstance(event, Ended):
        return [*event.groups], [*event.refusals]
    return str(event)
