"""Invariants of workers between two events."""

from __future__ import annotations

from etlstage.supervisor.lifecycle.pool import PoolState
from etlstage.supervisor.lifecycle.worker import WorkerLife, WorkerState

__all__ = ("check_life", "check_pool")


def check_pool(pool: PoolState) -> None:
    """Assert the invariants of all workers of a stage."""
    lives = list(pool._lives.values())
    for life in lives:
        check_life(life)
    retiring = [life for life in lives if life.retiring]
    assert len(retiring) <= 1, f"{retiring} retire at the same time"
    wanted = [life for life in lives if life.wanted]
    gone = bool(wanted) and all(life.finished for life in wanted)
    assert not pool.given_up or gone, "failed too early"
    assert not gone or pool.stopping or pool.given_up, (
        "all workers failed, and it is not reported"
    )


def check_life(life: WorkerLife) -> None:
    """Assert the invariants of one worker."""
    state = life.state
    timed = {WorkerState.STARTING, WorkerState.RUNNING, WorkerState.BACKOFF}
    assert life.alive or life.pid is None, f"{life} has a process"
    assert life.alive or not life.retiring, f"{life} retires"
    assert state is not WorkerState.BACKOFF or life.timer is not None, (
        f"{life} would never be started again"
    )
    assert state in timed or life.timer is None, f"{life} has a timer"
    assert not life._stopping or state not in timed, f"{life} goes on, but is to stop"
    assert len(life.tally) <= life._stage.restart.max, f"{life} restarts on"
