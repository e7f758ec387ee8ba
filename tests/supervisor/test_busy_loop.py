"""An event loop that was busy past a deadline, while what was due has come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import anyio
import pytest

from etlstage.errors import RemoteProtocolError, WorkerLost
from etlstage.messages import Result, StageKind
from etlstage.protocol.events import Alive, Ready
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import ErrorPolicy, RestartPolicy, Stage, Timeouts
from etlstage.supervisor import AsyncSupervisor, WorkerExited
from etlstage.supervisor.worker import WorkerProcess
from etlstage.testing import ScriptedLaunch, ScriptedWorker
from etlstage.testing.scripted import Script
from tests.staged import staged
from tests.supervisor.toy import HEARTBEAT, ToyDialect, ToyWorker
from tests.supervisor.workers import outputs

pytestmark = [pytest.mark.core, pytest.mark.virtual]

LATER = 2.0
"""Seconds for which the event loop was busy; all limits here are shorter."""


class Scene:
    """A worker that does nothing by itself, and its supervisor."""

    def __init__(self, stage: Stage, script: Script | None = None) -> None:
        self.launch = ScriptedLaunch(script or self._wait)
        self.supervisor = AsyncSupervisor(stage, launch=self.launch)
        self.results: list[Result] = []
        self._asked = anyio.Event()

    async def _wait(self, worker: ScriptedWorker) -> int:
        async for _ in worker.messages():
            self._asked.set()
        return 3

    async def submit(self) -> None:
        """Submit a message."""
        self.results += await self.supervisor.submit([b"1"])

    async def asked(self) -> ScriptedWorker:
        """Wait until the worker has a message, and return the worker."""
        await self._asked.wait()
        await anyio.wait_all_tasks_blocked()
        return self.launch.workers[0]

    @property
    def running(self) -> WorkerProcess:
        """The worker's process, as the pool has it."""
        assert self.supervisor._pool is not None
        (running,) = self.supervisor._pool._running.values()
        return running

    def ring_for_answer(self) -> None:
        """Do what the deadline of an answer does in a loop that was busy."""
        self.running.link.deadlines._ring(anyio.current_time() + LATER)

    def ring_timer(self) -> None:
        """Do what the worker's timer does in a loop that was busy."""
        pool = self.supervisor._pool
        assert pool is not None
        pool.time = lambda: anyio.current_time() + LATER
        pool._ring(self.running.name, 0.0)
        pool.time = anyio.current_time

    def ring_for_session(self) -> None:
        """Do what the session's timer does in a loop that was busy."""
        link, now = self.running.link, anyio.current_time() + HEARTBEAT
        link._clock = lambda: now
        link._session_due._ring(now)
        link._clock = anyio.current_time


async def quiet(worker: ScriptedWorker) -> int:
    """Be ready, and exit with status 3 at the end of stdin."""
    await ToyWorker(worker).say(Ready())
    while await worker.read():
        pass
    return 3


def answering() -> Stage:
    """Return a stage whose worker must answer within a second."""
    policy = ErrorPolicy(retries=0)
    timeout = Timeouts(message=1.0, stop=0.3)
    return staged(("scripted",), timeout=timeout, on_error=policy)


def beating() -> Stage:
    """Return a stage whose worker must be heard of within a second."""
    return staged(("scripted",), timeout=Timeouts(heartbeat=1.0, stop=0.3))


async def test_answer_counts_before_its_deadline() -> None:
    """The reply that is in the pipe is read first (issue 22)."""
    scene = Scene(answering())
    async with scene.supervisor, anyio.create_task_group() as tasks:
        tasks.start_soon(scene.submit)
        worker = await scene.asked()
        worker._wire.write(b"one\n\0")
        scene.ring_for_answer()
        assert scene.running.error is None
        assert scene.supervisor.faults.failures == 0
    assert outputs(scene.results) == [(b"one",)]


async def test_part_of_an_answer_does_not() -> None:
    """The worker is at fault, and the error has what was read (issue 22)."""
    scene = Scene(answering())
    async with scene.supervisor, anyio.create_task_group() as tasks:
        tasks.start_soon(scene.submit)
        worker = await scene.asked()
        worker._wire.write(b"one\n")
        scene.ring_for_answer()
        error = scene.running.error
    assert "did not answer a message within 1 s" in str(error)


@pytest.mark.parametrize(
    ("does", "error", "text"),
    [
        (
            lambda worker: worker._wire.close_write(),
            WorkerLost,
            "exited with status 3",
        ),
        (
            lambda worker: worker._wire.write(b"\0\0\0"),
            RemoteProtocolError,
            "broke the protocol",
        ),
    ],
    ids=["end", "breach"],
)
async def test_what_is_found_instead_is_the_error(
    does: Callable[[ScriptedWorker], object], error: type[Exception], text: str
) -> None:
    """A worker that has failed is not blamed for being silent (issue 22)."""
    scene = Scene(answering())
    async with scene.supervisor, anyio.create_task_group() as tasks:
        tasks.start_soon(scene.submit)
        worker = await scene.asked()
        does(worker)
        scene.ring_for_answer()
    (result,) = scene.results
    assert isinstance(result.error, error)
    assert text in str(result.error)


async def test_breach_precedes_a_deadline_of_any_order() -> None:
    """The exchange is lost with the worker, not cancelled (issue 22)."""
    scene = Scene(replace(answering(), dialect=ToyDialect()), quiet)
    async with scene.supervisor, anyio.create_task_group() as tasks:
        tasks.start_soon(scene.submit)
        await anyio.wait_all_tasks_blocked()
        scene.launch.workers[0]._wire.write(b"nonsense\n")
        scene.ring_for_answer()
    (result,) = scene.results
    assert "broke the protocol: no frame" in str(result.error)


async def test_worker_that_waits_for_the_consumer_is_not_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The deadline is paused until outputs are taken (issue 22)."""
    stage = staged(
        ("scripted",),
        kind=StageKind.EXTRACT,
        dialect=MarkerDialect(mode=Mode.CYCLIC),
        timeout=Timeouts(message=1.0, stop=0.3),
        restart=RestartPolicy(max=0),
    )
    monkeypatch.setattr("etlstage.supervisor.stream._ROUND_UNREAD", 1000)
    scene = Scene(stage)
    async with scene.supervisor, anyio.create_task_group() as tasks:
        messages: list[bytes] = []
        free = anyio.Event()

        async def extract() -> None:
            async for run in scene.supervisor.extract_runs(template="go"):
                messages.extend(run)
                await free.wait()

        tasks.start_soon(extract)
        worker = await scene.asked()
        worker._wire.write(b"x\n")
        await anyio.wait_all_tasks_blocked()
        worker._wire.write((b"x" * 1500 + b"\n") * 2)
        scene.ring_for_answer()
        assert scene.running.error is None
        await anyio.wait_all_tasks_blocked()
        assert scene.running.link.deadlines.asked_at is None
        free.set()
        worker._wire.write(b"\0")
    assert len(messages) == 3
    assert scene.supervisor.faults.failures == 0


async def test_heartbeat_counts_before_its_deadline() -> None:
    """One that is in the status pipe is read first (issue 22)."""
    scene = Scene(beating())
    async with scene.supervisor:
        await anyio.wait_all_tasks_blocked()
        scene.launch.workers[0].show_life()
        scene.ring_timer()
        assert scene.running.error is None


async def test_missing_heartbeat_is_noticed_by_a_busy_loop() -> None:
    """There is nothing to read: the worker is replaced (issue 22)."""
    scene = Scene(beating())
    async with scene.supervisor:
        await anyio.wait_all_tasks_blocked()
        scene.ring_timer()
        assert "sent no heartbeat for 1 s" in str(scene.running.error)


async def test_timer_of_a_worker_that_has_just_failed() -> None:
    """What is read first shows that the worker is at fault (issue 22)."""
    scene = Scene(beating())
    async with scene.supervisor:
        await anyio.wait_all_tasks_blocked()
        scene.launch.workers[0]._wire.write(b"\0\0\0")
        scene.ring_timer()
        assert isinstance(scene.running.error, RemoteProtocolError)


async def test_heartbeat_of_a_dialect_counts_before_its_deadline() -> None:
    """The session has its own timer, and receives what has come first (issue 22)."""
    scene = Scene(staged(("toy",), dialect=ToyDialect()), quiet)
    async with scene.supervisor:
        await anyio.wait_all_tasks_blocked()
        await ToyWorker(scene.launch.workers[0]).say(Alive())
        scene.ring_for_session()
        assert scene.running.error is None


@pytest.mark.parametrize(
    ("scene", "ring"),
    [
        (lambda: Scene(beating()), Scene.ring_timer),
        (
            lambda: Scene(staged(("toy",), dialect=ToyDialect()), quiet),
            Scene.ring_for_session,
        ),
    ],
    ids=["timer", "session"],
)
async def test_worker_that_has_ended_owes_no_heartbeat(
    scene: Callable[[], Scene], ring: Callable[[Scene], None]
) -> None:
    """Its exit status is reported instead (issue 22)."""
    seen, fates = scene(), []
    with seen.supervisor.events() as events:
        async with seen.supervisor:
            await anyio.wait_all_tasks_blocked()
            seen.launch.workers[0]._wire.close_write()
            ring(seen)
            assert seen.running.error is None
            async for event in events:
                if isinstance(event, WorkerExited):
                    fates.append(event.fate)
                    break
    assert fates == ["exited with status 3"]


async def test_breach_precedes_a_heartbeat_of_a_dialect() -> None:
    """What is read first shows that the worker is at fault (issue 22)."""
    scene = Scene(staged(("toy",), dialect=ToyDialect()), quiet)
    async with scene.supervisor:
        await anyio.wait_all_tasks_blocked()
        scene.launch.workers[0]._wire.write(b"nonsense\n")
        scene.ring_for_session()
        assert "no frame" in str(scene.running.error)
