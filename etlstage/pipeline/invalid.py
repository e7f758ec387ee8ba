"""Why a message does not fit the columns that it was to become; never its content."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple, NoReturn

from etlstage.messages import counted

__all__ = ("WantedColumn", "kind_of", "loaded", "reason")

_KINDS: Final = {
    dict: "an object",
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}


class WantedColumn(NamedTuple):
    """A column, as far as a message is asked for it."""

    name: str
    nullable: bool
    type: str
    """As Spark calls it."""


def kind_of(value: object) -> str:
    """Return what a value of JSON is, such as ``a number``."""
    return _KINDS.get(type(value), "a number")


def loaded(text: str) -> object:
    """Return a JSON document, as RFC 8259 has it; raises ValueError if it is none."""
    return json.loads(text, parse_constant=_no_number)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def reason(
    message: bytes,
    made: Collection[str],
    columns: Iterable[WantedColumn],
    *,
    demanded: Sequence[str] = (),
    closed: bool = False,
) -> str:
    """
    Return why ``message``, which does not fit, does not; never its content.

    Args:
        message: The message.
        made: Names of the columns for which something could be made of it.
        columns: What it should have become.
        demanded: Columns that it must have, if only with null.
        closed: Whether it must have no others.

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
            return f"field {name!r} is {kind_of(value)} that is no {wanted}"
    if all(document.get(name) is None for name in names):
        return "it has none of the schema's fields"
    for name in demanded:
        if name not in document:
            return (
                f"field {name!r} is missing: misspelt, or to be null, which missing:"
                f" null accepts, or for this column {name} ... null in the schema"
            )
    others = document.keys() - set(names)
    if closed and others:
        return f"it has {counted(len(others), 'field')} that the schema does not have"
    return "a value in it does not fit its type"
