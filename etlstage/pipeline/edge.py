"""
What connects two stages: a queue in memory, bounded in messages and bytes.

A full edge makes its producer wait. That is all of back-pressure: the wait goes
from stage to stage, through the pipes of the workers, up to the extraction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from typing import TypeAlias

import anyio

from etlstage.messages import Position, Run, size_of

__all__ = ("Edge", "Item")

Item: TypeAlias = Run | Position


class Edge:
    """
    A bounded queue of runs and positions, for one producer and one consumer.

    Args:
        max_messages: Messages held, at most; a longer run is let in alone.
        max_bytes: Bytes held, at most; likewise.

    """

    def __init__(
        self, *, max_messages: int = 65536, max_bytes: int = 16 * 1024 * 1024
    ) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._items: deque[tuple[Item, int]] = deque()
        self._closed = False
        self._changed = anyio.Event()
        self.messages = 0
        """Messages held."""
        self.bytes = 0
        """Bytes held."""

    @property
    def full(self) -> bool:
        """Whether the producer has to wait."""
        return self.messages >= self._max_messages or self.bytes >= self._max_bytes

    async def put(self, item: Item) -> None:
        """Append; wait while the edge is full."""
        while self.full:
            await self._change()
        count, size = 0, 0
        if not isinstance(item, Position):
            count, size = len(item), size_of(item)
        self._items.append((item, size))
        self.messages += count
        self.bytes += size
        self._changed.set()

    def close(self) -> None:
        """Promise that nothing more comes."""
        self._closed = True
        self._changed.set()

    async def get(self) -> Item | None:
        """Remove and return the oldest item; None at the end."""
        while not self._items:
            if self._closed:
                return None
            await self._change()
        item, size = self._items.popleft()
        if not isinstance(item, Position):
            self.messages -= len(item)
            self.bytes -= size
        self._changed.set()
        return item

    async def __aiter__(self) -> AsyncIterator[Item]:
        while (item := await self.get()) is not None:
            yield item

    async def _change(self) -> None:
        if self._changed.is_set():
            self._changed = anyio.Event()
        await self._changed.wait()
