"""
One caller's input, read ahead as far as there is room.

It runs as a task of the supervisor, so that a slow input and a slow consumer do not
wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import asynccontextmanager
from itertools import islice
from typing import Final, TypeVar

import anyio
import anyio.lowlevel

from etlstage.messages import Position, Run, refuse_one, sound
from etlstage.supervisor.exchange.keyed import Lanes
from etlstage.supervisor.exchange.submission import Submission

__all__ = ("Intake", "Signal", "as_run", "in_runs")

_RUN: Final = 1024  # messages taken at once from an iterable
_RUN_BYTES: Final = 1024 * 1024  # which is about as many bytes, unless one has more

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
        self.room: Signal = Signal()
        """Set it when there may be room again."""
        self.scope: anyio.CancelScope = anyio.CancelScope()
        self.ended: anyio.Event = anyio.Event()
        self.error: BaseException | None = closed
        """What ended the input, or None when it ended by itself."""
        self._submission = submission
        self._items = items
        self._has_room = has_room
        self._fed = fed
        self._count = 0  # messages fed

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
        except anyio.get_cancelled_exc_class() as error:
            if anyio.current_effective_deadline() == -math.inf:
                raise  # it is we who are cancelled
            self.error = error  # of a task that the input waits for, for example
        else:
            self.error = None
        self._submission.close()
        self._fed()

    async def _feed(self, item: Run | Position) -> None:
        if isinstance(item, Position):
            self._submission.mark(item)
            self._fed()  # a batch in front of it is filled no more
            return
        run, error = sound(item, self._count)
        while not self._has_room(self._submission):
            await self.room.wait()
        self._submission.feed(run, anyio.current_time())
        self._count += len(run)
        self._fed()
        if error is not None:
            raise error


async def in_runs(
    messages: Iterable[bytes] | AsyncIterable[bytes],
) -> AsyncIterator[Run]:
    """Yield the messages in runs, without waiting for one to be full."""
    if isinstance(messages, AsyncIterable):
        async with _iterating(messages) as rest:
            async for message in rest:
                yield [message]
        return
    refuse_one(messages)
    for run in _pieces(messages):
        yield run
        await anyio.lowlevel.checkpoint()


async def as_run(messages: Iterable[bytes]) -> Run:
    """Return all messages as one run; others have their turns in between."""
    refuse_one(messages)
    if isinstance(messages, Sequence):
        return messages
    run: list[bytes] = []
    for piece in _pieces(messages):
        run += piece
        await anyio.lowlevel.checkpoint()
    return run


def _pieces(messages: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yield bounded runs of the messages; what comes before an error, too."""
    taken = iter(messages)
    count = 1
    while True:
        run: list[bytes] = []
        try:
            run.extend(islice(taken, count))
        except Exception:
            yield run
            raise
        if not run:
            return
        yield run
        count = _next_count(run, count)


def _next_count(run: list[bytes], count: int) -> int:
    """Return how many messages to take next: the first one may be big, or none."""
    some = run[::8]
    try:
        size = sum(map(len, some)) // len(some)
    except TypeError:
        return count  # who takes the run says what is wrong with it
    return max(1, min(2 * count, _RUN, _RUN_BYTES // max(1, size)))


@asynccontextmanager
async def _iterating(items: AsyncIterable[_T]) -> AsyncIterator[AsyncIterator[_T]]:
    """Close a generator that is not read to its end: nobody else does."""
    iterator = aiter(items)
    try:
        yield iterator
    finally:
        if isinstance(iterator, AsyncGenerator):
            await iterator.aclose()
