"""
A supervisor with workers of dialect ``cocaine``, in memory and on a virtual clock.

Nothing above the dialect knows of it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from signal import SIGKILL, SIGTERM
from typing import Any

import anyio
import pytest

from etlstage.errors import WorkerLost, WorkerRefusal
from etlstage.messages import StageKind
from etlstage.protocol.cocaine import CocaineVersion
from etlstage.protocol.cocaine.settings import CocaineDialect
from etlstage.protocol.events import Added, Ended, Farewell
from etlstage.stage import (
    BatchPolicy,
    ErrorPolicy,
    PoolPolicy,
    RecyclePolicy,
    RestartPolicy,
    Stage,
    Timeouts,
)
from etlstage.supervisor import AsyncSupervisor, WorkerExited, WorkerFailed
from etlstage.testing import ScriptedLaunch, ScriptedWorker, run_virtually
from etlstage.transport import Child, LaunchRequest, Wire
from tests.protocol.cocaine.scripted import CocaineWorker, SessionRequest

pytestmark = [pytest.mark.core, pytest.mark.virtual]

Answer = Callable[[CocaineWorker, SessionRequest], Awaitable[None]]


def stage(
    dialect: CocaineDialect | None = None,
    **settings: Any,  # noqa: ANN401 - passed on
) -> Stage:
    """Return a stage whose workers speak the dialect."""
    return Stage(
        name="t", worker=("w",), dialect=dialect or CocaineDialect(), **settings
    )


def answering(
    answer: Answer,
    **settings: Any,  # noqa: ANN401 - passed on
) -> ScriptedLaunch:
    """Return workers that answer one session after the other."""

    async def script(worker: ScriptedWorker) -> int:
        async with CocaineWorker(worker, **settings) as cocaine:
            async for request in cocaine.requests():
                await answer(cocaine, request)
        return 0

    return ScriptedLaunch(script)


async def capitals(worker: CocaineWorker, request: SessionRequest) -> None:
    """Reply to each message in capitals."""
    await worker.reply(request, *map(bytes.upper, request.messages))


@pytest.mark.parametrize("version", [CocaineVersion.ZERO, CocaineVersion.ONE])
def test_message_is_a_session(version: CocaineVersion) -> None:
    """In either version; the worker is asked to terminate, and does."""
    scripted = answering(capitals, version=version)

    async def main() -> None:
        async with AsyncSupervisor(stage(), launch=scripted) as supervisor:
            results = await supervisor.submit([b"m%d" % n for n in range(100)])
        assert [r.outputs for r in results] == [(b"M%d" % n,) for n in range(100)]
        assert [w.returncode for w in scripted.workers] == [0]

    run_virtually(main)


async def test_sessions_that_there_is_room_for_are_one_write() -> None:
    """Each write is a system call, and wakes the worker (issue 15)."""
    scripted, written = answering(capitals), []

    def launch(request: LaunchRequest) -> tuple[Wire, Child]:
        wire, child = scripted(request)
        write = wire.write

        def noted(data: memoryview | bytes) -> int:
            written.append(bytes(data).count(b"transform"))
            return write(data)

        wire.write = noted  # type: ignore[method-assign]
        return wire, child

    async with AsyncSupervisor(stage(), launch=launch) as supervisor:
        await supervisor.submit([b"first"])
        await supervisor.submit([b"m%d" % n for n in range(10)])

    assert [count for count in written if count] == [1, 10]


async def test_results_come_in_order_though_sessions_end_in_any() -> None:
    """And a worker never holds more sessions than ``concurrency``."""
    most = 0

    async def script(worker: ScriptedWorker) -> int:
        nonlocal most
        held: list[SessionRequest] = []
        async with (
            CocaineWorker(worker) as cocaine,
            anyio.create_task_group() as tasks,
        ):

            async def answer() -> None:
                while True:
                    await anyio.sleep(1)
                    while held:
                        await capitals(cocaine, held.pop())

            tasks.start_soon(answer)
            async for request in cocaine.requests():
                held.append(request)
                most = max(most, len(held))
            tasks.cancel_scope.cancel()
        return 0

    dialect = CocaineDialect(concurrency=4)
    launch = ScriptedLaunch(script)
    async with AsyncSupervisor(stage(dialect, workers=3), launch=launch) as supervisor:
        results = await supervisor.submit([b"m%d" % n for n in range(36)])

    assert [r.outputs for r in results] == [(b"M%d" % n,) for n in range(36)]
    assert most == 4


async def test_worker_with_the_fewest_sessions_is_given_the_next() -> None:
    """An idle worker is preferred to a busy one that has room."""
    asked: dict[str, int] = {}

    async def script(worker: ScriptedWorker) -> int:
        async with CocaineWorker(worker) as cocaine:
            async for request in cocaine.requests():
                asked[worker.name] = asked.get(worker.name, 0) + 1
                await anyio.sleep(1)
                await cocaine.reply(request)
        return 0

    launch = ScriptedLaunch(script)
    async with AsyncSupervisor(stage(workers=4), launch=launch) as supervisor:
        await anyio.sleep(1)
        await supervisor.submit([b"m"] * 8)

    assert asked == {"t-1": 2, "t-2": 2, "t-3": 2, "t-4": 2}


async def test_batch_is_one_session() -> None:
    """Invoked with the configured event; each side's choke ends its half."""
    seen: list[tuple[str, int]] = []

    async def answer(worker: CocaineWorker, request: SessionRequest) -> None:
        seen.append((request.event, len(request.messages)))
        await capitals(worker, request)

    dialect = CocaineDialect(batches=True, event="clean")
    batched = stage(dialect, batch=BatchPolicy(size=3, seconds=1))
    async with AsyncSupervisor(batched, launch=answering(answer)) as supervisor:
        results = await supervisor.submit([b"a", b"b", b"c", b"d"])

    assert [r.outputs for r in results] == [(), (), (b"A", b"B", b"C"), (b"D",)]
    assert seen == [("clean", 3), ("clean", 1)]


async def test_chunks_are_outputs_or_one_message() -> None:
    """For an HTTP response, say: a head, and slices of a body."""

    async def answer(worker: CocaineWorker, request: SessionRequest) -> None:
        for slice_ in (b"head ", b"body"):
            await worker.say(Added(request.id, [slice_]))
            await anyio.sleep(1)
        await worker.reply(request)

    for concat, outputs in ((False, (b"head ", b"body")), (True, (b"head body",))):
        dialect = CocaineDialect(concat=concat)
        launch = answering(answer)
        async with AsyncSupervisor(stage(dialect), launch=launch) as supervisor:
            assert await supervisor.ask(b"GET") == outputs


async def test_extraction_is_a_session_with_one_chunk_of_parameters() -> None:
    """Its chunks are the data, its choke the end of the range."""

    async def answer(worker: CocaineWorker, request: SessionRequest) -> None:
        assert request.event == "extract"
        assert request.messages == (b'{"start": 2, "end": 5}',)
        for n in range(2, 5):
            await worker.say(Added(request.id, [b"%d" % n]))
        await worker.reply(request)

    extract = stage(kind=StageKind.EXTRACT)
    async with AsyncSupervisor(extract, launch=answering(answer)) as supervisor:
        got = [message async for message in supervisor.extract(start=2, end=5)]

    assert got == [b"2", b"3", b"4"]


async def test_extraction_waits_for_its_consumer_and_the_worker_for_no_one() -> None:
    """Its heartbeats stay unread meanwhile, but ours are still sent.

    Nor does that time count towards ``timeout.message`` (issue 15).
    """
    total = 40 * 64 * 1024

    async def answer(worker: CocaineWorker, request: SessionRequest) -> None:
        for _ in range(40):
            await worker.say(Added(request.id, [bytes(64 * 1024)]))
        await worker.reply(request)

    async def script(worker: ScriptedWorker) -> int:
        async with (
            CocaineWorker(worker, beat=3.0, disown=5.0) as cocaine,
            anyio.create_task_group() as tasks,
        ):
            async for request in cocaine.requests():
                tasks.start_soon(answer, cocaine, request)
        return 0

    dialect = CocaineDialect(heartbeat=20.0)
    slow = Timeouts(message=60)
    extract = stage(dialect, kind=StageKind.EXTRACT, timeout=slow)
    scripted, size = ScriptedLaunch(script), 0
    async with AsyncSupervisor(
        extract, launch=scripted, max_bytes=128 * 1024
    ) as supervisor:
        async for message in supervisor.extract():
            size += len(message)
            await anyio.sleep(6)

    assert size == total
    assert len(scripted.workers) == 1


async def test_load_is_acknowledged_by_a_stream_without_anything() -> None:
    """An error is no acknowledgement: the batch was not loaded."""

    async def answer(worker: CocaineWorker, request: SessionRequest) -> None:
        if b"bad" in request.messages:
            await worker.refuse(request, -13, "no such table")
        else:
            await worker.reply(request)

    load = stage(kind=StageKind.LOAD)
    async with AsyncSupervisor(load, launch=answering(answer)) as supervisor:
        good, bad = await supervisor.submit([b"good", b"bad"])

    assert (good.outputs, good.error) == ((), None)
    assert isinstance(bad.error, WorkerRefusal)
    assert (bad.error.code, bad.error.reason) == (-13, "no such table")
    assert bad.error.category == 42
    said = "refused the message: no such table (code -13, category 42)"
    assert bad.error.attempts[0].error == said


async def test_session_that_takes_too_long_is_given_up_and_the_worker_lives() -> None:
    """Its late reply hits no other session."""

    async def answer(worker: CocaineWorker, request: SessionRequest) -> None:
        await anyio.sleep(10 if request.messages == (b"slow",) else 1)
        await worker.reply(request, b"<" + request.messages[0] + b">")

    slow = stage(timeout=Timeouts(message=5), on_error=ErrorPolicy(retries=0))
    scripted = answering(answer)
    async with AsyncSupervisor(slow, launch=scripted) as supervisor:
        (first,) = await supervisor.submit([b"slow"])
        await anyio.sleep(5)
        (second,) = await supervisor.submit([b"quick"])

    assert isinstance(first.error, WorkerLost)
    late = "did not answer a message within 5 s (timeout.message), and it was cancelled"
    assert late in str(first.error)
    assert second.outputs == (b"<quick>",)
    assert len(scripted.workers) == 1
    assert supervisor.unknown_outcomes == 1


async def test_message_of_a_session_that_took_too_long_is_tried_again() -> None:
    """At once and by the same worker, which is as good as any other (issue 15)."""
    asked = 0

    async def answer(worker: CocaineWorker, request: SessionRequest) -> None:
        nonlocal asked
        asked += 1
        if asked > 1:
            await worker.reply(request, b"<" + request.messages[0] + b">")

    slow = stage(timeout=Timeouts(message=5), on_error=ErrorPolicy(retries=1))
    scripted = answering(answer)
    began = anyio.current_time()
    async with AsyncSupervisor(slow, launch=scripted) as supervisor:
        (result,) = await supervisor.submit([b"slow"])
        took = anyio.current_time() - began

    assert result.outputs == (b"<slow>",)
    assert (took, asked, len(scripted.workers)) == (5, 2, 1)


async def test_sessions_of_a_worker_that_dies_are_others_matter() -> None:
    """Other workers take them over: each message has one result."""

    async def script(worker: ScriptedWorker) -> int:
        async with CocaineWorker(worker) as cocaine:
            async for request in cocaine.requests():
                if worker.start == 1 and request.messages == (b"m7",):
                    return -SIGKILL
                await capitals(cocaine, request)
        return 0

    scripted = ScriptedLaunch(script)
    async with AsyncSupervisor(stage(workers=2), launch=scripted) as supervisor:
        results = await supervisor.submit([b"m%d" % n for n in range(30)])

    assert [r.outputs for r in results] == [(b"M%d" % n,) for n in range(30)]
    assert len(scripted.workers) > 2


async def beginning(
    script: Callable[[ScriptedWorker], Any],
    **settings: Any,  # noqa: ANN401 - passed on
) -> str:
    """Return the error of the first worker that failed, or how it exited."""
    scripted = ScriptedLaunch(script)
    once = stage(restart=RestartPolicy(max=0), **settings)
    async with AsyncSupervisor(once, launch=scripted) as supervisor:
        with supervisor.events() as told:
            (result,) = await supervisor.submit([b"m"])
            assert result.error is not None
            async for event in told:
                if isinstance(event, WorkerFailed):
                    return str(event.error)
                if isinstance(event, WorkerExited):
                    return f"status {event.status}, told {event.stopped}"
    raise AssertionError("unreachable: nothing was wrong")


async def test_worker_that_is_not_ready_in_time_is_not_waited_for() -> None:
    """From its start to its first heartbeat; a handshake may have its own deadline."""

    async def silent(worker: ScriptedWorker) -> int:
        await worker.read()
        return 0

    text = await beginning(silent, timeout=Timeouts(start=10))
    unheard = "did not connect and send a handshake with its --uuid"
    assert f"was not ready within 10 s (timeout.start): it {unheard}" in text
    text = await beginning(silent, dialect=CocaineDialect(handshake=2.0))
    assert "it did not identify itself within 2 s" in text


async def test_worker_without_heartbeat_is_not_waited_for() -> None:
    """Although it has a session whose own deadline has not passed."""

    async def stuck(worker: ScriptedWorker) -> int:
        async with CocaineWorker(worker, beat=None) as cocaine:
            async for _ in cocaine.requests():
                pass
        return 0

    text = await beginning(stuck, timeout=Timeouts(message=300))
    assert "there was no heartbeat within 30 s" in text


async def test_worker_that_beats_may_have_nothing_to_do_for_long() -> None:
    """After an idle hour it is still the same worker."""
    scripted = answering(capitals)
    async with AsyncSupervisor(stage(), launch=scripted) as supervisor:
        await supervisor.submit([b"a"])
        await anyio.sleep(3600)
        await supervisor.submit([b"b"])

    assert len(scripted.workers) == 1


async def test_unsolicited_exit_is_a_failure() -> None:
    """Workers that believe they are abandoned exit with status 0."""

    async def leaves(worker: ScriptedWorker) -> int:
        async with CocaineWorker(worker):
            await anyio.sleep(1)
        return 0

    leaving = stage(restart=RestartPolicy(max=2, delay=1.0))
    scripted = ScriptedLaunch(leaves)
    async with AsyncSupervisor(leaving, launch=scripted) as supervisor:
        await anyio.sleep(60)
        assert supervisor.health.state == "failed"
    assert len(scripted.workers) == 3


async def test_malformed_frame_ends_the_worker_and_no_one_else() -> None:
    """Another worker is given the message."""

    async def script(worker: ScriptedWorker) -> int:
        async with CocaineWorker(worker) as cocaine:
            async for request in cocaine.requests():
                if worker.start == 1:
                    await cocaine.write(b"\xc1")
                else:
                    await capitals(cocaine, request)
        return 0

    scripted = ScriptedLaunch(script)
    async with AsyncSupervisor(stage(), launch=scripted) as supervisor:
        assert await supervisor.ask(b"m") == (b"M",)
        (fault,) = supervisor.faults.last
    assert "expected msgpack frames" in str(fault)
    assert len(scripted.workers) == 2


async def test_worker_that_ignores_terminate_is_killed() -> None:
    """After terminate and the end of its input had no effect."""

    async def deaf(worker: ScriptedWorker) -> int:
        async with CocaineWorker(worker, obeys=False) as cocaine:
            async for request in cocaine.requests():
                await capitals(cocaine, request)
            await anyio.sleep_forever()
        return 0

    scripted = ScriptedLaunch(deaf)
    supervisor = AsyncSupervisor(stage(timeout=Timeouts(stop=5)), launch=scripted)
    async with supervisor:
        await supervisor.submit([b"m"])
        began = anyio.current_time()
    (worker,) = scripted.workers
    assert anyio.current_time() - began == pytest.approx(10)
    assert (worker.signals, worker.returncode) == ([SIGTERM], -SIGTERM)


async def test_worker_that_identifies_itself_late_is_asked_to_end() -> None:
    """Its version, and so how to ask it to terminate, is unknown before (issue 22)."""
    told: list[Farewell | None] = []
    dialect = CocaineDialect()
    assert dialect.protocol is CocaineVersion.AUTO

    async def late(worker: ScriptedWorker) -> int:
        await anyio.sleep(2)
        async with CocaineWorker(worker) as cocaine:
            async for _ in cocaine.requests():
                pass
            told.append(cocaine.farewell)
        return 0

    scripted = ScriptedLaunch(late)
    supervisor = AsyncSupervisor(stage(timeout=Timeouts(stop=5)), launch=scripted)
    async with supervisor:
        began = anyio.current_time()
    (worker,) = scripted.workers
    assert anyio.current_time() - began == pytest.approx(2, abs=0.5)
    assert (worker.signals, worker.returncode) == ([], 0)
    assert told == [Farewell(1, "the stage is stopping")]


async def test_worker_that_never_identifies_itself_has_one_step_to_end() -> None:
    """The end of its input means nothing to it (issue 22)."""

    async def silent(worker: ScriptedWorker) -> int:
        await anyio.sleep_forever()
        return 0

    scripted = ScriptedLaunch(silent)
    supervisor = AsyncSupervisor(stage(timeout=Timeouts(stop=5)), launch=scripted)
    async with supervisor:
        began = anyio.current_time()
    (worker,) = scripted.workers
    assert anyio.current_time() - began == pytest.approx(5)
    assert (worker.signals, worker.returncode) == ([SIGTERM], -SIGTERM)


async def test_open_sessions_may_end_when_the_supervisor_closes() -> None:
    """Within ``seal``; then the worker is asked to terminate."""
    order: list[str] = []

    async def answer(worker: CocaineWorker, request: SessionRequest) -> None:
        await anyio.sleep(2)
        order.append("answered")
        await worker.reply(request, b"ok")

    results = []

    async def ask(supervisor: AsyncSupervisor) -> None:
        results.extend(await supervisor.submit([b"m"]))

    async with (
        AsyncSupervisor(stage(), launch=answering(answer)) as supervisor,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(ask, supervisor)
        await anyio.sleep(1)
        await supervisor.aclose()

    assert [r.outputs for r in results] == [(b"ok",)]


async def test_worker_whose_session_does_not_end_is_notified_all_the_same() -> None:
    """After ``seal``, counted from the close, and before any signal (issue 15)."""
    told: list[float] = []

    async def script(worker: ScriptedWorker) -> int:
        async with CocaineWorker(worker, beat=None) as cocaine:
            async for _ in cocaine.requests():
                pass
            told.append(anyio.current_time())
        return 0

    scripted = ScriptedLaunch(script)
    async with (
        AsyncSupervisor(stage(), launch=scripted) as supervisor,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(supervisor.submit, [b"m"])
        await anyio.sleep(1)
        await supervisor.aclose()

    assert told == [4.0]
    assert [w.returncode for w in scripted.workers] == [0]


@pytest.mark.parametrize(("terminate", "tries"), [("fail", 2), ("drain", 1)])
def test_worker_that_terminates_loses_or_ends_its_sessions(
    terminate: str, tries: int
) -> None:
    """By the stage's settings; another worker is given lost messages."""
    asked = 0

    async def script(worker: ScriptedWorker) -> int:
        nonlocal asked
        async with CocaineWorker(worker) as cocaine:
            async for request in cocaine.requests():
                asked += 1
                if worker.start == 1:
                    await cocaine.say(Added(request.id, [b"half "]))
                    # Only etlstage's own SDK would not let its session go on.
                    frame = b"\x93\x01\x01\x92\x01\xa3bye"
                    await cocaine.write(frame)
                    await anyio.sleep(1)
                    await cocaine.reply(request, b"end")
                    return 0
                await cocaine.reply(request, b"again")
        return 0

    async def main() -> None:
        dialect = CocaineDialect(terminate=terminate)  # type: ignore[arg-type]
        launch = ScriptedLaunch(script)
        async with AsyncSupervisor(stage(dialect), launch=launch) as supervisor:
            outputs = await supervisor.ask(b"m")
        assert outputs == ((b"again",) if tries == 2 else (b"half ", b"end"))
        assert asked == tries

    run_virtually(main)


async def test_workers_come_and_go_with_the_work() -> None:
    """The pool's settings work as for any stage."""
    pool = PoolPolicy(min=1, max=4, grow_at=2, idle=20)

    async def answer(worker: CocaineWorker, request: SessionRequest) -> None:
        await anyio.sleep(1)
        await worker.reply(request)

    scripted = answering(answer)
    dialect = CocaineDialect(concurrency=1)
    async with AsyncSupervisor(
        stage(dialect, workers=pool), launch=scripted
    ) as supervisor:
        await supervisor.submit([b"m"] * 40)
        most = len(scripted.running)
        await anyio.sleep(60)
        least = len(scripted.running)

    assert (most, least) == (4, 1)
    assert {w.returncode for w in scripted.workers} == {0}


async def test_farewell_of_a_worker_with_nothing_to_do_is_heard() -> None:
    """It exits by itself, and another is started."""

    async def script(worker: ScriptedWorker) -> int:
        async with CocaineWorker(worker) as cocaine:
            async for request in cocaine.requests():
                await cocaine.say(Ended(request.id, [(b"x",)]))
                await cocaine.say(Farewell(1, "enough for today"))
                return 0
        return 0

    scripted = ScriptedLaunch(script)
    async with AsyncSupervisor(stage(), launch=scripted) as supervisor:
        for _ in range(3):
            assert await supervisor.ask(b"m") == (b"x",)
    assert len(scripted.workers) >= 3


async def test_worker_that_reports_that_none_could_work_has_no_successor() -> None:
    """All waiting messages fail with its reason; others are completed (issue 15)."""
    seen: list[bytes] = []

    async def script(worker: ScriptedWorker) -> int:
        async with CocaineWorker(worker) as cocaine:
            async for request in cocaine.requests():
                seen.extend(request.messages)
                if request.messages != (b"bad",):
                    await anyio.sleep(5)
                    await cocaine.reply(request, b"done")
                else:
                    await cocaine.say(Farewell(2, "no license"))
                    return 1
        return 0

    one_each = stage(CocaineDialect(concurrency=1), workers=2)
    scripted = ScriptedLaunch(script)
    async with AsyncSupervisor(one_each, launch=scripted) as supervisor:
        await anyio.sleep(1)
        results = await supervisor.submit([b"good", b"bad", b"waits"])
        assert supervisor.health.state == "failed"

    assert sorted(seen) == [b"bad", b"good"]
    assert results[0].outputs == (b"done",)
    for result in results[1:]:
        assert "reported a fatal condition for all workers: no license" in str(
            result.error
        )
    assert len(scripted.workers) == 2


async def test_worker_whose_last_session_was_cancelled_is_replaced() -> None:
    """Although it has answered fewer messages than its limit (issue 22)."""
    stuck = True

    async def answer(worker: CocaineWorker, request: SessionRequest) -> None:
        nonlocal stuck
        if request.messages == (b"stuck",) and stuck:
            stuck = False
            return
        await capitals(worker, request)

    recycled = stage(
        recycle=RecyclePolicy(max_messages=2, variance=0), timeout=Timeouts(message=5)
    )
    with anyio.fail_after(60):
        async with AsyncSupervisor(recycled, launch=answering(answer)) as supervisor:
            results = await supervisor.submit([b"one", b"stuck", b"two", b"three"])
            for _ in range(4):
                async with supervisor.session():
                    await anyio.sleep(1)
            results += await supervisor.submit([b"four"])

    made = [(b"ONE",), (b"STUCK",), (b"TWO",), (b"THREE",), (b"FOUR",)]
    assert [result.outputs for result in results] == made
