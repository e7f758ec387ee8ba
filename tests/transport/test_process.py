from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from etlstage.transport import Child, LaunchRequest, Wire, launch_over_pipes
from etlstage.transport.base import UNKNOWN_STATUS, describe_status
from etlstage.transport.process import PipeChild, PipeWire
from etlstage.transport.watchdog import WATCHDOG
from tests.patience import HANG
from tests.supervisor.workers import ends, open_files, runs

ENV = {"PATH": "/usr/bin:/bin"}


@contextmanager
def started(
    *command: str, stdin: bool = True, status: bool = False
) -> Iterator[tuple[PipeWire, PipeChild]]:
    """Start a shell script, or a program; kill and close it at the end."""
    words = command if len(command) > 1 else ("sh", "-c", *command)
    request = LaunchRequest(words, ENV, stdin=stdin, status=status)
    wire, child = launch_over_pipes(request)
    try:
        yield wire, child
    finally:
        child.kill()
        wire.close()
        child.close()


@contextmanager
def forked() -> Iterator[None]:
    """Have a fork of this process during a block, as multiprocessing makes them."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        if (fork := os.fork()) == 0:
            ours.close()
            theirs.send(b".")
            theirs.recv(1)
            os._exit(0)
        theirs.close()
        try:
            assert ours.recv(1) == b"."
            yield
        finally:
            ours.close()
            os.waitpid(fork, 0)


async def read_all(wire: Wire) -> bytes:
    """Return all of stdout."""
    output = b""
    with anyio.fail_after(HANG):
        while True:
            data = wire.read(65536)
            if data == b"":
                return output
            if data is None:
                await wire.readable()
            else:
                output += data


async def wait(child: Child) -> int:
    """Return the exit status."""
    with anyio.fail_after(HANG):
        return await child.wait()


# --- bytes ---------------------------------------------------------------------------


async def test_what_is_written_can_be_read() -> None:
    """The worker echoes it, until stdin is closed."""
    with started("cat", "-") as (wire, child):
        assert wire.read(10) is None
        assert wire.write(b"hello") == 5
        await wire.readable()
        assert wire.read(3) == b"hel"
        assert wire.read(10) == b"lo"
        assert wire.read(10) is None
        wire.close_write()
        assert await read_all(wire) == b""
        assert await wait(child) == 0


async def test_full_pipe_takes_a_part_and_then_nothing() -> None:
    """A write does not block; only ``writable()`` waits for room."""
    with started("sleep", "3600") as (wire, _child):
        written = wire.write(b"x" * 10_000_000)
        assert 0 < written < 10_000_000
        assert wire.write(b"x") == 0
        with anyio.move_on_after(0) as scope:
            await wire.writable()
        assert scope.cancelled_caught


async def test_pipes_are_enlarged() -> None:
    """To what Linux allows without privileges."""
    with started("sleep", "3600") as (wire, _child):
        assert wire.write(b"x" * 10_000_000) == 1024 * 1024


async def test_pipe_that_can_not_be_enlarged_stays_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The user's limit is reached, or the system can't: it works all the same."""
    monkeypatch.setattr("etlstage.transport.process._PIPE_SIZE", 1 << 62)
    with started("cat", "-") as (wire, _child):
        assert wire.write(b"hello") == 5
    monkeypatch.setattr("etlstage.transport.process._F_SETPIPE_SZ", None)
    with started("cat", "-") as (wire, _child):
        assert wire.write(b"hello") == 5


async def test_stderr_is_a_pipe_of_its_own() -> None:
    """Readable, then at its end."""
    with started("echo oops >&2") as (wire, child):
        with anyio.fail_after(HANG):
            await child.stderr.readable()
        assert child.stderr.read(100) == b"oops\n"
        assert await wait(child) == 0
        assert child.stderr.read(100) == b""
        assert await read_all(wire) == b""


async def test_closed_stdin_is_broken() -> None:
    """Whether the worker closed it or we did."""
    with started("exec <&-; echo closed; sleep 3600") as (wire, _child):
        await wire.readable()
        with pytest.raises(BrokenPipeError):
            wire.write(b"x")
        wire.close_write()
        wire.close_write()
        with pytest.raises(BrokenPipeError):
            wire.write(b"x")
        await wire.writable()


async def test_worker_without_stdin() -> None:
    """It reads an end at once, and there is nothing to write to."""
    with started("cat; echo done", stdin=False) as (wire, child):
        assert await read_all(wire) == b"done\n"
        with pytest.raises(BrokenPipeError):
            wire.write(b"x")
        await wire.writable()
        wire.close_write()
        assert await wait(child) == 0


async def test_closing_stdin_wakes_who_waits_for_room() -> None:
    """The writer finds out by its next write."""
    with started("sleep", "3600") as (wire, _child):
        wire.write(b"x" * 10_000_000)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wire.writable)
            await anyio.wait_all_tasks_blocked()
            wire.close_write()


async def test_readers_can_be_woken() -> None:
    """A pipe that somebody else holds open may never end."""
    with started("sleep", "3600") as (wire, _child):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wire.readable)
            await anyio.wait_all_tasks_blocked()
            wire.stop_waiting()
        assert wire.read(10) is None


async def test_closed_process_reads_as_ended() -> None:
    """Reading too late finds the end, without an error."""
    with started("sleep", "3600") as (wire, child):
        pass

    assert wire.read(10) == b""
    assert child.stderr.read(10) == b""


# --- the status ----------------------------------------------------------------------


async def test_status_is_a_file_that_any_program_can_write_to() -> None:
    """A program opens it by name, even repeatedly; it ends with its last writer."""
    script = 'echo > "$ETLSTAGE_STATUS"; read x; printf abc >> "$ETLSTAGE_STATUS"'
    with started(script, status=True) as (wire, child):
        assert child.status is not None
        with anyio.fail_after(HANG):
            await child.status.readable()
            assert child.status.read(100) == b"\n"
            assert child.status.read(100) is None
            wire.write(b"\n")
            await child.status.readable()
            assert child.status.read(2) == b"ab"
            assert child.status.read(2) == b"c"
            await wait(child)
            await child.status.readable()
        assert child.status.read(100) == b""


async def test_worker_without_status() -> None:
    """The worker is given no name of one, and inherits none."""
    with started("echo $ETLSTAGE_STATUS; ls /proc/self/fd") as (wire, child):
        assert child.status is None
        assert (await read_all(wire)).split() == [b"0", b"1", b"2", b"3"]


async def test_who_is_called_for_stdout_can_be_woken() -> None:
    """This works even if another process holds the other end (issue 13)."""
    with started("sleep", "3600") as (wire, _child):
        with anyio.fail_after(HANG):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wire.pull, lambda: True)
                await anyio.wait_all_tasks_blocked()
                wire.stop_waiting()


async def test_who_waits_for_the_status_can_be_woken() -> None:
    """This works as for readers of stdout."""
    with started("sleep", "3600", status=True) as (_wire, child):
        assert child.status is not None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(child.status.readable)
            await anyio.wait_all_tasks_blocked()
            child.status.stop_waiting()
        assert child.status.read(10) is None
    assert child.status.read(10) == b""
    await child.status.readable()
    child.status.stop_waiting()


# --- the end -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "status", "text"),
    [
        ("exit 0", 0, "exited with status 0"),
        ("exit 7", 7, "exited with status 7"),
        ("kill -SEGV $$", -signal.SIGSEGV, "was killed by SIGSEGV"),
        ("kill -KILL $$", -signal.SIGKILL, "was killed by SIGKILL"),
    ],
)
async def test_status(script: str, status: int, text: str) -> None:
    """Negative for a signal; None as long as it runs; ``repr`` shows it."""
    with started(f"read x; {script}") as (wire, child):
        assert child.returncode is None
        assert repr(child) == f"<PipeChild pid={child.pid} running>"
        wire.write(b"\n")
        assert await wait(child) == status
        assert child.returncode == status
        assert repr(child) == f"<PipeChild pid={child.pid} {text}>"


def test_signal_without_a_name() -> None:
    """Real-time signals have numbers only."""
    assert describe_status(-40) == "was killed by signal 40"


async def test_exit_can_be_awaited_without_a_pidfd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel may have none, or too many files may be open."""

    def refuse(pid: int) -> int:
        raise OSError

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with started("read x; exit 3") as (wire, child):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait, child)
            await anyio.wait_all_tasks_blocked()
            wire.write(b"\n")
        assert child.returncode == 3


async def test_what_the_worker_started_may_outlive_it() -> None:
    """It is killed with the worker's group, before the worker is reaped."""
    with started("sleep 3600 & echo $!") as (wire, child):
        grandchild = int(await read_line(wire))
        assert await wait(child) == 0
        assert runs(grandchild)
        assert child.kill() == 1
        assert ends(grandchild)
        assert child.kill() == 0


@pytest.mark.parametrize("pidfd", [True, False])
async def test_end_of_what_the_worker_started_can_be_awaited(
    pidfd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them are awaited, in any order, also where the kernel has no pidfd."""

    def refuse(pid: int) -> int:
        raise OSError

    waiting = "for n in 1 2 3; do (read x) <&3 & done"
    with started("bash", "-c", f"exec 3<&0; {waiting}") as (wire, child):
        assert await wait(child) == 0
        if not pidfd:
            monkeypatch.setattr(os, "pidfd_open", refuse)
        with anyio.fail_after(HANG):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(child.deserted)
                wire.write(b"\n")
                await anyio.wait_all_tasks_blocked()
                wire.close_write()
        assert child.kill() == 0


async def test_host_that_reaps_whatever_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """
    The exit status is lost, but not 0; processes that have the worker's mark are
    killed, and none by a pid that may be reused (issue 22).
    """
    with started("sleep 3600 & echo $!; exit 3") as (wire, child):
        grandchild = int(await read_line(wire))
        os.waitpid(child.pid, 0)  # noqa: ASYNC222 - it ends at once
        with monkeypatch.context() as patch:
            patch.setattr(os, "killpg", refuse_to_kill)
            child.signal(signal.SIGKILL)
            assert await wait(child) == UNKNOWN_STATUS
        assert ends(grandchild)
        assert child.returncode == UNKNOWN_STATUS
        assert repr(child).endswith(" has ended (exit status unknown)>")


async def test_worker_reaped_by_the_host_after_its_exit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its exit status is known; what it left is found by its mark (issue 22)."""
    with started("sleep 3600 & echo $!; exit 3") as (wire, child):
        grandchild = int(await read_line(wire))
        assert await wait(child) == 3
        os.waitpid(child.pid, 0)  # noqa: ASYNC222 - it has ended
        with monkeypatch.context() as patch:
            patch.setattr(os, "killpg", refuse_to_kill)
            await child.deserted()
            assert child.kill() == 1
        assert ends(grandchild)
        assert child.returncode == 3


@pytest.mark.parametrize("pidfd", [True, False])
async def test_worker_reaped_by_the_host_just_after_a_look(
    pidfd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that waits for any child may do so at any moment (issue 22)."""
    if not pidfd:
        monkeypatch.setattr(os, "pidfd_open", refuse_pidfd)
    look = os.waitid

    def reaping(kind: int, pid: int, options: int) -> os.waitid_result | None:
        found = look(kind, pid, options)
        if found is not None:
            os.waitpid(pid, 0)
        return found

    with started("exit 3") as (_wire, child), monkeypatch.context() as patch:
        patch.setattr(os, "waitid", reaping)
        assert await wait(child) == 3
    assert child.returncode == 3


@pytest.mark.parametrize("pidfd", [True, False])
async def test_exit_status_with_sigchld_ignored(
    pidfd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reaps the worker: its status is unknown, not 0 (issue 22)."""
    if not pidfd:
        monkeypatch.setattr(os, "pidfd_open", refuse_pidfd)
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with started("exit 3") as (_wire, child):
            assert await wait(child) == UNKNOWN_STATUS
        with started("sleep", "3600") as (_wire, child):
            child.kill()
            assert child.returncode == UNKNOWN_STATUS
    finally:
        signal.signal(signal.SIGCHLD, before)


def refuse_to_kill(group: int, number: int) -> None:
    """Fail: the pid of a reaped worker may be another's."""
    raise AssertionError(group, number)


def refuse_pidfd(pid: int) -> int:
    """Fail as a kernel without pidfds."""
    raise OSError


async def test_signal_reaches_the_whole_group() -> None:
    """The worker and its children get it; no signal is sent once it is reaped."""
    with started("sleep 3600 & echo $!; wait") as (wire, child):
        grandchild = int(await read_line(wire))
        assert runs(grandchild)
        child.signal(signal.SIGTERM)
        assert await wait(child) == -signal.SIGTERM
        assert ends(grandchild)
        child.kill()
        child.signal(signal.SIGTERM)


async def test_jobs_of_a_shell_are_killed_with_it() -> None:
    """They have groups of their own, but are in its session, even after its death."""
    with started("bash", "-c", "set -m; sleep 3600 & echo $!") as (wire, child):
        grandchild = int(await read_line(wire))
        assert os.getpgid(grandchild) == grandchild
        assert await wait(child) == 0
        assert child.kill() == 1
        assert ends(grandchild)


async def test_kill_reaches_other_sessions() -> None:
    """SIGKILL reaches all descendants of a live worker; SIGTERM does not."""
    script = "trap '' TERM; setsid sleep 3600 & echo $!; wait; wait"
    with started(script) as (wire, child):
        grandchild = int(await read_line(wire))
        while os.getsid(grandchild) != grandchild:
            await anyio.lowlevel.checkpoint()
        child.signal(signal.SIGTERM)
        assert runs(grandchild)
        child.signal(signal.SIGKILL)
        assert await wait(child) == -signal.SIGKILL
        assert ends(grandchild)


async def test_daemon_may_outlive_a_worker_that_ends_by_itself() -> None:
    """It has left the session, and the process that started it is gone."""
    with started("setsid sleep 3600 >&- 2>&- & echo $!") as (wire, child):
        grandchild = int(await read_line(wire))
        while os.getsid(grandchild) != grandchild:
            await anyio.lowlevel.checkpoint()
        assert await wait(child) == 0
        assert child.kill() == 0
        assert runs(grandchild)
        os.kill(grandchild, signal.SIGKILL)


async def test_kill_is_complete() -> None:
    """Killing twice is safe, and the watchdog forgets the worker."""
    wire, child = launch_over_pipes(LaunchRequest(("sleep", "3600"), ENV, stdin=False))
    assert child.pid in WATCHDOG._groups
    child.kill()
    child.kill()
    assert child.returncode == -signal.SIGKILL
    assert child.pid not in WATCHDOG._groups
    assert WATCHDOG._starting == 0
    wire.close()
    child.close()


async def test_worker_is_forgotten_before_it_is_reaped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After that the PID may be another's, which the watchdog must not kill."""
    seen = []

    def unregister(pid: int) -> None:
        seen.append(child._popen.returncode)
        assert Path(f"/proc/{pid}").exists()

    with started("exit 3") as (_wire, child):
        with monkeypatch.context() as patch:
            patch.setattr(WATCHDOG, "unregister", unregister)
            assert await wait(child) == 3
            assert seen == []
            child.kill()
        assert seen == [None]
        WATCHDOG.unregister(child.pid)


async def test_worker_dies_with_the_thread_that_started_it() -> None:
    """The parent-death signal is about the thread, not about the process."""
    started = []

    def start() -> None:
        started.append(launch_over_pipes(LaunchRequest(("sleep", "3600"), ENV)))
        # Until the wrapper has asked for the signal.
        while Path(f"/proc/{started[0][1].pid}/comm").read_text() != "sleep\n":
            os.sched_yield()

    thread = threading.Thread(target=start)
    thread.start()
    await anyio.to_thread.run_sync(thread.join)
    wire, child = started[0]
    assert await wait(child) == -signal.SIGKILL
    child.kill()
    wire.close()
    child.close()


async def read_line(wire: Wire) -> bytes:
    """Return the first line of stdout."""
    with anyio.fail_after(HANG):
        await wire.readable()
    return wire.read(100) or b""


async def test_worker_leads_a_session_of_its_own() -> None:
    """A Ctrl-C on our terminal reaches only us."""
    with started("cat", "-") as (_wire, child):
        assert os.getsid(child.pid) == child.pid
        assert os.getpgid(child.pid) == child.pid


async def test_nothing_is_open_after_close(tmp_path: Path) -> None:
    """Safe to call twice."""
    before = open_files()
    with started("exit 0") as (wire, child):
        await wait(child)
        wire.close()
        child.close()

    assert open_files() == before


async def test_fork_of_the_host_keeps_no_pipe_open() -> None:
    """The worker sees the end of its input although the fork lives (issue 22)."""
    with started("cat >&2; exit 3", status=True) as (wire, child), forked():
        wire.close_write()
        assert await wait(child) == 3


async def test_program_that_can_not_be_started_leaves_nothing_open() -> None:
    """The error is the system's; no pipe is left, and no worker that is expected."""
    before = open_files()
    with pytest.raises(FileNotFoundError):
        launch_over_pipes(LaunchRequest(("no-such-program",), ENV, status=True))

    assert open_files() == before
    assert WATCHDOG._starting == 0
