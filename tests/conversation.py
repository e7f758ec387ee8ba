"""
A worker process, and the bytes exchanged with it.

This uses raw descriptors and a deadline, and nothing of the code under test. Expected
bytes are waited for; no test sleeps or looks at a clock.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Self

import pytest

from tests.patience import HANG

__all__ = ("Conversation",)


class Conversation:
    """
    A running worker.

    Its environment is ``env`` and nothing else: no ``PYTHONUNBUFFERED`` of ours
    hides that a worker forgets to flush.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=env,
            bufsize=0,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin = self.process.stdin
        self._stdout = self.process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        self._unread = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._stdin.close()
        self._stdout.close()
        self._stderr.close()

    @property
    def stderr(self) -> str:
        """What the worker has written to stderr so far."""
        file = self._stderr.fileno()
        # A seek would move the worker's position: it writes to the same open file.
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")

    def write(self, data: bytes) -> None:
        """Write all of ``data``; what the worker writes meanwhile is kept."""
        rest = memoryview(data)
        while rest:
            if self._stdin.fileno() in self._wait("read", writing=True):
                rest = rest[os.write(self._stdin.fileno(), rest) :]

    def write_blindly(self, data: bytes) -> None:
        """Write a little, without reading what the worker writes."""
        assert os.write(self._stdin.fileno(), data) == len(data)

    def expect(self, data: bytes) -> None:
        """Wait for ``data``, and fail if anything else arrives, or more."""
        while len(self._unread) < len(data):
            self._wait(f"write {data[:80]!r}")
        got, self._unread = bytes(self._unread), bytearray()
        assert got == data

    def ask(self, data: bytes, answer: bytes) -> None:
        """Write ``data`` and expect ``answer``."""
        self.write(data)
        self.expect(answer)

    def answer_to(self, data: bytes, *, until: bytes, times: int = 1) -> bytes:
        """
        Write ``data``; return everything up to the last ``until`` of ``times``.

        Fails if more comes with it: a worker that writes anything before it is asked is
        out of step.
        """
        self.write(data)
        while self._unread.count(until) < times:
            self._wait(f"write {until!r} ({times} times)")
        answer, self._unread = bytes(self._unread), bytearray()
        assert answer.endswith(until)
        return answer

    def discard(self, count: int) -> None:
        """Read ``count`` bytes and forget them."""
        while count > 0:
            self._wait("write")
            count -= len(self._unread)
            self._unread.clear()

    def wait_for_stderr(self, text: str) -> None:
        """Wait until the worker has written ``text`` to stderr."""
        deadline = time.monotonic() + HANG
        while text not in self.stderr:
            if time.monotonic() > deadline:
                pytest.fail(f"worker did not complain of {text!r}; {self._story()}")
            os.sched_yield()

    def finish(self) -> tuple[bytes, int]:
        """Close the worker's input; return the rest of its output and its status."""
        self._stdin.close()
        return self.read_to_end()

    def read_to_end(self) -> tuple[bytes, int]:
        """Return the rest of the worker's output and its exit status."""
        while not self._stdout.closed:
            self._wait("close its stdout", ending=True)
        return bytes(self._unread), self.wait()

    def stop_reading(self) -> None:
        """Close the worker's output, as a supervisor that is gone."""
        self._stdout.close()

    def interrupt(self) -> None:
        """Send the signal of Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def wait(self) -> int:
        """Return the exit status of the worker, which is about to exit."""
        try:
            return self.process.wait(HANG)
        except subprocess.TimeoutExpired:
            pytest.fail(f"worker did not exit; {self._story()}")

    def _wait(
        self, missing: str, *, writing: bool = False, ending: bool = False
    ) -> set[int]:
        poll = select.poll()
        poll.register(self._stdout, select.POLLIN)
        if writing:
            poll.register(self._stdin, select.POLLOUT)
        ready = {descriptor for descriptor, _ in poll.poll(HANG * 1000)}
        if not ready:
            pytest.fail(f"worker did not {missing}; {self._story()}")
        if self._stdout.fileno() in ready:
            chunk = os.read(self._stdout.fileno(), 1 << 20)
            self._unread += chunk
            if not chunk and not ending:
                pytest.fail(f"worker closed its stdout; {self._story()}")
            if not chunk:
                self._stdout.close()
        return ready

    def _story(self) -> str:
        return f"unread: {bytes(self._unread[:200])!r}, stderr: {self.stderr}"
