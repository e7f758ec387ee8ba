"""
Reads of ``format("etlstage-journal")``: once, and as a stream.

``plan.py`` plans what each task reads; this module has what Spark calls, and makes the
rows. Planning does not check the content of frames: a task raises if frames are
missing, or are not those of its plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import (
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import (
    BinaryType,
    DataType,
    LongType,
    StringType,
    StructType,
    TimestampType,
)

from etlstage.columns import array_of
from etlstage.errors import ConfigError, guess
from etlstage.journal.errors import JournalDamaged, JournalError
from etlstage.messages import Run, size_of
from etlstage.pipeline.journal_source import messages_of
from etlstage.sequencing import Envelope, Flags, FrameError, clock_of, flags_of
from etlstage.spark.journal.options import (
    NAME,
    JournalReading,
    SetFolder,
    log_damage,
)
from etlstage.spark.journal.plan import FrameRange, Planner
from etlstage.spark.task.rows import binary_of
from etlstage.supervisor.exchange.keyed import key_text, point

__all__ = ("COLUMNS", "JournalBatchReader", "JournalRows", "JournalStreamReader")

COLUMNS: Final[Mapping[str, DataType]] = {
    "value": BinaryType(),
    "key": StringType(),
    "journal": StringType(),
    "offset": LongType(),
    "uuid": StringType(),
    "time": TimestampType(),
}
"""The columns of a read, with their types."""

_MESSAGES: Final = 8192
_BYTES: Final = 1 << 20
"""Approximate bounds of a batch of rows, as frames are not cut."""


class JournalRows:
    """
    Converts frames into rows.

    Args:
        place: The set of journals.
        reading: How it is read.
        schema: Some of the columns, in any order.

    Raises:
        ConfigError: If there is another column, or one has another type.

    """

    def __init__(
        self, place: SetFolder, reading: JournalReading, schema: StructType
    ) -> None:
        for field in schema:
            kind = COLUMNS.get(field.name)
            if kind is None:
                raise ConfigError(
                    f"format {NAME}: unknown column"
                    f" {field.name!r}{guess(field.name, COLUMNS)}, expected some of"
                    f" {', '.join(COLUMNS)}"
                )
            if field.dataType.simpleString() != kind.simpleString():
                raise ConfigError(
                    f"format {NAME}: column {field.name} is of type"
                    f" {field.dataType.simpleString()}, expected"
                    f" {kind.simpleString()}"
                )
        self._place = place
        self._skips = reading.on_damage == "skip"
        self._names = schema.names
        self._kinds = {
            name: to_arrow_type(COLUMNS[name], timezone="UTC") for name in schema.names
        }
        self._key = None if reading.key is None else point(reading.key)

    def read(self, ranges: list[FrameRange]) -> Iterator[pa.RecordBatch]:
        """
        Yield the rows of a task.

        Raises:
            JournalError: If the frames are not those that were planned, or the folder
                is not seen here.

        """
        if not ranges:
            return
        held: list[tuple[Envelope, Run]] = []
        count = size = 0
        for envelope in self._frames(ranges):
            run = messages_of(envelope.message)
            if held and (held[0][0].journal != envelope.journal or size > _BYTES):
                yield self._batch(held)
                held, count, size = [], 0, 0
            held.append((envelope, run))
            count, size = count + len(run), size + size_of(run)
            if count >= _MESSAGES:
                yield self._batch(held)
                held, count, size = [], 0, 0
        if held:
            yield self._batch(held)

    def _frames(self, ranges: list[FrameRange]) -> Iterator[Envelope]:
        with self._place.opened() as journals:
            for journal, begin, end, frames in ranges:
                found, damage = 0, _Damage()
                for envelope in journals.read_uncommitted(
                    journal, begin, end, on_error=damage.add if self._skips else None
                ):
                    if flags_of(envelope.message.uuid) != Flags.ACK_TXN:
                        found += 1
                        yield envelope
                if found != frames and not (damage.found and found < frames):
                    raise JournalError(
                        f"{journal}: found {found} frames from offset {begin} to {end},"
                        f" but {frames} were planned: it is not the journal that the"
                        " driver has read"
                    )

    def _batch(self, held: list[tuple[Envelope, Run]]) -> pa.RecordBatch:
        ends = array_of(list(accumulate(len(run) for _, run in held)), pa.int32())
        made: dict[str, pa.Array] = {}
        if not _OF_FRAME.keys() >= set(self._names):
            made["value"] = pa.concat_arrays([binary_of(run) for _, run in held])
            made["key"] = self._keys_of(made["value"]) if "key" in self._names else None
        for name in _OF_FRAME.keys() & self._names:
            value = _OF_FRAME[name]
            values = pa.array([value(frame) for frame, _ in held], self._kinds[name])
            runs = pa.RunEndEncodedArray.from_arrays(ends, values)
            made[name] = pc.run_end_decode(runs)
        return pa.RecordBatch.from_arrays(
            [made[name] for name in self._names],
            schema=pa.schema(list(self._kinds.items())),
        )

    def _keys_of(self, messages: pa.Array) -> pa.Array:
        """Return the key of each message: the value at the pointer."""
        if self._key is None:
            return pa.nulls(len(messages), pa.string())
        keys = [key_text(message, self._key) for message in messages.to_pylist()]
        return array_of(keys, pa.string())


class _Damage:
    """Logs damage that is skipped, and records that there is some."""

    found = False

    def add(self, error: FrameError | JournalDamaged) -> None:
        """Log damage."""
        self.found = True
        log_damage(error)


def _uuid(frame: Envelope) -> str | None:
    uuid = frame.message.uuid
    return str(uuid) if uuid.int else None


def _micros(frame: Envelope) -> int | None:
    """Return when a frame was published, by its producer's clock."""
    uuid = frame.message.uuid
    # The clock has units of 100 ns since 1582, and a sequence of 4 bits.
    return ((clock_of(uuid) >> 4) - _EPOCH) // 10 if uuid.int else None


_EPOCH: Final = 0x01B21DD213814000
"""The clock of UUIDs at the beginning of 1970."""
_OF_FRAME: Final[Mapping[str, Callable[[Envelope], object]]] = {
    "journal": lambda frame: frame.journal,
    "offset": lambda frame: frame.begin,
    "uuid": _uuid,
    "time": _micros,
}
"""Columns that all messages of a frame have in common."""


class JournalBatchReader(DataSourceReader):
    """
    Reads everything that is committed when the read is planned.

    Args:
        reading: What to read.
        schema: Schema of the rows.

    """

    def __init__(self, reading: JournalReading, schema: StructType) -> None:
        for name in ("reader", "max_messages", "max_bytes"):
            if getattr(reading, name):
                raise ConfigError(f"format {NAME}: option {name} is only for streams")
        self._reading = reading
        self._rows = JournalRows(SetFolder.seen(reading.path), reading, schema)

    def partitions(self) -> list[InputPartition]:
        """Return what each task is to read."""
        planner = Planner(self._reading)
        try:
            tasks = planner.next(planner.initial()).tasks
        finally:
            planner.close()
        # Without partitions Spark would read one whose value is None.
        return [InputPartition(task) for task in tasks or [[]]]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a task."""
        return self._rows.read(partition.value)


class JournalStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """
    Reads a stream, whose offsets Spark keeps in its checkpoint.

    Args:
        reading: What to read.
        schema: Schema of the rows.

    """

    def __init__(self, reading: JournalReading, schema: StructType) -> None:
        self._rows = JournalRows(SetFolder.seen(reading.path), reading, schema)
        self._reading = reading
        self._opened: Planner | None = None

    @property
    def _planner(self) -> Planner:
        """The planner of this process, opened when it is first needed."""
        if self._opened is None:
            self._opened = Planner(self._reading)
        return self._opened

    def initialOffset(self) -> dict[str, str]:  # noqa: N802 - Spark's name
        """Return where a query without a checkpoint begins."""
        return dict(self._planner.initial())

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return no limit of Spark's: we have two, and do not cut frames."""
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Let the query end at what is committed now."""
        self._planner.freeze()

    def latestOffset(self, start: dict[str, str], limit: ReadLimit) -> dict[str, str]:  # noqa: N802 - Spark's name
        """Return where the next batch ends; ``start`` if nothing new is committed."""
        return dict(self._planner.next(start).end)

    def partitions(
        self, start: dict[str, str], end: dict[str, str]
    ) -> list[InputPartition]:
        """Return what each task of a batch is to read."""
        return [InputPartition(task) for task in self._planner.between(start, end)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a task."""
        return self._rows.read(partition.value)

    def commit(self, end: dict[str, str]) -> None:
        """Record that the reader no longer needs the data before an offset."""
        self._planner.commit(end)

    def stop(self) -> None:
        """Release the reader's name."""
        if self._opened is not None:
            self._opened.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return what tasks need."""
        return {**self.__dict__, "_opened": None}
