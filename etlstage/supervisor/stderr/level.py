"""
How serious a line of text is, when it says so, and what of it a terminal may see.

A level counts where a log format has its place for it: at the head of the line, behind
at most a time, names and numbers; as a key of JSON or ``key=value``; as a prefix such as
syslog's ``<3>``. A word inside a sentence is not a level.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Final, Literal, TypeAlias

__all__ = ("Level", "LevelReader", "harmless")

Level: TypeAlias = Literal["debug", "info", "warning", "error", "critical"]

_LEVELS: Final[dict[str, Level]] = {
    "trace": "debug",
    "debug": "debug",
    "verbose": "debug",
    "info": "info",
    "information": "info",
    "notice": "info",
    "note": "info",
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
    # zerolog
    "trc": "debug",
    "dbg": "debug",
    "inf": "info",
    "wrn": "warning",
    "ftl": "critical",
    "pnc": "critical",
}
_LETTERS: Final[dict[str, Level]] = {
    "D": "debug",
    "I": "info",
    "W": "warning",
    "E": "error",
    "C": "critical",
    "F": "critical",
}
_SYSLOG: Final[tuple[Level, ...]] = (
    *("critical", "critical", "critical", "error"),
    *("warning", "info", "info", "debug"),
)
_KEYS: Final = ("level", "severity", "levelname", "log.level", "lvl", "loglevel")

_HEAD: Final = 300  # characters in which the level must stand
_WORDS: Final = 12  # and words

_PRIORITY: Final = re.compile(r"<(\d{1,3})>")
_LETTER: Final = re.compile(
    # glog: E0102 15:04:05.678901; Ruby: E, [2026-01-01T...; tornado: [E 260101 12:00:00
    r"([IWEF])\d{4} \d\d:\d\d:\d\d|([DIWEF]), \[\d{4}-|\[([DIWEC]) \d{6} \d\d:"
)
_LOGFMT: Final = re.compile(r"[\w.]+=")
_LOGFMT_LEVEL: Final = re.compile(
    r'(?:^|\s)(?:level|severity|lvl|loglevel|levelname)="?(\w+)"?(?=\s|$)',
    re.IGNORECASE,
)
_TABBED: Final = re.compile(r"\S+\t(\w+)\t")  # zap
_MODULE: Final = re.compile(r"\[\w+:(\w+)\]")  # Apache
_CRASH: Final = re.compile(
    r"(?:\s*\+ (?:Exception Group )?)?Traceback \(most recent call last\):"  # Python
    r"|thread '.*' (?:\(\d+\) )?panicked at "  # Rust
    r"|(?:Exception in thread |Caused by: )"  # Java
    r"|(?:[\w$]+\.)*[A-Z][\w$]*(?:Error|Exception)(?::|\s*$)"  # their last line
    r"|During handling of the above exception, another exception occurred:"
    r"|The above exception was the direct cause of the following exception:"
)
_WARNING: Final = re.compile(r"\S+:\d+: (?:\w+\.)*\w*Warning: ")  # Python's warnings

_LEVEL: Final = re.compile(r"(?P<open>[\[(<|]?)(?P<word>[A-Za-z]+)(?P<rest>.*)")
_DATE: Final = r"(?:\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}|\d{1,2}/[A-Z][a-z]{2}/\d{4})"
_CLOCK: Final = r"\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z|[+-]\d\d:?\d\d|[AP]M)?"
_TIME: Final = re.compile(
    rf"{_DATE}(?:[T:]{_CLOCK})?|{_CLOCK}|\d{{9,}}(?:[.,]\d+)?|[+-]\d{{4}}|UTC|GMT|[AP]M"
    r"|Mon|Tue|Wed|Thu|Fri|Sat|Sun"
    r"|Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
)
_NUMBER: Final = re.compile(r"#?\d+[:,]?")
_NAME: Final = re.compile(r"[\w.$:/#@-]+")
_SEPARATORS: Final = frozenset({"-", "|", "--", ":", "\N{EN DASH}", "\N{EM DASH}"})

_SEQUENCES: Final = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\))"
)
_CONTROLS: Final = re.compile(
    # What turns the direction of writing or ends a line hides text as well.
    r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)


def harmless(text: str) -> str:
    """Return ``text`` on one line, without what would steer a terminal."""
    return _CONTROLS.sub(_escaped, _SEQUENCES.sub("", text))


class LevelReader:
    """
    Tells the level of one line after the other.

    A line that is indented, and what follows a traceback, goes with the line above.
    """

    def __init__(self) -> None:
        self._above: Level = "info"
        self._traceback = False

    def read(self, line: str) -> Level:
        """Return the level of ``line``, ``info`` if there is nothing that tells it."""
        level = level_of(line)
        if level is None and (line[:1].isspace() or line.startswith("(==)")):
            # A frame of a stack, say.
            return self._above
        if level is None:
            # Below the frames of a traceback stands what was raised.
            level = "error" if self._traceback else "info"
        self._traceback = "Traceback (most recent call last):" in line
        self._above = level
        return level

    def skip(self) -> None:
        """Forget the line above: some are not read."""
        self._above = "info"
        self._traceback = False


def level_of(line: str) -> Level | None:
    """Return the level that ``line`` names; None if it does not."""
    if found := _PRIORITY.match(line):
        return _SYSLOG[int(found[1]) % 8]
    if line.startswith("{"):
        return _level_of_json(line)
    if (found := _TABBED.match(line)) and found[1].lower() in _LEVELS:
        return _LEVELS[found[1].lower()]
    if found := _LETTER.match(line):
        return _LETTERS[found[found.lastindex or 0]]
    if _CRASH.match(line):
        return "error"
    if _WARNING.match(line):
        return "warning"
    if _LOGFMT.match(line):
        key = _LOGFMT_LEVEL.search(line)
        return _LEVELS.get(key[1].lower()) if key else None
    return _level_in_head(line[:_HEAD].split(maxsplit=_WORDS)[:_WORDS])


def _level_of_json(line: str) -> Level | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    for key in _KEYS:
        value = entry.get(key)
        if isinstance(value, str):
            return _LEVELS.get(value.lower())
        if type(value) is int:
            return _level_of_number(value)
    return None


def _level_of_number(number: int) -> Level:
    """Return the level that bunyan and pino mean by a number."""
    for bound, level in (
        (60, "critical"),
        (50, "error"),
        (40, "warning"),
        (30, "info"),
    ):
        if number >= bound:
            return level  # type: ignore[return-value]
    return "debug"


def _level_in_head(words: list[str]) -> Level | None:
    timed = False
    for word, following in pairwise([*words, ""]):
        if level := _level_of_word(word, following):
            return level
        if _TIME.fullmatch(word.strip("[](),")):
            timed = True
        elif not _goes_before(word, following, timed=timed):
            return None
    return None


def _level_of_word(word: str, following: str) -> Level | None:
    if found := _MODULE.fullmatch(word):
        return _LEVELS.get(found[1].lower())
    found = _LEVEL.fullmatch(word)
    level = _LEVELS.get(found["word"].lower()) if found else None
    if found is None or level is None:
        return None
    rest = found["rest"]
    if found["open"]:
        set_off = rest[:1] in tuple("])>|") or (not rest and following[:1] == "]")
    else:
        # error: WARNING:root: error[E0308]:
        set_off = rest.startswith(":") or (rest.startswith("[") and rest.endswith("]:"))
    loud = found["word"].isupper() and not rest.lstrip(":|])>")
    return level if set_off or loud else None


def _goes_before(word: str, following: str, *, timed: bool) -> bool:
    """Return whether a level may still follow."""
    if word in _SEPARATORS or (word[0] in "[(" and word.rstrip(":")[-1:] in ("]", ")")):
        return True
    if timed and (_NUMBER.fullmatch(word) or word[0] == "[" or word[-1] == "]"):
        return True
    if following in _SEPARATORS:
        return _NAME.fullmatch(word) is not None
    if word.endswith(":"):  # gcc: error: x.c:1:2: fatal error:
        return following == "fatal" or (
            following.endswith(":") and _level_of_word(following, "") is not None
        )
    return word == "fatal" and following == "error:"


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
