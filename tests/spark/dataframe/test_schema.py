from __future__ import annotations

from decimal import Decimal

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from etlstage.spark.dataframe.fit import judged, rows_of, unfit_of, with_text
from etlstage.spark.dataframe.schema import Contract, is_raw, reason

pytestmark = pytest.mark.spark

DDL = (
    "id long, d decimal(5,2), t timestamp, dt date, f double, r float, bo boolean, "
    "i int, bt byte, title string, s struct<a: int, b: array<int>>, l array<int>, "
    "m map<string,long>, deep array<struct<x: double>>, "
    "bts map<string, array<struct<x: byte not null>>>, n timestamp_ntz, "
    "ts array<timestamp>, texts map<string, array<string>>, ds array<decimal(3,1)>"
)
NOT_NULL = (
    "id long not null, s struct<a: int not null>, "
    "l array<struct<x: int not null>>, m map<string, struct<y: int not null>>"
)

FITS = [
    '{"id":1}',
    ' \n{"id" : 1 }\t\r\n ',
    '{"id":1,"title":"a } b"}',
    '{"id":1,"title":null}',
    '{"id":1,"extra":{"a":[1,{}]}}',
    '{"id":1,"id":2}',
    '{"id":1,"s":{"a":1,"b":[1]}}',
    '{"id":1,"s":{}}',
    '{"id":1,"l":[1,null]}',
    '{"id":1,"m":{"a":1,"b":null}}',
    '{"id":1,"d":1.23}',
    '{"id":1,"d":1.2300}',
    '{"id":1,"d":-999.9}',
    '{"id":1,"d":"1.23"}',
    '{"id":1,"t":"2020-01-01T00:00:00Z"}',
    '{"id":1,"t":null,"n":"2020-01-01T00:00:00","ts":["2020-01-01T00:00:00Z",null]}',
    '{"id":1,"dt":"2020-02-29"}',
    '{"id":1,"f":1e300,"r":1}',
    '{"id":1,"texts":{"a":["}",null],"b":null}}',
    '{"id":1,"title":"\\u0000\\n\\u00e9"}',
    '{"title":"é€𝄞"}',
    '{"bt":-128,"bts":{"a":[{"x":127},{"x":-128}],"b":null}}',
]

UNFIT = {
    # No JSON object.
    "": "it is empty",
    "  ": "it is empty",
    "null": "it is null, not an object",
    "1": "it is a number, not an object",
    '"s"': "it is a string, not an object",
    "true": "it is a boolean, not an object",
    "[]": "it is an array, not an object",
    '[{"id":1}]': "it is an array, not an object",
    '[{"id":1},{"id":2}]': "it is an array, not an object",
    # Malformed.
    '{"id":1': "it is not one JSON document",
    "{'id':1}": "it is not one JSON document",
    '{"id":1,}': "it is not one JSON document",
    '{"id":01}': "it is not one JSON document",
    '{"id":1 /* c */}': "it is not one JSON document",
    '\ufeff{"id":1}': "it is not one JSON document",
    '{"id":1,"title":"a\nb"}': "it is not one JSON document",
    # Something after the object.
    '{"id":1}garbage': "it is not one JSON document (Extra data",
    '{"id":1} {"id":2}': "it is not one JSON document (Extra data",
    '{"id":1},{"id":2}': "it is not one JSON document (Extra data",
    '{"id":1}, "m":{"id":2}': "it is not one JSON document (Extra data",
    '{"id":1}}': "it is not one JSON document (Extra data",
    '{"id":1}]': "it is not one JSON document (Extra data",
    '{"id":1}] }': "it is not one JSON document (Extra data",
    '{"id":1}\0': "it is not one JSON document (Extra data",
    # The wrong type.
    '{"id":"x"}': "field 'id' is a string that is no bigint",
    '{"id":"12"}': "field 'id' is a string that is no bigint",
    '{"id":""}': "field 'id' is a string that is no bigint",
    '{"id":1.5}': "field 'id' is a number that is no bigint",
    '{"id":99999999999999999999}': "field 'id' is a number that is no bigint",
    '{"id":true}': "field 'id' is a boolean that is no bigint",
    '{"id":1,"i":3000000000}': "field 'i' is a number that is no int",
    '{"id":1,"bt":300}': "field 'bt' is a number that is no tinyint",
    '{"id":1,"bt":128}': "field 'bt' is a number that is no tinyint",
    '{"id":1,"bts":{"a":[{"x":255}]}}': "a value in it does not fit",
    '{"id":1,"bo":"true"}': "field 'bo' is a string that is no boolean",
    '{"id":1,"f":"x"}': "field 'f' is a string that is no double",
    '{"id":1,"f":"NaN"}': "field 'f' is a string that is no double",
    '{"id":1,"f":NaN}': "it is not one JSON document (NaN is no number)",
    '{"id":1,"f":1e400}': "a value in it does not fit",
    '{"id":1,"r":1e39}': "a value in it does not fit",
    '{"id":1,"deep":[{"x":1},{"x":-1e400}]}': "a value in it does not fit",
    '{"id":1,"d":123456.78}': "field 'd' is a number that is no decimal(5,2)",
    # What Spark would convert, and not say.
    '{"id":1,"d":1.239}': "a value in it does not fit",
    '{"id":1,"d":"1.239"}': "a value in it does not fit",
    '{"id":1,"ds":[1.25]}': "a value in it does not fit",
    '{"id":1,"title":5}': "field 'title' is a number that is no string",
    '{"id":1,"title":true}': "field 'title' is a boolean that is no string",
    '{"id":1,"title":{"a":"}"}}': "field 'title' is an object that is no string",
    '{"id":1,"title":["a"]}': "field 'title' is an array that is no string",
    '{"id":1,"texts":{"a":["x",1]}}': "a value in it does not fit",
    '{"id":1,"t":5}': "field 't' is a number that is no timestamp",
    '{"id":1,"n":5}': "field 'n' is a number that is no timestamp_ntz",
    '{"id":1,"ts":["2020-01-01T00:00:00Z",5]}': "a value in it does not fit",
    '{"id":1,"d":"x"}': "field 'd' is a string that is no decimal(5,2)",
    '{"id":1,"t":"nope"}': "field 't' is a string that is no timestamp",
    '{"id":1,"t":"2020-02-31T00:00:00Z"}': "field 't' is a string that is no timestamp",
    '{"id":1,"dt":"2020-13-01"}': "field 'dt' is a string that is no date",
    '{"id":1,"dt":7}': "field 'dt' is a number that is no date",
    '{"id":1,"s":3}': "field 's' is a number that is no struct<a:int,b:array<int>>",
    '{"id":1,"s":{"a":"x"}}': "a value in it does not fit",
    '{"id":1,"s":{"a":1,"b":["x"]}}': "a value in it does not fit",
    '{"id":1,"l":3}': "field 'l' is a number that is no array<int>",
    '{"id":1,"l":[1,"x"]}': "",
    '{"id":1,"m":[1]}': "field 'm' is an array that is no map<string,bigint>",
    '{"id":1,"m":{"a":"x"}}': "",
    # A row of nulls.
    "{}": "it has none of the schema's fields",
    '{"ID":1}': "it has none of the schema's fields",
    '{"id":null}': "it has none of the schema's fields",
}


def lenient(ddl: str) -> Contract:
    """Return a contract in which a column may be missing."""
    return Contract.of(ddl, missing="null")


def fit(spark: SparkSession, messages: list[bytes], contract: Contract) -> DataFrame:
    """Return the messages, judged."""
    rows = [(0, place, bytearray(raw)) for place, raw in enumerate(messages)]
    frame = spark.createDataFrame(rows, "partition int, place long, raw binary")
    return judged(with_text(frame), contract)


async def unfit(
    spark: SparkSession, messages: list[bytes], contract: Contract
) -> list[tuple[int, str]]:
    """Return the places of the messages that do not fit, and why each does not."""
    found = unfit_of(fit(spark, messages, contract), contract, at_once=1000)
    return [(message.place, message.why) async for message in found]


async def test_what_fits_is_not_refused(spark: SparkSession) -> None:
    """Objects whose values Spark converts are rows."""
    assert await unfit(spark, [text.encode() for text in FITS], lenient(DDL)) == []


async def test_all_that_does_not_fit_is_found(spark: SparkSession) -> None:
    """None of them passes, whatever is around it."""
    messages = [text.encode() for text in (*FITS, *UNFIT)]
    found = await unfit(spark, [*messages, b"\xff", b'{"title":"\xff"}'], lenient(DDL))
    places = range(len(FITS), len(messages) + 2)
    assert [place for place, _ in found] == list(places)
    for (_, why), wanted in zip(found, UNFIT.values(), strict=False):
        assert why.startswith(wanted), (why, wanted)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"s":{"a":1}}', "field 'id' is NOT NULL and has no value"),
        ('{"id":null}', "field 'id' is NOT NULL and has no value"),
        ('{"id":1,"s":{}}', "a value in it does not fit its type"),
        ('{"id":1,"s":{"a":null}}', "a value in it does not fit its type"),
        ('{"id":1,"l":[{"x":1},{}]}', "a value in it does not fit its type"),
        ('{"id":1,"m":{"k":{}}}', "a value in it does not fit its type"),
    ],
)
async def test_not_null_is_kept(spark: SparkSession, text: str, why: str) -> None:
    """NOT NULL holds at every depth, which from_json itself does not care for."""
    assert await unfit(spark, [text.encode()], lenient(NOT_NULL)) == [(0, why)]


async def test_not_null_asks_nothing_of_what_is_not_there(spark: SparkSession) -> None:
    """A NOT NULL field of a struct that is null is no flaw."""
    messages = [
        b'{"id":1}',
        b'{"id":1,"s":{"a":1},"l":[{"x":1}],"m":{"k":{"y":1}}}',
        b'{"id":1,"s":null,"l":[],"m":{}}',
    ]
    assert await unfit(spark, messages, lenient(NOT_NULL)) == []


def test_payload_is_not_told() -> None:
    """A reason never quotes the message."""
    schema = StructType().add("id", "long")
    for message in (b'{"id":"secret"}', b"secret", b'"secret"', b"\xffsecret"):
        assert "secret" not in reason(message, {"id": None}, Contract(schema))


def test_one_binary_column_takes_messages_as_they_are() -> None:
    """Only a schema of a single binary column is no JSON."""
    assert is_raw(StructType().add("value", "binary"))
    assert not is_raw(StructType().add("value", "string"))
    assert not is_raw(StructType().add("a", "binary").add("b", "binary"))


def test_small_numbers_are_what_they_were(spark: SparkSession) -> None:
    """In columns of the types that were asked for, however deep."""
    messages = [b'{"bt":-128,"bts":{"a":[{"x":127}]}}', b'{"id":1,"d":1}']
    ddl = "id long, bt byte, bts map<string, array<struct<x: byte>>>, d decimal(5,2)"
    contract = lenient(ddl)
    rows = rows_of(fit(spark, messages, contract), contract)
    assert rows.schema == StructType.fromDDL(ddl)
    assert [row.asDict(recursive=True) for row in rows.collect()] == [
        {"id": None, "bt": -128, "bts": {"a": [{"x": 127}]}, "d": None},
        {"id": 1, "bt": None, "bts": None, "d": Decimal("1.00")},
    ]


async def test_column_that_is_missing_is_no_null(spark: SparkSession) -> None:
    """Unless it is said that it may be: it may be misspelt (issue 23)."""
    messages = [
        b'{"id":1,"mnth":"x","note":"y"}',
        b'{"id":1,"mnth":null}',
        b'{"id":1,"month":"x"}',
        b'{"mnth":"x"}',
        b'{"id":1,"mnth":"x","other":{"mnth":1}}',
    ]
    ddl = "id long, mnth string, note string null"
    found = await unfit(spark, messages, Contract.of(ddl))
    assert [place for place, _ in found] == [2, 3]
    assert found[0][1].startswith("field 'mnth' is missing: misspelt, or")
    assert await unfit(spark, messages, lenient(ddl)) == []


async def test_field_that_is_no_column_may_be_refused(spark: SparkSession) -> None:
    """It is counted, and its name, which is the message's, is not told."""
    messages = [b'{"id":1}', b'{"id":1,"a":{"x":1},"b":null}', b'{"id":1,"id":2}']
    assert await unfit(spark, messages, Contract.of("id long")) == []
    found = await unfit(spark, messages, Contract.of("id long", extra="dead_letter"))
    assert found == [(1, "it has 2 fields that the schema does not have")]
