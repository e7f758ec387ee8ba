"""Two halves of a pipeline and the journals between them: each dies, and goes on."""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import anyio
import anyio.to_thread
import pytest

from etlstage.journal import CommittedReader, Journals, MemoryStorage
from etlstage.messages import Position
from etlstage.pipeline import Pipeline, journal_sink
from etlstage.pipeline.delivery.delivery import Bounds
from etlstage.pipeline.delivery.record import CommitRecord
from etlstage.pipeline.interfaces import Epochs
from etlstage.pipeline.journal_sink import JournalSink
from etlstage.pipeline.journal_source import JournalSource
from etlstage.pipeline.ledger import COUNTS
from etlstage.stage import ErrorPolicy, RestartPolicy, Stage, Timeouts
from etlstage.testing import (
    Fault,
    FaultKind,
    FaultPlan,
    MemoryDeadLetters,
    SimulationFailed,
    simulation,
)
from etlstage.testing.scenario import Violation
from tests.simulate.ends import (
    Disk,
    SimulatedDelivery,
    SimulatedEpochSink,
    SimulatedSource,
)
from tests.simulate.run import Crashed
from tests.simulate.scenario import Scenario

pytestmark = pytest.mark.core

SOME: Final = range(40)
STEPS: Final = (
    *("begin", "written", "aside", "recorded", "performed"),
    *("append", "torn", "sync"),
)
"""Of a commit, and of the disk of the journals; ``torn`` is within an append."""


def twice(name: bytes, message: bytes) -> Iterable[bytes]:
    """Return what a stage makes of a message: two of one of them, none of another."""
    number = int(message.partition(b"-")[0])
    return [message + b"-" + name, message + b"-" + name.upper()][: (number + 1) % 3]


def halves(draw: random.Random) -> Scenario:
    """Draw two stages, and where the halves that they are in break off."""
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
    return Scenario(
        messages=[b"%d" % n for n in range(draw.randint(1, 20))],
        stages=stages,
        work={"a": lambda m: twice(b"a", m), "b": lambda m: twice(b"b", m)},
        faults=faults,
        position_every=draw.randint(1, 5),
        epoch=Bounds(messages=draw.randint(1, 6), seconds=draw.choice((0.02, 60.0))),
        broken=draw.choice(("", "", "state")),
        breaks=steps,
        seconds=100.0,
    )


class Files(MemoryStorage):
    """What one half sees of the disk that both have: nothing it does when dead counts."""

    def __init__(self, half: Half, shared: MemoryStorage) -> None:
        super().__init__()
        self._half = half
        self.__dict__.update(
            {name: shared.__dict__[name] for name in ("files", "synced", "_locks")}
        )

    def append(self, path: str, *parts: bytes) -> None:
        """Append, or break off before it or in the middle."""
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
        """Record how long the file is, or break off before that."""
        if not self._half.dead:
            self._half.at("sync")
            self._half.fail()
            super().sync(path)

    def replace(self, path: str, data: bytes) -> None:
        """Set the content of a file."""
        if not self._half.dead:
            super().replace(path, data)


class EdgeSink(JournalSink):
    """Appends to journals in memory."""

    def __init__(self, half: Half, storage: MemoryStorage, partitions: int) -> None:
        super().__init__(Path("edge"), name="edge", partitions=partitions)
        self._settings["storage"] = storage  # type: ignore[assignment]
        self._half = half

    def _enter(self) -> None:
        super()._enter()
        self._half.simulation.entered.set()


class EdgeSource(JournalSource):
    """Reads them."""

    def __init__(self, half: Half, storage: MemoryStorage) -> None:
        follow = not half.simulation.complete
        super().__init__(Path("edge"), name="edge", reader="behind", follow=follow)
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
    """One half, over all its starts; it is what the ends of the other simulation ask."""

    def __init__(self, simulation: EdgeSimulation, number: int) -> None:
        self.simulation = simulation
        self.scenario: Scenario = simulation.scenario
        self.chance: random.Random = simulation.chance
        self.disk = Disk()
        self.dead: Crashed | None = None
        self.over = False
        self._number = number
        self._step = "", 0
        self._failed = False
        self._scope: anyio.CancelScope | None = None
        self.source: EdgeSource | None = None

    async def run(self) -> None:
        """Start it until it has come to its end."""
        while not self.over:
            if self._number:
                await self.simulation.entered.wait()
            breaks, step = self.simulation.breaks, ("", 0)
            if breaks:
                step = breaks.pop()
            self.dead, self._failed, self._step = None, False, step
            report = None
            with anyio.CancelScope() as self._scope:
                report = await self._made().run()
            if self.dead is None:
                assert report is not None
                self.simulation.tell(f"half {self._number} is over: {report.status}")
                if report.status != ("failed" if self._failed else "done"):
                    raise Violation(
                        f"half {self._number} {report.status}: {report.error}"
                    )
            # Behind its end it would begin anew.
            record = self.disk.record
            ended = bool(record.epoch and record.ended and not record.pending)
            self.over = ended or not (self.dead or self._failed)

    def _made(self) -> Pipeline:
        simulation, number = self.simulation, self._number
        files = Files(self, simulation.storage)
        options: dict[str, Any] = {
            "name": f"half {number}",
            "stages": [self.scenario.stages[number]],
            "dead_letters": MemoryDeadLetters(),
            "launch": simulation._launch,
            "delivery": SimulatedDelivery(self, self.disk, self.at),
        }
        if not number:
            source = SimulatedSource(self, self.scenario)
            sink = EdgeSink(self, files, simulation.partitions)
            return Pipeline(source=source, sink=sink, **options)
        self.source = EdgeSource(self, files)
        sink_behind = SimulatedEpochSink(self, self.disk)
        return Pipeline(source=self.source, sink=sink_behind, **options)

    def at(self, step: str) -> None:
        """Break off, if that is to be now; the machine with both halves, at times."""
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
        """Have nothing that this start does count from now on."""
        if self.dead is None:
            self.simulation.tell(f"half {self._number} {why}")
            self.dead = Crashed(why)
            if self._scope is not None:
                self._scope.cancel()

    def fail(self) -> None:
        """Raise OSError, if the disk is to fail now."""
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
        """Raise OSError, if that end is to fail now."""
        if end == "state":
            self.fail()

    def survives(self) -> bool:
        """Return whether what a disk failed to store is there after all."""
        return self.chance.random() < 0.5

    def live(self) -> None:
        """Raise what broke this start off."""
        if self.dead is not None:
            raise self.dead

    def commit(self, position: Position) -> None:
        """Judge a position that is acknowledged."""
        if self.dead is not None:
            return
        if position.value != self.disk.record.position:
            raise Violation(f"position {position.value} is acknowledged, not recorded")
        if not self._number:
            self.simulation.check_intents(self.disk.record)

    def record(self, record: CommitRecord) -> None:
        """Judge an epoch that is about to be recorded."""
        if self._number:
            self.simulation.check_loaded(self.disk.loaded_by(record), whole=False)


class EdgeSimulation(simulation.Simulation[Scenario]):
    """Both halves at once; they share nothing but the journals, and who has them runs."""

    def __init__(
        self, draw: Callable[[random.Random], Scenario], seed: int, **options: bool
    ) -> None:
        super().__init__(draw, seed, **options)
        self.chance: random.Random = self._draw
        self.breaks = [step for step in self.scenario.breaks if isinstance(step, tuple)]
        self.faults = 4 if self.scenario.broken else 0
        self.partitions: int = self._draw.choice((1, 1, 3))
        self.storage = MemoryStorage()
        self.entered: anyio.Event
        self.complete = False
        self._halves = [Half(self, number) for number in range(2)]

    async def _main(self) -> None:
        self.entered = anyio.Event()
        first, second = self._halves
        with (
            patch.object(anyio.to_thread, "run_sync", _inline),
            anyio.move_on_after(self.scenario.seconds) as patience,
        ):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(second.run)
                await first.run()
                self.complete = True
                if second.source is not None:
                    second.source.complete()
        self._check_over(None if patience.cancelled_caught else self)
        self.check_loaded(second.disk.loaded, whole=True)
        appended = first.disk.record.accounts["edge"][COUNTS.index("done")]
        read = second.disk.record.accounts["edge"][COUNTS.index("produced")]
        if appended != read:
            raise Violation(f"{appended} messages were appended, and {read} read")

    def lose_power(self) -> None:
        """End both halves, and drop some of what was not forced to the disk."""
        for half in self._halves:
            half.die("loses power")
        for path, file in self.storage.files.items():
            if path.endswith(".log"):
                synced = self.storage.synced.get(path, 0)
                del file[self.chance.randint(synced, len(file)) :]
        if not self._halves[0].over and self.entered.is_set():
            # As a run does that has both: what is recorded is committed first.
            self.entered = anyio.Event()

    def check_intents(self, record: CommitRecord) -> None:
        """Assert that what is recorded would be committed behind a crash, too."""
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

    def check_loaded(self, loaded: list[bytes], *, whole: bool) -> None:
        """Assert that it is what the stages make, each once."""
        a, b = self.scenario.work["a"], self.scenario.work["b"]
        wanted = [two for one in self.scenario.messages for m in a(one) for two in b(m)]
        if many := Counter(loaded) - Counter(wanted):
            raise Violation(f"{[*many]} is loaded too often")
        if whole and (few := Counter(wanted) - Counter(loaded)):
            raise Violation(f"{[*few]} is lost")
        if self.partitions == 1 and loaded != wanted[: len(loaded)]:
            raise Violation("order")


async def _inline(call: Callable[..., Any], *arguments: Any, **_: Any) -> Any:  # noqa: ANN401
    """Do at once what is for a thread: one would be beyond virtual time."""
    return call(*arguments)


def simulate(seeds: Iterable[int] = SOME) -> None:
    """Run two halves for each seed."""
    simulation.simulate(halves, seeds, simulation=EdgeSimulation)


def test_each_message_passes_an_edge_once() -> None:
    """In a sample, wherever the halves, or the machine, break off (issue 24)."""
    simulate()


append_intents = journal_sink.append_intents


def forget(sink: JournalSink, epochs: Epochs) -> None:
    """Begin without what is recorded."""
    sink._once = epochs.once


def leave(journals: Journals, intents: Iterable[Any], *, stage: str) -> None:
    """Append what acknowledges an epoch, and force nothing to the disk."""
    with patch.object(Journals, "sync"):
        append_intents(journals, intents, stage=stage)


PLANTED = {
    "recorded intents are not appended at the start": (
        (JournalSink, "begin", forget),
        "is lost",
    ),
    "positions do not wait for intents": (
        (journal_sink, "append_intents", leave),
        "acknowledged before its intents are safe",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bug_is_found(name: str) -> None:
    """And by no seed where there is none (issue 24)."""
    bug, why = PLANTED[name]
    with patch.object(*bug), pytest.raises(SimulationFailed, match=why) as found:
        simulate()
    simulate([found.value.seed])
