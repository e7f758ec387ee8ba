from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import anyio
import pytest

from etlstage.testing import VirtualLoop, run_virtually, virtual_time
from etlstage.testing.clock import Backend

pytestmark = pytest.mark.core

BACKENDS: tuple[Backend, ...] = ("asyncio", "trio")


@pytest.fixture(params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Run tests in virtual time, as users do."""
    return virtual_time(request.param)


async def test_a_day_takes_no_time() -> None:
    """It is over for who sleeps, and for nobody else."""
    began, clock = time.monotonic(), anyio.current_time()
    await anyio.sleep(86400)
    assert anyio.current_time() - clock == pytest.approx(86400)
    assert time.monotonic() - began < 60


async def test_who_sleeps_less_wakes_first() -> None:
    """Whoever began first, and in the same order every time."""
    woken: list[float] = []

    async def sleep(seconds: float) -> None:
        await anyio.sleep(seconds)
        woken.append(seconds)

    async with anyio.create_task_group() as tasks:
        for seconds in (3600, 0.001, 60, 7e6, 1):
            tasks.start_soon(sleep, seconds)
    assert woken == [0.001, 1, 60, 3600, 7e6]


async def test_time_stands_still_while_there_is_work() -> None:
    """However long that takes."""
    clock = anyio.current_time()
    with anyio.fail_after(0.000_001):
        for _ in range(1000):
            await anyio.lowlevel.checkpoint()
    assert anyio.current_time() == clock


async def test_deadline_is_met_or_missed_by_the_virtual_clock() -> None:
    """To the microsecond."""
    with anyio.move_on_after(10) as missed:
        await anyio.sleep(10.000_001)
    with anyio.move_on_after(10) as met:
        await anyio.sleep(9.999_999)
    assert missed.cancelled_caught
    assert not met.cancelled_caught


@pytest.mark.parametrize("backend", BACKENDS)
def test_plain_function_runs_without_pytest(backend: Backend) -> None:
    """Its result is returned, its error raised."""

    async def main(first: int, second: int) -> int:
        await anyio.sleep(1000)
        return first // second

    assert run_virtually(main, 6, 3, backend=backend) == 2
    with pytest.raises(ZeroDivisionError):
        run_virtually(main, 6, 0, backend=backend)


def test_loop_waits_for_a_thread_when_it_has_no_timer() -> None:
    """There is no time to jump to."""

    async def main() -> float:
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        wake = threading.Timer(0.05, loop.call_soon_threadsafe, (done.set,))
        wake.start()
        await done.wait()
        wake.join()
        return loop.time()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(main()) == 0


def test_timer_rings_however_late_it_is() -> None:
    """A float that far ahead is coarser than the loop's resolution: it hung."""

    async def main() -> float:
        await anyio.sleep(2**28)
        await anyio.sleep(1)
        return anyio.current_time()

    assert run_virtually(main) == pytest.approx(2**28 + 1)
