"""
One worker over all its starts: its states, its last events, and what follows each.

``pool.py`` has a diagram of the states, and decides what concerns several workers at
once. ``TRANSITIONS`` lists the states that each event may lead to. One change has no
event of its own: a worn worker goes from RUNNING to STOPPING when the others can spare
it.

Whether and when a worker is restarted depends on whether its last start made progress.
A worker that answered something before it died, or that died of a message that it had
read, is restarted as often as needed: in the first case at once, in the second with a
delay that grows with the number of times that the message has failed. A worker that
dies without either is restarted after a delay, and not at all if that happens too
often: then the program itself is at fault. Of a worker that commits, only what it has
committed is progress; if it has answered all that it held, no message is to blame.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Final, TypeAlias

from etlstage.errors import StageFailed
from etlstage.messages import StageKind, counted
from etlstage.stage.policy import RestartPolicy
from etlstage.stage.stage import Stage
from etlstage.supervisor.lifecycle.events import (
    AliveSeen,
    Event,
    Fail,
    FeedWorker,
    Instruction,
    Publish,
    RemainsEnded,
    Retire,
    SetTimer,
    Spawn,
    StartFailed,
    StopRequested,
    StopWorker,
    WorkerExited,
    WorkerFailed,
    WorkerFailedPermanently,
    WorkerReady,
    WorkerRestarting,
    WorkerStarted,
    WorkerTimerRang,
    WorkerWorn,
)

__all__ = (
    "TRANSITIONS",
    "Tally",
    "WorkerHistory",
    "WorkerLife",
    "WorkerState",
    "wait_time",
)


class WorkerState(Enum):
    """The states of a worker."""

    EXITED = "exited"
    """There is no process, and none is wanted."""
    STARTING = "starting"
    """The process runs, or is about to; it is not ready."""
    RUNNING = "running"
    """It is given messages."""
    STOPPING = "stopping"
    """It is given no more messages; its process is ending."""
    BACKOFF = "backoff"
    """It is restarted when the delay is over."""
    FATAL = "fatal"
    """It failed permanently: too many restarts without progress."""


_GONE: Final = frozenset(
    {WorkerState.EXITED, WorkerState.BACKOFF, WorkerState.STARTING, WorkerState.FATAL}
)
_S: TypeAlias = WorkerState

TRANSITIONS: Final[Mapping[tuple[WorkerState, type[Event]], frozenset[WorkerState]]] = {
    (_S.STARTING, WorkerStarted): frozenset({_S.STARTING, _S.RUNNING}),
    (_S.STARTING, StartFailed): _GONE,
    (_S.STARTING, WorkerReady): frozenset({_S.RUNNING}),
    (_S.STARTING, AliveSeen): frozenset({_S.STARTING}),
    (_S.STARTING, WorkerTimerRang): frozenset({_S.STARTING}),
    (_S.STARTING, WorkerFailed): frozenset({_S.STOPPING}),
    (_S.STARTING, WorkerExited): _GONE,
    (_S.STARTING, StopRequested): frozenset({_S.STOPPING}),
    (_S.RUNNING, WorkerReady): frozenset({_S.RUNNING}),
    (_S.RUNNING, AliveSeen): frozenset({_S.RUNNING}),
    (_S.RUNNING, WorkerTimerRang): frozenset({_S.RUNNING}),
    (_S.RUNNING, WorkerFailed): frozenset({_S.STOPPING}),
    (_S.RUNNING, WorkerWorn): frozenset({_S.RUNNING}),
    (_S.RUNNING, WorkerExited): _GONE,
    (_S.RUNNING, StopRequested): frozenset({_S.STOPPING}),
    (_S.STOPPING, StartFailed): _GONE,
    (_S.STOPPING, WorkerReady): frozenset({_S.STOPPING}),
    (_S.STOPPING, AliveSeen): frozenset({_S.STOPPING}),
    (_S.STOPPING, WorkerFailed): frozenset({_S.STOPPING}),
    (_S.STOPPING, WorkerWorn): frozenset({_S.STOPPING}),
    (_S.STOPPING, WorkerExited): _GONE,
    (_S.STOPPING, StopRequested): frozenset({_S.STOPPING}),
    (_S.BACKOFF, WorkerTimerRang): frozenset({_S.STARTING, _S.EXITED}),
    (_S.BACKOFF, StopRequested): frozenset({_S.EXITED}),
    (_S.EXITED, StopRequested): frozenset({_S.EXITED}),
    (_S.FATAL, StopRequested): frozenset({_S.FATAL}),
    # Processes that an earlier start left behind.
    **{(state, RemainsEnded): frozenset({state}) for state in WorkerState},
}
"""The states that each event may lead to; an event that is not listed can't happen."""


_LENGTH: Final = 16  # events in a history; enough for five failed starts


class WorkerHistory:
    """Keeps the last events of one worker, over all its starts."""

    def __init__(self) -> None:
        self._events: deque[tuple[float, str]] = deque(maxlen=_LENGTH)

    def note(self, now: float, text: str) -> None:
        """Record what happened at ``now``, in seconds."""
        self._events.append((now, text))

    def lines(self, now: float) -> tuple[str, ...]:
        """Return what happened, and how long ago, oldest first."""
        return tuple(f"{text} {now - at:.2f} s ago" for at, text in self._events)


def fate_of(event: WorkerExited) -> str:
    """Return what became of a worker, with the messages it answered and held."""
    parts = [event.fate or f"exited with status {event.status}"]
    if event.answered:
        parts.append(f"{counted(event.answered, 'message')} answered")
    if event.lost:
        parts.append(f"{event.lost} held")
    return ", ".join(parts)


def wait_time(attempt: int, policy: RestartPolicy, *, jitter: float = 0.0) -> float:
    """
    Return the delay before a restart, in seconds.

    It is 0 for the first one, then ``delay``, ``2 * delay``, ``4 * delay``...

    Args:
        attempt: Number of earlier restarts that count, or of earlier retries of the
            message.
        policy: Has ``delay`` and ``max_delay``.
        jitter: From 0 to 1: shortens the delay by up to half, so that workers that died
            together don't start together.

    Raises:
        ValueError: If ``attempt`` is negative.

    """
    if attempt < 0:
        raise ValueError(f"attempt must be zero or positive, got {attempt}")
    if attempt == 0:
        return 0.0
    # Cap the exponent: ldexp() overflows after about a thousand restarts.
    delay = min(policy.max_delay, math.ldexp(policy.delay, min(attempt - 1, 64)))
    return delay * (1 - jitter / 2)


class Tally:
    """Counts the restarts of one worker without progress."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self.waited: float = 0.0
        """Time spent in back-off so far, in seconds: ``within`` leaves it out."""
        # When each was, and the same less the time waited until then.
        self._restarts: deque[tuple[float, float]] = deque()

    def __len__(self) -> int:
        return len(self._restarts)

    def clear(self) -> None:
        """Reset the count: the worker made progress."""
        self._restarts.clear()

    def span(self, now: float) -> float:
        """Return how long ago the oldest counted restart was, in seconds."""
        return now - self._restarts[0][0] if self._restarts else 0.0

    def forgive(self, tries: int, *, jitter: float) -> float | None:
        """
        Reset the count; return the delay of the restart, None if there is to be none.

        ``tries`` is how often the message that is tried next has failed.
        """
        self._restarts.clear()
        if self._policy.max == 0:
            return None
        return wait_time(max(0, tries - 1), self._policy, jitter=jitter)

    def next_delay(self, now: float, *, useful: bool, jitter: float) -> float | None:
        """
        Count a restart and return its delay; None: there were too many already.

        ``useful``: the start that just ended made progress.
        """
        restarts = self._restarts
        if useful:
            restarts.clear()
        # Else a count would never be reached that takes longer than that by the delays.
        ran = now - self.waited
        while restarts and ran - restarts[0][1] > self._policy.within:
            restarts.popleft()
        if len(restarts) >= self._policy.max:
            return None
        delay = wait_time(len(restarts), self._policy, jitter=jitter)
        restarts.append((now, ran))
        return delay


class WorkerLife:
    """The lifecycle of one worker; appends instructions to ``out``."""

    def __init__(
        self,
        name: str,
        stage: Stage,
        random: Callable[[], float],
        out: list[Instruction],
    ) -> None:
        self.name = name
        self.state: WorkerState = WorkerState.EXITED
        self.tally: Tally = Tally(stage.restart)
        self.story: WorkerHistory = WorkerHistory()
        self.pid: int | None = None
        self.timer: float | None = None
        """When its timer rings, in seconds."""
        self.worn: str | None = None
        """Why it is to be replaced, as soon as it may be."""
        self.retiring: bool = False
        self.wanted: bool = True
        """Whether there is to be a process; else the worker counts as absent."""
        self.end: str = ""
        """Its name and what became of it, once it is not restarted any more."""
        self._stage = stage
        self._random = random
        self._out = out
        self.starts: int = 0
        """How often it was started."""
        self._stopping = False
        self._at_fault = False  # this start did something wrong
        self._ran = False  # this start became ready
        self._fatal = False  # every other start would fail, too
        self._alive_at = 0.0
        self._worn_at = math.inf
        self._idle = stage.pool.idle if stage.pool.varies else None

    def __repr__(self) -> str:
        pid = f" pid={self.pid}" if self.pid is not None else ""
        return f"<Worker {self.name!r} {self.state.name}{pid} starts={self.starts}>"

    @property
    def alive(self) -> bool:
        """Whether there is a process, or is about to be."""
        return self.state in (_S.STARTING, _S.RUNNING, _S.STOPPING)

    @property
    def finished(self) -> bool:
        """Whether there is no process, and none will be started."""
        return self.state in (WorkerState.EXITED, WorkerState.FATAL)

    def handle(self, event: Event, now: float) -> None:
        """Handle ``event``; raise AssertionError if it can't have happened."""
        before = self.state
        allowed = TRANSITIONS.get((before, type(event)))
        assert allowed is not None, f"can't handle {type(event).__name__} in {self}"
        _HANDLERS[type(event)](self, event, now)
        assert self.state in allowed, f"{before} -> {self} by {type(event).__name__}"

    def spawn(self) -> None:
        """Start the program."""
        self.state = WorkerState.STARTING
        self.starts += 1
        self._at_fault = self._ran = False
        self.worn = None
        most = self._stage.recycle.max_messages
        limit = math.inf if most is None else max(1, int(most * self._less()))
        self._out.append(Spawn(self.name, self.starts, limit))

    def want(self) -> None:
        """Start a worker that was not wanted before."""
        assert self.state is WorkerState.EXITED
        assert not self.wanted
        self.wanted = True
        self.spawn()

    def dismiss(self, now: float) -> None:
        """Let the worker go for good, once it has answered what it has."""
        self.wanted = False
        if self.state is WorkerState.RUNNING:
            self.story.note(now, "not needed any more")
            self._retire()
        elif self.state is WorkerState.STARTING:
            self._stop(patient=True)
        elif self.state is WorkerState.BACKOFF:
            self._set_timer(None)
            self.state = WorkerState.EXITED

    def retire(self, now: float) -> None:
        """Replace the worker, which is worn."""
        assert self.state is WorkerState.RUNNING
        assert self.worn is not None
        self.story.note(now, f"retired: {self.worn}")
        self._out.append(Publish(WorkerWorn(self.name, self.worn)))
        self.retiring = True
        self._retire()

    # --- what happened ------------------------------------------------------

    def _started(self, event: WorkerStarted, now: float) -> None:
        self.pid = event.pid
        self.story.note(now, f"started (pid {event.pid}, start {event.start})")
        self._out.append(Publish(event))
        if not (self._stage.program.ready or self._stage.dialect.announces):
            self._run(now)
        elif self._stage.timeout.start is not None:
            self._set_timer(now + self._stage.timeout.start)

    def _not_started(self, event: StartFailed, now: float) -> None:
        self.story.note(now, "could not be started")
        if not self._stopping:
            self._out.append(Publish(event))
        self._after(now, "could not be started")

    def _ready(self, event: WorkerReady, now: float) -> None:
        # It may report this twice: by its status pipe, and in its dialect.
        self._alive_at = now
        if self.state is WorkerState.STARTING:
            self.story.note(now, "ready")
            self._out.append(Publish(event))
            self._run(now)

    def _alive(self, _event: AliveSeen, now: float) -> None:
        self._alive_at = now

    def _failed(self, event: WorkerFailed, now: float) -> None:
        if self._at_fault:
            return  # only the first fault counts
        self._at_fault = True
        self._fatal = event.cause == "abnormal"
        self.story.note(now, "failed")
        self._out.append(Publish(event))
        self._stop(patient=False)

    def _worn(self, event: WorkerWorn, _now: float) -> None:
        if self.state is WorkerState.RUNNING:
            self.worn = event.reason

    def _exited(self, event: WorkerExited, now: float) -> None:
        self.story.note(now, fate_of(event))
        self._out.append(Publish(event))
        failed = self._at_fault or self._stage.dialect.failed(
            event.status, stopped=event.stopped, held=event.lost
        )
        retired = self.retiring and not failed
        policy = self._stage.restart
        self.retiring = False
        extracts = self._stage.kind is StageKind.EXTRACT
        if extracts and self._ran and not self._fatal:
            # An extractor is started when the next round is requested. One that ended
            # well may have exited before it saw the next request. One that was never
            # ready was started for a round that still waits: that round was not given,
            # so it is no retry, and without a count it would be restarted for ever.
            went = event.untouched and event.answered and not event.status
            self.wanted = bool(event.retried) and not went
        wanted = retired or policy.wanted(failed=failed, status=event.status)
        self._after(
            now,
            fate_of(event),
            obstacle="" if wanted else policy.obstacle(event.status),
            useful=retired or event.answered > 0 or event.progress,
            # All requests are alike: the worker is at fault, or the source that it
            # reads from, and a delay may help.
            blamed=event.lost > 0
            and not (event.untouched or event.all_answered or extracts),
            tries=event.tries,
        )

    def _remains_ended(self, event: RemainsEnded, now: float) -> None:
        if event.killed:
            left = f"processes left behind by pid {event.pid}: {event.killed:,}"
            self.story.note(now, f"{left} killed")
        self._out.append(Publish(event))

    def _rang(self, event: WorkerTimerRang, now: float) -> None:
        self.timer = None
        if self.state is WorkerState.BACKOFF:
            if event.needed:
                self.spawn()
            else:
                self.dismiss(now)
        elif self.state is WorkerState.STARTING:
            limit = self._stage.timeout.start
            reason = f"was not ready within {limit:g} s (timeout.start)"
            self._out.append(Fail(self.name, reason, "start"))
        else:
            if now >= self._worn_at:
                self._worn_at = math.inf
                self.worn = f"lived {self._stage.recycle.max_age} s"
            self._watch(now, event.idle_since)

    def _stop_requested(self, event: StopRequested, now: float) -> None:
        self._stopping = True
        if self.state in {WorkerState.STARTING, WorkerState.RUNNING}:
            self.story.note(now, "stop requested")
            self._stop(patient=event.patient)
        elif self.state is WorkerState.STOPPING:
            # It may have been given the time to answer what it has: no longer.
            patient = event.patient and not self._at_fault
            self._out.append(StopWorker(self.name, patient))
        elif self.state is WorkerState.BACKOFF:
            self._set_timer(None)
            self.state = WorkerState.EXITED

    # --- what follows -------------------------------------------------------

    def _run(self, now: float) -> None:
        self.state = WorkerState.RUNNING
        self._ran = True
        self._alive_at = now
        age = self._stage.recycle.max_age
        self._worn_at = math.inf if age is None else now + age * self._less()
        self._out.append(FeedWorker(self.name))
        self._watch(now, now)

    def _watch(self, now: float, idle_since: float | None) -> None:
        """Set the timer of a running worker, or fail it if its heartbeat is overdue."""
        at = self._worn_at
        limit = self._stage.timeout.heartbeat
        if limit is not None:
            seen = now if idle_since is None else max(self._alive_at, idle_since)
            if now >= seen + limit:
                reason = (
                    f"sent no heartbeat for {limit:g} s (timeout.heartbeat) while idle"
                )
                self._out.append(Fail(self.name, reason, "heartbeat"))
                return
            at = min(at, seen + limit)
        if self._idle is not None:
            spare = (now if idle_since is None else idle_since) + self._idle
            # If it has been idle that long, the pool may not spare it: look again
            # later.
            at = min(at, spare if spare > now else now + self._idle)
        self._set_timer(None if at == math.inf else at)

    def _retire(self) -> None:
        self._set_timer(None)
        self.state = WorkerState.STOPPING
        self._out.append(Retire(self.name))

    def _stop(self, *, patient: bool) -> None:
        self._set_timer(None)
        self.state = WorkerState.STOPPING
        self._out.append(StopWorker(self.name, patient))

    def _after(
        self,
        now: float,
        fate: str,
        *,
        obstacle: str = "",
        useful: bool = False,
        blamed: bool = False,
        tries: int = 0,
    ) -> None:
        """
        Decide what follows the end of a process.

        ``obstacle``: the setting that forbids a restart, if one does. ``useful``: the
        process made progress. ``blamed``: its end is blamed on a message, which has
        failed ``tries`` times.
        """
        pid, self.pid = self.pid, None
        self._set_timer(None)
        self.state = WorkerState.EXITED
        if self._stopping:
            return
        if not self.wanted:
            if useful:
                self.tally.clear()
            return
        span = self.tally.span(now)
        if not obstacle:
            jitter = self._random()
            if blamed:
                delay = self.tally.forgive(tries, jitter=jitter)
            else:
                delay = self.tally.next_delay(now, useful=useful, jitter=jitter)
            if delay is not None and not self._fatal:
                self._restart(now, delay)
                return
            self.state = WorkerState.FATAL
        who = self.name if pid is None else f"{self.name} (pid {pid})"
        self.end = f"worker {who} {fate}"
        if obstacle:
            self.end += f"; not restarted: {obstacle}"
        if self.state is WorkerState.FATAL:
            self._give_up(now, span)

    def _give_up(self, now: float, span: float) -> None:
        name, again = self._stage.name, "; not restarted again"
        if self._fatal:
            pass  # whatever the policy is
        elif self.tally:
            restarts = counted(len(self.tally), "restart")
            self.end += f" after {restarts} without progress in {span:.1f} s"
            self.end += " (restart.max)"
        else:
            self.end += "; not restarted: restart.max is 0"
            again = ""
        error = StageFailed(f"stage {name}: {self.end}{again}", stage=name)
        error.story = tuple(f"event: {event}" for event in self.story.lines(now))
        self._out.append(Publish(WorkerFailedPermanently(self.name, error)))

    def _restart(self, now: float, delay: float) -> None:
        self._out.append(Publish(WorkerRestarting(self.name, delay)))
        if delay:
            self.state = WorkerState.BACKOFF
            self.tally.waited += delay
            self.story.note(now, f"back-off of {delay:.2f} s began")
            self._set_timer(now + delay)
        else:
            self.spawn()

    def _set_timer(self, at: float | None) -> None:
        if at != self.timer:
            self.timer = at
            self._out.append(SetTimer(self.name, at))

    def _less(self) -> float:
        return 1 - self._stage.recycle.variance * self._random()


_HANDLERS: Final[Mapping[type[Event], Callable[..., None]]] = {
    WorkerStarted: WorkerLife._started,
    StartFailed: WorkerLife._not_started,
    WorkerReady: WorkerLife._ready,
    AliveSeen: WorkerLife._alive,
    WorkerTimerRang: WorkerLife._rang,
    WorkerFailed: WorkerLife._failed,
    WorkerWorn: WorkerLife._worn,
    WorkerExited: WorkerLife._exited,
    RemainsEnded: WorkerLife._remains_ended,
    StopRequested: WorkerLife._stop_requested,
}
