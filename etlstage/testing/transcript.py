"""What went between us and one worker, byte by byte, and how a person is shown it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby, pairwise
from typing import Final

from etlstage.errors import EtlstageError
from etlstage.protocol.base import Dialect, Side
from etlstage.telemetry.terminal import harmless
from etlstage.testing.dialect import FrameReader, kit_of

__all__ = (
    "BYTEWISE",
    "Channel",
    "Entry",
    "Transcript",
    "WorkerMisbehaved",
    "clipped",
    "cut",
)

BYTEWISE: Final = range(1, 2**62)
"""Cuts at every place: a byte at a time."""

_DATA: Final = 240  # bytes of a line that are shown, half of them from its end
_LINES: Final = 30  # lines that are shown, half of them the last ones
_PIECES: Final = 40  # of what was cut
_FRAMES: Final = 12  # of a line that are shown, half of them the last ones


class Channel(StrEnum):
    """Where bytes have passed, as a worker with pipes calls it."""

    STDIN = "stdin"
    """From us to the worker."""
    STDOUT = "stdout"
    """From the worker to us."""
    STDERR = "stderr"
    """From the worker to people."""
    STATUS = "status"
    """Where the worker reports that it is ready, and alive."""
    EVENT = "event"
    """No bytes, but something that happened: a signal, the exit."""


_SIDES: Final = {Channel.STDIN: Side.SUPERVISOR, Channel.STDOUT: Side.WORKER}
_OVER_SOCKET: Final = {Channel.STDIN: "sent", Channel.STDOUT: "recv"}
"""What passes either way where there is one connection for both."""


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
    """What was read and written, in order."""

    def of(self, channel: Channel) -> bytes:
        """Return the bytes that went one way."""
        return b"".join(entry.data for entry in self if entry.channel is channel)

    def shown(self, dialect: Dialect, since: int = 0) -> str:
        """
        Return lines of text; of much data, and of many lines, both ends.

        Args:
            dialect: What was spoken.
            since: Entries that are left out at the beginning.

        """
        reader = kit_of(dialect).reader()
        if reader is not None:
            for entry in self[:since]:
                if entry.channel in _SIDES:
                    reader.read(_SIDES[entry.channel], entry.data)
        lines = [
            _line([entry for _, entry in entries], dialect, reader)
            for _, entries in groupby(enumerate(self[since:]), key=_line_of)
        ]
        half = _LINES // 2
        if len(lines) > _LINES:
            left_out = f"            ... {len(lines) - 2 * half} lines ..."
            lines = [*lines[:half], left_out, *lines[-half:]]
        return "\n".join(lines)


class WorkerMisbehaved(EtlstageError, AssertionError):
    """
    Raised when a worker under test does not do what it should.

    Attributes:
        what: What it did, as a part of a sentence.
        transcript: The transcript, as text.

    """

    def __init__(self, what: str, transcript: str) -> None:
        super().__init__(f"{what}\n{transcript}" if transcript else what)
        self.what = what
        self.transcript = transcript


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


def _line(entries: list[Entry], dialect: Dialect, reader: FrameReader | None) -> str:
    at, channel, show = entries[0].at, entries[0].channel, kit_of(dialect).shown
    data = b"".join(entry.data for entry in entries)
    if reader is not None and channel in _SIDES:
        text = _frames(entries, reader)
    elif channel is Channel.STDIN and 1 < len(entries) <= _PIECES:
        # Where it was cut may be what the worker fails at.
        text = " | ".join(clipped(entry.data, show) for entry in entries)
    elif channel in (Channel.STDERR, Channel.EVENT):
        text = clipped(data.rstrip(), lambda part: part.decode(errors="replace"))
        text = harmless(text, lines=True).replace("\n", "\n" + " " * 20)
    else:
        text = clipped(data, show)
        if len(entries) > _PIECES and channel is Channel.STDIN:
            text += f" (in {len(entries)} pieces)"
    name = (
        _OVER_SOCKET.get(channel, channel)
        if dialect.connection is not None
        else channel
    )
    return f"{at:10.3f}  {name:6}  {text}"


def _frames(entries: list[Entry], reader: FrameReader) -> str:
    """Return what was complete in these; of many, both ends."""
    side = _SIDES[entries[0].channel]
    parts = [reader.read(side, entry.data) for entry in entries]
    if side is Side.SUPERVISOR and 1 < len(parts) <= _PIECES:
        return " | ".join("; ".join(part) or "..." for part in parts)
    frames = [frame for part in parts for frame in part]
    half = _FRAMES // 2
    if len(frames) > _FRAMES:
        left_out = f"... {len(frames) - 2 * half:,} frames ..."
        frames = [*frames[:half], left_out, *frames[-half:]]
    pieces = f" (in {len(parts)} pieces)" if len(parts) > _PIECES else ""
    return ("; ".join(frames) or "...") + pieces


def clipped(data: bytes, show: Callable[[bytes], str]) -> str:
    """Return bytes made printable by ``show``; of many, both ends."""
    if len(data) <= _DATA:
        return show(data)
    half = _DATA // 2
    left_out = f" ... {len(data) - 2 * half:,} bytes ... "
    return f"{show(data[:half])}{left_out}{show(data[-half:])}"
