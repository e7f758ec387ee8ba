"""
Frames: what they are made of in each version of the protocol, and how they are cut.

Nothing here knows what may follow what; see ``session.py``. A frame is an array of
msgpack with at least three elements: two numbers, of which one says to which session it
belongs and one what it is, and the arguments. Version 1 adds headers; what is behind
those nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, Final, NamedTuple

from etlstage.errors import ConfigError, PayloadTooBig, RemoteProtocolError

__all__ = (
    "EARLY",
    "MOST_TEXT",
    "ONE",
    "ZERO",
    "Encoding",
    "Frames",
    "Packer",
    "Version",
    "Words",
    "packed_text",
    "text_of",
    "unpacked_text",
)

MOST_TEXT: Final = 64 * 1024
"""Bytes of a name or a reason, at most."""
_AROUND: Final = 2 * MOST_TEXT  # bytes of a frame beside its payload: texts and headers
_SLICE: Final = 256 * 1024  # bytes understood at once
_MOST_ELEMENTS: Final = 4096  # of one array; headers are the only long one


class Words(NamedTuple):
    """How one version says it: the order of a frame, and its numbers."""

    channel_first: bool
    """The session comes before the type."""
    control: int
    """The session of what concerns the worker as a whole."""
    first: int
    """The first session of a worker."""
    pairs: bool
    """An error has a category beside its code."""
    error_ends: bool
    """Behind an error there is no choke: it ends its half of the session."""
    handshake: int
    heartbeat: int
    terminate: int
    invoke: int
    chunk: int
    error: int
    choke: int


# In the first, one list of numbers goes for all sessions. In the last, numbers are
# counted per state: what a handshake is on a new connection is later a heartbeat, and
# the first frame of a session is an invoke, whose number is that of a chunk.
ZERO: Final = Words(False, 0, 1, False, False, 0, 1, 2, 3, 4, 5, 6)
# The runtime of that day gave the first session the number of the control channel.
EARLY: Final = Words(True, 1, 2, False, False, 0, 1, 2, 3, 4, 5, 6)
ONE: Final = Words(True, 1, 2, True, True, 0, 0, 1, 0, 0, 1, 2)


class Version(Enum):
    """Which version of the protocol is spoken."""

    ZERO = "0"
    """``[type, session, arguments]``: runtimes up to 0.11."""
    EARLY = "early"
    """``[session, type, arguments]`` with the numbers of 0: the first ones of 0.12."""
    ONE = "1"
    """``[session, type, arguments, headers]``: runtimes since 0.12."""
    AUTO = "auto"
    """As the worker's first frames say."""

    @property
    def words(self) -> Words | None:
        """How it is said; None if that is not known yet."""
        return _WORDS.get(self)


_WORDS: Final = {Version.ZERO: ZERO, Version.EARLY: EARLY, Version.ONE: ONE}


class Encoding(Enum):
    """As what strings are sent; any are understood."""

    RAW = "raw"
    """All in the one type that msgpack had when the runtimes were written."""
    BIN_CHUNKS = "bin-chunks"
    """Payloads as ``bin``, the rest raw: for decoders that take raw for UTF-8."""
    BIN = "bin"
    """All as ``bin``: for Python workers with msgpack 1."""


class Packer:
    """
    Makes frames.

    Args:
        encoding: Of strings.

    """

    def __init__(self, encoding: Encoding) -> None:
        packer = _msgpack().Packer
        self.pack: Callable[[object], bytes]
        self.pack = packer(use_bin_type=encoding is Encoding.BIN).pack
        """Pack anything but a payload."""
        self.pack_payload: Callable[[object], bytes]
        self.pack_payload = packer(use_bin_type=encoding is not Encoding.RAW).pack
        """Pack a frame with a payload."""


class Frames:
    """
    Cuts what was received into frames, and holds what does not make one yet.

    Args:
        max_payload: Bytes of a payload, at most.

    """

    def __init__(self, max_payload: int) -> None:
        msgpack = _msgpack()
        self._most = max_payload + _AROUND
        self._payload = max_payload
        self._unpacker = msgpack.Unpacker(
            raw=True,
            use_list=False,
            strict_map_key=False,
            max_buffer_size=self._most + _SLICE,
            max_str_len=max_payload,
            max_bin_len=max_payload,
            max_ext_len=MOST_TEXT,
            max_array_len=_MOST_ELEMENTS,
            max_map_len=_MOST_ELEMENTS,
        )
        self._wrong = (ValueError, TypeError, msgpack.UnpackException)
        self._full = msgpack.BufferFull
        self._pending = 0  # bytes, at most, of the frame that is not complete

    @property
    def end(self) -> int:
        """Where the last frame ended, in bytes of all that was fed."""
        end: int = self._unpacker.tell()
        return end

    def feed(self, data: bytes) -> Iterator[object]:
        """
        Yield what is complete now.

        Raises:
            RemoteProtocolError: If that is no msgpack.
            PayloadTooBig: If it is longer than a frame may be.

        """
        for at in range(0, len(data), _SLICE):
            piece = data[at : at + _SLICE] if len(data) > _SLICE else data
            try:
                self._unpacker.feed(piece)
                for frame in self._unpacker:
                    self._pending = 0
                    yield frame
            except self._wrong as error:
                raise self._blame(error) from None
            self._pending += len(piece)
            if self._pending > self._most + _SLICE:
                raise self._too_long()

    def _too_long(self) -> PayloadTooBig:
        text = f"frame is longer than {self._most} bytes; see max_message"
        return PayloadTooBig(text)

    def _blame(self, error: Exception) -> RemoteProtocolError:
        if isinstance(error, self._full):
            return self._too_long()
        if "exceeds max_str_len" in str(error) or "exceeds max_bin_len" in str(error):
            return PayloadTooBig(
                f"payload is longer than {self._payload} bytes; see max_message"
            )
        return RemoteProtocolError(f"expected frames of msgpack: {error}")


def text_of(value: object, what: str) -> str:
    """
    Return a name or a reason.

    Raises:
        RemoteProtocolError: If it is none.
        PayloadTooBig: If it is too long for one.

    """
    if type(value) is not bytes:
        raise RemoteProtocolError(f"{what} is {_kind(value)}, expected a string")
    if len(value) > MOST_TEXT:
        raise PayloadTooBig(
            f"{what} is {len(value)} bytes long, expected no more than {MOST_TEXT}"
        )
    return value.decode(errors="backslashreplace")


def _kind(value: object) -> str:
    names = {int: "a number", tuple: "an array", type(None): "nil", dict: "a map"}
    return names.get(type(value), type(value).__name__)


def packed_text(message: bytes) -> bytes:
    """Return a message as a payload that is msgpack itself."""
    packed: bytes = _msgpack().packb(message, use_bin_type=False)
    return packed


def unpacked_text(payload: bytes) -> bytes | None:
    """Return the message of a payload that is msgpack itself; None if it is none."""
    msgpack = _msgpack()
    try:
        message = msgpack.unpackb(payload, raw=True)
    except (ValueError, TypeError, msgpack.UnpackException):
        return None
    return message if type(message) is bytes else None


def _msgpack() -> Any:  # noqa: ANN401 - it has no types
    # A stage of another dialect needs no such package.
    try:
        import msgpack
    except ImportError as error:
        text = "dialect 'cocaine' needs msgpack: pip install 'etlstage[cocaine]'"
        raise ConfigError(text) from error
    return msgpack
