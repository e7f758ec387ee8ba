"""
One worker and the bytes that go to and fro.

The supervisor's side of the protocol with nothing clever in it: what was asked for
must come before a deadline, and nobody sleeps.
"""

from __future__ import annotations

import os
import select
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

import pytest

__all__ = ("Conversation",)

PATIENCE = 10.0


class Conversation:
    """
    A running worker.

    Its environment is ``env`` and nothing else: no ``PYTHONUNBUFFERED`` of ours
    hides that a worker forgets to flush.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=env,
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin = self._process.stdin
        self._stdout = self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        self._unread = b""
        self._ending = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._stdin.close()
        self._stdout.close()
        self._stderr.close()

    @property
    def stderr(self) -> str:
        """What the worker has written to stderr so far."""
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace")

    def write(self, data: bytes) -> None:
        """Write all of ``data``; what the worker writes meanwhile is kept."""
        deadline = time.monotonic() + PATIENCE
        rest = memoryview(data)
        while rest:
            if self._wait(deadline, to_write=True, missing=f"read {len(rest)} bytes"):
                rest = rest[os.write(self._stdin.fileno(), rest) :]

    def ask(self, data: bytes, *, until: bytes, times: int = 1) -> bytes:
        """
        Write ``data`` and return all that comes up to the ``until`` that ends it.

        Fails if more comes with it: a worker that says anything before it is asked
        is out of step.
        """
        self.write(data)
        deadline = time.monotonic() + PATIENCE
        while self._unread.count(until) < times:
            self._wait(deadline, missing=f"write {until!r} ({times} times)")
        answer, self._unread = self._unread, b""
        assert answer.endswith(until)
        return answer

    def finish(self) -> tuple[bytes, int]:
        """Close the worker's input; return the rest of its output and its status."""
        self._stdin.close()
        return self.read_to_end()

    def read_to_end(self) -> tuple[bytes, int]:
        """Return the rest of the worker's output and its exit status."""
        deadline = time.monotonic() + PATIENCE
        self._ending = True
        while not self._stdout.closed:
            self._wait(deadline, missing="close its stdout")
        status = self._process.wait(PATIENCE)
        return self._unread, status

    def _wait(self, deadline: float, *, missing: str, to_write: bool = False) -> bool:
        """Take output if there is some; return whether the worker takes input."""
        poll = select.poll()
        poll.register(self._stdout, select.POLLIN)
        if to_write:
            poll.register(self._stdin, select.POLLOUT)
        ready = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
        if not ready:
            pytest.fail(f"worker did not {missing}; {self._story()}")
        if self._stdout.fileno() in ready:
            chunk = self._stdout.read(1 << 20)
            self._unread += chunk
            if not chunk and not self._ending:
                pytest.fail(f"worker closed its stdout; {self._story()}")
            if not chunk:
                self._stdout.close()
                return False
        return to_write and self._stdin.fileno() in ready

    def _story(self) -> str:
        return f"unread: {self._unread[:200]!r}, stderr: {self.stderr}"
