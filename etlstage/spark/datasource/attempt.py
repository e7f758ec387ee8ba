"""
One attempt of a write: the rows of a partition through a load worker of its own.

The attempt ends well when all rows are answered, or dead-lettered if that is allowed.
What it has done is not final by that; ``writer.py`` says when it is.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import BinaryType, StringType, StructType

from etlstage.spark.datasource.commit import AttemptFiles
from etlstage.spark.datasource.json_rows import check_types, documents_of
from etlstage.spark.datasource.options import Writing
from etlstage.spark.task.portal import bridged
from etlstage.spark.task.task import answer_all, messages_of, refused
from etlstage.stage import Order, Stage
from etlstage.supervisor.exchange.submission import Answer

__all__ = ("Feed", "Written")


@dataclass(frozen=True, kw_only=True)
class Written(WriterCommitMessage):
    """What an attempt that ended well has done."""

    write: str
    """What tells the write from all others: of a stream, its query and batch."""
    partition: int
    attempt: str
    """What tells the attempt from all others."""
    messages: int
    """How many its worker was given."""
    dead: tuple[dict[str, Any], ...] = ()
    """Those that were dead-lettered; only with a report."""


class Feed:
    """
    Feeds the worker of an attempt with the rows of a partition.

    Args:
        writing: What to write to.
        schema: Of the rows.

    """

    def __init__(self, writing: Writing, schema: StructType) -> None:
        single = len(schema) == 1
        self._plain = single and isinstance(schema[0].dataType, StringType | BinaryType)
        if not self._plain:
            check_types(schema, read=False)
        self._writing = writing

    def attempt(
        self, batches: Iterator[pa.RecordBatch], write: str, batch: int | None
    ) -> Written:
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
        messages, dead = 0, []
        with _staged(self._writing.path, write, attempt) as folder:
            if folder is not None:
                about["ETLSTAGE_STAGING"] = str(folder)
            stage = self._writing.place(self._writing.stage)
            stage = _stage(stage, about, folder)
            runs = (messages_of(stage, self._column(batch)) for batch in batches)
            serve = partial(answer_all, stage, ends_well=self._writing.staged)
            with bridged(serve) as bridge:
                for answer in bridge.cross(runs):
                    messages += len(answer.messages)
                    if answer.error is not None:
                        dead += self._put_aside(answer, partition)
        return Written(
            write=write,
            partition=partition,
            attempt=attempt,
            messages=messages,
            dead=tuple(dead),
        )

    def _column(self, rows: pa.RecordBatch) -> pa.Array:
        """Return the messages that rows are: their only value, or JSON."""
        return rows.column(0) if self._plain else documents_of(rows)

    def _put_aside(self, answer: Answer, partition: int) -> list[dict[str, Any]]:
        stage = self._writing.stage
        assert answer.error is not None
        if self._writing.report is None or stage.on_error.then == "fail":
            raise refused(stage.name, str(answer.error), answer) from answer.error
        return [
            {
                "partition": partition,
                "place": answer.start + n,
                "message": base64.b64encode(bytes(message)).decode(),
                "kind": type(answer.error).__name__,
                "error": str(answer.error),
            }
            for n, message in enumerate(answer.messages)
        ]


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
    command = stage.command
    if folder is not None:
        command = tuple(word.replace("{staging}", str(folder)) for word in command)
    env = about | dict(stage.env)
    # In the order of the input: so an answer's place is that of its rows.
    return replace(stage, command=command, env=env, order=Order.TOTAL, key=None)
