"""
What a pipeline has around its stages, in memory: no files, no threads, no Spark.

::

    source = MemorySource([[b"one", b"two"], [b"three"]])
    sink = MemorySink()
    report = await Pipeline(name="p", source=source, stages=[stage], sink=sink).run()
    assert sink.messages == [b"ONE", b"TWO", b"THREE"]
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from pathlib import Path

from etlstage.messages import Position, Run, counted
from etlstage.pipeline.dead_letter.record import DeadLetter
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.interfaces import Output, Sink, Source

__all__ = ("MemoryDeadLetters", "MemorySink", "MemorySource")


class MemorySource(Source):
    """
    Yields what it is given.

    Args:
        items: Runs of messages; positions, which cover what comes before them; and an
            exception to fail with.
        name: As reports and errors call it.

    Attributes:
        acknowledged: The values of the positions that are durable, in order.

    """

    def __init__(
        self, items: Iterable[Run | Position | Exception], *, name: str = "source"
    ) -> None:
        super().__init__(name)
        self.acknowledged: list[object] = []
        self._items = items

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        """Yield the items; raise the exception, if there is one."""
        for item in self._items:
            if isinstance(item, Exception):
                raise item
            yield item

    async def acknowledge(self, position: Position) -> None:
        """Note the position."""
        self.acknowledged.append(position.value)


class MemorySink(Sink):
    """
    Keeps what is written.

    Args:
        durable: Whether what is written is durable at once, and not when it is flushed.
        name: As reports and errors call it.

    Attributes:
        messages: What was written, in order.
        finished: How often the output was marked complete: once, unless the run failed.

    """

    def __init__(self, *, durable: bool = True, name: str = "sink") -> None:
        super().__init__(name)
        self.messages: list[bytes] = []
        self.finished: int = 0
        self._durable = durable

    async def write(self, run: Run) -> None:
        """Take a run."""
        self.account.received += len(run)
        self.messages += run
        if self._durable:
            self.account.done += len(run)

    async def flush(self) -> None:
        """Make all durable."""
        self.account.done = len(self.messages)

    async def finish(self) -> None:
        """Flush and mark as complete."""
        await self.flush()
        self.finished += 1

    def landed(self) -> str:
        """Return how many messages are durable."""
        return f"{counted(self.account.done, 'message')} in memory"

    def output(self) -> Output:
        """Return that this object has them."""
        return Output("memory", self.name)


class MemoryDeadLetters(DeadLetters):
    """
    Keeps the dead letters of one run.

    Args:
        pipeline: Name of the pipeline.

    Attributes:
        kept: The letters, in order.
        durable: How many of them a file would not lose.

    """

    def __init__(self, *, pipeline: str = "p") -> None:
        super().__init__(Path("memory"), pipeline=pipeline, run="memory")
        self.kept: list[DeadLetter] = []
        self.durable: int = 0

    def check(self) -> None:
        """Do nothing: there is no folder."""

    async def keep(self, letters: Sequence[DeadLetter]) -> None:
        """Append letters; they are durable after :meth:`sync`."""
        self.kept += letters
        self.count: int = len(self.kept)

    async def sync(self) -> None:
        """Make all durable."""
        self.durable = len(self.kept)

    def letters(self) -> Iterator[DeadLetter]:
        """Yield the letters."""
        yield from self.kept
