"""
From the bytes of a worker's stderr to the lines that are logged.

Cuts lines, tells their levels, drops what is too much and says how much that was.
Reading the bytes and logging the lines is ``log.py``.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple, TypeAlias

from etlstage.supervisor.stderr.level import Level, level_of
from etlstage.supervisor.stderr.throttle import Throttle
from etlstage.telemetry.terminal import harmless

__all__ = ("Diagnostic", "DiagnosticReader", "LineWritten", "LinesDropped")

_LINE: Final = 8192  # bytes of a line; a longer one comes in pieces
_TAIL_LINES: Final = 10
_TAIL_BYTES: Final = 8192


class LineWritten(NamedTuple):
    """A line, safe to be shown on a terminal."""

    level: Level
    text: str


class LinesDropped(NamedTuple):
    """Lines were written that are not passed on."""

    lines: int
    bytes: int


Diagnostic: TypeAlias = LineWritten | LinesDropped


class DiagnosticReader:
    """
    Reads what one worker writes to stderr.

    Args:
        throttle: What may pass.

    """

    def __init__(self, throttle: Throttle) -> None:
        self._throttle = throttle
        self._rest = b""
        self._dropped = LinesDropped(0, 0)
        self._tail: deque[bytes] = deque(maxlen=_TAIL_LINES)
        self.lines: int = 0
        """Lines so far, dropped or not; pieces of a long one count one each."""

    @property
    def owing(self) -> bool:
        """Whether lines were dropped that nobody was told about."""
        return self._dropped.lines > 0

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines, dropped or not; of very long ones their ends."""
        kept: list[str] = []
        room = _TAIL_BYTES
        for line in reversed(self._tail):
            if room <= 0:
                break
            # Long ones leave room for others.
            kept.append(_text(line[-min(room, _TAIL_BYTES // 4) :]))
            room -= len(line)
        return tuple(reversed(kept))

    def receive(self, data: bytes, now: float) -> list[Diagnostic]:
        """
        Return what is to be logged of ``data`` and what came before it.

        Args:
            data: What was written.
            now: The time, in seconds.

        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        seen: list[Diagnostic] = []
        for line in lines:
            self._cut(line, now, seen)
        while len(self._rest) > _LINE:
            self._take(self._rest[:_LINE], now, seen)
            self._rest = self._rest[_LINE:]
        return seen

    def settle(self) -> list[Diagnostic]:
        """Return how much was dropped, if anybody is to be told yet."""
        if not self.owing:
            return []
        owed, self._dropped = self._dropped, LinesDropped(0, 0)
        return [owed]

    def finish(self, now: float) -> list[Diagnostic]:
        """
        Return what has no line end, and how much was dropped.

        Args:
            now: The time, in seconds.

        """
        seen: list[Diagnostic] = []
        rest, self._rest = self._rest, b""
        self._cut(rest, now, seen)
        return seen + self.settle()

    def _cut(self, line: bytes, now: float, seen: list[Diagnostic]) -> None:
        line = line.rstrip(b"\r")
        for at in range(0, len(line), _LINE):
            self._take(line[at : at + _LINE], now, seen)

    def _take(self, line: bytes, now: float, seen: list[Diagnostic]) -> None:
        self.lines += 1
        self._tail.append(line)
        if not self._throttle.allows(len(line), now):
            lines, size = self._dropped
            self._dropped = LinesDropped(lines + 1, size + len(line))
            return
        if self.owing:
            seen.extend(self.settle())
        text = _text(line)
        seen.append(LineWritten(level_of(text), text))


def _text(line: bytes) -> str:
    return harmless(line.decode("utf-8", "backslashreplace").rstrip("\r"))
