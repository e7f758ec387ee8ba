"""
A worker of dialect ``cocaine`` with faults: frames, each as it was written.

A message is a chunk that the worker is sent. A fault at a message happens as soon as
the worker has it, whatever is due in other sessions; a fault that changes a reply
changes what comes of that session only. The input ends with our terminate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from signal import SIGKILL
from typing import ClassVar, Final

from etlstage.protocol.base import Side
from etlstage.protocol.cocaine.frame import Encoding, Outgoing
from etlstage.protocol.cocaine.sessions import WORKER_CATEGORY
from etlstage.protocol.cocaine.settings import CocaineDialect, Payload
from etlstage.testing.dialect.cocaine import PassedFrame, Passing
from etlstage.testing.fault import FaultKind
from etlstage.testing.faulty.wire import Fault, FaultyWire
from etlstage.testing.hostile.kinds import Exit, Step, as_bytes
from etlstage.testing.hostile.marked import BETWEEN, repeated
from etlstage.transport import LaunchRequest

__all__ = ("CocaineWire",)

_LOST: Final[Mapping[FaultKind, tuple[Side, str]]] = {
    FaultKind.NEVER_READY: (Side.WORKER, "heartbeat"),
    FaultKind.LOSE_HEARTBEATS: (Side.WORKER, "heartbeat"),
    FaultKind.LOSE_ANSWERS: (Side.SUPERVISOR, "heartbeat"),
    FaultKind.LOSE_TERMINATE: (Side.WORKER, "terminate"),
}
"""Which frames don't arrive any more."""
_CODE: Final = 1  # code of an error
_HEAD: Final = 8  # bytes of a frame that come one by one
_EMPTY: Final = b"\xa0"  # an empty string in msgpack
_LONG: Final = b"\xdb"  # begins a string whose length has four bytes


class CocaineWire(FaultyWire):
    """The conversation as the supervisor sees it; see :class:`FaultyWire`."""

    has: ClassVar[frozenset[str]] = frozenset({"a connection"})
    longest: ClassVar[float] = 2**32 - 1 - len(_LONG) - 4  # its string is in another

    def follow(self, request: LaunchRequest) -> None:
        """Prepare to parse the conversation."""
        dialect = request.dialect
        assert isinstance(dialect, CocaineDialect)
        self.stray = b"stray print\n"
        self._packed = dialect.payload is Payload.MSGPACK
        self._passing = Passing(dialect.protocol)
        self._open: set[int] = set()
        self._session = 0  # session of the last frame sent
        self._shapes: dict[int, list[Fault]] = {}  # by session
        self._frames: dict[int, list[PassedFrame]] = defaultdict(list)  # held back
        self._lost: set[tuple[Side, str]] = set()

    @property
    def _idle(self) -> bool:
        return not self._open

    # --- what the worker is sent --------------------------------------------

    def _pass_on(self, data: memoryview | bytes) -> int:
        # While there is no room, the last byte counts as not taken, so that it is
        # written again. It was parsed already, and is skipped then.
        begin = 1 if self._unsent else 0
        for passed in self._passing.read(Side.SUPERVISOR, bytes(data[begin:])):
            self._tell(passed)
        return len(data) - (not self._sent())

    def _tell(self, passed: PassedFrame) -> None:
        raw, _, name, session, arguments, _ = passed
        if (Side.SUPERVISOR, name) not in self._lost:
            self._unsent += raw
        if session is None:
            if name == "terminate":
                self._see_end()
            return
        self._session = session
        match name, arguments:
            case "invoke", _:
                self._open.add(session)
            case "error", _:
                self._open.discard(session)
            case "chunk", (bytes(payload), *_):
                self._number += 1
                self._misbehave("message", payload)

    # --- what it sends ------------------------------------------------------

    def _hear(self, data: bytes) -> None:
        for passed in self._passing.read(Side.WORKER, data):
            if (Side.WORKER, passed.name) in self._lost:
                continue
            if passed.session not in self._shapes:
                self._queue.append(passed.raw)
            else:
                self._frames[passed.session].append(passed)
            if passed.session is not None and self._ends(passed.name):
                self._open.discard(passed.session)
                self._pass_reply(passed.session)

    def _ends(self, name: str) -> bool:
        """Return whether a frame of this name is the last of a session."""
        words = self._passing.words
        terminal = words is not None and words.error_ends
        return name == "choke" or (name == "error" and terminal)

    def _rest(self) -> bytes:
        held = [passed.raw for frames in self._frames.values() for passed in frames]
        self._frames.clear()
        return b"".join([*held, self._passing.rest(Side.WORKER)])

    def _pass_reply(self, session: int) -> None:
        faults, frames = self._shapes.pop(session, []), self._frames.pop(session, [])
        if not faults:
            return
        shapes = self._noted(faults)
        if any(passed.name == "error" for passed in frames):
            shapes = {}  # already wrong: a refusal
        self._spoils(self._spoiled(session, shapes, [passed.raw for passed in frames]))

    def _spoiled(
        self, session: int, shapes: Mapping[str, Fault], frames: Sequence[bytes]
    ) -> Iterator[Step]:
        """Yield what is passed on in place of a reply, which is chunks and a choke."""
        if "skip" in shapes:
            return
        *chunks, choke = frames
        if "refuse" in shapes:
            yield self._end_of(session, shapes["refuse"], "refused")
            return
        if "flood" in shapes:
            tiny = self._chunk(session, b"x")
            yield from repeated(tiny, len(tiny) * shapes["flood"]["size"])
        if "huge" in shapes:
            yield from self._huge(session, shapes["huge"]["size"])
            chunks = []
        if "revoke" in shapes:
            chunks.insert(
                (len(chunks) + 1) // 2,
                self._end_of(session, shapes["revoke"], "revoked"),
            )
        frames = chunks if "partial" in shapes else [*chunks, choke]
        for frame in frames * (1 + ("twice" in shapes)):
            yield from _cut(frame) if "cut" in shapes else [frame]
        if "partial" in shapes:
            yield Exit(-SIGKILL)

    def _end_of(self, session: int, fault: Fault, reason: str) -> bytes:
        """Return what ends a session: an error, or a choke if there is no reason."""
        given, out = as_bytes(fault.get("data")), self._outgoing()
        if given == b"":
            out.choke(session)
        else:
            text = reason if given is None else given.decode(errors="replace")
            out.error(session, WORKER_CATEGORY, _CODE, text)
        return b"".join(out.take())

    def _chunk(self, session: int, payload: bytes) -> bytes:
        out = self._outgoing()
        out.chunks(session, [payload])
        return b"".join(out.take())

    def _huge(self, session: int, size: int) -> Iterator[bytes]:
        """Yield a chunk of ``size`` bytes, few of which are in memory."""
        head = self._chunk(session, b"").removesuffix(_EMPTY)
        length = _LONG + size.to_bytes(4)
        if self._packed:  # a string in a string
            head = head[:-1] + _LONG + (size + len(length)).to_bytes(4)
        yield head + length
        yield from repeated(b"x", size)

    def _outgoing(self) -> Outgoing:
        return Outgoing(self._passing.words, Encoding.RAW, packed=self._packed)

    # --- what goes wrong ----------------------------------------------------

    def _shape(self, fault: Fault) -> None:
        self._shapes.setdefault(self._session, []).append(fault)

    def _act(self, kind: FaultKind, fault: Fault) -> None:
        if kind in _LOST:
            self._lost.add(_LOST[kind])
        if kind is FaultKind.DISCONNECT:
            self._stdin_open = self._stdout_open = False
        else:
            super()._act(kind, fault)


def _cut(frame: bytes) -> Iterator[Step]:
    """Yield a frame with a pause before each of its first bytes."""
    for byte in frame[:_HEAD]:
        yield BETWEEN
        yield bytes([byte])
    if len(frame) > _HEAD:
        yield frame[_HEAD:]
