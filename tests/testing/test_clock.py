from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel
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
    """It passes on the virtual clock alone."""
    began, clock = time.monotonic(), anyio.current_time()
    await anyio.sleep(86400)
    assert anyio.current_time() - clock == pytest.approx(86400)
    assert time.monotonic() - began < 60


async def test_who_sleeps_less_wakes_first() -> None:
    """The order in which tasks fell asleep does not matter."""
    woken: list[float] = []

    async def sleep(seconds: float) -> None:
        await anyio.sleep(seconds)
        woken.append(seconds)

    async with anyio.create_task_group() as tasks:
        for seconds in (3600, 0.001, 60, 7e6, 1):
            tasks.start_soon(sleep, seconds)
    assert woken == [0.001, 1, 60, 3600, 7e6]


async def test_time_stands_still_while_there_is_work() -> None:
    """It passes only while all tasks wait."""
    clock = anyio.current_time()
    with anyio.fail_after(0.000_001):
        for _ in range(1000):
            await anyio.lowlevel.checkpoint()
    assert anyio.current_time() == clock


async def test_deadline_is_met_or_missed_by_the_virtual_clock() -> None:
    """It is exact to the microsecond."""
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
    """Floats that far ahead are coarser than the loop's resolution: it hung."""

    async def main() -> float:
        await anyio.sleep(2**28)
        await anyio.sleep(1)
        return anyio.current_time()

    assert run_virtually(main) == pytest.approx(2**28 + 1)


# --- an order that is drawn -----------------------------------------------------------


def drawn(seed: int) -> random.Random:
    """Return the random numbers of a seed."""
    return random.Random(seed)  # noqa: S311


def orders(seed: int) -> list[str]:
    """Return the order in which three tasks took their steps."""
    seen: list[str] = []

    async def walk(name: str) -> None:
        for _ in range(3):
            seen.append(name)
            await anyio.lowlevel.checkpoint()

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for name in "abc":
                tasks.start_soon(walk, name)

    run_virtually(main, draw=drawn(seed))
    return seen


def test_order_of_tasks_is_drawn() -> None:
    """A seed has one order; each task takes its own steps in order."""
    found = [orders(seed) for seed in range(40)]
    assert found == [orders(seed) for seed in range(40)]
    assert len({tuple(seen[:3]) for seen in found}) == 6
    assert all(sorted(seen) == list("aaabbbccc") for seen in found)


def cancelled(seed: int) -> list[int]:
    """Return the order in which the tasks of one scope are cancelled."""
    seen: list[int] = []

    async def wait(number: int) -> None:
        with anyio.CancelScope():
            try:
                await anyio.sleep_forever()
            finally:
                seen.append(number)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for number in range(20):
                tasks.start_soon(wait, number)
            await anyio.sleep(1)
            tasks.cancel_scope.cancel()

    run_virtually(main, draw=drawn(seed))
    return seen


def test_order_of_what_is_cancelled_is_drawn() -> None:
    """Without that it depends on memory addresses, as tasks are kept in sets."""
    ballast = []
    for seed in range(5):
        ballast += [object() for _ in range(seed * 777)]
        first = cancelled(seed)
        ballast += [[n] for n in range(seed * 1234)]
        assert cancelled(seed) == first
    assert cancelled(1) != cancelled(2)


async def wait_forever() -> None:
    """Wait for an event that is never set, together with a stubborn task."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait_stubbornly)
        await anyio.Event().wait()


async def wait_stubbornly() -> None:
    """Wait for an event that is never set; sleep even when cancelled."""
    try:
        await anyio.Event().wait()
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(anyio.current_time() + 1)


async def turn_forever() -> None:
    """Never wait."""
    while True:
        await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize(
    ("main", "why"),
    [
        (wait_forever, "all tasks wait for each other"),
        (turn_forever, "tasks keep running, but no time passes"),
    ],
)
def test_what_can_not_end_is_an_error(
    main: Callable[[], Awaitable[None]], why: str
) -> None:
    """Without the error it would run forever."""
    with pytest.raises(RuntimeError, match=why):
        run_virtually(main, draw=drawn(0))


def test_order_is_drawn_where_time_is_far_ahead() -> None:
    """Floats are far apart there."""

    async def main() -> list[int]:
        await anyio.sleep(1e9)  # noqa: ASYNC116 - and then it goes on
        seen: list[int] = []

        async def note(number: int) -> None:
            await anyio.lowlevel.checkpoint()
            seen.append(number)

        async with anyio.create_task_group() as tasks:
            for number in range(5):
                tasks.start_soon(note, number)
        return sorted(seen)

    assert run_virtually(main, draw=drawn(0)) == [0, 1, 2, 3, 4]
