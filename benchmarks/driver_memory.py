"""
Does the driver's memory grow with the input?

The whole of DataFrame -> stage -> Parquet with 1 and with 10 million messages, each
in a fresh process; what is compared is the peak resident size of the Python driver.
"""

from __future__ import annotations

import resource
import sys
import tempfile
from pathlib import Path

import anyio

from benchmarks.harness import Row, memory


def measure() -> list[Row]:
    """Return megabytes of both."""
    return [memory("driver memory", "benchmarks.driver_memory", 10, 1)]


def main(count: int) -> None:
    """Run once and print the peak, in megabytes."""
    from benchmarks.spark import pipeline, session

    with session() as spark, tempfile.TemporaryDirectory() as folder:
        report = anyio.run(pipeline(spark, count, Path(folder, "out")).run)
    if report.status != "done":
        sys.exit(str(report.error))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


if __name__ == "__main__":
    main(int(sys.argv[1]))
