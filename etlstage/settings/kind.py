"""
Kinds of values: text, numbers, words, and collections of them.

A kind reads a value of a pipeline file, an option or Python: ``"3"`` and ``3`` are the
same number. A value that was read once is read again unchanged. A kind also returns a
value as people write it, and describes the values it accepts in JSON Schema.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from etlstage.errors import guess
from etlstage.settings.problem import Invalid, Problem, refused, unexpected

__all__ = (
    "FOLDER",
    "REFERENCE",
    "Choice",
    "Flag",
    "Instance",
    "Kind",
    "ListOf",
    "MapOf",
    "Maybe",
    "Noun",
    "Pattern",
    "Schema",
    "Text",
    "Whole",
    "WholeOr",
)

Schema: TypeAlias = dict[str, Any]
"""A piece of JSON Schema."""

MAX_DIGITS: Final = 1000
"""Maximum digits of a number; Python's conversion takes quadratic time."""

REFERENCE: Final = r"\$\{"
"""Matches the start of a reference to a value, of any kind, that is known later."""


class Kind(ABC):
    """Reads one kind of value."""

    @abstractmethod
    def read(self, value: Any) -> Any:
        """
        Return what ``value`` stands for.

        Raises:
            Invalid: If it is not a value of this kind.

        """

    def written(self, value: Any) -> object:
        """Return a value that was read as people write it, in JSON."""
        return value

    def schema(self) -> Schema:
        """Describe what may be written."""
        return {}


class Text(Kind):
    """Any text, or any without NUL; every scalar of a file is text."""

    def __init__(self, *, nul: bool = True) -> None:
        self._nul = nul

    def read(self, value: Any) -> str:
        if not isinstance(value, str):
            raise unexpected("text", value)
        if "\0" in value and not self._nul:
            raise refused("can't contain a NUL byte")
        return value

    def schema(self) -> Schema:
        return {"type": ["string", "number", "boolean"]}


class Pattern(Text):
    """Text of a certain form."""

    def __init__(self, pattern: str, wanted: str) -> None:
        super().__init__()
        self._pattern = pattern
        self._wanted = wanted

    def read(self, value: Any) -> str:
        if not re.fullmatch(self._pattern, super().read(value)):
            raise unexpected(self._wanted, value)
        return str(value)

    def schema(self) -> Schema:
        return super().schema() | {"pattern": f"^({self._pattern})$|{REFERENCE}"}


class Whole(Kind):
    """A whole number within bounds."""

    def __init__(self, least: int | None = None, most: int | None = None) -> None:
        self._least = least
        self._most = most

    def read(self, value: Any) -> int:
        if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]+", value):
            if len(value) > MAX_DIGITS:
                raise unexpected(f"a number of up to {MAX_DIGITS} digits", value)
            number = int(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            number = value
        else:
            raise unexpected("a whole number", value)
        if self._least is not None and number < self._least:
            raise unexpected(f"{self._least} or more", value)
        if self._most is not None and number > self._most:
            raise unexpected(f"{self._most} or less", value)
        return number

    def schema(self) -> Schema:
        bounds = {"minimum": self._least, "maximum": self._most}
        return {
            "type": ["integer", "string"],
            "pattern": f"^[+-]?[0-9]+$|{REFERENCE}",
        } | {name: bound for name, bound in bounds.items() if bound is not None}


class WholeOr(Whole):
    """A whole number, or a word for one that the worker is asked for."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self._word = word

    def read(self, value: Any) -> Any:
        if value == self._word:
            return self._word
        if type(value) is int or (
            isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]+", value)
        ):
            return super().read(value)
        wanted = f"a whole number, or {self._word} to ask the worker"
        raise unexpected(wanted, value)

    def schema(self) -> Schema:
        whole = super().schema()
        return whole | {"pattern": f"^[+-]?[0-9]+$|^{self._word}$|{REFERENCE}"}


class Flag(Kind):
    """True or false."""

    def read(self, value: Any) -> bool:
        if isinstance(value, bool):
            return value
        words = {"true": True, "false": False}
        if not isinstance(value, str) or value.lower() not in words:
            raise unexpected("true or false", value)
        return words[value.lower()]

    def schema(self) -> Schema:
        pattern = f"^([Tt]rue|TRUE|[Ff]alse|FALSE)$|{REFERENCE}"
        return {"type": ["boolean", "string"], "pattern": pattern}


class Choice(Kind):
    """
    One of a few words.

    Args:
        noun: What the words are, for errors.
        words: What each word stands for.
        later: Words that are planned, but not supported by this version.

    """

    def __init__(
        self, noun: str, words: Mapping[str, object], later: Collection[str] = ()
    ) -> None:
        self._noun = noun
        self._words = words
        self._later = later

    def read(self, value: Any) -> Any:
        if isinstance(value, str) and value in self._words:
            return self._words[value]
        if any(value is known for known in self._words.values()):
            return value
        if type(value) is int and str(value) in self._words:
            return self._words[str(value)]  # YAML reads a word of digits as a number
        expected = f", expected {' or '.join(map(repr, self._words))}"
        if isinstance(value, str) and value in self._later:
            text = f"{{got}} is not supported by this version{expected}"
            raise Invalid(Problem((), text, value))
        close = guess(value, self._words) if isinstance(value, str) else ""
        unknown = f"unknown {self._noun}"
        text = f"{unknown} {{got}}{close or expected}"
        raise Invalid(Problem((), text, value, hidden=unknown + expected))

    def written(self, value: Any) -> object:
        return next(word for word, known in self._words.items() if known == value)

    def schema(self) -> Schema:
        reference = {"type": "string", "pattern": REFERENCE}
        numbers = [int(word) for word in self._words if word.isdigit()]
        return {"anyOf": [{"enum": [*self._words, *numbers]}, reference]}


class Noun(NamedTuple):
    """What the words of a choice are, where the setting's name is not clear enough."""

    noun: str


class _Folder(Text):
    """A path."""

    def __init__(self) -> None:
        super().__init__(nul=False)

    def read(self, value: Any) -> Path:  # type: ignore[override]
        return value if isinstance(value, Path) else Path(super().read(value))

    def written(self, value: Any) -> object:
        return str(value)


class Instance(Kind):
    """An object of a class; it can't be written."""

    def __init__(self, type_: type) -> None:
        self._type = type_

    def read(self, value: Any) -> Any:
        if not isinstance(value, self._type):
            raise unexpected(f"an instance of {self._type.__name__}", value)
        return value


class Maybe(Kind):
    """Another kind, or nothing."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def read(self, value: Any) -> Any:
        return None if value is None else self.kind.read(value)

    def written(self, value: Any) -> object:
        return None if value is None else self.kind.written(value)

    def schema(self) -> Schema:
        return {"anyOf": [self.kind.schema(), {"type": "null"}]}


class ListOf(Kind):
    """A list of values of one kind."""

    def __init__(
        self, item: Kind, make: Callable[[Iterable[Any]], Collection[Any]] = tuple
    ) -> None:
        self.item = item
        self._make = make

    def read(self, value: Any) -> Any:
        if isinstance(value, str) or not isinstance(value, list | tuple | frozenset):
            raise unexpected("a list", value)
        try:
            items = _each(enumerate(value), self.item)
        except Invalid as error:
            rest = (*error.rest.values(),) if isinstance(error.rest, dict) else ()
            # If one could not be read, the others would move to other indexes.
            whole = rest if len(rest) == len(value) else None
            raise Invalid(*error.problems, rest=whole) from None
        return self._make(items.values())

    def written(self, value: Any) -> object:
        items = value if isinstance(value, list | tuple) else sorted(value)
        return [self.item.written(item) for item in items]

    def schema(self) -> Schema:
        return {"type": "array", "items": self.item.schema()}


class MapOf(Kind):
    """Values of one kind by names."""

    def __init__(self, item: Kind, name: Kind | None = None) -> None:
        self.item = item
        self._name = name or Text()

    def read(self, value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise unexpected("a mapping", value)
        _each(((name, name) for name in value), self._name)
        return _each(value.items(), self.item)

    def written(self, value: Any) -> object:
        return {name: self.item.written(item) for name, item in value.items()}

    def schema(self) -> Schema:
        return {"type": "object", "additionalProperties": self.item.schema()}


def _each(items: Iterable[tuple[Any, object]], kind: Kind) -> dict[Any, Any]:
    """Read all items; the problems of all of them are reported at once."""
    made: dict[Any, Any] = {}
    problems: list[Problem] = []
    for at, item in items:
        try:
            made[at] = kind.read(item)
        except Invalid as error:
            problems += (problem.under(at) for problem in error.problems)
            if error.rest is not None:
                made[at] = error.rest
    if problems:
        raise Invalid(*problems, rest=made)
    return made


FOLDER: Final = _Folder()
"""Reads a path."""
