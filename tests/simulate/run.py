"""
Run a whole pipeline, whose ends fail, and which is interrupted and started again.

Commits and records are judged when they happen, the rest at the end of a run.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import anyio

from etlstage.errors import RepliesDoubtful, SourceFailed, StageFailed, WorkerLost
from etlstage.messages import Position, StageKind
from etlstage.pipeline import Pipeline, Report, WorkerSink, WorkerSource
from etlstage.pipeline.delivery.record import CommitRecord
from etlstage.pipeline.epoch_sink import EpochSink
from etlstage.stage import Stage
from etlstage.testing import (
    MemoryDeadLetters,
    MemorySink,
    SimulationFailed,
    simulation,
)
from etlstage.testing.scripted import ScriptedWorker, Work
from etlstage.transport import Child, Launch, LaunchRequest, Wire
from tests.simulate.ends import (
    Disk,
    Extracting,
    SimulatedDelivery,
    SimulatedEpochSink,
    SimulatedLetters,
    SimulatedSink,
    SimulatedSource,
)
from tests.simulate.oracle import Oracle, Violation
from tests.simulate.scenario import Scenario

__all__ = ("Draw", "Simulation", "simulate", "simulate_all")

Draw = Callable[[random.Random], Scenario]
"""Draws a seed's scenario, from random numbers of the seed alone."""


def simulate(draw: Draw, seeds: Iterable[int] = range(1000)) -> None:
    """
    Run pipelines, one for each seed, and judge each.

    Raises:
        SimulationFailed: For the first seed whose run breaks a promise.

    """
    simulation.simulate(draw, seeds, simulation=Simulation)


def simulate_all(run: Callable[[range], None], seeds: range) -> tuple[list[str], float]:
    """Return the stories of all failed seeds, and the processor time of all seeds."""
    began, stories = time.process_time(), list[str]()
    while seeds:
        try:
            run(seeds)
        except SimulationFailed as error:
            stories.append(str(error))
            seeds = range(error.seed + 1, seeds.stop)
        else:
            break
    return stories, time.process_time() - began


class Crashed(Exception):
    """Interrupts a run, as SIGKILL would."""


class Simulation(simulation.Simulation[Scenario]):
    """One seed, run once."""

    def __init__(self, draw: Draw, seed: int, *, recorded: bool = False) -> None:
        super().__init__(draw, seed, recorded=recorded)
        self._oracle = Oracle(self.scenario)
        self._calls = 0  # calls of the broken end
        self._failed = False  # whether the broken end failed in this start
        self._died = False  # whether a program died that commits or undoes an epoch
        self._disk = Disk()
        # Counts from earlier runs: messages, and dead letters by stage.
        self._before = 0, Counter[str]()
        self._starts = Counter[str]()  # starts of the workers of epochs, by name
        self._again = 3  # restarts that are left to a run that failed for a message
        self._crash: Crashed | None = None
        self._memory: MemorySink
        self._letters: SimulatedLetters
        self._run: Pipeline
        self._doubted: Violation | None = None

    async def pause(self) -> None:
        """Take some time, or none."""
        seconds = self._draw.choice((0.0, 0.0, 0.0, 0.001, 0.03))
        if seconds:
            await anyio.sleep(seconds)

    def use(self, end: str) -> None:
        """Raise OSError if an end must fail now."""
        if end == self.scenario.broken:
            self._calls += 1
            at = self._calls - self.scenario.broken_at
            if 1 <= at <= self.scenario.broken_for:
                self._failed = True
                self.tell(f"the {end} fails")
                raise OSError(f"the {end} is broken")

    def survives(self) -> bool:
        """Return whether what a disk failed to store is there after all."""
        return self._draw.random() < 0.5

    def live(self) -> None:
        """Raise the error that interrupted the run, if it was interrupted."""
        if self._crash is not None:
            raise self._crash

    def commit(self, position: Position) -> None:
        """Judge a position that is about to be stored, or was recorded."""
        self.use("commit")
        value = position.value
        assert isinstance(value, int)
        if self.scenario.epoch is not None:
            if value != self._disk.record.position:
                self.violate(f"position {value} is acknowledged, and not recorded")
            return
        self.tell(f"position {value} is stored")
        durable = self._memory.messages[: self._memory.account.done]
        with self._judging():
            self._oracle.check_commit(
                value, [*durable, *self._loaded], self._letters.safe
            )

    def record(self, record: CommitRecord) -> None:
        """Judge an epoch that is about to be recorded."""
        if record.epoch == self._disk.record.epoch:
            if self._disk.record.ended and not record.ended:
                # Another run begins where one was drained.
                position = record.position or 0
                assert isinstance(position, int)
                self._before = position, Counter(record.letters)
            return
        position = record.position
        if position is None:
            position = len(self.scenario.messages)
        assert isinstance(position, int)
        self.tell(f"epoch {record.epoch} is recorded, with position {position}")
        with self._judging():
            letters = self._letters.safe_of(record.letters)
            loaded = self._disk.loaded_by(record)
            self._oracle.check_epoch(position, loaded, letters)

    # --- inside -------------------------------------------------------------

    @contextmanager
    def _judging(self) -> Iterator[None]:
        try:
            yield
        except Violation as error:
            if self._run.doubtful or not self.scenario.may_fail:
                self.violate(str(error))
            else:
                # The sign that a reply was another message's may come later.
                self._doubted = self._doubted or error

    def _made(self) -> Pipeline:
        scenario, disk = self.scenario, self._disk
        letters = self._letters = SimulatedLetters(self, disk)
        self._memory = SimulatedSink(self)
        delivery = None
        if scenario.epoch is not None:
            if scenario.sink is None:
                self._memory = SimulatedEpochSink(self, disk)
            delivery = SimulatedDelivery(self, disk, self._at)
        source = SimulatedSource(self, scenario)
        return self._pipeline(
            source,
            self._memory,
            letters,
            self._launch,
            flush_every=scenario.flush_every,
            drain_limit=scenario.drain_limit,
            delivery=delivery,
        )

    def _extracting(self, stage: Stage, launch: Launch) -> WorkerSource:
        return Extracting(self, stage, launch)

    def _loading(
        self, stage: Stage, letters: MemoryDeadLetters, launch: Launch
    ) -> WorkerSink:
        if self.scenario.epoch is None:
            return super()._loading(stage, letters, launch)
        return EpochSink(
            stage,
            commit=("commit",),
            abort=("abort",),
            dead_letters=letters,
            launch=launch,
        )

    def _launch(self, request: LaunchRequest) -> tuple[Wire, Child]:
        if "ETLSTAGE_EPOCH" in request.env and not _is_program(request):
            # Each attempt has workers of its own. Their faults go by the total number
            # of starts, or else each attempt would end like the first.
            self._starts[request.worker] += 1
            start = {"ETLSTAGE_START": f"{self._starts[request.worker]}"}
            request = replace(request, env={**request.env, **start})
        return super()._launch(request)

    def _work(self, worker: ScriptedWorker) -> Work:
        epoch = worker.request.env.get("ETLSTAGE_EPOCH")
        if epoch is None:
            return super()._work(worker)
        attempt = worker.request.env["ETLSTAGE_ATTEMPT"]
        kept = self._disk.apart.setdefault((epoch, attempt), [])

        def keep(message: bytes) -> Iterable[bytes]:
            kept.append(message)
            return ()

        return keep

    async def _script(self, worker: ScriptedWorker) -> int:
        if not _is_program(worker.request):
            return await super()._script(worker)
        what, epoch = worker.request.command
        await self.pause()
        async for message in worker.messages():
            if self._dies(worker):
                return 1
            if what == "commit":
                self._disk.commit(epoch, json.loads(message)["attempt"])
            else:
                self._disk.abort(epoch)
            self.tell(f"{worker.name}: {what} of epoch {epoch}")
            if self._dies(worker):
                return 1
            await worker.reply()
            await self.pause()
        return 0

    def _dies(self, worker: ScriptedWorker) -> bool:
        """Return whether a program that commits or undoes an epoch dies here."""
        dies = self._draw.random() < 0.05
        if dies:
            self._died = True
            self.tell(f"{worker.name}: dies")
        return dies

    async def _main(self) -> None:
        breaks, ended = iter(self.scenario.breaks), self.scenario.ended
        while await self._start(next(breaks, None), ended):
            self.tell("the run is started again")
            ended = ""
            self._processed.clear()  # the order of processing may change

    async def _start(self, breaks: tuple[str, int] | float | None, ended: str) -> bool:
        """Run the pipeline; return whether it must be started again."""
        scenario, report = self.scenario, None
        self._step, self._crash = ("", 0), None
        self._failed = self._died = False
        self._run = self._made()
        with anyio.move_on_after(scenario.seconds) as patience:
            with anyio.CancelScope() as self._scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._end, ended)
                    if isinstance(breaks, tuple):
                        self._step = breaks
                    elif breaks is not None:
                        tasks.start_soon(self._break_off, breaks)
                    report = await self._run.run()
                    tasks.cancel_scope.cancel()
        self._check_over(None if patience.cancelled_caught else self._run)
        if self._crash is not None:
            return self._goes_on()
        if report is None:
            return self._is_cancelled()
        return self._is_over(report, drained=ended == "drained")

    def _is_over(self, report: Report, *, drained: bool) -> bool:
        scenario = self.scenario
        self.tell(f"the run is over: {report.status}")
        if self._made_up:
            return False  # replies are other messages', and no one can know that
        if self._failed and report.status != "failed":
            raise Violation(
                f"the run is {report.status}, although the {self.scenario.broken}"
                " failed"
            )
        if self._doubted and not isinstance(report.error, RepliesDoubtful):
            raise self._doubted
        # A source that is drained between two positions can't be resumed; a worker is
        # given the time to reach the end of its range.
        drained = drained and isinstance(report.error, SourceFailed)
        if drained and scenario.stages[0].kind is StageKind.EXTRACT:
            raise Violation(f"a drained worker ends between positions: {report.error}")
        failed = self._failed
        if report.status == "failed" and scenario.strict and self._again:
            self._again -= 1
            failed = True
        failed = failed or (self._died and report.status == "failed")
        if self.scenario.epoch is not None and (failed or drained):
            return self._goes_on()
        self._oracle.check_run(
            report,
            self._arrived,
            self._letters.kept,
            self._processed,
            self._before,
            unproven=self._unproven(report),
        )
        self._check_blame(self._letters.kept)
        ended = self.scenario.epoch is None or report.status != "drained"
        return not ended and self._goes_on()

    def _unproven(self, report: Report) -> bool:
        """Return whether a run failed, rightly, as a load worker did not end well."""
        loaders = (
            w for w in self._scripted.workers if w.request.kind is StageKind.LOAD
        )
        failed = any(worker.returncode for worker in loaders)
        if self.scenario.epoch is not None:  # it isn't committed: nothing is doubtful
            return failed and isinstance(report.error, StageFailed | WorkerLost)
        doubtful = report.ledger[-1].doubtful > 0
        return failed and doubtful and isinstance(report.error, WorkerLost)

    def _is_cancelled(self) -> bool:
        self.tell("the run is cancelled")
        if self.scenario.epoch is not None:
            return self._goes_on()
        if self.scenario.may_fail:
            return False  # a wrong reply may not have had the time to show
        report: Report = self._run.report("failed")
        extracted = report.ledger[0].produced
        self._oracle.check_loaded(
            extracted, self._arrived, self._letters.kept, whole=False
        )
        return False

    def _goes_on(self) -> bool:
        """Keep a random part of the letters; return whether the run can be resumed."""
        kept = self._letters.kept
        # Letters that were not synced may be durable nevertheless.
        self._disk.letters = kept[
            : self._draw.randint(self._letters.durable, len(kept))
        ]
        if self._made_up or self._doubted:
            return False  # a wrong reply may not have had the time to show
        record = self._disk.record
        return record.resumes or not record.epoch

    async def _end(self, ended: str) -> None:
        if not ended:
            return
        await anyio.sleep(self.scenario.ended_at)
        if ended == "drained":
            self.tell("the run is drained")
            self._run.drain()
        else:
            self._scope.cancel()

    async def _break_off(self, seconds: float) -> None:
        await anyio.sleep(seconds)
        with suppress(Crashed):
            self._break("")

    def _at(self, step: str) -> None:
        name, left = self._step
        self._step = name, left - (step == name)
        # After the end there is nothing to resume.
        if self._step == (step, 0) and not self._disk.record.ended:
            self._break(f" at {step}")

    def _break(self, where: str) -> None:
        self.tell(f"the run breaks off{where}")
        self._crash = Crashed("the run has broken off")
        self._scope.cancel()
        raise self._crash

    @property
    def _arrived(self) -> list[bytes]:
        """The messages that reached the sink, and count."""
        if self.scenario.epoch is not None:
            return self._disk.loaded
        return self._loaded if self.scenario.sink is not None else self._memory.messages


def _is_program(request: LaunchRequest) -> bool:
    """Return whether a worker commits or undoes an epoch (its last argument)."""
    return len(request.command) > 1
