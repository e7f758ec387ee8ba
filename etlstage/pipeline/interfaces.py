"""
The interfaces of the two ends of a pipeline.

The stages in the middle are supervisors; the ends are subclasses of these classes, for
example for a DataFrame, or a worker of kind E or L. An end overrides only the methods
that it needs.
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
    """The state of a load's epochs, for both ends."""

    load: str
    """The name of the load, the same for all its epochs and starts."""
    done: int
    """The last epoch on record. The next one comes now; anything that exists of it, or
    of later ones, was left by an interrupted start, and is replaced or removed."""
    once: bool
    """Whether each epoch is loaded exactly once: :meth:`Sink.flush` ends an epoch, and
    nothing of it counts before."""
    check: Callable[[], None]
    """Raises if another run has taken over: then nothing may be replaced."""
    start: int = 0
    """A number that identifies this start of the load; it rises with each start."""
    ended: bool = False
    """Whether everything is loaded, and nothing will come."""
    intents: object = None
    """The intents recorded with the last epoch, see :attr:`Landing.intents`."""
    moved_from: str = ""
    """Where the load was loaded before, if it continues in another place."""


class Source(ABC):
    """
    Where messages come from.

    Args:
        name: Name of the stage in reports and errors.

    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.faults: Faults = Faults()
        self.busy: float = 0.0
        """Seconds in which any worker held a message, complete when :meth:`runs` ends.
        The faults of the workers are up to date at each position, too."""

    supervisor: AsyncSupervisor | None = None
    """The supervisor of its workers, if it has any, as soon as they are started."""
    size: int | None = None
    """Number of messages in the input, once that is known."""
    rereads: bool = False
    """Whether the next run rereads what this run has not loaded."""
    goes_on: bool = False
    """Whether the next run continues where this run has reached the end."""

    @property
    def cut(self) -> tuple[int, int]:
        """Maximum messages and bytes between two positions; zeros: unknown."""
        return 0, 0

    @property
    def input(self) -> str:
        """The input, for humans."""
        return f"stage {self.name}"

    def begin(self, epochs: Epochs) -> None:
        """Store what identifies the load over all its starts."""

    async def finished(self) -> None:
        """Forget what was kept to resume: it is on record that everything is loaded."""

    def resume(self, position: object) -> None:
        """
        Make :meth:`runs` begin after a recorded position.

        Raises:
            SourceFailed: If the source has no such position.

        """
        del position
        raise SourceFailed(
            f"stage {self.name}: a position was recorded, but this source can't resume"
            " from one: 'etlstage state reset' starts from the beginning",
            stage=self.name,
        )

    @abstractmethod
    def runs(self) -> AsyncGenerator[Run | Position | InputDamaged, None]:
        """
        Yield runs of messages and, where reading can resume, positions.

        A run is bounded (thousands of messages or about a megabyte), never empty.
        Damage that the source skips is yielded in its place.

        Raises:
            SourceFailed: If the input can't be read, now or further on.

        """

    def numbered(self, after: int = -1) -> AsyncGenerator[AnnotatedRun, None]:
        """
        Yield runs with a column ``sequence``; may be called any number of times.

        A message has the same number each time it is read, and numbers rise.

        Args:
            after: Number of the message after which to begin.

        Raises:
            SourceFailed: Like :meth:`runs`; or if its messages have no such numbers.

        """
        raise SourceFailed(
            f"stage {self.name}: its messages have no sequence numbers that are the same"
            " for all readers",
            stage=self.name,
        )

    def identity(self) -> str:
        """Return a digest of its messages; blocks."""
        return self.input

    async def observe(self) -> None:
        """Measure what is left to read; called about once a second during a run."""

    def complete(self) -> None:
        """Make :meth:`runs` end at the end of the input, if it would wait there."""

    def drain(self) -> bool:
        """
        Make :meth:`runs` end at the next point from which reading can resume.

        Returns:
            False if it may end anywhere, so that it can be cancelled right away.

        """
        return False

    def limit(self, most: int) -> bool:
        """
        Make :meth:`runs` end after a number of messages, with a position there.

        Returns:
            False if it can't: then its runs are cut off.

        """
        del most
        return False

    @property
    def activity(self) -> str:
        """What the source does before its first message comes, for humans."""
        return "reading"

    async def secure(self, position: Position) -> None:
        """
        Make the input before ``position`` outlive a crash, before that is recorded.

        Raises:
            SourceFailed: If it can't be made durable.

        """

    async def acknowledge(self, position: Position) -> None:
        """Release the input before ``position``, which is durable and recorded."""

    async def aclose(self) -> None:
        """Release what the source holds; safe to call twice and at any time."""


class Output(NamedTuple):
    """The destination of a load, for programs that read a report."""

    what: str
    """Its type, such as ``workers``, ``table``, or a format of Spark."""
    where: str
    """Name of the stage or of the table, or a path."""


class Landing(ABC):
    """
    The destination of a pipeline, as far as it is the same for all engines.

    Args:
        name: Name of the stage in reports and errors.

    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.account: Account = Account(name, StageKind.LOAD)
        """The load stage's account in the ledger of the run. ``done`` messages are
        durable."""
        self.activity: str = ""
        """What it is doing that takes time, for humans."""

    def begin(self, epochs: Epochs) -> None:
        """Take over the record of what was loaded before; called before entering."""

    async def noted(self) -> str | None:
        """
        Return the note last given to :meth:`commit`, if the destination keeps it.

        Called after :meth:`begin`, for a load that was interrupted.

        Raises:
            SinkFailed: If it can't be read.

        """
        return None

    async def commit(self, note: str) -> None:
        """
        Commit what was flushed, if the destination commits it together with a note.

        Args:
            note: What :meth:`noted` must return to a start that resumes after this.

        Raises:
            SinkFailed: If it can't be committed.

        """

    @property
    def covered(self) -> int:
        """How many messages, from the first, are dealt with: a position may pass them."""
        return self.account.done + self.account.dead

    @property
    def performs(self) -> bool:
        """Whether :meth:`perform` does anything."""
        return False

    settles: bool = True
    """Whether a load that has ended here is over; if not, it is over once its messages
    are loaded from here, which is recorded elsewhere."""
    keeps_mark: bool = False
    """Whether the mark of complete output is left as it is, as in a retry."""

    @property
    def intents(self) -> object:
        """What :meth:`perform` needs, to be stored in the record, plain JSON."""
        return None

    async def perform(self) -> None:
        """
        Do what must follow the record of a flush, such as making its rows visible.

        Each start that finds the record does it again, so it must be idempotent.

        Raises:
            SinkFailed: If it can't be done.

        """

    @abstractmethod
    def landed(self) -> str:
        """Return, in one line for humans, what was loaded and what was not."""

    def output(self) -> Output:
        """Return the destination."""
        return Output("sink", self.name)

    @property
    def recorded(self) -> str:
        """The destination as records have it, to compare with that of the next run."""
        return " ".join(self.output())

    async def __aenter__(self) -> Self:
        """Start, and detect early what would fail later."""
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
    """A destination that takes messages run by run."""

    supervisor: AsyncSupervisor | None = None
    """The supervisor of its workers, if it has any, as soon as they are started."""

    withheld: bool = False
    """Whether its workers are given no more, so that parts of runs may be dropped."""

    def withhold(self) -> None:
        """Give its workers, if any, no more messages; they finish those they have."""

    def input_of(self, source: Source) -> Source:
        """Return what to read for this sink: the source, or a part of it."""
        return source

    @abstractmethod
    async def write(self, run: Run) -> None:
        """
        Take a run; it may be kept in memory until there is enough to write.

        Raises:
            SinkFailed: If the destination can't be written, or refuses a message.

        """

    async def flush(self) -> None:
        """
        Return when everything written is durable; raises like :meth:`write`.

        If epochs are loaded exactly once, this ends the next epoch, in a place with its
        number, so that it can be written again in the same place.
        """

    async def finish(self) -> None:
        """Flush, then mark the output as complete; raises like :meth:`write`."""
        await self.flush()

    def drain(self) -> None:
        """Wait for nothing but ongoing writes, as the run is about to end."""

    async def stop(self) -> None:
        """End its workers, if any; after that all doubtful replies are known."""


class DeadLetterSink(ABC):
    """An additional destination of a run's dead letters, besides their files."""

    @abstractmethod
    async def write(self, letters: Iterator[DeadLetter]) -> None:
        """
        Take the letters, once; their iterator blocks, as it reads files.

        Raises:
            SinkFailed: If they can't be written.

        """

    async def aclose(self) -> None:
        """Release what the sink holds; safe to call twice and at any time."""


def unfenced() -> None:
    """Do nothing: without a state directory no run can take over."""
