"""
Writes of ``format("etlstage")``: rows into load workers, one for each attempt.

What Spark promises is little: a task may run twice, also at the same time, and of the
attempts that ended well one for each partition is named in a commit, which may come
again for the same batch of a stream. So what an attempt does must not be final before
the commit: it stages. How files are staged is in ``commit.py``.
"""

from __future__ import annotations

import json
import pickle
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from etlstage.errors import EtlstageError, SinkFailed
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.worker_sink import tell
from etlstage.spark.datasource.attempt import Feed, WrittenPart
from etlstage.spark.datasource.commit import AttemptFiles
from etlstage.spark.datasource.options import Writing
from etlstage.stage import RestartPolicy

__all__ = ("Loaded", "StreamWriter", "Writer")


class Writer(DataSourceArrowWriter):
    """
    Writes a DataFrame: all of it, or, if the write fails, none.

    That holds for files in the folder that ``ETLSTAGE_STAGING`` names, where the
    worker leaves them: of each partition those of one attempt are moved into ``path``
    when all have ended well, and all are removed if not. A driver that dies in the
    middle of that may leave some in place.

    It holds as well for other effects if the worker only prepares them under what
    ``ETLSTAGE_ATTEMPT`` says, ``commit`` makes those final that it is told, and
    ``abort`` undoes them; both may be told twice.

    Without ``path`` and ``commit`` rows are loaded at least once: those of an attempt
    that failed, or that ran beside another, stay loaded.

    Args:
        writing: What to write to.
        schema: Of the rows.

    Raises:
        ConfigError: If a column can't be written as JSON.

    """

    def __init__(self, writing: Writing, schema: StructType) -> None:
        self._feed = Feed(writing, schema)
        self._writing = writing
        self._write = secrets.token_hex(8)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WrittenPart:
        """Pass the rows of a partition through a worker of this attempt."""
        return self._feed.attempt(iterator, self._write, None)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Make final what the attempts have staged."""
        written = _ended_well(messages)
        if self._writing.path is not None:
            staging = AttemptFiles(self._writing.path, self._write)
            staging.publish([(one.partition, one.attempt) for one in written])
        _tell(self._writing, self._writing.commit, [_told(one) for one in written])
        _report(self._writing, written)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Undo what attempts have done, also those that failed."""
        if self._writing.path is not None:
            AttemptFiles(self._writing.path, self._write).undo()
        told = _told_all(messages, {"write": self._write, "batch": None})
        _tell(self._writing, self._writing.abort, told)


class StreamWriter(DataSourceStreamArrowWriter):
    """
    Writes the batches of a stream, each all or not at all, and once.

    As for :class:`Writer`, and a batch that comes again, after a crash between its
    commit and Spark's note of it, is not moved into ``path`` again; where the crash
    was in the middle of the commit, what had been moved is replaced. ``commit`` is
    told such a batch twice, by the same ``write``: it must look whether it has seen
    it. Without ``path`` and ``commit``, at least once.

    Args:
        writing: What to write to.
        schema: Of the rows.

    """

    def __init__(self, writing: Writing, schema: StructType) -> None:
        self._feed = Feed(writing, schema)
        self._writing = writing

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WrittenPart:
        """Pass the rows of a partition through a worker of this attempt."""
        task = TaskContext.get()
        assert task is not None
        # Neither the batch nor the query is told in any other way.
        batch = int(task.getLocalProperty("streaming.sql.batchId") or 0)
        query = task.getLocalProperty("sql.streaming.queryId")
        return self._feed.attempt(iterator, f"{query}-{batch}", batch)

    def commit(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int,  # noqa: N803 - Spark's name
    ) -> None:
        """Make final what the attempts of a batch have staged."""
        written = _ended_well(messages)
        if self._writing.path is not None and written:
            write = written[0].write
            AttemptFiles(self._writing.path, write).publish_once(
                [(one.partition, one.attempt) for one in written],
                write.removesuffix(f"-{batchId}"),
                batchId,
            )
        told = [_told(one) | {"batch": batchId} for one in written]
        _tell(self._writing, self._writing.commit, told)
        _report(self._writing, written)

    def abort(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int,  # noqa: N803 - Spark's name
    ) -> None:
        """Remove what attempts of a batch have staged; it will come again."""
        known = [one for one in messages if isinstance(one, WrittenPart)]
        if self._writing.path is not None and known:
            write = known[0].write
            query = write.removesuffix(f"-{batchId}")
            AttemptFiles(self._writing.path, write).undo_once(query, batchId)
        about = {"write": known[0].write if known else None, "batch": batchId}
        told = _told_all(messages, about)
        _tell(self._writing, self._writing.abort, told)


def _ended_well(messages: Sequence[WriterCommitMessage | None]) -> list[WrittenPart]:
    return [one for one in messages if isinstance(one, WrittenPart)]


def _told(one: WrittenPart) -> dict[str, Any]:
    """Return what a program is told about an attempt that ended well."""
    return {
        "write": one.write,
        "batch": None,
        "partition": one.partition,
        "attempt": one.attempt,
        "messages": one.messages,
    }


def _told_all(
    messages: Sequence[WriterCommitMessage | None], about: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the same for each partition; of one that failed no more is known."""
    return [
        _told(one) | about
        if isinstance(one, WrittenPart)
        else about | {"partition": partition, "attempt": None, "messages": None}
        for partition, one in enumerate(messages)
    ]


def _tell(
    writing: Writing, command: tuple[str, ...], told: Sequence[dict[str, Any]]
) -> None:
    """
    Have a program load what it is told, a JSON message for each attempt.

    Raises:
        SinkFailed: If it does not answer all of it, or ends badly.

    """
    if not command or not told:
        return
    stage = replace(
        writing.stage,
        worker=replace(writing.stage.program, command=command),
        dialect=writing.stage.dialect.fitted(batches=False, heartbeat=None),
        workers=1,
        restart=RestartPolicy(),
    )
    try:
        anyio.run(tell, stage, [json.dumps(one).encode() for one in told])
    except EtlstageError as error:
        raise SinkFailed(
            f"{error} (given the list of attempts)", stage=stage.name
        ) from error


class Loaded(NamedTuple):
    """What became of the messages of a write."""

    messages: int
    skipped: int
    restarts: int
    failures: int
    dead: list[tuple[int, DeadLetter]]
    """Those that are dead-lettered, see :class:`WrittenPart`."""

    @classmethod
    def read(cls, report: Path) -> Loaded:
        """Return what a write that was committed has left in its report."""
        with report.open("rb") as file:
            loaded: Loaded = pickle.load(file)  # noqa: S301 - our own
        return loaded


def _report(writing: Writing, written: Sequence[WrittenPart]) -> None:
    if writing.report is None:
        return
    loaded = Loaded(
        sum(one.messages for one in written),
        sum(one.skipped for one in written),
        sum(one.restarts for one in written),
        sum(one.failures for one in written),
        [letter for one in written for letter in one.dead],
    )
    new = writing.report.with_name(writing.report.name + ".new")
    new.write_bytes(pickle.dumps(loaded))
    new.replace(writing.report)
