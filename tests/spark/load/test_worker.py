"""Messages into load workers on the executors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

from etlstage.messages import StageKind
from etlstage.pipeline import DeadLetters
from etlstage.spark.engine.staging import Staging
from etlstage.spark.load.worker import StagedWorker
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
def small_splits(spark: SparkSession) -> Iterator[None]:
    """Have files read in parts that are small."""
    spark.conf.set(SPLIT, "16k")
    yield
    spark.conf.unset(SPLIT)


@pytest.mark.usefixtures("small_splits")
async def test_large_partition_stays_with_one_worker(
    spark: SparkSession, tmp_path: Path
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

    loaded = tmp_path / "loaded"
    loaded.mkdir()
    command = (sys.executable, "-c", LOAD, str(loaded))
    stage = Stage(name="load", kind=StageKind.LOAD, command=command)
    letters = DeadLetters(tmp_path / "state", pipeline="p")
    sink = StagedWorker(stage, dead_letters=letters)
    await sink.load(messages, {0: 0, 1: 3000})

    assert (sink.account.received, sink.account.done) == (6000, 6000)
    found = [[*map(int, path.read_text().split())] for path in loaded.iterdir()]
    assert sorted(filter(None, found)) == [[*range(3000)], [*range(3000, 6000)]]
