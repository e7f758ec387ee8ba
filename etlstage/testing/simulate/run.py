"""
One seed: the scenario that it draws, run in virtual time, watched and judged.

Whatever is left to chance is drawn from the seed: the scenario, the order in which
tasks go on, how long the ends take, and what etlstage itself draws. So it runs again
the same, in any process.
"""

from __future__ import annotations

import errno
import json
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing

import anyio

from etlstage.errors import LedgerImbalance, RepliesDoubtful
from etlstage.messages import Position, Run
from etlstage.pipeline import (
    DeadLetter,
    Pipeline,
    Report,
    Sink,
    Source,
    WorkerSink,
    WorkerSource,
)
from etlstage.stage import Stage
from etlstage.testing.ends import MemoryDeadLetters, MemorySink, MemorySource
from etlstage.testing.fault import FaultPlan
from etlstage.testing.scripted import ScriptedLaunch, ScriptedWorker
from etlstage.testing.simulate import backend
from etlstage.testing.simulate.control import chance, logged, no_garbage
from etlstage.testing.simulate.loop import Loop
from etlstage.testing.simulate.oracle import Oracle, Violation
from etlstage.testing.simulate.scenario import Scenario
from etlstage.testing.simulate.worker import SimulatedWorker, Work
from etlstage.transport import Launch
from etlstage.transport.base import Child, LaunchRequest, Wire, describe_status

__all__ = ("Draw", "SimulationFailed", "simulate", "simulate_all")

Draw = Callable[[random.Random], Scenario]
"""Draws what a seed runs, from that alone."""


class SimulationFailed(AssertionError):
    """
    Raised for a seed whose run broke a promise; the text is the story of it.

    Attributes:
        seed: The seed.
        why: What was not as promised.
        story: What happened, in order, each line with its virtual time.

    """

    def __init__(self, seed: int, why: str, story: Iterable[str]) -> None:
        self.seed = seed
        self.why = why
        self.story: tuple[str, ...] = tuple(story)
        super().__init__(f"seed {seed}: {why}\n  " + "\n  ".join(self.story))


def simulate(draw: Draw, seeds: Iterable[int] = range(1000)) -> None:
    """
    Run pipelines in virtual time, one for each seed, and judge each.

    Every message has one outcome, replies are those of their messages, order is kept
    where it was promised, no position is stored before all that it covers is durable,
    and the run is over in time, with no worker left.

    Args:
        draw: Draws what to run. What it is given is the only chance that it may use.
        seeds: Which to run.

    Raises:
        SimulationFailed: For the first seed whose run breaks one of these promises.

    """
    with no_garbage() as collect:
        for seed in seeds:
            why = _Simulation(draw, seed).run()
            if why:
                again = _Simulation(draw, seed, told=True)
                found = again.run()
                if found != why:
                    again.tell(f"the first time it was: {why}")
                raise SimulationFailed(seed, why, again.story)
            collect()


def simulate_all(draw: Draw, seeds: range) -> tuple[list[str], float]:
    """Return the stories of all seeds that fail, and the processor time of all."""
    began, stories = time.process_time(), list[str]()
    while seeds:
        try:
            simulate(draw, seeds)
        except SimulationFailed as error:
            stories.append(str(error))
            seeds = range(error.seed + 1, seeds.stop)
        else:
            break
    return stories, time.process_time() - began


class _Simulation:
    """One seed, run once."""

    def __init__(self, draw: Draw, seed: int, *, told: bool = False) -> None:
        self._seed = seed
        # The choices of the scenario are apart from those of its run, so that a
        # scenario that is drawn with one fault less is run nearly the same.
        self.scenario: Scenario = draw(random.Random(f"{seed}"))  # noqa: S311
        self._draw = random.Random(f"{seed} run")  # noqa: S311
        self._told = told
        self._loop = Loop(self._draw)
        self.story: list[str] = []
        self._oracle = Oracle(self.scenario)
        self._letters = _Letters(self)
        self._scripted = ScriptedLaunch(self._script, pipe_size=self.scenario.pipe_size)
        self._calls = 0  # of the end that is broken
        self._stages = {stage.name: stage for stage in self.scenario.stages}
        self._loaded: list[bytes] = []  # by workers
        self._tries: Counter[tuple[str, bytes]] = Counter()
        # By stage: which message was processed first, and so on.
        self._processed: dict[str, dict[bytes, int]] = {}
        self._memory = _Sink(self)
        self._pipeline = self._make()
        self._violation = ""
        self._doubted: Violation | None = None
        self._made_up = False

    def run(self) -> str:
        """Return what was not as promised, or nothing."""
        with chance(self._seed), logged(self.tell if self._told else None):
            try:
                backend.run(self._loop, self._run)
            except (Violation, LedgerImbalance) as error:
                self.violate(str(error))
            except Exception as error:
                self.violate(f"internal error: {error!r}")
        return self._violation

    def tell(self, text: str) -> None:
        """Add a line to the story, if it is to be told."""
        if self._told:
            self.story.append(f"{self._loop.now:9.3f} s  {text}")

    def violate(self, why: str) -> None:
        """Take note of the first promise that is broken."""
        self._violation = self._violation or why
        self.tell(f"VIOLATION: {why}")

    async def pause(self) -> None:
        """Take some time, or none."""
        seconds = self._draw.choice((0.0, 0.0, 0.0, 0.001, 0.03))
        if seconds:
            await anyio.sleep(seconds)

    def use(self, end: str) -> None:
        """Raise OSError, if that end is to fail now."""
        if end == self.scenario.broken:
            self._calls += 1
            if self._calls == self.scenario.broken_at + 1:
                self.tell(f"the {end} fails")
                raise OSError(f"the {end} is broken")

    def commit(self, position: Position) -> None:
        """Judge a position that is about to be stored."""
        self.use("commit")
        value = position.value
        assert isinstance(value, int)
        self.tell(f"position {value} is stored")
        durable = self._memory.messages[: self._memory.account.done]
        letters = self._letters.kept[: self._letters.durable]
        try:
            self._oracle.check_commit(value, [*durable, *self._loaded], letters)
        except Violation as error:
            if self._pipeline.doubtful or not self.scenario.may_fail:
                self.violate(str(error))
            else:
                # What shows that a reply was another's may come later.
                self._doubted = self._doubted or error

    # --- inside -------------------------------------------------------------

    def _launch(self, request: LaunchRequest) -> tuple[Wire, Child]:
        if request.start in self.scenario.starts_that_fail.get(request.stage, ()):
            self.tell(f"{request.worker}: start {request.start} fails")
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        return self._scripted(request)

    def _make(self) -> Pipeline:
        scenario, letters, launch = self.scenario, self._letters, self._launch
        source: Source = _Source(self, scenario)
        if scenario.source is not None:
            source = _Extracting(self, scenario.source, launch)
        sink: Sink = self._memory
        if scenario.sink is not None:
            sink = WorkerSink(scenario.sink, dead_letters=letters, launch=launch)
        return Pipeline(
            name="simulated",
            source=source,
            stages=scenario.between,
            sink=sink,
            flush_every=scenario.flush_every,
            dead_letters=letters,
            launch=launch,
        )

    async def _run(self) -> None:
        scenario, report = self.scenario, None
        with anyio.move_on_after(scenario.seconds) as patience:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._end, scope)
                    report = await self._pipeline.run()
                    tasks.cancel_scope.cancel()
        for worker in self._scripted.running:
            raise Violation(f"{worker.name} was left behind")
        if patience.cancelled_caught:
            raise Violation(f"the run was not over within {scenario.seconds:g} s")
        if report is None:
            self._check_cancelled()
        else:
            self.tell(f"the run is over: {report.status}")
            if self._made_up:
                return  # replies are those of other messages, and nobody can know
            if self._calls > scenario.broken_at and report.status != "failed":
                raise Violation(
                    f"the run is {report.status}, although the {scenario.broken} failed"
                )
            if self._doubted and not isinstance(report.error, RepliesDoubtful):
                raise self._doubted
            self._oracle.check_end(
                report, self._arrived, self._letters.kept, self._processed
            )

    def _check_cancelled(self) -> None:
        self.tell("the run is cancelled")
        if self.scenario.may_fail:
            return  # whether a reply was another's, it had no time to tell
        report: Report = self._pipeline.report("failed")
        extracted = report.ledger[0].produced
        self._oracle.check_loaded(
            extracted, self._arrived, self._letters.kept, whole=False
        )

    async def _end(self, scope: anyio.CancelScope) -> None:
        if not self.scenario.ended:
            return
        await anyio.sleep(self.scenario.ended_at)
        if self.scenario.ended == "drained":
            self.tell("the run is drained")
            self._pipeline.drain()
        else:
            scope.cancel()

    @property
    def _arrived(self) -> list[bytes]:
        """What reached the sink."""
        return self._loaded if self.scenario.sink is not None else self._memory.messages

    async def _script(self, worker: ScriptedWorker) -> int:
        name = worker.request.stage
        stage, scenario = self._stages[name], self.scenario
        simulated = SimulatedWorker(
            worker,
            stage,
            self._counted(worker, self._work(name)),
            scenario.faults.get(name, FaultPlan()),
            lambda text: self.tell(f"{worker.name}: {text}"),
            self._loaded.extend,
        )
        self.tell(f"{worker.name}: start {worker.start}")
        try:
            status = await simulated.run()
        except SystemExit as error:
            self.tell(f"{worker.name}: {describe_status(int(str(error.code)))}")
            raise
        except anyio.get_cancelled_exc_class():
            signals = ", ".join(signal.name for signal in worker.signals)
            self.tell(f"{worker.name}: ended by {signals or 'its supervisor'}")
            raise
        finally:
            self._made_up = self._made_up or simulated.made_up
        self.tell(f"{worker.name}: exits with status {status}")
        return status

    def _work(self, stage: str) -> Work:
        if self.scenario.source is not None and self.scenario.source.name == stage:
            return self._extracted
        return self.scenario.work.get(stage, _nothing)

    def _extracted(self, request: bytes) -> Iterable[bytes]:
        asked = json.loads(request)
        return self.scenario.messages[asked["start"] : asked["end"]]

    def _counted(self, worker: ScriptedWorker, work: Work) -> Work:
        """Note what is processed, in which order, and tell of what is once more."""
        stage = worker.request.stage
        processed = self._processed.setdefault(stage, {})

        def counted(message: bytes) -> Iterable[bytes]:
            processed.setdefault(message, len(processed))
            self._tries[stage, message] += 1
            tries = self._tries[stage, message]
            if tries > 1:
                self.tell(f"{worker.name}: is given {message!r}, try {tries}")
            return work(message)

        return counted


def _nothing(_: bytes) -> Iterable[bytes]:
    return ()


class _Source(MemorySource):
    """Takes its time, and has the positions judged."""

    def __init__(self, simulation: _Simulation, scenario: Scenario) -> None:
        super().__init__(_items(scenario))
        self._simulation = simulation

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        """Yield the items."""
        async with aclosing(super().runs()) as items:
            async for item in items:
                await self._simulation.pause()
                self._simulation.use("source")
                yield item

    async def acknowledge(self, position: Position) -> None:
        """Have the position judged."""
        self._simulation.commit(position)
        await self._simulation.pause()


class _Extracting(WorkerSource):
    """Has the positions of its workers judged."""

    def __init__(self, simulation: _Simulation, stage: Stage, launch: Launch) -> None:
        super().__init__(stage, offsets=simulation.scenario.offsets, launch=launch)
        self._simulation = simulation

    async def acknowledge(self, position: Position) -> None:
        """Have the position judged."""
        self._simulation.commit(position)


class _Letters(MemoryDeadLetters):
    """Fails where that is wanted."""

    def __init__(self, simulation: _Simulation) -> None:
        super().__init__()
        self._simulation = simulation

    async def keep(self, letters: Sequence[DeadLetter]) -> None:
        """Append letters."""
        self._simulation.use("letters")
        await super().keep(letters)

    async def sync(self) -> None:
        """Make all durable."""
        self._simulation.use("letters")
        await super().sync()


class _Sink(MemorySink):
    """Takes its time."""

    def __init__(self, simulation: _Simulation) -> None:
        super().__init__(durable=not simulation.scenario.flushes)
        self._simulation = simulation

    async def write(self, run: Run) -> None:
        """Take a run."""
        await self._simulation.pause()
        self._simulation.use("sink")
        await super().write(run)

    async def flush(self) -> None:
        """Make all durable."""
        await self._simulation.pause()
        self._simulation.use("flush")
        await super().flush()


def _items(scenario: Scenario) -> Iterator[Run | Position]:
    messages, step = scenario.messages, scenario.position_every
    for start in range(0, len(messages), step):
        run = messages[start : start + step]
        yield run
        yield Position(start + len(run))
