from __future__ import annotations

import errno
import sys
from signal import SIGKILL, SIGSEGV, SIGTERM
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from etlstage.errors import WorkerStartFailed
from etlstage.messages import StageKind
from etlstage.protocol.marker import Markers, Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import RecyclePolicy, RestartPolicy, Stage, Timeouts
from etlstage.supervisor import AsyncSupervisor
from etlstage.testing import ScriptedLaunch, ScriptedWorker, WorkerUnderTest
from etlstage.testing.scripted import Script
from etlstage.transport import Child, LaunchRequest, Wire
from tests.staged import staged
from tests.supervisor.workers import errors, outputs

pytestmark = [pytest.mark.core, pytest.mark.virtual]


def stage(**settings: Any) -> Stage:  # noqa: ANN401
    """Return a stage whose command is never run."""
    return staged(("no-such-program",), **settings)


async def upper(worker: ScriptedWorker) -> None:
    """Answer each message with its capitals."""
    worker.show_life()
    async for message in worker.messages():
        await worker.reply(message.upper())


ONCE = RestartPolicy(policy="temporary")


async def fates(script: Script, **settings: Any) -> list[str]:  # noqa: ANN401
    """Return the errors of a message whose worker is this script, and not restarted."""
    with capture_logs():
        async with AsyncSupervisor(
            stage(restart=ONCE, **settings), launch=ScriptedLaunch(script)
        ) as supervisor:
            return errors(await supervisor.submit([b"x"]))


async def test_script_answers_messages() -> None:
    """It has what a program would have, and ends when its input does."""
    launch = ScriptedLaunch(upper)
    async with AsyncSupervisor(stage(), launch=launch) as supervisor:
        (worker,) = launch.running
        assert (worker.name, worker.start, worker.returncode) == ("t-1", 1, None)
        assert worker.request.command == ("no-such-program",)
        assert repr(worker) == "<ScriptedWorker 't-1' start=1 running>"
        assert outputs(await supervisor.submit([b"a", b"b"])) == [(b"A",), (b"B",)]
    assert launch.running == []
    assert (worker.returncode, worker.signals) == (0, [])
    assert repr(worker) == "<ScriptedWorker 't-1' start=1 status=0>"


@pytest.mark.parametrize(
    "markers", [Markers(b"<m>", b"<p>", b"<b>", b"<n>"), Markers(eop=b"\n")], ids=str
)
async def test_markers_are_those_of_the_environment(markers: Markers) -> None:
    """Scripts read them from there, as programs do."""
    run = stage(dialect=MarkerDialect(markers=markers))
    async with AsyncSupervisor(run, launch=ScriptedLaunch(upper)) as supervisor:
        assert outputs(await supervisor.submit([b"a"])) == [(b"A",)]


async def test_second_loop_goes_on_with_the_next_message() -> None:
    """A script that leaves its loop has not lost what was read (issue 26)."""

    async def header_first(worker: ScriptedWorker) -> None:
        async for message in worker.messages():
            await worker.reply(message)
            break
        async for message in worker.messages():
            await worker.reply(message.upper())

    launch = ScriptedLaunch(header_first)
    async with WorkerUnderTest(stage(), launch=launch) as worker:
        replies = await worker.exchange([b"a", b"b", b"c"])
    assert [reply.outputs for reply in replies] == [(b"a",), (b"B",), (b"C",)]


async def test_script_may_refuse() -> None:
    """It refuses one message, and goes on."""

    async def refuse_bad(worker: ScriptedWorker) -> None:
        async for message in worker.messages():
            if message == b"bad":
                await worker.refuse("no date")
            else:
                await worker.reply(message)

    async with AsyncSupervisor(
        stage(), launch=ScriptedLaunch(refuse_bad)
    ) as supervisor:
        good, bad, last = await supervisor.submit([b"a", b"bad", b"b"])
    assert (good.outputs, last.outputs) == ((b"a",), (b"b",))
    assert str(bad.error).endswith(") refused the message: no date")


async def test_more_than_fits_passes_through() -> None:
    """A side that finds a pipe full waits for the other."""
    launch = ScriptedLaunch(upper, pipe_size=3)
    async with AsyncSupervisor(stage(), launch=launch) as supervisor:
        assert outputs(await supervisor.submit([b"abc" * 99])) == [(b"ABC" * 99,)]


async def test_returned_status_is_that_of_the_exit() -> None:
    """A negative one means a signal."""

    async def crash(worker: ScriptedWorker) -> int:
        await worker.read()
        await worker.complain("oh no")
        return -SIGSEGV

    (text,) = await fates(crash)
    assert "was killed by SIGSEGV while it held 1 message" in text
    assert "oh no" in text


@pytest.mark.parametrize(
    ("given", "status"), [(3, 3), (None, 0), ("oops", 1), ("", 1), (300, 44), (-1, 255)]
)
async def test_script_may_exit_from_anywhere(given: object, status: int) -> None:
    """``sys.exit`` takes a number, nothing or a text, as in a program."""

    async def leave(worker: ScriptedWorker) -> int:
        await worker.read()
        sys.exit(given)  # type: ignore[arg-type]

    (text,) = await fates(leave)
    assert f"exited with status {status} while it held 1 message" in text


async def test_text_of_an_exit_is_on_stderr() -> None:
    """It is written there as by a program (issue 26)."""

    async def leave(worker: ScriptedWorker) -> int:
        await worker.read()
        sys.exit("no licence")

    (text,) = await fates(leave)
    assert "exited with status 1" in text
    assert "no licence" in text


async def test_exit_within_a_task_group_is_an_exception() -> None:
    """It is in a group, as in a program: a traceback, and status 1 (issue 26)."""

    async def leave(worker: ScriptedWorker) -> None:
        await worker.read()
        async with anyio.create_task_group():
            sys.exit(4)

    (text,) = await fates(leave)
    assert "exited with status 1" in text
    assert "SystemExit: 4" in text


async def test_interrupt_of_a_script_ends_its_caller() -> None:
    """An exception that is no exit is not taken for one, in a group or not."""

    async def interrupt(_worker: ScriptedWorker) -> int:
        raise BaseExceptionGroup("both", [SystemExit(4), KeyboardInterrupt()])

    wire, child = started(interrupt)
    with pytest.raises(BaseExceptionGroup):
        await child.wait()
    wire.close()
    child.close()


async def test_exception_is_what_it_is_to_a_program() -> None:
    """It is a traceback on stderr, and status 1."""

    async def fail(worker: ScriptedWorker) -> int:
        await worker.read()
        return 1 // 0

    (text,) = await fates(fail)
    assert "exited with status 1" in text
    assert "ZeroDivisionError" in text


async def test_worker_that_stalls_is_signalled() -> None:
    """The stage's timeout passes in virtual time."""

    async def stall(_worker: ScriptedWorker) -> None:
        await anyio.sleep_forever()

    began = anyio.current_time()
    (text,) = await fates(stall, timeout=Timeouts(message=1000))
    assert "did not answer a message within 1000 s" in text
    assert anyio.current_time() - began == pytest.approx(1000)


async def test_signals_can_be_ignored_but_for_one() -> None:
    """Stopping goes on to its last step, SIGKILL."""

    async def stubborn(worker: ScriptedWorker) -> None:
        worker.ignored.add(SIGTERM)
        await anyio.sleep_forever()

    launch = ScriptedLaunch(stubborn)
    async with AsyncSupervisor(stage(timeout=Timeouts(stop=60)), launch=launch):
        began = anyio.current_time()
    (worker,) = launch.workers
    assert worker.signals == [SIGTERM, SIGKILL]
    assert worker.returncode == -SIGKILL
    assert anyio.current_time() - began == pytest.approx(120)


async def test_readiness_and_life_are_shown() -> None:
    """A worker that falls silent is replaced when its heartbeat is overdue."""
    silent_after = 100.0

    async def beat(worker: ScriptedWorker) -> None:
        until = anyio.current_time() + silent_after
        while anyio.current_time() < until:
            worker.show_life()
            await anyio.sleep(5)
        await anyio.sleep_forever()

    launch = ScriptedLaunch(beat)
    run = stage(ready=True, timeout=Timeouts(start=1, heartbeat=10))
    with capture_logs():
        async with AsyncSupervisor(run, launch=launch):
            await anyio.sleep(silent_after + 4)
            assert len(launch.workers) == 1
            await anyio.sleep(2)
            assert len(launch.workers) == 2
    assert [worker.returncode for worker in launch.workers] == [-SIGTERM, -SIGTERM]


async def test_back_off_takes_virtual_time() -> None:
    """Minutes of back-off pass at once."""

    async def crash(_worker: ScriptedWorker) -> int:
        return 1

    launch = ScriptedLaunch(crash)
    policy = RestartPolicy(max=8, delay=10, max_delay=1000, within=1e6)
    began = anyio.current_time()
    with capture_logs():
        async with AsyncSupervisor(stage(restart=policy), launch=launch) as supervisor:
            (text,) = errors(await supervisor.submit([b"x"]))
    assert "all workers failed" in text
    assert [worker.start for worker in launch.workers] == list(range(1, 10))
    assert 10 * 127 / 2 < anyio.current_time() - began <= 10 * 127


async def test_recycled_worker_is_ended_by_its_stdin() -> None:
    """It exits with status 0, and is replaced."""
    launch = ScriptedLaunch(upper)
    run = stage(recycle=RecyclePolicy(max_messages=2, variance=0))
    async with AsyncSupervisor(run, launch=launch) as supervisor:
        for _ in range(5):
            assert outputs(await supervisor.submit([b"a"])) == [(b"A",)]
    assert [w.returncode for w in launch.workers] == [0, 0, 0]


async def test_script_may_close_its_ends_and_live_on() -> None:
    """The end that it closes first is reported."""

    async def close_both(worker: ScriptedWorker) -> None:
        await worker.read()
        worker.close_stdin()
        worker.close_stdout()
        worker.ignored.add(SIGTERM)
        await anyio.sleep_forever()

    (text,) = await fates(close_both)
    assert "closed its stdin, but did not exit, and was stopped" in text


def started(script: Script, **request: Any) -> tuple[Wire, Child]:  # noqa: ANN401
    """Return a supervisor's ends of a worker."""
    return ScriptedLaunch(script)(LaunchRequest(("no-such-program",), {}, **request))


async def stay(_worker: ScriptedWorker) -> None:
    """Do nothing."""
    await anyio.sleep_forever()


async def test_first_signal_counts() -> None:
    """This holds before the script begins, too; later signals do nothing (issue 12)."""
    for begun in (True, False):
        _, child = started(stay)
        async with anyio.create_task_group() as tasks:
            if begun:
                tasks.start_soon(child.wait)
                await anyio.sleep(1)
            child.signal(SIGTERM)
            child.signal(SIGKILL)
            assert child.returncode == (None if begun else -SIGTERM)
        assert child.returncode == -SIGTERM
        assert await child.wait() == -SIGTERM


async def test_no_one_ignores_sigkill() -> None:
    """A script can't change that (issue 12)."""

    async def ignore(worker: ScriptedWorker) -> None:
        worker.ignored |= {SIGTERM, SIGKILL}
        await anyio.sleep_forever()

    _, child = started(ignore)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(child.wait)
        await anyio.sleep(1)
        child.signal(SIGTERM)
        assert child.kill() == 0
    assert child.returncode == -SIGKILL


async def test_script_that_no_one_waits_for_any_more_is_killed() -> None:
    """A script runs in the task that waits for it (issue 12)."""
    _, child = started(stay)
    with anyio.move_on_after(1):
        await child.wait()
    assert child.returncode == -SIGKILL


async def test_worker_that_is_given_no_stdin_sees_its_end() -> None:
    """Extract workers are given none (issue 12)."""

    async def read(worker: ScriptedWorker) -> int:
        assert await worker.read() == b""
        return 7

    _, child = started(read, stdin=False)
    assert await child.wait() == 7
    assert await child.wait() == 7  # it does not run again


async def test_end_of_a_long_traceback_is_kept() -> None:
    """The end states what was wrong (issue 12)."""

    async def fail(_worker: ScriptedWorker) -> None:
        raise ValueError("x" * 200_000 + " the end")

    _, child = started(fail)
    assert await child.wait() == 1
    text = child.stderr.read(10**6)
    assert text is not None
    assert text.endswith(b"x the end\n")


async def test_status_is_there_where_it_is_asked_for() -> None:
    """Otherwise a worker's status is lost; the stream ends at its exit (issue 12)."""

    async def tell(worker: ScriptedWorker) -> None:
        worker.show_life()
        worker.tell(progress=0.5)

    _, child = started(tell)
    assert (await child.wait(), child.status) == (0, None)
    _, child = started(tell, status=True)
    assert await child.wait() == 0
    assert child.status is not None
    assert child.status.read(99) == b'\n{"progress": 0.5}\n'
    assert child.status.read(99) == b""


async def test_launch_can_be_wrapped() -> None:
    """A test can simulate a program that is gone at its restart, for example."""

    def launch(request: LaunchRequest, /) -> tuple[Wire, Child]:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    with pytest.raises(WorkerStartFailed, match="there is no program"):
        async with AsyncSupervisor(stage(), launch=launch):
            raise AssertionError("it started")


async def test_extractor_may_write_before_it_is_ready() -> None:
    """Its output is read once it is ready; what a failed start wrote is dropped."""

    async def write(worker: ScriptedWorker) -> int:
        await worker.write(b"1\n2\n")
        if worker.start == 1:
            return 1
        await anyio.sleep(1)
        worker.show_life()
        await worker.write(b"3\n")
        return 0

    run = stage(
        kind=StageKind.EXTRACT, dialect=MarkerDialect(mode=Mode.PLAIN), ready=True
    )
    with capture_logs():
        async with AsyncSupervisor(run, launch=ScriptedLaunch(write)) as supervisor:
            assert [m async for m in supervisor.extract()] == [b"1", b"2", b"3"]
