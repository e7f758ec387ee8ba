"""
What dead letters have in common: the stage, the kind of the error, and why in general.

In an error's first clause numbers and ids differ from message to message. They are
folded into ``#``, so that five thousand letters of one cause are one group. How many
groups are told apart is bounded, whatever workers write.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from etlstage.pipeline.dead_letter.record import DeadLetter, first_clause

__all__ = ("Causes", "Group", "folded")

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
class Group:
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


class Causes:
    """
    Groups letters as they come.

    Args:
        most: Groups that are told apart.

    """

    def __init__(self, most: int = 1000) -> None:
        self._most = most
        self._groups: dict[tuple[str, str, str], Group] = {}

    def add(self, letter: DeadLetter) -> None:
        """Count a letter."""
        key = letter.stage, letter.kind, folded(letter.error)
        if key not in self._groups and len(self._groups) >= self._most:
            key = letter.stage, letter.kind, OTHERS
        group = self._groups.get(key)
        if group is None:
            self._groups[key] = Group(*key, 1, letter.time, letter.time, letter.id)
            return
        group.count += 1
        group.first = min(group.first, letter.time)
        if letter.time >= group.last:
            group.last, group.example = letter.time, letter.id

    def groups(self) -> list[Group]:
        """Return the groups, the largest first."""
        return sorted(self._groups.values(), key=lambda group: -group.count)


def folded(error: str) -> str:
    """Return an error's first clause with ``#`` in place of numbers and ids."""
    return _JOINED.sub("#", _FOLDED.sub("#", first_clause(error)[:_LONGEST]))
