"""
One attempt of a write: the rows of a partition through a load worker of its own.

The attempt ends well when all rows are answered, or dead-lettered if that is allowed.
What it has done is not final by that; ``writer.py`` says when it is.
"""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import BinaryType, StringType, StructType

from etlstage.errors import EtlstageError, RepliesDoubtful, StageFailed
from etlstage.messages import Run
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.dead_letter.policy import config_of
from etlstage.pipeline.ledger import Account
from etlstage.pipeline.pipeline import Pipeline
from etlstage.pipeline.worker_sink import WorkerSink, check_ends
from etlstage.spark.dataframe.read import column_of
from etlstage.spark.datasource.commit import AttemptFiles
from etlstage.spark.datasource.json_rows import check_types, documents_of
from etlstage.spark.datasource.options import Writing
from etlstage.spark.task.chain import Given, message_of_partition
from etlstage.spark.task.portal import Bridge, bridged
from etlstage.stage import ErrorBudget, Order, Stage

__all__ = ("Feed", "WrittenPart")

_Item: TypeAlias = "DeadLetter | Account"
"""What comes of an attempt: dead letters, and at its end its account."""


@dataclass(frozen=True, kw_only=True)
class WrittenPart(WriterCommitMessage):
    """What an attempt that ended well has done."""

    write: str
    """What tells the write from all others: of a stream, its query and batch."""
    partition: int
    attempt: str
    """What tells the attempt from all others."""
    messages: int
    """How many its workers were given."""
    skipped: int
    restarts: int
    failures: int
    """As in the account of a stage."""
    dead: tuple[tuple[int, DeadLetter], ...] = ()
    """What it has dead-lettered; only with a report. The number beside each, and the
    letter's place, are what the row says."""


class Feed:
    """
    Feeds the worker of an attempt with the rows of a partition.

    Args:
        writing: What to write to.
        schema: Of the rows. With a report: ``partition`` and ``place``, of which each
            dead letter gets those of its row, and the message.

    """

    def __init__(self, writing: Writing, schema: StructType) -> None:
        fields = schema.fields[2:] if writing.report is not None else schema.fields
        single = len(fields) == 1
        self._plain = single and isinstance(fields[0].dataType, StringType | BinaryType)
        if not self._plain:
            check_types(schema, read=False)
        self._writing = writing

    def attempt(
        self, batches: Iterator[pa.RecordBatch], write: str, batch: int | None
    ) -> WrittenPart:
        """
        Pass all rows through a worker; return when all are answered and it has ended.

        Raises:
            StageFailed: If a message was refused, or the worker lost.

        """
        task = TaskContext.get()
        assert task is not None
        partition = task.partitionId()
        attempt = f"{partition}-{task.attemptNumber()}-{secrets.token_hex(4)}"
        about = {
            "ETLSTAGE_WRITE": write,
            "ETLSTAGE_PARTITION": str(partition),
            "ETLSTAGE_ATTEMPT": attempt,
        }
        if batch is not None:
            about["ETLSTAGE_BATCH"] = str(batch)
        with _staged(self._writing.path, write, attempt) as folder:
            if folder is not None:
                about["ETLSTAGE_STAGING"] = str(folder)
            stage = self._writing.place(self._writing.stage)
            account, dead = self._load(batches, _stage(stage, about, folder))
            if account.doubtful:
                raise RepliesDoubtful(account.doubtful, stage=stage.name)
        return WrittenPart(
            write=write,
            partition=partition,
            attempt=attempt,
            messages=account.received,
            skipped=account.skipped,
            restarts=account.restarts,
            failures=account.failures,
            dead=tuple(dead),
        )

    def _load(
        self, batches: Iterator[pa.RecordBatch], stage: Stage
    ) -> tuple[Account, list[tuple[int, DeadLetter]]]:
        """Return the account, and which messages are dead letters."""
        writing, account = self._writing, Account(stage.name, stage.kind)
        dead: list[tuple[int, DeadLetter]] = []
        places = _Places()

        def runs() -> Iterator[Run]:
            for batch in batches:
                if writing.report is not None:
                    places.add(batch.column(0), batch.column(1))
                yield column_of(
                    batch.column(-1) if self._plain else documents_of(batch)
                )

        with bridged(partial(_serve, writing, stage)) as bridge:
            for item in bridge.cross(runs()):
                if isinstance(item, Account):
                    account = item
                else:
                    number, place = places.of(item.place)
                    dead.append((number, replace(item, place=place)))
        return account, dead


class _Places:
    """What rows say of themselves, kept as ranges: most follow one another."""

    def __init__(self) -> None:
        self._rows = 0
        self._starts: list[int] = []
        self._first: list[tuple[int, int]] = []

    def add(self, partitions: pa.Array, places: pa.Array) -> None:
        """Take note of the next rows."""
        breaks = pc.or_(
            pc.not_equal(pc.pairwise_diff(partitions), 0),
            pc.not_equal(pc.pairwise_diff(places), 1),
        )
        for at in pc.indices_nonzero(breaks.fill_null(fill_value=True)).to_pylist():
            self._starts.append(self._rows + at)
            self._first.append((partitions[at].as_py(), places[at].as_py()))
        self._rows += len(places)

    def of(self, row: int) -> tuple[int, int]:
        """Return the partition and the place that a row said."""
        at = bisect_right(self._starts, row) - 1
        partition, place = self._first[at]
        return partition, place + row - self._starts[at]


async def _serve(writing: Writing, stage: Stage, bridge: Bridge[_Item]) -> None:
    async def keep(letter: DeadLetter) -> None:
        await bridge.put(letter, len(letter.message))

    letters = writing.letters
    if letters is not None:
        letters = letters.kept_by(keep, {stage.name: config_of(writing.stage)})
    pipeline = Pipeline(
        name=stage.name,
        source=Given(f"stage {stage.name}", bridge.runs()),
        sink=(_Staging if writing.staged else WorkerSink)(stage, dead_letters=letters),
    )
    report = await pipeline.run()
    error = report.error
    if isinstance(error, EtlstageError) and error.place is not None:
        text = f"{error} ({message_of_partition(error.place)})"
        # It is logged by Spark.
        text = text if letters is None else letters.secrets.conceal(text)
        raise StageFailed(text, stage=stage.name) from None
    if error is not None:
        raise error
    await bridge.put(report.ledger[-1])


class _Staging(WorkerSink):
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


@contextmanager
def _staged(path: Path | None, write: str, attempt: str) -> Iterator[Path | None]:
    """Make a folder for an attempt; remove it if the attempt fails."""
    if path is None:
        yield None
        return
    staging = AttemptFiles(path, write)
    try:
        yield staging.make(attempt)
    except BaseException:
        staging.discard(attempt)
        raise


def _stage(stage: Stage, about: dict[str, str], folder: Path | None) -> Stage:
    command = stage.program.command
    if folder is not None:
        command = tuple(word.replace("{staging}", str(folder)) for word in command)
    env = about | dict(stage.program.env)
    return replace(
        stage,
        worker=replace(stage.program, command=command, env=env),
        # In the order of the input: so a message's place is that of its row.
        order=Order.TOTAL,
        key=None,
        # An attempt has a part of the messages: the driver judges how many failed.
        on_error=replace(stage.on_error, budget=ErrorBudget(count=None, share=None)),
    )
