"""
Durations, sizes and choices as people write them.

Each is a type for the model's fields. Errors carry the rule that was broken, never
the value: ``loader.py`` adds it where it may be shown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Final

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from etlstage.stage import units as quantity

__all__ = (
    "Budget",
    "Duration",
    "Mask",
    "Pointer",
    "Seconds",
    "Share",
    "Size",
    "SizeOrZero",
    "Window",
    "one_of",
)

MASK: Final = re.compile(r"0?[0-7]{1,3}|0o[0-7]{1,3}")
POINTER: Final = re.compile(r"(?:/(?:[^~/]|~[01])*)*")
SHARE: Final = re.compile(r"(\d+(?:\.\d+)?|\.\d+) *%")


def _duration(value: object) -> float:
    with _as_expected():
        return quantity.duration(str(value))


def _size(value: object) -> int:
    with _as_expected():
        return quantity.size(str(value))


def _size_or_zero(value: object) -> int:
    return 0 if str(value) == "0" else _size(value)


def _seconds(value: object) -> int:
    return math.ceil(_duration(value))


def _share(value: object) -> float:
    match = SHARE.fullmatch(str(value))
    if match is None or float(match[1]) > 100:
        raise _unexpected("a share such as 1% or 0.5%, up to 100%")
    return float(match[1]) / 100


def _budget(value: object) -> object:
    """Return what a budget in one word says, as the mapping that says the same."""
    if not isinstance(value, str):
        return value
    if value.isdecimal():
        return {"count": value}
    if SHARE.fullmatch(value):
        return {"share": value}
    raise _unexpected("a number of messages such as 20, or a share such as 1%")


def _mask(value: object) -> int:
    text = str(value)
    if not MASK.fullmatch(text):
        raise _unexpected("an octal number such as 022")
    return int(text.removeprefix("0o"), 8)


def _pointer(value: object) -> str:
    if not isinstance(value, str) or not POINTER.fullmatch(value):
        raise _unexpected("a JSON pointer such as /id")
    return value


@contextmanager
def _as_expected() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise _unexpected(str(error)) from None


def _unexpected(wanted: str) -> PydanticCustomError:
    return PydanticCustomError("expected", "{text}", {"text": wanted})


def _window(value: object) -> int | None:
    text = str(value)
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        wanted = "a whole number of messages from 1 up, or auto"
        raise PydanticCustomError("expected", "{text}", {"text": wanted})
    return int(text)


Duration = Annotated[float, BeforeValidator(_duration)]
"""Seconds."""
Size = Annotated[int, BeforeValidator(_size)]
"""Bytes."""
SizeOrZero = Annotated[int, BeforeValidator(_size_or_zero)]
"""Bytes, or none at all."""
Seconds = Annotated[int, BeforeValidator(_seconds)]
"""Whole seconds, rounded up."""
Share = Annotated[float, BeforeValidator(_share)]
"""From 0 to 1, written in percent."""
Budget = BeforeValidator(_budget)
"""For a mapping of ``count`` and ``share``: lets one of them stand alone."""
Mask = Annotated[int, BeforeValidator(_mask)]
"""A file mode mask."""
Pointer = Annotated[str, BeforeValidator(_pointer)]
"""A JSON pointer, see RFC 6901."""
Window = Annotated[int | None, BeforeValidator(_window)]
"""Messages; ``auto`` is None."""


def one_of(
    noun: str, *known: str, later: Sequence[str] = ()
) -> Callable[[object], object]:
    """
    Return a validator that lets only ``known`` words pass.

    Args:
        noun: What the words are, for errors.
        known: The words.
        later: Words that the design knows and this version does not build.

    """

    def validate(value: object) -> object:
        if value in known:
            return value
        context = {
            "noun": noun,
            "known": list(known),
            "later": value in later,
        }
        raise PydanticCustomError("choice", "unknown {noun}", context)

    return validate
