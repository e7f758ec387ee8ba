"""
Run a stage of hostile workers, and return what became of everything.

Each run puts a token of its own into the environment of its workers. Their child
processes inherit it, so that no process of a run can hide in the process table.
"""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeVar

import anyio

from etlstage.messages import Result
from etlstage.protocol.marker import Markers, Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import BatchPolicy, RestartPolicy, Stage, Timeouts
from etlstage.supervisor import AsyncSupervisor, SupervisorEvent, WorkerStarted
from etlstage.testing import Fault, FaultPlan, ScriptedLaunch, hostile_worker
from tests.staged import staged
from tests.supervisor.acts import script_of

__all__ = (
    "MODES",
    "PATIENT",
    "QUICK",
    "RUN",
    "WORDS",
    "Outcome",
    "World",
    "delivered",
    "hostile",
    "left",
    "numbers",
    "simulated",
    "supervise",
    "supervised",
)

T = TypeVar("T")

MODES: Final = (Mode.SINGLE, Mode.BATCH_WORKER, Mode.BATCH_SUPERVISOR)
WORDS: Final = Markers(b"EOM", b"EOP", b"EOB", b"BNC")
WITHIN: Final = 60.0
"""Seconds that a run may take, on a busy machine."""
PATIENT: Final = Timeouts(message=2 * WITHIN, stop=0.1)
"""For faults that are noticed without a deadline: a run that waits for one fails."""
QUICK: Final = Timeouts(start=2 * WITHIN, message=1, stop=0.1)
"""For faults that only a deadline notices, in stages that report readiness."""
RUN: Final = "ETLSTAGE_TEST_RUN"
"""Name of the environment variable with the token of a run."""


@dataclass
class Outcome:
    """The outcome of one run."""

    results: list[Result] = field(default_factory=list)
    events: list[SupervisorEvent] = field(default_factory=list)
    """Those from before the supervisor's start until after its end."""
    peak: int = 0
    """The most by which the memory of this process grew, in bytes."""

    def of(self, kind: type[T]) -> list[T]:
        """Return the events of that kind."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def restarts(self) -> int:
        """Number of times that a worker was started again."""
        return sum(event.start > 1 for event in self.of(WorkerStarted))


def hostile(
    *faults: Fault,
    mode: Mode = Mode.SINGLE,
    workers: int = 1,
    seed: int = 0,
    timeout: Timeouts = PATIENT,
    markers: Markers = WORDS,
    **options: object,
) -> Stage:
    """Return a stage, named ``t``, whose workers have these faults."""
    options.setdefault("batch", BatchPolicy(size=4, seconds=0.05))
    options.setdefault("restart", RestartPolicy(delay=0.01))
    return staged(
        hostile_worker(FaultPlan(faults, seed), mode=mode, batch=4),
        dialect=MarkerDialect(mode=mode, markers=markers),
        workers=workers,
        timeout=timeout,
        **options,
    )


def numbers(count: int) -> list[bytes]:
    """Return messages that can be distinguished."""
    return [b"%d" % n for n in range(count)]


def delivered(results: Sequence[Result]) -> list[bytes]:
    """Return all outputs, in order; a result with an error must have none."""
    assert [r for r in results if r.error is not None and r.outputs] == []
    return [output for result in results for output in result.outputs]


def left(token: str) -> dict[int, str]:
    """Return the processes with the token, and their commands; without zombies."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if token.encode() in (process / "environ").read_bytes():
                command = (process / "cmdline").read_bytes().split(b"\0")
                found[int(process.name)] = f"{command[-2:]!r}"[:200]
    return found


@asynccontextmanager
async def supervised(
    stage: Stage,
) -> AsyncIterator[tuple[AsyncSupervisor, Outcome]]:
    """Run the block with a supervisor; no process may be left after it."""
    token, outcome = uuid.uuid4().hex, Outcome()
    stage = replace(
        stage, worker=replace(stage.program, env={**stage.program.env, RUN: token})
    )
    memory = _memory()
    try:
        with anyio.fail_after(WITHIN):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_watch, outcome, memory)
                async with AsyncSupervisor(stage) as supervisor:
                    events = supervisor.events()
                    yield supervisor, outcome
                tasks.cancel_scope.cancel()
        with events, suppress(anyio.EndOfStream, anyio.WouldBlock):
            while True:
                outcome.events.append(events.receive_nowait())
        # A process that was killed is gone a moment later.
        for _ in range(50):
            if not (found := left(token)):
                break
            await anyio.sleep(0.02)
        if found:
            raise AssertionError(f"processes are left: {found}")
    finally:
        # Whatever the test has shown, its processes must not disturb the next test.
        for pid in left(token):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@asynccontextmanager
async def simulated(
    stage: Stage,
) -> AsyncIterator[tuple[AsyncSupervisor, Outcome]]:
    """Run the block with a supervisor whose hostile workers run in memory."""
    outcome, launch = Outcome(), ScriptedLaunch(script_of(stage))
    async with AsyncSupervisor(stage, launch=launch) as supervisor:
        events = supervisor.events()
        yield supervisor, outcome
    with events:
        outcome.events += [event async for event in events]
    assert launch.running == []


World = Callable[[Stage], AbstractAsyncContextManager[tuple[AsyncSupervisor, Outcome]]]
"""How the workers of a stage are run."""


async def supervise(
    stage: Stage, messages: Sequence[bytes], world: World = supervised
) -> Outcome:
    """Submit all messages at once; return the outcome."""
    async with world(stage) as (supervisor, outcome):
        outcome.results = await supervisor.submit(messages)
    # In the order of the input, and each once.
    assert [result.message for result in outcome.results] == list(messages)
    return outcome


async def _watch(outcome: Outcome, before: int) -> None:
    while True:
        outcome.peak = max(outcome.peak, _memory() - before)
        await anyio.sleep(0.005)


def _memory() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
