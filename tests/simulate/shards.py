"""
Sharded loads: runners die, drain and join, their workers die, and tables fail.

Runners share the shards by leases; or they run one after the other, each with all
shards, and keep the checkpoints in a file.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from unittest.mock import patch

import anyio
import anyio.lowlevel
import anyio.to_thread
from anyio.abc import TaskGroup

from etlstage.errors import ConfigError, EtlstageError, StateUnusable
from etlstage.messages import AnnotatedRun, Position, Run, StageKind
from etlstage.pipeline import Pipeline, Report
from etlstage.pipeline.interfaces import Source
from etlstage.protocol.kcl.settings import KclDialect
from etlstage.shard import operator
from etlstage.shard.cut import Cut
from etlstage.shard.keeper import LeaseKeeper
from etlstage.shard.kinesis.aggregate import split
from etlstage.shard.kinesis.source import KinesisSource
from etlstage.shard.lease import Lease
from etlstage.shard.leased import LeasedSink
from etlstage.shard.sink import CheckpointFile, ShardedSink
from etlstage.shard.table import NEWS, MemoryLeases, News, TableGone
from etlstage.stage import (
    BatchPolicy,
    ErrorBudget,
    ErrorPolicy,
    RestartPolicy,
    Stage,
    Timeouts,
)
from etlstage.testing import (
    MemoryDeadLetters,
    Scenario,
    ScriptedLaunch,
    ScriptedWorker,
    simulation,
)
from etlstage.testing.scenario import Violation
from tests.shard.stream import MemoryKinesis, aggregated, refusal
from tests.simulate.processor import Number, Processor, number_in

__all__ = ("ShardScenario", "any_runners", "simulate")

OPERATIONS: Final = {
    "release": operator.release,
    "take": operator.take,
    "reset": operator.reset,
}
LOOKS: Final = 4.0  # seconds within which each runner reads the table again
AGO: Final = 15.0  # the same if requests are slow
PASSING: Final = ("ProvisionedThroughputExceededException", "ExpiredIteratorException")
"""Transient errors of the API."""


@dataclass(frozen=True, kw_only=True)
class ShardScenario(Scenario):
    """The runners of a load, and what goes wrong until the final, sound phase."""

    leases: bool
    """Whether runners share the shards by leases; else they run one after the other."""
    stream: bool
    """Whether the input has shards of its own; else it is cut into shards."""
    shards: int
    page: int
    """Number of records in one read."""
    lives: tuple[Life, ...]
    """The runners before the last one, which runs to the end."""
    unread: float
    """Probability that a request to the table fails, before or after it is done;
    likewise a write of the file, or a read of the stream."""
    slow: float
    """Maximal seconds that a request takes."""
    pace: float
    """Maximal seconds that a record takes."""
    dies: float
    """Probability that a worker exits at a message or at a record."""
    commits: float
    """Share of records that are checkpointed."""
    poisoned: frozenset[int]
    """Records that kill each worker; without dead letters, until the sound phase."""
    letters: bool
    """Whether a record that no worker survives is dead-lettered."""
    changes: tuple[tuple[float, str], ...] = ()
    """Splits and merges of shards, with their times."""
    operations: tuple[Operation, ...] = ()
    """What operators do to the leases."""
    last: tuple[Operation, ...] = ()
    """What operators do in the sound phase."""


@dataclass(frozen=True)
class Operation:
    """An operator's action, whether or not a runner is alive."""

    at: float
    """Virtual seconds from the beginning."""
    what: str
    """``release``, ``take``, ``reset``, or ``forget`` for a reset of all."""
    looked: float
    """Age, in seconds, of the table's rows that the operator acts on."""


@dataclass(frozen=True)
class Life:
    """The life of one runner."""

    name: str
    start: float
    """Virtual seconds from the beginning."""
    length: float
    end: str
    """``killed`` or ``drained``."""


def any_runners(draw: random.Random) -> ShardScenario:
    """Draw a load and its runners."""
    leases = draw.random() < 0.7
    stream = leases and draw.random() < 0.5
    records = draw.randint(1, 40)
    letters = draw.random() < 0.4
    stage = Stage(
        name="load",
        worker=("processor",),
        dialect=KclDialect(
            max_uncommitted=draw.choice((3, 1000)),
        ),
        kind=StageKind.LOAD,
        batch=BatchPolicy(size=draw.choice((1, 3, 10))),
        restart=RestartPolicy(max=1000, delay=0.01, max_delay=0.05),
        timeout=Timeouts(message=60.0, stop=0.5),
        on_error=ErrorPolicy(
            retries=draw.randint(0, 2),
            then="dead_letter",
            budget=ErrorBudget(count=10_000),
        )
        if letters
        else ErrorPolicy(retries=draw.choice((0, 1, 1000))),
    )
    lives = [
        Life(
            draw.choice("abc"),
            draw.choice((0.0, draw.uniform(0, 20))),
            draw.choice((0.3, 3.0, 20.0)) * draw.random(),
            draw.choice(("killed", "killed", "drained")),
        )
        for _ in range(draw.randint(0, 4))
    ]
    poisoned = draw.sample(range(records), min(records, draw.randint(0, 2)))
    return ShardScenario(
        messages=[
            json.dumps({"user": draw.randrange(9), "n": n}).encode()
            for n in range(records)
        ],
        stages=[stage],
        work={},
        leases=leases,
        stream=stream,
        shards=draw.randint(1, 3),
        page=draw.choice((1, 3, 10)),
        lives=tuple(lives),
        unread=draw.choice((0.0, 0.02, 0.3)),
        slow=draw.choice((0.0, 0.05, 2.0)),
        pace=draw.choice((0.03, 0.03, 1.0)),
        dies=draw.choice((0.0, 0.01, 0.1)),
        commits=draw.choice((0.1, 0.5, 1.0)),
        poisoned=frozenset(poisoned),
        letters=letters,
        changes=tuple(
            (draw.uniform(0, 15), draw.choice(("split", "split", "merge")))
            for _ in range(draw.randint(0, 3) if stream else 0)
        ),
        operations=_operations(draw, (0, 1, 3, 10), 20.0) if leases else (),
        last=_operations(draw, (0, 1, 3), 10.0) if leases else (),
    )


def _operations(
    draw: random.Random, counts: Sequence[int], until: float
) -> tuple[Operation, ...]:
    return tuple(
        Operation(
            draw.uniform(0, until),
            draw.choice(("release", "release", "take", "take", "reset", "forget")),
            draw.choice((0.0, 0.0, draw.uniform(0, 3))),
        )
        for _ in range(draw.choice(counts))
    )


class Records(Source):
    """A source of numbered records, which are cut into shards."""

    def __init__(self, simulation: ShardSimulation) -> None:
        super().__init__("records")
        self._simulation = simulation

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        """Raise AssertionError: records are read with their numbers."""
        raise AssertionError("records are read with their numbers")
        yield

    async def numbered(self, after: int = -1) -> AsyncGenerator[AnnotatedRun, None]:
        """Yield the records after a number."""
        messages, page = self._simulation.messages, self._simulation.scenario.page
        for n in range(after + 1, len(messages), page):
            await self._simulation.pause()
            numbers = range(n, min(n + page, len(messages)))
            yield AnnotatedRun(messages[n : n + page], sequence=numbers)


class Rows(Source):
    """The same source for a single runner, with positions."""

    def __init__(self, runner: Runner) -> None:
        super().__init__("records")
        self._runner = runner

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        """Yield records from the position on."""
        simulation = self._runner.simulation
        messages, page = simulation.messages, simulation.scenario.page
        for n in range(simulation.position, len(messages), page):
            await simulation.pause()
            yield messages[n : n + page]
            yield Position(min(n + page, len(messages)))

    async def acknowledge(self, position: Position) -> None:
        """Store a position, and have it judged."""
        await self._runner.simulation.pause()
        if not self._runner.dead:
            assert isinstance(position.value, int)
            self._runner.simulation.acknowledge(position.value)


class Checkpoints(CheckpointFile):
    """One runner's checkpoint file; nothing that a dead runner does counts."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(None, {})
        self._runner = runner
        self._simulation = runner.simulation

    def open(self) -> None:
        """Read the stored checkpoints."""
        self._positions = dict(self._simulation.stored)

    def store(self, shard: str, position: object) -> None:
        """Store a position, or fail before or after that."""
        self._fail()
        super().store(shard, position)
        self._simulation.store(self._runner, shard, json.dumps(position))
        self._fail()

    def _fail(self) -> None:
        if self._runner.dead or self._simulation.fails():
            raise StateUnusable("can't store checkpoints: disk full")


@dataclass
class Runner:
    """One start of a runner."""

    simulation: ShardSimulation
    life: Life
    owner: str
    begun: float
    dead: bool = False
    letters: MemoryDeadLetters = field(default_factory=MemoryDeadLetters)
    report: Report | None = None


class Table(MemoryLeases):
    """One runner's access to the table; nothing that a dead runner does counts."""

    def __init__(self, runner: Runner) -> None:
        super().__init__()
        self._runner = runner
        self._simulation = runner.simulation

    def read(self) -> list[Lease]:
        """Read the table, or fail."""
        self._fail()
        return self._simulation.table.read()

    def add(self, leases: Iterable[Lease], *, all_new: bool = False) -> int:
        """Add leases, or fail before or after that."""
        self._fail()
        added = self._simulation.table.add(leases, all_new=all_new)
        self._fail()
        return added

    def swap(self, before: Lease, after: Lease, news: News = NEWS) -> bool:
        """Replace a row, or fail; a failed write may still arrive later."""
        swap = partial(self._simulation.swap, self._runner, before, after, news)
        try:
            self._fail()
        except TableGone:
            if not self._runner.dead and self._simulation.chance.random() < 0.3:
                self._simulation.late(swap)
            raise
        done = swap()
        self._fail()
        return done

    def close(self) -> None:
        """Do nothing, as other runners use the table, too."""

    def _fail(self) -> None:
        if self._runner.dead or self._simulation.fails():
            raise TableGone("lease table: gone")


class Forgetful(MemoryLeases):
    """The table that all runners share."""

    def forget(self) -> None:
        """Remove all leases, as from a database."""
        self._rows.clear()


class Looked(MemoryLeases):
    """A table whose first two reads return what an operator saw earlier."""

    def __init__(self, table: MemoryLeases) -> None:
        super().__init__()
        self._table = table
        self._old = [table.read()] * 2

    def read(self) -> list[Lease]:
        """Return the old rows twice, and then the current ones."""
        return self._old.pop() if self._old else self._table.read()

    def swap(self, before: Lease, after: Lease, news: News = NEWS) -> bool:
        """Replace a row."""
        return self._table.swap(before, after, news)


class ShardSimulation(simulation.Simulation[ShardScenario]):
    """One seed, run once."""

    def __init__(
        self, draw: Callable[[random.Random], ShardScenario], seed: int, **options: bool
    ) -> None:
        super().__init__(draw, seed, **options)
        self.chance: random.Random = self._draw
        self.messages: Sequence[bytes] = self.scenario.messages
        self.table = Forgetful()
        self.stored: dict[str, Any] = {}
        """The checkpoints in the file, as plain JSON."""
        self.position = 0
        """The source's position, without leases."""
        self._begin = 0  # the position at which the current runner began
        self.sound = False
        """Whether nothing goes wrong any more."""
        numbers = None if self.scenario.leases else "/n"
        self._cut = Cut(self.scenario.shards, "/user", sequence=numbers)
        self._stream: MemoryKinesis | None = None
        self._done: dict[str, set[Number]] = {}
        self._resets: dict[str, list[float]] = {}
        """Times at which a shard's checkpoint was reset."""
        self._forgotten = -1.0
        self.killers: set[int] = set()
        """Records at which a worker has died."""
        self._lettered: set[int] = set()
        self._runners: list[Runner] = []
        self._tasks: TaskGroup

    # --- what goes wrong ------------------------------------------------------------

    async def pause(self) -> None:
        """Take some time, or none."""
        await anyio.sleep(self.chance.choice((0.0, 0.001, self.scenario.pace)))

    def fails(self) -> bool:
        """Return whether a request to the table fails."""
        return not self.sound and self.chance.random() < self.scenario.unread

    def late(self, swap: Callable[[], bool]) -> None:
        """Let a write arrive late, after its runner has given it up."""

        async def do() -> None:
            await anyio.sleep(self.chance.uniform(0, 20))
            swap()

        self._tasks.start_soon(do)

    def dies(self) -> bool:
        """Return whether a worker exits here."""
        return not self.sound and self.chance.random() < self.scenario.dies

    def kills(self, message: int) -> bool:
        """Return whether a record kills each worker."""
        cured = self.sound and not self.scenario.letters
        return message in self.scenario.poisoned and not cured

    async def _in_thread(
        self, function: Callable[..., Any], *args: object, **_: object
    ) -> Any:  # noqa: ANN401
        slow = self.scenario.slow * (not self.sound)
        try:
            await anyio.sleep(self.chance.choice((0.0, 0.001, slow)))
        except BaseException:
            # A thread can't be cancelled, so the call may still be done.
            if self.chance.random() < 0.5:
                function(*args)
            raise
        result = function(*args)
        await anyio.sleep(self.chance.choice((0.0, 0.001, slow)))
        return result

    # --- the table ------------------------------------------------------------------

    def swap(self, runner: Runner, before: Lease, after: Lease, news: News) -> bool:
        """Replace a row, and judge what it commits."""
        done = self.table.swap(before, after, news)
        if done and (after.position, after.ended) != (before.position, before.ended):
            self.tell(
                f"{runner.owner} commits {after.shard} {after.position}"
                f"{' ended' * after.ended}"
            )
            if not before.owner == after.owner == runner.owner:
                self.violate(f"{runner.owner} commits a shard of {before.owner}")
            self._check_commit(after, number_in(before.position))
        return done

    def store(self, runner: Runner, shard: str, position: str) -> None:
        """Store a checkpoint in the file, and judge it."""
        self.tell(f"{runner.owner} stores {shard} {position}")
        before = self.committed(shard).position
        self._check_commit(Lease(shard, position=position), number_in(before))
        self.stored[shard] = json.loads(position)

    def committed(self, shard: str) -> Lease:
        """Return the lease or checkpoint of a shard as it is stored."""
        if self.scenario.leases:
            rows = {row.shard: row for row in self.table.read()}
            return rows.get(shard, Lease(shard))
        stored = self.stored.get(shard)
        return Lease(shard, position=None if stored is None else json.dumps(stored))

    def acknowledge(self, position: int) -> None:
        """Store the position of the source, and judge it."""
        self.tell(f"position {position} is stored")
        if position < self.position:
            self.violate(f"the source goes back to {position}")
        self.position = position
        processed = {n for of in self._done.values() for n, _ in of}
        for n in range(position):
            if n not in processed and n not in self._safe():
                self.violate(f"{position} is stored, and {n} was not processed")

    async def _operate(self, operation: Operation) -> None:
        """Do an operation, and assert that it changes nothing else."""
        await anyio.sleep(operation.at)
        looked = Looked(self.table)
        await anyio.sleep(operation.looked)
        rows = {row.shard: row for row in self.table.read()}
        if operation.what == "forget":
            self.tell("all shards are reset")
            self.table.forget()
            self._forgotten = anyio.current_time()
            for shard in rows:
                self._forget(shard)
            return
        if not rows:
            return
        shard = self.chance.choice(sorted(rows))
        with suppress(ConfigError):
            OPERATIONS[operation.what](looked, shard)
        before, after = rows[shard], self.committed(shard)
        if before == after:
            return
        self.tell(f"{operation.what} of {shard}: {after}")
        kept = (before.position, before.ended)
        if operation.what == "reset":
            kept = (None, False)
            self._forget(shard)
        if (after.position, after.ended) != kept:
            self.violate(f"{operation.what} has moved {shard} to {after.position}")

    def _forget(self, shard: str) -> None:
        self._resets.setdefault(shard, []).append(anyio.current_time())
        self._done.pop(shard, None)

    def resets(self, shard: str) -> int:
        """Return how many times a shard has been reset."""
        return len(self._resets.get(shard, ()))

    def _check_commit(self, lease: Lease, before: Number) -> None:
        number = number_in(lease.position)
        # After a failed write, the runner doesn't know what the file has.
        unsure = not self.scenario.leases and self.scenario.unread
        if number < before and not lease.ended and not unsure:
            self.violate(f"{lease.shard} goes back to {number} from {before}")
        processed = self._done.get(lease.shard, set())
        for place, message in self.records_of(lease.shard).items():
            covered = lease.ended or place <= number
            if covered and place not in processed and message not in self._safe():
                self.violate(
                    f"{lease.shard} is committed, and record {message} was not processed"
                )
        if lease.ended and self._stream is not None:
            shard = next(s for s in self._stream.shards if s["ShardId"] == lease.shard)
            if "EndingSequenceNumber" not in shard["SequenceNumberRange"]:
                self.violate(f"{lease.shard} is committed as ended, and goes on")

    def _safe(self) -> set[int]:
        """Return the records in dead letters that no crash can lose."""
        kept = [
            letter
            for runner in self._runners
            for letter in runner.letters.kept[: runner.letters.durable]
        ]
        return self._lettered | {json.loads(letter.message)["n"] for letter in kept}

    def records_of(self, shard: str) -> Mapping[Number, int]:
        """Return the records of a shard by number, in order."""
        if self._stream is None:
            cuts = map(self._cut.record, self.messages)
            return {
                (row, 0): row
                for row, cut in enumerate(cuts)
                if self._cut.names[cut.shard] == shard
            }
        found: dict[Number, int] = {}
        for record in self._stream.records[shard]:
            number = int(record["SequenceNumber"])
            parts = split(record["Data"])
            for sub, data in enumerate(
                [record["Data"]] if parts is None else [data for data, _ in parts]
            ):
                found[number, sub] = json.loads(data)["n"]
        return found

    # --- runners --------------------------------------------------------------------

    async def _main(self) -> None:
        scenario = self.scenario
        if scenario.stream:
            self._stream = MemoryKinesis(scenario.shards, anyio.current_time)
        with (
            patch.object(anyio.to_thread, "run_sync", self._in_thread),
            patch("etlstage.shard.kinesis.source.time.sleep", lambda _: None),
            anyio.move_on_after(scenario.seconds) as patience,
        ):
            async with anyio.create_task_group() as self._tasks:
                async with anyio.create_task_group() as tasks:
                    if self._stream is not None:
                        tasks.start_soon(self._produce, self._stream)
                        for at, change in scenario.changes:
                            tasks.start_soon(self._change, self._stream, at, change)
                    for operation in scenario.operations:
                        tasks.start_soon(self._operate, operation)
                    for life in scenario.lives:
                        if scenario.leases:
                            tasks.start_soon(self._live, life)
                        else:
                            await self._live(life)
                await anyio.sleep(25)  # until all late writes have arrived
                self.sound = True
                self.tell("all is well from now on")
                async with anyio.create_task_group() as tasks:
                    for operation in scenario.last:
                        tasks.start_soon(self._operate, operation)
                    tasks.start_soon(self._live, Life("y", 0.0, 4000.0, "drained"))
                last = await self._live(Life("z", 0.0, 4000.0, "drained"))
                self._tasks.cancel_scope.cancel()
        if patience.cancelled_caught:
            self.violate("it does not end")
        else:
            self._check_whole(last)

    async def _produce(self, stream: MemoryKinesis) -> None:
        left = [*self.messages]
        while left:
            count = self.chance.choice((1, 1, 1, 3))
            some, left = left[:count], left[count:]
            data = some[0]
            if len(some) > 1:
                # They have the same key, so all belong to the aggregate's shard.
                data = aggregated(*((each, "k") for each in some))
            key = "k" if len(some) > 1 else str(self.chance.randrange(99))
            stream.put_data(data, key)
            if self.chance.random() < self.scenario.unread:
                stream.fails["get_records"].append(refusal(self.chance.choice(PASSING)))
            await anyio.sleep(self.chance.choice((0.0, 0.1, 1.0)))

    async def _change(self, stream: MemoryKinesis, at: float, change: str) -> None:
        await anyio.sleep(at)
        living = [
            shard
            for shard in stream.shards
            if "EndingSequenceNumber" not in shard["SequenceNumberRange"]
        ]
        living.sort(key=lambda shard: int(shard["HashKeyRange"]["StartingHashKey"]))
        place = self.chance.randrange(len(living))
        names = [shard["ShardId"] for shard in living[place : place + 2]]
        if change == "split":
            self.tell(f"{names[0]} is split: {stream.split(names[0])}")
        elif len(names) == 2:
            self.tell(f"{names} are merged: {stream.merge(*names)}")

    async def _live(self, life: Life) -> Runner:
        await anyio.sleep(life.start)
        start = f"{len(self._runners)}"
        owner = f"{life.name}/{start}"
        runner = Runner(self, life, owner, anyio.current_time())
        self._runners.append(runner)
        self._begin = self.position
        self.tell(f"{runner.owner} starts")
        pipeline = self._made(runner, start)
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._end, runner, pipeline, scope)
                runner.report = await pipeline.run()
                tasks.cancel_scope.cancel()
        if runner.dead:
            return runner
        self._judge(runner)
        return runner

    async def _end(
        self, runner: Runner, pipeline: Pipeline, scope: anyio.CancelScope
    ) -> None:
        await anyio.sleep(runner.life.length)
        self.tell(f"{runner.owner} is {runner.life.end}")
        if runner.life.end == "drained":
            pipeline.drain()
            return
        # A random part of the letters that are not durable survives.
        kept = runner.letters.kept
        safe = kept[: self.chance.randint(runner.letters.durable, len(kept))]
        self._lettered |= {json.loads(letter.message)["n"] for letter in safe}
        runner.dead = True
        scope.cancel()

    def _made(self, runner: Runner, start: str) -> Pipeline:
        scenario = self.scenario
        if not scenario.leases:
            return Pipeline(
                name="p",
                source=Rows(runner),
                sink=ShardedSink(
                    scenario.stages[0],
                    cut=self._cut,
                    checkpoints=Checkpoints(runner),
                    dead_letters=runner.letters,
                    launch=ScriptedLaunch(partial(self._live_as_processor, runner)),
                ),
                dead_letters=runner.letters,
            )
        keeper = LeaseKeeper(runner.life.name, start, failover=3.0, hand_over=2.0)
        sink = LeasedSink(
            scenario.stages[0],
            keeper=keeper,
            leases=lambda _of: Table(runner),
            cut=None if self._stream is not None else self._cut,
            dead_letters=runner.letters,
            launch=ScriptedLaunch(partial(self._live_as_processor, runner)),
        )
        source: Source = Records(self)
        if self._stream is not None:
            source = KinesisSource(
                "clicks",
                lambda: self._stream,
                follow=False,
                idle=0.5,
                sync=5.0,
                max_records=scenario.page,
            )
        return Pipeline(name="p", source=source, sink=sink, dead_letters=runner.letters)

    def _judge(self, runner: Runner) -> None:
        report = runner.report
        assert report is not None
        self.tell(f"{runner.owner} is over: {report.status} {report.error or ''}")
        account = report.ledger[-1]
        booked = account.done + account.unprocessed + account.dead
        if report.status != "failed" and booked != account.received:
            self.violate(f"{account.received} records were read, {booked} are booked")
        if report.status == "failed" and not self._may_fail(runner, report.error):
            self.violate(f"{runner.owner} failed: {report.error!r}")
        lettered = [letter.message for letter in runner.letters.kept]
        # With leases, a lost shard's uncommitted records may be dead-lettered again.
        if not self.scenario.leases and len(lettered) > len({*lettered}):
            self.violate(f"{runner.owner} has written two letters of one record")
        rows = self.table.read()
        if not self.scenario.unread and any(r.owner == runner.owner for r in rows):
            self.violate(f"{runner.owner} is over, and has leases")
        ago = self._ago
        for row in rows:
            open_ = not row.ended and not self._reset_since(row.shard, ago)
            if report.status == "done" and self._stream is None and open_:
                self.violate(f"{runner.owner} is done, and {row.shard} has not ended")

    def _may_fail(self, runner: Runner, error: BaseException | None) -> bool:
        if self.sound and self._forgotten > runner.begun:
            return "is gone from the lease table" in str(error)
        # A drained runner doesn't wait for the table.
        if isinstance(error, TableGone) and runner.life.end != "drained":
            return False
        return not self.sound and isinstance(error, EtlstageError)

    @property
    def _ago(self) -> float:
        """The time since which every runner has read the table."""
        return anyio.current_time() - (LOOKS if self.sound else AGO)

    def _reset_since(self, shard: str, time: float) -> bool:
        return any(at > time for at in self._resets.get(shard, ()))

    def _check_whole(self, last: Runner) -> None:
        report = last.report
        assert report is not None
        if report.status != "done":
            raise Violation(f"the last runner is {report.status}: {report.error!r}")
        safe, found = self._safe(), set[int]()
        if not self.scenario.leases:
            self.acknowledge(len(self.messages))
            return
        for lease in self.table.read():
            records, number = self.records_of(lease.shard), number_in(lease.position)
            processed = self._done.get(lease.shard, set())
            for place, message in records.items():
                found.add(message)
                if place not in processed and message not in safe:
                    raise Violation(f"record {message} of {lease.shard} is lost")
                if not lease.ended and place > number and message not in safe:
                    raise Violation(f"{message} of {lease.shard} is not committed")
        if found != set(range(len(self.messages))):
            raise Violation("not every record is in a shard")

    # --- workers --------------------------------------------------------------------

    async def _live_as_processor(self, runner: Runner, worker: ScriptedWorker) -> int:
        processor = Processor(self, runner, worker)
        return await processor.run()

    def begin(self, runner: Runner, shard: str, position: Number) -> None:
        """Judge the position at which a worker begins."""
        row = self.committed(shard)
        self.tell(f"{runner.owner}: a worker of {shard} begins behind {position}")
        ours = row.owner == runner.owner or not self.resets(shard)
        if ours and position > number_in(row.position) and not row.ended:
            self.violate(f"{shard} begins behind {position}, which is not committed")
        for parent in row.parents:
            of = next((one for one in self.table.read() if one.shard == parent), None)
            ago = self._ago
            late = self._reset_since(parent, ago)
            if of is not None and not of.ended and not late:
                self.violate(f"{shard} begins before its parent {parent} has ended")

    def process(self, shard: str, number: Number) -> None:
        """Record that a record is processed."""
        self._done.setdefault(shard, set()).add(number)

    def expected(self, shard: str, after: Number) -> list[Number]:
        """Return the records that may be next; all but the last may be skipped."""
        found = list[Number]()
        for place, message in self.records_of(shard).items():
            if place > after and message >= self._begin:
                found.append(place)
                if message not in self.killers:
                    break
        return found


def simulate(
    draw: Callable[[random.Random], ShardScenario], seeds: Iterable[int]
) -> None:
    """Run each seed's load; raise SimulationFailed for the first that fails."""
    simulation.simulate(draw, seeds, simulation=ShardSimulation)
