"""
What is asked of the event loop itself, where asking through anyio costs too much.

Lock-step waits for the loop in each exchange. On asyncio a pipe can stay registered
from one wait to the next, and the clock is a method of the loop; anyio registers, waits
a turn and looks up the loop anew each time. On any other loop nothing is different.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import anyio

__all__ = ("asyncio_loop", "clock")


def asyncio_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs this task, None if that is not asyncio's."""
    try:
        # A host of trio's may be asyncio: its loop runs then, but none of its tasks.
        if asyncio.current_task() is None:
            return None
    except RuntimeError:
        return None
    return asyncio.get_running_loop()


def clock() -> Callable[[], float]:
    """Return what tells the time of :func:`anyio.current_time`, in this event loop."""
    loop = asyncio_loop()
    return anyio.current_time if loop is None else loop.time
