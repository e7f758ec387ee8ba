"""Two halves of a pipeline with journals between them; each dies, and resumes."""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal
from unittest.mock import patch

import anyio
import anyio.to_thread

from etlstage.errors import SourceFailed
from etlstage.journal import CommittedReader, Journals, MemoryStorage
from etlstage.messages import Position, StageKind
from etlstage.pipeline import Pipeline, Report
from etlstage.pipeline.delivery.delivery import Bounds
from etlstage.pipeline.delivery.record import CommitRecord
from etlstage.pipeline.journal_sink import JournalSink
from etlstage.pipeline.journal_source import CUT, JournalSource
from etlstage.pipeline.ledger import COUNTS
from etlstage.sequencing import sequencer
from etlstage.stage import ErrorPolicy, Order, RestartPolicy, Stage, Timeouts
from etlstage.testing import (
    Fault,
    FaultKind,
    FaultPlan,
    MemorySink,
    simulation,
)
from etlstage.testing.scenario import Violation
from tests.simulate.ends import (
    Disk,
    SimulatedDelivery,
    SimulatedEpochSink,
    SimulatedLetters,
    SimulatedSink,
    SimulatedSource,
)
from tests.simulate.operated import Operated, Operation, any_operations
from tests.simulate.pipelines import BREAKS, any_faults, any_stage, any_work
from tests.simulate.run import Crashed
from tests.simulate.scenario import Scenario

__all__ = (
    "EdgeScenario",
    "EdgeSimulation",
    "Files",
    "Half",
    "Unheard",
    "any_halves",
    "halves",
    "inline",
    "simulate",
)

ONCE: Final = ((True, False), (False, True), (False, False))
STEPS: Final = (
    *("begin", "written", "aside", "recorded", "performed"),
    *("append", "torn", "sync"),
)
"""Steps of a commit, and of the journals' disk; ``torn`` is in the midst of appends."""


def twice(name: bytes, message: bytes) -> Iterable[bytes]:
    """Return a stage's outputs for a message: none, one or two, by its number."""
    number = int(message.partition(b"-")[0])
    return [message + b"-" + name, message + b"-" + name.upper()][: (number + 1) % 3]


@dataclass(frozen=True, kw_only=True)
class EdgeScenario(Scenario):
    """Two stages, each in a pipeline of its own, with journals between them."""

    once: tuple[bool, bool] = (True, True)
    """Whether each half loads exactly once, rather than at least once."""
    partitions: int = 1
    drains: Sequence[tuple[int, float]] = ()
    """Halves to drain, with the virtual seconds after which to drain them."""
    cut: tuple[int, int] = CUT
    """Messages and bytes between two positions of the half that reads."""
    segment: int = 64 << 20
    """Bytes after which a new segment of a journal begins."""
    keep: Literal["read"] | None = None
    """Setting of the journals: whether segments that were read are dropped."""
    limit: str | None = None
    """Setting of the journals: how much may wait for the half that reads."""
    key: str | None = None
    """Pointer to the key that determines the journal of a message."""
    operations: Sequence[Operation] = ()
    """What others do with the journals meanwhile."""


def any_halves(draw: random.Random) -> EdgeScenario:
    """Draw two halves with any kind of stages and faults of workers."""
    if draw.random() < 0.3:
        return halves(draw)
    messages = [
        b'[%d,"%d"]' % (draw.randrange(3), n) for n in range(draw.randint(1, 9))
    ]
    stages, plans, given = list[Stage](), dict[str, FaultPlan](), messages
    work = {
        name: partial(any_work, name, draw.randrange(9), draw.randrange(9))
        for name in "ab"
    }
    for name in "ab":
        stages.append(any_stage(draw, name, StageKind.TRANSFORM))
        faults, _, wrong = any_faults(draw, stages[-1], given)
        while wrong:
            faults, _, wrong = any_faults(draw, stages[-1], given)
        plans[name] = FaultPlan(tuple(faults), draw.randrange(2**32))
        given = [out for message in given for out in work[name](message)]
    steps: list[tuple[str, int] | float] = [
        (draw.choice(STEPS), draw.randint(1, 4)) for _ in range(draw.randint(0, 4))
    ]
    made = EdgeScenario(
        messages=messages,
        stages=stages,
        work=work,
        faults=plans,
        position_every=draw.randint(1, 5),
        epoch=Bounds(messages=draw.randint(1, 6), seconds=draw.choice((0.02, 3.0))),
        flush_every=draw.choice((0.5, 3.0)),
        notes=draw.random() < 0.3,
        broken=draw.choice(("", "", "state", *BREAKS)),
        breaks=steps,
        once=draw.choice(((True, True),) * 3 + ONCE),
        partitions=draw.choice((1, 1, 3)),
        drains=[
            (draw.randrange(2), draw.choice((0.0, 0.01, 0.1, 1.0)))
            for _ in range(draw.choice((0, 0, 1, 3)))
        ],
        cut=draw.choice((CUT, (1, 1 << 20), (3, 1 << 20), (1 << 16, 20))),
        segment=draw.choice((1, 100, 1000, 64 << 20)),
        keep=draw.choice((None, "read")),
        limit=draw.choice((None, None, "1B", "300B")),
        key=draw.choice((None, "/0")),
        pipe_size=draw.choice((65536, 65536, 65536, 8, 40)),
        seconds=1000.0,
    )
    operations = any_operations(draw, limited=made.limit is not None)
    return replace(made, operations=operations)


def halves(draw: random.Random) -> EdgeScenario:
    """Draw two simple stages, and where their halves are interrupted."""
    stages, faults = [], {}
    for name in "ab":
        stages.append(
            Stage(
                name=name,
                worker=("simulated",),
                timeout=Timeouts(message=2.0, stop=0.1),
                restart=RestartPolicy(max=1000, delay=0.01, max_delay=0.05),
                on_error=ErrorPolicy(retries=2),
            )
        )
        slow = Fault(FaultKind.PAUSE, probability=0.2, seconds=0.05)
        kill = Fault(FaultKind.KILL, message=draw.randint(1, 5), start=1)
        plan = draw.choice(((), (slow,), (kill,), (slow, kill)))
        faults[name] = FaultPlan(plan, draw.randrange(2**32))
    steps = [
        (draw.choice(STEPS), draw.randint(1, 4)) for _ in range(draw.randint(0, 6))
    ]
    return EdgeScenario(
        messages=[b"%d" % n for n in range(draw.randint(1, 20))],
        stages=stages,
        work={"a": lambda m: twice(b"a", m), "b": lambda m: twice(b"b", m)},
        faults=faults,
        position_every=draw.randint(1, 5),
        epoch=Bounds(messages=draw.randint(1, 6), seconds=draw.choice((0.02, 60.0))),
        broken=draw.choice(("", "", "state")),
        breaks=steps,
        partitions=draw.choice((1, 1, 3)),
        seconds=100.0,
    )


class Files(MemoryStorage):
    """One half's view of the shared disk; nothing that a dead half does counts."""

    def __init__(self, half: Half, shared: MemoryStorage) -> None:
        super().__init__()
        self._half = half
        self.__dict__.update(
            {
                name: shared.__dict__[name]
                for name in ("files", "synced", "_locks", "_held", "_numbers")
            }
        )

    def append(self, path: str, *parts: bytes) -> None:
        """Append, or be interrupted before or in the middle of it."""
        self._half.at("append")
        data = b"".join(parts)
        most = self._half.chance.randrange(len(data))
        super().append(path, data[:most])
        self._half.at("torn")
        self._half.fail()
        super().append(path, data[most:])

    def truncate(self, path: str, size: int) -> None:
        """Cut a file."""
        if not self._half.dead:
            super().truncate(path, size)

    def sync(self, path: str) -> None:
        """Make the file durable, or be interrupted before that."""
        if not self._half.dead:
            self._half.at("sync")
            self._half.fail()
            super().sync(path)

    def remove(self, path: str) -> None:
        """Remove a file."""
        if not self._half.dead:
            super().remove(path)

    def replace(self, path: str, data: bytes) -> None:
        """Set the content of a file."""
        if not self._half.dead:
            self._half.fail()
            super().replace(path, data)


class Unheard:
    """A log that must stay empty: an entry would be a loss of exactly-once."""

    def error(self, text: str, *given: object) -> None:
        """Raise Violation."""
        raise Violation(text % given)


class EdgeSink(JournalSink):
    """A sink that appends to journals in memory."""

    def __init__(
        self, half: Half, storage: MemoryStorage, *, most: int | None = None
    ) -> None:
        runs = half.scenario
        super().__init__(
            Path("edge"),
            name="edge",
            key=runs.key,
            mapping="rendezvous",
            partitions=runs.partitions,
            keep=runs.keep,
            limit=runs.limit,
            most=most,
        )
        self._settings |= {"storage": storage, "segment": runs.segment}  # type: ignore[dict-item]
        self._half = half

    async def flush(self) -> None:
        """Flush, and take some time, or none, before the epoch is recorded."""
        await super().flush()
        await self._half.pause()

    def _enter(self) -> None:
        super()._enter()
        if not self._journals.readers():
            # Register the reader, so that everything is kept for it from the beginning.
            self._journals.read_committed("behind").close()
        self._half.simulation.entered.set()


class EdgeSource(JournalSource):
    """A source that reads journals in memory."""

    def __init__(self, half: Half, storage: MemoryStorage) -> None:
        follow = not half.simulation.complete
        super().__init__(
            Path("edge"),
            name="edge",
            reader="behind",
            follow=follow,
            cut=half.scenario.cut,
        )
        self._half = half
        self._storage = storage

    def _open(self) -> CommittedReader:
        opened = Journals(storage=self._storage, create=False)
        with patch.object(Journals, "open", lambda *_, **__: opened):
            return super()._open()

    async def acknowledge(self, position: Position) -> None:
        """Have the position judged."""
        self._half.commit(position)
        await super().acknowledge(position)


class Half:
    """One half, over all its starts; it serves as the ``Watch`` of its ends."""

    def __init__(self, simulation: EdgeSimulation, number: int) -> None:
        self.simulation = simulation
        self.scenario: EdgeScenario = simulation.scenario
        self.chance: random.Random = simulation.chance
        self.once: bool = self.scenario.once[number]
        self.disk = Disk()
        self.runs: list[str] = []
        """Ids of the runs that have recorded epochs."""
        self.starts = 0
        self.dead: Crashed | None = None
        self.over = False
        self.source: EdgeSource | None = None
        self._number = number
        self._position: object = None  # last position, if loading at least once
        self._kept: list[bytes] = []  # likewise: the messages loaded by earlier starts
        self._step = "", 0
        self._failed = self._drained = False
        self._scope: anyio.CancelScope | None = None
        self._letters: SimulatedLetters
        self._sink: MemorySink | None = None

    async def run(self) -> None:
        """Start the half again and again, until it has come to its end."""
        while not self.over:
            if self._number:
                await self.simulation.entered.wait()
            breaks, step = self.simulation.breaks, ("", 0)
            if breaks:
                step = breaks.pop()
            self.dead, self._failed, self._step = None, False, step
            self._drained, self.starts = False, self.starts + 1
            report = None
            with anyio.CancelScope() as self._scope:
                async with anyio.create_task_group() as tasks:
                    pipeline = self._made()
                    tasks.start_soon(self._drain, pipeline)
                    report = await pipeline.run()
                    tasks.cancel_scope.cancel()
            self._leave()
            if self.dead is None:
                assert report is not None
                self._judge(report)
            # After its end the half would begin a new load.
            record = self.disk.record
            ended = bool(record.epoch and record.ended and not record.pending)
            whole = report is not None and report.status == "done"
            self.over = (ended and record.position is None) or (
                whole and self.dead is None
            )

    @property
    def loaded(self) -> list[bytes]:
        """Messages that are loaded, and would not be lost now; valid between starts."""
        return self.disk.loaded if self.once else self._kept

    def _judge(self, report: Report) -> None:
        self.simulation.tell(f"half {self._number} is over: {report.status}")
        # A drain doesn't wait for a worker that has never replied.
        may_fail = self._failed or (self._drained and not self.once)
        may_fail |= self._drained and isinstance(report.error, SourceFailed)
        if self._failed and report.status != "failed":
            raise Violation(f"half {self._number} {report.status}, its end has failed")
        if report.status == "failed" and not may_fail:
            raise Violation(f"half {self._number} failed: {report.error!r}")
        if report.status == "drained" and not self._drained:
            raise Violation(f"half {self._number} is drained by itself")

    def _leave(self) -> None:
        """Keep a random part of what was not made durable, as a crash does."""
        letters = self._letters.kept
        sizes = self._letters.durable, len(letters)
        self.disk.letters = letters[: self.chance.randint(*sizes)]
        if self._sink is not None and not self.once:
            loaded = self._sink.messages
            sizes = self._sink.account.done, len(loaded)
            self._kept += loaded[: self.chance.randint(*sizes)]

    async def _drain(self, pipeline: Pipeline) -> None:
        drains = self.simulation.drains
        mine = next((one for one in drains if one[0] == self._number), None)
        if mine is not None:
            drains.remove(mine)
            await anyio.sleep(mine[1])
            self.simulation.tell(f"half {self._number} is drained")
            self._drained = True
            pipeline.drain()

    def _made(self) -> Pipeline:
        simulation, number = self.simulation, self._number
        files = Files(self, simulation.storage)
        self._letters = SimulatedLetters(self, self.disk)
        options: dict[str, Any] = {
            "name": f"half {number}",
            "stages": [self.scenario.stages[number]],
            "dead_letters": self._letters,
            "launch": simulation._launch,
            "flush_every": self.scenario.flush_every,
        }
        if self.once or self.simulation.most:
            options["delivery"] = SimulatedDelivery(
                self, self.disk, self.at, once=self.once
            )
        if not number:
            source = SimulatedSource(self, self.scenario)
            if not self.once and not self.simulation.most:
                source.resume(self._position)
            sink = EdgeSink(self, files, most=self.simulation.most)
            return Pipeline(source=source, sink=sink, **options)
        self.source = EdgeSource(self, files)
        self._sink = (
            SimulatedEpochSink(self, self.disk) if self.once else SimulatedSink(self)
        )
        return Pipeline(source=self.source, sink=self._sink, **options)

    def at(self, step: str) -> None:
        """Die if this is the step to die at; at times the whole machine loses power."""
        self.live()
        name, left = self._step
        self._step = name, left - (step == name)
        if self._step != (step, 0):
            return
        self.die(f"breaks off at {step}")
        if self.chance.random() < 0.4:
            self.simulation.lose_power()
        self.live()

    def die(self, why: str) -> None:
        """End this start: nothing that it does from now on counts."""
        if self.dead is None:
            self.simulation.tell(f"half {self._number} {why}")
            self.dead = Crashed(why)
            if self._scope is not None:
                self._scope.cancel()

    def fail(self) -> None:
        """Raise OSError if the disk must fail now."""
        left = self.simulation.faults
        if left and self.chance.random() < 0.1:
            self.simulation.faults -= 1
            self._failed = True
            self.simulation.tell(f"the disk fails half {self._number}")
            raise OSError(errno.EIO, "Input/output error")

    # --- as ends ask ----------------------------------------------------------------

    async def pause(self) -> None:
        """Take some time, or none."""
        await anyio.sleep(self.chance.choice((0.0, 0.0, 0.001, 0.03)))

    def use(self, end: str) -> None:
        """Raise OSError if an end must fail now."""
        if end == self.scenario.broken:
            self.fail()

    def survives(self) -> bool:
        """Return whether what a disk failed to store is there after all."""
        return self.chance.random() < 0.5

    def live(self) -> None:
        """Raise the error that interrupted this start, if it was interrupted."""
        if self.dead is not None:
            raise self.dead

    def commit(self, position: Position) -> None:
        """Judge a position that is acknowledged."""
        self.use("commit")
        if self.dead is not None:
            return
        if not self.once:
            self._position = position.value
            return
        if position.value != self.disk.record.position:
            raise Violation(f"position {position.value} is acknowledged, not recorded")
        if not self._number:
            self.simulation.check_intents(self.disk.record)

    def record(self, record: CommitRecord) -> None:
        """Judge an epoch that is about to be recorded."""
        if record.run not in self.runs:
            self.runs.append(record.run)
        self._letters.safe_of(record.letters)
        if self._number:
            self.simulation.check_loaded(self.disk.loaded_by(record), whole=False)


class EdgeSimulation(simulation.Simulation[EdgeScenario]):
    """Both halves at once; they share only the journals."""

    def __init__(
        self, draw: Callable[[random.Random], EdgeScenario], seed: int, **options: bool
    ) -> None:
        super().__init__(draw, seed, **options)
        self.chance: random.Random = self._draw
        self.breaks = [step for step in self.scenario.breaks if isinstance(step, tuple)]
        self.drains = [*self.scenario.drains]
        self.faults = 4 if self.scenario.broken else 0
        self.storage = MemoryStorage()
        self.entered: anyio.Event
        self.complete = False
        self.most: int | None = None
        """The number of journals of the edge, if it cuts a pipeline."""
        self.operated: Operated = Operated(
            lambda: Journals(storage=self.storage, create=False),
            self._may_be_appended,
            self.scenario.operations,
            random.Random(f"{seed} operated"),  # noqa: S311
        )
        self._halves = [Half(self, number) for number in range(2)]
        self.disks: list[Disk] = [half.disk for half in self._halves]

    async def _main(self) -> None:
        self.entered = anyio.Event()
        first, second = self._halves
        with (
            patch.object(anyio.to_thread, "run_sync", inline),
            patch.object(sequencer, "_LOG", Unheard()),
            anyio.move_on_after(self.scenario.seconds) as patience,
        ):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(second.run)
                tasks.start_soon(self.operated.run)
                await first.run()
                self.complete = True
                if second.source is not None:
                    second.source.complete()
        self._check_over(None if patience.cancelled_caught else self)
        self.check_loaded(second.loaded, whole=True)
        if first.once:
            self.operated.check_over(self._between(whole=True))
            self._check_kept()
        if not first.once or not second.once or len(first.runs + second.runs) > 2:
            return
        appended = first.disk.record.accounts["edge"][COUNTS.index("done")]
        read = second.disk.record.accounts["edge"][COUNTS.index("produced")]
        if appended != read:
            raise Violation(f"{appended} messages were appended, and {read} read")

    def _check_kept(self) -> None:
        """Assert that no reader needs an open transaction: each one has an end."""
        with Journals(storage=self.storage, create=False) as journals:
            for reader in journals.readers():
                if any(state.begin >= 0 for state in reader.checkpoint.states):
                    raise Violation(f"{reader.name} needs what is never committed")

    def _die(self) -> None:
        for half in self._halves:
            half.die("loses power")

    def lose_power(self) -> None:
        """End both halves, and drop a random part of what was not synced."""
        self._die()
        for path, file in self.storage.files.items():
            if path.endswith(".log"):
                synced = self.storage.synced.get(path, 0)
                del file[self.chance.randint(synced, len(file)) :]

    def check_intents(self, record: CommitRecord) -> None:
        """Assert that a crash could not undo the commit of a recorded epoch."""
        safe = [
            bytes(file[: self.storage.synced.get(path, 0)])
            for path, file in self.storage.files.items()
            if path.endswith(".log")
        ]
        for _, intent in record.intents or ():  # type: ignore[attr-defined]
            if not any(bytes.fromhex(intent) in data for data in safe):
                raise Violation(
                    "a position is acknowledged before its intents are safe"
                )

    def check_loaded(self, loaded: Sequence[bytes], *, whole: bool) -> None:
        """Assert that the stages' outputs are loaded, each once if that is promised."""
        wanted = self._wanted(whole=whole)
        exact = self._exact
        if exact and (many := Counter(loaded) - Counter(wanted)):
            raise Violation(f"{[*many]} is loaded too often")
        if whole and (few := Counter(wanted) - Counter(loaded)):
            raise Violation(f"{[*few]} is lost")
        if exact:
            given = {*loaded}
            self._check_order(loaded, [one for one in wanted if one in given])

    @property
    def _exact(self) -> bool:
        """Whether each message must be loaded exactly once."""
        return all(half.once or half.starts == 1 for half in self._halves)

    def _check_order(self, loaded: Sequence[bytes], wanted: Sequence[bytes]) -> None:
        """Assert the order of all messages, or of each key's, where it is promised."""
        orders = {stage.order for stage in self.scenario.stages}
        whole = self.scenario.partitions == 1
        if whole and orders == {Order.TOTAL} and [*loaded] != [*wanted]:
            raise Violation("order")
        if (whole or self.scenario.key) and Order.NONE not in orders:
            for key in {one[:2] for one in wanted}:
                mine = [one for one in loaded if one[:2] == key]
                if mine != [one for one in wanted if one[:2] == key]:
                    raise Violation(f"order of {key!r}")

    def _wanted(self, *, whole: bool) -> list[bytes]:
        """Return all messages to load; if not ``whole``, with those refused."""
        dead = self._dead(1) if whole else set()
        b = self.scenario.work["b"]
        between = self._between(whole=whole)
        return [two for one in between if one not in dead for two in b(one)]

    def _between(self, *, whole: bool) -> list[bytes]:
        """Return all messages to append; if not ``whole``, with those refused."""
        dead = self._dead(0) if whole else set()
        a = self.scenario.work["a"]
        return [m for one in self.scenario.messages if one not in dead for m in a(one)]

    def _dead(self, number: int) -> set[bytes]:
        return {one.message for one in self.disks[number].letters}

    def _may_be_appended(self) -> list[bytes] | None:
        first = self._halves[0]
        exact = self.scenario.once[0] or first.starts == 1
        return self._between(whole=False) if exact else None


async def inline(call: Callable[..., Any], *arguments: Any, **_: Any) -> Any:  # noqa: ANN401
    """Call a function directly, as a thread would run outside virtual time."""
    return call(*arguments)


def simulate(
    draw: Callable[[random.Random], EdgeScenario], seeds: Iterable[int]
) -> None:
    """Run two halves for each seed; raise SimulationFailed for the first that fails."""
    simulation.simulate(draw, seeds, simulation=EdgeSimulation)
