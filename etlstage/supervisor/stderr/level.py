"""
How serious a line of text is, when it says so.

A level counts in four places: as a key of JSON, as ``level=`` of logfmt, before a colon
at the head of the line (``ERROR: ...``), and as syslog's prefix (``<3>``). A word in a
sentence is not a level.
"""

from __future__ import annotations

import json
import re
from typing import Final, Literal, TypeAlias

__all__ = ("Level", "level_of")

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
"""Those that are not ``info``."""
_SYSLOG: Final[tuple[Level, ...]] = (
    *("critical", "critical", "critical", "error"),
    *("warning", "info", "info", "debug"),
)
_NUMBERS: Final[tuple[tuple[int, Level], ...]] = (
    *((60, "critical"), (50, "error"), (40, "warning"), (30, "info")),
)
"""What bunyan and pino mean by numbers from these up; below them is ``debug``."""
_KEYS: Final = ("level", "severity", "levelname", "log.level", "lvl", "loglevel")

_PRIORITY: Final = re.compile(r"<(\d{1,3})>")
_HEAD: Final = re.compile(r"([A-Za-z]+):")
_LOGFMT: Final = re.compile(r"[\w.]+=")
_LOGFMT_LEVEL: Final = re.compile(
    r'(?:^|\s)(?:level|severity|lvl|loglevel|levelname)="?(\w+)"?(?=\s|$)',
    re.IGNORECASE,
)


def level_of(line: str) -> Level:
    """Return the level that ``line`` names, ``info`` if it names none."""
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
