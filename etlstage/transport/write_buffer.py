"""The direction to a worker: what its pipe took, and what waits for room in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import anyio

from etlstage.transport.base import Wire

__all__ = ("WriteBuffer",)


class WriteBuffer:
    """
    Writes to a wire without ever waiting, and keeps data for which it has no room.

    Attributes:
        unsent: Data to be written, in order; an empty chunk is the end of input.
        written: Number of bytes that the wire took.

    """

    def __init__(self, wire: Wire) -> None:
        self.unsent: deque[memoryview] = deque()
        self.written: int = 0
        self._wire = wire
        self._full = anyio.Event()
        self._left = 0  # bytes that the worker had not read when its process was gone
        self._unwritable = 0  # bytes for which the worker had closed its end

    @property
    def end(self) -> int:
        """The value of ``written`` once the wire has all that was queued."""
        return self.written + sum(map(len, self.unsent))

    def queue(self, chunks: Iterable[bytes]) -> None:
        """Queue chunks for :meth:`flush`, after what is unsent."""
        self.unsent.extend(map(memoryview, chunks))

    def flush(self) -> bool:
        """
        Write what there is room for; return whether that was all.

        Raises:
            BrokenPipeError: If the worker reads no more. Unsent data is dropped.

        """
        unsent = self.unsent
        try:
            while unsent:
                chunk = unsent[0]
                if not chunk:
                    self._wire.close_write()
                    unsent.popleft()
                    continue
                written = self._wire.write(chunk)
                self.written += written
                if written < len(chunk):
                    unsent[0] = chunk[written:]
                    self._full.set()
                    return False
                unsent.popleft()
        except BrokenPipeError:
            self._unwritable += sum(map(len, unsent))
            unsent.clear()
            raise
        return True

    async def room(self) -> None:
        """Wait until a write did not fit, now or later, and there is room again."""
        await self._full.wait()
        self._full = anyio.Event()
        await self._wire.writable()

    def exited(self) -> None:
        """Keep the number of unread bytes: the wire shows it only while it is open."""
        self._left = self._wire.unread()

    def unread(self) -> int:
        """Return how many bytes meant for the worker it has not read."""
        return max(self._left, self._wire.unread()) + self._unwritable
