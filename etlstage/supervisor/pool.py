"""
The workers of a stage: performs what ``lifecycle/pool.py`` decides.

Every event goes through :meth:`WorkerPool.handle`, and the instructions that it returns
are performed at once, in order. Only what takes time runs as a task: each process until
it is gone, one timer per worker, and the storing of each position.

A worker may ask, during its work, to store its position in the share of the input that
it was started for. It is answered when the position is stored, or could not be; its
next start resumes from the position that was stored last.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from threading import get_ident
from typing import Final, NamedTuple, TypeAlias, assert_never

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from etlstage.errors import (
    EtlstageError,
    StageError,
    StageFailed,
    WorkerLost,
    WorkerStartFailed,
)
from etlstage.protocol.base import Shape
from etlstage.protocol.events import Assignment, CommitAsked, FarewellReason
from etlstage.stage.stage import Stage
from etlstage.supervisor.contract import checker_of
from etlstage.supervisor.deadlines import BusyTime, Deadline
from etlstage.supervisor.diagnostic import SKIPPED
from etlstage.supervisor.exchange.backlog import Backlog
from etlstage.supervisor.exchange.submission import Submission
from etlstage.supervisor.lifecycle.events import (
    DemandSeen,
    Event,
    Fail,
    FeedWorker,
    GiveUp,
    Instruction,
    Publish,
    RemainsEnded,
    Retire,
    ScaleRequested,
    SetTimer,
    Spawn,
    StartFailed,
    StopRequested,
    StopWorker,
    SupervisorEvent,
    WorkerExited,
    WorkerFailedPermanently,
    WorkerSilent,
    WorkerStarted,
    WorkerTimerRang,
    WorkerWorn,
)
from etlstage.supervisor.lifecycle.pool import Health, PoolState, Silence
from etlstage.supervisor.lifecycle.worker import WorkerState
from etlstage.supervisor.observers import Observers
from etlstage.supervisor.process import traced
from etlstage.supervisor.worker import WorkerProcess
from etlstage.telemetry import StageMetrics
from etlstage.telemetry.log import Log
from etlstage.transport import Launch, launch_worker
from etlstage.transport.process import clock, resident_bytes

__all__ = ("CommitRequest", "Commits", "StoreCommit", "WorkerPool")

_log = Log()

_MOST_REMAINS: Final = 16  # exited workers whose children still have time to end
_LOOK: Final = 1.0  # seconds between two looks at the memory of the workers


class CommitRequest(NamedTuple):
    """A position that a worker asks to have stored."""

    worker: str
    """Name of the worker, such as ``load-1``."""
    assignment: Assignment | None
    """The share of the input that it was started for, with the last stored position."""
    exchange: int
    """Number of the exchange, in the life of the worker, that was opened last."""
    position: object
    """The position in the form of the dialect; plain JSON."""
    ended: bool = False
    """Whether the position is the end of the share."""


StoreCommit: TypeAlias = Callable[[CommitRequest], Awaitable[None]]
"""Stores a position durably; the text of an error it raises is sent to the worker."""


class Commits:
    """
    Stores positions, and knows where the next start resumes.

    Args:
        stage: The stage of the workers.
        store: Stores a position; None: no checkpoint store is configured.
        assignment: The share of the input that the worker has; None: all input.
            As an attribute it has the position that was stored last.

    """

    def __init__(
        self,
        stage: Stage,
        store: StoreCommit | None = None,
        assignment: Assignment | None = None,
    ) -> None:
        self.assignment: Assignment | None = assignment
        self.ended: bool = False
        """Whether the position that was stored last is the end of the share."""
        self._stage = stage
        self._store = store
        self._expected = True  # no worker has committed, and no warning was logged

    def warn_of_none(self, worker: str, held: int) -> None:
        """Log, once, that a worker has as much as it may have and never committed."""
        if self._expected:
            self._expected = False
            _log.warning(
                "worker has not committed any of the messages that it has answered, and"
                " is given no more until it does",
                stage=self._stage.name,
                worker=worker,
                messages=held,
            )

    async def store(
        self,
        worker: str,
        asked: CommitAsked,
        answer: Callable[[str | None], None],
    ) -> None:
        """Store a position, then call ``answer`` with the error, or None."""
        self._expected = False
        if self._store is None:
            answer(f"no checkpoint store configured for stage {self._stage.name}")
            return
        share, limit = self.assignment, self._stage.timeout.commit
        error: str | None = None
        try:
            with anyio.move_on_after(limit) as scope:
                await self._store(CommitRequest(worker, share, *asked))
            if scope.cancelled_caught:
                error = f"not stored within timeout.commit ({limit:g} s)"
        except Exception as failure:
            error = str(failure) or type(failure).__name__
        except BaseException as failure:
            if not _is_foreign(failure):
                # Cancelled: tasks that wait until it is stored must not wait for ever.
                answer("the run has ended")
                raise
            error = str(failure) or type(failure).__name__
        if error is not None:
            _log.warning(
                "position not stored",
                stage=self._stage.name,
                worker=worker,
                position=asked.position,
                error=error,
            )
        elif share is not None:
            self.assignment = share._replace(position=asked.position)
            self.ended = asked.ended
        answer(error)


def _is_foreign(error: BaseException) -> bool:
    """Return whether something awaited was cancelled, but not the current task."""
    cancelled = isinstance(error, anyio.get_cancelled_exc_class())
    return cancelled and anyio.current_effective_deadline() > -math.inf


class WorkerPool:
    """Keeps the workers of a stage running until it is stopped."""

    def __init__(
        self,
        stage: Stage,
        observers: Observers,
        metrics: StageMetrics | None,
        launch: Launch = launch_worker,
        commits: Commits | None = None,
    ) -> None:
        self.stage = stage
        self.commits: Commits = commits or Commits(stage)
        """Stores the positions that workers commit."""
        self.farewell_reason: FarewellReason = FarewellReason.DRAIN
        """Why workers are to end, for the farewell of their dialect."""
        self.backlog: Backlog = Backlog(checker_of(stage))
        """The messages that wait for the workers."""
        self.closing: bool = False
        """Whether new submissions fail."""
        self.metrics = metrics
        self.launch: Launch = launch
        self._complete = False
        self._entered = False
        self._tasks: TaskGroup  # set by start()
        self._observers = observers
        share = self.commits.assignment
        name = share.name if share is not None else stage.name
        self.state: PoolState = PoolState(stage, random.random, name=name)
        """The lifecycle, which decides; only :meth:`handle` may change it."""
        self._running: dict[str, WorkerProcess] = {}
        # Whether the task has begun that serves it, or only its remains; oldest first.
        self._served: dict[WorkerProcess, bool] = {}
        self._timers: dict[str, Deadline] = {}
        self._instructions: deque[Instruction] = deque()
        self._performing = False
        self._elastic = stage.pool.varies
        self._streams = stage.dialect.shape is Shape.STREAM
        self._kick_due = False  # workers may take what another one had
        self._broken: BaseException | None = None  # ended a task, and so everything
        self._gone = anyio.Event()
        self._drained: anyio.Event | None = None  # set when no submission is left
        self.time: Callable[[], float] = anyio.current_time
        """Returns the time of the event loop, in seconds; a fast function."""
        self.clock: PoolClock = PoolClock()
        self._last_errors: dict[str, EtlstageError] = {}
        self._doubtful = 0  # of workers that have ended
        self.doubt: StageError | None = None
        """The error of the first load worker that failed while it ended."""
        self.failure: StageFailed | None = None
        """The error with which all workers failed; None while there is a worker."""
        self.busy_time: BusyTime = BusyTime()
        """The time in which workers hold messages."""
        self.skipped: int = 0
        """Messages that workers report as skipped."""

    @property
    def doubtful(self) -> int:
        """Number of messages whose replies, or effects, may not be what they seem."""
        # A worker that was found at fault is listed until its process has ended.
        running = list(self._running.values())  # in one step: any thread may call this
        return self._doubtful + sum(r.link.doubtful for r in running)

    def running(self) -> list[WorkerStarted]:
        """Return the processes that run."""
        return [WorkerStarted(r.name, r.pid, r.start) for r in self._running.values()]

    def start(self, tasks: TaskGroup) -> None:
        """
        Start the workers; what takes time runs in ``tasks``.

        Raises:
            WorkerStartFailed: If the program can't be run; workers that were started
                before keep running.

        """
        self._tasks = tasks
        self.time = clock()
        self.clock.start()
        self.launch = traced(self.launch)
        if self.stage.recycle.max_rss is not None:
            tasks.start_soon(self._watch_memory, self.stage.recycle.max_rss)
        self._instructions.extend(self.state.begin())
        try:
            self._perform_all()
        except BaseException:
            self._instructions.clear()
            raise
        self._entered = True

    async def stop(self, *, patient: bool = True) -> None:
        """
        Stop the workers and return when they are gone.

        ``patient``: they may end by themselves once their stdin is closed.
        """
        self.handle(StopRequested(patient))
        if not patient:
            self._clear_remains(0)
            await self._serve_unserved()
        while self._served or not (self.state.finished or self._broken):
            await self._gone.wait()

    def close_for(self, why: FarewellReason) -> None:
        """Take no more submissions; ``why`` is sent to workers when they are stopped."""
        self._end_for(why)
        if why is FarewellReason.LOST:
            for running in list(self._running.values()):
                running.lose_share()

    def _end_for(self, why: FarewellReason) -> None:
        self.closing = True
        # A share that is lost stays lost. But one that ends has not ended any more if
        # the workers are stopped before they are given the rest.
        if self.farewell_reason is not FarewellReason.LOST:
            self.farewell_reason = why

    async def close(self, *, patient: bool) -> None:
        """Stop the workers, then end all submissions, even if this is cancelled."""
        try:
            if patient:
                await self.stop()
        finally:
            with anyio.CancelScope(shield=True):
                try:
                    await self.stop(patient=False)
                finally:
                    self.backlog.fail(self.closed())

    def open(self, submission: Submission) -> None:
        """Let the workers take messages of a submission."""
        self.backlog.open(submission)
        if self.closing:
            submission.fail(self.closed())

    def drop(self, submission: Submission) -> None:
        """Forget a submission: its results are not awaited any more."""
        if not submission.finished and self.farewell_reason is FarewellReason.ENDED:
            # What workers are not given any more would be missing before the end.
            self.farewell_reason = FarewellReason.DRAIN
        self.backlog.drop(submission)
        if self._drained is not None and not self.backlog.occupied:
            self._drained.set()
            self._drained = None

    async def drain(self) -> None:
        """Wait until all that was submitted is done."""
        while self.backlog.occupied:
            self._drained = self._drained or anyio.Event()
            await self._drained.wait()

    def closed(self) -> WorkerLost:
        """Return the error for messages of a closed supervisor."""
        name = self.stage.name
        return WorkerLost(f"stage {name}: the supervisor is closed", stage=name)

    def handle(self, event: Event) -> None:
        """Handle an event, and perform the instructions that follow."""
        self._instructions.extend(self.state.handle(event, self.time()))
        self._perform_all()

    def publish(self, event: WorkerSilent) -> None:
        """Publish an event that does not change the lifecycle."""
        self._observers.publish(event, alive=self.state.alive)

    def slowest(self) -> Silence | None:
        """Return the worker whose answer has been due longest; for any thread."""
        now = self.clock.now()
        found = [
            Silence(running.name, *silence)
            for running in list(self._running.values())
            if (silence := running.link.silence(now)) is not None
        ]
        return max(found, key=lambda silence: silence.seconds, default=None)

    def health(self) -> Health:
        """Return whether the workers can do their work, and why not; for any thread."""
        health = self.state.health(self.clock.now())
        if health.state == "ready" and self.backlog.in_step:
            reason = (
                "messages are sent one at a time: replies could not be matched to them"
            )
            return Health("degraded", reason)
        return health

    def scale(self, workers: int) -> None:
        """Change the number of workers; surplus workers finish what they have."""
        before = self.state.workers
        self.handle(ScaleRequested(workers))
        for worker in before:
            # A surplus worker that waited for its restart goes without any event.
            if not self.state.wanted(worker) and worker not in self._running:
                self._leave(worker, failed=bool(self.backlog.suspects))
        self.kick()

    def kick(self) -> None:
        """Let the workers take what waits, the least busy first; a single one, all."""
        now = self.time()
        links = [running.link for running in self._running.values()]
        if len(links) == 1:
            links[0].pump_all(now)
        moved = len(links) > 1
        while moved:
            links.sort(key=lambda link: link.owed)
            pumped = [link.pump(now) for link in links]
            moved = any(pumped)
        if len(links) > 1 and self.metrics is not None:
            for link in links:
                link.measure()
        self._tell_demand()

    def commit(
        self, worker: str, asked: CommitAsked, answer: Callable[[str | None], None]
    ) -> None:
        """Let :attr:`commits` store a position; ``answer`` is called later."""
        self._tasks.start_soon(self.commits.store, worker, asked, answer)

    def complete(self, why: FarewellReason) -> None:
        """Let the workers end once all is answered: nothing more is submitted."""
        self._complete = True
        self._end_for(why)
        self.end_if_answered()

    def end_if_answered(self) -> None:
        """Stop the workers if nothing more is submitted, and all is answered."""
        if not self._complete or self.state.stopping or not self.backlog.exhausted:
            return
        if not any(running.link.pending for running in self._running.values()):
            self.handle(StopRequested(patient=True))

    def count(self, worker: str, counts: Mapping[str, int]) -> None:
        """Add counts that a worker reported, by name of the metric."""
        for name, count in counts.items():
            if name == SKIPPED:
                self.skipped += count
            if self.metrics is not None:
                self.metrics.count_own(worker, name, count)

    # --- performing -----------------------------------------------------------

    def _perform_all(self) -> None:
        if self._performing:
            return  # called while performing: the outer call performs the rest
        self._performing = True
        try:
            while self._instructions:
                self._perform(self._instructions.popleft())
        finally:
            self._performing = False
        if self._kick_due:
            self._kick_due = False
            self.kick()

    def _perform(self, instruction: Instruction) -> None:
        match instruction:
            case Spawn():
                self._spawn(instruction)
            case FeedWorker(worker):
                self._running[worker].open()
                self._tell_demand()
            case Fail(worker, reason, cause):
                self._running[worker].fail(reason, cause)
            case Retire(worker):
                self._running[worker].link.retire()
            case StopWorker(worker, patient):
                if (running := self._running.get(worker)) is not None:
                    running.stop(patient=patient)
                else:
                    self._never_started(worker)
            case SetTimer(worker, at):
                if worker not in self._timers:
                    self._timers[worker] = Deadline(partial(self._ring, worker))
                    self._tasks.start_soon(self._timers[worker].run)
                self._timers[worker].set(at)
            case Publish(event):
                self._note(event)
            case GiveUp(worker, reason):
                self._give_up(worker, reason)
            case _:
                assert_never(instruction)

    def _spawn(self, wanted: Spawn) -> None:
        name = wanted.worker
        if self.state.stopping:
            self._never_started(name)
            return
        # A worker that keeps crashing must not fill the machine with its children.
        self._clear_remains(_MOST_REMAINS)
        try:
            running = WorkerProcess(
                self,
                name,
                number=_number(name),
                start=wanted.start,
                max_messages=wanted.max_messages,
            )
        except WorkerStartFailed as error:
            if not self._entered:
                raise  # to the host: the supervisor does not start
            self._last_errors[name] = error
            self.handle(StartFailed(name, error))
            return
        self._running[name] = running
        self._served[running] = False
        self.backlog.join(_number(name))
        self._tasks.start_soon(self._serve, running)
        self.handle(WorkerStarted(name, running.pid, wanted.start))

    async def _serve(self, running: WorkerProcess) -> None:
        self._served[running] = True
        try:
            await running.run()
        except BaseException as error:
            # An internal error, as those of workers are not raised; or the event loop
            # cancels all tasks, even shielded ones. Callers must not be left waiting.
            self._broken = error
            name = self.stage.name
            failed = StageFailed(f"stage {name}: internal error: {error!r}", stage=name)
            failed.__cause__ = error
            self.backlog.fail(failed if isinstance(error, Exception) else self.closed())
            raise
        finally:
            if self._running.get(running.name) is running:
                del self._running[running.name]
            del self._served[running]
            self._gone.set()
            self._gone = anyio.Event()

    async def _serve_unserved(self) -> None:
        """Serve processes whose task asyncio has cancelled before its first step."""
        if all(self._served.values()):
            return
        # After two turns of any event loop all other tasks have begun.
        for _ in range(2):
            await anyio.lowlevel.cancel_shielded_checkpoint()
        async with anyio.create_task_group() as tasks:
            for running, begun in self._served.items():
                if not begun:
                    self._served[running] = True
                    tasks.start_soon(self._serve, running)

    def _clear_remains(self, most: int) -> None:
        """Wait for remains of at most ``most`` exited workers; kill the others."""
        left = [running for running in self._served if running.exited]
        for running in left[: max(0, len(left) - most)]:
            running.kill_remains()

    def _tell_demand(self) -> None:
        if self._elastic and self.state.may_grow and (demand := self.backlog.demand):
            self.handle(DemandSeen(demand))

    def _never_started(self, worker: str) -> None:
        """Report a worker that is not started because all are stopping."""
        never = WorkerStartFailed("was not started", stage=self.stage.name)
        self.handle(StartFailed(worker, never))

    def _give_up(self, worker: str, reason: str) -> None:
        last = self._last_errors.get(worker)
        name = self.stage.name
        text, word, story = f"all workers failed: {reason}", "", tuple[str, ...]()
        if last is not None:
            word, story, what = last.word, last.story, f"last error: {last}"
            if word:
                text, story = f"{word}; {text}", (what, *story)
            else:
                text = f"{text}; {what}"
        error = StageFailed(f"stage {name}: {text}", stage=name)
        error.word, error.story = word, story
        self.failure = error
        self.backlog.fail(error)

    def _note(self, event: SupervisorEvent) -> None:
        if isinstance(event, WorkerExited | RemainsEnded):
            self._doubtful += event.doubtful
            self.doubt = self.doubt or event.doubt
        if isinstance(event, WorkerExited):
            self.backlog.unknown_outcomes += event.unknown
            error = self._running.pop(event.worker).error
            self._kick_due = True
            if error is not None:
                self._last_errors[event.worker] = error
            if self._complete and self.state.stopping and self.state.finished:
                self.backlog.fail(self.closed())
            if not self.state.wanted(event.worker):
                self._leave(event.worker, failed=bool(self.backlog.suspects))
            elif self.state[event.worker] in {WorkerState.EXITED, WorkerState.FATAL}:
                self._leave(event.worker)
        elif isinstance(event, WorkerFailedPermanently):
            self._leave(event.worker)
        self._observers.publish(event, alive=self.state.alive)

    def _leave(self, worker: str, *, failed: bool = True) -> None:
        """Leave a worker's messages to others; ``failed``: it was not let go."""
        self.backlog.leave(_number(worker), failed=failed)
        self._kick_due = True

    # --- time -----------------------------------------------------------------

    def _ring(self, worker: str, _now: float) -> None:
        running = self._running.get(worker)
        if running is not None:
            # What is missed may have come in time, while the event loop was busy.
            running.read_available()
            # A worker whose output has ended exits now, or is stopped.
            if running.link.all_read or self.state[worker] is WorkerState.STOPPING:
                return
        idle_since = None if running is None else running.link.deadlines.idle_since
        # Without a request, what the program writes would be lost.
        needed = not self._streams or self.backlog.demand > 0
        self.handle(WorkerTimerRang(worker, idle_since, needed))

    async def _watch_memory(self, limit: int) -> None:
        while True:
            await anyio.sleep(_LOOK)
            for name, running in list(self._running.items()):
                if not running.usable or self.state[name] is not WorkerState.RUNNING:
                    continue
                size = resident_bytes(running.pid)
                if size is not None and size > limit:
                    self.handle(WorkerWorn(name, f"uses {size} bytes of memory"))


def _number(worker: str) -> int:
    """Return the number of a worker, from 0."""
    return int(worker.rpartition("-")[2]) - 1


class PoolClock:
    """The time of the event loop, also for other threads."""

    def __init__(self) -> None:
        self._thread: int | None = None
        self._ahead = 0.0  # seconds by which the loop's clock is ahead of monotonic()

    def start(self) -> None:
        """Take the time of the loop that runs in this thread."""
        self._thread = get_ident()
        self._ahead = anyio.current_time() - time.monotonic()

    def now(self) -> float:
        """Return the time, in seconds."""
        if get_ident() == self._thread:
            # The loop may have ended: health may be asked for even then.
            with suppress(anyio.NoEventLoopError):
                return anyio.current_time()
        return time.monotonic() + self._ahead
