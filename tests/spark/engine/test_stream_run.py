"""Engine ``streaming``: batches of a stream, each loaded once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from etlstage.errors import SourceFailed
from etlstage.pipeline import Pipeline, Report
from etlstage.pipeline.dead_letter.files import letter_files, read_letters
from etlstage.pipeline.delivery.delivery import Delivery, take_over
from etlstage.pipeline.delivery.record import CommitRecord
from etlstage.pipeline.runner import Runner
from etlstage.spark.engine.stream_run import StreamingPipeline
from tests.crash.power import Disk
from tests.spark.driver import environment
from tests.spark.jobs import running
from tests.spark.processes import HANGING, are_gone, wait_for_pids

pytestmark = [pytest.mark.spark, pytest.mark.anyio]

# The messages of Spark 4.3: of a batch, in lower case; of a data source.
TOO_SLOW = (
    "timed out while waiting for the Python worker to connect back",
    "terminated with exception: Python worker failed to connect back. SQLSTATE: XXKST",
)
WORKER = """\
import json, os
from etlstage import worker

def clean(message):
    row = json.loads(message)
    if row["id"] == 13:
        os._exit(3)
    yield json.dumps({"id": row["id"]}).encode()

worker.transform(clean)
"""
FILE = """\
name: s
engine: streaming
delivery: {delivery}
state: state
extract:
  spark: {{format: json, path: in, schema: "id long", options: {{maxFilesPerTrigger: "1"}}}}
  {every}
transform:
  - name: clean
    worker: {{command: [python, worker.py]}}
    restart: {{delay: 10ms}}
load:
  spark: {{format: parquet, path: out, schema: id long, mode: {mode}}}
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a pipeline over a folder of files."""

    def write(
        *, every: str = "", delivery: str = "exactly-once", mode: str = "append"
    ) -> Path:
        (tmp_path / "worker.py").write_text(WORKER)
        (tmp_path / "in").mkdir(exist_ok=True)
        path = tmp_path / "s.yaml"
        path.write_text(FILE.format(every=every, delivery=delivery, mode=mode))
        return path

    return write


def feed(folder: Path, name: str, *ids: int) -> None:
    """Add a file to the stream's input."""
    (folder / "in").mkdir(exist_ok=True)
    new = folder / f"{name}.new"
    new.write_text("\n".join(json.dumps({"id": n}) for n in ids))
    new.rename(folder / "in" / f"{name}.json")


async def batch(folder: Path, number: int) -> None:
    """Wait until a batch is recorded."""
    while CommitRecord.latest(folder / "state").epoch <= number:  # noqa: ASYNC110 - Spark acts
        await anyio.sleep(0.05)


async def run(path: Path, spark: SparkSession) -> Report:
    """Run a pipeline."""
    return await ended(Pipeline.from_yaml(path, spark=spark))


async def ended(runner: Runner) -> Report:
    """Run a pipeline, with a timeout."""
    with anyio.fail_after(150):
        return await runner.run()


def loaded(spark: SparkSession, folder: Path) -> Counter[int]:
    """Return the ids in the output, with their counts."""
    return Counter(row.id for row in spark.read.parquet(str(folder / "out")).collect())


def dead(folder: Path) -> list[bytes]:
    """Return the dead-lettered messages."""
    found = [x for path in letter_files(folder / "state") for x in read_letters(path)]
    return [x.message for x in found]  # type: ignore[union-attr]


async def test_what_is_there_is_loaded_once(
    spark: SparkSession, write: Callable[..., Path], tmp_path: Path
) -> None:
    """Batch by batch, until the input is exhausted; the next run loads new files."""
    path = write(mode="error")
    feed(tmp_path, "a", *range(10))
    feed(tmp_path, "b", *range(10, 20))
    runner = Pipeline.from_yaml(path, spark=spark)
    report = await ended(runner)
    assert report.error is None
    assert report.status == "done"
    assert loaded(spark, tmp_path) == Counter(n for n in range(20) if n != 13)
    assert [letter.message for letter in runner.letters()] == dead(tmp_path)
    clean, load = list(report.ledger)[1:]
    assert (clean.received, clean.done, clean.dead) == (20, 19, 1)
    assert (load.received, load.done) == (19, 19)
    assert dead(tmp_path) == [b'{"id":13}']
    assert "wrote 19 messages in 2 epochs to" in report.landed
    assert report.dead_letters.messages
    found = {entry.name.split("-", 2)[-1][:2] for entry in (tmp_path / "out").iterdir()}
    assert found == {"_S", "1-", "2-"}

    feed(tmp_path, "c", 100, 101)
    runner = Pipeline.from_yaml(path, spark=spark)
    report = await ended(runner)
    assert report.error is None
    assert list(runner.letters()) == []  # the first run's are not this one's
    assert "wrote 2 messages in 1 epoch" in report.landed
    assert loaded(spark, tmp_path)[100] == 1
    report = await run(path, spark)
    assert report.error is None
    assert report.landed.startswith("nothing new was written to")


@pytest.mark.classic  # there this process records the batch
async def test_batch_is_on_the_disk_when_it_is_recorded(
    spark: SparkSession,
    write: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So is Spark's checkpoint: without it, other rows would count as loaded."""
    disk, keep, lost = Disk(), Delivery.keep, list[list[str]]()

    def kept(self: Delivery, record: CommitRecord) -> None:
        keep(self, record)
        lost.append([*disk.lost(tmp_path / "state", tmp_path / "out")])

    monkeypatch.setattr(os, "fsync", disk.fsync)
    monkeypatch.setattr(Delivery, "keep", kept)
    path = write()
    feed(tmp_path, "a", *range(20))
    feed(tmp_path, "b", *range(20, 40))
    report = await run(path, spark)
    assert report.error is None
    assert lost == [[], []]


async def test_batch_that_fails_is_run_again(
    spark: SparkSession, write: Callable[..., Path], tmp_path: Path
) -> None:
    """The run ends with the stage's error, and resumes when the stage is mended."""
    path = write()
    broken = path.read_text().replace(
        "restart:", "on_error: {retries: 0, then: fail}\n    restart:"
    )
    whole = path.read_text()
    path.write_text(broken)
    feed(tmp_path, "a", 12, 13, 14)
    report = await run(path, spark)
    assert report.status == "failed"
    assert "stage clean: worker clean-1" in str(report.error)
    assert "exited with status 3" in str(report.error)
    assert "Traceback" not in str(report.error)
    report.ledger.check(whole=False)
    assert not (tmp_path / "out").exists()
    path.write_text(whole)
    report = await run(path, spark)
    assert report.error is None
    assert loaded(spark, tmp_path) == Counter([12, 14])


@pytest.mark.timeout(400)  # three queries, the first of a session among them
@pytest.mark.parametrize(("slow", "text"), [(2, TOO_SLOW[0]), (3, TOO_SLOW[1])])
async def test_query_whose_python_is_slow_is_started_again(
    spark: SparkSession,
    write: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    slow: int,
    text: str,
) -> None:
    """Up to twice: Spark waits only ten seconds, which a busy machine may exceed."""
    watch = StreamingPipeline._watch
    starts = []

    async def watch_slow(self: StreamingPipeline, query: StreamingQuery) -> None:
        starts.append(query)
        await watch(self, query)
        if len(starts) <= slow:
            raise SourceFailed(f"extract: {text}", stage="extract")

    monkeypatch.setattr(StreamingPipeline, "_watch", watch_slow)
    feed(tmp_path, "a", *range(10))
    report = await run(write(), spark)
    assert len(starts) == 3
    assert (report.error is None) == (slow == 2)
    assert report.ledger[2].done == 10
    assert loaded(spark, tmp_path) == Counter(range(10))


async def test_stream_drains_behind_the_batch_under_way(
    spark: SparkSession, write: Callable[..., Path], tmp_path: Path
) -> None:
    """It is endless until it is drained; later files are left to the next run."""
    path = write(every="every: 100ms", delivery="at-least-once")
    feed(tmp_path, "a", 1, 2, 3)
    runner = Pipeline.from_yaml(path, spark=spark)
    async with running(runner) as reports:
        await batch(tmp_path, 0)
        feed(tmp_path, "b", 4)
        await batch(tmp_path, 1)
        runner.drain()
    (report,) = reports
    assert report.status == "drained"
    assert not (tmp_path / "out" / "_SUCCESS").exists()  # more is to come (issue 23)
    assert report.ledger[2].done == 4
    assert CommitRecord.latest(tmp_path / "state").delivery == "at-least-once"
    assert loaded(spark, tmp_path) == Counter([1, 2, 3, 4])
    feed(tmp_path, "c", 5)
    path = write()
    report = await run(path, spark)
    assert loaded(spark, tmp_path) == Counter([1, 2, 3, 4, 5])
    assert (tmp_path / "out" / "_SUCCESS").exists()


async def test_idle_stream_that_is_taken_over_ends(
    spark: SparkSession, write: Callable[..., Path], tmp_path: Path
) -> None:
    """Else it would still write to the checkpoint of the next run (issue 23)."""
    path = write(every="every: 100ms")
    feed(tmp_path, "a", 1)
    runner = Pipeline.from_yaml(path, spark=spark)
    async with running(runner) as reports:
        await batch(tmp_path, 0)
        take_over(tmp_path / "state")
    (report,) = reports
    assert "another run has taken over" in str(report.error)
    assert (await run(write(), spark)).status == "done"
    assert loaded(spark, tmp_path) == Counter([1])


async def test_stream_that_is_drained_before_it_repeats_a_batch(
    spark: SparkSession, write: Callable[..., Path], tmp_path: Path
) -> None:
    """It stays interrupted: files of the batch may have to be moved (issue 23)."""
    path, state = write(), tmp_path / "state"
    feed(tmp_path, "a", 1)
    assert (await run(path, spark)).status == "done"
    # As if it was killed between its record and the end of the batch.
    replace(CommitRecord.latest(state), ended=False).store(state)
    for name in ("0", ".0.crc"):
        (state / "checkpoint" / "commits" / name).unlink()
    runner = Pipeline.from_yaml(path, spark=spark)
    runner.drain()
    assert (await runner.run()).status == "drained"
    assert not CommitRecord.latest(state).ended
    assert (await run(path, spark)).status == "done"
    assert CommitRecord.latest(state).ended
    assert loaded(spark, tmp_path) == Counter([1])


async def test_stream_stops_at_once_and_runs_its_batch_again(
    spark: SparkSession, write: Callable[..., Path], tmp_path: Path
) -> None:
    """A worker that never replies does not delay cancelling the run."""
    path = write(every="every: 100ms")
    (tmp_path / "worker.py").write_text(HANGING.replace("sys.argv[1]", "'pids'"))
    (tmp_path / "pids").mkdir()
    feed(tmp_path, "a", 1, 2, 3)
    runner = Pipeline.from_yaml(path, spark=spark)
    with anyio.fail_after(150):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(runner.run)
            pids = await anyio.to_thread.run_sync(wait_for_pids, tmp_path / "pids")
            tasks.cancel_scope.cancel()
    assert await anyio.to_thread.run_sync(are_gone, pids[1:])
    assert CommitRecord.latest(tmp_path / "state").epoch == 0
    assert not (tmp_path / "out").exists()
    report = await run(write(), spark)
    assert report.error is None
    assert loaded(spark, tmp_path) == Counter([1, 2, 3])


async def test_status_names_the_batch_that_runs(
    spark: SparkSession, write: Callable[..., Path], tmp_path: Path
) -> None:
    """Nothing is counted before its end: the status tells it from no input (issue 26)."""
    path = write(every="every: 100ms")
    (tmp_path / "worker.py").write_text(HANGING.replace("sys.argv[1]", "'pids'"))
    (tmp_path / "pids").mkdir()
    (tmp_path / "in").mkdir(exist_ok=True)
    runner = Pipeline.from_yaml(path, spark=spark)
    assert runner.activity == "waiting for the first batch"
    with anyio.fail_after(150):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(runner.run)
            feed(tmp_path, "a", 1)
            while runner.activity != "waiting for batch 0, which is running":  # noqa: ASYNC110 - Spark acts
                await anyio.sleep(0.05)
            tasks.cancel_scope.cancel()


async def test_batch_is_broken_off_behind_the_drain_limit(
    spark: SparkSession, write: Callable[..., Path], tmp_path: Path
) -> None:
    """The next run repeats it, even if its worker never replied (issue 23)."""
    path = write(every="every: 100ms")
    path.write_text(path.read_text() + "drain: 10ms\n")
    (tmp_path / "worker.py").write_text(HANGING.replace("sys.argv[1]", "'pids'"))
    (tmp_path / "pids").mkdir()
    feed(tmp_path, "a", 1, 2, 3)
    runner = Pipeline.from_yaml(path, spark=spark)
    async with running(runner) as reports:
        pids = await anyio.to_thread.run_sync(wait_for_pids, tmp_path / "pids")
        runner.drain()
    (report,) = reports
    assert (report.status, report.error) == ("drained", None)
    assert await anyio.to_thread.run_sync(are_gone, pids[1:])
    assert CommitRecord.latest(tmp_path / "state").epoch == 0
    assert not (tmp_path / "out").exists()
    report = await run(write(), spark)
    assert (report.status, report.error) == ("done", None)
    assert report.ledger[2].done == 3
    assert loaded(spark, tmp_path) == Counter([1, 2, 3])


async def test_program_that_was_sent_runs(
    spark: SparkSession, write: Callable[..., Path], tmp_path: Path
) -> None:
    """Not the local one, which would find the pipeline's file beside it."""
    path = write()
    program = WORKER.replace('row["id"] == 13', 'os.path.exists("s.yaml")')
    (tmp_path / "sent_to_stream.py").write_text(program)
    text = path.read_text().replace("worker.py", "sent_to_stream.py")
    path.write_text(f"{text}spark: {{files: [sent_to_stream.py]}}\n")
    feed(tmp_path, "a", *range(10))
    report = await run(path, spark)
    assert report.error is None
    assert dead(tmp_path) == []
    assert loaded(spark, tmp_path) == Counter(range(10))


async def test_mode_error_holds_for_a_table(
    spark: SparkSession, write: Callable[..., Path], tmp_path: Path
) -> None:
    """No row is added to it; its own batches are, in later runs, too (issue 23)."""
    table = f"stream_{tmp_path.name.replace('-', '_')}"
    path = write(mode="error", delivery="at-least-once")
    text = path.read_text().replace("format: parquet, path: out", f"table: {table}")
    path.write_text(text)
    feed(tmp_path, "a", 1)
    feed(tmp_path, "b", 2)
    spark.sql(f"create table {table} using parquet as select 0L as id")
    report = await run(path, spark)
    assert str(report.error) == (
        f"table {table} exists already: drop it, or set mode to append or overwrite"
    )
    assert spark.table(table).count() == 1
    spark.sql(f"drop table {table}")
    assert (await run(path, spark)).error is None
    feed(tmp_path, "c", 3)
    assert (await run(path, spark)).error is None
    assert sorted(row.id for row in spark.table(table).collect()) == [1, 2, 3]
    spark.sql(f"drop table {table}")


@pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])
async def test_stream_that_continues_elsewhere_replaces_nothing(
    spark: SparkSession, write: Callable[..., Path], tmp_path: Path, delivery: str
) -> None:
    """Output that is there already is an error in mode overwrite, too (issue 23)."""
    path = write(mode="overwrite", delivery=delivery)
    feed(tmp_path, "a", 1)
    assert (await run(path, spark)).error is None
    path.write_text(path.read_text().replace("path: out", "path: other"))
    stale = tmp_path / "other" / "stale.parquet"
    (tmp_path / "other" / ".epoch=killed-2.1").mkdir(parents=True)
    stale.touch()
    feed(tmp_path, "b", 2)
    report = await run(path, spark)
    assert "other exists already, and nothing is replaced there" in str(report.error)
    stale.unlink()
    for letter, number in (("c", 3), ("d", 4)):
        assert (await run(path, spark)).error is None
        feed(tmp_path, letter, number)
    rows = spark.read.parquet(str(tmp_path / "other")).collect()
    assert sorted(row.id for row in rows) == [2, 3]


async def test_stream_continues_where_a_path_leads_to_the_same_output(
    spark: SparkSession, write: Callable[..., Path], tmp_path: Path
) -> None:
    """It is named by way of a link (issue 23)."""
    path = write(mode="overwrite")
    feed(tmp_path, "a", 1)
    assert (await run(path, spark)).error is None
    (tmp_path / "link").symlink_to(tmp_path)
    path.write_text(path.read_text().replace("path: out", "path: link/out"))
    feed(tmp_path, "b", 2)
    assert (await run(path, spark)).error is None
    assert spark.read.parquet(str(tmp_path / "out")).count() == 2


async def test_what_is_wrong_is_reported(
    spark: SparkSession, write: Callable[..., Path], tmp_path: Path
) -> None:
    """Such as output that exists already, or a source without a schema."""
    path = write(mode="error")
    (tmp_path / "out").mkdir()
    report = await run(path, spark)
    assert "out exists already: remove it, or set mode to append" in str(report.error)
    path.write_text(path.read_text().replace(', schema: "id long"', ""))
    report = await run(path, spark)
    assert str(report.error).startswith("extract: ")
    assert "set schema, as in 'id long, title string'" in str(report.error)


async def test_state_is_used_by_one_process_at_a_time(
    spark: SparkSession, write: Callable[..., Path], tmp_path: Path
) -> None:
    """A second one is refused, and leaves the first one's request to stop alone."""
    path = write()
    feed(tmp_path, "a", 1)
    stop = tmp_path / "state" / "stop-1"
    with Delivery(stop.parent):
        stop.touch()
        report = await run(path, spark)
        assert report.status == "failed"
        why = f"another run uses the state directory {tmp_path / 'state'} (pid "
        assert str(report.error).startswith(why)
        assert stop.exists()
    assert (await run(path, spark)).status == "done"


async def test_state_that_can_not_be_written(
    spark: SparkSession, write: Callable[..., Path], tmp_path: Path
) -> None:
    """One line with the folder, before Spark does anything."""
    path = write()
    (tmp_path / "state").write_text("a file")
    report = await run(path, spark)
    assert str(report.error) == (
        f"can't use the state directory {tmp_path / 'state'}: not a directory;"
        " set another state"
    )


CRASHING = """
import os, signal, sys
import anyio
from etlstage.pipeline import Pipeline
from etlstage.spark import Session

where, left = sys.argv[1], int(sys.argv[2])

def at(step):
    global left
    left -= step == where
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)

with_spark = Session(master="local[2]")
spark = with_spark.start()
runner = Pipeline.from_yaml("s.yaml", spark=spark)
runner._delivery.at = at
report = anyio.run(runner.run)
assert report.error is None, report.error
"""


def crash(folder: Path, where: str) -> subprocess.CompletedProcess[str]:
    """Run the pipeline in a process that kills itself in its second batch."""
    return subprocess.run(
        [sys.executable, "-c", CRASHING, where, "1"],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.classic
@pytest.mark.parametrize("where", ["written", "recorded"])
async def test_crash_behind_the_load_costs_and_doubles_nothing(
    spark: SparkSession, write: Callable[..., Path], tmp_path: Path, where: str
) -> None:
    """SIGKILL between the sink's write and our record, or Spark's commit log."""
    path = write()
    feed(tmp_path, "a", *range(10))
    feed(tmp_path, "b", *range(10, 20))
    feed(tmp_path, "c", *range(20, 30))
    done = await anyio.to_thread.run_sync(crash, tmp_path, where)
    assert done.returncode == -9, done.stderr
    sealed = len(list((tmp_path / "out").glob(".epoch=*")))
    moved = {path.name.split("-")[2] for path in (tmp_path / "out").glob("part-*")}
    assert (sealed, len(moved)) == (1, 1)
    assert not (tmp_path / "state/checkpoint/commits/1").exists()
    assert not (tmp_path / "out" / "_SUCCESS").exists()
    report = await run(path, spark)
    assert report.error is None
    assert loaded(spark, tmp_path) == Counter(n for n in range(30) if n != 13)
    assert dead(tmp_path) == [b'{"id":13}']
    assert report.ledger[1].received == 30
    assert report.landed.startswith("wrote 29 messages to ")
    assert (tmp_path / "out" / "_SUCCESS").exists()
