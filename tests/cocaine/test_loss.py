"""Workers with many sessions that are killed, again and again."""

from __future__ import annotations

import os
import sys
from signal import SIGKILL

import pytest

from etlstage import AsyncSupervisor, Stage
from etlstage.protocol.cocaine.settings import CocaineDialect
from etlstage.stage.policy import RestartPolicy
from etlstage.supervisor.lifecycle.events import WorkerStarted
from tests.supervisor.conftest import _nothing_is_left as _nothing_is_left

pytestmark = pytest.mark.process

WORKER = """
from etlstage.worker import cocaine
cocaine.run({"transform": lambda request, response: response.write(request.read())})
"""


@pytest.mark.parametrize(
    ("total", "every"),
    [
        pytest.param(4_000, 1_000, id="few"),
        pytest.param(
            100_000,
            5_000,
            id="many",
            marks=[pytest.mark.slow, pytest.mark.timeout(300)],
        ),
    ],
)
async def test_every_message_has_one_outcome_and_the_order_holds(
    total: int, every: int
) -> None:
    """One of four workers with 64 sessions each is killed now and then."""
    stage = Stage(
        name="app",
        worker=(sys.executable, "-c", WORKER),
        dialect=CocaineDialect(concurrency=64),
        workers=4,
        restart=RestartPolicy(max=1000, delay=0.01),
    )
    messages = [b"%d" % n for n in range(total)]
    answers, killed = [], 0
    async with AsyncSupervisor(stage) as supervisor, supervisor.events() as events:
        pids: list[int] = []
        async for result in supervisor.stream(messages):
            answers.append(result.outputs)
            if len(answers) % every == every // 2:
                while events.statistics().current_buffer_used or not pids:
                    event = await events.receive()
                    if isinstance(event, WorkerStarted):
                        pids.append(event.pid)
                os.kill(pids.pop(), SIGKILL)
                killed += 1
    assert answers == [(message,) for message in messages]
    assert killed == total // every
