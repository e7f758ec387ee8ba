"""The callback for an event loop that has found something to read."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import anyio
import anyio.lowlevel
import pytest

from etlstage.transport.process import Puller
from tests.patience import HANG

pytestmark = pytest.mark.core


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Open a pipe: where to read, where to write."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    yield reading, writing
    os.close(reading)
    os.close(writing)


@pytest.fixture
def anyio_backend() -> str:
    """Only asyncio uses callbacks."""
    return "asyncio"


@pytest.mark.anyio
async def test_what_comes_is_taken_until_enough(pipe: tuple[int, int]) -> None:
    """No task is woken in between (issue 13)."""
    reading, writing = pipe
    taken: list[bytes] = []

    def take() -> bool:
        taken.append(os.read(reading, 100))
        return len(taken) < 3

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Puller().run, reading, take)
        for data in b"1", b"2", b"3":
            await anyio.wait_all_tasks_blocked()
            os.write(writing, data)
            with anyio.fail_after(HANG):
                while not taken or taken[-1] != data:
                    await anyio.lowlevel.checkpoint()
    assert taken == [b"1", b"2", b"3"]


@pytest.mark.anyio
async def test_error_is_that_of_who_waits(pipe: tuple[int, int]) -> None:
    """It is raised where ``run()`` is awaited, and ends the calls (issue 13)."""
    reading, writing = pipe
    os.write(writing, b"1")
    calls = []

    def take() -> bool:
        calls.append(1)
        raise ValueError("taken wrongly")

    with anyio.fail_after(HANG), pytest.raises(ValueError, match="taken wrongly"):
        await Puller().run(reading, take)
    for _ in range(5):
        await anyio.lowlevel.checkpoint()
    assert len(calls) == 1


@pytest.mark.anyio
async def test_who_is_called_off_is_called_no_more(pipe: tuple[int, int]) -> None:
    """``stop()`` or a cancelled scope ends the calls (issue 13)."""
    reading, writing = pipe
    puller, calls = Puller(), []

    def take() -> bool:
        calls.append(1)
        return True

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(puller.run, reading, take)
        await anyio.wait_all_tasks_blocked()
        puller.stop()
        puller.stop()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await puller.run(reading, take)
    puller.stop()
    os.write(writing, b"1")
    for _ in range(5):
        await anyio.lowlevel.checkpoint()
    assert not calls


def test_anyio_knows_the_loop(pipe: tuple[int, int]) -> None:
    """The callback runs in no task, and perhaps in a loop that anyio did not start."""
    reading, writing = pipe
    os.write(writing, b"1")
    times = []

    def take() -> bool:
        times.append(anyio.current_time())
        anyio.Event().set()
        return False

    asyncio.run(asyncio.wait_for(Puller().run(reading, take), 5))
    assert times


def test_trio_waits_for_what_can_be_read(pipe: tuple[int, int]) -> None:
    """Under trio there is no callback (issue 13)."""
    reading, writing = pipe

    def calls() -> bool:
        raise AssertionError("nobody is called")

    async def main() -> None:
        with anyio.fail_after(HANG):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(Puller().run, reading, calls)
                await anyio.wait_all_tasks_blocked()
                os.write(writing, b"1")

    anyio.run(main, backend="trio")
