"""A worker of kind L as the sink of a pipeline."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterable, Iterable, Sequence
from contextlib import ExitStack, aclosing, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from etlstage.errors import EtlstageError, NotCommitted, StageFailed
from etlstage.messages import Run, counted
from etlstage.pipeline.dead_letter.policy import DeadLetterPolicy, config_of
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.interfaces import Output, Sink
from etlstage.protocol.events import FarewellReason
from etlstage.stage import RestartPolicy, Stage
from etlstage.supervisor import (
    Assignment,
    AsyncSupervisor,
    CommitRequest,
    SupervisorEvent,
    WorkerExited,
)
from etlstage.supervisor.pool import StoreCommit
from etlstage.telemetry import Meter
from etlstage.telemetry.log import Log
from etlstage.transport import Launch, launch_worker

__all__ = (
    "CommittingSink",
    "FinishingSink",
    "WorkerSink",
    "check_ends",
    "log_uncommitted",
    "tell",
)

_log = Log()


class WorkerSink(Sink):
    """
    Loads with workers: a message counts as loaded once it is answered.

    A worker may load a message before it writes its EOP marker; so a run that fails may
    have loaded messages that it reports as unprocessed.

    Args:
        stage: The stage.
        dead_letters: Where to keep messages that the workers can't load; None: the
            first such message ends the run.
        meter: Counts what happens, see :mod:`etlstage.telemetry`.
        launch: Starts the workers; by default, as their dialect requires.
        of_supervisor: Further arguments for the supervisor.

    """

    def __init__(
        self,
        stage: Stage,
        *,
        dead_letters: DeadLetters | None = None,
        meter: Meter | None = None,
        launch: Launch = launch_worker,
        **of_supervisor: Any,  # noqa: ANN401 - as AsyncSupervisor takes it
    ) -> None:
        super().__init__(stage.name)
        self._policy = DeadLetterPolicy(
            self.account, stage.on_error, config_of(stage), dead_letters
        )
        self.supervisor: AsyncSupervisor = AsyncSupervisor(
            stage, meter=meter, launch=launch, **of_supervisor
        )
        self._outputs = 0
        self._finished = False

    async def __aenter__(self) -> Self:
        """Start the workers."""
        await self.supervisor.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the workers."""
        try:
            await self.supervisor.__aexit__(kind, error, trace)
        finally:
            self.account.skipped += self.supervisor.skipped
            self._book()

    def _book(self, *, again: bool = False) -> None:
        """
        Add the counts of the workers, which have ended, except of skipped messages.

        Args:
            again: Whether all messages are loaded again, and counted then.

        """
        if not again:
            self.account.doubtful += self.supervisor.doubtful
        self.account.add_faults(self.supervisor.faults)
        self.account.busy += self.supervisor.busy

    def withhold(self) -> None:
        """Give the workers no more messages."""
        self.withheld = True
        self.supervisor.withhold()

    async def write(self, run: Run) -> None:
        """Pass a run through the workers; return when all of it is answered."""
        before = self.account.received
        self.account.received += len(run)
        if self.withheld:
            return
        await self._settle([run], before)

    async def _settle(
        self,
        runs: Iterable[Run] | AsyncIterable[Run],
        before: int,
        *,
        endless: bool = False,
    ) -> None:
        """
        Pass runs through the workers, and book the outcome of each message.

        Args:
            runs: The messages.
            before: Place of the first message in the stage's input.
            endless: Whether to stop at the first failure, as runs may never end and
                messages loaded after a failure would be counted as if before it.

        """
        failure: Exception | None = None
        async with aclosing(self.supervisor.answers(runs)) as answers:
            async for answer in answers:
                for part in answer.parts():
                    if part.error is None:
                        self._book_done(len(part.messages))
                        self._note_outputs(sum(map(len, part.groups)))
                        continue
                    place = before + part.start
                    try:
                        await self._policy.settle(
                            part.error, part.messages, place=place
                        )
                    except EtlstageError as error:
                        if endless:
                            raise
                        failure = failure or error
                    else:
                        self._book_dead(range(place, place + len(part.messages)))
        if failure is not None:
            raise failure

    def _book_done(self, count: int) -> None:
        """Count messages that were answered."""
        self.account.done += count

    def _book_dead(self, places: range) -> None:
        """Handle that the messages at these places were dead-lettered."""

    async def finish(self) -> None:
        """Record that the input was complete."""
        self._finished = True

    async def stop(self) -> None:
        """
        End the workers.

        Raises:
            StageError: If messages that they have answered may not be loaded.

        """
        await self.supervisor.aclose()
        if (doubt := self.supervisor.doubt) is not None:
            raise doubt

    def landed(self) -> str:
        """Return how many messages the workers have loaded."""
        whole = self._finished and not self.supervisor.doubtful
        complete = "complete" if whole else "incomplete"
        return f"{counted(self.account.done, 'message')} loaded; output {complete}"

    def output(self) -> Output:
        """Return the stage whose workers load the messages."""
        return Output("workers", self.name)

    def _note_outputs(self, count: int) -> None:
        # The protocol's page has "L-stage produces empty transformation result".
        if count and not self._outputs:
            _log.warning("output of a load worker is discarded", stage=self.name)
        self._outputs += count


def log_uncommitted(error: NotCommitted) -> None:
    """Log why a worker has not committed what it was given before the run's limit."""
    _log.warning("messages not committed", stage=error.stage, error=str(error))


class FinishingSink(Sink):
    """Waits at its end for the workers' last commits, unless the run is drained."""

    withheld: bool = False  # declared anew, as it is assigned here
    _why: FarewellReason = FarewellReason.ENDED
    """The reason given to the workers at the end of the input."""
    _failure: EtlstageError | None = None
    _finished = False
    _drained = False
    _stopping = False
    _ending: anyio.CancelScope | None = None

    def drain(self) -> None:
        """Wait for no last commits: :meth:`stop` leaves the rest to the next run."""
        self._drained = True
        if self._ending is not None:
            self._ending.cancel()

    async def flush(self) -> None:
        """Raise a failure so far; when to commit is the workers' decision."""
        self._check()

    async def finish(self) -> None:
        """
        End the workers' input, and wait for their last commits.

        Raises:
            NotCommitted: If they have not committed everything that they have answered.

        """
        if await self._end_input(self._why):
            self._check()
            self._finished = True
        else:
            self.withheld = True

    async def stop(self) -> None:
        """
        End the workers; the next run repeats what they have not committed by then.

        Where the load stops at a limit, neither finished nor drained, they first
        process all that was written.
        """
        self._stopping = True
        if not (self._finished or self.withheld):
            await self._end_input(FarewellReason.DRAIN)
        await self._stop()
        self._check()
        if self.account.pending:
            self.withheld = True

    async def _end_input(self, why: FarewellReason) -> bool:
        """End the workers' input; return whether the run was not drained meanwhile."""
        with anyio.CancelScope() as self._ending:
            if not self._drained:
                await self._finish(why)
                return True
        return False

    @abstractmethod
    async def _finish(self, why: FarewellReason) -> None:
        """Do that; return once no more commits can come. A drain cancels it."""

    @abstractmethod
    async def _stop(self) -> None:
        """End the workers now, if they have not exited."""

    def _fail(self, error: EtlstageError) -> None:
        """Record the first failure; uncommitted messages are none in a stopped load."""
        stopped = self._stopping or self._drained
        if not (stopped and isinstance(error, NotCommitted)):
            self._failure = self._failure or error
        elif not self._drained:
            log_uncommitted(error)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure


class CommittingSink(FinishingSink, WorkerSink):
    """
    Loads with a worker that commits: a message is loaded once a commit covers it.

    So :meth:`write` returns when the worker may be given the run, not when it is
    loaded, and the position of the source follows the commits.

    Args:
        stage: The stage.
        dead_letters: As for :class:`WorkerSink`.
        meter: As for :class:`WorkerSink`.
        launch: As for :class:`WorkerSink`.
        commit: Stores a position that the worker commits; by default the position
            counts as stored, as the next run resumes from the source's position.
        assignment: The share of the input that the worker is started for; by default
            all of it, under the name of the stage.

    """

    def __init__(
        self,
        stage: Stage,
        *,
        dead_letters: DeadLetters | None = None,
        meter: Meter | None = None,
        launch: Launch = launch_worker,
        commit: StoreCommit | None = None,
        assignment: Assignment | None = None,
    ) -> None:
        super().__init__(
            stage,
            dead_letters=dead_letters,
            meter=meter,
            launch=launch,
            commit=commit or _stored,
            assignment=assignment or Assignment(stage.name),
        )
        self._tasks: TaskGroup
        self._runs: MemoryObjectSendStream[Run]
        self._settled: anyio.Event

    async def __aenter__(self) -> Self:
        """Start the worker."""
        await super().__aenter__()
        self._settled = anyio.Event()
        self._runs, runs = anyio.create_memory_object_stream[Run](0)
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._settle_all, runs)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the worker."""
        self._runs.close()
        self._tasks.cancel_scope.cancel()
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            await super().__aexit__(kind, error, trace)

    async def _settle_all(self, runs: MemoryObjectReceiveStream[Run]) -> None:
        try:
            with runs:
                await self._settle(runs, 0, endless=True)
        except EtlstageError as error:
            self._fail(error)
        finally:
            self._settled.set()

    async def write(self, run: Run) -> None:
        """Pass a run to the worker; return when the worker may be given more."""
        self._check()
        self.account.received += len(run)
        with suppress(anyio.BrokenResourceError):
            await self._runs.send(run)
        self._check()

    async def _finish(self, why: FarewellReason) -> None:
        self.supervisor.finish(why=why)
        self._runs.close()
        await self._settled.wait()

    async def _stop(self) -> None:
        self._runs.close()
        # Else what waits for the worker fails, as the supervisor is closed.
        self.supervisor.withhold()
        await self.supervisor.aclose()
        await self._settled.wait()


async def _stored(_request: CommitRequest) -> None:
    """Do nothing: the position counts as stored."""


async def check_ends(
    stage: str, events: MemoryObjectReceiveStream[SupervisorEvent]
) -> None:
    """
    Assert that workers exited with status 0: others may have loaded only a part.

    Args:
        stage: Name of their stage.
        events: All events of the workers, which have ended.

    Raises:
        StageFailed: If a worker did not.

    """
    ends = [event async for event in events if isinstance(event, WorkerExited)]
    # For a worker that was restarted, only the last exit counts.
    for end in {end.worker: end for end in ends}.values():
        if end.status:
            raise StageFailed(
                f"stage {stage}: worker {end.worker} {end.fate} at the end of its"
                " input, expected status 0: its output may be incomplete",
                stage=stage,
            )


async def tell(
    stage: Stage,
    command: Sequence[str],
    messages: Run,
    *,
    launch: Launch = launch_worker,
) -> None:
    """
    Have a program process messages and exit; it uses the protocol of a stage's workers.

    Args:
        stage: The stage. The program need not report ``ready``, even if workers do.
        command: The program.
        messages: Its input; it answers each message once it has processed it.
        launch: Starts the program; by default, as its dialect requires.

    Raises:
        EtlstageError: If it does not answer each message once, or ends badly: its work
            may not be done.

    """
    program = replace(
        stage,
        worker=replace(stage.program, command=tuple(command), ready=False),
        dialect=stage.dialect.fitted(batches=False, heartbeat=None),
        workers=1,
        restart=RestartPolicy(),
    )
    with ExitStack() as stack:
        async with AsyncSupervisor(program, launch=launch) as supervisor:
            events = stack.enter_context(supervisor.events())
            results = await supervisor.submit(messages)
        for result in results:
            if result.error is not None:
                raise result.error
        await check_ends(stage.name, events)
    if (doubt := supervisor.doubt) is not None:
        raise doubt
