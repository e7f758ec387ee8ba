"""
How fast do messages pass a stage, compared to ``RDD.pipe``?

``AsyncSupervisor.answers`` through the C echo worker, a run at a time, and ``stream``,
one result for each message, against ``RDD.pipe("cat")`` from PySpark on the same
messages, twice:

* from the driver and back to it, which is what both do;
* cached next to Spark's Python workers and only counted there, which is what a job
  does that stays within Spark, on all cores. No target; it shows where the limit is.

Only etlstage reports which reply belongs to which message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import anyio

from benchmarks.harness import Job, Row, echo_stage, in_turn, messages
from benchmarks.spark import session
from etlstage import AsyncSupervisor

COUNT = 500_000
RUN = 8192
BACK, WITHIN = 'RDD.pipe("cat"), collected', 'RDD.pipe("cat"), counted'
TARGETS = {
    ("answers, lists", BACK): 4.0,
    ("stream", BACK): 2.2,
    ("answers, lists", WITHIN): 0,
    ("stream", WITHIN): 0,
}


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

        found = in_turn(
            {
                "answers, lists": lambda: anyio.run(_answers, run),
                "stream": lambda: anyio.run(_stream, run),
                BACK: lambda: _rate(there_and_back),
                WITHIN: lambda: _rate(inside),
            },
            rounds=5,
        )
    return [
        Row(
            f"AsyncSupervisor.{what}",
            found[what],
            against,
            found[against],
            "messages/s",
            least,
        )
        for (what, against), least in TARGETS.items()
    ]


def _rate(job: Callable[[], int]) -> float:
    started = time.perf_counter()
    assert job() == COUNT
    return COUNT / (time.perf_counter() - started)


async def _answers(run: list[bytes]) -> float:
    async with AsyncSupervisor(echo_stage()) as supervisor:
        await supervisor.submit([b"ready"])
        runs = [run[at : at + RUN] for at in range(0, COUNT, RUN)]
        started = time.perf_counter()
        count = 0
        async for outcome in supervisor.answers(runs):
            count += len(outcome.groups)
        assert count == COUNT
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
