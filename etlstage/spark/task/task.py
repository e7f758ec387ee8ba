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

from etlstage.columns import Replies
from etlstage.errors import StageFailed
from etlstage.messages import AnnotatedRun, Run
from etlstage.spark.ship.artifact import place
from etlstage.spark.task.chain import Given, message_of_partition, run_of
from etlstage.spark.task.portal import Bridge, bridged
from etlstage.stage import Stage
from etlstage.supervisor import AsyncSupervisor
from etlstage.supervisor.exchange.exchange import Outcome

__all__ = ("KEPT", "Task")

KEPT: Final = "_etlstage_kept"
"""Column with what rows keep."""

_ROWS: Final = 10_000  # in a batch of results, about
_BYTES: Final = 8 * 1024 * 1024


class Task:
    """
    What :meth:`DataFrame.mapInArrow` runs.

    Args:
        stage: With answers in the order of its input.
        texts: Whether replies are text.

    """

    def __init__(self, stage: Stage, *, texts: bool) -> None:
        self._stage = stage
        self._texts = texts

    def run(
        self, batches: Iterator[pa.RecordBatch]
    ) -> Generator[pa.RecordBatch, None, None]:
        """Yield the replies to the messages in the first column, in order."""
        results = _Results(self._stage.name, texts=self._texts)
        with bridged(partial(_answer_all, place(self._stage))) as bridge:
            for answer in bridge.cross(_messages(b) for b in batches if b.num_rows):
                results.add(answer)
                yield from results.ripe()
            yield from results.rest()


def _messages(batch: pa.RecordBatch) -> Run:
    """Return the messages of some rows, and beside them what the rows keep."""
    run = run_of(batch.column(0))
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


class _Results:
    """Makes batches for Spark out of answers."""

    def __init__(self, stage: str, *, texts: bool) -> None:
        self._stage = stage
        self._texts = texts
        self._pieces: list[tuple[pa.Array, ...]] = []
        self._rows = self._size = 0

    def add(self, answer: Outcome) -> None:
        """
        Take an answer.

        Raises:
            StageFailed: If there is no answer to a message, or it is not text.

        """
        if answer.error is not None:
            raise _refused(self._stage, str(answer.error), answer) from answer.error
        replies = Replies.of(answer.groups)
        values = replies.values
        if self._texts:
            try:
                values = values.cast(pa.string())
            except pa.ArrowInvalid as error:
                text = f"stage {self._stage}: a reply is not UTF-8"
                raise _refused(self._stage, text, answer) from error
        if isinstance(answer.messages, AnnotatedRun):
            kept: pa.StructArray = answer.messages.columns["kept"]
            owners = replies.owners
            self._pieces.append((values, kept if owners is None else kept.take(owners)))
        else:
            self._pieces.append((values,))
        self._rows += len(values)
        self._size += answer.reply_size

    def ripe(self) -> Iterator[pa.RecordBatch]:
        """Yield a batch if there is enough for one."""
        if self._rows >= _ROWS or self._size >= _BYTES:
            yield from self.rest()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """Yield what there is, if anything."""
        pieces, self._pieces = self._pieces, []
        rows, self._rows, self._size = self._rows, 0, 0
        if rows:
            columns = [pa.concat_arrays(column) for column in zip(*pieces, strict=True)]
            names = ["value", KEPT][: len(columns)]
            yield pa.RecordBatch.from_arrays(columns, names=names)
