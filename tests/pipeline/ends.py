"""A scripted source and a gated sink, both in memory."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Self, TypeAlias

import anyio

from etlstage.errors import SinkFailed, SourceFailed
from etlstage.messages import Position, Run
from etlstage.testing import MemorySink, MemorySource

__all__ = ("GatedSink", "ScriptedSource", "Wait", "refuse_at", "unreadable")


class Wait:
    """A place where a script waits for the test, and the test for the script."""

    def __init__(self) -> None:
        self.reached = anyio.Event()
        self.released = anyio.Event()

    async def here(self) -> None:
        """Report that this place was reached, and wait until the test continues."""
        self.reached.set()
        await self.released.wait()


Script: TypeAlias = Iterable[Run | Position | Wait | Exception]


class ScriptedSource(MemorySource):
    """
    Plays a script of runs, positions, places to wait, and an error to end with.

    Args:
        script: The steps.
        alike: What :meth:`drain` returns: whether it may be cancelled right away.

    """

    def __init__(self, script: Script, *, alike: bool = True) -> None:
        super().__init__([])
        self.stored = anyio.Event()
        self.closed = 0
        self.drained = False
        self.yielded = 0
        self._script = script
        self._alike = alike

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        """Play the script."""
        for step in self._script:
            match step:
                case Wait():
                    await step.here()
                case Exception():
                    raise step
                case _:
                    yield step
                    self.yielded += 1
                    if self.drained and isinstance(step, Position):
                        return

    def drain(self) -> bool:
        """End after the next position."""
        self.drained = True
        return not self._alike

    async def acknowledge(self, position: Position) -> None:
        """Record the position."""
        await super().acknowledge(position)
        self.stored.set()

    async def aclose(self) -> None:
        """Count the call."""
        self.closed += 1


class GatedSink(MemorySink):
    """
    Stores what is written to it, when the test allows it.

    Args:
        durable: As for :class:`MemorySink`.
        before: Called with the number of messages so far, before each run is taken;
            may raise.
        gate: Where each write waits.

    """

    def __init__(
        self,
        *,
        durable: bool = True,
        before: Callable[[int], None] | None = None,
        gate: Wait | None = None,
    ) -> None:
        super().__init__(durable=durable)
        self.open: bool | None = None
        self._before = before
        self._gate = gate

    async def __aenter__(self) -> Self:
        """Open."""
        self.open = True
        return self

    async def aclose(self) -> None:
        """Close."""
        self.open = False

    async def write(self, run: Run) -> None:
        """Take a run."""
        self.account.received += len(run)
        if self._gate is not None:
            await self._gate.here()
        if self._before is not None:
            self._before(len(self.messages))
        self.messages += run
        if self._durable:
            self.account.done += len(run)


def refuse_at(count: int) -> Callable[[int], None]:
    """Return a hook that fails a sink which holds ``count`` messages or more."""

    def before(held: int) -> None:
        if held >= count:
            raise SinkFailed(f"stage sink: full at {held}", stage="sink")

    return before


def unreadable() -> SourceFailed:
    """Return the error of an unreadable source."""
    return SourceFailed("stage source: unreadable", stage="source")
