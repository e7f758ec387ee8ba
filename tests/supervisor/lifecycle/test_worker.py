"""One worker over several starts."""

from __future__ import annotations

import math
from collections import deque

import pytest

from etlstage.errors import WorkerLost
from etlstage.messages import StageKind
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import RestartPolicy
from etlstage.supervisor.lifecycle.events import (
    AliveSeen,
    Event,
    Instruction,
    Publish,
    RemainsEnded,
    Spawn,
    StopRequested,
    StopWorker,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
    WorkerStarted,
    WorkerTimerRang,
    WorkerWorn,
)
from etlstage.supervisor.lifecycle.worker import (
    TRANSITIONS,
    WorkerHistory,
    WorkerLife,
    WorkerState,
    fate_of,
)
from tests.staged import staged
from tests.supervisor.lifecycle.invariants import check_life

STARTED = WorkerStarted("t-1", 7)
FAILED = WorkerFailed("t-1", 7, WorkerLost("lost", stage="t"), "died")


class Life:
    """A worker that is being started, and the instructions that it gives."""

    def __init__(self, **settings: object) -> None:
        stage = staged(("true",), **settings)
        self.out: list[Instruction] = []
        self.worker = WorkerLife("t-1", stage, lambda: 0.0, self.out)
        self.worker.spawn()

    def handle(self, *events: Event) -> list[Instruction]:
        """Return the instructions that the last of these events leads to."""
        for event in events:
            self.out.clear()
            self.worker.handle(event, 0.0)
            check_life(self.worker)
        return self.out


def test_readiness_comes_too_late_for_a_worker_that_is_stopped() -> None:
    """It is not fed."""
    life = Life(ready=True)

    assert (
        life.handle(STARTED, StopRequested(patient=True), WorkerReady("t-1", 7)) == []
    )
    assert life.worker.state is WorkerState.STOPPING


def test_worker_that_is_stopped_is_not_worn() -> None:
    """Its wear no longer matters."""
    life = Life()

    life.handle(STARTED, StopRequested(patient=True), WorkerWorn("t-1", "old"))
    assert life.worker.worn is None


def test_sign_of_life_while_it_is_stopped_means_nothing() -> None:
    """A worker may send some until it exits."""
    life = Life()

    assert life.handle(STARTED, StopRequested(patient=True), AliveSeen("t-1")) == []


@pytest.mark.parametrize(("events", "patient"), [((), True), ((FAILED,), False)])
def test_worker_at_fault_is_not_waited_for(
    events: tuple[Event, ...], patient: bool
) -> None:
    """Any other worker may exit by itself once its stdin is closed."""
    life = Life()

    out = life.handle(STARTED, *events, StopRequested(patient=True))
    assert out[-1] == StopWorker("t-1", patient)


def test_what_an_earlier_start_left_behind_is_reported_in_any_state() -> None:
    """It is remembered if killed; the worker's state is unchanged (issue 10)."""
    life = Life()
    killed, late = RemainsEnded("t-1", 7, 2), RemainsEnded("t-1", 7, 0, late=9)
    exited = WorkerExited("t-1", 7, 0, lost=0)

    for event in (STARTED, StopRequested(patient=True), exited):
        for remains in (killed, late):
            state = life.worker.state
            assert life.handle(remains) == [Publish(remains)]
            assert life.worker.state is state
        life.handle(event)
    story = life.worker.story.lines(0.0)
    assert story.count("processes left behind by pid 7: 2 killed 0.00 s ago") == 3
    assert len(story) == 6


def extractor() -> Life:
    """Return the life of an extracting worker that may be restarted once."""
    return Life(
        kind=StageKind.EXTRACT,
        dialect=MarkerDialect(mode=Mode.CYCLIC),
        restart=RestartPolicy(max=1),
    )


def test_extractor_is_restarted_as_long_as_it_gets_further() -> None:
    """Its restarts are counted from the last progress (issue 10)."""
    life = extractor()
    gone = WorkerExited("t-1", 7, -9, lost=1, retried=1, progress=True)
    for start in 2, 3, 4:
        out = life.handle(WorkerStarted("t-1", 7, start - 1), gone)
        assert Spawn("t-1", start, math.inf) in out


def test_extractor_that_gets_no_further_fails_permanently() -> None:
    """A request is not to blame as a message is: its source may be gone."""
    life = extractor()
    gone = WorkerExited("t-1", 7, -9, lost=1, retried=1)
    assert Spawn("t-1", 2, math.inf) in life.handle(STARTED, gone)
    life.handle(WorkerStarted("t-1", 7, 2), gone)
    assert life.worker.state is WorkerState.FATAL


@pytest.mark.parametrize("status", [0, 1])
def test_extractor_that_ends_before_it_is_ready_makes_no_progress(status: int) -> None:
    """It held no round, but was started for one (issue 22)."""
    life = Life(
        kind=StageKind.EXTRACT,
        dialect=MarkerDialect(mode=Mode.PLAIN),
        ready=True,
        restart=RestartPolicy(max=2, delay=3),
    )
    gone = WorkerExited("t-1", 7, status, lost=0)
    assert Spawn("t-1", 2, math.inf) in life.handle(STARTED, gone)
    life.handle(STARTED, gone)
    assert (life.worker.state, life.worker.timer) == (WorkerState.BACKOFF, 3)
    life.handle(WorkerTimerRang("t-1"), STARTED, gone)
    assert (life.worker.state, life.worker.wanted) == (WorkerState.FATAL, True)


def test_worker_that_is_not_needed_before_it_is_ready_is_stopped() -> None:
    """It has nothing to answer."""
    life = Life(ready=True)
    life.handle(STARTED)

    life.worker.dismiss(0.0)
    assert life.out[-1] == StopWorker("t-1", patient=True)


def test_worker_that_is_not_needed_is_not_waited_for() -> None:
    """It waited to be restarted, which is cancelled."""
    life = Life()
    life.handle(*(STARTED, WorkerExited("t-1", 7, 1, lost=0)) * 2)
    assert life.worker.timer is not None

    life.worker.dismiss(0.0)
    check_life(life.worker)
    assert life.worker.state is WorkerState.EXITED


def test_worker_that_is_on_its_way_out_is_not_stopped_twice() -> None:
    """It retires, and no other worker takes its place."""
    life = Life()
    life.handle(STARTED, WorkerWorn("t-1", "was old"))
    life.worker.retire(0.0)
    life.out.clear()

    life.worker.dismiss(0.0)
    assert life.out == []
    life.handle(WorkerExited("t-1", 7, 0, lost=0, stopped=True))
    assert life.worker.finished


def test_extractor_that_went_well_begins_anew() -> None:
    """Earlier restarts do not count for the next round."""
    life = extractor()
    gone = WorkerExited("t-1", 7, -9, lost=1, retried=1)
    life.handle(STARTED, gone)
    life.handle(STARTED, WorkerExited("t-1", 7, 0, lost=0, answered=1))
    assert life.worker.finished
    life.worker.want()

    out = life.handle(WorkerStarted("t-1", 7, 3), gone)
    assert Spawn("t-1", 4, math.inf) in out


def test_extractor_that_reports_that_none_could_work_is_not_asked_again() -> None:
    """Whatever happens to the request that it had (issue 15)."""
    life = Life(kind=StageKind.EXTRACT, dialect=MarkerDialect(mode=Mode.CYCLIC))
    life.handle(STARTED, FAILED._replace(cause="abnormal"))
    life.handle(WorkerExited("t-1", 7, 1, lost=1))
    assert (life.worker.state, life.worker.wanted) == (WorkerState.FATAL, True)


def reached(start: WorkerState) -> set[WorkerState]:
    """Return the states that any number of events may lead to from ``start``."""
    found, new = {start}, deque([start])
    while new:
        state = new.popleft()
        ways = (to for (at, _), to in TRANSITIONS.items() if at is state)
        for to in frozenset().union(*ways) - found:
            found.add(to)
            new.append(to)
    return found


def test_every_state_is_left_by_something_and_entered_by_something() -> None:
    """The table has transitions from and to every state."""
    assert {state for state, _ in TRANSITIONS} == set(WorkerState)
    assert frozenset().union(*TRANSITIONS.values()) == set(WorkerState)


def test_first_start_may_lead_anywhere() -> None:
    """To an exit, to another start, and to permanent failure."""
    assert reached(WorkerState.STARTING) == set(WorkerState)


@pytest.mark.parametrize("end", [WorkerState.EXITED, WorkerState.FATAL])
def test_who_has_ended_stays_there(end: WorkerState) -> None:
    """Only the supervisor itself can start such a worker again."""
    assert reached(end) == {end}


@pytest.mark.parametrize("state", WorkerState)
def test_stop_may_be_requested_at_any_time(state: WorkerState) -> None:
    """And no worker is started after it."""
    assert (state, StopRequested) in TRANSITIONS
    after = TRANSITIONS[state, StopRequested]
    assert after <= {WorkerState.STOPPING, WorkerState.EXITED, WorkerState.FATAL}


def test_history_is_reported_from_now() -> None:
    """As times before now, oldest first."""
    history = WorkerHistory()
    history.note(1.0, "started")
    history.note(2.5, "ready")

    assert history.lines(3.0) == ("started 2.00 s ago", "ready 0.50 s ago")


def test_history_forgets_what_is_long_ago() -> None:
    """It keeps sixteen events, enough for five failed starts."""
    history = WorkerHistory()
    for number in range(20):
        history.note(0.0, f"event {number}")

    story = history.lines(0.0)
    assert len(story) == 16
    assert story[-1] == "event 19 0.00 s ago"


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (WorkerExited("t-1", 7, 3, lost=0), "exited with status 3"),
        (WorkerExited("t-1", 7, -9, lost=2, fate="died"), "died, 2 held"),
        (
            WorkerExited("t-1", 7, 0, lost=0, answered=1),
            "exited with status 0, 1 message",
        ),
    ],
)
def test_fate_shows_what_was_answered_and_what_was_not(
    event: WorkerExited, text: str
) -> None:
    """Each is mentioned only if there is any."""
    assert fate_of(event).startswith(text)
