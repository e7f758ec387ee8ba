"""
A wire in memory: two ends in one process, which behave as pipes do.

Each direction has room for a limited number of bytes; a write takes only what fits.
Writing to a closed direction raises :class:`BrokenPipeError`; reading from one returns
what is left, and then ``b""``.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Final

import anyio

__all__ = ("MemoryPipe", "MemoryWire", "memory_wire")

_SIZE: Final = 65536  # bytes, as a pipe of Linux has


class MemoryPipe:
    """
    One direction: a buffer with an end to write to and one to read from.

    Args:
        size: Bytes that it has room for.

    """

    def __init__(self, size: int = _SIZE) -> None:
        if size < 1:
            raise ValueError(f"size must be 1 or more, got {size}")
        self._size = size
        self._data = bytearray()
        self.ended: bool = False
        """Whether the writing end is closed."""
        self._deserted = False  # the reading end is closed
        self._changed: anyio.Event | None = None  # set when waiting tasks are to wake

    def __len__(self) -> int:
        """Return how many bytes were written and not read."""
        return len(self._data)

    def read(self, size: int, /) -> bytes | None:
        if self._deserted:
            return b""
        if not self._data:
            return b"" if self.ended else None
        data = bytes(self._data[:size])
        del self._data[:size]
        self._wake()
        return data

    async def readable(self) -> None:
        if not (self._data or self.ended or self._deserted):
            await self._wait()

    def write(self, data: memoryview | bytes, /) -> int:
        if self.ended or self._deserted:
            raise BrokenPipeError
        taken = min(len(data), self._size - len(self._data))
        if taken:
            self._data += data[:taken]
            self._wake()
        return taken

    async def writable(self) -> None:
        while len(self._data) >= self._size and not (self.ended or self._deserted):
            await self._wait()

    def end(self) -> None:
        """Close the writing end; what is there can still be read."""
        self.ended = True
        self._wake()

    def desert(self) -> None:
        """Close the reading end; what is there stays unread."""
        self._deserted = True
        self._wake()

    def stop_waiting(self) -> None:
        self._wake()

    def close(self) -> None:
        """Close both ends."""
        self.end()
        self.desert()

    async def _wait(self) -> None:
        if self._changed is None:
            self._changed = anyio.Event()
        await self._changed.wait()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None


class MemoryWire:
    """One of the two ends of a conversation; see :func:`memory_wire`."""

    def __init__(self, incoming: MemoryPipe, outgoing: MemoryPipe) -> None:
        self._outgoing = outgoing
        self.read: Callable[[int], bytes | None] = incoming.read
        self.readable: Callable[[], Coroutine[Any, Any, None]] = incoming.readable
        self.stop_waiting: Callable[[], None] = incoming.stop_waiting
        self.write: Callable[[bytes | memoryview], int] = outgoing.write
        self.writable: Callable[[], Coroutine[Any, Any, None]] = outgoing.writable
        self.close_write: Callable[[], None] = outgoing.end
        self.close_read: Callable[[], None] = incoming.desert

    def unread(self) -> int:
        """Return how many bytes the other end has not read, or 0 after closing."""
        return 0 if self._outgoing.ended else len(self._outgoing)

    def mismatch_hint(self) -> str:
        """Return an empty text: both ends are connected from the start."""
        return ""

    def close(self) -> None:
        self.close_read()
        self.close_write()


def memory_wire(size: int = _SIZE) -> tuple[MemoryWire, MemoryWire]:
    """Return two ends of a wire, with room for ``size`` bytes in each direction."""
    one, other = MemoryPipe(size), MemoryPipe(size)
    return MemoryWire(one, other), MemoryWire(other, one)
