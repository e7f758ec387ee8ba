"""An event that is there again once it was waited for."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from etlstage.transport.process import Signal

pytestmark = pytest.mark.core


async def _wait(signal: Signal, woken: list[int]) -> None:
    await signal.wait()
    woken.append(1)


async def test_each_set_wakes_once() -> None:
    """Set twice before who waits has its turn, it is set once; on both event loops."""
    signal, woken = Signal(), list[int]()
    for count in 1, 2:
        with anyio.fail_after(5):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_wait, signal, woken)
                await anyio.wait_all_tasks_blocked()
                assert len(woken) == count - 1
                signal.set()
                signal.set()
        assert len(woken) == count


async def test_set_before_it_is_waited_for_counts() -> None:
    """Who comes later does not wait, once."""
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
    """Before he has had his turn, and behind that."""
    for turn in False, True:
        signal, woken = Signal(), list[int]()
        with anyio.fail_after(5):
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
    """What is waited for is cancelled by then, and its task has not run yet."""

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
