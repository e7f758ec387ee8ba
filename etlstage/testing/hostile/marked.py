"""The bytes of the stage protocol: find requests, and spoil replies."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from .kinds import Exit, FaultKind, Step, as_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .kinds import Fault

__all__ = ("BETWEEN", "MarkerBytes", "Requests", "SpoiledReplies", "repeated")

BETWEEN: Final = 0.002
"""Seconds between two parts of a reply that is cut."""
_BLOCK: Final = 1024 * 1024  # bytes


class MarkerBytes:
    """The markers of a stage, as its supervisor gives them to a worker."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        def marker(name: str, default: str) -> bytes:
            text = environment.get(f"ETLSTAGE_{name}", default)
            return text.encode().decode("unicode_escape").encode("latin-1")

        self.eom: bytes = marker("EOM", r"\012")
        self.eop: bytes = marker("EOP", r"\000")
        self.eob: bytes = marker("EOB", r"\027")
        self.bnc: bytes = marker("BNC", r"\005")
        self.err: bytes = marker("ERR", "")  # a stage may have none


class Requests:
    """
    Finds messages, and the ends of batches, in a worker's input.

    Args:
        markers: Those of the stage.
        batches: Whether EOB may come, where a message would begin.
        eob_then_eom: Whether an EOM follows it.

    """

    def __init__(
        self, markers: MarkerBytes, *, batches: bool, eob_then_eom: bool = False
    ) -> None:
        self._eom = markers.eom
        self._eob = markers.eob + markers.eom * eob_then_eom
        self._batches = batches
        self._rest = b""

    def __bool__(self) -> bool:
        """Return whether a part of a message has come."""
        return bool(self._rest)

    def feed(self, data: bytes) -> Iterator[bytes | None]:
        """Yield the messages that are complete now; None where a batch ends."""
        rest, at = self._rest + data, 0
        while True:
            if self._batches and rest.startswith(self._eob, at):
                at += len(self._eob)
                yield None
                continue
            if self._batches and self._eob.startswith(rest[at : at + len(self._eob)]):
                break
            end = rest.find(self._eom, at)
            if end < 0:
                break
            yield rest[at:end]
            at = end + len(self._eom)
        self._rest = rest[at:]


class SpoiledReplies:
    """
    Turns right replies into wrong ones.

    Args:
        markers: Those of the stage.
        streams: Whether the worker gives no replies, but a stream of messages.

    """

    def __init__(self, markers: MarkerBytes, *, streams: bool) -> None:
        self._markers = markers
        # A reply that is one message ends with its EOM.
        one = streams or markers.eop == markers.eom
        self._end = markers.eom if one else markers.eop
        self._more = b"" if one else markers.eom
        self._marks = re.compile(
            b"|".join(map(re.escape, {markers.eom, self._end, markers.bnc}))
        )

    def spoiled(self, shapes: Mapping[str, Fault], reply: bytes) -> Iterator[Step]:
        """
        Yield what is written in place of a reply.

        Args:
            shapes: What is to be wrong with it, by kind.
            reply: The reply, with its end.

        """
        if FaultKind.SKIP in shapes:
            return
        if not reply.endswith(self._end):
            yield reply  # already wrong: a refusal
            return
        body, end = reply.removesuffix(self._end), self._end
        if FaultKind.REFUSE in shapes and self._markers.err:
            reason = as_bytes(shapes[FaultKind.REFUSE].get("data"))
            output = body.removesuffix(self._markers.eom)
            output = output.replace(self._markers.eom, b" ")
            yield (output if reason is None else reason) + self._markers.err
            return
        if FaultKind.HUGE in shapes:
            yield from repeated(b"x", shapes[FaultKind.HUGE]["size"])
            body = self._more
        if FaultKind.FLOOD in shapes:
            tiny = b"x" + self._markers.eom
            yield from repeated(tiny, len(tiny) * shapes[FaultKind.FLOOD]["size"])
        if FaultKind.WRONG_MARKER in shapes:
            wrong = as_bytes(shapes[FaultKind.WRONG_MARKER].get("data"))
            end = self._markers.bnc if wrong is None else wrong
        if FaultKind.PARTIAL in shapes:
            yield body
            yield Exit(-9)
        elif FaultKind.CUT in shapes:
            yield from self.cut(body + end)
        else:
            yield body + end
            if FaultKind.TWICE in shapes:
                yield 0.0  # input that comes meanwhile, byte by byte, stays unread
                yield body + end

    def cut(self, data: bytes) -> Iterator[Step]:
        """Yield data with a pause before each byte of a marker."""
        at = 0
        for mark in self._marks.finditer(data):
            yield data[at : mark.start()]
            for byte in mark[0]:
                yield BETWEEN
                yield bytes([byte])
            at = mark.end()
        yield data[at:]


def repeated(unit: bytes, size: int) -> Iterator[bytes]:
    """Yield ``size`` bytes of a repeated unit; the blocks are the same object."""
    block = unit * max(1, _BLOCK // len(unit))
    for _ in range(size // len(block)):
        yield block
    if size % len(block):
        yield block[: size % len(block)]
