"""
One start of a worker: its process, the connection to it, and what becomes of both.

``child.py`` sees the process to its end, ``connection.py`` talks to it. Here is what
is told to the pool, and whom the end of a worker is blamed on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Final, Protocol

import anyio

from etlstage.errors import (
    Attempt,
    EtlstageError,
    FailureCause,
    StageFailed,
    WorkerLost,
)
from etlstage.messages import StageKind, counted
from etlstage.protocol.base import Shape
from etlstage.stage.stage import Stage
from etlstage.supervisor.child import ChildProcess
from etlstage.supervisor.connection import Connection
from etlstage.supervisor.diagnostic import StatusReader
from etlstage.supervisor.exchange.backlog import Backlog
from etlstage.supervisor.exchange.retry import Loss
from etlstage.supervisor.lifecycle.events import (
    AliveSeen,
    Event,
    RemainsEnded,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
    WorkerSilent,
)
from etlstage.telemetry import StageMetrics
from etlstage.transport import Launch, Readable

__all__ = ("Owner", "RunningWorker")

_CHUNK: Final = 4096  # bytes of its status a read
_TURN: Final = 16  # reads in a row


class Owner(Protocol):
    """What a running worker needs of the pool that it belongs to."""

    stage: Stage
    backlog: Backlog
    metrics: StageMetrics | None
    launch: Launch

    def handle(self, event: Event) -> None:
        """Take note of what happened, and act upon it."""
        ...

    def tell(self, event: WorkerSilent) -> None:
        """Tell the host what concerns nobody here."""
        ...

    def story(self, worker: str) -> tuple[str, ...]:
        """Return the last things that happened to a worker."""
        ...

    def commit(self, position: object, answer: Callable[[str | None], None]) -> None:
        """Have a position stored, then call ``answer``, with the error if it failed."""
        ...

    def count(self, worker: str, counts: Mapping[str, int]) -> None:
        """Add what a worker has counted, by name of the metric."""
        ...

    @property
    def stopping(self) -> bool:
        """Whether messages that are lost now are tried no more."""
        ...

    @property
    def forced(self) -> bool:
        """Whether workers are stopped without the time to end by themselves."""
        ...


class RunningWorker:
    """
    Starts one worker, and serves it until it is gone.

    Args:
        owner: The pool.
        name: Of the worker, such as ``clean-1``.
        number: Of the worker, from 0.
        start: How often it was started, this time included.
        max_messages: Messages after which it is worn.

    Raises:
        WorkerStartFailed: If the program can't be run.

    """

    def __init__(
        self,
        owner: Owner,
        name: str,
        *,
        number: int = 0,
        start: int = 1,
        max_messages: float = math.inf,
    ) -> None:
        self._owner = owner
        self._stage = stage = owner.stage
        metrics = owner.metrics
        self._streams = stage.dialect.shape is Shape.STREAM
        self.name = name
        self.start = start
        self._worker = ChildProcess(
            stage,
            name,
            owner.launch,
            start=start,
            stdin=not self._streams,
            farewell=self._say_farewell,
            unmet=lambda: self.connection.unmet,
            story=partial(owner.story, name),
            counted=partial(metrics.stderr_lines, name) if metrics else None,
        )
        self.pid: int = self._worker.child.pid
        self.connection: Connection = Connection(
            self,
            stage,
            owner.backlog,
            self._worker.wire,
            metrics,
            number=number,
            max_messages=max_messages,
        )
        self._open = False  # it is given messages
        self._told_to_stop = False
        self._all_read = False
        self._late = 0  # bytes that had come too late at its end
        self._closed = ""  # the pipe that the worker closed first
        self._ignored = False  # it had read nothing of what it did not answer
        self._reason = ""  # why it is of no more use, as a part of a sentence
        self._blame: EtlstageError | None = None  # how it broke the protocol
        self._doubted = False  # what it has answered may not be loaded
        self._announced = not stage.program.ready
        self._status = StatusReader()
        self.ended: bool = False
        """Its end was told; what it has left behind may live."""
        self.error: EtlstageError | None = None
        """Why the worker is of no more use, unless it was told to stop."""

    def __repr__(self) -> str:
        return f"<RunningWorker {self._worker!r} owed={self.connection.owed}>"

    @property
    def usable(self) -> bool:
        """Whether the worker may be given messages."""
        return self._open and self.error is None and not self._worker.told

    @property
    def failed(self) -> bool:
        """Whether it was at fault, or is gone: what is written then is no reply."""
        return self.error is not None or self.ended

    @property
    def exited(self) -> bool:
        """Whether its process is gone."""
        return self._worker.exited.is_set()

    def open(self) -> None:
        """Give the worker messages from now on."""
        self._open = True
        self.connection.pump_all(anyio.current_time())

    def stop(self, *, patient: bool = True) -> None:
        """Let :meth:`run` stop the worker, but not what it has left behind."""
        self._told_to_stop = True
        if self.exited:
            return
        # In the middle of a round there is nothing that it could finish.
        extracts = self._stage.kind is StageKind.EXTRACT
        busy = extracts and self.connection.dispatch.busy
        self.connection.stop_verifying()
        self._worker.stop(patient=patient and not busy)

    def hurry(self) -> None:
        """Let :meth:`run` wait no more for what the worker has left behind."""
        self._worker.stop(patient=False)

    def broke(self, pipe: str) -> None:
        """Take note that the worker closed a pipe; it is stopped if it does not exit."""
        if not self._worker.told or pipe == "stdin":
            self._closed = self._closed or pipe
        # Its exit follows, or else it is told to; replies may still come.
        self._worker.stop()

    def fail(
        self,
        reason: str,
        cause: FailureCause,
        blame: EtlstageError | None = None,
    ) -> None:
        """
        Declare the worker at fault.

        Args:
            reason: What it did, as a part of a sentence.
            cause: The same in a word.
            blame: How it broke the protocol, if it did.

        """
        if self.error is not None:
            return
        if cause == "start" and self._stage.dialect.announces:
            received = self.connection.patience.received
            reason += f": it {self._stage.dialect.unready(received)}"
        self._ignored = cause == "silent" and self.connection.unread(
            self._worker.wire.unread()
        )
        self._reason, self._blame = self._worker.beside(reason), blame
        self.error = self._describe(0)
        self.connection.stop_verifying()
        self._owner.handle(WorkerFailed(self.name, self.pid, self.error, cause))

    def handle(self, event: Event) -> None:
        """Take note of what happened, and act upon it."""
        self._owner.handle(event)

    def despair(self, reason: str) -> None:
        """End all that is submitted: nobody waits for another worker."""
        name = self._stage.name
        text = f"stage {name}: no worker has ever answered: worker {self.name} {reason}"
        self._owner.backlog.fail(StageFailed(text, stage=name))

    def silent(self, seconds: float, hint: str, *, progressing: bool = False) -> None:
        """Tell that the worker has not answered for so long."""
        silent = WorkerSilent(self.name, self.pid, seconds, hint, progressing)
        self._owner.tell(silent)

    def announce(self) -> None:
        """Take note that the worker says that it is ready."""
        self._owner.handle(WorkerReady(self.name, self.pid))

    def commit(self, position: object, answer: Callable[[str | None], None]) -> None:
        """Have a position stored, then call ``answer``, with the error if it failed."""
        self._owner.commit(position, answer)

    def refused(self, code: int, category: int, reason: str) -> EtlstageError:
        """Return the error of a message to which the worker said no."""
        return self._worker.refused(code, category, reason)

    def cancelled(
        self, reason: str
    ) -> tuple[Attempt, Callable[[tuple[Attempt, ...]], EtlstageError]]:
        """Return the attempt at an exchange that took too long, and its last error."""

        def last_error(attempts: tuple[Attempt, ...]) -> EtlstageError:
            error = self._worker.lost(reason, tries=len(attempts))
            error.attempts = attempts
            return error

        return self._worker.attempt(reason), last_error

    async def run(self) -> None:
        """Serve the worker until nothing is left; see :meth:`ChildProcess.run`."""
        status_pipe = self._worker.child.status
        tasks: list[Callable[[], Coroutine[Any, Any, object]]] = [
            self.connection.write,
            self.connection.watch,
            self.connection.verify,
        ]
        if status_pipe is not None:
            tasks.append(partial(self._read_status, status_pipe))
        if self._stage.kind is StageKind.EXTRACT:
            tasks.append(self._read_on_at_exit)
        try:
            killed = await self._worker.run(
                self._read, *tasks, owes=self._owes, ended=self._end
            )
        finally:
            self._worker.close()
        late = self.connection.late - self._late
        if killed or late:
            doubt = self._doubt_remains(killed) if killed else None
            doubtful = self._unproven if doubt is not None else 0
            self._owner.handle(
                RemainsEnded(self.name, self.pid, killed, late, doubtful, doubt)
            )

    async def _read(self) -> None:
        await self.connection.read()
        self._all_read = True
        # Normally the process exits now; if it doesn't, it is stopped.
        self.broke("stdout")

    async def _read_on_at_exit(self) -> None:
        await self._worker.exited.wait()
        self.connection.read_on()

    async def _read_status(self, status: Readable) -> None:
        while self._take_status(status):
            await status.readable()

    def _take_status(self, status: Readable) -> bool:
        """Read what the worker has told; return whether there may be more."""
        for _ in range(_TURN):
            data = status.read(_CHUNK)
            if not data:
                return data is None
            told = self._status.receive(data)
            if told.counts:
                self._owner.count(self.name, told.counts)
            if told.progress is not None:
                self.connection.patience.progressed(anyio.current_time())
            if self._announced:
                self._owner.handle(AliveSeen(self.name))
            else:
                self._announced = True
                self.announce()
        return True

    def _say_farewell(self) -> bool:
        return self.connection.say_farewell()

    # --- the end ------------------------------------------------------------

    def _owes(self, status: int) -> bool:
        """Read what is there; return whether others may still write what it owes."""
        self._catch_up(status)
        # One that failed is not waited for. What it had not begun nobody else will.
        if status or self.error is not None or not self.connection.dispatch.busy:
            return False
        return self._streams or not self.connection.unread(self._worker.unread)

    def _catch_up(self, status: int) -> None:
        sound = not status or self._told_to_stop
        self.connection.catch_up(sound=sound, left=self._worker.unread)

    def _end(self, status: int) -> None:
        if self._worker.child.status is not None:
            self._take_status(self._worker.child.status)
        self._catch_up(status)
        fate = self._worker.fate(self._closed if self.error is None else "")
        if not self._told_to_stop and self._streams and not status:
            if self._all_read:
                self.connection.complete_stream()
            else:
                seconds = f"{self._stage.timeout.stop:g} s"
                fate += f", but what it had started held its stdout open for {seconds}"
        if self.error is None:
            self._reason = "was stopped" if self._told_to_stop else fate
        told = self._told_to_stop and self.error is None
        doubt = self._doubt_end(status) if told else None
        # What it has not begun to read can't have killed it.
        block, ahead = self.connection.dispatch.block, self.connection.ahead
        untouched = not self._streams and (
            self._ignored
            or (ahead and block.doubted and not block.holds)
            or (self.error is None and ahead)
            or (self.error is None and self.connection.unread(self._worker.unread))
        )
        doubtful = self.connection.dispatch.doubtful
        if doubt is not None:
            told, doubtful, fate = False, self._unproven, self._worker.end()
        loss = self._lose(untouched=untouched)
        if self.error is None and not told:
            self.error = doubt or self._describe(loss.held)
        self.ended = True
        self._late = self.connection.late
        # What it held is with others before anybody hears of its end.
        self._owner.handle(
            WorkerExited(
                self.name,
                self.pid,
                status,
                lost=loss.held,
                answered=self.connection.answered,
                retried=loss.retried,
                failed=loss.failed,
                tries=loss.tries,
                progress=loss.progress,
                untouched=untouched,
                told=told,
                late=self.connection.late,
                doubtful=doubtful,
                doubt=doubt,
                fate=fate,
                cause=self._worker.cause,
            )
        )

    @property
    def _unproven(self) -> int:
        """Messages that it has answered, and only a good end shows to be loaded."""
        # One that was stopped by force had no time to end well.
        if self._stage.kind is not StageKind.LOAD or self._owner.forced:
            return 0
        return self.connection.answered

    def _doubt_end(self, status: int) -> WorkerLost | None:
        """Return why what it has answered may not be loaded, if it did not end well."""
        unproven = self._unproven
        if not self._stage.dialect.failed(status, told=True, held=0, unproven=unproven):
            return None
        return self._doubt(f"{self._worker.end()} while it ended")

    def _doubt_remains(self, killed: int) -> WorkerLost | None:
        """Return the same for processes that were killed behind its end."""
        if not self._unproven or self._doubted:
            return None
        left, seconds = (
            counted(killed, "process", "processes"),
            self._stage.timeout.stop,
        )
        return self._doubt(
            f"left {left} behind, killed after timeout.stop ({seconds:g} s)"
        )

    def _doubt(self, what: str) -> WorkerLost:
        self._doubted = True
        messages = counted(self._unproven, "message")
        reason = f"{what}; {messages} that it had answered may not be loaded"
        error = self._worker.lost(reason)
        error.attempts = (self._worker.attempt(what),)
        return error

    def _lose(self, *, untouched: bool) -> Loss:
        if self._owner.stopping:
            held = self.connection.dispatch.abandon(
                self._describe(self.connection.dispatch.held)
            )
            return Loss(held=held, retried=0)
        attempt = self._worker.attempt(self._reason)
        return self.connection.dispatch.lose(
            attempt, self._last_error, untouched=untouched
        )

    def _describe(self, held: int, tries: int = 1) -> EtlstageError:
        """Return the error of what the worker held, or the one that it failed with."""
        if self._blame is not None:
            return self._worker.blamed(self._blame, tries)
        held = held if self.error is None else 0
        return self._worker.lost(self._reason, held, tries)

    def _last_error(self, attempts: tuple[Attempt, ...]) -> EtlstageError:
        """Return the error of a message that this worker was the last to try."""
        held = 0 if self._streams else 1
        error = self._describe(held, len(attempts))
        error.attempts = attempts
        return error
