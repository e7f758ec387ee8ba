"""
A child process and its three pipes, as raw non-blocking descriptors.

Reading and writing are tried first and waited for only when the pipe says so:
that is faster than the streams of either event loop, and needs no thread.
Nothing here decides anything; see ``etlstage.supervisor``.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import anyio

__all__ = ("Process", "describe_status")

_PIPE_SIZE: Final = 1024 * 1024  # what Linux allows without privileges
_POLL: Final = 0.02  # seconds, where the kernel has no pidfd
_F_SETPIPE_SZ: Final = getattr(fcntl, "F_SETPIPE_SZ", None)


class Process:
    """
    A running program, leader of its own session and process group.

    Raises:
        OSError: If the program can't be started; as :class:`subprocess.Popen`.

    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None = None,
        stdin: bool = True,
    ) -> None:
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
        )
        self.pid = self._popen.pid
        for pipe in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                _enlarge(pipe.fileno())
        try:
            self._pidfd: int | None = os.pidfd_open(self.pid)
        except (AttributeError, OSError):
            self._pidfd = None

    def __repr__(self) -> str:
        fate = "running" if self.status is None else describe_status(self.status)
        return f"<Process pid={self.pid} {fate}>"

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

    async def stdout_readable(self) -> None:
        """Wait until reading stdout would not block, or :meth:`stop_waiting`."""
        assert self._popen.stdout is not None
        with suppress(anyio.ClosedResourceError):
            await anyio.wait_readable(self._popen.stdout.fileno())

    async def stderr_readable(self) -> None:
        """Wait until reading stderr would not block."""
        assert self._popen.stderr is not None
        await anyio.wait_readable(self._popen.stderr.fileno())

    async def stdin_writable(self) -> None:
        """Wait until stdin takes more, is broken, or is closed by us."""
        stdin = self._popen.stdin
        if stdin is not None and not stdin.closed:
            with suppress(anyio.ClosedResourceError):
                await anyio.wait_writable(stdin.fileno())

    def stop_waiting(self) -> None:
        """Wake who waits for stdout: the process is gone, and the pipe may stay open."""
        assert self._popen.stdout is not None
        anyio.notify_closing(self._popen.stdout.fileno())

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
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the worker and to whatever it started in its group."""
        if self._popen.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    async def wait(self) -> int:
        """Return the exit status; what is left of the process group is killed."""
        if self._pidfd is not None:
            await anyio.wait_readable(self._pidfd)
        else:
            while not _exited(self.pid):  # noqa: ASYNC110 - there is nothing to wait for
                await anyio.sleep(_POLL)
        # Until it is reaped, its pid, and so the group's id, can't be another's.
        self.signal_group(signal.SIGKILL)
        return self._popen.wait()


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


def _enlarge(fd: int) -> None:
    # Refused when the user has too many large pipes already: then it stays small.
    if _F_SETPIPE_SZ is not None:
        with suppress(OSError):
            fcntl.fcntl(fd, _F_SETPIPE_SZ, _PIPE_SIZE)


def _exited(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
