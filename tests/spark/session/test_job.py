"""Waiting for a job of Spark in the event loop."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from etlstage.spark.session import job as job_module
from etlstage.spark.session.job import over_connect, watch_job

pytestmark = pytest.mark.spark


async def test_progress_counts_tasks(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two tasks waits until the other was counted (issue 26)."""
    counted = not over_connect(spark)
    monkeypatch.setattr(job_module, "_LOOK", 0.02)
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    path, counts = str(gate), set[tuple[int, int]]()

    def held(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if counted and batch.column(0)[0].as_py() == 1:
                with open(path, "rb") as file:  # until noted() closes the pipe
                    file.read()
            yield batch

    def noted(done: int, total: int) -> None:
        if (done, total) not in counts:
            counts.add((done, total))
            if done == 1:
                with open(path, "wb"):
                    pass

    frame = spark.range(0, 2, 1, 2).mapInArrow(held, "id long")
    rows = await watch_job(spark, frame.collect, noted)
    assert sorted(row[0] for row in rows) == [0, 1]
    assert ((1, 2) in counts) is counted
    if not counted:
        return
    # Later jobs of this session belong to no group.
    assert spark.sparkContext.getLocalProperty("spark.jobGroup.id") is None


async def test_what_fails_is_raised_as_it_is(spark: SparkSession) -> None:
    """Although it is watched meanwhile."""

    def fail() -> None:
        raise LookupError("no table")

    with pytest.raises(LookupError, match="no table"):
        await watch_job(spark, fail, lambda *_: None)
