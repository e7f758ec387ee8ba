"""
A message that a stage could not process, and all that it takes to run it again.

It holds no secrets: of a worker's environment it has only the names, and values that a
pipeline file interpolates are kept as references; see ``store.py``.

Letters have the same cause if they have the same stage, kind of error, and first clause
of the error, in which numbers and ids are folded into ``#``: five thousand letters of
one cause are one group. The number of groups is bounded, whatever workers write.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from json.encoder import encode_basestring_ascii as _text
from typing import Any, Final

from etlstage.errors import Attempt
from etlstage.messages import StageKind

__all__ = (
    "OTHERS",
    "Causes",
    "DeadLetter",
    "LetterGroup",
    "first_clause",
    "folded",
)

WHO: Final = re.compile(r"stage [^:;]+: (?:worker [^:;]+ \(pid \d+\) )?")
"""The beginning of errors that describe the exit of a worker, or its cause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadLetter:
    """One message that could not be processed, and why."""

    id: str
    """Unique over all runs: the run's id, and the letter's number in the run."""
    time: str
    """When it was dead-lettered: ISO 8601, UTC."""
    pipeline: str
    run: str
    stage: str
    place: int
    """Place of the message in the stage's input, counted from 0."""
    message: bytes
    error: str
    kind: str
    """Class of the error."""
    attempts: tuple[Attempt, ...]
    """The attempts at the message, oldest first."""
    config: Mapping[str, Any]
    """The stage, as plain JSON; of its environment only the names."""
    pending: bool = False
    """Whether its run was yet to replace the output: see ``Settled``."""
    load: str = ""
    """The name of the load, common to all runs of it; empty: unknown."""

    @property
    def of_input(self) -> bool:
        """Whether it is input damage found by the extract stage, not a message."""
        return self.config.get("kind") == StageKind.EXTRACT.value

    def to_dict(self) -> dict[str, Any]:
        """Return the letter as plain JSON: its message in base64, its place from 1."""
        # Not with asdict(), which would copy the whole configuration.
        plain = {name: getattr(self, name) for name in _NAMES}
        plain["message"] = base64.b64encode(self.message).decode()
        plain["place"] = self.place + 1
        plain["attempts"] = [attempt._asdict() for attempt in self.attempts]
        if self.pending:
            plain["pending"] = True
        if self.load:
            plain["load"] = self.load
        return plain

    def to_line(self, config: str | None = None) -> bytes:
        """
        Return the letter as a line of JSON, with the content of :meth:`to_dict`.

        It is formatted by hand, as there may be thousands of letters a second.

        Args:
            config: The configuration as JSON, if known, as it is the larger part.

        """
        if config is None:
            config = json.dumps(self.config)
        message = base64.b64encode(self.message).decode()
        load = f', "load": {_text(self.load)}' if self.load else ""
        return (
            f'{{"id": {_text(self.id)}, "time": {_text(self.time)},'
            f' "pipeline": {_text(self.pipeline)}, "run": {_text(self.run)},'
            f' "stage": {_text(self.stage)}, "place": {self.place + 1},'
            f' "message": "{message}", "error": {_text(self.error)},'
            f' "kind": {_text(self.kind)}, "attempts": {_dumped(self.attempts)},'
            f' "config": {config}{_PENDING if self.pending else ""}{load}}}\n'
        ).encode()

    @classmethod
    def from_line(cls, line: bytes) -> DeadLetter:
        """Return the letter of a line; raises ValueError if it is not one."""
        try:
            plain = json.loads(line)
            plain["message"] = base64.b64decode(plain["message"], validate=True)
            plain["place"] = plain["place"] - 1
            plain["attempts"] = tuple(map(_attempt, plain["attempts"]))
            others = {name: plain[name] for name in _OPTIONAL if name in plain}
            found = {name: plain[name] for name in _NAMES} | others
            for name, value in found.items():
                _check_type(name, value)
            return cls(**found)
        except (TypeError, AttributeError, KeyError, RecursionError) as error:
            raise ValueError(f"not a dead letter: {error}") from error


_OPTIONAL: Final = ("pending", "load")
_NAMES: Final = tuple(x.name for x in fields(DeadLetter) if x.name not in _OPTIONAL)
_PENDING: Final = ', "pending": true'
_TYPES: Final[Mapping[str, type]] = {
    "place": int,
    "message": bytes,
    "attempts": tuple,
    "config": dict,
    "pending": bool,
    "pid": int,
    "story": list,
    "stderr": list,
}
"""The types of the values that are not text, of a letter and of its attempts."""


@lru_cache(maxsize=64)
def _dumped(attempts: tuple[Attempt, ...]) -> str:
    """Return the attempts as JSON; cached, as many refusals have the same."""
    return json.dumps([attempt._asdict() for attempt in attempts])


def _attempt(plain: Mapping[str, Any]) -> Attempt:
    for name, value in plain.items():
        _check_type(name, value)
    sides = {name: tuple(plain[name]) for name in ("story", "stderr")}
    for line in (*sides["story"], *sides["stderr"]):
        _check_type("line", line)
    return Attempt(**{**plain, **sides})


def _check_type(name: str, value: object) -> None:
    expected = _TYPES.get(name, str)
    if not isinstance(value, expected):
        raise TypeError(f"its {name} is a {type(value).__name__}")


def first_clause(error: str) -> str:
    """Return the text of an error up to the first ``; ``, without the worker's name."""
    who = WHO.match(error)
    lines = error[who.end() if who else 0 :].splitlines()
    return lines[0].split("; ", 1)[0] if lines else ""


OTHERS: Final = "(other causes)"
_LONGEST: Final = 300  # characters of a clause
_FOLDED: Final = re.compile(
    r"(?<!\w)(?<!status )(?<!utf-)"  # exit statuses differ, and utf-8 is a name
    r"(?:[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
    r"|0x[0-9a-f]+|[-+]?\d+(?:[T.,:/_-]\d+)*"
    r"|(?=(?:\w*?\d){3})\w+)"  # a word with three digits is an id
    r"(?!\w)",
    re.IGNORECASE,
)
_JOINED: Final = re.compile(r"#(?:[.,:/_-]#)+")


@dataclass(slots=True)
class LetterGroup:
    """A group of letters with one cause."""

    stage: str
    kind: str
    """Class of the errors."""
    why: str
    """The errors' first clause, folded."""
    count: int
    first: str
    """When the first letter was dead-lettered: ISO 8601, UTC."""
    last: str
    example: str
    """The id of the last letter."""

    @property
    def cause(self) -> str:
        """The class of the errors, and their folded first clause."""
        return f"{self.kind}: {self.why}" if self.why else self.kind


class Causes:
    """
    Groups letters by cause, as they come.

    Args:
        most: Maximum number of groups, besides those for other causes.

    """

    def __init__(self, most: int = 1000) -> None:
        self._most = most
        self._groups: dict[tuple[str, str, str], LetterGroup] = {}

    def add(self, letter: DeadLetter) -> None:
        """Count a letter."""
        key = letter.stage, letter.kind, folded(letter.error)
        if key not in self._groups and len(self._groups) >= self._most:
            key = letter.stage, letter.kind, OTHERS
        group = self._groups.get(key)
        if group is None:
            self._groups[key] = LetterGroup(
                *key, 1, letter.time, letter.time, letter.id
            )
            return
        group.count += 1
        group.first = min(group.first, letter.time)
        if letter.time >= group.last:
            group.last, group.example = letter.time, letter.id

    def groups(self) -> list[LetterGroup]:
        """Return the groups, the largest first."""
        return sorted(self._groups.values(), key=lambda group: -group.count)


def folded(error: str) -> str:
    """Return an error's first clause with ``#`` in place of numbers and ids."""
    return _JOINED.sub("#", _FOLDED.sub("#", first_clause(error)[:_LONGEST]))
