"""The same plans of faults in memory and by processes: the same becomes of all messages."""

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
"""Most of their time they wait: for a deadline, or for the pause before a restart."""


class InMemory(simulation.Simulation[Scenario]):
    """A seed in virtual time; keeps what came of it."""

    def _pipeline(self, *given: Any, **options: Any) -> Pipeline:  # noqa: ANN401
        _, sink, letters, _ = given
        assert isinstance(sink, MemorySink)
        assert isinstance(letters, MemoryDeadLetters)
        self._sink, self._letters = sink, letters
        self._made = super()._pipeline(*given, **options)
        return self._made

    @property
    def outcome(self) -> object:
        """What became of the messages, by the sink, the letters and the ledger."""
        letters = [
            (letter.stage, letter.message, letter.kind, _cause(letter.attempts[-1]))
            for letter in self._letters.kept
        ]
        # How often one is tried, or a worker started, is a matter of who has what then.
        accounts = [
            (a.received, a.done, a.dead, a.failed, a.unprocessed, a.produced)
            for a in self._made.ledger
        ]
        return sorted(self._sink.messages), sorted(letters), accounts


class AsProcesses(InMemory):
    """The same in real time, with processes."""

    def _launch(self, request: LaunchRequest) -> tuple[Wire, Child]:
        return launch_over_pipes(request)

    async def live(self) -> None:
        """Run it; raises Violation if something is not as promised."""
        await self._main()


def _cause(attempt: Attempt) -> str:
    """Return what happened, without who it was."""
    return attempt.error.replace(f"{attempt.pid}", "PID").replace(attempt.worker, "")


def agree(seeds: range) -> None:
    """Assert that processes do to the messages what their simulation does."""
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
    """A few plans, with crashes, refusals, hangs and what costs nothing (issue 26)."""
    agree(range(12))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_processes_do_as_their_simulation_200_times() -> None:
    """The same for many."""
    agree(range(12, 212))
