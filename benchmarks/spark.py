"""What the benchmarks with Spark share: a session, and a job to compare."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from benchmarks.harness import MESSAGE_BYTES, echo_stage
from etlstage import Pipeline
from etlstage.spark import DataFrameSink, DataFrameSource, Destination, Session

__all__ = ("frame", "pipeline", "rate", "session")


@contextmanager
def session(config: Mapping[str, object] | None = None) -> Iterator[SparkSession]:
    """Yield a local session on two cores."""
    owner = Session(master="local[2]", config=config)
    spark = owner.start()
    try:
        yield spark
    finally:
        owner.stop()


def frame(spark: SparkSession, count: int) -> DataFrame:
    """Return ``count`` rows with one column, ``value``, of a message each."""
    width = MESSAGE_BYTES - 1
    return spark.range(0, count, 1, 2).selectExpr(
        f"lpad(cast(id as string), {width}, '0') as value"
    )


def pipeline(spark: SparkSession, count: int, target: Path) -> Pipeline:
    """Return DataFrame -> C echo worker -> Parquet."""
    return Pipeline(
        name="benchmark",
        source=DataFrameSource(lambda: frame(spark, count), name="extract"),
        stages=[echo_stage()],
        sink=DataFrameSink(
            spark, Destination(str(target), mode="overwrite"), name="load"
        ),
    )


def rate(made: DataFrame, count: int) -> float:
    """Make ``count`` rows, keep none, and return the rows per second."""
    started = time.perf_counter()
    made.write.format("noop").mode("overwrite").save()
    return count / (time.perf_counter() - started)
