"""
Simulation of a pipeline in virtual time, on one thread, determined by a seed.

::

    def draw(chance: random.Random) -> Scenario:
        return Scenario(
            messages=[b"%d" % n for n in range(20)],
            stages=[CLEAN, ENRICH],
            work={"clean": clean, "enrich": enrich},
            faults={"clean": FaultPlan.of(Fault(FaultKind.KILL, probability=0.05))},
        )

    simulate(draw, seeds=range(1000))

Supervisors, exchanges and the pipeline are the real ones; workers are scripted, and
source and sink are in memory. The outcome is compared with what the functions return
for the messages. A seed that fails is reported with its story, and can be repeated.
"""

from __future__ import annotations

import errno
import gc
import json
import logging
import random
import sys
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    Callable,
    Iterable,
    Iterator,
)
from contextlib import contextmanager
from typing import Any, Generic, TypeVar
from unittest.mock import patch

import anyio

from etlstage.errors import LedgerImbalance, WorkerLost
from etlstage.pipeline import DeadLetter, Pipeline, Report, WorkerSink, WorkerSource
from etlstage.pipeline.interfaces import Sink, Source
from etlstage.protocol.marker import proof
from etlstage.stage import Stage
from etlstage.telemetry.log import NAME
from etlstage.testing.clock import run_virtually
from etlstage.testing.ends import MemoryDeadLetters, MemorySink, MemorySource
from etlstage.testing.fault import FaultPlan
from etlstage.testing.scenario import Oracle, Scenario, Violation
from etlstage.testing.scripted import (
    ScriptedLaunch,
    ScriptedWorker,
    SimulatedWorker,
    Work,
)
from etlstage.transport.base import Child, LaunchRequest, Wire, describe_status

__all__ = ("Simulation", "SimulationFailed", "simulate")

S = TypeVar("S", bound=Scenario)


class Simulation(Generic[S]):
    """
    A single run of one seed.

    Args:
        draw: Draws the scenario.
        seed: Determines all random choices.
        recorded: Whether to record its story.

    Attributes:
        scenario: The scenario.
        story: What happened, in order, each line with its virtual time.

    """

    def __init__(
        self, draw: Callable[[random.Random], S], seed: int, *, recorded: bool = False
    ) -> None:
        self._seed = seed
        # The scenario and its run draw from separate generators, so that a scenario
        # with one fault less runs almost the same.
        self.scenario: S = draw(random.Random(f"{seed}"))  # noqa: S311
        self._draw = random.Random(f"{seed} run")  # noqa: S311
        self._recorded = recorded
        self.story: list[str] = []
        self._scripted = ScriptedLaunch(self._script, pipe_size=self.scenario.pipe_size)
        self._stages = {stage.name: stage for stage in self.scenario.stages}
        self._loaded: list[bytes] = []  # by workers
        self._tries: Counter[tuple[str, bytes]] = Counter()
        self._worked: Counter[int] = Counter()  # messages, by process
        # By stage: each message, and how many others were processed before.
        self._processed: dict[str, dict[bytes, int]] = {}
        self._violation = ""
        self._made_up = False

    def run(self) -> str:
        """Run the scenario; return the first violation, an empty text if none."""
        left: list[AsyncGenerator[Any, Any]] = []

        async def main() -> None:
            # An abandoned generator would be closed at a time the seed can't determine.
            sys.set_asyncgen_hooks(None, left.append)
            try:
                await self._main()
            except (Violation, LedgerImbalance) as error:
                self.violate(str(error))
            except Exception as error:
                self.violate(f"internal error: {error!r}")

        with _chance(self._seed), _logged(self.tell if self._recorded else None):
            try:
                run_virtually(main, draw=self._draw)
            except RuntimeError as error:  # it can't end
                self._violation = self._violation or f"internal error: {error!r}"
        if left and not self._violation:
            return f"{left[0]!r} was abandoned in the middle without being closed"
        return self._violation

    def tell(self, text: str) -> None:
        """Add a line to the story, if it is kept."""
        if self._recorded:
            self.story.append(f"{anyio.current_time():9.3f} s  {text}")

    def violate(self, why: str) -> None:
        """Record the first promise that is broken."""
        self._violation = self._violation or why
        self.tell(f"VIOLATION: {why}")

    # --- inside -------------------------------------------------------------

    async def _main(self) -> None:
        letters, sink = MemoryDeadLetters(), MemorySink()
        pipeline = self._pipeline(
            MemorySource(self.scenario.items()), sink, letters, self._launch
        )
        report: Report | None = None
        with anyio.move_on_after(self.scenario.seconds):
            report = await pipeline.run()
        self._check_over(report)
        assert report is not None
        self.tell(f"the run is over: {report.status}")
        # Otherwise replies belong to other messages, so they can't be checked.
        if not self._made_up:
            loads = self.scenario.sink is not None
            loaded = self._loaded if loads else sink.messages
            Oracle(self.scenario).check_end(report, loaded, letters.kept)
            self._check_blame(letters.kept)

    def _check_over(self, report: object) -> None:
        for worker in self._scripted.running:
            raise Violation(f"{worker.name} was left behind")
        if report is None:
            seconds = self.scenario.seconds
            raise Violation(f"the run did not end within {seconds:g} s")

    def _check_blame(self, letters: Iterable[DeadLetter]) -> None:
        """Check that each dead-lettered message failed alone in its process."""
        for letter in letters:
            if letter.kind != WorkerLost.__name__ or letter.of_input:
                continue
            last = letter.attempts[-1]
            # A message that took too long is cancelled, and its process continues.
            if self._worked[last.pid] > 1 and "it was cancelled" not in last.error:
                raise Violation(
                    f"stage {letter.stage}: {letter.message!r} is dead-lettered because"
                    f" of a process that had {self._worked[last.pid]} messages:"
                    f" {last.error}"
                )

    def _pipeline(
        self,
        source: Source,
        sink: Sink,
        letters: MemoryDeadLetters,
        launch: Callable[[LaunchRequest], tuple[Wire, Child]],
        **options: Any,  # noqa: ANN401 - passed on
    ) -> Pipeline:
        """Return the pipeline, with workers as its ends if the scenario has them."""
        scenario = self.scenario
        if scenario.source is not None:
            source = self._extracting(scenario.source, launch)
        if scenario.sink is not None:
            sink = self._loading(scenario.sink, letters, launch)
        return Pipeline(
            name="simulated",
            source=source,
            stages=scenario.between,
            sink=sink,
            dead_letters=letters,
            launch=launch,
            **options,
        )

    def _extracting(
        self, stage: Stage, launch: Callable[[LaunchRequest], tuple[Wire, Child]]
    ) -> WorkerSource:
        return WorkerSource(stage, offsets=self.scenario.offsets, launch=launch)

    def _loading(
        self,
        stage: Stage,
        letters: MemoryDeadLetters,
        launch: Callable[[LaunchRequest], tuple[Wire, Child]],
    ) -> WorkerSink:
        return WorkerSink(stage, dead_letters=letters, launch=launch)

    def _launch(self, request: LaunchRequest) -> tuple[Wire, Child]:
        if request.start in self.scenario.starts_that_fail.get(request.stage, ()):
            self.tell(f"{request.worker}: start {request.start} fails")
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        return self._scripted(request)

    async def _script(self, worker: ScriptedWorker) -> int:
        name = worker.request.stage
        simulated = SimulatedWorker(
            worker,
            self._stages[name],
            self._counted(worker, self._work(worker)),
            self.scenario.faults.get(name, FaultPlan()),
            lambda text: self.tell(f"{worker.name}: {text}"),
        )
        self.tell(f"{worker.name}: start {worker.start}")
        try:
            status = await simulated.run()
        except anyio.get_cancelled_exc_class():
            signals = ", ".join(signal.name for signal in worker.signals)
            self.tell(f"{worker.name}: ended by {signals or 'its supervisor'}")
            raise
        finally:
            self._made_up = self._made_up or simulated.made_up
        self.tell(f"{worker.name}: {describe_status(status)}")
        return status

    def _work(self, worker: ScriptedWorker) -> Work:
        stage = worker.request.stage
        if self.scenario.source is not None and self.scenario.source.name == stage:
            return self._extracted
        if self.scenario.sink is not None and self.scenario.sink.name == stage:
            return self._load
        return self.scenario.work[stage]

    def _load(self, message: bytes) -> Iterable[bytes]:
        # The message is loaded before the worker can report that, or dies.
        self._loaded.append(message)
        return ()

    def _extracted(self, request: bytes) -> Iterable[bytes]:
        asked = json.loads(request)
        return self.scenario.messages[asked["start"] : asked["end"]]

    def _counted(self, worker: ScriptedWorker, work: Work) -> Work:
        """Return work that records the order of messages, and reports repetitions."""
        stage = worker.request.stage
        processed = self._processed.setdefault(stage, {})

        def counted(message: bytes) -> Iterable[bytes]:
            processed.setdefault(message, len(processed))
            self._worked[worker.pid] += 1
            self._tries[stage, message] += 1
            tries = self._tries[stage, message]
            if tries > 1:
                self.tell(f"{worker.name}: is given {message!r}, try {tries}")
            return work(message)

        return counted


class SimulationFailed(AssertionError):
    """
    Raised for a seed whose run broke a promise; the text has its story.

    Attributes:
        seed: The seed.
        why: The violation.
        story: What happened, in order, each line with its virtual time.

    """

    def __init__(self, seed: int, why: str, story: Iterable[str]) -> None:
        self.seed = seed
        self.why = why
        self.story: tuple[str, ...] = tuple(story)
        super().__init__(seed, why, self.story)  # what a copy is made of

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.why}\n  " + "\n  ".join(self.story)


def simulate(
    draw: Callable[[random.Random], S],
    seeds: Iterable[int] = range(1000),
    *,
    simulation: type[Simulation[S]] = Simulation,
) -> None:
    """
    Run pipelines in virtual time, one for each seed, and check each.

    Every message must have exactly one outcome, and fail only on its own; replies must
    belong to their messages, order must be kept where it was promised, and the run must
    end in time without leaving a worker behind.

    Args:
        draw: Draws the scenario. Its argument must be its only source of randomness.
        seeds: The seeds to run.
        simulation: The class that runs one seed.

    Raises:
        SimulationFailed: For the first seed whose run breaks one of these promises.

    """
    with _no_garbage() as collect:
        for seed in seeds:
            why = simulation(draw, seed).run()
            if why:
                again = simulation(draw, seed, recorded=True)
                found, story = again.run(), again.story
                if found != why:
                    story = [*story, f"the violation in the first run was: {why}"]
                raise SimulationFailed(seed, why, story)
            collect()


# --- other influences on a run, eliminated while a seed runs --------------------------


@contextmanager
def _chance(seed: int) -> Iterator[None]:
    """Seed the global random generator, which etlstage and the work may use."""
    state = random.getstate()
    random.seed(f"{seed} chance")
    try:
        # Scripts answer in a turn or two of the loop; spinning would only cost time.
        with patch.object(proof, "_LOOKS", 0):
            yield
    finally:
        random.setstate(state)


@contextmanager
def _no_garbage() -> Iterator[Callable[[], object]]:
    """Disable automatic garbage collection: the seed can't determine its timing."""
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield gc.collect
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


@contextmanager
def _logged(tell: Callable[[str], None] | None) -> Iterator[None]:
    """Record log lines, or drop them, even if structlog is configured."""
    structlog = sys.modules.get("structlog")
    settings: dict[str, Any] | None = None
    if structlog is not None and structlog.is_configured():
        settings = structlog.get_config()
        structlog.reset_defaults()
    logger = logging.getLogger(NAME)
    before = logger.disabled, logger.propagate, logger.level
    handler = _StoryHandler(tell) if tell is not None else None
    logger.disabled, logger.propagate = handler is None, False
    if handler is not None:
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.disabled, logger.propagate, logger.level = before
        if handler is not None:
            logger.removeHandler(handler)
        if structlog is not None and settings is not None:
            structlog.configure(**settings)


class _StoryHandler(logging.Handler):
    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(f"log: {record.getMessage()}")
