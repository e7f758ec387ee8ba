"""
All transform stages of a pipeline in one task, or its load workers.

A task runs an ordinary pipeline: its source is the rows that Spark passes in, its sink
the rows that Spark gets back, or the workers. Besides the messages that leave the last
stage, a task returns notes: one for each dead letter, and at the end one with the
outcome of the task and the error that ended it, if any. So everything that a task
reports is in its rows. Spark counts the rows of a task once, even if the task failed
before or ran twice, and so its reports count once, too.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import (
    AsyncGenerator,
    Callable,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext

from etlstage import errors
from etlstage.columns import Column, array_of
from etlstage.errors import (
    EtlstageError,
    SourceFailed,
    StageError,
    StageFailed,
    WorkerStartFailed,
)
from etlstage.messages import Run, cost_of, counted, plain, size_of
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.dead_letter.policy import config_of
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.interfaces import Sink, Source
from etlstage.pipeline.pipeline import Pipeline
from etlstage.pipeline.report import Report
from etlstage.pipeline.worker_sink import WorkerSink
from etlstage.spark.dataframe.read import column_of, run_of
from etlstage.spark.ship.artifact import Shipment, place
from etlstage.spark.task.portal import Bridge, bridged
from etlstage.spark.task.rows import RowBuilder, binary_of
from etlstage.stage import ErrorBudget, Order, Stage

__all__ = (
    "ROWS",
    "Chain",
    "Given",
    "TaskEnd",
    "in_attempt",
    "message_of_partition",
)

ROWS: Final = "partition int, place long, value binary, note string"
"""Rows that a task returns: messages, with their place in the partition; dead letters
as notes, with the number of their page as place; and a note without a place, which is
the outcome of the task."""

_NAMES: Final = ("partition", "place", "value", "note")
_JUDGED_OF: Final = 10_000  # messages, see Pipeline
_ROWS: Final = 100_000  # in a batch of results, about
_PAGE: Final = 1024 * 1024  # bytes of letters, about
_DETAILS: Final = ("stage", "code", "reason")  # of an error, beside its text

_Item: TypeAlias = "Run | _Note"


class _Note(NamedTuple):
    text: str
    is_letter: bool


class TaskEnd(NamedTuple):
    """The outcome of a task."""

    partition: int
    accounts: list[list[int]]
    """For each stage, its counts."""
    letters: int
    """Number of dead letters in its notes."""
    error: Exception | None
    """What ended the task early."""

    @classmethod
    def from_note(cls, partition: int, note: str) -> TaskEnd:
        """Return the outcome that is in the last note of a task."""
        plain = json.loads(note)
        error = plain["error"]
        found = error and _error(**error)
        return cls(partition, plain["accounts"], plain["letters"], found)


@dataclass(frozen=True)
class Chain:
    """The function for :meth:`DataFrame.mapInArrow`; the driver settles its results."""

    source: str
    """Name of the extract stage."""
    stages: Sequence[Stage]
    """The stages, of kind transform."""
    letters: DeadLetters
    """Dead letters of the run; a task returns its own in notes."""
    shipment: Shipment | None = None
    """Files that were shipped for the stages."""
    load: Stage | None = None
    """A stage of kind load, whose workers get the messages that leave the last stage;
    the task then returns only notes."""
    starts: Mapping[int, int] = field(default_factory=dict)
    """With ``load``: for each partition, the place of its first message among all, as
    dead letters have overall places."""

    @property
    def all(self) -> Sequence[Stage]:
        """The stages, followed by the load stage, if any."""
        return (*self.stages, *(() if self.load is None else (self.load,)))

    def run(
        self, batches: Iterator[pa.RecordBatch]
    ) -> Generator[pa.RecordBatch, None, None]:
        """
        Yield rows for the messages in the first column.

        Keys are in the second column, if there are any. With load workers the second
        and the third column have the partition and the place of each message.
        """
        task = TaskContext.get()
        rows = _Items(task.partitionId() if task is not None else 0)
        to_place = place if self.shipment is None else self.shipment.place
        stages = [to_place(stage) for stage in self.stages]
        load, places = None, _Places(self.starts)
        if self.load is not None:
            load = to_place(self.load)
        given = map(run_of if load is None else places.run_of, batches)
        with bridged(partial(self._serve, stages, load, places)) as bridge:
            # It may end before its input does; the last note has the reason.
            for item in bridge.cross(given):
                yield from rows.add(item)
            yield from rows.rest()

    async def _serve(
        self,
        stages: Sequence[Stage],
        load: Stage | None,
        places: _Places,
        bridge: Bridge[_Item],
    ) -> None:
        letters = 0

        async def note(letter: DeadLetter) -> None:
            nonlocal letters
            letters += 1
            if load is not None:
                letter = replace(letter, place=places.of(letter.place))
            text = letter.to_line().decode()
            await bridge.put(_Note(text, is_letter=True), len(text))

        configs = {stage.name: config_of(stage) for stage in self.all}
        kept = self.letters.kept_by(note, configs)
        pipeline = Pipeline(
            name=self.letters.pipeline,
            source=Given(self.source, bridge.runs()),
            stages=stages,
            sink=_Sink(bridge)
            if load is None
            else WorkerSink(in_attempt(load), dead_letters=kept),
            dead_letters=kept,
            judged_of=_JUDGED_OF,
        )
        report = await pipeline.run()
        error = report.error
        # Secrets are concealed, as Spark logs the text or it is staged with the rows.
        conceal = self.letters.secrets.conceal
        text = conceal(str(error))
        if isinstance(error, WorkerStartFailed | StageFailed):
            # This machine may be the cause, so Spark should try another one.
            raise type(error)(text, stage=error.stage) from None
        if (
            load is not None
            and isinstance(error, EtlstageError)
            and error.place is not None
        ):
            text = f"{text} (message {places.of(error.place) + 1})"
        outcome = json.dumps(_outcome(report, letters, text, conceal))
        await bridge.put(_Note(outcome, is_letter=False))


def in_attempt(stage: Stage, about: Mapping[str, str] | None = None) -> Stage:
    """
    Return a load stage for workers that get only a part of the messages.

    Args:
        stage: The stage.
        about: More environment variables; those of the stage take precedence.

    """
    task = TaskContext.get()
    added = dict(about or {})
    if task is not None:
        added.setdefault("ETLSTAGE_PARTITION", str(task.partitionId()))
    env = added | dict(stage.program.env)
    return replace(
        stage,
        worker=replace(stage.program, env=env),
        # In the order of the input, so that a message's place is that of its row.
        order=Order.TOTAL,
        key=None,
        # The driver checks how many messages have failed in all tasks.
        on_error=replace(stage.on_error, budget=ErrorBudget(count=None, share=None)),
    )


def _outcome(
    report: Report, letters: int, text: str, conceal: Callable[[str], str]
) -> dict[str, Any]:
    error = report.error
    about = {n: v for n, v in vars(error).items() if n in _DETAILS} if error else {}
    return {
        "accounts": [account.counts for account in report.ledger],
        "letters": letters,
        "error": error
        and {
            "kind": type(error).__name__,
            "text": text,
            "about": {
                name: conceal(value) if isinstance(value, str) else value
                for name, value in about.items()
            },
        },
    }


def _error(kind: str, text: str, about: dict[str, Any]) -> Exception:
    """Recreate an error that was raised in a task, or return a similar StageError."""
    found = getattr(errors, kind, StageError)
    if not isinstance(found, type) or not issubclass(found, StageError):
        found = StageError
    # The constructors differ, and would add to the text, which is complete.
    error = found.__new__(found)
    StageError.__init__(error, text, stage="")
    vars(error).update(about)
    return error


def message_of_partition(first: int, count: int = 1) -> str:
    """Return text that names the messages of the task's partition in an error."""
    task = TaskContext.get()
    partition = f" of partition {task.partitionId()}" if task is not None else ""
    upto = f" to {first + count}" if count > 1 else ""
    return f"message {first + 1}{upto}{partition}"


class Given(Source):
    """
    A pipeline's source: the rows that Spark passes in.

    Args:
        name: As errors call it.
        runs: The messages, see :func:`~etlstage.spark.dataframe.read.run_of`.

    """

    def __init__(self, name: str, runs: AsyncGenerator[Run, None]) -> None:
        super().__init__(name)
        self._runs = runs

    async def runs(self) -> AsyncGenerator[Run, None]:
        """Yield the runs; raises SourceFailed where a message is null."""
        async for run in self._runs:
            if nulls := _nulls(run):
                raise SourceFailed(
                    f"{self.name}: message is null in {nulls} of {len(run)} rows of a"
                    " batch: filter these rows, or give them a message with"
                    " coalesce(..., '')",
                    stage=self.name,
                )
            if len(run):
                yield run


def _nulls(run: Run) -> int:
    messages = plain(run)
    return int(messages.array.null_count) if isinstance(messages, Column) else 0


class _Sink(Sink):
    """A pipeline's sink: the rows that Spark gets back."""

    def __init__(self, bridge: Bridge[_Item]) -> None:
        super().__init__("a task's rows")
        self._bridge = bridge

    async def write(self, run: Run) -> None:
        self.account.received += len(run)
        await self._bridge.put(run, cost_of(run))
        self.account.done = self.account.received

    def landed(self) -> str:
        return f"{counted(self.account.done, 'message')} given to Spark"


class _Places:
    """The places of rows, stored as ranges since most are consecutive."""

    def __init__(self, starts: Mapping[int, int]) -> None:
        self._of_partition = starts
        self._rows = 0
        self._starts: list[int] = []
        self._first: list[int] = []

    def run_of(self, batch: pa.RecordBatch) -> Run:
        """Return the messages in the first column, and remember their places."""
        partitions, places = batch.column(1), batch.column(2)
        breaks = pc.or_(
            pc.not_equal(pc.pairwise_diff(partitions), 0),
            pc.not_equal(pc.pairwise_diff(places), 1),
        )
        for at in pc.indices_nonzero(breaks.fill_null(fill_value=True)).to_pylist():
            start = self._of_partition[partitions[at].as_py()]
            self._first.append(start + places[at].as_py())
            self._starts.append(self._rows + at)
        self._rows += len(places)
        return column_of(batch.column(0))

    def of(self, row: int) -> int:
        """Return the place of a row among all messages; another thread may call it."""
        at = bisect_right(self._starts, row) - 1
        return self._first[at] + row - self._starts[at]


class _Items:
    """Makes batches for Spark out of messages and notes."""

    def __init__(self, partition: int) -> None:
        self._partition = pa.scalar(partition, pa.int32())
        self._rows = RowBuilder(_NAMES, rows=_ROWS)
        self._places = 0
        self._page = self._page_size = 0

    def add(self, item: _Item) -> Iterator[pa.RecordBatch]:
        """Take messages or a note; yield a batch if there is enough for one."""
        if isinstance(item, _Note):
            texts = array_of([item.text], pa.string())
            place = array_of([self._page_of(item)], pa.int64())
            columns = [place, pa.nulls(1, pa.binary()), texts]
            size = len(item.text)
        else:
            values, size = binary_of(item), size_of(item)
            ones = pa.repeat(pa.scalar(1, pa.int64()), len(values))
            place = pc.cumulative_sum(ones, start=self._places - 1)
            self._places += len(values)
            columns = [place, values, pa.nulls(len(values), pa.string())]
        partition = pa.repeat(self._partition, len(place))
        return self._rows.add([partition, *columns], size)

    def rest(self) -> Iterator[pa.RecordBatch]:
        """Yield the remaining rows, if any."""
        return self._rows.rest()

    def _page_of(self, note: _Note) -> int | None:
        if not note.is_letter:
            return None
        if self._page_size >= _PAGE:
            self._page, self._page_size = self._page + 1, 0
        self._page_size += len(note.text)
        return self._page
