"""
The toy dialect in processes: on pipes and, as its twin, over a socket.

A stage's results do not show which: nothing above ``protocol`` and ``transport`` asks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from etlstage.errors import (
    RemoteProtocolError,
    WorkerLost,
    WorkerRefusal,
)
from etlstage.stage import (
    ErrorPolicy,
    RestartPolicy,
    Stage,
    Timeouts,
    WorkerProgram,
)
from etlstage.supervisor import AsyncSupervisor, WorkerExited, WorkerFailed
from tests.supervisor.toy import ToyConnector, ToyDialect, ToyTwin

ROOT = Path(__file__).parent.parent.parent
TWINS = pytest.mark.parametrize(
    "dialect", [ToyDialect(), ToyTwin()], ids=lambda d: d.name
)


def stage(dialect: ToyDialect, how: str = "loud", **settings: Any) -> Stage:  # noqa: ANN401
    """Return a stage that runs the toy program."""
    command = (sys.executable, "-S", "-m", "tests.supervisor.toy_program", how)
    return Stage(
        name="t",
        worker=WorkerProgram(command=command, cwd=ROOT),
        dialect=dialect,
        restart=RestartPolicy(max=3, delay=0.01),
        **settings,
    )


@TWINS
async def test_messages_are_answered(dialect: ToyDialect) -> None:
    """In order, by two workers, including refusals (issue 22)."""
    messages = [b"m%d" % n for n in range(40)]
    messages[7] = b"no"
    async with AsyncSupervisor(stage(dialect, workers=2)) as supervisor:
        events = supervisor.events()
        results = await supervisor.submit(messages)
    with events:
        exited = [e async for e in events if isinstance(e, WorkerExited)]

    assert isinstance(results[7].error, WorkerRefusal)
    others = [result for result in results if result.error is None]
    assert [r.outputs for r in others] == [(m.upper(),) for m in messages if m != b"no"]
    assert [(event.status, event.stopped) for event in exited] == [(0, True)] * 2


@TWINS
async def test_worker_that_is_killed_is_replaced(dialect: ToyDialect) -> None:
    """One message is at fault, and the others are answered (issue 22)."""
    run = stage(dialect, on_error=ErrorPolicy(retries=0))
    async with AsyncSupervisor(run) as supervisor:
        results = await supervisor.submit([b"a", b"die", b"how"])

    how = b"socket" if dialect.connection is not None else b"pipes"
    assert [r.outputs for r in results] == [(b"A",), (), (how,)]
    assert isinstance(results[1].error, WorkerLost)


@TWINS
async def test_worker_that_does_not_announce_itself(dialect: ToyDialect) -> None:
    """The dialect describes what it did (issue 22)."""
    run = stage(dialect, "mute", timeout=Timeouts(start=0.2))
    async with AsyncSupervisor(run) as supervisor:
        with supervisor.events() as events:
            async for event in events:
                if isinstance(event, WorkerFailed):
                    break

    assert isinstance(event, WorkerFailed)
    assert "it wrote 0 bytes and no hello" in str(event.error)


def test_first_frame_identifies_the_worker() -> None:
    """A part of it is not enough yet; any other frame breaks the protocol."""
    connector = ToyConnector()
    assert connector.identity(b'["hello", "t-1"') is None
    assert connector.identity(b'["hello", "t-1"]\n["beat"]') == "t-1"
    for data in b"GET /\n", b"7\n", b'["beat", 1]\n':
        with pytest.raises(RemoteProtocolError, match="no hello"):
            connector.identity(data)
