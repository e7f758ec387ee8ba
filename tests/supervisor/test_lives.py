"""Workers over several lives: restarts, readiness, signs of life, replacement."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from structlog.testing import capture_logs

from etlstage.errors import StageFailed, WorkerLost
from etlstage.messages import Result
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import (
    BatchPolicy,
    ErrorPolicy,
    RecyclePolicy,
    RestartPolicy,
    Stage,
    Timeouts,
)
from etlstage.supervisor import (
    AsyncSupervisor,
    StartFailed,
    SupervisorEvent,
    WorkerExited,
    WorkerFailed,
    WorkerFailedPermanently,
    WorkerReady,
    WorkerRestarting,
    WorkerSilent,
    WorkerStarted,
    WorkerWorn,
)
from etlstage.telemetry import PrometheusMeter
from etlstage.testing import ScriptedWorker
from etlstage.testing.scripted import Script
from tests.patience import HANG
from tests.staged import staged
from tests.supervisor.acts import acting, in_memory, script_of
from tests.supervisor.workers import numbers, outputs, stage

ECHO = """
import os, sys, time
status = os.environ.get("ETLSTAGE_STATUS")
start = int(os.environ["ETLSTAGE_START"])
def announce():
    with open(status, "w") as file:
        file.write("!")
"""
LOOP = """
for line in sys.stdin:
    print(line, end="\\0", flush=True)
"""


def script(code: str, **policies: object) -> Stage:
    """Return a stage whose workers run some code, with all defaults."""
    command = (sys.executable, "-S", "-c", ECHO + code)
    return staged(command, **policies)


async def serve(worker: ScriptedWorker) -> int:
    """Answer each message with itself; die of poison."""
    worker.show_life()
    async for message in worker.messages():
        if message == b"poison":
            await worker.complain("oh")
            return 3
        await worker.reply(message)
    return 0


def staged_in_memory(**policies: object) -> Stage:
    """Return a stage whose workers are scripts, with all defaults."""
    return staged(("scripted",), **policies)


async def lives(
    run: Stage, messages: Sequence[bytes], does: Script | None = None
) -> tuple[list[SupervisorEvent], list[tuple[bytes, ...] | Exception]]:
    """Return the events of the workers, and each message's outputs or error."""
    supervisor = acting(run, does) if does else AsyncSupervisor(run)
    with supervisor.events() as events, anyio.fail_after(1000):
        async with supervisor:
            results = await supervisor.submit(messages)
        seen = [event async for event in events]
    return seen, [r.error if r.error is not None else r.outputs for r in results]


def kinds(events: Sequence[SupervisorEvent]) -> list[type[SupervisorEvent]]:
    """Return the types of events."""
    return [type(event) for event in events]


# --- restarts ------------------------------------------------------------------------


@in_memory
async def test_worker_that_dies_is_started_again() -> None:
    """Its message is tried again; the new start has its number."""

    async def die_once(worker: ScriptedWorker) -> int:
        if worker.start == 1:
            await worker.read(1)
            return 3
        return await serve(worker)

    events, outcomes = await lives(staged_in_memory(), [b"one"], die_once)

    assert outcomes == [(b"one",)]
    assert kinds(events) == [
        WorkerStarted,
        WorkerExited,
        WorkerRestarting,
        WorkerStarted,
        WorkerExited,
    ]
    assert [e.start for e in events if isinstance(e, WorkerStarted)] == [1, 2]


@in_memory
async def test_program_that_never_works_is_given_up() -> None:
    """With its story and its last lines on stderr; no message is dropped."""

    async def fail(worker: ScriptedWorker) -> int:
        await worker.complain("no such table")
        return 1

    run = staged_in_memory(restart=RestartPolicy(max=2, delay=0.01))
    events, outcomes = await lives(run, [b"one", b"two"], fail)

    assert all(isinstance(o, WorkerLost | StageFailed) for o in outcomes)
    last = outcomes[-1]
    assert isinstance(last, StageFailed)
    assert str(last).startswith(
        "stage t: no such table; all workers failed: worker t-1 ("
    )
    assert "after 2 restarts without progress in " in str(last)
    assert "stderr: no such table" in last.story
    (given_up,) = (e for e in events if isinstance(e, WorkerFailedPermanently))
    assert isinstance(given_up.error, StageFailed)
    assert given_up.error.story[0].startswith("event: started (pid ")


@in_memory
async def test_exit_status_forbids_a_restart() -> None:
    """The worker has reported that a restart is of no use."""

    async def give_up(worker: ScriptedWorker) -> int:
        return 78

    run = staged_in_memory(restart=RestartPolicy(never_on=frozenset({78})))
    events, outcomes = await lives(run, [b"one"], give_up)

    assert kinds(events) == [WorkerStarted, WorkerExited]
    assert "exited with status 78" in str(outcomes[0])


async def test_program_that_is_removed_is_tried_again(tmp_path: Path) -> None:
    """A deployment may put it back, so a start that fails is repeated."""
    program, aside = tmp_path / "worker", tmp_path / "aside"
    program.write_text(
        f"#!{sys.executable} -S\n{ECHO}\n"
        f"if start == 1:\n    sys.exit(os.rename(__file__, {str(aside)!r}))\n{LOOP}"
    )
    program.chmod(0o755)
    restart = RestartPolicy(max=5, delay=0.01)
    run = Stage(name="t", worker=(str(program),), restart=restart)
    supervisor = AsyncSupervisor(run)
    with supervisor.events() as events, capture_logs() as logs, anyio.fail_after(HANG):
        async with supervisor, anyio.create_task_group() as tasks:
            results: list[Result] = []

            async def submit() -> None:
                results.extend(await supervisor.submit([b"one"]))

            tasks.start_soon(submit)
            seen = []
            async for event in events:
                seen.append(type(event))
                # The second restart follows a start that has failed.
                if seen.count(WorkerRestarting) == 2:
                    break
            aside.rename(program)
    assert seen == [
        WorkerStarted,
        WorkerExited,
        WorkerRestarting,
        StartFailed,
        WorkerRestarting,
    ]
    assert not [log for log in logs if log["log_level"] == "error"]
    assert [result.outputs for result in results] == [(b"one",)]


async def test_worker_more_that_can_not_be_started_is_tried_again(
    tmp_path: Path,
) -> None:
    """Others go on, and nobody else fails for it (issue 22)."""
    program, aside = tmp_path / "worker", tmp_path / "aside"
    program.write_text(f"#!{sys.executable} -S\n{ECHO}\n{LOOP}")
    program.chmod(0o755)
    run = Stage(
        name="t", worker=(str(program),), restart=RestartPolicy(max=99, delay=0.01)
    )
    supervisor = AsyncSupervisor(run)
    with supervisor.events() as events, anyio.fail_after(HANG):
        async with supervisor:
            await supervisor.submit([b"one"])  # its program is read by now
            program.rename(aside)
            supervisor.scale(2)
            (result,) = await supervisor.submit([b"two"])
            assert result.outputs == (b"two",)
            failures = 0
            async for event in events:
                failures += isinstance(event, StartFailed)
                if failures == 2 and aside.exists():
                    aside.rename(program)
                if isinstance(event, WorkerStarted) and event.worker == "t-2":
                    break


async def test_program_that_stays_away_is_given_up(tmp_path: Path) -> None:
    """After restart.max starts that failed; the error names the missing file."""
    program = tmp_path / "worker"
    text = f"#!{sys.executable} -S\nimport os\nos.rename(__file__, __file__ + '~')\n"
    program.write_text(text)
    program.chmod(0o755)
    restart = RestartPolicy(max=2, delay=0.01)
    run = Stage(name="t", worker=(str(program),), restart=restart)
    events, outcomes = await lives(run, [b"one"])

    assert isinstance(outcomes[0], StageFailed)
    assert "last error: stage t: can't start worker t-1" in str(outcomes[0])
    assert not any("last error" in line for line in outcomes[0].story)
    assert kinds(events) == [
        WorkerStarted,
        WorkerExited,
        *[WorkerRestarting, StartFailed] * 2,
        WorkerFailedPermanently,
    ]


@in_memory
async def test_program_that_can_not_start_is_blamed_alone() -> None:
    """It read nothing, so no message is reported to have killed it."""

    async def fail(worker: ScriptedWorker) -> int:
        await worker.complain("ModuleNotFoundError: No module named 'x'")
        return 1

    run = staged_in_memory(restart=RestartPolicy(max=1, delay=0.01), workers=2)
    events, outcomes = await lives(run, numbers(50), fail)

    assert {type(o) for o in outcomes} == {StageFailed}
    assert "No module named 'x'" in str(outcomes[0])
    exits = [e for e in events if isinstance(e, WorkerExited)]
    assert {e.failed for e in exits} == {0}


@in_memory
async def test_message_at_the_head_of_a_large_batch_is_found() -> None:
    """That takes more halvings than the restarts allowed without progress."""
    run = replace(
        stage(
            "exits_at_word",
            "poison",
            dialect=MarkerDialect(mode=Mode.BATCH_SUPERVISOR),
            restart=RestartPolicy(delay=0.01),
        ),
        on_error=ErrorPolicy(),
    )
    _, outcomes = await lives(run, [b"poison", *numbers(299)], script_of(run))

    assert isinstance(outcomes[0], WorkerLost)
    assert len(outcomes[0].attempts) > run.restart.max
    assert not any(isinstance(o, Exception) for o in outcomes[1:])


# --- the message that hangs a worker, with default settings --------------------------


@in_memory
async def test_hung_worker_is_replaced_with_default_settings() -> None:
    """Its default deadline is several minutes."""

    async def hang_once(worker: ScriptedWorker) -> int:
        async for message in worker.messages():
            if worker.start == 1 and message == b"hang":
                await anyio.sleep_forever()
            await worker.reply(message)
        return 0

    run, began = staged_in_memory(), anyio.current_time()
    events, outcomes = await lives(run, [b"one", b"hang", b"two"], hang_once)

    assert outcomes == [(b"one",), (b"hang",), (b"two",)]
    assert kinds(events)[:-1] == [
        WorkerStarted,
        WorkerSilent,
        WorkerFailed,
        WorkerExited,
        WorkerRestarting,
        WorkerStarted,
    ]
    assert run.timeout.message is not None
    assert anyio.current_time() - began >= run.timeout.message


# --- readiness and signs of life -----------------------------------------------------


async def test_worker_is_given_nothing_before_it_is_ready() -> None:
    """It would lose messages: this one discards anything that came earlier."""
    code = """
import fcntl
fcntl.fcntl(0, fcntl.F_SETFL, os.O_NONBLOCK)
time.sleep(0.2)
assert sys.stdin.buffer.raw.read() is None, "fed too early"
fcntl.fcntl(0, fcntl.F_SETFL, 0)
announce()
"""
    events, outcomes = await lives(script(code + LOOP, ready=True), [b"one"])

    assert outcomes == [(b"one",)]
    assert kinds(events) == [WorkerStarted, WorkerReady, WorkerExited]


@in_memory
async def test_worker_that_is_not_ready_in_time_is_replaced() -> None:
    """Its successor is ready, so no message is lost."""

    async def sleep_once(worker: ScriptedWorker) -> int:
        if worker.start == 1:
            await anyio.sleep_forever()
        return await serve(worker)

    run = staged_in_memory(ready=True, timeout=Timeouts(start=0.5, stop=0.5))
    events, outcomes = await lives(run, [b"one"], sleep_once)

    assert outcomes == [(b"one",)]
    failed = events[1]
    assert isinstance(failed, WorkerFailed)
    assert "was not ready within 0.5 s (timeout.start)" in str(failed.error)
    assert failed.cause == "start"


@in_memory
async def test_idle_worker_without_signs_of_life_is_replaced() -> None:
    """One that gives them is left alone, for many times the deadline."""

    async def beat(worker: ScriptedWorker) -> int:
        held = b""
        while True:
            with anyio.move_on_after(0.05) as quiet:
                data = await worker.read()
            if quiet.cancelled_caught:
                worker.show_life()
            elif not data:
                return 0
            elif worker.start == 1:
                await anyio.sleep_forever()
            elif (held := held + data).endswith(b"\n"):
                await worker.reply(held.removesuffix(b"\n"))
                held = b""

    timeout = Timeouts(message=1.0, heartbeat=0.4, stop=0.3)
    supervisor = acting(staged_in_memory(timeout=timeout), beat)
    with supervisor.events() as events:
        async with supervisor:
            assert isinstance(await events.receive(), WorkerStarted)
            with anyio.move_on_after(60) as quiet:
                await events.receive()
            assert quiet.cancelled_caught
            # A busy worker need not give any: then the message's deadline counts.
            assert outputs(await supervisor.submit([b"1"])) == [(b"1",)]
            failed = await events.receive()
    assert isinstance(failed, WorkerFailed)
    assert "did not answer a message within 1 s" in str(failed.error)


@in_memory
async def test_silent_idle_worker_is_replaced() -> None:
    """It hangs although it has nothing to do."""
    timeout = Timeouts(heartbeat=0.3, stop=0.3)
    supervisor = acting(staged_in_memory(timeout=timeout), serve)
    with supervisor.events() as events:
        async with supervisor:
            assert isinstance(await events.receive(), WorkerStarted)
            failed = await events.receive()
    assert isinstance(failed, WorkerFailed)
    assert "sent no heartbeat for 0.3 s (timeout.heartbeat) while idle" in str(
        failed.error
    )
    assert failed.cause == "heartbeat"


# --- worn workers --------------------------------------------------------------------


@in_memory
@pytest.mark.parametrize("workers", [1, 2])
async def test_worker_is_replaced_after_so_many_messages(workers: int) -> None:
    """No message is lost, and it is no failure."""
    run = staged_in_memory(
        workers=workers,
        recycle=RecyclePolicy(max_messages=50, variance=0),
        restart=RestartPolicy(max=1),
        window=4,
    )
    events, outcomes = await lives(run, numbers(500), serve)

    assert outcomes == [(n,) for n in numbers(500)]
    exited = [e for e in events if isinstance(e, WorkerExited)]
    if workers == 1:  # of two, one waits until the other is back
        assert [e.answered for e in exited] == [50] * 10
    assert {e.status for e in exited} == {0}
    assert {e.lost for e in exited} == {0}
    assert any(isinstance(e, WorkerWorn) for e in events)


@in_memory
async def test_worker_is_replaced_when_it_is_old() -> None:
    """Even if it has nothing to do."""
    run = staged_in_memory(recycle=RecyclePolicy(max_age=0.2))
    supervisor = acting(run, serve)
    with supervisor.events() as events, anyio.fail_after(HANG):
        async with supervisor:
            seen = [await events.receive() for _ in range(4)]
    assert seen[1] == WorkerWorn("t-1", "lived 0.2 s")
    assert isinstance(seen[2], WorkerExited)
    assert isinstance(seen[3], WorkerRestarting)


async def test_worker_is_replaced_when_it_has_grown() -> None:
    """Its resident memory is checked every second."""
    code = "if start == 1: hoard = b'x' * 100_000_000" + LOOP
    run = script(code, recycle=RecyclePolicy(max_rss=80_000_000))
    supervisor = AsyncSupervisor(run)
    with supervisor.events() as events, anyio.fail_after(HANG):
        async with supervisor:
            seen = [await events.receive() for _ in range(5)]
    worn = seen[1]
    assert isinstance(worn, WorkerWorn)
    assert worn.reason.endswith(" bytes of memory")
    assert isinstance(seen[4], WorkerStarted)


@in_memory
@pytest.mark.parametrize("driver", ["supervisor", "worker"])
async def test_batch_that_is_open_is_finished_first(driver: str) -> None:
    """A worker that retires within a batch answers it first."""
    from tests.supervisor.test_batches import closed_by_worker

    run = replace(
        closed_by_worker(3),
        recycle=RecyclePolicy(max_messages=4, variance=0),
        restart=RestartPolicy(),
    )
    if driver == "supervisor":
        run = replace(
            stage("batch"),
            dialect=MarkerDialect(mode=Mode.BATCH_SUPERVISOR),
            batch=run.batch,
        )
    events, outcomes = await lives(run, numbers(30), script_of(run))

    assert not any(isinstance(o, Exception) for o in outcomes)
    assert all(e.lost == 0 for e in events if isinstance(e, WorkerExited))


@in_memory
async def test_idle_worker_retires_while_a_batch_is_incomplete() -> None:
    """Messages that wait for a batch to fill do not keep the loop busy."""

    async def slow() -> AsyncIterator[bytes]:
        for number in numbers(3):
            yield number
        await done.wait()

    done = anyio.Event()
    run = replace(
        stage("batch", timeout=Timeouts(stop=5.0)),
        dialect=MarkerDialect(mode=Mode.BATCH_SUPERVISOR),
        batch=BatchPolicy(size=2, seconds=0.3),
        recycle=RecyclePolicy(max_messages=2, variance=0),
    )
    seen = []
    with anyio.fail_after(HANG):
        async with (
            acting(run) as supervisor,
            aclosing(supervisor.stream(slow())) as results,
        ):
            async for result in results:
                seen.append(result)
                if len(seen) == 3:
                    done.set()
    assert [r.message for r in seen] == numbers(3)


# --- what is counted -----------------------------------------------------------------


@in_memory
async def test_metrics_show_what_happened() -> None:
    """Messages, restarts, retries and failures, by stage and worker."""
    meter = PrometheusMeter()
    run = staged_in_memory(on_error=ErrorPolicy(retries=1), window=1)
    async with acting(run, serve, meter=meter) as supervisor:
        await supervisor.submit([b"a", b"poison", b"b"])
        during = meter.render()
    after = meter.render()

    for line in (
        'etlstage_messages_total{stage="t",worker="t-1"} 2',
        'etlstage_worker_starts_total{stage="t",worker="t-1"} 3',
        'etlstage_worker_restarts_total{stage="t",worker="t-1"} 2',
        'etlstage_worker_failures_total{reason="died",stage="t",worker="t-1"} 2',
        'etlstage_messages_retried_total{stage="t"} 1',
        'etlstage_messages_failed_total{stage="t"} 1',
        'etlstage_stderr_lines_total{stage="t",worker="t-1"} 2',
        'etlstage_workers_running{stage="t"} 1',
        'etlstage_messages_waiting{stage="t"} 0',
    ):
        assert line in during, during
    assert 'etlstage_workers_running{stage="t"} 0' in after


@in_memory
async def test_metrics_count_the_bytes_of_replies() -> None:
    """As they were read, with their markers, not the memory they take (issue 22)."""
    meter = PrometheusMeter()
    async with acting(stage("words"), meter=meter) as supervisor:
        await supervisor.submit([b"one two", b" ", b"three"])
        await supervisor.submit([b"four"])

    read = len(b"one\ntwo\n\0\0three\n\0four\n\0")
    line = f'etlstage_output_bytes_total{{stage="t",worker="t-1"}} {read}.0'
    assert line in meter.render().splitlines()
