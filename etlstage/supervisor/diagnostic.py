"""
What a worker writes beside its replies: lines for people, and for the supervisor.

On stderr: the output is cut into lines, with the level that each names. Lines beyond
the rate limit are dropped and counted. At the end, the error that the worker died of is
looked for. A level is recognized in four places: as a key of JSON, as ``level=`` of
logfmt, before a colon at the head of the line (``ERROR: ...``), and as syslog's prefix
(``<3>``). A word in a sentence is not a level.

Over ``ETLSTAGE_STATUS``: any output is a heartbeat. A line of JSON may hold more::

    {"metric": "rows_skipped", "add": 3}
    {"progress": 0.4}

A line that is not JSON, or whose meaning is unknown, is only a heartbeat. ``stderr.py``
reads the bytes and logs the lines.
"""

from __future__ import annotations

import json
import re
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias

from etlstage.telemetry.terminal import harmless

__all__ = (
    "SKIPPED",
    "Diagnostic",
    "DiagnosticReader",
    "Level",
    "LineWritten",
    "LinesDropped",
    "StatusReader",
    "StatusUpdate",
    "Throttle",
    "cause_of",
    "level_of",
    "traceback_of",
)

_LINE: Final = 8192  # bytes of a line; a longer one comes in pieces
_TAIL_LINES: Final = 10
_TAIL_BYTES: Final = 8192
_TRACE: Final = "Traceback (most recent call last):"
_TRACE_LINES: Final = 100


class LineWritten(NamedTuple):
    """A line, or the lines of a traceback, safe to be shown on a terminal."""

    level: Level
    text: str


class LinesDropped(NamedTuple):
    """Lines were written that are not passed on."""

    lines: int
    bytes: int


Diagnostic: TypeAlias = LineWritten | LinesDropped


class DiagnosticReader:
    """Reads what one worker writes to stderr; ``throttle`` decides what may pass."""

    def __init__(self, throttle: Throttle) -> None:
        self._throttle = throttle
        self._rest = b""
        self._dropped = LinesDropped(0, 0)
        self._tail: deque[bytes] = deque(maxlen=_TAIL_LINES)
        self._trace: list[str] = []
        self.lines: int = 0
        """Number of lines so far, dropped or not; each piece of a long one counts."""

    @property
    def owing(self) -> bool:
        """Whether lines were dropped, or held back, and not reported yet."""
        return self._dropped.lines > 0 or bool(self._trace)

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines, dropped or not; only the ends of very long ones."""
        kept: list[str] = []
        room = _TAIL_BYTES
        for line in reversed(self._tail):
            if room <= 0:
                break
            # Shortened, long lines leave room for others.
            kept.append(_text(line[-min(room, _TAIL_BYTES // 4) :]))
            room -= len(line)
        return tuple(reversed(kept))

    def receive(self, data: bytes, now: float) -> list[Diagnostic]:
        """Return what is to be logged once ``data`` has come."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        seen: list[Diagnostic] = []
        for line in lines:
            self._cut(line, now, seen)
        while len(self._rest) > _LINE:
            self._take(self._rest[:_LINE], now, seen)
            self._rest = self._rest[_LINE:]
        return seen

    def settle(self) -> list[Diagnostic]:
        """Return lines held back, and how much was dropped, if not reported yet."""
        seen: list[Diagnostic] = []
        self._end_trace(seen)
        if self._dropped.lines:
            seen.append(self._dropped)
            self._dropped = LinesDropped(0, 0)
        return seen

    def finish(self, now: float) -> list[Diagnostic]:
        """Return the last, incomplete line, lines held back and the number dropped."""
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
            self._end_trace(seen)
            lines, size = self._dropped
            self._dropped = LinesDropped(lines + 1, size + len(line))
            return
        if self._dropped.lines:
            seen.extend(self.settle())
        text = _text(line)
        if text == _TRACE:
            self._end_trace(seen)
            self._trace.append(text)
        elif self._trace:
            self._trace.append(text)
            # Frames are indented; the exception, the last line, is not.
            if not text.startswith(" ") or len(self._trace) == _TRACE_LINES:
                self._end_trace(seen)
        else:
            seen.append(LineWritten(level_of(text), text))

    def _end_trace(self, seen: list[Diagnostic]) -> None:
        """Report the lines of a traceback as one entry."""
        if self._trace:
            level = level_of(self._trace[-1])
            seen.append(LineWritten(level, "\n".join(self._trace)))
            self._trace = []


def _text(line: bytes) -> str:
    return harmless(line.decode("utf-8", "backslashreplace").rstrip("\r"))


Level: TypeAlias = Literal["debug", "info", "warning", "error", "critical"]

_LEVELS: Final[dict[str, Level]] = {
    "trace": "debug",
    "debug": "debug",
    "verbose": "debug",
    "warn": "warning",
    "warning": "warning",
    "err": "error",
    "error": "error",
    "severe": "error",
    "crit": "critical",
    "critical": "critical",
    "fatal": "critical",
    "panic": "critical",
    "emerg": "critical",
    "emergency": "critical",
    "alert": "critical",
}
"""Names of levels; any other name is ``info``."""
_SYSLOG: Final[tuple[Level, ...]] = (
    *("critical", "critical", "critical", "error"),
    *("warning", "info", "info", "debug"),
)
_NUMBERS: Final[tuple[tuple[int, Level], ...]] = (
    *((60, "critical"), (50, "error"), (40, "warning"), (30, "info")),
)
"""The least number of each level in bunyan and pino; lower ones are ``debug``."""
_KEYS: Final = ("level", "severity", "levelname", "log.level", "lvl", "loglevel")

_PRIORITY: Final = re.compile(r"<(\d{1,3})>")
_HEAD: Final = re.compile(r"([A-Za-z]+):")
_LOGFMT: Final = re.compile(r"[\w.]+=")
_LOGFMT_LEVEL: Final = re.compile(
    r'(?:^|\s)(?:level|severity|lvl|loglevel|levelname)="?(\w+)"?(?=\s|$)',
    re.IGNORECASE,
)


def level_of(line: str) -> Level:
    """Return the level that ``line`` names, or ``info``."""
    if found := _PRIORITY.match(line):
        return _SYSLOG[int(found[1]) % 8]
    if line.startswith("{"):
        return _level_of_json(line)
    found = _LOGFMT_LEVEL.search(line) if _LOGFMT.match(line) else _HEAD.match(line)
    return _named(found[1]) if found else "info"


def _level_of_json(line: str) -> Level:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return "info"
    for key in _KEYS:
        value = entry.get(key)
        if isinstance(value, str):
            return _named(value)
        if type(value) is int:
            return next((level for least, level in _NUMBERS if value >= least), "debug")
    return "info"


def _named(word: str) -> Level:
    return _LEVELS.get(word.lower(), "info")


_BYTES: Final = 1024  # bytes that cost as much as a line
_CLOSED: Final = 1.0  # seconds for which the bucket stays closed, at least


class Throttle:
    """
    Decides which lines of a talkative worker are logged, and which are only counted.

    It is a token bucket that, once empty, stays closed until it holds a good number of
    tokens. So a flood is logged as one block of lines per second, each after a count of
    the lines dropped before it, and not as single lines out of context.

    Args:
        rate: Lines per second that pass in the long run; a line of several KiB counts
            once per KiB.
        burst: Lines that pass at once after a time of silence.

    Raises:
        ValueError: If ``rate`` is not positive, or ``burst`` is less than 1.

    """

    def __init__(self, *, rate: float, burst: float) -> None:
        if rate <= 0 or burst < 1:
            raise ValueError(
                f"rate must be positive and burst 1 or more, got {rate} and {burst}"
            )
        self._rate = rate
        self._burst = burst
        self._tokens = float(burst)
        self._reopen = min(burst, max(1.0, rate * _CLOSED))
        self._closed = False
        self._at: float | None = None

    def allows(self, size: int, now: float) -> bool:
        """Return whether a line of ``size`` bytes may pass, and count it if so."""
        if self._at is not None and now > self._at:
            more = (now - self._at) * self._rate
            self._tokens = min(self._burst, self._tokens + more)
        self._at = now if self._at is None else max(now, self._at)
        if self._closed and self._tokens < self._reopen:
            return False
        # A line that costs more than the bucket can hold passes when it is full.
        cost = min(self._burst, max(1.0, size / _BYTES))
        self._closed = self._tokens < cost
        if self._closed:
            return False
        self._tokens -= cost
        return True


_ERROR: Final = re.compile(r"[A-Za-z_][\w.]*(?:: .*)?")
"""The last line of a Python traceback, as ``KeyError: 'date'``."""
_FRAME: Final = '  File "'


def cause_of(lines: Sequence[str]) -> str:
    """
    Return the error of an uncaught exception in Python, or an empty text.

    ``lines`` are the last on stderr, oldest first: the traceback may begin before them.
    """
    for at in range(len(lines) - 1, 0, -1):
        # A frame, its line of code, or the marks below that.
        if lines[at - 1].startswith("  ") and _ERROR.fullmatch(lines[at]):
            framed = any(line.startswith(_FRAME) for line in lines[:at])
            return lines[at] if framed else ""
    return ""


def traceback_of(lines: Sequence[str], error: str) -> tuple[str, ...]:
    """Return the lines of the last traceback, if it ends in ``error``."""
    if error not in lines or cause_of(lines) != error:
        return ()
    return tuple(lines[: len(lines) - lines[::-1].index(error)])


SKIPPED: Final = "skipped"
"""The metric for messages that a worker skipped: answered, without output."""
_STATUS_LINE: Final = 4096  # bytes; a longer line is only a heartbeat
_MOST: Final = 10**12  # added at once; a larger number is ignored
_NAME: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,63}")


@dataclass
class StatusUpdate:
    """What a worker has reported in some lines."""

    counts: Counter[str] = field(default_factory=Counter)
    """Numbers to be added to its metrics, by name."""
    progress: float | None = None
    """The share of its current work that is done, from 0 to 1; None: not reported."""


class StatusReader:
    """Reads the status lines of one worker."""

    def __init__(self) -> None:
        self._rest = b""
        self._too_long = False

    def receive(self, data: bytes) -> StatusUpdate:
        """Return what the worker reports in the lines that end in ``data``."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        update = StatusUpdate()
        for line in lines:
            if line and not self._too_long and len(line) <= _STATUS_LINE:
                _understand(line, update)
            self._too_long = False
        if len(self._rest) > _STATUS_LINE:
            self._rest, self._too_long = b"", True
        return update


def _understand(line: bytes, update: StatusUpdate) -> None:
    try:
        status = json.loads(line)
    except (ValueError, RecursionError):
        return
    match status:
        case {"metric": str(name), "add": int(count)} if (
            _NAME.fullmatch(name) and count is not True and 0 < count <= _MOST
        ):
            update.counts[name] += count
        case {"progress": float(share) | int(share)} if (
            not isinstance(share, bool) and 0 <= share <= 1
        ):
            update.progress = float(share)
