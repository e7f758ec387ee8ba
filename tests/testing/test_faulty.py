"""
Faults injected from outside have the same outcome as those of the hostile worker.

Also what only a launch has: any command, and an account of what each fault led to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from signal import SIGKILL
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from etlstage.errors import ConfigError, WorkerLost
from etlstage.messages import StageKind
from etlstage.protocol.kcl.settings import KclDialect
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import BatchPolicy, RestartPolicy, Stage, Timeouts
from etlstage.supervisor import (
    AsyncSupervisor,
    WorkerExited,
    WorkerFailed,
    WorkerStarted,
)
from etlstage.testing import Fault, FaultKind, FaultPlan, Moment, hostile_worker
from etlstage.testing.faulty.wire import FaultyLaunch
from etlstage.transport import Launch, LaunchRequest, launch_over_pipes
from tests.patience import HANG
from tests.staged import staged
from tests.testing.supervised import MODES, WORDS, numbers

MB = 1_000_000
PATIENT = Timeouts(message=10, stop=0.1)
QUICK = Timeouts(start=10, message=1, stop=0.1)


@dataclass
class Ledger:
    """What became of the messages and of the workers of a stage."""

    outputs: list[tuple[bytes, ...]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    deaths: list[int] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    starts: int = 0
    doubtful: int = 0


def worker(plan: FaultPlan, mode: Mode, **settings: object) -> Stage:
    """Return a stage whose hostile workers follow the plan."""
    defaults = {
        "timeout": PATIENT,
        "restart": RestartPolicy(delay=0.01),
        "batch": BatchPolicy(size=4, seconds=0.05),
        "max_message": 4 * MB,
        "max_reply": 8 * MB,
    }
    return staged(
        hostile_worker(plan, mode=mode, batch=4),
        dialect=MarkerDialect(mode=mode, markers=WORDS),
        **(defaults | settings),
    )


async def ledger(
    stage: Stage, launch: Launch, messages: Sequence[bytes], *, idle: bool = False
) -> Ledger:
    """
    Submit messages, and return what became of them and of the workers.

    Args:
        stage: Of the workers.
        launch: Starts the workers.
        messages: To be submitted.
        idle: Whether to wait for a restart before they are submitted.

    """
    found = Ledger()
    with capture_logs(), anyio.fail_after(HANG):
        async with AsyncSupervisor(stage, launch=launch) as supervisor:
            events = supervisor.events()
            with supervisor.events() as starts:
                while idle:
                    event = await starts.receive()
                    idle = not isinstance(event, WorkerStarted) or event.start == 1
            for result in await supervisor.submit(messages):
                found.outputs.append(result.outputs)
                found.errors.append(type(result.error).__name__)
        found.doubtful = supervisor.doubtful
        with events:
            async for event in events:
                found.starts += isinstance(event, WorkerStarted)
                if isinstance(event, WorkerExited) and event.lost:
                    found.deaths.append(event.status)
                if isinstance(event, WorkerFailed):
                    found.failed.append(type(event.error).__name__)
    return found


def once(kind: FaultKind, **values: object) -> Fault:
    """Return a fault of the sixth message in the first start of a worker."""
    return Fault(kind, **({"message": 6, "start": 1} | values))  # type: ignore[arg-type]


FAULTS = {
    "kill": once(FaultKind.KILL),
    "kill-always": Fault(FaultKind.KILL, equals=b"6"),
    "segfault": once(FaultKind.SEGFAULT),
    "abort": once(FaultKind.ABORT),
    "exit": once(FaultKind.EXIT, status=3),
    "exit-0": once(FaultKind.EXIT, status=0),
    "partial": once(FaultKind.PARTIAL),
    "pause": once(FaultKind.PAUSE, seconds=0.05),
    "twice": once(FaultKind.TWICE),
    "wrong-marker": once(FaultKind.WRONG_MARKER),
    "refuse": once(FaultKind.REFUSE),
    "refuse-for": once(FaultKind.REFUSE, data=b"no date"),
    "huge": once(FaultKind.HUGE),
    "large": once(FaultKind.HUGE, size=100_000),
    "flood": once(FaultKind.FLOOD),
    "flood-without-end": once(FaultKind.FLOOD, size=10**8),
    "cut": once(FaultKind.CUT),
    "stderr": once(FaultKind.STDERR),
    "kill-by-chance": Fault(FaultKind.KILL, probability=0.05),
    "kill-at-start": Fault(FaultKind.KILL, at=Moment.START, start=1),
    "garbage-at-start": Fault(FaultKind.GARBAGE, at=Moment.START, start=1),
    # At the start, timing decides whether a message is outstanding.
    "byte-order-mark": once(FaultKind.BYTE_ORDER_MARK, at=Moment.MESSAGE),
    "slow-start": Fault(FaultKind.PAUSE, at=Moment.START),
    "exit-at-end": Fault(FaultKind.EXIT, at=Moment.END, status=4),
}
EVERYWHERE = {
    *("kill", "kill-always", "partial", "twice", "refuse", "cut"),
}
"""Names of the faults that are tried with batches, too."""

CLOCKED = {
    "stall": once(FaultKind.STALL),
    "stop": once(FaultKind.STOP),
    "pause-too-long": once(FaultKind.PAUSE, seconds=5),
    "skip": once(FaultKind.SKIP),
    "close-stdout": once(FaultKind.CLOSE_STDOUT),
    "close-stdin": once(FaultKind.CLOSE_STDIN),
    "stall-at-end": Fault(FaultKind.STALL, at=Moment.END),
}
"""Faults that only a deadline notices."""

IDLE = {
    "extra-eop": Fault(FaultKind.EXTRA_EOP, start=1),
    "garbage": Fault(FaultKind.GARBAGE, at=Moment.IDLE, start=1),
    "exit": Fault(FaultKind.EXIT, at=Moment.IDLE, start=1, status=0),
    "kill": Fault(FaultKind.KILL, at=Moment.IDLE, start=1),
}
"""Faults of a worker that was given nothing yet."""
STRAYS = (FaultKind.EXTRA_EOP, FaultKind.GARBAGE)
"""Kinds of these that are a failure of the worker, not only its exit."""


async def compare(
    plan: FaultPlan,
    mode: Mode,
    messages: Sequence[bytes],
    *,
    idle: bool = False,
    **settings: object,
) -> Ledger:
    """Assert that a fault from outside leads to what it does in a hostile worker."""
    launch = FaultyLaunch(launch_over_pipes, {"t": plan})
    good, bad = (worker(p, mode, **settings) for p in (FaultPlan(), plan))
    expected = await ledger(bad, launch_over_pipes, messages, idle=idle)
    assert await ledger(good, launch, messages, idle=idle) == expected
    happened = {each.fault for each in launch.happened}
    assert happened == set(range(len(plan.faults)))
    return expected


@pytest.mark.parametrize(
    ("fault", "mode"),
    [
        pytest.param(fault, mode, id=f"{name}-{mode.name.lower()}")
        for name, fault in FAULTS.items()
        for mode in MODES
        if mode is Mode.SINGLE or name in EVERYWHERE
    ],
)
async def test_ledger_is_that_of_the_hostile_worker(fault: Fault, mode: Mode) -> None:
    """Each message has the same outcome, and workers die as often, in the same way."""
    await compare(FaultPlan.of(fault, seed=3), mode, numbers(16), window=1)


@pytest.mark.parametrize("fault", CLOCKED.values(), ids=CLOCKED)
async def test_worker_that_hangs_is_replaced_as_the_hostile_one(fault: Fault) -> None:
    """A deadline notices both."""
    settings: dict[str, Any] = {"timeout": QUICK, "window": 1, "ready": True}
    await compare(FaultPlan.of(fault), Mode.SINGLE, numbers(8), **settings)


async def test_worker_that_never_reports_ready_is_not_waited_for() -> None:
    """This holds for a fault from outside as for a hostile worker's."""
    plan = FaultPlan.of(Fault(FaultKind.NEVER_READY, start=1))
    timeout = replace(PATIENT, start=2)
    found = await compare(plan, Mode.SINGLE, numbers(3), timeout=timeout, ready=True)
    assert found.outputs == [(b"0",), (b"1",), (b"2",)]


async def test_worker_that_does_not_heed_sigterm_is_killed_as_the_hostile_one() -> None:
    """Both have to be ended by the last step, SIGKILL (issue 12)."""
    plan = FaultPlan.of(Fault(FaultKind.IGNORE_SIGTERM), once(FaultKind.STALL))
    settings: dict[str, Any] = {"timeout": QUICK, "window": 1, "ready": True}
    found = await compare(plan, Mode.SINGLE, numbers(8), **settings)
    assert found.deaths == [-SIGKILL]


@pytest.mark.parametrize("fault", IDLE.values(), ids=IDLE)
async def test_idle_worker_is_replaced_as_the_hostile_one(fault: Fault) -> None:
    """Nothing is lost with it (issue 12)."""
    found = await compare(FaultPlan.of(fault), Mode.SINGLE, numbers(3), idle=True)
    assert found.outputs == [(b"0",), (b"1",), (b"2",)]
    assert (found.starts, len(found.failed)) == (2, fault.kind in STRAYS)


def test_every_fault_that_both_have_is_compared() -> None:
    """A new kind needs a row in a table (issue 12)."""
    faults = [*FAULTS.values(), *CLOCKED.values(), *IDLE.values()]
    alone = {FaultKind.IGNORE_SIGTERM, FaultKind.NEVER_READY}
    assert {fault.kind for fault in faults} | alone == {
        k for k in FaultKind if not (k.inside or k.outside)
    }


async def test_messages_sent_ahead_are_asked_again() -> None:
    """Replies that the worker wrote after the fault are not passed on."""
    plan = FaultPlan.of(once(FaultKind.KILL))
    found = await compare(plan, Mode.SINGLE, numbers(5000))
    assert found.outputs == [(message,) for message in numbers(5000)]
    assert (found.deaths, found.starts) == ([-SIGKILL], 2)


async def test_extraction_ends_where_its_worker_was_killed() -> None:
    """A plain extraction counts messages as they are written."""
    stage = Stage(
        name="source",
        kind=StageKind.EXTRACT,
        dialect=MarkerDialect(mode=Mode.PLAIN),
        worker=("sh", "-c", "echo a; echo b; echo c; echo d"),
        restart=RestartPolicy(policy="temporary"),
    )
    plan = FaultPlan.of(Fault(FaultKind.KILL, message=3))
    launch = FaultyLaunch(launch_over_pipes, {"source": plan})
    found: list[bytes] = []

    async def extract() -> None:
        async with AsyncSupervisor(stage, launch=launch) as supervisor:
            async for message in supervisor.extract():
                found.append(message)  # noqa: PERF401 - until it fails

    with capture_logs(), pytest.raises(WorkerLost, match="killed by SIGKILL"):
        await extract()
    assert found == [b"a", b"b"]


async def test_any_worker_suffers_and_the_report_has_what() -> None:
    """A shell script can't inject faults; the account has what they led to."""
    program = 'while read -r line; do printf "%s\\n\\0" "$line"; done'
    stage = replace(
        worker(FaultPlan(), Mode.SINGLE),
        worker=("sh", "-c", program),
        dialect=MarkerDialect(),
    )
    stubborn = Fault(FaultKind.IGNORE_SIGTERM)
    plan = FaultPlan.of(stubborn, Fault(FaultKind.EXIT, status=7, equals=b"b"))
    launch = FaultyLaunch(launch_over_pipes, {"t": plan, "other": FaultPlan()})
    found = await ledger(stage, launch, [b"a", b"b", b"c"])
    assert found.outputs == [(b"a",), (), (b"c",)]
    assert set(found.deaths) == {7}
    told = [o for o in launch.happened if o.fault == 1]
    assert {(o.stage, o.worker, o.fate) for o in told} == {
        ("t", "t-1", "exited with status 7")
    }
    assert [o.start for o in told] == list(range(1, len(told) + 1))


async def test_stage_without_a_plan_is_left_alone() -> None:
    """Its workers are those that the inner launch has started."""
    launch = FaultyLaunch(
        launch_over_pipes, {"other": FaultPlan.of(once(FaultKind.KILL))}
    )
    found = await ledger(worker(FaultPlan(), Mode.SINGLE), launch, numbers(16))
    assert (found.deaths, launch.happened) == ([], [])


@pytest.mark.parametrize("kind", [k for k in FaultKind if k.inside])
def test_fault_that_only_a_process_can_have_is_refused(kind: FaultKind) -> None:
    """The error states why."""
    plan = FaultPlan.of(Fault(kind))
    with pytest.raises(ConfigError, match="it can't be done from outside"):
        FaultyLaunch(launch_over_pipes, {"t": plan})


@pytest.mark.core
def test_dialect_without_faults_is_refused() -> None:
    """The error comes when a worker is started, and names dialects (issue 26)."""

    class Other(KclDialect):
        name = "other"

    launch = FaultyLaunch(launch_over_pipes, {"t": FaultPlan.of(Fault(FaultKind.KILL))})
    request = LaunchRequest(("x",), {}, stage="t", dialect=Other())
    with pytest.raises(
        ConfigError, match="kill is not available in dialect other, only"
    ):
        launch(request)
