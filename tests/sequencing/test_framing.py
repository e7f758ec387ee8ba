"""Fixed frames, lines, and the buffer that they are read from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import BytesIO
from itertools import chain, repeat
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etlstage.errors import ConfigError
from etlstage.sequencing.framing import (
    FIXED_FRAME_HEADER_LENGTH,
    FIXED_FRAME_WORD,
    MAX_FRAME,
    DesyncDetected,
    FixedFraming,
    FrameBuffer,
    FrameError,
    NotFrameable,
    UnexpectedEnd,
    encode_fixed_frame,
    framing_by_content_type,
    register_framing,
    unpack_fixed_frame,
    unpack_line,
)
from etlstage.sequencing.message import CsvRecord, Opaque

TEST = bytes.fromhex("6633933614000000") + b"test message content"
FOO = bytes.fromhex("663393360b000000") + b"foo message"


class Plain:
    """A message that consists only of bytes."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = data

    def size(self) -> int:
        """Return the number of bytes."""
        return len(self.data)

    def marshal_to(self, buffer: memoryview) -> int:
        """Write the bytes."""
        buffer[: len(self.data)] = self.data
        return len(self.data)

    def unmarshal(self, data: bytes) -> None:
        """Replace the bytes."""
        self.data = data


def held(data: bytes, *, max_frame: int = MAX_FRAME) -> FrameBuffer:
    """Return a buffer that was fed a whole journal."""
    buffer = FrameBuffer(max_frame=max_frame)
    buffer.feed(data)
    buffer.feed_end()
    return buffer


def outcomes(
    unpack: Callable[[FrameBuffer], bytes | None],
    data: bytes,
    pieces: Iterator[int] | None = None,
    *,
    max_frame: int = MAX_FRAME,
) -> list[object]:
    """Return the frames, and errors as tuples, of data fed in the given pieces."""
    buffer = FrameBuffer(max_frame=max_frame)
    found: list[object] = []
    while True:
        try:
            frame = unpack(buffer)
        except EOFError:
            return found
        except DesyncDetected as error:
            found.append((DesyncDetected, error.skipped, error.offset))
        except FrameError as error:
            found.append((type(error), error.reason))
        else:
            if frame is not None:
                found.append(frame)
            elif not data:
                assert not buffer.ended
                buffer.feed_end()
            else:
                size = next(pieces) if pieces else len(data)
                buffer.feed(data[:size])
                data = data[size:]


def test_fixed_frames_are_those_of_the_real_package() -> None:
    """A frame is a magic word, a length, and the bytes."""
    assert TEST[:4] == FIXED_FRAME_WORD
    assert FIXED_FRAME_HEADER_LENGTH == 8
    data = encode_fixed_frame(Plain(b"test message content"), bytearray())
    assert data == TEST
    assert encode_fixed_frame(Plain(b"foo message"), data) is data
    assert data == TEST + FOO
    assert outcomes(unpack_fixed_frame, bytes(data)) == [TEST, FOO]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (TEST[:7], "Peek(FixedFrameHeaderLength): unexpected EOF"),
        (TEST[:1], "Peek(FixedFrameHeaderLength): unexpected EOF"),
        (b"\n\n", "Peek(FixedFrameHeaderLength): unexpected EOF"),
        (TEST[:8], "reading frame (size 28): unexpected EOF"),
        (TEST[:19], "reading frame (size 28): unexpected EOF"),
        (TEST[:27], "reading frame (size 28): unexpected EOF"),
    ],
)
def test_fixed_frame_without_its_end(data: bytes, reason: str) -> None:
    """An incomplete frame at the end is dropped with an error."""
    assert outcomes(unpack_fixed_frame, FOO + data) == [FOO, (UnexpectedEnd, reason)]


@pytest.mark.parametrize("data", [b"", b"\n"])
def test_end_of_fixed_frames(data: bytes) -> None:
    """A newline is allowed at the end."""
    assert outcomes(unpack_fixed_frame, TEST + data) == [TEST]


@given(st.lists(st.integers(1, 9), max_size=9))
def test_desynchronized_bytes_are_shown_once(sizes: list[int]) -> None:
    """An error shows them, however they are split; reading resumes at the next word."""
    data = b"x" * 21 + TEST + b"yy" + FOO
    assert outcomes(unpack_fixed_frame, data, chain(sizes, repeat(5))) == [
        (DesyncDetected, b"x" * 21, 0),
        TEST,
        (DesyncDetected, b"yy", 49),
        FOO,
    ]


def test_desynchronized_bytes_at_the_end() -> None:
    """The last three bytes might be the beginning of a magic word."""
    assert outcomes(unpack_fixed_frame, FOO + b"z" * 20) == [
        FOO,
        (DesyncDetected, b"z" * 17, 19),
        (UnexpectedEnd, "Peek(FixedFrameHeaderLength): unexpected EOF"),
    ]
    assert outcomes(unpack_fixed_frame, b"zzzzzz" + TEST[:3]) == [
        (DesyncDetected, b"zzzzzz", 0),
        (UnexpectedEnd, "Peek(FixedFrameHeaderLength): unexpected EOF"),
    ]


@pytest.mark.parametrize("piece", [1 << 20, 65536, 65539, 1000])
def test_desynchronized_bytes_come_in_bounded_pieces(piece: int) -> None:
    """No single error holds more than 64 KiB of them."""

    def sizes() -> Iterator[int]:
        while True:
            yield piece

    data = b"\0" * 140_000 + FOO
    found = outcomes(unpack_fixed_frame, data, sizes())
    assert found == [
        (DesyncDetected, b"\0" * 65536, 0),
        (DesyncDetected, b"\0" * 65536, 65536),
        (DesyncDetected, b"\0" * 8928, 131072),
        FOO,
    ]


def test_word_behind_a_single_byte() -> None:
    """A magic word is found even after a single wrong byte."""
    assert outcomes(unpack_fixed_frame, b"x" + FOO) == [(DesyncDetected, b"x", 0), FOO]


def test_word_that_begins_within_the_word() -> None:
    """The search for the word resumes after the first byte."""
    data = b"\x66\x33" + FOO
    assert outcomes(unpack_fixed_frame, data) == [(DesyncDetected, b"\x66\x33", 0), FOO]


def test_fixed_frame_beyond_the_limit() -> None:
    """It is refused before memory is allocated; most likely it isn't a frame at all."""
    assert outcomes(unpack_fixed_frame, TEST + FOO, max_frame=28) == [TEST, FOO]
    data = TEST[:4] + b"\xff" * 4 + FOO
    assert outcomes(unpack_fixed_frame, data, max_frame=100) == [
        (
            FrameError,
            (
                "frame is 4294967303 bytes long, expected no more than 100 bytes"
                " (max_frame)"
            ),
        ),
        (DesyncDetected, b"\xff" * 4, 4),
        FOO,
    ]
    assert outcomes(unpack_fixed_frame, TEST + FOO, max_frame=27)[0] == (
        FrameError,
        "frame is 28 bytes long, expected no more than 27 bytes (max_frame)",
    )


@given(st.lists(st.binary(max_size=30), max_size=8), st.lists(st.integers(1, 40)))
def test_fixed_frames_come_back(messages: list[bytes], sizes: list[int]) -> None:
    """They are read correctly however the bytes are split."""
    data = bytearray()
    for message in messages:
        encode_fixed_frame(Plain(message), data)
    pieces = iter([*sizes, *[7] * len(data)])
    found = outcomes(unpack_fixed_frame, bytes(data), pieces)
    assert [frame[8:] for frame in found if isinstance(frame, bytes)] == messages
    assert len(found) == len(messages)


@given(st.lists(st.integers(1, 5), max_size=9))
def test_lines_end_with_a_newline(sizes: list[int]) -> None:
    """A last line without a newline is an error."""
    data = b"one\n\nthree\nfo"
    assert outcomes(unpack_line, data, chain(sizes, repeat(3))) == [
        b"one\n",
        b"\n",
        b"three\n",
        (UnexpectedEnd, "unexpected EOF"),
    ]


TOO_LONG = "frame is more than 5 bytes long, expected no more than 5 bytes (max_frame)"


def test_line_beyond_the_limit_is_dropped() -> None:
    """Only that line is dropped, however long it gets."""
    data = b"1234\n" + b"x" * 50 + b"\nok\n"
    found = outcomes(unpack_line, data, iter([9] * 20), max_frame=5)
    assert found == [b"1234\n", (FrameError, TOO_LONG), b"ok\n"]
    whole = outcomes(unpack_line, data, max_frame=5)
    assert whole == [
        b"1234\n",
        (FrameError, TOO_LONG.replace("more than 5", "51", 1)),
        b"ok\n",
    ]
    cut = outcomes(unpack_line, b"x" * 50, iter([9] * 20), max_frame=5)
    assert cut == [(FrameError, TOO_LONG)]


def test_buffer_knows_where_it_is() -> None:
    """The offset stays right after consumed bytes have been dropped."""
    buffer = FrameBuffer(1000)
    buffer.feed(b"a\nbc\nd")
    assert unpack_line(buffer) == b"a\n"
    assert buffer.offset == 1002
    buffer.feed(b"e")
    assert (buffer.offset, len(buffer)) == (1002, 5)
    assert unpack_line(buffer) == b"bc\n"
    assert unpack_line(buffer) is None
    buffer.feed(b"\n")
    assert unpack_line(buffer) == b"de\n"
    assert buffer.offset == 1008


def test_buffer_goes_on_elsewhere() -> None:
    """After a jump, the bytes that it held are returned and no longer used."""
    buffer = FrameBuffer(10)
    buffer.feed(b"ab")
    assert unpack_line(buffer) is None
    assert buffer.jump(500) == b"ab"
    assert buffer.offset == 500
    buffer.feed(b"c\n")
    assert unpack_line(buffer) == b"c\n"
    buffer.feed(b"xx")
    buffer.drop_line()
    assert buffer.dropping
    buffer.jump(600)
    assert not buffer.dropping


def test_framing_of_fixed_frames() -> None:
    """The framing writes a whole frame, and reads one into a message."""
    framing, written = FixedFraming(), BytesIO()
    framing.marshal(Plain(b"test message content"), written)
    assert written.getvalue() == TEST
    buffer = FrameBuffer(100)
    unmarshal, message = framing.unmarshaller(buffer), Plain()
    assert not unmarshal(message)
    buffer.feed(TEST)
    assert unmarshal(message)
    assert message.data == b"test message content"


def test_error_of_a_frame_names_place_and_framing() -> None:
    """The error has the text of the real package."""
    buffer = held(TEST[:19])
    buffer.jump(1000)
    buffer.feed(TEST[:19])
    with pytest.raises(UnexpectedEnd) as caught:
        FixedFraming().unmarshaller(buffer)(Plain())
    error = caught.value
    assert str(error) == (
        "framing.Unmarshal(offset 1000): reading frame (size 28): unexpected EOF"
    )
    assert (error.offset, error.framing, error.journal) == (
        1000,
        "application/x-protobuf-fixed",
        None,
    )
    assert str(FrameError("why")) == "why"


def test_message_that_does_not_parse_is_that_frame_alone() -> None:
    """The next frame is still read."""
    buffer = held(FOO + FOO[:4] + b"\x10\0\0\0" + b"u" * 16)
    unmarshal, message = FixedFraming().unmarshaller(buffer), Opaque()
    with pytest.raises(FrameError, match="expected a UUID of 16 bytes, got 11"):
        unmarshal(message)
    assert unmarshal(message)
    assert message.uuid.bytes == b"u" * 16
    with pytest.raises(EOFError):
        unmarshal(message)


@pytest.mark.parametrize(
    "act",
    [
        lambda framing: framing.marshal(CsvRecord(), BytesIO()),
        lambda framing: framing.unmarshaller(held(FOO))(CsvRecord()),
    ],
)
def test_message_that_lacks_what_a_framing_asks(
    act: Callable[[FixedFraming], object],
) -> None:
    """The error names the message's type and the framing."""
    with pytest.raises(
        NotFrameable,
        match=r"^CsvRecord can't be framed as application/x-protobuf-fixed: it is not"
        " a ProtoFrameable, which has",
    ):
        act(FixedFraming())


@pytest.fixture
def _registry() -> Iterator[None]:
    before = framing_by_content_type("application/x-protobuf-fixed")
    yield
    register_framing(before)


@pytest.mark.usefixtures("_registry")
def test_framing_replaces_what_had_its_name() -> None:
    """So a program may register its own framing."""
    mine: Any = FixedFraming()
    register_framing(mine)
    assert framing_by_content_type("application/x-protobuf-fixed") is mine


def test_unknown_content_type_names_the_known() -> None:
    """The error also suggests the one that was probably meant."""
    with pytest.raises(ConfigError, match=r"^unrecognized content-type \(\)"):
        framing_by_content_type("")
    with pytest.raises(ConfigError) as caught:
        framing_by_content_type("application/ndjson")
    text, known = str(caught.value).split("; known are ")
    assert text == (
        "unrecognized content-type (application/ndjson) (did you mean"
        " 'application/x-ndjson'?)"
    )
    # Importing the journals registers another one.
    assert {*known.split(", ")} >= {
        "application/x-ndjson",
        "application/x-protobuf-fixed",
        "text/csv",
    }


def test_slip_of_the_page_is_reported() -> None:
    """Go's documentation has test/csv where its code has text/csv."""
    with pytest.warns(UserWarning, match="'test/csv' is taken as 'text/csv'"):
        framing = framing_by_content_type("test/csv")
    assert framing is framing_by_content_type("text/csv")
