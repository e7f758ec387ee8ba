"""
How long does a runner compute for a thousand leases, in a third of a failover?

It reads the table, renews all leases, and handles the confirmations. The time of the
table itself is not counted.
"""

from __future__ import annotations

import time

from benchmarks.harness import Row
from etlstage.shard.keeper import LeaseKeeper
from etlstage.shard.lease import Event, Lease, TableRead, TimerRang, Write, Written

COUNT = 1_000
ROUNDS = 25
EVERY = 4.0  # seconds, a third of the failover
MOST = 0.005  # seconds


def measure() -> list[Row]:
    """Return seconds of processor time for reading, renewing and confirming."""
    keeper = LeaseKeeper("a", "1", failover=3 * EVERY)
    rows = {f"s{n}": Lease(f"s{n}") for n in range(COUNT)}
    read, renew, confirm = list[float](), list[float](), list[float]()
    keeper.handle(TimerRang(), 0.0)
    for number in range(ROUNDS):
        now = number * EVERY
        # The first read acquires the leases; each later renewal is due to the timer.
        events: list[Event] = [TimerRang()] if number else [TableRead([*rows.values()])]
        seconds, writes = _timed(keeper, events, now)
        renew.append(seconds)
        assert len(writes) == COUNT
        rows |= {write.after.shard: write.after for write in writes}
        heard: list[Event] = [Written(write.number) for write in writes]
        confirm.append(_timed(keeper, heard, now)[0])
        if number:
            read.append(_timed(keeper, [TableRead([*rows.values()])], now)[0])
    return [
        Row(
            f"{COUNT:,} leases: {what}",
            found,
            "wanted",
            [MOST] * len(found),
            "s",
            1,
            True,
        )
        for what, found in (("read", read), ("renew", renew[1:]), ("confirm", confirm))
    ]


def _timed(
    keeper: LeaseKeeper, events: list[Event], now: float
) -> tuple[float, list[Write]]:
    """Return the seconds that decisions take, and the writes they ask for."""
    began = time.process_time()
    found = [one for event in events for one in keeper.handle(event, now)]
    seconds = time.process_time() - began
    return seconds, [one for one in found if isinstance(one, Write)]
