"""
Extract workers for a data source: ranges of offsets, rounds of messages, rows.

Spark calls from threads of its own, and each call must come to an end by itself; the
supervisor has an event loop in a thread beside, see ``task/portal.py``.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Final, NamedTuple, Self

import pyarrow as pa
from anyio.from_thread import BlockingPortal, start_blocking_portal
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StringType, StructType

from etlstage.columns import strings_of
from etlstage.errors import ConfigError, EtlstageError, RepliesDoubtful, SourceFailed
from etlstage.messages import Run, cost_of
from etlstage.pipeline.offsets import ask_offset, steps
from etlstage.spark.dataframe.schema import is_raw
from etlstage.spark.datasource.json_rows import (
    DoesNotFit,
    check_types,
    rows_of_documents,
)
from etlstage.spark.task.portal import Bridge, bridged
from etlstage.stage import OffsetPolicy, Stage
from etlstage.supervisor import AsyncSupervisor

__all__ = ("Offsets", "Range", "RowBuilder", "extracted", "ranges")

_ROWS: Final = 10_000  # in a batch of rows, about
_BYTES: Final = 8 * 1024 * 1024
_TASKS: Final = 10_000


class Range(NamedTuple):
    """What one task extracts."""

    number: int
    """Of the task, from zero."""
    of: int
    """How many tasks there are."""
    start: int | None = None
    """First offset; None for a plain stage."""
    end: int | None = None
    """Behind the last."""


def ranges(
    stage: str, start: int, end: int, step: int, partitions: int | None
) -> list[Range]:
    """
    Return the ranges of the tasks that extract from ``start`` up to ``end``.

    The same arguments always give the same ranges: a failed batch is cut as before.

    Args:
        stage: Its name, for errors.
        start: First offset.
        end: Behind the last.
        step: How far one request reaches.
        partitions: How many ranges to cut it into, evenly, as far as there are
            offsets; None: one for each step.

    Raises:
        ConfigError: If that is more than anybody can mean.

    """
    total = max(end - start, 0)
    count = -(-total // step) if partitions is None else min(partitions, total)
    if count > _TASKS:
        raise ConfigError(
            f"stage {stage}: offsets {start} to {end} make {count} tasks, expected no"
            f" more than {_TASKS}: raise step, give partitions, or for a stream"
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
    Yield what workers of ``stage`` extract as ``part``, a run at a time.

    Raises:
        SourceFailed: If a round fails; what was yielded before is a part of it.

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
    if supervisor.doubtful:
        raise RepliesDoubtful(supervisor.doubtful, stage=stage.name)


class Offsets:
    """
    Asks a worker for offsets; it lives from the first question until :meth:`close`.

    A query without new data asks again every few milliseconds.

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
        Return ``offset``, or the one that the worker calls ``initial`` or ``latest``.

        Raises:
            SourceFailed: If it does not answer with one whole number.

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


class RowBuilder:
    """
    Makes batches of rows for Spark out of messages.

    Args:
        stage: Name of the stage, for errors.
        schema: Of the rows. One column ``value``, a string, or one binary column
            takes messages as they are; else they are JSON objects.

    Raises:
        ConfigError: If a column can't be read from JSON.

    """

    def __init__(self, stage: str, schema: StructType) -> None:
        self._stage = stage
        self._schema = schema
        self._plain = is_raw(schema) or (
            schema.names == ["value"] and isinstance(schema[0].dataType, StringType)
        )
        if not self._plain:
            check_types(schema, read=True)
        self._pending: list[bytes] = []
        self._size = 0
        self._made = 0

    def add(self, run: Run) -> Generator[pa.RecordBatch, None, None]:
        """Take a run; yield a batch if there is enough for one."""
        self._pending += run
        self._size += sum(map(len, run))
        if len(self._pending) >= _ROWS or self._size >= _BYTES:
            yield from self.rest()

    def rest(self) -> Generator[pa.RecordBatch, None, None]:
        """
        Yield what there is, if anything.

        Raises:
            SourceFailed: If a message is no text, or does not fit the schema.

        """
        messages, self._pending, self._size = self._pending, [], 0
        if messages:
            yield self._batch(messages)
            self._made += len(messages)

    def _batch(self, messages: Run) -> pa.RecordBatch:
        # Spark compares; nullability is a part of it.
        target = to_arrow_schema(self._schema, timezone="UTC")
        try:
            if self._plain:
                values = pa.array(messages, pa.binary()).cast(target[0].type)
                return pa.RecordBatch.from_arrays([values], schema=target)
            rows = rows_of_documents(messages, self._schema, target)
            return pa.RecordBatch.from_arrays(rows.columns, schema=target)
        except DoesNotFit as error:
            raise self._failed(error.place, str(error)) from None
        except pa.ArrowInvalid:
            texts = strings_of(pa.array(messages, pa.binary()))
            place = texts.to_pylist().index(None)
            why = "it is not UTF-8: read it with values=binary"
            raise self._failed(place, why) from None

    def _failed(self, place: int, why: str) -> SourceFailed:
        number = self._made + place + 1
        return SourceFailed(
            f"stage {self._stage}: message {number} of a partition does not fit the"
            f" schema {self._schema.simpleString()}: {why}",
            stage=self._stage,
        )
