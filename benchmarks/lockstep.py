"""
How many exchanges per second, one at a time?

``AsyncSupervisor.stream`` with window 1 against the barest program that does the same:
asyncio's subprocess streams, write, drain, read until EOP. Both are pinned to one core,
where the worker's reply is there at the first read, and to two, where it is not:
without pinning, it is chance which of the two happens.

The comparison with another commit adds ``submit``, by one caller and by a hundred, and
batches that their worker asks for, where each message waits for its BNC.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import anyio

from benchmarks.harness import Job, Row, echo_stage, echo_worker, messages, paired
from etlstage import AsyncSupervisor, BatchPolicy, Stage
from etlstage.protocol.registry import dialect_from_plain

COUNT = 20_000
TARGETS = {1: 0.75, 2: 1.0}
"""The ratio to reach, by number of cores."""
CALLERS = 100
BATCH = 10
ASKER = """
import os
held = 0
while data := os.read(0, 65536):
    out = b""
    for byte in data:
        if byte == 10:
            held += 1
            out += b"\\5" if held < %d else b"done\\n\\0"
        elif byte == 23:
            out += b"done\\n\\0"
        if out.endswith(b"\\0"):
            held = 0
    os.write(1, out)
"""
"""Asks for messages until its batch is full."""


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


async def _submitted(run: list[bytes], callers: int) -> None:
    """Have each caller submit its share, a message at a time."""

    async def call(share: list[bytes]) -> None:
        for message in share:
            (result,) = await supervisor.submit([message])
            assert result.error is None

    async with (
        AsyncSupervisor(echo_stage()) as supervisor,
        anyio.create_task_group() as tasks,
    ):
        for number in range(callers):
            tasks.start_soon(call, run[number::callers])


async def _asked(run: list[bytes]) -> None:
    dialect = dialect_from_plain({"name": "marker", "mode": "worker-driven batch"})
    stage = Stage(
        name="asks",
        worker=(sys.executable, "-c", ASKER % BATCH),
        dialect=dialect,
        batch=BatchPolicy(size=BATCH),
    )
    async with AsyncSupervisor(stage) as supervisor:
        assert len(await supervisor.submit(run)) == len(run)


def _job(
    passing: Callable[..., Coroutine[Any, Any, object]], *options: int
) -> Callable[[], Iterator[Callable[[], object]]]:
    def make() -> Iterator[Callable[[], object]]:
        run = messages(COUNT)
        with _pinned(1):
            yield lambda: anyio.run(passing, run, *options)

    return make


JOBS = {
    "lock-step, one core": Job(COUNT, _job(_supervised)),
    "submit, one by one": Job(COUNT, _job(_submitted, 1)),
    f"submit, {CALLERS} callers": Job(COUNT, _job(_submitted, CALLERS)),
    f"batches of {BATCH} by BNC": Job(COUNT, _job(_asked)),
}
