"""
A child process and its pipes, as raw non-blocking descriptors.

Reading and writing are tried first and waited for only when the pipe says so:
that is faster than the streams of either event loop, and needs no thread.
Nothing here decides anything; see ``etlstage.supervisor``.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Final

import anyio

from etlstage.transport.descent import descendants, heirs, session_members
from etlstage.transport.launcher import Launcher, Terms
from etlstage.transport.watchdog import VARIABLE, WATCHDOG

__all__ = ("Process", "describe_status")

_PIPE_SIZE: Final = 1024 * 1024  # what Linux allows without privileges
_POLL: Final = 0.02  # seconds, where the kernel has no pidfd
PROCESS_VARIABLE: Final = "ETLSTAGE_PROCESS"
"""Marks a worker, and all that inherits its environment, as this one's."""
STATUS_VARIABLE: Final = "ETLSTAGE_STATUS"
"""Names a file: whatever a worker writes there says that it is ready, and alive."""
_numbers: Final = count(1)
_F_SETPIPE_SZ: Final = getattr(fcntl, "F_SETPIPE_SZ", None)


class Process:
    """
    A running program, leader of its own session and process group.

    It dies, with its group, when this process does, in whatever way. It also dies
    with the *thread* that has started it: start it from one that lives as long.

    Args:
        command: Program, looked for on the PATH of ``env``, and arguments.
        env: Its environment; what marks it as ours is added.
        cwd: Its working directory.
        stdin: Whether it is given any.
        status: Whether it gets one more pipe, by the name of ``ETLSTAGE_STATUS``.
        terms: Limits and identity.

    Raises:
        OSError: If the program can't be started; as :class:`subprocess.Popen`.
        TermsRefused: If it is not allowed to be started on these terms.

    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None = None,
        stdin: bool = True,
        status: bool = False,
        terms: Terms | None = None,
    ) -> None:
        self._pidfd: int | None = None
        self._status: int | None = None
        WATCHDOG.expect()
        try:
            self._start(command, dict(env), cwd, stdin, status, terms or Terms())
        except BaseException:
            WATCHDOG.give_up()
            raise
        self.pid = self._popen.pid
        WATCHDOG.register(self.pid)
        for descriptor in self._pipes():
            os.set_blocking(descriptor, False)
            if descriptor != self._status:
                _enlarge(descriptor)
        with suppress(AttributeError, OSError):
            self._pidfd = os.pidfd_open(self.pid)

    def _start(
        self,
        command: Sequence[str],
        env: dict[str, str],
        cwd: Path | None,
        stdin: bool,
        status: bool,
        terms: Terms,
    ) -> None:
        _keep_freed_memory()
        env[VARIABLE] = WATCHDOG.mark
        env[PROCESS_VARIABLE] = f"{WATCHDOG.mark}.{next(_numbers)}"
        self._mark = f"{PROCESS_VARIABLE}={env[PROCESS_VARIABLE]}".encode()
        with ExitStack() as stack:
            launcher = Launcher(command, env=env, cwd=cwd, terms=terms)
            stack.callback(launcher.close)
            theirs = []
            if status:
                self._status, writing = os.pipe()
                stack.callback(os.close, writing)
                theirs = [writing]
                env[STATUS_VARIABLE] = f"/dev/fd/{writing}"
                _give(writing, terms)
            try:
                self._popen = subprocess.Popen(
                    launcher.words,
                    stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    env=env,
                    cwd=cwd,
                    start_new_session=True,
                    pass_fds=(*launcher.descriptors, *theirs),
                    umask=-1 if terms.umask is None else terms.umask,
                )
                for descriptor in self._pipes():
                    _give(descriptor, terms)
                launcher.check()
            except BaseException:
                self._abandon()
                raise

    def _abandon(self) -> None:
        """Let nothing be left of what did not start."""
        if hasattr(self, "_popen"):
            self._popen.kill()
            self._popen.wait()
            for pipe in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
                if pipe is not None:
                    pipe.close()
        if self._status is not None:
            os.close(self._status)
            self._status = None

    def _pipes(self) -> list[int]:
        pipes = (self._popen.stdin, self._popen.stdout, self._popen.stderr)
        opened = [pipe.fileno() for pipe in pipes if pipe is not None]
        return opened if self._status is None else [*opened, self._status]

    def __repr__(self) -> str:
        fate = "running" if self.status is None else describe_status(self.status)
        return f"<Process pid={self.pid} {fate}>"

    @property
    def has_status(self) -> bool:
        """Whether it has a pipe on which to say that it is ready, and alive."""
        return self._status is not None

    @property
    def status(self) -> int | None:
        """Exit status once reaped, negative for a signal, else None."""
        return self._popen.returncode

    def read_stdout(self, size: int) -> bytes | None:
        """Return what is there, ``b""`` at the end, None when reading would block."""
        return _read(self._popen.stdout, size)

    def read_stderr(self, size: int) -> bytes | None:
        """Return what is there, ``b""`` at the end, None when reading would block."""
        return _read(self._popen.stderr, size)

    def read_status(self, size: int) -> bytes | None:
        """Return what is there, ``b""`` at the end, None when reading would block."""
        if self._status is None:
            return b""
        try:
            return os.read(self._status, size)
        except BlockingIOError:
            return None

    def write(self, data: memoryview | bytes) -> int:
        """
        Write as much as the pipe takes and return how many bytes that were.

        Raises:
            BrokenPipeError: If the worker, or we, closed its stdin.

        """
        stdin = self._popen.stdin
        if stdin is None or stdin.closed:
            raise BrokenPipeError
        try:
            return os.write(stdin.fileno(), data)
        except BlockingIOError:
            return 0

    def unread(self) -> int:
        """Return how many bytes are in its stdin, or 0 when that is closed or unknown."""
        stdin = self._popen.stdin
        if stdin is None or stdin.closed:
            return 0
        try:
            answer = fcntl.ioctl(stdin.fileno(), termios.FIONREAD, b"\0" * 4)
        except OSError:
            return 0
        return int.from_bytes(answer, sys.byteorder)

    async def stdout_readable(self) -> None:
        """Wait until reading stdout would not block, or :meth:`stop_waiting`."""
        assert self._popen.stdout is not None
        with suppress(anyio.ClosedResourceError):
            await anyio.wait_readable(self._popen.stdout.fileno())

    async def stderr_readable(self) -> None:
        """Wait until reading stderr would not block."""
        assert self._popen.stderr is not None
        await anyio.wait_readable(self._popen.stderr.fileno())

    async def status_readable(self) -> None:
        """Wait until reading the status would not block, or :meth:`stop_waiting`."""
        if self._status is not None:
            with suppress(anyio.ClosedResourceError):
                await anyio.wait_readable(self._status)

    async def stdin_writable(self) -> None:
        """Wait until stdin takes more, is broken, or is closed by us."""
        stdin = self._popen.stdin
        if stdin is not None and not stdin.closed:
            with suppress(anyio.ClosedResourceError):
                await anyio.wait_writable(stdin.fileno())

    def stop_waiting(self) -> None:
        """
        Wake who waits for stdout or the status.

        The process is gone, and its pipes may stay open.
        """
        assert self._popen.stdout is not None
        anyio.notify_closing(self._popen.stdout.fileno())
        if self._status is not None:
            anyio.notify_closing(self._status)

    def close_stdin(self) -> None:
        """Close the worker's stdin; safe to call twice."""
        if self._popen.stdin is not None:
            if not self._popen.stdin.closed:
                anyio.notify_closing(self._popen.stdin.fileno())
            self._popen.stdin.close()

    def close(self) -> None:
        """Close all that is open here; call it when nobody waits any more."""
        self.close_stdin()
        for pipe in (self._popen.stdout, self._popen.stderr):
            assert pipe is not None
            pipe.close()
        for name in ("_pidfd", "_status"):
            if (descriptor := getattr(self, name)) is not None:
                os.close(descriptor)
                setattr(self, name, None)

    def signal_group(self, number: signal.Signals) -> None:
        """
        Send a signal to the worker and to whatever it started in its group.

        SIGKILL also reaches what it started elsewhere, where that can be told.
        """
        if self._popen.returncode is not None:
            return
        others = []
        if number is signal.SIGKILL:
            # To be looked for first: the dead have no children.
            others = [*descendants(self.pid), *session_members(self.pid)]
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
        for pid in others:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def kill(self) -> None:
        """Kill it at once, with its group, and reap it; safe to call twice."""
        self.signal_group(signal.SIGKILL)
        WATCHDOG.unregister(self.pid)
        self._popen.wait()

    def kill_heirs(self) -> None:
        """Kill what it has left behind in other sessions, if it still bears our mark."""
        for pid in heirs(self._mark):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    async def wait(self) -> int:
        """Return the exit status; what is left of the process group is killed."""
        if self._pidfd is not None:
            await anyio.wait_readable(self._pidfd)
        else:
            while not _exited(self.pid):  # noqa: ASYNC110 - there is nothing to wait for
                await anyio.sleep(_POLL)
        # Until it is reaped, its pid, and so the group's id, can't be another's.
        self.kill()
        return self._popen.returncode


@cache
def _keep_freed_memory() -> None:
    """
    Have glibc keep up to twice as much free memory as the largest block freed so far.

    By itself it returns the end of its heap to the kernel when buffers for what a pipe
    holds are freed, and the next ones come from there, each page to be cleared.
    """
    bytes(16 * _PIPE_SIZE)


def describe_status(status: int) -> str:
    """Return what became of a process, as a part of a sentence."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def _read(pipe: object, size: int) -> bytes | None:
    assert pipe is not None
    try:
        return os.read(pipe.fileno(), size)  # type: ignore[attr-defined]
    except BlockingIOError:
        return None
    except ValueError:
        return b""  # we have closed it


def _give(fd: int, terms: Terms) -> None:
    # Else another user could not open it by name, such as /dev/stderr.
    if terms.user is not None:
        with suppress(OSError, OverflowError):
            os.fchown(fd, terms.user, -1)


def _enlarge(fd: int) -> None:
    # Refused when the user has too many large pipes already: then it stays small.
    if _F_SETPIPE_SZ is not None:
        with suppress(OSError):
            fcntl.fcntl(fd, _F_SETPIPE_SZ, _PIPE_SIZE)


def _exited(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
