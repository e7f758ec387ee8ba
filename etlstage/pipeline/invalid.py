"""Reasons why a message does not fit its columns, without the message's content."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final, NamedTuple, NoReturn, Self

from etlstage.messages import counted

__all__ = (
    "LINE_BREAK",
    "Fraction",
    "TextLines",
    "WantedColumn",
    "kind_of",
    "loaded",
    "reason",
)

_KINDS: Final = {
    dict: "an object",
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}

# A carriage return at the end of a message is part of a Windows line break, which makes
# no other row of it.
LINE_BREAK: Final = r"\n|\r[\s\S]"
"""The line breaks of readers of text, as most engines define them."""


class WantedColumn(NamedTuple):
    """A column that a message must fit."""

    name: str
    nullable: bool
    type: str
    """The name of the type in Spark."""


class TextLines(NamedTuple):
    """The lines of a text output, none of which may be read as two."""

    column: str | None
    """The field that becomes the line; None: the whole message."""
    separator: str | None = None
    """What ends a line; None: the default line breaks of readers."""

    def flaw(self, value: object) -> str | None:
        """Return why a column's value, or a message, is not a single line."""
        text = value.decode("latin-1") if isinstance(value, bytes) else value
        if not isinstance(text, str) or (at := self._break_in(text)) is None:
            return None
        what = "it" if self.column is None else f"field {self.column!r}"
        known = "a line break" if self.separator is None else "the lineSep"
        return (
            f"{what} has {known} at offset {at}, and would become two rows in format"
            " text; json, csv and parquet keep it as one row"
        )

    def _break_in(self, text: str) -> int | None:
        if self.separator is not None:
            # The end of the text and the separator after it may form another separator.
            at = (text + self.separator).index(self.separator)
            return at if at < len(text) else None
        found = re.search(LINE_BREAK, text)
        return found.start() if found else None


def kind_of(value: object) -> str:
    """Return the kind of a JSON value for humans, such as ``a number``."""
    return _KINDS.get(type(value), "a number")


class Fraction(float):
    """A number of JSON that is not an integer, and how it is written."""

    literal: str

    @classmethod
    def of(cls, literal: str) -> Self:
        """Return the number that is written so."""
        made = cls(literal)
        made.literal = literal
        return made


def loaded(text: str | bytes, *, literal: bool = False) -> Any:  # noqa: ANN401 - any JSON
    """
    Parse a JSON document as in RFC 8259; raises ValueError if it is not one.

    With ``literal``, numbers that are not integers are of class :class:`Fraction`.
    """
    return json.loads(
        text,
        parse_float=Fraction.of if literal else None,
        parse_constant=_no_number,
    )


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def reason(
    message: bytes,
    made: Collection[str],
    columns: Iterable[WantedColumn],
    *,
    demanded: Sequence[str] = (),
    closed: bool = False,
) -> str:
    """
    Return why ``message`` does not fit its columns, without its content.

    Args:
        message: A message that does not fit.
        made: Names of the columns for which a value could be made.
        columns: The columns that the message must fit.
        demanded: Fields that it must have, even if null.
        closed: Whether it must have no other fields.

    """
    try:
        document = loaded(message.decode())
    except UnicodeDecodeError as error:
        return f"it is not UTF-8 at offset {error.start}"
    except (ValueError, RecursionError) as error:
        if not message.strip():
            return "it is empty"
        return f"it is not one JSON document ({error})"
    if not isinstance(document, dict):
        return f"it is {kind_of(document)}, not an object"
    names = []
    for name, nullable, wanted in columns:
        names.append(name)
        value = document.get(name)
        if value is None and not nullable:
            return f"field {name!r} is NOT NULL and has no value"
        if value is not None and name not in made:
            return f"field {name!r} is {kind_of(value)} that is not of type {wanted}"
    if document.keys().isdisjoint(names):
        return "it has none of the schema's fields"
    for name in demanded:
        if name not in document:
            return (
                f"field {name!r} is missing: it may be misspelt; to load null, set missing:"
                f" null, or for this column alone {name} ... null in the schema"
            )
    others = document.keys() - set(names)
    if closed and others:
        return f"it has {counted(len(others), 'field')} that the schema does not have"
    return "a value in it does not fit its type"
