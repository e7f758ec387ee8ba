"""Messages into load workers on the executors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.datasource import DataSource, DataSourceRegistration

from etlstage.errors import SinkFailed
from etlstage.messages import StageKind
from etlstage.pipeline import DeadLetters
from etlstage.pipeline.interfaces import Epochs
from etlstage.spark.datasource import datasource
from etlstage.spark.engine.load_workers import LoadWorkers
from etlstage.spark.engine.staging import Staging
from etlstage.stage import Stage

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
    """Return a stage whose workers leave what they load in a file each."""
    folder = tmp_path / "loaded"
    folder.mkdir()
    command = (sys.executable, "-c", LOAD, str(folder))
    return Stage(name="load", kind=StageKind.LOAD, worker=command)


def loaded(folder: Path) -> list[list[int]]:
    """Return what each worker has loaded."""
    files = (folder / "loaded").iterdir()
    found = [[*map(int, path.read_text().split())] for path in files]
    return sorted(filter(None, found))


@pytest.fixture
def small_splits(spark: SparkSession) -> Iterator[None]:
    """Have files read in parts that are small."""
    spark.conf.set(SPLIT, "16k")
    yield
    spark.conf.unset(SPLIT)


@pytest.mark.usefixtures("small_splits")
async def test_large_partition_stays_with_one_worker(
    spark: SparkSession, stage: Stage, tmp_path: Path
) -> None:
    """Its file is read in several tasks, and they would load it at once (issue 14)."""
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


async def test_batches_of_a_stream_are_known_by_one_name(
    spark: SparkSession, stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session forgets none, and a stream may have batches for months (issue 14)."""
    names: list[str] = []
    registration = type(spark.dataSource)
    register = registration.register

    def noted(self: DataSourceRegistration, source: type[DataSource]) -> None:
        names.append(source.name())
        register(self, source)

    monkeypatch.setattr(registration, "register", noted)
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
    first, second = names
    assert first == second


async def test_server_that_does_not_see_our_folder(
    spark: SparkSession, stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told before anything is loaded, and not behind all of it (issue 14)."""
    far = tmp_path / "elsewhere"
    monkeypatch.setattr(datasource, "scratch", lambda _: nullcontext(far))
    sink = LoadWorkers(stage, dead_letters=DeadLetters(tmp_path, pipeline="p"))
    messages = spark.createDataFrame(
        [(0, 0, b"1")], "partition int, place long, raw binary"
    )
    with pytest.raises(SinkFailed, match=f"server does not see {far}, in which"):
        await sink.load(messages, {0: 0})
    assert loaded(tmp_path) == []
