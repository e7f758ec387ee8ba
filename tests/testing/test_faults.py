"""
Every fault, in every mode, with one worker or with three: a stage survives it.

A worker that fails in its first start costs nothing; a message that always makes
workers fail is found, alone, and all others are delivered once, in order.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from etlstage.errors import RemoteProtocolError, StageFailed, WorkerLost
from etlstage.protocol.marker import Mode
from etlstage.stage import (
    ErrorPolicy,
    RecyclePolicy,
    ResourceLimits,
    RestartPolicy,
    Timeouts,
)
from etlstage.supervisor import WorkerExited, WorkerFailed, WorkerStarted
from etlstage.supervisor.lifecycle.events import WorkerWorn
from etlstage.testing import Fault, FaultKind, Moment
from etlstage.testing.clock import virtual_time
from tests.testing.supervised import (
    MODES,
    PATIENT,
    QUICK,
    World,
    delivered,
    hostile,
    numbers,
    simulated,
    supervise,
    supervised,
)

MB = 1_000_000
every_mode = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name.lower())


def _needs_process(value: object) -> bool:
    """Return whether a value of a row has a fault that only a process can have."""
    if isinstance(value, tuple):
        return any(map(_needs_process, value))
    kind = value.kind if isinstance(value, Fault) else value
    return isinstance(kind, FaultKind) and kind.inside and kind is not FaultKind.SPIN


def _cases(*values: object, name: str = "", turn: int) -> Iterator[object]:
    """
    Yield a row in every mode, in memory, alternating between one worker and three.

    In one mode it is run with processes, too; in all of them if it can't be simulated.
    """
    for at, mode in enumerate(MODES, turn):
        case = f"{mode.name.lower()}{name}"
        alone = _needs_process(values)
        workers = (1, 3)[(turn + at) % 2]
        if alone or at % 3 == 0:
            yield pytest.param(
                *values, mode, workers, supervised, id=f"{workers}-{case}"
            )
        if not alone:
            yield pytest.param(
                *(*values, mode, workers, simulated),
                id=f"simulated-{workers}-{case}",
                marks=[pytest.mark.core, pytest.mark.virtual],
            )


def in_every_mode(names: str, rows: Mapping[str, Any]) -> pytest.MarkDecorator:
    """Run each row in every mode."""
    several = "," in names
    return pytest.mark.parametrize(
        f"{names}, mode, workers, world",
        [
            case
            for turn, (name, values) in enumerate(rows.items())
            for case in _cases(
                *(values if several else [values]), name=f"-{name}", turn=turn
            )
        ],
    )


def in_modes(turn: int) -> pytest.MarkDecorator:
    """Run a test in every mode; ``turn`` selects the one that is run with processes."""
    return pytest.mark.parametrize(("mode", "workers", "world"), [*_cases(turn=turn)])


@pytest.fixture
def anyio_backend(request: pytest.FixtureRequest) -> str | tuple[str, dict[str, Any]]:
    """Run on one event loop: the matrix is large, and it does not test the loop."""
    virtual = request.node.get_closest_marker("virtual")
    return virtual_time("asyncio") if virtual else "asyncio"


def first(kind: FaultKind, **values: object) -> Fault:
    """Return a fault of the second message in the first start of each worker."""
    return Fault(kind, message=2, start=1, **values)  # type: ignore[arg-type]


def lock_step(mode: Mode) -> int | None:
    """
    Return the window for faults that shift replies from one message to the next.

    The k-th EOP answers the k-th message: if messages are sent ahead, a missing or
    surplus EOP is not noticed before the worker is idle.
    """
    return 1 if mode is Mode.SINGLE else None


# --- a worker that fails once: all is delivered ---------------------------------------

DEATHS = {
    "kill": (first(FaultKind.KILL), -signal.SIGKILL),
    "segfault": (first(FaultKind.SEGFAULT), -signal.SIGSEGV),
    "abort": (first(FaultKind.ABORT), -signal.SIGABRT),
    "exit": (first(FaultKind.EXIT, status=3), 3),
    "exit-0-early": (first(FaultKind.EXIT, status=0), 0),
    "partial-reply": (first(FaultKind.PARTIAL), -signal.SIGKILL),
}


@in_every_mode("fault, status", DEATHS)
async def test_worker_that_dies_is_started_again(
    fault: Fault, status: int, mode: Mode, workers: int, world: World
) -> None:
    """Exit status 0 in the middle of an exchange is a failure like others."""
    messages = numbers(24)

    outcome = await supervise(
        hostile(fault, mode=mode, workers=workers), messages, world
    )

    assert delivered(outcome.results) == messages
    assert 1 <= outcome.restarts <= workers
    deaths = [e for e in outcome.of(WorkerExited) if e.lost]
    assert {e.status for e in deaths} == {status}
    assert len(deaths) == outcome.restarts


WRONGS = {
    "answers-twice": first(FaultKind.TWICE),
    "wrong-marker": first(FaultKind.WRONG_MARKER),
    "1-GB-reply": first(FaultKind.HUGE),
    "flood-without-end": first(FaultKind.FLOOD, size=10**9),
}


@in_every_mode("fault", WRONGS)
async def test_worker_that_breaks_the_protocol_is_replaced(
    fault: Fault, mode: Mode, workers: int, world: World
) -> None:
    """What it wrote last is not delivered; memory stays within the limits."""
    messages = numbers(24)
    stage = hostile(
        fault,
        mode=mode,
        workers=workers,
        window=lock_step(mode),
        max_message=4 * MB,
        max_reply=8 * MB,
    )

    outcome = await supervise(stage, messages, world)

    assert delivered(outcome.results) == messages
    assert 1 <= outcome.restarts <= workers
    failed = outcome.of(WorkerFailed)
    assert {type(e.error) for e in failed} == {RemoteProtocolError}
    # A worker that answers the last message twice is not started again.
    assert outcome.restarts <= len(failed) <= workers
    assert outcome.peak < 40 * MB * workers


HANGS = {
    "stall": (first(FaultKind.STALL),),
    "spin": (first(FaultKind.SPIN),),
    "sigstop": (first(FaultKind.STOP),),
    "never-answers": (first(FaultKind.SKIP),),
    "too-late": (first(FaultKind.PAUSE, seconds=2),),
    "stall-ignoring-sigterm": (
        Fault(FaultKind.IGNORE_SIGTERM, start=1),
        first(FaultKind.STALL),
    ),
    "closes-stdout": (first(FaultKind.CLOSE_STDOUT),),
    "closes-stdin": (first(FaultKind.CLOSE_STDIN),),
}


@in_every_mode("faults", HANGS)
async def test_worker_that_hangs_is_replaced(
    faults: tuple[Fault, ...], mode: Mode, workers: int, world: World
) -> None:
    """It is stopped within its deadlines; a late reply does not count."""
    messages = numbers(24)
    stage = hostile(
        *faults,
        mode=mode,
        workers=workers,
        timeout=QUICK,
        ready=True,
        window=lock_step(mode),
    )

    outcome = await supervise(stage, messages, world)

    assert delivered(outcome.results) == messages
    assert 1 <= outcome.restarts <= workers


# --- a message that is always at fault: it is found, alone ----------------------------

POISONS = {
    "kill": (FaultKind.KILL, WorkerLost, PATIENT),
    "exit-0": (FaultKind.EXIT, WorkerLost, PATIENT),
    "partial-reply": (FaultKind.PARTIAL, WorkerLost, PATIENT),
    "closes-stdout": (FaultKind.CLOSE_STDOUT, WorkerLost, PATIENT),
    "wrong-marker": (FaultKind.WRONG_MARKER, RemoteProtocolError, PATIENT),
    "1-GB-reply": (FaultKind.HUGE, RemoteProtocolError, PATIENT),
    "stall": (FaultKind.STALL, WorkerLost, QUICK),
}


@in_every_mode("kind, error, timeouts", POISONS)
async def test_message_that_is_always_at_fault_is_found(
    kind: FaultKind,
    error: type[Exception],
    timeouts: Timeouts,
    mode: Mode,
    workers: int,
    world: World,
) -> None:
    """It is retried as often as the stage allows, the last time alone."""
    messages = [*numbers(13), b"poison", *numbers(10)]
    fault = Fault(kind, contains=b"poison", status=0)
    stage = hostile(
        fault,
        mode=mode,
        workers=workers,
        timeout=timeouts,
        ready=True,
        max_message=4 * MB,
        max_reply=8 * MB,
    )

    outcome = await supervise(stage, messages, world)

    (culprit,) = [r for r in outcome.results if r.error is not None]
    assert culprit.message == b"poison"
    assert isinstance(culprit.error, error)
    # Attempts: a batch of four, perhaps with others after it; the batch alone; half of
    # it; the message three times, at last as the first message of its worker.
    attempts = len(culprit.error.attempts)
    assert 3 <= attempts <= 7
    assert delivered(outcome.results) == [m for m in messages if m != b"poison"]
    # Other workers may have done the rest before the last restart.
    assert outcome.restarts == attempts or workers == 3


@every_mode
async def test_no_retries(mode: Mode) -> None:
    """A batch is bisected all the same: its other messages are not to blame."""
    messages = [*numbers(5), b"poison", *numbers(5)]
    stage = hostile(
        Fault(FaultKind.KILL, contains=b"poison"),
        mode=mode,
        on_error=ErrorPolicy(retries=0),
    )

    outcome = await supervise(stage, messages)

    assert [r.message for r in outcome.results if r.error] == [b"poison"]
    assert delivered(outcome.results) == [m for m in messages if m != b"poison"]


@in_modes(1)
async def test_neighbours_that_are_at_fault(
    mode: Mode, workers: int, world: World
) -> None:
    """Each is found; the stage does not end because there are many in a row."""
    messages = [*numbers(4), *[b"poison"] * 5, *numbers(4)]
    stage = hostile(
        Fault(FaultKind.KILL, contains=b"poison"),
        mode=mode,
        workers=workers,
    )

    outcome = await supervise(stage, messages, world)

    assert [r.message for r in outcome.results if r.error] == [b"poison"] * 5
    assert {type(r.error) for r in outcome.results if r.error} == {WorkerLost}
    assert delivered(outcome.results) == [m for m in messages if m != b"poison"]


@in_modes(2)
@pytest.mark.parametrize("kind", [FaultKind.KILL, FaultKind.WRONG_MARKER])
async def test_worker_that_fails_at_its_second_message(
    kind: FaultKind, mode: Mode, workers: int, world: World
) -> None:
    """No message is blamed for what is wrong with the process."""
    stage = hostile(Fault(kind, message=2), mode=mode, workers=workers)

    outcome = await supervise(stage, numbers(13), world)

    assert delivered(outcome.results) == numbers(13)


# --- faults that cost nothing ---------------------------------------------------------

NUISANCES = {
    "cut-markers": (Fault(FaultKind.CUT),),
    "late-in-time": (Fault(FaultKind.PAUSE, message=2, seconds=0.2),),
    "slow-start": (Fault(FaultKind.PAUSE, at=Moment.START, seconds=0.2),),
    "1-MB-of-stderr": (Fault(FaultKind.STDERR, message=2, size=MB),),
    "leak": (Fault(FaultKind.LEAK, size=MB),),
    "child": (Fault(FaultKind.GRANDCHILD, message=2),),
    "child-in-a-session": (Fault(FaultKind.GRANDCHILD, message=2, own_session=True),),
    "ignores-sigterm": (Fault(FaultKind.IGNORE_SIGTERM),),
    "spins-after-eof": (Fault(FaultKind.SPIN, at=Moment.END),),
    "spins-after-eof-ignoring-sigterm": (
        Fault(FaultKind.IGNORE_SIGTERM),
        Fault(FaultKind.SPIN, at=Moment.END),
    ),
    "stops-after-eof": (Fault(FaultKind.STOP, at=Moment.END),),
}


@in_every_mode("faults", NUISANCES)
async def test_nuisance_costs_no_restart(
    faults: tuple[Fault, ...], mode: Mode, workers: int, world: World
) -> None:
    """All is delivered, and processes that resist are gone in bounded time."""
    messages = numbers(24)

    outcome = await supervise(
        hostile(*faults, mode=mode, workers=workers), messages, world
    )

    assert delivered(outcome.results) == messages
    assert outcome.restarts == 0
    assert outcome.of(WorkerFailed) == []
    assert len(outcome.of(WorkerExited)) == workers
    assert outcome.peak < 60 * MB


@every_mode
async def test_ten_megabytes_of_stderr(mode: Mode) -> None:
    """It is read while the worker works, and only its end is kept."""
    outcome = await supervise(
        hostile(Fault(FaultKind.STDERR, message=3), mode=mode), numbers(8)
    )

    assert delivered(outcome.results) == numbers(8)
    assert outcome.restarts == 0
    assert outcome.peak < 40 * MB


@in_modes(0)
async def test_flood_of_tiny_messages(mode: Mode, workers: int, world: World) -> None:
    """A reply may have any number of messages, within its limit in bytes."""
    stage = hostile(
        Fault(FaultKind.FLOOD, equals=b"3", size=50_000), mode=mode, workers=workers
    )

    outcome = await supervise(stage, numbers(24), world)

    assert delivered(outcome.results).count(b"x") == 50_000
    assert [m for m in delivered(outcome.results) if m != b"x"] == numbers(24)
    assert outcome.restarts == 0


# --- at the start ---------------------------------------------------------------------


@in_modes(1)
async def test_failing_only_at_the_third_start(
    mode: Mode, workers: int, world: World
) -> None:
    """Two starts fail at work, one fails at once, and the fourth is good."""
    messages = numbers(60)
    stage = hostile(
        *(Fault(FaultKind.KILL, message=1, start=start) for start in (1, 2)),
        Fault(FaultKind.EXIT, at=Moment.START, start=3),
        mode=mode,
        workers=workers,
        on_error=ErrorPolicy(retries=5),
    )

    outcome = await supervise(stage, messages, world)

    assert delivered(outcome.results) == messages
    starts = [e.start for e in outcome.of(WorkerStarted) if e.worker == "t-1"]
    if workers == 1:
        assert starts == [1, 2, 3, 4]
        assert [e.status for e in outcome.of(WorkerExited)][:3] == [-9, -9, 1]


@in_modes(2)
async def test_worker_that_never_starts_fails_the_stage(
    mode: Mode, workers: int, world: World
) -> None:
    """After ``restart.max`` restarts all messages have the same error."""
    stage = hostile(
        Fault(FaultKind.EXIT, at=Moment.START),
        mode=mode,
        workers=workers,
        restart=RestartPolicy(max=3, delay=0.01),
        on_error=ErrorPolicy(retries=100),
    )

    outcome = await supervise(stage, numbers(24), world)

    assert {type(r.error) for r in outcome.results} == {StageFailed}
    assert outcome.restarts == 3 * workers


@every_mode
async def test_one_of_three_never_starts(mode: Mode) -> None:
    """The others do its work."""
    stage = hostile(
        Fault(FaultKind.EXIT, at=Moment.START, worker="t-1"),
        mode=mode,
        workers=3,
        restart=RestartPolicy(max=2, delay=0.01),
    )

    outcome = await supervise(stage, numbers(60))

    assert delivered(outcome.results) == numbers(60)
    again = {e.worker for e in outcome.of(WorkerStarted) if e.start > 1}
    assert again <= {"t-1"}


@in_modes(0)
async def test_worker_that_is_never_ready_is_replaced(
    mode: Mode, workers: int, world: World
) -> None:
    """Readiness has a deadline of its own, before any message is sent."""
    stage = hostile(
        Fault(FaultKind.NEVER_READY, start=1),
        mode=mode,
        workers=workers,
        ready=True,
        timeout=Timeouts(start=2, message=10, stop=0.15),
    )

    outcome = await supervise(stage, numbers(24), world)

    assert delivered(outcome.results) == numbers(24)
    assert 1 <= outcome.restarts <= workers
    assert {type(e.error) for e in outcome.of(WorkerFailed)} == {WorkerLost}
    assert [e.lost for e in outcome.of(WorkerExited) if e.lost] == []


@in_modes(1)
async def test_worker_that_is_ready_late_is_waited_for(
    mode: Mode, workers: int, world: World
) -> None:
    """Nothing is sent to it before, so no message is late."""
    stage = hostile(
        Fault(FaultKind.PAUSE, at=Moment.START, seconds=0.4),
        mode=mode,
        workers=workers,
        ready=True,
        timeout=QUICK,
    )

    outcome = await supervise(stage, numbers(24), world)

    assert delivered(outcome.results) == numbers(24)
    assert outcome.restarts == 0


# --- when there is nothing to do ------------------------------------------------------

IDLE = {
    "exits-with-0": (Fault(FaultKind.EXIT, at=Moment.IDLE, start=1, status=0), False),
    "is-killed": (Fault(FaultKind.KILL, at=Moment.IDLE, start=1), False),
    "writes-eop": (Fault(FaultKind.EXTRA_EOP, start=1), True),
    "prints": (Fault(FaultKind.GARBAGE, at=Moment.IDLE, start=1), True),
    "closes-stdout": (Fault(FaultKind.CLOSE_STDOUT, at=Moment.IDLE, start=1), False),
}


@in_every_mode("fault, blamed", IDLE)
async def test_idle_worker_that_fails_is_replaced(
    fault: Fault, blamed: bool, mode: Mode, workers: int, world: World
) -> None:
    """Nothing is lost with it, and its replacement answers later messages."""
    stage = hostile(fault, mode=mode, workers=workers)
    async with world(stage) as (supervisor, outcome):
        before = await supervisor.submit(numbers(24))
        with supervisor.events() as events:
            started = 0
            while started < workers:
                event = await events.receive()
                started += isinstance(event, WorkerStarted) and event.start == 2
        behind = await supervisor.submit(numbers(24))

    assert delivered(before) == delivered(behind) == numbers(24)
    assert outcome.restarts == workers
    # Messages just answered may be retried: their replies were not proven yet.
    assert all(e.retried == e.lost for e in outcome.of(WorkerExited))
    failed = {type(e.error) for e in outcome.of(WorkerFailed)}
    assert failed == ({RemoteProtocolError} if blamed else set())


@in_modes(2)
async def test_idle_worker_that_hangs_is_replaced(
    mode: Mode, workers: int, world: World
) -> None:
    """Its missing heartbeats give it away."""
    stage = hostile(
        Fault(FaultKind.STALL, at=Moment.IDLE, start=1),
        mode=mode,
        workers=workers,
        ready=True,
        timeout=Timeouts(start=10, message=10, heartbeat=2, stop=0.15),
    )
    async with world(stage) as (supervisor, outcome):
        with supervisor.events() as events:
            started = 0
            while started < workers:
                event = await events.receive()
                started += isinstance(event, WorkerStarted) and event.start == 2
        outcome.results = await supervisor.submit(numbers(24))

    assert delivered(outcome.results) == numbers(24)
    assert outcome.restarts == workers
    assert len(outcome.of(WorkerFailed)) == workers


# --- memory ---------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "workers"), [*zip(MODES, (1, 3, 1), strict=True)])
async def test_leaking_worker_meets_its_limit(mode: Mode, workers: int) -> None:
    """It dies again and again, and makes progress each time."""
    stage = hostile(
        Fault(FaultKind.LEAK, size=20 * MB),
        mode=mode,
        workers=workers,
        limits=ResourceLimits(memory=150 * MB),
    )

    outcome = await supervise(stage, numbers(40))

    assert delivered(outcome.results) == numbers(40)
    assert outcome.restarts >= 1


async def test_leaking_worker_is_recycled() -> None:
    """This happens between two messages, so nothing is lost."""
    stage = hostile(
        Fault(FaultKind.LEAK, size=2 * MB),
        Fault(FaultKind.PAUSE, seconds=0.02),
        recycle=RecyclePolicy(max_rss=50 * MB),
    )

    outcome = await supervise(stage, numbers(100))

    assert delivered(outcome.results) == numbers(100)
    assert outcome.restarts >= 1
    # The last one is not replaced if it has answered the last message.
    assert len(outcome.of(WorkerWorn)) - outcome.restarts in (0, 1)
    assert [e.lost for e in outcome.of(WorkerExited) if e.lost] == []


# --- what no one can notice -----------------------------------------------------------


@in_modes(0)
async def test_stray_print_in_a_reply(mode: Mode, workers: int, world: World) -> None:
    """It is part of the reply, except where the worker must ask for more first."""
    fault = Fault(FaultKind.GARBAGE, equals=b"0", start=1)
    outcome = await supervise(
        hostile(fault, mode=mode, workers=workers), numbers(24), world
    )

    outputs = delivered(outcome.results)
    if mode is Mode.BATCH_WORKER:
        assert outputs == numbers(24)
        assert {type(e.error) for e in outcome.of(WorkerFailed)} == {
            RemoteProtocolError
        }
    else:
        assert outputs == [b"stray print", *numbers(24)]
        assert outcome.restarts == 0


# --- several at once ------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("own_session", [False, True])
async def test_child_that_outlives_a_worker_that_dies(
    mode: Mode, *, own_session: bool
) -> None:
    """
    It holds the dead worker's pipes; it delays nothing, and is killed.

    In a session of its own neither its process group nor its parents lead to it.
    """
    stage = hostile(
        Fault(FaultKind.GRANDCHILD, message=1, own_session=own_session),
        first(FaultKind.KILL),
        mode=mode,
    )

    outcome = await supervise(stage, numbers(24))

    assert delivered(outcome.results) == numbers(24)
    assert outcome.restarts == 1


@in_modes(1)
async def test_everything_at_once(mode: Mode, workers: int, world: World) -> None:
    """Starts fail in many ways, and there is a poison message."""
    messages = [*numbers(100), b"poison", *numbers(100)]
    stage = hostile(
        Fault(FaultKind.CUT, probability=0.1),
        Fault(FaultKind.STDERR, probability=0.05, size=100_000),
        Fault(FaultKind.KILL, probability=0.01),
        Fault(FaultKind.EXIT, probability=0.01, status=0),
        Fault(FaultKind.PARTIAL, probability=0.01),
        Fault(FaultKind.WRONG_MARKER, probability=0.01),
        Fault(FaultKind.STALL, message=9, start=2),
        Fault(FaultKind.STOP, message=5, start=4),
        Fault(FaultKind.SEGFAULT, equals=b"poison"),
        mode=mode,
        workers=workers,
        seed=11,
        timeout=QUICK,
        ready=True,
        on_error=ErrorPolicy(retries=4),
    )

    outcome = await supervise(stage, messages, world)

    assert [r.message for r in outcome.results if r.error] == [b"poison"]
    assert delivered(outcome.results) == [m for m in messages if m != b"poison"]
