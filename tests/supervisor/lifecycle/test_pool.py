"""
Decisions about workers: single ones, then any interleaving of them.

The second half runs a whole stage in memory: the decisions, the messages and the
protocol are real; processes, bytes in pipes and the clock are simulated.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from etlstage.errors import Attempt, StageFailed, WorkerLost
from etlstage.protocol.base import Limits, Side
from etlstage.protocol.events import Ended, Failed
from etlstage.protocol.marker import Mode
from etlstage.stage import (
    BatchPolicy,
    ErrorPolicy,
    Order,
    PoolPolicy,
    RecyclePolicy,
    RestartPolicy,
    Stage,
    Timeouts,
)
from etlstage.supervisor.exchange.backlog import Backlog
from etlstage.supervisor.exchange.dispatch import Dispatcher
from etlstage.supervisor.exchange.exchange import Outcome
from etlstage.supervisor.exchange.retry import Loss
from etlstage.supervisor.exchange.submission import AnyOrder, Submission
from etlstage.supervisor.lifecycle.events import (
    AliveSeen,
    DemandSeen,
    Event,
    Fail,
    FeedWorker,
    GiveUp,
    Instruction,
    Publish,
    Retire,
    ScaleRequested,
    SetTimer,
    Spawn,
    StartFailed,
    StopRequested,
    StopWorker,
    SupervisorEvent,
    WorkerExited,
    WorkerFailed,
    WorkerFailedPermanently,
    WorkerReady,
    WorkerStarted,
    WorkerTimerRang,
    WorkerWorn,
)
from etlstage.supervisor.lifecycle.pool import PoolState
from etlstage.supervisor.lifecycle.worker import WorkerState
from tests.supervisor.exchange.test_dispatch import Peer, give, stage
from tests.supervisor.lifecycle.invariants import check_pool

LOST = WorkerLost("lost", stage="t")


class Driver:
    """Passes events to a state and keeps the instructions, but for published events."""

    def __init__(self, run: Stage, random: Callable[[], float] = lambda: 0.0) -> None:
        self.state = PoolState(run, random)
        self.told: list[SupervisorEvent] = []
        self.now = 0.0
        self.out = self._keep(self.state.begin())

    def handle(self, event: Event) -> list[Instruction]:
        """Return the instructions, except ``Publish``."""
        self.out = self._keep(self.state.handle(event, self.now))
        check_pool(self.state)
        return self.out

    def start(self, worker: str = "t-1", pid: int = 7) -> list[Instruction]:
        """Report that a worker was started."""
        return self.handle(WorkerStarted(worker, pid))

    def end(
        self,
        worker: str = "t-1",
        status: int = 1,
        *,
        lost: int = 0,
        answered: int = 0,
        failed: int = 0,
        tries: int = 0,
        untouched: bool = False,
        stopped: bool = False,
    ) -> None:
        """Report that a worker has exited."""
        event = WorkerExited(
            worker,
            7,
            status,
            lost=lost,
            answered=answered,
            failed=failed,
            tries=tries,
            untouched=untouched,
            stopped=stopped,
        )
        self.handle(event)

    def _keep(self, instructions: list[Instruction]) -> list[Instruction]:
        self.told += [i.event for i in instructions if isinstance(i, Publish)]
        return [i for i in instructions if not isinstance(i, Publish)]


def driver(**policies: object) -> Driver:
    """Return the driver of a stage, called ``t``."""
    return Driver(stage(**policies))  # type: ignore[arg-type]


# --- starting ------------------------------------------------------------------------


def test_every_worker_is_started() -> None:
    """Each under its own name."""
    d = driver(workers=2)

    assert d.out == [Spawn("t-1", 1, math.inf), Spawn("t-2", 1, math.inf)]


def test_started_means_ready_by_default() -> None:
    """It is fed at once."""
    d = driver()

    assert d.start() == [FeedWorker("t-1")]
    assert d.state["t-1"] is WorkerState.RUNNING


def test_worker_that_announces_itself_is_waited_for() -> None:
    """It is fed once it reports readiness."""
    d = driver(ready=True, timeout=Timeouts(start=10.0))

    assert d.start() == [SetTimer("t-1", 10.0)]
    d.now = 3.0
    assert d.handle(WorkerReady("t-1", 7)) == [FeedWorker("t-1"), SetTimer("t-1", None)]


def test_worker_that_does_not_get_ready_is_given_up() -> None:
    """The reason states the deadline."""
    d = driver(ready=True, timeout=Timeouts(start=10.0))
    d.start()
    d.now = 10.0

    assert d.handle(WorkerTimerRang("t-1")) == [
        Fail("t-1", "was not ready within 10 s (timeout.start)", "start")
    ]
    assert d.handle(WorkerFailed("t-1", 7, LOST)) == [StopWorker("t-1", patient=False)]


def test_no_one_waits_for_ever_for_readiness_by_default() -> None:
    """``start: null`` sets no timer."""
    d = driver(ready=True, timeout=Timeouts(start=None))

    assert d.start() == []


# --- ending --------------------------------------------------------------------------


def test_worker_that_answered_is_started_again_at_once() -> None:
    """As often as necessary."""
    d = driver(restart=RestartPolicy(max=1))
    for start in range(2, 9):
        d.start()
        d.end(answered=1, lost=1)
        assert d.out == [Spawn("t-1", start, math.inf)]


def test_starts_without_progress_wait_longer_and_longer() -> None:
    """Then the worker fails permanently, and the stage with the last worker."""
    d = driver(restart=RestartPolicy(max=3, delay=1.0))
    d.start()
    d.end()
    assert d.out == [Spawn("t-1", 2, math.inf)]
    for delay in 1.0, 2.0:
        d.start()
        d.end()
        assert d.out == [SetTimer("t-1", d.now + delay)]
        assert d.state["t-1"] is WorkerState.BACKOFF
        d.now += delay
        assert isinstance(d.handle(WorkerTimerRang("t-1"))[0], Spawn)
    d.start()
    d.end()

    assert d.state["t-1"] is WorkerState.FATAL
    (given_up,) = d.out
    assert isinstance(given_up, GiveUp)
    assert given_up.reason == (
        "worker t-1 (pid 7) exited with status 1"
        " after 3 restarts without progress in 3.0 s (restart.max)"
    )
    last = d.told[-1]
    assert isinstance(last, WorkerFailedPermanently)
    assert isinstance(last.error, StageFailed)
    assert str(last.error) == f"stage t: {given_up.reason}; not restarted again"
    assert last.error.story[0] == "event: started (pid 7, start 1) 3.00 s ago"


@pytest.mark.parametrize("most", [5, 8, 20])
def test_time_in_back_off_does_not_count(most: int) -> None:
    """The delays of so many restarts may take longer than ``within`` (issue 22)."""
    d = driver(restart=RestartPolicy(max=most))
    for _ in range(most):
        d.start()
        d.end()
        if d.state["t-1"] is WorkerState.BACKOFF:
            (timer,) = d.out
            assert isinstance(timer, SetTimer)
            d.now = timer.at or 0.0
            d.handle(WorkerTimerRang("t-1"))
    d.start()
    d.end()

    assert d.state["t-1"] is WorkerState.FATAL
    assert f"after {most} restarts without progress" in str(d.out)


def test_worker_that_fails_seldom_is_restarted_for_ever() -> None:
    """What it ran between two failures counts, and so each is the first."""
    d = driver(restart=RestartPolicy(max=1, within=60.0))
    for start in range(2, 30):
        d.start()
        d.now += 60.5
        d.end()
        assert d.out == [Spawn("t-1", start, math.inf)]


def test_worker_that_died_of_a_message_has_made_progress() -> None:
    """The more often a message has failed, the longer the wait, but it never ends."""
    d = driver(restart=RestartPolicy(max=1, delay=1.0))
    for _ in range(9):
        d.start()
        d.end(lost=5, tries=1)
        assert isinstance(d.out[0], Spawn)
        for tries, delay in (2, 1.0), (3, 2.0):
            d.start()
            d.end(lost=1, tries=tries)
            assert d.out == [SetTimer("t-1", d.now + delay)]
            d.now += delay
            d.handle(WorkerTimerRang("t-1"))
        d.start()
        d.end(lost=1, failed=1)
        assert isinstance(d.out[0], Spawn)


def test_worker_that_read_nothing_has_made_no_progress() -> None:
    """Though it held messages: they can't have killed it."""
    d = driver(restart=RestartPolicy(max=1))
    for _ in range(2):
        d.start()
        d.end(lost=5, untouched=True)

    assert d.state["t-1"] is WorkerState.FATAL


def test_no_restarts_means_none() -> None:
    """Not even to find the message at fault."""
    d = driver(restart=RestartPolicy(max=0))
    d.start()
    d.end(lost=1, tries=1, answered=5)

    assert d.state["t-1"] is WorkerState.FATAL
    why = "worker t-1 (pid 7) exited with status 1, 5 messages answered, 1 held"
    why += "; not restarted: restart.max is 0"
    assert d.out == [GiveUp("t-1", why)]
    last = d.told[-1]
    assert isinstance(last, WorkerFailedPermanently)
    assert str(last.error) == f"stage t: {why}"


def test_worker_that_answered_all_that_it_held_has_no_message_to_blame() -> None:
    """Restarts count, unless it has committed something (issue 25)."""
    d = driver(restart=RestartPolicy(max=1, delay=1.0))
    for answered in (0, 5, 0):
        d.start()
        d.handle(
            WorkerExited("t-1", 7, 1, lost=3, answered=answered, all_answered=True)
        )
    assert d.state["t-1"] is WorkerState.FATAL


def test_one_of_two_workers_may_be_fatal() -> None:
    """The stage continues with the other one."""
    d = driver(workers=2, restart=RestartPolicy(max=0))
    d.start("t-1")
    d.start("t-2")
    d.end("t-1")
    assert (d.state["t-1"], d.out, d.state.given_up) == (WorkerState.FATAL, [], False)
    d.end("t-2")

    assert d.state.given_up


def test_worker_that_reports_that_none_could_work_ends_the_stage() -> None:
    """Others finish what they have, and none is restarted (issue 15)."""
    d = driver(workers=3)
    for name in ("t-1", "t-2"):
        d.start(name)
    out = d.handle(WorkerFailed("t-2", 7, LOST, "abnormal"))
    assert [i for i in out if not isinstance(i, SetTimer)] == [
        StopWorker("t-2", patient=False),
        Retire("t-1"),
        StopWorker("t-3", patient=True),
    ]
    d.end("t-1", answered=1)
    assert not d.out
    d.end("t-2", status=0)
    assert [type(i) for i in d.out] == [GiveUp]
    assert d.state.given_up
    assert d.handle(DemandSeen(100)) == []


def test_transient_worker_may_end_well() -> None:
    """Status 0 while idle is no failure; with held messages it is one."""
    d = driver(restart=RestartPolicy(policy="transient"))
    d.start()
    d.end(status=0, lost=1, answered=5)
    assert d.out == [Spawn("t-1", 2, math.inf)]
    d.start()
    d.end(status=0)

    assert d.state["t-1"] is WorkerState.EXITED
    why = "worker t-1 (pid 7) exited with status 0"
    why += "; not restarted: restart.policy is transient"
    assert d.out == [GiveUp("t-1", why)]


@pytest.mark.parametrize(
    ("restart", "setting"),
    [
        (RestartPolicy(policy="temporary"), "restart.policy is temporary"),
        (RestartPolicy(never_on=frozenset({1, 7})), "restart.never_on has 7"),
    ],
)
def test_setting_that_forbids_a_restart_is_named(
    restart: RestartPolicy, setting: str
) -> None:
    """That is what the reader of the error can change (issue 22)."""
    d = driver(restart=restart)
    d.start()
    d.end(status=7)

    (given_up,) = d.out
    assert isinstance(given_up, GiveUp)
    assert given_up.reason.endswith(f"status 7; not restarted: {setting}")


def test_program_that_is_gone_makes_no_progress() -> None:
    """It may reappear, so starting is tried again."""
    d = driver(restart=RestartPolicy(max=1))
    d.start()
    d.end()
    d.handle(StartFailed("t-1", OSError("gone")))

    assert d.state["t-1"] is WorkerState.FATAL
    assert "could not be started after 1 restart without progress in" in str(d.out)


def test_fatal_condition_is_no_matter_of_restarts() -> None:
    """None was tried after it, and no setting would have allowed one (issue 22)."""
    d = driver()
    d.start()
    d.handle(WorkerFailed("t-1", 7, LOST, "abnormal"))
    d.end(status=0)

    assert d.out == [GiveUp("t-1", "worker t-1 (pid 7) exited with status 0")]


def test_one_fault_is_enough() -> None:
    """Faults while it is being stopped are not reported."""
    d = driver()
    d.start()
    d.handle(WorkerFailed("t-1", 7, LOST))

    assert d.handle(WorkerFailed("t-1", 7, LOST)) == []
    assert [type(e) for e in d.told] == [WorkerStarted, WorkerFailed]


# --- signs of life -------------------------------------------------------------------


def test_idle_worker_must_give_signs_of_life() -> None:
    """Each one moves the deadline; a worker without one is given up."""
    d = driver(timeout=Timeouts(heartbeat=10.0))
    assert d.start() == [FeedWorker("t-1"), SetTimer("t-1", 10.0)]
    d.now = 4.0
    assert d.handle(AliveSeen("t-1")) == []
    d.now = 10.0
    assert d.handle(WorkerTimerRang("t-1", idle_since=0.0)) == [SetTimer("t-1", 14.0)]
    d.now = 14.0

    reason = "sent no heartbeat for 10 s (timeout.heartbeat) while idle"
    assert d.handle(WorkerTimerRang("t-1", idle_since=0.0)) == [
        Fail("t-1", reason, "heartbeat")
    ]


@pytest.mark.parametrize(("idle_since", "due"), [(None, 20.0), (9.0, 19.0)])
def test_busy_worker_need_send_no_sign_of_life(
    idle_since: float | None, due: float
) -> None:
    """Its time begins when it becomes idle."""
    d = driver(timeout=Timeouts(heartbeat=10.0))
    d.start()
    d.now = 10.0

    assert d.handle(WorkerTimerRang("t-1", idle_since)) == [SetTimer("t-1", due)]


# --- worn workers --------------------------------------------------------------------


def test_worn_worker_is_replaced_without_counting() -> None:
    """However often: there is nothing wrong with it."""
    d = driver(restart=RestartPolicy(max=1))
    for start in range(2, 9):
        d.start()
        assert d.handle(WorkerWorn("t-1", "was old")) == [Retire("t-1")]
        d.end(status=0)
        assert d.out == [Spawn("t-1", start, math.inf)]


def test_worn_workers_are_replaced_one_at_a_time() -> None:
    """The second waits until the first one's successor is ready."""
    d = driver(workers=2, ready=True)
    for worker in "t-1", "t-2":
        d.start(worker)
        d.handle(WorkerReady(worker, 7))
    assert d.handle(WorkerWorn("t-1", "was old")) == [Retire("t-1")]
    assert d.handle(WorkerWorn("t-2", "was old")) == []
    d.end("t-1", status=0)
    d.start("t-1")

    assert Retire("t-2") in d.handle(WorkerReady("t-1", 7))


def test_worker_that_retires_is_replaced_whatever_the_policy() -> None:
    """Its exit was the supervisor's decision, though it took a signal."""
    d = driver(restart=RestartPolicy(policy="temporary"))
    d.start()
    d.handle(WorkerWorn("t-1", "was old"))
    d.end(status=-15, stopped=True)

    assert d.out == [Spawn("t-1", 2, math.inf)]


def test_worker_that_fails_while_it_retires_has_failed() -> None:
    """Where its exit status forbids a restart, there is none."""
    d = driver(restart=RestartPolicy(never_on=frozenset({78})))
    d.start()
    d.handle(WorkerWorn("t-1", "was old"))
    d.end(status=78, lost=1)

    assert d.state["t-1"] is WorkerState.EXITED


def test_retirement_is_not_forgotten() -> None:
    """If the other worker can't be started, this one is replaced."""
    d = driver(workers=2, restart=RestartPolicy(max=1))
    d.start("t-1")
    d.start("t-2")
    d.end("t-2")
    d.handle(WorkerWorn("t-1", "was old"))

    assert Retire("t-1") in d.handle(StartFailed("t-2", OSError("gone")))


def test_worn_worker_is_replaced_when_who_was_missing_is_let_go() -> None:
    """No other event may ever reach it: it may be idle, without signs of life."""
    d = driver(workers=2, restart=RestartPolicy(max=2, delay=1.0))
    d.start("t-1")
    d.start("t-2")
    d.end("t-2")
    d.start("t-2")
    d.end("t-2")
    assert d.state["t-2"] is WorkerState.BACKOFF
    assert d.handle(WorkerWorn("t-1", "was old")) == []

    assert Retire("t-1") in d.handle(ScaleRequested(1))


def test_forced_stop_is_not_patient() -> None:
    """A cancelled supervisor does not wait until a worker has read all its input."""
    d = driver()
    d.start()

    assert d.handle(StopRequested(patient=False)) == [StopWorker("t-1", patient=False)]


def test_age_and_messages_vary() -> None:
    """Workers that started together don't end together."""
    policy = RecyclePolicy(max_messages=1000, max_age=100.0, variance=0.2)
    d = Driver(stage(recycle=policy), lambda: 0.5)
    assert d.out == [Spawn("t-1", 1, 900)]
    assert d.start() == [FeedWorker("t-1"), SetTimer("t-1", 90.0)]
    d.now = 90.0

    assert d.handle(WorkerTimerRang("t-1", 0.0)) == [Retire("t-1")]
    assert d.told[-1] == WorkerWorn("t-1", "lived 100.0 s")


# --- how many ------------------------------------------------------------------------


def elastic(**policy: float) -> Driver:
    """Return the driver of a stage with one to three workers, one of them running."""
    d = driver(workers=PoolPolicy(min=1, max=3, **policy))
    d.start()
    return d


def test_worker_is_added_when_enough_waits() -> None:
    """One at a time, each once the last one runs, up to the maximum."""
    d = elastic(grow_at=2)
    assert d.handle(DemandSeen(1)) == []
    assert d.handle(DemandSeen(2)) == [Spawn("t-2", 1, math.inf)]
    assert d.handle(DemandSeen(9)) == []
    d.start("t-2")
    assert d.handle(DemandSeen(3)) == []
    assert d.state.may_grow
    assert d.handle(DemandSeen(4)) == [Spawn("t-3", 1, math.inf)]
    d.start("t-3")
    assert not d.state.may_grow
    assert d.handle(DemandSeen(99)) == []


def test_idle_worker_goes_and_comes_back_under_its_name() -> None:
    """Neither one of the required minimum, nor one that is busy."""
    d = elastic(idle=10.0)
    d.handle(DemandSeen(2))
    assert d.start("t-2")[-1] == SetTimer("t-2", 10.0)
    d.now = 10.0
    assert d.handle(WorkerTimerRang("t-1", idle_since=None)) == [SetTimer("t-1", 20.0)]
    assert d.handle(WorkerTimerRang("t-2", idle_since=0.0))[-1] == Retire("t-2")
    assert d.state.workers == ("t-1",)
    assert not d.state.wanted("t-2")
    assert d.handle(WorkerTimerRang("t-1", idle_since=0.0)) == [SetTimer("t-1", 20.0)]
    d.end("t-2", 0, stopped=True)

    assert d.handle(DemandSeen(2)) == [Spawn("t-2", 2, math.inf)]


def test_restart_that_has_nothing_to_do_is_dropped() -> None:
    """The worker is started when there is demand again (issue 22)."""
    d = elastic()
    d.end(status=1)
    d.start()
    d.end(status=1)
    assert isinstance(d.out[-1], SetTimer)
    assert d.handle(WorkerTimerRang("t-1", needed=False)) == []
    assert d.state["t-1"] is WorkerState.EXITED
    assert d.state.workers == ()

    assert d.handle(DemandSeen(1)) == [Spawn("t-1", 3, math.inf)]


def test_number_of_workers_is_what_was_set() -> None:
    """The last ones are stopped; the stage's own limits no longer apply."""
    d = elastic()
    assert d.handle(ScaleRequested(5)) == [
        Spawn(f"t-{number}", 1, math.inf) for number in (2, 3, 4, 5)
    ]
    d.start("t-2")
    assert Retire("t-2") in d.handle(ScaleRequested(1))
    assert d.state.workers == ("t-1",)
    assert d.handle(DemandSeen(99)) == []


def test_worker_that_is_not_restarted_is_the_first_to_go() -> None:
    """The last one that works stays, or is joined by another (issue 22)."""
    d = driver(workers=2, restart=RestartPolicy(never_on=frozenset({7})))
    for name in ("t-1", "t-2"):
        d.start(name)
    d.end("t-1", 7)
    assert d.handle(ScaleRequested(1)) == []
    assert d.state.workers == ("t-2",)

    assert d.handle(ScaleRequested(2)) == [Spawn("t-1", 2, math.inf)]


def test_worker_that_is_not_restarted_is_none_of_the_least() -> None:
    """So another stays though it is idle; demand starts one more (issue 22)."""
    pool = PoolPolicy(min=1, max=3, idle=10.0)
    d = driver(workers=pool, restart=RestartPolicy(never_on=frozenset({7})))
    d.start()
    d.handle(DemandSeen(2))
    d.start("t-2")
    d.end("t-1", 7)
    d.now = 10.0
    assert d.handle(WorkerTimerRang("t-2", idle_since=0.0)) == [SetTimer("t-2", 20.0)]

    assert d.handle(DemandSeen(99)) == [Spawn("t-3", 1, math.inf)]


def test_no_worker_is_started_while_all_are_stopped() -> None:
    """Requests for more come too late."""
    d = elastic()
    d.handle(StopRequested())

    assert d.handle(DemandSeen(99)) == d.handle(ScaleRequested(3)) == []
    assert not d.state.may_grow


def test_no_worker_is_started_for_a_stage_that_was_given_up() -> None:
    """All messages have failed, so a worker would have nothing to do (issue 22)."""
    d = driver(restart=RestartPolicy(max=0))
    d.start()
    d.end()
    assert d.state.given_up

    assert d.handle(ScaleRequested(3)) == []


# --- the end -------------------------------------------------------------------------


def test_stop_stops_everybody() -> None:
    """Running workers are stopped; those that wait for a restart are not started."""
    d = driver(workers=2, restart=RestartPolicy(delay=5.0))
    d.start("t-1")
    d.start("t-2")
    d.end("t-2")
    d.start("t-2")
    d.end("t-2")
    assert d.state["t-2"] is WorkerState.BACKOFF

    assert d.handle(StopRequested()) == [
        StopWorker("t-1", patient=True),
        SetTimer("t-2", None),
    ]
    d.end("t-1", status=0)
    assert d.state.finished
    assert d.out == []


def test_event_that_can_not_happen_is_a_bug() -> None:
    """The error names the event and the state."""
    d = driver()

    d.handle(StopRequested())
    d.handle(StartFailed("t-1", LOST))

    with pytest.raises(
        AssertionError, match=r"can't handle WorkerExited in <Worker 't-1' EXITED"
    ):
        d.end()


def test_repr_shows_every_worker() -> None:
    """With its state and its process."""
    d = driver(workers=2)
    d.start("t-1")

    assert d.state.workers == ("t-1", "t-2")
    assert d.state.alive == 2
    assert repr(d.state) == (
        "<PoolState [<Worker 't-1' RUNNING pid=7 starts=1>,"
        " <Worker 't-2' STARTING starts=1>]>"
    )


def test_story_of_a_worker_is_its_own() -> None:
    """It does not include other workers' events."""
    d = driver(workers=2)
    d.start("t-1")

    assert d.state.history("t-1").lines(2.0) == ("started (pid 7, start 1) 2.00 s ago",)
    assert d.state.history("t-2").lines(2.0) == ()


# --- any interleaving ----------------------------------------------------------------


def number_of(worker: str) -> int:
    """Return a worker's number, from 0."""
    return int(worker.rpartition("-")[2]) - 1


class Process:
    """A worker in memory, and what the supervisor knows about it."""

    def __init__(self, run: Stage, backlog: Backlog, number: int, spawn: Spawn) -> None:
        self.name = spawn.worker
        self.max_messages = spawn.max_messages
        self.protocol = run.dialect.open(Side.SUPERVISOR, Limits())
        self.dispatcher = Dispatcher(run, backlog, number)
        self.peer = Peer(run)
        self.inbox = b""  # bytes that it has not read
        self.read = 0  # number of bytes
        self.fed = False
        self.retiring = False
        self.error: Exception | None = None
        self.told = False
        self.answered = 0
        self.idle_since: float | None = 0.0


class Supervision(RuleBasedStateMachine):
    """A stage in memory, to which anything may happen at any time."""

    @initialize(
        mode=st.sampled_from([Mode.SINGLE, Mode.BATCH_SUPERVISOR, Mode.BATCH_WORKER]),
        workers=st.integers(1, 3),
        window=st.none() | st.integers(1, 4),
        retries=st.integers(0, 2),
        policy=st.sampled_from(["permanent"] * 3 + ["transient", "temporary"]),
        most=st.sampled_from([99, 4, 1, 0]),
        ready=st.booleans(),
        heartbeat=st.none() | st.just(8.0),
        recycle=st.booleans(),
        order=st.sampled_from([Order.TOTAL, Order.NONE]),
    )
    def begin(
        self,
        mode: Mode,
        workers: int,
        window: int | None,
        retries: int,
        policy: str,
        most: int,
        ready: bool,
        heartbeat: float | None,
        recycle: bool,
        order: Order,
    ) -> None:
        """Start a stage with some policies."""
        self.run = stage(
            mode,
            workers=workers,
            window=window,
            ready=ready,
            batch=BatchPolicy(size=3, bytes=30, seconds=2.0),
            on_error=ErrorPolicy(retries=retries),
            restart=RestartPolicy(policy=policy, max=most, delay=1.0),  # type: ignore[arg-type]
            timeout=Timeouts(start=5.0, heartbeat=heartbeat),
            recycle=RecyclePolicy(max_messages=4, max_age=50.0)
            if recycle
            else RecyclePolicy(),
        )
        self.now = 0.0
        self.backlog = Backlog()
        self.dead: Exception | None = None
        self.callers: list[Submission] = []
        self.submitted: list[list[bytes]] = []
        self.answers: list[list[Outcome]] = []
        self.ordered = order is Order.TOTAL
        self.timers: dict[str, float] = {}
        self.processes: dict[str, Process] = {}
        self.queue: deque[Instruction] = deque()
        self.state = PoolState(self.run)
        self.stopped = False
        self._perform(self.state.begin())

    # The work of a crew, in memory.

    def _handle(self, event: Event) -> None:
        self._perform(self.state.handle(event, self.now))

    def _perform(self, instructions: list[Instruction]) -> None:
        first = not self.queue
        self.queue.extend(instructions)
        while first and self.queue:
            instruction = self.queue[0]
            self._do(instruction)
            self.queue.popleft()

    def _do(self, instruction: Instruction) -> None:
        match instruction:
            case Spawn(worker, start):
                number = number_of(worker)
                assert worker not in self.processes
                self.processes[worker] = Process(
                    self.run, self.backlog, number, instruction
                )
                self._handle(WorkerStarted(worker, 1, start))
            case FeedWorker(worker):
                self.processes[worker].fed = True
            case Fail(worker, reason):
                self._fail(self.processes[worker], reason)
            case Retire(worker):
                process = self.processes[worker]
                process.retiring = process.dispatcher.giving.retiring = True
            case StopWorker(worker):
                self.processes[worker].told = True
            case SetTimer(worker, at):
                self.timers.pop(worker, None)
                if at is not None:
                    assert at >= self.now
                    self.timers[worker] = at
            case GiveUp():
                self.dead = StageFailed("none left", stage="t")
                self.backlog.fail(self.dead)
            case Publish(WorkerFailedPermanently(worker) | WorkerExited(worker)):
                if self.state[worker] in {WorkerState.EXITED, WorkerState.FATAL}:
                    self.backlog.leave(number_of(worker))

    def _pump(self, process: Process) -> None:
        while (
            process.fed
            and process.error is None
            and not process.told
            and give(process.dispatcher, process.protocol, self.now)
        ):
            self._pass_on(process)
        if process.retiring and not process.protocol.owed:
            process.told = True

    def _pass_on(self, process: Process) -> None:
        """Deliver what was queued; the worker's replies wait in it."""
        data = b"".join(process.protocol.data_to_send())
        process.inbox += data

    def _fail(self, process: Process, reason: str) -> None:
        if process.error is None:
            process.error = WorkerLost(reason, stage="t")
            self._handle(WorkerFailed(process.name, 1, process.error))

    # What may happen.

    @rule(messages=st.lists(st.sampled_from([b"", b"a", b"bc", b"bad\n"]), max_size=6))
    def submit(self, messages: list[bytes]) -> None:
        """Submit some messages."""
        caller = Submission(lambda: None, order=None if self.ordered else AnyOrder())
        self.backlog.open(caller)
        caller.feed(messages, self.now)
        caller.close()
        self.callers.append(caller)
        self.submitted.append(messages)
        self.answers.append([])
        self._pump_all()

    @rule()
    def work_on(self) -> None:
        """Have every worker read and answer everything that it has."""
        for process in list(self.processes.values()):
            if self.processes.get(process.name) is process and process.error is None:
                self._answer_all(process)
        self._pump_all()

    @precondition(lambda self: self.processes)
    @rule(data=st.data(), size=st.integers(1, 20))
    def answer(self, data: st.DataObject, size: int) -> None:
        """Have a worker read some bytes and answer what it can."""
        process = self._choose(data)
        if process.error is None:
            self._answer(process, size)
            self._pump_all()

    @precondition(lambda self: self.processes)
    @rule(data=st.data(), status=st.sampled_from([0, 1, -9]))
    def die(self, data: st.DataObject, status: int) -> None:
        """End a worker: by itself, or because it was asked to."""
        self._end(self._choose(data), status)

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def misbehave(self, data: st.DataObject) -> None:
        """Have a worker break the protocol, or miss its deadline."""
        self._fail(self._choose(data), "did something wrong")

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def announce(self, data: st.DataObject) -> None:
        """Have a worker send a heartbeat, which may be its first."""
        process = self._choose(data)
        starting = self.state[process.name] is WorkerState.STARTING
        event = WorkerReady(process.name, 1) if starting else AliveSeen(process.name)
        self._handle(event)
        self._pump_all()

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0, 20.0]))
    def wait(self, seconds: float) -> None:
        """Let time pass, and timers ring."""
        until = self.now + seconds
        while self.timers and min(self.timers.values()) <= until:
            worker = min(self.timers, key=lambda name: self.timers[name])
            self.now = max(self.now, self.timers.pop(worker))
            process = self.processes.get(worker)
            idle_since = process.idle_since if process is not None else None
            self._handle(WorkerTimerRang(worker, idle_since))
        self.now = until
        self._pump_all()

    @precondition(lambda self: self.callers)
    @rule(data=st.data())
    def go_away(self, data: st.DataObject) -> None:
        """Have a caller give up."""
        index = data.draw(st.integers(0, len(self.callers) - 1))
        self.backlog.drop(self.callers.pop(index))
        del self.submitted[index], self.answers[index]

    @precondition(lambda self: not self.stopped)
    @rule(wanted=st.integers(0, 9))
    def stop(self, wanted: int) -> None:
        """Close the supervisor; seldom, or nothing else would happen."""
        if wanted == 9:
            self.stopped = True
            self._handle(StopRequested())

    # Invariants.

    @invariant()
    def decisions_are_sound(self) -> None:
        """Check the state's own invariants, and that no instruction is left."""
        if hasattr(self, "state"):
            check_pool(self.state)
            assert not self.queue

    @invariant()
    def suspects_are_alone(self) -> None:
        """Check that a message tried alone is all that its worker holds."""
        for process in getattr(self, "processes", {}).values():
            if process.dispatcher.giving.alone and process.protocol.owed:
                (suspect,) = (item.exchange for item in process.dispatcher.open.ranges)
                assert suspect.attempts or not suspect.left

    @invariant()
    def outcomes_are_single(self) -> None:
        """Check that no message is answered twice."""
        for index, caller in enumerate(getattr(self, "callers", ())):
            self.answers[index] += [
                item for item in caller.collect() if isinstance(item, Outcome)
            ]
            places = [
                place
                for answer in self.answers[index]
                for place in range(answer.start, answer.start + len(answer.messages))
            ]
            assert len(set(places)) == len(places)
            if self.ordered:
                assert places == sorted(places)

    def teardown(self) -> None:
        """Let the run end; check that every message has its outcome."""
        if not hasattr(self, "state"):
            return
        for _ in range(1000):
            if not self.processes or all(c.finished for c in self.callers):
                break
            for process in list(self.processes.values()):
                if self.processes.get(process.name) is not process:
                    continue
                if process.told or process.error is not None:
                    self._end(process, 0)
                elif self.state[process.name] is WorkerState.STARTING:
                    self._handle(WorkerReady(process.name, 1))
                else:
                    self._answer_all(process)
            self._pump_all()
            self.wait(1.0)
            self.outcomes_are_single()
        if not self.stopped:
            self.stop(9)
        for process in list(self.processes.values()):
            self._end(process, 0)
        assert self.state.finished
        assert not self.processes
        if self.dead is None:
            self.backlog.fail(LOST)
        self.outcomes_are_single()
        for caller, messages, answers in zip(
            self.callers, self.submitted, self.answers, strict=True
        ):
            assert caller.finished
            assert (caller.held, caller.held_bytes) == (0, 0)
            seen = {
                answer.start + n: message
                for answer in answers
                for n, message in enumerate(answer.messages)
            }
            assert [seen[n] for n in range(len(messages))] == messages

    def _answer_all(self, process: Process) -> None:
        while process.inbox and self.processes.get(process.name) is process:
            self._answer(process, len(process.inbox))
            self._pump(process)

    def _answer(self, process: Process, size: int) -> None:
        data, process.inbox = process.inbox[:size], process.inbox[size:]
        process.read += len(data)
        reply = process.peer.take(data)
        process.protocol.receive_data(reply, self.now)
        for event in process.protocol.events_received():
            match event:
                case Ended():
                    ended = process.dispatcher.ended(event, len(reply))
                    process.answered += ended.messages
                case Failed(error):
                    raise AssertionError(str(error))
        self._wear(process)
        process.idle_since = None if process.protocol.owed else self.now

    def _wear(self, process: Process) -> None:
        """Have a worker replaced that has answered its maximum."""
        if process.answered >= process.max_messages:
            process.max_messages = math.inf
            self._handle(WorkerWorn(process.name, "answered enough"))

    def _end(self, process: Process, status: int) -> None:
        del self.processes[process.name]
        untouched, owed = False, process.protocol.owed
        if self.state.stopping:
            loss = Loss(process.dispatcher.fail_all(LOST, owed), 0)
        else:
            attempt = Attempt(process.name, 1, "died")
            untouched = process.error is None and process.read == 0
            loss = process.dispatcher.lose(
                attempt, lambda _: LOST, owed=owed, untouched=untouched
            )
        self._handle(
            WorkerExited(
                process.name,
                1,
                status,
                loss.held,
                answered=process.answered,
                retried=loss.retried,
                failed=loss.failed,
                tries=loss.tries,
                untouched=untouched,
                stopped=process.told and process.error is None,
            )
        )
        self._pump_all()

    def _choose(self, data: st.DataObject) -> Process:
        return self.processes[data.draw(st.sampled_from(sorted(self.processes)))]

    def _pump_all(self) -> None:
        for process in list(self.processes.values()):
            self._pump(process)


Supervision.TestCase.settings = settings(
    deadline=None, max_examples=200, stateful_step_count=50
)
TestSupervision = pytest.mark.no_cover(Supervision.TestCase)
