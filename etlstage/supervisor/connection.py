"""
One worker of a T or L stage, its protocol, and the bytes between.

In the common case everything happens in the task that reads: a reply comes in, its
messages are delivered, the next ones are taken and written at once. Another task
writes only while the pipe is full, so that reading never waits for writing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, Protocol

import anyio
import anyio.lowlevel

from etlstage.errors import Attempt, EtlstageError, FailureCause
from etlstage.protocol.base import Shape
from etlstage.protocol.events import MoreRequested, ProtocolFailed, RepliesCompleted
from etlstage.stage.stage import Stage
from etlstage.supervisor.child import ChildProcess
from etlstage.supervisor.deadline import Deadline
from etlstage.supervisor.exchange.dispatch import Loss
from etlstage.supervisor.exchange.submission import Work
from etlstage.supervisor.lifecycle.events import (
    AliveSeen,
    Event,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
    WorkerWorn,
)
from etlstage.supervisor.session import feeder, session
from etlstage.supervisor.writer import Writer
from etlstage.telemetry import StageMetrics
from etlstage.transport import Launch, Readable

__all__ = ("Connection", "Owner")

_CHUNK: Final = 65536  # bytes a read; once that many came:
# Half of what the pipe holds: memory for all of it comes from the kernel, and goes
# back there, with every read, and its pages are cleared each time.
_BIG_CHUNK: Final = 512 * 1024
_TURN: Final = 16  # reads in a row before other tasks get a turn


class Owner(Protocol):
    """What a connection needs of the supervisor that it belongs to."""

    stage: Stage
    work: Work
    metrics: StageMetrics | None
    launch: Launch

    def handle(self, event: Event) -> None:
        """Take note of what happened, and act upon it."""
        ...

    def story(self, worker: str) -> tuple[str, ...]:
        """Return the last things that happened to a worker."""
        ...

    @property
    def stopping(self) -> bool:
        """Whether messages that are lost now are tried no more."""
        ...


class Connection:
    """
    Starts one worker, feeds it once it is told to, and delivers what it answers.

    Args:
        owner: The supervisor.
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
        self._metrics = metrics = owner.metrics
        self._worker = ChildProcess(
            stage,
            name,
            owner.launch,
            start=start,
            story=partial(owner.story, name),
            counted=partial(metrics.stderr_lines, name) if metrics else None,
        )
        self._wire, self._child = self._worker.wire, self._worker.child
        self._protocol = session(stage)
        self._feeder = feeder(stage, self._protocol, owner.work, number)
        self._max_messages = max_messages
        self._writer = Writer(self._wire, self._break)
        self._answer_due = Deadline(self._miss_answer)
        self._batch_due = Deadline(self._pump_all)
        self._unanswered_bytes = 0  # read since the last complete reply
        self._turn_came = 0.0  # when the oldest exchange that is owed became it
        self._open = False  # it is given messages
        self._retiring = False
        self._told_to_stop = False
        self._closed = ""  # the pipe that the worker closed first
        self._reason = ""  # why it is of no more use, as a part of a sentence
        self._blame: EtlstageError | None = None  # how it broke the protocol
        self._late = 0  # bytes read after it had failed
        self._drained = anyio.Event()
        self._batches = stage.dialect.shape.batches
        self._asked = stage.dialect.shape is Shape.ASKED_BATCH
        self.name = name
        self.start = start
        self.pid = self._child.pid
        self.answered = 0
        """Messages that it has answered."""
        self.idle_since: float | None = anyio.current_time()
        """Since when it has had nothing to do; None while it has."""
        self.error: EtlstageError | None = None
        """Why the worker is of no more use, unless it was told to stop."""

    def __repr__(self) -> str:
        return f"<Connection {self._worker!r} owed={self.owed}>"

    @property
    def owed(self) -> int:
        """Exchanges that the worker has not answered."""
        return self._protocol.owed

    @property
    def usable(self) -> bool:
        """Whether the worker may be given messages."""
        return self._open and self.error is None and not self._worker.told

    def open(self) -> None:
        """Give the worker messages from now on."""
        self._open = True
        self._pump_all(anyio.current_time())

    def pump(self, now: float) -> bool:
        """Give the worker what it may have now; return whether there was anything."""
        writer = self._writer
        if not self.usable or not (writer.empty or writer.flush()):
            return False
        idle = not self._protocol.owed
        if not self._feeder.feed(now):
            if self._batches:
                self._batch_due.set(self._feeder.due)
            return False
        writer.add(self._protocol.data_to_send())
        writer.flush()
        if idle or self._asked:
            if idle:
                self._turn_came = now
            self._expect_answer(now)
        return True

    def retire(self) -> None:
        """Give no more messages; stop the worker when it has answered those it has."""
        self._retiring = self._feeder.retiring = True
        self._pump_all(anyio.current_time())
        self._stop_if_retired()

    def stop(self, *, patient: bool = True) -> None:
        """Let :meth:`run` stop the worker."""
        self._told_to_stop = True
        self._worker.stop(patient=patient)

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
        self._reason, self._blame = reason, blame
        self.error = self._describe(0)
        self._owner.handle(WorkerFailed(self.name, self.pid, self.error, cause))

    async def run(self) -> None:
        """Serve the worker until its process is gone; see :meth:`ChildProcess.run`."""
        tasks: list[Callable[[], Coroutine[Any, Any, object]]] = [
            self._read,
            partial(self._writer.run, self._pump_all),
            self._answer_due.run,
            self._batch_due.run,
        ]
        if self._child.status is not None:
            tasks.append(partial(self._read_status, self._child.status))
        try:
            status = await self._worker.run(*tasks, drained=self._drained)
            self._end(status)
        finally:
            self._worker.close()

    def _end(self, status: int) -> None:
        fate = self._worker.fate(self._closed if self.error is None else "")
        if self.error is None:
            self._reason = "was stopped" if self._told_to_stop else fate
        told = self._told_to_stop and self.error is None
        # What it never read can't have killed it.
        untouched = self.error is None and self._worker.unread >= self._writer.written
        if self._owner.stopping:
            held = self._feeder.abandon(self._describe(self._feeder.held))
            loss = Loss(held=held, retried=0)
        else:
            loss = self._feeder.lose(
                self._worker.attempt(self._reason),
                self._last_error,
                untouched=untouched,
            )
        if self.error is None and not told:
            self.error = self._describe(loss.held)
        # What it held is with others before anybody hears of its end.
        self._owner.handle(
            WorkerExited(
                self.name,
                self.pid,
                status,
                lost=loss.held,
                answered=self.answered,
                retried=loss.retried,
                failed=loss.failed,
                tries=loss.tries,
                untouched=untouched,
                told=told,
                late=self._late,
                fate=fate,
            )
        )

    def _describe(self, held: int, tries: int = 1) -> EtlstageError:
        """Return the error of what the worker held, or the one that it failed with."""
        if self._blame is not None:
            return self._worker.blamed(self._blame, tries)
        held = held if self.error is None else 0
        return self._worker.lost(self._reason, held, tries)

    def _last_error(self, attempts: tuple[Attempt, ...]) -> EtlstageError:
        """Return the error of a message that this worker was the last to try."""
        error = self._describe(1, len(attempts))
        error.attempts = attempts
        return error

    # --- bytes --------------------------------------------------------------

    async def _read(self) -> None:
        wire, chunk, turn = self._wire, _CHUNK, 0
        read = wire.read
        while True:
            data = read(chunk)
            if data is None:
                turn = 0
                await wire.readable()
                continue
            if not data:
                break
            chunk = _BIG_CHUNK if len(data) >= _CHUNK else _CHUNK
            if self.error is None:
                self._receive(data)
            else:
                self._late += len(data)
            turn += 1
            if turn == _TURN:
                turn = 0
                await anyio.lowlevel.checkpoint()
        self._drained.set()
        if not self._worker.told:
            self._closed = self._closed or "stdout"
        # Normally the process exits now; if it doesn't, it is stopped.
        self._worker.stop()

    def _receive(self, data: bytes) -> None:
        now = anyio.current_time()
        self._unanswered_bytes += len(data)
        self._protocol.receive_data(data)
        for event in self._protocol.events_received():
            if isinstance(event, RepliesCompleted):
                self._take_replies(event, now)
            elif isinstance(event, ProtocolFailed):
                reason = f"broke the protocol: {event.error}"
                self.fail(reason, "protocol", event.error)
            elif isinstance(event, MoreRequested):
                self._expect_answer(now)
        # More than once: of what was taken, all may have been refused.
        self._pump_all(now)
        if self._metrics is not None:
            self._metrics.in_flight(self.name, self._feeder.held)
            self._metrics.waiting(self._owner.work.messages)
        if self._retiring:
            self._stop_if_retired()

    def _take_replies(self, event: RepliesCompleted, now: float) -> None:
        size = self._unanswered_bytes
        messages, message_bytes = self._feeder.answered(event.groups, size, now)
        self._unanswered_bytes = 0
        self.answered += messages
        if self._metrics is not None:
            self._metrics.answered(
                self.name,
                len(event.groups),
                messages,
                message_bytes,
                size,
                now - self._turn_came,
            )
        self._turn_came = now
        self._expect_answer(now)
        if self.answered >= self._max_messages:
            self._max_messages = math.inf
            reason = f"answered {self.answered} messages"
            self._owner.handle(WorkerWorn(self.name, reason))

    async def _read_status(self, status: Readable) -> None:
        announced = not self._stage.ready
        while True:
            data = status.read(_CHUNK)
            if data is None:
                await status.readable()
            elif not data:
                return
            elif announced:
                self._owner.handle(AliveSeen(self.name))
            else:
                announced = True
                self._owner.handle(WorkerReady(self.name, self.pid))

    def _break(self) -> None:
        # Its exit follows, or else it is told to; replies may still come.
        self._closed = self._closed or "stdin"
        self._worker.stop()

    def _pump_all(self, now: float) -> None:
        while self.pump(now):
            pass

    # --- time ---------------------------------------------------------------

    def _expect_answer(self, now: float) -> None:
        due = not self._feeder.awaited
        if due:
            self.idle_since = None
        elif self.idle_since is None:
            self.idle_since = now
        limit = self._stage.timeout.message
        if limit is not None:
            self._answer_due.set(now + limit if due else None)

    def _miss_answer(self, now: float) -> None:
        what = "batch" if self._batches else "message"
        wrote = self._stage.dialect.silence(self._unanswered_bytes)
        limit = self._stage.timeout.message
        self.fail(f"did not answer a {what} within {limit} s: {wrote}", "silent")

    def _stop_if_retired(self) -> None:
        if not self._protocol.owed and not self._worker.told:
            self.stop()
