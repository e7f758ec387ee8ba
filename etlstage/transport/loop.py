"""
The time of the event loop, asked for without anyio's look-up of the loop.

Lock-step asks once in each exchange. On asyncio the clock is a method of the loop; on
any other nothing is different.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import anyio

__all__ = ("clock",)


def clock() -> Callable[[], float]:
    """Return what tells the time of :func:`anyio.current_time`, in this event loop."""
    try:
        # A host of trio's may be asyncio: its loop runs then, but none of its tasks.
        ours = asyncio.current_task() is not None
    except RuntimeError:
        ours = False
    return asyncio.get_running_loop().time if ours else anyio.current_time
