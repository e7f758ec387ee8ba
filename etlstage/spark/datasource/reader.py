"""
Reads of ``format("etlstage")``: once, and as a stream.

The driver decides what each task extracts, and each task runs a worker of its own.
Spark makes blocking calls from its own threads, so the supervisor runs in an event loop
in another thread, see ``task/portal.py``.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple, Self, cast

import pyarrow as pa
from anyio.from_thread import BlockingPortal, start_blocking_portal
from pyspark.sql.datasource import (
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StringType, StructType

from etlstage.columns import strings_of
from etlstage.errors import ConfigError, EtlstageError, SourceFailed
from etlstage.messages import Run, cost_of, size_of
from etlstage.pipeline.offsets import ask_offset, fell_back, steps
from etlstage.spark.dataframe.schema import is_raw
from etlstage.spark.datasource.documents import fitting_of
from etlstage.spark.datasource.options import Reading
from etlstage.spark.task.portal import Bridge, bridged
from etlstage.spark.task.rows import RowBuilder, binary_of
from etlstage.stage import OffsetPolicy, Stage
from etlstage.supervisor import AsyncSupervisor

__all__ = (
    "BatchReader",
    "Fitted",
    "Offsets",
    "Range",
    "RefusedStream",
    "StreamReader",
    "extracted",
    "ranges",
)

_TASKS: Final = 10_000


class Range(NamedTuple):
    """What one task extracts."""

    number: int
    """Number of the task, from zero."""
    of: int
    """How many tasks there are."""
    start: int | None = None
    """First offset; None for a plain stage."""
    end: int | None = None
    """Offset after the last."""


def ranges(
    stage: str, start: int, end: int, step: int, partitions: int | None
) -> list[Range]:
    """
    Return the ranges of the tasks that extract from ``start`` up to ``end``.

    The same arguments always give the same ranges: a failed batch is cut as before.

    Args:
        stage: Name of the stage, for errors.
        start: First offset.
        end: Offset after the last.
        step: Offsets that one request covers.
        partitions: Number of ranges of even length, at most one for each offset;
            None: a range for each step.

    Raises:
        ConfigError: If there would be too many tasks.

    """
    total = max(end - start, 0)
    count = -(-total // step) if partitions is None else min(partitions, total)
    if count > _TASKS:
        raise ConfigError(
            f"stage {stage}: offsets {start} to {end} make {count} tasks, expected no"
            f" more than {_TASKS}: raise step, set partitions, or, for a stream, set"
            " max_per_batch"
        )
    if partitions is None:
        cuts = [min(start + i * step, end) for i in range(count + 1)]
    else:
        cuts = [start + total * i // count for i in range(count + 1)] if count else []
    return [Range(i, count, cuts[i], cuts[i + 1]) for i in range(count)]


def extracted(
    stage: Stage, part: Range, policy: OffsetPolicy | None
) -> Generator[Run, None, None]:
    """
    Yield what a worker of ``stage`` extracts for ``part``, a run at a time.

    Raises:
        SourceFailed: If a round fails; what was yielded until then is incomplete.

    """
    rounds: Iterable[tuple[int, int] | None] = [None]
    if policy is not None:
        assert part.start is not None
        assert part.end is not None
        if part.start == part.end:
            return
        rounds = steps(part.start, part.end, policy.step)
    template = policy.template if policy is not None else None
    with bridged(partial(_extract, stage, rounds, template)) as bridge:
        try:
            yield from bridge.cross(())
        except EtlstageError as error:
            raise SourceFailed(f"{error} ({_which(part)})", stage=stage.name) from error


def _which(part: Range) -> str:
    if part.start is None:
        return f"partition {part.number} of {part.of}"
    return f"offsets {part.start} to {part.end}, partition {part.number}"


async def _extract(
    stage: Stage,
    rounds: Iterable[tuple[int, int] | None],
    template: str | None,
    bridge: Bridge[Run],
) -> None:
    async with AsyncSupervisor(stage) as supervisor:
        for bounds in rounds:
            start, end = bounds or (None, None)
            async for run in supervisor.extract_runs(
                start=start, end=end, template=template
            ):
                await bridge.put(run, cost_of(run))
    if (doubt := supervisor.doubt) is not None:
        raise doubt


class Offsets:
    """
    Asks a worker for offsets; it lives from the first question until :meth:`close`.

    It stays running because a query without new data asks every few milliseconds.

    Args:
        stage: A cyclic stage.

    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._stack = ExitStack()
        self._portal: BlockingPortal | None = None
        self._supervisor: AsyncSupervisor | None = None

    def __enter__(self) -> Self:
        """Start nothing yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the worker."""
        self.close()

    def close(self) -> None:
        """Stop the worker, if it was ever asked."""
        self._portal = self._supervisor = None
        self._stack.close()

    def known(self, offset: int | str) -> int:
        """
        Return ``offset``, asking the worker for it if it is ``initial`` or ``latest``.

        Raises:
            SourceFailed: If the worker does not reply with one whole number.

        """
        if isinstance(offset, int):
            return offset
        if self._portal is None or self._supervisor is None:
            portal = self._stack.enter_context(start_blocking_portal())
            self._supervisor = self._stack.enter_context(
                portal.wrap_async_context_manager(AsyncSupervisor(self._stage))
            )
            self._portal = portal
        return self._portal.call(ask_offset, self._supervisor, offset)


class Fitted:
    """
    Converts messages into rows of a schema.

    Args:
        stage: Name of the stage, for errors.
        schema: Schema of the rows. A single string column ``value``, or a single binary
            column, takes whole messages; otherwise messages are JSON objects.

    Raises:
        ConfigError: If a column can't be read from JSON.

    """

    def __init__(self, stage: str, schema: StructType) -> None:
        self._stage = stage
        self._schema = schema
        plain = is_raw(schema) or (
            schema.names == ["value"] and isinstance(schema[0].dataType, StringType)
        )
        self._fitting = None if plain else fitting_of(schema)

    def batches(self, runs: Iterable[Run]) -> Iterator[pa.RecordBatch]:
        """
        Yield messages as rows.

        Raises:
            SourceFailed: If a message is not UTF-8, or does not fit the schema.

        """
        rows, made = RowBuilder(["message"]), 0
        for run in runs:
            for batch in rows.add([binary_of(run)], size_of(run)):
                yield self._batch(batch.column(0), made)
                made += batch.num_rows
        for batch in rows.rest():
            yield self._batch(batch.column(0), made)

    def _batch(self, messages: pa.BinaryArray, made: int) -> pa.RecordBatch:
        # Spark compares the schemas, including nullability.
        target = to_arrow_schema(self._schema, timezone="UTC")
        if self._fitting is None:
            binary = pa.types.is_binary(target[0].type)
            values = messages if binary else strings_of(messages)
            if values.null_count:
                place = values.to_pylist().index(None)
                why = "it is not UTF-8: read it with values=binary"
                raise self._failed(made + place, why)
            return pa.RecordBatch.from_arrays(
                [values.cast(target[0].type)], schema=target
            )
        found = self._fitting.rows(pa.chunked_array([messages]))
        if found.unfit:
            place, _, why = found.unfit[0]
            raise self._failed(made + place, why)
        columns = [
            pa.concat_arrays(column.chunks)
            if column.type == kind
            # Names or nullability of nested fields differ.
            else pa.array(column.to_pylist(), kind)
            for column, kind in zip(found.table.columns, target.types, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=target)

    def _failed(self, place: int, why: str) -> SourceFailed:
        return SourceFailed(
            f"stage {self._stage}: message {place + 1} of a partition does not fit the"
            f" schema {self._schema.simpleString()}: {why}",
            stage=self._stage,
        )


_OFFSET: Final = "offset"


class BatchReader(DataSourceReader):
    """
    Reads once, for a batch query.

    Args:
        reading: What to read.
        schema: Schema of the rows.

    """

    def __init__(self, reading: Reading, schema: StructType) -> None:
        Fitted(reading.stage.name, schema)  # rejects a schema here and not in a task
        self._reading = reading
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        """Return what each task is to extract."""
        reading = self._reading
        if reading.offsets is None:
            count = reading.partitions or 1
            return [InputPartition(Range(n, count)) for n in range(count)]
        with Offsets(reading.stage) as offsets:
            start = offsets.known(reading.offsets.start)
            end = offsets.known(reading.offsets.end)
        parts = _parts(reading, start, end)
        # Without partitions Spark would read one whose value is None.
        return parts or [InputPartition(Range(0, 1, start, start))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a task."""
        return _rows(self._reading, self._schema, partition)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """
    Reads a stream, whose offsets Spark keeps in its checkpoint.

    A failed batch is read again by the same offsets, in the same partitions.

    Args:
        reading: What to read.
        schema: Schema of the rows.

    """

    def __init__(self, reading: Reading, schema: StructType) -> None:
        if reading.offsets is None:
            raise ConfigError(
                f"stage {reading.stage.name} is of mode plain, expected cyclic: a stream"
                " is read by offsets"
            )
        Fitted(reading.stage.name, schema)
        self._reading = reading
        self._policy = reading.offsets
        self._schema = schema
        self._offsets: Offsets | None = None
        self._target: int | None = None

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        """Return where a query without a checkpoint begins."""
        return {_OFFSET: self._known(self._policy.start)}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return no limit of Spark's: offsets are neither rows nor bytes."""
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Let the query end at what is the latest offset now."""
        self._target = self._latest()

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802 - Spark's name
        """
        Return where the next batch ends; ``start`` if there is nothing new.

        Raises:
            SourceFailed: If the worker's latest offset is less than one already read.

        """
        begin = start[_OFFSET]
        latest = self._target if self._target is not None else self._latest()
        if latest < begin and self._policy.end == "latest":
            stage, remedy = self._reading.stage.name, "start with another checkpoint"
            raise fell_back(stage, latest, begin, remedy)
        if self._reading.max_per_batch is not None:
            latest = min(latest, begin + self._reading.max_per_batch)
        return {_OFFSET: max(latest, begin)}

    def partitions(
        self, start: dict[str, int], end: dict[str, int]
    ) -> list[InputPartition]:
        """Return what each task of a batch is to extract."""
        return _parts(self._reading, start[_OFFSET], end[_OFFSET])

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a task."""
        return _rows(self._reading, self._schema, partition)

    def commit(self, end: dict[str, int]) -> None:
        """Do nothing: the worker keeps no offsets."""

    def stop(self) -> None:
        """Stop the worker that was asked for offsets."""
        if self._offsets is not None:
            self._offsets.close()

    def _latest(self) -> int:
        return self._known(self._policy.end)

    def _known(self, offset: int | str) -> int:
        if self._offsets is None:
            self._offsets = Offsets(self._reading.stage)
        return self._offsets.known(offset)


class RefusedStream(DataSourceStreamReader):
    """
    Stands in for a reader that can't be made: every method raises the reason.

    Spark's process for a stream can't report why there is no reader (4.3.0: it tries to
    stop the missing reader, and reports that error instead).

    Args:
        error: Why there is no reader.

    """

    def __init__(self, error: EtlstageError) -> None:
        self._error = error

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        """Raise the error."""
        raise self._error

    def latestOffset(  # noqa: N802 - Spark's name
        self, start: dict[str, int], limit: ReadLimit
    ) -> dict[str, int]:
        """Raise the error, also where the first offset is in a checkpoint."""
        raise self._error

    def partitions(
        self, start: dict[str, int], end: dict[str, int]
    ) -> list[InputPartition]:
        """Raise the error, also where a checkpoint has a batch to repeat."""
        raise self._error

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Raise the error."""
        raise self._error


def _parts(reading: Reading, start: int, end: int) -> list[InputPartition]:
    policy = reading.offsets
    assert policy is not None
    found = ranges(reading.stage.name, start, end, policy.step, reading.partitions)
    return [InputPartition(part) for part in found]


def _rows(
    reading: Reading, schema: StructType, partition: InputPartition
) -> Iterator[pa.RecordBatch]:
    part = cast("Range", partition.value)
    about = {
        "ETLSTAGE_PARTITION": str(part.number),
        "ETLSTAGE_PARTITIONS": str(part.of),
    }
    stage = reading.place(reading.stage)
    stage = replace(
        stage, worker=replace(stage.program, env=about | dict(stage.program.env))
    )
    # Closing it here, and not when it is garbage collected, stops its worker now.
    with closing(extracted(stage, part, reading.offsets)) as runs:
        yield from Fitted(stage.name, schema).batches(runs)
