"""
A load that several runners share: each has the shards of which it holds the leases.

Each of them reads the whole input, and gives its workers the records of its shards,
behind what was committed. So what one runner has read is nobody's position: there are
only the checkpoints in the table, one for each shard, and whoever holds a shard goes on
behind that.

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
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, assert_never

import anyio
import anyio.lowlevel
import anyio.to_thread
from anyio.abc import TaskGroup

from etlstage.errors import EtlstageError, InvalidMessage, StateUnusable
from etlstage.messages import AnnotatedRun, Position, Run, counted
from etlstage.pipeline.dead_letter.policy import (
    OF_A_MESSAGE,
    DeadLetterPolicy,
    config_of,
)
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.interfaces import Output, Sink, Source
from etlstage.protocol.events import FarewellReason
from etlstage.shard.cut import LONGEST_KEY, Cut, RecordRun
from etlstage.shard.keeper import LeaseKeeper
from etlstage.shard.lease import (
    Answer,
    CheckpointAsked,
    Event,
    Instruction,
    Lease,
    LeaveAsked,
    Left,
    Read,
    ReadFailed,
    Refuse,
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
from etlstage.shard.table import LeaseTable, News, TableGone
from etlstage.shard.worker import ShardWorker
from etlstage.stage import Stage
from etlstage.supervisor import Assignment, CommitRequest
from etlstage.supervisor.exchange.exchange import Outcome
from etlstage.supervisor.stream import Signal
from etlstage.telemetry import Meter
from etlstage.telemetry.log import Log
from etlstage.transport import Launch, launch_worker

__all__ = ("LeasedSink",)

_log = Log()

_LOST: Final = "ShutdownException"
"""What a worker is answered that commits in a shard of another runner. Clients of the
Kinesis library know it by this name."""
_TICK: Final = 0.001  # seconds
_OF: Final = "shard"
"""The column that says whose a record is; a shard that comes back is another one."""


class LeasedSink(Sink):
    """
    Loads with a worker for each shard of which this runner has the lease.

    A message counts as loaded once it is committed, and as unprocessed if its shard
    went to another runner before.

    Args:
        stage: The stage; its dialect is of workers that commit.
        cut: How the input is cut into shards.
        keeper: Decides which of them are ours.
        leases: Opens the table, given what the input is; called in a thread.
        why: What the workers are told at the end of the input.
        dead_letters: Where messages go that the workers can't load; None: the first
            one ends its shard.
        meter: Where to count what happens, see :mod:`etlstage.telemetry`.
        launch: What starts the workers.

    """

    def __init__(
        self,
        stage: Stage,
        *,
        cut: Cut,
        keeper: LeaseKeeper,
        leases: Callable[[str], LeaseTable],
        why: FarewellReason = FarewellReason.ENDED,
        dead_letters: DeadLetters | None = None,
        meter: Meter | None = None,
        launch: Launch = launch_worker,
    ) -> None:
        super().__init__(stage.name)
        self._stage = stage
        self._cut = cut
        self._keeper = keeper
        self._open = leases
        self._why = why
        self._policy = DeadLetterPolicy(
            self.account, stage.on_error, config_of(stage), dead_letters
        )
        self._settling = anyio.Lock(fast_acquire=True)
        self._starting = anyio.Lock()
        self._of_supervisor: dict[str, Any] = {"meter": meter, "launch": launch}
        self._input: Source | None = None
        self._table: LeaseTable | None = None
        self._threads = anyio.CapacityLimiter(4)
        self._events: deque[Event] = deque()
        self._reported = Signal()
        self._shards: dict[str, _LeasedShard] = {}  # whose workers run
        self._over: set[str] = set()  # shards that need no runner, or not this one
        self._failures: dict[str, EtlstageError] = {}
        self._refused: EtlstageError | None = None
        self._changed = Signal()
        self._left = anyio.Event()
        self._finished = False
        self._tasks: TaskGroup

    # --- the pipeline -----------------------------------------------------------

    def input_of(self, source: Source) -> Source:
        """Return the records of the shards that are ours."""
        self._input = source
        return _LeasedInput(source, self, self._cut)

    async def __aenter__(self) -> Self:
        """Open the table, and begin to take leases."""
        await self._in_thread(self._begin)
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._keep)
        return self

    def _begin(self) -> None:
        self._table = self._open(self._input.identity() if self._input else "")
        self._table.add(map(Lease, self._cut.names))

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the workers, and let the leases run out that are left."""
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)
        if self._table is not None:
            with anyio.CancelScope(shield=True):
                await self._in_thread(self._table.close)

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
        if len(given):
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
        keys = run.columns["partition"]
        kept = [n for n, key in enumerate(keys) if 0 < len(key) <= LONGEST_KEY]
        for place in (
            {*range(len(run))}.difference(kept) if len(kept) < len(run) else ()
        ):
            error = InvalidMessage(
                f"its partition key is {len(keys[place])} characters, expected 1 to"
                f" {LONGEST_KEY}",
                index=place,
            )
            async with self._settling:
                at = self.account.moved
                await self._policy.settle(error, run[place : place + 1], place=at)
        columns = {
            name: [column[n] for n in kept]
            for name, column in run.columns.items()
            if name != _OF
        }
        return AnnotatedRun([run.messages[n] for n in kept], **columns)

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
        self._check()
        for error in self._failures.values():
            raise error
        self._finished = True

    def drain(self) -> None:
        """Hand over all shards: the run is to end."""
        self._report(LeaveAsked())

    async def stop(self) -> None:
        """Hand over what is left, and return when that is done."""
        self._report(LeaveAsked())
        await self._left.wait()

    def landed(self) -> str:
        """Return how many messages the workers of this runner have loaded."""
        complete = "complete" if self._finished else "incomplete"
        loaded = counted(self.account.done, "message")
        return f"{loaded} loaded by this runner; output {complete}"

    def output(self) -> Output:
        """Return that workers have them."""
        return Output("workers", self.name)

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

    def exhaust(self, shards: Sequence[_LeasedShard]) -> None:
        """Have shards end: all of the input was read for them."""
        for shard in shards:
            shard.exhausted = True
            self._end_if_done(shard)

    @property
    def _all_over(self) -> bool:
        everything = self._over.issuperset(self._cut.names) and not self._shards
        return everything or self._refused is not None

    def _end_if_done(self, shard: _LeasedShard) -> None:
        if shard.exhausted and not (
            shard.coming or shard.gone or shard.worker.stopping
        ):
            shard.worker.finish(self._why)

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
            case Refuse(text):
                self._refuse(text)
            case Left():
                self._left.set()
            case _:
                assert_never(instruction)

    def _refuse(self, text: str) -> None:
        self._refused = StateUnusable(f"stage {self.name}: {text}")
        self._changed.set()
        self._left.set()

    async def _read(self) -> None:
        try:
            rows = await self._in_thread(self._leases.read)
        except TableGone as error:
            _log.warning("leases not read", stage=self.name, error=str(error))
            self._report(ReadFailed())
            return
        if missing := {*self._cut.names}.difference(row.shard for row in rows):
            self._refuse(f"shard {min(missing)} is gone from the lease table")
        self._over |= {row.shard for row in rows if row.ended}
        self._changed.set()
        self._report(TableRead(rows))

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
            self._over.add(after.shard)
        self._report(Written(number) if done else WriteRefused(number))

    def _news(self, before: Lease, after: Lease) -> News:
        """Return what to say of a shard, beside its lease."""
        shard, failure = self._shards.get(after.shard), self._failures.get(after.shard)
        return News(
            lag=shard.held + shard.coming if shard is not None else None,
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
        shard = _LeasedShard(lease.shard, position)
        shard.worker = ShardWorker(
            self._stage,
            Assignment(shard.name, position),
            partial(self._store, shard),
            **self._of_supervisor,
        )
        _log.info("shard taken", stage=self.name, shard=shard.name, position=position)
        try:
            await self._serve(shard)
        except EtlstageError as error:
            shard.failure = shard.failure or error
        self._end(shard)

    async def _serve(self, shard: _LeasedShard) -> None:
        async with AsyncExitStack() as stack:
            async with self._starting:
                # One at a time, for to start a process keeps leases from being renewed.
                worker = await stack.enter_async_context(shard.worker)
                await anyio.lowlevel.checkpoint()
            self._shards[shard.name] = shard
            self._changed.set()
            async with aclosing(worker.answers()) as answers:
                async for part in answers:
                    await self._book(shard, part)

    async def _book(self, shard: _LeasedShard, part: Outcome) -> None:
        """Take what became of messages of a shard."""
        count, error = len(part.messages), part.error
        if error is not None and shard.worker.stopping:
            return  # who has the shard next finds out what is wrong with them
        shard.held -= count
        if error is None:
            self.account.done += count
        elif isinstance(error, OF_A_MESSAGE):
            async with self._settling:
                place = self.account.moved
                await self._policy.settle(error, part.messages, place=place)
        else:
            shard.failure = shard.failure or error

    def _end(self, shard: _LeasedShard) -> None:
        """Let go of a shard whose worker is gone."""
        shard.gone = True
        for faults in shard.worker.faults:
            self.account.add_faults(faults)
        if shard.worker.stopping:
            shard.failure = None  # what was not committed whoever has it next gives
        else:
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
        self._report(WorkerEnded(shard.name, failed=not shard.worker.stopping))
        self._changed.set()

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
    """Reads, in passes, the records of the shards that a runner has."""

    def __init__(self, source: Source, sink: LeasedSink, cut: Cut) -> None:
        super().__init__(source.name)
        self._source = source
        self._sink = sink
        self._cut = cut

    @property
    def input(self) -> str:
        """What is read, for a human."""
        return self._source.input

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        """Yield records, each run of one shard, until no shard needs any."""
        while shards := await self._sink.wanting():
            after = min(shard.last for shard in shards)
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
        numbers = run.columns["sequence"]
        for message, number in zip(run.messages, numbers, strict=True):
            which, key = self._cut.place(message)
            shard = wanted[which]
            if shard is not None and number > shard.last:
                parts.setdefault(shard, RecordRun()).add(message, key, number)
        for shard, part in parts.items():
            shard.last = part.last
            shard.coming += len(part)
            records = part.run()
            records.columns[_OF] = [shard] * len(part)
            yield records

    async def aclose(self) -> None:
        """Release what the source holds."""
        await self._source.aclose()


class _LeasedShard:
    """
    A shard that is ours, from the start of its worker to its end.

    Args:
        name: Of the shard.
        position: What is committed of it.

    """

    worker: ShardWorker

    def __init__(self, name: str, position: object) -> None:
        self.name = name
        self.last = _number_of(position)
        """Number of the last record that was read for it, or committed."""
        self.coming = 0
        """Records that were read and are not written yet."""
        self.held = 0
        """Records that were written and have no outcome."""
        self.exhausted = self.gone = False
        self.failure: EtlstageError | None = None
        self._asked: _Asked | None = None

    @property
    def wants(self) -> bool:
        """Whether it needs input."""
        return not (self.exhausted or self.worker.stopping or self.gone)

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


class _Asked:
    """A checkpoint that was asked for."""

    def __init__(self) -> None:
        self.stored = False
        self.answered = anyio.Event()


def _number_of(position: object) -> int:
    """Return the number of the last record that a position covers; -1: of none."""
    match position:
        case [str(sequence), *_] if sequence.isdecimal():
            return int(sequence)
        case _:
            return -1  # from the beginning; its dialect leaves out what is committed
