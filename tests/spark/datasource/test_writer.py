from __future__ import annotations

import fcntl
import json
import os
import sys
from pathlib import Path
from typing import IO

import pytest
from pyspark.sql import DataFrame, DataFrameWriter, SparkSession
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import StructType

from etlstage.pipeline.delivery.place import EpochFiles
from etlstage.pipeline.delivery.position import PositionFile
from etlstage.spark import register
from etlstage.spark.datasource import writer as module
from etlstage.spark.datasource.datasource import WorkerDataSource
from etlstage.spark.datasource.writer import EpochOfWrite, Staged, WrittenPart
from tests.crash.power import Disk
from tests.spark.driver import Driver
from tests.spark.jobs import failure

pytestmark = pytest.mark.spark

STAGED = """
import os, signal, sys
from etlstage import worker
out = open(os.path.join(os.environ["ETLSTAGE_STAGING"], "rows"), "ab", 0)
def f(message):
    if message.startswith(b"refuse"):
        os._exit(7)
    if message.startswith(b"kill"):
        try:
            os.mkdir(sys.argv[1])
        except FileExistsError:
            pass
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    out.write(message + b"\\n")
worker.load(f)
os._exit(int(*sys.argv[2:]))
"""
NOTING = """
import json, sys
from etlstage import worker
def f(message):
    with open(sys.argv[1], "ab", 0) as file:
        file.write(message + b"\\n")
worker.load(f)
"""
TABLE = """
import json, os, sys
from etlstage import worker
rows = open(sys.argv[1] + "/" + os.environ["ETLSTAGE_ATTEMPT"], "ab", 0)
def f(message):
    if message == b"refuse":
        os._exit(7)
    rows.write(message + b"\\n")
worker.load(f)
"""


def command(program: str, *arguments: object) -> str:
    """Return the command option for a worker that is ``program``."""
    return json.dumps([sys.executable, "-c", program, *map(str, arguments)])


def write(frame: DataFrame, **options: object) -> DataFrameWriter:
    """Return a writer of ``frame``."""
    register(frame.sparkSession)
    writer = frame.write.format("etlstage").mode("append")
    for name, value in options.items():
        writer = writer.option(name.replace("__", "."), str(value))
    return writer


def texts(spark: SparkSession, *rows: str, partitions: int = 2) -> DataFrame:
    """Return a DataFrame with a text column, in partitions of about equal size."""
    array = f"array({', '.join(map(repr, rows))})"
    frame = spark.range(0, len(rows), 1, partitions)
    return frame.selectExpr(f"element_at({array}, int(id) + 1) as t")


def files(path: Path) -> list[str]:
    """Return the names of all files under ``path``, without their random parts."""
    found = (file for file in path.rglob("*") if file.is_file())
    return sorted("-".join(file.name.split("-")[2:]) for file in found)


def lines(path: Path) -> list[str]:
    """Return the rows in all files under ``path``."""
    found = (file.read_text().splitlines() for file in path.rglob("part-*"))
    return sorted(line for rows in found for line in rows)


# --- once -------------------------------------------------------------------------


@pytest.mark.any_client
def test_files_of_all_partitions_are_in_place_after_the_commit(
    spark: SparkSession, tmp_path: Path
) -> None:
    """One per partition, with a name that is unique to the write, and nothing else."""
    frame = texts(spark, "a", "b", "c", "d")
    for _ in range(2):
        write(frame, command=command(STAGED, tmp_path / "k")).save(str(tmp_path / "o"))
    assert files(tmp_path / "o") == 2 * ["1-00000-rows"] + 2 * ["1-00001-rows"]
    assert lines(tmp_path / "o") == sorted("abcd" * 2)
    assert spark.read.text(str(tmp_path / "o")).count() == 8


def test_rows_become_messages(spark: SparkSession, tmp_path: Path) -> None:
    """JSON for several columns, else bytes; with batches and folders on request."""
    program = """
import os, sys
from etlstage import worker
os.mkdir(sys.argv[1] + "/day=1")
out = open(sys.argv[1] + "/day=1/" + os.environ["ETLSTAGE_PARTITION"], "ab", 0)
worker.load_batch(lambda batch: out.write(b"%d|" % len(batch) + b"|".join(batch)) and None)
"""
    frame = spark.range(0, 3, 1, 1).selectExpr("id", "'é' as text")
    options = {"command": command(program, "{staging}"), "batch__size": 3}
    write(frame, **options, path=tmp_path / "o").save()
    (file,) = (tmp_path / "o" / "day=1").iterdir()
    rows = [f'{{"id":{n},"text":"é"}}' for n in range(3)]
    assert file.read_text() == "|".join(["3", *rows])
    frame = spark.createDataFrame([(bytearray(b"\xff\x00"),)], "b binary").coalesce(1)
    options = {"command": command(STAGED, "-"), "eop": r"\x01"}
    write(frame, **options).save(str(tmp_path / "b"))
    (file,) = (tmp_path / "b").iterdir()
    assert file.read_bytes() == b"\xff\x00\n"


def test_write_that_fails_leaves_nothing(spark: SparkSession, tmp_path: Path) -> None:
    """Neither of the failed partition, nor of the other."""
    frame = texts(spark, "a", "b", "c", "refuse")
    writer = write(frame, command=command(STAGED, tmp_path / "k"))
    with pytest.raises(Exception, match="exited with status 7") as raised:
        writer.save(str(tmp_path / "o"))
    assert "(message 2 of partition 1)" in str(raised.value)
    assert list((tmp_path / "o").iterdir()) == []


@pytest.mark.any_client
def test_batch_that_is_tried_again_fails_its_attempt(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The worker may have kept part of it before the rejection (issue 23)."""
    program = """
import os, sys
from etlstage import worker
out, tries = open(sys.argv[1] + "/rows", "ab", 0), []
def load(batch):
    out.write(b"|".join(batch))
    tries.append(batch)
    if len(tries) == 1:
        raise ConnectionError("gone for a moment")
worker.load_batch(load)
"""
    options = {"command": command(program, "{staging}"), "batch__size": 3}
    writer = write(texts(spark, "a", "b", "c").coalesce(1), **options)
    with pytest.raises(Exception, match="may have stored some messages twice"):
        writer.save(str(tmp_path / "o"))
    assert not [*(tmp_path / "o").glob("**/rows*")]


@pytest.mark.any_client
def test_worker_must_end_well_too(spark: SparkSession, tmp_path: Path) -> None:
    """Otherwise its files may be incomplete, although it has replied."""
    # A single task: Spark does not wait for a second when it gives the write up.
    frame = texts(spark, "a", partitions=1)
    writer = write(frame, command=command(STAGED, tmp_path / "k", 5))
    text = failure(lambda: writer.save(str(tmp_path / "o")))
    assert "exited with status 5 while it was stopping; 1 message" in text
    assert list((tmp_path / "o").iterdir()) == []


@pytest.mark.any_client
def test_null_is_no_message(spark: SparkSession, tmp_path: Path) -> None:
    """It is not taken for an empty message."""
    frame = spark.createDataFrame([("a",), (None,)], "t string").coalesce(1)
    writer = write(frame, command=command(STAGED, tmp_path / "k"))
    text = failure(lambda: writer.save(str(tmp_path / "o")))
    assert "stage load: message is null in 1 of 2 rows" in text


@pytest.mark.any_client
def test_programs_make_a_write_final_or_undo_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    """They get each attempt that counts; of a failed one, the partition."""
    told = tmp_path / "told"
    options = {
        "command": command(TABLE, tmp_path),
        "commit": command(NOTING, told),
        "abort": command(NOTING, tmp_path / "undone"),
    }
    write(texts(spark, "a", "b", "c"), **options).save()
    found = [json.loads(line) for line in told.read_text().splitlines()]
    assert [(one["partition"], one["messages"]) for one in found] == [(0, 1), (1, 2)]
    assert {one["batch"] for one in found} == {None}
    assert len({one["epoch"] for one in found}) == 1
    rows = [(tmp_path / one["attempt"]).read_text() for one in found]
    assert rows == ["a\n", "b\nc\n"]
    told.unlink()
    writer = write(texts(spark, "a", "b", "refuse", partitions=3), **options)
    assert "status 7" in failure(writer.save)
    assert not told.exists()
    undone = [json.loads(s) for s in (tmp_path / "undone").read_text().splitlines()]
    assert [one["partition"] for one in undone] == [0, 1, 2]
    assert (undone[2]["attempt"], undone[2]["messages"]) == (None, None)
    # One of the others had ended before the third got a core; perhaps both had.
    over = [one for one in undone if one["attempt"] is not None]
    assert over
    for one in over:
        row = (tmp_path / one["attempt"]).read_text()
        assert (row, one["messages"]) == (f"{'ab'[one['partition']]}\n", 1)


@pytest.mark.any_client
def test_commit_that_fails_undoes_the_write(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The error names the list of attempts as its input."""
    options = {
        "command": command(TABLE, tmp_path),
        "commit": '["false"]',
        "abort": command(NOTING, tmp_path / "undone"),
    }
    text = failure(write(texts(spark, "a", "b"), **options).save)
    assert "exited with status 1" in text
    assert "(its input was the list of attempts)" in text
    assert len((tmp_path / "undone").read_text().splitlines()) == 2


def test_write_that_makes_no_sense_is_refused(spark: SparkSession) -> None:
    """It is refused before a task runs."""
    frame = spark.range(1).selectExpr("id", "interval 1 day as i")
    text = failure(write(frame, command="x").save)
    assert (
        "column 'i' has values of type interval day, which can't be written as JSON"
        in text
    )
    frame = spark.range(1)
    assert "(did you mean 'path'?)" in failure(write(frame, command="x", pth="o").save)
    text = failure(write(frame, command="x").mode("overwrite").save)
    assert "mode is overwrite, or complete, expected append" in text


def test_attempt_that_is_killed_leaves_no_row_behind(
    retrying: Driver, tmp_path: Path
) -> None:
    """The second attempt begins again, and only that is committed."""
    worker = command(STAGED, tmp_path / "killed")
    retrying.run(
        f"""
        from etlstage.spark import register
        register(spark)
        frame = spark.createDataFrame([("a",), ("b",), ("kill",), ("c",)], "t string")
        (frame.coalesce(1).write.format("etlstage").mode("append")
            .option("command", {worker!r}).save({str(tmp_path / "o")!r}))
        """
    )
    assert (tmp_path / "killed").exists()
    assert lines(tmp_path / "o") == ["a", "b", "c", "kill"]
    assert not list((tmp_path / "o").glob("[._]*"))


# --- the batches of a stream ------------------------------------------------------


def drain(spark: SparkSession, place: Path, **options: object) -> None:
    """Write the files of a folder of texts, each as a batch."""
    register(spark)
    frame = spark.readStream.format("text").option("maxFilesPerTrigger", 1)
    writer = frame.load(str(place / "in")).writeStream.format("etlstage")
    for name, value in options.items():
        writer = writer.option(name, str(value))
    checkpoint = str(place / "checkpoint")
    writer = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True)
    query = writer.queryName("any").start()
    query.awaitTermination()


def test_stream_is_loaded_batch_by_batch(spark: SparkSession, tmp_path: Path) -> None:
    """A batch that failed is repeated with the query, and is loaded once."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1").write_text("a\nb\n")
    options = {"command": command(STAGED, tmp_path / "k"), "path": tmp_path / "o"}
    drain(spark, tmp_path, **options)
    assert lines(tmp_path / "o") == ["a", "b"]
    (tmp_path / "in" / "2").write_text("c\nkill\n")
    assert "SIGKILL" in failure(lambda: drain(spark, tmp_path, **options))
    assert lines(tmp_path / "o") == ["a", "b"]
    drain(spark, tmp_path, **options)
    assert lines(tmp_path / "o") == ["a", "b", "c", "kill"]
    assert [file.name for file in (tmp_path / "o").glob("[._]*")] == ["_etlstage"]


@pytest.mark.any_client
def test_batch_that_is_committed_twice_is_loaded_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    """As after a crash between our commit and Spark's record of it."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1").write_text("a\nb\n")
    told = tmp_path / "told"
    options = {"command": command(STAGED, tmp_path / "k"), "path": tmp_path / "o"}
    drain(spark, tmp_path, **options)
    for note in (tmp_path / "checkpoint" / "commits").iterdir():
        note.unlink()
    drain(spark, tmp_path, **options)
    assert lines(tmp_path / "o") == ["a", "b"]
    told_of = {"command": command(TABLE, tmp_path), "commit": command(NOTING, told)}
    (tmp_path / "in" / "2").write_text("c\n")
    drain(spark, tmp_path, **told_of)
    (one,) = [json.loads(line) for line in told.read_text().splitlines()]
    assert (one["batch"], one["messages"]) == (1, 1)
    assert one["epoch"].endswith("-2")


@pytest.mark.parametrize("option", ["path", "commit"])
def test_checkpoint_is_durable_when_its_batch_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    """Otherwise Spark might plan other rows for a batch that counts as loaded."""
    disk, lost = Disk(), list[list[str]]()
    checkpoint = tmp_path / "queries" / "checkpoint"
    (checkpoint / "offsets").mkdir(parents=True)
    (checkpoint / "offsets" / "0").write_text("of the batch")
    options = {
        "command": "x",
        "checkpointLocation": f"file:{checkpoint}",
        option: str(tmp_path / "o"),
    }
    monkeypatch.setattr(os, "fsync", disk.fsync)

    def committing(*_: object) -> None:
        lost.append([*disk.lost(tmp_path / "queries")])

    monkeypatch.setattr(Staged, "commit_once", committing)
    monkeypatch.setattr(module, "_tell", committing)
    source = WorkerDataSource(CaseInsensitiveDict(options))
    writer = source.streamWriter(StructType().add("t", "string"), overwrite=False)
    epoch = EpochOfWrite("query", 1)
    part = WrittenPart(epoch=epoch, partition=0, attempt="0-1", messages=1)
    writer.commit([part], 0)
    assert lost
    assert [one for one in lost if one] == []


def batch(path: Path, number: int = 7) -> Staged:
    """Return the files of a batch of a query."""
    return Staged(path, EpochOfWrite("query", number))


def stage(staged: Staged, attempt: str, name: str) -> None:
    """Write a file as the worker of an attempt does."""
    staged.begin()
    with staged.attempt(attempt) as folder:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def parts(path: Path) -> list[str]:
    """Return the names of the files that readers see."""
    return sorted(str(file.relative_to(path)) for file in path.rglob("part-*"))


class Died(Exception):
    """Stand-in for the end of the driver."""


@pytest.mark.parametrize("step", ["rename", "store", "move"])
def test_commit_that_was_torn_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Wherever it was interrupted, the files of one attempt are there, once."""
    stage(batch(tmp_path, 6), "0-0", "before")
    batch(tmp_path, 6).commit_once([(0, "0-0")])
    torn = batch(tmp_path)
    for name in ("old", "older"):
        stage(torn, f"0-{name}", name)
    with monkeypatch.context() as patch:

        def dies(*_: object, **__: object) -> None:
            raise Died

        if step == "rename":
            # By then, one of the two files has been moved.
            rename, left = Path.rename, [0]

            def renamed(self: Path, target: Path) -> Path:
                if not left:
                    raise Died
                left.pop()
                return rename(self, target)

            patch.setattr(Path, "rename", renamed)
        else:
            owner = PositionFile if step == "store" else EpochFiles
            patch.setattr(owner, step, dies)
        with pytest.raises(Died):
            torn.commit_once([(0, "0-old"), (1, "0-older")])
    assert parts(tmp_path) == ["part-query-6-00000-before"]
    again = batch(tmp_path)
    stage(again, "0-new", "day=1/new")
    again.commit_once([(0, "0-new")])
    whole = {
        "rename": ["day=1/part-query-7-00000-new"],
        "store": ["day=1/part-query-7-00000-new"],
        "move": ["part-query-7-00000-old", "part-query-7-00001-older"],
    }[step]
    assert parts(tmp_path) == sorted(["part-query-6-00000-before", *whole])
    again = batch(tmp_path)
    stage(again, "0-newer", "newer")
    again.commit_once([(0, "0-newer")])
    assert parts(tmp_path) == sorted(["part-query-6-00000-before", *whole])
    assert not list(tmp_path.glob(".epoch=*"))


def test_commit_that_outlives_its_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    The next run commits the batch, and another, before it: it counts no more.

    Otherwise the record would be of the earlier batch again (issue 23).
    """
    late, flock = batch(tmp_path), fcntl.flock
    stage(late, "0-late", "late")

    def waits(file: IO[bytes], operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        for number, name in ((7, "again"), (8, "next")):
            stage(batch(tmp_path, number), f"0-{name}", name)
            batch(tmp_path, number).commit_once([(0, f"0-{name}")])
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", waits)
    late.commit_once([(0, "0-late")])
    assert late.done == 8
    assert parts(tmp_path) == ["part-query-7-00000-again", "part-query-8-00000-next"]


def test_commits_of_a_query_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as one seals, records and moves, another waits (issue 23)."""
    held = []

    def tries(*_: object, **__: object) -> None:
        (lock,) = (tmp_path / "_etlstage" / "streams").glob("*.lock")
        with lock.open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held.append(lock.name)

    monkeypatch.setattr(EpochFiles, "seal", tries)
    monkeypatch.setattr(PositionFile, "store", tries)
    monkeypatch.setattr(EpochFiles, "move", tries)
    stage(batch(tmp_path), "0-1", "rows")
    batch(tmp_path).commit_once([(0, "0-1")])
    assert held == ["query.lock"] * 3


def test_attempt_whose_files_are_gone_is_not_committed(tmp_path: Path) -> None:
    """Such as after an abort: the batch comes again (issue 23)."""
    staged = batch(tmp_path)
    stage(staged, "0-1", "rows")
    staged.undo(done=0)
    with pytest.raises(FileNotFoundError, match="0-1"):
        staged.commit_once([(0, "0-1")])
    assert staged.done == 0


def test_attempts_that_do_not_count_are_removed(tmp_path: Path) -> None:
    """They come from lost executors and from speculation."""
    staged = batch(tmp_path)
    for attempt in ("0-0-a", "0-1-b", "1-0-c"):
        stage(staged, attempt, attempt)
    staged.commit_once([(0, "0-1-b"), (1, "1-0-c")])
    assert parts(tmp_path) == ["part-query-7-00000-0-1-b", "part-query-7-00001-1-0-c"]
    assert not list(tmp_path.glob(".epoch=*"))


def test_attempts_that_run_when_a_write_is_undone_leave_nothing(
    tmp_path: Path,
) -> None:
    """Spark does not wait for them, whether they fail or succeed later."""
    staged = batch(tmp_path)
    staged.begin()
    with staged.attempt("0-0") as folder, (folder / "rows").open("w") as rows:
        staged.undo(done=0)
        rows.write("a")
        with pytest.raises(FileNotFoundError):
            (folder / "more").touch()
    with pytest.raises(FileNotFoundError), staged.attempt("0-1"):
        pass
    assert not list(tmp_path.iterdir())


def test_what_is_committed_is_durable(tmp_path: Path, synced: list[Path]) -> None:
    """Files, names and folders are synced before the commit is recorded (issue 14)."""
    out = tmp_path / "new" / "out"
    staged = batch(out)
    stage(staged, "0-1", "day/rows")
    staged.commit_once([(0, "0-1")])
    (record,) = (out / "_etlstage" / "streams").glob("*.json")
    (recorded,) = (
        n for n, path in enumerate(synced) if path == record.with_suffix(".new")
    )
    before, behind = synced[:recorded], synced[recorded:]
    aside = out / ".epoch=query-7.1"
    assert {aside / "day" / "00000-rows", aside / "day", out, tmp_path} <= set(before)
    assert {out / "day", out} <= set(behind)


def test_batch_that_is_aborted_leaves_nothing(tmp_path: Path) -> None:
    """But a recorded batch stays, and is moved into place if it was not."""
    staged = batch(tmp_path)
    stage(staged, "0-1", "old")
    staged.seal([(0, "0-1")])
    staged.undo(done=6)
    assert list(tmp_path.iterdir()) == []
    stage(staged, "0-2", "new")
    staged.seal([(0, "0-2")])
    stage(staged, "0-3", "newer")
    staged.undo(done=7)
    assert parts(tmp_path) == ["part-query-7-00000-new"]
    assert not list(tmp_path.glob(".epoch=*"))
