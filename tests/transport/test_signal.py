"""An event that is reset once it has been waited for."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from etlstage.transport.process import Signal
from tests.patience import HANG

pytestmark = pytest.mark.core


async def _wait(signal: Signal, woken: list[int]) -> None:
    await signal.wait()
    woken.append(1)


async def test_each_set_wakes_once() -> None:
    """Setting it twice before the waiter runs counts once, on both event loops."""
    signal, woken = Signal(), list[int]()
    for count in 1, 2:
        with anyio.fail_after(HANG):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_wait, signal, woken)
                await anyio.wait_all_tasks_blocked()
                assert len(woken) == count - 1
                signal.set()
                signal.set()
        assert len(woken) == count


async def test_set_before_it_is_waited_for_counts() -> None:
    """The next waiter does not wait; the one after it does."""
    signal, woken = Signal(), list[int]()
    signal.set()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_wait, signal, woken)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(_wait, signal, woken)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert woken == [1]


async def test_set_for_who_was_cancelled_wakes_the_next() -> None:
    """It may be set before or after the cancelled waiter has run."""
    for turn in False, True:
        signal, woken = Signal(), list[int]()
        with anyio.fail_after(HANG):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_wait, signal, woken)
                await anyio.wait_all_tasks_blocked()
                tasks.cancel_scope.cancel()
                if not turn:
                    signal.set()
            signal.set()
            await _wait(signal, woken)
        assert woken == [1]


def test_set_in_the_turn_of_a_cancellation_is_kept() -> None:
    """The waiter's future is cancelled by then, but its task has not run yet."""

    async def run() -> None:
        signal = Signal()
        waiting = asyncio.ensure_future(signal.wait())
        await asyncio.sleep(0)
        waiting.cancel()
        signal.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.wait_for(signal.wait(), 5)

    asyncio.run(run())
