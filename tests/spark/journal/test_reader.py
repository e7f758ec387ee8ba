"""``format("etlstage-journal")``: reading."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from etlstage.errors import ConfigError
from etlstage.journal import JournalError, Journals, Publisher, RunMessage
from etlstage.spark import register
from etlstage.spark.journal.options import (
    JournalReading,
    JournalWriting,
    SetFolder,
    read_options,
)
from tests.spark.jobs import failure

pytestmark = pytest.mark.spark

RUNS = "application/x-etlstage-run"


@pytest.fixture
def journals(tmp_path: Path) -> Iterator[Journals]:
    """Give a set of two journals."""
    path = tmp_path / "set"
    with Journals.open(path, partitions=2, content_type=RUNS) as made:
        yield made


def publisher(journals: Journals) -> Publisher:
    """Return a publisher of runs, each into the journal of its first number."""
    specs = journals.select()

    def mapping(message: RunMessage) -> tuple[str, str]:
        return specs[int(next(iter(message.run))) % len(specs)].name, RUNS

    return Publisher(journals, mapping=mapping)


def run(*numbers: int) -> RunMessage:
    """Return a run of messages."""
    return RunMessage([b"%d" % number for number in numbers])


def read(spark: SparkSession, journals: Journals, **options: object) -> DataFrame:
    """Return a DataFrame that the format reads."""
    register(spark)
    schema = options.pop("schema", None)
    reader = spark.read.format("etlstage-journal")
    for name, value in options.items():
        reader = reader.option(name.rstrip("_"), str(value))
    if schema is not None:
        reader = reader.schema(str(schema))
    return reader.load(str(journals.storage.root))  # type: ignore[attr-defined]


def test_what_is_committed_becomes_rows(
    spark: SparkSession, journals: Journals
) -> None:
    """With their places, in order within each journal, and without uncommitted ones."""
    one, lost = publisher(journals), publisher(journals)
    one.publish_uncommitted(run(0, 2))
    lost.publish_uncommitted(run(100_000))
    one.publish_uncommitted(run(1))
    one.publish_uncommitted(run(4, *range(10, 9000)))
    for journal, intent in one.build_ack_intents():
        journals.append(journal, intent)
    frame = read(spark, journals)
    assert frame.schema.names == ["value", "key", "journal", "offset", "uuid", "time"]
    rows = frame.collect()
    even = [int(row.value) for row in rows if row.journal.endswith("0")]
    assert even == [0, 2, 4, *range(10, 9000)]
    assert [int(row.value) for row in rows if row.journal.endswith("1")] == [1]
    assert rows[0].offset == rows[1].offset == 32
    assert rows[0].uuid == rows[1].uuid != rows[2].uuid
    assert rows[0].key is None
    (stamp,) = frame.selectExpr("min(unix_micros(time)) as at").collect()
    assert abs(stamp.at / 1e6 - datetime.now(UTC).timestamp()) < 600
    uncommitted = read(spark, journals, read_uncommitted=True)
    assert uncommitted.where("value = binary('100000')").count() == 1


@pytest.mark.any_client
def test_columns_are_those_that_are_asked_for(
    spark: SparkSession, tmp_path: Path
) -> None:
    """For JSON lines as well, with a key from each."""
    with Journals.open(tmp_path / "set") as journals:
        journals_publisher = Publisher(
            journals,
            mapping=lambda _: (journals.select()[0].name, "application/x-ndjson"),
        )
        for number in range(3):
            journals_publisher.publish_committed({"id": number})
        frame = read(spark, journals, key="/id", schema="key string, offset bigint")
        assert [row.key for row in frame.collect()] == ["0", "1", "2"]
        values = read(spark, journals, schema="value binary").collect()
        assert [b'"id":1' in row.value for row in values] == [False, True, False]
        text = failure(read(spark, journals, schema="valeu binary").collect)
        assert "unknown column 'valeu' (did you mean 'value'?)" in text
        text = failure(read(spark, journals, schema="value string").collect)
        assert "column value is of type string, expected binary" in text


def test_options_are_checked(tmp_path: Path) -> None:
    """All are reported at once, with suggestions."""
    with pytest.raises(ConfigError) as raised:
        read_options(
            JournalReading,
            {
                "path": str(tmp_path),
                "form": "end",
                "max_bytes": "x",
                "mapping": "modulo",
            },
        )
    text = str(raised.value)
    assert "option form: unknown option (did you mean 'from'?)" in text
    assert "option mapping: is only for writing" in text
    assert "option max_bytes: expected a size such as" in text
    with pytest.raises(ConfigError, match="option path: required"):
        read_options(JournalReading, {})
    with pytest.raises(ConfigError, match="option from: is 'soon', expected beginning"):
        read_options(JournalReading, {"path": "x", "from": "soon"})
    with pytest.raises(ConfigError, match="option max_bytes: is only for reading"):
        read_options(JournalWriting, {"path": "x", "max_bytes": "1MiB"})
    named = {"path": "x", "reader": "a", "read_uncommitted": "true"}
    with pytest.raises(ConfigError, match="option reader: needs committed messages"):
        read_options(JournalReading, named)
    written = {"path": "x", "checkpointlocation": "y", "key": "/id"}
    assert read_options(JournalWriting, written).key == "/id"
    with pytest.raises(ConfigError, match=r"option keep: is '7x', expected 'read'"):
        read_options(JournalWriting, {"path": "x", "keep": "7x"})


@pytest.mark.any_client
def test_what_makes_no_sense_is_refused(
    spark: SparkSession, journals: Journals, tmp_path: Path
) -> None:
    """The error comes from the call that is wrong."""
    assert "did you mean 'reader'?" in failure(read(spark, journals, raeder="x").count)
    text = failure(read(spark, journals, max_messages=3).count)
    assert "option max_messages is only for streams" in text
    assert read(spark, journals).count() == 0
    register(spark)
    absent = spark.read.format("etlstage-journal").load(str(tmp_path / "no"))
    assert "there is no set of journals" in failure(absent.count)


def test_a_folder_that_is_not_the_drivers_is_refused(tmp_path: Path) -> None:
    """A missing one, or another of the same name."""
    Journals.open(tmp_path / "set").close()
    Journals.open(tmp_path / "other", name="set").close()
    place = SetFolder.seen(tmp_path / "set")
    place.opened().close()
    (tmp_path / "set").rename(tmp_path / "moved")
    with pytest.raises(JournalError, match="can't access the driver's journals in"):
        place.opened()
    (tmp_path / "other").rename(tmp_path / "set")
    with pytest.raises(JournalError, match="tasks need the same folder"):
        place.opened()


# --- streams ------------------------------------------------------------------------


class Query:
    """A query from a set into Parquet, which can be run repeatedly."""

    def __init__(
        self, spark: SparkSession, journals: Journals, place: Path, **options: object
    ) -> None:
        register(spark)
        self._spark = spark
        self._place = place
        self._path = str(journals.storage.root)  # type: ignore[attr-defined]
        self._options = options

    def run(self) -> list[int]:
        """Read all that exists; return the sizes of the batches (not over Connect)."""
        reader = self._spark.readStream.format("etlstage-journal")
        for name, value in self._options.items():
            reader = reader.option(name.rstrip("_"), str(value))
        query = (
            reader.load(self._path)
            .writeStream.option("checkpointLocation", str(self._place / "checkpoint"))
            .trigger(availableNow=True)
            .start(str(self._place / "out"), format="parquet")
        )
        try:
            query.awaitTermination(120)
            error = query.exception()
            if error is not None:
                raise error
            return [one["numInputRows"] for one in query.recentProgress]
        finally:
            query.stop()

    def numbers(self) -> list[int]:
        """Return all written numbers, sorted."""
        frame = self._spark.read.parquet(str(self._place / "out"))
        return sorted(int(row.value) for row in frame.select("value").collect())


@pytest.mark.classic
def test_a_stream_resumes_from_its_checkpoint(
    spark: SparkSession, journals: Journals, tmp_path: Path
) -> None:
    """A transaction is delivered once, by the run in which it ends."""
    writer, other = publisher(journals), publisher(journals)
    query = Query(spark, journals, tmp_path, max_messages=2, reader="billing")
    writer.publish_uncommitted(run(0, 2))
    other.publish_committed(run(4))
    other.publish_committed(run(6))
    other.publish_committed(run(1))
    assert sum(sizes := query.run()) == 3
    assert max(sizes) == 2
    assert query.numbers() == [1, 4, 6]
    writer.publish_uncommitted(run(8))
    for journal, intent in writer.build_ack_intents():
        journals.append(journal, intent)
    assert [size for size in query.run() if size] == [2, 1]
    assert query.numbers() == [0, 1, 2, 4, 6, 8]
    assert sum(query.run()) == 0
    (known,) = journals.readers()
    assert known.name == "billing"


@pytest.mark.classic
def test_a_failed_batch_is_read_again(
    spark: SparkSession, journals: Journals, tmp_path: Path
) -> None:
    """With the same frames, even if more was committed since."""
    writer = publisher(journals)
    writer.publish_committed(run(0))
    query = Query(spark, journals, tmp_path)
    query.run()
    writer.publish_committed(run(2))
    query.run()
    # As if it had ended before Spark recorded the end of the batch.
    for place in (tmp_path / "checkpoint/commits", tmp_path / "out/_spark_metadata"):
        for name in ("1", ".1.crc"):
            (place / name).unlink()
    writer.publish_committed(run(4))
    assert [size for size in query.run() if size][-2:] == [1, 1]
    assert query.numbers() == [0, 2, 4]


def test_a_stream_shows_why_it_can_not_be_read(
    spark: SparkSession, journals: Journals, tmp_path: Path
) -> None:
    """Wrong options, and the place of damage."""
    query = Query(spark, journals, tmp_path / "a", max_mesages=2)
    assert "did you mean 'max_messages'?" in failure(query.run)
    publisher(journals).publish_committed(run(0))
    log = next((tmp_path / "set" / "part-000").glob("*.log"))
    data = bytearray(log.read_bytes())
    data[-1] ^= 1
    log.write_bytes(data)
    text = failure(Query(spark, journals, tmp_path / "b").run)
    assert "set/part-000: damaged at offset 0, in segment" in text
