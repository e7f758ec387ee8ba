r"""
What to do about what happens to the workers of a stage.

The supervisor reports every event with its time, and performs the instructions that
come back. Nothing here runs, waits or reads a clock, so every interleaving can be
tried. Data does not pass through here: an event per message would cost more than the
message.

The life of a worker, which keeps its name over all its starts::

    EXITED --> STARTING --> RUNNING --> STOPPING --> BACKOFF --> STARTING ...
                                                 \-> EXITED   (done, or not wanted)
                                                 \-> FATAL    (too many useless starts)

*STARTING* ends when the worker says that it is ready; one that never says so is
RUNNING at once. *STOPPING* is every way to an end that we have begun: a fault, a
worker that is worn, the supervisor's own end. A process that ends unasked goes from
where it is to the state behind it.

A start is of *use* when it answered something, or died of a message that it had read:
then the search for the culprit has come a step further. Only useless starts count
against ``RestartPolicy.max``: messages that kill workers must not use up what
protects from a program that can't even start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from etlstage.errors import StageFailed
from etlstage.supervisor.events import (
    AliveSeen,
    Event,
    StartFailed,
    StopRequested,
    TimerRang,
    WorkerExited,
    WorkerFailed,
    WorkerGivenUp,
    WorkerReady,
    WorkerRestarting,
    WorkerStarted,
    WorkerWorn,
)
from etlstage.supervisor.instructions import (
    Fail,
    Feed,
    GiveUp,
    Instruction,
    Retire,
    SetTimer,
    Spawn,
    Stop,
    Tell,
)
from etlstage.supervisor.restart import Tally
from etlstage.supervisor.stage import Stage
from etlstage.supervisor.story import Story
from etlstage.supervisor.transition import TRANSITIONS, State

__all__ = ("SupervisorState",)


class _Slot:
    """One worker, over all its starts."""

    def __init__(self, name: str, tally: Tally) -> None:
        self.name = name
        self.tally = tally
        self.state = State.EXITED
        self.start = 0
        self.pid: int | None = None
        self.failed = False  # this start did something wrong
        self.retiring = False
        self.worn: str | None = None  # why it is to be replaced, when it may be
        self.alive_at = 0.0
        self.worn_at = math.inf
        self.timer: float | None = None
        self.story = Story()

    def __repr__(self) -> str:
        pid = f" pid={self.pid}" if self.pid is not None else ""
        return f"<Worker {self.name!r} {self.state.name}{pid} starts={self.start}>"


class SupervisorState:
    """
    Decides over the workers of a stage.

    Args:
        stage: Its policies.
        random: Returns a number from 0 to 1, for jitter and variance.

    """

    def __init__(self, stage: Stage, random: Callable[[], float] = lambda: 0.0) -> None:
        self._stage = stage
        self._random = random
        self._slots = {
            name: _Slot(name, Tally(stage.restart))
            for name in (f"{stage.name}-{n}" for n in range(1, stage.workers + 1))
        }
        self._out: list[Instruction] = []
        self.stopping = False
        """The supervisor is to end: no worker is started any more."""
        self.given_up = False
        """No worker is left, although messages may be."""

    def __repr__(self) -> str:
        return f"<SupervisorState {list(self._slots.values())}>"

    def __getitem__(self, worker: str) -> State:
        """Return the state of a worker."""
        return self._slots[worker].state

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of the workers."""
        return tuple(self._slots)

    @property
    def alive(self) -> int:
        """How many workers have a process, or are about to."""
        living = {State.STARTING, State.RUNNING, State.STOPPING}
        return sum(slot.state in living for slot in self._slots.values())

    @property
    def finished(self) -> bool:
        """Whether there is no process, and none will be started."""
        return all(s.state in {State.EXITED, State.FATAL} for s in self._slots.values())

    def begin(self) -> list[Instruction]:
        """Return what starts the workers."""
        for slot in self._slots.values():
            self._spawn(slot)
        return self._drain()

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """
        Return what to do about ``event``, in this order.

        Args:
            event: What happened.
            now: When, in seconds.

        Raises:
            AssertionError: If it can't have happened.

        """
        if isinstance(event, StopRequested):
            self.stopping = True
            for slot in self._slots.values():
                self._step(slot, event, now)
        else:
            self._step(self._slots[event.worker], event, now)
        return self._drain()

    def story(self, worker: str, now: float) -> tuple[str, ...]:
        """Return the last things that happened to a worker, oldest first."""
        return self._slots[worker].story.tell(now)

    def validate(self) -> None:
        """Assert what always holds between two events."""
        retiring = [s for s in self._slots.values() if s.retiring]
        assert len(retiring) <= 1, f"{retiring} retire at the same time"
        for slot in self._slots.values():
            alive = slot.state in {State.STARTING, State.RUNNING, State.STOPPING}
            assert alive or slot.pid is None, f"{slot} has a process"
            assert alive or not slot.retiring, f"{slot} retires"
            assert slot.state is not State.BACKOFF or slot.timer is not None, (
                f"{slot} would never be started again"
            )
            assert slot.state in {State.STARTING, State.RUNNING, State.BACKOFF} or (
                slot.timer is None
            ), f"{slot} has a timer"
            assert not self.stopping or slot.state not in {
                State.STARTING,
                State.RUNNING,
                State.BACKOFF,
            }, f"{slot} goes on, but the supervisor is to stop"
            assert len(slot.tally) <= self._stage.restart.max, f"{slot} restarts on"
        assert not self.given_up or self.finished, "given up too early"
        assert not self.finished or self.stopping or self.given_up, (
            "no worker is left, and nobody is told"
        )

    # --- what happened ------------------------------------------------------

    def _step(self, slot: _Slot, event: Event, now: float) -> None:
        before = slot.state
        allowed = TRANSITIONS.get((before, type(event)))
        assert allowed is not None, f"can't handle {type(event).__name__} in {slot}"
        _HANDLERS[type(event)](self, slot, event, now)
        assert slot.state in allowed, f"{before} -> {slot} by {type(event).__name__}"

    def _started(self, slot: _Slot, event: WorkerStarted, now: float) -> None:
        slot.pid = event.pid
        slot.story.note(now, f"started (pid {event.pid}, start {event.start})")
        self._out.append(Tell(event))
        if not self._stage.ready:
            self._run(slot, now)
        elif self._stage.timeout.start is not None:
            self._set_timer(slot, now + self._stage.timeout.start)

    def _not_started(self, slot: _Slot, event: StartFailed, now: float) -> None:
        slot.story.note(now, "could not be started")
        if not self.stopping:
            self._out.append(Tell(event))
        self._after(slot, now, "could not be started")
        self._retire_one(now)

    def _ready(self, slot: _Slot, event: WorkerReady, now: float) -> None:
        if slot.state is State.STARTING:
            slot.story.note(now, "ready")
            self._out.append(Tell(event))
            self._run(slot, now)

    def _alive(self, slot: _Slot, _event: AliveSeen, now: float) -> None:
        slot.alive_at = now

    def _failed(self, slot: _Slot, event: WorkerFailed, now: float) -> None:
        if slot.failed:
            return  # one fault is enough
        slot.failed = True
        slot.story.note(now, "was given up")
        self._out.append(Tell(event))
        self._stop(slot, patient=False)

    def _worn(self, slot: _Slot, event: WorkerWorn, now: float) -> None:
        if slot.state is State.RUNNING:
            slot.worn = event.reason
            self._retire_one(now)

    def _exited(self, slot: _Slot, event: WorkerExited, now: float) -> None:
        slot.story.note(now, _fate(event))
        self._out.append(Tell(event))
        failed = slot.failed or (
            not event.told and (event.status != 0 or event.lost > 0)
        )
        retired = slot.retiring and not failed
        policy = self._stage.restart
        slot.retiring = False
        self._after(
            slot,
            now,
            _fate(event),
            wanted=retired or policy.wanted(failed=failed, status=event.status),
            useful=retired or event.answered > 0,
            blamed=event.lost > 0 and not event.untouched,
            tries=event.tries,
        )
        self._retire_one(now)

    def _rang(self, slot: _Slot, event: TimerRang, now: float) -> None:
        slot.timer = None
        if slot.state is State.BACKOFF:
            self._spawn(slot)
        elif slot.state is State.STARTING:
            limit = self._stage.timeout.start
            reason = f"was not ready within {limit} s"
            self._out.append(Fail(slot.name, reason, "start"))
        else:
            if now >= slot.worn_at:
                slot.worn_at = math.inf
                slot.worn = f"lived {self._stage.recycle.max_age} s"
                self._retire_one(now)
            if slot.state is State.RUNNING:
                self._watch(slot, now, event.idle_since)

    def _told_to_stop(self, slot: _Slot, event: StopRequested, now: float) -> None:
        if slot.state in {State.STARTING, State.RUNNING}:
            slot.story.note(now, "told to stop")
            self._stop(slot, patient=event.patient)
        elif slot.state is State.STOPPING:
            # It may be waited for to answer what it has: no longer.
            patient = event.patient and not slot.failed
            self._out.append(Stop(slot.name, patient))
        elif slot.state is State.BACKOFF:
            self._set_timer(slot, None)
            slot.state = State.EXITED

    # --- what follows -------------------------------------------------------

    def _spawn(self, slot: _Slot) -> None:
        recycle = self._stage.recycle
        slot.state = State.STARTING
        slot.start += 1
        slot.failed = False
        slot.worn = None
        most = recycle.max_messages
        limit = math.inf if most is None else max(1, int(most * self._less()))
        self._out.append(Spawn(slot.name, slot.start, limit))

    def _run(self, slot: _Slot, now: float) -> None:
        slot.state = State.RUNNING
        slot.alive_at = now
        age = self._stage.recycle.max_age
        slot.worn_at = math.inf if age is None else now + age * self._less()
        self._out.append(Feed(slot.name))
        self._watch(slot, now, now)
        self._retire_one(now)

    def _watch(self, slot: _Slot, now: float, idle_since: float | None) -> None:
        """Set the timer of a running worker, unless it has been still for too long."""
        at = slot.worn_at
        limit = self._stage.timeout.heartbeat
        if limit is not None:
            seen = now if idle_since is None else max(slot.alive_at, idle_since)
            if now >= seen + limit:
                reason = f"gave no sign of life for {limit} s while it was idle"
                self._out.append(Fail(slot.name, reason, "heartbeat"))
                return
            at = min(at, seen + limit)
        self._set_timer(slot, None if at == math.inf else at)

    def _stop(self, slot: _Slot, *, patient: bool) -> None:
        self._set_timer(slot, None)
        slot.state = State.STOPPING
        self._out.append(Stop(slot.name, patient))

    def _retire_one(self, now: float) -> None:
        """Replace a worn worker, if the others are all there."""
        slots = self._slots.values()
        others = [s for s in slots if s.state not in {State.EXITED, State.FATAL}]
        if any(s.state is not State.RUNNING for s in others):
            return
        for slot in others:
            if slot.worn is not None:
                slot.story.note(now, f"retired: {slot.worn}")
                self._out.append(Tell(WorkerWorn(slot.name, slot.worn)))
                self._set_timer(slot, None)
                slot.state = State.STOPPING
                slot.retiring = True
                self._out.append(Retire(slot.name))
                return

    def _after(
        self,
        slot: _Slot,
        now: float,
        fate: str,
        *,
        wanted: bool = True,
        useful: bool = False,
        blamed: bool = False,
        tries: int = 0,
    ) -> None:
        """
        Decide what follows the end of a process.

        Args:
            slot: Whose it was.
            now: The time, in seconds.
            fate: What became of it.
            wanted: Whether it may be started again.
            useful: Whether it was of use.
            blamed: Whether a message is to blame for its end.
            tries: How often that message has failed.

        """
        pid, slot.pid = slot.pid, None
        self._set_timer(slot, None)
        slot.state = State.EXITED
        if self.stopping:
            return
        span = slot.tally.span(now)
        if wanted:
            jitter = self._random()
            if blamed:
                delay = slot.tally.forgive(tries, jitter=jitter)
            else:
                delay = slot.tally.next_delay(now, useful=useful, jitter=jitter)
            if delay is not None:
                self._restart(slot, now, delay)
                return
            slot.state = State.FATAL
        reason = f"{_named(slot.name, pid)} {fate}"
        if slot.state is State.FATAL:
            count = len(slot.tally)
            reason += f" after {count} useless restart{'s' * (count != 1)}"
            reason += f" in {span:.1f} s" if count else ""
            error = StageFailed(
                f"stage {self._stage.name}: {reason}, and is given up;"
                f" last events: {'; '.join(self.story(slot.name, now))}",
                stage=self._stage.name,
            )
            self._out.append(Tell(WorkerGivenUp(slot.name, error)))
        if self.finished:
            self.given_up = True
            self._out.append(GiveUp(slot.name, reason))

    def _restart(self, slot: _Slot, now: float, delay: float) -> None:
        self._out.append(Tell(WorkerRestarting(slot.name, delay)))
        if delay:
            slot.state = State.BACKOFF
            slot.story.note(now, f"to be restarted in {delay:.2f} s")
            self._set_timer(slot, now + delay)
        else:
            self._spawn(slot)

    def _set_timer(self, slot: _Slot, at: float | None) -> None:
        if at != slot.timer:
            slot.timer = at
            self._out.append(SetTimer(slot.name, at))

    def _less(self) -> float:
        return 1 - self._stage.recycle.variance * self._random()

    def _drain(self) -> list[Instruction]:
        out, self._out = self._out, []
        return out


_HANDLERS: Final[Mapping[type[Event], Callable[..., None]]] = {
    WorkerStarted: SupervisorState._started,
    StartFailed: SupervisorState._not_started,
    WorkerReady: SupervisorState._ready,
    AliveSeen: SupervisorState._alive,
    TimerRang: SupervisorState._rang,
    WorkerFailed: SupervisorState._failed,
    WorkerWorn: SupervisorState._worn,
    WorkerExited: SupervisorState._exited,
    StopRequested: SupervisorState._told_to_stop,
}


def _named(worker: str, pid: int | None) -> str:
    return f"worker {worker}" if pid is None else f"worker {worker} (pid {pid})"


def _fate(event: WorkerExited) -> str:
    parts = [event.fate or f"ended with status {event.status}"]
    if event.answered:
        parts.append(f"{event.answered} messages answered")
    if event.lost:
        parts.append(f"{event.lost} held")
    return ", ".join(parts)
