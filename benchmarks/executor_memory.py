"""
Does the memory of Spark's Python workers grow with the rows of a stage?

A stage on executors with the C echo worker, on 1 and on 16 million rows, each in a
fresh process. What is compared is the peak resident size of the Python workers: they
are used again, and so a task behind the stage can tell it.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from benchmarks.harness import Row, echo_stage

if TYPE_CHECKING:
    import pyarrow as pa

MILLION = 1_000_000


def measure() -> list[Row]:
    """Return megabytes of both."""
    ours, theirs = (_peak(16 * MILLION), _peak(MILLION))
    return [
        Row(
            "memory of a Python worker, stage on 16 million rows",
            ours,
            "1 million rows",
            theirs,
            "MB",
            1.2,
            at_most=True,
        )
    ]


def _peak(count: int) -> float:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.executor_memory", str(count)],
        check=True,
        capture_output=True,
        text=True,
    )
    return float(done.stdout)


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
