"""Where messages end on the way to a worker, and what its replies are turned into."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from etlstage.protocol.base import Shape
from etlstage.testing.hostile.plan import as_bytes
from etlstage.transport import LaunchRequest
from etlstage.worker.marking import find_markers

__all__ = ("BETWEEN", "Requests", "SpoiledReplies", "repeated")

BETWEEN: Final = 0.002
"""Seconds between two parts of what is cut."""
_BLOCK: Final = 1024 * 1024  # bytes


class Requests:
    """Finds messages, and the ends of batches, in what a worker is to read."""

    def __init__(self, request: LaunchRequest) -> None:
        markers = find_markers((), request.env)
        self._eom = markers.eom
        self._eob = markers.eob + markers.eom * getattr(
            request.dialect, "eob_then_eom", False
        )
        self._batches = request.dialect.shape.batches
        self._rest = b""

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
    """Turns a right reply into a wrong one, as the hostile worker does."""

    def __init__(self, request: LaunchRequest) -> None:
        markers = find_markers((), request.env)
        self.eom: bytes = markers.eom
        self.eop: bytes = markers.eop
        self.bnc: bytes = markers.bnc
        self._err = markers.err
        # A reply that is one message ends with it.
        one = request.dialect.shape is Shape.STREAM or markers.eop == markers.eom
        self._end = markers.eom if one else markers.eop
        self._more = b"" if one else markers.eom
        self._marks = re.compile(
            b"|".join(map(re.escape, {self.eom, self._end, self.bnc}))
        )

    def spoiled(
        self, shapes: Mapping[str, Mapping[str, Any]], reply: bytes
    ) -> list[bytes | float]:
        """
        Return what is passed on in place of a reply.

        Args:
            shapes: What is to be wrong with it, by kind.
            reply: The reply, with its end.

        """
        if "skip" in shapes:
            return []
        if not reply.endswith(self._end):
            return [reply]  # it is wrong already: a refusal
        body, end = reply.removesuffix(self._end), self._end
        if "refuse" in shapes and self._err:
            reason = as_bytes(shapes["refuse"].get("data"))
            said = body.removesuffix(self.eom).replace(self.eom, b" ")
            return [(said if reason is None else reason) + self._err]
        made: list[bytes | float] = []
        if "huge" in shapes:
            made += repeated(b"x", shapes["huge"]["size"])
            body = self._more
        if "flood" in shapes:
            made += repeated(
                b"x" + self.eom, len(b"x" + self.eom) * shapes["flood"]["size"]
            )
        if "wrong_marker" in shapes:
            wrong = as_bytes(shapes["wrong_marker"].get("data"))
            end = self.bnc if wrong is None else wrong
        if "partial" in shapes:
            end = b""
        if "cut" in shapes:
            return made + self.cut(body + end)
        made.append((body + end) * (1 + ("twice" in shapes)))
        return [item for item in made if item]

    def cut(self, data: bytes) -> list[bytes | float]:
        """Return data with a pause before each byte of a marker."""
        made: list[bytes | float] = []
        at = 0
        for mark in self._marks.finditer(data):
            made.append(data[at : mark.start()])
            for byte in mark[0]:
                made += [BETWEEN, bytes([byte])]
            at = mark.end()
        return [item for item in (*made, data[at:]) if item]


def repeated(unit: bytes, size: int) -> Iterator[bytes]:
    """Yield so many bytes of a unit again and again; the blocks are one object."""
    block = unit * max(1, _BLOCK // len(unit))
    for _ in range(size // len(block)):
        yield block
    if size % len(block):
        yield block[: size % len(block)]
