"""
The supervisor of one stage, for embedding.

It has no global state, signal handlers or event loop policy. It is a context manager:
everything that it started is gone when its block ends, however the block ends.
"""

from __future__ import annotations

import threading
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import (
    AbstractAsyncContextManager,
    aclosing,
    asynccontextmanager,
    contextmanager,
)
from typing import Self, overload

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream

from etlstage.errors import (
    Faults,
    InvalidState,
    LocalProtocolError,
    Overloaded,
    RepliesDoubtful,
    StageError,
    StageFailed,
    WorkerStartFailed,
)
from etlstage.messages import (
    Position,
    Result,
    Run,
    StageKind,
    check_text,
    counted,
    sound,
)
from etlstage.protocol.base import Limits, Side
from etlstage.protocol.events import Assignment, FarewellReason
from etlstage.stage.policy import BatchPolicy
from etlstage.stage.stage import Stage
from etlstage.supervisor.arguments import (
    check_callable,
    check_limit,
    check_meter,
    check_seconds,
    check_stage,
    check_whole,
)
from etlstage.supervisor.exchange.exchange import Outcome
from etlstage.supervisor.exchange.keyed import Lanes
from etlstage.supervisor.exchange.submission import Collected, Submission
from etlstage.supervisor.lifecycle.events import SupervisorEvent
from etlstage.supervisor.lifecycle.pool import Health, Silence
from etlstage.supervisor.observers import Observers
from etlstage.supervisor.pool import Commits, StoreCommit, WorkerPool
from etlstage.supervisor.process import command_line, missing
from etlstage.supervisor.stream import (
    Intake,
    WorkerSession,
    as_run,
    extraction,
    in_runs,
    results_of,
    submission_for,
)
from etlstage.telemetry import Meter, StageMetrics
from etlstage.telemetry.log import Log
from etlstage.telemetry.trace import Span
from etlstage.transport import Launch, launch_worker
from etlstage.transport.process import Signal, event_loop

__all__ = ("AsyncSupervisor",)

_log = Log()


class AsyncSupervisor:
    """
    Runs the workers of a stage and passes messages through them.

    ::

        async with AsyncSupervisor(stage) as supervisor:
            results = await supervisor.submit([b"one", b"two"])

    Any number of tasks may submit at the same time. Methods may only be called in the
    event loop in which it was entered; properties may be read in any thread, at any
    time.

    Args:
        stage: What to run.
        max_messages: Messages that one :meth:`stream` may hold: read from its input
            and not yet taken by its consumer.
        max_bytes: The same in bytes, replies included.
        max_pending: Messages that may be pending: :meth:`submit`, :meth:`ask` and
            :meth:`session` raise beyond it; None: no limit. Messages of a stream count,
            but a stream never raises: ``max_messages`` and ``max_bytes`` bound it.
        meter: Counts what happens, see :mod:`etlstage.telemetry`.
        launch: Starts the workers; by default as their dialect requires.
        commit: Stores a position that a worker commits, in a dialect with commits;
            None: such a worker is answered with an error.
        assignment: The share of the input that the single worker is started for, and
            the position to resume from, in such a dialect.

    Raises:
        TypeError: If ``stage`` is not a stage, a limit is not a whole number, or
            ``meter``, ``launch`` or ``commit`` can't be called as such.
        ValueError: If several workers would have the same share, or ``max_messages`` or
            ``max_bytes`` is less than 1, or ``max_pending`` is negative.
        WorkerStartFailed: On entering, if the program can't be run, or the script that
            it is to interpret is not there.
        InvalidState: By methods, outside the block, or in another event loop or thread.
            After it, :meth:`aclose` and :meth:`withhold` have no effect and
            :meth:`events` yields nothing; before it, only :meth:`events` may be called.

    """

    def __init__(
        self,
        stage: Stage,
        *,
        max_messages: int = 65536,
        max_bytes: int = 64 * 1024 * 1024,
        max_pending: int | None = None,
        meter: Meter | None = None,
        launch: Launch = launch_worker,
        commit: StoreCommit | None = None,
        assignment: Assignment | None = None,
    ) -> None:
        check_stage(stage)
        if assignment is not None and stage.pool.max > 1:
            raise ValueError(
                f"stage {stage.name}: expected one worker, found workers:"
                f" {stage.pool.max}: a share of the input belongs to a single worker;"
                " use a supervisor for each share"
            )
        check_limit("max_messages", max_messages, 1)
        check_limit("max_bytes", max_bytes, 1)
        if max_pending is not None:
            check_limit("max_pending", max_pending, 0)
        check_callable("launch", launch, "a function")
        if commit is not None:
            check_callable("commit", commit, "an async function")
        if meter is not None:
            check_meter(meter)
        self.stage = stage
        self._metrics = StageMetrics(meter, stage.name) if meter is not None else None
        self._observers = Observers(stage, self._metrics)
        commits = Commits(stage, commit, assignment)
        self._pool = WorkerPool(stage, self._observers, self._metrics, launch, commits)
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._max_pending = max_pending
        self._intakes: set[Intake] = set()
        self._withheld = False
        self._tasks: TaskGroup | None = None
        self._thread: int | None = None
        self._loop: object | None = None
        self._ended = False

    def __repr__(self) -> str:
        return f"<AsyncSupervisor {self.stage.name!r} workers={self._pool.state.alive}>"

    async def __aenter__(self) -> Self:
        if self._tasks is not None:
            raise InvalidState(
                f"{self!r} was entered already: a supervisor can be entered only once;"
                " make another one"
            )
        # Only real processes need a program: other launches may use any name.
        real = self._pool.launch is launch_worker
        if real and (flaw := missing(self.stage)) is not None:
            raise WorkerStartFailed(
                f"stage {self.stage.name}: can't start its workers: {flaw};"
                f" command: {command_line(self.stage)}",
                stage=self.stage.name,
            )
        if self.stage.batch != BatchPolicy() and not self.stage.dialect.shape.gathers:
            _log.warning(
                "batch has no effect: workers are sent one message at a time",
                stage=self.stage.name,
                dialect=self.stage.dialect.name,
            )
        self._thread, self._loop = threading.get_ident(), event_loop()
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        try:
            self._pool.start(self._tasks)
        except BaseException:
            await self._finish(patient=False)
            raise
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        """Stop the workers; at once if the block failed or was cancelled."""
        self._in_loop()
        await self._finish(patient=kind is None)

    async def aclose(
        self, *, drain: float = 0.0, why: FarewellReason = FarewellReason.DRAIN
    ) -> None:
        """
        Stop the workers and wait until they are gone.

        Messages that they still hold end with an error. In dialect ``kcl`` a worker
        first finishes its action, within ``timeout.message``. If this call is
        cancelled, the workers are stopped at once.

        Args:
            drain: Seconds that submitted messages have to end before the workers are
                stopped. Meanwhile nothing new is taken, and streams read no more of
                their input.
            why: The reason that is sent to workers, in dialects with reasons.

        Raises:
            TypeError: If ``drain`` is not a number; nothing is stopped then.
            ValueError: If it is not a number of seconds (NaN), likewise.
            InvalidState: Before the block, or in another event loop or thread.

        """
        self._require_entered()
        self._in_loop()
        check_seconds("drain", drain)
        self._pool.close_for(why)
        for intake in self._intakes:
            intake.scope.cancel()
        try:
            with anyio.move_on_after(drain):
                await self._pool.drain()
        finally:
            try:
                await self._pool.close(patient=True)
            finally:
                self._observers.close()

    def finish(self, *, why: FarewellReason = FarewellReason.ENDED) -> None:
        """
        Let the workers end once all is answered: nothing more will be submitted.

        The end of the input is sent to the workers, in dialects that do so, and they
        may commit once more. Messages that remain uncommitted end with
        :class:`NotCommitted`.

        Args:
            why: The reason that is sent.

        """
        self._running()
        self._pool.complete(why)

    def withhold(self) -> None:
        """
        Give the workers no more messages: they finish those that they have.

        The rest of a stream, and anything read from its input from now on, is dropped:
        it has no results, and no position after it is yielded.

        Raises:
            InvalidState: Before the block, or in another event loop or thread.

        """
        self._require_entered()
        self._in_loop()
        self._withheld = True
        for intake in self._intakes:
            intake.withhold()

    def scale(self, workers: int) -> None:
        """
        Change the number of workers.

        Surplus workers finish what they have. Any bounds in ``stage.workers`` no longer
        apply.

        Raises:
            TypeError: If ``workers`` is not a whole number.
            ValueError: If the number is less than 1, or the stage extracts.

        """
        self._running()
        check_whole("workers", workers)
        if workers < 1 or self.stage.kind is StageKind.EXTRACT:
            raise ValueError(
                f"stage {self.stage.name} of kind {self.stage.kind.value} can't have"
                f" {workers} workers"
            )
        self._pool.scale(workers)

    @property
    def health(self) -> Health:
        """Whether the stage can do its work: its state, and why it is not ready."""
        if self._tasks is None:
            return Health("starting", "has not been entered")
        if self._pool.closing or self._ended:
            return Health("failed", "the supervisor is closed")
        return self._pool.health()

    @property
    def workers_ready(self) -> bool:
        """Whether all workers run, even if messages are sent one at a time."""
        pool = self._pool
        health = pool.state.health(pool.clock.now())
        return self._tasks is not None and health.state == "ready"

    @property
    def faults(self) -> Faults:
        """Restarts and failures of the workers, with the latest failures."""
        return self._observers.faults

    @property
    def busy(self) -> float:
        """Seconds during which any of its workers held a message."""
        return self._pool.busy_time.until(self._pool.clock.now())

    @property
    def slowest(self) -> Silence | None:
        """The worker whose answer has been due for longest; None if none is due."""
        if self._tasks is None or self._ended:
            return None
        return self._pool.slowest()

    @property
    def answered(self) -> bool:
        """Whether any worker has ever answered a message."""
        return self._pool.backlog.answered

    @property
    def skipped(self) -> int:
        """
        Messages that workers report as skipped.

        They are done, without output; see ``on_error="skip"`` of ``etlstage.worker``.
        """
        return self._pool.skipped

    @property
    def unknown_outcomes(self) -> int:
        """
        How often it is unknown whether a worker has processed a message.

        The worker was lost before it had answered the message, or, as a load worker,
        before it had exited with status 0; or the message was cancelled, or refused
        with its batch, some of which may have been processed.
        """
        return self._pool.backlog.unknown_outcomes

    @property
    def mismatches(self) -> Mapping[str, int]:
        """Number of replies that broke ``expect``, by the first key that they broke."""
        checker = self._pool.backlog.checker
        return {} if checker is None else dict(checker.found)

    @property
    def doubtful(self) -> int:
        """
        Number of messages whose returned results may be wrong.

        Their worker wrote one reply too many, or too few, which showed only later, so
        the results may belong to other messages. Or a load worker failed while it
        ended, and what it had answered may not be loaded. The number is final once the
        supervisor has ended; :attr:`doubt` has the reason.
        """
        return self._pool.doubtful

    @property
    def doubt(self) -> StageError | None:
        """
        Why results that were returned are doubtful; None if none is.

        Or the error of a load worker that failed while it ended: what it had answered
        may not be loaded, or it has not committed the end of its share.
        """
        if self._pool.doubt is not None or not self._pool.doubtful:
            return self._pool.doubt
        return RepliesDoubtful(self._pool.doubtful, stage=self.stage.name)

    @property
    def failure(self) -> StageFailed | None:
        """The error with which all workers failed; None while there is a worker."""
        return self._pool.failure

    async def submit(self, messages: Iterable[bytes]) -> list[Result]:
        """
        Pass messages through the workers and return their results in input order.

        It never raises for what a worker does: see :attr:`Result.error`.

        Raises:
            TypeError: If one of the messages is not bytes; none is passed then.
            Overloaded: If these and the pending messages are too many; none is passed.

        """
        self._running()
        with Span("submit", stage=self.stage.name) as noted:
            return await self._submit(messages, noted)

    async def ask(
        self,
        message: bytes,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - the error names what
    ) -> tuple[bytes, ...]:
        """
        Pass one message through the workers and return its outputs.

        Args:
            message: The message.
            timeout: Seconds after which the message is abandoned. A worker that has it
                keeps working on it; ``stage.timeout.message`` is a deadline for that.

        Raises:
            TypeError: If the message is not bytes, or ``timeout`` is not a number.
            ValueError: If ``timeout`` is not a number of seconds (NaN).
            TimeoutError: If there is no result in time.
            Overloaded: If too many messages are pending.
            EtlstageError: If the message failed: the error of its :class:`Result`.
            LocalProtocolError: If the stage answers in batches: outputs then can't be
                attributed to single messages.

        """
        self._running()
        if self.stage.dialect.shape.batches:
            raise LocalProtocolError(
                f"stage {self.stage.name} answers in batches: outputs can't be matched"
                " to single messages; use submit()"
            )
        if timeout is not None:
            check_seconds("timeout", timeout)
        with Span("ask", stage=self.stage.name) as noted:
            with anyio.move_on_after(timeout):
                (result,) = await self._submit([message], noted)
                if result.error is not None:
                    # Other messages may share the error: drop their tracebacks.
                    raise result.error.with_traceback(None)
                return result.outputs
            raise TimeoutError(
                f"stage {self.stage.name}: no result for the message within {timeout} s"
            )

    async def stream(
        self, messages: Iterable[bytes] | AsyncIterable[bytes]
    ) -> AsyncGenerator[Result, None]:
        """
        Pass messages through the workers and yield the results.

        They come in input order, or as ``stage.order`` determines. The input is read
        ahead within ``max_messages`` and ``max_bytes``. An error that it raises is
        raised here after the results of the messages before it; so is a TypeError for
        an item that is not bytes, and WorkerLost once the supervisor is closed.
        """
        async with aclosing(self.answers(in_runs(messages))) as outcomes:
            async for outcome in outcomes:
                for result in results_of(outcome):
                    yield result

    @overload
    def answers(
        self,
        items: Iterable[Run] | AsyncIterable[Run],
        *,
        on_failure: Callable[[Outcome], None] | None = None,
    ) -> AsyncGenerator[Outcome, None]: ...
    @overload
    def answers(
        self,
        items: Iterable[Run | Position] | AsyncIterable[Run | Position],
        *,
        on_failure: Callable[[Outcome], None] | None = None,
    ) -> AsyncGenerator[Collected, None]: ...
    async def answers(
        self,
        items: Iterable[Run | Position] | AsyncIterable[Run | Position],
        *,
        on_failure: Callable[[Outcome], None] | None = None,
    ) -> AsyncGenerator[Collected, None]:
        """
        Do as :meth:`stream`, a run at a time: for callers with millions of messages.

        A position among the runs is yielded when all messages before it have ended,
        whatever the order of the others; no position overtakes another.

        Args:
            items: The runs, and positions among them.
            on_failure: Called with an outcome that has an error as soon as it ends. The
                outcome is still yielded in its turn, which can be much later if the
                worker commits. An error that it raises ends the iteration.

        """
        tasks = self._running()
        if self._pool.closing:
            raise self._pool.closed()  # at once: the input may never end
        wrong: list[Exception] = []

        def note(outcome: Outcome) -> None:
            # It is called in the course of a worker, which other callers use, too.
            assert on_failure is not None
            try:
                on_failure(outcome)
            except Exception as error:
                wrong.append(error)
                changed.set()

        noted = note if on_failure else None
        messages = failed = 0
        with (
            Span("stream", stage=self.stage.name) as span,
            self._submission(noted) as (submission, changed),
        ):
            room = self._max_messages, self._max_bytes
            intake = Intake(self._pool, submission, items, *room)
            self._intakes.add(intake)
            if self._withheld:
                intake.withhold()
            tasks.start_soon(intake.run)
            try:
                while True:
                    for item in intake.passing(self._collect(submission)):
                        if isinstance(item, Outcome):
                            messages += len(item.messages)
                            failed += item.failed
                        yield item
                    if wrong:
                        raise wrong[0]
                    if submission.finished:
                        break
                    await changed.wait()
                if intake.error is not None:
                    raise intake.error
            finally:
                span.note(messages=messages, failed=failed)
                self._intakes.remove(intake)
                # The caller may close the input next.
                await intake.stop()

    async def extract(
        self, *, start: object = None, end: object = None
    ) -> AsyncGenerator[bytes, None]:
        """
        Yield the messages of one round of extraction.

        In plain mode a round is one run of the program. In cyclic mode it is one
        request, which carries ``start`` and ``end`` if they are given: offsets that the
        supervisor keeps.

        When a worker is lost, the request goes to another one, as ``restart`` allows.
        Messages of a range that were yielded before are then left out; if the worker
        keeps the offsets, they are yielded again if the worker gives them again.

        Raises:
            WorkerLost: If the worker died, did not answer in time, or, in plain mode,
                failed, and is not restarted or, in plain mode, had yielded something;
                what was yielded before stays valid.
            RemoteProtocolError: If the worker broke the protocol, likewise.
            SourceFailed: If a range gives other messages when it is requested again.
            StageFailed: If all workers failed, as when the program is not there any
                more.

        """
        async with aclosing(self.extract_runs(start=start, end=end)) as runs:
            async for run in runs:
                for message in run:
                    yield message

    def extract_runs(
        self, *, start: object = None, end: object = None, template: str | None = None
    ) -> AsyncGenerator[Run, None]:
        """
        Do as :meth:`extract`, a run at a time.

        Args:
            start: First offset of the round.
            end: End of the round, as the worker understands it.
            template: Text of the request, in which ``{start}`` and ``{end}`` are
                replaced; the default is a JSON object with these two keys.

        """
        self._running()
        if self.stage.kind is not StageKind.EXTRACT:
            raise LocalProtocolError(
                f"stage {self.stage.name} is of kind {self.stage.kind.value}:"
                " it can't extract"
            )
        return extraction(self._pool, start, end, template)

    def session(self, event: str = "") -> AbstractAsyncContextManager[WorkerSession]:
        """
        Open a session with a worker, in a dialect that has sessions.

        It counts as one message in flight, and is cancelled if it has not ended when
        its block does. If its worker is lost, it goes to another one only if no data
        has passed in either direction.

        Args:
            event: The event that is requested; empty: as the stage has it.

        Raises:
            TypeError: If the event is not text.
            ValueError: If it can't be encoded as UTF-8, or takes more than 64 KiB.
            LocalProtocolError: If there are no sessions in this dialect.
            Overloaded: If too many messages are pending.

        """
        self._running()
        check_text("event", event)
        return self._session(event)

    def events(self) -> MemoryObjectReceiveStream[SupervisorEvent]:
        """
        Return a stream of events in the life of the workers.

        It begins with the workers that run now, and ends with the supervisor: when the
        block or :meth:`aclose` has stopped them. It may be opened before the block, for
        the events of the start. Close it when you stop reading. It also ends when
        10,000 events are waiting in it.
        """
        self._in_loop()
        return self._observers.listen(self._pool.running())

    # --- inside -------------------------------------------------------------

    async def _submit(self, messages: Iterable[bytes], noted: Span) -> list[Result]:
        run, error = sound(await as_run(messages))
        if error is not None:
            raise error
        self._admit(len(run))
        results: dict[int, list[Result]] = {}
        failed = 0
        with self._submission() as (submission, changed):
            submission.feed(run, self._pool.time())
            submission.close()
            self._pool.kick()
            while not submission.finished:
                await changed.wait()
                for outcome in self._collect(submission):
                    assert isinstance(outcome, Outcome), "no positions were submitted"
                    results[outcome.start] = results_of(outcome)
                    failed += outcome.failed
            noted.note(messages=len(run), failed=failed)
        return [result for start in sorted(results) for result in results[start]]

    @asynccontextmanager
    async def _session(self, event: str) -> AsyncIterator[WorkerSession]:
        stage = self.stage
        if stage.kind is StageKind.EXTRACT:
            raise LocalProtocolError(
                f"stage {stage.name} extracts: it takes no sessions; use extract()"
            )
        if stage.dialect.open(Side.SUPERVISOR, Limits()).in_order:
            raise LocalProtocolError(
                f"stage {stage.name} can't have sessions: a worker of dialect"
                f" {stage.dialect.name} answers one message after the other, so"
                " parts of replies can't be matched to them; use submit()"
            )
        self._admit(1)
        session = WorkerSession(self._pool, event)
        self._pool.open(session.dialogue)
        try:
            with Span("session", stage=stage.name):
                self._pool.kick()
                yield session
        finally:
            session.close()

    @contextmanager
    def _submission(
        self, on_failure: Callable[[Outcome], None] | None = None
    ) -> Iterator[tuple[Submission | Lanes, Signal]]:
        if self.stage.kind is StageKind.EXTRACT:
            raise LocalProtocolError(
                f"stage {self.stage.name} extracts: it takes no messages"
            )
        changed = Signal()
        submission = submission_for(self.stage, changed.set, self._max_bytes)
        lanes = submission.lanes if isinstance(submission, Lanes) else [submission]
        for lane in lanes:
            lane.on_failure = on_failure
            self._pool.open(lane)
        try:
            yield submission, changed
        finally:
            stalled = submission.stalled
            for lane in lanes:
                self._pool.drop(lane)
            if stalled:
                self._pool.kick()  # what waited for its consumer can continue now
            if isinstance(submission, Lanes) and submission.unkeyed:
                self._observers.warn_of_unkeyed(submission.unkeyed, self.stage.key)

    def _admit(self, count: int) -> None:
        most = self._max_pending
        if most is not None and (pending := self._pool.backlog.pending) + count > most:
            name = self.stage.name
            raise Overloaded(
                f"stage {name}: {counted(pending, 'message')} pending, {count:,} more"
                f" would exceed max_pending ({most:,}); try again later, raise it, or"
                " use more workers",
                stage=name,
            )

    def _collect(self, submission: Submission | Lanes) -> list[Collected]:
        stalled, collected = submission.stalled, submission.collect()
        if stalled:
            self._pool.kick()  # what waited for its consumer can continue now
        if self._metrics is not None:
            for item in collected:
                if isinstance(item, Outcome) and item.failed:
                    self._metrics.failed(item.failed)
        return collected

    async def _finish(self, *, patient: bool) -> None:
        assert self._tasks is not None
        try:
            await self._pool.close(patient=patient)
        finally:
            # A stream that was left open would read its input forever.
            self._tasks.cancel_scope.cancel()
            try:
                await self._tasks.__aexit__(None, None, None)
            finally:
                self._ended = True
                self._observers.close()

    def _running(self) -> TaskGroup:
        tasks = self._require_entered()
        if self._ended:
            raise self._not_running()
        self._in_loop()
        return tasks

    def _require_entered(self) -> TaskGroup:
        if self._tasks is None:
            raise self._not_running()
        return self._tasks

    def _not_running(self) -> InvalidState:
        return InvalidState(
            f"{self!r} is not running; use it as `async with AsyncSupervisor(...)`"
        )

    def _in_loop(self) -> None:
        if self._tasks is None or self._ended:
            return
        # There are no locks: the tasks that are woken belong to one event loop.
        if threading.get_ident() != self._thread:
            raise InvalidState(
                f"{self!r} is used outside the thread of its event loop;"
                " use anyio.from_thread.run(), or asyncio.run_coroutine_threadsafe()"
            )
        # In another loop the call would wait forever: this loop does not run meanwhile.
        if event_loop() != self._loop:
            raise InvalidState(
                f"{self!r} is used outside the event loop that it was entered in;"
                " use it within one asyncio.run(), or a separate supervisor in each"
            )
