"""An error of our own, wherever it happens, ends the supervisor with that error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from etlstage.stage import Stage, Timeouts
from etlstage.supervisor import AsyncSupervisor
from etlstage.testing import ScriptedLaunch, ScriptedWorker, virtual_time
from etlstage.transport import Child, LaunchRequest, Wire

pytestmark = pytest.mark.core

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
    "child.kill_heirs",
    "child.close",
    "child.stderr.read",
    "child.stderr.readable",
    "child.status.read",
    "child.status.readable",
    "child.status.stop_waiting",
)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Run in virtual time."""
    return virtual_time(request.param)


class Bug(Exception):
    """What no code of ours expects."""


class Broken:
    """
    A launch whose workers have a bug at one place, from its ``nth`` use on.

    Args:
        launch: What starts them.
        place: Such as ``wire.read``.
        nth: Uses of that place that go well, and one.
        worker: The one that has it.

    """

    def __init__(
        self, launch: ScriptedLaunch, place: str, nth: int = 1, worker: str = "t-1"
    ) -> None:
        self.raised = False
        self._launch = launch
        self._path = place.split(".")
        self._left = nth
        self._worker = worker

    def __call__(self, request: LaunchRequest, /) -> tuple[Wire, Child]:
        """Start a worker."""
        wire, child = self._launch(request)
        if request.worker == self._worker:
            holder: object = {"wire": wire, "child": child}[self._path[0]]
            for name in self._path[1:-1]:
                holder = getattr(holder, name)
            name = self._path[-1]
            setattr(holder, name, self._broken(getattr(holder, name)))
        return wire, child

    def _broken(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def broken(*args: object) -> object:
            self._left -= 1
            if self._left <= 0:
                self.raised = True
                raise Bug
            return call(*args)

        return broken


async def behave(worker: ScriptedWorker) -> int:
    """Answer, talk, and need a signal to go."""
    worker.show_life()
    await worker.complain("hello")
    async for message in worker.messages():
        await worker.reply(message)
    await anyio.sleep_forever()
    return 0


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("place", PLACES)
async def test_error_of_our_own_ends_the_supervisor(
    place: str, nth: int, workers: int
) -> None:
    """It never hangs, and leaves no worker behind."""
    launch = ScriptedLaunch(behave, pipe_size=16)
    broken = Broken(launch, place, nth)
    stage = Stage(
        name="t",
        command=("x",),
        workers=workers,
        ready=True,
        timeout=Timeouts(heartbeat=1000, stop=1),
    )
    raised = False
    with capture_logs():
        try:
            async with AsyncSupervisor(stage, launch=broken) as supervisor:
                await supervisor.submit([b"message %d" % n for n in range(20)])
        except* Bug:
            raised = True
    assert raised == broken.raised
    assert launch.running == []


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("workers", [1, 2])
async def test_launch_that_fails_unforeseen_ends_the_supervisor(
    workers: int, nth: int
) -> None:
    """At once, or when it is to start a worker again, after a while."""
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

    stage = Stage(name="t", command=("x",), workers=workers)
    with capture_logs(), pytest.raises((Bug, ExceptionGroup)) as caught:
        async with AsyncSupervisor(stage, launch=broken):
            await anyio.sleep(60)
    assert launch.running == []
    assert "Bug" in repr(caught.value)
