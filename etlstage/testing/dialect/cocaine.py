"""
The test kit of dialect ``cocaine``: frames by name, and as they were written.

Nothing here validates the order of frames: it is for code that shows them to people, or
that sits between the two sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from etlstage.errors import RemoteProtocolError
from etlstage.protocol.base import Side
from etlstage.protocol.cocaine.frame import ONE, ZERO, CocaineVersion, Frames, Words
from etlstage.protocol.cocaine.settings import CocaineDialect
from etlstage.testing.dialect import DialectKit, shortened

__all__ = ("CocaineKit", "CocaineReader", "PassedFrame", "Passing")

_LARGEST: Final = 2**31  # bytes; a side that sends more is stopped elsewhere


class CocaineKit(DialectKit[CocaineDialect]):
    """Finds the frames of sessions."""

    def reader(self) -> CocaineReader:
        """Return a reader that names frames, and shows their arguments."""
        return CocaineReader(self._dialect.protocol)

    def cut(self, side: Side, data: bytes) -> list[bytes]:
        """Return what a side wrote, cut after each end of its half of a session."""
        passing, pieces = Passing(self._dialect.spoken), [b""]
        for passed in passing.read(side, data):
            pieces[-1] += passed.raw
            words = passing.words
            # Before version 1 a choke follows an error.
            ends = passed.name == "error" and words is not None and words.error_ends
            if ends or passed.name == "choke":
                pieces.append(b"")
        pieces[-1] += passing.rest(side)
        return pieces

    def exchanges(self, side: Side, data: bytes) -> list[bytes]:
        """Return what a side sent in each session; other frames vary between runs."""
        frames: dict[int, bytes] = {}
        for passed in Passing(self._dialect.spoken).read(side, data):
            if passed.session is not None:
                before = frames.get(passed.session, b"")
                frames[passed.session] = before + passed.raw
        return [frames[number] for number in sorted(frames)]

    def raw(self, messages: Sequence[bytes]) -> bytes:
        """Return the messages as a worker reads them, in its first session."""
        spoken = replace(self._dialect, protocol=self._dialect.spoken)
        return DialectKit(spoken).raw(messages)


class CocaineReader:
    """
    Renders what two sides send each other, in the order in which they send it.

    Args:
        version: Version of the protocol; ``AUTO``: as the worker begins.

    """

    def __init__(self, version: CocaineVersion) -> None:
        self._passing = Passing(version)

    def read(self, side: Side, data: bytes) -> list[str]:
        """Return texts for what is complete now; other data is shown as it is."""
        return [_frame_text(passed) for passed in self._passing.read(side, data)]


class PassedFrame(NamedTuple):
    """A frame that is complete, or other data of a side."""

    raw: bytes
    """The bytes as they were written."""
    frame: object = None
    """Those bytes decoded; None if they can't be."""
    name: str = ""
    """Such as ``chunk``; empty if it is not a frame."""
    session: int | None = None
    """The session that it is about; None: the connection."""
    arguments: tuple[object, ...] = ()
    headers: object = ()


class Passing:
    """
    Names the frames that two sides send each other, in the order of sending.

    Args:
        version: Version of the protocol; ``AUTO``: as the worker begins.

    Attributes:
        words: The version's form of frames; None if it is not known yet.

    """

    def __init__(self, version: CocaineVersion) -> None:
        self.words: Words | None = version.words
        self._streams = {side: _Stream() for side in Side}
        self._shaken = False  # the worker has identified itself
        self._invoked: set[int] = set()

    def read(self, side: Side, data: bytes) -> Iterator[PassedFrame]:
        """Yield what is complete now; what is not a frame comes as it is."""
        for raw, frame in self._streams[side].cut(data):
            match frame:
                case (int(first), int(second), tuple(arguments), *rest):
                    headers = rest[0] if rest else ()
                    name, session = self._name(side, first, second)
                    yield PassedFrame(raw, frame, name, session, arguments, headers)
                case _:
                    yield PassedFrame(raw, frame)

    def rest(self, side: Side) -> bytes:
        """Return, once, what a side has sent that is incomplete."""
        return self._streams[side].rest()

    def _name(self, side: Side, first: int, second: int) -> tuple[str, int | None]:
        if self.words is None:
            self.words = ZERO if first == 0 else ONE
        words = self.words
        number, kind = (first, second) if words.channel_first else (second, first)
        if number == words.control:
            return self._control(words, kind), None
        return self._session(words, side, number, kind), number

    def _control(self, words: Words, kind: int) -> str:
        # The number of a handshake may later be that of a heartbeat.
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


class _Stream:
    def __init__(self) -> None:
        self._frames = Frames(_LARGEST)
        self._waiting = bytearray()
        self._begin = 0  # offset of ``_waiting`` in all data
        self._broken = False

    def cut(self, data: bytes) -> Iterator[tuple[bytes, object]]:
        """Yield each frame that is complete now, with its bytes."""
        if self._broken:
            yield data, None
            return
        self._waiting += data
        try:
            for frame in self._frames.feed(data):
                size = self._frames.end - self._begin
                self._begin += size
                raw = bytes(self._waiting[:size])
                del self._waiting[:size]
                yield raw, frame
        except RemoteProtocolError:
            self._broken = True
            yield self.rest(), None

    def rest(self) -> bytes:
        """Return, once, what does not make a frame yet."""
        rest = bytes(self._waiting)
        self._waiting.clear()
        return rest


def _frame_text(passed: PassedFrame) -> str:
    raw, frame, name, session, arguments, headers = passed
    if not name:
        return f"not a frame: {_shown(raw if frame is None else frame)}"
    text = name if session is None else f"{name} {session}"
    more = [f"headers {_shown(headers)}"] if headers else []
    return " ".join([text, *map(_shown, arguments), *more])


def _shown(value: object) -> str:
    match value:
        case bytes():
            return shortened(value)
        case tuple():
            return f"[{', '.join(map(_shown, value))}]"
        case _:
            return repr(value)
