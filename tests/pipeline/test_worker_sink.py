from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from structlog.testing import capture_logs

from etlstage.errors import (
    InvalidMessage,
    RepliesDoubtful,
    StageError,
    WorkerLost,
    WorkerStartFailed,
)
from etlstage.messages import Position, Run, StageKind
from etlstage.pipeline import DeadLetters, Pipeline, WorkerSink
from etlstage.pipeline.delivery.delivery import Delivery
from etlstage.pipeline.delivery.record import CommitRecord
from etlstage.stage import ErrorBudget, ErrorPolicy, RestartPolicy, Stage, WorkerProgram
from etlstage.testing import MemorySource
from tests.patience import HANG
from tests.supervisor.workers import load

pytestmark = pytest.mark.process


def counts(sink: WorkerSink) -> tuple[int, int, int, int]:
    """Return the counts of received, done, dead and failed messages."""
    account = sink.account
    return account.received, account.done, account.dead, account.failed


async def test_answered_messages_are_loaded(tmp_path: Path) -> None:
    """When ``write`` returns, they are loaded and counted."""
    target = tmp_path / "target"
    sink = WorkerSink(load("append", target))
    assert sink.landed() == "0 messages loaded; output incomplete"
    async with sink:
        await sink.write([b"one", b"two"])
        assert target.read_bytes() == b"one\ntwo\n"
        await sink.write([b"three"])
        await sink.flush()
        assert sink.landed() == "3 messages loaded; output incomplete"
        await sink.finish()

    assert sink.name == "l"
    assert counts(sink) == (3, 3, 0, 0)
    assert sink.landed() == "3 messages loaded; output complete"


async def test_worker_that_dies(tmp_path: Path) -> None:
    """Acknowledged messages are loaded; the one that kills workers has no outcome."""
    target = tmp_path / "target"
    sink = WorkerSink(load("append_until", target, "three", restart=RestartPolicy()))
    async with sink:
        with anyio.fail_after(HANG), pytest.raises(WorkerLost, match="disk full"):
            await sink.write([b"one", b"two", b"three", b"four"])

    assert counts(sink) == (4, 3, 0, 0)
    assert target.read_bytes() == b"one\ntwo\nfour\n"


async def test_message_that_can_not_be_sent(tmp_path: Path) -> None:
    """It counts as failed; later messages of the run are loaded all the same."""
    sink = WorkerSink(load("append", tmp_path / "target"))
    async with sink:
        with pytest.raises(InvalidMessage, match="contains marker eop"):
            await sink.write([b"one", b"t\0wo", b"three"])

    assert counts(sink) == (3, 2, 0, 1)


async def test_worker_that_writes_messages_is_reported_once() -> None:
    """A load stage has no results: they are discarded."""
    with capture_logs() as logs:
        async with WorkerSink(load("echo")) as sink:
            await sink.write([b"one"])
            await sink.write([b"two"])

    assert sink.account.done == 2
    warnings = [entry for entry in logs if entry["log_level"] == "warning"]
    assert warnings == [
        {
            "event": "output of a load worker is discarded",
            "log_level": "warning",
            "stage": "l",
        }
    ]


async def test_worker_that_can_not_be_started() -> None:
    """The error comes on entering."""
    missing = Stage(name="l", worker=("no-such-program",), kind=StageKind.LOAD)
    with pytest.raises(WorkerStartFailed, match="stage l: can't start its workers"):
        async with WorkerSink(missing):
            raise AssertionError("it started")


async def test_message_that_kills_is_put_aside(tmp_path: Path) -> None:
    """The others are loaded; its place counts across runs."""
    letters = DeadLetters(tmp_path, pipeline="p")
    stage = replace(
        load("append_until", tmp_path / "target", "three"),
        on_error=ErrorPolicy(budget=ErrorBudget(count=1, share=None), retries=0),
        restart=RestartPolicy(delay=0.01),
    )
    sink = WorkerSink(stage, dead_letters=letters)
    async with sink:
        with anyio.fail_after(HANG):
            await sink.write([b"one", b"two"])
            await sink.write([b"three", b"four"])
            assert counts(sink) == (4, 3, 1, 0)
            with pytest.raises(StageError, match=r"2 of 5 messages .*budget"):
                await sink.write([b"t\0wo"])
    assert counts(sink) == (5, 3, 2, 0)
    assert (sink.account.restarts, sink.account.failures) == (2, 2)
    assert [(x.place, x.message) for x in letters.letters()] == [
        (2, b"three"),
        (4, b"t\0wo"),
    ]
    letters.close()


async def test_nothing_is_recorded_behind_a_doubt(tmp_path: Path) -> None:
    """What precedes it may not be loaded, so the next run loads it again (issue 14)."""
    script = """\
        (until mv late seen; do sleep 0.01; done; printf '\\0') &
        while read line; do printf '\\0'; done
    """
    stage = Stage(
        name="l",
        kind=StageKind.LOAD,
        worker=WorkerProgram(command=("sh", "-c", script), cwd=tmp_path),
    )
    sink = WorkerSink(stage)

    class Doubting(MemorySource):
        goes_on = True

        async def runs(self) -> AsyncGenerator[Run | Position, None]:
            yield [b"1", b"2"]
            while sink.account.done < 2:
                await anyio.lowlevel.checkpoint()
            (tmp_path / "late").touch()
            while not sink.supervisor.doubtful:
                await anyio.lowlevel.checkpoint()
            yield Position(2)
            yield [b"3"]
            yield Position(3)

    delivery = Delivery(tmp_path / "state")
    pipeline = Pipeline(
        name="p", source=Doubting([]), sink=sink, delivery=delivery, flush_every=60
    )
    with anyio.fail_after(HANG):
        report = await pipeline.run()
    assert isinstance(report.error, RepliesDoubtful)
    assert CommitRecord.latest(tmp_path / "state").position is None
