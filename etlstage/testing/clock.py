"""
Virtual time, which passes only while all tasks wait.

On such a clock a back-off of a minute takes no time, and whether a deadline is met
depends on the code, not on how busy the machine is. It is for code within one process,
such as the workers of ``scripted.py``: it does not wait for a real process or a thread,
for which hours may seem to pass.

With a ``draw``, the order in which ready tasks run is drawn, too, so that each seed
determines one order of events.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import random
import selectors
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Final, Literal, TypeVar, TypeVarTuple

import anyio

__all__ = ("Backend", "VirtualLoop", "run_virtually", "virtual_time")

Backend = Literal["asyncio", "trio"]
Args = TypeVarTuple("Args")
T = TypeVar("T")


_TURN: Final = 1e-9  # seconds; callbacks due within them run in one turn of the loop
_COARSE: Final = 2.0**23  # seconds; from then on, two floats are more than a turn apart
_TURNS: Final = 100_000  # turns of the loop in which no time passes, before an error
# Each task draws from its own generator: asyncio and anyio keep tasks in sets, and so
# call them in an order that the seed does not determine.
_DRAWS: contextvars.ContextVar[Callable[[], float]] = contextvars.ContextVar("draws")


class VirtualLoop(asyncio.SelectorEventLoop):
    """
    An asyncio event loop on a virtual clock, which starts at 0.

    Args:
        draw: Draws the order in which due callbacks run; then a deadlock (all tasks
            wait for each other) or a livelock (tasks never let time pass) raises
            RuntimeError. None: the order is asyncio's.

    """

    def __init__(self, draw: random.Random | None = None) -> None:
        self._virtual = _Selector(bounded=draw is not None)
        self._draw = draw
        super().__init__(self._virtual)
        self._clock_resolution = _TURN
        if draw is not None:
            self.set_task_factory(self._seeded_task)  # type: ignore[arg-type]

    def time(self) -> float:
        """Return the virtual time, in seconds."""
        now = self._virtual.now
        # The loop runs callbacks due before now plus its resolution, a nanosecond. When
        # waiting for a thread has advanced it by years, a float can't change so little.
        if now >= _COARSE:
            self._clock_resolution = math.ulp(now)
        return now

    def call_soon(
        self,
        callback: Callable[[*Args], object],
        *args: *Args,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        """Run a callback in the next turn, at a drawn place in its order."""
        if self._draw is None:
            return super().call_soon(callback, *args, context=context)
        found = context.get(_DRAWS) if context is not None else _DRAWS.get(None)
        later = (found or self._draw.random)() * _TURN
        return self.call_at(self._virtual.now + later, callback, *args, context=context)

    def _seeded_task(
        self,
        _: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, T],
        *,
        context: contextvars.Context | None = None,
        **options: Any,  # noqa: ANN401 - passed on
    ) -> asyncio.Task[T]:
        assert self._draw is not None
        own = random.Random(self._draw.getrandbits(64))  # noqa: S311
        context = context or contextvars.copy_context()
        context.run(_DRAWS.set, own.random)
        return _Task(coroutine, loop=self, context=context, **options)


class _Task(asyncio.Task[T]):
    """A task whose repr is short, as anyio shows it in every cancellation."""

    def __repr__(self) -> str:
        return f"<Task {self.get_name()}>"


class _Selector(selectors.DefaultSelector):
    """Jumps to the time of the next timer instead of sleeping until then."""

    def __init__(self, *, bounded: bool) -> None:
        super().__init__()
        self.now = 0.0
        self._bounded = bounded
        self._turns = 0  # since time last passed

    def select(
        self, timeout: float | None = None
    ) -> list[tuple[selectors.SelectorKey, int]]:
        if self._bounded:
            self._check(timeout)
        # Without a timer there is no time to jump to: only a thread can wake the loop.
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        ready = super().select(0)
        if not ready:
            self.now += timeout
        return ready

    def _check(self, timeout: float | None) -> None:
        if timeout is None:
            raise RuntimeError("all tasks wait for each other")
        self._turns = 0 if timeout > _TURN else self._turns + 1
        if self._turns > _TURNS:
            self._turns = 0
            raise RuntimeError("tasks keep running, but no time passes")


def virtual_time(
    backend: Backend = "asyncio", draw: random.Random | None = None
) -> tuple[str, dict[str, Any]]:
    """
    Return the name and the options of an anyio backend on a virtual clock.

    They have the form that anyio's pytest fixture returns::

        @pytest.fixture(params=["asyncio", "trio"])
        def anyio_backend(request):
            return virtual_time(request.param)

    Args:
        backend: Name of the backend.
        draw: For asyncio: draws the order of callbacks; see :class:`VirtualLoop`.

    """
    if backend == "asyncio":
        return backend, {"loop_factory": partial(VirtualLoop, draw)}
    import trio.testing

    return backend, {"clock": trio.testing.MockClock(autojump_threshold=0)}


def run_virtually(
    main: Callable[[*Args], Awaitable[T]],
    *args: *Args,
    backend: Backend = "asyncio",
    draw: random.Random | None = None,
) -> T:
    """Run ``main(*args)`` in virtual time, and return its result."""
    name, options = virtual_time(backend, draw)
    return anyio.run(main, *args, backend=name, backend_options=options)
