"""
What a pipeline needs at its two ends.

The stages in the middle are supervisors; the ends are whatever derives from these
classes: a DataFrame, or a worker of kind E or L. What an end has no use for, it leaves
as it is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator
from types import TracebackType
from typing import NamedTuple, Self

from etlstage.errors import Faults, InputDamaged, SourceFailed
from etlstage.messages import AnnotatedRun, Position, Run, StageKind
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.ledger import Account
from etlstage.supervisor import AsyncSupervisor

__all__ = (
    "DeadLetterSink",
    "Epochs",
    "Landing",
    "Output",
    "Sink",
    "Source",
    "unfenced",
)


class Epochs(NamedTuple):
    """What both ends are to know of the epochs of a load."""

    load: str
    """What the epochs of one load have in common, over all its starts."""
    done: int
    """The last that is recorded. What comes is the next; what there is of it, and of
    those behind, is of a start that was interrupted, and is replaced or removed."""
    once: bool
    """Whether each is to be there once: :meth:`Sink.flush` ends one, and nothing of it
    counts before."""
    check: Callable[[], None]
    """Raises if another run has taken over: then nothing is to be replaced."""
    start: int = 0
    """What sets this start apart from all others of the load: it rises with each."""
    ended: bool = False
    """Whether all is loaded, and nothing will come."""
    intents: object = None
    """What the last of them was recorded with, see :attr:`Landing.intents`."""


class Source(ABC):
    """
    Where messages come from.

    Args:
        name: As reports and errors call it.

    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.faults: Faults = Faults()
        self.busy: float = 0.0
        """Failures and restarts of its workers; complete when :meth:`runs` ends."""

    supervisor: AsyncSupervisor | None = None
    """Of its workers, if it has any, as soon as they are started."""
    size: int | None = None
    """How many messages there are, once that is known."""
    rereads: bool = False
    """Whether the next run reads again what this one has not loaded."""
    goes_on: bool = False
    """Whether the next run reads on where this one has come to the end."""

    @property
    def cut(self) -> tuple[int, int]:
        """Messages and bytes between two positions, at most; zeros: unknown."""
        return 0, 0

    @property
    def input(self) -> str:
        """What is read, for a human."""
        return f"stage {self.name}"

    def begin(self, epochs: Epochs) -> None:
        """Record what sets the load apart, over all its starts."""

    async def finished(self) -> None:
        """Forget what was kept to read on: it is recorded that all is loaded."""

    def resume(self, position: object) -> None:
        """
        Have :meth:`runs` begin behind a position that was recorded.

        Raises:
            SourceFailed: If it has no such position.

        """
        del position
        raise SourceFailed(
            f"stage {self.name}: a position was recorded, and it has none: 'etlstage"
            " state reset' starts from the beginning",
            stage=self.name,
        )

    @abstractmethod
    def runs(self) -> AsyncGenerator[Run | Position | InputDamaged, None]:
        """
        Yield runs of messages and, where reading can resume, positions.

        A run is bounded (thousands of messages or about a megabyte), never empty.
        Where damage is passed over, it is among them.

        Raises:
            SourceFailed: If the input can't be read, now or further on.

        """

    def numbered(self, after: int = -1) -> AsyncGenerator[AnnotatedRun, None]:
        """
        Yield runs with a column ``sequence``, any number of times.

        A message has the same number whenever and by whom it is read, and numbers rise.

        Args:
            after: Number of the message behind which to begin.

        Raises:
            SourceFailed: As by :meth:`runs`; or if its messages have no such numbers.

        """
        raise SourceFailed(
            f"stage {self.name}: its messages have no numbers that are the same for all"
            " who read them",
            stage=self.name,
        )

    def identity(self) -> str:
        """Return a digest of its messages; blocks."""
        return self.input

    async def observe(self) -> None:
        """Measure what is left to read; called about once a second of a run."""

    def complete(self) -> None:
        """Let :meth:`runs` end where there is no more, if it would wait there."""

    def drain(self) -> bool:
        """
        Let :meth:`runs` end at the next point from which reading can go on.

        Returns:
            False if all points are alike, so that it may be cancelled right away.

        """
        return False

    @property
    def activity(self) -> str:
        """What it is doing before its first message comes, for a human."""
        return "reading"

    async def secure(self, position: Position) -> None:
        """
        Have what is before ``position`` outlive a crash, before that is recorded.

        Raises:
            SourceFailed: If it can't be.

        """

    async def acknowledge(self, position: Position) -> None:
        """Record that everything before ``position`` is durable, and recorded."""

    async def aclose(self) -> None:
        """Release what the source holds; safe to call twice and at any time."""


class Output(NamedTuple):
    """What was loaded into, for programs that read a report."""

    what: str
    """Such as ``workers``, ``table``, or a format of Spark."""
    where: str
    """Name of the stage or of the table, or a path."""


class Landing(ABC):
    """
    Where messages end, as far as all engines know it.

    Args:
        name: As reports and errors call it.

    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.account: Account = Account(name, StageKind.LOAD)
        """Of the load stage, in the ledger of the run. ``done`` are messages that are
        durable; all before the first ``done + dead`` messages are dealt with."""
        self.activity: str = ""
        """What it is doing that takes its time, for a human."""

    def begin(self, epochs: Epochs) -> None:
        """Record what was loaded before, ahead of being entered."""

    async def noted(self) -> str | None:
        """
        Return what was last given to :meth:`commit`, if it is kept there.

        Asked behind :meth:`begin`, of a load that was interrupted.

        Raises:
            SinkFailed: If it can't be read.

        """
        return None

    async def commit(self, note: str) -> None:
        """
        Make what was flushed count, where that is done together with a note of it.

        Args:
            note: What :meth:`noted` is to return to a start that resumes after it.

        Raises:
            SinkFailed: If that can't be done.

        """

    @property
    def performs(self) -> bool:
        """Whether :meth:`perform` does anything."""
        return False

    settles: bool = True
    """Whether a load that has ended here is over; else it is so once it is read there,
    as somebody else records."""

    @property
    def intents(self) -> object:
        """What :meth:`perform` needs of what was flushed, plain JSON, for the record."""
        return None

    async def perform(self) -> None:
        """
        Do what belongs behind the record of what was flushed, such as to show it.

        It is done again by a start that finds the record, and has to lead to the same.

        Raises:
            SinkFailed: If it can't be done.

        """

    @abstractmethod
    def landed(self) -> str:
        """Return, in one line for a human, what was loaded and what was not."""

    def output(self) -> Output:
        """Return where the messages end."""
        return Output("sink", self.name)

    async def __aenter__(self) -> Self:
        """Start, and find out now what would fail later."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release what the sink holds; what is not durable is dropped."""
        await self.aclose()

    async def aclose(self) -> None:
        """Release what the sink holds; safe to call twice and at any time."""


class Sink(Landing):
    """Where messages end that come run by run."""

    supervisor: AsyncSupervisor | None = None
    """Of its workers, if it has any, as soon as they are started."""

    withheld: bool = False
    """Whether its workers are given no more, so that some of a run may be dropped."""

    def withhold(self) -> None:
        """Give workers no more, if it has any: what they have is finished."""

    def input_of(self, source: Source) -> Source:
        """Return what is to be read for it: a source, or its part of one."""
        return source

    @abstractmethod
    async def write(self, run: Run) -> None:
        """
        Take a run; it may be kept in memory until enough has come together.

        Raises:
            SinkFailed: If the destination can't be written, or refuses a message.

        """

    async def flush(self) -> None:
        """
        Return when all that was written is durable; raises as :meth:`write`.

        Where epochs are loaded once: as the epoch behind the last, in a place that has
        its number, so that it can be written again there.
        """

    async def finish(self) -> None:
        """Flush, then mark the output as complete; raises as :meth:`write`."""
        await self.flush()

    def drain(self) -> None:
        """Wait for nothing but what it is writing: the run is to end."""

    async def stop(self) -> None:
        """End workers, if it has any: all that is doubtful is known then."""


class DeadLetterSink(ABC):
    """Who else is given the dead letters of a run, beside their files."""

    @abstractmethod
    async def write(self, letters: Iterator[DeadLetter]) -> None:
        """
        Take the letters, once; they come from files, and their iterator blocks.

        Raises:
            SinkFailed: If they can't be written.

        """

    async def aclose(self) -> None:
        """Release what the sink holds; safe to call twice and at any time."""


def unfenced() -> None:
    """Do nothing: without a state directory no run can take over."""
