"""How frames are cut from what was received, and what they may not be."""

from __future__ import annotations

import msgpack
import pytest

from etlstage.errors import PayloadTooBig, RemoteProtocolError
from etlstage.protocol.cocaine.frame import (
    MOST_TEXT,
    ONE,
    Encoding,
    Frames,
    Packer,
    Version,
    packed_text,
    text_of,
    unpacked_text,
)

MiB = 1024 * 1024


def feed(frames: Frames, data: bytes, size: int) -> None:
    """Feed a few bytes at a time."""
    for at in range(0, len(data), size):
        list(frames.feed(data[at : at + size]))


def test_frames_come_when_they_are_complete() -> None:
    """However the bytes are cut."""
    frames = Frames(100)

    assert list(frames.feed(b"\x93\x00\x00\x90\x93\x01")) == [(0, 0, ())]
    assert list(frames.feed(b"\x00")) == []
    assert list(frames.feed(b"\x90")) == [(1, 0, ())]


def test_strings_of_all_kinds_are_read() -> None:
    """Raw, those of msgpack 1, and what is no UTF-8."""
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
    """Never as str8, which the runtimes of that day did not have."""
    packer = Packer(encoding)
    text = b"x" * 40

    assert packer.pack(text) == bytes.fromhex(event) + text
    assert packer.pack_payload(text) == bytes.fromhex(chunk) + text


@pytest.mark.parametrize("head", [b"\xdb\0\0\0\x65", b"\xc6\0\0\0\x65"])
def test_payload_that_is_too_long_is_refused(head: bytes) -> None:
    """With the setting that says how long it may be."""
    with pytest.raises(PayloadTooBig, match=r"longer than 100 bytes; see max_message"):
        list(Frames(100).feed(head + b"x" * 101))


def test_payload_is_not_waited_for_that_is_much_too_long() -> None:
    """What it says about its length costs nobody memory."""
    frames = Frames(100)

    assert list(frames.feed(b"\xc6\xff\xff\xff\xff")) == []
    with pytest.raises(
        PayloadTooBig, match="is longer than 131172 bytes; see max_mess"
    ):
        feed(frames, b"x" * 10 * 65536, 65536)


@pytest.mark.parametrize("size", [65536, 1024 * 1024])
def test_frame_of_many_small_parts_is_too_long(size: int) -> None:
    """Of nothing but elements that say nothing."""
    frames = Frames(100)
    data = (b"\xdc\x10\x00" + b"\xc0" * 4095) * (MiB // 4096)

    with pytest.raises(PayloadTooBig, match="frame is longer than 131172 bytes"):
        feed(frames, data, size)


def test_long_run_of_frames_is_not_a_long_frame() -> None:
    """Frames that have come are not counted."""
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
    """One of the peer, whatever the unpacker calls it."""
    with pytest.raises(RemoteProtocolError, match="expected frames of msgpack"):
        list(Frames(100).feed(data))


def test_names_are_text() -> None:
    """Of which nothing is lost that is no UTF-8."""
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
    """As the Python framework of version 0 does; what else it packs is no message."""
    assert packed_text(b"one") == b"\xa3one"
    assert unpacked_text(b"\xa3one") == b"one"
    assert unpacked_text(b"\xc4\x03one") == b"one"
    for no_text in (b"", b"\x01", b"\xa3on", b"\xa3one\x00", b"\xc1", b"\x81\x80\x00"):
        assert unpacked_text(no_text) is None


def test_version_has_its_words() -> None:
    """But for the one that is found out."""
    assert Version.ONE.words is ONE
    assert Version.AUTO.words is None
