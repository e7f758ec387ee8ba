"""
A child process and its pipes: the default way to start workers.

The pipes are raw and non-blocking: reading and writing are tried first, and only if the
pipe is not ready is it waited for. That is faster than the streams of either event
loop, and needs no thread.

In lock-step, three more things take time, and are done without anyio if the event loop
is asyncio's. An exchange asks for the time once: the clock is then a method of the
loop. It waits for a reply once: the loop then calls the reader, without waking a task
or registering the descriptor anew. And its caller waits once: then for a bare future.
On any other loop all this is done with anyio.

The end of a process is awaited without reaping it: until :meth:`PipeChild.kill` its pid
can't be reused for another process. A host may reap it all the same: by a SIGCHLD that
is ignored, or by a wait for any child. Then its exit status is unknown, which counts as
a failure, and only processes that have its mark are killed.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import sys
import termios
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from contextvars import copy_context
from dataclasses import replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from signal import SIGKILL, Signals
from time import monotonic
from typing import IO, Final, Literal

import anyio
from anyio.lowlevel import current_token

from etlstage.transport.base import (
    UNKNOWN_STATUS,
    ClosableReadable,
    LaunchRequest,
    describe_status,
)
from etlstage.transport.fork import close_in_fork
from etlstage.transport.guard import lives
from etlstage.transport.launcher import Launcher, LaunchTerms
from etlstage.transport.watchdog import VARIABLE, WATCHDOG

__all__ = (
    "PipeChild",
    "PipeReader",
    "PipeWire",
    "Puller",
    "Signal",
    "clock",
    "descendants",
    "event_loop",
    "launch_over_pipes",
    "resident_bytes",
    "session_members",
    "start_program",
)

_PIPE_SIZE: Final = 1024 * 1024  # what Linux allows without privileges
PROCESS_VARIABLE: Final = "ETLSTAGE_PROCESS"
"""Identifies one worker process, and all that inherits its environment."""
STATUS_VARIABLE: Final = "ETLSTAGE_STATUS"
"""Names a file: anything a worker writes there reports that it is ready, or alive."""
_numbers: Final = count(1)
_CHECK: Final = 1.0  # seconds between two checks of the watchdog
_POLL: Final = 0.02
"""Seconds between two polls, if the kernel has no pidfd."""
_F_SETPIPE_SZ: Final = getattr(fcntl, "F_SETPIPE_SZ", None)


class PipeReader:
    """
    Our end of a pipe that a worker writes to.

    Args:
        pipe: An unbuffered file; the reader takes ownership of it.

    """

    def __init__(self, pipe: IO[bytes]) -> None:
        os.set_blocking(pipe.fileno(), False)
        _enlarge(pipe.fileno())
        self._pipe = pipe
        self._puller = Puller()

    def read(self, size: int, /) -> bytes | None:
        # Reading after we have closed it is no error: there is just nothing to read.
        return b"" if self._pipe.closed else self._pipe.read(size)

    async def readable(self) -> None:
        if not self._pipe.closed:
            with suppress(anyio.ClosedResourceError):
                await anyio.wait_readable(self._pipe.fileno())

    async def pull(self, take: Callable[[], bool], /) -> None:
        if not self._pipe.closed:
            await self._puller.run(self._pipe.fileno(), take)

    def stop_waiting(self) -> None:
        """Wake waiting tasks; safe to call after closing."""
        self._puller.stop()
        if not self._pipe.closed:
            anyio.notify_closing(self._pipe.fileno())

    def fileno(self) -> int:
        """Return the descriptor that is waited for."""
        return self._pipe.fileno()

    def close(self) -> None:
        self._pipe.close()


class PipeWire(PipeReader):
    """A worker's stdout, and its stdin if it was given any."""

    def __init__(self, stdout: IO[bytes], stdin: IO[bytes] | None) -> None:
        super().__init__(stdout)
        self._stdin = stdin
        if stdin is not None:
            os.set_blocking(stdin.fileno(), False)
            _enlarge(stdin.fileno())

    def write(self, data: memoryview | bytes, /) -> int:
        stdin = self._stdin
        if stdin is None:
            raise BrokenPipeError
        return stdin.write(data) or 0

    async def writable(self) -> None:
        """Wait until stdin takes more, is broken, or was closed by us."""
        if self._stdin is not None:
            with suppress(anyio.ClosedResourceError):
                await anyio.wait_writable(self._stdin.fileno())

    def close_write(self) -> None:
        """Close the worker's stdin; safe to call twice."""
        stdin, self._stdin = self._stdin, None
        if stdin is not None:
            anyio.notify_closing(stdin.fileno())
            stdin.close()

    def unread(self) -> int:
        """Return how many bytes are in stdin, or 0 when that is closed or unknown."""
        if self._stdin is None:
            return 0
        try:
            answer = fcntl.ioctl(self._stdin.fileno(), termios.FIONREAD, b"\0" * 4)
        except OSError:
            return 0
        return int.from_bytes(answer, sys.byteorder)

    def mismatch_hint(self) -> str:
        """Return an empty text: a pipe is connected from the start."""
        return ""

    def close(self) -> None:
        self.close_write()
        super().close()


class PipeChild:
    """
    A running program, leader of its own session and process group.

    It dies, with its group, when this process does, in whatever way. It also dies with
    the *thread* that started it: start it from one that lives as long.

    Args:
        popen: The program.
        stderr: The stream of its stderr.
        status: The pipe on which it reports that it is ready and alive, if any.
        mark: The entry of its environment that identifies it.

    """

    def __init__(
        self,
        popen: subprocess.Popen[bytes],
        stderr: ClosableReadable,
        status: IO[bytes] | None,
        mark: bytes,
    ) -> None:
        self._popen = popen
        self._mark = mark
        self._ended: int | None = None  # the exit status, before it is reaped
        self.pid: int = popen.pid
        self.stderr: ClosableReadable = stderr
        self.status: PipeReader | None = None if status is None else PipeReader(status)
        self._pidfd = _open_pidfd(self.pid)

    def __repr__(self) -> str:
        status = self.returncode
        fate = "running" if status is None else describe_status(status)
        return f"<PipeChild pid={self.pid} {fate}>"

    @property
    def returncode(self) -> int | None:
        reaped = self._popen.returncode
        return self._ended if reaped is None else reaped

    def signal(self, number: Signals, /) -> None:
        """
        Send a signal to the worker and to whatever it started in its group.

        SIGKILL also goes to processes that it started outside its group, as far as
        these can be found.
        """
        if self._reaped():
            return
        self._send(number, self._others() if number is SIGKILL else [])

    async def wait(self) -> int:
        """
        Return the exit status; processes left in its group and session still run.

        It is not reaped before :meth:`kill`: until then its pid, and so the id of its
        group and session, can't be reused.
        """
        if self._pidfd is not None:
            await _wait_ended(self._pidfd)
        try:
            while (status := self._poll()) is None:
                WATCHDOG.check(monotonic())
                await anyio.sleep(_POLL)
        except ChildProcessError:
            self.kill()
            return self._popen.returncode
        self._ended = status
        return status

    async def deserted(self) -> None:
        while not self._reaped() and (others := self._others()):
            await _look_again(others[0])

    def kill(self) -> int:
        if self._popen.returncode is not None:
            return 0
        if self._reaped():
            killed = self.kill_heirs()
        else:
            # Searched first: once it is dead, its children can't be found any more.
            others = self._others()
            self._send(SIGKILL, others)
            killed = len(others)
        WATCHDOG.unregister(self.pid)
        try:
            status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:  # Popen.wait() would return 0
            status = UNKNOWN_STATUS if self._ended is None else self._ended
        self._popen.returncode = status
        return killed

    def kill_heirs(self) -> int:
        """Kill processes left in other sessions, if they still have our mark."""
        return _signal_all(heirs(self._mark), SIGKILL)

    def _reaped(self) -> bool:
        """Return whether it was reaped, by us or the host: its pid may be another's."""
        try:
            self._poll()
        except ChildProcessError:
            return True
        return False

    def _poll(self) -> int | None:
        """
        Return the exit status; None if it runs.

        Raises:
            ChildProcessError: If it was reaped. The host may do so at any moment, even
                between two calls.

        """
        if self._popen.returncode is not None:
            raise ChildProcessError
        return _status_of(self.pid)

    def _others(self) -> list[int]:
        """Return the processes it has started that can be found, parents first."""
        found = dict.fromkeys(descendants(self.pid))
        for member in session_members(self.pid):
            found |= dict.fromkeys((member, *descendants(member)))
        return [pid for pid in found if lives(pid)]

    def _send(self, number: Signals, others: list[int]) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
        _signal_all(others, number)

    def close(self) -> None:
        self.stderr.close()
        if self.status is not None:
            self.status.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def launch_over_pipes(request: LaunchRequest, /) -> tuple[PipeWire, PipeChild]:
    """
    Start a program, and talk to it over its stdin and stdout.

    Raises:
        OSError: If the program can't be started; as :class:`subprocess.Popen`.
        TermsRefused: If the system refuses to start it on these terms.

    """
    popen, status, mark = _start_watched(request, merged=False)
    assert popen.stdout is not None, "it has pipes"
    assert popen.stderr is not None, "it has pipes"
    wire = PipeWire(popen.stdout, popen.stdin)
    return wire, PipeChild(popen, PipeReader(popen.stderr), status, mark)


def start_program(
    request: LaunchRequest,
    words: Sequence[str],
    join: Callable[[PipeReader, int | None], ClosableReadable],
) -> PipeChild:
    """
    Start a program with more arguments, to talk to it elsewhere than over pipes.

    Its stdout is merged with its stderr, and its stdin is empty. ``join`` is called
    with the pipe of the two and a pidfd of the program, if there can be one, and
    returns what is read as its stderr. Raises the same errors as
    :func:`launch_over_pipes`.
    """
    command = (*request.command, *words)
    request = replace(request, command=command, stdin=False)
    popen, status, mark = _start_watched(request, merged=True)
    assert popen.stdout is not None, "it has a pipe"
    stderr = join(PipeReader(popen.stdout), _open_pidfd(popen.pid))
    return PipeChild(popen, stderr, status, mark)


def _open_pidfd(pid: int) -> int | None:
    """Return a descriptor that is readable once a process has exited, if possible."""
    with suppress(AttributeError, OSError):
        return os.pidfd_open(pid)
    return None


def _start_watched(
    request: LaunchRequest, *, merged: bool
) -> tuple[subprocess.Popen[bytes], IO[bytes] | None, bytes]:
    """Start it, registered with the watchdog. ``merged``: stderr goes to stdout."""
    WATCHDOG.expect()
    try:
        with ExitStack() as failed:
            started = _start(request, failed, merged=merged)
            failed.pop_all()
    except BaseException:
        WATCHDOG.give_up()
        raise
    WATCHDOG.register(started[0].pid)
    return started


def _start(
    request: LaunchRequest, failed: ExitStack, *, merged: bool
) -> tuple[subprocess.Popen[bytes], IO[bytes] | None, bytes]:
    """Start it; ``failed`` gets what to undo if that fails."""
    _keep_freed_memory()
    terms, status = request.terms, None
    env = {**request.env, VARIABLE: WATCHDOG.mark}
    env[PROCESS_VARIABLE] = mark = f"{WATCHDOG.mark}.{next(_numbers)}"
    with ExitStack() as stack:
        launcher = Launcher(request.command, env=env, cwd=request.cwd, terms=terms)
        stack.callback(launcher.close)
        pipe = partial(_pipe, stack, failed, terms)
        passed: list[int] = []
        stdin: IO[bytes] | None = None
        stderr: IO[bytes] | None = None
        their_stdin, their_stderr = subprocess.DEVNULL, subprocess.STDOUT
        if request.status:
            writing, status = pipe("rb")
            passed = [writing]
            env[STATUS_VARIABLE] = f"/dev/fd/{writing}"
        if request.stdin:
            their_stdin, stdin = pipe("wb")
        their_stdout, stdout = pipe("rb")
        if not merged:
            their_stderr, stderr = pipe("rb")
        popen: subprocess.Popen[bytes] = subprocess.Popen(
            launcher.words,
            stdin=their_stdin,
            stdout=their_stdout,
            stderr=their_stderr,
            env=env,
            cwd=request.cwd,
            start_new_session=True,
            pass_fds=(*launcher.descriptors, *passed),
            umask=-1 if terms.umask is None else terms.umask,
        )
        popen.stdin, popen.stdout, popen.stderr = stdin, stdout, stderr
        failed.enter_context(popen)  # waits for it, and closes its pipes
        failed.callback(popen.kill)
        launcher.check()
    return popen, status, f"{PROCESS_VARIABLE}={mark}".encode()


@cache
def _keep_freed_memory() -> None:
    """
    Make glibc keep up to twice as much free memory as the largest block freed so far.

    By default it returns the end of its heap to the kernel when buffers as large as a
    pipe are freed, and gets the next ones from there, with each page to be cleared.
    """
    bytes(16 * _PIPE_SIZE)


def _pipe(
    stack: ExitStack, failed: ExitStack, terms: LaunchTerms, mode: Literal["rb", "wb"]
) -> tuple[int, IO[bytes]]:
    """Return the program's end of a pipe, which ``stack`` closes, and our own."""
    reading, writing = os.pipe()
    theirs, ours = (writing, reading) if mode == "rb" else (reading, writing)
    stack.callback(os.close, theirs)
    # Otherwise a program of another user could not open it by name, such as
    # /dev/stderr. It may do so as soon as it runs, so this precedes its start.
    if terms.user is not None:
        with suppress(OSError, OverflowError):
            os.fchown(theirs, terms.user, -1)
    return theirs, close_in_fork(failed.enter_context(open(ours, mode, buffering=0)))


def _enlarge(fd: int) -> None:
    # Refused if the user already has too many large pipes: then it stays small.
    if _F_SETPIPE_SZ is not None:
        with suppress(OSError):
            fcntl.fcntl(fd, _F_SETPIPE_SZ, _PIPE_SIZE)


# --- the process table ---------------------------------------------------------------
#
# Finds processes that a worker has started and that have left its process group, as far
# as a look at the table shows them, and only on Linux: members of the session that the
# worker leads, even if the worker is dead; and its descendants, as long as the line of
# parents is unbroken. A daemon, which made a session of its own and whose parent has
# ended, is neither: only its inherited environment identifies it.


def session_members(leader: int) -> list[int]:
    """Return the other processes in the session of ``leader``, which is not reaped."""
    # No file is opened: a tenth of a millisecond for a hundred processes.
    members = []
    for name in _listing("/proc"):
        if name.isdigit() and int(name) != leader:
            try:
                if os.getsid(int(name)) == leader:
                    members.append(int(name))
            except OSError:
                continue
    return members


def descendants(pid: int) -> list[int]:
    """Return the descendants of ``pid``, parents before their children."""
    found = [pid]
    for parent in found:
        # One list per thread that has forked: proc_tid_children(5). It may miss a child
        # while others exit, so this is best effort; the mark is reliable.
        for task in _listing(f"/proc/{parent}/task"):
            try:
                children = Path(f"/proc/{parent}/task/{task}/children").read_text()
            except OSError:
                continue
            found += [
                child for child in map(int, children.split()) if child not in found
            ]
    return found[1:]


def resident_bytes(pid: int) -> int | None:
    """Return the resident memory of a process in bytes; None if it is gone."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def heirs(entry: bytes) -> list[int]:
    """Return the processes whose environment has ``entry``, such as ``NAME=value``."""
    # Reads a file per process, which takes milliseconds: used only if one is suspected.
    found = []
    for name in _listing("/proc"):
        try:
            environment = Path(f"/proc/{name}/environ").read_bytes()
        except OSError:
            continue  # not a process, or not ours
        if entry in environment.split(b"\0"):
            found.append(int(name))
    return found


def _listing(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


# --- signals, exits and waiting ------------------------------------------------------


def _signal_all(pids: Iterable[int], number: Signals) -> int:
    """Send a signal to processes; return how many got it."""
    count = 0
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
            count += 1
    return count


async def _wait_ended(pidfd: int) -> None:
    """Wait until a process has ended; meanwhile keep the watchdog alive."""
    while True:
        began = monotonic()
        with anyio.move_on_after(_CHECK):
            await anyio.wait_readable(pidfd)
            return
        now = monotonic()
        if now - began < 0.9 * _CHECK:
            # The event loop has a simulated clock, which jumps to the next time that
            # a task waits for.
            await anyio.wait_readable(pidfd)
            return
        WATCHDOG.check(now)


async def _look_again(pid: int) -> None:
    """Wait until a process has ended, or for a moment if there is no pidfd."""
    try:
        pidfd = os.pidfd_open(pid)
    except (AttributeError, OSError):
        await anyio.sleep(_POLL)
        return
    try:
        await anyio.wait_readable(pidfd)
    finally:
        os.close(pidfd)


def _status_of(pid: int) -> int | None:
    """Return the exit status of a child without reaping it; None if it runs."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    if ended is None:
        return None
    well = ended.si_code == os.CLD_EXITED
    return ended.si_status if well else -ended.si_status


def clock() -> Callable[[], float]:
    """Return the clock behind :func:`anyio.current_time` in this event loop."""
    return asyncio.get_running_loop().time if _is_ours() else anyio.current_time


def event_loop() -> object | None:
    """Return an object that identifies the event loop; None outside of any."""
    try:
        return asyncio.get_running_loop()  # takes a sixth of the time
    except RuntimeError:
        pass
    try:
        return current_token()
    except anyio.NoEventLoopError:
        return None


class Puller:
    """Calls a reader as soon as a descriptor is readable, without waking a task."""

    def __init__(self) -> None:
        self._stopped: asyncio.Future[None] | None = None

    async def run(self, fd: int, take: Callable[[], bool]) -> None:
        """
        Wait until a descriptor can be read, or :meth:`stop`.

        On asyncio ``take`` is called instead, each time there is something to read,
        until it returns False; errors that it raises are raised here.
        """
        if not _is_ours():
            with suppress(anyio.ClosedResourceError):
                await anyio.wait_readable(fd)
            return
        loop, failed = asyncio.get_running_loop(), list[Exception]()
        self._stopped = stopped = loop.create_future()

        def ready() -> None:
            try:
                if take():
                    return
            except Exception as error:
                failed.append(error)
            loop.remove_reader(fd)
            if not stopped.done():
                stopped.set_result(None)

        context = copy_context()
        context.run(_say_asyncio)
        context.run(loop.add_reader, fd, ready)
        try:
            await stopped
        finally:
            self._stopped = None
            loop.remove_reader(fd)
            if failed:
                raise failed[0]

    def stop(self) -> None:
        """Wake a task on asyncio; ``anyio.notify_closing`` wakes those elsewhere."""
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_result(None)


class Signal:
    """An event for one waiting task, which resets itself after each wait."""

    def __init__(self) -> None:
        self._is_set = False
        self._future: asyncio.Future[None] | None = None
        self._event: anyio.Event | None = None

    def set(self) -> None:
        """Wake the waiting task, or let the next wait return at once."""
        self._is_set = True
        if self._future is not None and not self._future.done():
            self._future.set_result(None)
        elif self._event is not None:
            self._event.set()

    async def wait(self) -> None:
        """Wait until it is set, or was set since the last wait."""
        if not self._is_set:
            if _is_ours():
                self._future = asyncio.get_running_loop().create_future()
                await self._future
            else:
                self._event = anyio.Event()
                await self._event.wait()
        self._is_set = False


def _is_ours() -> bool:
    # Trio may run as a guest of asyncio: then that loop runs, but none of its tasks.
    try:
        return asyncio.current_task() is not None
    except RuntimeError:
        return False


def _say_asyncio() -> None:
    """Identify the loop for anyio, which asks the task: a callback has none."""
    with suppress(ImportError):
        from sniffio import current_async_library_cvar

        current_async_library_cvar.set("asyncio")
