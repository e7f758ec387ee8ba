"""However the block ends, and whatever its workers do, they are gone afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import anyio
import pytest

from etlstage import errors as faults
from etlstage.messages import Result
from etlstage.stage import Timeouts
from etlstage.supervisor import AsyncSupervisor, WorkerExited, WorkerStarted
from etlstage.testing import ScriptedWorker
from etlstage.transport.process import PipeWire
from tests.patience import HANG
from tests.supervisor.acts import acting, in_memory
from tests.supervisor.workers import QUICK, ends, errors, numbers, outputs, runs, stage


async def exit_status(behaviour: str, *arguments: object) -> int:
    """Return the exit status of a worker that answers a message and is then stopped."""
    with anyio.fail_after(HANG):
        async with AsyncSupervisor(
            stage(behaviour, *arguments, timeout=QUICK)
        ) as supervisor:
            events = supervisor.events()
            await supervisor.submit([b"one"])
        with events:
            seen = [event async for event in events]
    _, event = seen
    assert isinstance(event, WorkerExited)
    assert ends(event.pid)
    return event.status


async def test_worker_ends_with_its_input() -> None:
    """A worker that behaves well gets no signal."""
    assert await exit_status("echo") == 0


async def test_worker_that_ignores_the_end_of_input_is_terminated() -> None:
    """SIGTERM is the second step."""
    assert await exit_status("deaf_to_eof") == -15


@pytest.mark.parametrize("behaviour", ["deaf_to_sigterm", "spins"])
async def test_worker_that_ignores_sigterm_is_killed(behaviour: str) -> None:
    """SIGKILL is the third step."""
    assert await exit_status(behaviour) == -9


async def test_full_pipe_is_no_reason_to_fail() -> None:
    """The worker never reads: unwritten data is lost, and nothing raises."""
    with anyio.fail_after(HANG):
        async with (
            AsyncSupervisor(stage("sleeps", timeout=QUICK)) as supervisor,
            anyio.create_task_group() as tasks,
        ):

            async def submit() -> None:
                results.extend(await supervisor.submit([b"x" * 10_000_000]))

            results: list[Result] = []
            tasks.start_soon(submit)
            for _ in range(9):  # until the writer waits, too
                await anyio.wait_all_tasks_blocked()
            await supervisor.aclose()

    assert "was stopped while it held 1 message" in errors(results)[0]


@in_memory
async def test_worker_that_never_reads_has_not_closed_its_stdin() -> None:
    """We have, with messages unwritten (issue 22)."""
    run = stage("sleeps", timeout=QUICK)
    async with (
        acting(run, never_reads) as supervisor,
        anyio.create_task_group() as tasks,
    ):
        events = supervisor.events()
        tasks.start_soon(supervisor.submit, [b"x" * 1_000_000])
        await anyio.wait_all_tasks_blocked()
        await supervisor.aclose()
    with events:
        (exited,) = [e async for e in events if isinstance(e, WorkerExited)]
    assert exited.stopped
    assert exited.fate == "was killed by SIGTERM"


async def never_reads(_: ScriptedWorker) -> None:
    """Wait for a signal."""
    await anyio.sleep_forever()


async def test_grandchildren_go_with_the_worker() -> None:
    """The process group is killed, even if the worker itself exited cleanly."""
    with anyio.fail_after(HANG):
        async with AsyncSupervisor(
            stage("has_child", "end", timeout=QUICK)
        ) as supervisor:
            (reply,) = outputs(await supervisor.submit([b"one"]))
            child = int(reply[1])
            assert runs(child)

    assert ends(child)


@in_memory
async def test_messages_under_way_are_lost_at_the_stop() -> None:
    """Messages that the worker holds fail, as it was stopped."""
    results: list[str] = []

    async def submit() -> None:
        results.extend(errors(await supervisor.submit(numbers(5))))

    with anyio.fail_after(HANG):
        run = stage("never_answers", window=2, timeout=QUICK)
        async with (
            anyio.create_task_group() as tasks,
            acting(run) as supervisor,
        ):
            tasks.start_soon(submit)
            await anyio.wait_all_tasks_blocked()

    assert len(results) == 5
    assert all("was stopped while it held 2 messages" in r for r in results[:2])
    assert results[2:] == ["stage t: the supervisor is closed"] * 3


@in_memory
async def test_aclose_returns_when_the_workers_are_gone() -> None:
    """From then on everything fails, with the reason."""
    async with acting(stage("echo", workers=3)) as supervisor:
        with supervisor.events() as events:
            await supervisor.aclose()
            seen = [events.receive_nowait() for _ in range(6)]
        await supervisor.aclose()
        results = await supervisor.submit([b"one"])
        with pytest.raises(faults.WorkerLost) as caught:
            await anext(supervisor.stream([b"two"]))

    assert [type(event) for event in seen[3:]] == [WorkerExited] * 3
    assert errors(results) == [str(caught.value)]
    assert errors(results) == ["stage t: the supervisor is closed"]


@in_memory
async def test_two_tasks_may_close_at_once() -> None:
    """Both return."""
    with anyio.fail_after(HANG):
        async with (
            acting(stage("echo", workers=2)) as supervisor,
            anyio.create_task_group() as tasks,
        ):
            for _ in range(3):
                tasks.start_soon(supervisor.aclose)


@in_memory
async def test_nothing_can_be_submitted_behind_the_block() -> None:
    """The error is that the supervisor does not run."""
    async with acting(stage("echo")) as supervisor:
        pass

    with pytest.raises(faults.InvalidState, match="is not running; use it as"):
        await supervisor.submit([b"one"])


@in_memory
@pytest.mark.parametrize("error", [LookupError("body"), KeyboardInterrupt("body")])
async def test_error_in_the_block_passes_as_it_is(error: BaseException) -> None:
    """It is not wrapped in a group."""

    async def body() -> None:
        async with acting(stage("echo")) as supervisor:
            await supervisor.submit([b"one"])
            raise error

    with pytest.raises(type(error), match=r"^body$"):
        await body()


async def test_host_may_be_cancelled() -> None:
    """Cancelling ends the block, and workers that ignore SIGTERM."""
    with anyio.move_on_after(10) as scope:
        async with AsyncSupervisor(
            stage("deaf_to_sigterm", workers=2, timeout=QUICK)
        ) as supervisor:
            await supervisor.submit([b"one"])
            scope.cancel()
            await supervisor.submit([b"two"])

    assert scope.cancelled_caught


@in_memory
async def test_host_may_be_cancelled_in_the_middle_of_a_stream() -> None:
    """Input, stream and workers end with the task that holds them."""

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 1000

    with anyio.CancelScope() as scope:
        async with acting(stage("fast"), max_messages=50) as supervisor:
            async for result in supervisor.stream(endless()):
                assert result.error is None
                scope.cancel()

    assert scope.cancelled_caught


@in_memory
async def test_block_that_fails_when_workers_were_just_started() -> None:
    """Each is served once, by the task that is about to begin (issue 22)."""

    async def fail() -> None:
        async with acting(stage("echo")) as supervisor:
            supervisor.scale(3)
            raise ZeroDivisionError

    for _ in range(20):  # trio runs the tasks of a turn in any order
        with pytest.raises(ZeroDivisionError):
            await fail()


@in_memory
async def test_cancelled_before_anything_happened() -> None:
    """A scope that is already cancelled still starts and stops the supervisor."""
    with anyio.CancelScope() as scope:
        scope.cancel()
        async with acting(stage("echo")):
            await anyio.lowlevel.checkpoint()

    assert scope.cancelled_caught


async def test_exit_is_waited_for_although_cancelled() -> None:
    """The worker is gone at the end of the block, not some time later."""
    pids: list[int] = []
    supervisor = AsyncSupervisor(stage("deaf_to_eof", timeout=QUICK))
    with anyio.CancelScope() as scope, supervisor.events() as events:
        async with supervisor:
            (reply,) = outputs(await supervisor.submit([b"one"]))
            assert reply == (b"one",)
            started = events.receive_nowait()
            assert isinstance(started, WorkerStarted)
            pids = [started.pid]
            scope.cancel()

    assert pids
    assert not any(runs(pid) for pid in pids)


@in_memory
async def test_dead_workers_are_not_waited_for() -> None:
    """However long the steps of stopping are, they apply to living workers only."""
    with anyio.fail_after(HANG):
        async with acting(stage("exits", 3, timeout=Timeouts(stop=3600))) as supervisor:
            with supervisor.events() as events:
                while not isinstance(await events.receive(), WorkerExited):
                    pass


async def test_many_supervisors_leave_nothing_behind() -> None:
    """One after the other and side by side; the fixture counts what is still open."""

    async def use(number: int) -> None:
        async with AsyncSupervisor(stage("echo")) as supervisor:
            assert len(outputs(await supervisor.submit(numbers(number)))) == number

    async with anyio.create_task_group() as tasks:
        for number in range(5):
            tasks.start_soon(use, number)
    for number in range(2):
        await use(number)


@pytest.mark.parametrize("method", ["read", "unread", "stop_waiting"])
async def test_error_of_our_own_leaves_no_process(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed and reaped; ``test_breakdown.py`` covers all places."""
    monkeypatch.setattr(PipeWire, method, None)
    with anyio.fail_after(HANG), pytest.raises(ExceptionGroup) as caught:
        async with AsyncSupervisor(stage("echo")) as supervisor:
            await supervisor.submit([b"x"])
    assert caught.group_contains(TypeError)


# --- inside plain asyncio ------------------------------------------------------------


@pytest.mark.asyncio
async def test_embedded_in_plain_asyncio() -> None:
    """Tasks of asyncio submit side by side, and one of them is cancelled."""
    async with AsyncSupervisor(stage("echo")) as supervisor:
        tasks = [asyncio.create_task(supervisor.submit(numbers(n))) for n in range(10)]
        doomed = asyncio.create_task(supervisor.submit(numbers(100)))
        await asyncio.sleep(0)
        doomed.cancel()
        results = await asyncio.gather(*tasks)
        with pytest.raises(asyncio.CancelledError):
            await doomed

    assert [len(outputs(r)) for r in results] == list(range(10))


@pytest.mark.asyncio
async def test_task_of_asyncio_that_holds_a_supervisor_is_cancelled() -> None:
    """The workers are gone once the task is."""
    inside = asyncio.Event()

    async def hold() -> None:
        async with AsyncSupervisor(stage("echo")) as supervisor:
            await supervisor.submit([b"one"])
            inside.set()
            await asyncio.sleep(3600)

    task = asyncio.create_task(hold())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
