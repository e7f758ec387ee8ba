"""
How fast is a run from files to files without Spark?

CSV -> C echo worker -> Parquet, with files at both ends against DataFrames, whose
session is already running.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import anyio
from pyspark.sql import SparkSession

from benchmarks.harness import MESSAGE_BYTES, Row, echo_stage, paired
from benchmarks.spark import session
from etlstage import Pipeline
from etlstage.files.sink import FileSink
from etlstage.files.source import FileSource
from etlstage.spark import DataFrameSink, DataFrameSource, Destination, read_frame

COUNT = 1_000_000


def measure() -> list[Row]:
    """Return rows per second of both."""
    with session() as spark, tempfile.TemporaryDirectory() as folder:
        given, target = Path(folder, "in"), Path(folder, "out")
        given.mkdir()
        with (given / "rows.csv").open("w") as file:
            width = MESSAGE_BYTES - 30
            file.writelines(f"{n},{n % 1000},{n:0{width}}\n" for n in range(COUNT))
        ours, theirs = paired(
            lambda: _run(_files(given, target)),
            lambda: _run(_frames(spark, given, target)),
            rounds=5,
        )
    return [
        Row(
            "files at both ends, CSV -> stage -> Parquet",
            ours,
            "the same with Spark at the ends, its start left out",
            theirs,
            "rows/s",
            2,
        )
    ]


def _files(given: Path, target: Path) -> Pipeline:
    return Pipeline(
        name="benchmark",
        source=FileSource(str(given), "csv"),
        stages=[echo_stage()],
        sink=FileSink(target, mode="overwrite"),
    )


def _frames(spark: SparkSession, given: Path, target: Path) -> Pipeline:
    return Pipeline(
        name="benchmark",
        source=DataFrameSource(
            lambda: read_frame(spark, format="csv", path=str(given))
        ),
        stages=[echo_stage()],
        sink=DataFrameSink(spark, Destination(str(target), mode="overwrite")),
    )


def _run(pipeline: Pipeline) -> float:
    started = time.perf_counter()
    report = anyio.run(pipeline.run)
    assert report.status == "done", report.error
    return COUNT / (time.perf_counter() - started)
