"""
Time that passes only where nobody has anything to do.

On such a clock a back-off of a minute takes no time, and a deadline is met or missed
by what was written and not by how busy the machine is. It is for what runs in one
process, such as the workers of ``scripted.py``: a real process, or a thread, is
not waited for, and finds that hours have passed.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Final, Literal, TypeVar, TypeVarTuple

import anyio

__all__ = ("Backend", "VirtualLoop", "run_virtually", "virtual_time")

Backend = Literal["asyncio", "trio"]
Args = TypeVarTuple("Args")
T = TypeVar("T")

_CALLBACK: Final = "_callback"  # of a handle of asyncio, which has no other name for it


class VirtualLoop(asyncio.SelectorEventLoop):
    """
    An event loop of asyncio on a virtual clock, which starts at 0.

    Args:
        draw: Draws the order in which tasks go on that may do so at the same time, as
            those of trio do; None: the order in which they became ready.

    """

    def __init__(self, draw: random.Random | None = None) -> None:
        self._virtual = _Selector(self._mix if draw is not None else None)
        self._draw = draw
        self._tasks = 0
        super().__init__(self._virtual)
        if draw is not None:
            self.set_task_factory(self._make_task)

    def time(self) -> float:
        """Return the time, in virtual seconds."""
        return self._virtual.now

    def _make_task(
        self,
        _loop: asyncio.AbstractEventLoop,
        coro: Coroutine[Any, Any, T] | Generator[Any, None, T],
        **options: Any,  # noqa: ANN401
    ) -> _Task:
        task = _Task(coro, loop=self, **options)
        self._tasks += 1
        task.number = self._tasks
        return task

    def _mix(self) -> None:
        """Change the order of tasks that are ready; callbacks stay where they are."""
        ready: deque[asyncio.Handle] = vars(self)["_ready"]
        if len(ready) < 2 or self._draw is None:
            return
        found = [
            (task_number, place, handle)
            for place, handle in enumerate(ready)
            if (task_number := _number_of(handle))
        ]
        places = [place for _, place, _ in found]
        found.sort()
        self._draw.shuffle(found)
        for place, (_, _, handle) in zip(places, found, strict=True):
            ready[place] = handle


class _Task(asyncio.Task[Any]):
    """A task with a number: where tasks are in a set, they have no order."""

    number = 0

    def __repr__(self) -> str:
        # That of asyncio is long, and who is cancelled is told it.
        return f"<task {self.number}>"


def _number_of(handle: asyncio.Handle) -> int:
    """Return the number of the task that goes on with that, or 0."""
    callback = getattr(handle, _CALLBACK, None)
    task = getattr(callback, "__self__", None)
    return task.number if isinstance(task, _Task) else 0


class _Selector(selectors.DefaultSelector):
    """Jumps to the time of the next timer in place of sleeping until then."""

    def __init__(self, turn: Callable[[], None] | None) -> None:
        super().__init__()
        self.now = 0.0
        self._turn = turn

    def select(
        self, timeout: float | None = None
    ) -> list[tuple[selectors.SelectorKey, int]]:
        if self._turn is not None:
            self._turn()
            if timeout == 0:
                return []  # somebody goes on: that costs no look at the descriptors
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
