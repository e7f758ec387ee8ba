"""
The bridge between Spark's thread and the supervisors of a task.

Spark passes an iterator to a task and expects one back, while supervisors run in an
event loop. The loop has a thread of its own, so that workers are watched even while
Spark neither passes rows nor requests any.

Spark ends a Python worker with SIGKILL, and then none of our code can run:
``etlstage.transport`` ensures that the processes which it had started end with it.
"""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
)
from contextlib import contextmanager, suppress
from functools import cache
from queue import SimpleQueue
from typing import Final, Generic, TypeVar

from anyio import BrokenResourceError, create_memory_object_stream, sleep
from anyio.from_thread import BlockingPortal, start_blocking_portal
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from pyspark import TaskContext

from etlstage.messages import Run

__all__ = ("Bridge", "bridged")

T = TypeVar("T")

_AHEAD: Final = 4  # runs passed in and not yet read
_UNREAD: Final = 64 * 1024 * 1024  # bytes that wait for Spark
_ITEM: Final = 512  # bytes of overhead of each item


class _Taken:
    """Reports that a run was read."""


_TAKEN: Final = _Taken()


class Bridge(Generic[T]):
    """
    Passes runs of messages into an event loop, and results out of it.

    Spark's thread calls :meth:`cross`; the code in the loop reads :meth:`runs` and
    calls :meth:`put`.
    """

    def __init__(self, portal: BlockingPortal) -> None:
        send, receive = create_memory_object_stream[Run](math.inf)
        self._inbox: MemoryObjectReceiveStream[Run] = receive
        self._send: MemoryObjectSendStream[Run] = send
        # A portal waits for each call and runs it in a task of its own, which would
        # cost more than passing on a run.
        self._loop = portal.call(_running_loop)
        self._outbox: SimpleQueue[tuple[T, int] | _Taken | Exception | None]
        self._outbox = SimpleQueue()
        self._put = self._taken = 0  # bytes; one thread writes each

    def cross(self, runs: Iterable[Run]) -> Generator[T, None, None]:
        """
        Pass ``runs`` in, a few ahead of the reader, and yield what is put out.

        Ends when the code in the loop has ended, even if runs are left; raises what
        that code raises.
        """
        ahead = 0
        for run in runs:
            self._loop.call_soon_threadsafe(self._pass, run)
            ahead += 1
            while ahead > _AHEAD or not self._outbox.empty():
                item = self._take()
                if item is None:
                    return
                if isinstance(item, _Taken):
                    ahead -= 1
                else:
                    yield item[0]
        self._loop.call_soon_threadsafe(self._send.close)
        while (item := self._take()) is not None:
            if not isinstance(item, _Taken):
                yield item[0]

    async def runs(self) -> AsyncGenerator[Run, None]:
        """Yield the runs that were passed in."""
        async for run in self._inbox:
            self._outbox.put(_TAKEN)
            yield run

    def _take(self) -> tuple[T, int] | _Taken | None:
        item = self._outbox.get()
        if isinstance(item, Exception):
            raise item
        if isinstance(item, tuple):
            self._taken += _ITEM + item[1]
        return item

    async def put(self, item: T, size: int = 0) -> None:
        """Pass out an item of ``size`` bytes; wait while too many bytes are unread."""
        self._put += _ITEM + size
        self._outbox.put((item, size))
        # Another thread takes items, and can't set an event of this loop.
        while self._put - self._taken > _UNREAD:  # noqa: ASYNC110
            await sleep(0.01)

    def _pass(self, run: Run) -> None:
        with suppress(BrokenResourceError):  # the reason is put out
            self._send.send_nowait(run)

    async def _serve(self, serve: Callable[[Bridge[T]], Awaitable[None]]) -> None:
        try:
            with self._inbox:
                await serve(self)
        except Exception as error:
            self._outbox.put(error)
        else:
            self._outbox.put(None)

    def _close(self) -> None:
        self._send.close()
        self._inbox.close()


async def _running_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


@cache
def _freeze() -> None:
    """Exempt what was imported from garbage collection, which each task runs."""
    gc.collect()
    gc.freeze()


@contextmanager
def bridged(serve: Callable[[Bridge[T]], Awaitable[None]]) -> Iterator[Bridge[T]]:
    """
    Run ``serve`` in an event loop; leaving the context before it ends cancels it.

    Args:
        serve: Called in the loop; what it raises is raised by :meth:`Bridge.cross`.

    """
    with start_blocking_portal("asyncio") as portal:
        if TaskContext.get() is not None:
            _freeze()
        bridge: Bridge[T] = Bridge(portal)
        serving = portal.start_task_soon(bridge._serve, serve)
        try:
            yield bridge
        finally:
            serving.cancel()
            with suppress(RuntimeError):
                portal.call(bridge._close)
