"""
Load workers whose messages become final epoch by epoch, through programs of the user.

All workers of an epoch are started for it and have exited before it is committed, so
that none of them holds anything back. They store what they load separately, under the
names in ``ETLSTAGE_EPOCH`` and ``ETLSTAGE_ATTEMPT``. ``commit`` makes it final.
``abort`` undoes an epoch, whether it is still separate or already final: it is run for
the first epoch that is not on record, before anything is loaded. An epoch has the same
name each time it is loaded; an attempt always has a new one. What an attempt of a run
that was taken over has stored separately is dropped.

A worker that is lost with a message unanswered may have stored that message, in part or
in whole, and so may a worker that rejects a batch after processing a part of it. Such
messages are tried again. What a worker has answered it may store as late as at its end,
so one that fails may not have stored it. In each case the attempt is undone, and
everything that was answered in it is loaded in another attempt; the messages of an
epoch are kept for that.

A run that was taken over starts none of these programs any more; a program that is
running by then can tell by ``ETLSTAGE_FENCE`` whether another run has come since.
"""

from __future__ import annotations

import json
import pickle
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import IO, Final, Self

import anyio
from anyio.abc import TaskGroup, TaskStatus

from etlstage.errors import EtlstageError, SinkFailed, os_reason
from etlstage.messages import AnnotatedRun, Run
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.interfaces import Epochs, unfenced
from etlstage.pipeline.worker_sink import WorkerSink, check_ends, tell
from etlstage.stage import Stage
from etlstage.supervisor import AsyncSupervisor
from etlstage.telemetry import Meter
from etlstage.telemetry.log import Log
from etlstage.transport import Launch, launch_worker

__all__ = ("EpochSink",)

_log = Log()

_IN_MEMORY: Final = 16 * 1024 * 1024  # bytes of an epoch's messages kept in memory


class EpochSink(WorkerSink):
    """
    Loads with workers, and commits with programs.

    A program uses the protocol of the workers: it is given a JSON message with
    ``epoch``, ``attempt``, ``fence`` and ``messages``, answers when it is done, and
    exits with status 0. Its last argument is the epoch, and its environment is that of
    the workers.

    Args:
        stage: The stage.
        commit: Command that makes final what was loaded in an epoch.
        abort: Command that undoes an epoch, even if it is final, or was never begun.
        dead_letters: Where to keep messages that the workers can't load; None: the
            first such message ends the run.
        meter: Counts what happens, see :mod:`etlstage.telemetry`.
        launch: Starts the workers; by default, as their dialect requires.

    """

    def __init__(
        self,
        stage: Stage,
        *,
        commit: Sequence[str],
        abort: Sequence[str],
        dead_letters: DeadLetters | None = None,
        meter: Meter | None = None,
        launch: Launch = launch_worker,
    ) -> None:
        super().__init__(stage, dead_letters=dead_letters, meter=meter, launch=launch)
        self._stage = stage
        self._commit = tuple(commit)
        self._abort = tuple(abort)
        self._meter = meter
        self._launch = launch
        self._load = ""
        self._number = 1
        self._fence = 0
        self._check: Callable[[], None] = unfenced
        self._attempt = secrets.token_hex(4)
        self._open = False
        self._answered = 0
        self._kept = _EpochMessages(stage.name)
        self._tasks: TaskGroup
        self._ended: anyio.Event
        self._closed: anyio.Event

    def begin(self, epochs: Epochs) -> None:
        """Take over the record of what was loaded before."""
        self._load, self._number = epochs.load, epochs.done + 1
        self._fence, self._check = epochs.start, epochs.check

    async def __aenter__(self) -> Self:
        """
        Undo what an interrupted start has left.

        Raises:
            SinkFailed: If the program does not answer, or ends badly.
            StateUnusable: If another run has taken over.

        """
        await self._tell("abort", self._abort)
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the workers; the next start undoes what they have stored separately."""
        try:
            if error is not None:
                self._tasks.cancel_scope.cancel()
            elif self._open:
                await self._end_workers()
        finally:
            self._kept.clear()
            # The error that ended the run is raised by the caller.
            with suppress(anyio.get_cancelled_exc_class()):
                await self._tasks.__aexit__(None, None, None)

    def withhold(self) -> None:
        """Give the workers, if an epoch is open, no more messages."""
        self.withheld = True
        if self._open:
            self.supervisor.withhold()

    async def write(self, run: Run) -> None:
        """
        Pass a run through the workers; return when all of it is answered.

        Raises:
            SinkFailed: If the run can't be kept for another attempt.

        """
        if self.withheld:
            await super().write(run)
            return
        place = self.account.received
        self.account.received += len(run)
        self._kept.add(place, run)
        if self._open and self._in_vain:
            return
        if not self._open:
            await self._tasks.start(self._work)
        await self._settle([run], place)

    def _book_done(self, count: int) -> None:
        # What the workers store separately is not loaded yet.
        self._answered += count

    def _book_dead(self, places: range) -> None:
        self._kept.drop(places)

    @property
    def _in_vain(self) -> bool:
        """Whether this attempt will be undone, whatever it still loads."""
        return self.supervisor.unknown_outcomes > 0

    async def flush(self) -> None:
        """
        End the epoch, and have it committed.

        Raises:
            SinkFailed: If a worker or the program ends badly, or the program does not
                answer; or if more attempts than ``restart.max`` were undone.
            StateUnusable: If another run has taken over.

        """
        if self._open:
            tries = 1
            while not await self._end_workers():
                await self._load_again(tries)
                tries += 1
            await self._tell("commit", self._commit)
            self.account.skipped += self.supervisor.skipped
        self.account.done += self._answered
        self._answered = 0
        self._kept.clear()
        self._number += 1

    async def finish(self) -> None:
        """Flush, and record that the input was complete; raises like :meth:`flush`."""
        await self.flush()
        await super().finish()

    async def stop(self) -> None:
        """Do nothing: the end of an epoch, if one was open, has ended the workers."""

    async def _work(self, *, task_status: TaskStatus[None]) -> None:
        # In a task of its own: an epoch may begin in one task and end in another.
        self.supervisor: AsyncSupervisor = AsyncSupervisor(
            self._of_epoch(self._stage), meter=self._meter, launch=self._launch
        )
        self._ended, self._closed = anyio.Event(), anyio.Event()
        try:
            async with self.supervisor:
                self._open = True
                task_status.started()
                await self._ended.wait()
        finally:
            self._open = False
            self._book(again=self._in_vain)
            self._closed.set()

    async def _end_workers(self) -> bool:
        """End the workers of this attempt; return whether the attempt is whole."""
        with self.supervisor.events() as events:
            self._ended.set()
            await self._closed.wait()
            if self._in_vain:
                return False
            await check_ends(self.name, events)
        if (doubt := self.supervisor.doubt) is not None:
            raise doubt
        return True

    async def _load_again(self, tries: int) -> None:
        """Undo the attempt, the ``tries``-th, and load its messages in another one."""
        most = self._stage.restart.max
        if tries > most:
            raise SinkFailed(
                f"{self.name}: epoch {self._epoch} was loaded {tries} times, and each"
                " time a worker was lost, or rejected a batch, so that messages may have"
                f" been stored twice, or not at all; restart.max is {most}",
                stage=self.name,
            )
        _log.warning(
            "epoch is loaded again: a worker was lost, or rejected a batch",
            stage=self.name,
            epoch=self._epoch,
            messages=self.supervisor.unknown_outcomes,
        )
        await self._tell("abort", self._abort)
        self._attempt = secrets.token_hex(4)
        self._answered = 0
        await self._tasks.start(self._work)
        for place, run in self._kept:
            await self._settle([run], place)

    async def _tell(self, what: str, command: tuple[str, ...]) -> None:
        self._check()  # another run may have taken over while workers ended
        epoch = self._epoch
        about = {
            "epoch": epoch,
            "attempt": self._attempt,
            "fence": self._fence,
            "messages": self._answered,
        }
        stage, messages = self._of_epoch(self._stage), [json.dumps(about).encode()]
        try:
            await tell(stage, (*command, epoch), messages, launch=self._launch)
        except EtlstageError as error:
            raise SinkFailed(
                f"{self.name}: {what} of epoch {epoch} failed: {error}",
                stage=self.name,
            ) from error

    @property
    def _epoch(self) -> str:
        return f"{self._load}-{self._number}"

    def _of_epoch(self, stage: Stage) -> Stage:
        """Return a stage whose workers know the epoch."""
        about = {
            "ETLSTAGE_EPOCH": self._epoch,
            "ETLSTAGE_ATTEMPT": self._attempt,
            "ETLSTAGE_FENCE": f"{self._fence}",
        }
        return replace(
            stage, worker=replace(stage.program, env={**stage.program.env, **about})
        )


class _EpochMessages:
    """The messages of an epoch with their places, except dead-lettered ones."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._file: IO[bytes] | None = None
        self._dead: set[int] = set()

    def add(self, place: int, run: Run) -> None:
        """Keep a run and its first message's place; raises SinkFailed without room."""
        if self._file is None:
            self._file = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115 - see clear
        # A slice of an Arrow array would be pickled with the whole array.
        messages: Run = [*run]
        if isinstance(run, AnnotatedRun):
            messages = AnnotatedRun(messages, **run.columns)
        try:
            pickle.dump((place, messages), self._file)
            # Else a full disk is found when the messages are read.
            self._file.flush()
        except OSError as error:
            raise SinkFailed(
                f"{self._stage}: can't keep the messages of an epoch in"
                f" {tempfile.gettempdir()}: {os_reason(error)}; set TMPDIR to a folder"
                " with room for them",
                stage=self._stage,
            ) from error

    def drop(self, places: range) -> None:
        """Leave out the messages at these places from now on."""
        self._dead.update(places)

    def __iter__(self) -> Iterator[tuple[int, Run]]:
        """Yield the runs in order, in pieces where messages are left out."""
        assert self._file is not None, "an attempt has messages"
        end = self._file.tell()
        self._file.seek(0)
        while self._file.tell() < end:
            place, run = pickle.load(self._file)  # noqa: S301 - our own unnamed file
            at = place
            # Messages dead-lettered while a piece is loaded again belong to that piece.
            for dead in sorted(self._dead & {*range(place, place + len(run))}):
                if at < dead:
                    yield at, run[at - place : dead - place]
                at = dead + 1
            if at < place + len(run):
                yield at, run[at - place :]

    def clear(self) -> None:
        """Forget the messages."""
        self._dead.clear()
        if self._file is not None:
            with suppress(OSError):  # what could not be written is not needed
                self._file.close()
            self._file = None
