"""
How many exchanges per second, one at a time?

``AsyncSupervisor.stream`` with window 1 against the barest program that does the
same: asyncio's subprocess streams, write, drain, read until EOP. Both pinned to one
core, where the worker's answer is there at the first read, and to two, where it is not:
which of the two happens else is chance.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio

from benchmarks.harness import Job, Row, echo_stage, echo_worker, messages, paired
from etlstage import AsyncSupervisor

COUNT = 20_000
TARGETS = {1: 0.75, 2: 1.0}
"""By cores."""


def measure() -> list[Row]:
    """Return exchanges per second of both."""
    run = messages(COUNT)
    rows = []
    for cores, target in TARGETS.items():
        with _pinned(cores):
            ours, theirs = paired(
                lambda: anyio.run(_supervised, run), lambda: asyncio.run(_bare(run))
            )
        what = f"lock-step, window 1, {cores} core{'s' * (cores > 1)}"
        rows.append(Row(what, ours, "asyncio streams", theirs, "exchanges/s", target))
    return rows


@contextmanager
def _pinned(cores: int) -> Iterator[None]:
    all_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(all_cores)[:cores])
    try:
        yield
    finally:
        os.sched_setaffinity(0, all_cores)


async def _supervised(run: list[bytes]) -> float:
    async with AsyncSupervisor(echo_stage(window=1)) as supervisor:
        await supervisor.submit([b"ready"])
        started = time.perf_counter()
        async for result in supervisor.stream(run):
            assert result.error is None
        return COUNT / (time.perf_counter() - started)


async def _bare(run: list[bytes]) -> float:
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(echo_worker(), stdin=pipe, stdout=pipe)
    assert child.stdin is not None
    assert child.stdout is not None
    started = time.perf_counter()
    for message in run:
        child.stdin.write(message + b"\n")
        await child.stdin.drain()
        await child.stdout.readuntil(b"\0")
    rate = COUNT / (time.perf_counter() - started)
    child.stdin.close()
    await child.wait()
    return rate


def _job() -> Iterator[Callable[[], object]]:
    run = messages(COUNT)
    with _pinned(1):
        yield lambda: anyio.run(_supervised, run)


JOBS = {"lock-step, one core": Job(COUNT, _job)}
