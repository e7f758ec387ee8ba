"""Pipelines without processes: their launch is scripted."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from structlog.testing import capture_logs

from etlstage.errors import RepliesDoubtful
from etlstage.files.source import FileSource
from etlstage.messages import Position, Run, StageKind
from etlstage.pipeline import Pipeline, WorkerSink, WorkerSource
from etlstage.pipeline.delivery.delivery import Bounds, Delivery
from etlstage.pipeline.delivery.record import CommitRecord
from etlstage.pipeline.descriptor import DescriptorSource
from etlstage.pipeline.interfaces import Source
from etlstage.pipeline.journal_source import JournalSource
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import OffsetPolicy, Order, Stage
from etlstage.testing import (
    MemorySink,
    MemorySource,
    ScriptedLaunch,
    ScriptedWorker,
)
from tests.supervisor.workers import cyclic

pytestmark = pytest.mark.virtual


async def test_workers_of_all_stages_may_be_scripted() -> None:
    """No process is started: the program does not exist."""

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
    """The next run would not load the messages before it (issue 12)."""

    async def script(worker: ScriptedWorker) -> None:
        async for message in worker.messages():
            await worker.reply(message.upper())
            if message == b"b" and worker.start == 1:
                # Taken for the reply to the next message, until that one's own comes.
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


@pytest.mark.parametrize("slow", ["a", "b", "load"])
@pytest.mark.parametrize("order", Order)
async def test_drained_run_processes_no_more_than_workers_have(
    slow: str, order: Order
) -> None:
    """After its limit; messages after the last position are left unprocessed."""

    async def script(worker: ScriptedWorker) -> None:
        async for message in worker.messages():
            if worker.request.stage == slow:
                await anyio.sleep(10)
            processed[worker.request.stage].append(message)
            await worker.reply(*[message] * (worker.request.stage != "load"))

    def stage(name: str, **settings: Any) -> Stage:  # noqa: ANN401
        key = "/0" if order is Order.KEY else None
        return Stage(
            name=name, worker=("none",), window=1, order=order, key=key, **settings
        )

    async def drain() -> None:
        await anyio.sleep(11)
        pipeline.drain()

    processed: dict[str, list[bytes]] = {"a": [], "b": [], "load": []}
    messages = [b"[%d]" % n for n in range(100)]
    source = MemorySource(
        [messages[:4], Position(4), messages[4:8], Position(8), messages[8:]]
    )
    launch = ScriptedLaunch(script)
    pipeline = Pipeline(
        name="p",
        source=source,
        stages=[stage("a"), stage("b")],
        sink=WorkerSink(stage("load", kind=StageKind.LOAD), launch=launch),
        launch=launch,
        drain_limit=30,
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(drain)
        with capture_logs() as logs:
            report = await pipeline.run()

    assert (report.status, report.error) == ("drained", None)
    # The fifth was begun within the limit, 41 s after the start. The load worker does
    # not get it before it is certain of the fourth, as it sends no results.
    assert processed[slow] == messages[: 4 if slow == "load" else 5]
    assert source.acknowledged == [4]
    unprocessed = sum(account.unprocessed for account in report.ledger)
    done = report.ledger[-1].done
    # Stages after a slow one take no more, either.
    assert done == len(processed["load"]) == 4
    assert done + unprocessed + report.undelivered == 100
    (log,) = (log for log in logs if log["log_level"] == "warning")
    assert log["unprocessed"] == 100 - (3 if slow == "load" else 4)


async def test_nothing_is_recorded_behind_what_load_workers_were_not_given(
    tmp_path: Path,
) -> None:
    """Its position still comes, though the sink has dropped the messages before it."""

    async def script(worker: ScriptedWorker) -> None:
        async for message in worker.messages():
            loaded.append(message)
            await anyio.sleep(10)
            await worker.reply()

    async def drain() -> None:
        await anyio.sleep(15)
        pipeline.drain()

    loaded: list[bytes] = []
    load = Stage(name="load", worker=("none",), kind=StageKind.LOAD)
    state = tmp_path / "state"
    pipeline = Pipeline(
        name="p",
        source=MemorySource([[b"a"], Position(1), [b"b", b"c", b"d"], Position(4)]),
        sink=WorkerSink(load, launch=ScriptedLaunch(script)),
        delivery=Delivery(state, exactly_once=True, bounds=Bounds(messages=1)),
        drain_limit=0,
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(drain)
        with capture_logs():
            report = await pipeline.run()

    assert (report.status, report.error) == ("drained", None)
    assert loaded == [b"a", b"b"]
    record = CommitRecord.latest(state)
    assert (record.position, record.ended) == (1, False)


@pytest.mark.parametrize(
    ("source", "limit"),
    [
        (FileSource("in", "text"), 30),
        (JournalSource(Path("set"), reader="papers"), 30),
        (JournalSource(Path("set"), reader=None, start="end"), math.inf),
        (
            WorkerSource(
                cyclic("ranges"), offsets=OffsetPolicy(by="supervisor", end=9)
            ),
            30,
        ),
        (WorkerSource(cyclic("ranges"), offsets=OffsetPolicy(by="worker")), math.inf),
        (DescriptorSource(0, max_message=9), math.inf),
    ],
)
def test_how_long_it_drains(source: Source, limit: float) -> None:
    """Without a limit where unprocessed messages would be lost."""
    assert Pipeline(name="p", source=source, sink=MemorySink()).drain_limit == limit


async def test_nothing_is_loaded_behind_a_doubt() -> None:
    """The run ends when the doubt is found, not when the input ends (issue 22)."""

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
