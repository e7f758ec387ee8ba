from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, DataFrameWriter, SparkSession

from etlstage import ErrorPolicy, Stage, StageKind
from etlstage.pipeline import DeadLetters
from etlstage.pipeline.delivery.position import PositionFile
from etlstage.spark import register
from etlstage.spark.datasource.commit import AttemptFiles
from etlstage.spark.datasource.datasource import write_worker
from etlstage.spark.errors import explain
from etlstage.stage import RestartPolicy
from tests.spark.driver import Driver

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
    """Return the option for a worker that is ``program``."""
    return json.dumps([sys.executable, "-c", program, *map(str, arguments)])


def write(frame: DataFrame, **options: object) -> DataFrameWriter:
    """Return what writes ``frame``."""
    register(frame.sparkSession)
    writer = frame.write.format("etlstage").mode("append")
    for name, value in options.items():
        writer = writer.option(name.replace("__", "."), str(value))
    return writer


def texts(spark: SparkSession, *rows: str, partitions: int = 2) -> DataFrame:
    """Return a DataFrame with a column of texts, in partitions of equal size."""
    array = f"array({', '.join(map(repr, rows))})"
    frame = spark.range(0, len(rows), 1, partitions)
    return frame.selectExpr(f"element_at({array}, int(id) + 1) as t")


def failure(job: Callable[[], object]) -> str:
    """Return why something can't be done."""
    with pytest.raises(Exception) as raised:  # noqa: PT011 - its text is the point
        job()
    return explain(raised.value)


def files(path: Path) -> list[str]:
    """Return all files under ``path``, without what is different each time."""
    found = (file for file in path.rglob("*") if file.is_file())
    return sorted(
        "-".join(f.name.split("-")[:2] + f.name.split("-")[3:]) for f in found
    )


def lines(path: Path) -> list[str]:
    """Return the rows in all files under ``path``."""
    found = (file.read_text().splitlines() for file in path.rglob("part-*"))
    return sorted(line for rows in found for line in rows)


# --- once -------------------------------------------------------------------------


def test_files_of_all_partitions_are_in_place_after_the_commit(
    spark: SparkSession, tmp_path: Path
) -> None:
    """One for each, under a name that no other write has; nothing else is left."""
    frame = texts(spark, "a", "b", "c", "d")
    for _ in range(2):
        write(frame, command=command(STAGED, tmp_path / "k")).save(str(tmp_path / "o"))
    assert files(tmp_path / "o") == 2 * ["part-00000-rows"] + 2 * ["part-00001-rows"]
    assert lines(tmp_path / "o") == sorted("abcd" * 2)
    assert not (tmp_path / "o" / "_etlstage").exists()
    assert spark.read.text(str(tmp_path / "o")).count() == 8


def test_rows_become_messages(spark: SparkSession, tmp_path: Path) -> None:
    """JSON for many columns, bytes as they are; batches and folders if asked for."""
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
    """Neither of the partition that was refused, nor of the one that was not."""
    frame = texts(spark, "a", "b", "c", "refuse")
    writer = write(frame, command=command(STAGED, tmp_path / "k"))
    with pytest.raises(Exception, match="exited with status 7") as raised:
        writer.save(str(tmp_path / "o"))
    assert "(message 2 of partition 1)" in str(raised.value)
    assert list((tmp_path / "o").iterdir()) == []


def test_worker_must_end_well_too(spark: SparkSession, tmp_path: Path) -> None:
    """Its files may be incomplete if it does not, though it has answered."""
    writer = write(texts(spark, "a", "b"), command=command(STAGED, tmp_path / "k", 5))
    text = failure(lambda: writer.save(str(tmp_path / "o")))
    assert "exited with status 5 while it ended; 1 message" in text
    assert list((tmp_path / "o").iterdir()) == []


def test_null_is_no_message(spark: SparkSession, tmp_path: Path) -> None:
    """It is told from nothing."""
    frame = spark.createDataFrame([("a",), (None,)], "t string").coalesce(1)
    writer = write(frame, command=command(STAGED, tmp_path / "k"))
    text = failure(lambda: writer.save(str(tmp_path / "o")))
    assert "stage load: message is null in 1 of 2 rows" in text


def test_programs_make_a_write_final_or_undo_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    """They are told each attempt that counts, and of a failed one its partition."""
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
    assert len({one["write"] for one in found}) == 1
    rows = [(tmp_path / one["attempt"]).read_text() for one in found]
    assert rows == ["a\n", "b\nc\n"]
    told.unlink()
    writer = write(texts(spark, "a", "b", "refuse", partitions=3), **options)
    assert "status 7" in failure(writer.save)
    assert not told.exists()
    undone = [json.loads(s) for s in (tmp_path / "undone").read_text().splitlines()]
    assert [one["partition"] for one in undone] == [0, 1, 2]
    assert (undone[2]["attempt"], undone[2]["messages"]) == (None, None)
    assert (tmp_path / undone[0]["attempt"]).read_text() == "a\n"


def test_commit_that_fails_undoes_the_write(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The error tells that it was about the attempts."""
    options = {
        "command": command(TABLE, tmp_path),
        "commit": '["false"]',
        "abort": command(NOTING, tmp_path / "undone"),
    }
    text = failure(write(texts(spark, "a", "b"), **options).save)
    assert "exited with status 1" in text
    assert "(given the list of attempts)" in text
    assert len((tmp_path / "undone").read_text().splitlines()) == 2


def test_write_that_makes_no_sense_is_refused(spark: SparkSession) -> None:
    """Before a task runs."""
    frame = spark.range(1).selectExpr("id", "interval 1 day as i")
    text = failure(write(frame, command="x").save)
    assert "column 'i' has interval day, which can't be written as JSON" in text
    frame = spark.range(1)
    assert "(did you mean 'path'?)" in failure(write(frame, command="x", pth="o").save)
    text = failure(write(frame, command="x").mode("overwrite").save)
    assert "mode is overwrite, or complete, expected append" in text


def test_attempt_that_is_killed_leaves_no_row_behind(
    retrying: Driver, tmp_path: Path
) -> None:
    """The second attempt begins anew, and it alone is committed."""
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
    assert not (tmp_path / "o" / "_etlstage").exists()


def test_stage_with_a_report_keeps_whole_letters(
    spark: SparkSession, tmp_path: Path
) -> None:
    """With the partition and the place that the row says, and every attempt."""
    stage = Stage(
        name="load",
        kind=StageKind.LOAD,
        worker=tuple(json.loads(command(TABLE, tmp_path))),
        restart=RestartPolicy(delay=0.01),
        on_error=ErrorPolicy(retries=1),
    )
    rows = [(7, 0, "a"), (7, 1, "b"), (7, 4, "c"), (7, 5, "refuse"), (9, 2, "refuse")]
    frame = spark.createDataFrame(rows, "partition int, place long, raw string")
    letters = DeadLetters(tmp_path, pipeline="p", hidden={"refuse": "$SECRET"})
    account = write_worker(frame.coalesce(1), stage, letters=letters)
    assert account.messages == 5
    assert [number for number, _ in account.dead] == [7, 9]
    first, second = (letter for _, letter in account.dead)
    assert (first.place, second.place) == (5, 2)
    assert (first.stage, first.pipeline, first.run) == ("load", "p", letters.run)
    assert (first.message, first.kind) == (b"refuse", "WorkerLost")
    assert len(first.attempts) == 2
    assert "exited with status 7" in first.attempts[0].error
    assert first.config["name"] == "load"
    assert "ETLSTAGE_ATTEMPT" not in first.config["worker"]["env"]
    assert "$SECRET" in first.config["worker"]["command"][2]
    failing = replace(stage, on_error=ErrorPolicy(retries=0, then="fail"))
    with pytest.raises(Exception, match=r"\(message 4 of partition 0\)") as raised:
        write_worker(frame.coalesce(1), failing, letters=letters)
    assert "exited with status 7" in str(raised.value)
    assert "refuse" not in str(raised.value)


# --- the batches of a stream ------------------------------------------------------


def drain(spark: SparkSession, place: Path, **options: object) -> None:
    """Pass on what files there are, each a batch, from a folder of text files."""
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
    """A batch that failed comes again when the query does, and is loaded once."""
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
    assert [file.name for file in (tmp_path / "o" / "_etlstage").iterdir()] == [
        "streams"
    ]


def test_batch_that_is_committed_twice_is_loaded_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    """As after a crash between our commit and Spark's note of it."""
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
    assert one["write"].endswith("-1")


def torn(path: Path) -> AttemptFiles:
    """Return batch 7 of a query, of whose commit only a part was done."""
    (path / "part-00000-query-6-old").write_text("before")
    (path / "part-00000-query-7-old").write_text("torn")
    notes = PositionFile(path / "_etlstage" / "streams", "query")
    notes.store({"batch": 7, "whole": False})
    return AttemptFiles(path, "query-7")


def test_commit_that_was_torn_is_done_again(tmp_path: Path) -> None:
    """What it had moved is replaced, though the next attempt has other files."""
    batch = torn(tmp_path)
    (batch.make("0-1") / "new").write_text("whole")
    batch.publish_once([(0, "0-1")], "query", 7)
    names = sorted(file.name for file in tmp_path.glob("part-*"))
    assert names == ["part-00000-query-6-old", "part-00000-query-7-new"]
    (batch.make("0-2") / "newer").write_text("whole")
    batch.publish_once([(0, "0-2")], "query", 7)
    assert sorted(file.name for file in tmp_path.glob("part-*")) == names
    assert not (tmp_path / "_etlstage" / "staging").exists()


def test_what_is_committed_is_durable(tmp_path: Path, synced: list[Path]) -> None:
    """Files, names and folders, before it is noted that they are whole (issue 14)."""
    out = tmp_path / "new" / "out"
    batch = AttemptFiles(out, "query-7")
    (batch.make("0-1") / "day").mkdir()
    staged = out / "_etlstage" / "staging" / "query-7" / "0-1" / "day" / "rows"
    staged.write_text("whole")
    batch.publish_once([(0, "0-1")], "query", 7)
    (note,) = (out / "_etlstage" / "streams").iterdir()
    noted = [n for n, path in enumerate(synced) if path == note.with_suffix(".new")]
    before = synced[noted[0] : noted[1]]
    places = [out / "day", out, out.parent, tmp_path]
    assert {staged, *places} <= set(before)
    assert all(before.index(staged) < before.index(place) for place in places)


def test_names_that_a_torn_commit_left_stay_away(
    tmp_path: Path, synced: list[Path]
) -> None:
    """Else they are there again when the machine fails (issue 14)."""
    (tmp_path / "day").mkdir()
    batch = torn(tmp_path)
    (tmp_path / "part-00000-query-7-old").rename(tmp_path / "day/part-0-query-7-old")
    batch.publish_once([], "query", 7)
    assert list((tmp_path / "day").iterdir()) == []
    assert tmp_path / "day" in synced


def test_commit_that_was_torn_is_undone(tmp_path: Path) -> None:
    """By an abort; one of a batch that is in place undoes nothing of it."""
    batch = torn(tmp_path)
    batch.make("0-1")
    batch.undo_once("query", 7)
    names = [file.name for file in tmp_path.glob("part-*")]
    assert names == ["part-00000-query-6-old"]
    (batch.make("0-2") / "new").write_text("whole")
    batch.publish_once([(0, "0-2")], "query", 7)
    batch.make("0-3")
    batch.undo_once("query", 7)
    assert len(list(tmp_path.glob("part-*"))) == 2
    assert not (tmp_path / "_etlstage" / "staging").exists()
