"""
Run a stage of hostile workers and see what became of everything.

Each run puts a word of its own into the environment of its workers. What they start
inherits it, so that nothing of a run can hide in the process table.
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
"""Seconds that a run may take, on a machine that does other things, too."""
PATIENT: Final = Timeouts(message=2 * WITHIN, stop=0.1)
"""For faults that are noticed without a clock: a run that waits for it fails."""
QUICK: Final = Timeouts(start=2 * WITHIN, message=0.25, stop=0.1)
"""For those that only a clock notices; for stages that report when they are ready."""
RUN: Final = "ETLSTAGE_TEST_RUN"
"""Name of the variable that holds the word of a run."""


@dataclass
class Outcome:
    """What one run has shown."""

    results: list[Result] = field(default_factory=list)
    events: list[SupervisorEvent] = field(default_factory=list)
    """From before the start to behind the end of the supervisor."""
    peak: int = 0
    """By how much our own memory grew, at most, in bytes."""

    def of(self, kind: type[T]) -> list[T]:
        """Return the events of that kind."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def restarts(self) -> int:
        """How often a worker was started again."""
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
    """Return a stage, called ``t``, whose workers misbehave so."""
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
    """Return all outputs, in order; there is none where there is an error."""
    assert [r for r in results if r.error is not None and r.outputs] == []
    return [output for result in results for output in result.outputs]


def left(token: str) -> dict[int, str]:
    """Return the processes that have the word, and their commands; zombies have not."""
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
    """Run the block with a supervisor; behind it, nothing may be left."""
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
        # Whatever this test has shown, it is not to disturb the next.
        for pid in left(token):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@asynccontextmanager
async def simulated(
    stage: Stage,
) -> AsyncIterator[tuple[AsyncSupervisor, Outcome]]:
    """Run the block with a supervisor whose hostile workers are no processes."""
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
    """Submit the messages, all at once."""
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
