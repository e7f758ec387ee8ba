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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

import anyio

from etlstage.errors import LedgerImbalance, RepliesDoubtful, SourceFailed, WorkerLost
from etlstage.messages import Position, StageKind
from etlstage.pipeline import Pipeline, Report, Sink, Source, WorkerSink
from etlstage.pipeline.delivery.record import Record
from etlstage.testing.ends import MemorySink
from etlstage.testing.fault import FaultPlan
from etlstage.testing.scripted import ScriptedLaunch, ScriptedWorker
from etlstage.testing.simulate import backend
from etlstage.testing.simulate.control import chance, logged
from etlstage.testing.simulate.ends import (
    Disk,
    Extracting,
    SimulatedDelivery,
    SimulatedEpochSink,
    SimulatedLetters,
    SimulatedSink,
    SimulatedSource,
)
from etlstage.testing.simulate.loop import Loop
from etlstage.testing.simulate.oracle import Oracle, Violation
from etlstage.testing.simulate.scenario import Scenario
from etlstage.testing.simulate.worker import SimulatedWorker, Work
from etlstage.transport.base import Child, LaunchRequest, Wire, describe_status

__all__ = ("Draw", "Simulation")

Draw = Callable[[random.Random], Scenario]
"""Draws what a seed runs, from that alone."""


class Crashed(Exception):
    """What breaks a run off, as SIGKILL would."""


class Simulation:
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
        self._scripted = ScriptedLaunch(self._script, pipe_size=self.scenario.pipe_size)
        self._calls = 0  # of the end that is broken
        self._disk = Disk()
        # Of the runs before this one: messages, and dead letters by stage.
        self._before = 0, Counter[str]()
        self._crash: Crashed | None = None
        self._stages = {stage.name: stage for stage in self.scenario.stages}
        self._loaded: list[bytes] = []  # by workers
        self._tries: Counter[tuple[str, bytes]] = Counter()
        # By stage: which message was processed first, and so on.
        self._processed: dict[str, dict[bytes, int]] = {}
        self._memory: MemorySink
        self._letters: SimulatedLetters
        self._pipeline: Pipeline
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

    def live(self) -> None:
        """Raise what broke the run off, if anything did."""
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

    def record(self, record: Record) -> None:
        """Judge an epoch that is about to be recorded."""
        if record.epoch == self._disk.record.epoch:
            if self._disk.record.ended and not record.ended:
                # Another run begins, where one was drained.
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
            if self._pipeline.doubtful or not self.scenario.may_fail:
                self.violate(str(error))
            else:
                # What shows that a reply was another's may come later.
                self._doubted = self._doubted or error

    def _launch(self, request: LaunchRequest) -> tuple[Wire, Child]:
        if request.start in self.scenario.starts_that_fail.get(request.stage, ()):
            self.tell(f"{request.worker}: start {request.start} fails")
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        return self._scripted(request)

    def _make(self) -> None:
        scenario, disk, launch = self.scenario, self._disk, self._launch
        letters = self._letters = SimulatedLetters(self, disk)
        source: Source = SimulatedSource(self, scenario)
        if scenario.source is not None:
            source = Extracting(self, scenario.source, launch)
        self._memory = SimulatedSink(self)
        delivery = None
        if scenario.epoch is not None:
            self._memory = SimulatedEpochSink(self, disk)
            delivery = SimulatedDelivery(self, disk, self._at)
        sink: Sink = self._memory
        if scenario.sink is not None:
            sink = WorkerSink(scenario.sink, dead_letters=letters, launch=launch)
        self._pipeline = Pipeline(
            name="simulated",
            source=source,
            stages=scenario.between,
            sink=sink,
            flush_every=scenario.flush_every,
            dead_letters=letters,
            launch=launch,
            delivery=delivery,
        )

    async def _run(self) -> None:
        breaks, ended = iter(self.scenario.breaks), self.scenario.ended
        while await self._start(next(breaks, None), ended):
            self.tell("the run is started again")
            ended = ""
            self._processed.clear()  # it may be that it is processed in another order

    async def _start(self, breaks: tuple[str, int] | float | None, ended: str) -> bool:
        """Run the pipeline; return whether it is to be started again."""
        scenario, report, calls = self.scenario, None, self._calls
        self._step, self._crash = ("", 0), None
        self._make()
        with anyio.move_on_after(scenario.seconds) as patience:
            with anyio.CancelScope() as self._scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._end, ended)
                    if isinstance(breaks, tuple):
                        self._step = breaks
                    elif breaks is not None:
                        tasks.start_soon(self._break_off, breaks)
                    report = await self._pipeline.run()
                    tasks.cancel_scope.cancel()
        for worker in self._scripted.running:
            raise Violation(f"{worker.name} was left behind")
        if patience.cancelled_caught:
            raise Violation(f"the run was not over within {scenario.seconds:g} s")
        if self._crash is not None:
            return self._goes_on()
        if report is None:
            return self._is_cancelled()
        broke = calls <= scenario.broken_at < self._calls
        return self._is_over(report, broke=broke, drained=ended == "drained")

    def _is_over(self, report: Report, *, broke: bool, drained: bool) -> bool:
        self.tell(f"the run is over: {report.status}")
        if self._made_up:
            return False  # replies are those of other messages, and nobody can know
        if broke and report.status != "failed":
            raise Violation(
                f"the run is {report.status}, although the {self.scenario.broken}"
                " failed"
            )
        if self._doubted and not isinstance(report.error, RepliesDoubtful):
            raise self._doubted
        # Between two positions a source can't be drained so that it reads on.
        drained = drained and isinstance(report.error, SourceFailed)
        if self.scenario.epoch is not None and (broke or drained):
            return self._goes_on()
        self._oracle.check_end(
            report,
            self._arrived,
            self._letters.kept,
            self._processed,
            self._before,
            unproven=self._unproven(report),
        )
        ended = self.scenario.epoch is None or report.status != "drained"
        return not ended and self._goes_on()

    def _unproven(self, report: Report) -> bool:
        """Return whether a run failed, rightly, for a load worker that did not end."""
        loaders = (
            w for w in self._scripted.workers if w.request.kind is StageKind.LOAD
        )
        failed = any(worker.returncode for worker in loaders)
        doubtful = report.ledger[-1].doubtful > 0
        return failed and doubtful and isinstance(report.error, WorkerLost)

    def _is_cancelled(self) -> bool:
        self.tell("the run is cancelled")
        if self.scenario.epoch is not None:
            return self._goes_on()
        if self.scenario.may_fail:
            return False  # whether a reply was another's, it had no time to tell
        report: Report = self._pipeline.report("failed")
        extracted = report.ledger[0].produced
        self._oracle.check_loaded(
            extracted, self._arrived, self._letters.kept, whole=False
        )
        return False

    def _goes_on(self) -> bool:
        """Return whether a run that broke off goes on, and what is left for it."""
        kept = self._letters.kept
        # Of what was not made durable some may have become so.
        self._disk.letters = kept[
            : self._draw.randint(self._letters.durable, len(kept))
        ]
        if self._made_up or self._doubted:
            return False  # whether a reply was another's, it had no time to tell
        record = self._disk.record
        return record.resumes or not record.epoch

    async def _end(self, ended: str) -> None:
        if not ended:
            return
        await anyio.sleep(self.scenario.ended_at)
        if ended == "drained":
            self.tell("the run is drained")
            self._pipeline.drain()
        else:
            self._scope.cancel()

    async def _break_off(self, seconds: float) -> None:
        await anyio.sleep(seconds)
        with suppress(Crashed):
            self._break("")

    def _at(self, step: str) -> None:
        name, left = self._step
        self._step = name, left - (step == name)
        # Behind the end there is nothing to go on with.
        if self._step == (step, 0) and not self._disk.record.ended:
            self._break(f" at {step}")

    def _break(self, where: str) -> None:
        self.tell(f"the run breaks off{where}")
        self._crash = Crashed("the run has broken off")
        self._scope.cancel()
        raise self._crash

    @property
    def _arrived(self) -> list[bytes]:
        """What reached the sink, and counts."""
        if self.scenario.epoch is not None:
            return self._disk.loaded
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
