"""
How much does framing cost?

The same bytes pass through the C echo worker, with messages framed and replies split;
through the same worker by two threads that only write and read, which is the ceiling;
and through ``cat``. All use the same kind of pipes. Once with messages of one length,
each answered by itself; once with lengths, and numbers of replies, that vary.

Also measured is the processor time of our process, with the compiled code and without:
that code is kept only if it is 1.3 times as fast.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import IO

import anyio
import pyarrow as pa

from benchmarks.harness import (
    Job,
    Row,
    echo_stage,
    echo_worker,
    in_turn,
    messages,
    paired,
)
from etlstage import AsyncSupervisor, Stage, speedups
from etlstage.columns import Column
from etlstage.messages import Run

COUNT = 1_000_000
RUN = 8192
PIPE = 1 << 20  # bytes, as the supervisor asks for
CEILING, CAT = "the worker alone", "cat"


def measure() -> list[Row]:
    """Return megabytes per second of all, for messages in Arrow and in lists."""
    rows = []
    for inputs, run, worker in (
        ("", messages(COUNT), (echo_worker(),)),
        (", varied", varied(COUNT), (echo_worker(), "varied")),
    ):
        wire = b"\n".join((*run, b""))
        jobs: dict[str, Callable[[], float]] = {
            f"{how}{inputs}": partial(_framed, worker, held, len(wire))
            for how, held in (("Arrow", _columns(run)), ("lists", _lists(run)))
        }
        jobs |= {CEILING: partial(_raw, worker, wire), CAT: partial(_raw, (CAT,), wire)}
        found = in_turn(jobs, rounds=5)
        for what in list(jobs)[:2]:
            target = 0.35 if what == "Arrow" else 0
            for against, least in (CEILING, target), (CAT, 0):
                ours, theirs = found[what], found[against]
                rows.append(
                    Row(f"framing, {what}", ours, against, theirs, "MB/s", least)
                )
        for how, held in ("Arrow", _columns(run)), ("lists", _lists(run)):
            ours, theirs = paired(
                partial(_processor, worker, held, compiled=True),
                partial(_processor, worker, held, compiled=False),
                rounds=7,
            )
            what = f"framing, {how}{inputs}: processor time, compiled"
            unit, least = "ns/message", 1 / 1.3
            rows.append(Row(what, ours, "in Python", theirs, unit, least, at_most=True))
    return rows


def _processor(
    worker: tuple[str, ...], runs: Sequence[Run], *, compiled: bool
) -> float:
    found, began = speedups.compiled, time.process_time()
    if not compiled:
        speedups.compiled = None
    try:
        anyio.run(_answered, Stage(name="echo", worker=worker), runs)
    finally:
        speedups.compiled = found
    return (time.process_time() - began) / COUNT * 1e9


def varied(count: int) -> list[bytes]:
    """Return messages of 1 to 216 bytes; the last digit decides the replies."""
    return [(b"%0216d" % number)[number * 89 % 216 :] for number in range(count)]


def _lists(run: list[bytes]) -> list[Run]:
    return [run[at : at + RUN] for at in range(0, len(run), RUN)]


def _columns(run: list[bytes]) -> list[Run]:
    return [Column(pa.array(part, pa.binary())) for part in _lists(run)]


def _framed(worker: tuple[str, ...], runs: Sequence[Run], size: int) -> float:
    stage = Stage(name="echo", worker=worker)
    seconds = anyio.run(_answered, stage, runs)
    return size / seconds / 1e6


async def _answered(stage: Stage, runs: Sequence[Run]) -> float:
    async with AsyncSupervisor(stage) as supervisor:
        started = time.perf_counter()
        count = 0
        async for answer in supervisor.answers(runs):
            count += len(answer.groups)
        assert count == sum(map(len, runs))
        return time.perf_counter() - started


def _raw(command: Sequence[str], wire: bytes) -> float:
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, pipesize=PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        started = time.perf_counter()
        writer = threading.Thread(target=_write, args=(child.stdin, wire))
        writer.start()
        while os.read(child.stdout.fileno(), PIPE):
            pass
        seconds = time.perf_counter() - started
        writer.join()
        return len(wire) / seconds / 1e6


def _write(stdin: IO[bytes], wire: bytes) -> None:
    view = memoryview(wire)
    while view:
        view = view[os.write(stdin.fileno(), view[:PIPE]) :]
    stdin.close()


def _job(hold: Callable[[list[bytes]], list[Run]]) -> Iterator[Callable[[], object]]:
    stage, runs = echo_stage(), hold(messages(COUNT))
    yield lambda: anyio.run(_answered, stage, runs)


JOBS = {
    "Arrow": Job(COUNT, partial(_job, _columns)),
    "lists": Job(COUNT, partial(_job, _lists)),
}
