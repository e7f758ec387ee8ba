"""How a runner keeps leases; the last test does everything in random order."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import ClassVar

import pytest

from etlstage.shard.keeper import LeaseKeeper, Phase
from etlstage.shard.lease import (
    CheckpointAsked,
    Event,
    FailRunner,
    Lease,
    LeaveAsked,
    Read,
    ReadFailed,
    Stop,
    TableRead,
    TimerRang,
    WorkerEnded,
    Write,
    WriteFailed,
    WriteRefused,
    Written,
)
from tests.dice import diced
from tests.shard.world import FAILOVER, Mode, Runner, World


def shards(count: int) -> list[Lease]:
    """Return leases without owners."""
    return [Lease(f"s{number}") for number in range(count)]


def counts(world: World) -> list[int]:
    """Return the number of shards of each live runner, fewest first."""
    have = Counter(row.owner for row in world.rows.values() if not row.ended)
    return sorted(have[r.keeper.owner] for r in world.runners if r.alive)


def alone(count: int = 1) -> tuple[World, Runner]:
    """Return a world with a single runner, which has all shards."""
    world = World(shards(count))
    runner = world.begin()
    world.go_on(1)
    assert len(runner.workers) == count
    return world, runner


# --- taking -----------------------------------------------------------------------


def test_what_is_free_is_taken_at_once() -> None:
    """The first runner that looks takes it, and starts workers at its checkpoint."""
    world = World([Lease("s0", position="7", owner=None, counter=3, switches=2)])
    runner = world.begin()
    world.work(runner)

    assert runner.workers == {"s0": 7}
    row = world.rows["s0"]
    assert (row.owner, row.counter, row.switches) == (runner.keeper.owner, 4, 3)


def test_a_lease_of_the_dead_is_taken_after_failover() -> None:
    """It isn't taken before that, measured by the taker's own clock."""
    world, dead = alone()
    dead.alive = False
    taker = world.begin()
    world.go_on(FAILOVER - 1)
    assert not taker.workers
    world.go_on(FAILOVER)
    assert taker.workers == {"s0": 0}


def test_a_lease_that_is_renewed_is_not_taken() -> None:
    """It stays with its owner, however long others wait."""
    world, owner = alone()
    other = world.begin()
    world.go_on(10 * FAILOVER)

    assert (list(owner.workers), list(other.workers)) == (["s0"], [])


@pytest.mark.parametrize("jump", [1000.0, -1000.0])
def test_a_clock_that_jumps_robs_no_one(jump: float) -> None:
    """A runner that didn't look can't conclude that a lease is stale."""
    world, owner = alone()
    other = world.begin()
    world.go_on(1)
    world.jump(other, jump)
    world.go_on(2 * FAILOVER)
    assert (list(owner.workers), list(other.workers)) == (["s0"], [])
    owner.alive = False
    world.go_on(2 * FAILOVER)
    assert list(other.workers) == ["s0"]


def test_a_runner_that_was_stopped_gives_up_first() -> None:
    """It can't move the checkpoint, even before it knows of the loss."""
    world, owner = alone()
    owner.stopped = True
    taker = world.begin()
    world.go_on(3 * FAILOVER)
    assert list(taker.workers) == ["s0"]

    owner.stopped = False
    world.ask(owner, "s0", 5, ended=False)
    assert owner.pending == {}  # refused
    assert owner.keeper.phases == {"s0": Phase.LOST}
    assert owner.stopping == {"s0"}
    world.go_on(1)
    assert not owner.workers
    assert world.rows["s0"].position is None


def test_a_runner_with_a_stale_row_is_refused_by_the_table() -> None:
    """Its clock stood still, so only the counter shows that the lease is lost."""
    world, owner = alone()
    owner.rate = 0.0
    taker = world.begin()
    owner.stopped = True
    world.go_on(3 * FAILOVER)
    owner.stopped = False
    world.ask(owner, "s0", 5, ended=False)
    assert owner.pending
    world.work(owner)

    assert not owner.pending
    assert not owner.workers
    assert list(taker.workers) == ["s0"]
    assert "s0" not in world.acknowledged


def test_work_stops_in_time_when_the_table_is_gone() -> None:
    """It stops before others may take the lease, and resumes when the table is back."""
    world, owner = alone()
    for _ in range(int(FAILOVER)):
        world.pass_time(1)
        while owner.requests:
            world.do(owner, mode=Mode.LOST)
        while owner.answers:
            world.hear(owner)
    assert owner.keeper.phases == {"s0": Phase.LOST}
    world.go_on(FAILOVER)
    assert list(owner.workers) == ["s0"]


def test_a_table_that_comes_and_goes() -> None:
    """An outage counts from the last successful read (issue 25)."""
    keeper = LeaseKeeper("a", "0", failover=FAILOVER, outage=20.0)
    assert keeper.handle(TimerRang(), 0.0) == [Read()]
    now, out = 0.0, list[object]()
    answers: list[Event] = [ReadFailed("gone"), TableRead([])]
    for answer in (*answers, *[ReadFailed("gone")] * 20):
        now += 1.5
        out += keeper.handle(answer, now)
        now = max(now, keeper.due() or 0.0)
        if keeper.handle(TimerRang(), now) != [Read()]:
            break
    (failed,) = out
    assert isinstance(failed, FailRunner)
    assert failed.text.endswith("load.shards.outage sets: gone")
    assert 28 <= now < 32  # the first of them was begun at 8


@pytest.mark.parametrize("every", [None, 9])
def test_a_table_that_can_only_be_read(every: int | None) -> None:
    """It counts as an outage until a write succeeds, or none is due (issue 25)."""
    keeper = LeaseKeeper("a", "0", failover=FAILOVER, outage=20.0)
    row, now, writes = Lease("s0"), 0.0, 0
    out = [*keeper.handle(TimerRang(), now)]
    while out and now < 200:
        asked = out.pop(0)
        now += 0.1
        match asked:
            case Read():
                out += keeper.handle(TableRead([row]), now)
            case Write(number, _, after):
                writes += 1
                written = every is not None and writes % every == 0
                row = after if written else row
                event = Written(number) if written else WriteFailed(number, "locked")
                out += keeper.handle(event, now)
            case Stop(shard):
                out += keeper.handle(WorkerEnded(shard), now)
            case FailRunner(text):
                assert text.endswith("load.shards.outage sets: locked")
                assert 20 <= now < 23
                break
        if not out:
            now = max(now, keeper.due() or 0.0)
            out += keeper.handle(TimerRang(), now)
    assert (now >= 200) is (every is not None)


def test_outage_of_writes_ends_where_nothing_is_to_be_written() -> None:
    """The shard is another runner's now; so does a write that is refused (issue 25)."""
    for refused in (True, False):
        keeper = LeaseKeeper("a", "0", failover=FAILOVER, outage=20.0)
        keeper.handle(TimerRang(), 0.0)
        (taken,) = keeper.handle(TableRead([Lease("s0")]), 0.0)
        assert isinstance(taken, Write)
        keeper.handle(WriteFailed(taken.number, "locked"), 1.0)
        keeper.handle(TimerRang(), 9.0)
        rows = [Lease("s0", owner=None if refused else "b/0", counter=5)]
        (again, *_) = [*keeper.handle(TableRead(rows), 10.0), None]
        if refused:
            assert isinstance(again, Write)
            keeper.handle(WriteRefused(again.number), 11.0)
        keeper.handle(TimerRang(), 19.0)
        rows = [Lease("s0", owner=None, counter=6)]
        (again,) = keeper.handle(TableRead(rows), 20.0)
        assert isinstance(again, Write)
        out = keeper.handle(WriteFailed(again.number, "locked"), 30.0)
        assert not any(isinstance(one, FailRunner) for one in out)


def test_a_table_that_is_gone_is_not_asked_all_the_time() -> None:
    """It is asked only a few times in a failover time."""
    world, owner = alone()
    asked = 0
    for _ in range(1000):
        world.pass_time(FAILOVER / 1000)
        while owner.requests:
            asked += 1
            world.do(owner, mode=Mode.LOST)
            world.hear(owner)
    assert asked <= 12


def test_a_shard_waits_for_its_parents() -> None:
    """It waits for all of them to end, and forever for an unknown parent."""
    world = World(
        [
            *shards(2),
            Lease("child", ("s0", "s1")),
            Lease("orphan", ("gone",)),
            Lease("done", ended=True),
        ]
    )
    runner = world.begin()
    world.go_on(FAILOVER)
    assert sorted(runner.workers) == ["s0", "s1"]
    for shard in ("s0", "s1"):
        assert "child" not in runner.workers
        world.ask(runner, shard, 1, ended=True)
        world.do(runner)
        world.hear(runner)
        assert runner.keeper.phases[shard] is Phase.ENDED
        world.go_on(FAILOVER)
    assert sorted(runner.workers) == ["child"]


def test_children_begin_when_their_parent_ends() -> None:
    """They begin soon, before the next regular read; many ends cause only one read."""
    world = World([*shards(5), Lease("child", ("s0",))])
    runner = world.begin()
    world.work(runner)
    looks = 0
    world.pass_time(FAILOVER / 20)
    for shard in [*runner.workers]:
        world.ask(runner, shard, 1, ended=True)
        world.do(runner)
        world.hear(runner)
        looks += runner.requests.count(Read())
        world.work(runner)
    assert looks == 1
    world.pass_time(FAILOVER / 20)
    world.work(runner)
    assert "child" in runner.workers


def test_a_shard_whose_worker_fails_goes_to_another() -> None:
    """The runner whose worker failed doesn't take it again."""
    world, runner = alone(2)
    world.end(runner, "s0", failed=True)
    world.go_on(FAILOVER)
    assert list(runner.workers) == ["s1"]
    other = world.begin()
    world.go_on(FAILOVER)
    assert list(other.workers) == ["s0"]


@pytest.mark.parametrize("released", [False, True])
def test_a_shard_that_is_reset_goes_to_who_has_failed_at_it(released: bool) -> None:
    """After each reset that runner tries it once more."""
    world, runner = alone(2)
    world.end(runner, "s0", failed=True)
    if released:
        world.go_on(FAILOVER)
    for _ in range(2):
        row = world.rows["s0"]
        world.rows["s0"] = Lease("s0", counter=row.counter + 1)
        world.go_on(FAILOVER)
        assert sorted(runner.workers) == ["s0", "s1"]
        world.end(runner, "s0", failed=True)
        world.go_on(FAILOVER)
        assert list(runner.workers) == ["s1"]


def test_a_worker_that_ends_by_itself_is_replaced() -> None:
    """The runner gets the lease back, which was free in between."""
    world, runner = alone()
    world.end(runner, "s0")
    assert not runner.workers
    world.go_on(FAILOVER)
    assert list(runner.workers) == ["s0"]


def test_a_lease_that_is_gone_is_lost() -> None:
    """Its worker is stopped when the row has disappeared from the table."""
    world, runner = alone()
    del world.rows["s0"]
    world.go_on(FAILOVER)
    assert not runner.workers


# --- sharing ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("leases", "runners", "share"),
    [(8, 2, [4, 4]), (8, 3, [2, 3, 3]), (5, 5, [1] * 5), (3, 8, [0] * 5 + [1] * 3)],
)
def test_runners_have_about_as_many(
    leases: int, runners: int, share: list[int]
) -> None:
    """A later runner claims leases from those that have more than their share."""
    world = World(shards(leases))
    for _ in range(runners):
        world.begin()
        world.go_on(FAILOVER)
    world.go_on(10 * FAILOVER)

    assert counts(world) == share
    assert all(len(world.owners(row)) == 1 for row in world.rows)


def test_a_claim_lets_the_worker_commit_once_more() -> None:
    """The worker is asked to end and commits; only then does the lease change hands."""
    world, owner = alone(2)
    thief = world.begin()
    for _ in range(20):
        world.pass_time(0.5)
        world.work(thief)
        while owner.requests:
            world.do(owner)
        while owner.answers:
            world.hear(owner)
    (shard,) = owner.stopping
    assert owner.keeper.phases[shard] is Phase.HANDING
    assert not thief.workers
    world.ask(owner, shard, 3, ended=False)
    world.work(owner)
    world.work(thief)
    world.go_on(FAILOVER)

    assert thief.workers == {shard: 3}
    assert world.rows[shard].switches == 2


def test_a_claim_may_be_read_before_anything_is_written() -> None:
    """The owner notices the claim without a refused write."""
    world, owner = alone()
    row = world.rows["s0"]
    world.rows["s0"] = row._replace(counter=row.counter + 1, claimant="other/1")
    world.tell(owner, TableRead([*world.rows.values()]))
    assert owner.stopping == {"s0"}
    world.work(owner)
    assert world.rows["s0"].owner == "other/1"


@pytest.mark.parametrize(("claimed", "more"), [(0, 2), (1, 1), (2, 0), (3, 0)])
def test_so_many_are_claimed_at_once(claimed: int, more: int) -> None:
    """Claims that have not been handed over yet count towards the limit."""
    keeper = LeaseKeeper("b", "1", max_steal=2)
    rows = [
        Lease(f"s{n}", owner="a/1", claimant="b/1" if n < claimed else None)
        for n in range(12)
    ]
    keeper.handle(TimerRang(), 0.0)
    writes = keeper.handle(TableRead(rows), 0.0)

    assert len(writes) == more
    for write in writes:
        assert isinstance(write, Write)
        assert write.before.claimant is None
        assert write.after == write.before._replace(counter=1, claimant="b/1")


@pytest.mark.parametrize("claimed", range(6))
def test_what_is_claimed_is_not_claimed_again(claimed: int) -> None:
    """That holds for any of the leases."""
    keeper = LeaseKeeper("b", "1", max_steal=4)
    rows = [
        Lease(f"s{n}", owner="a/1", claimant="b/1" if n == claimed else None)
        for n in range(6)
    ]
    keeper.handle(TimerRang(), 0.0)
    writes = keeper.handle(TableRead(rows), 0.0)
    assert len(writes) == 2
    assert rows[claimed] not in [one.before for one in writes if isinstance(one, Write)]


@pytest.mark.parametrize(("event", "due"), [(WriteRefused, 1.0), (WriteFailed, 3.0)])
def test_table_is_read_for_what_became_of_a_write(
    event: type[WriteRefused | WriteFailed], due: float
) -> None:
    """After a refusal at once; after a failure half a renewal interval later."""
    keeper = LeaseKeeper("a", "1", failover=12.0)
    keeper.handle(TimerRang(), 0.0)
    (taken,) = keeper.handle(TableRead([Lease("s0")]), 0.0)
    assert isinstance(taken, Write)
    reads = keeper.handle(event(taken.number), 1.0)
    assert (keeper.due() if not reads else 1.0) == due


def test_no_more_are_claimed_than_make_it_even() -> None:
    """Of three shards the other runner keeps two."""
    keeper = LeaseKeeper("b", "1", max_steal=9)
    keeper.handle(TimerRang(), 0.0)
    rows = [Lease(f"s{n}", owner="a/1") for n in range(3)]
    assert len(keeper.handle(TableRead(rows), 0.0)) == 1


def test_a_renewal_that_is_not_confirmed_is_given_up_for() -> None:
    """The limit is 5/6 of the failover time after the last confirmed write began."""
    keeper = LeaseKeeper("a", "1", failover=12.0)
    keeper.handle(TimerRang(), 0.0)
    (taken,) = keeper.handle(TableRead([Lease("s0")]), 1.0)
    assert isinstance(taken, Write)
    (start,) = keeper.handle(Written(taken.number), 2.0)
    assert start == (taken.after,)
    assert keeper.due() == 5.0  # a third
    writes = keeper.handle(TimerRang(), 5.0)
    assert any(isinstance(one, Write) for one in writes)
    keeper.handle(TimerRang(), 10.9)
    assert keeper.phases == {"s0": Phase.RUNNING}
    assert keeper.due() == 11.0
    assert keeper.handle(TimerRang(), 11.0) == [("s0", True)]
    assert keeper.phases == {"s0": Phase.LOST}


def test_what_was_given_up_is_forgotten_with_its_worker() -> None:
    """A late answer to its write changes nothing, even if the lease was taken again."""
    keeper = LeaseKeeper("a", "1", failover=12.0)
    keeper.handle(TimerRang(), 0.0)
    (taken,) = keeper.handle(TableRead([Lease("s0")]), 0.0)
    assert isinstance(taken, Write)
    keeper.handle(Written(taken.number), 0.0)
    late, _ = keeper.handle(TimerRang(), 4.0)
    assert isinstance(late, Write)
    keeper.handle(TimerRang(), 10.0)
    keeper.handle(WorkerEnded("s0"), 10.0)
    assert keeper.phases == {}
    (again,) = keeper.handle(TableRead([taken.after]), 10.0)
    assert isinstance(again, Write)
    assert keeper.handle(Written(late.number), 10.0) == []
    assert keeper.phases == {"s0": Phase.TAKING}
    assert keeper.handle(Written(again.number), 10.0) == [(again.after,)]


def test_a_worker_that_does_not_end_is_asked_again() -> None:
    """After the time for handing over, the worker is told to end at once."""
    world, owner = alone(2)
    world.tell(owner, LeaveAsked())
    assert owner.stopping == {"s0", "s1"}
    owner.stopping.clear()
    for _ in range(6):
        world.pass_time(1.0)
        world.work(owner)
    assert owner.left


def test_a_runner_leaves() -> None:
    """It keeps no leases, so the next runner needn't wait."""
    world, owner = alone(3)
    world.tell(owner, LeaveAsked())
    world.work(owner)
    assert owner.left
    assert {row.owner for row in world.rows.values()} == {None}
    other = world.begin()
    world.work(other)
    assert len(other.workers) == 3


def test_shard_that_an_operator_releases() -> None:
    """Its lease becomes free, and may be taken again by the same runner."""
    world, owner = alone()
    row = world.rows["s0"]
    world.rows["s0"] = row._replace(counter=row.counter + 1, claimant="")
    world.tell(owner, TableRead([*world.rows.values()]))
    assert owner.stopping == {"s0"}
    world.go_on(2 * FAILOVER)

    assert world.rows["s0"].owner == owner.keeper.owner
    assert world.rows["s0"].claimant is None
    assert owner.workers.keys() == {"s0"}


def test_a_runner_leaves_that_is_just_taking() -> None:
    """It releases the lease that it just got."""
    world = World(shards(1))
    runner = world.begin()
    world.do(runner)
    world.hear(runner)
    world.do(runner)
    world.tell(runner, LeaveAsked())
    world.work(runner)

    assert runner.left
    assert world.rows["s0"].owner is None


# --- writes of which no one knows -------------------------------------------------


@pytest.mark.parametrize("mode", [Mode.LOST, Mode.UNTOLD, Mode.LATE])
def test_checkpoint_of_unknown_outcome(mode: Mode) -> None:
    """The runner looks it up in the table, and writes it again if it is missing."""
    world, owner = alone()
    world.ask(owner, "s0", 5, ended=False)
    world.do(owner, mode=mode)
    world.hear(owner)
    assert owner.pending
    world.go_on(FAILOVER / 2)

    assert not owner.pending
    assert world.rows["s0"].position == "5"
    assert world.acknowledged == {"s0": 5}


def test_renewal_that_comes_late_is_no_checkpoint() -> None:
    """Both leave the same owner and counter, so the position itself is compared."""
    world, owner = alone()
    for _ in range(4):
        world.pass_time(1.0)
    renewal = next(r for r in owner.requests if isinstance(r, Write))
    world.do(owner, owner.requests.index(renewal), Mode.LATE)
    world.ask(owner, "s0", 5, ended=False)
    while not any(isinstance(r, Write) for r in owner.requests):
        # The renewal isn't in the table, so the checkpoint is written instead.
        world.pass_time(1.0)
        while owner.answers:
            world.hear(owner)
        if owner.requests and not isinstance(owner.requests[0], Write):
            world.do(owner)
            world.hear(owner)
    world.swap(world.late.pop())
    world.go_on(FAILOVER)

    assert world.rows["s0"].position == "5"
    assert world.acknowledged == {"s0": 5}


@pytest.mark.parametrize("mode", [Mode.LOST, Mode.UNTOLD, Mode.LATE])
def test_taking_of_unknown_outcome(mode: Mode) -> None:
    """The runner looks it up; a worker starts only once the lease is certain."""
    world = World(shards(1))
    runner = world.begin()
    world.do(runner)
    world.hear(runner)
    world.do(runner, mode=mode)
    world.hear(runner)
    assert not runner.workers
    world.go_on(FAILOVER)

    assert list(runner.workers) == ["s0"]


@pytest.mark.parametrize("mode", [Mode.LOST, Mode.UNTOLD, Mode.LATE])
def test_handing_over_of_unknown_outcome(mode: Mode) -> None:
    """In the end the former owner no longer has the lease."""
    world, owner = alone()
    world.tell(owner, LeaveAsked())
    world.end(owner, "s0")
    world.do(owner, mode=mode)
    world.hear(owner)
    world.go_on(FAILOVER)

    assert owner.left
    assert world.rows["s0"].owner is None


def test_answers_that_come_too_late_start_nothing() -> None:
    """If a taking is confirmed only after a failover time, the table is read again."""
    world = World(shards(1))
    runner = world.begin()
    world.do(runner)
    world.hear(runner)
    world.do(runner)
    world.pass_time(FAILOVER)
    world.hear(runner)
    assert not runner.workers
    world.work(runner)
    assert list(runner.workers) == ["s0"]


def test_shard_that_has_ended_since_the_read_is_not_taken() -> None:
    """No worker could end it again (issue 25)."""
    world, owner = alone()
    while Read() not in owner.requests:
        world.pass_time(0.5)
    world.do(owner, owner.requests.index(Read()))
    late = owner.answers.pop()
    world.ask(owner, "s0", 5, ended=True)
    world.work(owner)
    world.tell(owner, late)
    assert owner.keeper.phases == {"s0": Phase.TAKING}
    world.go_on(FAILOVER)
    assert (owner.keeper.phases, [*owner.workers]) == ({}, [])


def test_two_that_take_at_once() -> None:
    """One of them is refused, and gets nothing."""
    world = World(shards(1))
    one, other = world.begin(), world.begin()
    for runner in (one, other):
        world.do(runner)
        world.hear(runner)
    world.work(one)
    world.work(other)

    assert (list(one.workers), list(other.workers)) == (["s0"], [])
    assert other.keeper.phases == {}


def test_worker_that_ends_while_it_waits_for_a_checkpoint() -> None:
    """The request for a checkpoint is answered in any case."""
    world, owner = alone()
    for _ in range(4):
        world.pass_time(1.0)  # a renewal is on its way
    world.ask(owner, "s0", 5, ended=False)
    world.end(owner, "s0")
    world.work(owner)

    assert not owner.pending


def test_claim_of_a_lease_that_is_just_taken() -> None:
    """The taker, which lost the answer to its write, still finds that it owns it."""
    world = World(shards(1))
    runner = world.begin()
    world.do(runner)
    world.hear(runner)
    world.do(runner, mode=Mode.UNTOLD)
    row = world.rows["s0"]
    world.rows["s0"] = row._replace(counter=row.counter + 1, claimant="other/1")
    world.hear(runner)
    world.go_on(FAILOVER)

    assert list(runner.workers) == ["s0"]


def test_lease_that_was_handed_over_and_is_anothers() -> None:
    """The former owner never got the answer to its handing over, and still leaves."""
    world, owner = alone()
    world.tell(owner, LeaveAsked())
    world.end(owner, "s0")
    world.do(owner, mode=Mode.UNTOLD)
    other = world.begin()
    world.work(other)
    world.hear(owner)
    world.go_on(FAILOVER)

    assert owner.left
    assert list(other.workers) == ["s0"]


def test_lease_that_is_anothers() -> None:
    """Its worker must end at once, and other shards are not affected."""
    world, owner = alone(2)
    row = world.rows["s0"]
    world.rows["s0"] = row._replace(owner="other/1", counter=row.counter + 1)
    world.tell(owner, TableRead([*world.rows.values()]))
    assert owner.stopping == {"s0"}
    for _ in range(10):
        world.pass_time(1.0)
        while owner.requests:
            world.do(owner)
        while owner.answers:
            world.hear(owner)
    assert owner.keeper.phases == {"s0": Phase.LOST, "s1": Phase.RUNNING}


def test_renewal_that_is_confirmed_too_late() -> None:
    """The worker was already asked to end, and the lease stays lost."""
    world, owner = alone()
    for _ in range(4):
        world.pass_time(1.0)
    while owner.requests:
        world.do(owner)
    world.pass_time(FAILOVER)
    assert owner.keeper.phases == {"s0": Phase.LOST}
    while owner.answers:
        world.hear(owner)
    assert owner.keeper.phases == {"s0": Phase.LOST}
    world.go_on(FAILOVER)
    assert list(owner.workers) == ["s0"]


def test_runner_that_leaves_when_its_worker_has_ended() -> None:
    """There is no worker left to stop."""
    world, owner = alone()
    world.end(owner, "s0")
    world.tell(owner, LeaveAsked())
    assert not owner.stopping
    world.work(owner)
    assert owner.left
    assert owner.keeper.handle(TimerRang(), 1e9) == []


# --- names ------------------------------------------------------------------------


def test_second_runner_of_a_name_is_refused() -> None:
    """The second is refused while the first renews (issue 25)."""
    world = World(shards(1))
    first = world.begin("blue")
    world.go_on(1)
    second = world.begin("blue")
    world.go_on(FAILOVER)

    assert (
        "runner 'blue' is already running: s0 was renewed by blue/0" in second.refused
    )
    assert list(first.workers) == ["s0"]


def test_of_two_starts_at_once_one_is_refused() -> None:
    """If each got some of the leases, the other one has all of them then (issue 25)."""
    world = World(shards(4))
    first, second = (world.begin("blue") for _ in range(2))
    for runner in (first, second):
        world.do(runner)
        world.hear(runner)
    for _ in range(2):
        world.do(first)
        world.do(second, -1)
        world.hear(first)
        world.hear(second)
    assert first.workers
    assert second.workers
    world.go_on(2 * FAILOVER)

    assert "is already running" in second.refused
    assert not first.refused
    assert len(first.workers) == 4


def test_a_start_that_was_stopped_is_refused_when_it_is_continued() -> None:
    """Its leases belong to the later start by then (issue 25)."""
    world = World(shards(2))
    first = world.begin("blue")
    world.go_on(1)
    first.stopped = True
    second = world.begin("blue")
    world.go_on(FAILOVER)
    first.stopped = False
    world.go_on(FAILOVER)

    assert "s0 was renewed by blue/1" in first.refused
    assert len(second.workers) == 2


def test_a_runner_of_a_fixed_name_is_back_soon() -> None:
    """It needn't wait for the whole failover time, as others must."""
    world = World(shards(1))
    world.begin("blue")
    world.go_on(1)
    world.runners[0].alive = False
    second = world.begin("blue")
    world.go_on(0.8 * FAILOVER)

    assert list(second.workers) == ["s0"]


def test_a_runner_that_is_known_to_be_alone_is_back_at_once() -> None:
    """The leases of its last start are its own with the first read (issue 25)."""
    world = World(shards(2))
    first = world.begin("blue", alone=True)
    world.go_on(1)
    assert len(first.workers) == 2
    first.alive = False
    second = world.begin("blue", alone=True)
    world.work(second)
    assert sorted(second.workers) == ["s0", "s1"]


def test_a_start_that_was_taken_for_ended_can_not_commit() -> None:
    """Only the later start can move the checkpoint; the earlier one is refused."""
    world = World(shards(1))
    first = world.begin("blue", alone=True)
    world.go_on(1)
    first.stopped = True
    second = world.begin("blue", alone=True)
    world.work(second)
    world.ask(second, "s0", 5, ended=False)
    world.work(second)
    first.stopped = False
    world.ask(first, "s0", 9, ended=False)
    world.go_on(FAILOVER)

    world.check()
    assert world.rows["s0"].position == "5"
    assert "was renewed by blue/1" in first.refused
    assert list(second.workers) == ["s0"]


def test_a_start_that_had_nothing_does_not_rob_a_later_one() -> None:
    """Only leases found by its first read count as those of an ended start."""
    world = World([])
    first = world.begin("blue", alone=True)
    world.work(first)
    first.stopped = True
    world.rows["s0"] = Lease("s0")
    second = world.begin("blue", alone=True)
    world.work(second)
    first.stopped = False
    world.go_on(FAILOVER)

    assert not second.refused
    assert world.rows["s0"].switches == 1
    assert "was renewed by blue/1" in first.refused


def test_a_claim_is_no_sign_of_another_start() -> None:
    """A claim moves the counter, too, but must not be taken for a renewal."""
    world = World(shards(1))
    world.begin("blue")
    world.go_on(1)
    world.runners[0].alive = False
    second = world.begin("blue")
    world.go_on(1)
    row = world.rows["s0"]
    world.rows["s0"] = row._replace(counter=row.counter + 1, claimant="red/9")
    world.go_on(2 * FAILOVER)

    assert not second.refused
    assert list(second.workers) == ["s0"]


# --- how much it costs ------------------------------------------------------------


def test_a_thousand_leases() -> None:
    """A renewal needs one write for each lease; ``benchmarks`` measure the time."""
    world, owner = alone(1000)
    for _ in range(10):
        world.pass_time(FAILOVER / 3 + 0.01)
        writes = [one for one in owner.requests if isinstance(one, Write)]
        assert len(writes) == len({one.before.shard for one in writes}) == 1000
        world.work(owner)


def test_events_of_what_is_not_ours_are_harmless() -> None:
    """Answers to unknown writes, and requests for foreign shards, do no harm."""
    keeper = LeaseKeeper("a", "1")
    assert keeper.due() is None
    keeper.handle(TimerRang(), 0.0)
    for event in (Written(99), WriteFailed(99), WorkerEnded("s0")):
        assert keeper.handle(event, 0.0) == []
    (answer,) = keeper.handle(CheckpointAsked("s0", "5"), 0.0)

    assert answer == ("s0", False)
    assert repr(keeper) == "<LeaseKeeper 'a/1' no leases>"
    keeper.handle(TableRead([Lease("s0")]), 0.0)
    assert repr(keeper) == "<LeaseKeeper 'a/1' s0 TAKING>"


class Runners:
    """Two to nine runners, with clocks that drift and jump, and a table that fails."""

    def __init__(self, dice: Random) -> None:
        self.dice = dice
        self.world = World(
            [*shards(4), Lease("c0", ("s0",)), Lease("c1", ("s0", "s1"))]
        )
        self.down = False
        for rate in (0.95, 1.05):
            self.world.begin(rate=rate)

    @property
    def anyone(self) -> Runner:
        """A random runner, which may be dead."""
        return self.dice.choice(self.world.runners)

    @property
    def running(self) -> list[Runner]:
        """A random runner that is alive and not stopped, if there is one."""
        found = [r for r in self.world.runners if r.alive and not r.stopped]
        return [self.dice.choice(found)] if found else []

    def join(self) -> None:
        """Start another runner."""
        if len(self.world.runners) < 8:
            rate = self.dice.choice([0.9, 0.95, 1.0, 1.05, 1.1])
            self.world.begin(rate=rate, offset=self.dice.uniform(0, 1e6))

    def pass_time(self) -> None:
        """Let time pass."""
        self.world.pass_time(self.dice.choice([0.1, 1.0, 2.0, 4.0, 9.0]))

    def jump(self) -> None:
        """Let a clock jump."""
        for runner in self.running:
            self.world.jump(runner, self.dice.choice([-50.0, 5.0, 500.0]))

    def do(self) -> None:
        """Let the table perform a request, in any order, or lose it."""
        runner, mode = self.anyone, self.dice.choice([Mode.DONE, Mode.DONE, *Mode])
        if runner.requests:
            if self.down and mode is Mode.DONE:
                mode = Mode.LOST
            self.world.do(runner, self.dice.randrange(len(runner.requests)), mode)

    def hear(self) -> None:
        """Let a runner receive an answer, in any order."""
        for runner in self.running:
            if runner.answers:
                self.world.hear(runner, self.dice.randrange(len(runner.answers)))

    def work(self) -> None:
        """Let a runner finish everything it wants."""
        for runner in self.running:
            if not self.down:
                self.world.work(runner)

    def arrive(self) -> None:
        """Let a write arrive late, after it was given up."""
        if late := self.world.late:
            self.world.swap(late.pop(self.dice.randrange(len(late))))

    def ask(self) -> None:
        """Let a worker ask for a checkpoint, or for the end of its shard."""
        for runner in self.running:
            if runner.workers:
                shard = self.dice.choice(sorted(runner.workers))
                step, ended = self.dice.randrange(6), self.dice.random() < 0.5
                self.world.ask(runner, shard, step, ended=ended)

    def end(self) -> None:
        """Let a worker end, whether or not it was asked to."""
        for runner in self.running:
            if runner.workers:
                self.world.end(runner, self.dice.choice(sorted(runner.workers)))

    def stop_or_continue(self) -> None:
        """Stop a runner's process, or continue it."""
        runner = self.anyone
        runner.stopped = not runner.stopped

    def kill(self) -> None:
        """Kill a runner; its requests may still arrive."""
        for runner in self.running:
            runner.alive = False

    def start_again(self) -> None:
        """Start a name again; its former start is dead, or only stopped."""
        if len(self.world.runners) < 8:
            for runner in self.running:
                runner.alive, runner.stopped = self.dice.random() < 0.5, True
                name = runner.keeper.owner.rpartition("/")[0]
                self.world.begin(name, runner.rate, alone=True)

    def leave(self) -> None:
        """Ask a runner to leave."""
        for runner in self.running:
            self.world.tell(runner, LeaveAsked())

    def break_or_mend(self) -> None:
        """Make the table unreachable, or reachable again."""
        self.down = not self.down

    ACTS: ClassVar = (
        *(join, pass_time, jump, do, hear, work, arrive, ask, end),
        *(stop_or_continue, kill, start_again, leave, break_or_mend),
    )

    def settle(self) -> None:
        """Assert that every shard soon has an owner, and that runners share evenly."""
        for runner in self.world.runners:
            runner.stopped = False
        self.world.begin()
        owned = set[str]()
        for _ in range(6):  # half failover times, as few as it takes
            owned |= self.world.go_on(FAILOVER / 2)
            if owned >= {*self.world.wanted()}:
                break
        assert owned >= {*self.world.wanted()}
        self.world.check()
        if self.dice.random() < 0.8:  # the rest takes most of the test's time
            return
        self.world.go_on(10 * FAILOVER, step=1.0)
        for shard in self.world.wanted():
            (owner,) = self.world.owners(shard)
            assert owner.alive
            assert shard in owner.workers
        few, *_, many = [*counts(self.world), *counts(self.world)]
        assert many - few <= 1


def play(dice: Random) -> None:
    """Let anything happen; only one runner can ever move a shard's checkpoint."""
    runners = Runners(dice)
    for _ in range(dice.randint(1, 50)):
        dice.choice(Runners.ACTS)(runners)
        runners.world.check()
    runners.settle()


@diced(6)
def test_one_can_move_a_checkpoint_whatever_happens(dice: Random) -> None:
    """A few random histories."""
    play(dice)


@pytest.mark.slow
@pytest.mark.timeout(600)
@diced(400)
def test_one_can_move_a_checkpoint_whatever_happens_10_000_times(dice: Random) -> None:
    """Ten thousand random histories, with up to nine runners (issue 25)."""
    play(dice)
