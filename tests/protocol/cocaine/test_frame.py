"""How frames are cut from received bytes, and which frames are refused."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etlstage.errors import PayloadTooBig, RemoteProtocolError
from etlstage.messages import MOST_TEXT, OVERHEAD
from etlstage.protocol.cocaine import frame
from etlstage.protocol.cocaine.frame import (
    ONE,
    ZERO,
    Encoding,
    Frames,
    HeaderTable,
    Outgoing,
    Packer,
    Words,
    text_of,
    unpacked_text,
)

MiB = 1024 * 1024


def feed(frames: Frames, data: bytes, size: int) -> None:
    """Feed a few bytes at a time."""
    for at in range(0, len(data), size):
        list(frames.feed(data[at : at + size]))


def test_frames_come_when_they_are_complete() -> None:
    """Wherever the bytes are cut."""
    frames = Frames(100)

    assert list(frames.feed(b"\x93\x00\x00\x90\x93\x01")) == [(0, 0, ())]
    assert list(frames.feed(b"\x00")) == []
    assert list(frames.feed(b"\x90")) == [(1, 0, ())]


def test_end_of_each_frame_is_known_when_it_comes() -> None:
    """As an offset in all bytes fed so far."""
    frames = Frames(100)
    data = b"\x93\x01\x00\x90"
    assert [frames.end for _ in frames.feed(data * 2 + b"\x93")] == [4, 8]


def test_strings_of_all_kinds_are_read() -> None:
    """Raw strings, those of msgpack 1, and bytes that are not UTF-8."""
    text = b"\xff" * 40
    every = [
        b"\xa3abc",
        b"\xd9\x28" + text,
        b"\xda\x00\x28" + text,
        b"\xdb\x00\x00\x00\x28" + text,
        b"\xc4\x28" + text,
        b"\xc5\x00\x28" + text,
        b"\xc6\x00\x00\x00\x28" + text,
    ]

    found = list(Frames(100).feed(b"".join(every)))

    assert found == [b"abc", *[text] * 6]


@pytest.mark.parametrize(
    ("encoding", "event", "chunk"),
    [
        (Encoding.RAW, "da0028", "da0028"),
        (Encoding.BIN_CHUNKS, "da0028", "c428"),
        (Encoding.BIN, "c428", "c428"),
    ],
)
def test_strings_are_sent_as_workers_read_them(
    encoding: Encoding, event: str, chunk: str
) -> None:
    """Never as str8, which the runtimes of that time did not have."""
    packer = Packer(encoding)
    text = b"x" * 40

    assert packer.pack(text) == bytes.fromhex(event) + text
    assert packer.pack_payload(text) == bytes.fromhex(chunk) + text


@pytest.mark.parametrize("head", [b"\xdb\0\0\0\x65", b"\xc6\0\0\0\x65"])
def test_payload_that_is_too_long_is_refused(head: bytes) -> None:
    """The error names the setting for the limit."""
    with pytest.raises(PayloadTooBig, match=r"longer than 100 bytes; see max_message"):
        list(Frames(100).feed(head + b"x" * 101))


def test_payload_is_not_waited_for_that_is_much_too_long() -> None:
    """A declared length costs no memory."""
    frames = Frames(100)

    # msgpack 1.0.3 refuses the length itself, later versions the bytes that follow.
    refused = r"is longer than (100|131172) bytes; see max_mess"
    with pytest.raises(PayloadTooBig, match=refused):
        feed(frames, b"\xc6\xff\xff\xff\xff" + b"x" * 10 * 65536, 65536)


@pytest.mark.parametrize("size", [65536, 1024 * 1024])
def test_frame_of_many_small_parts_is_too_long(size: int) -> None:
    """Even if it consists of nothing but meaningless elements."""
    frames = Frames(100)
    data = (b"\xdc\x10\x00" + b"\xc0" * 4095) * (MiB // 4096)

    with pytest.raises(PayloadTooBig, match="frame is longer than 131172 bytes"):
        feed(frames, data, size)


def test_long_run_of_frames_is_not_a_long_frame() -> None:
    """Complete frames no longer count towards the limit."""
    one = msgpack.packb([4, 1, [b"x" * 90]])

    assert len(list(Frames(100).feed(one * 40_000))) == 40_000


@pytest.mark.parametrize(
    "data",
    [
        b"\xc1",
        b"\x91" * 5000,
        b"\xdd\x00\x01\x00\x00",
        b"\xdf\x00\x01\x00\x00",
        b"\x81\x91\x80\x00",
    ],
    ids=["no type", "too deep", "too wide", "too many", "no key"],
)
def test_what_is_no_msgpack_or_too_much_of_it_is_a_fault(data: bytes) -> None:
    """The peer's fault, whatever the unpacker calls it."""
    with pytest.raises(RemoteProtocolError, match="expected msgpack frames"):
        list(Frames(100).feed(data))


def test_names_are_text() -> None:
    """Bytes that are not UTF-8 are escaped, not lost."""
    assert text_of(b"caf\xc3\xa9 \xff", "name") == "café \\xff"
    with pytest.raises(
        RemoteProtocolError, match="name is a number, expected a string"
    ):
        text_of(3, "name")
    with pytest.raises(RemoteProtocolError, match="name is float, expected a string"):
        text_of(3.5, "name")
    with pytest.raises(PayloadTooBig, match="name is 65537 bytes long"):
        text_of(b"x" * (MOST_TEXT + 1), "name")


def test_payload_may_be_packed_once_more() -> None:
    """As version 0 of the Python framework does; other values are not messages."""
    assert unpacked_text(b"\xa3one") == b"one"
    assert unpacked_text(b"\xc4\x03one") == b"one"
    for no_text in (b"", b"\x01", b"\xa3on", b"\xa3one\x00", b"\xc1", b"\x81\x80\x00"):
        assert unpacked_text(no_text) is None


# --- headers --------------------------------------------------------------------


ZEROS = bytes(8)


def test_frame_of_a_runtime_refers_to_what_it_has_stored() -> None:
    """A Python worker 0.12.14.5 reads its headers in the same way."""
    table = HeaderTable()

    assert table.read((80, (True, b"PING", b"A"))) == (
        (b"trace_id", ZEROS),
        (b"PING", b"A"),
    )
    assert table.read(((False, 83, b"B"),)) == ((b"PING", b"B"),)
    assert table.read((83,)) == ((b"PING", b"A"),)
    assert table.read(()) == ()


def test_entries_are_those_of_hpack() -> None:
    """The entries of RFC 7541, appendix A, and three for tracing."""
    entries = HeaderTable().read((1, 2, 16, 32, 58, 61, 79, 81, 82))

    assert [name for name, _ in entries] == [
        *(b":authority", b":method", b"accept-encoding", b"cookie", b"user-agent"),
        *(b"www-authenticate", b"", b"span_id", b"parent_id"),
    ]


def test_what_is_stored_last_comes_first() -> None:
    """Earlier entries move up."""
    table = HeaderTable()
    table.read(((True, b"a", b"1"), (True, b"b", b"2")))

    assert table.read((83, 84)) == ((b"b", b"2"), (b"a", b"1"))


def test_table_forgets_the_oldest() -> None:
    """Each entry costs 32 bytes more than its own; the table has 4096 bytes."""
    table = HeaderTable()
    table.read(tuple((True, b"%04d" % n, bytes(28)) for n in range(65)))

    assert table.read((83, 83 + 63))[1][0] == b"0001"
    with pytest.raises(RemoteProtocolError, match="there is no header 147"):
        table.read((83 + 64,))


def test_entry_that_is_too_large_empties_the_table() -> None:
    """The header itself is still read."""
    table = HeaderTable()

    assert table.read(((True, b"a", b"1"), (True, b"b", bytes(5000))))[1][0] == b"b"
    with pytest.raises(RemoteProtocolError, match="there is no header 83"):
        table.read((83,))


@pytest.mark.parametrize(
    "headers",
    [
        b"x",
        None,
        (0,),
        (-1,),
        (True,),
        (b"x",),
        ((True, b"a"),),
        ((1, b"a", b"b"),),
        ((True, None, b"b"),),
        ((True, b"a", None),),
        ((True, 83, b"b"),),
    ],
)
def test_what_is_no_header_is_a_fault(headers: object) -> None:
    """The peer's fault."""
    with pytest.raises(RemoteProtocolError, match="header"):
        HeaderTable().read(headers)


# --- writing --------------------------------------------------------------------


@pytest.mark.parametrize("words", [ZERO, ONE])
@pytest.mark.parametrize("encoding", Encoding)
@pytest.mark.parametrize("packed", [False, True])
def test_whole_sessions_are_what_their_frames_are_one_by_one(
    words: Words, encoding: Encoding, packed: bool
) -> None:
    """For an event name and session numbers of any length (issue 15)."""
    at_once, one_by_one = (Outgoing(words, encoding, packed=packed) for _ in range(2))
    messages = [b"%d" % number * 100 for number in range(9)]
    for first in (2, 120, 65530):
        at_once.whole(first, "100 %b", messages)
        for number, message in enumerate(messages, first):
            one_by_one.invoke(number, "100 %b", ())
            one_by_one.chunks(number, [message])
            one_by_one.choke(number)

    assert at_once.take() == one_by_one.take()


def test_what_is_about_the_connection_overtakes_but_not_the_end() -> None:
    """A terminate comes after everything that was sent before it."""
    out = Outgoing(ONE, Encoding.RAW, packed=False)
    out.chunks(2, [b"x"])
    out.terminate(1, "no")
    out.beat()

    beat, chunk, end = "93010090", "93020091a178", "930101" + "92" + "01" + "a26e6f"
    assert out.take() == [bytes.fromhex(beat + chunk + end)]
    assert out.take() == []


def test_what_was_not_taken_can_be_forgotten() -> None:
    """All frames, or only those of sessions."""
    out = Outgoing(ONE, Encoding.RAW, packed=False)
    for forget, left in ((out.drop, 1), (out.clear, 0)):
        out.choke(2)
        out.beat()
        forget()
        assert len(out.take()) == left


def test_memory_of_what_was_not_taken_is_known() -> None:
    """Each frame takes more than its bytes (issue 22)."""
    out = Outgoing(ONE, Encoding.RAW, packed=False)
    out.chunks(2, [b"a", b"b"])
    assert out.unsent == 2 * (6 + OVERHEAD)
    out.take()
    assert out.unsent == 0


def test_short_frames_are_one_piece_and_a_long_one_is_not_copied() -> None:
    """Each piece costs a system call."""
    out = Outgoing(ONE, Encoding.RAW, packed=False)
    out.chunks(2, [b"a", b"b", bytes(300_000), b"c"])

    assert [len(piece) for piece in out.take()] == [16, 300_005]
    assert [len(piece) for piece in out.take()] == [6]
    assert out.take() == []


@pytest.mark.parametrize("words", [ZERO, ONE])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["chunks", "whole", "beat"]),
            st.lists(st.integers(0, 100), max_size=20),
            st.integers(0, 3),
        )
    )
)
def test_heartbeat_comes_between_frames_and_never_inside_one(
    words: Words, steps: list[tuple[str, list[int], int]]
) -> None:
    """Whatever the sizes, and whenever the bytes are taken (issue 22)."""
    out = Outgoing(words, Encoding.RAW, packed=False)
    given_, taken, beats = [], b"", 0
    with patch.object(frame, "_TURN", 64):
        for what, sizes, times in steps:
            messages = [b"x" * size for size in sizes]
            if what == "beat":
                out.beat()
                beats += 1
            else:
                given_ += messages
            if what == "chunks":
                out.chunks(2, messages)
            elif what == "whole":
                out.whole(130, "e", messages)
            for _ in range(times):
                taken += b"".join(out.take())
        while pieces := out.take():
            taken += b"".join(pieces)

    found: list[Any] = list(Frames(100).feed(taken))
    control = 0 if words.channel_first else 1
    assert [each[control] for each in found].count(words.control) == beats
    arguments = [each[2][0] for each in found if each[2]]
    assert [each for each in arguments if each != b"e"] == given_
