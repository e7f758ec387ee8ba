"""
Frames: their form in each version of the protocol, how they are split from bytes, and
in which order they are written.

Nothing here knows what may follow what; see ``session.py``. A frame is a msgpack array
of at least three elements: two numbers, for its session and its type, and the
arguments. Version 1 adds headers; elements after them are not read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple, TypeAlias

from etlstage.errors import (
    ConfigError,
    LocalProtocolError,
    PayloadTooBig,
    RemoteProtocolError,
)
from etlstage.messages import MOST_TEXT, OVERHEAD

__all__ = (
    "ONE",
    "ZERO",
    "CocaineVersion",
    "Encoding",
    "Frames",
    "HeaderTable",
    "Headers",
    "Outgoing",
    "Packer",
    "Words",
    "text_of",
    "unpacked_text",
)

_AROUND: Final = 2 * MOST_TEXT  # bytes of a frame beyond its payload: texts and headers
_SLICE: Final = 256 * 1024  # bytes parsed at once
_TURN: Final = 256 * 1024  # bytes written at once, which may delay a heartbeat
_MOST_ELEMENTS: Final = 4096  # of one array; headers are the only long one


class Words(NamedTuple):
    """The frames of one version: the order of elements, and the numbers of types."""

    channel_first: bool
    """The session comes before the type."""
    control: int
    """Session number of frames about the connection as a whole."""
    first: int
    """The first session of a worker."""
    pairs: bool
    """An error has a category in addition to its code."""
    error_ends: bool
    """An error ends its half of the session: no choke follows."""
    handshake: int
    heartbeat: int
    terminate: int
    invoke: int
    chunk: int
    error: int
    choke: int


# In version 0, each type has its own number. In version 1, numbers depend on the state:
# the number of a handshake on a new connection is later that of a heartbeat, and the
# first frame of a session is an invoke, whose number is later that of a chunk.
ZERO: Final = Words(False, 0, 1, False, False, 0, 1, 2, 3, 4, 5, 6)
ONE: Final = Words(True, 1, 2, True, True, 0, 0, 1, 0, 0, 1, 2)


class CocaineVersion(Enum):
    """A version of the protocol."""

    ZERO = "0"
    """``[type, session, arguments]``: runtimes up to 0.11."""
    ONE = "1"
    """``[session, type, arguments, headers]``: runtimes since 0.12."""
    AUTO = "auto"
    """Detected from the worker's first frames."""

    @property
    def words(self) -> Words | None:
        """The form of its frames; None if that is not known yet."""
        return {CocaineVersion.ZERO: ZERO, CocaineVersion.ONE: ONE}.get(self)


class Encoding(Enum):
    """The msgpack type of strings that are sent; any type is read."""

    RAW = "raw"
    """All have the only type that msgpack had when the runtimes were written."""
    BIN_CHUNKS = "bin-chunks"
    """Payloads as ``bin``, the rest raw: for decoders that take raw for UTF-8."""
    BIN = "bin"
    """All as ``bin``: for Python workers with msgpack 1."""


class Packer:
    """Packs frames, with strings in an encoding."""

    def __init__(self, encoding: Encoding) -> None:
        packer = _msgpack().Packer
        self.pack: Callable[[object], bytes]
        self.pack = packer(use_bin_type=encoding is Encoding.BIN).pack
        """Pack anything but a payload."""
        self.pack_payload: Callable[[object], bytes]
        self.pack_payload = packer(use_bin_type=encoding is not Encoding.RAW).pack
        """Pack a frame with a payload."""


class Frames:
    """Splits received bytes into frames, and holds an incomplete one."""

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
        self._pending = 0  # bytes of the incomplete frame, at most

    @property
    def end(self) -> int:
        """Where the last complete frame ends, as an offset in all bytes fed."""
        end: int = self._unpacker.tell()
        return end

    def feed(self, data: bytes) -> Iterator[object]:
        """
        Yield the frames that are complete now.

        Raises:
            RemoteProtocolError: If the bytes are not msgpack.
            PayloadTooBig: If a frame or its payload is too long.

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
        return RemoteProtocolError(f"expected msgpack frames: {error}")


def text_of(value: object, what: str) -> str:
    """
    Return the text of a name or a reason.

    Raises:
        RemoteProtocolError: If it is not a string.
        PayloadTooBig: If it is too long.

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


def unpacked_text(payload: bytes) -> bytes | None:
    """Return the message in a payload that is a msgpack string; None for others."""
    msgpack = _msgpack()
    try:
        message = msgpack.unpackb(payload, raw=True)
    except (ValueError, TypeError, msgpack.UnpackException):
        return None
    return message if type(message) is bytes else None


def _msgpack() -> Any:  # noqa: ANN401 - it has no types
    # Stages of other dialects do not need the package.
    try:
        import msgpack
    except ImportError as error:
        text = "dialect 'cocaine' needs msgpack: pip install 'etlstage[cocaine]'"
        raise ConfigError(text) from error
    return msgpack


# --- headers ----------------------------------------------------------------------

Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]
"""Names and values."""

# RFC 7541, appendix A; then the headers that runtimes add for tracing, at 80 to 82.
_STATIC: Final[Headers] = (
    (b":authority", b""),
    (b":method", b"GET"),
    (b":method", b"POST"),
    (b":path", b"/"),
    (b":path", b"/index.html"),
    (b":scheme", b"http"),
    (b":scheme", b"https"),
    *((b":status", b"%d" % code) for code in (200, 204, 206, 304, 400, 404, 500)),
    (b"accept-charset", b""),
    (b"accept-encoding", b"gzip, deflate"),
    *(
        (name, b"")
        for name in (
            b"accept-language accept-ranges accept access-control-allow-origin age"
            b" allow authorization cache-control content-disposition content-encoding"
            b" content-language content-length content-location content-range"
            b" content-type cookie date etag expect expires from host if-match"
            b" if-modified-since if-none-match if-range if-unmodified-since"
            b" last-modified link location max-forwards proxy-authenticate"
            b" proxy-authorization range referer refresh retry-after server set-cookie"
            b" strict-transport-security transfer-encoding user-agent vary via"
            b" www-authenticate"
        ).split()
    ),
    *((b"", b"") for _ in range(62, 80)),
    *((name, bytes(8)) for name in (b"trace_id", b"span_id", b"parent_id")),
)
_STORED: Final = 4096  # bytes that are stored, at most
_OVERHEAD: Final = 32  # bytes of an entry beyond its name and value


class HeaderTable:
    """
    Reads the headers that one peer sends, as version 1 compresses them.

    The tables are those of HPACK (RFC 7541), its encoding is not used. A header is the
    number of an entry, or ``[store, name, value]``, where the name may be the number of
    an entry, too. A stored header becomes entry 83, and earlier ones move up. Each
    direction of a connection has its own table. We write all headers in full, which
    needs none.
    """

    def __init__(self) -> None:
        self._stored: deque[tuple[bytes, bytes]] = deque()
        self._size = 0

    def read(self, headers: object) -> Headers:
        """Return the headers of one frame; raise RemoteProtocolError for other data."""
        if headers == ():
            return ()
        if type(headers) is not tuple:
            raise RemoteProtocolError("headers of a frame are not an array")
        return tuple(map(self._header, headers))

    def _header(self, header: object) -> tuple[bytes, bytes]:
        if type(header) is int:
            return self._entry(header)
        if type(header) is not tuple or len(header) != 3:
            raise RemoteProtocolError(
                "a header is neither a number nor an array of 3 elements"
            )
        store, name, value = header
        if type(name) is int:
            name, _ = self._entry(name)
        if (
            type(store) is not bool
            or type(name) is not bytes
            or type(value) is not bytes
        ):
            raise RemoteProtocolError("a header is not [store, name, value]")
        if store:
            self._store(name, value)
        return name, value

    def _entry(self, number: int) -> tuple[bytes, bytes]:
        if 1 <= number <= len(_STATIC):
            return _STATIC[number - 1]
        at = number - len(_STATIC) - 1
        if 0 <= at < len(self._stored):
            return self._stored[at]
        raise RemoteProtocolError(f"there is no header {number}")

    def _store(self, name: bytes, value: bytes) -> None:
        self._stored.appendleft((name, value))
        self._size += _cost(name, value)
        # An entry that is larger than the table empties it.
        while self._size > _STORED:
            self._size -= _cost(*self._stored.pop())


def _cost(name: bytes, value: bytes) -> int:
    return len(name) + len(value) + _OVERHEAD


# --- writing ----------------------------------------------------------------------

# In msgpack: an array of three elements, of one, and of none.
_FRAME, _ONE, _NONE = b"\x93", b"\x91", b"\x90"

_Whole: TypeAlias = tuple[Words, str, bytes, bytes]
"""For one version and event, the bytes before and after the message of a session."""


class Outgoing:
    """
    The frames to be written, in order.

    Frames about the connection as a whole overtake the rest, except for the terminate,
    which comes last. ``session.py`` decides what may be sent.

    Args:
        words: The form of frames; None if it is not known yet.
        encoding: The encoding of strings.
        packed: A payload is a msgpack string itself.

    """

    def __init__(
        self, words: Words | None, encoding: Encoding, *, packed: bool
    ) -> None:
        self.words = words
        self._packer = Packer(encoding)
        self._payload: Callable[[bytes], bytes]
        self._payload = self._packed_twice if packed else self._packer.pack_payload
        self._control: list[bytes] = []
        # Whole frames; but a payload of _TURN bytes or more comes after its head.
        self._data: deque[bytes] = deque()
        self._size = 0  # bytes of the data
        self._whole: _Whole | None = None

    @property
    def said(self) -> Words:
        """The form of frames; raises LocalProtocolError if it is not known yet."""
        if self.words is None:
            raise LocalProtocolError(
                "the protocol version of the worker is not known yet"
            )
        return self.words

    @property
    def unsent(self) -> int:
        """Bytes of memory of the frames of sessions that were not taken."""
        return self._size + OVERHEAD * len(self._data)

    def hello(self, identity: str) -> None:
        """Send the handshake of a worker."""
        self._control.append(self._about(self.said.handshake, identity))

    def beat(self) -> None:
        """Send a heartbeat, or answer one."""
        self._control.append(self._about(self.said.heartbeat))

    def terminate(self, code: int, reason: str) -> None:
        """Send terminate."""
        self._put([self._about(self.said.terminate, code, reason.encode())])

    def invoke(self, number: int, event: str, headers: Headers) -> None:
        """Begin a session."""
        written = [(False, *header) for header in headers]
        rest = [written] if written else []
        self._put([self._frame(number, self.said.invoke, (event.encode(),), *rest)])

    def chunks(self, number: int, messages: Iterable[bytes]) -> None:
        """Send messages."""
        head = self._head(self.said.chunk, _ONE) % self._packer.pack(number)
        payload = self._payload
        pieces: list[bytes] = []
        for message in messages:
            if len(message) < _TURN:
                pieces.append(head + payload(message))
            else:
                pieces += head, payload(message)
        self._put(pieces)

    def choke(self, number: int) -> None:
        """End our half of a session."""
        self._put([self._head(self.said.choke, _NONE) % self._packer.pack(number)])

    def whole(self, first: int, event: str, messages: Iterable[bytes]) -> None:
        """Begin a session for each message, numbered from ``first``; end our halves."""
        pack, payload = self._packer.pack, self._payload
        whole = self._whole
        if whole is None or whole[:2] != (self.said, event):
            words, name = self.said, pack(event.encode()).replace(b"%", b"%%")
            begun = self._head(words.invoke, _ONE + name)
            begun += self._head(words.chunk, _ONE)
            whole = words, event, begun, self._head(words.choke, _NONE)
            self._whole = whole
        _, _, begin, end = whole
        pieces: list[bytes] = []
        for number, message in enumerate(messages, first):
            packed = pack(number)
            begun = begin % (packed, packed)
            if len(message) < _TURN:
                pieces.append(begun + payload(message) + end % packed)
            else:
                pieces += begun, payload(message), end % packed
        self._put(pieces)

    def error(self, number: int, category: int, code: int, reason: str) -> None:
        """End our half of a session with an error."""
        words = self.said
        said = (category, code) if words.pairs else code
        self._put([self._frame(number, words.error, (said, reason.encode()))])
        if not words.error_ends:
            self.choke(number)

    def drop(self) -> None:
        """Drop what was not taken, except frames about the connection."""
        self._data.clear()
        self._size = 0

    def clear(self) -> None:
        """Drop everything that was not taken."""
        self._control.clear()
        self.drop()

    def take(self) -> list[bytes]:
        """Return the frames to write next; each piece takes one system call."""
        pieces, self._control = self._control, []
        data = self._data
        if self._size < _TURN:
            pieces += data
            self.drop()
        size = 0
        # Frames of the connection may be next, so the last frame has to be whole.
        while data and (size < _TURN or len(data[0]) >= _TURN):
            piece = data.popleft()
            size += len(piece)
            self._size -= len(piece)
            if len(piece) >= _TURN and pieces:
                # A long payload is not copied.
                return [b"".join(pieces), piece]
            pieces.append(piece)
        return pieces if len(pieces) < 2 else [b"".join(pieces)]

    def _packed_twice(self, message: bytes) -> bytes:
        packed = _msgpack().packb(message, use_bin_type=False)
        return self._packer.pack_payload(packed)

    def _head(self, kind: int, rest: bytes) -> bytes:
        """Return a frame with ``%b`` in place of its session number."""
        packed = self._packer.pack(kind)
        order = b"%b" + packed if self.said.channel_first else packed + b"%b"
        return _FRAME + order + rest

    def _put(self, pieces: Sequence[bytes]) -> None:
        self._data.extend(pieces)
        self._size += sum(map(len, pieces))

    def _about(self, kind: int, *arguments: object) -> bytes:
        """Return a frame about the connection."""
        return self._frame(self.said.control, kind, arguments)

    def _frame(self, number: int, kind: int, *rest: object) -> bytes:
        order = (number, kind) if self.said.channel_first else (kind, number)
        return self._packer.pack((*order, *rest))
