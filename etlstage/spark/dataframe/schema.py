"""
Which messages fit a schema, and the columns they become.

A schema is a contract. Spark's ``from_json`` is lenient: it rounds, makes a string of a
number and a time of another, takes the first of two objects, gives null for what it
can't read or find. Here this fits: a JSON object as RFC 8259 has it, alone in its
message, whose values are of the types of the schema, with a value for every NOT NULL
field and for at least one field of all. Beyond that a :class:`Contract` decides which
columns must be there, if only with null, and whether there may be others.

A string is a JSON string, a date or a time is one in ISO 8601, to the microsecond, and
without a zone where the type has none; a decimal is a number or a string with no more
digits than its scale. Of a field that is there twice the last counts, in a map, too.
All that is decided for all messages of a DataFrame before anything is written.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
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

from etlstage.pipeline import invalid
from etlstage.settings.ddl import columns_of, spark_ddl
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
    DateType: f"^{_DATE}$",
    TimestampType: rf"^{_DATE}([T ]{_TIME}{_ZONE})?$",
    TimestampNTZType: rf"^{_DATE}([T ]{_TIME})?$",
}
"""
What is a JSON string, and nothing else, and of which form.

A cast takes more: ``12:30`` as a time of today, ``20200102`` as a year, anything behind
a date; and it drops what is below a microsecond, or a zone.
"""
_DIGITS: Final = 38  # of a decimal, at most
_NUMBER: Final = r"^[+-]?(\d*)\.?(\d*)(?:[eE]([+-]?\d+))?$"
"""Digits in front of the point and behind it, and the exponent."""
_ENDLESS: Final = r"[eE][+-]?\d{4,}$"
_LONG: Final = r"[:\[,]\s*-?\d[\d.]*[eE][+-]?\d{4,}\s*[,\]}]"
"""An exponent with which no number is a decimal, of a number among others of JSON."""
_NOTHING: Final = ("0.0", "-0.0", "Infinity", "-Infinity")


class Contract(NamedTuple):
    """What is promised of the messages that become rows."""

    schema: StructType
    demanded: Sequence[str] = ()
    """Columns that a message must have, if only with null."""
    closed: bool = False
    """Whether it must have no others."""

    @classmethod
    def of(
        cls, ddl: str, *, missing: str = "dead_letter", extra: str = "ignore"
    ) -> Self:
        """
        Return what columns ask for.

        Args:
            ddl: The columns.
            missing: What becomes of a message without a column that is not declared to be
                ``NULL``: ``dead_letter``, or ``null``, as if it had null there.
            extra: What becomes of one with a field that is no column: ``dead_letter``,
                or ``ignore``, as if it had none.

        Raises:
            ValueError: If it is no DDL.

        """
        columns = columns_of(ddl)
        schema = StructType.fromDDL(spark_ddl(ddl))
        assert isinstance(schema, StructType)
        demanded = [column.name for column in columns if not column.nullable]
        strict = missing == "dead_letter"
        return cls(schema, demanded if strict else (), closed=extra == "dead_letter")


def is_raw(schema: StructType) -> bool:
    """Return whether messages are the column's values as they are: one binary."""
    return len(schema) == 1 and isinstance(schema[0].dataType, BinaryType)


def fitted(frame: DataFrame, contract: Contract) -> DataFrame:
    """
    Return ``frame`` with the columns ``row``, a struct, and ``unfit``, a boolean.

    Args:
        frame: Has the messages as its column ``value``, a string, or null for what
            is not UTF-8.
        contract: What is asked of them.

    """
    value, schema = sf.col("value"), contract.schema
    wide = _wide(schema)
    assert isinstance(wide, StructType)
    with_corrupt = StructType(list(wide.fields)).add(_CORRUPT, "string")
    endless, rounded = _of_decimals(value, schema)
    made = sf.from_json(sf.when(~endless, value), with_corrupt, _OPTIONS)
    parsed = frame.withColumn("row", made)
    row = sf.col("row")
    fields = [_narrow(row.getField(f.name), f.dataType) for f in schema.fields]
    flaws = [
        row.isNull(),
        row.getField(_CORRUPT).isNotNull(),
        _has_tail(value),
        reduce(and_, [field.isNull() for field in fields]),
        _flaw(row, schema),
        rounded,
        *_other_columns(value, dict(zip(schema.names, fields, strict=True)), contract),
    ]
    unfit = sf.coalesce(reduce(or_, flaws), sf.lit(True))
    judged = parsed.withColumn("unfit", unfit)
    if not _differs(schema):
        return judged
    named = map(Column.alias, fields, schema.names)
    return judged.withColumn("row", sf.struct(*named))


def _other_columns(
    value: Column, fields: dict[str, Column], contract: Contract
) -> list[Column]:
    """Return whether a message lacks columns, and whether it has others."""
    flaws, names = [], sf.json_object_keys(value)
    if contract.demanded:
        # Names are only looked for where there is a null: it means a second reading.
        some = reduce(or_, [fields[name].isNull() for name in contract.demanded])
        wanted = sf.array(*map(sf.lit, contract.demanded))
        lacking = sf.size(sf.array_except(wanted, names)) > 0
        flaws.append(sf.when(some, lacking).otherwise(sf.lit(False)))
    if contract.closed:
        known = sf.array(*map(sf.lit, contract.schema.names))
        flaws.append(sf.size(sf.array_except(names, known)) > 0)
    return flaws


def _wide(kind: DataType) -> DataType:
    """Return a type without NOT NULL, by which nothing is converted unseen."""
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
            # As tinyint Spark takes 128 to 255, too, and makes -128 to -1 of them.
            return ShortType()
        case DecimalType():
            # As many digits in front, and more behind the point.
            return DecimalType(_DIGITS, _DIGITS - kind.precision + kind.scale)
    return VariantType() if type(kind) in _TEXTS else kind


def _differs(kind: DataType) -> bool:
    """Return whether a type is not parsed as itself."""
    match kind:
        case StructType():
            return any(_differs(field.dataType) for field in kind)
        case ArrayType():
            return _differs(kind.elementType)
        case MapType():
            return True
    return type(kind) in (ByteType, DecimalType, *_TEXTS)


def _narrow(column: Column, kind: DataType) -> Column:
    """Return what was parsed as a wide type as it is wanted, null if it can't be."""
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
    return text if kind == StringType() else text.try_cast(kind)


def _last_of_each(column: Column) -> Column:
    """Return a map in which each key is once: ``from_json`` makes one with them all."""
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


def _of_decimals(value: Column, schema: StructType) -> tuple[Column, Column]:
    """
    Return whether a decimal in a message can't be parsed, and whether it is rounded.

    ``from_json`` rounds to the digits that its type has, and there may be more behind
    these, however wide it is. So they are read once more as what they are, and their
    digits counted. It also writes all zeros that an exponent stands for: with
    ``1e99999999`` it is busy for minutes.

    """
    pruned = _decimals(schema)
    if pruned is None:
        return sf.lit(False), sf.lit(False)
    assert isinstance(pruned, StructType)
    # Of a number with such an exponent a variant has nothing but 0, or infinity.
    suspect = value.rlike(_LONG)

    def is_endless(text: Column, _: DecimalType) -> Column:
        return text.rlike(_ENDLESS) | (suspect & text.isin(*_NOTHING))

    def is_rounded(text: Column, kind: DecimalType) -> Column:
        return ~_exact(text, kind.scale)

    found = sf.from_json(value, pruned, _OPTIONS)
    return _any(found, schema, is_endless), _any(found, schema, is_rounded)


def _decimals(kind: DataType) -> DataType | None:
    """Return a type with nothing but the decimals in it, each as a variant, if any."""
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
    """Return whether a test holds for the text of any decimal, each a variant."""
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


def _exact(text: Column, scale: int) -> Column:
    """Return whether a number has no digits but zeros beyond a scale."""
    short = text.rlike(rf"^-?\d+(\.\d{{0,{scale}}}0*)?$")
    whole, part, written = (sf.regexp_extract(text, _NUMBER, n) for n in (1, 2, 3))
    exponent = sf.when(written == "", 0).otherwise(written.try_cast("int"))
    digits = sf.rtrim(sf.concat(whole, part), sf.lit("0"))
    behind = sf.length(digits) - sf.length(whole) - exponent
    # Of an exponent that is no int nothing is known.
    fits = (digits == "") | sf.coalesce(behind <= scale, sf.lit(False))
    return short | (text.rlike(_NUMBER) & fits)


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
    """Return whether a NOT NULL field in ``column`` is null, or a value is no such."""
    flaw = sf.lit(False)
    match kind:
        case StructType():
            for field in kind.fields:
                inner = column.getField(field.name)
                if not field.nullable:
                    flaw |= _narrow(inner, field.dataType).isNull()
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
            flaw = column.isNotNull() & _narrow(column, kind).isNull()
        case DecimalType():
            flaw = ~column.eqNullSafe(_narrow(column, kind))
        case _ if type(kind) in _TEXTS:
            # There is null of JSON's, and null of Spark's where nothing is.
            void = sf.coalesce(sf.is_variant_null(column), sf.lit(True))
            there = column.isNotNull() & ~void
            flaw = there & _narrow(column, kind).isNull()
    return sf.coalesce(flaw, sf.lit(False))


def reason(message: bytes, row: dict[str, object] | None, contract: Contract) -> str:
    """
    Return why ``message``, which does not fit, does not; never its content.

    Args:
        message: The message.
        row: What Spark made of it; None: it was not asked.
        contract: What it should have fitted.

    """
    names = contract.schema.names
    return invalid.reason(
        message,
        names if row is None else [n for n in names if row.get(n) is not None],
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
    Return messages as a sink takes them.

    Args:
        messages: Has the columns ``partition`` and ``place``, which together give their
            order, and the messages as ``raw``, binary.

    Returns:
        These, and ``value``: the message as a string, null where it is no UTF-8.

    """
    text = sf.col("raw").cast("string")
    value = sf.when(sf.is_valid_utf8(text), text).alias("value")
    return messages.select("partition", "place", "raw", value)


def judged(messages: DataFrame, contract: Contract | None) -> DataFrame:
    """
    Return the messages with the column ``unfit``, a boolean.

    Args:
        messages: As :func:`with_text` returns them.
        contract: What is asked of them, or None: to be the string ``value``.

    """
    if contract is None:
        return messages.withColumn("unfit", sf.col("value").isNull())
    if is_raw(contract.schema):
        return messages.withColumn("unfit", sf.lit(False))
    return fitted(messages, contract)


def rows_of(messages: DataFrame, contract: Contract | None) -> DataFrame:
    """Return the rows that messages become, judged ones that fit."""
    if contract is None:
        return messages.select("value")
    schema = contract.schema
    if is_raw(schema):
        return messages.select(sf.col("raw").alias(schema.names[0]))
    fields = [sf.col("row").getField(name).alias(name) for name in schema.names]
    return messages.select(*fields)


async def unfit_of(
    messages: DataFrame, contract: Contract | None, *, at_once: int
) -> AsyncIterator[Unfit]:
    """Yield what does not fit of judged messages, in order, collected in turns."""
    found = messages.where("unfit")
    if "row" not in found.columns:
        found = found.withColumn("row", sf.lit(None))
    partition, place = sf.col("partition"), sf.col("place")
    part = found
    while True:
        top = part.select("partition", "place", "raw", "row")
        top = top.orderBy("partition", "place").limit(at_once)
        rows = await run_job(messages.sparkSession, top.collect)
        for row in rows:
            made = None if row["row"] is None else row["row"].asDict()
            message = bytes(row["raw"])
            why = reason(message, made, contract or Contract(StructType()))
            yield Unfit(row["partition"], row["place"], message, why)
        if len(rows) < at_once:
            return
        last = rows[-1]
        part = found.where(
            (partition > last["partition"])
            | ((partition == last["partition"]) & (place > last["place"]))
        )
