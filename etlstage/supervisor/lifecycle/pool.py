r"""
Decides what follows each event in the life of a stage's workers.

The supervisor reports every event with its time, and performs the instructions that it
gets in return. Nothing here runs, waits or reads a clock, so every interleaving can be
tried. Data does not pass through here: an event per message would cost more than the
message.

The life of a worker, which keeps its name over all its starts::

    EXITED --> STARTING --> RUNNING --> STOPPING --> BACKOFF --> STARTING ...
                                                 \-> EXITED   (done, or not wanted)
                                                 \-> FATAL    (no progress)

*STARTING* ends when the worker announces that it is ready; a worker that makes no such
announcement is RUNNING at once. *STOPPING* covers every end that we have begun: after a
fault, of a worn worker, with the end of the supervisor. A process that ends by itself
goes directly to one of the states after STOPPING.

A start made *progress* if it answered something, or died of a message that it had read,
which brings the search for the culprit a step forward. Only starts without progress
count against ``RestartPolicy.max``: this limit guards against a program that can't even
start, and must not be used up by messages that kill workers.

``worker.py`` handles what concerns one worker. This module handles what concerns
several: how many there are to be, that only one of them is replaced at a time, and that
callers get an error when none is left. An extractor runs only when it is requested, so
there may be no worker at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from etlstage.messages import counted
from etlstage.protocol.base import Shape
from etlstage.stage.stage import Stage
from etlstage.supervisor.lifecycle.events import (
    AliveSeen,
    DemandSeen,
    Event,
    GiveUp,
    Instruction,
    ScaleRequested,
    StopRequested,
    WorkerFailed,
    WorkerTimerRang,
)
from etlstage.supervisor.lifecycle.worker import WorkerHistory, WorkerLife, WorkerState

__all__ = (
    "Health",
    "PoolState",
    "Silence",
)


class Health(NamedTuple):
    """The health of a stage."""

    state: Literal["starting", "ready", "degraded", "failed"]
    """*starting* until a worker is ready; *ready* when all are; *degraded* when some
    are not, or messages are sent one at a time; *failed* when all workers failed, or
    the supervisor is closed."""
    reason: str = ""
    """Why the stage is not ready; empty if it is."""


class Silence(NamedTuple):
    """A worker whose answer is due."""

    worker: str
    seconds: float
    """How long the answer has been due."""
    received: int
    """Bytes of the answer that have come."""


class PoolState:
    """
    The lifecycle of a stage's workers; ``random`` returns jitter, from 0 to 1.

    ``name`` precedes their numbers in their names; by default that of the stage.
    """

    def __init__(
        self,
        stage: Stage,
        random: Callable[[], float] = lambda: 0.0,
        *,
        name: str = "",
    ) -> None:
        self._stage = stage
        self._name = name or stage.name
        self._random = random
        self._out: list[Instruction] = []
        self._lives: dict[str, WorkerLife] = {}
        self._min, self._max = stage.pool.min, stage.pool.max
        # In shape STREAM a worker is started only when its output is requested.
        streams = stage.dialect.shape is Shape.STREAM
        for _ in range(0 if streams else max(1, self._min)):
            self._add()
        self.stopping: bool = False
        """The supervisor is to end: no worker is started any more."""
        self.forced: bool = False
        """The workers are not given time to end by themselves."""
        self.given_up: bool = False
        """All workers failed, although messages may be left."""

    def __repr__(self) -> str:
        return f"<PoolState {list(self._lives.values())}>"

    def __getitem__(self, worker: str) -> WorkerState:
        return self._lives[worker].state

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of the workers that there are to be."""
        return tuple(life.name for life in self._wanted())

    @property
    def alive(self) -> int:
        """How many workers have a process, or are about to have one."""
        return sum(life.alive for life in list(self._lives.values()))

    @property
    def may_grow(self) -> bool:
        """Whether demand can lead to one more worker."""
        return not self.stopping and len(self._wanted()) < self._max

    @property
    def finished(self) -> bool:
        """Whether there is no process, and none will be started."""
        return all(life.finished for life in self._lives.values())

    def begin(self) -> list[Instruction]:
        """Return the instructions that start the workers."""
        for life in self._lives.values():
            life.spawn()
        return self._drain()

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Return what to do, in order; AssertionError if it can't have happened."""
        match event:
            case StopRequested(patient):
                self.stopping = True
                self.forced = self.forced or not patient
                for life in self._lives.values():
                    life.handle(event, now)
            case AliveSeen(worker):  # the most frequent event
                self._lives[worker].handle(event, now)
            case DemandSeen(waiting):
                self._grow(waiting)
            case ScaleRequested(workers):
                self._scale(workers, now)
            case _:
                life = self._lives[event.worker]
                life.handle(event, now)
                if isinstance(event, WorkerTimerRang):
                    self._spare(life, event.idle_since, now)
                if isinstance(event, WorkerFailed) and event.cause == "abnormal":
                    # No other worker could work. They finish what they have.
                    for other in self._wanted():
                        if other is not life:
                            other.dismiss(now)
                self._retire_one(now)
                self._give_up(life)
        return self._drain()

    def wanted(self, worker: str) -> bool:
        """Return whether a worker is to have a process."""
        return self._lives[worker].wanted

    def history(self, worker: str) -> WorkerHistory:
        """Return the last events of a worker."""
        return self._lives[worker].story

    def health(self, now: float) -> Health:
        """Return whether the workers can do their work, and why not."""
        if self.stopping:
            return Health("failed", "the supervisor is closed")
        wanted = self._wanted()
        if self.given_up:
            ends = "; ".join(life.end for life in wanted)
            return Health("failed", f"all workers failed: {ends}")
        running = [
            life
            for life in wanted
            if life.state is WorkerState.RUNNING or life.retiring
        ]
        troubled = [life for life in wanted if life not in running and _troubled(life)]
        if troubled:
            reasons = "; ".join(_reason(life, now) for life in troubled)
            workers = counted(len(wanted), "worker")
            return Health("degraded", f"{len(running)} of {workers} running: {reasons}")
        if wanted and not running:
            names = ", ".join(life.name for life in wanted)
            return Health("starting", f"waiting for {names} to be ready")
        return Health("ready")

    # --- how many -----------------------------------------------------------

    def _wanted(self) -> list[WorkerLife]:
        # A copy, as another thread may ask for the health while workers are added.
        return [life for life in list(self._lives.values()) if life.wanted]

    def _usable(self) -> list[WorkerLife]:
        """Return the workers that have a process, or will have one again."""
        return [life for life in self._wanted() if not life.finished]

    def _add(self) -> WorkerLife:
        name = f"{self._name}-{len(self._lives) + 1}"
        life = WorkerLife(name, self._stage, self._random, self._out)
        self._lives[name] = life
        return life

    def _start_one(self) -> None:
        """Start one more worker, under the name of a dismissed one if there is any."""
        for life in self._lives.values():
            if not life.wanted and life.state is WorkerState.EXITED:
                life.want()
                return
        self._add().spawn()

    def _grow(self, waiting: int) -> None:
        wanted = self._wanted()
        if self.stopping or self.given_up or len(wanted) >= self._max:
            return
        # One at a time: how much the last one helps is not known before it runs.
        busy = all(life.state is WorkerState.RUNNING for life in self._usable())
        if waiting and busy and waiting >= self._stage.pool.grow_at * len(wanted):
            self._start_one()

    def _spare(self, life: WorkerLife, idle_since: float | None, now: float) -> None:
        policy = self._stage.pool
        if (
            policy.varies
            and life.state is WorkerState.RUNNING
            and idle_since is not None
            and now >= idle_since + policy.idle
            and len(self._usable()) > self._min
        ):
            life.dismiss(now)

    def _scale(self, workers: int, now: float) -> None:
        self._min = self._max = workers
        if self.stopping or self.given_up:
            return  # a new worker would have nothing to do: all messages have ended
        usable = self._usable()
        for life in self._wanted():
            if life not in usable[:workers]:
                life.dismiss(now)
        for _ in range(workers - len(usable)):
            self._start_one()
        self._retire_one(now)  # the worker it waited for may have been dismissed

    # --- what concerns several ----------------------------------------------

    def _retire_one(self, now: float) -> None:
        """Replace a worn worker, if all others are running."""
        others = self._usable()
        if all(life.state is WorkerState.RUNNING for life in others):
            worn = next((life for life in others if life.worn is not None), None)
            if worn is not None:
                worn.retire(now)

    def _give_up(self, last: WorkerLife) -> None:
        wanted = self._wanted()
        gone = bool(wanted) and all(life.finished for life in wanted)
        if gone and not self.stopping and not self.given_up:
            self.given_up = True
            self._out.append(GiveUp(last.name, last.end))

    def _drain(self) -> list[Instruction]:
        out = self._out[:]
        self._out.clear()
        return out


def _troubled(life: WorkerLife) -> bool:
    """Return whether a worker that does not run is past its first start."""
    return life.state is not WorkerState.STARTING or life.starts > 1


def _reason(life: WorkerLife, now: float) -> str:
    match life.state:
        case WorkerState.BACKOFF:
            # Read in another thread: the timer may have rung just now.
            wait = max(0.0, (life.timer or now) - now)
            return f"{life.name} will be restarted in {wait:.1f} s"
        case WorkerState.FATAL | WorkerState.EXITED:
            return life.end
        case _:
            return f"{life.name} is being replaced"
