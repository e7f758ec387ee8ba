"""
What comes out of a worker's stdout.

It is read as fast as it comes, but for two things: other tasks get their turns, and
reading waits while outputs lie unread that nobody has room for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import anyio
import anyio.lowlevel

from etlstage.supervisor.exchange.dispatch import Dispatcher
from etlstage.transport import Wire
from etlstage.transport.base import Pulled

if TYPE_CHECKING:
    from etlstage.supervisor.worker import WorkerProcess

__all__ = ("Reader",)

_CHUNK: Final = 65536  # bytes a read; once that many came:
# Half of what the pipe holds: memory for all of it comes from the kernel, and goes
# back there, with every read, and its pages are cleared each time.
_BIG_CHUNK: Final = 512 * 1024
_MOST: Final = 1024 * 1024  # bytes that a pipe holds
_TURN: Final = 16  # reads in a row before other tasks get a turn


class Reader:
    """
    Reads from one worker.

    Args:
        wire: The worker's.
        host: The worker: of one that has failed bytes are counted, not understood.
        dispatch: Says when reading has to wait for a consumer.
        received: Called with what was read.
        waits: Called when reading begins to wait for the consumer, and when it ends.

    """

    def __init__(
        self,
        wire: Wire,
        host: WorkerProcess,
        dispatch: Dispatcher,
        received: Callable[[bytes], None],
        waits: Callable[[bool], None],
    ) -> None:
        self._wire = wire
        self._host = host
        self._dispatch = dispatch
        self._received = received
        self._waits = waits
        self._going_on: anyio.Event | None = None
        self.paused: bool = False
        """Reading waits for the consumer."""
        self.late: int = 0
        """Bytes that the worker wrote after it had failed."""

    async def run(self) -> None:
        """Read to the end of what the worker writes."""
        wire, chunk, turn = self._wire, _CHUNK, 0
        read, pull = wire.read, wire.pull if isinstance(wire, Pulled) else None
        while True:
            if self._dispatch.stalled:
                await self._wait()
            data = read(chunk)
            if data is None:
                turn = 0
                await (wire.readable() if pull is None else pull(self._pull))
                continue
            if not data:
                return
            chunk = _BIG_CHUNK if len(data) >= _CHUNK else _CHUNK
            self._take(data)
            turn += 1
            if turn == _TURN:
                turn = 0
                await anyio.lowlevel.checkpoint()

    def catch_up(self) -> None:
        """Read what a dead process has written, without waiting for more."""
        left = _MOST
        while left > 0 and (data := self._wire.read(left)):
            left -= len(data)
            self._take(data)

    def read_dry(self) -> None:
        """Read what the worker has written, unless it has failed."""
        # The end, when it comes, is left to who reads.
        while not self._host.failed and (data := self._wire.read(_CHUNK)):
            self._received(data)

    def follow(self) -> None:
        """Go on if the consumer has made room."""
        if not self._dispatch.stalled:
            self.go_on()

    def go_on(self) -> None:
        """Wait for the consumer no longer."""
        if self._going_on is not None:
            self._going_on.set()

    def _pull(self) -> bool:
        """Take what has come; return False for all that :meth:`run` has to do."""
        for _ in range(_TURN):
            if self._dispatch.stalled:
                return False
            data = self._wire.read(_CHUNK)
            if data is None:
                return True
            if not data:
                return False
            if self._host.failed:
                self.late += len(data)
            else:
                self._received(data)
            if len(data) == _CHUNK:
                return False
        return True

    def _take(self, data: bytes) -> None:
        if self._host.failed:
            self.late += len(data)
        else:
            self._received(data)

    async def _wait(self) -> None:
        """Read no more while outputs lie unread; all that is left once it exited."""
        while self._dispatch.stalled and not self._host.exited:
            self._waits(True)
            self._going_on, self.paused = anyio.Event(), True
            await self._going_on.wait()
            self._going_on, self.paused = None, False
            self._waits(False)
