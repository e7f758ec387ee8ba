"""
Writes of ``format("etlstage")``: rows into load workers, one for each attempt.

Spark guarantees little: a task may run twice, even at the same time. A commit names one
successful attempt for each partition, and may be repeated for the same batch of a
stream. So the effects of an attempt must not be final before the commit. A write is one
epoch, and so is each batch of a stream; an epoch is committed as by the engines. Each
attempt writes its files into a folder of its own; those of the attempts that count are
sealed, and moved to where they are read once the epoch is recorded, see
``delivery/place.py``. Other effects than files are made final by the user's program.

The record of a write is Spark's own commit. A batch may be committed twice, if the
driver dies after our commit and before Spark has recorded it, so its number is stored.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import anyio
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from etlstage.errors import EtlstageError, RepliesDoubtful, SinkFailed, StageFailed
from etlstage.pipeline.delivery.folder import make_ours, opened
from etlstage.pipeline.delivery.place import EpochFiles
from etlstage.pipeline.delivery.position import PositionFile
from etlstage.pipeline.ledger import Account
from etlstage.pipeline.pipeline import Pipeline
from etlstage.pipeline.worker_sink import WorkerSink, check_ends, tell
from etlstage.spark.datasource.checkpoint import sync_checkpoint
from etlstage.spark.datasource.documents import MessageWriter
from etlstage.spark.datasource.options import Writing
from etlstage.spark.ship.artifact import place
from etlstage.spark.task.chain import Given, in_attempt, message_of_partition
from etlstage.spark.task.portal import Bridge, bridged
from etlstage.stage import Stage

__all__ = ("EpochOfWrite", "Staged", "Writer")

_RECORDS: Final = Path("_etlstage", "streams")
"""Where the last batch of each query is stored; Spark's readers skip such names."""


class EpochOfWrite(NamedTuple):
    """Identifies what one commit covers."""

    load: str
    """Identifies a write, or all batches of a query."""
    number: int = 1

    def __str__(self) -> str:
        return f"{self.load}-{self.number}"


@dataclass(frozen=True, kw_only=True)
class WrittenPart(WriterCommitMessage):
    """The result of a successful attempt."""

    epoch: EpochOfWrite
    partition: int
    attempt: str
    """Identifies the attempt among all others."""
    messages: int
    """Number of messages that its workers were given."""


class Writer(DataSourceArrowWriter, DataSourceStreamArrowWriter):
    """
    Writes a DataFrame, or each batch of a stream: all of it, or, if that fails, none.

    That holds for files that the worker leaves in the folder that ``ETLSTAGE_STAGING``
    names. It also holds for other effects if the worker only prepares them under the
    name in ``ETLSTAGE_ATTEMPT``, ``commit`` makes the attempts final that it is given,
    and ``abort`` undoes those that it is given; both may get an attempt twice.

    The files of a repeated batch are not moved into ``path`` again. ``commit`` gets
    such a batch twice, with the same ``epoch``, and must check whether it has seen it.

    Without ``path`` and ``commit`` rows are loaded at least once: those of an attempt
    that failed, or ran at the same time as another, stay loaded.

    Args:
        writing: What to write to.
        schema: Schema of the rows.
        streams: Whether it is a stream.
        checkpoint: Where Spark has the checkpoint of the stream; None: nothing is
            committed.

    Raises:
        ConfigError: If a column can't be written as JSON.

    """

    def __init__(
        self,
        writing: Writing,
        schema: StructType,
        *,
        streams: bool = False,
        checkpoint: str | None = None,
    ) -> None:
        self._feed = _Feed(writing, schema)
        self._writing = writing
        self._checkpoint = checkpoint
        # A stream's epoch is known only in tasks, and from what they have written.
        self._epoch = None if streams else EpochOfWrite(secrets.token_hex(8))
        if self._epoch is not None and writing.path is not None:
            Staged(writing.path, self._epoch).begin()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WrittenPart:
        """Pass the rows of a partition through a worker of this attempt."""
        if self._epoch is not None:
            return self._feed.attempt(iterator, self._epoch, None)
        task = TaskContext.get()
        assert task is not None
        # Spark passes neither the batch nor the query in any other way.
        batch = int(task.getLocalProperty("streaming.sql.batchId") or 0)
        query = str(task.getLocalProperty("sql.streaming.queryId"))
        epoch = EpochOfWrite(query, batch + 1)
        if self._writing.path is not None:
            Staged(self._writing.path, epoch).begin()
        return self._feed.attempt(iterator, epoch, batch)

    def commit(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int | None = None,  # noqa: N803 - Spark's name
    ) -> None:
        """Make final what these attempts have staged."""
        written = _ended_well(messages)
        if self._checkpoint is not None:
            sync_checkpoint(self._checkpoint)
        if staged := self._staged(written):
            attempts = [(one.partition, one.attempt) for one in written]
            if batchId is None:
                staged.seal(attempts)
                staged.move()
            else:
                staged.commit_once(attempts)
        told = [_described(one) | {"batch": batchId} for one in written]
        _tell(self._writing, self._writing.commit, told)

    def abort(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int | None = None,  # noqa: N803 - Spark's name
    ) -> None:
        """Undo what attempts have done, also failed ones; a batch will come again."""
        written = _ended_well(messages)
        if staged := self._staged(written):
            with staged.alone() if batchId is not None else nullcontext():
                staged.undo(done=staged.done)
        epoch = self._epoch_of(written)
        about = {"epoch": epoch and str(epoch), "batch": batchId}
        _tell(self._writing, self._writing.abort, _described_all(messages, about))

    def _staged(self, written: Sequence[WrittenPart]) -> Staged | None:
        path, epoch = self._writing.path, self._epoch_of(written)
        return None if path is None or epoch is None else Staged(path, epoch)

    def _epoch_of(self, written: Sequence[WrittenPart]) -> EpochOfWrite | None:
        return self._epoch or next((one.epoch for one in written), None)


# --- files ----------------------------------------------------------------------------


class Staged:
    """
    The files of one epoch, in a folder for each attempt until they are sealed.

    Args:
        path: The output folder.
        epoch: The epoch.

    """

    def __init__(self, path: Path, epoch: EpochOfWrite) -> None:
        self._attempts = EpochFiles(path, epoch.load).aside(epoch.number)
        # Apart from the attempts: an interrupted commit may have left files there.
        self._files = EpochFiles(path, epoch.load, start=1)
        self._undone = EpochFiles(path, epoch.load, start=2).aside(epoch.number)
        self._load, self._number = epoch
        self._record = PositionFile(path / _RECORDS, epoch.load)

    def begin(self) -> None:
        """Make the folder of the attempts, which an undone epoch lacks."""
        self._attempts.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def attempt(self, name: str) -> Iterator[Path]:
        """
        Make a folder for an attempt; it is removed if the attempt fails.

        Raises:
            FileNotFoundError: If the epoch has been undone: Spark does not wait for
                attempts that still run.

        """
        folder = self._attempts / name
        folder.mkdir()
        try:
            yield folder
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def seal(self, attempts: Sequence[tuple[int, str]]) -> None:
        """
        Make the files of attempts durable, and remove those of all others.

        Args:
            attempts: For each partition, the attempt that counts.

        Raises:
            OSError: If the files of an attempt are gone, or can't be moved.

        """
        aside = self._files.aside(self._number)
        shutil.rmtree(aside, ignore_errors=True)
        for partition, attempt in attempts:
            folder = self._attempts / attempt
            for at, _, names in os.walk(folder, onerror=_raise):
                for name in names:
                    new = aside / Path(at).relative_to(folder)
                    new.mkdir(parents=True, exist_ok=True)
                    Path(at, name).rename(new / f"{partition:05}-{name}")
        self._files.seal(self._number, always=False, check=_alone)
        shutil.rmtree(self._attempts, ignore_errors=True)

    def move(self) -> None:
        """Move sealed files to where they are read; may be repeated."""
        self._files.move(self._number, replaces=False, check=_alone)

    def commit_once(self, attempts: Sequence[tuple[int, str]]) -> None:
        """Seal, record and move; of a recorded epoch, only move the remaining files."""
        with self.alone():
            if self._number > self.done:
                self.seal(attempts)
                self._record.store({"batch": self._number - 1})
            else:
                shutil.rmtree(self._attempts, ignore_errors=True)
            self.move()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait for another commit of the query: one may outlive its driver."""
        folder = self._record.path.parent
        make_ours(folder)
        lock = folder / f"{self._load}.lock"
        with opened(lock, os.O_RDWR | os.O_CREAT) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @property
    def done(self) -> int:
        """The last recorded epoch; 0 if there is none."""
        match self._record.load():
            case {"batch": int(last)}:
                return last + 1
        return 0

    def undo(self, *, done: int) -> None:
        """Remove epochs after ``done``, and move the other sealed ones."""
        with suppress(OSError):
            # Renaming stops attempts that still run, which would leave files there.
            self._attempts.rename(self._undone)
        for number in self._files.sweep(done, check=_alone):
            self._files.move(number, replaces=False, check=_alone)


def _alone() -> None:
    """Do nothing: no other run can take over a commit of Spark's."""


def _raise(error: OSError) -> None:
    raise error


# --- programs -------------------------------------------------------------------------


def _ended_well(messages: Sequence[WriterCommitMessage | None]) -> list[WrittenPart]:
    return [one for one in messages if isinstance(one, WrittenPart)]


def _described(one: WrittenPart) -> dict[str, Any]:
    """Return what a program is given about a successful attempt."""
    return {
        "epoch": str(one.epoch),
        "batch": None,
        "partition": one.partition,
        "attempt": one.attempt,
        "messages": one.messages,
    }


def _described_all(
    messages: Sequence[WriterCommitMessage | None], about: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the same for each partition; for failed attempts, only what is known."""
    return [
        _described(one) | about
        if isinstance(one, WrittenPart)
        else about | {"partition": partition, "attempt": None, "messages": None}
        for partition, one in enumerate(messages)
    ]


def _tell(
    writing: Writing, command: Sequence[str], attempts: Sequence[dict[str, Any]]
) -> None:
    """
    Have a program process a JSON message for each attempt.

    Raises:
        SinkFailed: If the program does not answer all messages, or fails.

    """
    if not command or not attempts:
        return
    messages = [json.dumps(one).encode() for one in attempts]
    try:
        anyio.run(tell, writing.stage, tuple(command), messages)
    except EtlstageError as error:
        raise SinkFailed(
            f"{error} (its input was the list of attempts)", stage=writing.stage.name
        ) from error


# --- one attempt ----------------------------------------------------------------------


class _Feed:
    """
    Feeds the worker of an attempt with the rows of a partition.

    Args:
        writing: What to write to.
        schema: Schema of the rows.

    """

    def __init__(self, writing: Writing, schema: StructType) -> None:
        self._writer = MessageWriter(schema)
        self._writing = writing

    def attempt(
        self,
        batches: Iterator[pa.RecordBatch],
        epoch: EpochOfWrite,
        batch: int | None,
    ) -> WrittenPart:
        """
        Pass all rows through a worker; return when it has answered all and ended.

        Raises:
            StageFailed: If a message was rejected, or the worker was lost.

        """
        task = TaskContext.get()
        assert task is not None
        partition = task.partitionId()
        attempt = f"{partition}-{task.attemptNumber()}-{secrets.token_hex(4)}"
        about = {
            "ETLSTAGE_EPOCH": str(epoch),
            "ETLSTAGE_PARTITION": str(partition),
            "ETLSTAGE_ATTEMPT": attempt,
        }
        if batch is not None:
            about["ETLSTAGE_BATCH"] = str(batch)
        stage = place(self._writing.stage)
        if self._writing.path is None:
            account = self._load(batches, in_attempt(stage, about))
        else:
            with Staged(self._writing.path, epoch).attempt(attempt) as folder:
                about["ETLSTAGE_STAGING"] = str(folder)
                stage = _seen_from(stage, folder)
                account = self._load(batches, in_attempt(stage, about))
        return WrittenPart(
            epoch=epoch, partition=partition, attempt=attempt, messages=account.received
        )

    def _load(self, batches: Iterator[pa.RecordBatch], stage: Stage) -> Account:
        """Pass messages through a worker, and return their account."""
        sink = _Ending if self._writing.staged else WorkerSink
        account: Account
        with bridged(partial(_serve, sink, stage)) as bridge:
            (account,) = bridge.cross(map(self._writer.messages_of, batches))
        if account.doubtful:
            raise RepliesDoubtful(account.doubtful, stage=stage.name)
        return account


def _seen_from(stage: Stage, folder: Path) -> Stage:
    """Return the stage with ``{staging}`` in its command replaced by the folder."""
    words = stage.program.command
    command = tuple(word.replace("{staging}", str(folder)) for word in words)
    return replace(stage, worker=replace(stage.program, command=command))


async def _serve(sink: type[WorkerSink], stage: Stage, bridge: Bridge[Account]) -> None:
    pipeline = Pipeline(
        name=stage.name,
        source=Given(f"stage {stage.name}", bridge.runs()),
        sink=sink(stage),
    )
    report = await pipeline.run()
    error = report.error
    if isinstance(error, EtlstageError) and error.place is not None:
        text = f"{error} ({message_of_partition(error.place)})"
        raise StageFailed(text, stage=stage.name) from None
    if error is not None:
        raise error
    await bridge.put(report.ledger[-1])


class _Ending(WorkerSink):
    """Load workers, each of which must exit with status 0 when its input has ended."""

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._events = self.supervisor.events()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await super().__aexit__(kind, error, trace)
        with self._events as events:
            if error is None:
                await check_ends(self.name, events)
        if error is None and self.supervisor.unknown_outcomes:
            raise StageFailed(
                f"stage {self.name}: a worker was lost, or rejected a batch: workers may"
                " have stored some messages twice, or not at all, in this attempt",
                stage=self.name,
            )
