"""
The DataFrame of an extract stage, and the one message of each of its rows.

Spark only makes a plan here: a wrong path, column or expression is reported before any
job runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming.readwriter import DataStreamReader
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    MapType,
    NumericType,
    StringType,
    StructType,
)

from etlstage.columns import Column
from etlstage.messages import AnnotatedRun, Run
from etlstage.spark.errors import explain

__all__ = (
    "TIMES",
    "MessageColumn",
    "column_of",
    "inner_types",
    "message_column",
    "messages_of",
    "name_conflict",
    "objects_of",
    "read_frame",
    "run_of",
)

TIMES: Final[Mapping[str, str]] = {
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
"""Options for writing times in full: by default Spark drops microseconds."""
_KEYS: Final = (StringType, NumericType, BooleanType)
# Every message has all columns, so that a worker can notice a misspelt name.
_OPTIONS: Final = {"ignoreNullFields": "false", **TIMES}
_WHOLE_ROW: Final = "to_json(struct(*), map({}))".format(
    ", ".join(
        "'{}'".format(text.replace("'", r"\'"))
        for option in _OPTIONS.items()
        for text in option
    )
)


class MessageColumn(NamedTuple):
    """The column that has the message of each row."""

    expression: str
    """Spark SQL, string or binary."""
    is_text: bool
    """Whether it is a string."""


def read_frame(
    spark: SparkSession,
    *,
    format: str | None = None,  # noqa: A002 - as DataFrameReader.load calls it
    path: str | Sequence[str] | None = None,
    table: str | None = None,
    schema: str | None = None,
    options: Mapping[str, str] | None = None,
    streaming: bool = False,
) -> DataFrame:
    """
    Return the DataFrame that the settings of an extract stage describe; blocks.

    Args:
        spark: The session.
        format: Spark's name of it, by default its ``spark.sql.sources.default``.
        path: Where the data is, unless ``table`` or the options have it.
        table: A table of the catalog.
        schema: Columns as DDL, for formats that do not know theirs.
        options: Options of the format.
        streaming: Whether it is to be a stream.

    """
    reader: DataFrameReader | DataStreamReader
    reader = spark.readStream if streaming else spark.read
    reader = reader.options(**(options or {}))
    if table is not None:
        return reader.table(table)
    if schema is not None:
        reader = reader.schema(schema)
    paths: Any = path if path is None or isinstance(path, str) else list(path)
    return reader.load(paths, format=format)


def messages_of(
    frame: DataFrame,
    expression: str | None,
    key: str | None = None,
    sort: str | None = None,
) -> DataFrame:
    """
    Return the messages of ``frame`` as its first column, binary; blocks.

    Args:
        frame: Any DataFrame.
        expression: Spark SQL that makes a message of a row. By default the only
            column if that is string or binary, else ``to_json(struct(*))``, with null
            where there is null, and times to the microsecond.
        key: Spark SQL for a key: only messages with the same key keep their order. Its
            hash becomes the second column; without a key there is none.
        sort: Spark SQL that rows are sorted by.

    Raises:
        TypeError: If the message is neither string nor binary, columns of one name
            would become a JSON object, or an expression is not valid for these columns.

    """
    if sort is not None:
        with _naming(f"sort {sort!r}"):
            frame = frame.sort(sf.expr(sort))
            _ = frame.schema
    with _naming(f"message {expression!r}" if expression else ""):
        chosen = message_column(frame, expression)
    columns = [sf.expr(chosen.expression).cast("binary").alias("message")]
    if key is not None:
        with _naming(f"key {key!r}"):
            # Over Connect nothing is checked before that.
            _ = frame.select(sf.expr(key)).schema
        columns.append(sf.xxhash64(sf.expr(key)).alias("key"))
    return frame.select(*columns)


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Name the expression in the error, if Spark can't read it."""
    try:
        yield
    except PySparkException as error:
        if not what:
            raise
        raise TypeError(f"{what}: {explain(error)}") from error


def message_column(frame: DataFrame, expression: str | None) -> MessageColumn:
    """Return the column of messages; arguments as for :func:`messages_of`."""
    expression = expression or _default(frame.schema)
    kind = frame.select(sf.expr(expression)).schema[0].dataType
    if not isinstance(kind, StringType | BinaryType):
        raise TypeError(
            f"message {expression!r} is {kind.simpleString()}, expected string or "
            f"binary: write 'cast({expression} as string)' or 'to_json(...)'"
        )
    return MessageColumn(expression, isinstance(kind, StringType))


def objects_of(frame: DataFrame) -> list[bytes]:
    """Return each row as a JSON object, without null fields; blocks."""
    row = sf.to_json(sf.struct("*"), dict(TIMES)).alias("row")
    return [found["row"].encode() for found in frame.select(row).collect()]


def _default(schema: StructType) -> str:
    if len(schema) == 1 and isinstance(schema[0].dataType, StringType | BinaryType):
        return f"`{schema[0].name.replace('`', '``')}`"
    if conflict := name_conflict(schema):
        raise TypeError(conflict)
    for field in schema:
        if wrong := _wrong_key(field.dataType):
            raise TypeError(
                f"column {field.name!r} has a map with keys of type {wrong}, of which"
                " to_json makes text that can't be read back: cast them, for example"
                " with transform_keys(..., (k, v) -> cast(k as string)), or set message"
            )
    return _WHOLE_ROW


def _wrong_key(kind: DataType) -> str | None:
    """Return the type of a map's keys that ``to_json`` does not write as it is."""
    if isinstance(kind, MapType) and not isinstance(kind.keyType, _KEYS):
        return kind.keyType.simpleString()
    return next(filter(None, map(_wrong_key, inner_types(kind))), None)


def name_conflict(kind: DataType) -> str | None:
    """Return why names of columns, or of fields, can't be keys of JSON, if so."""
    names = kind.names if isinstance(kind, StructType) else []
    for name, count in Counter(names).items():
        if count > 1:
            return (
                f"column {name!r} appears {count} times, but JSON can have it only once:"
                f" rename {'one' if count == 2 else 'all but one'}"
            )
    return next(filter(None, map(name_conflict, inner_types(kind))), None)


def inner_types(kind: DataType) -> Sequence[DataType]:
    """Return the types that a type consists of."""
    match kind:
        case StructType():
            return [field.dataType for field in kind]
        case ArrayType():
            return [kind.elementType]
        case MapType():
            return [kind.keyType, kind.valueType]
    return []


def column_of(array: pa.Array) -> Column:
    """Return a column from Spark as messages, which may be null."""
    # The column may be text, and of a large type if
    # spark.sql.execution.arrow.useLargeVarTypes is set. Only large types are copied.
    return Column(array.cast(pa.binary()))


def run_of(batch: pa.RecordBatch) -> Run:
    """Return the messages in the first column, with their keys if there are any."""
    messages = column_of(batch.column(0))
    if batch.num_columns == 1:
        return messages
    return AnnotatedRun(messages, key=batch.column(1).to_pylist())
