"""
The services that a worker may use besides its work: a locator, and a log.

The only service is ``logging``, at the same address as the locator. Both use frames of
version 1: a channel, the number of a method, its arguments. Frameworks resolve services
when they start, and some wait forever for an answer; so a request for anything else is
answered with an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from etlstage.messages import MOST_TEXT
from etlstage.protocol.cocaine.frame import ZERO, Encoding, Frames, Packer

__all__ = ("Locator",)

_LOGGING: Final = b"logging"
_LEVELS: Final = (b"DEBUG", b"INFO", b"WARNING", b"ERROR")
_VALUE, _ERROR = 0, 1
_CATEGORY: Final = 10  # category of the locator's errors
_UNKNOWN: Final = 1
_API: Final = {
    0: ["emit", {}, {}],
    1: ["verbosity", {}, {0: ["value", {}], 1: ["error", {}]}],
}


class Locator:
    """One connection, without I/O; see :class:`~etlstage.protocol.base.Services`."""

    def __init__(self, host: str, port: int) -> None:
        self._at = (host, port)
        self._frames = Frames(MOST_TEXT)
        self._pack = Packer(Encoding.RAW).pack
        self._lines: list[bytes] = []

    def receive_data(self, data: bytes) -> bytes:
        return b"".join(
            answer for frame in self._frames.feed(data) for answer in self._take(frame)
        )

    def lines(self) -> bytes:
        lines, self._lines = self._lines, []
        return b"".join(lines)

    def _take(self, frame: object) -> Iterator[bytes]:
        match frame:
            case (0, int(session), *_):
                # The services of version 0 are different.
                text = "services are only available in version 1 of the protocol"
                yield self._pack((ZERO.error, session, (_UNKNOWN, text)))
                yield self._pack((ZERO.choke, session, ()))
            case (int(channel), 0, (bytes(name), *_), *_):
                yield self._resolve(channel, name)
            case (int(), 0, (int(level), bytes(source), bytes(text), *more), *_):
                self._log(level, source, text, more)
            case (int(channel), 1, (), *_):
                yield self._pack((channel, _VALUE, (0,)))
            case (int(channel), int(), tuple(), *_):
                yield self._refuse(channel, "only resolve is supported here")
            case _:
                self._log(2, b"locator", b"received a malformed request", ())

    def _resolve(self, channel: int, name: bytes) -> bytes:
        if name != _LOGGING:
            asked = name.decode(errors="backslashreplace")
            text = f"there is no service {asked!r} here: a stage has only 'logging'"
            return self._refuse(channel, text)
        return self._pack((channel, _VALUE, ((self._at,), 1, _API)))

    def _refuse(self, channel: int, text: str) -> bytes:
        return self._pack((channel, _ERROR, ((_CATEGORY, _UNKNOWN), text)))

    def _log(
        self, level: int, source: bytes, text: bytes, more: Iterable[object]
    ) -> None:
        line = _LEVELS[min(max(level, 0), 3)] + b" " + source + b": " + text
        for attributes in more:
            if isinstance(attributes, tuple):
                line += b"".join(map(_shown, attributes))
        self._lines.append(b" ".join(line.splitlines()) + b"\n")


def _shown(attribute: object) -> bytes:
    match attribute:
        case (bytes(name), bytes(value), *_):
            return b" " + name + b"=" + value
        case (bytes(name), int() | float() as value, *_):
            return b" " + name + b"=" + str(value).encode()
    return b""
