"""
Writes of ``format("etlstage-journal")``: rows appended to journals, once.

Each attempt of a task is a producer: what it appends is in a transaction, forced to the
disk, and what would acknowledge it is sent to the driver. The driver stores that of all
attempts that count beside the journals, in one step, and appends it then: with the first
the write is committed, whatever happens to the second. What an attempt has appended that
is not among them is never acknowledged, and so is never read; where its end is known it
is rolled back, so that readers need not keep it until they forget the producer.

Of a stream the last batch of each query stays stored: one that comes again, for Spark did
not note that it was committed, has the acknowledgements that are stored appended again,
which does no harm, and none of its own. Of a write it is removed; where a driver has
ended between the two, the next that writes to the set appends it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import anyio
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import BinaryType, StringType, StructType

from etlstage.columns import Column
from etlstage.errors import SinkFailed
from etlstage.files.text import objects
from etlstage.journal import Journals
from etlstage.journal.errors import JournalError
from etlstage.pipeline.interfaces import Epochs
from etlstage.pipeline.journal_sink import JournalSink, append_intents
from etlstage.settings.definition import settings_of
from etlstage.spark.dataframe.read import column_of
from etlstage.spark.datasource.documents import check_written
from etlstage.spark.journal.options import NAME, JournalWriting, SetFolder

__all__ = ("JournalStreamWriter", "JournalWriter", "StoredCommits")

_FOLDER: Final = "spark"
"""In the set, where acknowledgements are stored."""


@dataclass(frozen=True, kw_only=True)
class AppendedPart(WriterCommitMessage):
    """What an attempt that ended well has appended."""

    query: str
    intents: list[list[str]]
    """What acknowledges it, by journal, framed."""
    rollbacks: list[list[str]]
    """What drops it, likewise."""


class JournalWriter(DataSourceArrowWriter):
    """
    Appends a DataFrame: readers see all of it or, if the write fails, nothing.

    Args:
        writing: What to write to; a set that is not there is made.
        schema: Of the rows: one text or binary column has the messages, more columns
            are made JSON objects.

    Raises:
        ConfigError: If a column can't be written as JSON.
        JournalError: If the set can't be written to.

    """

    def __init__(self, writing: JournalWriting, schema: StructType) -> None:
        self._task = _AppendingTask(writing, schema)
        self._number = secrets.token_hex(8)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> AppendedPart:
        """Append the rows of a partition, uncommitted."""
        return self._task.append(iterator, self._number)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Store what acknowledges the attempts that count, and append it."""
        with self._task.place.opened() as journals:
            StoredCommits(journals).write(self._number, _intents(messages))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Roll back what was appended, unless it is committed."""
        with self._task.place.opened() as journals:
            StoredCommits(journals).roll_back(f"write-{self._number}", messages)


class JournalStreamWriter(DataSourceStreamArrowWriter):
    """
    Appends the batches of a stream, each all or not at all, and once.

    Args:
        writing: What to write to; a set that is not there is made.
        schema: Of the rows; as for :class:`JournalWriter`.

    """

    def __init__(self, writing: JournalWriting, schema: StructType) -> None:
        self._task = _AppendingTask(writing, schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> AppendedPart:
        """Append the rows of a partition, uncommitted."""
        task = TaskContext.get()
        assert task is not None
        query = str(task.getLocalProperty("sql.streaming.queryId"))
        return self._task.append(iterator, query)

    def commit(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int,  # noqa: N803 - Spark's name
    ) -> None:
        """Store what acknowledges the attempts that count, once, and append it."""
        known = [one for one in messages if isinstance(one, AppendedPart)]
        if known:
            with self._task.place.opened() as journals:
                commits = StoredCommits(journals)
                commits.batch(known[0].query, batchId, _intents(messages))
                # Of a batch that was committed before, by another start.
                commits.roll_back(f"query-{known[0].query}", messages)

    def abort(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int,  # noqa: N803 - Spark's name
    ) -> None:
        """Roll back what was appended, unless it is committed."""
        known = [one for one in messages if isinstance(one, AppendedPart)]
        if known:
            with self._task.place.opened() as journals:
                name = f"query-{known[0].query}"
                StoredCommits(journals).roll_back(name, messages)


class StoredCommits:
    """
    The commits of Spark that are stored in a set of journals.

    Args:
        journals: The set.

    """

    def __init__(self, journals: Journals) -> None:
        self._journals = journals

    def write(self, number: str, intents: list[list[str]]) -> None:
        """Commit a write."""
        name = f"write-{number}"
        self._store(name, {"intents": intents})
        self._finish(name, intents)

    def batch(self, query: str, number: int, intents: list[list[str]]) -> None:
        """Commit a batch of a stream, or what is stored of it, if it is committed."""
        name = f"query-{query}"
        stored = self._load(name)
        if stored.get("batch", -1) < number:
            stored = {"batch": number, "intents": intents}
            self._store(name, stored)
        self._append(stored["intents"])

    def roll_back(
        self, name: str, messages: Sequence[WriterCommitMessage | None]
    ) -> None:
        """
        Roll back what is not among the acknowledgements that are stored.

        Args:
            name: Of the commit.
            messages: Of attempts that have ended.

        """
        kept = self._load(name).get("intents", [])
        self._append(
            [
                dropped
                for one in messages
                if isinstance(one, AppendedPart)
                if not any(intent in kept for intent in one.intents)
                for dropped in one.rollbacks
            ]
        )

    def resume(self) -> None:
        """Append what was stored by drivers that have ended before they did it."""
        for file in self._journals.storage.names(_FOLDER):
            name, _, kind = file.rpartition(".")
            if name.startswith("write-") and kind == "json":
                self._finish(name, self._load(name).get("intents", []))

    def _finish(self, name: str, intents: list[list[str]]) -> None:
        try:
            self._append(intents)
        except (OSError, JournalError) as error:
            raise SinkFailed(
                f"the write is committed and could not be ended: {error}; don't repeat"
                " it: the next that writes to these journals ends it",
                stage=NAME,
            ) from error
        self._journals.storage.remove(f"{_FOLDER}/{name}.json")

    def _append(self, intents: list[list[str]]) -> None:
        append_intents(self._journals, intents, stage=NAME)

    def _store(self, name: str, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self._journals.storage.replace(f"{_FOLDER}/{name}.json", data)

    def _load(self, name: str) -> dict[str, Any]:
        data = self._journals.storage.load(f"{_FOLDER}/{name}.json")
        found: dict[str, Any] = json.loads(data) if data else {}
        return found


def _intents(messages: Sequence[WriterCommitMessage | None]) -> list[list[str]]:
    return [
        intent
        for one in messages
        if isinstance(one, AppendedPart)
        for intent in one.intents
    ]


class _AppendingTask:
    """
    Appends the rows of partitions.

    Args:
        writing: What to write to.
        schema: Of the rows.

    Attributes:
        place: The set, which the driver has made or opened.

    """

    def __init__(self, writing: JournalWriting, schema: StructType) -> None:
        kind = schema[0].dataType if len(schema) == 1 else None
        self._plain = isinstance(kind, StringType | BinaryType)
        if not self._plain:
            check_written(schema)
        self._settings = {
            name: getattr(writing, name) for name in settings_of(JournalWriting)
        }
        anyio.run(self._appended, iter(()))  # makes the set
        self.place: SetFolder = SetFolder.seen(writing.path)
        with self.place.opened() as journals:
            StoredCommits(journals).resume()

    def append(self, batches: Iterator[pa.RecordBatch], query: str) -> AppendedPart:
        """
        Append the rows of a partition, and return what acknowledges them.

        Raises:
            JournalError: If the driver's folder is not seen here.
            SinkFailed: If they can't be appended, or a message is null.

        """
        self.place.opened().close()
        sink = anyio.run(self._appended, batches)
        return AppendedPart(query=query, intents=sink.intents, rollbacks=sink.rollbacks)

    async def _appended(self, batches: Iterator[pa.RecordBatch]) -> JournalSink:
        sink = JournalSink(**self._settings, name=NAME)
        sink.begin(Epochs(NAME, 0, True, lambda: None))
        async with sink:
            try:
                for batch in batches:
                    await sink.write(self._messages(batch))
                await sink.flush()
            except BaseException:
                # The disk may be full: what is not dropped is never read either.
                with suppress(SinkFailed):
                    await sink.roll_back()
                raise
            return sink

    def _messages(self, batch: pa.RecordBatch) -> Column:
        texts = batch.column(0) if self._plain else objects(batch, utc=True)
        messages = column_of(texts)
        if messages.problem is not None:
            raise SinkFailed(f"format {NAME}: {messages.problem}", stage=NAME)
        return messages
