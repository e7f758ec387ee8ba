"""
The worker of a shard, and the base of sinks that have a worker for each shard.

A supervisor restarts a worker that was lost, but not one that was asked to end. As the
end of a shard has to be committed by a worker, another one is started here for what the
previous worker had not committed when it ended, as often as ``restart`` allows.

A message that killed every worker that had it is given up. The next worker knows
nothing of it, and commits the messages after it. So messages that were given up are
settled before a checkpoint is stored. If that fails, or ends the run, the checkpoint is
not stored.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Self

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from etlstage.errors import (
    EtlstageError,
    Faults,
    NotCommitted,
    RemoteProtocolError,
    WorkerLost,
)
from etlstage.messages import Run, counted
from etlstage.pipeline.dead_letter.policy import (
    OF_A_MESSAGE,
    DeadLetterPolicy,
    config_of,
)
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.interfaces import Output, Sink
from etlstage.protocol.events import FarewellReason
from etlstage.shard.cut import number_of, place_of
from etlstage.shard.lease import CheckpointAsked
from etlstage.stage import Stage
from etlstage.supervisor import Assignment, AsyncSupervisor, CommitRequest
from etlstage.supervisor.exchange.exchange import Outcome
from etlstage.supervisor.lifecycle.worker import wait_time
from etlstage.supervisor.pool import StoreCommit
from etlstage.telemetry import Meter, StageMetrics
from etlstage.telemetry.log import Log
from etlstage.transport import Launch, launch_worker
from etlstage.transport.process import Signal

__all__ = ("LeasedShard", "ShardSink", "ShardWorker")

_log = Log()


class ShardWorker:
    """
    Has a worker process the records of a shard, in their order.

    Args:
        stage: The stage of the worker.
        share: The shard, and its committed position.
        store: Stores a commit.
        on_given_up: Called with the outcome of messages that are not retried any more,
            before a checkpoint after them is stored.
        settings: Passed to the supervisors.

    Attributes:
        runs: Where to send records; closed by :meth:`finish` and :meth:`stop`. It
            buffers one run for the supervisor.
        taken: Set when the buffered run has been taken.
        ended: Whether the end of the shard is committed.
        stopping: Whether :meth:`stop` was called.
        yielded: Number of messages whose outcomes the current supervisor has yielded.
        faults: Failures and restarts of the workers: those of each supervisor that has
            ended, and a restart for each one that replaced another.

    """

    def __init__(
        self,
        stage: Stage,
        share: Assignment,
        store: StoreCommit,
        on_given_up: Callable[[Outcome], None],
        **settings: Any,  # noqa: ANN401 - passed on
    ) -> None:
        self.runs: MemoryObjectSendStream[Run]
        self.runs, self._given = anyio.create_memory_object_stream[Run](1)
        self.taken: Signal = Signal()
        self.ended: bool = False
        self.stopping: bool = False
        self.yielded: int = 0
        self.faults: list[Faults] = []
        self._stage = stage
        self._share = share
        self._store = store
        self._on_given_up = on_given_up
        self._settings = settings
        self._why: FarewellReason | None = None
        self._supervisor: AsyncSupervisor
        self._running = False

    async def __aenter__(self) -> Self:
        """Start the worker, unless :meth:`stop` was called meanwhile."""
        if not self.stopping:
            await self._start()
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        """Stop the worker."""
        self.runs.close()
        self._given.close()
        if self._running:
            await self._end(kind)

    async def _start(self) -> None:
        self._supervisor = AsyncSupervisor(
            self._stage, commit=self._commit, assignment=self._share, **self._settings
        )
        await self._supervisor.__aenter__()
        self._running, self.yielded = True, 0

    async def _end(self, kind: object = None) -> None:
        self._running = False
        try:
            await self._supervisor.__aexit__(kind)
        finally:
            self.faults.append(self._supervisor.faults)

    async def _commit(self, request: CommitRequest) -> None:
        await self._store(request)
        self._share = self._share._replace(position=request.position)
        self.ended = request.ended

    @property
    def waits(self) -> bool:
        """Whether the supervisor has taken all runs that were sent."""
        return not self.runs.statistics().current_buffer_used

    def finish(self, why: FarewellReason) -> None:
        """Let the worker end once all records are answered, as no more will come."""
        self._why = why
        self.runs.close()

    async def stop(self, why: FarewellReason) -> None:
        """End the worker now; what it does not commit until it exits is not loaded."""
        self.stopping = True
        self.runs.close()
        if self._running:
            await self._supervisor.aclose(why=why)

    async def answers(self) -> AsyncGenerator[Outcome, None]:
        """
        Yield the outcomes of the records, in their order, up to the end.

        Raises:
            NotCommitted: If no worker has committed the end of the shard.
            StageFailed: If a worker failed permanently before that end.

        """
        tries, source = 0, self._finished_with(self._given)
        while not self.stopping:
            supervisor, last = self._supervisor, tries == self._most
            failures, left = supervisor.faults.failures, list[Run]()
            async with aclosing(
                supervisor.answers(source, on_failure=self._note_failure)
            ) as answers:
                async for answer in answers:
                    for part in answer.parts():
                        if not last and self._is_of_end(part.error):
                            left.append(part.messages)
                        else:
                            self.yielded += len(part.messages)
                            yield part
            if self.stopping or self._why is None:
                return
            await supervisor.aclose(why=self._why)
            if supervisor.failure is not None:
                raise supervisor.failure
            failed = supervisor.faults.failures > failures
            has_to = failed or self._stage.dialect.holds > 0
            if not self._ends or not (left or (has_to and not self.ended)):
                return
            error = self._not_ended(left, tries + 1)
            if last:
                raise error
            _log.warning(
                "worker is started again to commit the rest of its shard",
                stage=self._stage.name,
                shard=self._share.name,
                error=str(error),
            )
            await self._end()
            tries += 1
            await anyio.sleep(wait_time(tries, self._stage.restart))
            if not self.stopping:
                source = self._finished_with(left)
                await self._start()
                self.faults.append(Faults(restarts=1))

    @property
    def _most(self) -> int:
        """How many more workers may be started for the end of the shard."""
        policy = self._stage.restart
        return 0 if policy.policy == "temporary" else policy.max

    @property
    def _ends(self) -> bool:
        """Whether the shard ends; else the next run resends uncommitted records."""
        return self._why is FarewellReason.ENDED and not self.stopping

    def _note_failure(self, outcome: Outcome) -> None:
        error = outcome.error
        if isinstance(error, OF_A_MESSAGE) and not _only_ended(error):
            self._on_given_up(outcome)

    def _is_of_end(self, error: EtlstageError | None) -> bool:
        """Return whether an error reports only that the worker has ended."""
        return error is not None and self._ends and _only_ended(error)

    def _not_ended(self, left: Sequence[Run], tries: int) -> NotCommitted:
        stage, shard = self._stage.name, self._share.name
        what = (
            counted(sum(map(len, left)), "message") if left else "the end of the shard"
        )
        again = f", after {tries} tries" if tries > 1 else ""
        doubt, last = self._supervisor.doubt, self._supervisor.faults.last
        why = f": {doubt or last[-1].what}" if last else ""
        error = NotCommitted(
            f"stage {stage}: the worker of shard {shard} exited without committing"
            f" {what}{again}{why}",
            stage=stage,
        )
        if doubt is not None:
            error.story = doubt.story
        return error

    async def _finished_with(
        self, runs: AsyncIterable[Run] | Sequence[Run]
    ) -> AsyncGenerator[Run, None]:
        """Yield runs, then finish the worker's input, if no more will come."""
        if isinstance(runs, Sequence):
            for run in runs:
                yield run
        else:
            async for run in runs:
                self.taken.set()
                yield run
        if self._why is not None:
            await self._be_ready()
            self._supervisor.finish(why=self._why)

    async def _be_ready(self) -> None:
        """Wait until the worker is ready, as its start has a time limit of its own."""
        supervisor = self._supervisor
        with supervisor.events() as events:
            while not supervisor.workers_ready and supervisor.health.state != "failed":
                await events.receive()


class ShardSink(Sink):
    """
    Loads with a worker for each shard: a message is loaded once it is committed.

    Args:
        stage: The stage; its dialect must be one of workers that commit.
        why: The reason given to the workers at the end of the input.
        dead_letters: Where messages go that the workers can't load; None: the first
            such message ends its shard.
        meter: Where metrics are recorded; see :mod:`etlstage.telemetry`.
        launch: Starts the workers.

    """

    def __init__(
        self,
        stage: Stage,
        *,
        why: FarewellReason = FarewellReason.ENDED,
        dead_letters: DeadLetters | None = None,
        meter: Meter | None = None,
        launch: Launch = launch_worker,
    ) -> None:
        super().__init__(stage.name)
        self._stage = stage
        self._why = why
        self._policy = DeadLetterPolicy(
            self.account, stage.on_error, config_of(stage), dead_letters
        )
        self._letters = dead_letters
        self._settling = anyio.Lock(fast_acquire=True)
        self._metrics = StageMetrics(meter, stage.name)
        self._of_supervisor: dict[str, Any] = {"meter": meter, "launch": launch}
        self._finished = False

    def _worker(
        self,
        shard: str,
        position: object,
        store: StoreCommit,
        on_given_up: Callable[[Outcome], None],
    ) -> ShardWorker:
        """Return the worker of a shard, which the caller has to enter."""
        share = Assignment(shard, position)
        return ShardWorker(
            self._stage, share, store, on_given_up, **self._of_supervisor
        )

    async def _sync_letters(self) -> None:
        """Make dead letters durable before a checkpoint relies on them."""
        if self._letters is not None:
            await self._letters.sync()

    def _log_omitted(self, shard: str, records: int, checkpoint: int) -> None:
        """Log how many records of a shard an earlier worker has committed."""
        if records:
            _log.info(
                "records omitted that were committed before",
                stage=self.name,
                shard=shard,
                records=records,
                checkpoint=checkpoint,
            )

    def output(self) -> Output:
        """Return the stage's workers as the output."""
        return Output("workers", self.name)

    def _loaded(self, where: str) -> str:
        """Describe how many messages have been loaded, for a human."""
        complete = "complete" if self._finished else "incomplete"
        loaded = counted(self.account.done, "message")
        return f"{loaded} loaded {where}; output {complete}"


class LeasedShard:
    """
    A shard that is ours, from the start of its worker to its end.

    Args:
        name: Name of the shard.
        position: Its committed position.
        renumbered: Whether records have numbers other than those of the input's rows.

    """

    worker: ShardWorker

    def __init__(
        self, name: str, position: object, *, renumbered: bool = False
    ) -> None:
        self.name = name
        self.position = position
        self.reading: anyio.CancelScope = anyio.CancelScope()
        """Cancels the reader of the shard, if the input is a stream."""
        self.begin: int = number_of(position)
        """Number of the record after which processing began."""
        self.row: int = -1 if renumbered else self.begin
        """Last row of the input that was considered for the shard."""
        self.last: int = self.row
        """Number of the last valid record up to that row."""
        self.known = 0
        """Number of records that were committed before."""
        self.coming = 0
        """Number of records that were read and are not written yet."""
        self.held = 0
        """Number of records that were written and have no outcome yet."""
        self.exhausted: FarewellReason | None = None
        """The reason to give to the worker, once all input of the shard was read."""
        self.started = False
        """Whether the worker was started."""
        self.gone = False
        self.failure: EtlstageError | None = None
        self.given_up: deque[Outcome] = deque()
        """Outcomes of messages that were given up and are not settled yet."""
        self.settled: list[EtlstageError] = []
        """Errors that were settled for a checkpoint, and are still to be yielded."""
        self._asked: _Asked | None = None
        self._place = place_of(position)
        """The last record that the committed position covers."""
        self._ended = False
        """Whether the end is committed."""

    @property
    def wants(self) -> bool:
        """Whether the shard needs input."""
        over = self.exhausted is not None or self.worker.stopping or self.gone
        return self.started and not over

    async def ask(
        self, asked: CheckpointAsked, report: Callable[[CheckpointAsked], None]
    ) -> bool:
        """Report a request for a checkpoint; return whether it was stored."""
        # An earlier request that was cancelled may still be stored: wait until then.
        while self._asked is not None:
            await self._asked.answered.wait()
        # The worker does not know of that, and may ask for less.
        place = place_of(json.loads(asked.position))
        if self._ended or (place < self._place and not asked.ended):
            return True
        pending = self._asked = _Asked(asked)
        report(asked)
        await pending.answered.wait()
        return pending.stored

    def answer(self, *, stored: bool) -> None:
        """Answer the pending request, if any."""
        if self._asked is not None:
            pending, self._asked = self._asked, None
            if stored:
                self._place = place_of(json.loads(pending.asked.position))
                self._ended = pending.asked.ended
            pending.stored = stored
            pending.answered.set()


class _Asked:
    """A pending request for a checkpoint."""

    def __init__(self, asked: CheckpointAsked) -> None:
        self.asked = asked
        self.stored = False
        self.answered = anyio.Event()


def _only_ended(error: EtlstageError) -> bool:
    """Return whether messages failed only because their worker had ended."""
    lost = isinstance(error, WorkerLost | RemoteProtocolError)
    return isinstance(error, NotCommitted) or (lost and not error.attempts)
