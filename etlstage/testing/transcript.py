"""What went between us and one worker, byte by byte, and how a person is shown it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from enum import StrEnum
from itertools import groupby, pairwise
from typing import Final, NamedTuple

from etlstage.telemetry.terminal import harmless

__all__ = ("BYTEWISE", "Flow", "Passage", "Transcript", "clipped", "cut")

BYTEWISE: Final = range(1, 2**62)
"""Cuts at every place: a byte at a time."""

_DATA: Final = 240  # bytes of a line that are shown, half of them from its end
_LINES: Final = 30  # lines that are shown, half of them the last ones
_PIECES: Final = 40  # of what was cut


class Flow(StrEnum):
    """Where bytes went, as the worker calls it."""

    STDIN = "stdin"
    STDOUT = "stdout"
    STDERR = "stderr"
    EVENT = "event"
    """No bytes, but something that happened: a signal, the exit."""


class Passage(NamedTuple):
    """One write to the worker, or one read from it."""

    seconds: float
    """Since the worker was started."""
    flow: Flow
    data: bytes


class Transcript(list[Passage]):
    """All that went both ways, in order."""

    def of(self, flow: Flow) -> bytes:
        """Return the bytes that went one way."""
        return b"".join(passage.data for passage in self if passage.flow is flow)

    def shown(self, show: Callable[[bytes], str]) -> str:
        """
        Return lines of text; of much data, and of many lines, both ends.

        Args:
            show: Makes bytes printable: ``Dialect.shown``.

        """
        lines = [
            _line([passage for _, passage in passages], show)
            for _, passages in groupby(enumerate(self), key=_line_of)
        ]
        half = _LINES // 2
        if len(lines) > _LINES:
            left_out = f"            ... {len(lines) - 2 * half} lines ..."
            lines = [*lines[:half], left_out, *lines[-half:]]
        return "\n".join(lines)


def cut(data: bytes, cuts: Collection[int], offset: int = 0) -> Iterator[bytes]:
    """
    Yield the pieces of ``data``.

    Args:
        data: What is to be cut.
        cuts: Before which bytes, counted from 0; those outside don't count.
        offset: Where in what ``cuts`` counts ``data`` begins.

    """
    places = (at for at in range(1, len(data)) if at + offset in cuts)
    for begin, end in pairwise((0, *(places if cuts else ()), len(data))):
        yield data[begin:end]


def _line_of(numbered: tuple[int, Passage]) -> object:
    """Return the same for what goes on one line: one way without anything between."""
    number, passage = numbered
    return number if passage.flow is Flow.EVENT else passage.flow


def _line(passages: list[Passage], show: Callable[[bytes], str]) -> str:
    seconds, flow, _ = passages[0]
    data = b"".join(passage.data for passage in passages)
    if flow is Flow.STDIN and 1 < len(passages) <= _PIECES:
        # Where it was cut may be what the worker fails at.
        text = " | ".join(clipped(passage.data, show) for passage in passages)
    elif flow in (Flow.STDERR, Flow.EVENT):
        text = clipped(data.rstrip(), lambda part: part.decode(errors="replace"))
        text = harmless(text, lines=True).replace("\n", "\n" + " " * 20)
    else:
        text = clipped(data, show)
        if len(passages) > _PIECES and flow is Flow.STDIN:
            text += f" (in {len(passages)} pieces)"
    return f"{seconds:10.3f}  {flow:6}  {text}"


def clipped(data: bytes, show: Callable[[bytes], str]) -> str:
    """Return bytes made printable by ``show``; of many, both ends."""
    if len(data) <= _DATA:
        return show(data)
    half = _DATA // 2
    left_out = f" ... {len(data) - 2 * half:,} bytes ... "
    return f"{show(data[:half])}{left_out}{show(data[-half:])}"
