from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import pytest

from etlstage.stage import Timeouts
from etlstage.supervisor.deadlines import BusyTime, Deadline, ResponseDeadlines

pytestmark = [pytest.mark.core, pytest.mark.virtual]


class Bell:
    """Records when its alarm rings."""

    def __init__(self) -> None:
        self.alarm = Deadline(self._ring)
        self.rung: list[float] = []
        self.then: Callable[[float], None] = lambda _: None
        self._rings = anyio.Event()

    def _ring(self, now: float) -> None:
        self.rung.append(now)
        self.then(now)
        self._rings.set()

    async def wait(self) -> float:
        """Return the time when it rings next."""
        with anyio.fail_after(10):
            await self._rings.wait()
        self._rings = anyio.Event()
        return self.rung[-1]


@asynccontextmanager
async def running() -> AsyncIterator[Bell]:
    """Run an alarm that is not set yet."""
    bell = Bell()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bell.alarm.run)
        await anyio.wait_all_tasks_blocked()
        yield bell
        tasks.cancel_scope.cancel()


async def test_alarm_rings_once_its_time_has_come() -> None:
    """Not before, and only once."""
    async with running() as bell:
        at = anyio.current_time() + 0.05
        bell.alarm.set(at)
        assert await bell.wait() >= at
        await anyio.wait_all_tasks_blocked()

    assert len(bell.rung) == 1


async def test_alarm_that_is_late_rings_at_once() -> None:
    """A time in the past is due."""
    async with running() as bell:
        bell.alarm.set(0.0)
        await bell.wait()


async def test_alarm_that_is_moved_away_rings_later() -> None:
    """The sleeper wakes at the old time, and sleeps again."""
    async with running() as bell:
        now = anyio.current_time()
        bell.alarm.set(now + 0.02)
        await anyio.wait_all_tasks_blocked()
        bell.alarm.set(now + 0.1)
        assert await bell.wait() >= now + 0.1

    assert len(bell.rung) == 1


async def test_alarm_that_is_moved_nearer_rings_sooner() -> None:
    """It does not sleep until the old time."""
    async with running() as bell:
        bell.alarm.set(anyio.current_time() + 3600)
        await anyio.wait_all_tasks_blocked()
        bell.alarm.set(anyio.current_time() + 0.02)
        await bell.wait()


async def test_alarm_that_is_taken_back_does_not_ring() -> None:
    """None cancels it; it can be set again."""
    async with running() as bell:
        bell.alarm.set(anyio.current_time() + 0.01)
        await anyio.wait_all_tasks_blocked()
        bell.alarm.set(None)
        other = Bell()
        other.alarm.set(anyio.current_time() + 0.03)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(other.alarm.run)
            await other.wait()
            tasks.cancel_scope.cancel()
        assert bell.rung == []
        bell.alarm.set(0.0)
        await bell.wait()


async def test_who_is_called_may_set_the_alarm_again() -> None:
    """For a deadline that is followed by another."""
    async with running() as bell:

        def again(now: float) -> None:
            bell.then = lambda _: None
            bell.alarm.set(now + 0.01)

        bell.then = again
        bell.alarm.set(0.0)
        await bell.wait()
        await bell.wait()

    assert len(bell.rung) == 2
    assert bell.rung[1] >= bell.rung[0] + 0.01


async def test_one_that_is_moved_by_another_does_not_ring() -> None:
    """Although its own time had come."""
    first, second = Bell(), Bell()
    first.then = lambda _: second.alarm.set(None)
    first.alarm.set(0.0)
    second.alarm.set(0.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(first.alarm.run, second.alarm)
        await first.wait()
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert second.rung == []


async def test_several_deadlines_share_a_task() -> None:
    """Each rings at its own time; one moved nearer wakes the common sleeper."""
    first, second = Bell(), Bell()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(first.alarm.run, second.alarm)
        began = anyio.current_time()
        first.alarm.set(began + 0.1)
        await anyio.wait_all_tasks_blocked()
        second.alarm.set(began + 0.02)
        assert began + 0.02 <= await second.wait() < began + 0.1
        assert first.rung == []
        assert await first.wait() >= began + 0.1
        assert len(second.rung) == 1
        tasks.cancel_scope.cancel()


def test_time_in_which_workers_hold_messages() -> None:
    """Overlaps count once, and a closed worker counts no more (issue 26)."""
    busy = BusyTime()

    def follow(_: float) -> None:
        """Do nothing."""

    one, other = (
        ResponseDeadlines(Timeouts(), follow, in_order=True, now=0.0, busy=busy)
        for _ in range(2)
    )
    assert busy.until(9.0) == 0.0
    one.arm(10.0, 10.0, busy=True)
    one.arm(11.0, 11.0, busy=True)
    other.arm(12.0, 12.0, busy=True)
    assert busy.until(13.0) == 3.0
    one.arm(14.0, None, busy=False)
    one.arm(14.5, None, busy=False)
    assert busy.until(15.0) == 5.0
    other.close(16.0)
    other.close(17.0)
    other.arm(18.0, None, busy=False)
    other.arm(18.0, 18.0, busy=True)
    assert busy.until(20.0) == 6.0
    one.arm(21.0, 21.0, busy=True)
    one.arm(22.5, None, busy=False)
    one.close(23.0)
    assert busy.until(30.0) == 7.5
