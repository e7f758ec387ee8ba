"""
Does the memory of Spark's Python workers grow with the rows of a stage?

A stage on executors with the C echo worker, on 1 and on 16 million rows, each in a
fresh process. The peak resident size of the Python workers is compared: they are
reused, so a task after the stage can report it.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from benchmarks.harness import Row, echo_stage, memory

if TYPE_CHECKING:
    import pyarrow as pa


def measure() -> list[Row]:
    """Return megabytes of both."""
    return [memory("memory of a Python worker", "benchmarks.executor_memory", 16, 1)]


def _told(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    for _ in batches:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        yield pa.record_batch({"kilobytes": pa.array([peak], pa.int64())})


def main(count: int) -> None:
    """Run once and print the peak, in megabytes."""
    from benchmarks.spark import frame, rate, session
    from etlstage.spark import transform

    with session() as spark:
        rate(transform(frame(spark, count), echo_stage()), count)
        told = spark.range(0, 2, 1, 2).mapInArrow(_told, "kilobytes long").collect()
    print(max(row.kilobytes for row in told) / 1024)


if __name__ == "__main__":
    main(int(sys.argv[1]))
