from __future__ import annotations

from decimal import Decimal

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import StructType

from etlstage.spark.dataframe.schema import (
    Contract,
    is_raw,
    judged,
    reason,
    rows_of,
    unfit_of,
    with_text,
)
from tests.contract import DDL, FITS, NOT_NULL, UNFIT

pytestmark = pytest.mark.spark


def lenient(ddl: str) -> Contract:
    """Return a contract in which a column may be missing."""
    return Contract.of(ddl, missing="null")


def fit(spark: SparkSession, messages: list[bytes], contract: Contract) -> DataFrame:
    """Return the messages as a frame that marks those that do not fit."""
    rows = [(0, place, bytearray(raw)) for place, raw in enumerate(messages)]
    frame = spark.createDataFrame(rows, "partition int, place long, raw binary")
    return judged(with_text(frame), contract)


async def unfit(
    spark: SparkSession, messages: list[bytes], contract: Contract
) -> list[tuple[int, str]]:
    """Return the places of the messages that do not fit, with the reasons."""
    found = unfit_of(fit(spark, messages, contract), contract, at_once=1000)
    return [(message.place, message.why) async for message in found]


@pytest.mark.any_client
async def test_key_with_half_of_a_pair_is_no_question_mark(
    spark: SparkSession,
) -> None:
    """Spark makes one of a lone surrogate; keys that are valid text pass."""
    contract = lenient("m map<string,int>, l array<struct<n: map<string,string>>>")
    good = [
        rb'{"m":{"a?":1}}',
        rb'{"m":{"\ud83d\ude00?":1}}',
        rb'{"m":{"\\ud800?":1}}',
        rb'{"m":{"a":1},"other":"\ud800"}',
    ]
    bad = [
        rb'{"m":{"\ud800":1}}',
        rb'{"m":{"a":2,"\uDC00x":1}}',
        rb'{"m":{"\\\ud800\\\udc00":1}}',
        rb'{"l":[{},{"n":{"\uDbFf\ud83d\ude00":"x"}}]}',
    ]
    assert [place for place, _ in await unfit(spark, [*good, *bad], contract)] == [
        4,
        5,
        6,
        7,
    ]


@pytest.mark.any_client
async def test_what_fits_is_not_refused(spark: SparkSession) -> None:
    """Objects whose values Spark can convert become rows."""
    assert await unfit(spark, [text.encode() for text in FITS], lenient(DDL)) == []


async def test_all_that_does_not_fit_is_found(spark: SparkSession) -> None:
    """No unfit message passes, whatever surrounds it (issue 23)."""
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
@pytest.mark.any_client
async def test_not_null_is_kept(spark: SparkSession, text: str, why: str) -> None:
    """NOT NULL holds at every depth, which from_json itself ignores."""
    assert await unfit(spark, [text.encode()], lenient(NOT_NULL)) == [(0, why)]


@pytest.mark.any_client
async def test_not_null_asks_nothing_of_what_is_not_there(spark: SparkSession) -> None:
    """A NOT NULL field within a struct that is null is not an error."""
    messages = [
        b'{"id":1}',
        b'{"id":1,"s":{"a":1},"l":[{"x":1}],"m":{"k":{"y":1}}}',
        b'{"id":1,"s":null,"l":[],"m":{}}',
    ]
    assert await unfit(spark, messages, lenient(NOT_NULL)) == []


def test_payload_is_not_shown() -> None:
    """A reason never quotes the message."""
    schema = StructType().add("id", "long")
    for message in (b'{"id":"secret"}', b"secret", b'"secret"', b"\xffsecret"):
        assert "secret" not in reason(message, (), Contract(schema))


def test_one_binary_column_takes_messages_as_they_are() -> None:
    """Only with a schema of a single binary column messages are not JSON."""
    assert is_raw(StructType().add("value", "binary"))
    assert not is_raw(StructType().add("value", "string"))
    assert not is_raw(StructType().add("a", "binary").add("b", "binary"))


@pytest.mark.any_client
def test_small_numbers_are_what_they_were(spark: SparkSession) -> None:
    """The columns have the types that were asked for, however deep."""
    messages = [b'{"bt":-128,"bts":{"a":[{"x":127}]}}', b'{"id":1,"d":1}']
    ddl = "id long, bt byte, bts map<string, array<struct<x: byte>>>, d decimal(5,2)"
    contract = lenient(ddl)
    rows = rows_of(fit(spark, messages, contract), contract)
    assert rows.schema == StructType.fromDDL(ddl)
    assert [row.asDict(recursive=True) for row in rows.collect()] == [
        {"id": None, "bt": -128, "bts": {"a": [{"x": 127}]}, "d": None},
        {"id": 1, "bt": None, "bts": None, "d": Decimal("1.00")},
    ]


@pytest.mark.any_client
async def test_column_that_is_missing_is_no_null(spark: SparkSession) -> None:
    """It may be misspelt, so it does not fit unless nulls are allowed (issue 23)."""
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
    assert found[0][1].startswith("field 'mnth' is missing: it may be misspelt")
    assert await unfit(spark, messages, lenient(ddl)) == []


@pytest.mark.any_client
async def test_field_that_is_no_column_may_be_refused(spark: SparkSession) -> None:
    """Such fields are counted; their names, parts of the message, are not shown."""
    messages = [b'{"id":1}', b'{"id":1,"a":{"x":1},"b":null}', b'{"id":1,"id":2}']
    assert await unfit(spark, messages, Contract.of("id long")) == []
    found = await unfit(spark, messages, Contract.of("id long", extra="dead_letter"))
    assert found == [(1, "it has 2 fields that the schema does not have")]


@pytest.mark.any_client
def test_key_that_a_map_has_twice_counts_once(spark: SparkSession) -> None:
    """The last one, as for fields; ``from_json`` would keep both (issue 23)."""
    messages = [
        b'{"m":{"y":0,"x":1,"x":2,"z":3,"y":null}}',
        b'{"l":[{"x":{"a":1,"a":2},"x":{"b":1,"b":2}}]}',
    ]
    contract = lenient("m map<string,int>, l array<map<string,map<string,int>>>")
    rows = rows_of(fit(spark, messages, contract), contract)
    texts = rows.select(sf.to_json(sf.struct("*")).alias("text")).collect()
    assert [row["text"] for row in texts] == [
        '{"m":{"x":2,"z":3,"y":null}}',
        '{"l":[{"x":{"b":2}}]}',
    ]


@pytest.mark.any_client
def test_years_of_five_digits_are_times(spark: SparkSession) -> None:
    """Spark itself writes them, with a sign (issue 23)."""
    ddl = "d date, t timestamp, n timestamp_ntz"
    contract = Contract.of(ddl)
    written = (
        b'{"d":"+12020-01-01","t":"-0044-01-01T00:00:00Z","n":"+12020-01-01T00:00:00"}'
    )
    frame = fit(spark, [written], contract)
    assert frame.where("unfit").count() == 0
    texts = rows_of(frame, contract).select(sf.col("d").cast("string").alias("d"))
    assert [row["d"] for row in texts.collect()] == ["+12020-01-01"]
