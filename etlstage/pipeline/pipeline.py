"""
A pipeline that moves messages from the source through the stages into the sink.

The stages are composed: each is an iterator over runs of messages that reads from the
stage before it, and the sink reads from the last stage. Each stage's supervisor reads
ahead, up to a bound; nothing is queued between two stages. So a slow sink blocks the
last stage, which blocks the stage before it, and so on up to the source: that is all
there is to back-pressure. Positions travel in order among the runs.

The first error wins: it ends the run, the workers are stopped, and the report shows
what was loaded.
"""

from __future__ import annotations

import math
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup, TaskStatus
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from etlstage.errors import Faults, InputDamaged, RepliesDoubtful, StageError
from etlstage.messages import Passed, Position, Run, counted, joined
from etlstage.pipeline.dead_letter.policy import DeadLetterPolicy, config_of
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.delivery.delivery import Delivery
from etlstage.pipeline.delivery.record import StoppedAt
from etlstage.pipeline.interfaces import DeadLetterSink, Sink, Source
from etlstage.pipeline.ledger import Account
from etlstage.pipeline.loading import Loading
from etlstage.pipeline.report import Status
from etlstage.pipeline.runner import Runner
from etlstage.stage import ErrorBudget, ErrorPolicy, Stage
from etlstage.supervisor import AsyncSupervisor
from etlstage.telemetry import Meter
from etlstage.telemetry.log import Log
from etlstage.transport import Launch, launch_worker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ("Pipeline",)

_log = Log()

_SLOW = 3.0  # seconds without an answer after which a worker is reported as slow
_DRAIN = 30.0  # seconds of draining in which messages that were read are processed
_LOOK = 1.0  # seconds between two checks for what changes without a message

Item: TypeAlias = Run | Position
Items: TypeAlias = AsyncGenerator[Item, None] | MemoryObjectReceiveStream[Item]


class Pipeline(Runner):
    """
    One extract stage, any number of transform stages, one load stage.

    Args:
        name: Name of the pipeline, as shown in the report.
        source: Where messages come from.
        stages: The transform stages, in order.
        sink: Where messages are loaded.
        flush_every: Seconds after which written messages are made durable even if
            the sink would wait for more; for extractions that never end.
        dead_letters: Where to keep messages that a stage can't process; None: the
            first such message ends the run. The sink has its own.
        dead_letter_sink: Receives the dead letters at the end of the run.
        meter: Counts what happens in the stages between source and sink, see
            :mod:`etlstage.telemetry`.
        launch: Starts the workers of these stages; by default, as their dialect
            requires.
        release: Called last, with the error of the run if there is one, to release
            what its parts share, such as a Spark session.
        judged_of: The least number of messages of which an error budget's share is
            taken: a part of an input may be worse than the whole.
        delivery: Records the run's progress.
        note: Returns the note that the sink stores at the end of a run whose delivery
            is not exactly once.
        limit: Maximum number of messages to extract; None: all.
        drain_limit: Seconds of draining in which workers are still given messages that
            were read; None: 30 if the next run rereads messages that this one has not
            loaded, else unlimited.

    Attributes:
        when_begun: Awaited before the run reads, once it is known where it begins.

    Raises:
        ConfigError: If two stages have one name, or a stage in the middle is not of
            kind transform.

    """

    def __init__(
        self,
        *,
        name: str,
        source: Source,
        stages: Sequence[Stage] = (),
        sink: Sink,
        flush_every: float = 60.0,
        dead_letters: DeadLetters | None = None,
        dead_letter_sink: DeadLetterSink | None = None,
        meter: Meter | None = None,
        launch: Launch = launch_worker,
        release: Callable[[Exception | None], Awaitable[None]] | None = None,
        judged_of: int = 0,
        delivery: Delivery | None = None,
        note: Callable[[], str] = str,
        limit: int | None = None,
        drain_limit: float | None = None,
    ) -> None:
        source = sink.input_of(source)
        super().__init__(
            name,
            source=source.name,
            stages=stages,
            sink=sink,
            dead_letters=dead_letters,
            dead_letter_sink=dead_letter_sink,
            release=release,
            delivery=delivery,
            drain_limit=drain_limit,
        )
        self._source = source
        self._input, self._reads_on = source.input, source.goes_on
        self._sink = sink
        self._flush_every = flush_every
        self._meter = meter
        self._launch = launch
        self._judged_of = judged_of
        self._note = note
        self._left = math.inf if limit is None else limit  # messages to extract
        self._cuts_off = limit is not None and not source.limit(limit)
        self.when_begun: Callable[[], Awaitable[None]] | None = None
        self._scope: anyio.CancelScope
        self._extracting: anyio.CancelScope | None = None
        self._watching: anyio.CancelScope
        self._supervisors: list[AsyncSupervisor] = []
        self._drained = self._forced = False
        self._drained_at = math.inf
        self._looking: anyio.CancelScope | None = None  # the wait for the next check
        self.stopped_at: StoppedAt = ""
        """Where reading has stopped; empty: it has not, or the run was drained."""
        self._source_end: StoppedAt = "end"  # what the end of the source is

    @classmethod
    def from_yaml(
        cls, path: str | Path, *, spark: SparkSession | None = None
    ) -> Runner:
        """
        Build the runner for the pipeline of a YAML file; nothing is started.

        Args:
            path: The file.
            spark: A session to use in place of the file's own; it is not stopped.

        Raises:
            ConfigError: If anything in the file is wrong; one line for each problem.

        """
        # The only import of a higher layer, so that users need only know Pipeline.
        from etlstage.config.build import pipeline_from_yaml

        return pipeline_from_yaml(path, spark=spark)

    def drain(self) -> None:
        """
        Stop extracting; :meth:`run` returns when everything in flight is loaded.

        After ``drain_limit`` only messages that workers already hold are processed.
        """
        self._drained = True
        self._sink.drain()
        if self._extracting is not None:
            self._drained_at = anyio.current_time()
            if self._looking is not None:
                self._looking.deadline = self._next_look
            if not self._source.drain():
                self._extracting.cancel()

    @property
    def drain_limit(self) -> float:
        """Seconds of draining in which workers are still given messages."""
        if self._drain_limit is None and self._source.rereads:
            return _DRAIN
        return super().drain_limit

    def complete(self, stopped_at: StoppedAt = "end") -> None:
        """
        End once everything is read, where the source would wait for more.

        Args:
            stopped_at: Where the part before stopped reading; unless it is the end of
                the input, the output is not complete.

        """
        self._source_end = stopped_at
        self._source.complete()

    @property
    def activity(self) -> str:
        """What the run waits for: a worker, or else the output or the first message."""
        waits = [supervisor.slowest for supervisor in self._working]
        slow = [wait for wait in waits if wait is not None and wait.seconds >= _SLOW]
        if slow:
            # The longest wait is the cause of the others.
            worker, seconds, received = max(slow, key=lambda wait: wait.seconds)
            came = f"{counted(received, 'byte')} of its reply received"
            return f"{worker}: {seconds:.0f} s without an answer, {came}"
        waiting = "" if self.ledger.moving else self._source.activity
        return self._sink.activity or waiting

    @property
    def doubtful(self) -> int:
        """Number of messages whose replies may be those of other messages, so far."""
        return sum(supervisor.doubtful for supervisor in self._working)

    @property
    def _working(self) -> list[AsyncSupervisor]:
        """The supervisors of the stages, and of the source and the sink, if any."""
        of_ends = (self._source.supervisor, self._sink.supervisor)
        return [s for s in (*self._supervisors, *of_ends) if s is not None]

    async def _run(self) -> Status:
        self._extracting, self._watching = anyio.CancelScope(), anyio.CancelScope()
        if self._drained:
            self.drain()
        loaded = await self._begin()
        if self.when_begun is not None:
            await self.when_begun()
        if loaded:
            self.stopped_at = "end"
            return "done"
        out, items = anyio.create_memory_object_stream[Item](0)
        with anyio.CancelScope() as self._scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._extract, out)
                tasks.start_soon(self._pass_on, items, tasks)
        if self._forced:
            return "forced"
        # A run that reaches its limit is done, though its output is not complete.
        return "done" if self.stopped_at and not self._cut else "drained"

    async def _pass_on(
        self, items: MemoryObjectReceiveStream[Item], tasks: TaskGroup
    ) -> None:
        with suppress(Exception), self._guarded(), items:
            await self._load(await self._transform(items, tasks), tasks)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """End the run with an error at once, before the error reaches the sink."""
        try:
            yield
        except Exception as error:
            self._fail(error)
            self._scope.cancel()
            raise

    def _move(self, account: Account) -> None:
        account.seconds = anyio.current_time() - self._started
        if account.began is None:
            account.began = account.seconds

    # --- extract ------------------------------------------------------------

    async def _extract(self, out: MemoryObjectSendStream[Item]) -> None:
        with suppress(Exception), self._guarded(), out:
            try:
                await self._read(out)
            finally:
                with anyio.CancelScope(shield=True):
                    await self._source.aclose()
                self.ledger[0].add_faults(self._source.faults)
                self.ledger[0].busy += self._source.busy

    async def _read(self, out: MemoryObjectSendStream[Item]) -> None:
        account = self.ledger[0]
        policy = DeadLetterPolicy(
            account,
            ErrorPolicy(budget=ErrorBudget()),
            {"name": account.stage, "kind": account.kind.value},
            self._dead_letters,
        )
        assert self._extracting is not None
        self._move(account)
        with self._extracting:
            async with aclosing(self._source.runs()) as items, _flushed(policy):
                async for item in items:
                    if isinstance(item, InputDamaged):
                        await _pass_over(item, account, policy)
                        continue
                    if isinstance(item, Position):
                        await policy.flush()
                        passed = self._passed(account, self._source.faults)
                        item = item._replace(passed=(passed,))
                    else:
                        if len(item) > self._left:
                            item = item[: int(self._left)]
                        self._left -= len(item)
                        account.produced += len(item)
                        self.ledger.expected = self._source.size
                    # Pass on what was read, even if reading is cancelled.
                    with anyio.CancelScope(shield=True):
                        try:
                            await out.send(item)
                        except anyio.BrokenResourceError:
                            return  # the run has failed, or was cancelled
                    self._move(account)
                    over = self._cuts_off and not self._left
                    if self._extracting.cancel_called or over:
                        break
        # A source that is drained at the limit may be cancelled while it is closed.
        if not self._left:
            self.stopped_at = "limit"
        elif not self._drained:
            self.stopped_at = self._source_end

    # --- transform ----------------------------------------------------------

    async def _transform(self, items: Items, tasks: TaskGroup) -> Items:
        """Return the items that leave the last stage; each stage reads the previous."""
        for stage, account in zip(self._stages, list(self.ledger)[1:], strict=False):
            ended, closed = anyio.Event(), anyio.Event()
            supervisor = await tasks.start(
                self._supervise, stage, account, ended, closed
            )
            items = self._transformed(supervisor, account, items, ended, closed)
        return items

    async def _supervise(
        self,
        stage: Stage,
        account: Account,
        ended: anyio.Event,
        closed: anyio.Event,
        *,
        task_status: TaskStatus[AsyncSupervisor],
    ) -> None:
        # In a task of its own: if the run fails, all workers are stopped at once.
        supervisor = AsyncSupervisor(stage, meter=self._meter, launch=self._launch)
        self._supervisors.append(supervisor)
        try:
            async with supervisor:
                task_status.started(supervisor)
                await ended.wait()
        finally:
            account.skipped += supervisor.skipped
            account.doubtful += supervisor.doubtful
            account.add_faults(supervisor.faults)
            account.busy += supervisor.busy
            closed.set()

    async def _transformed(
        self,
        supervisor: AsyncSupervisor,
        account: Account,
        items: Items,
        ended: anyio.Event,
        closed: anyio.Event,
    ) -> AsyncGenerator[Item, None]:
        """Yield what a stage makes of the items; set ``ended`` after the last."""
        stage = supervisor.stage
        policy = DeadLetterPolicy(
            account,
            stage.on_error,
            config_of(stage),
            self._dead_letters,
            judged_of=self._judged_of,
        )
        before = account.received  # counted by starts that were interrupted
        keeps = policy.keeps and stage.on_mismatch != "fail"
        answers = supervisor.answers(self._received(items, account))
        with self._guarded():
            async with aclosing(answers), _flushed(policy):
                async for answer in answers:
                    self._move(account)
                    if isinstance(answer, Position):
                        await policy.flush()
                        passed = self._passed(
                            account, supervisor.faults, supervisor.skipped
                        )
                        yield answer._replace(passed=(*answer.passed, passed))
                        continue
                    if answer.mismatches:
                        account.add_mismatches(name for _, name in answer.mismatches)
                    # Results before a refusal that ends the run are passed on.
                    parts = (answer,) if keeps else answer.parts()
                    for part in parts:
                        if part.error is not None:
                            await policy.hold(
                                part.error, part.messages, place=before + part.start
                            )
                            continue
                        if part.refused:
                            await policy.hold_refused(part, before)
                        outputs = joined(part.groups)
                        account.done += len(part.messages) - part.failed
                        account.produced += len(outputs)
                        if len(outputs):
                            yield outputs
            ended.set()
            # Only when the workers have exited is it certain that no more output comes.
            await closed.wait()
            if account.doubtful:
                doubt = RepliesDoubtful(account.doubtful, stage=stage.name)
                raise supervisor.doubt or doubt

    async def _received(
        self, items: Items, account: Account
    ) -> AsyncGenerator[Item, None]:
        """Yield the items, and count the messages in."""
        async with aclosing(items):
            async for item in items:
                if not isinstance(item, Position):
                    account.received += len(item)
                    if account.began is None:
                        self._move(account)
                yield item

    # --- load ---------------------------------------------------------------

    async def _load(self, items: Items, tasks: TaskGroup) -> None:
        account = self._sink.account
        loading = Loading(
            self._sink,
            self._source,
            ledger=self.ledger,
            letters=self._dead_letters,
            delivery=self._delivery,
            every=self._flush_every,
            doubtful=lambda: self.doubtful,
            note=self._note,
        )
        async with self._sink, aclosing(items):
            # Entering a sink in a thread does not notice that the run was cancelled.
            await anyio.lowlevel.checkpoint_if_cancelled()
            tasks.start_soon(loading.flush_now_and_then, self._guarded)
            tasks.start_soon(self._watch)
            async for item in items:
                # If replies are doubtful, this item is left to the next run.
                self._check_doubt()
                self._move(account)
                await loading.take(item)
                self._move(account)
            self._watching.cancel()
            await loading.end("" if self._cut else self.stopped_at, cut=self._cut)
            self._cut |= self._sink.withheld
            self._tick(account)

    async def _watch(self) -> None:
        """End the run if replies are doubtful or absent, even if nothing is loaded."""
        with suppress(Exception), self._guarded(), self._watching:
            while True:
                with anyio.CancelScope(deadline=self._next_look) as self._looking:
                    await anyio.sleep_forever()
                if anyio.current_time() >= self._drained_at + self.drain_limit:
                    self._withhold()
                await self._source.observe()
                self._check_doubt()
                if any(map(self._is_mute, self._working)):
                    self._forced = True
                    self._scope.cancel()

    @property
    def _next_look(self) -> float:
        now, limit = anyio.current_time(), self._drained_at + self.drain_limit
        return now + _LOOK if self._cut else min(now + _LOOK, max(now, limit))

    def _withhold(self) -> None:
        """Let only messages be processed that workers already hold."""
        if self._cut:
            return
        self._cut = True
        assert self._extracting is not None
        self._extracting.cancel()
        self._sink.withhold()
        for supervisor in self._supervisors:
            supervisor.withhold()
        _log.warning(
            "draining took too long: waiting messages are not processed",
            seconds=self.drain_limit,
            unprocessed=self.ledger.waiting,
        )

    def _is_mute(self, supervisor: AsyncSupervisor) -> bool:
        """Return whether a run that drains waits for workers that may never answer."""
        slowest, limit = supervisor.slowest, supervisor.stage.timeout.stop
        drained_for = anyio.current_time() - self._drained_at
        if slowest is None or supervisor.answered or drained_for < limit:
            return False
        if slowest.seconds < limit:
            return False
        _log.warning(
            "stopped: no worker has ever answered",
            stage=supervisor.stage.name,
            worker=slowest.worker,
            seconds=round(slowest.seconds),
        )
        return True

    def _check_doubt(self) -> None:
        """Raise the error if results that are loaded, or will be, are doubtful."""
        for supervisor in self._working:
            if (doubt := supervisor.doubt) is not None:
                raise doubt

    def _passed(self, account: Account, faults: Faults, skipped: int = 0) -> Passed:
        """Return what a stage has done up to the position that leaves it now."""
        letters = self._dead_letters
        size = letters.size(account.stage) if letters is not None else 0
        return Passed(account.stage, account.settled(faults, skipped), size)

    async def _begin(self) -> bool:
        """Resume where the last run stopped; return whether everything is loaded."""
        if (record := await self._begin_delivery()) is None:
            return False
        self._source.begin(self._epochs)
        if record.ended:
            if self._sink.performs:
                # Entering the sink completes what an interrupted start has left undone.
                async with self._sink:
                    pass
            await self._source.finished()
            return True
        if record.position is not None:
            self._source.resume(record.position)
        return False


async def _pass_over(
    damage: InputDamaged, account: Account, policy: DeadLetterPolicy
) -> None:
    """Dead-letter damage of the input, or count it if dead letters are not kept."""
    if policy.keeps:
        account.received += 1
        await policy.hold(damage, [damage.data], place=account.received - 1)
        return
    account.skipped += 1
    _log.warning("damage skipped", stage=account.stage, error=str(damage))


@asynccontextmanager
async def _flushed(policy: DeadLetterPolicy) -> AsyncIterator[None]:
    """Write letters that are held at the end, even if the run fails or is stopped."""
    try:
        yield
    except BaseException:
        with anyio.CancelScope(shield=True), suppress(StageError):
            await policy.flush()
        raise
    await policy.flush()
