"""
One micro-batch of a stream: through the stages, into the sink, once.

Spark may give a batch again, with the same number and the same rows, when it was
stopped before it noted that the batch has ended. So a batch leaves a record when all
of it has landed; one that has its record is skipped. Before the record is there, files
of a batch are replaced as a whole: they are in a folder of their own, the epoch's.

Over Spark Connect this runs on the server's machine, in a process of its own. What it
has to say is in the records, which are in the state directory.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import anyio
from pyspark.sql import DataFrame, SparkSession

from etlstage.errors import EtlstageError
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.delivery.folder import make
from etlstage.pipeline.delivery.position import load, store
from etlstage.pipeline.interfaces import Output
from etlstage.pipeline.ledger import Ledger
from etlstage.spark.dataframe.destination import Destination
from etlstage.spark.engine.stage_job import StageJob
from etlstage.spark.engine.staging import StagedLoad, staging_for
from etlstage.spark.load.dataframe import StagedSink
from etlstage.spark.load.worker import StagedWorker
from etlstage.spark.ship.artifact import place
from etlstage.spark.ship.plan import Shipment
from etlstage.stage import ErrorPolicy, Stage

__all__ = ("STOPPED", "Batches", "FrameOutlet", "Outlet", "Record", "WorkerOutlet")

STOPPED: Final = "etlstage begins no further batch"
"""What a batch raises that comes after the stream was told to stop."""

_STOP: Final = "stop"
_KEPT: Final = 1000  # records; Spark can go back by 100 batches
_STOP_NOW: Final = "stop-now"
_LOOK: Final = 0.2  # seconds between two looks whether to stop now


class Outlet(Protocol):
    """
    Where the batches of a stream end: makes the sink of each.

    It is plain data: over Spark Connect it travels to the process that runs the batches.
    """

    @property
    def name(self) -> str:
        """Name of the load stage."""
        ...

    def objection(self) -> str | None:
        """Return what stands against a stream that begins, as far as it is known."""
        ...

    def output(self) -> Output:
        """Return where the messages end."""
        ...

    def sink(self, spark: SparkSession, epoch: str, letters: DeadLetters) -> StagedLoad:
        """
        Return the sink of a batch.

        Args:
            spark: The session.
            epoch: What the batch is called, every time it is run.
            letters: Where messages are dead-lettered.

        """
        ...

    def __str__(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class FrameOutlet:
    """A DataFrame: a path has a folder for each epoch, which is replaced as a whole."""

    destination: Destination
    """With mode ``error`` a stream that begins must find nothing there."""
    name: str = "load"
    schema: str | None = None
    """As for :class:`DataFrameSink`."""
    on_error: ErrorPolicy = field(default_factory=ErrorPolicy)

    def __str__(self) -> str:
        return str(self.destination)

    def objection(self) -> str | None:
        """Return what stands against a stream that begins, as far as it is known."""
        return self.destination.objection(self.destination.partition_by)

    def output(self) -> Output:
        """Return the destination."""
        return self.destination.output()

    def sink(self, spark: SparkSession, epoch: str, letters: DeadLetters) -> StagedSink:
        """Return the sink of a batch."""
        place = replace(self.destination, mode="append")
        if place.path is not None:
            path = f"{place.path}/epoch={epoch}"
            place = replace(place, path=path, mode="overwrite")
        return StagedSink(
            spark,
            place,
            name=self.name,
            schema=self.schema,
            on_error=self.on_error,
            dead_letters=letters,
        )


@dataclass(frozen=True, kw_only=True)
class WorkerOutlet:
    """Load workers; a batch that is run again is loaded again."""

    stage: Stage
    place: Callable[[Stage], Stage] = place
    """Makes of it the one that runs in a task."""

    @property
    def name(self) -> str:
        """Name of the load stage."""
        return self.stage.name

    def __str__(self) -> str:
        return f"stage {self.stage.name}"

    def objection(self) -> str | None:
        """Return None: a worker says what it wants when it runs."""
        return None

    def output(self) -> Output:
        """Return that workers have them."""
        return Output("workers", self.name)

    def sink(
        self, spark: SparkSession, epoch: str, letters: DeadLetters
    ) -> StagedWorker:
        """Return the sink of a batch."""
        del spark, epoch
        return StagedWorker(self.stage, dead_letters=letters, place=self.place)


class Record(NamedTuple):
    """What became of one batch."""

    number: int
    run: str
    """Of the process that ran it."""
    accounts: list[list[int]]
    """For each stage: received, done, dead, failed, lost, produced."""
    loaded: bool
    """Whether it has landed; otherwise it ended the run."""
    error: str | None


class Batches:
    """
    What Spark calls for each batch.

    Args:
        run: What sets this run apart from others.
        state: The state directory.
        source: Name of the extract stage.
        stages: The stages, of kind transform.
        outlet: Where they end.
        letters: Where messages are dead-lettered.
        staging: See :func:`staging_for`.
        shipment: What was sent to the executors.

    Attributes:
        log_path: Spark's log, for errors to name, once there is one.

    """

    def __init__(
        self,
        run: str,
        state: Path,
        *,
        source: str,
        stages: Sequence[Stage],
        outlet: Outlet,
        letters: DeadLetters,
        staging: str | None = None,
        shipment: Shipment | None = None,
    ) -> None:
        self._run = run
        self._state = state
        self._source = source
        self._stages = tuple(stages)
        self._outlet = outlet
        self._letters = letters
        self._staging = staging
        self._shipment = shipment
        self.log_path: Path | None = None
        self._first = True
        self._read: set[str] = set()

    def __call__(self, messages: DataFrame, number: int) -> None:
        """Process a batch; blocks."""
        if (self._state / _STOP).exists():
            raise RuntimeError(STOPPED)
        if self._record(number).exists():
            return
        anyio.run(self._process_unless_stopped, messages, number)

    def stream(self) -> str:
        """Return what the epochs of this stream are called after; made if it is new."""
        path = self._state / "stream.json"
        if not path.exists():
            store(path, {"id": secrets.token_hex(4)})
        name: str = load(path)["id"]
        return name

    def records(self) -> Iterator[Record]:
        """Yield the records of this run that are new since the last time, unordered."""
        for path in (self._state / "batches").glob("*.json"):
            if path.name in self._read:
                continue
            self._read.add(path.name)
            record = Record(**load(path))
            if record.run == self._run:
                yield record

    def begin(self, *, anew: bool) -> None:
        """
        Forget what earlier runs left: that they were stopped, what they failed at.

        Args:
            anew: Whether Spark counts batches from zero again, its checkpoint being
                gone: the batches that have records are others then.

        """
        self.forget_stop()
        if anew:
            (self._state / "stream.json").unlink(missing_ok=True)
            shutil.rmtree(self._state / "batches", ignore_errors=True)
        for path in (self._state / "batches").glob("*.failed.json"):
            path.unlink(missing_ok=True)

    def stop(self, *, at_once: bool = False) -> None:
        """
        Begin no further batch.

        Args:
            at_once: Call off the one that is under way, too: it is run again when
                batches begin again.

        """
        make(self._state)
        (self._state / _STOP).touch()
        if at_once:
            (self._state / _STOP_NOW).touch()

    def forget_stop(self) -> None:
        """Let batches begin again."""
        (self._state / _STOP).unlink(missing_ok=True)
        (self._state / _STOP_NOW).unlink(missing_ok=True)

    async def _process_unless_stopped(self, messages: DataFrame, number: int) -> None:
        error: Exception | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._call_off, tasks.cancel_scope)
            try:
                await self._process(messages, number)
            except Exception as caught:
                error = caught
            tasks.cancel_scope.cancel()
        if error is not None:
            raise error
        if not self._record(number).exists():
            raise RuntimeError(STOPPED)

    async def _call_off(self, batch: anyio.CancelScope) -> None:
        # Whoever stops it may be another process: see Connect.
        while not (self._state / _STOP_NOW).exists():  # noqa: ASYNC110
            await anyio.sleep(_LOOK)
        batch.cancel()

    async def _process(self, messages: DataFrame, number: int) -> None:
        epoch = f"{self.stream()}-{number}"
        letters = self._letters.of_run(epoch)
        if self._first:
            # Only the first batch of a process may have been begun by another.
            letters.recall()
            self._first = False
        sink = self._outlet.sink(messages.sparkSession, epoch, letters)
        names = [stage.name for stage in self._stages]
        ledger = Ledger.of_pipeline(self._source, names, sink.account)
        error: EtlstageError | None = None
        try:
            await self._pass(messages, ledger, letters, sink)
            await letters.sync()
        except EtlstageError as caught:
            error = caught
        finally:
            letters.close()
        if error is not None:
            ledger.settle()
        else:
            ledger.check(whole=True)
        counts = [account.counts for account in ledger]
        text = None if error is None else str(error)
        record = Record(number, self._run, counts, error is None, text)
        self._note(record)
        if error is not None:
            raise error

    async def _pass(
        self,
        messages: DataFrame,
        ledger: Ledger,
        letters: DeadLetters,
        sink: StagedLoad,
    ) -> None:
        spark = messages.sparkSession
        passing = StageJob(
            self._source,
            self._stages,
            ledger,
            letters,
            shipment=self._shipment,
            log_path=self.log_path,
        )
        with staging_for(spark, self._staging, letters.pipeline) as staging:
            await passing.fill(messages, staging)
            starts = await passing.settle(spark, staging)
            async with sink:
                await sink.load(staging.messages(spark), starts)

    def _note(self, record: Record) -> None:
        path = self._record(record.number)
        if not record.loaded:
            path = path.with_name(f"{record.number}.failed.json")
        store(path, record._asdict())
        # One goes with each that comes.
        self._record(record.number - _KEPT).unlink(missing_ok=True)

    def _record(self, number: int) -> Path:
        return self._state / "batches" / f"{number}.json"
