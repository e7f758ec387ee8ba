"""Doubtful replies end the run when they are found, not at its end."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import anyio
import pytest
from structlog.testing import capture_logs

from etlstage.errors import RepliesDoubtful, WorkerLost
from etlstage.messages import Position, Run, StageKind
from etlstage.pipeline import Pipeline, WorkerSink
from etlstage.pipeline.report import Report
from etlstage.stage import RecyclePolicy, Stage
from etlstage.testing import (
    MemorySink,
    MemorySource,
    ScriptedLaunch,
    ScriptedWorker,
)

pytestmark = [pytest.mark.core, pytest.mark.virtual]

COUNT = 300


class Ticking(MemorySource):
    """Yields a message every half second; then it waits for more, or ends."""

    def __init__(self, count: int, *, ends: bool) -> None:
        super().__init__([])
        self._count = count
        self._ends = ends

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        """Yield the messages."""
        for number in range(self._count):
            await anyio.sleep(0.5)
            yield [b"%d" % number]
        if not self._ends:
            await anyio.sleep_forever()


def straying(at: bytes, *, answer: bool) -> ScriptedLaunch:
    """Return workers that write a surplus reply a moment after the message ``at``."""

    async def script(worker: ScriptedWorker) -> int:
        async for message in worker.messages():
            await worker.reply(*[message] * answer)
            if message == at:
                await anyio.sleep(0.2)
                await worker.reply()
        return 0

    return ScriptedLaunch(script)


def made(kind: StageKind, at: bytes, source: MemorySource) -> Pipeline:
    """Return a pipeline with a worker that strays after the message ``at``."""
    stage = Stage(name=kind.value, kind=kind, worker=("no-such-program",))
    launch = straying(at, answer=kind is StageKind.TRANSFORM)
    if kind is StageKind.LOAD:
        return Pipeline(name="p", source=source, sink=WorkerSink(stage, launch=launch))
    return Pipeline(
        name="p", source=source, stages=[stage], sink=MemorySink(), launch=launch
    )


async def ended(pipeline: Pipeline) -> tuple[Report, float]:
    """Return the report of a run, and its duration in seconds."""
    began = anyio.current_time()
    with capture_logs(), anyio.fail_after(COUNT):
        report = await pipeline.run()
    return report, anyio.current_time() - began


@pytest.mark.parametrize("kind", [StageKind.TRANSFORM, StageKind.LOAD])
async def test_nothing_more_is_loaded(kind: StageKind) -> None:
    """However many messages are still to come (issue 22)."""
    report, _ = await ended(made(kind, b"20", Ticking(COUNT, ends=True)))

    assert isinstance(report.error, RepliesDoubtful)
    assert 20 <= report.ledger[-1].done <= 25
    assert sum(account.doubtful for account in report.ledger) > 0


@pytest.mark.parametrize("kind", [StageKind.TRANSFORM, StageKind.LOAD])
async def test_run_that_waits_for_more_ends(kind: StageKind) -> None:
    """A waiting run need not be stopped to report the doubt (issue 22)."""
    report, seconds = await ended(made(kind, b"20", Ticking(21, ends=False)))

    assert isinstance(report.error, RepliesDoubtful)
    assert seconds < 15


async def test_load_worker_that_fails_while_it_is_replaced() -> None:
    """Its replies are in doubt at once, not at the end of the run (issue 22)."""

    async def fails(worker: ScriptedWorker) -> int:
        async for _ in worker.messages():
            await worker.reply()
        return 3

    stage = Stage(
        name="load",
        kind=StageKind.LOAD,
        worker=("no-such-program",),
        recycle=RecyclePolicy(max_messages=10, variance=0),
    )
    sink = WorkerSink(stage, launch=ScriptedLaunch(fails))
    report, _ = await ended(
        Pipeline(name="p", source=Ticking(COUNT, ends=True), sink=sink)
    )

    assert isinstance(report.error, WorkerLost)
    assert sink.account.doubtful == 10
    assert sink.account.done < 15
