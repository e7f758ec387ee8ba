"""
Workers that commit as the sink of a pipeline, one for each shard of the input.

A message falls to a shard by its key, and gets a number that rises and is never used
again, in this run or another one. Shards are committed each in its own time; the
position of the source follows the first message of all that is not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

import anyio
from anyio.abc import TaskGroup, TaskStatus

from etlstage.errors import (
    EtlstageError,
    InvalidMessage,
    StateUnusable,
)
from etlstage.messages import Run, counted
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.dead_letter.policy import OF_A_MESSAGE
from etlstage.pipeline.delivery.position import load, store
from etlstage.protocol.events import FarewellReason
from etlstage.shard.cut import Cut, RecordRun, number_of
from etlstage.shard.worker import ShardSink, ShardWorker
from etlstage.stage import Stage
from etlstage.supervisor import CommitRequest
from etlstage.supervisor.exchange.exchange import Outcome
from etlstage.telemetry.log import Log

__all__ = ("CheckpointFile", "ShardedSink")

_log = Log()

_FORMAT: Final = 1
_RESERVED: Final = 1_000_000  # numbers that are taken from the file at once
_Failed: TypeAlias = tuple[EtlstageError, bytes]


class CheckpointFile:
    """
    Where shards are committed up to, and which numbers have been used.

    Args:
        path: The file; None: it is kept in memory.
        made: What makes the shards what they are, by setting: another file is refused.

    """

    def __init__(self, path: Path | None, made: Mapping[str, object]) -> None:
        self._path = path
        self._made = dict(made)
        self._positions: dict[str, Any] = {}
        self._next = self._end = 1

    def open(self) -> None:
        """
        Read it.

        Raises:
            StateUnusable: If it can't be read, or is of other shards.

        """
        path = self._path
        if path is None or not path.exists():
            return
        try:
            found = load(path)
            made, positions = dict(found["made"]), dict(found["positions"])
            self._next = self._end = int(found["next"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StateUnusable(f"can't read the checkpoints in {path}: {error}") from (
                error
            )
        if found.get("format") != _FORMAT:
            raise StateUnusable(
                f"the checkpoints in {path} have format {found.get('format')}, expected"
                f" {_FORMAT}: another version of etlstage wrote them"
            )
        for name, value in self._made.items():
            if made.get(name) != value:
                raise StateUnusable(
                    f"the checkpoints in {path} are of shards with {name}"
                    f" {made.get(name)}, found {name} {value}: set it as it was, or"
                    " remove the file"
                )
        self._positions = positions

    def position(self, shard: str) -> object:
        """Return up to where a shard is committed; None: it has no checkpoint."""
        return self._positions.get(shard)

    def store(self, shard: str, position: object) -> None:
        """Store that a shard is committed up to there; raises as :meth:`take`."""
        self._positions[shard] = position
        self._write()

    def take(self, count: int) -> int:
        """
        Return the first of so many numbers that no message has had.

        Raises:
            StateUnusable: If the file can't be written.

        """
        first, self._next = self._next, self._next + count
        if self._next > self._end:
            self._end = self._next + _RESERVED
            self._write()
        return first

    def _write(self) -> None:
        if self._path is None:
            return
        value = {
            "format": _FORMAT,
            "made": self._made,
            "next": self._end,
            "positions": self._positions,
        }
        try:
            store(self._path, value)
        except OSError as error:
            raise StateUnusable(
                f"can't store checkpoints in {self._path}: {error.strerror}"
            ) from error


class ShardedSink(ShardSink):
    """
    Cuts the input into shards, all of which are its own.

    Args:
        stage: The stage; its dialect is of workers that commit.
        cut: How the input is cut into them.
        checkpoints: Where it is stored how far shards are committed.
        settings: As :class:`~etlstage.shard.worker.ShardSink` has them.

    """

    def __init__(
        self,
        stage: Stage,
        *,
        cut: Cut,
        checkpoints: CheckpointFile | None = None,
        **settings: Any,  # noqa: ANN401 - passed on
    ) -> None:
        super().__init__(stage, **settings)
        self._cut = cut
        self._file = checkpoints or CheckpointFile(None, {})
        self._shards = [_Shard(name) for name in cut.names]
        self._settled: dict[int, _Failed | None] = {}  # ahead of the first that is not
        self._given_up: dict[int, _Failed] = {}  # what is yielded in its turn, by place
        self._kept: dict[int, Sequence[DeadLetter]] = {}  # of these, for a checkpoint
        self._first = 0  # message of all that is not settled
        self._failure: EtlstageError | None = None
        self._finishing = False
        self.withheld: bool = False
        self._tasks: TaskGroup

    async def __aenter__(self) -> Self:
        """Start a worker for each shard."""
        self._file.open()
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        try:
            for shard in self._shards:
                await self._tasks.start(self._live, shard)
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the workers."""
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)
        for shard in self._shards:
            for faults in shard.worker.faults if shard.worker is not None else ():
                self.account.add_faults(faults)

    async def _live(self, shard: _Shard, *, task_status: TaskStatus[None]) -> None:
        """Have the worker of a shard, and book what becomes of its messages."""
        position = self._file.position(shard.name)
        shard.begin = number_of(position)
        shard.worker = self._worker(
            shard.name,
            position,
            partial(self._store, shard),
            partial(self._note_given_up, shard),
        )
        async with shard.worker as worker:
            task_status.started()
            try:
                async with aclosing(worker.answers()) as answers:
                    async for part in answers:
                        self._note(shard, part.messages, part.error)
                        await self._advance()
            except EtlstageError as error:
                if not worker.stopping:
                    self._failure = self._failure or error
            finally:
                worker.runs.close()
                shard.settled.set()
            await anyio.sleep_forever()  # until all are stopped

    async def write(self, run: Run) -> None:
        """
        Have the workers take a run, each its part, when they may be given more.

        Raises:
            EtlstageError: If a shard has failed.

        """
        self._check()
        place = self.account.received
        self.account.received += len(run)
        number = 0 if self._cut.numbers else self._file.take(len(run))
        parts: dict[_Shard, RecordRun] = {}
        for at, message in enumerate(run):
            record = self._cut.record(message, number + at)
            shard = self._shards[record.shard]
            if wrong := self._cut.wrong(record, place + at, shard.last):
                self._settled[place + at] = InvalidMessage(wrong, index=at), message
                continue
            shard.last = record.number
            shard.places.append(place + at)
            parts.setdefault(shard, RecordRun()).add(message, record)
        for shard, part in parts.items():
            shard.known += part.up_to(shard.begin)
            assert shard.worker is not None, "it is started"
            # One that has failed takes no more.
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                await shard.worker.runs.send(part.run())
            self._check()
        await self._advance()

    async def _store(self, shard: _Shard, request: CommitRequest) -> None:
        # Behind the end of a shard nothing would be given in the next run.
        if request.ended:
            return
        try:
            await self._keep_given_up()
        except EtlstageError as error:
            self._failure = self._failure or error
            assert shard.worker is not None, "it commits"
            self._tasks.start_soon(shard.worker.stop, FarewellReason.LOST)
            raise
        self._file.store(shard.name, request.position)

    def _note_given_up(self, shard: _Shard, outcome: Outcome) -> None:
        assert shard.worker is not None, "it had these messages"
        assert outcome.error is not None, "they have failed"
        first = outcome.start - shard.worker.yielded
        places = [shard.places[first + at] for at in range(len(outcome.messages))]
        shard.given_up[id(outcome.error)] = places
        for place, message in zip(places, outcome.messages, strict=True):
            self._given_up[place] = outcome.error, message

    async def _keep_given_up(self) -> None:
        """Dead-letter, durably, what no shard would be given in the next run."""
        if self._given_up:
            async with self._settling:
                for place, (error, message) in sorted(self._given_up.items()):
                    letters = await self._policy.keep(error, [message], place=place)
                    self._kept[place] = letters
                    del self._given_up[place]
        await self._sync_letters()

    def _note(self, shard: _Shard, messages: Run, error: EtlstageError | None) -> None:
        """
        Take what became of messages of a shard, the oldest that are open.

        What was given up is yielded in front of what another worker is to commit, too.
        """
        assert shard.worker is not None, "it has answered"
        stopping = shard.worker.stopping
        if error is not None and not stopping and not isinstance(error, OF_A_MESSAGE):
            self._failure = self._failure or error
            return
        known = shard.given_up.pop(id(error), None)
        for at, message in enumerate(messages):
            place = shard.places[0] if known is None else known[at]
            shard.places.remove(place)
            if error is None:
                self._settled[place] = None
            elif not stopping or place in self._kept:
                self._settled[place] = error, message
            # Else the next run gives it again.

    async def _advance(self) -> None:
        """Book what has an outcome, up to the first message that has none."""
        async with self._settling:
            while self._first in self._settled:
                failed = self._settled.pop(self._first)
                self._first += 1
                if failed is None:
                    self.account.done += 1
                    continue
                place = self._first - 1
                self._given_up.pop(place, None)
                if (letters := self._kept.pop(place, None)) is not None:
                    self._policy.count(letters)
                else:
                    error, message = failed
                    await self._policy.settle(error, [message], place=place)

    async def flush(self) -> None:
        """Make nothing durable: when they commit is the workers' decision."""
        self._check()

    async def finish(self) -> None:
        """
        End the input of all shards, and wait for what is committed then.

        Raises:
            NotCommitted: If not all is committed that was answered.

        """
        for shard in self._shards:
            if shard.worker is not None:
                shard.worker.finish(self._why)
        self._finishing = True
        for shard in self._shards:
            await shard.settled.wait()
        self._check()
        self._finished = not self.withheld
        for shard in self._shards:
            if shard.known:
                _log.info(
                    "records left out that an earlier run has committed",
                    stage=self.name,
                    shard=shard.name,
                    records=shard.known,
                    checkpoint=shard.begin,
                )

    def drain(self) -> None:
        """End the workers, should only they be waited for."""
        if self._finishing:
            self.withheld = True
            self._stop_in(self._tasks)

    async def stop(self) -> None:
        """End the workers; what they do not commit then, the next run gives again."""
        async with anyio.create_task_group() as tasks:
            self._stop_in(tasks)
        for shard in self._shards:
            await shard.settled.wait()
        self._check()
        if self._first < self.account.received:
            self.withheld = True

    def _stop_in(self, tasks: TaskGroup) -> None:
        for shard in self._shards:
            if shard.worker is not None:
                tasks.start_soon(shard.worker.stop, FarewellReason.DRAIN)

    def landed(self) -> str:
        """Return how many messages the workers have loaded."""
        return self._loaded(f"in {counted(len(self._shards), 'shard')}")

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure


class _Shard:
    """A part of the input, and its worker."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.worker: ShardWorker | None = None
        self.places: deque[int] = deque()  # of its messages that are open
        self.given_up: dict[int, list[int]] = {}  # of these, by the id() of their error
        self.last = -1  # number of the last message that it was given
        self.begin = -1  # number up to which it was committed before
        self.known = 0  # messages that were committed before
        self.settled = anyio.Event()
