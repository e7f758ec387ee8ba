"""
Writes of ``format("etlstage-journal")``: rows appended to journals, once.

Each attempt of a task is a producer. It appends its messages in a transaction, forced
to the disk, and sends the acknowledgements that would commit them to the driver. The
driver stores the acknowledgements of all attempts that count beside the journals, in
one step, and then appends them. Storing them commits the write, whatever happens after
that. Messages of other attempts are never acknowledged, and so never read.

Those messages are also rolled back, so that readers need not keep them until they
forget the producer. Before an attempt first appends to a journal, it notes what rolls
that back in a file beside the journals, which is locked as long as the attempt's
process has it open. So a driver that commits or aborts finds the attempts that were
killed. Attempts that still run then, as Spark does not wait for a task that it kills,
are left to the next commit of the query, or to the next write to the set.

If a write's driver is killed before it commits or aborts, its attempts are not rolled
back. Spark calls this code in processes of their own, none of which lasts as long as
the write, so no lock could show other drivers whether an attempt may still be committed.

For a stream, the last batch of each query stays stored. If that batch comes again,
because Spark did not record its commit, the stored acknowledgements are appended again,
which does no harm, and its new ones are ignored. For a write, they are removed after
they were appended; if a driver has ended before that, the next write to the set appends
them.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from pyspark.sql.types import StructType

from etlstage.errors import SinkFailed
from etlstage.journal import Journals
from etlstage.journal.errors import JournalError
from etlstage.pipeline.interfaces import Epochs
from etlstage.pipeline.journal_sink import JournalSink, append_intents, note_of, noted
from etlstage.sequencing import AckIntent
from etlstage.settings.definition import settings_of
from etlstage.spark.datasource.checkpoint import sync_checkpoint
from etlstage.spark.datasource.documents import MessageWriter
from etlstage.spark.journal.options import NAME, JournalWriting, SetFolder

__all__ = ("JournalWriter", "StoredCommits")

_FOLDER: Final = "spark"
"""Folder in the set where acknowledgements are stored."""
_ATTEMPT: Final = ".attempt"
"""Suffix of a file there that has what rolls back an attempt."""
_COMMITTING: Final = "commits.lock"


@dataclass(frozen=True, kw_only=True)
class AppendedPart(WriterCommitMessage):
    """What a successful attempt has appended."""

    query: str
    run: str
    """For a stream: identifies the start of its query."""
    attempt: str
    """The name of its file."""
    intents: list[list[str]]
    """Its acknowledgements, by journal, as frames."""


class JournalWriter(DataSourceArrowWriter, DataSourceStreamArrowWriter):
    """
    Appends a DataFrame, or each batch of a stream, once and as a whole.

    Readers see all of it or nothing.

    Args:
        writing: What to write to; a missing set is created.
        schema: Schema of the rows: a single text or binary column has the messages;
            other rows become JSON objects.
        checkpoint: Where Spark has the checkpoint of a stream.

    Raises:
        ConfigError: If a column can't be written as JSON.
        JournalError: If the set can't be written to.

    """

    def __init__(
        self, writing: JournalWriting, schema: StructType, checkpoint: str | None = None
    ) -> None:
        self._task = _AppendingTask(writing, schema)
        self._name = f"write-{secrets.token_hex(8)}"
        self._checkpoint = checkpoint

    def write(self, iterator: Iterator[pa.RecordBatch]) -> AppendedPart:
        """Append the rows of a partition, uncommitted."""
        if self._checkpoint is None:
            return self._task.append(iterator, self._name)
        task = TaskContext.get()
        assert task is not None
        query = f"query-{task.getLocalProperty('sql.streaming.queryId')}"
        run = task.getLocalProperty("spark.jobGroup.id")
        return self._task.append(iterator, query, str(run))

    def commit(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int | None = None,  # noqa: N803 - Spark's name
    ) -> None:
        """Store the acknowledgements of attempts, and append them; a batch once."""
        known = _known(messages)
        if self._checkpoint is not None:
            sync_checkpoint(self._checkpoint)
        with self._task.place.opened() as journals:
            if batchId is None:
                StoredCommits(journals).write(self._name, known)
            elif known:
                StoredCommits(journals).batch(batchId, known)

    def abort(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int | None = None,  # noqa: N803 - Spark's name
    ) -> None:
        """Roll back what was appended, unless it is committed."""
        known = _known(messages)
        with self._task.place.opened() as journals:
            if batchId is None:
                StoredCommits(journals).abort(self._name)
            elif known:
                StoredCommits(journals).roll_back(known[0].query, known[0].run)


class StoredCommits:
    """
    The commits of Spark that are stored in a set of journals.

    Args:
        journals: The set.

    """

    def __init__(self, journals: Journals) -> None:
        self._journals = journals
        self._storage = journals.storage

    def write(self, name: str, parts: Sequence[AppendedPart]) -> None:
        """Commit a write."""
        self._store(name, parts)
        try:
            self._finish(name)
        except (OSError, JournalError) as error:
            raise SinkFailed(
                f"the write is committed but could not be completed: {error}; don't"
                " repeat it: the next write to these journals completes it",
                stage=NAME,
            ) from error

    def abort(self, name: str) -> None:
        """End a write without committing it, unless it is committed already."""
        if not self._load(name):
            self._store(name, ())
        self._finish(name)

    def batch(self, number: int, parts: Sequence[AppendedPart]) -> None:
        """Commit a batch of a stream; if it is committed, append what is stored."""
        query, run = parts[0].query, parts[0].run
        # A commit may outlive its driver, and end after one of the query's next run.
        with self._storage.locked(_COMMITTING):
            stored = self._load(query)
            newer = stored.get("batch", -1) < number
            if newer:
                # Attempts of the batch before are acknowledged: not to be rolled back.
                for attempt in stored.get("attempts", ()):
                    self._storage.remove(f"{_FOLDER}/{attempt}")
                self._store(query, parts, batch=number)
                stored = self._load(query)
            self._append(stored["intents"])
            # Attempts of another run may belong to a batch that is still to come.
            self.roll_back(query, None if newer else run)

    def roll_back(self, name: str, run: str | None = None) -> bool:
        """
        Roll back what attempts have appended that have ended and are not stored.

        Args:
            name: Name of the commit.
            run: The start of a stream's query whose attempts are meant; None: any.

        Returns:
            Whether no attempt is left.

        """
        kept = self._load(name).get("attempts", ())
        first = f"{name}." if run is None else f"{name}.{run}."
        none_left = True
        for file in self._storage.names(_FOLDER):
            if not (file.startswith(first) and file.endswith(_ATTEMPT)):
                continue
            path = f"{_FOLDER}/{file}"
            if (held := self._storage.hold(path)) is None:
                none_left = False
                continue
            try:
                if file not in kept:
                    self._append(noted(self._storage.load(path)))
                self._storage.remove(path)
            finally:
                self._storage.let_go(held)
        return none_left

    def resume(self) -> None:
        """Finish writes whose drivers ended before they had done so, or could not."""
        for file in self._storage.names(_FOLDER):
            name, _, kind = file.rpartition(".")
            if name.startswith("write-") and kind == "json":
                self._finish(name)

    def _finish(self, name: str) -> None:
        self._append(self._load(name).get("intents", ()))
        if self.roll_back(name):
            self._storage.remove(f"{_FOLDER}/{name}.json")

    def _append(self, intents: Iterable[Sequence[str]]) -> None:
        append_intents(self._journals, intents, stage=NAME)

    def _store(self, name: str, parts: Sequence[AppendedPart], **more: object) -> None:
        value = {
            "intents": [intent for part in parts for intent in part.intents],
            "attempts": [part.attempt for part in parts],
            **more,
        }
        data = json.dumps(value).encode()
        self._storage.replace(f"{_FOLDER}/{name}.json", data)

    def _load(self, name: str) -> dict[str, Any]:
        data = self._storage.load(f"{_FOLDER}/{name}.json")
        found: dict[str, Any] = json.loads(data) if data else {}
        return found


def _known(messages: Sequence[WriterCommitMessage | None]) -> list[AppendedPart]:
    return [one for one in messages if isinstance(one, AppendedPart)]


class _AppendingTask:
    """
    Appends the rows of partitions.

    Args:
        writing: What to write to.
        schema: Schema of the rows.

    Attributes:
        place: The set, which the driver has made or opened.

    """

    def __init__(self, writing: JournalWriting, schema: StructType) -> None:
        self._writer = MessageWriter(schema)
        self._settings = {
            name: getattr(writing, name) for name in settings_of(JournalWriting)
        }
        anyio.run(self._appended, iter(()), None)  # makes the set
        self.place: SetFolder = SetFolder.seen(writing.path)
        with self.place.opened() as journals:
            StoredCommits(journals).resume()

    def append(
        self, batches: Iterator[pa.RecordBatch], query: str, run: str = ""
    ) -> AppendedPart:
        """
        Append the rows of a partition, and return what acknowledges them.

        Raises:
            JournalError: If the driver's folder is not seen here.
            SinkFailed: If they can't be appended, or a message is null.

        """
        attempt = f"{query}.{run}.{secrets.token_hex(8)}{_ATTEMPT}"
        with self.place.opened() as journals:
            path, storage = f"{_FOLDER}/{attempt}", journals.storage

            def note(opened: AckIntent) -> None:
                storage.append(path, note_of(opened))

            held = storage.hold(path)
            if held is None:
                raise SinkFailed("the write was aborted", stage=NAME)
            try:
                sink = anyio.run(self._appended, batches, note)
            finally:
                storage.let_go(held)
        return AppendedPart(query=query, run=run, attempt=attempt, intents=sink.intents)

    async def _appended(
        self,
        batches: Iterator[pa.RecordBatch],
        opening: Callable[[AckIntent], None] | None,
    ) -> JournalSink:
        sink = JournalSink(**self._settings, name=NAME, opening=opening)
        sink.begin(Epochs(NAME, 0, True, lambda: None))
        async with sink:
            for batch in batches:
                messages = self._writer.messages_of(batch)
                if messages.problem is not None:
                    raise SinkFailed(
                        f"format {NAME}: {messages.problem} rows of a batch: filter these"
                        " rows, or give them a message with coalesce(..., '')",
                        stage=NAME,
                    )
                await sink.write(messages)
            await sink.flush()
            return sink
