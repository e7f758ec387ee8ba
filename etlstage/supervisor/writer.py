"""
What is on its way into a worker's stdin.

It is written at once as far as the pipe takes it; a task waits only while the pipe is
full.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import anyio

from etlstage.transport import Wire

__all__ = ("Writer",)


class Writer:
    """
    Writes to one worker.

    Args:
        wire: The worker's.
        broken: Called when its stdin is closed: what waited is dropped.

    """

    def __init__(self, wire: Wire, broken: Callable[[], None]) -> None:
        self._wire = wire
        self._broken = broken
        self.unsent: deque[memoryview] = deque()
        """What waits."""
        self._full = anyio.Event()
        self.written: int = 0
        """Bytes that the pipe took."""

    def add(self, chunks: Iterable[bytes | memoryview]) -> None:
        """Append bytes; :meth:`flush` writes them."""
        self.unsent.extend(map(memoryview, chunks))

    def flush(self) -> bool:
        """Write what the pipe takes; return whether that was all."""
        unsent = self.unsent
        try:
            while unsent:
                if not unsent[0]:  # SEND_EOF
                    self._wire.close_write()
                    unsent.popleft()
                    continue
                written = self._wire.write(unsent[0])
                self.written += written
                if written < len(unsent[0]):
                    unsent[0] = unsent[0][written:]
                    self._full.set()
                    return False
                unsent.popleft()
        except BrokenPipeError:
            unsent.clear()
            self._broken()
        return True

    async def run(self, flushed: Callable[[float], None]) -> None:
        """Write what did not fit; call ``flushed`` with the time when all of it did."""
        while True:
            await self._full.wait()
            self._full = anyio.Event()
            await self._wire.writable()
            if self.flush():
                flushed(anyio.current_time())
