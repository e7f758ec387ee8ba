"""How far ahead anything runs: windows, pipes, back-pressure."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing

import anyio
import pytest
from structlog.testing import capture_logs

from etlstage.messages import Position, Run, StageKind
from etlstage.stage import ErrorPolicy, Order, RestartPolicy
from etlstage.supervisor import AsyncSupervisor
from etlstage.supervisor.exchange.exchange import Outcome
from etlstage.testing import ScriptedWorker
from tests.patience import HANG
from tests.supervisor.acts import acting, in_memory
from tests.supervisor.workers import cyclic, numbers, outputs, plain, stage

# --- windows -------------------------------------------------------------------------


@in_memory
async def test_window_of_one_is_lock_step() -> None:
    """Nothing follows a message before it is answered."""
    async with acting(stage("lock_step", window=1)) as supervisor:
        assert outputs(await supervisor.submit(numbers(20))) == [(b"0",)] * 20


@in_memory
@pytest.mark.parametrize("kind", [StageKind.LOAD, StageKind.TRANSFORM])
async def test_load_worker_that_is_quick_gets_one_message_at_a_time(
    kind: StageKind,
) -> None:
    """By default other workers are given more and more in advance."""
    most = 0

    async def quick(worker: ScriptedWorker) -> None:
        nonlocal most
        while data := await worker.read():
            most = max(most, data.count(b"\n"))
            await worker.write(b"\0" * data.count(b"\n"))

    async with acting(stage("echo", kind=kind), quick) as supervisor:
        assert outputs(await supervisor.submit(numbers(500))) == [()] * 500

    assert (most == 1) is (kind is StageKind.LOAD)


@in_memory
async def test_window_of_five_is_five_ahead() -> None:
    """A worker that waits for five gets five, and never more."""
    async with acting(stage("ahead", 5, window=5)) as supervisor:
        with anyio.fail_after(HANG):
            results = await supervisor.submit(numbers(20))

    assert outputs(results) == [(b"5",)] * 20


async def test_window_of_two_is_two_ahead_though_messages_are_big() -> None:
    """A message that does not fit into the pipe counts like any other."""
    messages = [b"x" * 3_000_000] * 4
    async with AsyncSupervisor(stage("echo", window=2)) as supervisor:
        with anyio.fail_after(HANG):
            results = await supervisor.submit(messages)

    assert outputs(results) == [(m,) for m in messages]


# --- pipes ---------------------------------------------------------------------------


async def test_many_messages_come_back_in_order() -> None:
    """As they exceed a pipe's size, the worker is read while it is written to."""
    messages = [b"%07d" % n * 10 for n in range(50_000)]
    async with AsyncSupervisor(stage("fast")) as supervisor:
        results = await supervisor.submit(messages)

    assert [r.message for r in results] == messages
    assert outputs(results) == [(m,) for m in messages]


async def test_big_message_in_both_directions() -> None:
    """Ten megabytes, more than any pipe holds."""
    message = os.urandom(5_000_000).hex().encode()
    async with AsyncSupervisor(stage("echo")) as supervisor:
        with anyio.fail_after(HANG):
            results = await supervisor.submit([b"a", message, b"b"])

    assert outputs(results) == [(b"a",), (message,), (b"b",)]


async def test_big_answers() -> None:
    """A short message may have a long answer."""
    async with AsyncSupervisor(stage("long_answer", 10_000_000)) as supervisor:
        with anyio.fail_after(HANG):
            results = await supervisor.submit([b"a", b"b"])

    assert [len(o[0]) for o in outputs(results)] == [10_000_000] * 2


async def test_full_pipes_are_no_deadlock() -> None:
    """The worker answers before it has read everything, and both pipes fill up."""
    async with AsyncSupervisor(stage("answers_early", 4_000_000)) as supervisor:
        with anyio.fail_after(HANG):
            # One by one: the first byte of a waiting message would be written as a
            # probe, and this worker answers that byte.
            results = [
                result
                for message in (b"x" * 10_000_000, b"last")
                for result in await supervisor.submit([message])
            ]

    assert [len(o[0]) for o in outputs(results)] == [4_000_000] * 2


# --- extraction ----------------------------------------------------------------------


async def test_plain_round_may_be_broken_off() -> None:
    """The worker is stopped, and another round works."""
    async with AsyncSupervisor(plain("ranges")) as supervisor:
        for _ in range(2):
            async with aclosing(supervisor.extract()) as messages:
                async for message in messages:
                    if message == b"5000":
                        break


async def test_endless_round_lets_others_run() -> None:
    """A consumer that never has to wait for messages can still be cancelled."""
    with anyio.move_on_after(0.2) as scope:
        async with AsyncSupervisor(plain("ranges")) as supervisor:
            async for message in supervisor.extract():
                hashlib.sha256(message).digest()

    assert scope.cancelled_caught


async def test_slow_consumer_stops_the_worker_through_the_pipe() -> None:
    """It gets no further ahead than what the pipe and one read hold."""
    async with (
        AsyncSupervisor(plain("extract_counted")) as supervisor,
        aclosing(supervisor.extract()) as messages,
    ):
        with capture_logs() as logs:
            assert await anext(messages) == b"x" * 100_000
            for _ in range(50):
                await anyio.wait_all_tasks_blocked()
    counted = [int(entry["line"]) for entry in logs if "line" in entry]

    assert max(counted, default=0) <= 21


async def test_request_that_does_not_fit_the_pipe() -> None:
    """It is written as fast as the worker reads it."""
    async with AsyncSupervisor(cyclic("requests")) as supervisor:
        runs = supervisor.extract_runs(template="x" * 3_000_000)
        with anyio.fail_after(HANG):
            messages = [message async for run in runs for message in run]

    assert messages[0] == b"<" + b"x" * 3_000_000 + b">"


# --- back-pressure -------------------------------------------------------------------


class Tap:
    """Yields messages forever, and counts them."""

    def __init__(self, message: bytes = b"x" * 100) -> None:
        self.pulled = 0
        self.message = message

    def __iter__(self) -> Iterator[bytes]:
        while True:
            self.pulled += 1
            yield self.message

    async def flow(self) -> AsyncIterator[bytes]:
        """Yield the same, asynchronously."""
        for message in self:
            yield message


async def settle() -> None:
    """Let all tasks run until they wait."""
    for _ in range(50):
        await anyio.wait_all_tasks_blocked()


@in_memory
@pytest.mark.parametrize("plainly", [True, False], ids=["plain", "async"])
async def test_slow_consumer_stops_the_reading_of_input(plainly: bool) -> None:
    """Reading ahead is limited to ``max_messages``, plus a slice."""
    tap = Tap()
    async with acting(stage("fast"), max_messages=1000) as supervisor:
        messages = tap if plainly else tap.flow()
        async with aclosing(supervisor.stream(messages)) as stream:
            for consumed in range(1, 4):
                with anyio.fail_after(HANG):
                    await anext(stream)
                    await settle()
                # A slice, or a reply, is always taken as a whole.
                assert tap.pulled <= (4096 if plainly else consumed + 1001)


@in_memory
async def test_slow_worker_stops_the_reading_of_input() -> None:
    """Before its first reply, no more is read than may be held."""
    tap, answered = Tap(), 0

    async def slow(worker: ScriptedWorker) -> None:
        nonlocal answered
        async for message in worker.messages():
            await gates[answered >= 3].wait()
            await worker.reply(message)
            answered += 1

    gates = anyio.Event(), anyio.Event()
    async with (
        acting(stage("echo", window=3), slow, max_messages=10) as supervisor,
        aclosing(supervisor.stream(tap.flow())) as stream,
    ):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anext, stream)
            await settle()
            assert tap.pulled <= 11
            assert not answered
            # Replies are held back until the worker has answered all three.
            gates[0].set()
        gates[1].set()
        await settle()
        assert tap.pulled <= 14


async def test_bytes_bound_what_is_read_ahead() -> None:
    """Fewer big messages are held."""
    tap = Tap(b"x" * 100_000)
    run = stage("echo")
    async with (
        acting(run, max_bytes=1_000_000) as supervisor,
        aclosing(supervisor.stream(tap.flow())) as stream,
    ):
        with anyio.fail_after(HANG):
            await anext(stream)
            await settle()

    assert tap.pulled <= 10 + 2


@in_memory
async def test_one_slow_caller_does_not_stop_another() -> None:
    """Each stream has its own limit."""
    async with (
        acting(stage("fast"), max_messages=10) as supervisor,
        aclosing(supervisor.stream(Tap().flow())) as slow,
    ):
        await anext(slow)
        await settle()
        with anyio.fail_after(HANG):
            results = await supervisor.submit(numbers(5000))

    assert len(outputs(results)) == 5000


@in_memory
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("wrong", [b"with\nmarker", b"die"])
async def test_error_of_a_callers_hook_is_its_own(workers: int, wrong: bytes) -> None:
    """It ends the caller's iteration; the others have their results (issue 22)."""

    def hook(outcome: Outcome) -> None:
        raise LookupError("hook")

    async def dying(worker: ScriptedWorker) -> int:
        async for message in worker.messages():
            if message == b"die":
                return 3
            await worker.reply(message)
        return 0

    async def mine() -> None:
        items = [[b"one", wrong, b"two"]]
        async with aclosing(supervisor.answers(items, on_failure=hook)) as answers:
            async for _ in answers:
                pass

    async def others() -> None:
        for number in numbers(100):
            assert await supervisor.ask(number) == (number,)

    run = stage(
        "echo",
        workers=workers,
        restart=RestartPolicy(delay=0.001),
        on_error=ErrorPolicy(retries=1),
    )
    async with acting(run, dying) as supervisor:
        with anyio.fail_after(HANG):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(others)
                with pytest.raises(LookupError, match=r"^hook$"):
                    await mine()
            await others()


# --- positions -----------------------------------------------------------------------


@in_memory
@pytest.mark.parametrize("order", Order)
async def test_position_stays_behind_the_messages_before_it(order: Order) -> None:
    """In any order of results; positions keep their order, and none is lost."""
    key = "" if order is Order.KEY else None
    slow = stage("uneven", 3, workers=3, order=order, key=key)
    items: list[Run | Position] = [Position(0)]
    for n in range(0, 60, 2):
        items += [[b"%d" % n, b"%d" % (n + 1)], Position(n + 2), Position(n + 2.5)]
    answered: set[int] = set()
    positions: list[float] = []
    async with (
        acting(slow) as supervisor,
        aclosing(supervisor.answers(items)) as answers,
    ):
        with anyio.fail_after(HANG):
            async for item in answers:
                if isinstance(item, Position):
                    assert isinstance(item.value, int | float)
                    assert set(range(int(item.value))) <= answered
                    positions.append(item.value)
                else:
                    answered |= {int(m) for m in item.messages}

    assert answered == set(range(60))
    assert positions == [item.value for item in items if isinstance(item, Position)]


@in_memory
async def test_position_is_passed_while_nothing_else_comes() -> None:
    """It wakes the consumer, even if the input stays open forever."""
    gate = anyio.Event()

    async def items() -> AsyncIterator[Run | Position]:
        yield [b"a"]
        yield Position(1)
        await gate.wait()
        yield Position(2)

    async with (
        acting(stage("echo")) as supervisor,
        aclosing(supervisor.answers(items())) as answers,
    ):
        with anyio.fail_after(HANG):
            assert isinstance(await anext(answers), Outcome)
            assert await anext(answers) == Position(1)
            gate.set()
            assert await anext(answers) == Position(2)
            assert await anext(answers, None) is None
