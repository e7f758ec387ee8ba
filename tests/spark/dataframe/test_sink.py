from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable
from errno import EACCES
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from pyspark.sql import DataFrame, SparkSession

from etlstage.errors import ConfigError, SinkFailed, StageError
from etlstage.files.find import NOWHERE
from etlstage.pipeline import DeadLetters
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.dead_letter.retry import Settled
from etlstage.pipeline.delivery.place import EpochFiles
from etlstage.pipeline.interfaces import Epochs, Sink
from etlstage.spark import DataFrameSink, Destination, Session
from etlstage.spark.dataframe import sink as sink_module
from etlstage.stage import ErrorBudget, ErrorPolicy
from tests.database import SQLite

pytestmark = pytest.mark.spark


def objects(count: int, start: int = 0) -> list[bytes]:
    """Return messages for the schema ``id long, title string``."""
    numbers = range(start, start + count)
    return [b'{"id":%d,"title":"t%d"}' % (n, n) for n in numbers]


async def load(sink: Sink, *runs: list[bytes]) -> None:
    """Load ``runs`` and finish."""
    async with sink:
        for run in runs:
            await sink.write(run)
        await sink.finish()


def there(path: Path) -> bool:
    """Return whether anything is at ``path``."""
    return path.exists()


def names(directory: Path, pattern: str) -> list[str]:
    """Return the sorted names that match ``pattern`` in ``directory``."""
    return sorted(path.name for path in directory.glob(pattern))


def marker(path: Path) -> bool:
    """Return whether the output is marked as complete."""
    return (path / "_SUCCESS").exists()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Give a path for output that does not exist yet."""
    return tmp_path / "out"


async def test_message_is_the_value(spark: SparkSession, out: Path) -> None:
    """Without a schema a message is the string value."""
    await load(
        DataFrameSink(spark, Destination(str(out))),
        [b"one", "é€𝄞\0\n".encode()],
        [b""],
    )
    frame = spark.read.parquet(str(out))
    assert frame.dtypes == [("value", "string")]
    assert sorted(row[0] for row in frame.collect()) == ["", "one", "é€𝄞\0\n"]


@pytest.mark.any_client
@pytest.mark.parametrize(
    ("schema", "options", "bad", "why"),
    [
        (None, {}, b"b\nc", "it has a line break at offset 1"),
        (None, {}, b"b\r\r\n", "it has a line break at offset 1"),
        (None, {"LINESEP": "xx"}, b"bx", "it has the lineSep at offset 1"),
        (
            "day string, v string",
            {},
            b'{"day":"m","v":"b\\nc"}',
            "field 'v' has a line break at offset 1",
        ),
    ],
)
async def test_line_break_does_not_make_two_rows_of_text(
    spark: SparkSession,
    out: Path,
    tmp_path: Path,
    schema: str | None,
    options: dict[str, str],
    bad: bytes,
    why: str,
) -> None:
    """It is dead-lettered; ``lineSep`` sets what counts as a line break."""
    letters = DeadLetters(tmp_path / "state", pipeline="p")
    by = ["day"] if schema else []
    sink = DataFrameSink(
        spark,
        Destination(str(out), format="text", options=options, partition_by=by),
        schema=schema,
        on_error=ErrorPolicy(then="dead_letter", budget=ErrorBudget()),
        dead_letters=letters,
    )
    good = b'{"day":"m","v":"a\\r"}' if schema else b"a\n" if options else b"a\r"
    await load(sink, [good, bad])
    (letter,) = letters.letters()
    assert letter.message == bad
    assert f": {why}, and would become two rows in format text; json" in str(letter)
    rows = spark.read.options(**options).text(str(out)).collect()
    assert [row["value"] for row in rows] == ["a\n" if options else "a"]


async def test_it_shows_which_epoch_it_writes(
    spark: SparkSession, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing may take long, without a count that moves (issue 11)."""
    sink = DataFrameSink(spark, Destination(str(out)), epoch_messages=1)
    said, write = [], Destination.write

    def noted(to: Destination, frame: DataFrame, *, first: bool, last: bool) -> None:
        said.append(sink.activity)
        write(to, frame, first=first, last=last)

    monkeypatch.setattr(Destination, "write", noted)
    await load(sink, [b"one", b"two"])
    assert [*said, sink.activity] == ["writing epoch 1", "writing epoch 2", ""]


async def test_schema_makes_columns(spark: SparkSession, out: Path) -> None:
    """With a schema a message is a JSON object, and a row of typed columns."""
    sink = DataFrameSink(
        spark,
        Destination(str(out)),
        schema="id long null, `a.b` array<int> null, title string",
        missing="null",
    )
    await load(sink, [b'{"title":"x","a.b":[1,2]}', b'{"id":7}'])
    frame = spark.read.parquet(str(out))
    assert frame.dtypes == [
        ("id", "bigint"),
        ("a.b", "array<int>"),
        ("title", "string"),
    ]
    rows = [tuple(row) for row in frame.orderBy("id").collect()]
    assert rows == [(None, [1, 2], "x"), (7, None, None)]


@pytest.mark.any_client
async def test_misspelt_column_is_no_column_of_nulls(
    spark: SparkSession, out: Path, tmp_path: Path
) -> None:
    """Messages without the column do not fit (issue 23)."""
    letters = DeadLetters(tmp_path / "state", pipeline="p")
    sink = DataFrameSink(
        spark,
        Destination(str(out)),
        schema="id long, mnth string, title string null",
        dead_letters=letters,
    )
    await load(sink, [b'{"id":1,"month":"May"}', b'{"id":2,"mnth":null}'])
    assert (sink.account.done, sink.account.dead) == (1, 1)
    assert "field 'mnth' is missing" in next(x.error for x in letters.letters())
    assert sink.landed() == (
        f"wrote 1 message in 1 epoch to {out}; output complete;"
        " columns mnth, title are null in all rows loaded (1)"
    )


@pytest.mark.parametrize("mode", ["overwrite", "append"])
@pytest.mark.any_client
async def test_letters_of_overwritten_output_are_superseded(
    spark: SparkSession, out: Path, tmp_path: Path, mode: str
) -> None:
    """Their messages may be in the new output (issue 23)."""
    letters = [DeadLetters(tmp_path / "state", pipeline="p") for _ in range(2)]
    for mine in letters:
        place = Destination(str(out), mode=mode)
        sink = DataFrameSink(spark, place, epoch_messages=1, dead_letters=mine)
        await load(sink, [b"one", b"\xff", b"two"])
    settled = Settled(letters[0].folder)
    left = [x for x in settled.letters("load") if isinstance(x, DeadLetter)]
    found = [(x.run, settled.superseded(x)) for x in left]
    again = mode == "overwrite"
    assert found == [(letters[0].run, again), (letters[1].run, False)]
    for mine in letters:
        mine.close()


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.any_client
async def test_mark_is_kept_as_it_is(
    spark: SparkSession, out: Path, *, marked: bool
) -> None:
    """A retry adds rows to output that is complete or is not (issue 23)."""
    await load(DataFrameSink(spark, Destination(str(out))), [b"one"])
    if not marked:
        (out / "_SUCCESS").unlink()
    sink = DataFrameSink(spark, Destination(str(out), mode="append"))
    sink.keeps_mark = True
    await load(sink, [b"two"])
    assert (out / "_SUCCESS").exists() is marked
    assert spark.read.parquet(str(out)).count() == 2


@pytest.mark.parametrize("messages", [[b"\xff"], [b"\xff", b"\xff"]])
@pytest.mark.any_client
async def test_letters_of_output_overwritten_with_nothing_are_current(
    spark: SparkSession, out: Path, tmp_path: Path, messages: list[bytes]
) -> None:
    """A run whose messages are all dead-lettered replaces the output, too."""
    await load(DataFrameSink(spark, Destination(str(out))), [b"old"])
    letters = DeadLetters(tmp_path / "state", pipeline="p")
    place = Destination(str(out), mode="overwrite")
    sink = DataFrameSink(
        spark,
        place,
        epoch_messages=1,
        on_error=ErrorPolicy(budget=ErrorBudget(count=9, share=None)),
        dead_letters=letters,
    )
    await load(sink, messages)
    settled = Settled(letters.folder)
    left = [x for x in settled.letters("load") if isinstance(x, DeadLetter)]
    assert [settled.superseded(x) for x in left] == [False] * len(messages)
    assert spark.read.parquet(str(out)).count() == 0
    letters.close()


@pytest.mark.any_client
async def test_batch_in_a_folder_of_its_own_supersedes_no_letters(
    spark: SparkSession, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where files can't be renamed, a batch replaces only its own output."""
    monkeypatch.setattr(Destination, "local", property(lambda _: None))
    letters = DeadLetters(tmp_path / "state", pipeline="p")
    whole = DataFrameSink(spark, Destination(str(out), mode="append"))
    for done in range(2):
        mine = letters.of_run(f"1-{done + 1}")
        epochs = Epochs("1", done, once=False, check=lambda: None)
        await load(whole.of_batch(spark, epochs, mine), [b"one", b"\xff"])
        mine.close()
    settled = Settled(letters.folder)
    left = [x for x in settled.letters("load") if isinstance(x, DeadLetter)]
    assert [(x.run, settled.superseded(x)) for x in left] == [
        ("1-1", False),
        ("1-2", False),
    ]


@pytest.mark.any_client
async def test_column_of_nulls_is_reported_at_the_end(
    spark: SparkSession, out: Path
) -> None:
    """A column with a value in any epoch is not reported (issue 23)."""
    sink = DataFrameSink(
        spark, Destination(str(out)), schema="a long, b long, c long", epoch_messages=1
    )
    await load(sink, [b'{"a":1,"b":null,"c":null}', b'{"a":null,"b":1,"c":null}'])
    assert sink.landed().endswith(
        "output complete; column c is null in all rows loaded (2)"
    )


@pytest.mark.any_client
async def test_binary_column_keeps_bytes(spark: SparkSession, out: Path) -> None:
    """A schema of one binary column takes any bytes."""
    payloads = [b"\xff\0\n", b"", b"{}"]
    await load(
        DataFrameSink(spark, Destination(str(out)), schema="raw binary"), payloads
    )
    found = [bytes(row.raw) for row in spark.read.parquet(str(out)).collect()]
    assert sorted(found) == sorted(payloads)


@pytest.mark.parametrize("schema", [None, "id long, title string", "value binary"])
@pytest.mark.any_client
async def test_no_message_gives_readable_output(
    spark: SparkSession, out: Path, schema: str | None
) -> None:
    """Zero messages still leave a schema and the marker."""
    await load(DataFrameSink(spark, Destination(str(out)), schema=schema))
    frame = spark.read.parquet(str(out))
    assert frame.count() == 0
    assert frame.columns == (
        ["id", "title"] if schema == "id long, title string" else ["value"]
    )
    assert marker(out)


@pytest.mark.any_client
async def test_epoch_is_bounded_in_messages(spark: SparkSession, out: Path) -> None:
    """A full epoch is loaded when more comes; the last one marks the output."""
    async with DataFrameSink(spark, Destination(str(out)), epoch_messages=3) as sink:
        await sink.write([b"1", b"2"])
        assert (sink.account.received, sink.account.done, there(out)) == (2, 0, False)
        await sink.write([b"3", b"4", b"5", b"6", b"7"])
        assert (sink.account.received, sink.account.done, sink.epochs) == (7, 5, 2)
        assert not marker(out)
        assert sink.landed() == (
            f"wrote 5 messages in 2 epochs to {out}; output incomplete;"
            " 2 messages not loaded"
        )
        await sink.finish()
        assert (sink.account.done, sink.epochs, marker(out)) == (7, 3, True)
        assert sink.landed() == (
            f"wrote 7 messages in 3 epochs to {out}; output complete"
        )
    values = [row.value for row in spark.read.parquet(str(out)).collect()]
    assert sorted(values) == list("1234567")


@pytest.mark.any_client
async def test_epoch_is_bounded_in_bytes(spark: SparkSession, out: Path) -> None:
    """An epoch takes no run that would make it too big."""
    async with DataFrameSink(spark, Destination(str(out)), epoch_bytes=100) as sink:
        for _ in range(3):
            await sink.write([b"x" * 40])
        assert (sink.account.done, sink.epochs) == (2, 1)


async def test_flush_makes_durable_without_marking(
    spark: SparkSession, out: Path
) -> None:
    """Flushed messages can be read, but the output is not marked complete."""
    async with DataFrameSink(spark, Destination(str(out))) as sink:
        await sink.flush()
        assert not there(out)
        await sink.write([b"1"])
        await sink.flush()
        assert (sink.account.done, marker(out)) == (1, False)
        await sink.finish()
        await sink.finish()
        assert marker(out)
    assert spark.read.parquet(str(out)).count() == 1


@pytest.mark.any_client
async def test_closing_without_finishing_leaves_no_mark(
    spark: SparkSession, out: Path
) -> None:
    """A run that ends early is incomplete."""
    async with DataFrameSink(spark, Destination(str(out)), epoch_messages=1) as sink:
        await sink.write([b"1", b"2"])
    assert (sink.account.done, marker(out)) == (1, False)
    await sink.aclose()


@pytest.mark.parametrize("mode", ["append", "overwrite"])
@pytest.mark.any_client
async def test_stale_marker_is_removed_first(
    spark: SparkSession, out: Path, mode: str
) -> None:
    """An older run's marker must not vouch for part of a new output."""
    await load(DataFrameSink(spark, Destination(str(out))), [b"old"])
    async with DataFrameSink(
        spark, Destination(f"file:{out}", mode=mode), epoch_messages=1
    ) as sink:
        assert marker(out)
        await sink.write([b"1", b"2"])
        assert not marker(out)
    values = sorted(row.value for row in spark.read.parquet(str(out)).collect())
    assert values == (["1"] if mode == "overwrite" else ["1", "old"])


async def test_later_epochs_append(spark: SparkSession, out: Path) -> None:
    """Mode overwrite replaces what was there, not what this run wrote."""
    for _ in range(2):
        sink = DataFrameSink(
            spark, Destination(str(out), mode="overwrite"), epoch_messages=1
        )
        await load(sink, [b"1", b"2", b"3"])
    assert spark.read.parquet(str(out)).count() == 3


@pytest.mark.any_client
async def test_message_that_does_not_fit_keeps_its_epoch_out(
    spark: SparkSession, out: Path
) -> None:
    """They are counted and reported, and nothing of their epoch is loaded."""
    sink = DataFrameSink(
        spark,
        Destination(str(out)),
        schema="id long, title string",
        epoch_messages=10,
    )
    bad = [*objects(4, 10), b'{"id":"secret"}', b"", *objects(4)]
    with pytest.raises(SinkFailed) as failure:
        await load(sink, objects(10), bad)
    assert str(failure.value) == (
        "load: 2 of 10 messages do not fit the schema 'id long, title string': "
        "message 15 is the first, field 'id' is a string that is not of type bigint; "
        "nothing of epoch 2 is loaded"
    )
    assert sink.account.counts[:4] == [20, 10, 0, 2]
    assert spark.read.parquet(str(out)).count() == 10
    assert not marker(out)


@pytest.mark.any_client
async def test_what_does_not_fit_at_first_leaves_old_output_alone(
    spark: SparkSession, out: Path
) -> None:
    """An epoch that is refused overwrites nothing."""
    await load(DataFrameSink(spark, Destination(str(out))), [b"old"])
    with pytest.raises(SinkFailed, match="message 1 is the first, it is not UTF-8 at"):
        await load(
            DataFrameSink(spark, Destination(str(out), mode="overwrite")),
            [b"\xff"],
        )
    assert [row.value for row in spark.read.parquet(str(out)).collect()] == ["old"]
    assert marker(out)


@pytest.mark.any_client
async def test_failed_sink_stays_failed(spark: SparkSession, out: Path) -> None:
    """After a failure nothing is written or marked any more."""
    sink = DataFrameSink(spark, Destination(str(out)))
    await sink.write([b"\xff"])
    for call in (sink.flush, sink.finish, sink.flush):
        with pytest.raises(SinkFailed, match="of 1 message does not fit the schema"):
            await call()
    assert sink.account.failed == 1
    assert sink.landed() == f"nothing was written to {out}; 1 message not loaded"
    assert not there(out)


async def refusal(sink: Sink, *runs: list[bytes]) -> str:
    """Return the one-line error with which ``sink`` fails."""
    with pytest.raises(SinkFailed) as failure:
        await load(sink, *runs)
    text = str(failure.value)
    assert "\n" not in text
    return text


async def test_existing_path_is_reported_before_work_is_lost(
    spark: SparkSession, out: Path
) -> None:
    """Mode error checks the path before the first message."""
    sink = DataFrameSink(spark, Destination(str(out.parent)))
    assert await refusal(sink) == (
        f"load: {out.parent} exists already: remove it, or set mode to append or overwrite"
    )
    assert sink.account.received == 0


@pytest.mark.parametrize("here", [True, False])
async def test_load_that_continues_elsewhere_replaces_nothing(
    spark: SparkSession, out: Path, monkeypatch: pytest.MonkeyPatch, *, here: bool
) -> None:
    """Neither on this machine nor on another one (issue 23)."""
    if not here:
        monkeypatch.setattr(Destination, "local", property(lambda _: None))
    epochs = Epochs("ab", 3, once=False, check=lambda: None, moved_from="parquet a")
    for mode in ("overwrite", "append"):
        sink = DataFrameSink(spark, Destination(str(out), mode=mode))
        sink.begin(epochs)
        await load(sink, [b"1"])
        sink = DataFrameSink(spark, Destination(str(out), mode="overwrite"))
        sink.begin(epochs)
        assert await refusal(sink) == (
            f"load: {out} exists already, and nothing is replaced there, as the load"
            " continues from parquet a: set mode to append, or another output"
        )
    assert spark.read.parquet(str(out)).count() == 2


async def test_load_that_continues_in_a_catalog_table(spark: SparkSession) -> None:
    """Without rows it is taken as one that is missing (issue 23)."""
    table = "sink_continued"
    epochs = Epochs("ab", 3, once=False, check=lambda: None, moved_from="table a")
    spark.sql(f"create table {table} (value string) using parquet")
    try:
        sink = DataFrameSink(spark, Destination(table=table, mode="error"))
        sink.begin(epochs)
        await load(sink, [b"1"])
        sink = DataFrameSink(spark, Destination(table=table, mode="overwrite"))
        sink.begin(epochs)
        assert "exists already, and nothing is replaced there" in await refusal(sink)
        assert spark.table(table).count() == 1
    finally:
        spark.sql(f"drop table {table}")


def test_stream_that_continues_where_nothing_can_be_looked_at(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its load stage reports the folder that can't be read (issue 23)."""

    def refuse(path: Path) -> list[str]:
        raise PermissionError(EACCES, "Permission denied", str(path))

    out.mkdir()
    monkeypatch.setattr(os, "listdir", refuse)
    sink = DataFrameSink(Session(), Destination(str(out)))
    with pytest.raises(SinkFailed) as caught:
        sink.objection(moved_from="parquet a")
    assert str(caught.value) == (
        f"load: can't read from {out}: [Errno 13] Permission denied: '{out}'"
    )
    assert caught.value.stage == "load"


def test_stream_is_refused_for_a_table_of_a_database(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Mode error holds for it over any client (issue 23)."""
    base = SQLite(tmp_path / "base.db")
    place = Destination(format="jdbc", options={**base.options, "dbtable": "rows"})
    assert DataFrameSink(spark, place).objection() is None
    base.ask("create table rows (value text)")
    assert DataFrameSink(spark, place).objection() == (
        "table rows of a database exists already: drop it, or set mode to append or"
        " overwrite"
    )


def test_stream_is_refused_for_output_elsewhere(
    spark: SparkSession, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mode error holds for a path on another machine, too (issue 23)."""
    monkeypatch.setattr(Destination, "local", property(lambda _: None))
    places = [Destination(str(out)), Destination(options={"path": str(out)})]
    assert [DataFrameSink(spark, place).objection() for place in places] == [None] * 2
    out.mkdir()
    exists = "exists already: remove it, or set mode to append or overwrite"
    assert [DataFrameSink(spark, place).objection() for place in places] == [
        f"{out} {exists}",
        f"a parquet destination {exists}",
    ]
    for mode in ("append", "overwrite"):
        assert (
            DataFrameSink(spark, Destination(str(out), mode=mode)).objection() is None
        )


@pytest.mark.any_client
def test_place_that_spark_can_not_look_at(spark: SparkSession) -> None:
    """It is an error, except for formats that look there themselves (issue 23)."""
    objection = DataFrameSink(spark, Destination("far://host/out")).objection()
    assert objection is not None
    assert objection.startswith("can't find out whether far://host/out exists: ")
    assert 'FileSystem for scheme "far"' in objection
    for place in (
        Destination("far://host/out", format="own"),
        Destination(format="own"),
    ):
        assert DataFrameSink(spark, place).objection() is None


async def test_wrong_schema_is_reported_at_once(spark: SparkSession) -> None:
    """A schema that can't be used is reported before the first message (issue 23)."""
    sink = DataFrameSink(spark, Destination("/x"), schema="id lng")
    assert await refusal(sink) == (
        "load: schema 'id lng': unknown type 'lng' at character 4 (did you mean 'long'?)"
    )
    sink = DataFrameSink(spark, Destination("/x"), schema="`_Etlstage_unfit` int")
    assert await refusal(sink) == (
        "load: schema: column '_Etlstage_unfit' has a reserved name: rename it"
    )
    sink = DataFrameSink(spark, Destination("/x"), schema="id varchar(3)")
    assert "char/varchar" in await refusal(sink)


async def test_unknown_partition_column_is_reported(spark: SparkSession) -> None:
    """The error names the column and those that exist."""
    sink = DataFrameSink(
        spark, Destination("/x", partition_by=["dya"]), schema="id long, day date"
    )
    assert await refusal(sink) == (
        "load: can't partition by dya: the columns are id, day"
    )


@pytest.mark.any_client
async def test_partitions_become_directories(spark: SparkSession, out: Path) -> None:
    """Spark's own partitioning is used, epoch after epoch."""
    sink = DataFrameSink(
        spark,
        Destination(str(out), partition_by=["day"]),
        schema="id long, day string",
        epoch_messages=2,
    )
    await load(sink, [b'{"id":%d,"day":"d%d"}' % (n, n % 2) for n in range(6)])
    assert names(out, "day=*") == ["day=d0", "day=d1"]
    assert spark.read.parquet(str(out)).where("day = 'd1'").count() == 3
    assert marker(out)


@pytest.mark.any_client
async def test_value_that_can_be_no_folder_is_dead_lettered(
    spark: SparkSession, out: Path, tmp_path: Path
) -> None:
    """Its row alone is not loaded; escapes count as in the name (issue 23)."""
    letters = DeadLetters(tmp_path / "state", pipeline="p")
    sink = DataFrameSink(
        spark,
        Destination(str(out), partition_by=["k"]),
        schema="id long, k string",
        on_error=ErrorPolicy(budget=ErrorBudget(count=9, share=None)),
        dead_letters=letters,
    )
    values = ["x" * 253, "x" * 254, "é" * 127, ":" * 84 + "x", ":" * 85, None, NOWHERE]
    messages = [json.dumps({"id": n, "k": k}).encode() for n, k in enumerate(values)]
    await load(sink, [*messages, b'{"id":"x","k":"a"}'])
    letters.close()
    kept = spark.read.parquet(str(out)).select("id").collect()
    assert sorted(row.id for row in kept) == [0, 3, 5]
    flaws = [x.error.partition("string': ")[2] for x in letters.letters()]
    assert flaws == [
        *(
            f"field 'k' makes a folder name of {size} bytes, expected no more than 255:"
            " shorten it, or take k out of partition_by"
            for size in (256, 256, 257)
        ),
        (
            "field 'k' has the text that is null in a folder's name: replace it, or"
            " take k out of partition_by"
        ),
        "field 'id' is a string that is not of type bigint",
    ]


async def test_nul_can_be_in_no_folder(
    spark: SparkSession, out: Path, tmp_path: Path
) -> None:
    """A message with one is dead-lettered, and does not end the run (issue 23)."""
    letters, policy = kept(tmp_path, 1)
    sink = DataFrameSink(
        spark,
        Destination(str(out), partition_by=["k"]),
        schema="id long, k string",
        on_error=policy,
        dead_letters=letters,
    )
    await load(sink, [b'{"id":1,"k":"a\\u0000b"}', b'{"id":2,"k":"c"}'])
    assert names(out, "k=*") == ["k=c"]
    (letter,) = letters.letters()
    assert letter.error.endswith(
        "field 'k' has a NUL at offset 1, which no folder can have in its name: replace"
        " it, or take k out of partition_by"
    )
    letters.close()


async def test_empty_folder_is_null_where_that_is_allowed(
    spark: SparkSession, out: Path, tmp_path: Path
) -> None:
    """If the column is NOT NULL, the message is dead-lettered (issue 23)."""
    letters, policy = kept(tmp_path, 2)
    sink = DataFrameSink(
        spark,
        Destination(str(out), partition_by=["j", "k"]),
        schema="id long, j string, k string not null",
        on_error=policy,
        dead_letters=letters,
    )
    pairs = [("", "a"), ("a", ""), ("a", None)]
    await load(sink, [json.dumps({"id": 1, "j": j, "k": k}).encode() for j, k in pairs])
    assert names(out, "*/*") == ["k=a"]
    assert [letter.error.rpartition("null': ")[2] for letter in letters.letters()] == [
        (
            "field 'k' is NOT NULL, and empty, which is null in a folder's name: replace"
            " it, or take k out of partition_by"
        ),
        "field 'k' is NOT NULL and has no value",
    ]
    letters.close()


async def test_format_and_options_are_sparks(spark: SparkSession, out: Path) -> None:
    """Any format with its options can be written."""
    sink = DataFrameSink(
        spark,
        Destination(format="json", path=str(out), options={"compression": "gzip"}),
    )
    await load(sink, [b"x"])
    assert len(names(out, "*.json.gz")) == 1
    assert [json.loads(row[0]) for row in spark.read.text(str(out)).collect()] == [
        {"value": "x"}
    ]


@pytest.mark.classic
async def test_path_that_can_not_be_made_is_reported_at_first(
    spark: SparkSession,
) -> None:
    """Before the first message, naming the folder that is to blame (issue 23)."""
    sink = DataFrameSink(spark, Destination("/proc/no/x"))
    assert await refusal(sink) == (
        "load: can't create /proc/no/x: /proc: no such file or directory; set another path"
    )


@pytest.mark.any_client
async def test_output_is_one_runs(spark: SparkSession, out: Path) -> None:
    """Of two runs at a time, one would remove the other's files (issue 23)."""
    place = Destination(str(out), mode="append")
    async with DataFrameSink(spark, place) as first:
        text = await refusal(
            DataFrameSink(spark, Destination(f"file:{out}", mode="append"))
        )
        assert text.startswith(
            f"load: another run writes to {out} (pid {os.getpid()} on"
        )
        await first.finish()
    await load(DataFrameSink(spark, place), [b"x"])


async def test_unknown_format_is_reported(spark: SparkSession, out: Path) -> None:
    """The error names the format."""
    text = await refusal(
        DataFrameSink(spark, Destination(str(out), format="nofmt")), [b"1"]
    )
    assert text == (
        "load: there is no format 'nofmt': a format that is not built into Spark needs its"
        " package in spark.jars.packages"
    )
    text = await refusal(DataFrameSink(spark, Destination(str(out), format="parket")))
    assert "there is no format 'parket' (did you mean 'parquet'?)" in text


async def test_table_is_appended_to(spark: SparkSession) -> None:
    """A table takes rows of its schema, and refuses others."""
    name = "sink_table"
    try:
        sink = DataFrameSink(
            spark, Destination(table=name), schema="id long", epoch_messages=1
        )
        await load(sink, [b'{"id":1}', b'{"id":2}'])
        assert sink.landed().startswith("wrote 2 messages in 2 epochs to table")
        more = DataFrameSink(
            spark, Destination(table=name, mode="append"), schema="id long"
        )
        await load(more, [b'{"id":3}'])
        assert sorted(row.id for row in spark.table(name).collect()) == [1, 2, 3]
        other = DataFrameSink(spark, Destination(table=name, mode="append"))
        text = await refusal(other, [b"x"])
        assert text.startswith("load: can't write epoch 1 to table sink_table: ")
        assert "id" in text
        again = DataFrameSink(spark, Destination(table=name))
        assert "already exists" in await refusal(again, [b"x"])
    finally:
        spark.sql(f"drop table if exists {name}")


def test_mode_ignore_is_refused() -> None:
    """Silently dropping everything is not loading."""
    with pytest.raises(
        ConfigError, match="mode 'ignore' is refused: it would silently"
    ):
        Destination("/x", mode="ignore")
    with pytest.raises(ConfigError, match="unknown mode 'apend', expected append"):
        Destination("/x", mode="apend")


async def test_event_loop_goes_on_while_spark_writes(
    spark: SparkSession, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark writes in a thread, so that other tasks can run."""
    alive = threading.Event()

    def write(self: Destination, frame: object, **which: bool) -> None:
        assert alive.wait(60)

    monkeypatch.setattr(Destination, "write", write)

    async def live() -> None:
        alive.set()

    sink = DataFrameSink(spark, Destination(str(out)))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(load, sink, [b"1"])
        tasks.start_soon(live)
    assert sink.account.done == 1


async def test_cancelled_write_is_not_counted(
    spark: SparkSession,
    wait_for_jobs: Callable[[bool], None],
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cancelling interrupts Spark's job; the sink counts only what is in place."""

    def endless(self: Destination, frame: object, **which: bool) -> None:
        # Spark can stop a task in Python; one that only computes in the JVM may go on.
        spark.range(10**15).mapInArrow(lambda batches: batches, "id long").count()

    monkeypatch.setattr(Destination, "write", endless)
    sink = DataFrameSink(spark, Destination(str(out)))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(load, sink, [b"1"])
        await anyio.to_thread.run_sync(wait_for_jobs, True)
        tasks.cancel_scope.cancel()
    wait_for_jobs(False)
    assert sink.account.done == 0
    with pytest.raises(SinkFailed, match="the epoch under way was interrupted"):
        await sink.flush()
    assert spark.range(10, numPartitions=2).count() == 10


def kept(tmp_path: Path, count: int) -> tuple[DeadLetters, ErrorPolicy]:
    """Return a store for dead letters and a policy that allows ``count``."""
    policy = ErrorPolicy(budget=ErrorBudget(count=count, share=None))
    return DeadLetters(tmp_path / "state", pipeline="p"), policy


async def test_what_does_not_fit_is_dead_lettered(
    spark: SparkSession, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of their epoch is loaded; many are dead-lettered in several turns."""
    monkeypatch.setattr(sink_module, "_AT_ONCE", 2)
    letters, policy = kept(tmp_path, 9)
    sink = DataFrameSink(
        spark,
        Destination(str(out), options={"compression": "gzip"}),
        schema="id long, title string",
        epoch_messages=10,
        on_error=policy,
        dead_letters=letters,
    )
    bad = [b"", *objects(4, 10), b'{"id":"secret"}', b"\xff", *objects(2, 14), b"[]"]
    await load(sink, objects(10), bad, [b"{", b"1"])
    assert sink.account.counts[:4] == [22, 16, 6, 0]
    rows = spark.read.parquet(str(out)).collect()
    assert sorted(row.id for row in rows) == list(range(16))
    assert marker(out)
    found = [(x.place, x.message, x.kind, x.error) for x in letters.letters()]
    wrong = "does not fit the schema 'id long, title string'"
    assert [row[:3] for row in found] == [
        (10, b"", "SinkFailed"),
        (15, b'{"id":"secret"}', "SinkFailed"),
        (16, b"\xff", "SinkFailed"),
        (19, b"[]", "SinkFailed"),
        (20, b"{", "SinkFailed"),
        (21, b"1", "SinkFailed"),
    ]
    assert found[1][3] == (
        f"load: message 16 {wrong}: field 'id' is a string that is not of type bigint"
    )
    assert found[2][3] == f"load: message 17 {wrong}: it is not UTF-8 at offset 0"
    (letter, *_) = letters.letters()
    assert letter.config["options"] == ["compression"]
    letters.close()


async def test_time_that_python_lacks_is_dead_lettered(
    spark: SparkSession, out: Path, tmp_path: Path
) -> None:
    """Spark has more years; a message with one may be unfit, or fit (issue 23)."""
    letters, policy = kept(tmp_path, 9)
    sink = DataFrameSink(
        spark,
        Destination(str(out)),
        schema="id long, d date null, t timestamp null, l array<timestamp_ntz> null",
        on_error=policy,
        dead_letters=letters,
    )
    values = [
        b'"d":"+12000-01-01"',
        b'"d":"0000-06-01"',
        b'"t":"0001-01-01T00:00:00Z"',
        b'"t":"9999-12-31T23:59:59-12:00"',
        b'"l":["-0044-03-15T00:00:00"]',
    ]
    bad = [b'{"id":"x",%b}' % value for value in values]
    good = [b'{"id":%d,%b}' % (n, value) for n, value in enumerate(values)]
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        await load(sink, [*bad, *good])
    finally:
        spark.conf.unset("spark.sql.session.timeZone")
    wrong = "field 'id' is a string that is not of type bigint"
    found = [(x.message, x.error.rpartition(": ")[2]) for x in letters.letters()]
    assert found == [(message, wrong) for message in bad]
    rows = spark.read.parquet(str(out)).orderBy("id")
    texts = rows.selectExpr("id", "string(d) d", "unix_seconds(t) t", "string(l) l")
    assert [tuple(row) for row in texts.collect()] == [
        (0, "+12000-01-01", None, None),
        (1, "0000-06-01", None, None),
        (2, None, -62135596800, None),
        (3, None, 253402343999, None),
        (4, None, None, "[-0044-03-15 00:00:00]"),
    ]
    letters.close()


@pytest.mark.any_client
async def test_text_that_is_none_is_dead_lettered(
    spark: SparkSession, out: Path, tmp_path: Path
) -> None:
    """Even if an epoch has nothing else: the output is there, and complete."""
    letters, policy = kept(tmp_path, 3)
    sink = DataFrameSink(
        spark,
        Destination(str(out)),
        on_error=policy,
        dead_letters=letters,
        epoch_messages=2,
    )
    await load(sink, [b"\xff", b"\xfe"], [b"a", b"\xfd"])
    assert (sink.account.done, sink.account.dead) == (1, 3)
    assert [row.value for row in spark.read.parquet(str(out)).collect()] == ["a"]
    assert marker(out)
    assert [x.place for x in letters.letters()] == [0, 1, 3]
    letters.close()


@pytest.mark.any_client
async def test_too_many_that_do_not_fit_end_the_run(
    spark: SparkSession, out: Path, tmp_path: Path
) -> None:
    """Nothing of the epoch is loaded; dead letters are kept."""
    letters, policy = kept(tmp_path, 1)
    sink = DataFrameSink(
        spark, Destination(str(out)), on_error=policy, dead_letters=letters
    )
    with pytest.raises(StageError, match=r"load: 2 of 4 messages .*allows 1 message"):
        await load(sink, [b"\xff", b"a", b"\xfe", b"\xfd"])
    assert (sink.account.done, sink.account.dead, letters.count) == (0, 2, 2)
    assert not there(out)
    letters.close()


# --- epochs that are loaded once ------------------------------------------------------


@pytest.mark.parametrize("mode", ["error", "overwrite"])
async def test_epochs_are_loaded_once(
    spark: SparkSession, out: Path, mode: str
) -> None:
    """Interrupted starts leave nothing; the mode is for the first epoch (issue 14)."""
    if mode == "overwrite":
        out.mkdir()  # noqa: ASYNC240
        (out / "old").touch()
    known = Epochs("ab12", 0, once=True, check=lambda: None)
    for done, runs in (0, "ab"), (1, "xc"), (1, "yz"):
        sink = DataFrameSink(
            spark, Destination(str(out), mode=mode), epoch_messages=1, name="load"
        )
        sink.begin(known._replace(done=done))
        async with sink:
            for run in runs:
                await sink.write([run.encode(), b"-"])
                if run != "z":
                    await sink.flush()
                if run == "a":
                    assert values(spark, out) == []
                    await sink.perform()  # b is not on record, y not shown at once
            if run == "z":
                assert sink.account.done == 2
                await sink.finish()
                assert sink.account.done == 4
    shown = EpochFiles(out, "ab12")
    assert not shown.others()
    known = known._replace(done=3, ended=True)
    assert values(spark, out) == ["-", "a"]
    sink = DataFrameSink(spark, Destination(str(out), mode=mode), name="load")
    sink.begin(known)
    async with sink:
        pass
    names = sorted(path.name for path in out.iterdir())  # noqa: ASYNC240
    form = re.compile(r"part-ab12-(\d)-\d{5}-.*\.parquet|_SUCCESS")
    found = [form.fullmatch(name) for name in names]
    assert {match[1] for match in found if match} == {"1", "2", "3", None}
    assert all(found)
    frame = spark.read.parquet(str(out))
    assert frame.columns == ["value"]  # and no epoch (issue 23)
    assert values(spark, out) == ["-", "-", "-", "a", "y", "z"]
    assert marker(out)


def values(spark: SparkSession, out: Path) -> list[str]:
    """Return the values that readers see, sorted."""
    if not list(out.glob("part-*")):
        return []
    return sorted(row.value for row in spark.read.parquet(str(out)).collect())


@pytest.mark.any_client
async def test_epochs_in_a_table_are_not_loaded_once(spark: SparkSession) -> None:
    """The error tells why (issue 14)."""
    sink = DataFrameSink(spark, Destination(table="t"))
    with pytest.raises(
        SinkFailed, match="table t: it is neither a path on this machine"
    ):
        sink.begin(Epochs("ab12", 0, once=True, check=lambda: None))
