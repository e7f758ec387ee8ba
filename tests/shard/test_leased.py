"""Runners that share a load's shards, all in one process and in memory."""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Any, Literal, Self

import anyio
import anyio.to_thread
import pytest
from structlog.testing import capture_logs

from etlstage.errors import (
    ConfigError,
    InvalidMessage,
    NotCommitted,
    StageError,
    StageFailed,
    StateUnusable,
    WorkerLost,
)
from etlstage.messages import AnnotatedRun, Position, Run, StageKind
from etlstage.pipeline import Pipeline, Report
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.interfaces import Sink, Source
from etlstage.protocol.events import FarewellReason
from etlstage.protocol.kcl.settings import KclDialect
from etlstage.shard.cut import Cut, number_of
from etlstage.shard.keeper import LeaseKeeper
from etlstage.shard.lease import Lease, Write
from etlstage.shard.leased import LeasedSink
from etlstage.shard.operator import release, reset
from etlstage.shard.sink import CheckpointFile, ShardedSink
from etlstage.shard.table import (
    NEWS,
    LeaseTable,
    MemoryLeases,
    News,
    SQLiteLeases,
    TableGone,
)
from etlstage.stage import BatchPolicy, ErrorPolicy, RestartPolicy, Stage, Timeouts
from etlstage.testing import (
    MemoryDeadLetters,
    MemorySource,
    ScriptedLaunch,
    ScriptedWorker,
)
from tests.shard.load import Processors, drained_after, run_all, virtually

pytestmark = pytest.mark.core

COUNT = 60
STAGE = Stage(
    name="load",
    worker=("processor",),
    dialect=KclDialect(),
    kind=StageKind.LOAD,
    batch=BatchPolicy(size=3),
)
RECORDS = [json.dumps({"user": n % 7, "n": n}).encode() for n in range(COUNT)]


class Numbered(Source):
    """Source of the records, three a run, with their places as numbers."""

    def __init__(self, pause: float = 0.0, *, begin: int = 0, end: int = COUNT) -> None:
        super().__init__("records")
        self._pause, self._begin, self._end = pause, begin, end
        self.begun: list[int] = []
        """The number after which each pass began."""

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        """Yield the records without numbers."""
        for n in range(0, COUNT, 3):
            yield RECORDS[n : n + 3]

    async def numbered(self, after: int = -1) -> AsyncGenerator[AnnotatedRun, None]:
        """Yield the records after a number."""
        self.begun.append(after)
        for n in range(max(after + 1, self._begin), self._end, 3):
            await anyio.sleep(self._pause)
            numbers = range(n, min(n + 3, self._end))
            yield AnnotatedRun(RECORDS[n : numbers.stop], sequence=numbers)


class Gone(MemoryLeases):
    """A table whose database can be made unreachable."""

    gone = False

    def add(self, leases: Iterable[Lease], *, all_new: bool = False) -> int:
        """Add leases, unless the database is gone."""
        self._check()
        return super().add(leases, all_new=all_new)

    def read(self) -> list[Lease]:
        """Read the leases, unless the database is gone."""
        self._check()
        return super().read()

    def swap(self, before: Lease, after: Lease, news: News = NEWS) -> bool:
        """Swap a lease, unless the database is gone."""
        self._check()
        return super().swap(before, after, news)

    def _check(self) -> None:
        if self.gone:
            raise TableGone("lease table: gone")


def unshared(processors: Processors) -> ShardedSink:
    """Return a sink for the same load by a single runner without leases."""
    return ShardedSink(STAGE, cut=Cut(3, "/user"), launch=ScriptedLaunch(processors))


def runner(
    table: LeaseTable,
    processors: Callable[[ScriptedWorker], Coroutine[Any, Any, int]],
    name: str = "a",
    source: Source | None = None,
    **settings: Any,  # noqa: ANN401 - passed on
) -> Pipeline:
    """Return a runner of the load."""
    keeper, limit = settings.pop("keeper", None), settings.pop("limit", None)
    sink = settings.pop("sink", None) or LeasedSink(
        STAGE,
        cut=Cut(3, "/user"),
        keeper=keeper or LeaseKeeper(name, "start", failover=3.0),
        leases=lambda _of: table,
        launch=ScriptedLaunch(processors),
        **settings,
    )
    return Pipeline(name="p", source=source or Numbered(), sink=sink, limit=limit)


def check_whole(processors: Processors) -> None:
    """Assert that each shard got all its records, in order, without a gap."""
    found = {shard: dict.fromkeys(done) for shard, done in processors.done.items()}
    assert sorted(n for done in found.values() for n in done) == [*range(COUNT)]
    for done in found.values():
        assert [*done] == sorted(done)
        # All records of a key are in one shard.
    users = [{n % 7 for n in done} for done in found.values()]
    assert sum(map(len, users)) == 7


@virtually
async def test_one_runner_loads_all() -> None:
    """It reads the input once and ends each shard; the next has nothing to do."""
    table, processors, source = MemoryLeases(), Processors(), Numbered()
    (report,) = await run_all(runner(table, processors, source=source))

    assert report.status == "done", report.error
    assert "60 messages loaded by this runner; output complete" in str(report)
    check_whole(processors)
    assert all(lease.ended for lease in table.read())
    actions = [action for _, action in processors.actions]
    assert actions.count("shardEnded") == actions.count("initialize") == 3
    assert set(source.begun) == {-1}

    (report,) = await run_all(runner(table, processors, "b"))
    assert report.status == "done", report.error
    assert report.ledger[0].produced == 0


@virtually
async def test_runners_share_the_shards() -> None:
    """The second is handed some shards, and begins after their checkpoints."""
    table, processors = MemoryLeases(), Processors()
    late = Processors()

    async def second() -> None:
        await anyio.sleep(0.5)
        await run_all(runner(table, late, "b"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(second)
        (report,) = await run_all(runner(table, processors))

    assert report.status == "done", report.error
    assert processors.actions.count(("shardId-000000000000", "initialize")) <= 1
    handed = [shard for shard, action in processors.actions if action == "leaseLost"]
    assert handed
    for shard in handed:
        # The loser may commit once more, so no record of the shard comes twice.
        both = [*processors.done[shard], *late.done.get(shard, ())]
        assert both == sorted(set(both))
    for shard, done in late.done.items():
        processors.done.setdefault(shard, []).extend(done)
    check_whole(processors)


@virtually
async def test_shard_that_comes_late_has_all_its_records() -> None:
    """The input is read again for it; other shards get no record twice."""
    table, processors, source = MemoryLeases(), Processors(), Numbered(0.5)
    table.add([Lease("shardId-000000000002", owner="gone/1", counter=1)])
    (report,) = await run_all(runner(table, processors, source=source))

    assert report.status == "done", report.error
    check_whole(processors)
    assert all(len(done) == len(set(done)) for done in processors.done.values())
    assert len(source.begun) > 1
    assert report.ledger[0].produced == COUNT


@virtually
async def test_runner_that_waits_for_leases_reports_it() -> None:
    """Each wait is logged once, with the holders; the activity shows them, too."""
    table, processors = MemoryLeases(), Processors()
    table.add(
        Lease(f"shardId-{n:012}", owner=f"gone-{n % 2}/1", counter=1) for n in range(3)
    )
    one, seen = runner(table, processors), list[str]()

    async def look() -> None:
        await anyio.sleep(2)
        seen.append(one.activity)

    with capture_logs() as logs:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(look)
            (report,) = await run_all(one)
    assert report.status == "done", report.error
    waited = [log["owners"] for log in logs if log["event"] == "waiting for leases"]
    # Claiming a lease moves its counter, so it is taken later.
    assert waited == [["gone-0/1", "gone-1/1"], ["gone-0/1"]]
    assert seen == ["waiting for leases of gone-0/1, gone-1/1"]
    assert not one.activity


@virtually
async def test_shards_go_on_with_the_next_run() -> None:
    """With reason DRAIN, the end of the input is not the end of the shards."""
    table, processors = MemoryLeases(), Processors()
    drains = FarewellReason.DRAIN
    reports = await run_all(
        runner(table, processors, why=drains),
        runner(table, processors, "b", why=drains),
    )
    assert {report.status for report in reports} == {"done"}
    check_whole(processors)
    assert not any(lease.ended or lease.owner for lease in table.read())
    assert {action for _, action in processors.actions} >= {"shutdownRequested"}


@virtually
async def test_drained_runner_hands_all_over() -> None:
    """Its workers commit once more, so nothing is loaded again."""
    table, processors = MemoryLeases(), Processors()
    first = runner(table, processors)

    report = await drained_after(1, first)
    assert report.status == "drained", report.error
    assert not all(lease.ended for lease in table.read())
    assert not any(lease.owner for lease in table.read() if not lease.ended)
    assert "output incomplete" in str(report)

    before = {shard: [*done] for shard, done in processors.done.items()}
    (report,) = await run_all(runner(table, processors, "b"))
    assert report.status == "done", report.error
    check_whole(processors)
    for shard, done in before.items():
        assert processors.done[shard].count(done[0]) == 1


@virtually
async def test_limited_runner_processes_all_before_the_limit() -> None:
    """Its shards go on with the next run, which loads nothing again (issue 25)."""
    table, processors = MemoryLeases(), Processors(every=4)
    for name in "ab":
        (report,) = await run_all(runner(table, processors, name, limit=10))
        assert report.status == "done", report.error
        assert report.ledger[-1].made == 10
        assert "output incomplete" in str(report)
    assert "shardEnded" not in [action for _, action in processors.actions]
    assert not any(lease.ended or lease.owner for lease in table.read())

    (report,) = await run_all(runner(table, processors, "c"))
    assert report.status == "done", report.error
    check_whole(processors)
    assert sum(map(len, processors.done.values())) == COUNT


@virtually
async def test_limited_runner_whose_workers_commit_nothing() -> None:
    """What they have processed is unprocessed, as in a drained run (issue 25)."""

    class Silent(Processors):
        async def _checkpoint(self, *_: object) -> None:
            pass

    processors = Silent()
    with capture_logs() as logs:
        (report,) = await run_all(runner(MemoryLeases(), processors, limit=10))
    assert (report.error, report.status) == (None, "drained")
    warned = {one["error"] for one in logs if one["event"] == "messages not committed"}
    assert len(warned) == len(processors.done)
    assert (report.ledger[-1].made, report.ledger[-1].unprocessed) == (0, 10)
    assert sum(map(len, processors.done.values())) == 10


@pytest.mark.parametrize("leased", [False, True])
def test_drained_runner_lets_actions_end(
    monkeypatch: pytest.MonkeyPatch, *, leased: bool
) -> None:
    """Those longer than timeout.farewell, too; then its workers commit (issue 25)."""

    @virtually
    async def test() -> None:
        processors = Processors(pause=3.0, every=9)
        sink = None if leased else unshared(processors)
        one = runner(MemoryLeases(), processors, sink=sink)

        report = await drained_after(2, one)
        assert report.status == "drained", report.error
        assert processors.errors == [None] * len(processors.done)
        for shard, done in processors.done.items():
            assert 0 < len(done) <= STAGE.batch.size
            actions = [action for of, action in processors.actions if of == shard]
            assert actions[1:] == ["processRecords", "shutdownRequested", "leaseLost"]

    test(monkeypatch)


async def run_without(
    table: Gone,
    gone: float,
    back: float,
    processors: Processors | None = None,
    **settings: Any,  # noqa: ANN401
) -> tuple[Report, float]:
    """Run without the table for a time; return the report and the duration."""
    begun = anyio.current_time()

    async def fail() -> None:
        await anyio.sleep(gone)
        table.gone = True
        await anyio.sleep(back - gone)
        table.gone = False

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fail)
        await anyio.sleep(0.01)
        (report,) = await run_all(runner(table, processors or Processors(), **settings))
        tasks.cancel_scope.cancel()
    return report, anyio.current_time() - begun


@virtually
async def test_processor_whose_lease_is_lost_in_an_action_is_sent_that() -> None:
    """At the end of the action, if that is soon enough (issue 25)."""
    processors = Processors(pause=1.0, every=9)
    report, _ = await run_without(Gone(), 1.0, 20.0, processors)
    assert report.status == "done", report.error
    check_whole(processors)
    for shard in processors.done:
        actions = [action for of, action in processors.actions if of == shard]
        lost = actions.index("leaseLost")
        assert actions[:lost] == ["initialize", *["processRecords"] * (lost - 1)]


@virtually
async def test_processor_whose_lease_is_lost_at_the_end_is_sent_that() -> None:
    """It could not commit the end, and the shard does not fail for it (issue 25)."""
    table = Gone()

    class GoneAtEnd(Processors):
        async def _checkpoint(
            self,
            *args: Any,  # noqa: ANN401 - passed on
        ) -> None:
            table.gone = args[2] is None and not self.errors
            await super()._checkpoint(*args)
            table.gone = False

    processors = GoneAtEnd(every=99)
    (report,) = await run_all(runner(table, processors))

    assert report.status == "done", report.error
    check_whole(processors)
    refused = processors.errors.count("ShutdownException")
    lost = 0
    for shard in processors.done:
        actions = [action for of, action in processors.actions if of == shard]
        lost += [*pairwise(actions)].count(("shardEnded", "leaseLost"))
    assert lost == refused > 0


@virtually
async def test_database_that_is_gone_for_long() -> None:
    """Shards are given up in time, and taken again when the database is back."""
    processors = Processors()
    report, _ = await run_without(Gone(), 1.0, 10.0, processors)
    assert report.status == "done", report.error
    check_whole(processors)
    assert "ShutdownException" in processors.errors
    account = report.ledger[-1]
    assert account.done + account.unprocessed == account.received
    assert account.done == COUNT


@virtually
async def test_database_that_is_gone_when_a_runner_starts() -> None:
    """The runner tries again, as it does later in a run (issue 25)."""
    table = Gone()
    report, _ = await run_without(table, 0.0, 60.0)
    assert report.status == "done", report.error
    assert all(row.ended for row in table.read())


@pytest.mark.parametrize("gone", [0.0, 2.0])
def test_database_that_is_gone_for_too_long(
    gone: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run fails with the limit and the reason, at its start or later (issue 25)."""

    @virtually
    async def test() -> None:
        keeper = LeaseKeeper("a", "start", failover=3.0, outage=30.0)
        report, seconds = await run_without(Gone(), gone, 999.0, keeper=keeper)
        assert isinstance(report.error, StateUnusable)
        expected = "stage load: the leases were out of reach for 30 s, the limit"
        assert str(report.error).startswith(expected)
        assert str(report.error).endswith("load.shards.outage sets: lease table: gone")
        assert gone + 30 <= seconds < gone + 34

    test(monkeypatch)


@virtually
async def test_run_is_drained_while_the_database_is_gone() -> None:
    """The run stops waiting for the database."""
    table = Gone()
    table.gone = True
    one = runner(table, Processors())

    with anyio.fail_after(12):
        report = await drained_after(10, one)
    assert isinstance(report.error, TableGone)


class Resetting(MemoryLeases):
    """A table that resets the first shard that ends."""

    again = ""

    def swap(self, before: Lease, after: Lease, news: News = NEWS) -> bool:
        """Swap a lease, and reset the shard as soon as its end is stored."""
        done = super().swap(before, after, news)
        if after.ended and not self.again:
            self.again = after.shard
            reset(self, after.shard)
        return done


@virtually
async def test_shard_is_reset_that_has_ended() -> None:
    """The runner that ended it loads it again before it finishes (issue 25)."""
    table, processors = Resetting(), Processors()
    (report,) = await run_all(runner(table, processors))
    assert report.status == "done", report.error
    assert all(row.ended for row in table.read())
    check_whole(processors)
    for shard, done in processors.done.items():
        assert set(Counter(done).values()) == {1 + (shard == table.again)}


class SlowToStart(LeasedSink):
    """A sink that is busy for a time before it can start workers."""

    async def __aenter__(self) -> Self:
        """Open the table, and keep workers from starting for a while."""
        await super().__aenter__()
        self._tasks.start_soon(self._pause)
        return self

    async def _pause(self) -> None:
        async with self._starting:
            await anyio.sleep(9)


@virtually
async def test_shard_is_lost_before_its_worker_has_started() -> None:
    """It gets a worker only when it is taken again (issue 25)."""
    table, processors = Gone(), Processors()

    async def fail() -> None:
        await anyio.sleep(1)
        table.gone = True
        await anyio.sleep(5)
        table.gone = False

    sink = SlowToStart(
        STAGE,
        cut=Cut(3, "/user"),
        keeper=LeaseKeeper("a", "start", failover=3.0),
        leases=lambda _of: table,
        launch=ScriptedLaunch(processors),
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fail)
        (report,) = await run_all(runner(table, processors, sink=sink))
    assert report.status == "done", report.error
    check_whole(processors)
    assert {*processors.errors} == {None}
    assert Counter(action for _, action in processors.actions)["initialize"] == 3


@virtually
async def test_end_of_a_shard_is_tried_again() -> None:
    """A new worker gets what the one before had not committed."""
    for status in (None, 0, 3, -9):
        for shared in (True, False):
            processors = Processors(at_end=status, fails=2, every=4)
            sink = None if shared else unshared(processors)
            (report,) = await run_all(runner(MemoryLeases(), processors, sink=sink))

            assert report.status == "done", report.error
            check_whole(processors)
            lives = Counter(s for s, action in processors.actions if action[0] == "i")
            assert lives == Counter(dict.fromkeys(processors.done, 3))
            account = report.ledger[-1]
            assert (account.done, account.unprocessed) == (COUNT, 0)
            for done in processors.done.values():
                assert len(done) <= len(set(done)) + 2 * 3


def late(one: Pipeline, late: Callable[[Lease, Lease], bool]) -> None:
    """Let a runner's writes of some changes take longer than timeout.commit."""
    sink = one._sink
    assert isinstance(sink, LeasedSink)
    prompt = sink._holder.write

    async def slow(write: Write, news: News) -> None:
        if late(write.before, write.after):
            await anyio.sleep(1.5)
        await prompt(write, news)

    sink._holder.write = slow  # type: ignore[method-assign]


HASTY = replace(
    STAGE, timeout=Timeouts(commit=1.0), restart=RestartPolicy(max=2, delay=0.01)
)


def hasty(table: LeaseTable, processors: Callable[..., Any]) -> Pipeline:
    """Return a runner whose workers wait a second for a checkpoint."""
    sink = LeasedSink(
        HASTY,
        cut=Cut(3, "/user"),
        keeper=LeaseKeeper("a", "start", failover=3.0),
        leases=lambda _of: table,
        launch=ScriptedLaunch(processors),
    )
    return runner(table, processors, sink=sink)


@virtually
async def test_end_of_a_shard_that_is_stored_late_is_stored() -> None:
    """The next worker that asks for it has ended the shard (issue 25)."""
    table, processors = MemoryLeases(), Processors()
    one = hasty(table, processors)
    late(one, lambda before, after: after.ended and not before.ended)
    (report,) = await run_all(one)
    assert report.status == "done", report.error
    assert all(row.ended for row in table.read())
    assert processors.errors.count("KinesisClientLibDependencyException") == 3
    assert "ShutdownException" not in processors.errors
    check_whole(processors)


class Noting(MemoryLeases):
    """A table that notes the numbers of all checkpoints, by shard."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: dict[str, list[int]] = defaultdict(list)

    def swap(self, before: Lease, after: Lease, news: News = NEWS) -> bool:
        """Swap a lease, and note its number if that changes."""
        done = super().swap(before, after, news)
        if done and after.position != before.position and not after.ended:
            number = number_of(json.loads(after.position or ""))
            self.stored[after.shard].append(number)
        return done


@virtually
async def test_checkpoint_that_is_stored_late_does_not_go_back() -> None:
    """The next worker begins before it, and commits on the way to it (issue 25)."""

    class Dying(Processors):
        async def _checkpoint(
            self,
            *args: Any,  # noqa: ANN401 - passed on
            **settings: Any,  # noqa: ANN401 - passed on
        ) -> None:
            await super()._checkpoint(*args, **settings)
            if self.errors[-1] is not None:
                self._every = 1
                raise EOFError

        async def __call__(self, worker: ScriptedWorker) -> int:
            try:
                return await super().__call__(worker)
            except EOFError:
                # Its successor begins when the checkpoint has been stored.
                await anyio.sleep(1)
                return 3

    table, processors, count = Noting(), Dying(every=3), Counter[str]()
    one = hasty(table, processors)

    def second(before: Lease, after: Lease) -> bool:
        moved = before.position != after.position
        count[after.shard] += moved
        return moved and count[after.shard] == 2

    late(one, second)
    (report,) = await run_all(one)
    assert report.status == "done", report.error
    assert processors.errors.count("KinesisClientLibDependencyException") == 3
    for shard, stored in table.stored.items():
        assert stored == sorted(stored)
        # The next worker has begun before the checkpoint that was late.
        assert processors.done[shard].count(stored[1]) == 2
    assert all(row.ended for row in table.read())
    check_whole(processors)


@pytest.mark.parametrize("end", [0, COUNT // 2])
@pytest.mark.parametrize("numbered", [False, True])
def test_checkpoint_after_all_records_covers_no_later_one(
    monkeypatch: pytest.MonkeyPatch, end: int, *, numbered: bool
) -> None:
    """
    A processor may ask for any at the end of its shard, and fail to end it; then the
    input grows (issue 25).
    """

    class Ahead(Processors):
        async def _checkpoint(self, *asked: Any) -> None:  # noqa: ANN401 - passed on
            worker, lines, number = asked[:3]
            await super()._checkpoint(worker, lines, number or "9" * 50)

    @virtually
    async def test() -> None:
        table, processors, ahead = MemoryLeases(), Processors(), Ahead()
        cut = Cut(3, "/user", sequence="/n" if numbered else None)

        def sink(processors: Processors) -> LeasedSink:
            return LeasedSink(
                STAGE,
                cut=cut,
                keeper=LeaseKeeper("a", "start", failover=3.0),
                leases=lambda _of: table,
                launch=ScriptedLaunch(processors),
            )

        short = Numbered(end=end)
        (report,) = await run_all(runner(table, ahead, source=short, sink=sink(ahead)))
        assert isinstance(report.error, NotCommitted)
        assert set(ahead.errors) == {None}
        processors.done = {shard: [*done] for shard, done in ahead.done.items()}

        (report,) = await run_all(runner(table, processors, sink=sink(processors)))
        assert report.status == "done", report.error
        check_whole(processors)

    test(monkeypatch)


@virtually
async def test_input_ends_while_records_go_one_by_one() -> None:
    """After a worker's death, its successor still gets the end of the shard."""
    for shared in (True, False):
        processors, lives = Processors(every=4), Counter[str]()

        async def die_once(
            worker: ScriptedWorker,
            processors: Processors = processors,
            lives: Counter[str] = lives,
        ) -> int:
            lives["begun"] += 1
            if lives["begun"] > 3:
                return await processors(worker)
            await worker.read()
            await worker.write(b'{"action":"status","responseFor":"initialize"}\n')
            await worker.read()
            return 3

        sink = None
        if not shared:
            launch = ScriptedLaunch(die_once)
            sink = ShardedSink(STAGE, cut=Cut(3, "/user"), launch=launch)
        one = runner(MemoryLeases(), die_once, sink=sink)
        with anyio.fail_after(500):
            (report,) = await run_all(one)
        assert report.status == "done", report.error
        check_whole(processors)


class Letters(MemoryDeadLetters):
    """Dead letters, kept in memory or on a full disk."""

    def __init__(self, *, full: bool = False) -> None:
        super().__init__()
        self._full = full

    async def keep(self, letters: Sequence[DeadLetter]) -> None:
        """Keep the letters, or fail if the disk is full."""
        if self._full:
            raise StageError("can't write dead letters: disk full", stage="load")
        await super().keep(letters)


class Settled:
    """A load whose sixth record kills each worker, before any of them commits."""

    def __init__(self, *, then: Literal["fail", "dead_letter"], full: bool) -> None:
        self.processors = Processors(every=20, killers=[5])
        self.letters = Letters(full=full)
        self.committed: list[object] = []
        self._then = then

    def commit(self, position: object) -> None:
        """Assert that all covered records were processed, or have durable letters."""
        self.committed.append(position)
        done = {n for of in self.processors.done.values() for n in of}
        kept = [json.loads(letter.message)["n"] for letter in self.letters.kept]
        safe = done.union(kept[: self.letters.durable])
        assert safe.issuperset(range(number_of(position) + 1))

    async def run(self, *, shared: bool) -> Report:
        """Load, with leases or with a checkpoint file."""
        commit = self.commit

        class Table(MemoryLeases):
            def swap(self, before: Lease, after: Lease, news: News = NEWS) -> bool:
                if after.position is not None:
                    commit(json.loads(after.position))
                return super().swap(before, after, news)

        class File(CheckpointFile):
            def store(self, shard: str, position: object) -> None:
                commit(position)
                super().store(shard, position)

        settings: dict[str, Any] = {
            "stage": replace(STAGE, on_error=ErrorPolicy(retries=0, then=self._then)),
            "cut": Cut(1, sequence="/n"),
            "dead_letters": self.letters,
            "launch": ScriptedLaunch(self.processors),
        }
        sink: Sink
        if shared:
            keeper, table = LeaseKeeper("a", "start", failover=3.0), Table()
            sink = LeasedSink(**settings, keeper=keeper, leases=lambda _of: table)
        else:
            sink = ShardedSink(**settings, checkpoints=File(None, {}))
        return await Pipeline(
            name="p", source=Numbered(), sink=sink, dead_letters=self.letters
        ).run()


@virtually
async def test_record_that_was_given_up_is_settled_before_a_checkpoint() -> None:
    """The next worker knows nothing of it, and commits later records (issue 25)."""
    for shared in (True, False):
        one = Settled(then="dead_letter", full=False)
        report = await one.run(shared=shared)
        assert report.status == "done", report.error
        account = report.ledger[-1]
        assert (account.done, account.dead) == (COUNT - 1, 1)
        assert [letter.place for letter in one.letters.kept] == [5]
        assert one.committed


@virtually
async def test_nothing_is_committed_behind_a_record_that_ends_the_run() -> None:
    """Nor after a record that can't be dead-lettered (issue 25)."""
    for shared in (True, False):
        one = Settled(then="fail", full=False)
        report = await one.run(shared=shared)
        assert isinstance(report.error, WorkerLost)
        assert not one.committed

        one = Settled(then="dead_letter", full=True)
        report = await one.run(shared=shared)
        assert isinstance(report.error, StageError)
        assert "disk full" in str(report.error)
        assert not one.committed


@virtually
async def test_record_that_was_given_up_keeps_its_place() -> None:
    """Even if another worker commits the records before it only later."""
    processors = Processors(every=99, killers=[5], at_end=None, fails=3)
    letters = Letters()
    sink = ShardedSink(
        replace(STAGE, on_error=ErrorPolicy(retries=0)),
        cut=Cut(1, sequence="/n"),
        dead_letters=letters,
        launch=ScriptedLaunch(processors),
    )
    one = Pipeline(name="p", source=Numbered(), sink=sink, dead_letters=letters)
    report = await one.run()
    assert report.status == "done", report.error
    assert processors.actions.count(("shardId-000000000000", "initialize")) > 3
    assert [letter.place for letter in letters.kept] == [5]


@virtually
async def test_shards_without_records_end() -> None:
    """Their workers must checkpoint the end, too."""
    for shared in (True, False):
        table, processors = MemoryLeases(), Processors()
        sink = None if shared else unshared(processors)
        source = MemorySource([]) if sink else Numbered(begin=COUNT)
        (report,) = await run_all(runner(table, processors, source=source, sink=sink))
        assert report.status == "done", report.error
        assert processors.errors == [None] * 3
        assert all(lease.ended for lease in table.read())


@virtually
async def test_shard_that_never_ends_fails() -> None:
    """The error names it; its leases are released."""
    for shared in (True, False):
        table, processors = MemoryLeases(), Processors(fails=99)
        sink = None if shared else unshared(processors)
        (report,) = await run_all(runner(table, processors, sink=sink))
        assert isinstance(report.error, NotCommitted)
        found = re.search(
            r"the worker of shard (\S+) .* without a checkpoint", str(report.error)
        )
        assert found is not None
        assert len(processors.done) == 3
        assert found[1] in processors.done
        # Nothing but the end is missing: it is not loaded as if it were there.
        assert sorted(chain.from_iterable(processors.done.values())) == [*range(COUNT)]
        assert not any(lease.ended for lease in table.read())
        assert not any(lease.owner for lease in table.read())
        lives = Counter(s for s, action in processors.actions if action[0] == "i")
        assert set(lives.values()) == {6}


@virtually
async def test_processor_that_dies_at_its_start_is_restarted_max_times() -> None:
    """No shard has ended, so nothing else is started for it (issue 25)."""

    async def die(_worker: ScriptedWorker) -> int:
        return 3

    for shared, most, records in product((True, False), (0, 1, 2), (COUNT, 0)):
        stage = replace(STAGE, restart=RestartPolicy(max=most))
        source: Source = Numbered(begin=COUNT - records)
        sink: Sink = ShardedSink(stage, cut=Cut(1, "/user"), launch=ScriptedLaunch(die))
        if shared:
            sink = LeasedSink(
                stage,
                cut=Cut(1, "/user"),
                keeper=LeaseKeeper("a", "start", failover=3.0),
                leases=lambda _of: MemoryLeases(),
                launch=ScriptedLaunch(die),
            )
        elif not records:
            source = MemorySource([])
        with capture_logs() as logs:
            report = await Pipeline(name="p", source=source, sink=sink).run()
        error, account = report.error, report.ledger[-1]
        assert isinstance(error, StageFailed), (shared, most, records)
        assert "exited with status 3" in str(error)
        after = f"after {most} restart" in str(error)
        assert after is (most > 0), str(error)
        assert (account.restarts, account.failures) == (most, most + 1)
        events = [log["event"] for log in logs]
        assert events.count("worker failed permanently") == 1
        assert "worker is started again to commit the rest of its shard" not in events


@virtually
async def test_error_has_the_cause_of_a_failure_at_the_end() -> None:
    """How the last processor exited, its stderr and its command (issue 25)."""
    for shared in (True, False):
        processors = Processors(at_end=7, fails=99)
        sink = None if shared else unshared(processors)
        with capture_logs() as logs:
            (report,) = await run_all(runner(MemoryLeases(), processors, sink=sink))
        assert isinstance(report.error, NotCommitted)
        assert re.search(
            r"without committing the end of the shard, after 6 tries: .*boom at end;"
            r" worker shardId-\d+-1 \(pid \d+\) exited with status 7$",
            str(report.error),
        )
        assert report.error.story[0] == "stderr: boom at end"
        assert report.error.story[-1] == "command: processor"
        exits = [log["exit"] for log in logs if log["event"] == "worker exited"]
        assert "exited with status 7" in exits


@virtually
async def test_processors_that_fail_at_the_end_are_counted() -> None:
    """Each as a failure, and those that replace them as restarts (issue 25)."""
    for status, fails in product((None, 0, 7, -9), (1, 99)):
        for shards in 1, 3:
            processors, sink = Processors(at_end=status, fails=fails), None
            if shards == 1:
                launch = ScriptedLaunch(processors)
                sink = ShardedSink(STAGE, cut=Cut(1, "/user"), launch=launch)
            (report,) = await run_all(runner(MemoryLeases(), processors, sink=sink))
            account, lives = report.ledger[-1], 2 if fails == 1 else 6
            assert len({shard for shard, _ in processors.actions}) == shards
            assert account.restarts == shards * (lives - 1)
            assert account.failures == shards * min(lives, fails)
            assert len(account.faults) == account.failures


@virtually
async def test_processors_of_a_run_that_fails_are_counted() -> None:
    """Their restarts and failures are in its report, with leases or not (issue 25)."""

    class Damaged(Numbered):
        async def runs(self) -> AsyncGenerator[Run | Position, None]:
            async for run in self.numbered():
                yield run.messages

        async def numbered(self, after: int = -1) -> AsyncGenerator[AnnotatedRun, None]:
            async for run in super().numbered(after):
                yield run
            raise StateUnusable("damaged")

    for shared in (True, False):
        processors, lives = Processors(), Counter[str]()

        async def die_once(
            worker: ScriptedWorker,
            processors: Processors = processors,
            lives: Counter[str] = lives,
        ) -> int:
            lives["begun"] += 1
            return 3 if lives["begun"] == 1 else await processors(worker)

        sink = None
        if not shared:
            launch = ScriptedLaunch(die_once)
            sink = ShardedSink(STAGE, cut=Cut(3, "/user"), launch=launch)
        source = Damaged(pause=1.0)
        (report,) = await run_all(
            runner(MemoryLeases(), die_once, source=source, sink=sink)
        )
        assert str(report.error) == "damaged"
        account = report.ledger[-1]
        assert (account.restarts, account.failures) == (1, 1), shared


@virtually
async def test_processor_that_fails_after_the_end_is_not_replaced() -> None:
    """The end of its shard is committed: how it exits then is of no importance."""
    for shared in (True, False):
        processors = Processors()

        async def fail(
            worker: ScriptedWorker, processors: Processors = processors
        ) -> int:
            return await processors(worker) or 7

        sink = None
        if not shared:
            sink = ShardedSink(STAGE, cut=Cut(3, "/user"), launch=ScriptedLaunch(fail))
        (report,) = await run_all(runner(MemoryLeases(), fail, sink=sink))
        assert report.status == "done", report.error
        lives = [shard for shard, action in processors.actions if action[0] == "i"]
        assert len(lives) == 3
        assert report.ledger[-1].failures == 0


@virtually
async def test_shard_that_is_reset_is_taken_by_who_failed_at_it() -> None:
    """The runner loads the whole shard then, and the run succeeds."""
    killers = {0}
    table, processors = MemoryLeases(), Processors(killers=killers, pause=3.0)
    one = runner(table, processors)
    sink = one._sink
    assert isinstance(sink, LeasedSink)

    async def operate() -> None:
        while not sink._failures:  # noqa: ASYNC110 - there is no event of it
            await anyio.sleep(0.1)
        killers.clear()
        (failed,) = sink._failures
        await anyio.sleep(5)
        reset(table, failed)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(operate)
        (report,) = await run_all(one)
    assert report.status == "done", report.error
    assert all(lease.ended for lease in table.read())
    check_whole(processors)


@virtually
async def test_shard_that_was_reset_and_taken_again_is_not_over() -> None:
    """The runner waits for it while it is handed over, and then ends it (issue 25)."""
    killers, released = {0}, list[str]()
    table, processors = MemoryLeases(), Processors(killers=killers, pause=0.5)
    one = runner(table, processors)
    sink = one._sink
    assert isinstance(sink, LeasedSink)

    async def operate() -> None:
        while not sink._failures:  # noqa: ASYNC110 - there is no event of it
            await anyio.sleep(0.1)
        killers.clear()
        (failed,) = sink._failures
        reset(table, failed)
        left = table.read()
        while len(left) > 1 or not left[0].owner:
            await anyio.sleep(0.1)
            left = [row for row in table.read() if not row.ended]
        # No other shard keeps the run going.
        assert left[0].shard == failed
        release(table, failed)
        released.append(failed)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(operate)
        (report,) = await run_all(one)
        tasks.cancel_scope.cancel()
    assert released
    assert report.status == "done", report.error
    assert all(lease.ended for lease in table.read())
    check_whole(processors)


@virtually
async def test_run_ends_when_all_shards_are_reset() -> None:
    """The error has the cause and the remedy, and the next run loads all (issue 25)."""
    table = MemoryLeases()

    async def operate() -> None:
        await anyio.sleep(5)
        table._rows.clear()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(operate)
        (report,) = await run_all(runner(table, Processors(pause=3.0)))
    assert report.status == "failed"
    assert str(report.error) == (
        "stage load: shard shardId-000000000000 is gone from the lease table: all shards"
        " were reset, or its row was deleted; run again"
    )
    processors = Processors()
    (report,) = await run_all(runner(table, processors, "b"))
    assert report.status == "done", report.error
    check_whole(processors)


@virtually
async def test_lease_that_was_removed_has_no_counter_again() -> None:
    """New leases' counters are higher, so a former owner's late write can't match."""
    table, before = MemoryLeases(), time.time_ns() // 1000
    (report,) = await run_all(runner(table, Processors()))
    assert report.status == "done", report.error
    assert all(lease.counter > before for lease in table.read())


@virtually
async def test_worker_that_never_commits_is_named() -> None:
    """A single warning explains why the worker gets no more records."""
    dialect = KclDialect(max_uncommitted=3, commit_overdue=5.0)
    stage = replace(STAGE, dialect=dialect, restart=RestartPolicy(policy="temporary"))
    processors = Processors(every=99)
    sink = ShardedSink(stage, cut=Cut(1, "/user"), launch=ScriptedLaunch(processors))
    with capture_logs() as logs:
        (report,) = await run_all(runner(MemoryLeases(), processors, sink=sink))
    assert report.status == "failed"
    (log,) = (log for log in logs if "has not committed any" in log["event"])
    assert log["worker"] == "shardId-000000000000-1"
    assert log["messages"] == 3


@virtually
async def test_shard_whose_checkpoint_is_overdue_fails() -> None:
    """Its processor is not restarted, and the error is the cause (issue 25)."""
    dialect = KclDialect(max_uncommitted=3, commit_overdue=5.0)
    stage = replace(STAGE, dialect=dialect)
    for shared in (True, False):
        processors = Processors(every=99)
        launch, cut = ScriptedLaunch(processors), Cut(1, "/user")
        sink: Sink = ShardedSink(stage, cut=cut, launch=launch)
        if shared:
            keeper = LeaseKeeper("a", "start", failover=3.0)
            sink = LeasedSink(
                stage,
                cut=cut,
                keeper=keeper,
                leases=lambda _of: MemoryLeases(),
                launch=launch,
            )
        with anyio.fail_after(600):
            (report,) = await run_all(runner(MemoryLeases(), processors, sink=sink))
        assert isinstance(report.error, StageFailed)
        assert "3 records" in str(report.error)
        assert "(commit_overdue)" in str(report.error)
        assert processors.actions.count(("shardId-000000000000", "initialize")) == 1
        account = report.ledger[-1]
        assert (account.restarts, account.failures, account.done) == (0, 1, 0)


@virtually
async def test_key_that_is_too_long_is_refused_before_it_is_given() -> None:
    """The run fails, and its shard doesn't end without that record."""

    class LongKeys(Numbered):
        async def numbered(self, after: int = -1) -> AsyncGenerator[AnnotatedRun, None]:
            record = json.dumps({"user": "x" * 300, "n": 0}).encode()
            yield AnnotatedRun([record], sequence=[0])

    table, processors = MemoryLeases(), Processors()
    (report,) = await run_all(runner(table, processors, source=LongKeys()))
    assert isinstance(report.error, InvalidMessage)
    assert "row 1: its partition key is 300 characters long, expected 1 to 256" in str(
        report.error
    )
    assert processors.done == {}
    assert not all(lease.ended for lease in table.read())


@virtually
async def test_runner_that_ends_while_a_worker_is_tried_again() -> None:
    """It doesn't wait for the next attempt."""
    table, processors = MemoryLeases(), Processors(fails=99)
    first = runner(table, processors)

    report = await drained_after(8, first)
    assert report.status == "drained", report.error
    assert not any(lease.owner for lease in table.read())


@virtually
async def test_name_that_another_runner_has() -> None:
    """A second start is refused while the first one renews its leases."""
    table = MemoryLeases()
    keeper = LeaseKeeper("a", "other", failover=3.0)
    second = runner(table, Processors(), keeper=keeper)
    reports: list[Report] = []

    async def run_second() -> None:
        await anyio.sleep(1)
        reports.extend(await run_all(second))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_second)
        reports.extend(await run_all(runner(table, Processors(pause=0.5))))
    assert [report.status for report in reports] == ["failed", "done"]
    (error,) = (report.error for report in reports if report.error is not None)
    assert isinstance(error, StateUnusable)
    assert "runner 'a' is already running" in str(error)


def test_table_of_other_shards_is_refused(tmp_path: Path) -> None:
    """The error names the difference; nothing is written."""
    path = tmp_path / "leases"
    SQLiteLeases(path, "app", made={"count": 8, "input": "x"}).close()
    with pytest.raises(ConfigError, match="for shards with count 8, found count 4:"):
        SQLiteLeases(path, "app", made={"count": 4, "input": "x"})
    with sqlite3.connect(path) as base:
        (made,) = base.execute("select made from etlstage_leases_layout").fetchone()
    base.close()
    assert json.loads(made) == {"count": 8, "input": "x"}
