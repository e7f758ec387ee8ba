"""
What anyio needs of a backend, for the tasks of ``loop.py``, and no more.

What takes an operating system is missing, and what would run in a thread is called. All
tasks share one context of variables.
"""

from __future__ import annotations

import math
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from threading import get_ident
from types import TracebackType
from typing import Any, Final, Self, TypeVar
from unittest.mock import patch

from anyio._core import _eventloop
from anyio.abc import AsyncBackend

from etlstage.testing.simulate.loop import (
    CancelScope,
    Loop,
    SimulatedTask,
    TaskCancelled,
)

__all__ = ("run",)

T = TypeVar("T")

_NAME: Final = "etlstage-simulation"  # as anyio calls it

_loop: Loop  # the one that runs


def run(loop: Loop, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """
    Run what uses anyio, and return what it returns.

    Raises:
        RuntimeError: If nobody can ever go on, or all do and no time passes; or if an
            asynchronous generator was left in the middle: elsewhere it is chance when
            what is behind its ``yield`` is done.

    """
    with _installed(loop) as left:
        result = loop.run(main)
    if left:
        raise RuntimeError(f"{left[0]!r} was left in the middle, and not closed")
    return result


# anyio has no way to add one: what is patched here is its own.


@contextmanager
def _installed(loop: Loop) -> Iterator[list[AsyncGenerator[Any, Any]]]:
    """Have anyio find the loop in this thread; yield the generators left behind."""
    global _loop
    _loop = loop
    thread, otherwise = get_ident(), _eventloop.current_async_library

    def library() -> str | None:
        return _NAME if get_ident() == thread else otherwise()

    left: list[AsyncGenerator[Any, Any]] = []
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(None, left.append)
    try:
        with (
            patch.dict(_eventloop.loaded_backends, {_NAME: _Backend}),
            patch.object(_eventloop, "current_async_library", library),
        ):
            yield left
    finally:
        sys.set_asyncgen_hooks(*hooks)


class _Backend(AsyncBackend):
    """What anyio calls; never instantiated."""

    @classmethod
    def current_time(cls) -> float:
        return _loop.now

    @classmethod
    def cancelled_exception_class(cls) -> type[BaseException]:
        return TaskCancelled

    @classmethod
    async def checkpoint(cls) -> None:
        await _loop.sleep(0)

    @classmethod
    async def checkpoint_if_cancelled(cls) -> None:
        if _loop.current.scope.cancelled:
            raise TaskCancelled

    @classmethod
    async def cancel_shielded_checkpoint(cls) -> None:
        await _loop.let_others()

    @classmethod
    async def sleep(cls, delay: float) -> None:
        await _loop.sleep(delay)

    @classmethod
    def create_cancel_scope(
        cls, *, deadline: float = math.inf, shield: bool = False
    ) -> Any:  # noqa: ANN401
        return CancelScope(_loop, deadline, shield=shield)

    @classmethod
    def current_effective_deadline(cls) -> float:
        scope: CancelScope | None = _loop.current.scope
        if scope is not None and scope.cancelled:
            return -math.inf
        nearest = math.inf
        while scope is not None:
            nearest = min(nearest, scope.deadline)
            scope = None if scope.shield else scope.parent
        return nearest

    @classmethod
    def create_task_group(cls) -> Any:  # noqa: ANN401
        return _TaskGroup(_loop)

    @classmethod
    def create_event(cls) -> Any:  # noqa: ANN401
        return _Event(_loop)

    @classmethod
    def create_lock(cls, *, fast_acquire: bool) -> Any:  # noqa: ANN401
        return _Lock(_loop)

    @classmethod
    async def run_sync_in_worker_thread(
        cls,
        func: Callable[..., T],
        args: tuple[Any, ...],
        abandon_on_cancel: bool = False,
        limiter: object = None,
    ) -> T:
        await _loop.let_others()
        return func(*args)

    @classmethod
    def get_current_task(cls) -> Any:  # noqa: ANN401
        return _loop.current


class _TaskGroup:
    """As anyio's of that name."""

    def __init__(self, loop: Loop) -> None:
        self.cancel_scope: CancelScope = CancelScope(loop)
        self._loop = loop
        self._tasks: dict[SimulatedTask, None] = {}
        self._errors: list[BaseException] = []
        self._host: SimulatedTask | None = None  # it waits for the end
        self._cancelled: TaskCancelled | None = None  # while it did
        self._starting: dict[SimulatedTask, _Status] = {}

    async def __aenter__(self) -> Self:
        self.cancel_scope.__enter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        scope = self.cancel_scope
        if error is not None:
            scope.cancel()
            if not isinstance(error, TaskCancelled):
                self._errors.append(error)
        if self._tasks:
            self._host = self._loop.current
            await self._loop.wait(self)
        else:
            await self._loop.let_others()
        found = error or self._cancelled
        if self._errors:
            found = BaseExceptionGroup("unhandled errors in a task group", self._errors)
        if scope.__exit__(None, found, None) or found is None:
            return True
        if found is error:
            return False
        raise found from None

    def start_soon(
        self,
        function: Callable[..., Coroutine[Any, Any, object]],
        *args: object,
        name: object = None,
    ) -> None:
        """Start a task."""
        self._tasks[SimulatedTask(self._loop, function(*args), self)] = None

    async def start(
        self,
        function: Callable[..., Coroutine[Any, Any, object]],
        *args: object,
        name: object = None,
    ) -> Any:  # noqa: ANN401
        """Start a task, and wait until it says that it has begun."""
        status = _Status(self._loop)
        task = SimulatedTask(self._loop, function(*args, task_status=status), self)
        self._tasks[task], self._starting[task] = None, status
        try:
            await status.begun.wait()
        except TaskCancelled:
            task.root.cancel()
            raise
        if status.error is not None:
            raise status.error
        return status.value

    def ended(self, task: SimulatedTask, error: BaseException | None) -> None:
        """Take note that a task is over."""
        del self._tasks[task]
        status = self._starting.pop(task, None)
        if status is not None and not status.begun.is_set():
            status.error = error or RuntimeError("the task has ended, and not begun")
            status.begun.set()
        elif error is not None and not isinstance(error, TaskCancelled):
            self._errors.append(error)
            self.cancel_scope.cancel()
        if self._host is not None and not self._tasks:
            self._loop.wake(self._host)

    def leave(self, _: SimulatedTask) -> bool:
        """Wait on: the tasks are told, too."""
        self._cancelled = TaskCancelled()
        return False


class _Status:
    """As anyio's of that name."""

    def __init__(self, loop: Loop) -> None:
        self.begun = _Event(loop)
        self.value: Any = None
        self.error: BaseException | None = None

    def started(self, value: object = None) -> None:
        self.value = value
        self.begun.set()


class _Event:
    """As anyio's of that name."""

    __slots__ = ("__weakref__", "_loop", "_set", "_waiting")

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._set = False
        self._waiting: dict[SimulatedTask, None] = {}

    def set(self) -> None:
        """Wake who waits."""
        if not self._set:
            self._set = True
            for task in self._waiting:
                self._loop.wake(task)
            self._waiting.clear()

    def is_set(self) -> bool:
        """Return whether it is."""
        return self._set

    async def wait(self) -> None:
        """Wait until it is."""
        loop = self._loop
        if self._set:
            await loop.sleep(0)
        else:
            self._waiting[loop.current] = None
            await loop.wait(self)

    def leave(self, task: SimulatedTask) -> bool:
        """Let it wait no more."""
        del self._waiting[task]
        return True


class _Lock:
    """As anyio's of that name."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._freed: _Event | None = None  # when it is taken

    async def __aenter__(self) -> None:
        while self._freed is not None:
            await self._freed.wait()
        self._freed = _Event(self._loop)

    async def __aexit__(self, *_: object) -> None:
        assert self._freed is not None
        self._freed.set()
        self._freed = None
