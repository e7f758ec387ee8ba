"""Tasks in virtual time: as anyio's on asyncio and trio, but for who goes on first."""

from __future__ import annotations

import asyncio
import gc
import math
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from etlstage.testing import run_virtually
from etlstage.testing.simulate import backend
from etlstage.testing.simulate.loop import Loop

T = TypeVar("T")
Run = Callable[[Callable[[], Any]], Any]


def run_simulated(main: Callable[[], Any], seed: int = 0) -> Any:  # noqa: ANN401
    """Run on the loop of simulations."""
    return backend.run(Loop(random.Random(seed)), main)  # noqa: S311


@pytest.fixture(params=["simulated", "asyncio", "trio"])
def run(request: pytest.FixtureRequest) -> Run:
    """Return what runs a coroutine function in virtual time."""
    if request.param == "simulated":
        return run_simulated
    return lambda main: run_virtually(main, backend=request.param)


# --- time -----------------------------------------------------------------------------


def test_who_sleeps_less_wakes_first(run: Run) -> None:
    """And time passes for nobody else."""

    async def main() -> list[float]:
        woken: list[float] = []

        async def sleep(seconds: float) -> None:
            await anyio.sleep(seconds)
            woken.append(seconds)

        began = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for seconds in (3600, 0.001, 60, 0, 7e6, 1):
                tasks.start_soon(sleep, seconds)
        assert anyio.current_time() - began == pytest.approx(7e6)
        return woken

    assert run(main) == [0, 0.001, 1, 60, 3600, 7e6]


def test_deadline_cancels_what_takes_longer(run: Run) -> None:
    """A scope that was left before, or whose deadline was moved, is not cancelled."""

    async def main() -> None:
        with anyio.move_on_after(10) as missed:
            await anyio.sleep(11)
        with anyio.move_on_after(10) as met:
            await anyio.sleep(9)
        await anyio.sleep(5)
        with anyio.move_on_after(10) as moved:
            moved.deadline += 10
            await anyio.sleep(15)
        with anyio.CancelScope() as late:
            late.deadline = anyio.current_time() - 1
            await anyio.sleep(1)
        with anyio.CancelScope(deadline=-math.inf) as never:
            await anyio.lowlevel.checkpoint()
        scopes = [missed, met, moved, late, never]
        caught = [scope.cancelled_caught for scope in scopes]
        assert caught == [True, False, False, True, True]
        assert met.deadline < anyio.current_time()
        assert not met.cancel_called

    run(main)


def test_nearest_deadline_is_known(run: Run) -> None:
    """Behind a shield it is that within."""

    async def main() -> None:
        now = anyio.current_time()
        assert anyio.current_effective_deadline() == math.inf
        with anyio.move_on_after(1), anyio.move_on_after(2) as scope:
            await anyio.lowlevel.checkpoint()
            assert anyio.current_effective_deadline() == pytest.approx(now + 1)
            with anyio.move_on_after(3, shield=True):
                await anyio.lowlevel.checkpoint()
                assert anyio.current_effective_deadline() == pytest.approx(now + 3)
            scope.cancel()
            assert anyio.current_effective_deadline() == -math.inf

    run(main)


# --- cancellation ---------------------------------------------------------------------


def test_cancelled_task_is_told_wherever_it_waits(run: Run) -> None:
    """Each time, until it has left the scope."""

    async def main() -> None:
        told, cancelled = 0, anyio.get_cancelled_exc_class()
        with anyio.CancelScope() as scope:
            scope.cancel()
            scope.cancel()
            for wait in (anyio.sleep_forever, anyio.lowlevel.checkpoint, later):
                try:
                    await wait()
                except cancelled:
                    told += 1
            await anyio.lowlevel.checkpoint_if_cancelled()
        assert told == 3
        assert scope.cancelled_caught
        await anyio.lowlevel.checkpoint_if_cancelled()

    async def later() -> None:
        await anyio.Event().wait()

    run(main)


def test_sleep_that_was_cancelled_wakes_nobody(run: Run) -> None:
    """Not even where it never began: the task waits for something else then."""

    async def main() -> None:
        began = anyio.current_time()
        with anyio.move_on_after(0.5):
            await anyio.sleep(1)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await anyio.sleep(1)
        with anyio.move_on_after(9):
            await anyio.Event().wait()
        assert anyio.current_time() - began == pytest.approx(9.5)

    run(main)


def test_outer_scope_is_for_who_is_outside(run: Run) -> None:
    """The inner one does not swallow what is not its own."""

    async def main() -> None:
        with anyio.CancelScope() as outer, anyio.CancelScope() as inner:
            inner.cancel()
            outer.cancel()
            await anyio.sleep(1)
        assert outer.cancelled_caught
        assert not inner.cancelled_caught
        with anyio.CancelScope() as outer:
            with anyio.CancelScope() as inner:
                inner.cancel()
                await anyio.sleep(1)
            assert inner.cancelled_caught
            await anyio.sleep(1)
        assert not outer.cancel_called

    run(main)


def test_shield_keeps_what_is_around_it_away(run: Run) -> None:
    """As long as it is there; its own cancellation it does not."""

    async def main() -> list[str]:
        seen = []
        with anyio.CancelScope() as outer:
            with anyio.CancelScope(shield=True) as shielded:
                outer.cancel()
                await anyio.sleep(1)
                seen.append("spared")
                shielded.cancel()
                await anyio.sleep(1)
                seen.append("unreachable")
            with anyio.CancelScope(shield=True) as shielded:
                await anyio.sleep(1)
                seen.append("spared again")
                shielded.shield = False
                await anyio.sleep(1)
                seen.append("unreachable")
        return seen

    assert run(main) == ["spared", "spared again"]


def test_scope_is_cancelled_by_another_task(run: Run) -> None:
    """Whatever it waits for; what it waited for is none the worse."""

    async def main() -> list[str]:
        seen: list[str] = []
        event, scopes = anyio.Event(), [anyio.CancelScope() for _ in range(2)]

        async def wait(name: str, scope: anyio.CancelScope) -> None:
            with scope:
                await event.wait()
                seen.append(name)

        async with anyio.create_task_group() as tasks:
            for name, scope in zip("ab", scopes, strict=True):
                tasks.start_soon(wait, name, scope)
            await anyio.sleep(1)
            scopes[0].cancel()
            await anyio.sleep(1)
            event.set()
            event.set()
            assert event.is_set()
            await event.wait()
        assert [scope.cancelled_caught for scope in scopes] == [True, False]
        return seen

    assert run(main) == ["b"]


# --- groups ---------------------------------------------------------------------------


def test_error_of_a_task_ends_the_others(run: Run) -> None:
    """And the host, with the error in a group."""

    async def fail() -> None:
        await anyio.sleep(1)
        raise ValueError("no")

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail)
            tasks.start_soon(anyio.sleep_forever)
            await anyio.sleep_forever()

    with pytest.raises(BaseExceptionGroup) as found:
        run(main)
    (error,) = found.value.exceptions
    assert str(error) == "no"


def test_error_of_the_host_ends_the_tasks(run: Run) -> None:
    """What they raise then is beside it."""

    async def fail() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise KeyError("too")

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail)
            await anyio.sleep(1)
            raise ValueError("no")

    with pytest.raises(BaseExceptionGroup) as found:
        run(main)
    kinds = {type(error) for error in found.value.exceptions}
    assert kinds == {ValueError, KeyError}


def test_group_waits_for_its_tasks(run: Run) -> None:
    """Also where it is cancelled meanwhile: they are told, and take their time."""

    async def linger(seen: list[str]) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(1)
            seen.append("task")

    async def main() -> list[str]:
        seen: list[str] = []
        with anyio.move_on_after(1) as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(linger, seen)
            seen.append("unreachable")
        seen.append("host")
        assert scope.cancelled_caught
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(linger, seen)
            await anyio.sleep(1)
            tasks.cancel_scope.cancel()
        async with anyio.create_task_group():
            pass
        return [*seen, "behind"]

    assert run(main) == ["task", "host", "task", "behind"]


def test_task_says_that_it_has_begun(run: Run) -> None:
    """With a value; or fails before, which is for who started it."""

    async def begin(
        what: str, *, task_status: anyio.abc.TaskStatus[str] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        await anyio.sleep(1)
        if what == "fails":
            raise ValueError("no")
        if what == "begins":
            task_status.started("begun")
            await anyio.sleep(1)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            assert await tasks.start(begin, "begins") == "begun"
            with pytest.raises(ValueError, match="no"):
                await tasks.start(begin, "fails")
            with pytest.raises(RuntimeError):
                await tasks.start(begin, "ends")
            with anyio.move_on_after(0.5) as scope:
                await tasks.start(begin, "begins")
            assert scope.cancelled_caught

    run(main)


# --- the rest of what is used ---------------------------------------------------------


def test_lock_has_one_owner(run: Run) -> None:
    """The others wait."""

    async def main() -> None:
        lock, inside = anyio.Lock(), 0

        async def enter() -> None:
            nonlocal inside
            async with lock:
                inside += 1
                assert inside == 1
                await anyio.sleep(1)
                inside -= 1

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(enter)

    run(main)


def test_streams_between_tasks(run: Run) -> None:
    """Those of anyio, in order."""

    async def main() -> list[int]:
        send, receive = anyio.create_memory_object_stream[int](0)
        seen: list[int] = []

        async def give() -> None:
            async with send:
                for number in range(3):
                    await send.send(number)

        async with anyio.create_task_group() as tasks, receive:
            tasks.start_soon(give)
            seen.extend([number async for number in receive])
        return seen

    assert run(main) == [0, 1, 2]


def test_what_would_run_in_a_thread_is_called(run: Run) -> None:
    """Its result is that of the call."""

    async def main() -> int:
        return await anyio.to_thread.run_sync(max, 1, 2)

    assert run(main) == 2


def test_result_or_error_is_that_of_the_function(run: Run) -> None:
    """As of any function."""

    async def main() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run(main)


# --- what only simulations have -------------------------------------------------------


def orders(seed: int) -> list[str]:
    """Return in which order tasks went on that could do so at the same time."""
    seen: list[str] = []

    async def walk(name: str) -> None:
        for _ in range(3):
            seen.append(name)
            await anyio.lowlevel.checkpoint()

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for name in "abc":
                tasks.start_soon(walk, name)

    run_simulated(main, seed)
    return seen


def test_order_of_tasks_is_drawn() -> None:
    """The same from one seed; each task goes through its own steps in order."""
    drawn = [orders(seed) for seed in range(20)]
    assert drawn == [orders(seed) for seed in range(20)]
    assert len({tuple(seen[:3]) for seen in drawn}) == 6
    assert all(sorted(seen) == list("aaabbbccc") for seen in drawn)


async def wait_forever() -> None:
    """Wait for what nobody does, and at the end, too."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait_stubbornly)
        await anyio.Event().wait()


async def wait_stubbornly() -> None:
    """Wait, and be none the wiser."""
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
        (turn_forever, "tasks go on for ever, and no time passes"),
    ],
)
def test_what_can_not_end_is_an_error(
    main: Callable[[], Awaitable[None]], why: str
) -> None:
    """It would be waited for without end."""
    with pytest.raises(RuntimeError, match=why):
        run_simulated(main)


def test_generator_that_is_left_behind_is_an_error() -> None:
    """Who would close it, and when, is left to chance elsewhere."""

    async def numbers() -> AsyncIterator[int]:
        yield 1
        yield 2

    async def main() -> None:
        async for _ in numbers():
            break
        gc.collect()

    with pytest.raises(RuntimeError, match=r"numbers .* was left in the middle"):
        run_simulated(main)


def test_other_threads_have_their_own_loops() -> None:
    """And the same thread has one again."""

    async def sleep() -> str:
        await anyio.lowlevel.checkpoint()
        return asyncio.get_running_loop().__class__.__name__

    async def main() -> list[str]:
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(anyio.run(sleep)))
        thread.start()
        thread.join()
        return found

    (found,) = run_simulated(main)
    assert found == anyio.run(sleep)
