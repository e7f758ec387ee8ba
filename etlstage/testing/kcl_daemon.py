"""
A daemon on the terminal: shards of records from a file, one processor for each.

What both sides send is shown by name, with records decoded; at the end, what was
checkpointed of each shard.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Sequence
from hashlib import md5
from typing import Any, NamedTuple

import anyio

from etlstage.errors import ConfigError, WorkerStartFailed
from etlstage.messages import AnnotatedRun, Run, counted
from etlstage.protocol.events import Assignment, FarewellReason
from etlstage.protocol.kcl.checkpoint import ShardPosition, position_of, rank
from etlstage.protocol.kcl.lines import RecordColumn, hashed_key
from etlstage.protocol.kcl.uncommitted import LONGEST_KEY
from etlstage.stage.stage import Stage
from etlstage.telemetry.terminal import harmless
from etlstage.testing.dialect import FrameReader, kit_of
from etlstage.testing.kcl import MARKS, ProcessorFaults, ProcessorUnderTest
from etlstage.testing.transcript import Channel, WorkerMisbehaved

__all__ = ("StreamRecord", "StreamShard", "records_of", "shards_of", "simulate")


class StreamRecord(NamedTuple):
    """What is put into a stream once."""

    data: bytes
    key: str
    time: int | None = None
    """When it arrived, in milliseconds since 1970; None: now."""


class StreamShard(NamedTuple):
    """A part of a stream, in order."""

    name: str
    numbers: list[int]
    records: list[StreamRecord]

    def run(self, begin: int, end: int) -> Run:
        """Return some of its records, as a session takes them."""
        records = self.records[begin:end]
        now = time.time_ns() // 1_000_000
        columns: dict[str, Sequence[Any]] = {
            RecordColumn.SEQUENCE: list(map(str, self.numbers[begin:end])),
            RecordColumn.PARTITION: [record.key for record in records],
            RecordColumn.ARRIVAL: [record.time or now for record in records],
        }
        return AnnotatedRun([record.data for record in records], **columns)


def records_of(lines: Sequence[bytes]) -> list[StreamRecord]:
    """
    Return the records of a file.

    Args:
        lines: Each is the data of one; or a JSON object with ``data``, a text, or
            ``base64`` in its place, and perhaps ``key`` and ``time``.

    Raises:
        ConfigError: If one has a key that it can't have.

    """
    return [_record(number, line) for number, line in enumerate(lines, 1)]


def _record(number: int, line: bytes) -> StreamRecord:
    try:
        said = json.loads(line)
    except ValueError:
        said = None
    if not isinstance(said, dict) or not {"data", "base64"} & said.keys():
        return StreamRecord(line, hashed_key(line))
    text = said.get("data")
    data = (text if isinstance(text, str) else json.dumps(text)).encode()
    if "base64" in said:
        try:
            data = base64.b64decode(said["base64"], validate=True)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"record {number}: base64: {error}") from None
    key, arrival = said.get("key", hashed_key(data)), said.get("time")
    if not isinstance(key, str) or not 0 < len(key) <= LONGEST_KEY:
        raise ConfigError(
            f"record {number}: key is {key!r}, expected text of 1 to {LONGEST_KEY}"
            " characters"
        )
    if not isinstance(arrival, int | None):
        raise ConfigError(
            f"record {number}: time is {arrival!r}, expected milliseconds since 1970"
        )
    return StreamRecord(data, key, arrival)


def shards_of(records: Sequence[StreamRecord], count: int) -> list[StreamShard]:
    """Return shards, each with the records whose keys fall to it, as Kinesis has it."""
    shards = [StreamShard(f"shardId-{n:012}", [], []) for n in range(count)]
    for number, record in enumerate(records, 1):
        place = int.from_bytes(md5(record.key.encode(), usedforsecurity=False).digest())
        shard = shards[place * count >> 128]
        shard.numbers.append(number)
        shard.records.append(record)
    return shards


async def simulate(
    stage: Stage,
    shards: Sequence[StreamShard],
    *,
    size: int,
    tell: Callable[[str], None],
    faults: ProcessorFaults,
    begin: str | None = None,
    timeout: float = 10.0,  # noqa: ASYNC109 - of each action, in the processor
) -> bool:
    """
    Run a processor for each shard; return whether all of them did well.

    A shard that ends has to be checkpointed to its end.

    Args:
        stage: Of the processors.
        shards: What they are given.
        size: Records of an action, at most.
        tell: Is given each line.
        faults: What goes wrong in each of them.
        begin: The checkpoint behind which they begin, such as ``7`` or ``7.2``.
        timeout: How long one may take for an action, in seconds.

    Raises:
        ConfigError: If ``begin`` is no checkpoint.
        WorkerStartFailed: If the program can't be run.

    """
    position = None if begin is None else _position(begin)
    ended: list[str] = []
    well = True
    unstarted: WorkerStartFailed | None = None

    async def live(shard: StreamShard) -> None:
        nonlocal well, unstarted
        life = _ShardRun(
            shard, kit_of(stage.dialect).reader(), tell, alone=len(shards) == 1
        )
        processor = ProcessorUnderTest(
            stage,
            Assignment(shard.name, position),
            faults=faults,
            timeout=timeout,
            on_data=life.show,
        )
        try:
            await life.run(processor, size)
        except WorkerMisbehaved as error:
            well = False
            life.tell(f"FAIL {error.what}")
        except WorkerStartFailed as error:
            unstarted = error
            tasks.cancel_scope.cancel()
            return
        left = life.left(processor)
        well = well and not (left and faults.end is None)
        stored = processor.stored
        sub = f".{stored.sub}" if stored.sub else ""
        what = f"; {counted(left, 'record')} not covered" if left else ""
        ended.append(f"checkpointed: {shard.name} {stored.sequence}{sub}{what}")

    async with anyio.create_task_group() as tasks:
        for shard in shards:
            tasks.start_soon(live, shard)
    if unstarted is not None:
        raise unstarted
    for line in sorted(ended):
        tell(line)
    return well


def _position(text: str) -> ShardPosition:
    number, _, sub = text.partition(".")
    try:
        return position_of([number, int(sub or 0)])
    except ValueError as error:
        raise ConfigError(f"--from: {error}") from None


class _ShardRun:
    """One life of a processor, and its log lines."""

    def __init__(
        self,
        shard: StreamShard,
        reader: FrameReader | None,
        tell: Callable[[str], None],
        *,
        alone: bool,
    ) -> None:
        assert reader is not None
        self._shard = shard
        self._reader = reader
        self._tell = tell
        self._lead = "" if alone else f"{int(shard.name[-12:])}  "

    async def run(self, processor: ProcessorUnderTest, size: int) -> None:
        """Give its records, an action for so many, and end it."""
        shard, end = self._shard, processor.faults.end
        begin = sum((number, 0) <= rank(processor.stored) for number in shard.numbers)
        async with processor:
            places = range(begin, len(shard.records), size)
            for action, place in enumerate(places, 1):
                if end is not None and end[0] == action:
                    break
                await processor.give(shard.run(place, place + size))
            await processor.end(FarewellReason.ENDED if end is None else end[1])

    def left(self, processor: ProcessorUnderTest) -> int:
        """Return how many records no checkpoint covers."""
        stored = rank(processor.stored)
        return sum((number, 0) > stored for number in self._shard.numbers)

    def show(self, channel: Channel, data: bytes) -> None:
        """Show what went one way."""
        if channel in MARKS:
            side, mark = MARKS[channel]
            for text in self._reader.read(side, data):
                self.tell(f"{mark} {text}")
        elif channel is Channel.STDERR:
            for line in data.decode(errors="replace").splitlines():
                self.tell(f"! {line}")
        else:
            self.tell(f"- {data.decode(errors='replace')}")

    def tell(self, text: str) -> None:
        """Tell a line."""
        self._tell(harmless(f"{self._lead}{text}"))
