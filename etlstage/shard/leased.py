"""
A load that several runners share: each processes the shards whose leases it holds.

A stream with shards of its own is read shard by shard: each shard has a reader beside
its worker, which continues when the worker has taken what was read. New shards get
leases as they are found; the keeper makes them wait for their parents.

Any other input is divided into shards by the key of its records. Each runner reads the
whole input, and gives its workers the records of its shards that are after the
committed position. How far a runner has read is not stored. There are only the
checkpoints in the table, one for each shard, from which the holder of its lease
resumes.

A *pass* reads the input from the first record that one of its shards needs. It serves
the shards that the runner has when the pass begins. Each new shard starts another pass,
so that no shard is given a record before one that it has missed. A shard remembers the
last record that it was given, and is given none twice.

``keeper.py`` decides which shards the runner has, and ``holder.py`` holds their leases.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, aclosing, suppress
from functools import partial
from typing import Any, Final, Self, assert_never

import anyio
import anyio.lowlevel
import anyio.to_thread
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from etlstage.errors import (
    ConfigError,
    EtlstageError,
    InvalidMessage,
    NotCommitted,
    StateUnusable,
)
from etlstage.messages import AnnotatedRun, Run
from etlstage.pipeline.dead_letter.policy import OF_A_MESSAGE
from etlstage.pipeline.interfaces import Source
from etlstage.pipeline.worker_sink import log_uncommitted
from etlstage.protocol.events import FarewellReason
from etlstage.shard.cut import Cut, RecordRun, number_of, position_at, wrong_key
from etlstage.shard.holder import Duty, LeaseHolder
from etlstage.shard.keeper import LeaseKeeper
from etlstage.shard.lease import (
    Answer,
    CheckpointAsked,
    FailRunner,
    Lease,
    LeaveAsked,
    Left,
    Start,
    Stop,
    TableRead,
    WorkerEnded,
    Write,
)
from etlstage.shard.stream import ShardedSource, ShardsUnavailable
from etlstage.shard.table import LeaseTable, News
from etlstage.shard.worker import LeasedShard, ShardSink
from etlstage.stage import Stage
from etlstage.supervisor import CommitRequest
from etlstage.supervisor.exchange.exchange import Outcome
from etlstage.telemetry.log import Log
from etlstage.transport.process import Signal

__all__ = ("LeasedSink",)

_log = Log()

_LOST: Final = "ShutdownException"
"""Answer to a worker that commits in another runner's shard; the name of this error for
clients of the Kinesis library."""
_OF: Final = "shard"
"""Column with a record's ``LeasedShard``; a shard that is taken again has a new one."""
_WRONG: Final = "wrong"
"""Column with the reason not to give a record to a worker; empty if there is none."""


class LeasedSink(ShardSink):
    """
    Loads with a worker for each shard whose lease this runner holds.

    A message counts as loaded once it is committed, and as unprocessed if its shard
    went to another runner before.

    Args:
        stage: The stage; its dialect must be one of workers that commit.
        keeper: Decides which shards are ours.
        leases: Opens the table, given the input's identity; called in a thread.
        cut: How the input is divided into shards; None: it has shards of its own.
        settings: Passed to :class:`~etlstage.shard.worker.ShardSink`.

    """

    def __init__(
        self,
        stage: Stage,
        *,
        keeper: LeaseKeeper,
        leases: Callable[[str], LeaseTable],
        cut: Cut | None = None,
        **settings: Any,  # noqa: ANN401 - passed on
    ) -> None:
        super().__init__(stage, **settings)
        self._cut = cut
        self._keeper = keeper
        names = cut.names if cut is not None else ()
        self._holder = LeaseHolder(stage.name, keeper, leases, names)
        self._starting = anyio.Lock()
        self._input: Source | None = None
        self._stream: ShardedSource | None = None
        self._entered = anyio.Event()
        self._read_out: MemoryObjectSendStream[Run]
        self._read_in: MemoryObjectReceiveStream[Run]
        self._shards: dict[str, LeasedShard] = {}  # the shards that are ours
        self._failures: dict[str, EtlstageError] = {}
        self._failed: dict[str, LeasedShard] = {}  # the shards of ``_failures``
        self._refused: EtlstageError | None = None
        self._leaving = False  # whether all shards are to be handed over
        self._changed = Signal()
        self._left = anyio.Event()
        self._tasks: TaskGroup

    # --- the pipeline -----------------------------------------------------------

    def input_of(self, source: Source) -> Source:
        """Return a source of the records of the shards that are ours."""
        self._input = source
        if self._cut is None:
            if not isinstance(source, ShardedSource):
                raise ConfigError(f"stage {self.name}: {source.input} has no shards")
            self._stream = source
        return _LeasedInput(source, self)

    async def __aenter__(self) -> Self:
        """Open the table, and start taking leases."""
        source = self._input
        of = source.identity if source is not None else str
        await self._holder.open(of, self._stream)
        self._read_out, self._read_in = anyio.create_memory_object_stream[Run](0)
        self._entered.set()
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._keep)
        if self._stream is not None:
            self._tasks.start_soon(self._look_for_shards, self._stream)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop the workers, and release the remaining leases."""
        self._tasks.cancel_scope.cancel()
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            self._metrics.close()
            self._read_out.close()
            self._read_in.close()
            with anyio.CancelScope(shield=True):
                await self._holder.close()

    async def write(self, run: Run) -> None:
        """
        Give records to the worker of their shard, once it accepts more.

        Raises:
            EtlstageError: Why the run has failed, such as a StateUnusable if another
                runner uses this one's name.

        """
        self._check()
        self.account.received += len(run)
        assert isinstance(run, AnnotatedRun), "records are cut by input_of()"
        shard: LeasedShard = run.columns[_OF][0]
        given = await self._sound(run)
        shard.held += len(given)
        if not len(given):
            shard.worker.taken.set()
        else:
            # A worker whose shard is lost meanwhile does not accept them.
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                await shard.worker.runs.send(given)
        shard.coming -= len(run)
        if shard.gone:
            self._leave_unprocessed(shard)
        self._end_if_done(shard)

    async def _sound(self, run: AnnotatedRun) -> AnnotatedRun:
        """
        Return the records that a worker may be given; dead-letter the others.

        They are dead-lettered before the worker gets the rest, as the worker may commit
        the end of the shard before its outcomes arrive.
        """
        wrong = run.columns[_WRONG]
        for place, text in enumerate(wrong):
            if text:
                error = InvalidMessage(text, index=place)
                async with self._settling:
                    at = self.account.moved
                    await self._policy.settle(error, run[place : place + 1], place=at)
        columns = {
            name: [value for value, text in zip(column, wrong, strict=True) if not text]
            for name, column in {**run.columns, "": run.messages}.items()
            if name not in (_OF, _WRONG)
        }
        return AnnotatedRun(columns.pop(""), **columns)

    async def flush(self) -> None:
        """Raise a failure of the run; what is durable is up to the workers."""
        self._check()

    async def finish(self) -> None:
        """
        Hand over what is left, and mark the load as complete.

        Raises:
            EtlstageError: Why the run, or the first shard that failed, has failed.

        """
        await self.stop()
        self._finished = True

    def drain(self) -> None:
        """Start handing over all shards, as the run is to end."""
        self._leaving = True
        self._holder.report(LeaveAsked())

    async def stop(self) -> None:
        """
        Hand over what is left, and return when that is done.

        Unless the run was drained, the workers first process all that was written.

        Raises:
            EtlstageError: Why the run, or the first shard that failed, has failed.

        """
        if not self._leaving:
            self._leaving = True
            await self._end_input(*self._shards.values())
        self._holder.report(LeaveAsked())
        await self._left.wait()
        self._check()
        for error in self._failures.values():
            raise error

    async def _end_input(self, *shards: LeasedShard) -> None:
        """Let shards that are to go on later process what was written."""
        for shard in shards:
            shard.reading.cancel()
            shard.coming = 0  # the rest of a run that a limit has cut is never written
        self._exhaust(*shards, why=FarewellReason.DRAIN)
        while self._refused is None and not all(shard.gone for shard in shards):
            await self._changed.wait()

    def landed(self) -> str:
        """Describe how many messages this runner's workers have loaded."""
        return self._loaded("by this runner")

    def _check(self) -> None:
        if self._refused is not None:
            raise self._refused

    # --- the input ------------------------------------------------------------

    async def runs(self) -> AsyncGenerator[Run, None]:
        """Yield runs of records of one shard each, until no shard needs any."""
        await self._entered.wait()
        if self._cut is None:
            async for run in self._read_in:
                yield run
            return
        async with aclosing(self._passes(self._cut)) as runs:
            async for run in runs:
                yield run

    async def _passes(self, cut: Cut) -> AsyncGenerator[Run, None]:
        assert self._input is not None, "input_of() came first"
        while shards := await self._wanting():
            after = min(shard.row for shard in shards)
            async with aclosing(self._input.numbered(after)) as runs:
                async for run in runs:
                    for part in _parts(run, cut, shards):
                        yield part
                    wanting = [one for one in self._shards.values() if one.wants]
                    if not wanting or not shards.issuperset(wanting):
                        break
                else:
                    self._exhaust(*shards)

    async def _wanting(self) -> set[LeasedShard]:
        """Wait for shards that need input, and return them; none: all is over."""
        while not self._all_over:
            if found := {shard for shard in self._shards.values() if shard.wants}:
                return found
            await self._changed.wait()
        return set()

    def _exhaust(self, *shards: LeasedShard, why: FarewellReason | None = None) -> None:
        """Let shards end, as all their input was read."""
        for shard in shards:
            shard.exhausted = why or self._why
            self._end_if_done(shard)

    @property
    def _all_over(self) -> bool:
        over = not self._shards and self._holder.all_over
        return over or self._refused is not None

    def _change(self) -> None:
        """Let the input look again whether shards need it."""
        self._changed.set()
        if self._stream is not None and self._all_over:
            self._read_out.close()

    def _end_if_done(self, shard: LeasedShard) -> None:
        if shard.exhausted is not None and not (
            shard.coming or shard.gone or shard.worker.stopping
        ):
            shard.worker.finish(shard.exhausted)

    # --- a stream -----------------------------------------------------------------

    async def _look_for_shards(self, stream: ShardedSource) -> None:
        """Look for new shards every ``stream.sync`` seconds."""
        while True:
            await anyio.sleep(stream.sync)
            await self._find_shards(stream)

    async def _find_shards(self, stream: ShardedSource) -> None:
        """Look for new shards, until their source is available."""
        while True:
            try:
                await self._holder.find(stream)
            except ShardsUnavailable as error:
                _log.warning(
                    "retrying shard listing",
                    stage=self.name,
                    error=str(error),
                    seconds=stream.sync,
                )
                await anyio.sleep(stream.sync)
            except EtlstageError as error:
                self._fail(error)
                return
            else:
                return

    def _fail(self, error: EtlstageError) -> None:
        """End the run with an error."""
        self._refused = self._refused or error
        self._change()

    async def _feed(self, stream: ShardedSource, shard: LeasedShard) -> None:
        """Read a shard, each time its worker has taken what was read before."""
        with (
            shard.reading,
            suppress(anyio.ClosedResourceError, anyio.BrokenResourceError),
        ):
            try:
                async with aclosing(
                    stream.records(shard.name, shard.position)
                ) as records:
                    async for run in records:
                        if run is None:
                            # Its children have to be known before the shard ends.
                            await self._find_shards(stream)
                            self._exhaust(shard, why=FarewellReason.ENDED)
                            return
                        while shard.coming or not shard.worker.waits:
                            await shard.worker.taken.wait()
                        shard.coming += len(run)
                        run.columns[_OF] = [shard] * len(run)
                        run.columns[_WRONG] = [
                            wrong and f"shard {shard.name}: {wrong}"
                            for wrong in map(wrong_key, run.columns["partition"])
                        ]
                        await self._read_out.send(run)
                self._exhaust(shard, why=FarewellReason.DRAIN)
            except EtlstageError as error:
                self._fail(error)

    # --- the leases -------------------------------------------------------------

    async def _keep(self) -> None:
        """Perform the keeper's instructions."""
        async with aclosing(self._holder.instructions(self._tasks)) as instructions:
            async for instruction in instructions:
                self._perform(instruction)

    def _perform(self, instruction: Duty) -> None:
        match instruction:
            case TableRead():
                self._note_waiting()
                self._change()
            case Write(_, before, after):
                news = self._news(before, after)
                self._tasks.start_soon(self._holder.write, instruction, news)
            case Start(lease):
                self._tasks.start_soon(self._live, lease)
            case Stop(shard, lost):
                self._tasks.start_soon(self._stop, shard, lost)
            case Answer(shard, stored):
                if shard in self._shards:
                    self._shards[shard].answer(stored=stored)
            case FailRunner(text):
                self._fail(StateUnusable(f"stage {self.name}: {text}"))
                self._left.set()
            case Left():
                self._left.set()
            case _:
                assert_never(instruction)

    def _note_waiting(self) -> None:
        """Set the activity to the owners that we wait for, if we have nothing to do."""
        living = {row.owner for row in self._holder.rows.values() if not row.ended}
        others = sorted(owner for owner in living - {self._keeper.owner} if owner)
        if not others or self._keeper.phases or self._all_over:
            self.activity = ""
            return
        if not self.activity:
            _log.info("waiting for leases", stage=self.name, owners=others)
        self.activity: str = f"waiting for leases of {', '.join(others)}"

    def _news(self, before: Lease, after: Lease) -> News:
        """Return what to publish about a shard, beside its lease."""
        shard, failure = self._shards.get(after.shard), self._failures.get(after.shard)
        lag = None  # another runner's shard, which publishes its lag itself
        if shard is not None:
            lag = shard.held + shard.coming
            if self._stream is not None:
                behind = self._stream.behind.get(shard.name, 0.0)
                self._metrics.behind(shard.name, behind)
        elif self._keeper.owner in (before.owner, after.owner):
            lag = 0
        return News(
            lag=lag,
            moved=time.time() if after.position != before.position else None,
            error=str(failure) if failure is not None else None,
        )

    # --- a shard ----------------------------------------------------------------

    async def _live(self, lease: Lease) -> None:
        """Run a worker for a shard until the shard has ended or is another runner's."""
        position = None if lease.position is None else json.loads(lease.position)
        numbers = self._cut is not None and self._cut.numbers
        shard = LeasedShard(lease.shard, position, renumbered=numbers)
        # A position may have further items, which are not for the worker.
        share = position[:2] if isinstance(position, list) else position
        shard.worker = self._worker(
            shard.name, share, partial(self._store, shard), shard.given_up.append
        )
        _log.info("shard taken", stage=self.name, shard=shard.name, position=position)
        if (failed := self._failed.pop(shard.name, None)) is not None:
            # The shard was reset: what its worker had is delivered again.
            del self._failures[shard.name]
            self._leave_unprocessed(failed)
        # Before the worker has started, as the shard may be lost meanwhile.
        self._shards[shard.name] = shard
        self._metrics.leases(len(self._shards))
        try:
            await self._serve(shard)
        except EtlstageError as error:
            if not shard.worker.stopping:
                shard.failure = shard.failure or error
        finally:
            for faults in shard.worker.faults:
                self.account.add_faults(faults)
        self._end(shard, lease)

    async def _serve(self, shard: LeasedShard) -> None:
        async with AsyncExitStack() as stack:
            async with self._starting:
                # One at a time, as starting a process delays the renewal of leases.
                worker = await stack.enter_async_context(shard.worker)
                await anyio.lowlevel.checkpoint()
            shard.started = True
            self._change()
            if self._stream is not None:
                self._tasks.start_soon(self._feed, self._stream, shard)
            async with aclosing(worker.answers()) as answers:
                async for part in answers:
                    await self._book(shard, part)

    async def _book(self, shard: LeasedShard, part: Outcome) -> None:
        """Account for the outcome of a shard's messages; raise what ends the shard."""
        if part.error is None:
            self.account.done += len(part.messages)
        elif part.error in shard.settled:
            shard.settled.remove(part.error)
        elif shard.worker.stopping:
            return  # the shard's next owner finds out what is wrong with them
        elif self._leaving and isinstance(part.error, NotCommitted):
            self.withheld = True
            log_uncommitted(part.error)
            return
        elif isinstance(part.error, OF_A_MESSAGE):
            if all(one.error is not part.error for one in shard.given_up):
                shard.given_up.append(part)
            await self._settle(shard)
            shard.settled.remove(part.error)
        else:
            # Set it now, as the shard may be stopped before its worker has exited.
            shard.failure = part.error
            raise part.error
        shard.held -= len(part.messages)

    async def _settle(self, shard: LeasedShard) -> None:
        """Dead-letter a shard's given-up messages; raise what ends the shard."""
        # Use the lock only if there is something to do: a task that begins when its run
        # is already cancelled would spin at a lock of anyio.
        if shard.given_up:
            async with self._settling:
                try:
                    while shard.failure is None and shard.given_up:
                        outcome = shard.given_up[0]
                        error = outcome.error
                        assert error is not None, "it was given up"
                        ahead = max(0, outcome.start - shard.worker.yielded)
                        place = self.account.moved + ahead
                        await self._policy.settle(error, outcome.messages, place=place)
                        shard.given_up.popleft()
                        shard.settled.append(error)
                except EtlstageError as error:
                    shard.failure = error
        if shard.failure is not None:
            raise shard.failure

    def _end(self, shard: LeasedShard, lease: Lease) -> None:
        """Release a shard whose worker has exited."""
        shard.gone = True
        shard.reading.cancel()
        self._log_omitted(shard.name, shard.known, shard.begin)
        # A worker that failed, or exited neither stopped nor at the shard's end, would
        # do so again here. A shard that has ended is not given up, as it may be reset.
        left = shard.worker.stopping or shard.worker.ended
        over = shard.failure is not None or not left
        if over:
            self._holder.give_up(lease)
        if shard.failure is not None:
            self._failures[shard.name] = shard.failure
            self._failed[shard.name] = shard
            _log.error(
                "shard failed",
                stage=self.name,
                shard=shard.name,
                error=str(shard.failure),
            )
        else:
            self._leave_unprocessed(shard)
        self._shards.pop(shard.name, None)
        self._metrics.leases(len(self._shards))
        if self._stream is not None:
            self._metrics.behind(shard.name, 0)
        self._holder.report(WorkerEnded(shard.name, failed=over))
        self._change()

    def _leave_unprocessed(self, shard: LeasedShard) -> None:
        self.account.unprocessed += shard.held
        shard.held = 0

    async def _stop(self, name: str, lost: bool) -> None:
        if (shard := self._shards.get(name)) is None:
            return
        _log.info("shard lost" if lost else "shard handed over", shard=name)
        await shard.worker.stop(FarewellReason.LOST if lost else FarewellReason.DRAIN)

    async def _store(self, shard: LeasedShard, request: CommitRequest) -> None:
        try:
            await self._settle(shard)
            await self._sync_letters()
        except EtlstageError as error:
            shard.failure = error
            self._tasks.start_soon(shard.worker.stop, FarewellReason.LOST)
            raise
        position, last = request.position, max(shard.last, shard.begin)
        if self._cut is not None and not request.ended and number_of(position) > last:
            # If a number after it were stored, rows that come later would be missed.
            if last < 0:
                return
            position = position_at(last)
        asked = CheckpointAsked(shard.name, json.dumps(position), request.ended)
        if not await shard.ask(asked, self._holder.report):
            raise EtlstageError(_LOST)


class _LeasedInput(Source):
    """Reads the records of a runner's shards."""

    def __init__(self, source: Source, sink: LeasedSink) -> None:
        super().__init__(source.name)
        self._source = source
        self._sink = sink
        self.goes_on: bool = source.goes_on

    @property
    def input(self) -> str:
        """Description of the input, for a human."""
        return self._source.input

    def runs(self) -> AsyncGenerator[Run, None]:
        """Yield runs of records of one shard each, until no shard needs any."""
        return self._sink.runs()

    def complete(self) -> None:
        """Let the source end where there is no more."""
        self._source.complete()

    async def aclose(self) -> None:
        """Release the source's resources."""
        await self._source.aclose()


def _parts(
    run: AnnotatedRun, cut: Cut, shards: Iterable[LeasedShard]
) -> Iterator[AnnotatedRun]:
    """Yield, for each shard, the records of a run that it has not been given yet."""
    by_name = {shard.name: shard for shard in shards if shard.wants}
    wanted = [by_name.get(name) for name in cut.names]
    parts: dict[LeasedShard, RecordRun] = {}
    rows = run.columns["sequence"]
    for message, row in zip(run.messages, rows, strict=True):
        record = cut.record(message, row)
        shard = wanted[record.shard]
        if shard is None or row <= shard.row:
            continue
        shard.row = row
        wrong = cut.wrong(record, row, shard.last)
        if not wrong:
            shard.last = record.number
        # Wrong records before the committed position were settled before its commit.
        if shard.last > shard.begin or (wrong and shard.last == shard.begin):
            parts.setdefault(shard, RecordRun()).add(message, record, wrong)
        elif not wrong:
            shard.known += 1
    for shard, part in parts.items():
        shard.coming += len(part)
        records = part.run()
        records.columns[_OF] = [shard] * len(part)
        records.columns[_WRONG] = part.wrong
        yield records
