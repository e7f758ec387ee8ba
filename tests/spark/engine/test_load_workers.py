"""Loading by load workers on the executors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

from etlstage.errors import StageError
from etlstage.messages import StageKind
from etlstage.pipeline import DeadLetters
from etlstage.pipeline.interfaces import Epochs
from etlstage.spark.engine.load_workers import LoadWorkers
from etlstage.spark.engine.staging import Staging
from etlstage.stage import ErrorBudget, ErrorPolicy, RestartPolicy, Stage

pytestmark = [pytest.mark.spark, pytest.mark.anyio]

LOAD = """\
import os, sys
from etlstage import worker
file = open(f"{sys.argv[1]}/{os.getpid()}", "ab", buffering=0)
worker.load(lambda message: file.write(message + b"\\n") and None)
"""
SPLIT = "spark.sql.files.maxPartitionBytes"


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    """Return a stage whose workers each write the loaded messages to a file."""
    folder = tmp_path / "loaded"
    folder.mkdir()
    command = (sys.executable, "-c", LOAD, str(folder))
    return Stage(name="load", kind=StageKind.LOAD, worker=command)


def loaded(folder: Path) -> list[list[int]]:
    """Return the numbers that each worker has loaded."""
    files = (folder / "loaded").iterdir()
    found = [[*map(int, path.read_text().split())] for path in files]
    return sorted(filter(None, found))


@pytest.fixture
def small_splits(spark: SparkSession) -> Iterator[None]:
    """Have Spark read files in small parts."""
    spark.conf.set(SPLIT, "16k")
    yield
    spark.conf.unset(SPLIT)


@pytest.mark.usefixtures("small_splits")
async def test_large_partition_stays_with_one_worker(
    spark: SparkSession, stage: Stage, tmp_path: Path
) -> None:
    """The tasks that read its file would otherwise load it concurrently (issue 14)."""
    rows = (
        spark.range(6000)
        .repartitionByRange(2, "id")
        .select(
            (sf.col("id") >= 3000).cast("int").alias("partition"),
            sf.col("id").alias("place"),
            sf.col("id").cast("string").cast("binary").alias("value"),
            sf.lit(None).cast("string").alias("note"),
        )
    )
    folder = str(tmp_path / "staged")
    small = rows.write.option("parquet.block.size", 4096)
    small.option("parquet.page.size", 1024).parquet(folder)
    messages = Staging(folder).messages(spark)
    tasks = messages.select("partition", sf.spark_partition_id()).distinct()
    assert tasks.count() > 2

    letters = DeadLetters(tmp_path / "state", pipeline="p")
    sink = LoadWorkers(stage, dead_letters=letters)
    await sink.load(messages, {0: 0, 1: 3000})

    assert (sink.account.received, sink.account.done) == (6000, 6000)
    assert loaded(tmp_path) == [[*range(3000)], [*range(3000, 6000)]]


async def test_batches_of_a_stream_leave_nothing_with_spark(
    spark: SparkSession, stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session never forgets a data source, and a stream may run for months."""

    def register(*_: object) -> None:
        raise AssertionError("unreachable: a data source is registered")

    monkeypatch.setattr(type(spark.dataSource), "register", register)
    letters = DeadLetters(tmp_path / "state", pipeline="p")
    stream = LoadWorkers(stage, dead_letters=letters)
    for batch in range(2):
        epochs = Epochs("l", batch, once=False, check=lambda: None)
        sink = stream.of_batch(spark, epochs, letters)
        messages = spark.createDataFrame(
            [(0, 0, b"%d" % batch)], "partition int, place long, raw binary"
        )
        await sink.load(messages, {0: 0})
        assert sink.account.done == 1
    assert loaded(tmp_path) == [[0], [1]]
    assert not stream.account.done


REFUSE = """\
import os
from etlstage import worker
def load(message):
    if message == b"refuse":
        os._exit(7)
worker.load(load)
"""


async def test_dead_letter_has_the_place_of_its_row(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Whatever the task; it has all its attempts, and no secrets."""
    stage = Stage(
        name="load",
        kind=StageKind.LOAD,
        worker=(sys.executable, "-c", REFUSE),
        restart=RestartPolicy(delay=0.01),
        on_error=ErrorPolicy(retries=1, budget=ErrorBudget(count=None, share=None)),
    )
    rows = [
        (7, 0, b"a"),
        (7, 1, b"b"),
        (7, 4, b"c"),
        (7, 5, b"refuse"),
        (9, 2, b"refuse"),
    ]
    frame = spark.createDataFrame(rows, "partition int, place long, raw binary")
    state = tmp_path / "state"
    letters = DeadLetters(state, pipeline="p", hidden={"refuse": "$SECRET"})
    sink = LoadWorkers(stage, dead_letters=letters)
    await sink.load(frame.coalesce(1), {7: 100, 9: 200})
    account = sink.account
    assert (account.received, account.done, account.dead) == (5, 3, 2)
    await letters.sync()
    first, second = letters.letters()
    assert (first.place, second.place) == (105, 202)
    assert (first.stage, first.pipeline, first.run) == ("load", "p", letters.run)
    assert (first.message, first.kind) == (b"refuse", "WorkerLost")
    assert len(first.attempts) == 2
    assert "exited with status 7" in first.attempts[0].error
    assert first.config["name"] == "load"
    assert "ETLSTAGE_PARTITION" not in first.config["worker"]["env"]
    assert "$SECRET" in first.config["worker"]["command"][2]

    failing = replace(stage, on_error=ErrorPolicy(retries=0, then="fail"))
    sink = LoadWorkers(failing, dead_letters=letters)
    with pytest.raises(StageError, match=r"\(message 106\)") as raised:
        await sink.load(frame.coalesce(1), {7: 100, 9: 200})
    assert "exited with status 7" in str(raised.value)
    assert "refuse" not in str(raised.value)
    assert sink.account.received == 5
