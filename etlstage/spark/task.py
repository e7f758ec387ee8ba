"""
One task of a stage: a partition's Arrow batches through workers of its own.

It runs in Spark's Python worker. The event loop with the supervisor has a thread to
itself, so that workers are watched also while Spark has nothing for us, or wants
nothing from us; this thread reads what Spark gives and hands back what is ready.

Spark ends a Python worker with SIGKILL: what it had started is gone with it by the
means of ``etlstage.transport``, for no code of ours runs then.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import aclosing, suppress
from queue import SimpleQueue
from typing import Final, NamedTuple, cast

import pyarrow as pa
from anyio import BrokenResourceError, create_memory_object_stream, sleep
from anyio.from_thread import start_blocking_portal
from anyio.streams.memory import MemoryObjectReceiveStream
from pyspark import TaskContext

from etlstage.errors import SourceFailed, StageFailed
from etlstage.messages import Run
from etlstage.protocol.marker.columnar import COLUMNS, Column, Replies
from etlstage.protocol.marker.framing import LISTS
from etlstage.supervisor import AsyncSupervisor, Stage
from etlstage.supervisor.submission import Answer

__all__ = ("KEPT", "Task")

KEPT: Final = "_etlstage_kept"
"""Column with what rows keep."""

_AHEAD: Final = 4  # batches that the workers may have before the oldest is answered
_ROWS: Final = 10_000  # in a batch of results, about
_BYTES: Final = 8 * 1024 * 1024
_UNREAD: Final = 64 * 1024 * 1024  # bytes of replies that wait for Spark


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
        send, receive = create_memory_object_stream[Run](math.inf)
        # Leaving the block in any other way than at its end cancels what runs in it.
        with send, receive, start_blocking_portal() as portal:
            exchange = _Exchange(self._stage, receive)
            portal.start_task_soon(exchange.serve)
            results = _Results(self._stage.name, texts=self._texts)
            for batch in batches:
                messages = self._messages(batch)
                results.expect(batch)
                with suppress(BrokenResourceError):  # why, is among the answers
                    portal.call(send.send_nowait, messages)
                while results.pending > _AHEAD or exchange.ready:
                    results.add(exchange.take())
                    yield from results.ripe()
            portal.call(send.close)
            while (answer := exchange.take()) is not None:
                results.add(answer)
                yield from results.ripe()
            yield from results.rest()

    def _messages(self, batch: pa.RecordBatch) -> Run:
        # Large where spark.sql.execution.arrow.useLargeVarTypes is set.
        column = batch.column(0).cast(pa.binary())
        if column.null_count:
            raise SourceFailed(
                f"stage {self._stage.name}: message is null in {column.null_count} of"
                f" {len(column)} rows of a batch: filter these rows, or give them a"
                " message with coalesce(...)",
                stage=self._stage.name,
            )
        if self._stage.mode.batches:
            messages: Run = column.to_pylist()
            return messages
        # A sequence of bytes is all that the way of single messages asks for.
        return cast("Run", Column(column))


class _Exchange:
    """The supervisor, in the thread of its event loop, and the way back from it."""

    def __init__(self, stage: Stage, inbox: MemoryObjectReceiveStream[Run]) -> None:
        self._stage = stage
        self._inbox = inbox
        self._outbox: SimpleQueue[Answer | Exception | None] = SimpleQueue()
        self._put = self._taken = 0  # bytes of replies; each has one writer

    @property
    def ready(self) -> bool:
        """Whether :meth:`take` has something now."""
        return not self._outbox.empty()

    async def serve(self) -> None:
        """Answer what comes in until there is no more; runs in the event loop."""
        framing = LISTS if self._stage.mode.batches else COLUMNS
        try:
            async with (
                AsyncSupervisor(self._stage, framing=framing) as supervisor,
                self._inbox,
                aclosing(supervisor.answers(self._inbox)) as answers,
            ):
                async for answer in answers:
                    self._put += answer.reply_size
                    self._outbox.put(answer)
                    # Another thread takes them, and can't set an event of this one.
                    while self._put - self._taken > _UNREAD:  # noqa: ASYNC110
                        await sleep(0.01)
        except Exception as error:
            self._outbox.put(error)
        else:
            self._outbox.put(None)

    def take(self) -> Answer | None:
        """Return the next answer, or None behind the last; blocks."""
        answer = self._outbox.get()
        if isinstance(answer, Exception):
            raise answer
        if answer is not None:
            self._taken += answer.reply_size
        return answer


class _Results:
    """Makes batches for Spark out of answers."""

    def __init__(self, stage: str, *, texts: bool) -> None:
        self._stage = stage
        self._texts = texts
        self._places: deque[_Place] = deque()
        self._next = 0  # place of the next row
        self._pieces: list[tuple[pa.Array, ...]] = []
        self._rows = self._size = 0

    @property
    def pending(self) -> int:
        """How many batches are not answered to their end."""
        return len(self._places)

    def expect(self, batch: pa.RecordBatch) -> None:
        """Take note of a batch that is given to the workers."""
        kept = batch.column(1) if batch.num_columns > 1 else None
        self._places.append(_Place(self._next, batch.num_rows, kept))
        self._next += batch.num_rows

    def add(self, answer: Answer | None) -> None:
        """
        Take an answer.

        Raises:
            StageFailed: If there is no answer to a message, or it is not text.

        """
        assert answer is not None, "unreachable: answers end before the input does"
        if answer.error is not None:
            raise self._failed(str(answer.error), answer) from answer.error
        replies = Replies.of(answer.groups)
        values = replies.values
        if self._texts:
            try:
                values = values.cast(pa.string())
            except pa.ArrowInvalid as error:
                text = f"stage {self._stage}: a reply is not UTF-8"
                raise self._failed(text, answer) from error
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

    def _failed(self, text: str, answer: Answer) -> StageFailed:
        task = TaskContext.get()
        partition = f" of partition {task.partitionId()}" if task is not None else ""
        first, count = answer.start + 1, len(answer.messages)
        which = f"message {first}" + (f" to {first + count - 1}" if count > 1 else "")
        return StageFailed(f"{text} ({which}{partition})", stage=self._stage)
