"""What went between us and one worker, byte by byte, and how a person is shown it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby, pairwise
from typing import Final

from etlstage.telemetry.terminal import harmless

__all__ = ("BYTEWISE", "Channel", "Entry", "Transcript", "clipped", "cut")

BYTEWISE: Final = range(1, 2**62)
"""Cuts at every place: a byte at a time."""

_DATA: Final = 240  # bytes of a line that are shown, half of them from its end
_LINES: Final = 30  # lines that are shown, half of them the last ones
_PIECES: Final = 40  # of what was cut


class Channel(StrEnum):
    """Where bytes have passed, as the worker calls it."""

    STDIN = "stdin"
    """From us to the worker."""
    STDOUT = "stdout"
    """From the worker to us."""
    STDERR = "stderr"
    """From the worker to people."""
    STATUS = "status"
    """Where the worker says that it is ready, and alive."""
    EVENT = "event"
    """No bytes, but something that happened: a signal, the exit."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What one read or write has moved."""

    channel: Channel
    data: bytes
    """As it was cut; empty in a recording: the end of that stream."""
    at: float = 0.0
    """Seconds since the start."""
    ahead: int = 0
    """For stdin: bytes written before that the worker had not read."""


class Transcript(list[Entry]):
    """All that went both ways, in order."""

    def of(self, channel: Channel) -> bytes:
        """Return the bytes that went one way."""
        return b"".join(entry.data for entry in self if entry.channel is channel)

    def shown(self, show: Callable[[bytes], str]) -> str:
        """
        Return lines of text; of much data, and of many lines, both ends.

        Args:
            show: Makes bytes printable: ``Dialect.shown``.

        """
        lines = [
            _line([entry for _, entry in entries], show)
            for _, entries in groupby(enumerate(self), key=_line_of)
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


def _line_of(numbered: tuple[int, Entry]) -> object:
    """Return the same for what goes on one line: one way without anything between."""
    number, entry = numbered
    return number if entry.channel is Channel.EVENT else entry.channel


def _line(entries: list[Entry], show: Callable[[bytes], str]) -> str:
    at, channel = entries[0].at, entries[0].channel
    data = b"".join(entry.data for entry in entries)
    if channel is Channel.STDIN and 1 < len(entries) <= _PIECES:
        # Where it was cut may be what the worker fails at.
        text = " | ".join(clipped(entry.data, show) for entry in entries)
    elif channel in (Channel.STDERR, Channel.EVENT):
        text = clipped(data.rstrip(), lambda part: part.decode(errors="replace"))
        text = harmless(text, lines=True).replace("\n", "\n" + " " * 20)
    else:
        text = clipped(data, show)
        if len(entries) > _PIECES and channel is Channel.STDIN:
            text += f" (in {len(entries)} pieces)"
    return f"{at:10.3f}  {channel:6}  {text}"


def clipped(data: bytes, show: Callable[[bytes], str]) -> str:
    """Return bytes made printable by ``show``; of many, both ends."""
    if len(data) <= _DATA:
        return show(data)
    half = _DATA // 2
    left_out = f" ... {len(data) - 2 * half:,} bytes ... "
    return f"{show(data[:half])}{left_out}{show(data[-half:])}"
