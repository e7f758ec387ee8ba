"""The leases of a runner, with a table in memory."""

from __future__ import annotations

import pytest

from etlstage.shard.holder import LeaseHolder
from etlstage.shard.keeper import LeaseKeeper
from etlstage.shard.lease import Lease
from etlstage.shard.table import MemoryLeases

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
