"""Search for cases that make a script fail."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar, TypeVarTuple
from unittest.mock import patch

from etlstage.testing.fuzzing import fuzz
from etlstage.testing.fuzzing.bench import Bench
from etlstage.testing.fuzzing.fuzz import Budget, Found, Fuzzer
from etlstage.testing.fuzzing.oracle import CaseFailed
from etlstage.testing.machine import Held

__all__ = ("searched",)

T = TypeVar("T")
Args = TypeVarTuple("Args")


class _Portal:
    """
    Takes the place of a portal: its event loop runs only during a call.

    In the thread of a real portal virtual time would pass between two calls, until the
    heartbeat of a worker that is kept would be overdue.
    """

    _held: Held[Bench]

    @contextmanager
    def wrap_async_context_manager(self, bench: Bench) -> Iterator[Bench]:
        """Keep the bench open during the block."""
        self._held = Held(bench, virtual=True)
        self._held.open()
        try:
            yield bench
        finally:
            self._held.close()

    def call(
        self, function: Callable[[*Args], Coroutine[Any, Any, T]], *arguments: *Args
    ) -> T:
        """Run a coroutine function; return its result."""
        found: list[T] = []

        # asyncio formats the task to handle signals: a megabyte, if the task returned a
        # case of that size.
        async def find() -> None:
            found.append(await function(*arguments))

        self._held.run(find())
        return found[0]


def searched(
    fuzzer: Fuzzer, examples: int, *, known: Iterable[CaseFailed] = ()
) -> list[Found]:
    """
    Return what is found, however busy the machine is.

    Time is virtual, so that no script hangs. The search has no limit in real time, as
    that could end it, or the shrinking, too early.
    """
    portal = nullcontext(_Portal())
    with (
        patch.object(fuzz, "start_blocking_portal", lambda: portal),
        fuzzer.running(),
    ):
        return fuzzer.search(Budget(examples, seconds=math.inf, seed=1), known=known)
