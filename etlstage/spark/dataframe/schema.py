"""
Which messages fit a schema, and the columns they become.

Spark's ``from_json`` is lenient: it rounds, takes the first of two objects, gives
null for what it can't read.  A message that does not fit must be told, so this is
what fits here: a JSON object as RFC 8259 has it, alone in its message, whose values
Spark converts to the types of the schema, with a value for every NOT NULL field and
for at least one field of all.  Fields that the schema does not have are dropped, of
a field that is there twice the last counts, numbers and objects become strings
where the schema says string, and decimals are rounded to their scale: as in Spark.
"""

from __future__ import annotations

import json
from functools import reduce
from operator import and_, or_
from typing import Final, NoReturn

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    DoubleType,
    FloatType,
    MapType,
    ShortType,
    StructField,
    StructType,
)

__all__ = ("fitted", "is_raw", "reason")

_CORRUPT: Final = "_etlstage_unfit"
_OPTIONS: Final = {
    "mode": "PERMISSIVE",
    "columnNameOfCorruptRecord": _CORRUPT,
    "allowSingleQuotes": "false",
    "allowNonNumericNumbers": "false",
}
_KINDS: Final = {
    dict: "an object",
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}


def is_raw(schema: StructType) -> bool:
    """Return whether messages are the column's values as they are: one binary."""
    return len(schema) == 1 and isinstance(schema[0].dataType, BinaryType)


def fitted(frame: DataFrame, schema: StructType) -> DataFrame:
    """
    Return ``frame`` with the columns ``row``, a struct, and ``unfit``, a boolean.

    Args:
        frame: Has the messages as its column ``value``, a string, or null for what
            is not UTF-8.
        schema: Of the struct.

    """
    value = sf.col("value")
    # As tinyint Spark takes 128 to 255, too, and makes -128 to -1 of them.
    wide = _nullable(schema, ShortType())
    assert isinstance(wide, StructType)
    with_corrupt = StructType(list(wide.fields)).add(_CORRUPT, "string")
    parsed = frame.withColumn("row", sf.from_json(value, with_corrupt, _OPTIONS))
    row = sf.col("row")
    fields = [row.getField(name) for name in schema.names]
    flaws = [
        row.isNull(),
        row.getField(_CORRUPT).isNotNull(),
        _has_tail(value),
        reduce(and_, [field.isNull() for field in fields]),
        _flaw(row, schema),
    ]
    unfit = sf.coalesce(reduce(or_, flaws), sf.lit(True))
    judged = parsed.withColumn("unfit", unfit)
    if wide == _nullable(schema, ByteType()):
        return judged
    return judged.withColumn("row", sf.struct(*map(_narrowed, fields, schema.fields)))


def _nullable(kind: DataType, tiny: DataType) -> DataType:
    """Return a type without NOT NULL, and with ``tiny`` in place of tinyint."""
    match kind:
        case StructType():
            fields = [
                StructField(field.name, _nullable(field.dataType, tiny))
                for field in kind.fields
            ]
            return StructType(fields)
        case ArrayType():
            return ArrayType(_nullable(kind.elementType, tiny))
        case MapType():
            return MapType(kind.keyType, _nullable(kind.valueType, tiny))
        case ByteType():
            return tiny
    return kind


def _narrowed(column: Column, field: StructField) -> Column:
    """Return a field that was parsed with wider numbers, null if one is too big."""
    kind = _nullable(field.dataType, ByteType())
    if kind != _nullable(field.dataType, ShortType()):
        column = sf.when(~_flaw(column, field.dataType), column.cast(kind))
    return column.alias(field.name)


def _has_tail(value: Column) -> Column:
    """
    Return whether something comes after the first JSON object.

    ``from_json`` stops reading there. When the first closing brace is the last
    character there can't be anything. Else the message is parsed twice more, as the
    item of an array and as a member of an object: to end the former early its tail
    must start with a bracket, to end the latter with a brace or a comma that leads
    on, so that no tail passes both.

    """
    sure = sf.instr(value, "}") == sf.length(value)
    item = sf.from_json(
        sf.concat(sf.lit("["), value, sf.lit("]")), "array<string>", _OPTIONS
    )
    member = sf.from_json(
        sf.concat(sf.lit('{"m":'), value, sf.lit("}")), f"{_CORRUPT} string", _OPTIONS
    )
    alone = (sf.size(item) == 1) & member.getField(_CORRUPT).isNull()
    return sf.when(sure, sf.lit(False)).otherwise(~sf.coalesce(alone, sf.lit(False)))


def _flaw(column: Column, kind: DataType) -> Column:
    """Return whether a NOT NULL field in ``column`` is null, or a number too big."""
    flaw = sf.lit(False)
    match kind:
        case StructType():
            for field in kind.fields:
                inner = column.getField(field.name)
                if not field.nullable:
                    flaw |= inner.isNull()
                flaw |= _flaw(inner, field.dataType)
            # What a struct that is not there lacks is no flaw.
            flaw = column.isNotNull() & flaw
        case ArrayType():
            flaw = sf.exists(column, lambda item: _flaw(item, kind.elementType))
        case MapType():
            flaw = _flaw(sf.map_values(column), ArrayType(kind.valueType))
        case DoubleType() | FloatType():
            # JSON has no infinity: the number is too big for the type.
            flaw = sf.abs(column) == sf.lit(float("inf"))
        case ByteType():
            flaw = ~column.between(-128, 127)
    return sf.coalesce(flaw, sf.lit(False))


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def reason(message: bytes, row: dict[str, object] | None, schema: StructType) -> str:
    """
    Return why ``message``, which does not fit, does not; never what it says.

    Args:
        message: The message.
        row: What Spark made of it.
        schema: What it should have fitted.

    """
    try:
        document = json.loads(message.decode(), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        return f"it is not UTF-8 at offset {error.start}"
    except (ValueError, RecursionError) as error:
        if not message.strip():
            return "it is empty"
        return f"it is not one JSON document ({error})"
    if not isinstance(document, dict):
        return f"it is {_KINDS[type(document)]}, not an object"
    for field in schema.fields:
        value = document.get(field.name)
        if value is None and not field.nullable:
            return f"field {field.name!r} is NOT NULL and has no value"
        if value is not None and (row or {}).get(field.name) is None:
            wanted = field.dataType.simpleString()
            return f"field {field.name!r} is {_KINDS[type(value)]} that is no {wanted}"
    if all(document.get(name) is None for name in schema.names):
        return "it has none of the schema's fields"
    return "a value in it does not fit its type"
