"""Pipelines without processes: what starts the workers is given to them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from structlog.testing import capture_logs

from etlstage.errors import RepliesDoubtful
from etlstage.messages import Position, Run, StageKind
from etlstage.pipeline import Pipeline, WorkerSink, WorkerSource
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import Stage
from etlstage.testing import (
    MemorySink,
    MemorySource,
    ScriptedLaunch,
    ScriptedWorker,
)

pytestmark = pytest.mark.virtual


async def test_workers_of_all_stages_may_be_scripted() -> None:
    """No process is started: such a program does not exist."""

    async def script(worker: ScriptedWorker) -> None:
        if worker.request.stage == "extract":
            await worker.write(b"one\ntwo\n")
        async for message in worker.messages():
            await worker.reply(*[message.upper()] * (worker.request.stage == "clean"))
            seen.append((worker.request.stage, message))

    def stage(name: str, kind: StageKind, **settings: Any) -> Stage:  # noqa: ANN401
        return Stage(name=name, worker=("no-such-program",), kind=kind, **settings)

    seen: list[tuple[str, bytes]] = []
    launch = ScriptedLaunch(script)
    plain = MarkerDialect(mode=Mode.PLAIN)
    sink = WorkerSink(stage("load", StageKind.LOAD), launch=launch)
    source = WorkerSource(
        stage("extract", StageKind.EXTRACT, dialect=plain), launch=launch
    )
    pipeline = Pipeline(
        name="p",
        source=source,
        stages=[stage("clean", StageKind.TRANSFORM)],
        sink=sink,
        launch=launch,
    )

    report = await pipeline.run()

    assert (report.status, report.error) == ("done", None)
    names = {worker.name for worker in launch.workers}
    assert names == {"extract-1", "clean-1", "load-1"}
    assert sorted(seen) == [
        ("clean", b"one"),
        ("clean", b"two"),
        ("load", b"ONE"),
        ("load", b"TWO"),
    ]


async def test_no_position_is_stored_behind_a_doubtful_reply() -> None:
    """What comes before it would not be loaded by the next run (issue 12)."""

    async def script(worker: ScriptedWorker) -> None:
        async for message in worker.messages():
            await worker.reply(message.upper())
            if message == b"b" and worker.start == 1:
                # It is taken for the reply to what comes next, until that comes, too.
                await worker.reply(message.upper())
                await anyio.sleep(0.5)

    class Late(MemorySource):
        async def runs(self) -> AsyncGenerator[Run | Position, None]:
            yield [b"a"]
            yield Position(1)
            await anyio.sleep(0.1)
            yield [b"b", b"c"]
            await anyio.sleep(1)
            yield Position(3)

    source, sink = Late([]), MemorySink()
    pipeline = Pipeline(
        name="p",
        source=source,
        stages=[Stage(name="clean", worker=("no-such-program",), window=4)],
        sink=sink,
        launch=ScriptedLaunch(script),
    )

    with capture_logs():
        report = await pipeline.run()

    assert isinstance(report.error, RepliesDoubtful)
    assert sink.messages == [b"A", b"B", b"B"]
    assert source.acknowledged == [1]


async def test_nothing_is_loaded_behind_a_doubt() -> None:
    """The run ends when it is found, and not when the input does (issue 22)."""

    async def script(worker: ScriptedWorker) -> None:
        async for message in worker.messages():
            await worker.reply(message.upper())
            if message == b"b" and worker.start == 1:
                await anyio.sleep(0.5)  # until the reply has been passed on
                await worker.reply(message.upper())

    class Endless(MemorySource):
        async def runs(self) -> AsyncGenerator[Run | Position, None]:
            yield [b"a"]
            yield [b"b"]
            while not pipeline.doubtful:  # noqa: ASYNC110 - a number, no event
                await anyio.sleep(0.01)
            for _ in range(100):
                yield [b"late"]

    sink = MemorySink()
    pipeline = Pipeline(
        name="p",
        source=Endless([]),
        stages=[Stage(name="clean", worker=("no-such-program",), window=4)],
        sink=sink,
        launch=ScriptedLaunch(script),
    )

    with capture_logs():
        report = await pipeline.run()

    assert isinstance(report.error, RepliesDoubtful)
    assert report.error.stage == "clean"
    assert b"LATE" not in sink.messages
