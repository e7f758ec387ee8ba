"""``format("etlstage-journal")``: what Spark appends."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from etlstage.errors import SinkFailed
from etlstage.journal import Journals, Publisher, RunMessage
from etlstage.journal.account import JournalCounts, verify
from etlstage.pipeline.journal_source import messages_of
from etlstage.spark import register
from etlstage.spark.errors import explain
from etlstage.spark.journal.writer import AppendedPart, StoredCommits
from tests.spark.driver import Driver

pytestmark = pytest.mark.spark

RUNS = "application/x-etlstage-run"


@pytest.fixture
def journals(tmp_path: Path) -> Iterator[Journals]:
    """Give a set of one journal."""
    with Journals.open(tmp_path / "set", content_type=RUNS) as made:
        yield made


def committed(path: Path) -> list[bytes]:
    """Return the messages that readers see, in no order."""
    with Journals.open(path, create=False) as journals:
        found = [messages_of(one.message) for one in journals.read_committed()]
    return sorted(message for run in found for message in run)


def counts(path: Path) -> JournalCounts:
    """Return what the one journal of a set has."""
    with Journals.open(path, create=False) as journals:
        return verify(journals, journals.select()[0].name)


def write(frame: DataFrame, path: Path, mode: str = "append", **options: str) -> None:
    """Append a frame to journals."""
    register(frame.sparkSession)
    writer = frame.write.format("etlstage-journal").mode(mode)
    writer.options(**options).save(str(path))


def failure(job: Callable[[], object]) -> str:
    """Return why something can't be done."""
    with pytest.raises(Exception) as raised:  # noqa: PT011 - its text is the point
        job()
    return explain(raised.value)


def test_rows_are_appended(spark: SparkSession, tmp_path: Path) -> None:
    """Into a new set, each key in its journal; more columns are objects."""
    path = tmp_path / "set"
    rows = spark.range(0, 40, 1, 2).selectExpr("id % 4 as k", "string(id) as t")
    write(rows, path, partitions="3", key="/k")
    with Journals.open(path, create=False) as journals:
        assert len(journals.select()) == 3
        places: dict[int, set[str]] = {}
        for envelope in journals.read_committed():
            for message in messages_of(envelope.message):
                key = json.loads(message)["k"]
                places.setdefault(key, set()).add(envelope.journal)
        assert [len(places[key]) for key in range(4)] == [1, 1, 1, 1]
        assert journals.storage.names("spark") == []
    found = [json.loads(message) for message in committed(path)]
    assert sorted(int(one["t"]) for one in found) == list(range(40))
    write(spark.range(2).selectExpr("binary('a')"), path)
    assert committed(path)[:2] == [b"a", b"a"]


@pytest.mark.any_client
def test_a_write_that_fails_is_never_seen(spark: SparkSession, tmp_path: Path) -> None:
    """Though some of its tasks may have ended well."""
    path = tmp_path / "set"
    rows = spark.range(0, 4, 1, 2).selectExpr(
        "case when id = 3 then raise_error('no') else string(id) end as t"
    )
    assert "no" in failure(lambda: write(rows, path))
    assert committed(path) == []
    # Of one that Spark has killed for it, in the middle, nothing could drop what it had
    # appended: it is open, and never acknowledged.
    found = counts(path)
    assert (found.pending <= 1, found.committed) == (True, 0)
    nothing = spark.sql("select cast(null as string) as t")
    assert "message is null in 1 of 1" in failure(lambda: write(nothing, path))
    write(spark.sql("select 'a' as t"), path)
    assert committed(path) == [b"a"]


@pytest.mark.any_client
def test_what_makes_no_sense_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    """Before any task."""
    rows = spark.sql("select 'a' as t")
    path = tmp_path / "set"
    assert "expected append" in failure(lambda: write(rows, path, "overwrite"))
    text = failure(lambda: write(rows, path, mappin="modulo"))
    assert "option mappin: unknown option (did you mean 'mapping'?)" in text
    text = failure(
        lambda: write(spark.sql("select interval '1' day as m, 1 as n"), path)
    )
    assert "can't be written as JSON" in text
    Journals.open(path).close()
    text = failure(lambda: write(rows, path))
    assert "its content type is application/x-ndjson" in text


def test_an_attempt_that_is_lost_is_not_seen(retrying: Driver, tmp_path: Path) -> None:
    """Its task is killed behind what it appended, and runs again."""
    retrying.run(
        f"""
        from etlstage.spark import register
        register(spark)

        def pass_on(batches):
            import os, pyarrow as pa
            for n, batch in enumerate(batches):
                yield batch
            yield pa.record_batch([pa.array([b"x" * (2 << 20)])], ["t"])
            try:
                os.mkdir({str(tmp_path / "killed")!r})
            except FileExistsError:
                return
            os.kill(os.getpid(), 9)

        frame = spark.createDataFrame([(b"0",), (b"1",)], "t binary").coalesce(1)
        frame = frame.mapInArrow(pass_on, "t binary")
        (frame.write.format("etlstage-journal").mode("append")
            .save({str(tmp_path / "set")!r}))
        """
    )
    assert (tmp_path / "killed").exists()
    assert [len(message) for message in committed(tmp_path / "set")] == [1, 1, 2 << 20]


# --- commits --------------------------------------------------------------------------


def appended(journals: Journals, message: bytes) -> list[list[str]]:
    """Append a message, and return what acknowledges it."""
    (spec,) = journals.select()
    publisher = Publisher(journals, mapping=lambda _: (spec.name, RUNS))
    publisher.publish_uncommitted(RunMessage([message]))
    return [[name, intent.hex()] for name, intent in publisher.build_ack_intents()]


def test_a_second_commit_of_a_batch_does_nothing(
    journals: Journals, tmp_path: Path
) -> None:
    """What the batch has appended again is not seen; other queries do not matter."""
    commits = StoredCommits(journals)
    commits.batch("a", 0, appended(journals, b"a0"))
    commits.batch("a", 0, appended(journals, b"a0"))
    commits.batch("b", 0, appended(journals, b"b0"))
    commits.batch("a", 1, appended(journals, b"a1"))
    commits.batch("a", 0, appended(journals, b"a0"))
    assert committed(tmp_path / "set") == [b"a0", b"a1", b"b0"]


def part(journals: Journals, message: bytes) -> AppendedPart:
    """Return what an attempt sends that has appended a message."""
    (spec,) = journals.select()
    publisher = Publisher(journals, mapping=lambda _: (spec.name, RUNS))
    publisher.publish_uncommitted(RunMessage([message]))
    dropped, kept = publisher.rollback_intents(), publisher.build_ack_intents()
    return AppendedPart(
        query="a",
        intents=[[name, intent.hex()] for name, intent in kept],
        rollbacks=[[name, intent.hex()] for name, intent in dropped],
    )


def test_what_is_not_committed_is_rolled_back(
    journals: Journals, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Never what is stored: its acknowledgement may come later (issue 24)."""
    commits, path = StoredCommits(journals), tmp_path / "set"
    kept, again, lost = (part(journals, b"%d" % n) for n in range(3))
    commits.batch("a", 0, kept.intents)
    commits.batch("a", 0, again.intents)
    assert counts(path).pending == 2
    commits.roll_back("query-a", [kept, again, None, lost])
    assert committed(path) == [b"0"]
    assert (counts(path).pending, counts(path).rolled_back) == (0, 2)
    commits._store("write-7", {"intents": (stored := part(journals, b"3")).intents})
    commits.roll_back("write-7", [stored])
    commits.resume()
    assert committed(path) == [b"0", b"3"]
    assert caplog.messages == []


def test_what_is_stored_is_committed(
    journals: Journals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that ends before it appended it: the next does, or the batch again."""
    commits = StoredCommits(journals)
    with monkeypatch.context() as patched:

        def fail(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        patched.setattr(journals, "append", fail)
        with pytest.raises(SinkFailed, match=r"the write is committed .* don't"):
            commits.write("1", appended(journals, b"once"))
        with pytest.raises(OSError, match="No space left"):
            commits.batch("a", 3, appended(journals, b"a3"))
    assert committed(tmp_path / "set") == []
    commits.resume()
    assert committed(tmp_path / "set") == [b"once"]
    commits.batch("a", 3, appended(journals, b"a3 again"))
    commits.resume()
    assert committed(tmp_path / "set") == [b"a3", b"once"]
    assert journals.storage.names("spark") == ["query-a.json"]


# --- streams --------------------------------------------------------------------------


def test_a_batch_that_comes_again_is_appended_once(
    spark: SparkSession, journals: Journals, tmp_path: Path
) -> None:
    """From journals to journals, with restarts of the query; Spark forgets a commit."""
    register(spark)
    (spec,) = journals.select()
    publisher = Publisher(journals, mapping=lambda _: (spec.name, RUNS))

    def run() -> None:
        reader = spark.readStream.format("etlstage-journal").option("max_messages", 2)
        query = (
            reader.load(str(tmp_path / "set"))
            .select("value")
            .writeStream.format("etlstage-journal")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start(str(tmp_path / "copy"))
        )
        query.awaitTermination(120)
        assert query.exception() is None

    for number in range(3):
        publisher.publish_committed(RunMessage([b"%d" % number]))
    run()
    assert committed(tmp_path / "copy") == [b"0", b"1", b"2"]
    for name in ("1", ".1.crc"):
        (tmp_path / "checkpoint" / "commits" / name).unlink()
    publisher.publish_committed(RunMessage([b"3"]))
    run()
    assert committed(tmp_path / "copy") == [b"0", b"1", b"2", b"3"]
