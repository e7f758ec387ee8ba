"""
How fast is a whole run, DataFrame -> stage -> Parquet?

Engine ``local`` with the C echo worker against the same job with
``RDD.pipe("cat")``: same rows in, same rows out, same session.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
from pyspark.sql import SparkSession

from benchmarks.harness import Job, Row, paired
from benchmarks.spark import frame, pipeline, session

COUNT = 1_000_000


def measure() -> list[Row]:
    """Return rows per second of both."""
    with session() as spark, tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "out")
        ours, theirs = paired(
            lambda: anyio.run(_run, spark, target),
            lambda: _pipe(spark, target),
            rounds=3,
        )
    return [
        Row(
            "engine local, DataFrame -> stage -> Parquet",
            ours,
            'the same with RDD.pipe("cat")',
            theirs,
            "rows/s",
            2.2,
        )
    ]


async def _run(spark: SparkSession, target: Path) -> float:
    started = time.perf_counter()
    report = await pipeline(spark, COUNT, target).run()
    assert report.status == "done", report.error
    return COUNT / (time.perf_counter() - started)


def _pipe(spark: SparkSession, target: Path) -> float:
    started = time.perf_counter()
    lines = frame(spark, COUNT).rdd.map(lambda row: row.value).pipe("cat")
    rows = spark.createDataFrame(lines.map(lambda line: (line,)), "value string")
    rows.write.mode("overwrite").parquet(str(target))
    return COUNT / (time.perf_counter() - started)


def _job() -> Iterator[Callable[[], object]]:
    with session() as spark, tempfile.TemporaryDirectory() as folder:
        yield lambda: anyio.run(_run, spark, Path(folder, "out"))


JOBS = {"engine local": Job(COUNT, _job, everywhere=True)}
