from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etlstage.errors import InvalidMessage, LocalProtocolError
from etlstage.messages import Run, Singles
from etlstage.protocol.events import Refusal
from etlstage.protocol.marker import Markers
from etlstage.protocol.marker.framing import (
    Unterminated,
    encode_groups,
    encode_replies,
    encode_run,
    end_of,
    split_groups,
    split_replies,
    split_run,
)
from etlstage.testing.strategies import MARKER_SETS, messages, sendable
from tests.protocol.strategies import REPEATED, garbage, moderate

pytestmark = pytest.mark.usefixtures("twin")

DEFAULT = Markers()
ONE_TO_ONE = Markers(eop=b"\n")
Groups = list[tuple[bytes, ...]]


def refused(run: Run, markers: Markers = DEFAULT, *, limit: int = 100) -> str:
    """Return where and why a run is refused."""
    with pytest.raises(InvalidMessage) as caught:
        encode_run(run, markers, limit=limit)
    return f"{caught.value.index}: {caught.value}"


@pytest.mark.parametrize(
    ("run", "wire"),
    [
        ([], b""),
        ([b""], b"\n"),
        ([b"one"], b"one\n"),
        ([b"one", b"", b"two"], b"one\n\ntwo\n"),
        ([b"\xff\r"], b"\xff\r\n"),
    ],
)
def test_each_message_has_its_eom(run: Run, wire: bytes) -> None:
    """EOM ends a message, and is no separator: an empty message is one EOM."""
    assert encode_run(run, DEFAULT, limit=100) == wire


@pytest.mark.parametrize(
    ("groups", "wire"),
    [
        ([], b""),
        ([()], b"\0"),
        ([("a",)], b"a\n\0"),
        ([("a", "", "b")], b"a\n\nb\n\0"),
        ([("a",), ("b",)], b"a\n\0b\n\0"),
        ([(), ("a", "b"), ()], b"\0a\nb\n\0\0"),
        ([("",)], b"\n\0"),
        ([(), ("a", "b")], b"\0a\nb\n\0"),
    ],
)
def test_each_reply_has_its_eop(groups: list[tuple[str, ...]], wire: bytes) -> None:
    """With no message, one, or many; equal counts need not mean one message each."""
    encoded = [tuple(message.encode() for message in group) for group in groups]
    assert encode_groups(encoded, DEFAULT, limit=100) == wire


def test_reply_is_its_message_when_eop_is_eom() -> None:
    """One marker means both: the message is complete, and so is the reply."""
    groups: Groups = [(b"a",), (b"",), (b"b",)]
    assert encode_groups(groups, ONE_TO_ONE, limit=100) == b"a\n\nb\n"


@pytest.mark.parametrize(
    ("message", "name", "marker", "at"),
    [
        (b"\n", "eom", r"\012", 0),
        (b"ab\n", "eom", r"\012", 2),
        (b"a\0b", "eop", r"\000", 1),
        (b"\x17", "eob", r"\027", 0),
        (b"abc\x05d", "bnc", r"\005", 3),
        (b"a\x05b\n", "eom", r"\012", 3),
    ],
)
def test_message_with_a_marker_is_refused(
    message: bytes, name: str, marker: str, at: int
) -> None:
    """The error shows which marker, and where; EOM is searched for first."""
    assert refused([message]) == (
        f"0: message contains marker {name} '{marker}' at offset {at};"
        " choose other markers, or encode the message"
    )


def test_refusal_names_the_first_bad_message_of_a_run() -> None:
    """The error has the index, within the run, of the message to leave out."""
    assert refused([b"a", b"", b"b\0", b"\n"]).startswith(
        r"2: message contains marker eop '\000' at offset 1;"
    )


def test_refusal_does_not_show_the_message() -> None:
    """Contents of messages may be confidential."""
    assert "secret" not in refused([b"secret\n"])


def test_message_that_begins_the_eom_behind_it_is_refused() -> None:
    """LF before LF LF: a reader would see the boundary one byte too early."""
    assert refused([b"x", b"y\n"], REPEATED) == (
        r"1: message contains marker eom '\012\012' at offset 1;"
        " choose other markers, or encode the message"
    )


def test_eop_that_is_eom_is_not_looked_for_twice() -> None:
    """The EOM after each message is not an EOP within it."""
    assert encode_run([b"a", b"b"], ONE_TO_ONE, limit=100) == b"a\nb\n"
    assert refused([b"a\n"], ONE_TO_ONE).startswith("0: message contains marker eom")


def test_message_of_the_limit_is_sent() -> None:
    """The limit is inclusive, and EOM does not count."""
    assert encode_run([b"x" * 10] * 2, DEFAULT, limit=10) == b"xxxxxxxxxx\n" * 2


def test_message_over_the_limit_is_refused() -> None:
    """The error has both numbers, and names the setting."""
    assert refused([b"x" * 10, b"x" * 11], limit=10) == (
        "1: message is 11 bytes long, expected no more than 10 bytes; see max_message"
    )


def test_length_is_looked_at_before_markers() -> None:
    """A message that is too long is not searched."""
    assert "11 bytes long" in refused([b"\n" * 11], limit=10)


def test_refusal_is_the_callers_mistake() -> None:
    """The peer has not seen anything of the message."""
    assert issubclass(InvalidMessage, LocalProtocolError)


def test_index_in_replies_counts_messages() -> None:
    """All messages of all replies, in order, are one run."""
    with pytest.raises(InvalidMessage, match="marker bnc") as caught:
        encode_groups([(b"a",), (), (b"b", b"\x05")], DEFAULT, limit=100)
    assert caught.value.index == 2


@pytest.mark.parametrize(
    ("data", "run", "rest"),
    [
        (b"", [], b""),
        (b"a", [], b"a"),
        (b"\n", [b""], b""),
        (b"a\n\nb\nc", [b"a", b"", b"b"], b"c"),
    ],
)
def test_run_is_split_at_eom(data: bytes, run: Run, rest: bytes) -> None:
    """Bytes after the last EOM are an incomplete message."""
    assert split_run(data, b"\n") == (run, rest)


def test_eom_that_overlaps_itself_is_found_from_the_left() -> None:
    """Three LF are one EOM and the beginning of another message."""
    assert split_run(b"x\n\n\n", b"\n\n") == ([b"x"], b"\n")


@given(st.data(), st.sampled_from(MARKER_SETS))
@moderate
def test_splitting_a_run_undoes_encoding_it(
    data: st.DataObject, markers: Markers
) -> None:
    """Nothing is lost, added or moved, and nothing remains."""
    run = data.draw(st.lists(messages(markers), max_size=5))
    wire = encode_run(run, markers, limit=100)
    assert split_run(wire, markers.eom) == (run, b"")


@given(st.data(), st.sampled_from(MARKER_SETS))
@moderate
def test_splitting_replies_undoes_encoding_them(
    data: st.DataObject, markers: Markers
) -> None:
    """Even if they have no message, or many."""
    widths = (1, 1) if markers.eop == markers.eom else (0, 3)
    group = st.lists(messages(markers), min_size=widths[0], max_size=widths[1])
    groups = data.draw(st.lists(group.map(tuple), max_size=5))
    wire = encode_groups(groups, markers, limit=100)
    assert split_groups(wire, markers) == (groups, b"", sum(map(len, groups)))


@given(st.data(), st.sampled_from(MARKER_SETS))
@moderate
def test_message_is_sent_if_no_marker_begins_in_it(
    data: st.DataObject, markers: Markers
) -> None:
    """A run is refused because of a message in it, never because of its neighbors."""
    run = data.draw(st.lists(garbage(markers) | messages(markers), max_size=4))
    sound = [sendable(message, markers) for message in run]
    if all(sound):
        encode_run(run, markers, limit=100)
    else:
        assert refused(run, markers).startswith(f"{sound.index(False)}: ")


def slowly(data: bytes, markers: Markers) -> tuple[Groups, bytes] | Groups:
    """Return what ``split_groups`` should, found message by message; faults: a list."""
    eom, eop = markers.eom, markers.eop
    groups: Groups = []
    while (end := data.find(eop)) >= 0:
        part, data = data[:end], data[end + len(eop) :]
        group = []
        if eop == eom:
            group.append(part)
            part = b""
        elif part and not part.endswith(eom):
            return groups
        while part:
            at = part[: -len(eom)].find(eom)
            at = at if at >= 0 else len(part) - len(eom)
            group.append(part[:at])
            part = part[at + len(eom) :]
        groups.append(tuple(group))
    return groups, data


@given(st.data(), st.sampled_from(MARKER_SETS))
@moderate
def test_fast_way_finds_what_the_slow_way_finds(
    data: st.DataObject, markers: Markers
) -> None:
    """Counting markers in bulk is a shortcut that must not change the result."""
    wire = data.draw(garbage(markers))
    try:
        *found, _ = split_groups(wire, markers)
    except Unterminated as fault:
        found = list(fault.groups)
    assert found == [*slowly(wire, markers)]


def test_refusals_are_found_among_the_replies() -> None:
    """Each with its place, and everything that was written before its ERR."""
    found = split_replies(b"a\n\0no\x15b\n\0c\n\0\x15d", DEFAULT)
    assert found.groups == [(b"a",), (), (b"b",), (b"c",), ()]
    assert found[1:] == (b"d", 3, [(1, b"no"), (4, b"")], None)
    assert isinstance(found.groups, Singles)
    found = split_replies(b"a\n\0no\x15b\nc\n\0\0\x15", DEFAULT)
    assert found.groups == [(b"a",), (), (b"b", b"c"), (), ()]


def test_refusals_before_a_broken_reply_are_found() -> None:
    """Anything after it is not."""
    found = split_replies(b"no\x15a\n\0oops\0b\x15", DEFAULT)
    assert found.groups == [(), (b"a",)]
    assert found.reasons == [(0, b"no")]
    assert str(found.broken) == "message without EOM before EOP"


@pytest.mark.parametrize("markers", [DEFAULT, DEFAULT.without_err()])
def test_end_of_so_many_replies(markers: Markers) -> None:
    """Refusals count as replies, where they are allowed."""
    wire = b"a\n\0no\x15\0b\n\0"
    ends = [0, 3, 6, 7, 10] if markers.err else [0, 3, 7, 10]
    assert [end_of(wire, markers, n) for n in range(len(ends))] == ends


def test_refusals_are_written_among_the_replies() -> None:
    """In place of their replies."""
    refusals = [Refusal(0, 0, 0, "no"), Refusal(3, 0, 0, "never")]
    groups: Groups = [(), (b"a",), (b"b",), ()]
    wire = encode_replies(groups, refusals, DEFAULT, limit=100)
    assert wire == b"no\x15a\n\0b\n\0never\x15"
    assert encode_replies(groups, (), DEFAULT, limit=100) == b"\0a\n\0b\n\0\0"


@pytest.mark.parametrize(
    ("groups", "index"),
    [
        ([(b"a\n",), (), (b"c",)], 0),
        ([(b"a", b"b"), (), (b"c", b"d\0")], 3),
    ],
)
def test_message_that_can_t_be_sent_among_refusals(groups: Groups, index: int) -> None:
    """Its index counts the messages of all replies."""
    with pytest.raises(InvalidMessage) as caught:
        encode_replies(groups, [Refusal(1, 0, 0, "no")], DEFAULT, limit=100)
    assert caught.value.index == index
