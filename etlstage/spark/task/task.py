"""
One task of a stage: a partition's Arrow batches through workers of its own.

It runs in Spark's Python worker, the supervisor behind a bridge: this thread reads
what Spark gives and hands back what is ready.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from contextlib import aclosing
from functools import partial
from typing import Final, NamedTuple

import pyarrow as pa

from etlstage.columns import Replies
from etlstage.errors import StageFailed
from etlstage.messages import Run
from etlstage.spark.ship.artifact import place
from etlstage.spark.task.chain import Given, message_of_partition, run_of
from etlstage.spark.task.portal import Bridge, bridged
from etlstage.stage import Stage
from etlstage.supervisor import AsyncSupervisor
from etlstage.supervisor.exchange.submission import Answer

__all__ = ("KEPT", "Task")

KEPT: Final = "_etlstage_kept"
"""Column with what rows keep."""

_ROWS: Final = 10_000  # in a batch of results, about
_BYTES: Final = 8 * 1024 * 1024


class _Place(NamedTuple):
    """Consecutive rows of the partition."""

    start: int
    """Place of the first."""
    rows: int
    kept: pa.StructArray | None
    """What each of them keeps."""


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

        def runs() -> Iterator[Run]:
            for batch in batches:
                if batch.num_rows:
                    results.expect(batch)
                    yield run_of(batch.column(0))

        with bridged(partial(_answer_all, place(self._stage))) as bridge:
            for answer in bridge.cross(runs()):
                results.add(answer)
                yield from results.ripe()
            yield from results.rest()


def _refused(stage: str, text: str, answer: Answer) -> StageFailed:
    """Return the error for an answer, with the place of its messages."""
    which = message_of_partition(answer.start, len(answer.messages))
    return StageFailed(f"{text} ({which})", stage=stage)


async def _answer_all(stage: Stage, bridge: Bridge[Answer]) -> None:
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
        self._places: deque[_Place] = deque()
        self._next = 0  # place of the next row
        self._pieces: list[tuple[pa.Array, ...]] = []
        self._rows = self._size = 0

    def expect(self, batch: pa.RecordBatch) -> None:
        """Take note of a batch that is given to the workers."""
        kept = batch.column(1) if batch.num_columns > 1 else None
        self._places.append(_Place(self._next, batch.num_rows, kept))
        self._next += batch.num_rows

    def add(self, answer: Answer) -> None:
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
        place = self._places[0]
        if place.kept is None:
            self._pieces.append((values,))
        else:
            kept = place.kept.slice(answer.start - place.start, len(replies))
            owners = replies.owners
            self._pieces.append((values, kept if owners is None else kept.take(owners)))
        self._rows += len(values)
        self._size += answer.reply_size
        end = answer.start + len(answer.messages)
        while self._places and self._places[0].start + self._places[0].rows <= end:
            self._places.popleft()

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
