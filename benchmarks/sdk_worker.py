"""
What does the Python SDK cost?

An identity worker written with the SDK against the C echo worker, under the same
supervisor, with the same messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import anyio

from benchmarks.harness import Job, Row, echo_stage, messages, paired, sdk_stage
from etlstage import AsyncSupervisor, Stage

COUNT = 500_000


def measure() -> list[Row]:
    """Return messages per second of both."""
    run = messages(COUNT)
    ours, theirs = paired(
        lambda: anyio.run(_pass, sdk_stage(), run),
        lambda: anyio.run(_pass, echo_stage(), run),
    )
    return [
        Row("SDK worker, identity", ours, "C echo worker", theirs, "messages/s", 0.5)
    ]


async def _pass(stage: Stage, run: list[bytes]) -> float:
    runs = [run[at : at + 8192] for at in range(0, len(run), 8192)]
    async with AsyncSupervisor(stage) as supervisor:
        await supervisor.submit([b"ready"])
        started = time.perf_counter()
        count = 0
        async for answer in supervisor.answers(runs):
            count += len(answer.groups)
        assert count == COUNT
        return COUNT / (time.perf_counter() - started)


def _job() -> Iterator[Callable[[], object]]:
    run = messages(COUNT)
    yield lambda: anyio.run(_pass, sdk_stage(), run)


JOBS = {"SDK worker": Job(COUNT, _job)}
