"""The end of processes: brought about, and waited for without reaping."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from signal import Signals
from time import monotonic
from typing import Final

import anyio

from etlstage.transport.watchdog import WATCHDOG

__all__ = ("POLL", "ended", "look_again", "signal_all", "status_of")

_CHECK: Final = 1.0  # seconds between two looks at the watchdog
POLL: Final = 0.02
"""Seconds between two looks, where the kernel has no pidfd."""


def signal_all(pids: Iterable[int], number: Signals) -> int:
    """Send a signal to processes; return how many got it."""
    count = 0
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
            count += 1
    return count


async def ended(pidfd: int) -> None:
    """Wait until a process has ended; meanwhile see to it that the watchdog lives."""
    while True:
        began = monotonic()
        with anyio.move_on_after(_CHECK):
            await anyio.wait_readable(pidfd)
            return
        now = monotonic()
        if now - began < 0.9 * _CHECK:
            # The clock of the event loop is a test's, which jumps to whatever time
            # somebody waits for.
            await anyio.wait_readable(pidfd)
            return
        WATCHDOG.check(now)


async def look_again(pid: int) -> None:
    """Wait until a process has ended, or for a moment if that can't be told."""
    try:
        pidfd = os.pidfd_open(pid)
    except (AttributeError, OSError):
        await anyio.sleep(POLL)
        return
    try:
        await anyio.wait_readable(pidfd)
    finally:
        os.close(pidfd)


def status_of(pid: int) -> int | None:
    """Return the exit status of a child that is not reaped; None if it runs."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    if ended is None:
        return None
    well = ended.si_code == os.CLD_EXITED
    return ended.si_status if well else -ended.si_status
