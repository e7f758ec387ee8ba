"""
The ends of a simulated run, and the disk, which outlives an interrupted run.

The disk changes only while the run is alive: an interrupted run may still close its
resources, but that leaves no trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, Self

from etlstage.errors import StateUnusable
from etlstage.messages import Position, Run
from etlstage.pipeline import DeadLetter, WorkerSource
from etlstage.pipeline.delivery.delivery import Delivery
from etlstage.pipeline.delivery.record import CommitRecord
from etlstage.pipeline.interfaces import Epochs
from etlstage.stage import Stage
from etlstage.testing.ends import (
    MemoryDeadLetters,
    MemoryEpochs,
    MemoryEpochSink,
    MemorySink,
    MemorySource,
)
from etlstage.testing.scenario import Violation
from etlstage.transport import Launch
from tests.simulate.scenario import Scenario

__all__ = (
    "Disk",
    "Extracting",
    "SimulatedDelivery",
    "SimulatedEpochSink",
    "SimulatedLetters",
    "SimulatedSink",
    "SimulatedSource",
    "Watch",
)


@dataclass
class Disk:
    """Everything that outlives a start of the run."""

    apart: dict[tuple[str, str], list[bytes]] = field(default_factory=dict)
    """Messages that load workers have staged, by epoch and attempt."""
    record: CommitRecord = field(default_factory=CommitRecord)
    holder: object = None
    """The delivery that holds the lock."""
    letters: list[DeadLetter] = field(default_factory=list)
    epochs: MemoryEpochs = field(default_factory=MemoryEpochs)

    def commit(self, epoch: str, attempt: str) -> None:
        """Publish what was staged in an attempt, as a user's commit program does."""
        kept = self.apart.pop((epoch, attempt), [])
        self.epochs.places.setdefault(epoch, kept)

    def abort(self, epoch: str) -> None:
        """Undo an epoch, whether it was published or not."""
        self.epochs.places.pop(epoch, None)
        for key in [*self.apart]:
            if key[0] == epoch:
                del self.apart[key]

    @property
    def loaded(self) -> list[bytes]:
        """The messages of the recorded epochs."""
        return self.loaded_by(self.record)

    def loaded_by(self, record: CommitRecord) -> list[bytes]:
        """Return the messages of the epochs up to that of a record."""
        number = record.epoch
        return [
            message
            for name, place in self.epochs.places.items()
            if int(name.rpartition("-")[2]) <= number
            for message in place
        ]


class Watch(Protocol):
    """The simulation, as its ends see it: it decides on failures, and judges."""

    @property
    def scenario(self) -> Scenario:
        """The scenario that is simulated."""

    async def pause(self) -> None:
        """Take some time, or none."""

    def use(self, end: str) -> None:
        """Raise OSError if an end must fail now."""

    def survives(self) -> bool:
        """Return whether what a disk failed to store is there after all."""

    def live(self) -> None:
        """Raise the error that interrupted the run, if it was interrupted."""

    def commit(self, position: Position) -> None:
        """Judge a position that is acknowledged."""

    def record(self, record: CommitRecord) -> None:
        """Judge a record that is about to be stored."""


class SimulatedSource(MemorySource):
    """A source that takes some time, and has its positions judged."""

    def __init__(self, watch: Watch, scenario: Scenario) -> None:
        super().__init__(scenario.items())
        self._watch = watch

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        """Yield the items."""
        async with aclosing(super().runs()) as items:
            async for item in items:
                await self._watch.pause()
                self._watch.use("source")
                yield item

    async def acknowledge(self, position: Position) -> None:
        """Have the position judged."""
        self._watch.commit(position)
        await self._watch.pause()


class Extracting(WorkerSource):
    """A worker source whose positions are judged."""

    def __init__(self, watch: Watch, stage: Stage, launch: Launch) -> None:
        super().__init__(stage, offsets=watch.scenario.offsets, launch=launch)
        self._watch = watch

    async def acknowledge(self, position: Position) -> None:
        """Have the position judged."""
        self._watch.commit(position)


class SimulatedLetters(MemoryDeadLetters):
    """Dead letters that fail if the scenario wants that."""

    def __init__(self, watch: Watch, disk: Disk) -> None:
        super().__init__(kept=disk.letters)
        self._watch = watch

    @property
    def safe(self) -> list[DeadLetter]:
        """The letters that a crash would not lose now."""
        return self.kept[: self.durable]

    def safe_of(self, sizes: Mapping[str, int]) -> list[DeadLetter]:
        """Return that many letters of each stage; raise Violation if one isn't safe."""
        safe, left = list[DeadLetter](), Counter(sizes)
        for letter in self.safe:
            if left[letter.stage] > 0:
                left[letter.stage] -= 1
                safe.append(letter)
        if lacking := [stage for stage, count in left.items() if count]:
            raise Violation(f"a dead letter of stage {lacking[0]} is not durable")
        return safe

    async def keep(self, letters: Sequence[DeadLetter]) -> None:
        """Append letters."""
        self._watch.use("letters")
        self._watch.live()
        await super().keep(letters)

    async def sync(self) -> None:
        """Make all letters durable."""
        self._watch.use("letters")
        self._watch.live()
        await super().sync()


class SimulatedSink(MemorySink):
    """A sink that takes some time."""

    def __init__(self, watch: Watch) -> None:
        super().__init__(durable=not watch.scenario.flushes)
        self._watch = watch

    async def write(self, run: Run) -> None:
        """Write a run."""
        await self._watch.pause()
        self._watch.use("sink")
        await super().write(run)

    async def flush(self) -> None:
        """Make all messages durable."""
        await self._watch.pause()
        self._watch.use("flush")
        self._watch.live()
        await super().flush()


class SimulatedEpochSink(SimulatedSink, MemoryEpochSink):
    """The same sink by epochs, which may be interrupted."""

    def __init__(self, watch: Watch, disk: Disk) -> None:
        MemoryEpochSink.__init__(self, disk.epochs, noting=watch.scenario.notes)
        self._watch = watch

    def begin(self, epochs: Epochs) -> None:
        """Remove the epochs that are not recorded."""
        self._watch.live()
        super().begin(epochs)

    async def flush(self) -> None:
        """Put the messages that were written into the next epoch's place."""
        await super().flush()
        await self._watch.pause()

    async def commit(self, note: str) -> None:
        """Add the epoch and the note."""
        await self._watch.pause()
        self._watch.live()
        await super().commit(note)
        await self._watch.pause()


class SimulatedDelivery(Delivery):
    """
    A delivery without files, whose records are judged before they count.

    Args:
        watch: The simulation that judges.
        disk: Holds the record.
        at: Called with the steps of each commit.
        once: Whether each epoch is loaded exactly once, rather than at least once.

    """

    def __init__(
        self,
        watch: Watch,
        disk: Disk,
        at: Callable[[str], None],
        *,
        once: bool = True,
    ) -> None:
        bounds = watch.scenario.epoch
        super().__init__(Path("memory"), exactly_once=once, bounds=bounds)
        self.at = at
        self._watch = watch
        self._disk = disk

    def __enter__(self) -> Self:
        """Raise the fence, unless another live run has the lock."""
        if self._disk.holder is not None:
            raise StateUnusable("another run uses the state directory")
        self._disk.holder = self
        try:
            found = self._disk.record
            self.record: CommitRecord = replace(found, fence=found.fence + 1)
            self._write(self.record, None)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lock, unless another run has taken over."""
        if self._disk.holder is self:
            self._disk.holder = None

    def check_resumable(self, *, stages: Sequence[str] | None, output: str) -> None:
        """Raise what ``begin`` would, unless another live run has the lock."""
        if self._disk.holder is None:
            self._resumes(self._disk.record, stages, output)

    def check(self) -> None:
        """Raise StateUnusable if another run has taken over."""
        if self._disk.record.fence != self.record.fence:
            raise StateUnusable("another run has taken over")

    def _write(self, record: CommitRecord, at: Callable[[str], None] | None) -> None:
        if at is not None:
            at("aside")
        self._watch.live()
        try:
            self._watch.use("state")
        except OSError as error:
            if self._watch.survives():
                self._keep(record)
            raise StateUnusable(f"can't store the record: {error}") from error
        self._keep(record)

    def _keep(self, record: CommitRecord) -> None:
        self._watch.record(record)
        self._disk.record = record
