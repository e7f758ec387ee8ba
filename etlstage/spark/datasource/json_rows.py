"""
JSON documents into Arrow columns, and rows into JSON documents.

Inside a data source there is no ``from_json`` and no ``to_json``: Spark hands over
what it has read or wants written as Arrow, in a Python process. It goes value by value:
whoever wants speed transforms with :func:`~etlstage.spark.transform`.

Arrow's own reader of JSON does not take its place. Over a run it does not tell which
message is at fault, and of two objects in one message it makes two rows; a record at a
time it takes 20 times as long as what is here (300 against 16 microseconds for two
fields), makes infinity of a number that is too big, and strings of what is no UTF-8.

What fits a schema is decided as in ``dataframe/schema.py``: each value must be of the
type of its field. Timestamps have their offset from UTC, unless they are of the type
that has none. Rows become what ``to_json(struct(*))`` makes of them, nulls are kept,
but timestamps are always in UTC.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC
from decimal import Decimal, InvalidOperation
from typing import Any, Final, NoReturn

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    IntegralType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from etlstage.errors import ConfigError
from etlstage.messages import Run
from etlstage.spark.dataframe.schema import Contract, reason

__all__ = ("DoesNotFit", "check_types", "documents_of", "rows_of_documents")

_BOTH: Final = (
    *(ByteType, ShortType, IntegerType, LongType, FloatType, DoubleType),
    *(BooleanType, StringType, DecimalType, DateType, TimestampType, TimestampNTZType),
)
_WRITTEN: Final = (*_BOTH, BinaryType, NullType)


class DoesNotFit(ValueError):
    """
    Raised when a message does not fit the schema; the text says why.

    Attributes:
        place: Its place in the run, counted from zero.

    """

    def __init__(self, place: int, why: str) -> None:
        super().__init__(why)
        self.place = place


def check_types(schema: StructType, *, read: bool) -> None:
    """
    Check that columns can be read from JSON, or written as JSON.

    Raises:
        ConfigError: If one can't.

    """
    _check_names(schema.names)
    for field in schema.fields:
        for kind in _leaves(field.dataType, read=read):
            if not isinstance(kind, _BOTH if read else _WRITTEN):
                raise ConfigError(
                    f"column {field.name!r} has {kind.simpleString()}, which can't be"
                    f" {'read from' if read else 'written as'} JSON"
                )


def _leaves(kind: DataType, *, read: bool) -> list[DataType]:
    inner: list[DataType] = []
    match kind:
        case StructType():
            _check_names(kind.names)
            inner = [field.dataType for field in kind.fields]
        case ArrayType():
            inner = [kind.elementType]
        case MapType() if not read:
            inner = [kind.keyType, kind.valueType]
        case _:
            return [kind]
    return [leaf for one in inner for leaf in _leaves(one, read=read)]


def _check_names(names: Sequence[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ConfigError(
                f"column {name!r} is there {count} times, and JSON has it once: rename"
                f" {'one' if count == 2 else 'all but one'}"
            )


# --- from documents ---------------------------------------------------------------


def rows_of_documents(
    messages: Run, schema: StructType, target: pa.Schema
) -> pa.RecordBatch:
    """
    Return the rows that JSON objects, a message each, are.

    Args:
        messages: One at least.
        schema: Their columns, checked by :func:`check_types`.
        target: The same as an Arrow schema.

    Raises:
        DoesNotFit: If a message does not fit.

    """
    kinds = [(field, target.field(field.name).type) for field in schema.fields]
    rows = []
    for place, message in enumerate(messages):
        row, fits = _row(message, kinds)
        if not fits:
            raise DoesNotFit(place, reason(message, row, Contract(schema)))
        rows.append(row)
    nullable = pa.schema([field.with_nullable(True) for field in target])
    return pa.RecordBatch.from_pylist(rows, schema=nullable)


def _row(
    message: bytes, kinds: Sequence[tuple[StructField, pa.DataType]]
) -> tuple[dict[str, object], bool]:
    """Return the fields of a message that fit, and whether that is all of them."""
    row: dict[str, object] = {}
    try:
        document = json.loads(
            message.decode(), parse_float=_decimal, parse_constant=_no_number
        )
    except (ValueError, RecursionError):
        return row, False
    if not isinstance(document, dict):
        return row, False
    fits = True
    for field, kind in kinds:
        try:
            value = _field(field, kind, document)
        except (ValueError, ArithmeticError):
            fits = False
        else:
            row[field.name] = value
    return row, fits and any(value is not None for value in row.values())


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:  # no exponent is that large
        return Decimal(float(text))


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _field(field: StructField, kind: pa.DataType, document: dict[str, Any]) -> object:
    value = document.get(field.name)
    if value is not None:
        return _value(field.dataType, kind, value)
    if not field.nullable:
        raise ValueError("no value")
    return None


def _value(wanted: DataType, kind: pa.DataType, value: object) -> object:
    """Return a value as Arrow takes it; raises ValueError if it does not fit."""
    match wanted, value:
        case StructType(), dict():
            pairs = zip(wanted.fields, kind, strict=True)
            return {f.name: _field(f, inner.type, value) for f, inner in pairs}
        case ArrayType(), list():
            item, inner = wanted.elementType, kind.value_type
            return [None if v is None else _value(item, inner, v) for v in value]
        case BooleanType(), bool():
            return value
        case _, bool():  # which Python takes for a number
            pass
        case IntegralType(), int():
            return pa.scalar(value, kind).as_py()
        case FloatType() | DoubleType(), int() | Decimal():
            number = pa.scalar(float(value), kind).as_py()
            if math.isfinite(number):  # it was too big, JSON has no infinity
                return number
        case StringType(), str():
            value.encode()  # half of a surrogate pair is no text
            return value
        case (DecimalType(), int() | str() | Decimal()) | (
            DateType() | TimestampType() | TimestampNTZType(),
            str(),
        ):
            return pa.scalar(str(value), pa.string()).cast(kind).as_py()
        case _:
            pass
    raise ValueError(f"no {wanted.simpleString()}")


# --- to documents -----------------------------------------------------------------


def documents_of(rows: pa.RecordBatch) -> pa.Array:
    """Return a JSON object for each row, as strings; nulls are kept."""
    kind = pa.struct(rows.schema)
    return pa.array([_text(row, kind) for row in rows.to_pylist()], pa.string())


def _text(value: Any, kind: pa.DataType) -> str:  # noqa: ANN401 - of any type
    """Return a value as JSON."""
    if value is None:
        return "null"
    if pa.types.is_struct(kind):
        return _object(
            (field.name, _text(value[field.name], field.type)) for field in kind
        )
    if pa.types.is_map(kind):
        return _object(
            (
                key if isinstance(key, str) else _text(key, kind.key_type).strip('"'),
                text,
            )
            for key, text in ((k, _text(v, kind.item_type)) for k, v in value)
        )
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"[{','.join(_text(item, kind.value_type) for item in value)}]"
    if pa.types.is_floating(kind):
        return _number(value, kind)
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        return json.dumps(value)
    if pa.types.is_decimal(kind):
        return str(value)
    if pa.types.is_timestamp(kind):
        local = value if kind.tz is None else value.astimezone(UTC).replace(tzinfo=None)
        value = local.isoformat(timespec="microseconds") + ("Z" if kind.tz else "")
    elif pa.types.is_date(kind):
        value = value.isoformat()
    elif isinstance(value, bytes):
        value = base64.b64encode(value).decode()
    return json.dumps(value, ensure_ascii=False)


def _object(members: Iterable[tuple[str, str]]) -> str:
    names = ((json.dumps(name, ensure_ascii=False), text) for name, text in members)
    return f"{{{','.join(f'{name}:{text}' for name, text in names)}}}"


def _number(value: float, kind: pa.DataType) -> str:
    if math.isfinite(value):
        # Its digits are those of its width: 0.1, and not 0.10000000149011612.
        text: str = pa.scalar(value, kind).cast(pa.string()).as_py()
        return text
    # As Spark writes them.
    return json.dumps(str(value).replace("inf", "Infinity").replace("nan", "NaN"))
