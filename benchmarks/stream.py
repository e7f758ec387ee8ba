"""
How fast do messages pass a stage, compared to ``RDD.pipe``?

``AsyncSupervisor.stream`` through the C echo worker, one result for each message.
Against it ``RDD.pipe("cat")`` from PySpark on the same messages, twice:

* from the driver and back to it, which is what ``stream`` does;
* cached next to Spark's Python workers and only counted there, which is what a job
  does that stays within Spark, on all cores. No target; it shows where the limit is.

Only etlstage says which reply is whose.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import anyio

from benchmarks.harness import Job, Row, echo_stage, messages, paired
from benchmarks.spark import session
from etlstage import AsyncSupervisor

COUNT = 500_000


def measure() -> list[Row]:
    """Return messages per second of each."""
    run = messages(COUNT)
    lines = [message.decode() for message in run]
    with session() as spark:
        context = spark.sparkContext
        cached = context.parallelize(lines, 2).cache()
        cached.count()

        def there_and_back() -> int:
            return len(context.parallelize(lines, 2).pipe("cat").collect())

        def inside() -> int:
            return int(cached.pipe("cat").count())

        def ours() -> float:
            return anyio.run(_stream, run)

        back = paired(ours, lambda: _rate(there_and_back), rounds=3)
        within = paired(ours, lambda: _rate(inside), rounds=3)
    what = "AsyncSupervisor.stream, window auto"
    unit = "messages/s"
    return [
        Row(what, back[0], 'RDD.pipe("cat"), collected', back[1], unit, 2.2),
        Row(what, within[0], 'RDD.pipe("cat"), counted', within[1], unit, 0),
    ]


def _rate(job: Callable[[], int]) -> float:
    started = time.perf_counter()
    assert job() == COUNT
    return COUNT / (time.perf_counter() - started)


async def _stream(run: list[bytes]) -> float:
    async with AsyncSupervisor(echo_stage()) as supervisor:
        await supervisor.submit([b"ready"])
        started = time.perf_counter()
        count = 0
        async for result in supervisor.stream(run):
            count += len(result.outputs)
        assert count == COUNT
        return COUNT / (time.perf_counter() - started)


def _job() -> Iterator[Callable[[], object]]:
    run = messages(COUNT)
    yield lambda: anyio.run(_stream, run)


JOBS = {"stream": Job(COUNT, _job)}
