"""
What we say on one connection: frames, in the order in which they are written.

What is about the connection as a whole overtakes the rest, but for the terminate, which
is behind all else. What may be said is decided in ``session.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

from etlstage.errors import LocalProtocolError
from etlstage.protocol.cocaine.frame import Encoding, Packer, Words, packed_text
from etlstage.protocol.cocaine.headers import Headers

__all__ = ("Outgoing",)

_SLICE: Final = (
    256 * 1024
)  # bytes behind which the answer to a heartbeat may have to wait
# In msgpack: an array of three, of which the last one is an array of one, or none.
_FRAME, _ONE, _NONE = b"\x93", b"\x91", b"\x90"

_Whole: TypeAlias = tuple[Words, str, bytes, bytes]
"""What is before and behind the message of a session, of one version and event."""


class Outgoing:
    """
    Frames that are to be written.

    Args:
        words: How things are said; None if that is not known yet.
        encoding: Of strings.
        packed: A payload is msgpack itself.

    """

    def __init__(
        self, words: Words | None, encoding: Encoding, *, packed: bool
    ) -> None:
        self.words = words
        self._packer = Packer(encoding)
        self._payload: Callable[[bytes], bytes]
        self._payload = self._packed_twice if packed else self._packer.pack_payload
        self._control: list[bytes] = []
        self._data: deque[bytes] = deque()
        self._size = 0  # bytes of these
        self._whole: _Whole | None = None

    @property
    def said(self) -> Words:
        """
        How things are said here.

        Raises:
            LocalProtocolError: If nobody knows yet.

        """
        if self.words is None:
            raise LocalProtocolError("the worker has not said yet how it speaks")
        return self.words

    def hello(self, identity: str) -> None:
        """Say who we are."""
        words = self.said
        frame = self._frame(words.control, words.handshake, (identity,))
        self._control.append(frame)

    def beat(self) -> None:
        """Send a heartbeat, or answer one."""
        words = self.said
        self._control.append(self._frame(words.control, words.heartbeat, ()))

    def terminate(self, code: int, reason: str) -> None:
        """Say that this is the end."""
        words = self.said
        self._put(
            [self._frame(words.control, words.terminate, (code, reason.encode()))]
        )

    def invoke(self, number: int, event: str, headers: Headers) -> None:
        """Begin a session."""
        written = [(False, *header) for header in headers]
        rest = [written] if written else []
        self._put([self._frame(number, self.said.invoke, (event.encode(),), *rest)])

    def chunks(self, number: int, messages: Iterable[bytes]) -> None:
        """Send messages."""
        head = self._head(self.said.chunk, _ONE) % self._packer.pack(number)
        pieces: list[bytes] = []
        for message in messages:
            pieces += head, self._payload(message)
        self._put(pieces)

    def choke(self, number: int) -> None:
        """End our half of a session."""
        self._put([self._head(self.said.choke, _NONE) % self._packer.pack(number)])

    def whole(self, first: int, event: str, messages: Iterable[bytes]) -> None:
        """
        Begin a session for each message, and end our half of it.

        Args:
            first: Number of the first; the others follow.
            event: Of them all.
            messages: Each of them.

        """
        pack, payload = self._packer.pack, self._payload
        whole = self._whole
        if whole is None or whole[:2] != (self.said, event):
            self._whole = whole = self._around(self.said, event)
        _, _, begin, end = whole
        pieces: list[bytes] = []
        for number, message in enumerate(messages, first):
            packed = pack(number)
            pieces += begin % (packed, packed), payload(message), end % packed
        self._put(pieces)

    def error(self, number: int, category: int, code: int, reason: str) -> None:
        """End our half of a session with an error."""
        words = self.said
        said = (category, code) if words.pairs else code
        self._put([self._frame(number, words.error, (said, reason.encode()))])
        if not words.error_ends:
            self.choke(number)

    def drop(self) -> None:
        """Forget what was not taken, but for what is about the connection."""
        self._data.clear()
        self._size = 0

    def clear(self) -> None:
        """Forget all that was not taken."""
        self._control.clear()
        self.drop()

    def take(self) -> list[bytes]:
        """Return what is to be written next; each of it is a system call."""
        pieces, self._control = self._control, []
        data = self._data
        if self._size < _SLICE:
            pieces += data
            self.drop()
        size = 0
        while data and size < _SLICE:
            size += len(data[0])
            self._size -= len(data[0])
            if size >= _SLICE and pieces:
                # One that is long is not copied.
                return [b"".join(pieces), data.popleft()]
            pieces.append(data.popleft())
        return pieces if len(pieces) < 2 else [b"".join(pieces)]

    def _around(self, words: Words, event: str) -> _Whole:
        name = self._packer.pack(event.encode()).replace(b"%", b"%%")
        begin = self._head(words.invoke, _ONE + name) + self._head(words.chunk, _ONE)
        return words, event, begin, self._head(words.choke, _NONE)

    def _packed_twice(self, message: bytes) -> bytes:
        return self._packer.pack_payload(packed_text(message))

    def _head(self, kind: int, rest: bytes) -> bytes:
        """Return a frame in which the place of its number is marked for formatting."""
        packed = self._packer.pack(kind)
        order = b"%b" + packed if self.said.channel_first else packed + b"%b"
        return _FRAME + order + rest

    def _put(self, pieces: Sequence[bytes]) -> None:
        self._data.extend(pieces)
        self._size += sum(map(len, pieces))

    def _frame(self, number: int, kind: int, *rest: object) -> bytes:
        order = (number, kind) if self.said.channel_first else (kind, number)
        return self._packer.pack((*order, *rest))
