"""
Framings: how messages are written to a journal one after another, and found there.

A framing writes one message, or reads one from a :class:`FrameBuffer`. It never takes a
byte after the message, so the offsets of messages are exact. Nothing here does I/O: the
caller feeds a buffer, and calls again with more bytes if a message was incomplete.

A damaged frame is an error of that frame only; the next call finds the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol, TypeAlias
from warnings import warn

from etlstage.errors import ConfigError, EtlstageError, guess

__all__ = (
    "FIXED_FRAME_HEADER_LENGTH",
    "FIXED_FRAME_WORD",
    "MAX_FRAME",
    "ByteWriter",
    "DesyncDetected",
    "FixedFraming",
    "FrameBuffer",
    "FrameError",
    "Framing",
    "NotFrameable",
    "ProtoFrameable",
    "UnexpectedEnd",
    "Unmarshaller",
    "asked",
    "encode_fixed_frame",
    "framing_by_content_type",
    "located",
    "register_framing",
    "unpack_fixed_frame",
    "unpack_line",
)

FIXED_FRAME_WORD: Final = b"\x66\x33\x93\x36"
"""The word that begins each fixed frame."""
FIXED_FRAME_HEADER_LENGTH: Final = 8
"""Bytes of the word and of the little-endian length that follows it."""
MAX_FRAME: Final = 64 << 20
"""Default of the maximum size of a frame, in bytes."""

_SKIPPED: Final = 1 << 16
"""Maximum number of bytes between frames that one error has."""


class FrameError(EtlstageError):
    """
    Raised when bytes of a journal are not a message of its framing.

    Attributes:
        reason: What is wrong.
        framing: The content type.
        offset: Where the frame begins; None if that is not known yet.
        end: Where the next frame begins; None as long as that has not been read.
        journal: Name of the journal, once a reader has set it.

    """

    def __init__(
        self, reason: str, *, framing: str = "", offset: int | None = None
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.framing = framing
        self.offset = offset
        self.end: int | None = None
        self.journal: str | None = None

    def __str__(self) -> str:
        if self.offset is None:
            return self.reason
        return f"framing.Unmarshal(offset {self.offset}): {self.reason}"


class UnexpectedEnd(FrameError):
    """Raised when a journal, or the range to be read, ends inside a frame."""


class DesyncDetected(FrameError):
    """
    Raised when no frame begins where one should.

    Attributes:
        skipped: The bytes up to the next word that begins a frame, or some of them.

    """

    def __init__(self, skipped: bytes, *, offset: int) -> None:
        super().__init__("detected de-synchronization", offset=offset)
        self.skipped = skipped


class NotFrameable(EtlstageError, TypeError):
    """Raised when a message lacks methods that a framing requires."""


class ByteWriter(Protocol):
    """The target to which frames are written."""

    def write(self, data: bytes, /) -> object:
        """Append ``data``."""


class FrameBuffer:
    """
    Bytes of a journal that have been read but not been taken as messages yet.

    Args:
        offset: Offset in the journal of the first byte that will be fed.
        max_frame: Maximum size of a frame, in bytes.

    Attributes:
        ended: Whether no more bytes will come.

    """

    def __init__(self, offset: int = 0, *, max_frame: int = MAX_FRAME) -> None:
        self.max_frame = max_frame
        self.ended: bool = False
        self._data: bytes | bytearray = b""
        self._at = 0
        self._offset = offset
        # How far the end of the next line has been searched for already.
        self._searched = 0
        self._dropping = False

    def __len__(self) -> int:
        return len(self._data) - self._at

    @property
    def offset(self) -> int:
        """Offset in the journal of the first byte that is held."""
        return self._offset + self._at

    def feed(self, data: bytes) -> None:
        """Append ``data``."""
        at, self._at = self._at, 0
        self._offset += at
        self._searched -= at
        if at == len(self._data):
            # Usually a frame comes in one piece, which need not be copied.
            self._data = data
            return
        if isinstance(self._data, bytes):
            self._data = bytearray(memoryview(self._data)[at:])
        elif at:
            del self._data[:at]
        self._data += data

    def feed_end(self) -> None:
        """Declare that no more bytes will come."""
        self.ended = True

    def jump(self, offset: int) -> bytes:
        """Continue at another offset of the journal; return the bytes held so far."""
        held = self.take(len(self))
        self._data, self._at, self._offset, self._searched = b"", 0, offset, 0
        self._dropping = False
        return held

    def peek(self, count: int) -> bytes:
        """Return the first ``count`` bytes, or fewer, and keep them."""
        return bytes(self._data[self._at : self._at + count])

    def find(self, word: bytes, start: int = 0) -> int:
        """Return where ``word`` begins, at ``start`` or later, or -1."""
        found = self._data.find(word, self._at + start)
        return found - self._at if found >= 0 else -1

    def take(self, count: int) -> bytes:
        """Remove and return the first ``count`` bytes."""
        data, at = self._data, self._at
        if isinstance(data, bytes):
            taken = data[at : at + count]
        else:
            taken = bytes(memoryview(data)[at : at + count])
        self._at += len(taken)
        return taken

    @property
    def dropping(self) -> bool:
        """Whether bytes are dropped up to a newline that has not been read yet."""
        if self._dropping:
            end = self._data.find(b"\n", self._at) + 1
            self._at = end or len(self._data)
            self._dropping = not (end or self.ended)
        return self._dropping

    def drop_line(self) -> None:
        """Drop all bytes that are held, and further ones up to the next newline."""
        self._at = len(self._data)
        self._dropping = True

    def line(self) -> bytes | None:
        """Return the next line; see :func:`unpack_line`."""
        if self.dropping:
            return None
        size = self._data.find(b"\n", max(self._at, self._searched)) + 1 - self._at
        if size > self.max_frame:
            self.take(size)
            raise self.too_big("", size)
        if size > 0:
            return self.take(size)
        self._searched = len(self._data)
        if len(self) > self.max_frame:
            self.drop_line()
            raise self.too_big("more than ", self.max_frame)
        if not self.ended:
            return None
        if self.take(len(self)):
            raise UnexpectedEnd("unexpected EOF")
        raise EOFError

    def too_big(self, more: str, size: int) -> FrameError:
        """Return the error for a frame beyond the limit."""
        return FrameError(
            f"frame is {more}{size} bytes long, expected no more than"
            f" {self.max_frame} bytes (max_frame)"
        )


Unmarshaller: TypeAlias = Callable[[Any], bool]
"""
Reads the next message from its buffer into the message that it is given.

It returns False if the buffer needs more bytes first. It raises EOFError if all
messages were read, and FrameError for a frame that is not a message.
"""


class Framing(Protocol):
    """How the messages of a content type are written to a journal."""

    @property
    def content_type(self) -> str:
        """The content type for which the framing is registered."""

    def marshal(self, message: Any, writer: ByteWriter) -> None:  # noqa: ANN401
        """
        Write a message.

        Raises:
            NotFrameable: If the message lacks methods that this framing requires.

        """

    def unmarshaller(self, buffer: FrameBuffer) -> Unmarshaller:
        """Return a function that reads the messages of a buffer."""


def asked(message: object, protocol: type, framing: str, *names: str) -> Any:  # noqa: ANN401
    """
    Return the first of the methods that a framing requires of a message.

    Raises:
        NotFrameable: If the message lacks one of them.

    """
    if not all(hasattr(message, name) for name in names):
        raise NotFrameable(
            f"{type(message).__name__} can't be framed as {framing}: it is not a"
            f" {protocol.__name__}, which has {' and '.join(names)}"
        )
    return getattr(message, names[0])


class ProtoFrameable(Protocol):
    """A message that can be written in a fixed frame."""

    def size(self) -> int:
        """Return the serialized size in bytes."""

    def marshal_to(self, buffer: memoryview) -> int:
        """Serialize to the beginning of ``buffer``; return the number of bytes."""

    def unmarshal(self, data: bytes) -> None:
        """Replace the content by that of ``data``; raises ValueError if it can't."""


def unpack_line(buffer: FrameBuffer) -> bytes | None:
    r"""
    Return the bytes through the next ``\n``, or None if more bytes are needed.

    Raises:
        EOFError: If there are no more lines.
        UnexpectedEnd: If the last line has no newline; the line is dropped.
        FrameError: If the line is longer than a frame may be; the line is dropped.

    """
    return buffer.line()


def unpack_fixed_frame(buffer: FrameBuffer) -> bytes | None:
    """
    Return the next fixed frame with its header, or None if more bytes are needed.

    Raises:
        EOFError: If there are no more frames; a newline may follow the last one.
        UnexpectedEnd: If the last frame is incomplete; the frame is dropped.
        DesyncDetected: If no frame begins here; the next call continues at the next
            word that may begin a frame.
        FrameError: If the header declares more bytes than a frame may have.

    """
    header = buffer.peek(FIXED_FRAME_HEADER_LENGTH)
    if len(header) < FIXED_FRAME_HEADER_LENGTH:
        if not buffer.ended:
            return None
        buffer.take(len(header))
        if header in {b"", b"\n"}:
            raise EOFError
        raise UnexpectedEnd("Peek(FixedFrameHeaderLength): unexpected EOF")
    if not header.startswith(FIXED_FRAME_WORD):
        _skip(buffer)
        return None
    size = FIXED_FRAME_HEADER_LENGTH + int.from_bytes(header[4:], "little")
    if size > buffer.max_frame:
        # Most likely this is not a header: search the bytes after its word for one.
        buffer.take(len(FIXED_FRAME_WORD))
        raise buffer.too_big("", size)
    if len(buffer) < size:
        if not buffer.ended:
            return None
        buffer.take(len(buffer))
        raise UnexpectedEnd(f"reading frame (size {size}): unexpected EOF")
    return buffer.take(size)


def _skip(buffer: FrameBuffer) -> None:
    at = buffer.find(FIXED_FRAME_WORD, 1)
    # The last three bytes may begin a word.
    count = at if at >= 0 else len(buffer) - len(FIXED_FRAME_WORD) + 1
    if at < 0 and not buffer.ended and count < _SKIPPED:
        # Wait: the error must not depend on the pieces in which the bytes come.
        return
    offset = buffer.offset
    raise DesyncDetected(buffer.take(min(count, _SKIPPED)), offset=offset)


def encode_fixed_frame(message: ProtoFrameable, buffer: bytearray) -> bytearray:
    """Append a message in a fixed frame to ``buffer``, and return ``buffer``."""
    size = message.size()
    start = len(buffer)
    buffer += FIXED_FRAME_WORD + size.to_bytes(4, "little") + bytes(size)
    with memoryview(buffer) as view:
        message.marshal_to(view[start + FIXED_FRAME_HEADER_LENGTH :])
    return buffer


class FixedFraming:
    """Messages as bytes, each preceded by a fixed word and its length."""

    content_type: Final = "application/x-protobuf-fixed"

    def marshal(self, message: Any, writer: ByteWriter) -> None:  # noqa: ANN401
        """Write a :class:`ProtoFrameable`."""
        asked(
            message,
            ProtoFrameable,
            self.content_type,
            "size",
            "marshal_to",
            "unmarshal",
        )
        writer.write(bytes(encode_fixed_frame(message, bytearray())))

    def unmarshaller(self, buffer: FrameBuffer) -> Unmarshaller:
        """Return a function that reads a :class:`ProtoFrameable`."""

        def unmarshal(message: Any) -> bool:  # noqa: ANN401
            take = asked(message, ProtoFrameable, self.content_type, "unmarshal")
            frame = unpack_fixed_frame(buffer)
            if frame is not None:
                take(frame[FIXED_FRAME_HEADER_LENGTH:])
            return frame is not None

        return located(unmarshal, buffer, self.content_type)


def located(take: Unmarshaller, buffer: FrameBuffer, framing: str) -> Unmarshaller:
    """Add offset and framing to the errors of an unmarshaller."""

    def unmarshal(message: Any) -> bool:  # noqa: ANN401
        begin = buffer.offset
        try:
            return take(message)
        except FrameError as error:
            error.offset, error.framing = begin, framing
            raise
        except (ValueError, RecursionError) as error:
            raise FrameError(str(error), framing=framing, offset=begin) from error

    return unmarshal


_FRAMINGS: Final[dict[str, Framing]] = {}
_SLIPS: Final = {"test/csv": "text/csv"}
"""Wrong content types that appear in documentation, and the ones that they mean."""


def register_framing(framing: Framing) -> None:
    """Register a framing by its content type, replacing an earlier one."""
    _FRAMINGS[framing.content_type] = framing


def framing_by_content_type(content_type: str) -> Framing:
    """
    Return the framing of a content type.

    Raises:
        ConfigError: If no framing is registered for it.

    """
    if (meant := _SLIPS.get(content_type)) is not None:
        warn(f"content type {content_type!r} is taken as {meant!r}", stacklevel=2)
        content_type = meant
    try:
        return _FRAMINGS[content_type]
    except KeyError:
        raise ConfigError(
            f"unrecognized content-type ({content_type})"
            f"{guess(content_type, _FRAMINGS)}; known are {', '.join(sorted(_FRAMINGS))}"
        ) from None


register_framing(FixedFraming())
