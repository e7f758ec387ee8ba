"""
One caller's input, read ahead as far as there is room.

It runs as a task of the supervisor, so that a slow input and a slow consumer do not
wait for each other.
"""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
)
from contextlib import asynccontextmanager
from itertools import islice
from typing import TypeVar

import anyio
import anyio.lowlevel

from etlstage.messages import Position, Run
from etlstage.supervisor.exchange.keyed import Lanes
from etlstage.supervisor.exchange.submission import Submission

__all__ = ("Intake", "Signal", "in_runs")

_RUN = 1024  # messages taken at once from an iterable

_T = TypeVar("_T")


class Signal:
    """An event that is there again once it was waited for."""

    def __init__(self) -> None:
        self._is_set = False
        self._event: anyio.Event | None = None

    def set(self) -> None:
        """Wake who waits, or the next who will."""
        self._is_set = True
        if self._event is not None:
            self._event.set()

    async def wait(self) -> None:
        """Wait until set since the last time."""
        if not self._is_set:
            self._event = anyio.Event()
            await self._event.wait()
            self._event = None
        self._is_set = False


class Intake:
    """
    Feeds one submission.

    Args:
        submission: What to feed.
        items: The caller's input: runs of messages, and positions among them.
        has_room: Whether the submission may take a run.
        fed: Called when there is something for the workers.
        closed: The error of a stream whose supervisor is closed first.

    """

    def __init__(
        self,
        submission: Submission | Lanes,
        items: Iterable[Run | Position] | AsyncIterable[Run | Position],
        *,
        has_room: Callable[[Submission | Lanes], bool],
        fed: Callable[[], None],
        closed: Exception,
    ) -> None:
        self.room = Signal()
        """Set it when there may be room again."""
        self.scope = anyio.CancelScope()
        self.ended = anyio.Event()
        self.error: Exception | None = closed
        """What ended the input, or None when it ended by itself."""
        self._submission = submission
        self._items = items
        self._has_room = has_room
        self._fed = fed

    async def run(self) -> None:
        """Feed until the input ends, or the stream or the supervisor is closed."""
        try:
            with self.scope:
                await self._read()
        finally:
            self._submission.close()
            self.ended.set()

    async def _read(self) -> None:
        await anyio.lowlevel.checkpoint_if_cancelled()
        try:
            if isinstance(self._items, AsyncIterable):
                async with _iterating(self._items) as items:
                    async for item in items:
                        await self._feed(item)
            else:
                for item in self._items:
                    await self._feed(item)
        except Exception as error:
            self.error = error
        else:
            self.error = None
        self._submission.close()
        self._fed()

    async def _feed(self, item: Run | Position) -> None:
        if isinstance(item, Position):
            self._submission.mark(item)
            return
        while not self._has_room(self._submission):
            await self.room.wait()
        self._submission.feed(item, anyio.current_time())
        self._fed()


async def in_runs(
    messages: Iterable[bytes] | AsyncIterable[bytes],
) -> AsyncIterator[Run]:
    """Yield the messages in runs, without waiting for one to be full."""
    if isinstance(messages, AsyncIterable):
        async with _iterating(messages) as rest:
            async for message in rest:
                yield [message]
        return
    taken = iter(messages)
    while True:
        run: list[bytes] = []
        try:
            run.extend(islice(taken, _RUN))
        except Exception:
            yield run  # what came before the error
            raise
        if not run:
            return
        yield run
        await anyio.lowlevel.checkpoint()


@asynccontextmanager
async def _iterating(items: AsyncIterable[_T]) -> AsyncIterator[AsyncIterator[_T]]:
    """Close a generator that is not read to its end: nobody else does."""
    iterator = aiter(items)
    try:
        yield iterator
    finally:
        if isinstance(iterator, AsyncGenerator):
            await iterator.aclose()
