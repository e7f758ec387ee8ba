"""
Values as people write them, and what is said of those that are wrong.

A kind reads what a pipeline file, an option or Python gives: ``"5m"``, ``"300"`` and
``300.0`` are one duration. What it has read it reads again, unchanged. It also says
how a value is written, and describes what may be written in JSON Schema.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, NamedTuple, TypeAlias

from etlstage.errors import guess

__all__ = (
    "FOLDER",
    "REFERENCE",
    "Argument",
    "Choice",
    "Command",
    "Count",
    "CountOrZero",
    "Duration",
    "Flag",
    "Folder",
    "Instance",
    "Invalid",
    "Kind",
    "ListOf",
    "Loc",
    "MapOf",
    "Mask",
    "Maybe",
    "Name",
    "Noun",
    "Pointer",
    "Positive",
    "Problem",
    "Schema",
    "Seconds",
    "Share",
    "ShareBelowOne",
    "Size",
    "SizeOrZero",
    "Text",
    "Variables",
    "Whole",
    "Window",
    "dotted",
    "refused",
    "shortened",
    "unexpected",
)

Loc: TypeAlias = tuple[str | int, ...]
"""Keys and indexes down to a value."""
Schema: TypeAlias = dict[str, Any]
"""A piece of JSON Schema."""

REFERENCE: Final = r"\$\{"
"""What stands for a value that is only known later: of any kind."""


# --- what is wrong ----------------------------------------------------------------


class Problem(NamedTuple):
    """
    One thing that is wrong.

    What was found is not in the text, for it may be a secret.
    """

    loc: Loc
    text: str
    """``{got}`` stands for what was found."""
    value: object = None
    """What was found."""
    hidden: str = ""
    """The text for a value that must not be shown, if it is another one."""
    at_key: bool = False
    """Whether it is the key that is wrong, and not its value."""

    def under(self, *loc: str | int) -> Problem:
        """Return the problem as seen from above."""
        return self._replace(loc=loc + self.loc)

    def say(self, instead: str = "") -> str:
        """Return the text, with ``instead`` in place of a value that is not shown."""
        if instead:
            return (self.hidden or self.text).replace("{got}", instead)
        return self.text.replace("{got}", _shown(self.value))


class Invalid(ValueError):
    """Raised for a value that can't be read; has a problem for each thing wrong."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("; ".join(problem.say() for problem in problems))
        self.problems = problems


def unexpected(wanted: str, value: object) -> Invalid:
    """Return the error of a value that is not what it should be."""
    return Invalid(Problem((), f"expected {wanted}, got {{got}}", value))


def refused(text: str) -> Invalid:
    """Return the error of a value of which ``text`` says all."""
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


# --- kinds ------------------------------------------------------------------------


class Kind(ABC):
    """Reads one kind of value."""

    @abstractmethod
    def read(self, value: Any) -> Any:
        """
        Return what ``value`` stands for.

        Raises:
            Invalid: If it stands for nothing.

        """

    def written(self, value: Any) -> object:
        """Return what was read as people write it, in JSON."""
        return value

    def schema(self) -> Schema:
        """Describe what may be written."""
        return {}


class Text(Kind):
    """Any text, or any without NUL; of a file, every scalar is text."""

    def __init__(self, *, nul: bool = True) -> None:
        self._nul = nul

    def read(self, value: Any) -> str:
        if not isinstance(value, str):
            raise unexpected("text", value)
        if "\0" in value and not self._nul:
            raise refused("can't hold a NUL byte")
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
        noun: What they are, for errors.
        words: What each stands for.
        later: Words that the design knows and this version does not build.

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
        expected = f", expected {' or '.join(map(repr, self._words))}"
        if isinstance(value, str) and value in self._later:
            text = f"{{got}} is not in this version{expected}"
            raise Invalid(Problem((), text, value))
        close = guess(value, self._words) if isinstance(value, str) else ""
        unknown = f"unknown {self._noun}"
        text = f"{unknown} {{got}}{close or expected}"
        raise Invalid(Problem((), text, value, hidden=unknown + expected))

    def written(self, value: Any) -> object:
        return next(word for word, known in self._words.items() if known == value)

    def schema(self) -> Schema:
        reference = {"type": "string", "pattern": REFERENCE}
        return {"anyOf": [{"enum": list(self._words)}, reference]}


class Noun(NamedTuple):
    """What the words of a choice are, where the name of the setting does not say it."""

    noun: str


class _Quantity(Kind):
    """A number with a unit, more than 0."""

    units: ClassVar[Mapping[str, float]]
    wanted: str

    def read(self, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise unexpected(self.wanted, value)
        found = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+) *([A-Za-z]*)", str(value))
        if isinstance(value, str):
            if found is None or found[2] not in self.units:
                raise unexpected(self.wanted, value)
            amount = float(found[1]) * self.units[found[2]]
        else:
            amount = value
        if not amount > 0:
            raise unexpected("more than 0", value)
        return amount

    def written(self, value: Any) -> object:
        """Return the shortest text, with the largest unit that leaves a whole number."""
        units = sorted(self.units.items(), key=lambda unit: -unit[1])
        for unit, size in units:
            if unit and value >= size and (value / size).is_integer():
                return f"{int(value / size)}{unit}"
        return value

    def schema(self) -> Schema:
        units = "|".join(unit for unit in self.units if unit)
        return {
            "type": ["string", "number"],
            "pattern": rf"^([0-9]+(\.[0-9]+)?|\.[0-9]+) *({units})?$|{REFERENCE}",
            "exclusiveMinimum": 0,
        }


class _Positive(_Quantity):
    """A number without a unit."""

    units: ClassVar = {"": 1.0}
    wanted = "a number"


class _Duration(_Quantity):
    units: ClassVar = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
    wanted = "a duration such as 500ms, 30s or 2m"

    def written(self, value: Any) -> object:
        # A thousandth is no sum of powers of two: 0.5 / 0.001 may be 500.00000001.
        return f"{value * 1000:g}ms" if value < 1 else super().written(value)


class _Seconds(_Duration):
    def read(self, value: Any) -> int:
        return math.ceil(super().read(value))


class _Size(_Quantity):
    units: ClassVar = {
        "": 1.0, "B": 1.0,
        "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9,
        "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30,
    }  # fmt: skip
    wanted = "a size such as 512KiB, 1MiB or 10MB"

    def __init__(self, *, zero: bool = False) -> None:
        self._zero = zero

    def read(self, value: Any) -> int:
        if self._zero and str(value) == "0":
            return 0
        amount = super().read(value)
        if amount == math.inf:
            raise unexpected(self.wanted, value)
        return max(1, round(amount))

    def schema(self) -> Schema:
        if not self._zero:
            return super().schema()
        made = super().schema() | {"minimum": 0}
        del made["exclusiveMinimum"]
        return made


class _Share(Kind):
    """A share: text in percent, or a number from 0 to 1 in Python."""

    def __init__(self, *, whole: bool = True) -> None:
        self._whole = whole
        """Whether all of it is a share, too."""

    def read(self, value: Any) -> float:
        found = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+) *%", str(value))
        share = -1.0
        if isinstance(value, str) and found is not None:
            share = float(found[1]) / 100
        elif isinstance(value, int | float) and not isinstance(value, bool):
            share = value
        if not 0 <= share <= 1 or (share == 1 and not self._whole):
            bound = "up to 100%" if self._whole else "below 100%"
            raise unexpected(f"a share such as 1% or 0.5%, {bound}", value)
        return share

    def written(self, value: Any) -> object:
        return f"{value * 100:g}%"

    def schema(self) -> Schema:
        pattern = rf"^([0-9]+(\.[0-9]+)?|\.[0-9]+) *%$|{REFERENCE}"
        return {"type": "string", "pattern": pattern}


class _Mask(Kind):
    """A file mode mask: text in octal, or a number in Python."""

    def read(self, value: Any) -> int:
        if isinstance(value, str) and re.fullmatch(r"0?[0-7]{1,3}|0o[0-7]{1,3}", value):
            return int(value.removeprefix("0o"), 8)
        if isinstance(value, bool) or value not in range(0o1000):
            raise unexpected("an octal number such as 022", value)
        return int(value)

    def written(self, value: Any) -> object:
        return f"{value:03o}"

    def schema(self) -> Schema:
        pattern = f"^0?[0-7]{{1,3}}$|^0o[0-7]{{1,3}}$|{REFERENCE}"
        return {"type": ["integer", "string"], "pattern": pattern}


class _Window(Kind):
    """A number of messages; ``auto`` is None."""

    def read(self, value: Any) -> int | None:
        if value in ("auto", None):
            return None
        if isinstance(value, bool) or not re.fullmatch(r"0*[1-9][0-9]*", str(value)):
            raise unexpected("a whole number of messages from 1 up, or auto", value)
        return int(value)

    def written(self, value: Any) -> object:
        return "auto" if value is None else value

    def schema(self) -> Schema:
        pattern = f"^[0-9]+$|^auto$|{REFERENCE}"
        return {"type": ["integer", "string"], "minimum": 1, "pattern": pattern}


class _Folder(Text):
    """A path."""

    def __init__(self) -> None:
        super().__init__(nul=False)

    def read(self, value: Any) -> Path:  # type: ignore[override]
        return value if isinstance(value, Path) else Path(super().read(value))

    def written(self, value: Any) -> object:
        return str(value)


class _Variable(Text):
    """A name for an environment variable."""

    def read(self, value: Any) -> str:
        if not super().read(value) or "=" in value or "\0" in value:
            raise refused("is not a name for a variable")
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
        items = _each(enumerate(value), self.item)
        return self._make(items.values())

    def written(self, value: Any) -> object:
        items = value if isinstance(value, list | tuple) else sorted(value)
        return [self.item.written(item) for item in items]

    def schema(self) -> Schema:
        return {"type": "array", "items": self.item.schema()}


class _Command(ListOf):
    """A program and its arguments."""

    def __init__(self) -> None:
        super().__init__(Text(nul=False))

    def read(self, value: Any) -> Any:
        if isinstance(value, str):
            # Its first letter would be the program.
            raise unexpected("a list such as [python, clean.py]", value)
        words = super().read(value)
        if not words or not words[0]:
            raise unexpected("a program and its arguments", value)
        return words

    def schema(self) -> Schema:
        return super().schema() | {"minItems": 1}


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
    """Read all items; what is wrong with any of them is told at once."""
    made: dict[Any, Any] = {}
    problems: list[Problem] = []
    for at, item in items:
        try:
            made[at] = kind.read(item)
        except Invalid as error:
            problems += (problem.under(at) for problem in error.problems)
    if problems:
        raise Invalid(*problems)
    return made


# --- types for settings -----------------------------------------------------------

Argument = Annotated[str, Text(nul=False)]
"""Text that a command line, an environment or a path may hold."""
Command = Annotated[tuple[str, ...], _Command()]
"""A program and its arguments."""
Count = Annotated[int, Whole(least=1)]
"""At least one."""
CountOrZero = Annotated[int, Whole(least=0)]
"""At least none."""
Duration = Annotated[float, _Duration()]
"""Seconds."""
FOLDER: Final = _Folder()
"""Reads a path."""
Folder = Annotated[Path, FOLDER]
"""A path."""
Mask = Annotated[int, _Mask()]
"""A file mode mask."""
Name = Annotated[
    str,
    Pattern(
        r"[A-Za-z0-9][A-Za-z0-9._ -]{0,63}",
        "a name of up to 64 letters, digits, blanks, dots, dashes and underscores",
    ),
]
"""A name that may be a file's."""
Pointer = Annotated[
    str, Pattern(r"(?:/(?:[^~/]|~[01])*)*", "a JSON pointer such as /id")
]
"""A JSON pointer, see RFC 6901."""
Positive = Annotated[float, _Positive()]
"""More than 0."""
Seconds = Annotated[int, _Seconds()]
"""Whole seconds, rounded up."""
Share = Annotated[float, _Share()]
"""From 0 to 1, written in percent."""
ShareBelowOne = Annotated[float, _Share(whole=False)]
"""From 0 to less than 1, written in percent."""
Size = Annotated[int, _Size()]
"""Bytes."""
SizeOrZero = Annotated[int, _Size(zero=True)]
"""Bytes, or none at all."""
Variables = Annotated[Mapping[str, str], MapOf(Text(nul=False), _Variable())]
"""Environment variables."""
Window = Annotated[int | None, _Window()]
"""Messages; ``auto`` is None."""
