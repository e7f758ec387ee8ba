"""
Tasks in virtual time on one thread.

asyncio is made for descriptors, threads and signals, and anyio does for it what it
lacks: most of what a seed costs would be theirs. Here a task is a coroutine in a list,
and time is a number, which moves on where nobody has anything to do. Who goes on first,
of those that may, is drawn. ``backend.py`` has anyio use it.

Cancellation is Trio's: each place where a task waits raises, as long as a scope around
it is cancelled; who was woken before is not cancelled any more.
"""

from __future__ import annotations

import math
import random
import types
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from heapq import heappop, heappush
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeVar

__all__ = ("CancelScope", "Loop", "SimulatedTask", "TaskCancelled")

T = TypeVar("T")

_TURNS: Final = 100_000  # in which time stands still, until that is no accident
_TRIES: Final = 100  # to close a coroutine that waits for something at its end


class TaskCancelled(BaseException):
    """Raised where a task waits, once a scope around it is cancelled."""


class Place(Protocol):
    """Where a task waits."""

    def leave(self, task: SimulatedTask, /) -> bool:
        """Let it wait no more, for it is cancelled; return whether it goes on."""
        ...


class TaskHost(Protocol):
    """What a task belongs to."""

    cancel_scope: CancelScope

    def ended(self, task: SimulatedTask, error: BaseException | None, /) -> None:
        """Take note that it is over."""
        ...


class Loop:
    """
    Runs one coroutine, and all the tasks that it starts.

    Args:
        draw: Draws who goes on first.

    """

    def __init__(self, draw: random.Random) -> None:
        self.now: float = 0.0
        """The time, in virtual seconds."""
        self.current: SimulatedTask
        """The task that goes on now."""
        self.tasks: dict[SimulatedTask, None] = {}
        """Those that are not over."""
        self._draw = draw.random
        self._ready: list[SimulatedTask] = []
        # At which time, in which order, and whom, if that was not woken since.
        self._timers: list[tuple[float, int, SimulatedTask | CancelScope, int]] = []
        self._timed = 0

    def run(self, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """
        Run a coroutine function and return what it returns.

        Raises:
            RuntimeError: If nobody can ever go on, or all do and no time passes.

        """
        done: list[T] = []

        async def run() -> None:
            done.append(await main())

        SimulatedTask(self, run())
        try:
            while not done:
                self._turn()
                if not done:
                    self._move_on()
        finally:
            self._close_all()
        return done[0]

    def wake(self, task: SimulatedTask) -> None:
        """Let a task go on in the next turn."""
        task.place = None
        task.woken += 1
        self._ready.append(task)

    def ring(self, at: float, whom: SimulatedTask | CancelScope) -> None:
        """Wake a task, or cancel a scope, at that time, if it is not woken before."""
        self._timed += 1
        heappush(self._timers, (at, self._timed, whom, whom.woken))

    @types.coroutine
    def wait(self, place: Place) -> Generator[None, None, None]:
        """Wait at a place until woken."""
        task = self.current
        if task.scope.cancelled and place.leave(task):
            raise TaskCancelled
        task.place = place
        yield
        error = task.error
        if error is not None:
            task.error = None
            raise error

    @types.coroutine
    def let_others(self) -> Generator[None, None, None]:
        """Let others go on first."""
        self._ready.append(self.current)
        yield

    async def sleep(self, seconds: float) -> None:
        """Sleep for so many virtual seconds."""
        task = self.current
        if seconds <= 0:
            await self.let_others()
        # Or its timer would wake it wherever it waits then.
        if task.scope.cancelled:
            raise TaskCancelled
        if seconds <= 0:
            return
        if seconds < math.inf:
            self.ring(self.now + seconds, task)
        await self.wait(_BED)

    # --- inside -------------------------------------------------------------

    def _close_all(self) -> None:
        """Close what is left of a run that can't end, as often as it takes."""
        while self.tasks:
            self.current, _ = self.tasks.popitem()
            for _ in range(_TRIES):
                # It may wait for what it does at its end.
                with suppress(BaseException):
                    self.current.coroutine.close()
                    break

    def _turn(self) -> None:
        """Let all go on that may, until nobody may."""
        draw = self._draw
        for _ in range(_TURNS):
            ready = self._ready
            if not ready:
                return
            self._ready = []
            for left in range(len(ready), 1, -1):
                drawn = int(draw() * left)
                ready[drawn], ready[left - 1] = ready[left - 1], ready[drawn]
            for task in ready:
                self.current = task
                try:
                    task.coroutine.send(None)
                except StopIteration:
                    task.end(None)
                except (Exception, TaskCancelled, SystemExit) as error:
                    task.end(error)
        raise RuntimeError("tasks go on for ever, and no time passes")

    def _move_on(self) -> None:
        """Move on to the next time at which somebody may go on."""
        timers, ready = self._timers, self._ready
        while timers and (not ready or timers[0][0] <= self.now):
            at, _, whom, woken = heappop(timers)
            if whom.woken == woken:
                self.now = at
                whom.ring()
        if not ready:
            raise RuntimeError("all tasks wait for each other")


class SimulatedTask:
    """A coroutine, and where it is; it goes on in the next turn."""

    __slots__ = (
        "coroutine",
        "error",
        "group",
        "loop",
        "place",
        "root",
        "scope",
        "woken",
    )

    def __init__(
        self,
        loop: Loop,
        coroutine: Coroutine[Any, Any, object],
        group: TaskHost | None = None,
    ) -> None:
        self.loop: Loop = loop
        self.coroutine: Coroutine[Any, Any, object] = coroutine
        self.group: TaskHost | None = group
        self.place: Place | None = None  # where it waits
        self.error: BaseException | None = None  # what it goes on with
        self.woken: int = 0  # how often
        self.root: CancelScope = CancelScope(loop)
        self.scope: CancelScope = self.root
        self.root.hold(self, group.cancel_scope if group is not None else None)
        loop.tasks[self] = None
        loop.wake(self)

    def has_pending_cancellation(self) -> bool:
        """Return whether it is told so where it waits next."""
        return self.scope.cancelled

    def cancel(self) -> None:
        """Have it go on with that, if it waits."""
        if self.place is not None and self.place.leave(self):
            self.error = TaskCancelled()
            self.loop.wake(self)

    def ring(self) -> None:
        """Go on: it has slept."""
        self.loop.wake(self)

    def end(self, error: BaseException | None) -> None:
        """Take note that it is over."""
        del self.loop.tasks[self]
        self.root.release()
        if self.group is not None:
            self.group.ended(self, error)
        elif error is not None:
            raise error


class _Bed:
    """Where those are who sleep."""

    def leave(self, _: SimulatedTask) -> bool:
        return True


_BED: Final = _Bed()


class CancelScope:
    """As anyio's."""

    __slots__ = (
        "__weakref__",
        "_deadline",
        "_inner",
        "_loop",
        "_shield",
        "_task",
        "cancel_called",
        "cancelled",
        "cancelled_caught",
        "parent",
        "woken",
    )

    def __init__(
        self, loop: Loop, deadline: float = math.inf, *, shield: bool = False
    ) -> None:
        self._loop = loop
        self._deadline = deadline
        self._shield = shield
        self._task: SimulatedTask | None = None  # who is in it
        self._inner: dict[CancelScope, None] = {}
        self.parent: CancelScope | None = None
        self.cancel_called: bool = False
        self.cancelled_caught: bool = False
        self.cancelled: bool = False  # it is, or one around it that it sees
        self.woken: int = 0  # how often its deadline changed

    def __enter__(self) -> Self:
        task = self._loop.current
        self.hold(task, task.scope)
        task.scope = self
        if self._deadline < math.inf:
            self.deadline = self._deadline
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        task, parent = self._task, self.parent
        assert task is not None
        assert task.scope is self, "a scope is left before one within it"
        assert parent is not None
        task.scope = parent
        self.release()
        ours = self.cancel_called and (self._shield or not parent.cancelled)
        self.cancelled_caught = ours and isinstance(error, TaskCancelled)
        return self.cancelled_caught

    def hold(self, task: SimulatedTask, parent: CancelScope | None) -> None:
        """Be a scope of that task, within another one."""
        self._task, self.parent = task, parent
        self.cancelled = self.cancel_called
        if parent is not None:
            parent._inner[self] = None
            self.cancelled |= parent.cancelled and not self._shield

    def release(self) -> None:
        """Be a scope of nobody."""
        self._task = None
        self.woken += 1
        if self.parent is not None:
            del self.parent._inner[self]

    def cancel(self, reason: str | None = None) -> None:
        """Cancel it."""
        if not self.cancel_called:
            self.cancel_called = True
            self._look()

    def ring(self) -> None:
        """Cancel it: its time has come."""
        self.cancel()

    @property
    def deadline(self) -> float:
        """When it is cancelled."""
        return self._deadline

    @deadline.setter
    def deadline(self, at: float) -> None:
        self._deadline = at
        self.woken += 1
        if self._task is None or self.cancel_called:
            return
        if at <= self._loop.now:
            self.cancel()
        elif at < math.inf:
            self._loop.ring(at, self)

    @property
    def shield(self) -> bool:
        """Whether it sees none around it."""
        return self._shield

    @shield.setter
    def shield(self, value: bool) -> None:
        self._shield = value
        self._look()

    def _look(self) -> None:
        """Find out whether it is cancelled, and have those within it do so, too."""
        parent = self.parent
        around = parent is not None and parent.cancelled and not self._shield
        cancelled = self.cancel_called or around
        if self._task is None or cancelled is self.cancelled:
            return
        self.cancelled = cancelled
        if cancelled and self._task.scope is self:
            self._task.cancel()
        for scope in [*self._inner]:
            scope._look()
