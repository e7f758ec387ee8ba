"""The leases of a runner, with a table in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from threading import Event, get_ident
from typing import Any

import anyio
import anyio.to_thread
import pytest

from etlstage.errors import StateUnusable
from etlstage.shard.holder import LeaseHolder
from etlstage.shard.keeper import LeaseKeeper
from etlstage.shard.kinesis.source import KinesisSource
from etlstage.shard.lease import Lease
from etlstage.shard.stream import SourceShard
from etlstage.shard.table import MemoryLeases
from tests.patience import HANG
from tests.shard.stream import MemoryKinesis

pytestmark = pytest.mark.core


async def test_lease_is_released_although_a_late_write_moves_it() -> None:
    """A write that was abandoned at the end of the run may arrive then (issue 25)."""
    held, other = Lease("s", owner="a/0", counter=5), Lease("t", owner="b/0")
    late = [held._replace(counter=6)]

    class Table(MemoryLeases):
        def read(self) -> list[Lease]:
            rows = super().read()
            if late:
                assert self.swap(held, late.pop())
            return rows

    table = Table()
    table.add([held, other])
    holder = LeaseHolder("load", LeaseKeeper("a", "0"), lambda _: table, "s")
    await holder.open(str, None)
    await holder.close()
    assert table.read() == [Lease("s", counter=7), other]


async def test_names_of_shards_change_in_the_loop_alone() -> None:
    """A thread could undo the change by a read, so the run would end (issue 25)."""
    threads: list[int] = []

    class Names(set[str]):
        def __or__(self, other: Iterable[str]) -> Names:  # type: ignore[override]
            threads.append(get_ident())
            return Names(self.union(other))

    table, stream = MemoryLeases(), MemoryKinesis(1)
    holder = LeaseHolder("load", LeaseKeeper("a", "0"), lambda _: table)
    holder._names = Names()
    source = KinesisSource("clicks", lambda: stream)
    await holder.open(str, source)
    stream.split("shardId-000000000000")
    await holder.find(source)
    await holder._read()
    assert holder._names == {f"shardId-{n:012}" for n in range(3)}
    assert threads == [get_ident()] * 3


async def test_leases_are_read_while_shards_are_listed() -> None:
    """Several looks take one thread, and share the next list of shards (issue 25)."""
    table, stream = MemoryLeases(), MemoryKinesis(1)
    begun, listed = Event(), Event()
    lists: list[int] = []

    class Slow(KinesisSource):
        def shards(self) -> list[SourceShard]:
            lists.append(len(lists))
            begun.set()
            listed.wait()
            return super().shards()

    holder = LeaseHolder("load", LeaseKeeper("a", "0"), lambda _: table)
    await holder.open(str, KinesisSource("clicks", lambda: stream))
    async with anyio.create_task_group() as tasks:
        source = Slow("clicks", lambda: stream)
        tasks.start_soon(holder.find, source)
        await anyio.to_thread.run_sync(begun.wait)
        for _ in range(8):
            tasks.start_soon(holder.find, source)
        try:
            with anyio.fail_after(HANG):
                await holder._read()
        finally:
            listed.set()
    # The first list may be outdated for the looks that were asked for later.
    assert lists == [0, 1]


async def test_shards_that_are_added_after_the_stream_was_listed() -> None:
    """Those that another look adds meanwhile are not taken for gone (issue 25)."""
    table, stream = MemoryLeases(), MemoryKinesis(1)
    source = KinesisSource("clicks", lambda: stream)
    children = {f"shardId-{n:012}" for n in (1, 2)}

    class Outdated(KinesisSource):
        def shards(self) -> list[SourceShard]:
            found = super().shards()
            stream.split("shardId-000000000000")
            other._add(source)
            return found

    other, holder = (
        LeaseHolder("load", LeaseKeeper(name, "0"), lambda _: table) for name in "ab"
    )
    await other.open(str, source)
    await holder.open(str, source)
    await holder.find(Outdated("clicks", lambda: stream))
    assert children < {row.shard for row in table.read()}


@pytest.mark.parametrize("ended", [True, False])
async def test_shard_that_expires_while_shards_are_listed(ended: bool) -> None:
    """It is gone only if it was not read to its end meanwhile (issue 25)."""
    table, stream = MemoryLeases(), MemoryKinesis(2)
    (first, _) = (shard["ShardId"] for shard in stream.shards)

    class Expiring(KinesisSource):
        def shards(self) -> list[SourceShard]:
            (row,) = (row for row in table.read() if row.shard == first)
            assert table.swap(row, row._replace(ended=ended))
            return [shard for shard in super().shards() if shard.name != first]

    holder = LeaseHolder("load", LeaseKeeper("a", "0"), lambda _: table)
    await holder.open(str, KinesisSource("clicks", lambda: stream))
    expiring = Expiring("clicks", lambda: stream)
    if ended:
        await holder.find(expiring)
        return
    with pytest.raises(StateUnusable, match=f"shard {first} is gone"):
        await holder.find(expiring)


async def test_shards_that_were_split_and_merged_many_times() -> None:
    """A look doesn't go each of the ways from a shard to an ancestor (issue 25)."""
    looks = Counter[str]()

    class Rows(dict[str, Lease]):
        def get(self, shard: str, default: Any = None) -> Any:  # noqa: ANN401
            looks[shard] += 1
            assert looks[shard] < 10 * len(self)
            return super().get(shard, default)

    rows = [Lease("0")]
    for n in range(40):
        halves = Lease(f"{n} low", (f"{n}",)), Lease(f"{n} high", (f"{n}",))
        rows += [*halves, Lease(f"{n + 1}", tuple(half.shard for half in halves))]
    holder = LeaseHolder(
        "load", LeaseKeeper("a", "0"), lambda _: MemoryLeases(), [r.shard for r in rows]
    )
    holder.rows = Rows({row.shard: row for row in rows})
    assert not holder.is_over("40")
    holder.give_up(rows[0])
    looks.clear()
    assert holder.all_over
