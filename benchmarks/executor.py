"""
How fast is a stage inside Spark's executors?

``etlstage.spark.transform`` with the C echo worker against ``mapInArrow`` with the
identity, and against ``RDD.pipe("cat")``. Every row is made and none is kept. The
rows come out of Spark's cache: to make them up takes longer than to pass them on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame

from benchmarks.harness import Row, echo_stage, paired
from benchmarks.spark import frame, session
from etlstage.spark import transform

if TYPE_CHECKING:
    import pyarrow as pa

COUNT = 4_000_000


def measure(count: int = COUNT, rounds: int = 3) -> list[Row]:
    """Return rows per second of each pair."""
    with session() as spark:
        rows = frame(spark, count).cache()
        assert rows.count() == count

        def ours() -> float:
            return _rate(transform(rows, echo_stage()), count)

        identity = paired(
            ours,
            lambda: _rate(rows.mapInArrow(_identity, "value string"), count),
            rounds=rounds,
        )
        pipe = paired(ours, lambda: _pipe(rows, count), rounds=rounds)
    what = "stage on executors, C echo worker"
    return [
        Row(what, identity[0], "mapInArrow identity", identity[1], "rows/s", 0.65),
        Row(what, pipe[0], 'RDD.pipe("cat")', pipe[1], "rows/s", 6),
    ]


def _identity(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def _rate(made: DataFrame, count: int) -> float:
    started = time.perf_counter()
    made.write.format("noop").mode("overwrite").save()
    return count / (time.perf_counter() - started)


def _pipe(rows: DataFrame, count: int) -> float:
    started = time.perf_counter()
    lines = rows.rdd.map(lambda row: row.value).pipe("cat")
    assert lines.count() == count
    return count / (time.perf_counter() - started)
