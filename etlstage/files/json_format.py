"""
Read JSON lines as Spark reads them, but for values that are not of their column's type.

Where Spark makes these null, they are an error here. Columns without a schema are those
that Spark infers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, Final, NamedTuple

import pyarrow as pa

from etlstage.columns import array_of
from etlstage.files.fit import Read, arrow_type, has_bits, is_kept, reader_of
from etlstage.files.format import LineFormat, Where, without_columns
from etlstage.files.lines import FileLines, Unreadable
from etlstage.pipeline.invalid import Fraction, kind_of, loaded
from etlstage.settings.ddl import DeclaredColumn, Type

__all__ = ("JsonFormat",)

_BETWEEN: Final = re.compile(r"[ \t\n\r,:]*")
_DECODER: Final = json.JSONDecoder()
_MINUS_ZERO: Final = re.compile(r"-0(?=[ \t\r,\]}])")
"""An integer that is parsed as 0; in a text it does no harm."""
_HALF: Final = re.compile("[\ud800-\udfff]")


class _Rewritten(Exception):
    """A parsed value is not as it was written."""


class _Row(NamedTuple):
    """A line that is an object."""

    where: Where
    row: dict[str, Any]
    text: str


class JsonFormat(LineFormat):
    """A row from each line that is not blank, which is an object."""

    def _prepare(self) -> None:
        columns = self._columns
        if columns is None:
            seen = Type("struct")
            for file in self._files:
                with closing(FileLines(file)) as lines:
                    for data in lines:
                        for where, row, _ in _objects(data, lines):
                            seen = _merged(seen, _type_of(row, where))
            settled = _settled(seen)
            columns = list(settled.inner) if settled is not None else []
        self._readers = [
            (c.name, arrow_type(c.type), _json_reader(c.type), str(c.type))
            for c in columns
        ]
        self._row = Type("struct", (), tuple(columns))
        # These have a number as it is written.
        self._literal = any(
            kind in expected
            for *_, expected in self._readers
            for kind in ("decimal", "float", "string")
        )

    def _table(self, data: bytes, lines: FileLines) -> pa.Table:
        rows = list(_objects(data, lines, self._row if self._literal else None))
        if not self._readers:
            return without_columns(len(rows))
        columns = [
            array_of(list(self._values(name, read, expected, rows)), kind)
            for name, kind, read, expected in self._readers
        ]
        return pa.table(columns, [name for name, *_ in self._readers])

    def _values(
        self, name: str, read: Read, expected: str, rows: Sequence[_Row]
    ) -> Iterator[Any]:
        for where, row, line in rows:
            value = row.get(name)
            try:
                try:
                    yield _or_null(read, value)
                except _Rewritten:
                    row.update(_as_written(self._row, line))  # for all columns at once
                    yield read(row[name])
            except Exception:
                raise Unreadable(
                    f"{where()}: field {name!r} is {kind_of(value)} that is not of type {expected}:"
                    " set another schema, or read the lines as text"
                ) from None


def _objects(
    data: bytes, lines: FileLines, written: Type | None = None
) -> Iterator[_Row]:
    """
    Yield the object of each line of a chunk that is not blank.

    Args:
        data: The chunk.
        lines: Where it is from.
        written: The type of the objects, if numbers are needed as they are written.

    """
    for n, line in enumerate(data.split(b"\n")[:-1]):
        if not line.strip():
            continue
        where = partial(lines.place, n)
        try:
            text = line.decode()
            row = loaded(text, literal=written is not None)
            if written is not None and _MINUS_ZERO.search(text):
                row = _as_written(written, text)
        except (ValueError, RecursionError) as error:
            raise Unreadable(
                f"{where()}: the line is not one JSON document ({error}): read the lines"
                " as text, and have a worker parse them"
            ) from None
        if not isinstance(row, dict):
            raise Unreadable(
                f"{where()}: the line is {kind_of(row)}, expected an object"
            )
        yield _Row(where, row, text)


def _type_of(value: object, where: Where) -> Type:
    """Return the inferred type of a JSON value, ``void`` where it is unknown."""
    texts = value if isinstance(value, dict) else [value]
    if any(isinstance(t, str) and not t.isascii() and _HALF.search(t) for t in texts):
        raise Unreadable(
            f"{where()}: the line has an unpaired surrogate, which no valid text contains:"
            " set a schema without that field, or read the lines as text"
        )
    if isinstance(value, dict):
        fields = (DeclaredColumn(k, None, _type_of(v, where)) for k, v in value.items())
        return Type("struct", (), tuple(fields))
    if isinstance(value, list):
        inner = Type("void")
        for item in value:
            inner = _merged(inner, _type_of(item, where))
        return Type("array", (), (DeclaredColumn("element", None, inner),))
    if isinstance(value, int) and not has_bits(value, 64):
        raise Unreadable(f"{where()}: a number does not fit into bigint: set a schema")
    return Type(_FOUND[type(value)])


_FOUND: Final[Mapping[type, str]] = {
    bool: "boolean",
    int: "bigint",
    float: "double",
    str: "string",
    type(None): "void",
}


def _merged(one: Type, other: Type) -> Type:
    """Return a type that has room for the values of both."""
    if one == other or other.name == "void":
        return one
    if one.name == "void":
        return other
    if one.name == other.name == "array":
        inner = _merged(one.inner[0].type, other.inner[0].type)
        return Type("array", (), (DeclaredColumn("element", None, inner),))
    if one.name == other.name == "struct":
        fields = {column.name: column.type for column in one.inner}
        for column in other.inner:
            fields[column.name] = _merged(
                fields.get(column.name, Type("void")), column.type
            )
        return Type(
            "struct", (), tuple(DeclaredColumn(n, None, t) for n, t in fields.items())
        )
    both = {one.name, other.name}
    return Type("double" if both == {"bigint", "double"} else "string")


def _settled(kind: Type) -> Type | None:
    """Return the type that Spark settles on; None for a struct without fields."""
    if kind.name == "void":
        return Type("string")
    if not kind.inner:
        return None if kind.name == "struct" else kind
    inner = [(column.name, _settled(column.type)) for column in kind.inner]
    if kind.name == "struct":
        inner.sort()
    kept = tuple(DeclaredColumn(name, None, found) for name, found in inner if found)
    return Type(kind.name, (), kept) if kept else None


def _json_reader(kind: Type) -> Read:
    """Return a reader of JSON values by Spark's rules: a string may be any value."""
    if kind.name == "string":
        return _as_text
    inner = [(column.name, _json_reader(column.type)) for column in kind.inner]
    if kind.name == "array":
        read = inner[0][1]
        return lambda value: [_or_null(read, item) for item in _of(list, value)]
    if kind.name == "map":
        read = inner[1][1]
        return lambda value: [
            (k, _or_null(read, v)) for k, v in _of(dict, value).items()
        ]
    if kind.name == "struct":
        return lambda value: {
            name: _or_null(read, _of(dict, value).get(name)) for name, read in inner
        }
    if kind.name in ("float", "double"):
        return partial(_real, reader_of(kind), kind)
    return reader_of(kind)


def _real(read: Read, kind: Type, value: object) -> Any:  # noqa: ANN401 - as Read
    if isinstance(value, int) and not is_kept(value, kind):
        raise ValueError(value)
    return read(value)


def _or_null(read: Read, value: Any) -> Any:  # noqa: ANN401 - any JSON
    return None if value is None else read(value)


def _of(kind: type, value: Any) -> Any:  # noqa: ANN401 - any JSON
    if not isinstance(value, kind):
        raise TypeError
    return value


def _as_text(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Fraction):
        return value.literal
    if isinstance(value, dict | list):
        raise _Rewritten
    return json.dumps(value)


def _as_written(kind: Type, text: str) -> Any:  # noqa: ANN401 - any JSON
    """Parse JSON; where a type has a string, this is the text of any other value."""
    value = loaded(text, literal=True)
    if kind.name == "string":
        return value if value is None or isinstance(value, str) else text
    if kind.name == "struct" and isinstance(value, dict):
        types = {field.name: field.type for field in kind.inner}
        parts = _parts(text)
        return {k: _as_written(types[k], part) for k, part in parts if k in types}
    if kind.name == "map" and isinstance(value, dict):
        return {k: _as_written(kind.inner[1].type, part) for k, part in _parts(text)}
    if kind.name == "array" and isinstance(value, list):
        return [_as_written(kind.inner[0].type, part) for _, part in _parts(text)]
    return value


def _parts(text: str) -> Iterator[tuple[str, str]]:
    """Yield the key, empty in an array, and the text of each value within valid JSON."""
    at = _next_token(text, 0)
    keyed = text[at] == "{"
    at = _next_token(text, at + 1)
    while text[at] not in "]}":
        key = ""
        if keyed:
            key, at = _DECODER.raw_decode(text, at)
            at = _next_token(text, at)
        _, end = _DECODER.raw_decode(text, at)
        yield key, text[at:end]
        at = _next_token(text, end)


def _next_token(text: str, at: int) -> int:
    """Return where the next value, key or closing bracket begins."""
    found = _BETWEEN.match(text, at)
    assert found is not None
    return found.end()
