"""
One task of a stage: a partition's Arrow batches through workers of its own.

It runs in Spark's Python worker, the supervisor behind a bridge: this thread reads
what Spark gives and hands back what is ready.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import aclosing
from functools import partial
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from etlstage.columns import Replies, strings_of
from etlstage.errors import RepliesDoubtful, StageFailed, WorkerRefusal
from etlstage.messages import AnnotatedRun, Run
from etlstage.pipeline.dead_letter.letter import first_clause
from etlstage.pipeline.dead_letter.policy import OF_A_MESSAGE
from etlstage.spark.dataframe.read import column_of
from etlstage.spark.ship.artifact import place
from etlstage.spark.task.chain import Given, message_of_partition
from etlstage.spark.task.portal import Bridge, bridged
from etlstage.stage import Stage
from etlstage.supervisor import AsyncSupervisor
from etlstage.supervisor.exchange.exchange import Outcome

__all__ = ("ERROR", "KEPT", "Task")

KEPT: Final = "_etlstage_kept"
"""Column with what rows keep."""
ERROR: Final = "_etlstage_error"
"""Column with why there is no reply, or not one that is text."""

_ROWS: Final = 10_000  # in a batch of results, about
_BYTES: Final = 8 * 1024 * 1024


class Task:
    """
    What :meth:`DataFrame.mapInArrow` runs.

    Args:
        stage: With answers in the order of its input.
        texts: Whether replies are text.
        errors: Whether a message without a reply is a row that says why, and does not
            fail the task.

    """

    def __init__(self, stage: Stage, *, texts: bool, errors: bool = False) -> None:
        self._stage = stage
        self._texts = texts
        self._errors = errors

    def run(
        self, batches: Iterator[pa.RecordBatch]
    ) -> Generator[pa.RecordBatch, None, None]:
        """Yield the replies to the messages in the first column, in order."""
        name = self._stage.name
        results = _Results(name, texts=self._texts, errors=self._errors)
        with bridged(partial(_answer_all, place(self._stage))) as bridge:
            for answer in bridge.cross(_messages(b) for b in batches if b.num_rows):
                for part in answer.parts():
                    results.add(part)
                yield from results.ripe()
            yield from results.rest()


def _messages(batch: pa.RecordBatch) -> Run:
    """Return the messages of some rows, and beside them what the rows keep."""
    run = column_of(batch.column(0))
    return run if batch.num_columns == 1 else AnnotatedRun(run, kept=batch.column(1))


def _refused(stage: str, text: str, answer: Outcome) -> StageFailed:
    """Return the error for an answer, with the place of its messages."""
    which = message_of_partition(answer.start, len(answer.messages))
    return StageFailed(f"{text} ({which})", stage=stage)


async def _answer_all(stage: Stage, bridge: Bridge[Outcome]) -> None:
    given = Given(f"stage {stage.name}", bridge.runs())
    async with (
        AsyncSupervisor(stage) as supervisor,
        aclosing(supervisor.answers(given.runs())) as answers,
    ):
        async for answer in answers:
            await bridge.put(answer, answer.reply_size)
    if supervisor.doubtful:
        raise RepliesDoubtful(supervisor.doubtful, stage=stage.name)


class _Results:
    """Makes batches for Spark out of answers."""

    def __init__(self, stage: str, *, texts: bool, errors: bool) -> None:
        self._stage = stage
        self._texts = texts
        self._errors = errors
        self._pieces: list[dict[str, pa.Array]] = []
        self._rows = self._size = 0

    def add(self, answer: Outcome) -> None:
        """
        Take an answer.

        Raises:
            StageFailed: If there is no answer to a message, or it is not text.

        """
        error = answer.error
        if error is not None and not (self._errors and isinstance(error, OF_A_MESSAGE)):
            raise _refused(self._stage, str(error), answer) from error
        kept: pa.StructArray | None = None
        if isinstance(answer.messages, AnnotatedRun):
            kept = answer.messages.columns["kept"]
        if error is not None:
            count = len(answer.messages)
            values = pa.nulls(count, pa.string() if self._texts else pa.binary())
            self._add(values, kept, pa.array([_why(error)] * count, pa.string()))
            return
        replies = Replies.of(answer.groups)
        values, errors = replies.values, None
        if self._texts:
            values = strings_of(values)
            if values.null_count:
                text = f"stage {self._stage}: a reply is not UTF-8"
                if not self._errors:
                    raise _refused(self._stage, text, answer)
                errors = pc.if_else(values.is_null(), text, None)
        owners = replies.owners
        if kept is not None and owners is not None:
            kept = kept.take(owners)
        self._add(values, kept, errors)
        self._size += answer.reply_size

    def _add(
        self, values: pa.Array, kept: pa.Array | None, errors: pa.Array | None
    ) -> None:
        columns = {"value": values}
        if kept is not None:
            columns[KEPT] = kept
        if self._errors:
            none = pa.nulls(len(values), pa.string())
            columns[ERROR] = none if errors is None else errors
        self._pieces.append(columns)
        self._rows += len(values)

    def ripe(self) -> Iterator[pa.RecordBatch]:
        """Yield a batch if there is enough for one."""
        if self._rows >= _ROWS or self._size >= _BYTES:
            yield from self.rest()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """Yield what there is, if anything."""
        pieces, self._pieces = self._pieces, []
        rows, self._rows, self._size = self._rows, 0, 0
        if rows:
            names = list(pieces[0])
            columns = [pa.concat_arrays([p[name] for p in pieces]) for name in names]
            yield pa.RecordBatch.from_arrays(columns, names=names)


def _why(error: Exception) -> str:
    """Return in short what went wrong with a message."""
    if isinstance(error, WorkerRefusal):
        return error.reason or "refused"
    return first_clause(str(error)) or type(error).__name__
