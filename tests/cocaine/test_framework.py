"""The published Python framework, unmodified."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from etlstage import AsyncSupervisor, Stage, WorkerRefusal
from etlstage.protocol.cocaine.settings import CocaineDialect
from etlstage.protocol.events import (
    Added,
    Alive,
    Cancelled,
    Farewell,
    Opened,
)
from tests.cocaine.talk import Talk, talking
from tests.patience import HANG
from tests.supervisor.conftest import _nothing_is_left as _nothing_is_left

# The first test installs the framework.
pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


async def ask(talk: Talk, event: str, *messages: bytes) -> list[bytes]:
    """Return what a handler makes of messages."""
    talk.send(Opened(id_ := talk.session.owed + 1, messages, each=False, event=event))
    await talk.until(lambda: id_ in talk.ended or id_ in talk.refused)
    return talk.outputs[id_]


async def test_it_is_ready_at_once_and_keeps_beating(
    framework: tuple[str, ...],
) -> None:
    """It sends handshake and heartbeat, and further heartbeats as ours arrive."""
    async with talking((*framework[:2], "1")) as talk:
        await talk.until(lambda: sum(isinstance(e, Alive) for e in talk.events) >= 3)


async def test_chunks_come_back(framework: tuple[str, ...]) -> None:
    """Three chunks come back, and then the end."""
    async with talking(framework) as talk:
        assert await ask(talk, "echo", b"one", b"", b"\xff") == [b"one", b"", b"\xff"]


@pytest.mark.parametrize(
    ("event", "refusal"),
    [
        ("boom", (42, 100, "handler raised")),
        ("no", (42, -13, "explicit failure")),
        ("nosuch", (42, 200, "there is no handler for event b'nosuch'")),
    ],
)
async def test_error_ends_a_session(
    framework: tuple[str, ...], event: str, refusal: tuple[int, int, str]
) -> None:
    """A handler that raises, one that rejects, and one that is not there."""
    async with talking(framework) as talk:
        assert await ask(talk, event, b"x") == []
        assert talk.refused[1] == refusal
        talk.send(Opened(2, [b"y"], each=False, event="echo"))
        await talk.until(lambda: 2 in talk.ended)


async def test_session_can_be_cancelled(framework: tuple[str, ...]) -> None:
    """The handler is notified, and no other session is affected."""
    async with talking(framework) as talk:
        talk.send(Opened(1, [b"x"], each=False, ended=False, event="echo"))
        await talk.until(lambda: talk.outputs[1])
        talk.send(Cancelled(1, 7, "client gone"))
        assert talk.session.owed == 0
        talk.send(Opened(2, [b"y"], each=False, event="echo"))
        await talk.until(lambda: 2 in talk.ended)
        assert (talk.outputs[1], talk.outputs[2]) == ([b"x"], [b"y"])
        said = b""
        with anyio.fail_after(HANG):
            while b"\n" not in said:
                await talk.child.stderr.readable()
                said += talk.child.stderr.read(1000) or b""
        assert said == b"cancelled 42 7 b'client gone'\n"


async def test_sessions_interleave(framework: tuple[str, ...]) -> None:
    """Five sessions are open at once, and closed in reverse order."""
    async with talking(framework) as talk:
        ids = range(1, 6)
        for id_ in ids:
            talk.send(Opened(id_, [], each=False, ended=False, event="echo"))
        for part in range(3):
            for id_ in ids:
                talk.send(Added(id_, [b"%d.%d" % (id_, part)]))
        for id_ in reversed(ids):
            talk.send(Added(id_, (), ended=True))
            left = id_ - 1
            await talk.until(lambda: talk.session.owed == left)  # noqa: B023
        assert talk.ended == [5, 4, 3, 2, 1]
        for id_ in ids:
            assert talk.outputs[id_] == [b"%d.%d" % (id_, part) for part in range(3)]


async def test_chunk_may_be_longer_than_a_read(framework: tuple[str, ...]) -> None:
    """Most documents arrive in several reads."""
    async with talking(framework) as talk:
        assert await ask(talk, "echo", b"x" * 100_000) == [b"x" * 100_000]


async def test_it_drops_what_it_has_when_it_is_asked_to_end(
    framework: tuple[str, ...],
) -> None:
    """It exits with status 0 without ending its session, so a stage seals it first."""
    async with talking(framework) as talk:
        talk.send(Opened(1, [b"x"], each=False, event="slow"))
        await talk.until(lambda: talk.outputs[1])
        talk.wire.write(b"\x93\x01\x01\x92\x01\xa3bye")
        await talk.until(lambda: talk.seen(Farewell) or talk.gone)
        assert await talk.exited() == 0
        assert talk.outputs[1] == [b"begun"]


async def test_it_is_sealed_before_it_is_asked_to_end(
    framework: tuple[str, ...],
) -> None:
    """Its sessions end first, so nothing is lost when a stage stops."""
    stage = Stage(name="app", worker=framework, dialect=CocaineDialect(event="slow"))
    async with AsyncSupervisor(stage) as supervisor, anyio.create_task_group() as tasks:
        results = []

        async def submit() -> None:
            results.extend(await supervisor.submit([b"x"]))

        tasks.start_soon(submit)
        while supervisor.health.state != "ready":
            await anyio.wait_all_tasks_blocked()
            await anyio.sleep(0.01)
        await supervisor.aclose(drain=10)
    assert [result.outputs for result in results] == [(b"begun", b"done")]


async def test_it_may_leave_by_itself(framework: tuple[str, ...]) -> None:
    """Its replies count, but leaving by itself is a failure, even with status 0."""
    stage = Stage(name="app", worker=framework, dialect=CocaineDialect(event="leave"))
    async with AsyncSupervisor(stage) as supervisor:
        assert await supervisor.ask(b"x", timeout=15) == (b"bye",)
        assert await supervisor.ask(b"y", timeout=15) == (b"bye",)
        assert supervisor.faults.failures == 1


async def test_it_exits_when_heartbeats_go_unanswered(
    framework: tuple[str, ...],
) -> None:
    """Its status is 0 although it was not asked to exit, which counts as a failure."""
    async with talking((*framework[:2], "0.2")) as talk:
        talk.deaf = True
        await talk.until(lambda: talk.gone)
        status = await talk.exited()
    assert status == 0
    assert CocaineDialect().failed(status, stopped=False, held=0)


@pytest.mark.parametrize(
    ("service", "answer"),
    [(b"logging", b"found"), (b"storage", b"there is no service 'storage' here")],
)
async def test_services_are_found_or_refused(
    framework: tuple[str, ...], service: bytes, answer: bytes
) -> None:
    """A missing service is refused at once."""
    stage = Stage(name="app", worker=framework, dialect=CocaineDialect(event="resolve"))
    async with AsyncSupervisor(stage) as supervisor:
        (said,) = await supervisor.ask(service, timeout=15)
    assert answer in said


async def test_session_is_kept_open(framework: tuple[str, ...]) -> None:
    """The handler gets each chunk, and a cancellation; its error is reported."""
    stage = Stage(name="app", worker=framework, dialect=CocaineDialect())
    async with AsyncSupervisor(stage) as supervisor:
        with anyio.fail_after(HANG):
            async with supervisor.session("echo") as session:
                for chunk in (b"one", b"\xff" * 100_000):
                    await session.send(chunk)
                    assert await anext(session) == chunk
                await session.choke()
                assert [chunk async for chunk in session] == []
            async with supervisor.session("boom") as session:
                await session.send(b"x")
                with pytest.raises(WorkerRefusal, match="handler raised"):
                    await anext(session)
            async with supervisor.session("echo") as session:
                await session.send(b"x")
                assert await anext(session) == b"x"
                await session.error(7, "client gone")
            async with supervisor.session("echo") as session:
                await session.choke()
                assert [chunk async for chunk in session] == []
        assert supervisor.faults.failures == 0


def test_it_is_a_stage_of_a_pipeline(pipeline: Path) -> None:
    """All messages go through it, in order."""
    command = [sys.executable, "-m", "etlstage", "run", str(pipeline)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (pipeline.parent / "loaded").read_bytes() == b"one\ntwo\nthree\n"
