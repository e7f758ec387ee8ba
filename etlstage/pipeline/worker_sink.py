"""A worker of kind L as the sink of a pipeline."""

from __future__ import annotations

from contextlib import ExitStack, aclosing
from types import TracebackType
from typing import Self

from anyio.streams.memory import MemoryObjectReceiveStream

from etlstage.errors import EtlstageError, StageError, StageFailed
from etlstage.messages import Run, counted
from etlstage.pipeline.dead_letter.policy import DeadLetterPolicy, config_of
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.interfaces import Output, Sink
from etlstage.stage import Stage
from etlstage.supervisor import AsyncSupervisor, Silence, SupervisorEvent, WorkerExited
from etlstage.telemetry import Meter
from etlstage.telemetry.log import Log
from etlstage.transport import Launch, launch_worker

__all__ = ("WorkerSink", "check_ends", "tell")

_log = Log()


class WorkerSink(Sink):
    """
    Loads with workers: a message counts as loaded once it is answered.

    What the worker does with a message before its EOP is its own matter; a run that
    fails may have loaded messages that it reports as lost.

    Args:
        stage: The stage.
        dead_letters: Where messages go that the workers can't load; None:
            the first one ends the run.
        meter: Where to count what happens, see :mod:`etlstage.telemetry`.
        launch: What starts the workers; by default what their dialect asks for.
        commit: Stores a position that a worker commits; by default it counts as
            stored: the position of the source follows it, and is what is resumed from.
        assignment: The share of the input that the worker is started for.

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
        super().__init__(stage.name)
        self._policy = DeadLetterPolicy(
            self.account, stage.on_error, config_of(stage), dead_letters
        )
        self._supervisor = AsyncSupervisor(
            stage, meter=meter, launch=launch, commit=commit, assignment=assignment
        )
        self._outputs = 0
        self._finished = False

    @property
    def slowest(self) -> Silence | None:
        """For whose answer it is waited."""
        return self._supervisor.slowest

    @property
    def doubtful(self) -> int:
        """Messages whose replies may be those of others, so far."""
        return self._supervisor.doubtful

    @property
    def doubt(self) -> StageError | None:
        """Why, if there are any."""
        return self._supervisor.doubt

    def hurry(self) -> None:
        """Wait no more for workers that may never answer."""
        self._supervisor.hurry()

    async def __aenter__(self) -> Self:
        """Start the workers."""
        await self._supervisor.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the workers."""
        await self._supervisor.__aexit__(kind, error, trace)
        self._book()

    def _book(self) -> None:
        """Add how the workers have fared to the account; they have ended."""
        self.account.skipped += self._supervisor.skipped
        self.account.doubtful += self._supervisor.doubtful
        self.account.add_faults(self._supervisor.faults)

    async def write(self, run: Run) -> None:
        """Pass a run through the workers; return when all of it is answered."""
        account = self.account
        before = account.received
        account.received += len(run)
        failure: Exception | None = None
        async with aclosing(self._supervisor.answers([run])) as answers:
            async for answer in answers:
                for part in answer.parts():
                    if part.error is None:
                        account.done += len(part.messages)
                        self._note_outputs(sum(map(len, part.groups)))
                        continue
                    try:
                        await self._policy.settle(
                            part.error, part.messages, place=before + part.start
                        )
                    except EtlstageError as error:
                        failure = failure or error
        if failure is not None:
            raise failure

    async def finish(self) -> None:
        """Take note that the input was whole."""
        self._finished = True

    async def stop(self) -> None:
        """
        End the workers.

        Raises:
            StageError: If what they have answered may not be loaded.

        """
        await self._supervisor.aclose()
        if (doubt := self.doubt) is not None:
            raise doubt

    def landed(self) -> str:
        """Return how many messages the workers have loaded."""
        whole = self._finished and not self.doubtful
        complete = "complete" if whole else "incomplete"
        return f"{counted(self.account.done, 'message')} loaded; output {complete}"

    def output(self) -> Output:
        """Return that workers have them."""
        return Output("workers", self.name)

    def _note_outputs(self, count: int) -> None:
        # The page: "L-stage produces empty transformation result".
        if count and not self._outputs:
            _log.warning("output of a load worker is discarded", stage=self.name)
        self._outputs += count


async def check_ends(
    stage: str, events: MemoryObjectReceiveStream[SupervisorEvent]
) -> None:
    """
    Assert that workers have ended well: who did not may have loaded half of it.

    Args:
        stage: Their stage.
        events: All that happened to them; they have ended.

    Raises:
        StageFailed: If one has not.

    """
    ends = [event async for event in events if isinstance(event, WorkerExited)]
    # Of a worker that was started again, the last.
    for end in {end.worker: end for end in ends}.values():
        if end.status:
            raise StageFailed(
                f"stage {stage}: worker {end.worker} {end.fate} at the end of its"
                " input, expected status 0: its output may be incomplete",
                stage=stage,
            )


async def tell(stage: Stage, messages: Run, *, launch: Launch = launch_worker) -> None:
    """
    Have a program do what it is told, and end.

    Args:
        stage: The program.
        messages: What it is told; it answers each when it has done it.
        launch: What starts it; by default what its dialect asks for.

    Raises:
        EtlstageError: If it does not answer all of them, each once, or ends badly: what
            it was to do may not be done.

    """
    with ExitStack() as stack:
        async with AsyncSupervisor(stage, launch=launch) as supervisor:
            events = stack.enter_context(supervisor.events())
            results = await supervisor.submit(messages)
        for result in results:
            if result.error is not None:
                raise result.error
        await check_ends(stage.name, events)
    if (doubt := supervisor.doubt) is not None:
        raise doubt
