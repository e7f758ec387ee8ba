"""
The decisions of a runner about the leases of all shards.

The runner reports every event with its time, and performs the instructions that are
returned. Nothing here waits or reads a clock, so every interleaving can be tried.

Safety rests on the table alone: a row is replaced only if it still has the owner and
the counter that were read, and each change raises the counter. So of all runners that
believe they own a shard only one can move its checkpoint, however wrong their clocks
are. Clocks only decide when to take and when to give up a lease:

- A lease is *taken* when nothing has changed it for ``failover``, by the taker's own
  clock and reads of the table. The time between two reads counts for no more than two
  read intervals, so a runner that was suspended, or whose clock has jumped, takes
  nothing from living runners.
- Its owner *renews* it every third of ``failover``. It *gives up* the lease five sixths
  of ``failover`` after it has begun the last confirmed write; the remaining sixth is
  for clock drift. Nothing is lost by giving up: what was not committed is delivered
  again.
- Runners with leases count as living, and each gets about the same number. A runner
  with too few takes free leases. If none is free, it *claims* a few from the runner
  with most, whose worker may commit once more before it hands over.
- A shard whose parents have not ended has no owner.

A write whose outcome is unknown is looked up in the table: it was done if the row has
what was written. It may also be done later: then the next write of the same row is
refused, and the row is looked up again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Final, NamedTuple
from zlib import crc32

from etlstage.shard.lease import (
    Answer,
    CheckpointAsked,
    Event,
    FailRunner,
    Instruction,
    Lease,
    LeaveAsked,
    Left,
    Read,
    ReadFailed,
    Start,
    Stop,
    TableRead,
    WorkerEnded,
    Write,
    WriteFailed,
    WriteRefused,
    Written,
)

__all__ = ("LeaseKeeper", "Phase", "out_of_reach")

_RENEWALS: Final = 3  # in a failover
_GIVE_UP: Final = 5 / 6  # of a failover
_SOONER: Final = 10  # maximum reads of the table per interval, when shards end


def out_of_reach(seconds: float, why: str) -> str:
    """Return the error of a runner that could not reach the table for too long."""
    return (
        f"the leases were out of reach for {seconds:g} s, the limit that"
        f" load.shards.outage sets: {why}"
    )


class Phase(Enum):
    """The state of a lease at its runner."""

    TAKING = "taking"
    """We are writing ourselves as the owner; there is no worker yet."""
    RUNNING = "running"
    """There is a worker."""
    HANDING = "handing"
    """The worker is to end; then the lease is released for another runner."""
    LOST = "lost"
    """Another runner owns the lease, or may own it; the worker is to end."""
    ENDED = "ended"
    """The shard has ended; its worker is about to end."""


class _Aim(Enum):
    """The purpose of a write."""

    RENEW = "renew"
    COMMIT = "commit"
    RELEASE = "release"


class _Change(NamedTuple):
    """A write whose outcome is unknown."""

    number: int
    after: Lease
    aim: _Aim
    begun: float


class _Held:
    """A lease that is ours, was ours, or that we are taking."""

    __slots__ = (
        "ask",
        "change",
        "gone",
        "hand_until",
        "lease",
        "pending",
        "phase",
        "sure",
    )

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        """The row in the table, as far as we know."""
        self.phase: Phase = Phase.TAKING
        self.change: _Change | None = None
        self.pending: bool = True
        """The change's outcome will be reported; else look it up in the table."""
        self.ask: CheckpointAsked | None = None
        self.gone: bool = False
        """The worker has exited."""
        self.sure: float = -math.inf
        """When the last confirmed write was begun."""
        self.hand_until: float = math.inf


class _Seen(NamedTuple):
    """A row as it was last read, and for how long it has not changed."""

    lease: Lease
    age: float
    """Seconds for which the row is known not to have changed."""


class LeaseKeeper:
    """
    Decides for one runner.

    Args:
        name: Name of the runner; only one runner may use it at any time.
        start: Distinguishes this start of the runner from others.
        failover: Seconds without a change after which a lease is taken.
        max_steal: Number of leases to claim from living runners at the same time.
        hand_over: Seconds in which a worker may commit once more before it is stopped.
        outage: Seconds for which the table may be out of reach.
        alone: Whether a lock guarantees that other starts of the name have ended. The
            leases that they have at the first read are then taken at once. A start that
            is alive nevertheless can't commit any more, and finds that its name is in
            use.

    """

    def __init__(
        self,
        name: str,
        start: str,
        *,
        alone: bool = False,
        failover: float = 10.0,
        max_steal: int = 1,
        hand_over: float = 30.0,
        outage: float = 300.0,
    ) -> None:
        self.owner: Final = f"{name}/{start}"
        self.outage: Final = outage
        self._name = name
        self._alone = alone
        self._failover = failover
        self._every = failover / _RENEWALS
        self._give_up = failover * _GIVE_UP
        self._max_steal = max_steal
        self._hand_over = hand_over
        self._held: dict[str, _Held] = {}
        self._changes: dict[int, _Held] = {}
        # Leases to look at: with a thousand, an event must not look at each of them.
        self._touched: list[_Held] = []
        self._check_due = math.inf
        self._seen: dict[str, _Seen] = {}
        # By shard at which a worker of ours failed for good: its lease's switches then.
        self._failed: dict[str, int] = {}
        self._out: list[Instruction] = []
        self._number = 0
        # The caller's clock may be set back; ours is monotonic.
        self._caller: float | None = None
        self._now = 0.0
        self._read_due = 0.0
        self._read_begun: float | None = None
        self._read_done: float | None = None
        self._out_since: float | None = None
        """When the first of the current series of failed reads was begun."""
        self._unwritten_since: float | None = None
        """The same for writes; reads end it only when nothing is to be written."""
        self._leaving = self._over = False

    def __repr__(self) -> str:
        held = ", ".join(f"{name} {one.phase.name}" for name, one in self._held.items())
        return f"<LeaseKeeper {self.owner!r} {held or 'no leases'}>"

    @property
    def phases(self) -> Mapping[str, Phase]:
        """By shard, the phase of each lease that is or was ours."""
        return {shard: held.phase for shard, held in self._held.items()}

    def due(self) -> float | None:
        """Return when to report TimerRang, on the caller's clock; None: at once."""
        if self._caller is None:
            return None
        reads = math.inf if self._read_begun is not None else self._read_due
        return self._caller + max(0.0, min(reads, self._check_due) - self._now)

    def _due_of(self, held: _Held) -> float:
        """Return when a lease needs an action."""
        if held.phase not in (Phase.RUNNING, Phase.HANDING):
            return math.inf
        limit = self._give_up if held.change is not None else self._every
        return min(held.sure + limit, held.hand_until)

    # --- events ---------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Return the instructions for an event that happened at ``now`` seconds."""
        if self._caller is not None:
            self._now += max(0.0, now - self._caller)
        self._caller = now
        if not self._over:
            late = self._now >= self._check_due
            if late:
                # Before the event: a runner that was suspended must not carry on.
                self._give_up_late()
            self._take(event)
            if late or isinstance(event, TableRead | LeaveAsked):
                self._touched = [*self._held.values()]
                self._check_due = math.inf
            for held in self._touched:
                self._go_on(held)
                self._check_due = min(self._check_due, self._due_of(held))
            self._touched = []
            if isinstance(event, TableRead) and self._all_written:
                self._unwritten_since = None
            self._look_again()
        out, self._out = self._out, []
        return out

    def _take(self, event: Event) -> None:
        match event:
            case TableRead(leases):
                self._take_table({lease.shard: lease for lease in leases})
            case ReadFailed(why):
                self._fail_read(why)
            case Written(number):
                self._confirm(number)
            case WriteRefused(number):
                self._unwritten_since = None
                self._doubt(number, soon=True)
            case WriteFailed(number, why):
                self._fail_write(number, why)
            case CheckpointAsked(shard):
                self._ask(shard, event)
            case WorkerEnded(shard, failed):
                self._end_worker(shard, failed=failed)
            case LeaveAsked():
                self._leave()
        # TimerRang needs nothing here, as every event looks at what is due.

    def _fail_read(self, why: str) -> None:
        if self._out_since is None:
            self._out_since = self._read_begun
        self._read_begun = None
        self._read_due = self._now + self._every / 2
        self._check_outage(self._out_since, why)

    def _fail_write(self, number: int, why: str) -> None:
        if self._unwritten_since is None:
            held = self._changes.get(number)
            change = None if held is None else held.change
            self._unwritten_since = self._now if change is None else change.begun
        self._doubt(number, soon=False)
        self._check_outage(self._unwritten_since, why)

    def _check_outage(self, since: float | None, why: str) -> None:
        if since is not None and self._now >= since + self.outage:
            self._fail_runner(out_of_reach(self.outage, why))

    @property
    def _all_written(self) -> bool:
        """Whether nothing is to be written, now or once a given-up lease is retaken."""
        writes = any(isinstance(one, Write) for one in self._out)
        lost = any(held.phase is Phase.LOST for held in self._held.values())
        return not (writes or self._changes or lost)

    def _fail_runner(self, text: str) -> None:
        self._over = True
        self._out.append(FailRunner(text))

    def _ask(self, shard: str, event: CheckpointAsked) -> None:
        held = self._held.get(shard)
        if held is None or held.phase not in (Phase.RUNNING, Phase.HANDING):
            self._out.append(Answer(shard, stored=False))
        else:
            held.ask = event
            self._touched.append(held)

    def _end_worker(self, shard: str, *, failed: bool) -> None:
        held = self._held.get(shard)
        if held is None:
            return
        held.gone = True
        self._touched.append(held)
        if failed:
            self._failed[shard] = held.lease.switches

    def _leave(self) -> None:
        self._leaving = True
        for held in self._held.values():
            if held.phase is Phase.RUNNING:
                self._hand(held)

    def _hand(self, held: _Held) -> None:
        """Ask a worker to end, so that another runner can have its shard."""
        held.phase = Phase.HANDING
        held.hand_until = self._now + self._hand_over
        self._stop(held, lost=False)

    def _stop(self, held: _Held, *, lost: bool) -> None:
        if not held.gone:
            self._out.append(Stop(held.lease.shard, lost))

    def _lose(self, held: _Held) -> None:
        self._deny(held)
        if held.phase is Phase.TAKING:
            self._drop(held)
        elif held.phase is not Phase.LOST:
            held.phase = Phase.LOST
            self._stop(held, lost=True)

    def _deny(self, held: _Held) -> None:
        """Reject the worker's pending checkpoint, if any."""
        if held.ask is not None:
            held.ask = None
            self._out.append(Answer(held.lease.shard, stored=False))

    def _drop(self, held: _Held) -> None:
        if self._held.get(held.lease.shard) is held:
            del self._held[held.lease.shard]

    def _give_up_late(self) -> None:
        """Give up leases not confirmed in time; stop workers slow to hand over."""
        for held in self._held.values():
            if held.phase not in (Phase.RUNNING, Phase.HANDING):
                continue
            if self._now >= held.sure + self._give_up:
                self._lose(held)
            elif self._now >= held.hand_until:
                held.hand_until = math.inf
                self._stop(held, lost=True)

    # --- writing --------------------------------------------------------------

    def _go_on(self, held: _Held) -> None:
        """Begin the next write of a lease, if it needs one and none is under way."""
        if held.phase in (Phase.LOST, Phase.ENDED):
            if held.gone:
                self._drop(held)
            return
        if held.change is not None or held.phase is Phase.TAKING:
            return
        lease, ask = held.lease, held.ask
        if held.gone:
            self._deny(held)
            free = lease._replace(owner=lease.claimant or None, claimant=None)
            self._change(held, free, _Aim.RELEASE)
            return
        asked = self._leaving or lease.claimant is not None
        if held.phase is Phase.RUNNING and asked:
            self._hand(held)
        if ask is not None:
            at = lease._replace(position=ask.position, ended=ask.ended)
            self._change(held, at, _Aim.COMMIT)
        elif self._now >= held.sure + self._every:
            self._change(held, lease, _Aim.RENEW)

    def _change(self, held: _Held, after: Lease, aim: _Aim) -> None:
        before = held.lease
        after = self._moved(before, after)
        self._number += 1
        held.change = _Change(self._number, after, aim, self._now)
        held.pending = True
        self._changes[self._number] = held
        self._out.append(Write(self._number, before, after))

    @staticmethod
    def _moved(before: Lease, after: Lease) -> Lease:
        switches = before.switches + (after.owner not in (None, before.owner))
        # _replace() takes three times as long, and there may be a thousand at a time.
        return Lease(*after[:5], before.counter + 1, switches, after.claimant)

    def _confirm(self, number: int) -> None:
        self._unwritten_since = None
        held = self._changes.pop(number, None)
        if held is not None and held.change is not None:
            change, held.change = held.change, None
            held.sure = change.begun
            self._done(held, change, change.after)

    def _doubt(self, number: int, *, soon: bool) -> None:
        """Schedule a read that reveals a write's outcome; at once if ``soon``."""
        held = self._changes.pop(number, None)
        if held is not None:  # else the write was a claim
            held.pending = False
            wait = 0.0 if soon else self._every / 2
            self._read_due = min(self._read_due, self._now + wait)

    def _done(self, held: _Held, change: _Change, row: Lease) -> None:
        """Continue after a change that is in the table."""
        held.lease = row
        self._touched.append(held)
        if held.phase is Phase.LOST:
            return
        if change.aim is _Aim.RELEASE:
            self._drop(held)
            held.phase = Phase.LOST
        elif change.aim is _Aim.COMMIT:
            held.ask = None
            self._out.append(Answer(row.shard, stored=True))
            if row.ended:
                held.phase = Phase.ENDED
                # Its children may begin now. As a thousand shards may end at once, most
                # of them without children, the number of reads is limited.
                assert self._read_done is not None, "the lease was read"
                soon = self._read_done + self._every / _SOONER
                self._read_due = min(self._read_due, soon)
        elif held.phase is Phase.TAKING:
            self._begin(held)

    def _begin(self, held: _Held) -> None:
        """Start a worker for a lease that is ours."""
        if self._leaving:
            held.phase, held.gone = Phase.HANDING, True
        elif self._now < held.sure + self._give_up:
            held.phase = Phase.RUNNING
            self._out.append(Start(held.lease))
        else:
            # The table names us as the owner, but the write is too old to rely on.
            self._change(held, held.lease, _Aim.RENEW)

    # --- the table ------------------------------------------------------------

    def _look_again(self) -> None:
        if self._leaving and not self._held:
            self._over = True
            self._out.append(Left())
        elif self._read_begun is None and self._now >= self._read_due:
            self._read_begun = self._now
            self._out.append(Read())

    def _take_table(self, rows: dict[str, Lease]) -> None:
        begun, done = self._read_begun, self._read_done
        self._read_begun, self._read_done = None, self._now
        self._out_since = None
        self._read_due = self._now + self._every
        looked = 0.0
        if begun is not None and done is not None:
            # Time without a read does not prove that nothing has changed.
            looked = min(max(0.0, begun - done), 2 * self._every)
        twin = self._twin(rows)
        self._grow_old(rows, looked)
        # A shard that was reset (its switches are lower) may be tried again.
        self._failed = {
            shard: switches
            for shard, switches in self._failed.items()
            if shard not in rows or rows[shard].switches >= switches
        }
        for held in [*self._held.values()]:
            self._compare(held, rows.get(held.lease.shard))
        if twin is not None and not self._comes_before(twin):
            self._fail_runner(
                f"runner {self._name!r} is already running: {twin.shard} was renewed by"
                f" {twin.owner}; stop it, or give this one another name"
            )
        elif not self._leaving:
            self._balance(rows)
            self._alone = False  # a start of our name seen from now on is a later one

    def _grow_old(self, rows: Mapping[str, Lease], looked: float) -> None:
        before, self._seen = self._seen, {}
        for shard, row in rows.items():
            seen = before.get(shard)
            still = seen is not None and seen.lease.counter == row.counter
            age = seen.age + looked if seen is not None and still else 0.0
            self._seen[shard] = _Seen(row, age)

    def _namesake(self, owner: str | None) -> bool:
        """Return whether an owner is another start of this runner's name."""
        if owner is None or owner == self.owner:
            return False
        return owner.rpartition("/")[0] == self._name

    def _twin(self, rows: Mapping[str, Lease]) -> Lease | None:
        """Return a lease that another start of our name was seen to renew."""
        for shard, row in rows.items():
            seen = self._seen.get(shard)
            if (
                seen is not None
                and seen.lease.owner == row.owner
                and self._namesake(row.owner)
                and seen.lease.counter != row.counter
                # A claim by another runner changes the row, too.
                and seen.lease.claimant == row.claimant
            ):
                return row
        return None

    def _comes_before(self, twin: Lease) -> bool:
        """Return whether the twin has to fail: of two starts with leases one stays."""
        ours = any(one.phase is not Phase.LOST for one in self._held.values())
        return ours and self.owner < str(twin.owner)

    def _compare(self, held: _Held, row: Lease | None) -> None:
        """Compare a lease of ours with its row in the table."""
        change = held.change
        if (change is not None and held.pending) or held.phase is Phase.ENDED:
            return  # the outcome will be reported, or nothing more is to be written
        if row is None:
            self._lose(held)
        elif change is not None:
            self._find(held, change, row)
        elif row.counter > held.lease.counter:
            if row.owner == self.owner:
                held.lease = row
            else:
                self._lose(held)

    def _find(self, held: _Held, change: _Change, row: Lease) -> None:
        """Find out from the table's row whether a change was made."""
        held.change = None
        if row == change.after:
            # When it was made is unknown, so ``sure`` stays as it is.
            self._done(held, change, row)
        elif row.owner == self.owner:
            # It was not made, or a claim came first: _go_on() makes it again.
            held.lease = row
            if held.phase is Phase.TAKING and row.ended:
                self._drop(held)  # a read that was begun before its end had it free
            elif held.phase is Phase.TAKING:
                self._change(held, row._replace(claimant=None), _Aim.RENEW)
        elif change.aim is _Aim.RELEASE:
            self._drop(held)
            held.phase = Phase.LOST
        else:
            self._lose(held)

    # --- the share of a runner ------------------------------------------------

    def _balance(self, rows: Mapping[str, Lease]) -> None:
        """Take leases that are free or ours, or claim some, up to a fair share."""
        shards = [row for row in rows.values() if self._open(row, rows)]
        living: list[Lease] = []
        free: list[Lease] = []
        for row in shards:
            (free if self._free(row) else living).append(row)
        if any(self._namesake(row.owner) for row in living):
            return  # soon it will turn out whether the other start of our name lives
        counts = Counter(str(row.claimant or row.owner) for row in living)
        ours = self._ours(living)
        counts[self.owner] = ours
        share = -(-len(shards) // len(counts))
        mine = [
            row
            for row in shards
            if row.owner == self.owner and row.shard not in self._held
        ]
        free = [
            row
            for row in free
            if row.owner != self.owner and row.shard not in self._held
        ]
        for row in mine:
            self._grab(row)
        wanted = self._spread(free)[: max(0, share - ours)]
        for row in wanted:
            self._grab(row)
        if not free and ours < share:
            self._claim(living, counts)

    def _ours(self, living: Iterable[Lease]) -> int:
        """Return the number of leases that are ours, or about to be."""
        shards = {
            shard
            for shard, held in self._held.items()
            if held.phase in (Phase.TAKING, Phase.RUNNING)
        }
        shards |= {
            row.shard
            for row in living
            if self.owner in (row.claimant, row.owner) and row.shard not in self._held
        }
        return len(shards)

    def _open(self, row: Lease, rows: Mapping[str, Lease]) -> bool:
        """Return whether a shard needs an owner."""
        if row.ended or row.shard in self._failed:
            return False
        # A parent without a row is not known to have ended.
        return not row.parents or all(
            parent in rows and rows[parent].ended for parent in row.parents
        )

    def _free(self, row: Lease) -> bool:
        """Return whether a lease has no living owner."""
        if row.owner is None:
            return True
        ours = self._namesake(row.owner)
        least = self._failover / (2 if ours else 1)
        return (ours and self._alone) or self._seen[row.shard].age >= least

    def _spread(self, rows: Iterable[Lease]) -> list[Lease]:
        """Return rows in an order of our own, as others take them at the same time."""
        return sorted(rows, key=lambda row: crc32(f"{self.owner}{row.shard}".encode()))

    def _grab(self, row: Lease) -> None:
        held = _Held(row)
        self._held[row.shard] = held
        self._change(held, row._replace(owner=self.owner, claimant=None), _Aim.RENEW)

    def _claim(self, living: Iterable[Lease], counts: Counter[str]) -> None:
        """Claim a few leases of the runner with most, if that evens out the shares."""
        claimed = sum(row.claimant == self.owner for row in living)
        most, count = max(counts.items(), key=lambda item: (item[1], item[0]))
        spare = min(self._max_steal - claimed, (count - counts[self.owner]) // 2)
        theirs = [row for row in living if row.owner == most and row.claimant is None]
        for row in self._spread(theirs)[: max(0, spare)]:
            self._number += 1
            after = self._moved(row, row._replace(claimant=self.owner))
            self._out.append(Write(self._number, row, after))
