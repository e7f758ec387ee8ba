"""
A record processor with faults: one action at a time, and checkpoints in between.

A message is a record. A fault at a message happens as soon as the processor has its
action; a fault that changes a reply changes the status of that action.
"""

from __future__ import annotations

from binascii import a2b_base64
from collections.abc import Iterator, Mapping
from contextlib import suppress
from signal import SIGKILL
from typing import ClassVar, Final

from etlstage.protocol.kcl.checkpoint import THROTTLING
from etlstage.protocol.kcl.lines import (
    ROWS,
    Ask,
    Lines,
    StatusReply,
    answer_line,
    read_object,
    read_reply,
)
from etlstage.protocol.kcl.settings import KclDialect
from etlstage.testing.fault import FaultKind, Moment
from etlstage.testing.faulty.wire import Fault, FaultyWire
from etlstage.testing.hostile.kinds import Exit, Step
from etlstage.testing.hostile.marked import BETWEEN, repeated
from etlstage.transport import LaunchRequest

__all__ = ("KclWire",)

_LARGEST: Final = 2**31  # bytes of a line


class KclWire(FaultyWire):
    """The conversation as the supervisor sees it; see :class:`FaultyWire`."""

    has: ClassVar[frozenset[str]] = frozenset({"pipes", "checkpoints"})

    def follow(self, request: LaunchRequest) -> None:
        """Prepare to parse the conversation."""
        assert isinstance(request.dialect, KclDialect)
        self.stray = b"stray print\n"
        self._member = ROWS[request.dialect.version].position
        self._input = Lines(_LARGEST)
        self._begun = b""  # an incomplete line of the processor
        self._asked = 0  # number of checkpoints
        self._in_action = False
        self._unready = False  # its status for initialize is withheld
        self._shapes: list[Fault] = []  # faults of the next status

    @property
    def _idle(self) -> bool:
        return not self._in_action

    # --- what the processor is sent -----------------------------------------

    def _pass_on(self, data: memoryview | bytes) -> int:
        if not self._sent():
            return 0
        taken = self._wire.write(data)
        for line in self._input.feed(bytes(data[:taken])):
            self._tell(line)
        return taken

    def _tell(self, line: bytes) -> None:
        said = read_object(line) or {}
        self._in_action |= said.get("action") != "checkpoint"
        for record in said.get("records", ()):
            self._number += 1
            self._misbehave("message", a2b_base64(record["data"] or ""))

    # --- what it sends ------------------------------------------------------

    def _hear(self, data: bytes) -> None:
        # Line ends are kept, and so are empty lines: a print may end in one.
        lines = (self._begun + data).splitlines(keepends=True)
        self._begun = b"" if lines[-1][-1:] in b"\r\n" else lines.pop()
        for line in lines:
            match read_reply(line):
                case Ask() as ask if self._fails(ask):
                    pass
                case StatusReply("initialize") if self._unready:
                    pass
                case StatusReply():
                    self._in_action = False
                    self._pass_status(line)
                case _:
                    self._queue.append(line)

    def _rest(self) -> bytes:
        rest, self._begun = self._begun, b""
        return rest

    def _fails(self, ask: Ask) -> bool:
        """Inject the faults of a checkpoint; return whether it is withheld."""
        self._asked += 1
        unheard = False
        for fault in self._plan.due(Moment.CHECKPOINT, self._asked, b""):
            self._note(fault, self._number)
            match FaultKind(fault["kind"]):
                case FaultKind.PAUSE:
                    self._queue.append(float(fault["seconds"]))
                case FaultKind.END_INPUT:
                    self._wire.close_write()
                    unheard = True
                case _:
                    named = ask if ask.member else ask._replace(member=self._member)
                    error = fault.get("data", THROTTLING)
                    self._unsent += answer_line(named, error)
                    with suppress(BrokenPipeError):  # its exit is noticed elsewhere
                        self._sent()
                    unheard = True
        return unheard

    def _pass_status(self, line: bytes) -> None:
        shapes = self._noted(self._shapes)
        self._shapes.clear()
        self._spoils(_spoiled(shapes, line))

    # --- what goes wrong ----------------------------------------------------

    def _shape(self, fault: Fault) -> None:
        self._shapes.append(fault)

    def _act(self, kind: FaultKind, fault: Fault) -> None:
        self._unready |= kind is FaultKind.NEVER_READY
        super()._act(kind, fault)


def _spoiled(shapes: Mapping[str, Fault], line: bytes) -> Iterator[Step]:
    if "skip" in shapes:
        return
    if "flood" in shapes:
        yield from repeated(b"x\n", 2 * shapes["flood"]["size"])
    if "huge" in shapes:
        yield from repeated(b"x", shapes["huge"]["size"])
        yield b"\n"
    if "partial" in shapes:
        yield line[: len(line) // 2]
        yield Exit(-SIGKILL)
    # At once: a late extra status would be taken for that of the next action.
    line *= 1 + ("twice" in shapes)
    if "cut" not in shapes:
        yield line
        return
    for byte in line:
        yield BETWEEN
        yield bytes([byte])
