"""
Schemas that a data source can read and write as JSON, and their converters.

Inside a data source there is no ``from_json`` and no ``to_json``: Spark exchanges rows
with a Python process as Arrow. So JSON is read and written as in files without Spark,
by the same rules. But an executor may be in another time zone than the session, so
times have their offset from UTC, unless their type has no zone.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    FractionalType,
    IntegralType,
    MapType,
    NullType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from etlstage.columns import Column
from etlstage.errors import ConfigError
from etlstage.files.fit import Fitting
from etlstage.files.text import objects
from etlstage.spark.dataframe.read import column_of, inner_types, name_conflict

__all__ = ("MessageWriter", "check_written", "fitting_of")

_WRITTEN: Final = (
    *(IntegralType, FractionalType, BooleanType, StringType, DecimalType, BinaryType),
    *(DateType, TimestampType, TimestampNTZType, NullType),
)


def fitting_of(schema: StructType) -> Fitting:
    """
    Return the converter of messages, a JSON object each, into rows.

    Raises:
        ConfigError: If a column can't be read from JSON.

    """
    _check_names(schema)
    for field in schema:
        try:
            Fitting(_ddl(StructType([field])))
        except ValueError as error:
            raise ConfigError(
                f"column {field.name!r} is of type {field.dataType.simpleString()}, which"
                " can't be read from JSON"
            ) from error
    try:
        return Fitting(_ddl(schema), missing="null", strict=True)
    except ValueError as error:
        raise ConfigError(f"schema {schema.simpleString()}: {error}") from error


class MessageWriter:
    """
    Makes a message of each row: the only column if that is text or binary, else JSON.

    Args:
        schema: Schema of the rows.

    Raises:
        ConfigError: If a column can't be written as JSON.

    """

    def __init__(self, schema: StructType) -> None:
        kind = schema[0].dataType if len(schema) == 1 else None
        self._plain = isinstance(kind, StringType | BinaryType)
        if not self._plain:
            check_written(schema)

    def messages_of(self, batch: pa.RecordBatch) -> Column:
        """Return the messages of some rows, which may be null."""
        return column_of(batch.column(0) if self._plain else objects(batch, utc=True))


def check_written(schema: StructType) -> None:
    """
    Assert that columns can be written as JSON.

    Raises:
        ConfigError: If one can't.

    """
    _check_names(schema)
    for field in schema:
        for kind in _leaves(field.dataType):
            if not isinstance(kind, _WRITTEN):
                raise ConfigError(
                    f"column {field.name!r} has values of type {kind.simpleString()},"
                    " which can't be written as JSON"
                )


def _ddl(schema: StructType) -> str:
    """Return a schema as :class:`Fitting` reads it."""
    return ", ".join(
        f"`{field.name.replace('`', '``')}` {_type(field.dataType)}"
        + ("" if field.nullable else " NOT NULL")
        for field in schema
    )


def _type(kind: DataType) -> str:
    match kind:
        case StructType():
            return f"struct<{_ddl(kind)}>"
        case ArrayType():
            return f"array<{_type(kind.elementType)}>"
        case MapType():
            return f"map<{_type(kind.keyType)}, {_type(kind.valueType)}>"
    return kind.simpleString()


def _leaves(kind: DataType) -> list[DataType]:
    return [leaf for one in inner_types(kind) for leaf in _leaves(one)] or [kind]


def _check_names(schema: StructType) -> None:
    if conflict := name_conflict(schema):
        raise ConfigError(conflict)
