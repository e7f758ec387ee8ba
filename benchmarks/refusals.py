"""
What does it cost if a worker refuses a message now and then?

The same SDK worker refuses one message of a hundred, or none: under a supervisor, and
in a pipeline that keeps each refused message as a dead letter.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import anyio

from benchmarks.harness import Row, messages, paired
from etlstage import AsyncSupervisor, ErrorBudget, ErrorPolicy, Pipeline, Stage
from etlstage.pipeline import DeadLetters
from etlstage.testing import MemorySink, MemorySource

COUNT = 100_000
SHARE = 100
WORKER = """
import sys
from etlstage import worker
END = sys.argv[1].encode()
def f(message):
    if message.endswith(END):
        raise ValueError("no date")
    return [message]
worker.transform(f)
"""


def measure() -> list[Row]:
    """Return messages per second with refusals, and without."""
    run = messages(COUNT)
    runs = [run[at : at + 8192] for at in range(0, COUNT, 8192)]
    rows = []
    for what, job in ("supervisor", _supervise), ("pipeline, dead letters", _pipeline):
        some, none = paired(
            lambda job=job: anyio.run(job, _stage("00"), runs),  # type: ignore[misc]
            lambda job=job: anyio.run(job, _stage("none"), runs),  # type: ignore[misc]
        )
        rows.append(
            Row(f"1 % refused, {what}", some, "none refused", none, "messages/s", 0.8)
        )
    return rows


def _stage(end: str) -> Stage:
    return Stage(
        name="refuses",
        worker=(sys.executable, "-c", WORKER, end),
        on_error=ErrorPolicy(budget=ErrorBudget(share=0.02)),
    )


async def _supervise(stage: Stage, runs: list[list[bytes]]) -> float:
    async with AsyncSupervisor(stage) as supervisor:
        await supervisor.submit([b"ready"])
        started = time.perf_counter()
        ended = 0
        async for answer in supervisor.answers(runs):
            ended += len(answer.messages)
        assert ended == COUNT
        return COUNT / (time.perf_counter() - started)


async def _pipeline(stage: Stage, runs: list[list[bytes]]) -> float:
    sink = MemorySink()
    with tempfile.TemporaryDirectory() as folder:
        letters = DeadLetters(Path(folder), pipeline="p")
        started = time.perf_counter()
        report = await Pipeline(
            name="p",
            source=MemorySource(runs),
            stages=[stage],
            sink=sink,
            dead_letters=letters,
        ).run()
        seconds = time.perf_counter() - started
        letters.close()
    assert report.status == "done", report.error
    assert report.ledger[1].dead in (0, COUNT // SHARE)
    return COUNT / seconds
