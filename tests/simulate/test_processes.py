"""The same fault plans have the same outcome in simulations and in real processes."""

from __future__ import annotations

import random
from typing import Any

import anyio
import pytest

from etlstage.errors import Attempt
from etlstage.pipeline import Pipeline
from etlstage.testing import MemoryDeadLetters, MemorySink, simulation
from etlstage.transport import Child, LaunchRequest, Wire, launch_over_pipes
from tests.simulate.pipelines import of_programs
from tests.simulate.scenario import Scenario
from tests.supervisor.conftest import _nothing_is_left as _nothing_is_left

pytestmark = pytest.mark.process

AT_ONCE = 6
"""Number of runs at a time; they mostly wait for deadlines and restarts."""


class InMemory(simulation.Simulation[Scenario]):
    """A seed in virtual time, which keeps its outcome."""

    def _pipeline(self, *given: Any, **options: Any) -> Pipeline:  # noqa: ANN401
        _, sink, letters, _ = given
        assert isinstance(sink, MemorySink)
        assert isinstance(letters, MemoryDeadLetters)
        self._sink, self._letters = sink, letters
        self._made = super()._pipeline(*given, **options)
        return self._made

    @property
    def outcome(self) -> object:
        """The messages in the sink, the dead letters, and the ledger's counts."""
        letters = [
            (letter.stage, letter.message, letter.kind, _cause(letter.attempts[-1]))
            for letter in self._letters.kept
        ]
        # The number of attempts and of worker starts depends on timing.
        accounts = [
            (a.received, a.done, a.dead, a.failed, a.unprocessed, a.produced)
            for a in self._made.ledger
        ]
        return sorted(self._sink.messages), sorted(letters), accounts


class AsProcesses(InMemory):
    """The same seed in real time, with processes."""

    def _launch(self, request: LaunchRequest) -> tuple[Wire, Child]:
        return launch_over_pipes(request)

    async def live(self) -> None:
        """Run the seed; raise Violation if a promise is broken."""
        await self._main()


def _cause(attempt: Attempt) -> str:
    """Return an attempt's error without the worker's name and process id."""
    return attempt.error.replace(f"{attempt.pid}", "PID").replace(attempt.worker, "")


def agree(seeds: range) -> None:
    """Assert that processes have the same outcome as their simulation."""
    expected: dict[int, object] = {}
    for seed in seeds:
        simulated = InMemory(of_programs, seed)
        assert simulated.run() == "", seed
        expected[seed] = simulated.outcome
    found: dict[int, object] = {}

    async def one(seed: int, limiter: anyio.CapacityLimiter) -> None:
        async with limiter:
            real = AsProcesses(of_programs, seed)
            try:
                await real.live()
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise
            found[seed] = real.outcome

    async def all_of_them() -> None:
        limiter = anyio.CapacityLimiter(AT_ONCE)
        async with anyio.create_task_group() as tasks:
            for seed in seeds:
                tasks.start_soon(one, seed, limiter)

    random.seed(0)
    anyio.run(all_of_them)
    assert found == expected


def test_processes_do_as_their_simulation() -> None:
    """A few plans, with crashes, refusals, hangs and harmless faults (issue 26)."""
    agree(range(12))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_processes_do_as_their_simulation_200_times() -> None:
    """The same for 200 more plans."""
    agree(range(12, 212))
