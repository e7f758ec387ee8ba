"""What frames say, as text for people; nothing here judges what may follow what."""

from __future__ import annotations

from typing import Final

from etlstage.errors import RemoteProtocolError
from etlstage.protocol.base import Side
from etlstage.protocol.cocaine.frame import EARLY, ONE, ZERO, Frames, Version, Words

__all__ = ("FrameReader",)

_LONG: Final = 48  # bytes of a string that are shown, half of them from its end
_LARGEST: Final = 2**31  # bytes; who sends more has been stopped elsewhere


class FrameReader:
    """
    Reads what two sides say to each other, in the order in which they do.

    Args:
        version: Of the protocol; ``AUTO``: as the worker begins.

    """

    def __init__(self, version: Version) -> None:
        self._words = version.words
        self._frames = {side: Frames(_LARGEST) for side in Side}
        self._broken: set[Side] = set()
        self._shaken = False  # the worker has said who it is
        self._invoked: set[int] = set()

    def read(self, side: Side, data: bytes) -> list[str]:
        """Return what is complete now; what is no frame comes as it is."""
        if side in self._broken:
            return [_shown(data)]
        said: list[str] = []
        try:
            said.extend(self._said(side, f) for f in self._frames[side].feed(data))
        except RemoteProtocolError:
            self._broken.add(side)
            said.append(f"no frame: {_shown(data)}")
        return said

    def _said(self, side: Side, frame: object) -> str:
        match frame:
            case (int(first), int(second), tuple(arguments), *rest):
                pass
            case _:
                return f"no frame: {_shown(frame)}"
        if self._words is None:
            self._words = ZERO if first == 0 else ONE
        elif self._words is ONE and frame[:3] == (1, 1, ()):
            self._words = EARLY
        words = self._words
        number, kind = (first, second) if words.channel_first else (second, first)
        if number == words.control:
            said = self._control(words, kind)
        else:
            said = f"{self._session(words, side, number, kind)} {number}"
        headers = [f"headers {_shown(rest[0])}"] if rest and rest[0] else []
        return " ".join([said, *map(_shown, arguments), *headers])

    def _control(self, words: Words, kind: int) -> str:
        # What a handshake is at first may be a heartbeat later.
        if kind == words.handshake and not self._shaken:
            self._shaken = True
            return "handshake"
        names = {words.heartbeat: "heartbeat", words.terminate: "terminate"}
        return names.get(kind, f"control frame {kind}")

    def _session(self, words: Words, side: Side, number: int, kind: int) -> str:
        begins = side is Side.SUPERVISOR and number not in self._invoked
        if begins and kind == words.invoke:
            self._invoked.add(number)
            return "invoke"
        names = {words.chunk: "chunk", words.error: "error", words.choke: "choke"}
        return names.get(kind, f"frame {kind} for")


def _shown(value: object) -> str:
    match value:
        case bytes():
            if len(value) <= _LONG:
                return repr(value)[1:]
            half = _LONG // 2
            ends = repr(value[:half])[1:], repr(value[-half:])[1:]
            return f"{ends[0]}... {len(value):,} bytes ...{ends[1]}"
        case tuple():
            return f"[{', '.join(map(_shown, value))}]"
        case _:
            return repr(value)
