"""What a service needs: single questions, a limit, health, and an end that waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from structlog.testing import capture_logs

import etlstage
from etlstage import (
    AsyncSupervisor,
    ErrorPolicy,
    Order,
    PoolPolicy,
    RestartPolicy,
    Result,
    Stage,
    Timeouts,
    WorkerSilent,
)
from etlstage.errors import (
    InvalidMessage,
    InvalidState,
    LocalProtocolError,
    Overloaded,
    StageFailed,
    WorkerLost,
    WorkerRefusal,
)
from etlstage.messages import StageKind
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.supervisor.lifecycle.pool import Silence
from etlstage.telemetry import PrometheusMeter
from etlstage.testing import ScriptedLaunch, ScriptedWorker
from etlstage.testing.clock import Backend

pytestmark = [pytest.mark.core, pytest.mark.virtual]


async def sleeper(worker: ScriptedWorker) -> int:
    """Answer after the number of seconds in the message."""
    async for message in worker.messages():
        if message == b"no":
            await worker.refuse("not this one")
        elif message == b"die":
            return 3
        else:
            await anyio.sleep(float(message))
            await worker.reply(message, b"slept")
    return 0


async def mute(worker: ScriptedWorker) -> int:
    """Answer nothing."""
    await worker.read()
    await anyio.sleep_forever()
    return 0


def service(
    stage: Stage = Stage(name="t", worker=("none",), window=1),  # noqa: B008 - frozen
    max_pending: int | None = None,
) -> AsyncSupervisor:
    """Return a supervisor with ``sleeper`` workers."""
    launch = ScriptedLaunch(sleeper)
    return AsyncSupervisor(stage, launch=launch, max_pending=max_pending)


# --- ask -----------------------------------------------------------------------------


async def test_question_has_its_own_answer() -> None:
    """The outputs of that message, and of no other (issue 11)."""
    async with service() as supervisor:
        assert await supervisor.ask(b"5") == (b"5", b"slept")


async def test_question_that_takes_too_long() -> None:
    """The worker goes on, and the next question is answered."""
    async with service() as supervisor:
        before = anyio.current_time()
        with pytest.raises(
            TimeoutError, match=r"t: no result for the message within 2"
        ):
            await supervisor.ask(b"5", timeout=2)
        assert anyio.current_time() - before == pytest.approx(2)
        assert await supervisor.ask(b"1", timeout=9) == (b"1", b"slept")


@pytest.mark.parametrize(
    ("message", "error"),
    [(b"no", WorkerRefusal), (b"a\nb", InvalidMessage), (b"die", WorkerLost)],
)
async def test_question_without_an_answer(
    message: bytes, error: type[Exception]
) -> None:
    """An error that submit() puts into a result is raised; later ones are answered."""
    async with service() as supervisor:
        for _ in range(2):
            with pytest.raises(error):
                await supervisor.ask(message)
        assert await supervisor.ask(b"0") == (b"0", b"slept")


async def test_error_of_all_does_not_grow_with_each_caller() -> None:
    """A service may go on asking a failed stage for years."""
    once = RestartPolicy(policy="temporary")
    stage = Stage(name="t", worker=("none",), window=1, restart=once)
    async with service(stage) as supervisor:
        with pytest.raises((WorkerLost, StageFailed)):
            await supervisor.ask(b"die")
        errors, depths = set(), set()
        for _ in range(5):
            with pytest.raises(StageFailed) as caught:
                await supervisor.ask(b"0")
            errors.add(caught.value)
            depths.add(len(caught.traceback))
    assert (len(errors), len(depths)) == (1, 1)


async def test_question_to_a_stage_with_batches() -> None:
    """Outputs belong to a whole batch there, perhaps to another caller's message."""
    dialect = MarkerDialect(mode=Mode.BATCH_SUPERVISOR)
    async with service(
        Stage(name="t", worker=("none",), dialect=dialect)
    ) as supervisor:
        with pytest.raises(LocalProtocolError, match="answers in batches"):
            await supervisor.ask(b"1")


# --- the limit ------------------------------------------------------------------------


async def test_too_many_messages_are_not_taken() -> None:
    """The first ones are served; the others are rejected at once (issue 11)."""
    async with (
        service(max_pending=3) as supervisor,
        anyio.create_task_group() as tasks,
    ):
        for _ in range(3):
            tasks.start_soon(supervisor.ask, b"5")
        await anyio.sleep(1)
        with pytest.raises(Overloaded) as caught:
            await supervisor.submit([b"1", b"1"])
        assert str(caught.value) == (
            "stage t: 3 messages pending, 2 more would exceed max_pending (3);"
            " try again later, raise it, or use more workers"
        )
        await anyio.sleep(5)
        await supervisor.ask(b"0")


async def test_message_that_was_given_up_makes_room() -> None:
    """No caller waits for it, so it does not count against the limit."""
    async with service(max_pending=2) as supervisor:
        for _ in range(5):
            with pytest.raises(TimeoutError):
                await supervisor.ask(b"5", timeout=1)


async def test_stream_waits_for_no_limit() -> None:
    """It is limited anyway."""
    async with service(max_pending=1) as supervisor:
        results = [result async for result in supervisor.stream([b"0"] * 50)]
    assert all(result.error is None for result in results)


@pytest.mark.parametrize(
    ("workers", "shown"),
    [(2.0, "2.0"), (1.5, "1.5"), (float("nan"), "nan"), ("3", "'3'"), (None, "None")],
)
async def test_number_of_workers_is_whole(workers: Any, shown: str) -> None:  # noqa: ANN401
    """The error names the argument, and the stage keeps its worker (issue 22)."""
    async with service() as supervisor:
        with pytest.raises(TypeError) as caught:
            supervisor.scale(workers)
        assert str(caught.value) == f"workers: expected a whole number, got {shown}"
        assert await supervisor.ask(b"0") == (b"0", b"slept")
        assert supervisor.health == ("ready", "")


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ("2", TypeError, ": expected a number of seconds, got '2'"),
        (True, TypeError, ": expected a number of seconds, got True"),
        (float("nan"), ValueError, " is nan, expected a number of seconds"),
    ],
)
async def test_times_are_validated(
    wrong: Any,  # noqa: ANN401
    error: type[Exception],
    text: str,
) -> None:
    """Nothing is asked or closed with a wrong one (issue 22)."""
    async with service() as supervisor:
        with pytest.raises(error) as caught:
            await supervisor.ask(b"0", timeout=wrong)
        assert str(caught.value) == f"timeout{text}"
        with pytest.raises(error) as caught:
            await supervisor.aclose(drain=wrong)
        assert str(caught.value) == f"drain{text}"
        assert await supervisor.ask(b"0", timeout=5) == (b"0", b"slept")


# --- health --------------------------------------------------------------------------


async def test_health_over_a_life() -> None:
    """From before the start until after the end (issue 11)."""
    supervisor = service()
    assert supervisor.health == ("starting", "has not been entered")
    async with supervisor:
        assert supervisor.health == ("ready", "")
    assert supervisor.health == ("failed", "the supervisor is closed")


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_properties_are_read_in_any_thread(backend: Backend) -> None:
    """A probe may be a plain function that a framework runs in a thread (issue 22)."""
    names = [
        name for name, of in vars(AsyncSupervisor).items() if isinstance(of, property)
    ]
    assert {"health", "slowest", "faults", "doubtful", "skipped"} <= {*names}
    silent = Stage(name="t", worker=("none",), timeout=Timeouts(stop=0.1, message=None))
    supervisor = AsyncSupervisor(silent, launch=ScriptedLaunch(mute))

    def read() -> dict[str, object]:
        return {name: getattr(supervisor, name) for name in (*names, "__repr__")}

    async def main() -> None:
        async with supervisor, anyio.create_task_group() as tasks:
            tasks.start_soon(supervisor.ask, b"1")
            while supervisor.slowest is None:
                await anyio.lowlevel.checkpoint()
            values = await anyio.to_thread.run_sync(read)
            tasks.cancel_scope.cancel()
        assert values["health"] == ("ready", "")
        slowest = values["slowest"]
        assert isinstance(slowest, Silence)
        assert slowest.worker == "t-1"
        values = await anyio.to_thread.run_sync(read)
        assert (values["health"], values["slowest"]) == (
            ("failed", "the supervisor is closed"),
            None,
        )

    # A virtual clock does not wait for threads: hours would pass while one reads.
    anyio.run(main, backend=backend)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_events_and_withhold_are_refused_in_another_thread(backend: Backend) -> None:
    """As all methods are: they change what the event loop uses (issue 22)."""
    supervisor = service()

    def elsewhere() -> None:
        for method in (supervisor.events, supervisor.withhold):
            with pytest.raises(InvalidState, match="outside the thread of its event"):
                method()

    async def main() -> None:
        async with supervisor:
            await anyio.to_thread.run_sync(elsewhere)
            assert [result.outputs async for result in supervisor.stream([b"0"])] == [
                (b"0", b"slept")
            ]

    # A virtual clock does not wait for threads: hours would pass while one works.
    anyio.run(main, backend=backend)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_methods_are_refused_in_another_thread(backend: Backend) -> None:
    """Changes by two event loops would corrupt the state, and misdirect replies."""
    supervisor = service()

    def elsewhere() -> None:
        with pytest.raises(
            InvalidState, match="used outside the thread of its event loop"
        ):
            supervisor.scale(2)
        with pytest.raises(InvalidState, match=r"use anyio\.from_thread\.run\(\)"):
            anyio.run(supervisor.ask, b"1")

    async def main() -> None:
        async with supervisor:
            await anyio.to_thread.run_sync(elsewhere)
            assert await supervisor.ask(b"0") == (b"0", b"slept")

    # A virtual clock does not wait for threads: hours would pass while one works.
    anyio.run(main, backend=backend)


def test_methods_are_refused_in_another_event_loop() -> None:
    """The supervisor's own loop is not running then, so callers would wait forever."""
    supervisor = service()
    other = "outside the event loop that it was entered in; use it within one"

    async def serve(entered: asyncio.Event, left: asyncio.Event) -> None:
        async with supervisor:
            entered.set()
            await left.wait()

    async def begin(left: asyncio.Event) -> asyncio.Task[None]:
        entered = asyncio.Event()
        task = asyncio.create_task(serve(entered, left))
        await entered.wait()
        return task

    async def end(left: asyncio.Event, task: asyncio.Task[None]) -> None:
        assert await supervisor.ask(b"0") == (b"0", b"slept")
        left.set()
        await task

    async def elsewhere() -> None:
        with pytest.raises(InvalidState, match=other):
            await supervisor.ask(b"1")
        with pytest.raises(InvalidState, match=other):
            await supervisor.aclose()
        with pytest.raises(InvalidState, match=other):
            await supervisor.__aexit__(None, None, None)

    with asyncio.Runner() as runner:
        left = asyncio.Event()
        task = runner.run(begin(left))
        anyio.run(elsewhere)
        with pytest.raises(InvalidState, match=other):
            supervisor.scale(2)
        runner.run(end(left, task))
    anyio.run(supervisor.aclose)  # it has ended, so there is nothing to wait for


def test_health_when_the_loop_has_ended() -> None:
    """Later readers still see the final state."""
    kept: list[AsyncSupervisor] = []

    async def run() -> None:
        async with service() as supervisor:
            kept.append(supervisor)

    anyio.run(run)
    assert kept[0].health == ("failed", "the supervisor is closed")
    assert kept[0].slowest is None


async def test_stage_in_lock_step_is_degraded() -> None:
    """It works, but slowly: its worker should be examined."""

    async def talks_too_much(worker: ScriptedWorker) -> int:
        async for message in worker.messages():
            await worker.reply(message)
            if worker.start == 1:
                await worker.reply(b"more")
        return 0

    stage = Stage(name="t", worker=("none",))
    launch = ScriptedLaunch(talks_too_much)
    async with AsyncSupervisor(stage, launch=launch) as supervisor:
        await supervisor.submit([b"1"] * 9)
        assert supervisor.health == (
            "degraded",
            "messages are sent one at a time: replies could not be matched to them",
        )


# --- the end -------------------------------------------------------------------------


async def test_end_waits_for_what_was_submitted() -> None:
    """And takes no new messages meanwhile (issue 11)."""
    answers: list[tuple[bytes, ...]] = []

    async def ask(supervisor: AsyncSupervisor) -> None:
        answers.append(await supervisor.ask(b"5"))

    async with service() as supervisor, anyio.create_task_group() as tasks:
        tasks.start_soon(ask, supervisor)
        tasks.start_soon(ask, supervisor)
        await anyio.sleep(1)
        tasks.start_soon(_aclose, supervisor, 60)
        await anyio.sleep(1)
        assert supervisor.health.state == "failed"
        with pytest.raises(WorkerLost, match="is closed"):
            await supervisor.ask(b"0")
        before = anyio.current_time()
    assert answers == [(b"5", b"slept")] * 2
    assert anyio.current_time() - before < 12


async def test_end_waits_no_longer_than_asked() -> None:
    """Messages that are not done by then have an error."""
    async with service() as supervisor, anyio.create_task_group() as tasks:

        async def ask() -> None:
            with pytest.raises(WorkerLost, match=r"is closed|was stopped"):
                await supervisor.ask(b"50")

        for _ in range(2):
            tasks.start_soon(ask)
        await anyio.sleep(1)
        before = anyio.current_time()
        await supervisor.aclose(drain=3)
        assert anyio.current_time() - before < 10


async def test_cancelled_end_stops_the_workers_at_once() -> None:
    """They would work on, while nobody waits for them (issue 22)."""
    async with service() as supervisor, anyio.create_task_group() as tasks:

        async def ask() -> None:
            with pytest.raises(WorkerLost, match=r"is closed|was stopped"):
                await supervisor.ask(b"50")

        tasks.start_soon(ask)
        await anyio.sleep(1)
        before = anyio.current_time()
        with anyio.move_on_after(2) as scope:
            await supervisor.aclose(drain=60)
        assert scope.cancelled_caught
        assert anyio.current_time() == before + 2
        assert supervisor._pool.state.alive == 0


async def test_stream_ends_behind_what_it_has_read() -> None:
    """It reads no more, yields all results of what it has read, and then raises."""
    read = 0

    async def forever() -> AsyncIterator[bytes]:
        nonlocal read
        while True:
            read += 1
            yield b"1"
            await anyio.sleep(0.5)

    results: list[Result] = []
    async with service() as supervisor, anyio.create_task_group() as tasks:

        async def consume() -> None:
            async for result in supervisor.stream(forever()):
                results.append(result)  # noqa: PERF401 - what came before the error

        async def stream() -> None:
            with pytest.raises(WorkerLost, match="is closed"):
                await consume()

        tasks.start_soon(stream)
        await anyio.sleep(10)
        await supervisor.aclose(drain=60)
    assert [result.error for result in results] == [None] * read


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("drain", [0, 60])
async def test_stream_after_the_end_reads_nothing(order: Order, drain: float) -> None:
    """It raises at once, while messages are finished and after that (issue 22)."""
    read: list[bytes] = []

    async def forever() -> AsyncIterator[bytes]:
        while True:
            read.append(b"1")
            yield b"1"

    async def runs() -> AsyncIterator[list[bytes]]:
        async for message in forever():
            yield [message]

    key = "/k" if order is Order.KEY else None
    stage = Stage(name="t", worker=("none",), order=order, key=key)
    launch = ScriptedLaunch(sleeper)
    async with (
        AsyncSupervisor(stage, launch=launch) as supervisor,
        anyio.create_task_group() as tasks,
    ):
        early = supervisor.stream(forever())  # it begins once results are asked for
        tasks.start_soon(supervisor.submit, [b"5"])
        await anyio.sleep(1)
        tasks.start_soon(_aclose, supervisor, drain)
        await anyio.sleep(1 if drain else 100)
        streams = supervisor.stream(forever()), supervisor.answers(runs()), early
        for late in streams:
            before = anyio.current_time()
            with pytest.raises(WorkerLost, match="is closed"):
                await anext(late)
            assert anyio.current_time() == before
    assert read == []


async def test_stream_after_the_end_of_the_input_reads_nothing() -> None:
    """What was submitted before is still answered, and the worker ends (issue 22)."""
    read: list[bytes] = []

    def forever() -> Iterator[bytes]:
        while True:
            read.append(b"1")
            yield b"1"

    async with service() as supervisor, anyio.create_task_group() as tasks:
        results: list[Result] = []

        async def stream() -> None:
            async for result in supervisor.stream([b"5"]):
                results.append(result)  # noqa: PERF401 - awaited one by one

        tasks.start_soon(stream)
        await anyio.sleep(1)
        supervisor.finish()
        with pytest.raises(WorkerLost, match="is closed"):
            await anext(supervisor.stream(forever()))
    assert [result.outputs for result in results] == [(b"5", b"slept")]
    assert read == []


async def test_end_with_nothing_to_wait_for() -> None:
    """It ends at once, however long it might have waited."""
    async with service() as supervisor:
        await supervisor.ask(b"0")
        before = anyio.current_time()
        await supervisor.aclose(drain=1000)
        assert anyio.current_time() - before < 10


@pytest.mark.parametrize("drain", [0, 1])
async def test_events_end_with_the_supervisor(drain: float) -> None:
    """A listener in the block is not left waiting (issue 22)."""
    seen: list[str] = []

    async def listen() -> None:
        async with supervisor.events() as events:
            seen.extend([type(event).__name__ async for event in events])

    async with service() as supervisor, anyio.create_task_group() as tasks:
        tasks.start_soon(listen)
        await supervisor.ask(b"0")
        await supervisor.aclose(drain=drain)
    assert seen[0] == "WorkerStarted"
    assert seen[-1] == "WorkerExited"


async def test_number_of_workers_after_the_end() -> None:
    """It can still be changed, without effect or event (issue 22)."""
    async with service() as supervisor, supervisor.events():
        await supervisor.aclose()
        supervisor.scale(3)
        async with supervisor.events() as events:
            assert [event async for event in events] == []
        assert supervisor.health.state == "failed"


async def _aclose(supervisor: AsyncSupervisor, drain: float) -> None:
    await supervisor.aclose(drain=drain)


def test_events_are_at_hand() -> None:
    """They can be imported from the package to be matched (issue 11)."""
    assert etlstage.WorkerExited._fields[:2] == ("worker", "pid")
    assert {"SupervisorEvent", "Health", "Overloaded"} <= set(etlstage.__all__)


# --- what workers report ------------------------------------------------------------


async def test_worker_that_gets_on_has_more_time() -> None:
    """Its deadline starts anew with each report of progress (issue 11)."""

    async def slow(worker: ScriptedWorker) -> int:
        async for message in worker.messages():
            for _ in range(int(message)):
                await anyio.sleep(4)
                worker.tell(progress=0.1)
            await anyio.sleep(9 if message == b"0" else 0)
            await worker.reply(message)
        return 0

    stage = Stage(
        name="t",
        worker=("none",),
        timeout=Timeouts(message=5),
        on_error=ErrorPolicy(retries=0),
    )
    async with AsyncSupervisor(stage, launch=ScriptedLaunch(slow)) as supervisor:
        assert await supervisor.ask(b"5") == (b"5",)
        with pytest.raises(WorkerLost, match="did not answer a message within 5"):
            await supervisor.ask(b"0")


async def test_progress_extends_a_deadline_up_to_a_limit() -> None:
    """A worker that reports progress forever still counts as hanging (issue 22)."""

    async def hangs(worker: ScriptedWorker) -> int:
        async for _ in worker.messages():
            while True:
                await anyio.sleep(4)
                worker.tell(progress=0.1)
        return 0

    stage = Stage(
        name="t",
        worker=("none",),
        timeout=Timeouts(message=5, total=60),
        on_error=ErrorPolicy(retries=0),
    )
    with capture_logs() as logs:
        async with AsyncSupervisor(stage, launch=ScriptedLaunch(hangs)) as supervisor:
            began = anyio.current_time()
            for _ in range(2):
                with pytest.raises(WorkerLost, match=r"timeout\.total"):
                    await supervisor.ask(b"1")
            assert anyio.current_time() - began == pytest.approx(120, abs=1)
    told = [log for log in logs if log["event"] == "worker has not answered"]
    assert [log["seconds"] for log in told] == [52]
    assert "keeps reporting progress" in told[0]["hint"]


async def test_progress_starts_no_deadline_while_we_do_not_read() -> None:
    """Outputs wait for their consumer, so the worker is not the slow one (issue 22)."""

    async def pours(worker: ScriptedWorker) -> int:
        async for _ in worker.messages():
            async with anyio.create_task_group() as tasks:

                async def get_on() -> None:
                    await anyio.sleep(10)
                    worker.tell(progress=0.5)

                tasks.start_soon(get_on)
                for _ in range(8):
                    await worker.write(b"x" * 65535 + b"\n")
                await worker.write(b"\0")
        return 0

    stage = Stage(
        name="t",
        worker=("none",),
        kind=StageKind.EXTRACT,
        dialect=MarkerDialect(mode=Mode.CYCLIC),
        timeout=Timeouts(message=5),
        restart=RestartPolicy(max=0),
    )
    async with AsyncSupervisor(stage, launch=ScriptedLaunch(pours)) as supervisor:
        outputs = supervisor.extract()
        sizes = [len(await anext(outputs))]
        await anyio.sleep(100)
        sizes += [len(output) async for output in outputs]
    assert sizes == [65535] * 8


async def test_total_is_a_limit_of_its_own() -> None:
    """Even without a deadline for an answer, and for each message alone (issue 22)."""
    stage = Stage(
        name="t",
        worker=("none",),
        timeout=Timeouts(message=None, total=60),
        on_error=ErrorPolicy(retries=0),
    )
    async with AsyncSupervisor(stage, launch=ScriptedLaunch(sleeper)) as supervisor:
        await supervisor.submit([b"50"] * 3)
        with pytest.raises(WorkerLost, match=r"within 60 s \(timeout\.total\)"):
            await supervisor.ask(b"61")


async def test_worker_that_never_reads_makes_no_progress() -> None:
    """The program is to blame, not a message, and restarts are limited (issue 22)."""

    async def deaf(_worker: ScriptedWorker) -> int:
        await anyio.sleep_forever()
        return 0

    stage = Stage(
        name="t",
        worker=("none",),
        timeout=Timeouts(message=5),
        restart=RestartPolicy(max=2, delay=1),
    )
    launch = ScriptedLaunch(deaf)
    async with AsyncSupervisor(stage, launch=launch) as supervisor:
        results = await supervisor.submit([b"1", b"2"])
    assert [type(result.error) for result in results] == [StageFailed, StageFailed]
    assert "2 restarts without progress" in str(results[0].error)
    assert len(launch.workers) == 3


async def test_worker_counts_what_it_likes() -> None:
    """In a metric with a name of its own (issue 11)."""

    async def counts(worker: ScriptedWorker) -> int:
        async for message in worker.messages():
            worker.tell(metric="rows", add=int(message))
            await worker.reply(message)
        return 0

    meter = PrometheusMeter()
    stage = Stage(name="t", worker=("none",))
    launch = ScriptedLaunch(counts)
    async with AsyncSupervisor(stage, launch=launch, meter=meter) as supervisor:
        await supervisor.submit([b"2", b"40"])
    text = meter.render()
    assert 'worker_counts_total{metric="rows",stage="t",worker="t-1"} 42.0' in text


@pytest.mark.parametrize("workers", [1, 2])
async def test_gauges_of_workers_that_hang(workers: int) -> None:
    """They have what they were given from then on, not from a reply (issue 26)."""

    async def hangs(worker: ScriptedWorker) -> int:
        async for message in worker.messages():
            if message != b"fine":
                given.set()
                await anyio.sleep_forever()
            await worker.reply()
        return 0

    given, meter = anyio.Event(), PrometheusMeter()
    stage = Stage(name="t", worker=("none",), workers=workers, window=1)
    launch = ScriptedLaunch(hangs)
    async with AsyncSupervisor(stage, launch=launch, meter=meter) as supervisor:
        await supervisor.submit([b"fine"] * workers)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(supervisor.submit, [b"a", b"b", b"c"])
            await given.wait()
            text = meter.render()
            tasks.cancel_scope.cancel()
    assert [
        f'messages_in_flight{{stage="t",worker="t-{n + 1}"}} 1.0' in text
        for n in range(workers)
    ] == [True] * workers
    assert f'messages_waiting{{stage="t"}} {3.0 - workers}' in text


# --- workers that do not answer ------------------------------------------------------


async def test_worker_that_does_not_answer_is_reported_once() -> None:
    """Long before its deadline, with what may be wrong (issue 11)."""

    async def forgets(worker: ScriptedWorker) -> int:
        async for message in worker.messages():
            await worker.write(message + b"\n")
        return 0

    stage = Stage(name="t", worker=("none",), on_error=ErrorPolicy(retries=0))
    supervisor = AsyncSupervisor(stage, launch=ScriptedLaunch(forgets))
    with supervisor.events() as events, capture_logs() as logs:
        async with supervisor:
            with pytest.raises(TimeoutError):
                await supervisor.ask(b"ab", timeout=40)
            slowest = supervisor.slowest
            assert slowest is not None
            assert (slowest.worker, slowest.received) == ("t-1", 3)
            assert slowest.seconds == pytest.approx(40)
            await supervisor.submit([b"a", b"b"])
        silent = [event async for event in events if isinstance(event, WorkerSilent)]
    assert silent[0].worker == "t-1"
    assert silent[0].seconds == pytest.approx(30)
    hint = (
        "it wrote 3 bytes without the marker eop '\\000' after its reply; if it answers"
        " each message with one, set eop to '\\012'"
    )
    assert silent[0].hint == hint
    told = [log for log in logs if log["event"] == "worker has not answered"]
    assert [(log["seconds"], log["hint"]) for log in told] == [(30, hint)]


async def test_worker_that_answers_now_and_then_is_not_reported() -> None:
    """Each of its answers took less."""
    supervisor = service()
    with supervisor.events() as events:
        async with supervisor:
            await supervisor.submit([b"25"] * 4)
            assert supervisor.slowest is None
        assert not [e async for e in events if isinstance(e, WorkerSilent)]


async def test_who_has_ever_answered() -> None:
    """Workers that never did are not waited for at the end of a run (issue 23)."""
    async with service() as supervisor:
        assert not supervisor.answered
        await supervisor.ask(b"1")
        assert supervisor.answered


# --- as many workers as there is work for ---------------------------------------------


async def test_no_worker_is_started_for_the_keys_of_another() -> None:
    """It would have nothing to do, and be stopped, again and again (issue 12)."""
    launch = ScriptedLaunch(sleeper)
    pool = PoolPolicy(min=1, max=3, grow_at=1, idle=1)
    stage = Stage(
        name="t", worker=("none",), window=1, order=Order.KEY, key="", workers=pool
    )
    async with AsyncSupervisor(stage, launch=launch) as supervisor:
        await supervisor.submit([b"5"] * 5)
    assert len(launch.workers) == 1


async def test_workers_come_and_go_with_the_work() -> None:
    """From one to eight, and back; each message has its result (issue 15)."""
    launch = ScriptedLaunch(sleeper)
    pool = PoolPolicy(min=1, max=8, grow_at=2, idle=20)
    stage = Stage(name="t", worker=("none",), window=1, workers=pool)
    messages = [b"%d" % (5 + n % 7) for n in range(100)]
    async with AsyncSupervisor(stage, launch=launch) as supervisor:
        await anyio.sleep(1)
        before = len(launch.running)
        results = await supervisor.submit(messages)
        most = len(launch.running)
        await anyio.sleep(60)
        after = len(launch.running)
        assert (await supervisor.submit([b"1"]))[0].error is None

    assert (before, most, after) == (1, 8, 1)
    assert [result.message for result in results] == messages
    assert all(result.error is None for result in results)
    assert supervisor.faults.failures == 0
