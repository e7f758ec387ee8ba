"""Pipelines without processes: what starts the workers is given to them."""

from __future__ import annotations

from typing import Any

import pytest

from etlstage.messages import StageKind
from etlstage.pipeline import Pipeline, WorkerSink, WorkerSource
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import Stage
from etlstage.testing import ScriptedLaunch, ScriptedWorker, virtual_time


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Run in virtual time."""
    return virtual_time(request.param)


async def test_workers_of_all_stages_may_be_scripted() -> None:
    """No process is started: such a program does not exist."""

    async def script(worker: ScriptedWorker) -> None:
        if worker.request.stage == "extract":
            await worker.write(b"one\ntwo\n")
        async for message in worker.messages():
            await worker.reply(*[message.upper()] * (worker.request.stage == "clean"))
            seen.append((worker.request.stage, message))

    def stage(name: str, kind: StageKind, **settings: Any) -> Stage:  # noqa: ANN401
        return Stage(name=name, command=("no-such-program",), kind=kind, **settings)

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
