"""
Write values of Arrow as the text that Spark writes for them, in JSON and in CSV.

Where possible, a whole column is converted at once. Times are written to the
microsecond, in this machine's zone, as in a Spark session by default, or in UTC.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime, tzinfo
from decimal import Decimal
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as pt

from etlstage.columns import array_of, one_of

__all__ = ("cell_texts", "is_text", "objects", "plain_text")

_ESCAPED: Final = re.compile(r'["\\\x00-\x1f]')
_SHORT: Final = {"\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_PLAIN: Final = (1e-3, 1e7)
"""Between these Java writes a floating point number without an exponent."""


class _Style(NamedTuple):
    """How values are written."""

    nulls: bool = True
    """Whether null fields are written rather than left out."""
    utc: bool = False
    """Whether times are in UTC."""


def objects(
    table: pa.Table | pa.RecordBatch, *, nulls: bool = True, utc: bool = False
) -> pa.Array:
    """
    Return each row as a JSON object, as ``to_json(struct(*))`` does.

    Args:
        table: The rows.
        nulls: Whether null fields are written rather than left out.
        utc: Whether times are in UTC.

    """
    style = _Style(nulls, utc)
    pieces: list[Any] = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        key = f"{_quoted(name)}:"
        made = _written(name, column, style)
        if nulls:
            pieces += [
                f"{',' if pieces else ''}{key}",
                pc.fill_null(made, one_of("null")),
            ]
        else:
            made = _joined(f",{key}", made)
            pieces.append(pc.fill_null(made, one_of("")))
    if not pieces:
        return array_of(["{}"] * table.num_rows, pa.string())
    if not nulls:
        joined = _joined(*pieces)
        pieces = [pc.utf8_slice_codeunits(joined, 1)]
    return _joined("{", *pieces, "}")


def _written(name: str, column: pa.Array | pa.ChunkedArray, style: _Style) -> pa.Array:
    try:
        return _fragments(_whole(column), style)
    except OverflowError as error:
        raise ValueError(
            f"column {name!r} has a date or time outside of the years 1 to 9999, which"
            " can't be written as JSON: make it a string, or null"
        ) from error
    except KeyError as error:
        raise ValueError(
            f"column {name!r} is {column.type}, which can't be written as JSON: make it a"
            " string, or omit it"
        ) from error


def _joined(*pieces: str | pa.Array) -> pa.Array:
    """Concatenate texts, row by row; null where one of them is null."""
    made = [one_of(piece) if isinstance(piece, str) else piece for piece in pieces]
    return pc.binary_join_element_wise(*made, one_of(""))


def cell_texts(column: pa.Array) -> pa.Array:
    """Return values as text for cells of CSV, or for folders of partitions."""
    column = _whole(column)
    if pt.is_string(column.type):
        return column
    if _is_plain(column.type):
        return column.cast(pa.string())
    return array_of([plain_text(v, column.type) for v in _values(column)], pa.string())


def plain_text(value: object, kind: pa.DataType) -> str | None:
    """Return one value as text outside of JSON; None for null."""
    if value is None or isinstance(value, str):
        return value
    return _text(value, kind, _Style()).strip('"')


def is_text(kind: pa.DataType) -> bool:
    """Return whether values of a type are strings or bytes."""
    return bool(
        pt.is_string(kind)
        or pt.is_binary(kind)
        or pt.is_large_string(kind)
        or pt.is_large_binary(kind)
    )


def _whole(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # in some versions, if it is empty
        column = pa.concat_arrays(column.chunks)
    if pt.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.cast(pa.string()) if pt.is_large_string(column.type) else column


def _is_plain(kind: pa.DataType) -> bool:
    """Return whether Arrow writes values of a type as Spark does."""
    return bool(pt.is_integer(kind) or pt.is_boolean(kind) or pt.is_date32(kind))


def _fragments(column: pa.Array, style: _Style) -> pa.Array:
    """Return each value as JSON; null stays null."""
    kind = column.type
    if pt.is_string(kind):
        return _quoted_all(column)
    if _is_plain(kind):
        made = column.cast(pa.string())
        if pt.is_date32(kind):
            made = _joined('"', made, '"')
        return made
    values = _values(column)
    return array_of(
        [None if v is None else _text(v, kind, style) for v in values],
        pa.string(),
    )


def _values(column: pa.Array) -> list[Any]:
    if pt.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us", column.type.tz), safe=False)
    values: list[Any] = column.to_pylist()
    return values


def _quoted_all(column: pa.Array) -> pa.Array:
    if pc.any(pc.match_substring_regex(column, r"[\x00-\x1f]")).as_py():
        values = column.to_pylist()
        return array_of(
            [None if v is None else _quoted(v) for v in values], pa.string()
        )
    column = pc.replace_substring(column, "\\", "\\\\")
    column = pc.replace_substring(column, '"', '\\"')
    return _joined('"', column, '"')


def _quoted(text: str) -> str:
    return f'"{_ESCAPED.sub(_escaped, text)}"'


def _escaped(found: re.Match[str]) -> str:
    sign = found[0]
    if sign in '"\\':
        return f"\\{sign}"
    return _SHORT.get(sign) or f"\\u{ord(sign):04X}"


def _text(value: Any, kind: pa.DataType, style: _Style) -> str:  # noqa: ANN401
    """Return a value as JSON."""
    if value is None:
        return "null"
    if pt.is_struct(kind):
        inner = {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}
        pairs = [
            f"{_quoted(name)}:{_text(value[name], of, style)}"
            for name, of in inner.items()
            if style.nulls or value[name] is not None
        ]
        return f"{{{','.join(pairs)}}}"
    if pt.is_map(kind):
        pairs = [
            f"{_quoted(plain_text(k, kind.key_type) or '')}"
            f":{_text(v, kind.item_type, style)}"
            for k, v in (value.items() if isinstance(value, Mapping) else value)
        ]
        return f"{{{','.join(pairs)}}}"
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        items = (_text(item, kind.value_type, style) for item in value)
        return f"[{','.join(items)}]"
    if isinstance(value, datetime):
        return _moment(value, UTC if style.utc else None)
    return _WRITTEN[type(value)](value, kind)


def _number(value: float, kind: pa.DataType) -> str:
    if not math.isfinite(value):
        word = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        return f'"{word}"'
    digits = _shortest(value, kind)
    if value == 0 or _PLAIN[0] <= abs(value) < _PLAIN[1]:
        plain = format(Decimal(digits), "f")
        return plain if "." in plain else f"{plain}.0"
    sign, figures, exponent = Decimal(digits).normalize().as_tuple()
    assert isinstance(exponent, int)
    rest = "".join(map(str, figures[1:])) or "0"
    exponent += len(figures) - 1
    return f"{'-' * sign}{figures[0]}.{rest}E{exponent}"


def _shortest(value: float, kind: pa.DataType) -> str:
    """Return the fewest digits that set a number apart from others of its type."""
    if not pt.is_float32(kind):
        return repr(value)
    packed = struct.pack("f", value)
    texts = (f"{value:.{digits}g}" for digits in range(1, 10))
    return next(t for t in texts if struct.pack("f", float(t)) == packed)


def _moment(value: datetime, zone: tzinfo | None) -> str:
    """Return a time as JSON, moved to ``zone`` if it has one; None: this machine's."""
    if value.tzinfo is not None:
        try:
            value = value.astimezone(zone)
        except OverflowError:  # the year would be 0 or 10,000 there
            value = value.astimezone(UTC)
    text = value.isoformat(timespec="microseconds")
    if text.endswith("+00:00"):
        text = f"{text[:-6]}Z"
    return f'"{text}"'


_WRITTEN: Final[Mapping[type, Callable[[Any, pa.DataType], str]]] = {
    str: lambda value, _: _quoted(value),
    bool: lambda value, _: str(value).lower(),
    int: lambda value, _: str(value),
    float: _number,
    Decimal: lambda value, _: str(value),
    date: lambda value, _: f'"{value.isoformat()}"',
    bytes: lambda value, _: f'"{base64.b64encode(value).decode()}"',
}
