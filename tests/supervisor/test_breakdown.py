"""An error of our own, wherever it happens, ends the supervisor with that error."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from etlstage.messages import StageKind
from etlstage.protocol.base import Limits, Side
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import Stage, Timeouts, WorkerProgram
from etlstage.supervisor import AsyncSupervisor
from etlstage.testing import ScriptedLaunch, ScriptedWorker
from etlstage.transport import Child, Launch, LaunchRequest, Wire

pytestmark = [pytest.mark.core, pytest.mark.virtual]

PLACES = (
    "wire.read",
    "wire.readable",
    "wire.write",
    "wire.writable",
    "wire.close_write",
    "wire.unread",
    "wire.stop_waiting",
    "wire.close",
    "child.signal",
    "child.wait",
    "child.deserted",
    "child.kill",
    "child.kill_heirs",
    "child.close",
    "child.stderr.read",
    "child.stderr.readable",
    "child.status.read",
    "child.status.readable",
    "child.status.stop_waiting",
)


class Bug(Exception):
    """An error that no code of ours expects."""


class Fuse:
    """
    Makes a method raise a bug, from its ``nth`` call on.

    Attributes:
        blown: Whether it has.

    """

    def __init__(self, nth: int) -> None:
        self.blown = False
        self._left = nth

    def put_into(self, holder: object, path: str) -> None:
        """Break the method at a path from ``holder``, such as ``stderr.read``."""
        *names, method = path.split(".")
        for name in names:
            holder = getattr(holder, name)
        call = getattr(holder, method)

        def broken(*args: object) -> object:
            self._left -= 1
            if self._left <= 0:
                self.blown = True
                raise Bug
            return call(*args)

        setattr(holder, method, broken)


def broken_at(place: str, fuse: Fuse, launch: ScriptedLaunch) -> Launch:
    """Return a launch where all starts of worker ``t-1`` have the fuse at ``place``."""
    whose, _, path = place.partition(".")

    def broken(request: LaunchRequest, /) -> tuple[Wire, Child]:
        wire, child = launch(request)
        if request.worker == "t-1":
            fuse.put_into({"wire": wire, "child": child}[whose], path)
        return wire, child

    return broken


async def behave(worker: ScriptedWorker) -> int:
    """Answer, write to stderr, and need a signal to exit."""
    worker.show_life()
    await worker.complain("hello")
    async for message in worker.messages():
        await worker.reply(message)
    await anyio.sleep_forever()
    return 0


async def break_down(
    stage: Stage,
    scripted: Callable[[ScriptedWorker], Coroutine[Any, Any, int]],
    place: str,
    nth: int,
    work: Callable[[AsyncSupervisor], Awaitable[None]],
) -> None:
    """Do work with a bug at ``place``; check that it is raised, and no worker left."""
    launch = ScriptedLaunch(scripted, pipe_size=16)
    fuse = Fuse(nth)
    raised = False
    with capture_logs():
        try:
            async with AsyncSupervisor(
                stage, launch=broken_at(place, fuse, launch)
            ) as supervisor:
                await work(supervisor)
        except* Bug:
            raised = True
    assert raised == fuse.blown
    assert launch.running == []


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("place", PLACES)
async def test_error_of_our_own_ends_the_supervisor(
    place: str, nth: int, workers: int
) -> None:
    """It never hangs, and leaves no worker behind."""
    stage = Stage(
        name="t",
        worker=WorkerProgram(command=("x",), ready=True),
        workers=workers,
        timeout=Timeouts(heartbeat=1000, stop=1),
    )

    async def work(supervisor: AsyncSupervisor) -> None:
        await supervisor.submit([b"message %d" % n for n in range(20)])

    await break_down(stage, behave, place, nth, work)


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("workers", [1, 2])
async def test_launch_that_fails_unforeseen_ends_the_supervisor(
    workers: int, nth: int
) -> None:
    """At once, or when a worker is restarted after a delay."""
    launch = ScriptedLaunch(behave)
    left = nth

    async def crash(_worker: ScriptedWorker) -> int:
        return 1

    def broken(request: LaunchRequest, /) -> tuple[Wire, Child]:
        nonlocal left
        if request.worker == "t-1":
            left -= 1
            if not left:
                raise Bug
            return ScriptedLaunch(crash)(request)
        return launch(request)

    stage = Stage(name="t", worker=("x",), workers=workers)
    with capture_logs(), pytest.raises((Bug, ExceptionGroup)) as caught:
        async with AsyncSupervisor(stage, launch=broken):
            await anyio.sleep(60)
    assert launch.running == []
    assert "Bug" in repr(caught.value)


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize(
    "method",
    ["send", "receive_data", "events_received", "data_to_send", "get_timer"],
)
async def test_error_of_a_dialect_ends_the_supervisor(
    method: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts as an error of our own."""
    launch, fuse = ScriptedLaunch(behave), Fuse(nth)
    whole = MarkerDialect.open

    def open_broken(
        dialect: MarkerDialect,
        side: Side,
        limits: Limits,
        **opened_for: Any,  # noqa: ANN401 - passed on
    ) -> object:
        session = whole(dialect, side, limits, **opened_for)
        session.unprompted = True
        fuse.put_into(session, method)
        return session

    monkeypatch.setattr(MarkerDialect, "open", open_broken)
    raised = False
    with capture_logs():
        try:
            stage = Stage(name="t", worker=("x",), workers=2)
            async with AsyncSupervisor(stage, launch=launch) as supervisor:
                for n in range(9):
                    await supervisor.submit([b"%d" % n] * 9)
        except* Bug:
            raised = True
    assert raised
    assert launch.running == []


async def extract(worker: ScriptedWorker) -> int:
    """Answer requests, if there are any; write to stderr, and need a signal to exit."""
    worker.show_life()
    await worker.complain("hello")
    if not worker.request.stdin:
        await worker.write(b"x\n" * 20)
        return 0
    async for _ in worker.messages():
        await worker.reply(*[b"x"] * 20)
    await anyio.sleep_forever()
    return 0


@pytest.mark.parametrize("mode", [Mode.PLAIN, Mode.CYCLIC], ids=str)
@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("place", PLACES)
async def test_error_of_our_own_ends_an_extraction(
    place: str, nth: int, mode: Mode
) -> None:
    """As in other stages."""
    stage = Stage(
        name="t",
        worker=WorkerProgram(command=("x",), ready=True),
        kind=StageKind.EXTRACT,
        dialect=MarkerDialect(mode=mode),
        timeout=Timeouts(stop=1),
    )

    async def work(supervisor: AsyncSupervisor) -> None:
        for _ in range(2):
            async with aclosing(supervisor.extract()) as messages:
                assert [m async for m in messages] == [b"x"] * 20

    await break_down(stage, extract, place, nth, work)
