"""A bare driver, which only moves bytes between a session and a real child."""

from __future__ import annotations

import os
import select
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

from etlstage.protocol.base import SEND_EOF
from etlstage.protocol.events import (
    CommitAnswered,
    CommitAsked,
    Ended,
    Event,
    Failed,
    Farewell,
    Noise,
)
from etlstage.protocol.kcl.session import KclSession, State
from tests.patience import HANG

__all__ = ("Driver", "driven")


class Driver:
    """
    One real child, and what it has done.

    Attributes:
        asked: Positions that the child asked to store.
        ended: Number of records that have ended.
        noise: Lines that are not part of the protocol.
        sent: Everything that was written to the child.
        errors: Answers to its next checkpoints, first to last; afterwards None.

    """

    def __init__(self, session: KclSession, child: subprocess.Popen[bytes]) -> None:
        self.session = session
        self.child = child
        self.asked: list[object] = []
        self.ended = 0
        self.noise: list[bytes] = []
        self.sent = b""
        self.errors: list[str | None] = []
        self.failed: Failed | None = None
        self.closed: str = ""  # what was expected when the child closed stdout
        self._unsent = b""

    def until(self, reached: Callable[[], bool]) -> None:
        """Move bytes until a condition holds, or the session has failed or closed."""
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        inward, outward = self.child.stdin, self.child.stdout
        due = monotonic() + HANG
        while True:
            self._look()
            self._write(inward.fileno() if not inward.closed else -1)
            if reached() or self.failed or self.closed:
                return
            assert monotonic() < due, f"{self.session} waits for its child"
            writes = [inward] if self._unsent else []
            ready, _, _ = select.select([outward], writes, [], 0.1)
            if ready:
                data = os.read(outward.fileno(), 1 << 16)
                if data:
                    self.session.receive_data(data, monotonic())
                else:
                    self.session.receive_eof(monotonic())

    def send(self, event: Event) -> None:
        """Send an event, and wait until the action that it begins is answered."""
        self.session.send(event, monotonic())
        self.until(lambda: self.session.state is State.READY)

    def part(self, event: Event) -> int:
        """Send a farewell, wait until the child has exited; return its status."""
        self.session.send(event, monotonic())
        self.until(lambda: self.session.state is State.ENDED)
        self._drain()
        return self.child.wait(HANG)

    def _drain(self) -> None:
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.close()
        self.session.receive_data(self.child.stdout.read(), monotonic())
        self._look()

    def _look(self) -> None:
        for event in self.session.events_received():
            match event:
                case CommitAsked(_, position):
                    self.asked.append(position)
                    error = self.errors.pop(0) if self.errors else None
                    self.session.send(CommitAnswered(position, error), monotonic())
                case Ended():
                    self.ended += len(event.groups)
                case Noise(data):
                    self.noise += data.splitlines()
                case Failed():
                    self.failed = event
                case Farewell(reason=reason):
                    self.closed = reason
                case _:
                    pass

    def _write(self, descriptor: int) -> None:
        for data in self.session.data_to_send():
            if data == SEND_EOF:
                assert not self._unsent
                if self.child.stdin:
                    self.child.stdin.close()
                return
            self._unsent += data
            self.sent += data
        if self._unsent and descriptor >= 0:
            self._unsent = self._unsent[os.write(descriptor, self._unsent) :]


@contextmanager
def driven(
    session: KclSession, command: Sequence[str], **variables: str
) -> Iterator[Driver]:
    """Start a child, and wait until it has initialized; kill it at the end."""
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C", **variables},
    ) as child:
        assert child.stdin is not None
        os.set_blocking(child.stdin.fileno(), False)
        driver = Driver(session, child)
        try:
            driver.until(lambda: session.state is State.READY)
            yield driver
        finally:
            child.kill()
