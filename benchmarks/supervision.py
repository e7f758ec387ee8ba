"""
What does it cost to be supervised, and what does a crash?

* exchanges per second, one at a time, with the C echo worker, and how long one takes:
  median and 99th percentile. In one stream; and each submitted by itself, as a
  service does. Against the barest program, as in ``lockstep.py``;
* messages per second through 1, 2 and 4 workers that do some work for each message:
  what the supervisor itself can pass is in ``stream.py``, and one worker is enough
  for that;
* messages per second with a crash about every 1,000 messages, against the same
  workers without one, and as many of them started for nothing, two at a time;
* a worker of the Python SDK is killed while it is idle: how long until the next one
  answers. The first restart has no back-off.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import anyio

from benchmarks.harness import Row, echo_stage, echo_worker, messages, paired
from etlstage import AsyncSupervisor, Stage
from etlstage.testing import Fault, FaultKind, FaultPlan, hostile_worker

EXCHANGES = 20_000
COUNT = 200_000
KILLS = 20
TARGETS = {"submit, one by one, median": 1.7}
WORKING = """
from zlib import crc32
from etlstage import worker
worker.transform(lambda message: (b"%d" % crc32(message * 200),))
"""
"""Some 10 microseconds of work for each message."""
SIGNING = """
import os
from etlstage import worker
worker.transform(lambda message: (b"%d" % os.getpid(),))
"""


def measure() -> list[Row]:
    """Return exchanges, latencies, throughput and the time of a restart."""
    return [*_latencies(), *_throughput(), _crashing(), _restart()]


# --- one exchange at a time -----------------------------------------------------------


def _latencies() -> list[Row]:
    run = messages(EXCHANGES)
    rows = []
    for what, program in ("stream, window 1", _stream), ("submit, one by one", _submit):
        rows += _compare(what, partial(program, run), partial(_bare, run))
    return rows


def _compare(
    what: str, ours: Callable[[], list[float]], theirs: Callable[[], list[float]]
) -> list[Row]:
    """Return exchanges per second, and the median and 99th percentile of one."""
    times: dict[bool, list[list[float]]] = {True: [], False: []}

    def rate(mine: bool) -> float:
        times[mine].append(sorted(ours() if mine else theirs()))
        return EXCHANGES / sum(times[mine][-1])

    against = "asyncio streams"
    rates = paired(lambda: rate(True), lambda: rate(False), rounds=3)
    rows = [Row(what, rates[0], against, rates[1], "exchanges/s", 0)]
    for name, share in ("median", 0.5), ("99th percentile", 0.99):
        mine, other = (
            [a_round[int(share * EXCHANGES)] * 1e6 for a_round in times[m][1:]]
            for m in (True, False)
        )
        title = f"{what}, {name}"
        most = TARGETS.get(title, 0)
        rows.append(Row(title, mine, against, other, "µs", most, at_most=True))
    return rows


def _stream(run: list[bytes]) -> list[float]:
    async def work() -> list[float]:
        async with AsyncSupervisor(echo_stage(window=1)) as supervisor:
            await supervisor.submit([b"ready"])
            times, before = [], time.perf_counter()
            async for _ in supervisor.stream(run):
                now = time.perf_counter()
                times.append(now - before)
                before = now
            return times

    return anyio.run(work)


def _submit(run: list[bytes]) -> list[float]:
    async def work() -> list[float]:
        async with AsyncSupervisor(echo_stage(window=1)) as supervisor:
            await supervisor.submit([b"ready"])
            times = []
            for message in run:
                before = time.perf_counter()
                await supervisor.submit([message])
                times.append(time.perf_counter() - before)
            return times

    return anyio.run(work)


def _bare(run: list[bytes]) -> list[float]:
    async def work() -> list[float]:
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(
            echo_worker(), stdin=pipe, stdout=pipe
        )
        assert child.stdin is not None
        assert child.stdout is not None
        times = []
        for message in run:
            began = time.perf_counter()
            child.stdin.write(message + b"\n")
            await child.stdin.drain()
            await child.stdout.readuntil(b"\0")
            times.append(time.perf_counter() - began)
        child.stdin.close()
        await child.wait()
        return times

    return asyncio.run(work())


# --- many at once ---------------------------------------------------------------------


def _throughput() -> list[Row]:
    rows = []
    for workers in (1, 2, 4):
        ours, theirs = paired(
            partial(_rate, _stage(WORKING, workers)),
            partial(_rate, _stage(WORKING, 1)),
            rounds=3,
        )
        what = f"{workers} worker{'s' * (workers > 1)}, 10 µs a message"
        rows.append(Row(what, ours, "1 worker", theirs, "messages/s", 0))
    return rows


def _crashing() -> Row:
    def stage(*faults: Fault) -> Stage:
        return Stage(name="crash", worker=hostile_worker(FaultPlan(faults)), workers=2)

    ours, theirs = paired(
        partial(_rate, stage(Fault(FaultKind.KILL, probability=0.001))),
        partial(_started, stage(Fault(FaultKind.KILL, probability=0.0))),
        rounds=3,
    )
    what = "2 workers, a crash per 1,000 messages"
    return Row(what, ours, "bare starts as often", theirs, "messages/s", 0.95)


def _started(stage: Stage) -> float:
    """Return the rate of a run without crashes that also starts as many workers."""
    seconds = COUNT / _rate(stage)
    began = time.perf_counter()

    def start(_: int) -> None:
        subprocess.run(stage.program.command, stdin=subprocess.DEVNULL, check=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(start, range(COUNT // 1000)))
    return COUNT / (seconds + time.perf_counter() - began)


def _stage(code: str, workers: int) -> Stage:
    return Stage(name="sdk", worker=(sys.executable, "-c", code), workers=workers)


def _rate(stage: Stage) -> float:
    run = messages(COUNT)
    runs = [run[at : at + 8192] for at in range(0, COUNT, 8192)]

    async def work() -> float:
        async with AsyncSupervisor(stage) as supervisor:
            await supervisor.submit([b"ready"] * 100)
            began, count = time.perf_counter(), 0
            async for answer in supervisor.answers(runs):
                assert answer.error is None
                count += len(answer.groups)
            assert count == COUNT
            return COUNT / (time.perf_counter() - began)

    return anyio.run(work)


# --- a restart ------------------------------------------------------------------------


def _restart() -> Row:
    times = anyio.run(_kill_and_wait)
    what = "restart of an SDK worker, kill -9 to answer"
    allowed = [150.0] * len(times)
    return Row(what, times, "what is allowed", allowed, "ms", 1.0, at_most=True)


async def _kill_and_wait() -> list[float]:
    times = []
    async with AsyncSupervisor(_stage(SIGNING, 1)) as supervisor:
        for _ in range(KILLS + 1):
            # A worker that has answered is restarted without a delay.
            (before,) = await supervisor.submit([b"who"])
            began = time.perf_counter()
            os.kill(int(before.outputs[0]), signal.SIGKILL)
            (behind,) = await supervisor.submit([b"who"])
            times.append((time.perf_counter() - began) * 1000)
            assert behind.outputs not in ((), before.outputs)
    # The first is a warm-up.
    return times[1:]
