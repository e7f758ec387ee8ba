"""
What does it cost to prove that each reply belongs to its message?

The same stage with and without the proof, by processor time of our process: a run at a
time on lists and in Arrow, ``stream``, lock-step, and in the Python workers of Spark's
executors; and the median time of one ``submit`` at a time. Users can't have the stage
without it: its dialect claims that a reply identifies its message.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace

import anyio
import pyarrow as pa
from pyspark.sql import DataFrame

from benchmarks.harness import Row, echo_stage, messages, paired
from benchmarks.spark import frame, session
from etlstage import AsyncSupervisor, Stage
from etlstage.messages import Run
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.spark.task.transform import Task

Timed = Callable[[Stage], Awaitable[float]]

COUNT = 1_000_000
ALONE = 3_000


class _Trusted(MarkerDialect):
    @property
    def counts(self) -> bool:
        """Return False: nothing is held back."""
        return False


def measure() -> list[Row]:
    """Return processor seconds per million messages, and seconds per submit."""
    run = messages(COUNT)
    lists: list[Run] = [run[at : at + 8192] for at in range(0, COUNT, 8192)]
    arrow: list[Run] = [_column(part) for part in lists]
    rows = []
    jobs: list[tuple[str, Timed, float]] = [
        ("a run at a time, lists", lambda stage: _runs(stage, lists), 1.05),
        ("a run at a time, Arrow", lambda stage: _runs(stage, arrow), 1.05),
        ("stream", lambda stage: _stream(stage, run), 1.1),
        ("window 1", lambda stage: _runs(replace(stage, window=1), lists[:12]), 0),
    ]
    for what, job, target in jobs:
        with_, without = _compare(job)
        unit = "CPU s/million"
        rows.append(Row(what, with_, "no proof", without, unit, target, at_most=True))
    with_, without = _compare(_submits)
    one = "one submit at a time, median"
    rows.append(Row(one, with_, "no proof", without, "s", 1.3, at_most=True))
    with session() as spark:
        cached = frame(spark, COUNT).cache()
        assert cached.count() == COUNT
        with_, without = _compare(lambda stage: _on_executors(cached, stage))
    where, unit = "on executors", "CPU s/million"
    rows.append(Row(where, with_, "no proof", without, unit, 1.05, at_most=True))
    return rows


def _compare(job: Timed) -> tuple[list[float], list[float]]:
    proven = echo_stage()
    trusted = replace(proven, dialect=_Trusted())
    return paired(lambda: anyio.run(job, proven), lambda: anyio.run(job, trusted))


def _column(part: Run) -> Run:
    from etlstage.columns import Column

    return Column(pa.array(list(part), pa.binary()))


async def _runs(stage: Stage, runs: Sequence[Run]) -> float:
    async with AsyncSupervisor(stage) as supervisor:
        await supervisor.submit([b"ready"])
        began, count = time.process_time(), 0
        async for answer in supervisor.answers(runs):
            count += len(answer.messages)
        return (time.process_time() - began) / count * 1e6


async def _stream(stage: Stage, run: Run) -> float:
    async with AsyncSupervisor(stage) as supervisor:
        await supervisor.submit([b"ready"])
        began, count = time.process_time(), 0
        async for _ in supervisor.stream(run):
            count += 1
        return (time.process_time() - began) / count * 1e6


async def _submits(stage: Stage) -> float:
    took = []
    async with AsyncSupervisor(stage) as supervisor:
        for _ in range(ALONE):
            began = time.perf_counter()
            await supervisor.submit([b"one"])
            took.append(time.perf_counter() - began)
    return statistics.median(took)


async def _on_executors(rows: DataFrame, stage: Stage) -> float:
    task = Task(stage, texts=True)

    def timed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        began = time.process_time()
        for _ in task.run(batches):
            pass
        yield pa.record_batch({"seconds": [time.process_time() - began]})

    took = rows.mapInArrow(timed, "seconds double").collect()
    total: float = sum(row.seconds for row in took)
    return total / COUNT * 1e6
