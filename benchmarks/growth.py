"""
What does a message cost when there are more of them, larger ones, or more processes?

Messages in Arrow pass through supervisors one after the other, whose workers are the C
echo worker, or ``cat`` where sizes vary: 1, 4 and 16 million messages, 1 to 8 workers,
chains of 1 to 6 stages, messages of 10 bytes to 10 MB. Each is measured in a process of
its own: time, processor time of that process and its workers, and its peak memory.

Python and its libraries are some 100 MB of the memory.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack
from functools import partial

import anyio
import pyarrow as pa

from benchmarks.harness import MESSAGE_BYTES, Row, echo_stage, in_turn, processor_time
from etlstage import AsyncSupervisor, MarkerDialect, Markers, Stage
from etlstage.columns import Column
from etlstage.messages import Run, joined

MILLION = 1_000_000
RUN = 1 << 20  # bytes of a run of messages, if it has more than one
TOTAL = 200 * MILLION  # bytes that pass, where sizes vary
GROWTH = {
    "million messages": (1, 4, 16),
    "workers": (1, 2, 4, 8),
    "stages": (1, 2, 4, 6),
    "bytes a message": tuple(10**power for power in range(1, 8)),
}
FIGURES = ("time", "ns/message"), ("processor time", "ns/message"), ("memory", "MB")


def measure(rounds: int = 3) -> list[Row]:
    """Return all figures of each size, beside those of the smallest."""
    rows = []
    for what, sizes in GROWTH.items():
        jobs = {str(size): partial(_apart, what, size) for size in sizes}
        found = in_turn(jobs, rounds=rounds)
        for size in sizes[1:]:
            for place, (figure, unit) in enumerate(FIGURES):
                ours, theirs = (
                    [numbers[place] for numbers in found[str(one)]]
                    for one in (size, sizes[0])
                )
                named = title(size, what, figure)
                rows.append(Row(named, ours, f"{sizes[0]}", theirs, unit, 0))
    return rows


def title(size: int, what: str, figure: str) -> str:
    """Return the title of the row of a figure."""
    return f"{size:,} {what}: {figure}"


def _apart(what: str, size: int) -> list[float]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.growth", what, str(size)],
        check=True,
        stdout=subprocess.PIPE,
    )
    numbers: list[float] = json.loads(done.stdout)
    return numbers


# --- in a process of its own ----------------------------------------------------------


def main(what: str, size: int) -> None:
    """Pass the messages and print the figures."""
    count, width, stages = MILLION, MESSAGE_BYTES - 1, [echo_stage()]
    if what == "million messages":
        count *= size
    elif what == "workers":
        stages = [echo_stage(workers=size)]
    elif what == "stages":
        stages *= size
    else:
        count, width = min(MILLION, TOTAL // size), size
        stages = [_cat(size)]
    began, processor = time.perf_counter(), processor_time()
    anyio.run(_pass, _runs(count, width), stages, count)
    seconds = time.perf_counter() - began, processor_time() - processor
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps([*(one / count * 1e9 for one in seconds), peak]))


def _cat(size: int) -> Stage:
    # If eop is eom, the output of ``cat`` is one reply for each message.
    dialect = MarkerDialect(markers=Markers(eop=b"\n"))
    # Replies are looked at one by one only where one may be too long.
    most = max(size, RUN)
    return Stage(name="cat", worker=("cat",), dialect=dialect, max_message=most)


def _runs(count: int, width: int) -> Iterator[Run]:
    many = max(1, min(count, RUN // width))
    run = Column(pa.array([b"x" * width] * many, pa.binary()))
    for at in range(0, count, many):
        yield run[: count - at]


async def _pass(runs: Iterable[Run], stages: list[Stage], count: int) -> None:
    async with AsyncExitStack() as stack:
        flow: Iterable[Run] | AsyncIterable[Run] = runs
        for stage in stages:
            supervisor = await stack.enter_async_context(AsyncSupervisor(stage))
            flow = _outputs(supervisor, flow)
        assert not isinstance(flow, Iterable)
        passed = 0
        async for run in flow:
            passed += len(run)
    assert passed == count, f"{passed} of {count} messages came"


async def _outputs(
    supervisor: AsyncSupervisor, runs: Iterable[Run] | AsyncIterable[Run]
) -> AsyncIterator[Run]:
    async for outcome in supervisor.answers(runs):
        if outcome.error is not None:
            raise outcome.error
        yield joined(outcome.groups)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
