"""
What we say on one connection: frames, in the order in which they are written.

What is about the connection as a whole overtakes the rest, but for the terminate, which
is behind all else. What may be said is decided in ``session.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from etlstage.errors import LocalProtocolError
from etlstage.protocol.cocaine.frame import Encoding, Packer, Words, packed_text
from etlstage.protocol.cocaine.headers import Headers

__all__ = ("Outgoing",)

_SLICE: Final = (
    256 * 1024
)  # bytes behind which the answer to a heartbeat may have to wait


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
        self._packed = packed
        self._control: list[bytes] = []
        self._data: deque[bytes] = deque()

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
        self._put(words.control, words.terminate, (code, reason.encode()))

    def invoke(self, number: int, event: str, headers: Headers) -> None:
        """Begin a session."""
        written = [(False, *header) for header in headers]
        rest = [written] if written else []
        self._put(number, self.said.invoke, (event.encode(),), *rest)

    def chunks(self, number: int, messages: Iterable[bytes]) -> None:
        """Send messages."""
        words, pack = self.said, self._packer.pack_payload
        kind, first = words.chunk, words.channel_first
        for message in messages:
            payload = (packed_text(message) if self._packed else message,)
            frame = (number, kind, payload) if first else (kind, number, payload)
            self._data.append(pack(frame))

    def choke(self, number: int) -> None:
        """End our half of a session."""
        self._put(number, self.said.choke, ())

    def error(self, number: int, category: int, code: int, reason: str) -> None:
        """End our half of a session with an error."""
        words = self.said
        said = (category, code) if words.pairs else code
        self._put(number, words.error, (said, reason.encode()))
        if not words.error_ends:
            self.choke(number)

    def drop(self) -> None:
        """Forget what was not taken, but for what is about the connection."""
        self._data.clear()

    def clear(self) -> None:
        """Forget all that was not taken."""
        self._control.clear()
        self._data.clear()

    def take(self) -> list[bytes]:
        """Return what is to be written next; each of it is a system call."""
        frames, self._control = self._control, []
        size, data = 0, self._data
        while data and size < _SLICE:
            size += len(data[0])
            if size >= _SLICE and frames:
                # One that is long is not copied.
                return [b"".join(frames), data.popleft()]
            frames.append(data.popleft())
        return frames if len(frames) < 2 else [b"".join(frames)]

    def _put(self, number: int, kind: int, *rest: object) -> None:
        self._data.append(self._frame(number, kind, *rest))

    def _frame(self, number: int, kind: int, *rest: object) -> bytes:
        order = (number, kind) if self.said.channel_first else (kind, number)
        return self._packer.pack((*order, *rest))
