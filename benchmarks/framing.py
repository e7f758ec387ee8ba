"""
How much does framing cost?

The same bytes, through the C echo worker with messages framed and replies split,
and through ``cat`` with nothing looked at. Both over the same pipes.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from functools import partial

import anyio
import pyarrow as pa

from benchmarks.harness import MESSAGE_BYTES, Row, echo_stage, messages, paired
from etlstage import AsyncSupervisor
from etlstage.columns import Column
from etlstage.messages import Run

COUNT = 1_000_000
RUN = 8192


def measure() -> list[Row]:
    """Return bytes per second of both, for messages as Arrow has them and as lists."""
    run = messages(COUNT)
    column = Column(pa.array(run, pa.binary()))
    wire = b"\n".join((*run, b""))
    found = []
    kinds: tuple[tuple[str, Run, float], ...] = (
        ("Arrow framing", column, 0.7),
        ("framing of lists", run, 0),
    )
    for what, held, target in kinds:
        runs = [held[at : at + RUN] for at in range(0, COUNT, RUN)]
        ours, theirs = paired(partial(anyio.run, _framed, runs), partial(_cat, wire))
        what = f"{what}, C echo worker"
        found.append(Row(what, ours / 1e6, "cat", theirs / 1e6, "MB/s", target))
    return found


async def _framed(runs: list[Run]) -> float:
    async with AsyncSupervisor(echo_stage()) as supervisor:
        started = time.perf_counter()
        count = 0
        async for answer in supervisor.answers(runs):
            count += len(answer.groups)
        assert count == COUNT
        return COUNT * MESSAGE_BYTES / (time.perf_counter() - started)


def _cat(wire: bytes) -> float:
    with subprocess.Popen(
        ["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as cat:
        assert cat.stdin is not None
        assert cat.stdout is not None
        started = time.perf_counter()
        writer = threading.Thread(target=_write, args=(cat.stdin.fileno(), wire))
        writer.start()
        left = len(wire)
        while left:
            left -= len(os.read(cat.stdout.fileno(), 1 << 20))
        seconds = time.perf_counter() - started
        writer.join()
        return len(wire) / seconds


def _write(fd: int, wire: bytes) -> None:
    view = memoryview(wire)
    while view:
        view = view[os.write(fd, view[: 1 << 20]) :]
