"""
What SIGINT, SIGTERM and SIGHUP do to a command.

As long as there is nothing to lose, they end it at once with one line, even while
modules are imported, where an exception would end as a traceback. Where there is
something to clean up, they raise an exception; but never in an event loop, whose main
task is cancelled instead. During a run they are only counted, from before it begins
until its report is written: no signal, however often it is sent, ends the process
without its report.

Nothing heavy is imported here, as a command imports this first.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType
from typing import Final, Self, TypeAlias, TypeVar

__all__ = (
    "FORCED",
    "Signals",
    "deafen",
    "interruptible",
    "keep_statuses",
    "quit_at_once",
    "run_interruptible",
)

FORCED: Final = 5
"""Exit code of a command that was stopped by force."""
_GRACE: Final = 10  # seconds; workers that ignore SIGTERM are killed earlier
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None
_Result = TypeVar("_Result")


def quit_at_once() -> None:
    """Let signals end the process, without a traceback, from now on."""
    _install(_quit)


def keep_statuses() -> None:
    """Have the exit statuses of children kept, even if our parent ignores SIGCHLD."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def deafen() -> None:
    """Ignore signals from now on: only the exit is left."""
    # Not a function of our own: the interpreter drops those while it shuts down.
    _install(signal.SIG_IGN)


@contextmanager
def interruptible() -> Iterator[None]:
    """
    Let signals raise :class:`KeyboardInterrupt`, so that a block can clean up.

    An event loop in it has to be run by :func:`run_interruptible`.
    """
    before = _install(_interrupt)
    try:
        yield
    finally:
        _restore(before)


def run_interruptible(main: Callable[[], Awaitable[_Result]]) -> _Result:
    """
    Run ``main`` in an event loop, and return its result.

    The first signal cancels it. One that comes when it has not ended for 10 seconds
    ends the process at once: what is left behind then is better than a hang.

    Raises:
        KeyboardInterrupt: When the loop has ended, if there was a signal.

    """
    import anyio

    signals = Signals(forced=True)
    try:
        with signals:
            return anyio.run(signals.cancel, main)
    finally:
        if signals.came:
            raise KeyboardInterrupt


class Signals:
    """
    Counts signals in place of their usual effects.

    Args:
        begun: Whether there is a run that can obey signals; if not, they raise
            :class:`KeyboardInterrupt` until :meth:`begin`.
        forced: Whether a signal ends the process at once that comes 10 seconds after
            the first or later.

    """

    def __init__(self, *, begun: bool = True, forced: bool = False) -> None:
        self._begun = begun
        self._forced = forced
        self._hangs = math.inf  # when a signal ends the process
        self._left = 0
        self._wake: Callable[[], object] | None = None
        self._before: dict[signal.Signals, _Handler] = {}

    def __enter__(self) -> Self:
        self._before = _install(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        _restore(self._before)

    def begin(self) -> None:
        """Count signals from now on: there is a run that obeys them."""
        self._begun = True

    @property
    def came(self) -> bool:
        """Whether there is a signal that was not received."""
        return self._left > 0

    async def cancel(self, main: Callable[[], Awaitable[_Result]]) -> _Result:
        """Run ``main``, and return its result; a signal cancels it."""
        import asyncio

        import anyio

        loop = asyncio.get_running_loop()
        with anyio.CancelScope() as scope:
            # In this order, as a signal may come in between.
            self._wake = lambda: loop.call_soon_threadsafe(scope.cancel)
            try:
                if self._left:
                    scope.cancel()
                return await main()
            finally:
                self._wake = None
        raise asyncio.CancelledError

    async def receive(self) -> None:
        """Wait for the next signal, or return at once if one came before."""
        import asyncio

        loop, came = asyncio.get_running_loop(), asyncio.Event()
        # In this order, as a signal may come in between.
        self._wake = lambda: loop.call_soon_threadsafe(came.set)
        try:
            if not self._left:
                await came.wait()
        finally:
            self._wake = None
        self._left -= 1

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._begun:
            raise KeyboardInterrupt
        now = monotonic()
        if now >= self._hangs:
            _quit(number, frame)
        if self._forced:
            self._hangs = min(self._hangs, now + _GRACE)
        self._left += 1
        if self._wake is not None:
            self._wake()


def _install(handler: _Handler) -> dict[signal.Signals, _Handler]:
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, was in before.items():
        # Signals stay ignored under nohup, or a shell that runs us in the background.
        if was is not signal.SIG_IGN:
            signal.signal(number, handler)
    return before


def _restore(before: dict[signal.Signals, _Handler]) -> None:
    for number, was in before.items():
        signal.signal(number, was)


def _quit(_number: int, _frame: FrameType | None) -> None:
    os.write(2, b"etlstage: error: interrupted\n")
    os._exit(FORCED)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
