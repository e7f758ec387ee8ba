"""
A simulated daemon: shards of records from a file, with one processor for each.

It prints what both sides send, by name and with records decoded, and at the end the
checkpoint of each shard.
"""

from __future__ import annotations

import base64
import json
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import md5
from typing import Any, Final, NamedTuple

import anyio

from etlstage.errors import ConfigError, WorkerStartFailed
from etlstage.messages import AnnotatedRun, Run, counted
from etlstage.protocol.events import Assignment
from etlstage.protocol.kcl.checkpoint import (
    SHARD_END,
    Rank,
    ShardPosition,
    position_of,
    rank,
)
from etlstage.protocol.kcl.lines import RecordColumn, hashed_key
from etlstage.protocol.kcl.uncommitted import LONGEST_KEY
from etlstage.stage.stage import Stage
from etlstage.telemetry.terminal import harmless
from etlstage.testing.dialect import FrameReader, kit_of
from etlstage.testing.fault import FaultKind, FaultPlan, Moment
from etlstage.testing.faulty.wire import FaultyLaunch
from etlstage.testing.kcl import ENDS, MARKS, ProcessorUnderTest
from etlstage.testing.transcript import Channel, WorkerMisbehaved
from etlstage.transport import Launch, launch_worker

__all__ = ("StreamRecord", "StreamShard", "records_of", "shards_of", "simulate")

_HASHES: Final = 2**128  # of partition keys
_STARTS: Final = 1_000  # processes of a shard, at most, if faults restart them
_PARTS: Final = FaultKind.SPLIT_SHARD, FaultKind.MERGE_SHARDS


class StreamRecord(NamedTuple):
    """A record as it is put into a stream."""

    data: bytes
    key: str
    time: int | None = None
    """Arrival time, in milliseconds since 1970; None: now."""


@dataclass
class StreamShard:
    """A shard of a stream, with its records in order."""

    name: str
    keys: range
    """Hashes of the partition keys that belong to it."""
    positions: list[Rank] = field(default_factory=list)
    records: list[StreamRecord] = field(default_factory=list)

    def run(self, begin: int, end: int) -> Run:
        """Return a range of its records, in the form that a session takes."""
        now = time.time_ns() // 1_000_000
        records, positions = self.records[begin:end], self.positions[begin:end]
        columns: dict[str, Sequence[Any]] = {
            RecordColumn.SEQUENCE: [str(number) for number, _ in positions],
            RecordColumn.PARTITION: [record.key for record in records],
            RecordColumn.ARRIVAL: [
                now if record.time is None else record.time for record in records
            ],
        }
        if any(sub for _, sub in positions):
            columns[RecordColumn.SUB] = [sub for _, sub in positions]
        return AnnotatedRun([record.data for record in records], **columns)

    def covered(self, position: ShardPosition) -> int:
        """Return how many of its records a checkpoint covers."""
        return bisect_right(self.positions, rank(position))

    def repeat(self, place: int, times: int) -> None:
        """Replace a record by ``times`` copies that share its sequence number."""
        number, _ = self.positions[place]
        self.positions[place : place + 1] = [(number, sub) for sub in range(times)]
        self.records[place : place + 1] = [self.records[place]] * times

    def fill(self, records: Iterable[tuple[Rank, StreamRecord]]) -> None:
        """Insert those of ``records`` whose keys belong to the shard, in order."""
        for position, record in records:
            hashed = md5(record.key.encode(), usedforsecurity=False).digest()
            if int.from_bytes(hashed) in self.keys:
                at = bisect_right(self.positions, position)
                self.positions.insert(at, position)
                self.records.insert(at, record)

    def cut(self, place: int) -> list[tuple[Rank, StreamRecord]]:
        """Remove and return its records from ``place`` on."""
        rest = list(zip(self.positions[place:], self.records[place:], strict=True))
        del self.positions[place:], self.records[place:]
        return rest


def records_of(lines: Sequence[bytes]) -> list[StreamRecord]:
    """
    Return the records of a file.

    Args:
        lines: Each is the data of a record; or a JSON object with ``data`` (a text) or
            ``base64``, and optionally ``key`` and ``time``.

    Raises:
        ConfigError: If the ``data``, ``base64``, ``key`` or ``time`` of a record is
            invalid.

    """
    return [_record(number, line) for number, line in enumerate(lines, 1)]


def _record(number: int, line: bytes) -> StreamRecord:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or not {"data", "base64"} & record.keys():
        return StreamRecord(line, hashed_key(line))
    text = record.get("data")
    text = text if isinstance(text, str) else json.dumps(text)
    data = _encoded(text, f"record {number}: data")
    if "base64" in record:
        try:
            data = base64.b64decode(record["base64"], validate=True)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"record {number}: base64: {error}") from None
    key, arrival = record.get("key", hashed_key(data)), record.get("time")
    if not isinstance(key, str) or not 0 < len(key) <= LONGEST_KEY:
        raise ConfigError(
            f"record {number}: key is {key!r}, expected text of 1 to {LONGEST_KEY}"
            " characters"
        )
    _encoded(key, f"record {number}: key")
    if not isinstance(arrival, int | None) or isinstance(arrival, bool):
        raise ConfigError(
            f"record {number}: time is {arrival!r}, expected milliseconds since 1970"
        )
    return StreamRecord(data, key, arrival)


def _encoded(text: str, what: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{what} has the surrogate {text[error.start]!r}, expected text that UTF-8"
            " can encode; see base64"
        ) from None


def shards_of(records: Sequence[StreamRecord], count: int) -> list[StreamShard]:
    """Return shards, with records distributed by key hash, as Kinesis does it."""
    bounds = [_HASHES * n // count for n in range(count + 1)]
    shards = [_shard(n, range(*bounds[n : n + 2])) for n in range(count)]
    numbered: list[tuple[Rank, StreamRecord]] = [
        ((n, 0), record) for n, record in enumerate(records, 1)
    ]
    for shard in shards:
        shard.fill(numbered)
    return shards


def _shard(number: int, keys: range) -> StreamShard:
    return StreamShard(f"shardId-{number:012}", keys)


async def simulate(
    stage: Stage,
    shards: Sequence[StreamShard],
    *,
    size: int,
    tell: Callable[[str], None],
    faults: FaultPlan | None = None,
    begin: str | None = None,
    timeout: float = 10.0,  # noqa: ASYNC109 - per action, by the processor
) -> bool:
    """
    Run a processor for each shard; return whether none of them failed.

    A shard that was split or merged has children with the rest of its records. They
    begin only once all their parents were checkpointed at their end.

    Args:
        stage: The stage of the processors.
        shards: The shards at the start.
        size: Maximum number of records of an action.
        tell: Called with each line of output.
        faults: What goes wrong in each processor.
        begin: The checkpoint after which they begin, such as ``7`` or ``7.2``.
        timeout: How long a processor may take for an action, in seconds.

    Raises:
        ConfigError: If ``begin`` is not a checkpoint, or a fault can't happen.
        WorkerStartFailed: If the program can't be run.

    """
    position = None if begin is None else _position(begin, "--from")
    plan, launch = _parted(stage, faults or FaultPlan())
    whole = FaultPlan(
        tuple(each for each in plan.faults if each.kind not in _PARTS), plan.seed
    )
    stream = _Lineage(shards)
    alone = len(shards) == 1 and whole == plan
    ended: list[str] = []
    well = True
    wrong: ConfigError | WorkerStartFailed | None = None

    async def live(shard: StreamShard, position: ShardPosition | None) -> None:
        nonlocal well, wrong
        lead = "" if alone else f"{int(shard.name[-12:])}  "
        log = _ConversationPrinter(kit_of(stage.dialect).reader(), tell, lead)
        life = _ShardRun(shard, stream, size, log)
        own = plan if stream.divisible(shard) else whole

        def processor(begin: ShardPosition | None, start: int) -> ProcessorUnderTest:
            return ProcessorUnderTest(
                stage,
                Assignment(shard.name, begin),
                faults=own,
                start=start,
                launch=launch,
                timeout=timeout,
                on_data=log.add,
            )

        try:
            went_well = await life.run(processor, position)
        except (ConfigError, WorkerStartFailed) as error:
            wrong = error
            tasks.cancel_scope.cancel()
            return
        well &= went_well  # not of the await: others may set it meanwhile
        ended.append(life.ended())
        for child in stream.over(shard, life.stored):
            tasks.start_soon(live, child, None)

    async with anyio.create_task_group() as tasks:
        for shard in shards:
            tasks.start_soon(live, shard, position)
    if wrong is not None:
        raise wrong
    for line in sorted(ended) + stream.waiting():
        tell(line)
    return well


def _parted(stage: Stage, faults: FaultPlan) -> tuple[FaultPlan, Launch]:
    """Return the faults of the daemon, and a launch that does the others."""
    of_daemon = Moment.ACTION, Moment.CHECKPOINT
    mine = [each for each in faults.faults if each.at in of_daemon]
    others = [each for each in faults.faults if each.at not in of_daemon]
    launch: Launch = launch_worker
    if others:
        plan = FaultPlan(tuple(others), faults.seed)
        launch = FaultyLaunch(launch_worker, {stage.name: plan})
    return FaultPlan(tuple(mine), faults.seed), launch


def _position(text: str, what: str) -> ShardPosition:
    number, _, sub = text.partition(".")
    try:
        return position_of([number, int(sub or 0)])
    except ValueError as error:
        raise ConfigError(f"{what}: {error}") from None


class _Lineage:
    """The shards of a stream, and their children by splits and merges."""

    def __init__(self, shards: Sequence[StreamShard]) -> None:
        self._first = [shard.name for shard in shards]
        self._count = len(shards)  # of all shards ever created
        self._running = list(shards)
        self._parents: dict[str, set[str]] = {}  # that have not ended, by child
        self._children: dict[str, list[StreamShard]] = {}  # by parent

    def divisible(self, shard: StreamShard) -> bool:
        """Return whether a shard may be split or merged; children never are again."""
        return shard.name in self._first

    def merges(self, shard: StreamShard) -> bool:
        return shard.name in self._children

    def end(self, shard: StreamShard, kind: FaultKind, place: int) -> None:
        """
        End a shard before a record; its children, if any, get the rest.

        Raises:
            ConfigError: If there is no other shard to merge it with.

        """
        keys = shard.keys
        middle = (keys.start + keys.stop) // 2
        match kind:
            case FaultKind.SPLIT_SHARD:
                parts = range(keys.start, middle), range(middle, keys.stop)
                self._follow([shard], *parts)
            case FaultKind.MERGE_SHARDS if not self.merges(shard):
                other = self._other(shard)
                spans = keys, other.keys
                begin, end = min(s.start for s in spans), max(s.stop for s in spans)
                self._follow([shard, other], range(begin, end))
            case FaultKind.MERGE_SHARDS | FaultKind.END_SHARD:
                pass
            case _:
                return
        rest = shard.cut(place)
        for child in self._children.get(shard.name, ()):
            child.fill(rest)

    def over(self, shard: StreamShard, stored: ShardPosition) -> list[StreamShard]:
        """Remove a shard whose processing is over; return the children to begin now."""
        self._running.remove(shard)
        children = self._children.get(shard.name, [])
        if stored.sequence == SHARD_END:
            for child in children:
                self._parents[child.name].discard(shard.name)
        begun = [child for child in children if not self._parents[child.name]]
        self._running += begun
        return begun

    def waiting(self) -> list[str]:
        """Return a line for each shard that could not begin."""
        return [
            f"not started: {child}, no checkpoint at the end of"
            f" {' and '.join(sorted(parents))}"
            for child, parents in self._parents.items()
            if parents
        ]

    def _other(self, shard: StreamShard) -> StreamShard:
        for other in self._running:
            if other is not shard and not self.merges(other):
                return other
        raise ConfigError(
            f"fault {FaultKind.MERGE_SHARDS.value}: no shard other than {shard.name} is"
            " being processed; see --shards"
        )

    def _follow(self, parents: Sequence[StreamShard], *spans: range) -> None:
        children = [_shard(self._count + n, span) for n, span in enumerate(spans)]
        self._count += len(children)
        names = {parent.name for parent in parents}
        self._children |= dict.fromkeys(names, children)
        self._parents |= {child.name: set(names) for child in children}


class _ShardRun:
    """Runs the processors of one shard, one after the other."""

    def __init__(
        self,
        shard: StreamShard,
        stream: _Lineage,
        size: int,
        log: _ConversationPrinter,
    ) -> None:
        self.stored: ShardPosition = position_of(None)
        self._shard = shard
        self._stream = stream
        self._size = size
        self._log = log
        self._actions = 0
        self._many = 0  # copies of the next record; 0: no fault

    async def run(
        self,
        processor_at: Callable[[ShardPosition | None, int], ProcessorUnderTest],
        begin: ShardPosition | None,
    ) -> bool:
        """
        Give all records to processors; return whether none of them failed.

        Raises:
            ConfigError: If a fault can't happen.
            WorkerStartFailed: If the program can't be run.

        """
        asked = 0
        for start in range(1, _STARTS + 1):
            processor = processor_at(begin, start)
            processor.number = asked
            failure = ""
            try:
                async with processor:
                    await self._live(processor)
            except WorkerMisbehaved as error:
                failure = error.what
            finally:
                self.stored = processor.stored
                self._log.flush()
            if processor.killed is None:
                if failure:
                    self._log.show(f"FAIL {failure}")
                return not failure
            asked, begin = processor.number, self.stored
            if processor.killed:
                begin = _position(processor.killed, f"fault {FaultKind.RESTART.value}")
        raise ConfigError(
            f"fault {FaultKind.RESTART.value}: {self._shard.name} was started"
            f" {_STARTS:,} times; set number"
        )

    def ended(self) -> str:
        """Return the line that reports what was checkpointed."""
        stored, left = self.stored, len(self._shard.records)
        left -= self._shard.covered(stored)
        sub = f".{stored.sub}" if stored.sub else ""
        what = f"; {counted(left, 'record')} not covered" if left else ""
        return f"checkpointed: {self._shard.name} {stored.sequence}{sub}{what}"

    async def _live(self, processor: ProcessorUnderTest) -> None:
        """Give the records after the checkpoint, in actions, and end the processor."""
        await processor.initialized()
        shard, end = self._shard, await self._before(processor)
        place = shard.covered(processor.stored)
        while end is None and place < len(shard.records):
            if self._many:
                shard.repeat(place, self._many)
            size, self._many = max(self._size, self._many), 0
            await processor.give(shard.run(place, place + size))
            place += size
            end = processor.parted or await self._before(processor)
        if end is FaultKind.END_INPUT:
            await processor.exited()
            return
        end = end or FaultKind.END_SHARD
        self._stream.end(shard, end, place)
        await processor.end(ENDS[end])

    async def _before(self, processor: ProcessorUnderTest) -> FaultKind | None:
        """Do the faults due before an action; return one that ends the processor."""
        self._actions += 1
        end: FaultKind | None = None
        for fault in processor.faults.due(Moment.ACTION, self._actions, b""):
            kind = FaultKind(fault["kind"])
            if kind is FaultKind.PAUSE:
                await anyio.sleep(fault["seconds"])
            elif kind is FaultKind.NO_RECORDS:
                await processor.give(self._shard.run(0, 0))
            elif kind is FaultKind.MANY_RECORDS:
                self._many = fault["size"]
            elif kind is FaultKind.RESTART:
                await processor.restart(fault.get("data", ""))
            else:
                end = end or kind
        if end is None and self._stream.merges(self._shard):
            end = FaultKind.MERGE_SHARDS
        return end


class _ConversationPrinter:
    """Prints the conversation: a line for each message, and each line of stderr."""

    def __init__(
        self, reader: FrameReader | None, tell: Callable[[str], None], lead: str
    ) -> None:
        assert reader is not None
        self._reader = reader
        self._tell = tell
        self._lead = lead
        self._begun = b""  # of a line on stderr

    def add(self, channel: Channel, data: bytes) -> None:
        if channel in MARKS:
            side, mark = MARKS[channel]
            for text in self._reader.read(side, data):
                self.show(f"{mark} {text}")
        elif channel is Channel.STDERR:
            # One print() to a pipe may be several writes, one per argument.
            *lines, self._begun = (self._begun + data).split(b"\n")
            for line in lines:
                self.show(f"! {line.decode(errors='replace')}")
        else:
            self.flush()
            self.show(f"- {data.decode(errors='replace')}")

    def flush(self) -> None:
        """Show the line on stderr that has no end yet, if any."""
        if self._begun:
            self.add(Channel.STDERR, b"\n")

    def show(self, text: str) -> None:
        self._tell(harmless(f"{self._lead}{text}"))
