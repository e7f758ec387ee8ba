"""
What is done without anyio where the event loop is asyncio's, because lock-step waits.

An exchange asks for the time once: there the clock is a method of the loop. And it
waits for a reply once: there the loop can call who takes it, and need not wake a task
for that, nor register the descriptor anew. On any other loop nothing is different.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context

import anyio

__all__ = ("Puller", "clock")


def clock() -> Callable[[], float]:
    """Return what tells the time of :func:`anyio.current_time`, in this event loop."""
    return asyncio.get_running_loop().time if _is_ours() else anyio.current_time


class Puller:
    """Has what can be read taken at once, and not when a task gets its turn."""

    def __init__(self) -> None:
        self._stopped: asyncio.Future[None] | None = None

    async def run(self, fd: int, take: Callable[[], bool]) -> None:
        """
        Wait until a descriptor can be read, or :meth:`stop`.

        Args:
            fd: The descriptor.
            take: On asyncio it is called instead, as often as there is something to
                read, until it returns False; what it raises is raised here.

        """
        if not _is_ours():
            with suppress(anyio.ClosedResourceError):
                await anyio.wait_readable(fd)
            return
        loop, failed = asyncio.get_running_loop(), list[Exception]()
        self._stopped = stopped = loop.create_future()

        def ready() -> None:
            try:
                if take():
                    return
            except Exception as error:
                failed.append(error)
            loop.remove_reader(fd)
            if not stopped.done():
                stopped.set_result(None)

        context = copy_context()
        context.run(_say_asyncio)
        context.run(loop.add_reader, fd, ready)
        try:
            await stopped
        finally:
            self._stopped = None
            loop.remove_reader(fd)
            if failed:
                raise failed[0]

    def stop(self) -> None:
        """Wake who waits on asyncio; others are woken by ``anyio.notify_closing``."""
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_result(None)


def _is_ours() -> bool:
    # A host of trio's may be asyncio: its loop runs then, but none of its tasks.
    try:
        return asyncio.current_task() is not None
    except RuntimeError:
        return False


def _say_asyncio() -> None:
    """Tell anyio which loop it is, where it asks the task: in here there is none."""
    with suppress(ImportError):
        from sniffio import current_async_library_cvar

        current_async_library_cvar.set("asyncio")
