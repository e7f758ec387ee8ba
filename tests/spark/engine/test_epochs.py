"""Each row and letter once, on executors, wherever a start was interrupted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import anyio
import anyio.from_thread
import pytest
from pyspark.sql import DataFrame, SparkSession

from etlstage.pipeline import DeadLetter, DeadLetters, Pipeline, Report
from etlstage.pipeline.dead_letter.files import letter_files, read_letters
from etlstage.pipeline.delivery.record import CommitRecord
from etlstage.spark.engine.staging import Staging

pytestmark = [pytest.mark.spark, pytest.mark.anyio]

WORKER = """\
import random
from etlstage import worker

def answer(message):
    if message == b"7":
        raise worker.Refuse("seven")
    yield message + b" %d" % random.randrange(10**9)

worker.transform(answer)
"""
FILE = """\
name: p
engine: {engine}
delivery: exactly-once
state: state
extract:
  spark: {{path: in, format: text{options}}}
transform:
  - name: first
    worker: {{command: [python, worker.py]}}
load:
  spark: {{path: out, mode: {mode}}}
"""


class Crash(Exception):
    """Stand-in for the end of the process."""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a pipeline of twenty numbers in two files."""

    def write(engine: str, *, mode: str = "error", options: str = "") -> Path:
        (tmp_path / "worker.py").write_text(WORKER)
        (tmp_path / "in").mkdir(exist_ok=True)
        for name, numbers in ("a", range(10)), ("b", range(10, 20)):
            text = "".join(f"{n}\n" for n in numbers)
            (tmp_path / "in" / f"{name}.txt").write_text(text)
        path = tmp_path / "p.yaml"
        path.write_text(FILE.format(engine=engine, mode=mode, options=options))
        return path

    return write


async def run(path: Path, spark: SparkSession, crash: str = "") -> Report:
    """Run a pipeline; with ``crash``, up to that step of its commit."""
    runner = Pipeline.from_yaml(path, spark=spark)

    def at(step: str) -> None:
        if step == crash:
            raise Crash(step)

    assert runner._delivery is not None
    runner._delivery.at = at
    with anyio.fail_after(150):
        report = await runner.run()
    assert crash in str(report.error) if crash else report.error is None
    return report


def rows(spark: SparkSession, folder: Path) -> Counter[int]:
    """Return the numbers in the output, with their counts."""
    found = spark.read.parquet(str(folder / "out")).collect()
    return Counter(int(row.value.split()[0]) for row in found)


def epochs(folder: Path) -> set[str]:
    """Return the epochs that readers see; check that there are no other files."""
    names = {entry.name for entry in (folder / "out").glob("[!.]*")} - {"_SUCCESS"}
    assert all(name.startswith("part-") for name in names)
    return {"-".join(name.split("-")[1:3]) for name in names}


def letters(folder: Path) -> list[bytes]:
    """Return the dead-lettered messages."""
    return [
        letter.message
        for path in letter_files(folder / "state")
        for letter in read_letters(path)
        if isinstance(letter, DeadLetter)
    ]


def counts(report: Report) -> list[tuple[int, ...]]:
    """Return, by stage: received, done, dead, produced."""
    return [(a.received, a.done, a.dead, a.produced) for a in report.ledger]


ONCE = Counter(n for n in range(20) if n != 7)
ALL = [(0, 0, 0, 20), (20, 19, 1, 19), (19, 19, 0, 0)]


async def test_run_on_executors_is_one_epoch(
    spark: SparkSession, write: Callable[..., Path], tmp_path: Path
) -> None:
    """Staged results are loaded without running the workers again (issue 14)."""
    path = write("spark")
    report = await run(path, spark, "begin")
    assert not (tmp_path / "out").exists()
    (tmp_path / "worker.py").unlink()
    report = await run(path, spark, "aside")
    assert len(list((tmp_path / "out").glob(".epoch=*"))) == 1
    again = await run(path, spark)
    assert again.run == report.run
    assert rows(spark, tmp_path) == ONCE
    assert letters(tmp_path) == [b"7"]
    assert counts(again) == ALL
    record = CommitRecord.latest(tmp_path / "state")
    assert (record.ended, record.position, record.epoch) == (True, None, 1)
    assert epochs(tmp_path) == {f"{record.load}-1"}
    assert not list((tmp_path / "state").glob("staging*"))

    # The next run is another load with a single epoch, its first.
    path = write("spark", mode="overwrite")
    report = await run(path, spark, "recorded")
    assert epochs(tmp_path) == {f"{record.load}-1"}  # replaced files are still there
    assert CommitRecord.latest(tmp_path / "state").pending
    shown = await run(path, spark, "ended")
    assert shown.run == report.run != again.run
    assert rows(spark, tmp_path) == ONCE
    last = CommitRecord.latest(tmp_path / "state")
    assert epochs(tmp_path) == {f"{last.load}-1"} != {f"{record.load}-1"}
    assert counts(await run(path, spark)) == ALL
    assert not CommitRecord.latest(tmp_path / "state").pending
    assert letters(tmp_path) == [b"7", b"7"]


async def test_epoch_has_no_more_than_its_bounds(
    spark: SparkSession, write: Callable[..., Path]
) -> None:
    """Its source is read in small enough parts: 500 once became 4,993 (issue 23)."""
    path = write("local")
    path.write_text(
        path.read_text().replace("path: out,", "path: out, epoch: {messages: 4},")
    )
    runner = Pipeline.from_yaml(path, spark=spark)
    loaded = [0]

    def at(step: str) -> None:
        if step == "recorded":
            loaded.append(runner.ledger[-1].done)

    assert runner._delivery is not None
    runner._delivery.at = at
    report = await runner.run()
    assert report.error is None
    assert loaded[-1] == 19
    sizes = [b - a for a, b in pairwise(loaded)]
    assert len(sizes) > 4
    assert max(sizes) <= 4


async def test_jvm_that_ends_behind_the_stages_is_reported(
    spark: SparkSession,
    write: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not reported as a refused connection (issue 14)."""

    def gone(_staging: Staging, _spark: SparkSession) -> DataFrame:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(Staging, "messages", gone)
    await run(write("spark"), spark, "the JVM of Spark has exited")


async def test_stages_that_were_mended_run_again(
    spark: SparkSession, write: Callable[..., Path], tmp_path: Path
) -> None:
    """Their results did not fit, or are of other settings: none is kept (issue 14)."""
    path = write("spark")
    text = path.read_text()
    strict = text.replace("path: out,", "path: out, schema: n long,")
    path.write_text(f"{strict}  on_error: {{then: fail}}\n")
    report = await Pipeline.from_yaml(path, spark=spark).run()
    assert "19 of 19 messages do not fit" in str(report.error)
    assert not list((tmp_path / "state").glob("staging*"))
    path.write_text(text)
    await run(path, spark, "begin")
    path.write_text(text.replace("name: first\n", "name: first\n    workers: 2\n"))
    (tmp_path / "worker.py").write_text(WORKER.replace("7", "8"))
    await run(path, spark)
    assert rows(spark, tmp_path) == Counter(n for n in range(20) if n != 8)
    assert letters(tmp_path) == [b"8"]


async def test_signal_that_comes_when_letters_are_kept(
    spark: SparkSession,
    write: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run still loads: a next run would keep the same letters again (issue 14)."""
    runner = Pipeline.from_yaml(write("spark"), spark=spark)
    adopt = DeadLetters.adopt

    def drained(letters: DeadLetters, letter: DeadLetter, *, place: int) -> None:
        adopt(letters, letter, place=place)
        anyio.from_thread.run_sync(runner.drain)

    monkeypatch.setattr(DeadLetters, "adopt", drained)
    with anyio.fail_after(150):
        report = await runner.run()
    assert report.status == "done"
    assert rows(spark, tmp_path) == ONCE
    assert letters(tmp_path) == [b"7"]
    assert CommitRecord.latest(tmp_path / "state").ended


async def test_batch_of_a_stream_is_an_epoch(
    spark: SparkSession, write: Callable[..., Path], tmp_path: Path
) -> None:
    """Wherever starts are interrupted; the first batch replaces old rows (issue 14)."""
    options = ', options: {maxFilesPerTrigger: "1"}'
    path = write("streaming", mode="overwrite", options=options)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "others").touch()
    await run(path, spark, "begin")
    assert (tmp_path / "out" / "others").exists()
    await run(path, spark, "aside")
    report = await run(path, spark, "recorded")
    assert CommitRecord.latest(tmp_path / "state").epoch == 1
    again = await run(path, spark)
    assert again.run == report.run
    assert rows(spark, tmp_path) == ONCE
    assert letters(tmp_path) == [b"7"]
    assert counts(again) == ALL
    record = CommitRecord.latest(tmp_path / "state")
    assert (record.ended, record.epoch) == (True, 2)
    assert epochs(tmp_path) == {f"{record.load}-{number}" for number in (1, 2)}
