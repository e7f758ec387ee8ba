"""
What the worker writes: replies, right or as the plan spoils them.

Right replies are kept until the input runs dry; before a wrong one all of them are
written, so that it is known who holds what.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from .markers import MarkerBytes
from .plan import as_bytes
from .system import kill, sleep

if TYPE_CHECKING:
    from .plan import Fault

__all__ = ("SHAPES", "HostileOutput")

SHAPES: Final = frozenset(
    {"skip", "refuse", "twice", "wrong_marker", "partial", "huge", "flood", "cut"}
)
"""Kinds of faults that change the reply; the others are acts, done at once."""

_BLOCK: Final = 1024 * 1024  # bytes
_BETWEEN: Final = 0.002  # seconds between two parts of a marker


class HostileOutput:
    """
    Our stdout.

    Attributes:
        shapes: What is to be wrong with the reply to come.
        closed: Whether it is closed; what is written then is dropped.
        one_to_one: Whether a reply is one message.

    """

    def __init__(self, markers: MarkerBytes) -> None:
        self.shapes: list[Fault] = []
        self.closed = False
        self.one_to_one: bool = markers.eop == markers.eom
        self._markers = markers
        self._unsent: list[bytes] = []

    def reply(self, outputs: list[bytes], *, ends: bool = True) -> None:
        """Answer with these messages, or just give them: then there is no EOP."""
        eom, eop = self._markers.eom, self._markers.eop if ends else b""
        if eop == eom:
            # Exactly one message, whatever we have.
            outputs, eop = [b"".join(outputs)], b""
        if self.shapes:
            self.flush()
            shapes, self.shapes = {s["kind"]: s for s in self.shapes}, []
            self._spoil(shapes, outputs, eop)
        else:
            self._unsent.append(eom.join((*outputs, eop)))

    def pass_on(self, outputs: list[bytes]) -> None:
        """Give messages before the end of their reply."""
        self._unsent.append(self._markers.eom.join((*outputs, b"")))
        self.flush()

    def ask_for_more(self) -> None:
        """Say that the batch is not complete."""
        bnc = self._markers.bnc
        if any(shape["kind"] == "cut" for shape in self.shapes):
            self.flush()
            self._cut(bnc)
        else:
            self._unsent.append(bnc)

    def flush(self) -> None:
        """Write the replies that were kept."""
        if self._unsent:
            data = b"".join(self._unsent)
            self._unsent.clear()
            self.write(data)

    def write(self, data: bytes) -> None:
        """Write it now, and all of it; who does not listen ends us."""
        if self.closed:
            return
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(1, rest) :]
        except BrokenPipeError:
            os._exit(1)

    def _spoil(
        self, shapes: dict[str, Fault], outputs: list[bytes], eop: bytes
    ) -> None:
        eom = self._markers.eom
        if "skip" in shapes:
            return
        if "refuse" in shapes and self._markers.err:
            reason = as_bytes(shapes["refuse"].get("data"))
            self.write(b" ".join(outputs) if reason is None else reason)
            self.write(self._markers.err)
            return
        if "huge" in shapes:
            self._write_much(b"x", shapes["huge"]["size"])
            outputs = [b""]
        if "flood" in shapes:
            self._write_much(b"x" + eom, shapes["flood"]["size"])
        if "wrong_marker" in shapes:
            wrong = as_bytes(shapes["wrong_marker"].get("data"))
            eop = self._markers.bnc if wrong is None else wrong
        if "partial" in shapes:
            self.write(eom.join((*outputs, b"")))
            kill("SIGKILL")
        if "cut" in shapes:
            for output in outputs:
                self.write(output)
                self._cut(eom)
            self._cut(eop)
        else:
            self.write(eom.join((*outputs, eop)) * (1 + ("twice" in shapes)))

    def _cut(self, marker: bytes) -> None:
        for at in range(len(marker)):
            sleep(_BETWEEN)
            self.write(marker[at : at + 1])

    def _write_much(self, unit: bytes, count: int) -> None:
        block = unit * min(count, _BLOCK)
        for _ in range(count * len(unit) // max(1, len(block))):
            self.write(block)
        self.write(unit * (count % max(1, min(count, _BLOCK))))
