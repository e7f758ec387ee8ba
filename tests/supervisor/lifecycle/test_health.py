"""Whether a stage can work, derived from the lives of its workers."""

from __future__ import annotations

import pytest

from etlstage.errors import WorkerLost
from etlstage.messages import StageKind
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import RecyclePolicy, RestartPolicy
from etlstage.supervisor.lifecycle.events import (
    Event,
    StopRequested,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
    WorkerStarted,
    WorkerWorn,
)
from etlstage.supervisor.lifecycle.pool import Health, PoolState
from etlstage.supervisor.lifecycle.worker import WorkerLife
from tests.staged import staged
from tests.supervisor.lifecycle.invariants import check_pool

READY = Health("ready")


def pool(*events: Event, **settings: object) -> PoolState:
    """Return a pool of two workers after these events, all at 0 seconds."""
    settings = {"workers": 2, **settings}
    state = PoolState(staged(("true",), **settings))
    state.begin()
    for event in events:
        state.handle(event, 0.0)
        check_pool(state)
    return state


def started(*numbers: int) -> list[WorkerStarted]:
    """Return the events of started workers."""
    return [WorkerStarted(f"t-{n}", n) for n in numbers]


def died(number: int) -> WorkerExited:
    """Return the event of a worker that was killed, without progress."""
    return WorkerExited(f"t-{number}", number, -9, lost=0, fate="was killed by SIGKILL")


def test_all_run() -> None:
    """There is nothing to report."""
    assert pool(*started(1, 2)).health(0.0) == READY


def test_workers_may_be_added_while_another_thread_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Properties are for any thread (issue 22)."""
    state = pool(*started(1, 2))

    def alive(_: WorkerLife) -> bool:
        state._add()
        return True

    monkeypatch.setattr(WorkerLife, "alive", property(alive))
    assert state.alive == 2


def test_none_is_ready_yet() -> None:
    """Callers wait, but not in vain."""
    waiting = Health("starting", "waiting for t-1, t-2 to be ready")
    assert pool().health(0.0) == waiting
    state = pool(*started(1, 2), ready=True)
    assert state.health(0.0) == waiting

    state.handle(WorkerReady("t-1", 1), 0.0)
    assert state.health(0.0) == READY  # the other one will come


def test_one_is_restarted() -> None:
    """The other one works; the reason tells when there will be two again."""
    policy = RestartPolicy(delay=8)
    state = pool(*started(1, 2), died(1), restart=policy)
    state.handle(WorkerStarted("t-1", 1, 2), 0.0)
    state.handle(died(1), 0.0)
    assert state.health(3.0) == Health(
        "degraded", "1 of 2 workers running: t-1 will be restarted in 5.0 s"
    )


def test_one_is_at_fault() -> None:
    """It is stopped, then started."""
    fault = WorkerFailed("t-2", 2, WorkerLost("lost", stage="t"))
    state = pool(*started(1, 2), fault)
    replaced = Health("degraded", "1 of 2 workers running: t-2 is being replaced")
    assert state.health(0.0) == replaced

    # A worker that has answered something is restarted at once.
    state = pool(*started(1, 2), fault, died(2)._replace(answered=1))
    assert state.health(0.0) == replaced
    state.handle(WorkerStarted("t-2", 3, 2), 0.0)
    assert state.health(0.0) == READY


def test_none_runs_for_now() -> None:
    """Messages wait, and are not lost."""
    state = pool(*started(1), died(1), workers=1)
    assert state.health(0.0).state == "degraded"
    assert state.health(0.0).reason.startswith("0 of 1 worker running: t-1")


def test_some_are_left_for_good() -> None:
    """Why the others failed is reported for as long as that lasts."""
    state = pool(*started(1, 2), died(1), restart=RestartPolicy(max=0))
    assert state.health(9.0) == Health(
        "degraded",
        "1 of 2 workers running: worker t-1 (pid 1) was killed by SIGKILL"
        "; not restarted: restart.max is 0",
    )


def test_none_is_left() -> None:
    """This state is final."""
    state = pool(*started(1), died(1), workers=1, restart=RestartPolicy(max=0))
    assert state.health(9.0) == Health(
        "failed",
        "all workers failed: worker t-1 (pid 1) was killed by SIGKILL"
        "; not restarted: restart.max is 0",
    )


def test_closed() -> None:
    """Nothing is processed any more."""
    state = pool(*started(1, 2), StopRequested())
    assert state.health(0.0) == Health("failed", "the supervisor is closed")


def test_worker_that_is_replaced_for_its_age_is_no_trouble() -> None:
    """It answers what it has; callers don't notice."""
    recycle = RecyclePolicy(max_messages=5)
    state = pool(*started(1, 2), WorkerWorn("t-1", "answered 5"), recycle=recycle)
    assert state.health(0.0) == READY


def test_extractor_runs_when_it_is_asked() -> None:
    """It is normal that no worker runs before."""
    dialect = MarkerDialect(mode=Mode.PLAIN)
    state = pool(kind=StageKind.EXTRACT, dialect=dialect, workers=1)
    assert state.health(0.0) == READY
