"""Transcripts of all bytes exchanged with one worker, and their readable form."""

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
"""Cuts at every byte: one byte at a time."""

_DATA: Final = 240  # bytes shown of a line, half of them from its end
_LINES: Final = 30  # lines shown, half of them from the end
_PIECES: Final = 40  # pieces, at most, whose cuts are shown
_FRAMES: Final = 12  # frames shown of a line, half of them from its end


class Channel(StrEnum):
    """A stream, named as in a worker with pipes, or the channel for events."""

    STDIN = "stdin"
    """From us to the worker."""
    STDOUT = "stdout"
    """From the worker to us."""
    STDERR = "stderr"
    """From the worker to humans."""
    STATUS = "status"
    """The pipe in which the worker reports that it is ready, and alive."""
    EVENT = "event"
    """Not a stream: something that happened, such as a signal or the exit."""


_SIDES: Final = {Channel.STDIN: Side.SUPERVISOR, Channel.STDOUT: Side.WORKER}
_OVER_SOCKET: Final = {Channel.STDIN: "sent", Channel.STDOUT: "recv"}
"""Names of the two directions where a single connection serves both."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One read or write."""

    channel: Channel
    data: bytes
    """The bytes read or written; empty in a recording: the end of the stream."""
    at: float = 0.0
    """Seconds since the start."""
    ahead: int = 0
    """For stdin: number of bytes written earlier that the worker had not read."""


class Transcript(list[Entry]):
    """All reads and writes, in order."""

    def of(self, channel: Channel) -> bytes:
        """Return all bytes of a channel."""
        return b"".join(entry.data for entry in self if entry.channel is channel)

    def shown(self, dialect: Dialect, since: int = 0) -> str:
        """
        Return it as lines of text; long data and long transcripts are elided.

        Args:
            dialect: The dialect of the worker.
            since: Number of entries to leave out at the beginning.

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
    Raised when a worker under test misbehaves.

    Attributes:
        what: What the worker did, as part of a sentence.
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
        data: The bytes to cut.
        cuts: Offsets at which to cut; those outside of ``data`` are ignored.
        offset: Offset of the first byte of ``data``, in terms of ``cuts``.

    """
    places = (at for at in range(1, len(data)) if at + offset in cuts)
    for begin, end in pairwise((0, *(places if cuts else ()), len(data))):
        yield data[begin:end]


def _line_of(numbered: tuple[int, Entry]) -> object:
    """Return a key that is the same for entries on one line: those of one channel."""
    number, entry = numbered
    return number if entry.channel is Channel.EVENT else entry.channel


def _line(entries: list[Entry], dialect: Dialect, reader: FrameReader | None) -> str:
    at, channel, show = entries[0].at, entries[0].channel, kit_of(dialect).shown
    data = b"".join(entry.data for entry in entries)
    if reader is not None and channel in _SIDES:
        text = _frames(entries, reader)
    elif channel is Channel.STDIN and 1 < len(entries) <= _PIECES:
        # The cuts may be what makes the worker fail.
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
    """Return the frames completed by these entries; many are elided."""
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
    """Return bytes made printable by ``show``; the middle of long ones is elided."""
    if len(data) <= _DATA:
        return show(data)
    half = _DATA // 2
    left_out = f" ... {len(data) - 2 * half:,} bytes ... "
    return f"{show(data[:half])}{left_out}{show(data[-half:])}"
