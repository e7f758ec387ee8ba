"""Workers that die when they owe nothing: their last replies may be one too many."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from etlstage.stage import Stage
from etlstage.supervisor import AsyncSupervisor
from etlstage.testing import ScriptedLaunch, ScriptedWorker, virtual_time
from tests.supervisor.workers import outputs

pytestmark = pytest.mark.core


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Run in virtual time."""
    return virtual_time(request.param)


@pytest.mark.parametrize("window", [2, 4])
async def test_second_reply_is_not_that_of_the_next_message(window: int) -> None:
    """Although the worker dies behind as many replies as it was asked (issue 12)."""

    async def answer_twice(worker: ScriptedWorker) -> int:
        async for message in worker.messages():
            await worker.reply(message.upper())
            if message == b"a" and worker.start == 1:
                await worker.reply(message.upper())
                return 1
        return 0

    stage = Stage(name="t", command=("no-such-program",), window=window)
    launch = ScriptedLaunch(answer_twice)
    with capture_logs(), anyio.fail_after(60):
        async with AsyncSupervisor(stage, launch=launch) as supervisor:
            made = outputs(await supervisor.submit([b"a", b"b"]))

    assert made == [(b"A",), (b"B",)]
    assert len(launch.workers) == 2


@pytest.mark.parametrize("status", [0, 1])
async def test_who_answers_and_exits_is_restarted(status: int) -> None:
    """Each message is answered, however often that happens (issue 12)."""

    async def answer_two(worker: ScriptedWorker) -> int:
        left = 2
        async for message in worker.messages():
            await worker.reply(message.upper())
            left -= 1
            if not left:
                return status
        return 0

    stage = Stage(name="t", command=("no-such-program",), window=2)
    messages = [b"%d" % n for n in range(20)]
    with capture_logs(), anyio.fail_after(60):
        async with AsyncSupervisor(
            stage, launch=ScriptedLaunch(answer_two)
        ) as supervisor:
            made = outputs(await supervisor.submit(messages))

    assert made == [(message,) for message in messages]
