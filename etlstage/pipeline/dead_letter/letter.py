"""
A message that a stage could not process, and all that it takes to run it again.

It holds no secrets: of a worker's environment it has the names, and what a pipeline
file interpolated stands there as it was written; see ``store.py``.

What letters have in common, their cause, is the stage, the kind of the error, and its
first clause, in which numbers and ids are folded into ``#``: five thousand letters of
one cause are one group. The number of groups is bounded, whatever workers
write.
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
"""How errors begin that describe the end of a worker, or its cause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadLetter:
    """One message that could not be processed, and why."""

    id: str
    """Unique over all runs; the number of the run, and of the letter in it."""
    time: str
    """When it was dead-lettered: ISO 8601, UTC."""
    pipeline: str
    run: str
    stage: str
    place: int
    """Of the message in the stage's input, counted from 0."""
    message: bytes
    error: str
    kind: str
    """Class of the error."""
    attempts: tuple[Attempt, ...]
    """The attempts at the message, oldest first."""
    config: Mapping[str, Any]
    """The stage, as plain JSON; of its environment the names."""
    pending: bool = False
    """Whether its run was to replace the output, and had not yet: see ``Settled``."""

    @property
    def of_input(self) -> bool:
        """Whether it is damage that the extract stage has found, and no message."""
        return self.config.get("kind") == StageKind.EXTRACT.value

    def to_dict(self) -> dict[str, Any]:
        """Return the letter as plain JSON: its message in base64, its place from 1."""
        # Not by asdict(), which copies all that the configuration holds.
        plain = {name: getattr(self, name) for name in _NAMES}
        plain["message"] = base64.b64encode(self.message).decode()
        plain["place"] = self.place + 1
        plain["attempts"] = [attempt._asdict() for attempt in self.attempts]
        if self.pending:
            plain["pending"] = True
        return plain

    def to_line(self, config: str | None = None) -> bytes:
        """
        Return the letter as a line of JSON: that of :meth:`to_dict`.

        There may be thousands a second, which is why it is put together here.

        Args:
            config: The configuration as JSON, which is the larger part, if it is known.

        """
        if config is None:
            config = json.dumps(self.config)
        message = base64.b64encode(self.message).decode()
        return (
            f'{{"id": {_text(self.id)}, "time": {_text(self.time)},'
            f' "pipeline": {_text(self.pipeline)}, "run": {_text(self.run)},'
            f' "stage": {_text(self.stage)}, "place": {self.place + 1},'
            f' "message": "{message}", "error": {_text(self.error)},'
            f' "kind": {_text(self.kind)}, "attempts": {_dumped(self.attempts)},'
            f' "config": {config}{_PENDING if self.pending else ""}}}\n'
        ).encode()

    @classmethod
    def from_line(cls, line: bytes) -> DeadLetter:
        """Return the letter of a line; raises ValueError if it is none."""
        try:
            plain = json.loads(line)
            plain["message"] = base64.b64decode(plain["message"], validate=True)
            plain["place"] = plain["place"] - 1
            plain["attempts"] = tuple(map(_attempt, plain["attempts"]))
            pending = plain.get("pending", False)
            return cls(**{name: plain[name] for name in _NAMES}, pending=pending)
        except (TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"not a dead letter: {error}") from error


_NAMES: Final = tuple(x.name for x in fields(DeadLetter) if x.name != "pending")
_PENDING: Final = ', "pending": true'


@lru_cache(maxsize=64)
def _dumped(attempts: tuple[Attempt, ...]) -> str:
    """Return the attempts as JSON; those of many refusals are the same."""
    return json.dumps([attempt._asdict() for attempt in attempts])


def _attempt(plain: Mapping[str, Any]) -> Attempt:
    sides = {name: tuple(plain[name]) for name in ("story", "stderr")}
    return Attempt(**{**plain, **sides})


def first_clause(error: str) -> str:
    """Return the text of an error up to the first ``; ``, without the worker's name."""
    who = WHO.match(error)
    lines = error[who.end() if who else 0 :].splitlines()
    return lines[0].split("; ", 1)[0] if lines else ""


OTHERS: Final = "(other causes)"
_LONGEST: Final = 300  # characters of a clause
_FOLDED: Final = re.compile(
    r"(?<!\w)(?<!status )(?<!utf-)"  # exits differ, and this is a name
    r"(?:[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
    r"|0x[0-9a-f]+|[-+]?\d+(?:[T.,:/_-]\d+)*"
    r"|(?=(?:\w*?\d){3})\w+)"  # three digits make an id of a word
    r"(?!\w)",
    re.IGNORECASE,
)
_JOINED: Final = re.compile(r"#(?:[.,:/_-]#)+")


@dataclass(slots=True)
class LetterGroup:
    """Letters of one cause."""

    stage: str
    kind: str
    """Class of the errors."""
    why: str
    """The errors' first clause, folded."""
    count: int
    first: str
    """When the first was dead-lettered: ISO 8601, UTC."""
    last: str
    example: str
    """The id of the last."""

    @property
    def cause(self) -> str:
        """The class of the errors, and what they have in common."""
        return f"{self.kind}: {self.why}" if self.why else self.kind


class Causes:
    """
    Groups letters as they come.

    Args:
        most: Groups, at most.

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
