"""
Quantities and names as people write them, as types for settings.

``"5m"``, ``"300"`` and ``300.0`` are one duration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

from etlstage.settings.kind import (
    FOLDER,
    REFERENCE,
    Kind,
    ListOf,
    MapOf,
    Pattern,
    Schema,
    Text,
    Whole,
)
from etlstage.settings.problem import refused, unexpected

__all__ = (
    "COMMAND",
    "DURATION",
    "FILES",
    "READER_NAME",
    "SIZE",
    "Argument",
    "Command",
    "Count",
    "CountOrZero",
    "Duration",
    "Folder",
    "Location",
    "Mask",
    "Name",
    "Pointer",
    "Positive",
    "Seconds",
    "Share",
    "ShareBelowOne",
    "Size",
    "SizeOrZero",
    "Variables",
    "Window",
    "as_duration",
    "is_hidden",
    "is_reader_name",
    "literal",
    "local_path",
    "of_files",
)

FILES: Final = ("avro", "csv", "json", "orc", "parquet", "text", "xml")
"""Formats of Spark that are files in a folder."""
_SPECIAL: Final = re.compile(r"\A[A-Za-z][A-Za-z0-9+.-]*://[^/]*|([][{}*?\\])")
"""A character of patterns; or the host of a URL, such as [::1], which is none of it."""
_READER: Final = 200  # most bytes in the name of a reader
READER_NAME: Final = (
    f"letters, digits, '-', '_' and '.', which is not first, in up to {_READER} bytes"
)
"""What a reader of journals may be called."""


def of_files(format_: object) -> bool:
    """Return whether a format, in whatever case, is files in a folder."""
    return str(format_).lower() in FILES


def is_hidden(name: str) -> bool:
    """Return whether a file or folder with this name is hidden from Spark's readers."""
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def local_path(path: str) -> Path | None:
    """Return a path or a ``file:`` URL as a path; None: it is on another machine."""
    scheme, found, rest = path.partition(":")
    if not found or "/" in scheme:
        return Path(path)
    return Path(rest.removeprefix("//")) if scheme == "file" else None


def literal(path: str) -> str:
    """Return a path or URL for a reader of Spark, which takes it for a pattern."""
    return _SPECIAL.sub(lambda found: f"\\{found[1]}" if found[1] else found[0], path)


def is_reader_name(name: str) -> bool:
    """Return whether a reader of journals may have this name, as its files do."""
    plain = name.replace("-", "").replace("_", "").replace(".", "").isalnum()
    return plain and name[0] != "." and len(name.encode()) <= _READER


def as_duration(seconds: float) -> float | str:
    """Return a duration as it is written in a file: with its unit, where that is exact."""
    text = f"{seconds:g}"
    # A number with a unit has no exponent; seconds need no unit.
    return f"{text}s" if "e" not in text and float(text) == seconds else seconds


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
            if amount == math.inf:
                raise unexpected(self.wanted, value)
        else:
            amount = value
        if not amount > 0:
            raise unexpected("more than 0", value)
        return amount

    def written(self, value: Any) -> object:
        """Return the text with the largest unit that leaves a whole number."""
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

    units: ClassVar[Mapping[str, float]] = {"": 1.0}
    wanted = "a number"


class _Duration(_Quantity):
    units: ClassVar[Mapping[str, float]] = {
        "": 1.0,
        "ms": 0.001,
        "s": 1.0,
        "m": 60.0,
        "h": 3600.0,
        "d": 86400.0,
    }
    wanted = "a duration such as 500ms, 30s or 2m"

    def written(self, value: Any) -> object:
        # 0.001 is not exact in binary: 0.5 / 0.001 may be 500.00000001.
        return f"{value * 1000:g}ms" if value < 1 else super().written(value)


class _Seconds(_Duration):
    def read(self, value: Any) -> int:
        return math.ceil(super().read(value))


class _Size(_Quantity):
    units: ClassVar[Mapping[str, float]] = {
        "": 1.0, "B": 1.0,
        "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
        "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40,
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
        """Whether 100% is allowed."""

    def read(self, value: Any) -> float:
        share = -1.0
        if isinstance(value, str):
            found = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+) *%", value)
            share = float(found[1]) / 100 if found else -1.0
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


WHOLE: Final = Whole()


class _Window(Kind):
    """A number of messages; ``auto`` is None."""

    def read(self, value: Any) -> int | None:
        if value in ("auto", None):
            return None
        number = value if isinstance(value, str | int) else ""
        if isinstance(value, bool) or not re.fullmatch(r"0*[1-9][0-9]*", str(number)):
            raise unexpected("a whole number of messages from 1 up, or auto", value)
        return WHOLE.read(value)

    def written(self, value: Any) -> object:
        return "auto" if value is None else value

    def schema(self) -> Schema:
        pattern = f"^[0-9]+$|^auto$|{REFERENCE}"
        return {"type": ["integer", "string"], "minimum": 1, "pattern": pattern}


class _Variable(Text):
    """A name for an environment variable."""

    def read(self, value: Any) -> str:
        if not super().read(value) or "=" in value or "\0" in value:
            raise refused("is not a valid name for a variable")
        return str(value)


class _Location(Text):
    """A path or a URL."""

    def __init__(self) -> None:
        super().__init__(nul=False)

    def read(self, value: Any) -> str:
        if not super().read(value):
            # It would stand for the folder of the pipeline file itself.
            raise refused("is empty, expected a path")
        return str(value)

    def schema(self) -> Schema:
        return super().schema() | {"minLength": 1}


class _Command(ListOf):
    """A program and its arguments."""

    def __init__(self) -> None:
        super().__init__(Text(nul=False))

    def read(self, value: Any) -> Any:
        if isinstance(value, str | bytes) or not isinstance(value, Sequence):
            # The first letter of a text would be taken for the program.
            raise unexpected("a list such as [python, clean.py]", value)
        words = super().read(tuple(value))
        if not words or not words[0]:
            raise unexpected("a program and its arguments", value)
        return words

    def schema(self) -> Schema:
        return super().schema() | {"minItems": 1}


Argument = Annotated[str, Text(nul=False)]
"""Text that a command line or an environment may contain."""
COMMAND: Final = _Command()
Command = Annotated[Sequence[str], COMMAND]
"""A program and its arguments, in any sequence; kept as a tuple."""
Count = Annotated[int, Whole(least=1)]
"""At least one."""
CountOrZero = Annotated[int, Whole(least=0)]
"""At least 0."""
DURATION: Final = _Duration()
Duration = Annotated[float, DURATION]
"""Seconds."""
Folder = Annotated[Path, FOLDER]
"""A path."""
Location = Annotated[str, _Location()]
"""A path or a URL, as text."""
Mask = Annotated[int, _Mask()]
"""A file mode mask."""
Name = Annotated[
    str,
    Pattern(
        r"[A-Za-z0-9][A-Za-z0-9._ -]{0,63}",
        "a name of up to 64 letters, digits, spaces, dots, dashes and underscores",
    ),
]
"""A name that may also be a file name."""
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
SIZE: Final = _Size()
Size = Annotated[int, SIZE]
"""Bytes."""
SizeOrZero = Annotated[int, _Size(zero=True)]
"""Bytes, or none at all."""
Variables = Annotated[Mapping[str, str], MapOf(Text(nul=False), _Variable())]
"""Environment variables."""
Window = Annotated[int | None, _Window()]
"""Messages; ``auto`` is None."""
