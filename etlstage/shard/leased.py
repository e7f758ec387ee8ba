"""
A load that several runners share: each has the shards of which it holds the leases.

A stream with shards of its own is read shard by shard: each has a reader beside its
worker, which reads on when the worker has taken what was read. New shards get leases as
they are found; the keeper has them wait for their parents.

Of any other input there is a part in each shard, by the key of the records. Each runner reads the whole input, and gives its workers the records of its shards,
behind what was committed. What one runner has read is no position: there are only
the checkpoints in the table, one for each shard, after which the holder of its lease
resumes.

A *pass* reads the input from the first record that one of its shards needs. It is for
the shards that the runner has when it begins: with each new one another pass begins, so
that no shard is given a record ahead of one that it has missed. A shard remembers the
last record that it was given, and is given none twice.

``keeper.py`` decides which shards these are; here its instructions are performed.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, closing, suppress
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, assert_never

import anyio
import anyio.lowlevel
import anyio.to_thread
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from etlstage.errors import ConfigError, EtlstageError, InvalidMessage, StateUnusable
from etlstage.messages import AnnotatedRun, Position, Run
from etlstage.pipeline.dead_letter.policy import OF_A_MESSAGE
from etlstage.pipeline.interfaces import Source
from etlstage.protocol.events import FarewellReason
from etlstage.shard.cut import Cut, RecordRun, number_of, wrong_key
from etlstage.shard.keeper import LeaseKeeper
from etlstage.shard.lease import (
    Answer,
    CheckpointAsked,
    Event,
    FailRunner,
    Instruction,
    Lease,
    LeaveAsked,
    Left,
    Read,
    ReadFailed,
    Start,
    Stop,
    TableRead,
    TimerRang,
    WorkerEnded,
    Write,
    WriteFailed,
    WriteRefused,
    Written,
)
from etlstage.shard.stream import AT_END, ShardedSource
from etlstage.shard.table import LeaseTable, News, TableGone
from etlstage.shard.worker import ShardSink, ShardWorker
from etlstage.stage import Stage
from etlstage.supervisor import CommitRequest
from etlstage.supervisor.exchange.exchange import Outcome
from etlstage.supervisor.stream import Signal
from etlstage.telemetry.log import Log

__all__ = ("LeasedSink",)

_log = Log()

_LOST: Final = "ShutdownException"
"""What a worker is answered that commits in a shard of another runner. Clients of the
Kinesis library know it by this name."""
_TICK: Final = 0.001  # seconds
_AGAIN: Final = 1.0  # seconds until a database is asked again
_OF: Final = "shard"
"""The column that says whose a record is; a shard that comes back is another one."""
_WRONG: Final = "wrong"
"""The column that says why a record is not to be given to a worker, or is empty."""


class LeasedSink(ShardSink):
    """
    Loads with a worker for each shard of which this runner has the lease.

    A message counts as loaded once it is committed, and as unprocessed if its shard
    went to another runner before.

    Args:
        stage: The stage; its dialect is of workers that commit.
        keeper: Decides which shards are ours.
        leases: Opens the table, given what the input is; called in a thread.
        cut: How the input is cut into shards; None: it has shards of its own.
        settings: As :class:`~etlstage.shard.worker.ShardSink` has them.

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
        self._names = set(cut.names) if cut is not None else set[str]()
        self._keeper = keeper
        self._open = leases
        self._starting = anyio.Lock()
        self._input: Source | None = None
        self._stream: ShardedSource | None = None
        self._entered = anyio.Event()
        self._read_out: MemoryObjectSendStream[Run]
        self._read_in: MemoryObjectReceiveStream[Run]
        self._table: LeaseTable | None = None
        self._threads = anyio.CapacityLimiter(4)
        self._events: deque[Event] = deque()
        self._reported = Signal()
        self._shards: dict[str, _LeasedShard] = {}  # whose workers run
        self._rows: dict[str, Lease] = {}  # as they were read last
        self._ended: set[str] = set()
        self._over: set[str] = set()  # shards that need no runner, or not this one
        self._failures: dict[str, EtlstageError] = {}
        self._refused: EtlstageError | None = None
        self._changed = Signal()
        self._left = anyio.Event()
        self._tasks: TaskGroup

    # --- the pipeline -----------------------------------------------------------

    def input_of(self, source: Source) -> Source:
        """Return the records of the shards that are ours."""
        self._input = source
        if self._cut is not None:
            return _CutInput(source, self, self._cut)
        if not isinstance(source, ShardedSource):
            raise ConfigError(f"stage {self.name}: {source.input} has no shards")
        self._stream = source
        return _StreamInput(source, self)

    async def __aenter__(self) -> Self:
        """Open the table, and begin to take leases."""
        try:
            await self._in_thread(self._begin)
        except BaseException:
            if self._table is not None:
                self._table.close()
            raise
        self._read_out, self._read_in = anyio.create_memory_object_stream[Run](0)
        self._entered.set()
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._keep)
        if self._stream is not None:
            self._tasks.start_soon(self._look_for_shards, self._stream)
        return self

    def _begin(self) -> None:
        self._table = self._open(self._input.identity() if self._input else "")
        if self._stream is not None:
            self._add_shards(self._stream)
        else:
            self._table.add(map(Lease, sorted(self._names)))

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the workers, and release the leases that are left."""
        self._tasks.cancel_scope.cancel()
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            self._metrics.close()
            self._read_out.close()
            self._read_in.close()
            with anyio.CancelScope(shield=True):
                await self._in_thread(self._release)

    def _release(self) -> None:
        """Free what a run still has that has failed: there are no workers any more."""
        with closing(self._leases) as table, suppress(TableGone):
            for row in table.read():
                if row.owner == self._keeper.owner:
                    free = row._replace(owner=None, claimant=None)
                    free = free._replace(counter=row.counter + 1)
                    table.swap(row, free, News(lag=0))

    async def write(self, run: Run) -> None:
        """
        Give records to the worker of their shard, when it may be given more.

        Raises:
            StateUnusable: If another runner has this one's name.

        """
        self._check()
        self.account.received += len(run)
        assert isinstance(run, AnnotatedRun), "records are cut by input_of()"
        shard: _LeasedShard = run.columns[_OF][0]
        given = await self._sound(run)
        shard.held += len(given)
        if not len(given):
            shard.worker.taken.set()
        else:
            # One that is lost meanwhile has no use for them.
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                await shard.worker.runs.send(given)
        shard.coming -= len(run)
        if shard.gone:
            self._leave_unprocessed(shard)
        self._end_if_done(shard)

    async def _sound(self, run: AnnotatedRun) -> AnnotatedRun:
        """
        Return the records that a worker may be given; dead-letter the others.

        Not when its outcome comes: the end of the shard may be committed before that.
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
        """Make nothing durable: when they commit is the workers' decision."""
        self._check()

    async def finish(self) -> None:
        """
        Find out whether all shards have been loaded, by whomever.

        Raises:
            EtlstageError: Why the first shard has failed that did.

        """
        await self.stop()
        self._finished = True

    def drain(self) -> None:
        """Hand over all shards: the run is to end."""
        self._report(LeaveAsked())

    async def stop(self) -> None:
        """
        Hand over what is left, and return when that is done.

        Raises:
            EtlstageError: Why the first shard has failed that did.

        """
        self._report(LeaveAsked())
        await self._left.wait()
        self._check()
        for error in self._failures.values():
            raise error

    def landed(self) -> str:
        """Return how many messages the workers of this runner have loaded."""
        return self._loaded("by this runner")

    def _check(self) -> None:
        if self._refused is not None:
            raise self._refused

    # --- the input ------------------------------------------------------------

    async def wanting(self) -> Sequence[_LeasedShard]:
        """Return those that need input, once there are some; none: it is over."""
        while not self._all_over:
            if found := [shard for shard in self._shards.values() if shard.wants]:
                return found
            await self._changed.wait()
        return []

    def has_changed(self, shards: Sequence[_LeasedShard]) -> bool:
        """Return whether others need input, or none of these does any more."""
        wanting = [shard for shard in self._shards.values() if shard.wants]
        return not wanting or any(shard not in shards for shard in wanting)

    def exhaust(
        self, shards: Iterable[_LeasedShard], why: FarewellReason | None = None
    ) -> None:
        """Have shards end: all of the input was read for them."""
        for shard in shards:
            shard.exhausted = why or self._why
            self._end_if_done(shard)

    @property
    def _all_over(self) -> bool:
        over = not self._shards and all(map(self._is_over, self._names))
        return over or self._refused is not None

    def _is_over(self, shard: str) -> bool:
        """Return whether a shard needs no runner, or can't begin by this one."""
        if shard in self._over:
            return True
        row = self._rows.get(shard)
        parents = () if row is None else row.parents
        return any(self._is_over(p) for p in parents if p not in self._ended)

    def _change(self) -> None:
        """Have the input look whether shards need it."""
        self._changed.set()
        if self._stream is not None and self._all_over:
            self._read_out.close()

    def _end_if_done(self, shard: _LeasedShard) -> None:
        if shard.exhausted is not None and not (
            shard.coming or shard.gone or shard.worker.stopping
        ):
            shard.worker.finish(shard.exhausted)

    # --- a stream -----------------------------------------------------------------

    async def read(self) -> AsyncGenerator[Run, None]:
        """Yield what the reader of each shard has read."""
        await self._entered.wait()
        async for run in self._read_in:
            yield run

    def _add_shards(self, stream: ShardedSource) -> None:
        """Add leases of shards that have come; blocks."""
        found = stream.shards()
        known = {row.shard: row for row in self._leases.read()}
        there = {shard.name for shard in found}
        gone = [
            row for row in known.values() if not row.ended and row.shard not in there
        ]
        if gone:
            raise StateUnusable(
                f"stage {self.name}: shard {gone[0].shard} is gone from {stream.input},"
                " and was not read to its end: 'etlstage shards reset' begins anew with"
                " what there is"
            )
        begins = {
            # What comes from others begins with its first record.
            shard.name: None if known else stream.beginning(shard)
            for shard in found
        }
        # The first to know a stream says where it begins. Who is second may see more
        # shards, made of those: so first come the ones that are over, which decide.
        over = [shard for shard in found if begins[shard.name] == AT_END]
        first = self._leases.add(
            Lease(shard.name, shard.parents, ended=True) for shard in over
        )
        rest = [shard for shard in found if shard not in over]
        known_parents = there.union(known)
        self._leases.add(
            Lease(
                shard.name,
                tuple(name for name in shard.parents if name in known_parents),
                _text(begins[shard.name] if first == len(over) else None),
            )
            for shard in rest
        )
        self._names = self._names | known_parents

    async def _look_for_shards(self, stream: ShardedSource) -> None:
        """Look for new shards from time to time."""
        while True:
            await anyio.sleep(stream.sync)
            await self._find_shards(stream)

    async def _find_shards(self, stream: ShardedSource) -> None:
        while True:
            try:
                await self._in_thread(partial(self._add_shards, stream))
            except TableGone as error:
                _log.warning("leases not read", stage=self.name, error=str(error))
                await anyio.sleep(_AGAIN)
                continue
            except EtlstageError as error:
                self._fail(error)
            return

    def _fail(self, error: EtlstageError) -> None:
        """End the run: what there is to read can't be read."""
        self._refused = self._refused or error
        self._change()

    async def _feed(self, stream: ShardedSource, shard: _LeasedShard) -> None:
        """Read a shard, when its worker has taken what was read before."""
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
                            # Once it has ended its children are all that is left.
                            await self._find_shards(stream)
                            self.exhaust([shard], FarewellReason.ENDED)
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
                self.exhaust([shard], FarewellReason.DRAIN)
            except EtlstageError as error:
                self._fail(error)

    # --- the leases -------------------------------------------------------------

    async def _keep(self) -> None:
        """Report what happens to the keeper, and perform what it decides."""
        while True:
            event = self._events.popleft() if self._events else TimerRang()
            now = anyio.current_time()
            for instruction in self._keeper.handle(event, now):
                self._perform(instruction)
            due = self._keeper.due()
            assert due is not None, "an event was handled"
            if not self._events:
                # What is due in less than a float can tell is not due yet.
                with anyio.CancelScope(deadline=max(due, now + _TICK)):
                    await self._reported.wait()

    def _report(self, event: Event) -> None:
        self._events.append(event)
        self._reported.set()

    def _perform(self, instruction: Instruction) -> None:
        match instruction:
            case Read():
                self._tasks.start_soon(self._read)
            case Write():
                self._tasks.start_soon(self._write, instruction)
            case Start(lease):
                self._tasks.start_soon(self._live, lease)
            case Stop(shard, lost):
                self._tasks.start_soon(self._stop, shard, lost)
            case Answer(shard, stored):
                if shard in self._shards:
                    self._shards[shard].answer(stored=stored)
            case FailRunner(text):
                self._refuse(text)
            case Left():
                self._left.set()
            case _:
                assert_never(instruction)

    def _refuse(self, text: str) -> None:
        self._fail(StateUnusable(f"stage {self.name}: {text}"))
        self._left.set()

    async def _read(self) -> None:
        names = self._names  # there may be more meanwhile
        try:
            rows = await self._in_thread(self._leases.read)
        except TableGone as error:
            _log.warning("leases not read", stage=self.name, error=str(error))
            self._report(ReadFailed())
            return
        self._rows = {row.shard: row for row in rows}
        there = set(self._rows)
        if missing := names - there:
            self._refuse(f"shard {min(missing)} is gone from the lease table")
        # Children come into the table before their parents end, by whomever.
        self._names = self._names | there
        self._ended |= {row.shard for row in rows if row.ended}
        self._over |= self._ended
        self._note_waiting()
        self._change()
        self._report(TableRead(rows))

    def _note_waiting(self) -> None:
        """Say whose leases it is waited for, if there is nothing else to do."""
        living = {row.owner for row in self._rows.values() if not row.ended}
        others = sorted(owner for owner in living - {self._keeper.owner} if owner)
        if not others or self._keeper.phases or self._all_over:
            self.activity = ""
            return
        if not self.activity:
            _log.info("waiting for leases", stage=self.name, owners=others)
        self.activity: str = f"waiting for leases of {', '.join(others)}"

    async def _write(self, write: Write) -> None:
        number, before, after = write
        try:
            swap = partial(self._leases.swap, before, after, self._news(before, after))
            done = await self._in_thread(swap)
        except TableGone as error:
            _log.warning(
                "lease not written",
                stage=self.name,
                shard=after.shard,
                error=str(error),
            )
            self._report(WriteFailed(number))
            return
        if done and after.ended:
            self._ended.add(after.shard)
            self._over.add(after.shard)
        self._report(Written(number) if done else WriteRefused(number))

    def _news(self, before: Lease, after: Lease) -> News:
        """Return what to say of a shard, beside its lease."""
        shard, failure = self._shards.get(after.shard), self._failures.get(after.shard)
        lag = None  # of a shard of another runner, which says it itself
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

    @property
    def _leases(self) -> LeaseTable:
        assert self._table is not None
        return self._table

    async def _in_thread(self, what: Callable[[], Any]) -> Any:  # noqa: ANN401
        return await anyio.to_thread.run_sync(
            what, limiter=self._threads, abandon_on_cancel=True
        )

    # --- a shard ----------------------------------------------------------------

    async def _live(self, lease: Lease) -> None:
        """Have a worker for a shard until it has ended, or is another's."""
        position = None if lease.position is None else json.loads(lease.position)
        numbers = self._cut is not None and self._cut.numbers
        shard = _LeasedShard(lease.shard, position, renumbered=numbers)
        # Where a stream begins may say more, for us alone.
        share = position[:2] if isinstance(position, list) else position
        shard.worker = self._worker(shard.name, share, partial(self._store, shard))
        _log.info("shard taken", stage=self.name, shard=shard.name, position=position)
        try:
            await self._serve(shard)
        except EtlstageError as error:
            if not shard.worker.stopping:
                shard.failure = shard.failure or error
        self._end(shard)

    async def _serve(self, shard: _LeasedShard) -> None:
        async with AsyncExitStack() as stack:
            async with self._starting:
                # One at a time, for to start a process keeps leases from being renewed.
                worker = await stack.enter_async_context(shard.worker)
                await anyio.lowlevel.checkpoint()
            self._shards[shard.name] = shard
            self._metrics.leases(len(self._shards))
            self._change()
            if self._stream is not None:
                self._tasks.start_soon(self._feed, self._stream, shard)
            async with aclosing(worker.answers()) as answers:
                async for part in answers:
                    await self._book(shard, part)

    async def _book(self, shard: _LeasedShard, part: Outcome) -> None:
        """Take what became of messages of a shard; raise what ends it."""
        if part.error is not None and shard.worker.stopping:
            return  # who has the shard next finds out what is wrong with them
        try:
            if part.error is None:
                self.account.done += len(part.messages)
            elif isinstance(part.error, OF_A_MESSAGE):
                async with self._settling:
                    place = self.account.moved
                    await self._policy.settle(part.error, part.messages, place=place)
            else:
                raise part.error
        except EtlstageError as error:
            # Now: it may be stopped before its worker is gone.
            shard.failure = error
            raise
        shard.held -= len(part.messages)

    def _end(self, shard: _LeasedShard) -> None:
        """Let go of a shard whose worker is gone."""
        shard.gone = True
        shard.reading.cancel()
        for faults in shard.worker.faults:
            self.account.add_faults(faults)
        # Another worker would fail here, too.
        over = shard.failure is not None or not shard.worker.stopping
        if over:
            self._over.add(shard.name)
        if shard.failure is not None:
            self._failures[shard.name] = shard.failure
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
        self._report(WorkerEnded(shard.name, failed=over))
        self._change()

    def _leave_unprocessed(self, shard: _LeasedShard) -> None:
        self.account.unprocessed += shard.held
        shard.held = 0

    async def _stop(self, name: str, lost: bool) -> None:
        if (shard := self._shards.get(name)) is None:
            return
        _log.info("shard lost" if lost else "shard handed over", shard=name)
        await shard.worker.stop(FarewellReason.LOST if lost else FarewellReason.DRAIN)

    async def _store(self, shard: _LeasedShard, request: CommitRequest) -> None:
        asked = CheckpointAsked(shard.name, json.dumps(request.position), request.ended)
        if not await shard.ask(partial(self._report, asked)):
            raise EtlstageError(_LOST)


class _LeasedInput(Source):
    """Reads the records of the shards that a runner has."""

    def __init__(self, source: Source) -> None:
        super().__init__(source.name)
        self._source = source
        self.goes_on: bool = source.goes_on

    @property
    def input(self) -> str:
        """What is read, for a human."""
        return self._source.input

    def complete(self) -> None:
        """Let it end where there is no more."""
        self._source.complete()

    async def aclose(self) -> None:
        """Release what the source holds."""
        await self._source.aclose()


class _StreamInput(_LeasedInput):
    """Those of a stream, as each shard has been read."""

    def __init__(self, source: Source, sink: LeasedSink) -> None:
        super().__init__(source)
        self._sink = sink

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        """Yield records, each run of one shard, until no shard needs any."""
        async with aclosing(self._sink.read()) as runs:
            async for run in runs:
                yield run


class _CutInput(_LeasedInput):
    """Those of an input that is read in passes."""

    def __init__(self, source: Source, sink: LeasedSink, cut: Cut) -> None:
        super().__init__(source)
        self._sink = sink
        self._cut = cut

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        """Yield records, each run of one shard, until no shard needs any."""
        while shards := await self._sink.wanting():
            after = min(shard.row for shard in shards)
            async with aclosing(self._source.numbered(after)) as runs:
                async for run in runs:
                    for part in self._parts(run, shards):
                        yield part
                    if self._sink.has_changed(shards):
                        break
                else:
                    self._sink.exhaust(shards)

    def _parts(
        self, run: AnnotatedRun, shards: Sequence[_LeasedShard]
    ) -> Iterator[AnnotatedRun]:
        """Yield what each of some shards has not been given of a run."""
        by_name = {shard.name: shard for shard in shards if shard.wants}
        wanted = [by_name.get(name) for name in self._cut.names]
        parts: dict[_LeasedShard, RecordRun] = {}
        rows = run.columns["sequence"]
        for message, row in zip(run.messages, rows, strict=True):
            record = self._cut.record(message, row)
            shard = wanted[record.shard]
            if shard is None or row <= shard.row:
                continue
            shard.row = row
            wrong = self._cut.wrong(record, row, shard.last)
            if not wrong:
                shard.last = record.number
            # What is wrong before a record that was committed was found by who did that.
            if shard.last > shard.begin or (wrong and shard.last == shard.begin):
                parts.setdefault(shard, RecordRun()).add(message, record, wrong)
        for shard, part in parts.items():
            shard.coming += len(part)
            records = part.run()
            records.columns[_OF] = [shard] * len(part)
            records.columns[_WRONG] = part.wrong
            yield records


class _LeasedShard:
    """
    A shard that is ours, from the start of its worker to its end.

    Args:
        name: Of the shard.
        position: What is committed of it.
        renumbered: Whether numbers of records are others than those of rows.

    """

    worker: ShardWorker

    def __init__(
        self, name: str, position: object, *, renumbered: bool = False
    ) -> None:
        self.name = name
        self.position = position
        self.reading: anyio.CancelScope = anyio.CancelScope()
        """Of its reader, in a stream."""
        self.begin: int = number_of(position)
        """Number of the record behind which it was begun."""
        self.row = -1 if renumbered else self.begin
        """The last row of the input that was looked at for it."""
        self.last = self.row
        """Number of the record that was there, or of one before that."""
        self.coming = 0
        """Records that were read and are not written yet."""
        self.held = 0
        """Records that were written and have no outcome."""
        self.exhausted: FarewellReason | None = None
        """The reason that its worker gets, since all was read for it."""
        self.gone = False
        self.failure: EtlstageError | None = None
        self._asked: _Asked | None = None

    @property
    def wants(self) -> bool:
        """Whether it needs input."""
        return not (self.exhausted is not None or self.worker.stopping or self.gone)

    async def ask(self, report: Callable[[], None]) -> bool:
        """Report that a checkpoint is asked for; return whether it was stored."""
        # One that was given up may be stored yet: until then there is no other.
        while self._asked is not None:
            await self._asked.answered.wait()
        asked = self._asked = _Asked()
        report()
        await asked.answered.wait()
        return asked.stored

    def answer(self, *, stored: bool) -> None:
        """Answer what was asked for."""
        if self._asked is not None:
            asked, self._asked = self._asked, None
            asked.stored = stored
            asked.answered.set()


def _text(position: object) -> str | None:
    """Return a position as a lease has it."""
    return None if position is None else json.dumps(position)


class _Asked:
    """A checkpoint that was asked for."""

    def __init__(self) -> None:
        self.stored = False
        self.answered = anyio.Event()
