"""
A pipeline that is cut at a durable edge, run as a whole, or with its halves apart.

Processes run it one after the other, and at times two at once: one for each half, or a
process whose state was taken over, still alive beside the process that took it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import anyio
import anyio.to_thread

from etlstage.errors import StateUnusable
from etlstage.journal import Journals
from etlstage.messages import Position
from etlstage.pipeline import Report, edge
from etlstage.pipeline.delivery.record import CommitRecord
from etlstage.pipeline.divided import DividedPipeline
from etlstage.pipeline.edge import DurableEdge, Waiting
from etlstage.sequencing import sequencer
from etlstage.testing import simulation
from etlstage.testing.scenario import Violation
from tests.simulate.edge import (
    EdgeScenario,
    EdgeSimulation,
    Files,
    Half,
    Unheard,
    any_halves,
    inline,
)
from tests.simulate.ends import Disk, SimulatedDelivery, SimulatedLetters

__all__ = ("DividedSimulation", "any_divided", "simulate")

STATES: Final = Path("state"), Path("state/edge-a")
WHOLE: Final = 0, 1
MOST: Final = 40
"""Maximal number of processes; hardly a dozen of those that are drawn can fail."""


@dataclass(frozen=True, kw_only=True)
class DividedScenario(EdgeScenario):
    """A pipeline of two stages that is cut between them."""

    starts: Sequence[str] = ()
    """What is started before whole pipelines finish the load: ``whole``; ``apart``,
    both halves in separate processes; ``taken``, a process that takes the state over
    from one that is alive."""


def any_divided(draw: random.Random) -> DividedScenario:
    """Draw a divided pipeline, with any kind of halves."""
    halves = any_halves(draw)
    given = {name: getattr(halves, name) for name in halves.__dataclass_fields__}
    given |= {
        "once": (halves.once[0],) * 2,
        "key": halves.key if halves.partitions > 1 else None,
        "keep": "read",
        "seconds": 60.0,
    }
    kinds = ("whole", "apart", "taken")
    starts = [draw.choice(kinds) for _ in range(draw.randint(0, 4))]
    if "apart" in starts:
        given["limit"] = None  # it would wait for the other half, which may have ended
    return DividedScenario(**given, starts=starts)


class Part(Half):
    """One half in one process."""

    def __init__(self, process: Process, number: int) -> None:
        super().__init__(process.simulation, number)
        self._process = process
        self._whole = process.simulation
        self.disk = self._whole.disks[number]
        self._kept = self._whole.kept
        self.files = Files(self, self._whole.storage)
        self._settled = False

    def die(self, why: str) -> None:
        """End the whole process."""
        self._process.die(why)

    def commit(self, position: Position) -> None:
        """Judge a position, unless another process has taken the state over."""
        if not self._process.stale:
            super().commit(position)

    def record(self, record: CommitRecord) -> None:
        """Judge an epoch; once the load is over, no process may begin another."""
        if self._whole.over and not record.ended:
            self.die("comes too late")
            self.live()
        super().record(record)

    def break_at(self, step: tuple[str, int]) -> None:
        """Set the step to be interrupted at."""
        self._step = step

    def look(self) -> None:
        """Read the dead letters again, as another process has run this half."""
        self._letters = SimulatedLetters(self, self.disk)

    def leave(self, why: str) -> None:
        """End this half: nothing that it does from now on counts."""
        super().die(why)

    def settle(self) -> None:
        """Keep, once, a random part of what isn't durable, unless another took over."""
        if not (self._process.stale or self._settled):
            self._settled = True
            self._leave()

    @property
    def failed(self) -> bool:
        """Whether the disk has failed this half."""
        return self._failed


class MemoryEdge(DurableEdge):
    """An edge with journals in memory, whose operations belong to a process."""

    def __init__(self, process: Process, **settings: Any) -> None:  # noqa: ANN401
        super().__init__("a", *STATES, **settings)
        self._process = process
        self._whole = process.simulation

    @property
    def exists(self) -> bool:
        """Whether the journals exist."""
        return "spec.json" in self._whole.storage.files

    def prepare(self) -> None:
        """Prepare, unless the load is over: the process would begin another load."""
        self._whole.at_work = self._process
        if self._whole.over:
            self._process.die("comes too late")
        self._process.parts[0].live()
        super().prepare()

    def acknowledge(self) -> bool:
        """Commit the recorded epoch."""
        self._whole.at_work = self._process
        free = super().acknowledge()
        record = self._whole.disks[0].record
        ended = record.pending or (record.ended and record.position is None)
        self._process.input_ended = ended and bool(record.load)
        return free

    def unread(self) -> Waiting:
        """Return how much waits."""
        self._whole.at_work = self._process
        return super().unread()

    def full(self) -> bool:
        """Return whether the limit of waiting messages is reached."""
        self._whole.at_work = self._process
        return super().full()

    def settle(self) -> None:
        """Record that the load is over."""
        self._whole.at_work = self._process
        super().settle()

    def renew(self) -> None:
        """Begin another load."""
        self._whole.at_work = self._process
        super().renew()


class Process:
    """A process that runs the pipeline, or one half of it."""

    def __init__(
        self,
        whole: DividedSimulation,
        name: str,
        span: tuple[int, int] = WHOLE,
        *,
        alone: bool = True,
    ) -> None:
        self.simulation = whole
        self.stale = self.dead = False
        self.input_ended = False
        """Whether the first half had passed on all of its input, at the last look."""
        self.span = span
        self._name, self._alone = name, alone
        self._drained = False
        self._divided: DividedPipeline | None = None
        self._report: Report | None = None
        self._scope = anyio.CancelScope()
        self.parts = [Part(self, number) for number in WHOLE]

    async def run(self) -> None:
        """Run the pipeline until it ends or the process dies, and judge it."""
        whole, runs = self.simulation, self.simulation.scenario
        if whole.breaks:
            whole.chance.choice(self.parts).break_at(whole.breaks.pop())
        between = MemoryEdge(
            self,
            partitions=runs.partitions,
            key=runs.key,
            mapping="rendezvous",
            keep=runs.keep,
            limit=runs.limit,
        )
        parts = [part._made() for part in self.parts]
        first, last = self.span
        made = DividedPipeline("p", parts, [between], first=first, last=last)
        self._divided = made
        whole.processes.append(self)
        with self._scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._drain, made)
                self._report = await made.run()
                tasks.cancel_scope.cancel()
        whole.processes.remove(self)
        for part in self.parts[first : last + 1]:
            part.settle()
        if not self.dead:
            self._judge()

    def settle_ended(self) -> None:
        """Settle the halves that have ended: another process may run them now."""
        assert self._divided is not None, "it runs"
        for number in self._divided._reports:
            self.parts[number].settle()

    def die(self, why: str) -> None:
        """End the process: nothing that it does from now on counts."""
        if self.dead:
            return
        self.simulation.tell(f"{self._name} {why}")
        self.dead = True
        for part in self.parts:
            part.leave(why)
        self._scope.cancel()

    async def _drain(self, made: DividedPipeline) -> None:
        if drains := self.simulation.drains:
            await anyio.sleep(drains.pop()[1])
            self.simulation.tell(f"{self._name} is drained")
            self._drained = True
            made.drain()

    def _judge(self) -> None:
        report, name = self._report, self._name
        assert report is not None
        self.simulation.tell(f"{name} is over: {report.status} {report.error!r}")
        failed = any(part.failed for part in self.parts)
        refused = isinstance(report.error, StateUnusable) and not self._alone
        if report.status == "failed":
            if not (failed or refused or self._drained or self.stale):
                raise Violation(f"{name} failed: {report.error!r}")
        elif failed:
            raise Violation(f"{name} is {report.status}, and its disk has failed")
        elif report.status != "done" and not self._drained:
            if self.span != (1, 1) or self.input_ended:
                raise Violation(f"{name} is {report.status} by itself")
        elif report.status == "done" and self.span == (1, 1) and not self.input_ended:
            raise Violation(f"{name} is done, and its input may go on")
        elif report.status == "done" and self.span == WHOLE:
            self.simulation.done |= not self.simulation.scenario.once[1]
            if not self.simulation.over:
                raise Violation(f"{name} is done, and the load is not over")
            self.simulation.check_loaded(self.simulation.loaded, whole=True)


class DividedSimulation(EdgeSimulation):
    """One seed: processes run one after the other, or at the same time."""

    scenario: DividedScenario

    def __init__(
        self,
        draw: Callable[[random.Random], EdgeScenario],
        seed: int,
        **options: bool,
    ) -> None:
        super().__init__(draw, seed, **options)
        self.most = self.scenario.partitions
        self.kept: list[bytes] = []
        """Messages that were loaded, if loading at least once."""
        self.processes: list[Process] = []
        """Live processes."""
        self.at_work: Process
        self.done = False
        self._count = 0

    async def _main(self) -> None:
        self.entered = anyio.Event()
        starts = [*self.scenario.starts]
        patches: tuple[AbstractContextManager[object], ...] = (
            patch.object(anyio.to_thread, "run_sync", inline),
            patch.object(sequencer, "_LOG", Unheard()),
            patch.object(CommitRecord, "latest", lambda at: self._disk(at).record),
            patch.object(edge, "make_ours", lambda _: None),
            patch.object(edge, "unheld", self._unheld),
            patch.object(edge, "Delivery", self._delivery),
            patch.object(edge, "Journals", SimpleNamespace(open=self._open)),
        )
        with (
            ExitStack() as stack,
            anyio.move_on_after(self.scenario.seconds) as patience,
        ):
            for one in patches:
                stack.enter_context(one)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.operated.run)
                while not self.over:
                    if self._count > MOST:
                        raise Violation("no start brings the load to its end")
                    await self._start(starts.pop() if starts else "whole")
                tasks.cancel_scope.cancel()
        self._check_over(None if patience.cancelled_caught else self)
        self.check_loaded(self.loaded, whole=True)
        if self._exact:
            self.operated.check_over(self._between(whole=True))

    async def _start(self, kind: str) -> None:
        """Run the process or processes of one start to their ends."""
        async with anyio.create_task_group() as tasks:
            if kind == "apart":
                for span in self.chance.sample(((0, 0), (1, 1)), 2):
                    tasks.start_soon(self._made(span).run)
                    await anyio.sleep(self.chance.choice((0.0, 0.0, 0.01, 0.3)))
                return
            alone = kind == "whole"
            first = self._made(alone=alone)
            tasks.start_soon(first.run)
            if alone:
                return
            await anyio.sleep(self.chance.choice((0.001, 0.02, 0.1, 0.5, 2.0)))
            if first in self.processes:
                first.settle_ended()
                self._take_over(first)
            tasks.start_soon(self._made(alone=False).run)

    def _made(self, span: tuple[int, int] = WHOLE, *, alone: bool = True) -> Process:
        self._count += 1
        return Process(self, f"process {self._count}", span, alone=alone)

    def _take_over(self, stale: Process) -> None:
        """Take the state over, as ``etlstage state take-over`` does."""
        for disk in self.disks:
            if disk.holder is not None:
                self.tell("the state of a half is taken over")
                if not stale.stale:
                    for part in stale.parts:
                        part.settle()
                stale.stale = True
                disk.record = replace(disk.record, fence=disk.record.fence + 1)
                disk.holder = None

    @property
    def over(self) -> bool:
        """Whether the load is over; only a report shows that for at-least-once."""
        record = self.disks[0].record
        return self.done or (self._exact and bool(record.epoch) and not record.resumes)

    @property
    def loaded(self) -> list[bytes]:
        """Messages that are loaded, and would not be lost now."""
        return self.disks[1].loaded if self._exact else self.kept

    @property
    def _exact(self) -> bool:
        return self.scenario.once[1]

    def _die(self) -> None:
        for process in [*self.processes]:
            process.die("loses power")

    # --- as edges ask ---------------------------------------------------------------

    def _disk(self, folder: Path) -> Disk:
        return self.disks[STATES.index(folder)]

    def _held(self, folder: Path) -> bool:
        return self._disk(folder).holder is not None

    @contextmanager
    def _unheld(self, folder: Path) -> Iterator[bool]:
        yield not self._held(folder)

    def _delivery(self, folder: Path) -> SimulatedDelivery:
        number = STATES.index(folder)
        part = self.at_work.parts[number]
        if number not in self.at_work.span:
            part.look()
        return SimulatedDelivery(part, self.disks[number], part.at, once=self._exact)

    def _open(self, _: Path, **settings: Any) -> Journals:  # noqa: ANN401
        files = self.at_work.parts[0].files
        return Journals(
            storage=files, segment=self.scenario.segment, name="memory", **settings
        )


def simulate(
    draw: Callable[[random.Random], EdgeScenario], seeds: Iterable[int]
) -> None:
    """Run each seed's pipeline; raise SimulationFailed for the first that fails."""
    simulation.simulate(draw, seeds, simulation=DividedSimulation)
