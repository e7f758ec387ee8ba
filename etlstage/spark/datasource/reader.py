"""
Reads of ``format("etlstage")``: once, and as a stream.

The driver decides who extracts what, and each task runs a worker of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Final, cast

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from etlstage.errors import ConfigError
from etlstage.pipeline.offsets import fell_back
from etlstage.spark.datasource.extraction import (
    Offsets,
    Range,
    RowBuilder,
    extracted,
    ranges,
)
from etlstage.spark.datasource.options import Reading

__all__ = ("BatchReader", "RefusedStream", "StreamReader")

_OFFSET: Final = "offset"


class BatchReader(DataSourceReader):
    """
    Reads once.

    Args:
        reading: What to read.
        schema: Of the rows.

    """

    def __init__(self, reading: Reading, schema: StructType) -> None:
        RowBuilder(reading.stage.name, schema)  # refuses a schema now and not in a task
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
        # Spark makes one of none.
        return parts or [InputPartition(Range(0, 1, start, start))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a task."""
        return _rows(self._reading, self._schema, partition)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """
    Reads a stream, whose offsets Spark keeps in its checkpoint.

    A batch that failed is read again by the same offsets, in the same partitions.

    Args:
        reading: What to read.
        schema: Of the rows.

    """

    def __init__(self, reading: Reading, schema: StructType) -> None:
        if reading.offsets is None:
            raise ConfigError(
                f"stage {reading.stage.name} is of mode plain, expected cyclic: a stream"
                " is read by offsets"
            )
        RowBuilder(reading.stage.name, schema)
        self._reading = reading
        self._policy = reading.offsets
        self._schema = schema
        self._offsets: Offsets | None = None
        self._target: int | None = None

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        """Return where a query without a checkpoint begins."""
        return {_OFFSET: self._known(self._policy.start)}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return that the limit is ours: offsets are neither rows nor bytes."""
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Take what is there now for all there is."""
        self._target = self._latest()

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802 - Spark's name
        """
        Return where the next batch ends; ``start`` if there is nothing new.

        Raises:
            SourceFailed: If the worker is behind what it has given already.

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
    Refuses whatever it is asked.

    Spark's process for a stream can't tell why there is no reader (4.3.0: it wants to
    stop the one it has not got, and tells of that).

    Args:
        error: Why there is none.

    """

    def __init__(self, error: ConfigError) -> None:
        self._error = error

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        """Refuse."""
        raise self._error

    def latestOffset(  # noqa: N802 - Spark's name
        self, start: dict[str, int], limit: ReadLimit
    ) -> dict[str, int]:
        """Refuse, also where a checkpoint has the first offset."""
        raise self._error

    def partitions(
        self, start: dict[str, int], end: dict[str, int]
    ) -> list[InputPartition]:
        """Refuse, also where a checkpoint has a batch to repeat."""
        raise self._error

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Refuse."""
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
    rows = RowBuilder(stage.name, schema)
    # Closed here and not when it is collected: its worker is to be gone.
    with closing(extracted(stage, part, reading.offsets)) as runs:
        for run in runs:
            yield from rows.add(run)
    yield from rows.rest()
