"""
All transform stages of a pipeline in one task, for one partition of its input.

Inside, it is a pipeline as any other: its source is what Spark gives, its sink is what
Spark gets. Beside the messages that leave the last stage there are notes: a dead letter
each, and at the end what became of the task, with the error that ended it, if any. So
all that a task has to say is in its rows, and what Spark makes of the rows of a task
that failed, or ran twice, holds for that too: they count once.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext

from etlstage import errors
from etlstage.columns import Column
from etlstage.errors import SourceFailed, StageError, StageFailed, WorkerStartFailed
from etlstage.messages import Run, cost_of, counted, plain, size_of
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.dead_letter.policy import config_of
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.interfaces import Sink, Source
from etlstage.pipeline.pipeline import Pipeline
from etlstage.pipeline.report import Report
from etlstage.spark.dataframe.read import run_of
from etlstage.spark.ship.artifact import place
from etlstage.spark.ship.plan import Shipment
from etlstage.spark.task.portal import Bridge, bridged
from etlstage.stage import Stage

__all__ = ("ROWS", "Chain", "Given", "TaskEnd", "message_of_partition")

ROWS: Final = "partition int, place long, value binary, note string"
"""What a task gives: messages, each at its place among those of its partition; dead
letters as notes, with the number of their page for a place; and a note without a place,
which is its outcome."""

_SCHEMA: Final = pa.schema(
    {
        "partition": pa.int32(),
        "place": pa.int64(),
        "value": pa.binary(),
        "note": pa.string(),
    }
)
_JUDGED_OF: Final = 10_000  # messages, see Pipeline
_ROWS: Final = 100_000  # in a batch of results, about
_BYTES: Final = 8 * 1024 * 1024
_PAGE: Final = 1024 * 1024  # bytes of letters, about
_TOLD: Final = ("stage", "code", "reason")  # of an error, beside its text

_Item: TypeAlias = "Run | _Note"


class _Note(NamedTuple):
    text: str
    is_letter: bool


class TaskEnd(NamedTuple):
    """What became of a task."""

    partition: int
    accounts: list[list[int]]
    """For each stage, its counts."""
    letters: int
    """How many it has noted."""
    error: Exception | None
    """What ended the task early."""

    @classmethod
    def from_note(cls, partition: int, note: str) -> TaskEnd:
        """Return what a task has noted at its end."""
        plain = json.loads(note)
        error = plain["error"]
        found = error and _error(**error)
        return cls(partition, plain["accounts"], plain["letters"], found)


class Chain:
    """
    What :meth:`DataFrame.mapInArrow` runs.

    Args:
        source: Name of the extract stage.
        stages: The stages, of kind transform.
        letters: Those of the run; what is dead-lettered here leaves in notes.
        shipment: What was sent for the stages.

    """

    def __init__(
        self,
        source: str,
        stages: Sequence[Stage],
        letters: DeadLetters,
        shipment: Shipment | None = None,
    ) -> None:
        self._source = source
        self._stages = tuple(stages)
        self._letters = letters
        self._place = place if shipment is None else shipment.place

    def run(
        self, batches: Iterator[pa.RecordBatch]
    ) -> Generator[pa.RecordBatch, None, None]:
        """Yield rows for the messages in the first column, keys in the second."""
        task = TaskContext.get()
        rows = _Rows(task.partitionId() if task is not None else 0)
        stages = [self._place(stage) for stage in self._stages]
        with bridged(partial(self._serve, stages)) as bridge:
            # It may end before its input: why, is the last note.
            for item in bridge.cross(map(run_of, batches)):
                yield from rows.add(item)
            yield from rows.rest()

    async def _serve(self, stages: Sequence[Stage], bridge: Bridge[_Item]) -> None:
        letters = 0

        async def note(letter: DeadLetter) -> None:
            nonlocal letters
            letters += 1
            text = letter.to_line().decode()
            await bridge.put(_Note(text, is_letter=True), len(text))

        configs = {stage.name: config_of(stage) for stage in self._stages}
        pipeline = Pipeline(
            name=self._letters.pipeline,
            source=Given(self._source, bridge.runs()),
            stages=stages,
            sink=_Sink(bridge),
            dead_letters=self._letters.kept_by(note, configs),
            judged_of=_JUDGED_OF,
        )
        report = await pipeline.run()
        error = report.error
        # It is logged by Spark, or staged with the rows.
        conceal = self._letters.secrets.conceal
        text = conceal(str(error))
        if isinstance(error, WorkerStartFailed | StageFailed):
            # It may be this machine's fault: Spark is to try another one.
            raise type(error)(text, stage=error.stage) from None
        outcome = json.dumps(_outcome(report, letters, conceal))
        await bridge.put(_Note(outcome, is_letter=False))


def _outcome(
    report: Report, letters: int, conceal: Callable[[str], str]
) -> dict[str, Any]:
    error = report.error
    about = {n: v for n, v in vars(error).items() if n in _TOLD} if error else {}
    return {
        "accounts": [account.counts for account in report.ledger],
        "letters": letters,
        "error": error
        and {
            "kind": type(error).__name__,
            "text": conceal(str(error)),
            "about": {
                name: conceal(value) if isinstance(value, str) else value
                for name, value in about.items()
            },
        },
    }


def _error(kind: str, text: str, about: dict[str, Any]) -> Exception:
    """Return an error as it was raised in a task, or a StageError like it."""
    found = getattr(errors, kind, StageError)
    if not isinstance(found, type) or not issubclass(found, StageError):
        found = StageError
    # Each class has a constructor of its own; this one has all that it can say.
    error = found.__new__(found)
    StageError.__init__(error, text, stage="")
    vars(error).update(about)
    return error


def message_of_partition(first: int, count: int = 1) -> str:
    """Return which messages of the task's partition an error is about."""
    task = TaskContext.get()
    partition = f" of partition {task.partitionId()}" if task is not None else ""
    upto = f" to {first + count}" if count > 1 else ""
    return f"message {first + 1}{upto}{partition}"


class Given(Source):
    """
    What Spark gives, as a pipeline's source.

    Args:
        name: As errors call it.
        runs: Of messages, see :func:`~etlstage.spark.dataframe.read.run_of`.

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
    """What Spark gets, as a pipeline's sink."""

    def __init__(self, bridge: Bridge[_Item]) -> None:
        super().__init__("a task's rows")
        self._bridge = bridge

    async def write(self, run: Run) -> None:
        self.account.received += len(run)
        await self._bridge.put(run, cost_of(run))
        self.account.done = self.account.received

    def landed(self) -> str:
        return f"{counted(self.account.done, 'message')} given to Spark"


class _Rows:
    """Makes batches for Spark out of messages and notes."""

    def __init__(self, partition: int) -> None:
        self._partition = partition
        self._places = 0
        self._values: list[pa.Array] = []
        self._page = self._page_size = 0
        self._notes: list[_Note] = []
        self._rows = self._size = 0

    def add(self, item: _Item) -> Iterator[pa.RecordBatch]:
        """Take messages or a note; yield a batch if there is enough for one."""
        if isinstance(item, _Note):
            self._notes.append(item)
            self._size += len(item.text)
        else:
            run = item
            self._values.append(
                run.array if isinstance(run, Column) else pa.array(run, pa.binary())
            )
            self._size += size_of(run)
            self._rows += len(run)
        if self._size >= _BYTES or self._rows >= _ROWS:
            yield from self.rest()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """Yield what there is, if anything."""
        values, self._values = self._values, []
        notes, self._notes = self._notes, []
        self._rows = self._size = 0
        if values:
            value = pa.concat_arrays(values)
            ones = pa.repeat(pa.scalar(1, pa.int64()), len(value))
            place = pc.cumulative_sum(ones, start=self._places - 1)
            self._places += len(value)
            yield self._batch(place, value, pa.nulls(len(value), pa.string()))
        if notes:
            texts = pa.array([note.text for note in notes], pa.string())
            places = pa.array(map(self._page_of, notes), pa.int64())
            yield self._batch(places, pa.nulls(len(notes), pa.binary()), texts)

    def _page_of(self, note: _Note) -> int | None:
        if not note.is_letter:
            return None
        if self._page_size >= _PAGE:
            self._page, self._page_size = self._page + 1, 0
        self._page_size += len(note.text)
        return self._page

    def _batch(
        self, place: pa.Array, value: pa.Array, note: pa.Array
    ) -> pa.RecordBatch:
        partition = pa.repeat(pa.scalar(self._partition, pa.int32()), len(value))
        return pa.RecordBatch.from_arrays(
            [partition, place, value, note], schema=_SCHEMA
        )
