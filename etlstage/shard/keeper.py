"""
What a runner does about the leases of all shards.

It reports every event with its time, and performs the instructions that come back.
Nothing here waits or reads a clock, so every interleaving can be tried.

What is safe rests on the table alone: a row takes the place of another only if that has
the owner and the counter that were read, and each change raises the counter. So of all
who think that they own a shard one can move its checkpoint, however wrong their clocks
are. Clocks only decide when to take and when to give up:

- A lease is *taken* when nothing has moved it for ``failover``, by the taker's own clock,
  as far as it has looked: time in which it did not look counts for no more than two
  looks, so a runner that was stopped, or whose clock has jumped, takes nothing from the living.
- Its owner *renews* it every third of that, and *gives up* five sixths of it after it
  has begun to write what was last confirmed: a sixth is for clocks that drift. Nothing
  is lost by giving up: what was not committed comes again.
- Runners with leases count as living, and all have about as many. One with too few takes
  what is free; where nothing is, it *claims* a few of the one with most, and that one's
  worker may commit once more before it hands over.
- A shard whose parents have not ended has no owner.

A write whose outcome is not known is looked for in the table: it was done if the row has
what it wrote. It may also be done later: then the next one of the same row is refused,
and it is looked for again.
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


def out_of_reach(seconds: float, why: str) -> str:
    """Return why a runner ends that has not had the table for so long."""
    return (
        f"the leases were out of reach for {seconds:g} s, the limit that"
        f" load.shards.outage sets: {why}"
    )


class Phase(Enum):
    """What a lease is to its runner."""

    TAKING = "taking"
    """It is written as ours; there is no worker yet."""
    RUNNING = "running"
    """It has a worker."""
    HANDING = "handing"
    """Its worker is to end, and then it goes to somebody else."""
    LOST = "lost"
    """It is, or may be, another's; its worker is to end."""
    ENDED = "ended"
    """The shard has ended; its worker is to follow."""


class _Aim(Enum):
    """What a write is for."""

    RENEW = "renew"
    COMMIT = "commit"
    RELEASE = "release"


class _Change(NamedTuple):
    """A write of which the outcome is not known."""

    number: int
    after: Lease
    aim: _Aim
    begun: float


class _Held:
    """A lease that is ours, or was."""

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
        """As it is in the table, as far as we know."""
        self.phase: Phase = Phase.TAKING
        self.change: _Change | None = None
        self.pending: bool = True
        """The outcome of the change is on its way; else it has to be looked for."""
        self.ask: CheckpointAsked | None = None
        self.gone: bool = False
        """There is no worker any more."""
        self.sure: float = -math.inf
        """When what was last confirmed was begun to be written."""
        self.hand_until: float = math.inf


class _Seen(NamedTuple):
    """A row as it was last seen to move."""

    lease: Lease
    age: float
    """Seconds since, of which we know that nothing moved it."""


class LeaseKeeper:
    """
    Decides for one runner.

    Args:
        name: Of the runner; at any time one runner has it.
        start: Sets this start of it apart from others.
        failover: Seconds without a move after which a lease is taken.
        max_steal: Leases that are claimed of a living runner at once.
        hand_over: Seconds that a worker has which may commit once more.
        outage: Seconds for which the table may be out of reach.
        alone: Whether other starts of the name have ended, by a lock: what they
            have at the first look is taken at once. One that lives all the same can't
            commit any more, and finds that this one has its name.

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
        # With a thousand leases an event must not look at each of them.
        self._touched: list[_Held] = []
        self._check_due = math.inf
        self._seen: dict[str, _Seen] = {}
        self._failed: set[str] = set()
        self._out: list[Instruction] = []
        self._number = 0
        # The caller's clock may be set back: ours only goes on.
        self._caller: float | None = None
        self._now = 0.0
        self._read_due = 0.0
        self._read_begun: float | None = None
        self._read_done: float | None = None
        self._out_since: float | None = None
        """When the first read was begun of those that have failed one after another."""
        self._leaving = self._over = False

    def __repr__(self) -> str:
        held = ", ".join(f"{name} {one.phase.name}" for name, one in self._held.items())
        return f"<LeaseKeeper {self.owner!r} {held or 'no leases'}>"

    @property
    def phases(self) -> Mapping[str, Phase]:
        """What each lease is that is ours, or was, by shard."""
        return {shard: held.phase for shard, held in self._held.items()}

    def due(self) -> float | None:
        """Return when TimerRang is wanted, on the caller's clock; None: at once."""
        if self._caller is None:
            return None
        reads = math.inf if self._read_begun is not None else self._read_due
        return self._caller + max(0.0, min(reads, self._check_due) - self._now)

    def _due_of(self, held: _Held) -> float:
        """Return when something is to be done about a lease."""
        if held.phase not in (Phase.RUNNING, Phase.HANDING):
            return math.inf
        limit = self._give_up if held.change is not None else self._every
        return min(held.sure + limit, held.hand_until)

    # --- what happens ---------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Return what is to be done about an event, at a time in seconds."""
        if self._caller is not None:
            self._now += max(0.0, now - self._caller)
        self._caller = now
        if not self._over:
            late = self._now >= self._check_due
            if late:
                # First: a runner that was stopped must not go on.
                self._give_up_late()
            self._take(event)
            if late or isinstance(event, TableRead | LeaveAsked):
                self._touched = [*self._held.values()]
                self._check_due = math.inf
            for held in self._touched:
                self._go_on(held)
                self._check_due = min(self._check_due, self._due_of(held))
            self._touched = []
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
            case WriteRefused(number) | WriteFailed(number):
                self._doubt(number, soon=isinstance(event, WriteRefused))
            case CheckpointAsked(shard):
                self._ask(shard, event)
            case WorkerEnded(shard, failed):
                self._end_worker(shard, failed=failed)
            case LeaveAsked():
                self._leave()
        # TimerRang needs no more: what is due is looked at with every event.

    def _fail_read(self, why: str) -> None:
        if self._out_since is None:
            self._out_since = self._read_begun
        self._read_begun = None
        self._read_due = self._now + self._every / 2
        if self._out_since is not None and self._now >= self._out_since + self.outage:
            self._fail_runner(out_of_reach(self.outage, why))

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
        if failed:
            self._failed.add(shard)
        if shard in self._held:
            self._held[shard].gone = True
            self._touched.append(self._held[shard])

    def _leave(self) -> None:
        self._leaving = True
        for held in self._held.values():
            if held.phase is Phase.RUNNING:
                self._hand(held)

    def _hand(self, held: _Held) -> None:
        """Ask a worker to end, so that its shard can go to somebody else."""
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
        """Notify those that wait for a checkpoint that there is none."""
        if held.ask is not None:
            held.ask = None
            self._out.append(Answer(held.lease.shard, stored=False))

    def _drop(self, held: _Held) -> None:
        if self._held.get(held.lease.shard) is held:
            del self._held[held.lease.shard]

    def _give_up_late(self) -> None:
        """Give up what was not confirmed in time, and who does not end."""
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
        """Write what is to be written next of a lease, if anything."""
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
        # _replace() takes three times as long, and there may be a thousand a round.
        return Lease(*after[:5], before.counter + 1, switches, after.claimant)

    def _confirm(self, number: int) -> None:
        held = self._changes.pop(number, None)
        if held is not None and held.change is not None:
            change, held.change = held.change, None
            held.sure = change.begun
            self._done(held, change, change.after)

    def _doubt(self, number: int, *, soon: bool) -> None:
        """Look for what has become of a write; at once if the table is there."""
        held = self._changes.pop(number, None)
        if held is not None:  # else a claim, or it was given up meanwhile
            held.pending = False
            wait = 0.0 if soon else self._every / 2
            self._read_due = min(self._read_due, self._now + wait)

    def _done(self, held: _Held, change: _Change, row: Lease) -> None:
        """Go on behind a change that is in the table."""
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
            # What is in the table is ours, and too old to be sure of.
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
            # Time without a look is no evidence that nothing moved.
            looked = min(max(0.0, begun - done), 2 * self._every)
        twin = self._twin(rows)
        self._grow_old(rows, looked)
        for held in [*self._held.values()]:
            self._compare(held, rows.get(held.lease.shard))
        if twin is not None and not self._comes_before(twin):
            self._fail_runner(
                f"runner {self._name!r} is running: {twin.shard} was renewed by"
                f" {twin.owner}; stop it, or give this one another name"
            )
        elif not self._leaving:
            self._balance(rows)
            self._alone = False  # who has our name later came behind us

    def _grow_old(self, rows: Mapping[str, Lease], looked: float) -> None:
        before, self._seen = self._seen, {}
        for shard, row in rows.items():
            seen = before.get(shard)
            still = seen is not None and seen.lease.counter == row.counter
            age = seen.age + looked if seen is not None and still else 0.0
            self._seen[shard] = _Seen(row, age)

    def _namesake(self, owner: str | None) -> bool:
        """Return whether an owner is another start of ours."""
        if owner is None or owner == self.owner:
            return False
        return owner.rpartition("/")[0] == self._name

    def _twin(self, rows: Mapping[str, Lease]) -> Lease | None:
        """Return a lease that another start of ours has renewed before our eyes."""
        for shard, row in rows.items():
            seen = self._seen.get(shard)
            if (
                seen is not None
                and seen.lease.owner == row.owner
                and self._namesake(row.owner)
                and seen.lease.counter != row.counter
                # Who claims a lease moves it, too.
                and seen.lease.claimant == row.claimant
            ):
                return row
        return None

    def _comes_before(self, twin: Lease) -> bool:
        """Return whether it is that start which fails: of two with leases one stays."""
        ours = any(one.phase is not Phase.LOST for one in self._held.values())
        return ours and self.owner < str(twin.owner)

    def _compare(self, held: _Held, row: Lease | None) -> None:
        """Look at what has become of a lease of ours."""
        change = held.change
        if (change is not None and held.pending) or held.phase is Phase.ENDED:
            return  # its outcome is on its way, or there is none to come
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
        """Find out whether a change was made, by what there is."""
        held.change = None
        if row == change.after:
            # Since when is not known, so it makes us no surer.
            self._done(held, change, row)
        elif row.owner == self.owner:
            # A claim came first, or nothing at all: it is made again by who goes on.
            held.lease = row
            if held.phase is Phase.TAKING:
                self._change(held, row._replace(claimant=None), _Aim.RENEW)
        elif change.aim is _Aim.RELEASE:
            self._drop(held)
            held.phase = Phase.LOST
        else:
            self._lose(held)

    # --- the share of a runner ---------------------------------------------------------

    def _balance(self, rows: Mapping[str, Lease]) -> None:
        """Take what is free or ours, or claim, up to a fair share."""
        shards = [row for row in rows.values() if self._open(row, rows)]
        living: list[Lease] = []
        free: list[Lease] = []
        for row in shards:
            (free if self._free(row) else living).append(row)
        if any(self._namesake(row.owner) for row in living):
            return  # it will be seen soon whether that start of ours lives
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
        """Return how many leases are ours, or about to be."""
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
        """Return whether a shard has to have an owner."""
        if row.ended or row.shard in self._failed:
            return False
        # One that is not there is not known to have ended.
        return not row.parents or all(
            parent in rows and rows[parent].ended for parent in row.parents
        )

    def _free(self, row: Lease) -> bool:
        """Return whether a lease has no owner that lives."""
        if row.owner is None:
            return True
        ours = self._namesake(row.owner)
        least = self._failover / (2 if ours else 1)
        return (ours and self._alone) or self._seen[row.shard].age >= least

    def _spread(self, rows: Iterable[Lease]) -> list[Lease]:
        """Return rows in an order of our own: others take them at the same time."""
        return sorted(rows, key=lambda row: crc32(f"{self.owner}{row.shard}".encode()))

    def _grab(self, row: Lease) -> None:
        held = _Held(row)
        self._held[row.shard] = held
        self._change(held, row._replace(owner=self.owner, claimant=None), _Aim.RENEW)

    def _claim(self, living: Iterable[Lease], counts: Counter[str]) -> None:
        """Ask the runner with most for a few, if that makes us more equal."""
        claimed = sum(row.claimant == self.owner for row in living)
        most, count = max(counts.items(), key=lambda item: (item[1], item[0]))
        spare = min(self._max_steal - claimed, (count - counts[self.owner]) // 2)
        theirs = [row for row in living if row.owner == most and row.claimant is None]
        for row in self._spread(theirs)[: max(0, spare)]:
            self._number += 1
            after = self._moved(row, row._replace(claimant=self.owner))
            self._out.append(Write(self._number, row, after))
