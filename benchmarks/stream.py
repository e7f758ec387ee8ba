"""
How fast do messages pass a stage, compared to ``RDD.pipe``?

``AsyncSupervisor.stream`` through the C echo worker, one result for each message,
against ``RDD.pipe("cat")`` from PySpark on the same messages, cached in its workers'
reach. Both give back every message; only etlstage says which reply is whose.
"""

from __future__ import annotations

import time

import anyio

from benchmarks.harness import Row, echo_stage, messages, paired
from benchmarks.spark import session
from etlstage import AsyncSupervisor

COUNT = 500_000


def measure() -> list[Row]:
    """Return messages per second of both."""
    run = messages(COUNT)
    with session() as spark:
        cached = spark.sparkContext.parallelize([m.decode() for m in run], 2).cache()
        cached.count()

        def pipe() -> float:
            started = time.perf_counter()
            assert cached.pipe("cat").count() == COUNT
            return COUNT / (time.perf_counter() - started)

        ours, theirs = paired(lambda: anyio.run(_stream, run), pipe, rounds=3)
    return [
        Row(
            "AsyncSupervisor.stream, window auto",
            ours,
            'RDD.pipe("cat")',
            theirs,
            "messages/s",
            4,
        )
    ]


async def _stream(run: list[bytes]) -> float:
    async with AsyncSupervisor(echo_stage()) as supervisor:
        await supervisor.submit([b"ready"])
        started = time.perf_counter()
        count = 0
        async for result in supervisor.stream(run):
            count += len(result.outputs)
        assert count == COUNT
        return COUNT / (time.perf_counter() - started)
