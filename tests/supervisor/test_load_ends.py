"""Load workers that have answered everything, and fail while they exit."""

from __future__ import annotations

from dataclasses import replace
from signal import SIGSEGV, SIGTERM

import anyio
import anyio.lowlevel
import pytest
from structlog.testing import capture_logs

from etlstage.errors import WorkerLost
from etlstage.messages import StageKind
from etlstage.pipeline import Pipeline, WorkerSink
from etlstage.protocol.cocaine.settings import CocaineDialect
from etlstage.stage import RecyclePolicy, RestartPolicy, Stage, Timeouts
from etlstage.supervisor import AsyncSupervisor, WorkerExited
from etlstage.testing import (
    MemorySource,
    ScriptedLaunch,
    ScriptedWorker,
)
from etlstage.testing.scripted import Script
from tests.protocol.cocaine.scripted import CocaineWorker

pytestmark = [pytest.mark.core, pytest.mark.virtual]


def stage(kind: StageKind = StageKind.LOAD) -> Stage:
    """Return a stage called ``l``; the launch decides what runs."""
    command = ("no-such-program",)
    return Stage(name="l", kind=kind, worker=command, timeout=Timeouts(stop=5))


def ending(status: int) -> Script:
    """Return a worker that answers everything, and exits with this status."""

    async def answer(worker: ScriptedWorker) -> int:
        async for _ in worker.messages():
            await worker.reply()
        if status:
            await worker.complain("No space left on device")
        return status

    return answer


async def deaf(worker: ScriptedWorker) -> int:
    """Answer everything, but do not exit when the input ends."""
    async for _ in worker.messages():
        await worker.reply()
    await anyio.sleep_forever()
    return 0


async def served(
    script: Script, run: Stage, messages: list[bytes]
) -> tuple[AsyncSupervisor, list[WorkerExited]]:
    """Return a supervisor that answered messages and closed, and its workers' exits."""
    with capture_logs(), anyio.fail_after(600):
        async with AsyncSupervisor(run, launch=ScriptedLaunch(script)) as supervisor:
            events = supervisor.events()
            for message in messages:
                (result,) = await supervisor.submit([message])
                assert result.error is None
        with events:
            seen = [event async for event in events]
    return supervisor, [event for event in seen if isinstance(event, WorkerExited)]


@pytest.mark.parametrize("status", [3, -SIGSEGV])
async def test_what_it_has_answered_is_doubtful(status: int) -> None:
    """A buffer that it could not write is lost without any other sign (issue 22)."""
    supervisor, (event,) = await served(ending(status), stage(), [b"1", b"2", b"3"])

    assert (event.status, event.stopped, event.doubtful) == (status, False, 3)
    assert supervisor.doubtful == 3
    assert isinstance(supervisor.doubt, WorkerLost)
    (attempt,) = supervisor.doubt.attempts
    assert attempt.stderr == ("No space left on device",)
    assert supervisor.faults.failures == 1


async def test_who_is_killed_is_doubtful() -> None:
    """It did not exit within ``timeout.stop`` after its input ended (issue 22)."""
    supervisor, (event,) = await served(deaf, stage(), [b"1", b"2"])

    assert (event.status, event.doubtful) == (-SIGTERM, 2)
    assert "did not exit within 5 s" in str(supervisor.doubt)


async def test_dialect_decides_what_a_good_end_is() -> None:
    """Cocaine's frameworks exit with any status after a terminate (issue 22)."""
    statuses: list[int] = []

    async def answer(worker: ScriptedWorker) -> int:
        async with CocaineWorker(worker) as cocaine:
            async for request in cocaine.requests():
                await cocaine.reply(request)
        return statuses[0]

    run = replace(stage(), dialect=CocaineDialect())
    for status, doubtful in (1, 0), (-SIGSEGV, 1):
        statuses[:] = [status]
        supervisor, (event,) = await served(answer, run, [b"1"])
        assert (event.status, event.doubtful) == (status, doubtful)
        assert (supervisor.doubt is None) == (not doubtful)


async def test_who_ends_well_is_not() -> None:
    """Status 0 proves that everything it has answered is loaded."""
    supervisor, (event,) = await served(ending(0), stage(), [b"1", b"2"])

    assert (event.stopped, event.doubtful) == (True, 0)
    assert (supervisor.doubtful, supervisor.doubt) == (0, None)


async def test_who_has_answered_nothing_is_not() -> None:
    """It may not even have started, so there is nothing to doubt."""
    supervisor, (event,) = await served(deaf, stage(), [])

    assert (event.stopped, event.doubtful) == (True, 0)
    assert supervisor.doubt is None


async def test_outputs_of_a_transform_worker_are_not() -> None:
    """They have been returned, and its exit changes none of them."""
    supervisor, (event,) = await served(
        ending(3), stage(StageKind.TRANSFORM), [b"1", b"2"]
    )

    assert (event.stopped, event.doubtful) == (True, 0)
    assert supervisor.doubt is None


async def test_each_process_proves_its_own() -> None:
    """Of workers that are replaced, only those that failed are doubtful (issue 22)."""

    async def once(worker: ScriptedWorker) -> int | None:
        return await ending(4 if worker.start == 2 else 0)(worker)

    supervisor, exits = await served(
        once,
        replace(
            stage(),
            recycle=RecyclePolicy(max_messages=2, variance=0),
            restart=RestartPolicy(delay=0.1),
        ),
        [b"%d" % n for n in range(6)],
    )

    assert [event.doubtful for event in exits[:3]] == [0, 2, 0]
    assert supervisor.doubtful == 2


async def test_who_is_stopped_by_force_is_not() -> None:
    """It had no time to exit: the load is known to be incomplete anyway."""
    launch = ScriptedLaunch(deaf)
    with capture_logs(), anyio.CancelScope() as scope:
        async with AsyncSupervisor(stage(), launch=launch) as supervisor:
            await supervisor.submit([b"1"])
            scope.cancel()
            await anyio.lowlevel.checkpoint()
    assert launch.workers[0].signals == [SIGTERM]
    assert (supervisor.doubtful, supervisor.doubt) == (0, None)


async def test_the_run_fails() -> None:
    """The report counts doubtful messages, and names the worker (issue 22)."""
    sink = WorkerSink(stage(), launch=ScriptedLaunch(ending(3)))
    with capture_logs():
        report = await Pipeline(
            name="p", source=MemorySource([[b"1", b"2"], [b"3"]]), sink=sink
        ).run()

    assert report.status == "failed"
    assert isinstance(report.error, WorkerLost)
    *_, account = report.ledger
    assert (account.done, account.doubtful, account.failures) == (3, 3, 1)
    assert report.landed == "3 messages loaded; output incomplete"
