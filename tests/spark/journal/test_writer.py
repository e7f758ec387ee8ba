"""``format("etlstage-journal")``: appending."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import CaseInsensitiveDict, DataSource
from pyspark.sql.types import StructType

from etlstage.errors import ConfigError, SinkFailed
from etlstage.journal import Journals, Publisher, RunMessage
from etlstage.journal.account import JournalCounts, verify
from etlstage.pipeline.journal_source import messages_of
from etlstage.spark import register
from etlstage.spark.datasource.datasource import WorkerDataSource
from etlstage.spark.journal.datasource import JournalDataSource
from etlstage.spark.journal.writer import AppendedPart, StoredCommits
from tests.crash.power import Disk
from tests.spark.driver import Driver
from tests.spark.jobs import failure

pytestmark = pytest.mark.spark

RUNS = "application/x-etlstage-run"


@pytest.fixture
def journals(tmp_path: Path) -> Iterator[Journals]:
    """Give a set of one journal."""
    with Journals.open(tmp_path / "set", content_type=RUNS) as made:
        yield made


def committed(path: Path) -> list[bytes]:
    """Return the messages that readers see, sorted."""
    with Journals.open(path, create=False) as journals:
        found = [messages_of(one.message) for one in journals.read_committed()]
    return sorted(message for run in found for message in run)


def counts(path: Path) -> JournalCounts:
    """Return the counts of a set's only journal."""
    with Journals.open(path, create=False) as journals:
        return verify(journals, journals.select()[0].name)


def write(frame: DataFrame, path: Path, mode: str = "append", **options: str) -> None:
    """Append a frame to journals."""
    register(frame.sparkSession)
    writer = frame.write.format("etlstage-journal").mode(mode)
    writer.options(**options).save(str(path))


def test_rows_are_appended(spark: SparkSession, tmp_path: Path) -> None:
    """Into a new set, each key into one journal; several columns become objects."""
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
    """Even if some of its tasks succeeded."""
    path = tmp_path / "set"
    rows = spark.range(0, 4, 1, 2).selectExpr(
        "case when id = 3 then raise_error('no') else string(id) end as t"
    )
    assert "no" in failure(lambda: write(rows, path))
    assert committed(path) == []
    nothing = spark.sql("select cast(null as string) as t")
    text = failure(lambda: write(nothing, path))
    assert "message is null in 1 of 1 rows of a batch: filter these rows" in text
    write(spark.sql("select 'a' as t"), path)
    assert committed(path) == [b"a"]


@pytest.mark.any_client
def test_what_makes_no_sense_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    """The error comes before any task."""
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
    assert "their content type is application/x-ndjson" in text


def test_an_attempt_that_is_lost_is_not_seen(retrying: Driver, tmp_path: Path) -> None:
    """Its task is killed after it has appended, and runs again."""
    retrying.run(
        f"""
        from etlstage.spark import register
        register(spark)
        # Else the rows of all wait for the last.
        spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", 1)

        def pass_on(batches):
            import os, pathlib, time, pyarrow as pa
            for n, batch in enumerate(batches):
                yield batch
            # What is on its way may lack the end of the last.
            for _ in range(4):
                yield pa.record_batch([pa.array([b"x" * (2 << 20)])], ["t"])
            try:
                os.mkdir({str(tmp_path / "killed")!r})
            except FileExistsError:
                return
            while not any(
                path.stat().st_size > 2 << 20
                for path in pathlib.Path({str(tmp_path / "set")!r}).rglob("*")
            ):
                time.sleep(0.05)
            os.kill(os.getpid(), 9)

        frame = spark.createDataFrame([(b"0",), (b"1",)], "t binary").coalesce(1)
        frame = frame.mapInArrow(pass_on, "t binary")
        (frame.write.format("etlstage-journal").mode("append")
            .save({str(tmp_path / "set")!r}))
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
        """
    )
    assert (tmp_path / "killed").exists()
    # The first attempt's messages are rolled back (issue 24).
    found = counts(tmp_path / "set")
    assert (found.pending, found.rolled_back > 0) == (0, True)
    with Journals.open(tmp_path / "set", create=False) as journals:
        assert journals.storage.names("spark") == []
    assert [len(message) for message in committed(tmp_path / "set")] == [
        1,
        1,
        *[2 << 20] * 4,
    ]


# --- commits --------------------------------------------------------------------------


class Attempt:
    """
    An attempt of a task, which appends a message.

    Args:
        journals: A set of a single journal.
        message: The message.
        name: The name of the commit.
        run: The start of a stream's query.

    """

    def __init__(
        self, journals: Journals, message: bytes, name: str, run: str = "1"
    ) -> None:
        (spec,) = journals.select()
        self._storage = journals.storage
        file = f"{name}.{run}.{message.hex()}{secrets.token_hex(4)}.attempt"
        self.held = self._storage.hold(f"spark/{file}")
        publisher = Publisher(
            journals,
            mapping=lambda _: (spec.name, RUNS),
            opening=lambda one: self._storage.append(
                f"spark/{file}", json.dumps([one[0], one[1].hex()]).encode(), b"\n"
            ),
        )
        publisher.publish_uncommitted(RunMessage([message]))
        intents = [[name, one.hex()] for name, one in publisher.build_ack_intents()]
        self.part = AppendedPart(query=name, run=run, attempt=file, intents=intents)

    def end(self) -> AppendedPart:
        """End the attempt; return its part."""
        assert self.held is not None
        self._storage.let_go(self.held)
        return self.part


def ended(
    journals: Journals, message: bytes, name: str = "query-a", run: str = "1"
) -> AppendedPart:
    """Return the part of an attempt that has appended a message."""
    return Attempt(journals, message, name, run).end()


def test_a_second_commit_of_a_batch_does_nothing(
    journals: Journals, tmp_path: Path
) -> None:
    """A repeated batch's messages are not seen; other queries are independent."""
    commits = StoredCommits(journals)
    commits.batch(0, [ended(journals, b"a0")])
    commits.batch(0, [ended(journals, b"a0")])
    commits.batch(0, [ended(journals, b"b0", "query-b")])
    commits.batch(1, [ended(journals, b"a1")])
    commits.batch(0, [ended(journals, b"a0")])
    assert committed(tmp_path / "set") == [b"a0", b"a1", b"b0"]
    assert counts(tmp_path / "set").pending == 0
    assert sorted(journals.storage.names("spark")) == ["query-a.json", "query-b.json"]


def test_commit_that_outlives_its_driver_rolls_back_no_later_batch(
    journals: Journals, tmp_path: Path
) -> None:
    """The query's next run may have committed that batch, and be at the next."""
    commits, path = StoredCommits(journals), tmp_path / "set"
    late = ended(journals, b"a0", run="1")
    commits.batch(0, [ended(journals, b"b0", run="2")])
    coming = ended(journals, b"b1", run="2")
    commits.batch(0, [late])
    commits.batch(1, [coming])
    # Its messages would be lost (issue 24).
    assert committed(path) == [b"b0", b"b1"]
    assert (counts(path).pending, counts(path).rolled_back) == (0, 1)


def test_commits_of_batches_exclude_each_other(
    journals: Journals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was stopped behind its check would undo a later one (issue 24)."""
    locked: list[bool] = []

    def store(*_: object, **__: object) -> None:
        locked.append(journals.storage.hold("commits.lock") is None)
        raise OSError("full")

    commits = StoredCommits(journals)
    monkeypatch.setattr(commits, "_store", store)
    with pytest.raises(OSError, match="full"):
        commits.batch(0, [ended(journals, b"a0")])
    assert locked == [True]


def test_what_is_not_committed_is_rolled_back(
    journals: Journals, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Even of attempts that returned nothing; but never a stored commit (issue 24)."""
    commits, path = StoredCommits(journals), tmp_path / "set"
    kept, _lost = (ended(journals, b"%d" % n) for n in range(2))
    ended(journals, b"of another query", "query-ab")
    commits.batch(0, [kept])
    assert committed(path) == [b"0"]
    assert (counts(path).pending, counts(path).rolled_back) == (1, 1)
    commits.batch(0, [ended(journals, b"again")])
    commits.roll_back("query-ab", "2")
    assert (counts(path).pending, counts(path).rolled_back) == (1, 2)
    commits.roll_back("query-ab", "1")
    assert (counts(path).pending, counts(path).rolled_back) == (0, 3)
    commits._store("write-7", [ended(journals, b"3", "write-7")])
    commits.abort("write-7")
    assert committed(path) == [b"0", b"3"]
    assert caplog.messages == []


@pytest.mark.parametrize("commits_well", [True, False])
def test_what_still_runs_is_rolled_back_later(
    journals: Journals, tmp_path: Path, *, commits_well: bool
) -> None:
    """By a later writer, as Spark does not wait for tasks that it kills (issue 24)."""
    commits, path = StoredCommits(journals), tmp_path / "set"
    running = Attempt(journals, b"late", "write-1")
    other = ended(journals, b"1", "write-1")
    if commits_well:
        commits.write("write-1", [other])
    else:
        commits.abort("write-1")
    commits.resume()
    assert counts(path).pending == 1
    running.end()
    commits.resume()
    assert counts(path).pending == 0
    assert committed(path) == [b"1"] * commits_well
    assert journals.storage.names("spark") == []


def test_what_was_noted_in_part_was_not_appended(journals: Journals) -> None:
    """It is of an attempt that was killed while writing a note (issue 24)."""
    journals.storage.append("spark/query-a.1.x.attempt", b'["jour')
    StoredCommits(journals).batch(0, [ended(journals, b"0")])
    assert journals.storage.names("spark") == ["query-a.json"]


def test_what_is_stored_is_committed(
    journals: Journals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the driver ends before appending it, the next or the repeated batch does."""
    commits = StoredCommits(journals)
    once, a3 = ended(journals, b"once", "write-1"), ended(journals, b"a3")
    with monkeypatch.context() as patched:

        def fail(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        patched.setattr(journals, "append", fail)
        with pytest.raises(SinkFailed, match=r"the write is committed .* don't"):
            commits.write("write-1", [once])
        with pytest.raises(OSError, match="No space left"):
            commits.batch(3, [a3])
    assert committed(tmp_path / "set") == []
    commits.resume()
    assert committed(tmp_path / "set") == [b"once"]
    commits.batch(3, [ended(journals, b"a3 again")])
    commits.resume()
    assert committed(tmp_path / "set") == [b"a3", b"once"]
    assert journals.storage.names("spark") == ["query-a.json"]


# --- streams --------------------------------------------------------------------------


def test_checkpoint_is_durable_when_its_batch_is_committed(
    journals: Journals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise Spark might plan other rows for a batch that counts as appended."""
    disk, lost, commit = Disk(), list[list[str]](), StoredCommits.batch
    checkpoint = tmp_path / "queries" / "a" / "checkpoint"
    (checkpoint / "offsets").mkdir(parents=True)
    (checkpoint / "metadata").write_text("of the query")
    (checkpoint / "offsets" / "0").write_text("of the batch")

    def committing(self: StoredCommits, number: int, parts: list[AppendedPart]) -> None:
        lost.append([*disk.lost(tmp_path / "queries")])
        commit(self, number, parts)

    monkeypatch.setattr(os, "fsync", disk.fsync)
    monkeypatch.setattr(StoredCommits, "batch", committing)
    options = {"path": str(tmp_path / "set"), "checkpointLocation": str(checkpoint)}
    rows = StructType().add("t", "string")
    writer = JournalDataSource(CaseInsensitiveDict(options)).streamWriter(rows, False)
    writer.commit([ended(journals, b"a")], 0)
    assert committed(tmp_path / "set") == [b"a"]
    assert lost == [[]]


@pytest.mark.parametrize("format_", [JournalDataSource, WorkerDataSource])
def test_batches_need_a_checkpoint_that_is_known(
    tmp_path: Path, format_: type[DataSource]
) -> None:
    """It may be set in the session, but a format does not get that."""
    options = {"path": str(tmp_path / "set")}
    if format_ is WorkerDataSource:
        options["command"] = "x"
    source = format_(options)
    with pytest.raises(ConfigError, match="option checkpointLocation is missing"):
        source.streamWriter(StructType().add("t", "string"), overwrite=False)


def test_a_batch_that_comes_again_is_appended_once(
    spark: SparkSession, journals: Journals, tmp_path: Path
) -> None:
    """From journals to journals, with restarts; Spark has lost one of its commits."""
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
