"""
Descriptions of wrong values.

The value found is kept apart from what is expected, as it may be a secret.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

__all__ = (
    "Invalid",
    "Loc",
    "Problem",
    "dotted",
    "refused",
    "shortened",
    "unexpected",
)

Loc: TypeAlias = tuple[str | int, ...]
"""Keys and indexes down to a value."""


class Problem(NamedTuple):
    """
    One thing that is wrong.

    The value found is not in the text, as it may be a secret.
    """

    loc: Loc
    text: str
    """``{got}`` stands for what was found."""
    value: object = None
    """What was found."""
    hidden: str = ""
    """The text for a value that must not be shown, if it differs."""
    at_key: bool = False
    """Whether the key is wrong, not its value."""

    def under(self, *loc: str | int) -> Problem:
        """Return the problem with ``loc`` before its own location."""
        return self._replace(loc=loc + self.loc)

    def shown(self, instead: str = "") -> str:
        """Return the text, with ``instead`` in place of a value that is not shown."""
        if instead:
            return (self.hidden or self.text).replace("{got}", instead)
        return self.text.replace("{got}", _shown(self.value))


class Invalid(ValueError):
    """Raised for a value that can't be read; has a problem for each thing wrong."""

    def __init__(self, *problems: Problem, rest: object = None) -> None:
        super().__init__(*problems)
        self.problems = problems
        self.rest = rest
        """What could be read, so that more of it can be checked; None: nothing."""

    def __str__(self) -> str:
        return "; ".join(problem.shown() for problem in self.problems)


def unexpected(wanted: str, value: object) -> Invalid:
    """Return the error of a value that is not what it should be."""
    return Invalid(Problem((), f"expected {wanted}, got {{got}}", value))


def refused(text: str) -> Invalid:
    """Return the error of a value, with ``text`` unchanged."""
    return Invalid(Problem((), text))


def dotted(loc: Loc) -> str:
    """Return a location as users read it: ``transform[0].batch.size``."""
    text = ""
    for step in loc:
        if isinstance(step, int):
            text += f"[{step}]"
        elif step.replace("-", "_").isidentifier():
            text += f".{step}"
        else:
            text += f"[{shortened(step)}]"
    return text.removeprefix(".")


def shortened(value: object, limit: int = 60) -> str:
    """Return ``value`` quoted, on one line, with its middle left out if long."""
    if isinstance(value, str) and len(value) > limit:
        value = f"{value[: limit // 2]}...{value[-limit // 4 :]}"
    return repr(value)


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    return "null" if value is None else shortened(value)
