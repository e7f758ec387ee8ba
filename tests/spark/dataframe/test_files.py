"""Files read without Spark give the same messages as with Spark (issue 23)."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from etlstage.files.sink import FileSink
from etlstage.files.source import FileSource
from etlstage.messages import Position
from etlstage.settings.ddl import spark_ddl
from etlstage.spark import DataFrameSink, Destination, read_frame
from etlstage.spark.dataframe.read import messages_of

pytestmark = pytest.mark.spark

HEADER = {"header": "true"}
RFC = {**HEADER, "escape": '"'}
CSV = [
    (b"id,name\n1,Ada\n2,\n,x\n\n   \n3\n4,a,\n", {}),
    (b"id,name\n1,Ada\n2,\n,x\n\n   \n3\n4,a,\n", HEADER),
    (
        b'id,name\n1,"a,b"\n2,""\n3,"say \\"hi\\""\n4,a"b\n5,"c:\\\\d\\e"\n6,a\\b\n',
        HEADER,
    ),
    (b'id,name\r\n1,"a,b"\r\n2," x "\r\n3,"say ""hi"""\r\n 4 ,a\r\n', RFC),
    (b"id;name\n1;\xc3\xa9\xf0\x9d\x84\x9e\n2;a\tb\n", {**HEADER, "sep": ";"}),
    (b"\xef\xbb\xbfid,name\n1,x", HEADER),
    (b"\tid\tname \n0\t1\tx\n", {**HEADER, "sep": "\t"}),
]
JSON = b"""\
{"b": 1, "a": "x", "s": {"z": 1, "y": null}, "l": [1, 2.5], "e": {}, "n": null}

{"b": 2.5, "a": "q\\"\\u001f\\n\xc3\xa9/", "s": {"z": 2, "x": "w"}, "l": [], "m": true}
{"b": 1e20, "a": null, "l": null, "m": [1,"x"]}
{"b": 0.0001, "a": "", "v": [[{"k": 1}], []]}
"""
TYPES = (
    "id bigint, i int, b tinyint, f float, d double, t string, o boolean, dt date,"
    " ts timestamp, n timestamp_ntz, de decimal(12,3), a array<int>,"
    " s struct<x: int, y: string>, m map<string, double>"
)
ROWS = [
    (
        b'{"id":1,"i":-5,"b":127,"f":0.1,"d":12345678.9,"t":"a\\"b","o":true,'
        b'"dt":"2020-02-29","ts":"2020-01-01T12:30:00.123456Z","n":"1999-12-31T23:59:59",'
        b'"de":"12.340","a":[1,null],"s":{"x":1,"y":null},"m":{"k":1e-5,"l":null}}'
    ),
    (
        b'{"id":2,"i":null,"b":null,"f":1e10,"d":1e7,"t":"","o":false,"dt":null,"ts":null,'
        b'"n":null,"de":-0.5,"a":[],"s":null,"m":{}}'
    ),
    (
        b'{"id":3,"i":0,"b":0,"f":3.0e-4,"d":0.001,"t":null,"o":null,"dt":"1969-01-01",'
        b'"ts":"1960-01-01T00:00:00Z","n":"2020-01-01T00:00:00.5","de":0,"a":null,"s":{},'
        b'"m":null}'
    ),
]


async def messages_in(path: Path, kind: str, **settings: object) -> list[bytes]:
    """Return the messages of files, read without Spark."""
    source = FileSource(str(path), kind, **settings)  # type: ignore[arg-type]
    return [m async for r in source.runs() if not isinstance(r, Position) for m in r]


def of_spark(spark: SparkSession, path: Path, kind: str, **more: object) -> list[bytes]:
    """Return the messages of the same files, read with Spark."""
    frame = read_frame(spark, format=kind, path=str(path), **more)  # type: ignore[arg-type]
    return [bytes(row["message"]) for row in messages_of(frame, None).collect()]


@pytest.mark.parametrize(("data", "options"), CSV)
@pytest.mark.any_client
async def test_csv(
    spark: SparkSession, tmp_path: Path, data: bytes, options: dict[str, str]
) -> None:
    """With quotes, escapes, blank lines, and rows that are too short or too long."""
    (tmp_path / "a.csv").write_bytes(data)
    found = await messages_in(tmp_path, "csv", options=options)
    assert found == of_spark(spark, tmp_path, "csv", options=options)


@pytest.mark.any_client
async def test_csv_with_a_schema(spark: SparkSession, tmp_path: Path) -> None:
    """Values have the types of the schema."""
    lines = "1,2,0.5,1e10,true,2020-01-01,x,1.5\n-7,,,1.0,FALSE,,,12.345\n"
    (tmp_path / "a.csv").write_text(lines)
    ddl = (
        "a long, b int, c float, d double, e boolean, f date, g string, h decimal(9,3)"
    )
    found = await messages_in(tmp_path, "csv", schema=ddl)
    assert found == of_spark(spark, tmp_path, "csv", schema=ddl)


@pytest.mark.any_client
async def test_text_with_a_schema(spark: SparkSession, tmp_path: Path) -> None:
    """Its only column, but for those of folders, has the declared name (issue 23)."""
    (tmp_path / "n=1").mkdir()
    (tmp_path / "n=1/a.txt").write_text("a\nb\n")
    for folder, ddl in (("n=1", "line string not null"), ("", "n string, line string")):
        path = tmp_path / folder
        found = await messages_in(path, "text", schema=ddl)
        assert found == of_spark(spark, path, "text", schema=ddl)


@pytest.mark.any_client
async def test_json(spark: SparkSession, tmp_path: Path) -> None:
    """Types are inferred as Spark infers them."""
    with gzip.open(tmp_path / "a.json.gz", "wb") as file:
        file.write(JSON)
    found = await messages_in(tmp_path, "json")
    assert found == of_spark(spark, tmp_path, "json")
    ddl = "a string, l array<double>, s struct<z: long, x: string>, q long"
    found = await messages_in(tmp_path, "ndjson", schema=ddl)
    assert found == of_spark(spark, tmp_path, "json", schema=ddl)
    ddl = "b string, s string, l string, e string, m string, v array<string>"
    (tmp_path / "b.json").write_text(
        '{"b": -0, "s": {"x": "\\u00e9", "x" :\t2 }, "e": { }, "v": [ [ 1 ], {} ]}\n'
    )
    found = await messages_in(tmp_path, "ndjson", schema=ddl)
    assert sorted(found) == sorted(of_spark(spark, tmp_path, "json", schema=ddl))


@pytest.mark.any_client
@pytest.mark.parametrize("pattern", ["[^a].txt", "{a,b.t{x,y}}*", "{a*,n=1/[!b].txt}"])
async def test_pattern(spark: SparkSession, tmp_path: Path, pattern: str) -> None:
    """It matches the same files (issue 23)."""
    (tmp_path / "n=1").mkdir()
    for name in ("a", "b", "c", "n=1/d"):
        (tmp_path / f"{name}.txt").write_text(name)
    found = await messages_in(tmp_path / pattern, "text")
    assert sorted(found) == sorted(of_spark(spark, tmp_path / pattern, "text"))


async def test_text(spark: SparkSession, tmp_path: Path) -> None:
    """Lines are bytes, whatever ends them; partitions become columns."""
    (tmp_path / "a.txt").write_bytes(b"a\r\nb\n\n\xff\rlast")
    found = await messages_in(tmp_path, "text")
    assert found == of_spark(spark, tmp_path, "text")
    for folder in (
        "n=1/d=2020-01-01/s=a%2Fb",
        "n=2/d=2020-01-02/s=__HIVE_DEFAULT_PARTITION__",
    ):
        (tmp_path / "by" / folder).mkdir(parents=True)
        (tmp_path / "by" / folder / "x.txt").write_text("l\n")
        (tmp_path / "by" / folder / "_x.txt").write_text("hidden\n")
    (tmp_path / "by" / "other").mkdir()
    found = await messages_in(tmp_path / "by", "text")
    assert sorted(found) == sorted(of_spark(spark, tmp_path / "by", "text"))


@pytest.mark.parametrize(
    ("kind", "text"), [("csv", "1,x\n"), ("json", '{"id":1,"s":"x","S":"y"}\n')]
)
async def test_declared_partitions(
    spark: SparkSession, tmp_path: Path, kind: str, text: str
) -> None:
    """Their columns are the last, wherever the schema has them (issue 23)."""
    folder = tmp_path / "q=1.50" / "Zip=007" / "d=2020-01-01" / "n=5"
    folder.mkdir(parents=True)
    (folder / "f").write_text(text)
    ddl = "q double, zip string, id long, d string, s string"
    found = await messages_in(tmp_path, kind, schema=ddl)
    assert found == of_spark(spark, tmp_path, kind, schema=ddl)


@pytest.mark.parametrize("kind", ["parquet", "json"])
async def test_names_in_another_case(
    spark: SparkSession, tmp_path: Path, kind: str
) -> None:
    """Parquet's match in any case, JSON's do not (issue 23)."""
    async with FileSink(tmp_path / "o", kind, schema="id long, Name string") as sink:
        await sink.write([b'{"id":1,"Name":"x"}'])
        await sink.finish()
    ddl = "ID long, name string, id2 long"
    found = await messages_in(tmp_path / "o", kind, schema=ddl)
    assert found == of_spark(spark, tmp_path / "o", kind, schema=ddl)
    assert (b'"x"' in found[0]) is (kind == "parquet")


@pytest.mark.parametrize("kind", ["parquet", "json"])
async def test_what_one_writes_the_other_reads(
    spark: SparkSession, tmp_path: Path, kind: str
) -> None:
    """With all types of a schema, in both directions (issue 23)."""
    async with FileSink(tmp_path / "ours", kind, schema=TYPES, missing="null") as sink:
        await sink.write(ROWS)
        await sink.finish()
    schema = {"schema": spark_ddl(TYPES) if kind == "json" else None}
    theirs = of_spark(spark, tmp_path / "ours", kind, **schema)
    ours = str(tmp_path / "ours")
    frame = read_frame(spark, format=kind, path=ours, schema=schema["schema"])
    assert await messages_in(tmp_path / "ours", kind, **schema) == theirs
    there = Destination(str(tmp_path / "theirs"), format=kind)
    there.write(frame.coalesce(1), first=True, last=True)
    again = await messages_in(tmp_path / "theirs", kind, **schema)
    assert again == theirs


@pytest.mark.parametrize("options", [HEADER, RFC])
@pytest.mark.any_client
async def test_csv_that_is_written(
    spark: SparkSession, tmp_path: Path, options: dict[str, str]
) -> None:
    """Spark reads back the written values, from partitions, too."""
    ddl = "id long, t string, d double, p string"
    rows = [
        b'{"id":1,"t":"a,\\"b\\"","d":1e-9,"p":"x/y"}',
        b'{"id":2,"t":"","d":null,"p":null}',
        b'{"id":3,"t":" \\\\ ","d":2,"p":"z"}',
    ]
    sink = FileSink(
        tmp_path / "o", "csv", schema=ddl, options=options, partition_by=["p"]
    )
    async with sink:
        await sink.write(rows)
        await sink.finish()
    found = await messages_in(tmp_path / "o", "csv", options=options)
    assert sorted(found) == sorted(
        of_spark(spark, tmp_path / "o", "csv", options=options)
    )
    assert b'{"id":"1","t":"a,\\"b\\"","d":"1.0E-9","p":"x/y"}' in found


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("decimal(20,10)", "1.000E-7"),
        ("timestamp_ntz", "2020-01-01T10:00:00.000000"),
        ("timestamp_ntz", "0001-01-01T00:00:00.120000"),
        ("timestamp", "2020-01-01T10:00:00.000000Z"),
        ("double", "1.0E-9"),
        ("boolean", "true"),
        ("date", "0001-01-01"),
    ],
)
@pytest.mark.any_client
async def test_folder_of_the_other_end(
    spark: SparkSession, tmp_path: Path, kind: str, text: str
) -> None:
    """Its text may differ, but the declared type has the same value (issue 23)."""
    ddl = f"id int, p {kind}"
    value = text if kind in ("boolean", "double") else f'"{text}"'
    row = f'{{"id":1,"p":{value}}}'
    (tmp_path / "in.json").write_text(row)
    (wanted,) = await messages_in(tmp_path / "in.json", "json", schema=ddl)
    sink = FileSink(tmp_path / "ours", "json", schema=ddl, partition_by=["p"])
    async with sink:
        await sink.write([row.encode()])
        await sink.finish()
    path = str(tmp_path / "in.json")
    frame = read_frame(spark, format="json", path=path, schema=spark_ddl(ddl))
    there = Destination(str(tmp_path / "theirs"), format="json", partition_by=["p"])
    there.write(frame, first=True, last=True)
    for out in ("ours", "theirs"):
        assert await messages_in(tmp_path / out, "json", schema=ddl) == [wanted]
        schema = spark_ddl(ddl)
        assert of_spark(spark, tmp_path / out, "json", schema=schema) == [wanted]


@pytest.mark.parametrize(
    ("ddl", "options"),
    [
        ("t string", {}),
        ("t string", HEADER),
        ("t string, u string", {}),
        ("t string, u string", {"sep": "\\t"}),
        ("t string, u string", {"delimiter": " "}),
    ],
)
@pytest.mark.any_client
async def test_csv_of_blanks_and_nulls(
    spark: SparkSession, tmp_path: Path, ddl: str, options: dict[str, str]
) -> None:
    """Both sinks keep the blanks of a value, and a row that has nothing else (issue 23)."""
    values = (" a ", None, "\u0001", "\t", " ", "b")
    rows: list[bytes] = [json.dumps({"t": value}).encode() for value in values]
    settings: dict[str, Any] = {"schema": ddl, "missing": "null"}
    there = Destination(str(tmp_path / "theirs"), format="csv", options=options)
    ours = tmp_path / "ours"
    for sink in (
        FileSink(ours, "csv", options=options, **settings),
        DataFrameSink(spark, there, **settings),
    ):
        async with sink:
            await sink.write(rows)
            await sink.finish()
    for path in (ours, tmp_path / "theirs"):
        reading: dict[str, Any] = {"schema": f"{ddl}, z int", "options": options}
        found = of_spark(spark, path, "csv", **reading)
        assert [json.loads(row)["t"] for row in found] == [*values]
        assert await messages_in(path, "csv", **reading) == found


@pytest.mark.parametrize(
    ("options", "rows", "wanted"),
    [
        ({"SEP": "\t", "quote": ""}, [(1, "a"), (2, None)], b"1\ta\n2\t\n"),
        ({"sep": "\t", "Quote": "\0"}, [(None, None)], b"\t\n"),
        ({"sep": "\t"}, [(1, None), (2, "a\tb")], b'1\t\n2\t"a\tb"\n'),
        ({"sep": "\t"}, [(1, "a"), (None, "\x01")], b'"1"\t"a"\n""\t"\x01"\n'),
        ({"sep": "\t", "nullValue": "\\N"}, [(None, None)], b"\\N\t\\N\n"),
        ({"sep": "\t", "emptyValue": ""}, [(1, "")], b"1\t\n"),
        ({"sep": "\t", "emptyValue": ""}, [(None, "")], b'""\t""\n'),
        ({"nullvalue": "NULL"}, [("a",), (None,)], b"a\nNULL\n"),
        ({"quote": ""}, [("a",)], b"a\n"),
    ],
)
@pytest.mark.any_client
async def test_csv_has_quotes_only_where_a_line_may_be_blank(
    spark: SparkSession,
    tmp_path: Path,
    options: dict[str, str],
    rows: list[tuple[object, ...]],
    wanted: bytes,
) -> None:
    """Nulls and values are as the options have them if no row needs more (issue 23)."""
    ddl = "`i.d` bigint, v string" if len(rows[0]) == 2 else "v string"
    frame = spark.createDataFrame(rows, ddl).coalesce(1)
    place = Destination(str(tmp_path / "o"), format="csv", options=options)
    place.write(frame, first=True, last=True)
    (file,) = (tmp_path / "o").glob("part-*")
    assert file.read_bytes() == wanted


@pytest.mark.any_client
async def test_csv_that_is_trimmed_as_set(spark: SparkSession, tmp_path: Path) -> None:
    """The options of Spark's writer come before what is set by default (issue 23)."""
    options = {"ignoreLeadingWhiteSpace": "true", "quoteAll": "false"}
    place = Destination(str(tmp_path / "o"), format="csv", options=options)
    async with DataFrameSink(spark, place, schema="t string") as sink:
        await sink.write([b'{"t":" a "}'])
        await sink.finish()
    (file,) = (tmp_path / "o").glob("part-*")
    assert file.read_bytes() == b"a \n"


@pytest.mark.any_client
async def test_bytes_in_the_name_of_a_folder(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Both sinks write Base64, of which no byte is lost (issue 23)."""
    ddl = "v int, p binary null"
    values = [b"abcd", b"\xff", bytes(range(150)), None]
    texts = [None if value is None else b64encode(value).decode() for value in values]
    rows = [json.dumps({"v": n, "p": text}).encode() for n, text in enumerate(texts)]
    for sink in (
        FileSink(tmp_path / "ours", "json", schema=ddl, partition_by=["p"]),
        DataFrameSink(
            spark,
            Destination(str(tmp_path / "theirs"), format="json", partition_by=["p"]),
            schema=ddl,
        ),
    ):
        async with sink:
            await sink.write(rows)
            await sink.finish()
    ours, theirs = (
        {folder.name for folder in (tmp_path / name).glob("p=*")}
        for name in ("ours", "theirs")
    )
    assert theirs == ours
    found = await messages_in(tmp_path / "theirs", "json", schema=ddl)
    assert sorted(map(json.loads, found), key=lambda row: row["v"]) == [
        {"v": n, "p": text} for n, text in enumerate(texts)
    ]
    frame = spark.read.schema("v int, p string").json(str(tmp_path / "theirs"))
    read = frame.orderBy("v").selectExpr("unbase64(p) p").collect()
    assert [row.p and bytes(row.p) for row in read] == values


@pytest.mark.any_client
async def test_hour_that_a_clock_repeats_in_the_name_of_a_folder(
    spark: SparkSession, tmp_path: Path
) -> None:
    """It has the offset, as with the sink of files (issue 23)."""
    ddl = "v int, p timestamp"
    rows = [b'{"v":%d,"p":"2020-10-25T0%d:30:00Z"}' % (n, n) for n in (0, 1)]
    place = Destination(str(tmp_path / "o"), format="json", partition_by=["p"])
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    try:
        async with DataFrameSink(spark, place, schema=ddl) as sink:
            await sink.write(rows)
            await sink.finish()
    finally:
        spark.conf.unset("spark.sql.session.timeZone")
    assert sorted(folder.name for folder in (tmp_path / "o").glob("p=*")) == [
        "p=2020-10-25T02%3A30%3A00.000000+01%3A00",
        "p=2020-10-25T02%3A30%3A00.000000+02%3A00",
    ]
    frame = spark.read.json(str(tmp_path / "o"), schema=ddl).orderBy("v")
    found = frame.selectExpr("unix_seconds(p) s").collect()
    assert [row.s for row in found] == [1603585800, 1603589400]
    messages = await messages_in(tmp_path / "o", "json", schema=ddl)
    moments = {
        m["v"]: datetime.fromisoformat(m["p"]) for m in map(json.loads, messages)
    }
    assert {v: moment.timestamp() for v, moment in moments.items()} == {
        0: 1603585800,
        1: 1603589400,
    }
