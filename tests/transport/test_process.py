from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from etlstage.transport.process import Process, describe_status
from etlstage.transport.watchdog import WATCHDOG
from tests.supervisor.workers import ends, open_files, runs

ENV = {"PATH": "/usr/bin:/bin"}


@contextmanager
def started(
    *command: str, stdin: bool = True, status: bool = False
) -> Iterator[Process]:
    """Start a shell script, or a program; it is gone and closed at the end."""
    words = command if len(command) > 1 else ("sh", "-c", *command)
    process = Process(words, env=ENV, stdin=stdin, status=status)
    try:
        yield process
    finally:
        process.kill()
        process.close()


async def read_all(process: Process) -> bytes:
    """Return all of stdout."""
    output = b""
    with anyio.fail_after(10):
        while True:
            data = process.read_stdout(65536)
            if data == b"":
                return output
            if data is None:
                await process.stdout_readable()
            else:
                output += data


async def wait(process: Process) -> int:
    """Return the exit status."""
    with anyio.fail_after(10):
        return await process.wait()


# --- bytes ---------------------------------------------------------------------------


async def test_what_is_written_can_be_read() -> None:
    """Until stdin is closed."""
    with started("cat", "-") as process:
        assert process.read_stdout(10) is None
        assert process.write(b"hello") == 5
        await process.stdout_readable()
        assert process.read_stdout(3) == b"hel"
        assert process.read_stdout(10) == b"lo"
        assert process.read_stdout(10) is None
        process.close_stdin()
        assert await read_all(process) == b""
        assert await wait(process) == 0


async def test_full_pipe_takes_a_part_and_then_nothing() -> None:
    """Nobody is blocked; when it is read there is room again."""
    with started("sleep", "3600") as process:
        written = process.write(b"x" * 10_000_000)
        assert 0 < written < 10_000_000
        assert process.write(b"x") == 0
        with anyio.move_on_after(0) as scope:
            await process.stdin_writable()
        assert scope.cancelled_caught


async def test_pipes_are_enlarged() -> None:
    """To what Linux allows without privileges."""
    with started("sleep", "3600") as process:
        assert process.write(b"x" * 10_000_000) == 1024 * 1024


async def test_pipe_that_can_not_be_enlarged_stays_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The user has too many, or the system can't: it works all the same."""
    monkeypatch.setattr("etlstage.transport.process._PIPE_SIZE", 1 << 62)
    with started("cat", "-") as process:
        assert process.write(b"hello") == 5
    monkeypatch.setattr("etlstage.transport.process._F_SETPIPE_SZ", None)
    with started("cat", "-") as process:
        assert process.write(b"hello") == 5


async def test_stderr_is_a_pipe_of_its_own() -> None:
    """Readable, then at its end."""
    with started("echo oops >&2") as process:
        with anyio.fail_after(10):
            await process.stderr_readable()
        assert process.read_stderr(100) == b"oops\n"
        assert await wait(process) == 0
        assert process.read_stderr(100) == b""
        assert await read_all(process) == b""


async def test_closed_stdin_is_broken() -> None:
    """Whether the worker closed it or we did."""
    with started("exec <&-; echo closed; sleep 3600") as process:
        await process.stdout_readable()
        with pytest.raises(BrokenPipeError):
            process.write(b"x")
        process.close_stdin()
        process.close_stdin()
        with pytest.raises(BrokenPipeError):
            process.write(b"x")
        await process.stdin_writable()


async def test_worker_without_stdin() -> None:
    """It reads an end at once, and there is nothing to write to."""
    with started("cat; echo done", stdin=False) as process:
        assert await read_all(process) == b"done\n"
        with pytest.raises(BrokenPipeError):
            process.write(b"x")
        await process.stdin_writable()
        process.close_stdin()
        assert await wait(process) == 0


async def test_closing_stdin_wakes_who_waits_for_room() -> None:
    """It finds out with the next write."""
    with started("sleep", "3600") as process:
        process.write(b"x" * 10_000_000)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(process.stdin_writable)
            await anyio.wait_all_tasks_blocked()
            process.close_stdin()


async def test_readers_can_be_woken() -> None:
    """A pipe that somebody else holds open may never end."""
    with started("sleep", "3600") as process:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(process.stdout_readable)
            await anyio.wait_all_tasks_blocked()
            process.stop_waiting()
        assert process.read_stdout(10) is None


async def test_closed_process_reads_as_ended() -> None:
    """Who comes too late finds nothing, and no error."""
    with started("sleep", "3600") as process:
        pass

    assert process.read_stdout(10) == b""
    assert process.read_stderr(10) == b""


# --- the status ----------------------------------------------------------------------


async def test_status_is_a_file_that_any_program_can_write_to() -> None:
    """By its name, again and again; it ends with the last who has it open."""
    script = 'echo > "$ETLSTAGE_STATUS"; read x; printf abc >> "$ETLSTAGE_STATUS"'
    with started(script, status=True) as process:
        assert process.has_status
        with anyio.fail_after(10):
            await process.status_readable()
            assert process.read_status(100) == b"\n"
            assert process.read_status(100) is None
            process.write(b"\n")
            await process.status_readable()
            assert process.read_status(2) == b"ab"
            assert process.read_status(2) == b"c"
            await wait(process)
            await process.status_readable()
        assert process.read_status(100) == b""


async def test_worker_without_status() -> None:
    """It is not told of one; who reads finds an end."""
    with started("echo $ETLSTAGE_STATUS; ls /proc/self/fd") as process:
        assert not process.has_status
        assert process.read_status(100) == b""
        await process.status_readable()
        assert (await read_all(process)).split() == [b"0", b"1", b"2", b"3"]


async def test_who_waits_for_the_status_can_be_woken() -> None:
    """As those who read stdout."""
    with started("sleep", "3600", status=True) as process:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(process.status_readable)
            await anyio.wait_all_tasks_blocked()
            process.stop_waiting()
        assert process.read_status(10) is None
    assert process.read_status(10) == b""
    assert not process.has_status


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
    """Negative for a signal; None as long as it runs; ``repr`` says it."""
    with started(f"read x; {script}") as process:
        assert process.status is None
        assert repr(process) == f"<Process pid={process.pid} running>"
        process.write(b"\n")
        assert await wait(process) == status
        assert process.status == status
        assert repr(process) == f"<Process pid={process.pid} {text}>"


def test_signal_without_a_name() -> None:
    """Real-time signals have numbers only."""
    assert describe_status(-40) == "was killed by signal 40"


async def test_exit_can_be_awaited_without_a_pidfd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the kernel has none, or there are too many files open."""

    def refuse(pid: int) -> int:
        raise OSError

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with started("read x; exit 3") as process:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait, process)
            await anyio.wait_all_tasks_blocked()
            process.write(b"\n")
        assert process.status == 3


async def test_what_the_worker_started_goes_with_it() -> None:
    """Its process group is killed before it is reaped."""
    with started("sleep 3600 & echo $!") as process:
        child = int(await read_line(process))
        assert await wait(process) == 0
        assert ends(child)


async def test_signal_reaches_the_whole_group() -> None:
    """The worker and what it started; none is sent once it is reaped."""
    with started("sleep 3600 & echo $!; wait") as process:
        child = int(await read_line(process))
        assert runs(child)
        process.signal_group(signal.SIGTERM)
        assert await wait(process) == -signal.SIGTERM
        assert ends(child)
        process.signal_group(signal.SIGTERM)


async def test_jobs_of_a_shell_go_with_it() -> None:
    """They have groups of their own, but its session, even when it is dead."""
    with started("bash", "-c", "set -m; sleep 3600 & echo $!") as process:
        child = int(await read_line(process))
        assert os.getpgid(child) == child
        assert await wait(process) == 0
        assert ends(child)


async def test_kill_reaches_other_sessions() -> None:
    """As long as the worker lives, its child is known as such; SIGTERM does not."""
    script = "trap '' TERM; setsid sleep 3600 & echo $!; wait; wait"
    with started(script) as process:
        child = int(await read_line(process))
        while os.getsid(child) != child:
            await anyio.lowlevel.checkpoint()
        process.signal_group(signal.SIGTERM)
        assert runs(child)
        process.signal_group(signal.SIGKILL)
        assert await wait(process) == -signal.SIGKILL
        assert ends(child)


async def test_daemon_may_outlive_a_worker_that_ends_by_itself() -> None:
    """It has left the session, and who has started it is gone."""
    with started("setsid sleep 3600 >&- 2>&- & echo $!") as process:
        child = int(await read_line(process))
        while os.getsid(child) != child:
            await anyio.lowlevel.checkpoint()
        assert await wait(process) == 0
        assert runs(child)
        os.kill(child, signal.SIGKILL)


async def test_kill_is_complete() -> None:
    """Safe to call twice; a dead worker's number is nobody's business any more."""
    process = Process(("sleep", "3600"), env=ENV, stdin=False)
    assert process.pid in WATCHDOG._groups
    process.kill()
    process.kill()
    assert process.status == -signal.SIGKILL
    assert process.pid not in WATCHDOG._groups
    assert WATCHDOG._starting == 0
    process.close()


async def test_worker_is_forgotten_before_it_is_reaped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After that its number may be another's, whom the watchdog must not kill."""
    seen = []

    def unregister(pid: int) -> None:
        seen.append(process._popen.returncode)
        assert Path(f"/proc/{pid}").exists()

    with started("exit 3") as process:
        with monkeypatch.context() as patch:
            patch.setattr(WATCHDOG, "unregister", unregister)
            assert await wait(process) == 3
        assert seen == [None]
        WATCHDOG.unregister(process.pid)


async def test_worker_dies_with_the_thread_that_started_it() -> None:
    """It is the thread that the parent-death signal is about, not the process."""
    processes = []

    def start() -> None:
        processes.append(Process(("sleep", "3600"), env=ENV))
        # Until the wrapper has asked for the signal.
        while Path(f"/proc/{processes[0].pid}/comm").read_text() != "sleep\n":
            os.sched_yield()

    thread = threading.Thread(target=start)
    thread.start()
    await anyio.to_thread.run_sync(thread.join)
    assert await wait(processes[0]) == -signal.SIGKILL
    processes[0].close()


async def read_line(process: Process) -> bytes:
    """Return the first line of stdout."""
    with anyio.fail_after(10):
        await process.stdout_readable()
    return process.read_stdout(100) or b""


async def test_worker_leads_a_session_of_its_own() -> None:
    """A Ctrl-C on our terminal is ours alone."""
    with started("cat", "-") as process:
        assert os.getsid(process.pid) == process.pid
        assert os.getpgid(process.pid) == process.pid


async def test_nothing_is_open_after_close(tmp_path: Path) -> None:
    """Safe to call twice."""
    before = open_files()
    with started("exit 0") as process:
        await wait(process)
        process.close()

    assert open_files() == before


async def test_program_that_can_not_be_started_leaves_nothing_open() -> None:
    """The system's error, and no pipe; the watchdog does not wait for it."""
    before = open_files()
    with pytest.raises(FileNotFoundError):
        Process(("no-such-program",), env=ENV, status=True)

    assert open_files() == before
    assert WATCHDOG._starting == 0
