"""
How many exchanges per second, one at a time?

``AsyncSupervisor.stream`` with window 1 against the barest program that does the
same: asyncio's subprocess streams, write, drain, read until EOP.
"""

from __future__ import annotations

import asyncio
import time

import anyio

from benchmarks.harness import Row, echo_stage, echo_worker, messages, paired
from etlstage import AsyncSupervisor

COUNT = 20_000


def measure() -> list[Row]:
    """Return exchanges per second of both."""
    run = messages(COUNT)
    ours, theirs = paired(
        lambda: anyio.run(_supervised, run), lambda: asyncio.run(_bare(run))
    )
    return [
        Row("lock-step, window 1", ours, "asyncio streams", theirs, "exchanges/s", 1.0)
    ]


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
