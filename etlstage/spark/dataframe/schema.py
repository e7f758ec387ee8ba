"""
Validation of messages against a schema, and conversion into columns.

A schema is a contract, but Spark's ``from_json`` is lenient: it rounds, it converts
numbers to strings and times, reads only the first of two objects, and returns null for
values that it can't parse or find. Here a message fits only if it is a single JSON
object as RFC 8259 defines it that has at least one of the schema's fields, its values
have the types of the schema, and every NOT NULL field has one. A :class:`Contract` also
decides which columns must be present, even if null, and whether other fields are
allowed.

A string must be a JSON string. A date or a time must be a string in ISO 8601, with
microseconds at most, and without a zone where the type has none. A decimal is a number
or a string with no more decimal places than its scale. If a field or the key of a map
occurs twice, the last one counts; but if an earlier value can't be parsed as the type,
the message does not fit. All messages of a DataFrame are checked before anything is
written.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from functools import reduce
from operator import and_, or_
from typing import Final, NamedTuple, Self

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VariantType,
)

from etlstage.errors import ConfigError
from etlstage.files.find import LONGEST, NOWHERE, ODD, folder_flaw, folder_name
from etlstage.pipeline import invalid
from etlstage.pipeline.invalid import TextLines
from etlstage.settings.ddl import columns_of, spark_ddl
from etlstage.spark.dataframe.destination import folder_text
from etlstage.spark.session.job import run_job

__all__ = (
    "Contract",
    "Unfit",
    "fitted",
    "is_raw",
    "judged",
    "reason",
    "rows_of",
    "unfit_of",
    "with_text",
)

_CORRUPT: Final = "_etlstage_unfit"
_OPTIONS: Final = {
    "mode": "PERMISSIVE",
    "columnNameOfCorruptRecord": _CORRUPT,
    "allowSingleQuotes": "false",
    "allowNonNumericNumbers": "false",
}
_DATE: Final = r"([+-]\d{4,6}|\d{4})-\d\d-\d\d"
_TIME: Final = r"\d\d:\d\d(:\d\d(\.\d{1,6})?)?"
_ZONE: Final = r"(Z|[+-]\d\d(:?\d\d(:?\d\d)?)?)?"
_TEXTS: Final[Mapping[type[DataType], str]] = {
    StringType: "",
    BinaryType: r"^(?:[A-Za-z0-9+/]{4})*+(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?\z",
    DateType: rf"^{_DATE}\z",
    TimestampType: rf"^{_DATE}([T ]{_TIME}{_ZONE})?\z",
    TimestampNTZType: rf"^{_DATE}([T ]{_TIME})?\z",
}
"""
Types whose values must be JSON strings, with the pattern that these must match.

A cast accepts more: ``12:30`` as a time today, ``20200102`` as a year, anything after a
date. It also drops digits below a microsecond, and a zone. ``from_json`` ignores line
breaks in Base64, and padding within it. Java's ``$`` would also match before a line
break at the end.
"""
_DIGITS: Final = 38  # largest precision of a decimal
_NUMBER: Final = r"^[+-]?(\d*)\.?(\d*)(?:[eE]([+-]?\d+))?\z"
"""Groups: digits before the point, digits after it, the exponent."""
_ENDLESS: Final = r"(?s)^(?![+-]?[0.]++[eE][+-]?\d{1,4}\z).*[eE][+-]?0*+[1-9]\d{3,}\z"
"""
An exponent that is too large for any decimal, unless a zero has it.

Spark expands a zero's exponent, too, so this must be short.
"""
_BARE: Final = r'\G((?:[^"\d-]|-(?!\d)|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+)(-?\d[\d.eE+-]*+)'
"""
A number in JSON text. Groups: what comes before it, since the last one; the number.

Java matches possessive groups without recursion, so long messages are no problem.
"""
_QUOTED: Final = '$1"$2"'
_INEXACT: Final = r"\d(?:[eE]|[\d.]{38})"
"""A number that may be a double in a variant."""
_HALF: Final = (
    r"(?<!\\)(?:\\\\)*(?:"
    r"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
"""An escaped surrogate without its other half, which no valid text contains."""


class Contract(NamedTuple):
    """Requirements on the messages that become rows."""

    schema: StructType
    demanded: Sequence[str] = ()
    """Columns that a message must have, even if null."""
    closed: bool = False
    """Whether a message must have no other fields."""

    @classmethod
    def of(
        cls, ddl: str, *, missing: str = "dead_letter", extra: str = "ignore"
    ) -> Self:
        """
        Return the contract for the columns of ``ddl``.

        Args:
            ddl: The columns.
            missing: What happens to a message without a column that is not declared
                ``NULL``: ``dead_letter``, or ``null``, as if the column were null.
            extra: What happens to a message with a field that is not a column:
                ``dead_letter``, or ``ignore``, as if the field were not there.

        Raises:
            ValueError: If ``ddl`` is not valid.

        """
        columns = columns_of(ddl)
        schema = StructType.fromDDL(spark_ddl(ddl))
        assert isinstance(schema, StructType)
        demanded = [column.name for column in columns if not column.nullable]
        strict = missing == "dead_letter"
        return cls(schema, demanded if strict else (), closed=extra == "dead_letter")


def is_raw(schema: StructType) -> bool:
    """Return whether a schema is one binary column, whose values are whole messages."""
    return len(schema) == 1 and isinstance(schema[0].dataType, BinaryType)


def fitted(frame: DataFrame, contract: Contract) -> DataFrame:
    """
    Return ``frame`` with the columns ``row``, a struct, and ``unfit``, a boolean.

    Args:
        frame: Has the messages in the string column ``value``, with null for a message
            that is not UTF-8.
        contract: Requirements on the messages.

    Raises:
        ConfigError: If a column has a name that is used here.

    """
    value, schema = sf.col("value"), contract.schema
    for name in schema.names:
        if name.lower() == _CORRUPT:
            raise ConfigError(f"schema: column {name!r} has a reserved name: rename it")
    wide = _wide(schema)
    assert isinstance(wide, StructType)
    with_corrupt = StructType(list(wide.fields)).add(_CORRUPT, "string")
    endless, rounded = _of_decimals(value, schema)
    made = sf.from_json(sf.when(~_either(endless), value), with_corrupt, _OPTIONS)
    parsed = frame.withColumn("row", made)
    row = sf.col("row")
    fields = {f.name: _narrow(row.getField(f.name), f.dataType) for f in schema.fields}
    flaws = [
        row.isNull(),
        row.getField(_CORRUPT).isNotNull(),
        _has_tail(value),
        _has_none(value, fields),
        _flaw(row, schema),
        rounded,
        # Spark turns half a pair into a question mark, which other keys may contain.
        value.rlike(_HALF) & _any_key(row, schema, lambda key: key.contains("?")),
        *_other_columns(value, fields, contract),
    ]
    unfit = sf.coalesce(reduce(or_, flaws), sf.lit(True))
    judged = parsed.withColumn("unfit", unfit)
    if not _differs(schema):
        return judged
    named = [field.alias(name) for name, field in fields.items()]
    return judged.withColumn("row", sf.struct(*named))


def _has_none(value: Column, fields: Mapping[str, Column]) -> Column:
    """Return whether a message has none of the fields, not even as null."""
    empty = reduce(and_, [field.isNull() for field in fields.values()])
    # Listing the names parses the message again, so do it only for a row of nulls.
    wanted = sf.array(*map(sf.lit, fields))
    present = sf.arrays_overlap(sf.json_object_keys(value), wanted)
    return sf.when(empty, ~present).otherwise(sf.lit(False))


def _other_columns(
    value: Column, fields: dict[str, Column], contract: Contract
) -> list[Column]:
    """Return tests for missing columns and for other fields, as far as required."""
    flaws, names = [], sf.json_object_keys(value)
    if contract.demanded:
        # Listing the names parses the message again, so do it only if there is a null.
        some = reduce(or_, [fields[name].isNull() for name in contract.demanded])
        wanted = sf.array(*map(sf.lit, contract.demanded))
        lacking = sf.size(sf.array_except(wanted, names)) > 0
        flaws.append(sf.when(some, lacking).otherwise(sf.lit(False)))
    if contract.closed:
        known = sf.array(*map(sf.lit, contract.schema.names))
        flaws.append(sf.size(sf.array_except(names, known)) > 0)
    return flaws


def _wide(kind: DataType) -> DataType:
    """Return a wider type without NOT NULL, so that nothing is converted silently."""
    match kind:
        case StructType():
            return StructType(
                [StructField(field.name, _wide(field.dataType)) for field in kind]
            )
        case ArrayType():
            return ArrayType(_wide(kind.elementType))
        case MapType():
            return MapType(kind.keyType, _wide(kind.valueType))
        case ByteType():
            # For tinyint Spark also accepts 128 to 255, and makes them -128 to -1.
            return ShortType()
        case DecimalType():
            # As many digits before the point, and more after it.
            return DecimalType(_DIGITS, _DIGITS - kind.precision + kind.scale)
    return VariantType() if type(kind) in _TEXTS else kind


def _differs(kind: DataType) -> bool:
    """Return whether a type is parsed as a wider one, see :func:`_wide`."""
    match kind:
        case StructType():
            return any(_differs(field.dataType) for field in kind)
        case ArrayType():
            return _differs(kind.elementType)
        case MapType():
            return True
    return type(kind) in (ByteType, DecimalType, *_TEXTS)


def _narrow(column: Column, kind: DataType) -> Column:
    """Convert a column parsed as a wide type to ``kind``; null where that fails."""
    if not _differs(kind):
        return column
    match kind:
        case StructType():
            fields = [
                _narrow(column.getField(f.name), f.dataType).alias(f.name) for f in kind
            ]
            return sf.when(column.isNotNull(), sf.struct(*fields))
        case ArrayType():
            return sf.transform(column, lambda item: _narrow(item, kind.elementType))
        case MapType():
            return sf.transform_values(
                _last_of_each(column), lambda _, item: _narrow(item, kind.valueType)
            )
        case DecimalType() | ByteType():
            return column.try_cast(kind)
    text = sf.when(sf.schema_of_variant(column) == "STRING", column.cast("string"))
    if form := _TEXTS[type(kind)]:
        text = sf.when(text.rlike(form), text)
    if kind == BinaryType():
        return sf.unbase64(text)
    return text if kind == StringType() else text.try_cast(kind)


def _last_of_each(column: Column) -> Column:
    """Return a map with the last value of each key: ``from_json`` keeps duplicates."""
    keys, entries = sf.map_keys(column), sf.map_entries(column)
    last = sf.map_from_entries(
        sf.filter(
            entries,
            lambda entry, at: (
                sf.array_position(sf.reverse(keys), entry.getField("key"))
                == sf.size(keys) - at
            ),
        )
    )
    return sf.when(sf.size(sf.array_distinct(keys)) == sf.size(keys), column).otherwise(
        last
    )


def _of_decimals(value: Column, schema: StructType) -> tuple[dict[str, Column], Column]:
    """
    Return which columns have a decimal that can't be parsed, and whether one is rounded.

    ``from_json`` rounds a decimal to the scale of its type, and a number may have more
    digits than the widest type. So decimals are parsed again as variants, and their
    digits counted. Of a number with more digits than 38, or with an exponent, a variant
    makes a double, so such numbers are put in quotes first. ``from_json`` also expands
    an exponent into zeros: ``1e99999999`` keeps it busy for minutes.

    """
    pruned = _decimals(schema)
    if pruned is None:
        return {}, sf.lit(False)
    assert isinstance(pruned, StructType)

    def is_endless(text: Column, _: DecimalType) -> Column:
        return text.rlike(_ENDLESS)

    def is_rounded(text: Column, kind: DecimalType) -> Column:
        return ~_exact(text, kind.scale)

    quoted = sf.regexp_replace(value, _BARE, _QUOTED)
    text = sf.when(value.rlike(_INEXACT), quoted).otherwise(value)
    found = sf.from_json(text, pruned, _OPTIONS)
    endless = {
        name: _any(found.getField(name), schema[name].dataType, is_endless)
        for name in pruned.names
    }
    return endless, _any(found, schema, is_rounded)


def _either(tests: Mapping[str, Column]) -> Column:
    return reduce(or_, tests.values(), sf.lit(False))


def _decimals(kind: DataType) -> DataType | None:
    """Return a type reduced to its decimals, as variants; None if it has no decimal."""
    match kind:
        case StructType():
            fields = [(field.name, _decimals(field.dataType)) for field in kind]
            some = [StructField(name, inner) for name, inner in fields if inner]
            return StructType(some) if some else None
        case ArrayType():
            inner = _decimals(kind.elementType)
            return inner and ArrayType(inner)
        case MapType():
            inner = _decimals(kind.valueType)
            return inner and MapType(kind.keyType, inner)
        case DecimalType():
            return VariantType()
    return None


def _any(
    column: Column, kind: DataType, test: Callable[[Column, DecimalType], Column]
) -> Column:
    """Return whether a test holds for the text of any decimal, parsed as a variant."""
    found = sf.lit(False)
    match kind:
        case StructType():
            for field in kind:
                if _decimals(field.dataType) is not None:
                    found |= _any(column.getField(field.name), field.dataType, test)
        case ArrayType():
            found = sf.exists(column, lambda item: _any(item, kind.elementType, test))
        case MapType():
            found = _any(sf.map_values(column), ArrayType(kind.valueType), test)
        case DecimalType():
            found = test(column.try_cast("string"), kind)
    return sf.coalesce(found, sf.lit(False))


def _any_key(
    column: Column, kind: DataType, test: Callable[[Column], Column]
) -> Column:
    """Return whether a test holds for the key of any map."""
    found = sf.lit(False)
    match kind:
        case StructType():
            for field in kind:
                found |= _any_key(column.getField(field.name), field.dataType, test)
        case ArrayType():
            found = sf.exists(
                column, lambda item: _any_key(item, kind.elementType, test)
            )
        case MapType(keyType=StringType()):
            found = sf.exists(sf.map_keys(column), test)
            values = ArrayType(kind.valueType)
            found |= _any_key(sf.map_values(column), values, test)
    return sf.coalesce(found, sf.lit(False))


def _exact(text: Column, scale: int) -> Column:
    """Return whether a number has only zeros beyond the scale."""
    short = text.rlike(rf"^-?\d+(\.\d{{0,{scale}}}0*)?\z")
    whole, part, written = (sf.regexp_extract(text, _NUMBER, n) for n in (1, 2, 3))
    exponent = sf.when(written == "", 0).otherwise(written.try_cast("int"))
    digits = sf.rtrim(sf.concat(whole, part), sf.lit("0"))
    behind = sf.length(digits) - sf.length(whole) - exponent
    # An exponent too large for an int can't be judged, so the number is not exact.
    fits = (digits == "") | sf.coalesce(behind <= scale, sf.lit(False))
    return short | (text.rlike(_NUMBER) & fits)


def _has_tail(value: Column) -> Column:
    """
    Return whether something comes after the first JSON object.

    ``from_json`` stops reading there. If the first closing brace is the last character,
    nothing can follow. Otherwise the message is parsed twice more, as the item of an
    array and as a member of an object. A tail passes the first only if it starts with a
    bracket, and the second only if it starts with a brace, or with a comma and another
    member, so no tail passes both.

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
    """Return whether a NOT NULL field is null, or a value is not of its type."""
    flaw = sf.lit(False)
    match kind:
        case StructType():
            for field in kind.fields:
                inner = column.getField(field.name)
                if not field.nullable:
                    flaw |= _narrow(inner, field.dataType).isNull()
                flaw |= _flaw(inner, field.dataType)
            # The fields of a struct that is null itself are not judged.
            flaw = column.isNotNull() & flaw
        case ArrayType():
            flaw = sf.exists(column, lambda item: _flaw(item, kind.elementType))
        case MapType():
            flaw = _flaw(sf.map_values(column), ArrayType(kind.valueType))
        case DoubleType() | FloatType():
            # JSON has no infinity: the number is too big for the type.
            flaw = sf.abs(column) == sf.lit(float("inf"))
        case ByteType():
            flaw = column.isNotNull() & _narrow(column, kind).isNull()
        case DecimalType():
            flaw = ~column.eqNullSafe(_narrow(column, kind))
        case _ if type(kind) in _TEXTS:
            # Null is JSON's null in a variant, or Spark's null where there is no value.
            void = sf.coalesce(sf.is_variant_null(column), sf.lit(True))
            there = column.isNotNull() & ~void
            flaw = there & _narrow(column, kind).isNull()
    return sf.coalesce(flaw, sf.lit(False))


def reason(message: bytes, made: Collection[str] | None, contract: Contract) -> str:
    """
    Return why ``message`` does not fit, without its content.

    Args:
        message: The message.
        made: Names of the columns that Spark parsed from it; None: it parsed nothing.
        contract: The contract that it does not fit.

    """
    return invalid.reason(
        message,
        contract.schema.names if made is None else made,
        [
            invalid.WantedColumn(
                field.name, field.nullable, field.dataType.simpleString()
            )
            for field in contract.schema.fields
        ],
        demanded=contract.demanded,
        closed=contract.closed,
    )


class Unfit(NamedTuple):
    """A message that does not fit."""

    partition: int
    place: int
    message: bytes
    why: str


def with_text(messages: DataFrame) -> DataFrame:
    """
    Return messages in the form that a sink checks.

    Args:
        messages: Has the columns ``partition`` and ``place``, which together give the
            order, and ``raw``, the messages as binary.

    Returns:
        These columns, and ``value``: the message as a string, null if it is not UTF-8.

    """
    text = sf.col("raw").cast("string")
    value = sf.when(sf.is_valid_utf8(text), text).alias("value")
    return messages.select("partition", "place", "raw", value)


def judged(
    messages: DataFrame,
    contract: Contract | None,
    lines: TextLines | None = None,
    folders: Sequence[StructField] = (),
) -> DataFrame:
    """
    Return the messages with the column ``unfit``, a boolean.

    Args:
        messages: As :func:`with_text` returns them.
        contract: Requirements on the messages; None: they must be UTF-8.
        lines: The lines of text that rows become, if any.
        folders: Columns that become folders.

    """
    if contract is None:
        found = messages.withColumn("unfit", sf.col("value").isNull())
    elif is_raw(contract.schema):
        found = messages.withColumn("unfit", sf.lit(False))
    else:
        found = fitted(messages, contract)
    for field in folders:
        homeless = _has_no_folder(field, sf.col("row").getField(field.name))
        found = found.withColumn("unfit", sf.col("unfit") | homeless)
    if lines is None:
        return found
    text = sf.col("value")
    if lines.column is not None:
        text = sf.col("row").getField(lines.column)
    split = sf.coalesce(_splits(text, lines.separator), sf.lit(False))
    return found.withColumn("unfit", sf.col("unfit") | split)


def _has_no_folder(field: StructField, value: Column) -> Column:
    """Return what :func:`folder_flaw` finds: whether a partition can't have a folder."""
    text = folder_text(value, field.dataType)
    escaped = sf.regexp_replace(text, ODD.pattern, "%00")
    room = LONGEST - len(folder_name(field.name, "-").encode()) + 1
    unfit = (sf.octet_length(escaped) > room) | (text == NOWHERE) | text.contains("\0")
    if not field.nullable:
        unfit |= text == ""
    return sf.coalesce(unfit, sf.lit(False))


def _splits(text: Column, separator: str | None) -> Column:
    """Return whether a text would become several lines, see :class:`TextLines`."""
    if separator is None:
        return text.rlike(invalid.LINE_BREAK)
    ended = sf.concat(text, sf.lit(separator))
    return sf.instr(ended, separator) <= sf.length(text)


def rows_of(
    messages: DataFrame, contract: Contract | None, folders: Collection[str] = ()
) -> DataFrame:
    """Return the rows for judged messages, all of which fit; ``folders`` as text."""
    if contract is None:
        return messages.select("value")
    schema = contract.schema
    if is_raw(schema):
        return messages.select(sf.col("raw").alias(schema.names[0]))
    fields = []
    for field in schema:
        value = sf.col("row").getField(field.name)
        made = folder_text(value, field.dataType) if field.name in folders else value
        fields.append(made.alias(field.name))
    return messages.select(*fields)


async def unfit_of(
    messages: DataFrame,
    contract: Contract | None,
    lines: TextLines | None = None,
    folders: Sequence[StructField] = (),
    *,
    at_once: int,
) -> AsyncIterator[Unfit]:
    """Yield unfit judged messages in order, collecting ``at_once`` at a time."""
    contract = contract or Contract(StructType())
    found = messages.where("unfit")
    if "row" not in found.columns:
        found = found.withColumn("row", sf.lit(None))
    partition, place = sf.col("partition"), sf.col("place")
    cells = [
        folder_text(sf.col("row").getField(field.name), field.dataType)
        for field in folders
    ]
    columns = [
        *(partition, place, sf.col("raw"), _made(contract), _line(lines)),
        sf.array(*cells).cast("array<string>").alias("cells"),
    ]
    part = found
    while True:
        top = part.select(*columns).orderBy("partition", "place").limit(at_once)
        rows = await run_job(messages.sparkSession, top.collect)
        for row in rows:
            message = bytes(row["raw"])
            why = reason(message, row["made"], contract)
            if lines is not None:
                line = message if lines.column is None else row["line"]
                why = lines.flaw(line) or why
            flaws = (
                folder_flaw(field.name, cell, nullable=field.nullable)
                for field, cell in zip(folders, row["cells"], strict=True)
            )
            why = next(filter(None, flaws), why)
            yield Unfit(row["partition"], row["place"], message, why)
        if len(rows) < at_once:
            return
        last = rows[-1]
        part = found.where(
            (partition > last["partition"])
            | ((partition == last["partition"]) & (place > last["place"]))
        )


def _made(contract: Contract) -> Column:
    """
    Return the names of the columns that have a value; null if nothing was parsed.

    Not the values: PySpark fails on a date or a time that Python can't represent.
    """
    row = sf.col("row")
    filled = [
        sf.when(row.getField(name).isNotNull(), sf.lit(name))
        for name in contract.schema.names
    ]
    endless, _ = _of_decimals(sf.col("value"), contract.schema)
    # Such a message was not parsed at all, but its other columns may be right.
    names, fine = contract.schema.names, sf.lit(False)
    others = [sf.when(~endless.get(name, fine), sf.lit(name)) for name in names]
    found = sf.when(_either(endless), sf.array_compact(sf.array(*others)))
    found = found.when(row.isNotNull(), sf.array_compact(sf.array(*filled)))
    return found.alias("made")


def _line(lines: TextLines | None) -> Column:
    """Return the column that becomes a line of text; null if there is none."""
    line = sf.lit(None)
    if lines is not None and lines.column is not None:
        line = sf.col("row").getField(lines.column).cast("string")
    return line.alias("line")
