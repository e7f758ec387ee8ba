"""
JSON documents into Arrow columns, and rows into JSON documents.

Inside a data source there is no ``from_json`` and no ``to_json``: Spark hands over
what it has read or wants written as Arrow, in a Python process.

What fits a schema is decided as in ``frame/schema.py``, but strictly: each value must be of
the type of its field.  A number is no string, ``1.0`` is no int, and a decimal has no
more digits than its scale. Timestamps are ISO 8601, with their offset from UTC unless
they are of the type that has none.  Rows become what ``to_json(struct(*))`` makes of
them, but timestamps are always in UTC.
"""

from __future__ import annotations

import base64
import json
from contextlib import suppress
from functools import reduce
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
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
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from etlstage.errors import ConfigError
from etlstage.messages import Run
from etlstage.spark.dataframe.schema import reason

__all__ = ("Misfit", "check_types", "documents_of", "rows_of_documents")

_BOTH: Final = (
    *(ByteType, ShortType, IntegerType, LongType, FloatType, DoubleType),
    *(BooleanType, StringType, DecimalType, DateType, TimestampType, TimestampNTZType),
)
_WRITTEN: Final = (*_BOTH, BinaryType, NullType)
_ESCAPED: Final = r'["\\\x00-\x1f\x7f]'
_OBJECT: Final = r"^\s*\{"
_TAIL: Final = r"\}\s*[^\s,}\]]"  # nothing else may follow a brace, outside of strings


class Misfit(ValueError):
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
            inner = [field.dataType for field in kind.fields]
        case ArrayType():
            inner = [kind.elementType]
        case MapType() if not read:
            inner = [kind.keyType, kind.valueType]
        case _:
            return [kind]
    return [leaf for one in inner for leaf in _leaves(one, read=read)]


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
        Misfit: If a message does not fit.

    """
    try:
        rows = _parsed(messages, target)
    except pa.ArrowInvalid:
        rows = None
    if rows is None or _flawed(rows, schema):
        raise _misfit(messages, schema, target)
    return rows


def _parsed(messages: Run, target: pa.Schema) -> pa.RecordBatch:
    if not _are_objects(messages):
        raise pa.ArrowInvalid("not one object in each message")
    text = b"\n".join(messages) + b"\n"
    readable = [pa.field(field.name, _readable(field.type)) for field in target]
    table = pyarrow.json.read_json(
        pa.BufferReader(text),
        # In one block: a document may be as long as all of them.
        read_options=pyarrow.json.ReadOptions(
            use_threads=False, block_size=len(text) + 1
        ),
        parse_options=pyarrow.json.ParseOptions(
            explicit_schema=pa.schema(readable),
            newlines_in_values=True,
            unexpected_field_behavior="ignore",
        ),
    )
    assert table.num_rows == len(messages), "unreachable: each is one object"
    columns = [
        table.column(field.name).combine_chunks().cast(field.type) for field in target
    ]
    return pa.RecordBatch.from_arrays(
        [c.chunk(0) if isinstance(c, pa.ChunkedArray) else c for c in columns],
        schema=pa.schema([field.with_nullable(True) for field in target]),
    )


def _are_objects(messages: Run) -> bool:
    """
    Return whether each message is an object, and no more than one.

    It must be UTF-8, or ArrowInvalid is raised. Arrow reads documents wherever they end, two in one message and none in another,
    and one that is ``null`` crashes the process (pyarrow 26.0.1).
    """
    column = pa.array(messages, pa.binary()).cast(pa.string())
    if not pc.all(pc.match_substring_regex(column, _OBJECT)).as_py():
        return False
    doubtful = column.filter(pc.match_substring_regex(column, _TAIL))
    for message in doubtful.to_pylist():
        try:
            json.loads(message)
        except (ValueError, RecursionError):
            return False
    return True


def _readable(kind: pa.DataType) -> pa.DataType:
    """Return the type as which the reader of JSON takes values that become ``kind``."""
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_readable(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(f.name, _readable(f.type)) for f in kind.fields])
    return kind


def _flawed(rows: pa.RecordBatch, schema: StructType) -> bool:
    empty = reduce(pc.and_, [pc.is_null(column) for column in rows.columns])
    if pc.any(empty).as_py():
        return True
    for column, field in zip(rows.columns, schema.fields, strict=True):
        if column.null_count and not field.nullable:
            return True
        # JSON has neither: the number is too big for the type, or a word.
        if pa.types.is_floating(column.type) and not _all_finite(column):
            return True
    return False


def _all_finite(column: pa.Array) -> bool:
    """Return whether no value of ``column`` is infinite, or no number."""
    return pc.all(pc.is_finite(column)).as_py() is not False


def _misfit(messages: Run, schema: StructType, target: pa.Schema) -> Misfit:
    for place, message in enumerate(messages):
        try:
            fits = not _flawed(_parsed([message], target), schema)
        except pa.ArrowInvalid:
            fits = False
        if not fits:
            return Misfit(place, reason(message, _made(message, target), schema))
    raise AssertionError("unreachable: each message fits, all together don't")


def _made(message: bytes, target: pa.Schema) -> dict[str, object]:
    """Return the fields of a message that can be read, each for itself."""
    try:
        document = json.loads(message)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(document, dict):
        return {}
    made = {}
    for field in target:
        alone = json.dumps({field.name: document.get(field.name)}).encode()
        with suppress(pa.ArrowInvalid):
            column = _parsed([alone], pa.schema([field])).column(0)
            if not pa.types.is_floating(field.type) or _all_finite(column):
                made[field.name] = column[0].as_py()
    return made


# --- to documents -----------------------------------------------------------------


def documents_of(rows: pa.RecordBatch) -> pa.Array:
    """Return a JSON object for each row, as strings; nulls are left out."""
    return _objects(rows.schema.names, rows.columns, rows.num_rows)


def _objects(names: list[str], columns: list[pa.Array], rows: int) -> pa.Array:
    members = [
        _joined(f",{json.dumps(name, ensure_ascii=False)}:", _texts(column)).fill_null(
            ""
        )
        for name, column in zip(names, columns, strict=True)
    ]
    if not members:
        return pa.array(["{}"] * rows, pa.string())
    body = pc.utf8_slice_codeunits(_joined(*members), 1)
    return _joined("{", body, "}")


def _texts(column: pa.Array) -> pa.Array:
    """Return each value as JSON, null for null."""
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _quoted(column.cast(pa.string()))
    if pa.types.is_floating(kind):
        return _numbers(column)
    if pa.types.is_date(kind):
        return _joined('"', column.cast(pa.string()), '"')
    if pa.types.is_timestamp(kind):
        zone = "Z" if kind.tz is not None else ""
        local = column.cast(pa.timestamp(kind.unit)).cast(pa.string())
        return _joined('"', pc.replace_substring(local, " ", "T"), f'{zone}"')
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        coded = [None if v is None else _base64(v) for v in column.to_pylist()]
        return _joined('"', pa.array(coded, pa.string()), '"')
    if pa.types.is_struct(kind):
        inner = [pc.struct_field(column, [i]) for i in range(kind.num_fields)]
        names = [field.name for field in kind.fields]
        return _where(column, _objects(names, inner, len(column)))
    if pa.types.is_map(kind):
        pair = pa.struct([("key", kind.key_type), ("value", kind.item_type)])
        column = column.cast(pa.list_(pair))
        entries = column.flatten()
        keys = _texts(pc.struct_field(entries, [0]).cast(pa.string()))
        values = _texts(pc.struct_field(entries, [1])).fill_null("null")
        return _where(column, _listed("{", column, _joined(keys, ":", values), "}"))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        items = _texts(column.flatten()).fill_null("null")
        return _where(column, _listed("[", column, items, "]"))
    return column.cast(pa.string())  # whole numbers, decimals, booleans, null


def _listed(before: str, column: pa.Array, items: pa.Array, after: str) -> pa.Array:
    lengths = pc.list_value_length(column).fill_null(0).cast(pa.int64())
    ends = pc.cumulative_sum(lengths)
    offsets = pa.concat_arrays([pa.array([0], pa.int64()), ends]).cast(pa.int32())
    lists = pa.ListArray.from_arrays(offsets, items)
    return _joined(before, pc.binary_join(lists, ","), after)


def _numbers(column: pa.Array) -> pa.Array:
    texts = column.cast(pa.string())
    if _all_finite(column):
        return texts
    # As Spark writes them.
    for ours, theirs in (
        ("nan", '"NaN"'),
        ("-inf", '"-Infinity"'),
        ("inf", '"Infinity"'),
    ):
        texts = pc.if_else(pc.equal(texts, ours), theirs, texts)
    return texts


def _quoted(column: pa.Array) -> pa.Array:
    if pc.any(pc.match_substring_regex(column, _ESCAPED)).as_py():
        made = [
            None if text is None else json.dumps(text, ensure_ascii=False)
            for text in column.to_pylist()
        ]
        return pa.array(made, pa.string())
    return _joined('"', column, '"')


def _joined(*parts: Any) -> pa.Array:  # noqa: ANN401 - texts and arrays of them
    return pc.binary_join_element_wise(*parts, "")


def _where(column: pa.Array, texts: pa.Array) -> pa.Array:
    return pc.if_else(column.is_valid(), texts, pa.scalar(None, pa.string()))


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()
