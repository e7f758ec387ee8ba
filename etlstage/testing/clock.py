"""
Time that passes only where nobody has anything to do.

On such a clock a back-off of a minute takes no time, and a deadline is met or missed
by what was written and not by how busy the machine is. It is for what runs in one
process, such as the workers of ``scripted.py``: a real process, or a thread, is
not waited for, and finds that hours have passed.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar, TypeVarTuple

import anyio

__all__ = ("Backend", "VirtualLoop", "run_virtually", "virtual_time")

Backend = Literal["asyncio", "trio"]
Args = TypeVarTuple("Args")
T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop of asyncio on a virtual clock, which starts at 0."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Return the time, in virtual seconds."""
        now = self._virtual.now
        # The loop runs what is due before now plus its resolution, a nanosecond. Years
        # ahead, where a thread lets it jump, a float does not change by that little.
        self._clock_resolution = max(1e-9, math.ulp(now))
        return now


class _Selector(selectors.DefaultSelector):
    """Jumps to the time of the next timer in place of sleeping until then."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(
        self, timeout: float | None = None
    ) -> list[tuple[selectors.SelectorKey, int]]:
        # Without a timer there is no time to jump to: only a thread can go on.
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        ready = super().select(0)
        if not ready:
            self.now += timeout
        return ready


def virtual_time(backend: Backend = "asyncio") -> tuple[str, dict[str, Any]]:
    """
    Return a backend on a virtual clock, with its options, as anyio wants them.

    It is what anyio's fixture for pytest returns, too::

        @pytest.fixture(params=["asyncio", "trio"])
        def anyio_backend(request):
            return virtual_time(request.param)

    """
    if backend == "asyncio":
        return backend, {"loop_factory": VirtualLoop}
    import trio.testing

    return backend, {"clock": trio.testing.MockClock(autojump_threshold=0)}


def run_virtually(
    main: Callable[[*Args], Awaitable[T]],
    *args: *Args,
    backend: Backend = "asyncio",
) -> T:
    """Run ``main(*args)`` in virtual time and return what it returns."""
    name, options = virtual_time(backend)
    return anyio.run(main, *args, backend=name, backend_options=options)
