"""
Sources, sinks and dead letters in memory: no files, no threads, no Spark.

::

    source = MemorySource([[b"one", b"two"], [b"three"]])
    sink = MemorySink()
    report = await Pipeline(name="p", source=source, stages=[stage], sink=sink).run()
    assert sink.messages == [b"ONE", b"TWO", b"THREE"]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from etlstage.messages import Position, Run, counted
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.interfaces import Epochs, Output, Sink, Source

__all__ = (
    "MemoryDeadLetters",
    "MemoryEpochSink",
    "MemoryEpochs",
    "MemorySink",
    "MemorySource",
)


class MemorySource(Source):
    """
    Yields the items that it is given.

    Args:
        items: Runs of messages; positions, each of which covers all messages before it;
            and an exception to fail with.
        name: Its name in reports and errors.

    Attributes:
        acknowledged: Values of the acknowledged positions, in order.

    """

    def __init__(
        self, items: Iterable[Run | Position | Exception], *, name: str = "source"
    ) -> None:
        super().__init__(name)
        self.acknowledged: list[object] = []
        self._items = items
        self._resumed: object = None

    def resume(self, position: object) -> None:
        """Begin after the position with that value."""
        self._resumed = position

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        """Yield the items; raise the exception, if there is one."""
        behind = self._resumed is None
        for item in self._items:
            if behind:
                if isinstance(item, Exception):
                    raise item
                yield item
            elif isinstance(item, Position):
                behind = item.value == self._resumed

    async def acknowledge(self, position: Position) -> None:
        """Record the position."""
        self.acknowledged.append(position.value)


class MemorySink(Sink):
    """
    Keeps the messages that are written.

    Args:
        durable: Whether messages are durable as soon as they are written; otherwise,
            once they are flushed.
        name: Its name in reports and errors.

    Attributes:
        messages: All messages that were written, in order.
        finished: How often the output was marked complete: once, unless the run failed.

    """

    def __init__(self, *, durable: bool = True, name: str = "sink") -> None:
        super().__init__(name)
        self.messages: list[bytes] = []
        self.finished: int = 0
        self._durable = durable

    async def write(self, run: Run) -> None:
        """Write a run of messages."""
        self.account.received += len(run)
        self.messages += run
        if self._durable:
            self.account.done += len(run)

    async def flush(self) -> None:
        """Make all messages durable."""
        self.account.done = len(self.messages)

    async def finish(self) -> None:
        """Flush and mark as complete."""
        await self.flush()
        self.finished += 1

    def landed(self) -> str:
        """Return how many messages are durable."""
        return f"{counted(self.account.done, 'message')} in memory"

    def output(self) -> Output:
        """Return a reference to the output: this sink, by name."""
        return Output("memory", self.name)


@dataclass
class MemoryEpochs:
    """The loaded epochs; they outlive the sinks that load them."""

    places: dict[str, list[bytes]] = field(default_factory=dict)
    """The epochs, in order, by the name of the load and their number."""
    note: str | None = None
    """The note of the last commit, if sinks store notes."""

    @property
    def messages(self) -> list[bytes]:
        """The messages of all epochs."""
        return [message for place in self.places.values() for message in place]


class MemoryEpochSink(MemorySink):
    """
    Loads messages epoch by epoch, exactly once even if the run is interrupted.

    Args:
        epochs: Stores the epochs, for the next start, too.
        noting: Whether an epoch is added together with a note of its commit, as in a
            table, and can't be undone; otherwise it has its own place, as a folder, and
            is replaced there.
        name: Its name in reports and errors.

    """

    def __init__(
        self, epochs: MemoryEpochs, *, noting: bool = False, name: str = "sink"
    ) -> None:
        super().__init__(durable=False, name=name)
        self.epochs: MemoryEpochs = epochs
        self._noting = noting
        self._epoch = Epochs("", 0, once=True, check=lambda: None)
        self._flushed = self._placed = 0  # messages

    def begin(self, epochs: Epochs) -> None:
        """Remove the load's epochs not recorded as done, unless ``noting``."""
        self._epoch = epochs
        places = self.epochs.places
        for name in [*places] if not self._noting else ():
            load, _, number = name.rpartition("-")
            if load == epochs.load and int(number) > epochs.done:
                del places[name]

    async def noted(self) -> str | None:
        """Return the note of the last commit."""
        return self.epochs.note

    async def flush(self) -> None:
        """Make all messages durable; put the next epoch in place, unless ``noting``."""
        if not self._noting:
            self._put()
        self.account.done += len(self.messages) - self._flushed
        self._flushed = len(self.messages)

    async def commit(self, note: str) -> None:
        """Add the epoch together with the note, if ``noting``."""
        if self._noting:
            self._put()
            self.epochs.note = note

    def _put(self) -> None:
        load, done, _, check, *_ = self._epoch
        name = f"{load}-{done + 1}"
        check()
        assert not self._noting or name not in self.epochs.places
        self.epochs.places[name] = self.messages[self._placed :]
        self._placed = len(self.messages)
        self._epoch = self._epoch._replace(done=done + 1)


class MemoryDeadLetters(DeadLetters):
    """
    Keeps the dead letters of one run.

    Args:
        pipeline: Name of the pipeline.
        kept: Letters from interrupted starts of the run.

    Attributes:
        kept: The letters, in order.
        durable: Number of letters that were synced.

    """

    def __init__(self, *, pipeline: str = "p", kept: Iterable[DeadLetter] = ()) -> None:
        super().__init__(Path("memory"), pipeline=pipeline, run="memory")
        self.kept: list[DeadLetter] = [*kept]
        self.durable: int = len(self.kept)

    def check(self) -> None:
        """Do nothing: there is no folder."""

    async def keep(self, letters: Sequence[DeadLetter]) -> None:
        """Append letters; they are durable after :meth:`sync`."""
        self.kept += letters
        self.count += len(letters)

    async def sync(self) -> None:
        """Make all letters durable."""
        self.durable = len(self.kept)

    def size(self, stage: str) -> int:
        """Return the number of letters of a stage."""
        return self.sizes().get(stage, 0)

    def sizes(self) -> dict[str, int]:
        """Return the number of letters by stage."""
        return Counter(letter.stage for letter in self.kept)

    def resume(self, run: str, sizes: Mapping[str, int]) -> None:
        """Resume an interrupted run; keep only its first ``sizes`` letters by stage."""
        self.run: str = run
        left, kept = Counter(sizes), list[DeadLetter]()
        for letter in self.kept:
            left[letter.stage] -= 1
            if left[letter.stage] >= 0:
                kept.append(letter)
        self.kept = kept
        self.count: int = len(kept)
        self.durable = len(kept)
        numbers = (int(letter.id.rpartition("-")[2]) for letter in kept)
        self._numbered = max(numbers, default=0)

    def letters(self) -> Iterator[DeadLetter]:
        """Yield the letters."""
        yield from self.kept
