"""
The factories behind the pytest fixtures, which take a command, a script or a stage.

A *command* is a list of words, or a :class:`~etlstage.WorkerProgram`; a *script* is an
async function, a worker without a process, see :mod:`etlstage.testing.scripted`. Both
get a stage with settings for tests: a timeout of ten seconds, and almost no delay
before a restart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from etlstage.pipeline import Pipeline, Report
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.stage import (
    ErrorBudget,
    ErrorPolicy,
    RestartPolicy,
    Stage,
    Timeouts,
    WorkerProgram,
)
from etlstage.supervisor import AsyncSupervisor
from etlstage.testing.conversation import WorkerUnderTest
from etlstage.testing.ends import MemorySink, MemorySource
from etlstage.testing.scripted import Script, ScriptedLaunch
from etlstage.transport import Launch, launch_worker

__all__ = (
    "PipelineFactory",
    "Ran",
    "SupervisorFactory",
    "Tested",
    "WorkerFactory",
    "stage_of",
)

Tested: TypeAlias = Stage | WorkerProgram | Sequence[str] | Script
"""What a test may be about."""

_SETTINGS: Final[dict[str, Any]] = {
    "timeout": Timeouts(start=10, message=10, stop=1),
    "restart": RestartPolicy(delay=0.001),
    "on_error": ErrorPolicy(budget=ErrorBudget(share=1.0)),
}


def stage_of(
    tested: Tested,
    name: str = "worker",
    **settings: Any,  # noqa: ANN401 - settings of a stage
) -> tuple[Stage, Launch]:
    """
    Return a stage for what is tested, and the launch of its workers.

    Args:
        tested: A command, a script or a stage; a stage is only changed by ``settings``.
        name: Name of the stage, unless a stage is given.
        settings: Settings of :class:`~etlstage.Stage`.

    """
    if isinstance(tested, Stage):
        return replace(tested, **settings), launch_worker
    settings = {"name": name, **_SETTINGS, **settings}
    if callable(tested):
        script = getattr(tested, "__name__", "script")
        return Stage(worker=(script,), **settings), ScriptedLaunch(tested)
    return Stage(worker=tested, **settings), launch_worker


class WorkerFactory:
    """Makes workers under test, and keeps track of them."""

    def __init__(self) -> None:
        self._made: list[WorkerUnderTest] = []

    def __call__(
        self,
        tested: Tested,
        *,
        timeout: float = 10.0,
        **settings: Any,  # noqa: ANN401 - settings of a stage
    ) -> WorkerUnderTest:
        """
        Return a worker, which is an async context manager.

        Args:
            tested: A command, a script or a stage.
            timeout: How long each wait may take, in seconds.
            settings: Settings of :class:`~etlstage.Stage`.

        """
        stage, launch = stage_of(tested, **settings)
        made = WorkerUnderTest(stage, launch=launch, timeout=timeout)
        self._made.append(made)
        return made

    def shown(self) -> Iterator[tuple[str, str]]:
        """Yield a title and the transcript of each worker."""
        for made in self._made:
            shown = made.transcript.shown(made.stage.dialect)
            yield f"worker {made.stage.name}", shown


class SupervisorFactory:
    """Makes supervisors."""

    def __call__(
        self,
        tested: Tested,
        *,
        launch: Launch | None = None,
        **settings: Any,  # noqa: ANN401 - settings of a stage
    ) -> AsyncSupervisor:
        """
        Return a supervisor, which is an async context manager.

        Args:
            tested: A command, a script or a stage.
            launch: Starts its workers; None: the usual launch for ``tested``.
            settings: Settings of :class:`~etlstage.Stage`.

        """
        stage, usual = stage_of(tested, **settings)
        return AsyncSupervisor(stage, launch=launch or usual)


@dataclass(frozen=True)
class Ran:
    """The outcome of a pipeline run."""

    outputs: list[bytes]
    """Messages that reached the sink, in order."""
    dead: list[DeadLetter]
    """Messages that a stage could not process, each with the reason."""
    report: Report


class PipelineFactory:
    """
    Runs stages between a source and a sink in memory.

    Args:
        folder: The folder for dead letters.

    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._letters: list[DeadLetters] = []

    async def __call__(
        self,
        tested: Sequence[Tested],
        messages: Sequence[bytes],
        *,
        launch: Launch | None = None,
    ) -> Ran:
        """
        Run a pipeline of transform stages, and return its outcome.

        Args:
            tested: For each stage, a command, a script or a stage.
            messages: The messages for the first stage.
            launch: Starts all workers; None: the usual launch for each stage.

        Raises:
            Exception: The error of the run, if it failed.

        """
        made = [stage_of(each, f"stage{n}") for n, each in enumerate(tested, 1)]
        launches = {stage.name: usual for stage, usual in made}
        name = f"pipeline{len(self._letters) + 1}"
        letters = DeadLetters(self._folder / name, pipeline=name)
        self._letters.append(letters)
        sink = MemorySink()
        report = await Pipeline(
            name=name,
            source=MemorySource([messages]),
            stages=[stage for stage, _ in made],
            sink=sink,
            dead_letters=letters,
            launch=launch or (lambda request: launches[request.stage](request)),
        ).run()
        if report.error is not None:
            raise report.error
        return Ran(sink.messages, list(letters.letters()), report)

    def close(self) -> None:
        """Close the dead letters."""
        for letters in self._letters:
            letters.close()
