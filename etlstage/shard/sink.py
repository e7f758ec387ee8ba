"""
Workers that commit as the sink of a pipeline, one for each shard of the input.

A message is assigned to a shard by its key, and gets a number that rises and is never
used again, in this run or another one. Each shard is committed at its own pace; the
position of the source stays before the first message that has no outcome.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from pathlib import Path
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
from etlstage.pipeline.worker_sink import FinishingSink
from etlstage.protocol.events import FarewellReason
from etlstage.shard.cut import Cut, RecordRun, number_of, position_at
from etlstage.shard.worker import ShardSink, ShardWorker
from etlstage.stage import Stage
from etlstage.supervisor import CommitRequest
from etlstage.supervisor.exchange.exchange import Outcome

__all__ = ("CHECKPOINTS_FILE", "CheckpointFile", "ShardedSink")

CHECKPOINTS_FILE: Final = "shards.json"
"""Name of the file with the checkpoints in a state directory."""
_FORMAT: Final = 1
_RESERVED: Final = 1_000_000  # numbers that are reserved in the file at once
_Failed: TypeAlias = tuple[EtlstageError, bytes]


class CheckpointFile:
    """
    The committed positions of shards, and the next unused number.

    Args:
        path: The file; None: keep them in memory.
        made: Settings that determine the shards, by name; a file of others is refused.

    """

    def __init__(self, path: Path | None, made: Mapping[str, object]) -> None:
        self._path = path
        self._made = dict(made)
        self._positions: dict[str, Any] = {}
        self._next = self._end = 1

    def open(self) -> None:
        """
        Read the file, if it exists.

        Raises:
            StateUnusable: If the file can't be read, or is of other shards.

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
                    f"the checkpoints in {path} are for shards with {name}"
                    f" {made.get(name)}, found {name} {value}: set it back, or"
                    " remove the file"
                )
        self._positions = positions

    @staticmethod
    def forget(path: Path) -> None:
        """
        Delete the positions in a file, if it exists; its numbers are not used again.

        Raises:
            StateUnusable: If the file can't be read or written.

        """
        try:
            store(path, {**load(path), "positions": {}})
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError) as error:
            raise StateUnusable(
                f"can't delete the checkpoints in {path} ({error}): make room, or remove"
                " the file; numbers that messages had may then be used again"
            ) from error

    def position(self, shard: str) -> object:
        """Return the committed position of a shard; None: it has no checkpoint."""
        return self._positions.get(shard)

    def store(self, shard: str, position: object) -> None:
        """Store the committed position of a shard; raises like :meth:`take`."""
        positions = self._positions | {shard: position}
        self._write(positions, self._end)
        # Else a refused position would be stored with that of the next shard.
        self._positions = positions

    def take(self, count: int) -> int:
        """
        Return the first of ``count`` numbers that no message has had.

        Raises:
            StateUnusable: If the file can't be written.

        """
        first, after = self._next, self._next + count
        if after > self._end:
            end = after + _RESERVED
            self._write(self._positions, end)
            self._end = end
        self._next = after
        return first

    def _write(self, positions: Mapping[str, object], end: int) -> None:
        if self._path is None:
            return
        value = {
            "format": _FORMAT,
            "made": self._made,
            "next": end,
            "positions": positions,
        }
        try:
            store(self._path, value)
        except OSError as error:
            raise StateUnusable(
                f"can't store checkpoints in {self._path}: {error.strerror}"
            ) from error


class ShardedSink(FinishingSink, ShardSink):
    """
    Divides the input into shards, and processes all of them.

    Args:
        stage: The stage; its dialect must be one of workers that commit.
        cut: How the input is divided into shards.
        checkpoints: Where committed positions are stored.
        unsorted: Whether a number that does not rise restarts its shard, with
            another worker; else its message is refused.
        settings: Passed to :class:`~etlstage.shard.worker.ShardSink`.

    """

    def __init__(
        self,
        stage: Stage,
        *,
        cut: Cut,
        checkpoints: CheckpointFile | None = None,
        unsorted: bool = False,
        **settings: Any,  # noqa: ANN401 - passed on
    ) -> None:
        super().__init__(stage, **settings)
        self._cut = cut
        self._unsorted = unsorted
        self._file = checkpoints or CheckpointFile(None, {})
        self._shards = [_Shard(name) for name in cut.names]
        self._latest = [*self._shards]  # the current one of each name
        # By place of the message in the input:
        self._settled: dict[int, _Failed | None] = {}  # outcomes, until their turn
        self._given_up: dict[int, _Failed] = {}  # to dead-letter before a checkpoint
        self._kept: dict[int, Sequence[DeadLetter]] = {}  # letters for a checkpoint
        self._first = 0  # place of the first message without an outcome
        self._waiting: anyio.CancelScope | None = None
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

    async def __aexit__(self, *_: object) -> None:
        """Stop the workers."""
        self._tasks.cancel_scope.cancel()
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            for shard in self._shards:
                for faults in shard.worker.faults if shard.worker is not None else ():
                    self.account.add_faults(faults)

    async def _live(self, shard: _Shard, *, task_status: TaskStatus[None]) -> None:
        """Run the worker of a shard, and account for the outcomes of its messages."""
        position = None if shard.restarted else self._file.position(shard.name)
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
                    self._fail(error)
            finally:
                worker.runs.close()
                shard.settled.set()
            await anyio.sleep_forever()  # until all are stopped

    def withhold(self) -> None:
        """Give the workers no more messages, even if a write waits for one."""
        self.withheld = True
        if self._waiting is not None:
            self._waiting.cancel()

    async def write(self, run: Run) -> None:
        """
        Give each worker its part of a run, once it accepts more.

        Raises:
            EtlstageError: If a shard has failed.

        """
        self._check()
        place = self.account.received
        self.account.received += len(run)
        if self.withheld:
            return
        number = 0 if self._cut.numbers else self._file.take(len(run))
        parts: dict[_Shard, RecordRun] = {}
        for at, message in enumerate(run):
            record = self._cut.record(message, number + at)
            shard = self._latest[record.shard]
            if self._unsorted and not record.wrong and record.number <= shard.last:
                await self._give(parts)
                parts = {}
                await self._end_shard(record.shard)
                if self.withheld:
                    return
                shard = await self._restart(record.shard)
            if wrong := self._cut.wrong(record, place + at, shard.last):
                self._settled[place + at] = InvalidMessage(wrong, index=at), message
                continue
            shard.last = record.number
            shard.places.append(place + at)
            parts.setdefault(shard, RecordRun()).add(message, record)
        await self._give(parts)
        await self._advance()

    async def _give(self, parts: Mapping[_Shard, RecordRun]) -> None:
        for shard, part in parts.items():
            shard.known += part.up_to(shard.begin)
            assert shard.worker is not None, "it is started"
            # A worker that has failed takes no more.
            with (
                suppress(anyio.BrokenResourceError, anyio.ClosedResourceError),
                self._until_withheld(),
            ):
                await shard.worker.runs.send(part.run())
            self._check()

    @contextmanager
    def _until_withheld(self) -> Iterator[None]:
        with anyio.CancelScope() as self._waiting:
            if self.withheld:
                self._waiting.cancel()
            yield

    async def _end_shard(self, place: int) -> None:
        """Return once the worker of a shard has committed all that it was given."""
        shard = self._latest[place]
        assert shard.worker is not None, "it is started"
        shard.worker.finish(self._why)
        with self._until_withheld():
            await shard.settled.wait()
        self._check()

    async def _restart(self, place: int) -> _Shard:
        """Start another worker for a shard that has ended, from its beginning."""
        name = self._cut.names[place]
        shard = self._latest[place] = _Shard(name, restarted=True)
        self._shards.append(shard)
        await self._tasks.start(self._live, shard)
        return shard

    async def _store(self, shard: _Shard, request: CommitRequest) -> None:
        position = request.position
        last = max(shard.last, number_of(self._file.position(shard.name)))
        if request.ended or number_of(position) > last:
            # If the end itself were stored, or a number after it, the next run would
            # give the shard nothing.
            if last < 0:
                return
            position = position_at(last)
        try:
            await self._keep_given_up()
        except EtlstageError as error:
            self._fail(error)
            assert shard.worker is not None, "it commits"
            self._tasks.start_soon(shard.worker.stop, FarewellReason.LOST)
            raise
        self._file.store(shard.name, position)

    def _note_given_up(self, shard: _Shard, outcome: Outcome) -> None:
        assert shard.worker is not None, "it had these messages"
        assert outcome.error is not None, "they have failed"
        first = outcome.start - shard.worker.yielded
        places = [shard.places[first + at] for at in range(len(outcome.messages))]
        shard.given_up[id(outcome.error)] = places
        for place, message in zip(places, outcome.messages, strict=True):
            self._given_up[place] = outcome.error, message

    async def _keep_given_up(self) -> None:
        """Dead-letter durably what the next run would not deliver again."""
        if self._given_up:
            async with self._settling:
                for place, (error, message) in sorted(self._given_up.items()):
                    letters = await self._policy.keep(error, [message], place=place)
                    self._kept[place] = letters
                    del self._given_up[place]
        await self._sync_letters()

    def _note(self, shard: _Shard, messages: Run, error: EtlstageError | None) -> None:
        """
        Record the outcome of a shard's oldest open messages.

        Messages that were given up may be yielded before older ones that another worker
        is to commit, so their places are looked up.
        """
        assert shard.worker is not None, "it has answered"
        stopping = shard.worker.stopping
        if error is not None and not stopping and not isinstance(error, OF_A_MESSAGE):
            self._fail(error)
            return
        known = shard.given_up.pop(id(error), None)
        for at, message in enumerate(messages):
            place = shard.places[0] if known is None else known[at]
            shard.places.remove(place)
            if error is None:
                self._settled[place] = None
            elif not stopping or place in self._kept:
                self._settled[place] = error, message
            # Otherwise the next run delivers the message again.

    async def _advance(self) -> None:
        """Account for messages with outcomes, up to the first that has none."""
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

    async def _finish(self, why: FarewellReason) -> None:
        for shard in self._shards:
            if shard.worker is not None:
                shard.worker.finish(why)
            self._log_omitted(shard.name, shard.known, shard.begin)
        for shard in self._shards:
            await shard.settled.wait()

    async def _stop(self) -> None:
        async with anyio.create_task_group() as tasks:
            for shard in self._shards:
                if shard.worker is not None:
                    tasks.start_soon(shard.worker.stop, FarewellReason.DRAIN)
        for shard in self._shards:
            await shard.settled.wait()

    def landed(self) -> str:
        """Describe how many messages the workers have loaded."""
        return self._loaded(f"in {counted(len(self._latest), 'shard')}")


class _Shard:
    """A part of the input, and its worker."""

    def __init__(self, name: str, *, restarted: bool = False) -> None:
        self.name = name
        self.restarted = restarted  # ignoring what is committed
        self.worker: ShardWorker | None = None
        self.places: deque[int] = deque()  # of open messages
        self.given_up: dict[int, list[int]] = {}  # places, by the id() of their error
        self.last = -1  # number of the last message that it was given
        self.begin = -1  # number up to which it was committed by an earlier run
        self.known = 0  # messages that were committed by an earlier run
        self.settled = anyio.Event()
