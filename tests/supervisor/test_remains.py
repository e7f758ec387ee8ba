"""Processes that an exiting worker leaves behind have time to end, too."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio
import pytest
from anyio.streams.memory import MemoryObjectReceiveStream
from structlog.testing import capture_logs

from etlstage.errors import EtlstageError, WorkerLost
from etlstage.messages import Result, StageKind
from etlstage.stage import RestartPolicy, Stage, Timeouts
from etlstage.supervisor import (
    AsyncSupervisor,
    RemainsEnded,
    SupervisorEvent,
    WorkerExited,
)
from etlstage.testing import ScriptedLaunch, ScriptedWorker, run_virtually
from etlstage.transport import Child, LaunchRequest, Wire
from tests.patience import HANG
from tests.supervisor.workers import (
    QUICK,
    collect,
    ends,
    load,
    numbers,
    outputs,
    plain,
    runs,
    told,
)

LONG = Timeouts(stop=3600)
ENDLESS = "sleep 3600 & echo $!"


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Make a gate that :func:`open_gate` opens."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    return path


async def open_gate(gate: Path) -> None:
    """Let all children continue that wait at the gate."""
    await anyio.to_thread.run_sync(gate.write_bytes, b"")


def lines(target: Path) -> list[bytes]:
    """Return the lines that have arrived, sorted."""
    return sorted(target.read_bytes().split())


def remains(events: list[SupervisorEvent]) -> list[RemainsEnded]:
    """Return the events about processes left behind."""
    return [event for event in events if isinstance(event, RemainsEnded)]


async def exit_in(events: MemoryObjectReceiveStream[SupervisorEvent]) -> None:
    """Wait until a worker has exited."""
    while not isinstance(await events.receive(), WorkerExited):
        pass


async def pids(supervisor: AsyncSupervisor, *messages: bytes) -> list[int]:
    """Return the pids with which these messages are answered."""
    results: list[Result] = []
    for message in messages:
        results += await supervisor.submit([message])
    return [int(reply) for (reply,) in outputs(results)]


async def test_uploads_in_the_background_arrive(tmp_path: Path) -> None:
    """They begin after their worker's exit, and the supervisor waits (issue 10)."""
    target = tmp_path / "target"
    with anyio.fail_after(HANG):
        async with AsyncSupervisor(load("leaves", "", target, "")) as supervisor:
            events = supervisor.events()
            outputs(await supervisor.submit([b"a", b"b", b"c"]))
        with events:
            told = [event async for event in events]

    assert lines(target) == [b"a", b"b", b"c"]
    assert remains(told) == []


@pytest.mark.parametrize("end", ["exit", "fail", "crash"])
async def test_next_worker_does_not_wait_for_them(
    tmp_path: Path, gate: Path, end: str
) -> None:
    """However the worker ended, another one continues at once (issue 10)."""
    target = tmp_path / "target"
    run = load(
        "leaves", gate, target, end, timeout=LONG, restart=RestartPolicy(delay=0.01)
    )
    with anyio.fail_after(HANG), capture_logs():
        async with AsyncSupervisor(run) as supervisor:
            children = await pids(supervisor, b"a", b"b", b"c")
            assert all(map(runs, children))
            # A child that arrives while another holds the gate open passes with it.
            async with anyio.create_task_group() as tasks:
                for child in children:
                    tasks.start_soon(open_gate_for, gate, child)

    assert lines(target) == [b"a", b"b", b"c"]


async def open_gate_for(gate: Path, child: int) -> None:
    """Open the gate until that child has passed it."""
    while runs(child):
        with suppress(OSError):  # no child waits there now
            os.close(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))
        await anyio.sleep(0.001)


async def test_killing_them_makes_what_was_loaded_doubtful() -> None:
    """A child may have been loading what its worker had answered (issue 22)."""
    script = f"while read -r x; do {ENDLESS}; printf '\\0'; done"
    run = Stage(
        name="l", kind=StageKind.LOAD, worker=("sh", "-c", script), timeout=QUICK
    )
    with anyio.fail_after(HANG), capture_logs():
        async with AsyncSupervisor(run) as supervisor:
            events = supervisor.events()
            outputs(await supervisor.submit([b"a", b"b"]))
        with events:
            (remained,) = remains([event async for event in events])

    assert (remained.killed, remained.doubtful) == (2, 2)
    assert supervisor.doubtful == 2
    assert isinstance(supervisor.doubt, WorkerLost)


@pytest.mark.parametrize("command", [ENDLESS, "setsid sleep 3600 & echo $!"])
async def test_what_does_not_end_in_time_is_killed_and_reported(command: str) -> None:
    """In events and in the log, even if it has left the session (issue 10)."""
    script = f"read x; {command}; printf '\\0'"
    run = Stage(name="t", worker=("sh", "-c", script), timeout=QUICK)
    with anyio.fail_after(HANG), capture_logs() as logs:
        async with AsyncSupervisor(run) as supervisor:
            events = supervisor.events()
            (child,) = await pids(supervisor, b"one")
        with events:
            told = [event async for event in events]

    assert ends(child)
    (event,) = remains(told)
    assert (event.worker, event.killed, event.late) == ("t-1", 1, 0)
    (entry,) = [entry for entry in logs if "left" in entry["event"]]
    assert entry == {
        "event": "worker left processes behind",
        "log_level": "warning",
        "stage": "t",
        "worker": "t-1",
        "pid": event.pid,
        "killed": 1,
        "dropped_bytes": 0,
    }


async def test_what_is_written_behind_the_end_is_dropped_and_reported(
    tmp_path: Path, gate: Path
) -> None:
    """It belongs to no reply, and no worker is stopped for it (issue 10)."""
    target = tmp_path / "target"
    run = load("leaves", gate, target, "exit", timeout=LONG)
    with anyio.fail_after(HANG), capture_logs():
        async with AsyncSupervisor(run) as supervisor:
            events = supervisor.events()
            await pids(supervisor, b"write")
            await exit_in(events)
            await open_gate(gate)
        with events:
            told = [event async for event in events]

    assert lines(target) == [b"write"]
    (event,) = remains(told)
    assert (event.killed, event.late) == (0, len(b"too late"))


async def test_cancelling_ends_their_time() -> None:
    """They are killed at once, which is reported (issue 10)."""
    script = f"read x; {ENDLESS}; printf '\\0'"
    run = Stage(name="t", worker=("sh", "-c", script), timeout=LONG)
    with anyio.fail_after(HANG), capture_logs() as logs:
        with anyio.CancelScope() as scope:
            async with AsyncSupervisor(run) as supervisor:
                with supervisor.events() as events:
                    (child,) = await pids(supervisor, b"one")
                    await exit_in(events)
                scope.cancel()
    assert ends(child)
    assert [entry["killed"] for entry in logs if "killed" in entry] == [1]


async def test_cancelling_the_end_ends_all_patience() -> None:
    """A worker that ignores the end of its input gets a signal (issue 10)."""
    run = Stage(name="t", worker=("sleep", "3600"), timeout=LONG)
    with anyio.fail_after(HANG):
        async with AsyncSupervisor(run) as supervisor:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(supervisor.aclose)
                await anyio.wait_all_tasks_blocked()
                tasks.cancel_scope.cancel()
            assert await supervisor.submit(numbers(1)) != []


# --- extraction ----------------------------------------------------------------------


async def test_extraction_goes_on_behind_the_exit(gate: Path) -> None:
    """A shell may exit before its children have written (issue 10)."""
    run = plain("extract_behind", gate, "one", "two", timeout=LONG)
    messages: list[bytes] = []
    with anyio.fail_after(HANG):
        async with (
            AsyncSupervisor(run) as supervisor,
            anyio.create_task_group() as tasks,
        ):

            async def read() -> None:
                messages.extend([m async for m in supervisor.extract()])

            tasks.start_soon(read)
            await open_gate(gate)

    assert messages == [b"one", b"two"]


# --- many ----------------------------------------------------------------------------


def test_not_too_many_have_time_at_once() -> None:
    """A worker that crashes repeatedly does not exhaust the machine (issue 10)."""
    living: list[int] = []
    most = 0

    class Leaving:
        """Leaves behind a process that only a kill ends."""

        def __init__(self, child: Child) -> None:
            self._child = child

        def __getattr__(self, name: str) -> object:
            return getattr(self._child, name)

        async def deserted(self) -> None:
            living.append(self._child.pid)
            await anyio.sleep_forever()

        def kill(self) -> int:
            living.remove(self._child.pid)
            return 1 + self._child.kill()

    async def crash(worker: ScriptedWorker) -> int:
        nonlocal most
        most = max(most, len(living))
        async for message in worker.messages():
            await worker.reply(message)
            return 1
        return 0

    launch = ScriptedLaunch(crash)

    def leave(request: LaunchRequest, /) -> tuple[Wire, Child]:
        wire, child = launch(request)
        return wire, Leaving(child)  # type: ignore[return-value]

    async def main() -> None:
        run = Stage(name="t", worker=("x",), timeout=LONG)
        async with AsyncSupervisor(run, launch=leave) as supervisor:
            for message in numbers(100):
                outputs(await supervisor.submit([message]))
                await anyio.sleep(1)

    with capture_logs():
        run_virtually(partial(main))
    assert living == []
    assert 10 < most < 20


async def test_plain_worker_whose_child_holds_the_pipe() -> None:
    """It is waited for, but not forever; its further output is unknown."""
    run = plain("extract_and_leave_child", timeout=QUICK)
    seen: list[bytes] = []
    with capture_logs() as logs:
        async with AsyncSupervisor(run) as supervisor:
            with anyio.fail_after(HANG), pytest.raises(EtlstageError) as caught:
                await collect(seen, supervisor.extract())
    assert seen == [b"one"]
    assert (
        "exited with status 0, but a process that it had started held its stdout"
        " open for 0.2 s" in told(caught.value)
    )
    (child,) = (entry["line"].split()[1] for entry in logs if "line" in entry)

    assert ends(int(child))
