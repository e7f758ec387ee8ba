"""
The leases of a runner, in a table that all runners see.

The keeper's instructions about the table are performed here. Those about workers are
passed on to the owner of the workers.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import closing, suppress
from functools import partial
from typing import Any, Final, TypeAlias

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from etlstage.errors import StateUnusable
from etlstage.shard.keeper import LeaseKeeper, out_of_reach
from etlstage.shard.lease import (
    Answer,
    Event,
    FailRunner,
    Lease,
    Left,
    Read,
    ReadFailed,
    Start,
    Stop,
    TableRead,
    TimerRang,
    Write,
    WriteFailed,
    WriteRefused,
    Written,
)
from etlstage.shard.stream import AT_END, ShardedSource
from etlstage.shard.table import LeaseTable, News, TableGone
from etlstage.telemetry.log import Log
from etlstage.transport.process import Signal

__all__ = ("Duty", "LeaseHolder")

_log = Log()

_TICK: Final = 0.001  # seconds
_AGAIN: Final = 1.0  # seconds until a database is tried again


Duty: TypeAlias = Write | Start | Stop | Answer | FailRunner | Left | TableRead
"""An instruction that the caller has to perform, or the event of a table read."""


class LeaseHolder:
    """
    Holds leases as a keeper decides.

    Args:
        stage: Name of the stage.
        keeper: Decides which shards are ours.
        leases: Opens the table, given the input's identity.
        names: Shards of the input; :meth:`find` may add more.

    Attributes:
        rows: Leases as last read or written. An ended lease may be reset later.

    """

    def __init__(
        self,
        stage: str,
        keeper: LeaseKeeper,
        leases: Callable[[str], LeaseTable],
        names: Iterable[str] = (),
    ) -> None:
        self.rows: dict[str, Lease] = {}
        self._over: dict[str, int] = {}
        self._stage = stage
        self._keeper = keeper
        self._open = leases
        self._names = set(names)
        self._table: LeaseTable | None = None
        self._threads = anyio.CapacityLimiter(4)
        self._looking = anyio.Lock()
        self._looks = 0
        """Number of looks for shards that have begun."""
        self._found = 0
        """Number of the last look that succeeded."""
        self._events: deque[Event | FailRunner] = deque()
        self._reported = Signal()

    async def open(self, of: Callable[[], str], stream: ShardedSource | None) -> None:
        """
        Open the table as soon as it can be reached, and add the existing shards.

        Args:
            of: Returns the input's identity; called in a thread.
            stream: Where shards come from; None: only those in ``names`` exist.

        Raises:
            EtlstageError: If the input or the table is not the expected one.
            StateUnusable: If the table is out of reach for too long.
            TableGone: If the table is out of reach when the run is drained.

        """

        def begin() -> set[str]:
            if self._table is None:
                self._table = self._open(of())
            if stream is not None:
                return self._add(stream)
            begin = _never_had()
            self._table.add(Lease(name, counter=begin) for name in sorted(self._names))
            return self._names

        limit = anyio.current_time() + self._keeper.outage

        def over() -> bool:
            return bool(self._events) or anyio.current_time() >= limit

        try:
            await self._add_when_there(begin, over)
        except BaseException as error:
            if self._table is not None:
                self._table.close()
            if isinstance(error, TableGone) and not self._events:
                text = out_of_reach(self._keeper.outage, str(error))
                raise StateUnusable(f"stage {self._stage}: {text}") from error
            raise

    async def _add_when_there(
        self, add: Callable[[], set[str]], over: Callable[[], bool]
    ) -> None:
        """Add leases of shards, and their names, once the table can be reached."""
        while True:
            try:
                names = await self._in_thread(add)
            except TableGone as error:
                _log.warning("leases not read", stage=self._stage, error=str(error))
                if over():
                    raise
                await anyio.sleep(_AGAIN)
            else:
                # Not in the thread, which could undo what a read has added meanwhile.
                self._names = self._names | names
                return

    async def close(self) -> None:
        """Release leases that a failed run still holds, as its workers have exited."""
        await self._in_thread(self._release)

    def _release(self) -> None:
        ours = self._keeper.owner
        with closing(self._leases) as table, suppress(TableGone):
            # A write that was abandoned may still change a row after it was read.
            while held := [row for row in table.read() if row.owner == ours]:
                for row in held:
                    free = row._replace(owner=None, claimant=None)
                    free = free._replace(counter=row.counter + 1)
                    table.swap(row, free, News(lag=0))

    def report(self, event: Event) -> None:
        """Pass an event to the keeper."""
        self._events.append(event)
        self._reported.set()

    async def instructions(self, tasks: TaskGroup) -> AsyncGenerator[Duty, None]:
        """
        Yield the instructions to perform, and an event each time the table was read.

        Args:
            tasks: Task group in which the table is read.

        """
        while True:
            event = self._events.popleft() if self._events else TimerRang()
            if isinstance(event, FailRunner):
                yield event
                continue
            now = anyio.current_time()
            for instruction in self._keeper.handle(event, now):
                if isinstance(instruction, Read):
                    tasks.start_soon(self._read)
                else:
                    yield instruction
            if isinstance(event, TableRead):
                yield event
            due = self._keeper.due()
            assert due is not None, "an event was handled"
            if not self._events:
                # Wait for at least a tick: a time that is due sooner than a float can
                # resolve would not count as due yet.
                with anyio.CancelScope(deadline=max(due, now + _TICK)):
                    await self._reported.wait()

    async def _read(self) -> None:
        names = self._names  # there may be more meanwhile
        try:
            rows = await self._in_thread(self._leases.read)
        except TableGone as error:
            _log.warning("leases not read", stage=self._stage, error=str(error))
            self.report(ReadFailed(str(error)))
            return
        self.rows = {row.shard: row for row in rows}
        # Once a shard that was reset is taken again, its switches show no reset.
        self._over = {
            shard: switches
            for shard, switches in self._over.items()
            if shard not in self.rows or self.rows[shard].switches >= switches
        }
        there = set(self.rows)
        if missing := names - there:
            gone = (
                f"shard {min(missing)} is gone from the lease table: all shards were"
                " reset, or its row was deleted; run again"
            )
            self._events.append(FailRunner(gone))
        # Each runner that ends a shard first adds its children to the table.
        self._names = self._names | there
        self.report(TableRead(rows))

    async def write(self, write: Write, news: News) -> None:
        """Replace a row, and report the outcome."""
        number, before, after = write
        try:
            swap = partial(self._leases.swap, before, after, news)
            done = await self._in_thread(swap)
        except TableGone as error:
            _log.warning(
                "lease not written",
                stage=self._stage,
                shard=after.shard,
                error=str(error),
            )
            self.report(WriteFailed(number, str(error)))
            return
        if done:
            self.rows[after.shard] = after
        self.report(Written(number) if done else WriteRefused(number))

    def give_up(self, lease: Lease) -> None:
        """Regard a shard as over for this runner, until the shard is reset."""
        self._over[lease.shard] = lease.switches

    @property
    def all_over(self) -> bool:
        """Whether there is no shard that this runner could still process."""
        return all(map(self.is_over, self._names))

    def is_over(self, shard: str) -> bool:
        """Return whether a shard has ended, or this runner can't process it."""
        if self._has_ended(shard):
            return True
        # After several splits and merges, many ways lead from a shard to an ancestor.
        waits_for, ancestors = [shard], {shard}
        while waits_for:
            name = waits_for.pop()
            row = self.rows.get(name)
            switches, parents = (0, ()) if row is None else (row.switches, row.parents)
            # A reset sets ``switches`` to 0, so a shard that was reset is not over.
            if switches >= self._over.get(name, math.inf):
                return True
            new = {p for p in parents if not self._has_ended(p)} - ancestors
            ancestors |= new
            waits_for += new
        return False

    def _has_ended(self, shard: str) -> bool:
        row = self.rows.get(shard)
        return row is not None and row.ended

    async def find(self, stream: ShardedSource) -> None:
        """
        Look for new shards, and add leases for them.

        Raises:
            EtlstageError: If the shards can't be listed, or one is gone.

        """
        begun = self._looks
        # One at a time: while its source is busy, it takes a thread.
        async with self._looking:
            if self._found > begun:
                return  # by another call that began its look after this one was made
            self._looks += 1
            # If the table is out of reach for too long, reading leases ends the run.
            await self._add_when_there(partial(self._add, stream), lambda: False)
            self._found = self._looks

    def _add(self, stream: ShardedSource) -> set[str]:
        """Add leases for new shards; return the names of all shards; blocks."""
        # In this order, as another look may add shards between the two.
        known = {row.shard: row for row in self._leases.read()}
        found = stream.shards()
        there = {shard.name for shard in found}
        gone = [
            row for row in known.values() if not row.ended and row.shard not in there
        ]
        if gone:
            # Read again, as the last may have been read to its end, and then expired.
            left = {row.shard for row in self._leases.read() if not row.ended}
            gone = [row for row in gone if row.shard in left]
        if gone:
            raise StateUnusable(
                f"stage {self._stage}: shard {gone[0].shard} is gone from {stream.input},"
                " and was not read to its end: 'etlstage shards reset' starts over with"
                " the shards that exist"
            )
        counter = _never_had()
        known_parents = there.union(known)
        new = [
            Lease(
                shard.name,
                tuple(name for name in shard.parents if name in known_parents),
                counter=counter,
            )
            for shard in found
        ]
        # The first runner to see a stream stores where all its shards begin. A second
        # one may see other shards, too. These are children, as are all that come later:
        # they begin with their first record.
        if known or not self._leases.add(
            map(_begun, new, map(stream.beginning, found)), all_new=True
        ):
            self._leases.add(new)
        return known_parents

    @property
    def _leases(self) -> LeaseTable:
        assert self._table is not None
        return self._table

    async def _in_thread(self, what: Callable[[], Any]) -> Any:  # noqa: ANN401
        return await anyio.to_thread.run_sync(
            what, limiter=self._threads, abandon_on_cancel=True
        )


def _never_had() -> int:
    """
    Return the counter of a new lease: microseconds since 1970.

    A lease of that name may have been removed while a runner held it. If counters began
    at 0, a late write of that runner could succeed once the new lease had reached the
    same counter.
    """
    return time.time_ns() // 1000


def _begun(lease: Lease, position: object) -> Lease:
    """Return a lease with the position where its shard begins."""
    if position == AT_END:
        return lease._replace(ended=True)
    return lease if position is None else lease._replace(position=json.dumps(position))
