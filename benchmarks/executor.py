"""
How fast is a stage inside Spark's executors?

``etlstage.spark.transform`` with an identity worker in C, with the SDK and in shell,
against other ways to pass rows through Python or through a program:

* ``mapInArrow`` and ``mapInPandas`` with the identity, which start no program;
* ``RDD.pipe("cat")`` from PySpark;
* the JVM's own ``RDD.pipe("cat")``, called through the gateway, where no row meets
  Python. No target: it shows what Spark does in Scala.

Also measured is the processor time of the JVM, Python and the workers together, for a
stage with the C worker and for ``mapInArrow``.

Every row is made and none is kept. The rows come out of Spark's cache: making them
takes longer than passing them on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from pyspark.sql import DataFrame

from benchmarks.harness import (
    Job,
    Row,
    echo_stage,
    in_turn,
    paired,
    processor_time,
    sdk_stage,
    shell_stage,
)
from benchmarks.spark import frame, rate, session
from etlstage.spark import transform

T = TypeVar("T")

COUNT = 4_000_000
WORKERS = {"C echo worker": echo_stage, "SDK worker": sdk_stage, "shell": shell_stage}
ARROW, PANDAS = "mapInArrow identity", "mapInPandas identity"
PIPE, JVM_PIPE = 'RDD.pipe("cat")', 'RDD.pipe("cat") in the JVM'
TARGETS = {
    ("C echo worker", ARROW): 0.65,
    ("C echo worker", PANDAS): 0,
    ("C echo worker", PIPE): 6,
    ("C echo worker", JVM_PIPE): 0,
    ("SDK worker", ARROW): 0,
    ("SDK worker", PIPE): 0,
    ("shell", ARROW): 0,
    ("shell", PIPE): 0,
}
"""Pairs that are compared, and the ratio to reach; 0 where there is none."""


def measure(count: int = COUNT, rounds: int = 3) -> list[Row]:
    """Return rows per second of each worker, beside each of the others."""
    with session() as spark:
        rows = frame(spark, count).cache()
        assert rows.count() == count
        jobs: dict[str, Callable[[], float]] = {
            worker: partial(_pass, rows, worker, count) for worker in WORKERS
        }
        jobs |= {
            ARROW: lambda: rate(rows.mapInArrow(_identity, "value string"), count),
            PANDAS: lambda: rate(rows.mapInPandas(_identity, "value string"), count),
            PIPE: lambda: _counted(_pipe(rows), count),
            JVM_PIPE: lambda: _counted(_jvm_pipe(rows), count),
        }
        rates = in_turn(jobs, rounds=rounds)
        stage, arrow = paired(
            lambda: _cost(jobs["C echo worker"], count),
            lambda: _cost(jobs[ARROW], count),
        )
    what, unit = "stage on executors: processor time", "ns/row"
    return [Row(what, stage, ARROW, arrow, unit, 1.3, at_most=True)] + [
        Row(
            f"stage on executors, {worker}",
            rates[worker],
            against,
            rates[against],
            "rows/s",
            target,
        )
        for (worker, against), target in TARGETS.items()
    ]


def _pass(rows: DataFrame, worker: str, count: int) -> float:
    return rate(transform(rows, WORKERS[worker]()), count)


def _cost(job: Callable[[], object], count: int) -> float:
    began = processor_time()
    job()
    return (processor_time() - began) / count * 1e9


def _identity(batches: Iterator[T]) -> Iterator[T]:
    yield from batches


class _Lines(Protocol):
    """Either kind of RDD."""

    def count(self) -> int: ...


def _pipe(rows: DataFrame) -> _Lines:
    return rows.rdd.map(lambda row: row.value).pipe("cat")


def _jvm_pipe(rows: DataFrame) -> _Lines:
    jvm: Any = rows.sparkSession.sparkContext._jvm
    texts = getattr(rows._jdf, "as")(jvm.org.apache.spark.sql.Encoders.STRING())
    return cast("_Lines", texts.toJavaRDD().pipe("cat"))


def _counted(lines: _Lines, count: int) -> float:
    started = time.perf_counter()
    assert lines.count() == count
    return count / (time.perf_counter() - started)


def _job() -> Iterator[Callable[[], object]]:
    count = COUNT // 2
    with session() as spark:
        rows = frame(spark, count).cache()
        assert rows.count() == count
        yield lambda: _pass(rows, "C echo worker", count)


JOBS = {"stage on executors": Job(COUNT // 2, _job, everywhere=True)}
