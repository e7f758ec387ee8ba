"""
Load workers whose messages become final epoch by epoch, by programs of the user's.

All workers of an epoch are started for it and have ended before it is committed, so
that none of them holds anything back: what they load they keep apart, under the names
that ``ETLSTAGE_EPOCH`` and ``ETLSTAGE_ATTEMPT`` have for them. ``commit`` makes it
final. ``abort`` undoes an epoch, whether it is apart or final by now: it is run for the
first that is not on record, before anything is loaded. An epoch is called the same each
time that it is loaded, an attempt never: what one keeps apart that was taken over
is dropped. A run that was taken over starts none of these programs any more; one that
is under way by then knows by ``ETLSTAGE_FENCE`` whether another has come since.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Self

import anyio
from anyio.abc import TaskGroup, TaskStatus

from etlstage.errors import EtlstageError, SinkFailed
from etlstage.messages import Run
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.interfaces import Epochs
from etlstage.pipeline.worker_sink import WorkerSink, check_ends, tell
from etlstage.stage import RestartPolicy, Stage
from etlstage.supervisor import AsyncSupervisor
from etlstage.telemetry import Meter
from etlstage.transport import Launch, launch_worker

__all__ = ("EpochSink",)


class EpochSink(WorkerSink):
    """
    Loads with workers, and has programs commit.

    A program is a worker, too, that speaks as those do: it is given a JSON message with
    ``epoch``, ``attempt``, ``fence`` and ``messages``, answers when it has done it, and
    ends with status 0. It has the epoch as its last argument, and in its environment
    what the workers have.

    Args:
        stage: The stage.
        commit: Makes final what was loaded in an epoch.
        abort: Undoes an epoch, also one that is final, or was never begun.
        dead_letters: Where messages go that the workers can't load; None:
            the first one ends the run.
        meter: Where to count what happens, see :mod:`etlstage.telemetry`.
        launch: What starts the workers; by default what their dialect asks for.

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
        self._check: Callable[[], None] = _alone
        self._attempt = secrets.token_hex(4)
        self._open = False
        self._answered = 0
        self._tasks: TaskGroup
        self._ended: anyio.Event
        self._closed: anyio.Event

    def begin(self, epochs: Epochs) -> None:
        """Record what was loaded before."""
        self._load, self._number = epochs.load, epochs.done + 1
        self._fence, self._check = epochs.start, epochs.check

    async def __aenter__(self) -> Self:
        """
        Undo what a start that was interrupted has left.

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
        """Stop the workers; what they have kept apart the next start undoes."""
        if error is not None:
            self._tasks.cancel_scope.cancel()
        elif self._open:
            await self._end_workers()
        # The error that ended the run is raised by the caller.
        with suppress(anyio.get_cancelled_exc_class()):
            await self._tasks.__aexit__(None, None, None)

    async def write(self, run: Run) -> None:
        """Pass a run through the workers; return when all of it is answered."""
        if not self._open:
            await self._tasks.start(self._work)
        done = self.account.done
        try:
            await super().write(run)
        finally:
            # What is kept apart is not loaded yet.
            self._answered += self.account.done - done
            self.account.done = done

    async def flush(self) -> None:
        """
        End the epoch, and have it committed.

        Raises:
            SinkFailed: If a worker or the program ends badly, or that does not answer.
            StateUnusable: If another run has taken over.

        """
        if self._open:
            await self._end_workers()
            await self._tell("commit", self._commit)
        self.account.done += self._answered
        self._answered = 0
        self._number += 1

    async def finish(self) -> None:
        """Flush, and record that the input was complete; raises as :meth:`flush`."""
        await self.flush()
        await super().finish()

    async def _work(self, *, task_status: TaskStatus[None]) -> None:
        # In a task of its own: an epoch may end in another than it began in.
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
            self._book()
            self._closed.set()

    async def _end_workers(self) -> None:
        with self.supervisor.events() as events:
            self._ended.set()
            await self._closed.wait()
            await check_ends(self.name, events)
        if (doubt := self.supervisor.doubt) is not None:
            raise doubt

    async def _tell(self, what: str, command: tuple[str, ...]) -> None:
        self._check()  # workers may have taken their time to end
        epoch = f"{self._load}-{self._number}"
        about = {
            "epoch": epoch,
            "attempt": self._attempt,
            "fence": self._fence,
            "messages": self._answered,
        }
        of_epoch = self._of_epoch(self._stage)
        stage = replace(
            of_epoch,
            worker=replace(of_epoch.program, command=(*command, epoch)),
            dialect=self._stage.dialect.fitted(batches=False, heartbeat=None),
            workers=1,
            restart=RestartPolicy(),
        )
        try:
            await tell(stage, [json.dumps(about).encode()], launch=self._launch)
        except EtlstageError as error:
            raise SinkFailed(
                f"{self.name}: {what} of epoch {epoch} failed: {error}",
                stage=self.name,
            ) from error

    def _of_epoch(self, stage: Stage) -> Stage:
        """Return a stage whose workers know the epoch."""
        about = {
            "ETLSTAGE_EPOCH": f"{self._load}-{self._number}",
            "ETLSTAGE_ATTEMPT": self._attempt,
            "ETLSTAGE_FENCE": f"{self._fence}",
        }
        return replace(
            stage, worker=replace(stage.program, env={**stage.program.env, **about})
        )


def _alone() -> None:
    """Do nothing: without a state directory no run can take over."""
