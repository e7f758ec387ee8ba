from __future__ import annotations

import json
import re
from collections.abc import Callable

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
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
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VariantType,
)

from etlstage.errors import ConfigError
from etlstage.files.text import objects
from etlstage.spark.datasource.documents import check_written, fitting_of

SCHEMA = StructType(
    [
        StructField("id", IntegerType(), nullable=False),
        StructField("half", DoubleType()),
        StructField("text", StringType()),
    ]
)


def rows(schema: StructType, *messages: bytes) -> list[dict[str, object]]:
    """Return the rows of messages, which must all fit."""
    found = fitting_of(schema).rows(pa.chunked_array([messages], pa.binary()))
    assert found.unfit == []
    made: list[dict[str, object]] = found.table.to_pylist()
    return made


def invalid(schema: StructType, *messages: bytes) -> list[tuple[int, str]]:
    """Return the places of messages that do not fit, with the reasons."""
    found = fitting_of(schema).rows(pa.chunked_array([messages], pa.binary()))
    return [(place, why) for place, _, why in found.unfit]


def test_documents_become_rows() -> None:
    """Whatever is around and inside of them, and whatever other fields they have."""
    messages = [
        b'{"id": 1, "half": 0.5, "more": [null, {"id": 7}]}',
        b' {"text": "}{ ] }", "id": 2}\n',
        b'{"id":3,\n"half":\n1}',
    ]
    assert rows(SCHEMA, *messages) == [
        {"id": 1, "half": 0.5, "text": None},
        {"id": 2, "half": None, "text": "}{ ] }"},
        {"id": 3, "half": 1.0, "text": None},
    ]


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (b"", "it is empty"),
        (b"null", "it is null, not an object"),
        (b"[]", "it is an array, not an object"),
        (b'{"id": 1', "it is not one JSON document"),
        (b'{"id": 1}{"id": 2}', "it is not one JSON document"),
        (b'{"id": 1} null', "it is not one JSON document"),
        (b'{"id": 1, "text": "\xff"}', "it is not UTF-8 at offset 19"),
        (b'{"half": 1}', "field 'id' is NOT NULL and has no value"),
        (b'{"other": 1}', "field 'id' is NOT NULL and has no value"),
        (b'{"id": 1.0}', "field 'id' is a number that is not of type int"),
        (
            b'{"id": 1, "text": 5}',
            "field 'text' is a number that is not of type string",
        ),
        (b'{"id": 1, "half": NaN}', "it is not one JSON document"),
        (
            b'{"id": 1, "half": 1e999}',
            "field 'half' is a number that is not of type double",
        ),
        (
            b'{"id": 1, "half": 1e9%s}' % (b"9" * 20),
            "a number that is not of type double",
        ),
    ],
)
def test_document_that_does_not_fit_is_found(message: bytes, why: str) -> None:
    """With its place and the reason, but never its content."""
    ((place, said),) = invalid(SCHEMA, b'{"id": 0}', message, b'{"id": 2}')
    assert place == 1
    assert why in said


@pytest.mark.parametrize(
    ("kind", "fitting", "others"),
    [
        (ByteType(), ["-128", "127"], ["128", "1.0", "true", '"1"']),
        (FloatType(), ["1", "0.1", "3e38"], ["1e39", "true", '"1"']),
        (BooleanType(), ["true"], ["1", '"true"']),
        (StringType(), ['"a"', '"\\ud83d\\ude00"'], ["1", "{}", '"\\ud800"']),
        (DecimalType(5, 2), ["1", "1.5", "1.50", '"1e1"'], ["1.555", "1234.5", '"_"']),
        (DateType(), ['"2020-01-31"'], ['"20200131"', '"2020-02-30"', "5"]),
        (
            TimestampType(),
            ['"2020-01-31T01:02:03.5Z"', '"2020-01-31 01:02:03+01:00"'],
            ['"2020-01-31T01:02:03"', '"now"', "5"],
        ),
        (TimestampNTZType(), ['"2020-01-31T01:02:03"'], ['"2020-01-31T01:02:03Z"']),
        (ArrayType(IntegerType()), ["[]", "[1, null]"], ["[1.5]", "{}", "1"]),
        (
            StructType().add("a", IntegerType()),
            ["{}", '{"a": 1, "b": 2}'],
            ['{"a": "1"}', "1"],
        ),
        (
            StructType().add("a", IntegerType(), nullable=False),
            ['{"a": 1}'],
            ["{}", '{"a": null}'],
        ),
    ],
)
def test_value_must_be_of_its_type(
    kind: DataType, fitting: list[str], others: list[str]
) -> None:
    """Even where Python or Arrow would convert it."""
    schema = StructType().add("x", kind)
    for text in fitting:
        (row,) = rows(schema, b'{"x": %s}' % text.encode())
        assert row["x"] is not None
    for text in others:
        ((_, why),) = invalid(schema, b'{"x": %s}' % text.encode())
        assert re.search("field 'x' is .* that is not of type ", why), text


def test_column_that_has_no_json_is_refused() -> None:
    """The error names the column; some types can be written but not read."""
    written = StructType().add("b", BinaryType())
    written.add("m", MapType(IntegerType(), BinaryType()))
    check_written(written)
    with pytest.raises(
        ConfigError, match="'m' is of type map<int,binary>, which can't be re"
    ):
        fitting_of(written)
    variant = StructType().add("v", VariantType())
    with pytest.raises(
        ConfigError, match="'v' is of type variant, which can't be read"
    ):
        fitting_of(variant)
    with pytest.raises(
        ConfigError, match="'v' has values of type variant, which can't be wr"
    ):
        check_written(variant)


@pytest.mark.parametrize("check", [fitting_of, check_written])
@pytest.mark.parametrize("inner", [True, False])
def test_columns_of_one_name_are_refused(
    *, inner: bool, check: Callable[[StructType], object]
) -> None:
    """A JSON object could have only one of them (issue 14)."""
    both = StructType().add("a", IntegerType()).add("b", IntegerType())
    both = both.add("a", StringType())
    with pytest.raises(ConfigError, match="column 'a' appears 2 times"):
        check(StructType().add("s", both) if inner else both)


def test_columns_that_differ_in_case_alone_are_refused() -> None:
    """For Spark they are the same column, by default."""
    both = StructType().add("a", IntegerType()).add("A", IntegerType())
    with pytest.raises(ConfigError, match=r"struct<a:int,A:int>: column .* appears tw"):
        fitting_of(both)


def test_number_with_too_large_an_exponent_elsewhere() -> None:
    """A value that no column needs does no harm (issue 14)."""
    message = b'{"id": 1, "half": 1e-9%s, "more": -1e9%s}' % (b"9" * 20, b"9" * 20)
    assert rows(SCHEMA, message) == [{"id": 1, "half": 0.0, "text": None}]


@pytest.mark.spark
def test_rows_become_what_spark_makes_of_them(spark: SparkSession) -> None:
    """Every type, with and without values, also nested; as ``to_json`` in UTC."""
    frame = spark.sql(
        """
        select 1Y as y, -2S as s, 3 as i, 4L as l, 0.1F as f, 2.25D as d, true as b,
          1.50BD as dec, 'a"b\\\\c\\n\\u0001é' as text, '' as empty, x'00ff' as bin,
          date'2020-01-31' as day, timestamp_ntz'2020-01-31 01:02:03' as ntz,
          timestamp'2020-01-31T01:02:03.5Z' as at, array(1, null, 2) as xs,
          array_remove(array(1), 1) as none, map('k"', 1, 'n', null) as m, map(1, 'x') as mi,
          named_struct('a', 1, 'b', cast(null as int), 'c', array(date'2020-01-01'))
            as st, double('NaN') as nan, double('-Infinity') as inf,
          cast(null as int) as gone, `q"` as `odd " name`
        from values (1), (2) as t(`q"`)
        union all
        select null, null, null, null, null, null, null, null, null, null, null, null,
          null, null, null, null, null, null, null, null, null, null, null
    """
    )
    # By default Spark writes as few digits of a second as necessary.
    digits = "yyyy-MM-dd\\'T\\'HH:mm:ss.SSSSSS"
    options = f"map('timeZone', 'UTC', 'timestampFormat', '{digits}XXX',"
    options += " 'ignoreNullFields', 'false',"
    options += f" 'timestampNTZFormat', '{digits}')"
    single = frame.coalesce(1)
    expected = single.selectExpr(f"to_json(struct(*), {options}) as document").collect()
    made = single.mapInArrow(
        lambda batches: (
            pa.record_batch([objects(b, utc=True)], ["d"]) for b in batches
        ),
        "d string",
    )
    found = [json.loads(row.d) for row in made.collect()]
    assert found == [json.loads(row.document) for row in expected]
    assert set(found[-1].values()) == {None}
