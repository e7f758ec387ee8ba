"""
One worker, its session, and the bytes between.

The connection alone owns the session of the dialect: it asks the dispatcher what to
send, matches every event that comes back, and tells what has ended.

In the common case everything happens in the task that reads: a reply comes in, its
messages are delivered, the next ones are taken and written at once. Another task
writes only while the pipe is full, so that reading never waits for writing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, Protocol, assert_never

import anyio
import anyio.lowlevel

from etlstage.errors import (
    Attempt,
    EtlstageError,
    FailureCause,
    LocalProtocolError,
    MessageRefused,
)
from etlstage.messages import Groups, StageKind, counted
from etlstage.protocol.base import Limits, Shape, Side
from etlstage.protocol.events import (
    BatchEnded,
    CommitAnswered,
    CommitAsked,
    ExchangeCancelled,
    ExchangeOpened,
    ExchangeRefused,
    ExchangesEnded,
    Farewell,
    LifeSeen,
    MessagesPassed,
    MoreRequested,
    Noise,
    OutputOf,
    OutputPassed,
    ProtocolFailed,
    Ready,
    RepliesCompleted,
    StreamEnded,
)
from etlstage.protocol.events import Event as Passed
from etlstage.stage.stage import Stage
from etlstage.supervisor.child import ChildProcess
from etlstage.supervisor.deadline import Deadline
from etlstage.supervisor.exchange.backlog import Backlog
from etlstage.supervisor.exchange.batch import AskedDispatcher, BatchDispatcher
from etlstage.supervisor.exchange.dispatch import (
    Answered,
    Dispatcher,
    Loss,
    StreamDispatcher,
)
from etlstage.supervisor.exchange.named import NamedDispatcher
from etlstage.supervisor.lifecycle.events import (
    AliveSeen,
    Event,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
    WorkerWorn,
)
from etlstage.supervisor.writer import Writer
from etlstage.telemetry import StageMetrics
from etlstage.transport import Launch, Readable

__all__ = ("Connection", "Owner")

_CHUNK: Final = 65536  # bytes a read; once that many came:
# Half of what the pipe holds: memory for all of it comes from the kernel, and goes
# back there, with every read, and its pages are cleared each time.
_BIG_CHUNK: Final = 512 * 1024
_TURN: Final = 16  # reads in a row before other tasks get a turn

_DISPATCHERS: Final[dict[Shape, type[Dispatcher]]] = {
    Shape.STREAM: StreamDispatcher,
    Shape.MESSAGE: Dispatcher,
    Shape.BATCH: BatchDispatcher,
    Shape.ASKED_BATCH: AskedDispatcher,
}


class Owner(Protocol):
    """What a connection needs of the supervisor that it belongs to."""

    stage: Stage
    backlog: Backlog
    metrics: StageMetrics | None
    launch: Launch

    def handle(self, event: Event) -> None:
        """Take note of what happened, and act upon it."""
        ...

    def story(self, worker: str) -> tuple[str, ...]:
        """Return the last things that happened to a worker."""
        ...

    def commit(self, position: object, answer: Callable[[str | None], None]) -> None:
        """Have a position stored, then call ``answer``, with the error if it failed."""
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
        self._shape = stage.dialect.shape
        self._asked = self._shape is Shape.ASKED_BATCH
        self._worker = ChildProcess(
            stage,
            name,
            owner.launch,
            start=start,
            stdin=self._shape is not Shape.STREAM,
            farewell=self._say_farewell,
            story=partial(owner.story, name),
            counted=partial(metrics.stderr_lines, name) if metrics else None,
        )
        self._wire, self._child = self._worker.wire, self._worker.child
        limits = Limits(stage.max_message, stage.max_reply)
        self._session = stage.dialect.open(Side.SUPERVISOR, limits)
        self._named: NamedDispatcher | None = None
        self._dispatch: Dispatcher
        if self._session.in_order:
            self._dispatch = _DISPATCHERS[self._shape](stage, owner.backlog, number)
        else:
            self._named = NamedDispatcher(stage, owner.backlog, number)
            self._dispatch = self._named
        self._max_messages = max_messages
        self._writer = Writer(self._wire, self._break)
        self._answer_due = Deadline(self._miss_answer)
        self._batch_due = Deadline(self._pump_all)
        self._session_due = Deadline(self._ring_session)
        self._session_timer: float | None = None
        self._written_before = 0  # bytes, when it was last given something while idle
        self._unanswered_bytes = 0  # read since the last complete reply
        self._turn_came = 0.0  # when the oldest exchange that is owed became it
        self._open = False  # it is given messages
        self._retiring = False
        self._told_to_stop = False
        self._closed = ""  # the pipe that the worker closed first
        self._reason = ""  # why it is of no more use, as a part of a sentence
        self._blame: EtlstageError | None = None  # how it broke the protocol
        self._late = 0  # bytes read after it had failed
        self._tail: bytes | None = None  # what it wrote last, once it can write no more
        self._drained = anyio.Event()
        self._extracts = stage.kind is StageKind.EXTRACT
        self._paused: anyio.Event | None = None  # reading waits for the consumer
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
        return self._session.owed

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
        if self._extracts:
            self._follow_consumer(now)
        writer = self._writer
        if not self.usable or not (writer.empty or writer.flush()):
            return False
        session, dispatch = self._session, self._dispatch
        owed = session.owed
        events = dispatch.next(now, owed, session.room)
        if events is None:
            if self._shape.batches:
                self._batch_due.set(dispatch.due)
            return False
        if not owed:
            self._turn_came = now
            self._written_before = writer.written
        for event in events:
            try:
                session.send(event)
            except MessageRefused as error:
                dispatch.refused(error)
                break
        writer.add(session.data_to_send())
        writer.flush()
        if not owed or self._asked or self._named is not None:
            self._expect_answer(now)
        return True

    def retire(self) -> None:
        """Give no more messages; stop the worker when it has answered those it has."""
        self._retiring = self._dispatch.retiring = True
        self._pump_all(anyio.current_time())
        self._stop_if_retired()

    def stop(self, *, patient: bool = True) -> None:
        """Let :meth:`run` stop the worker."""
        self._told_to_stop = True
        # In the middle of a round there is nothing that it could finish.
        busy = self._extracts and self._dispatch.busy
        self._worker.stop(patient=patient and not busy)

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
            partial(self._writer.run, self._write_on),
            partial(self._answer_due.run, self._batch_due, self._session_due),
        ]
        if self._child.status is not None:
            tasks.append(partial(self._read_status, self._child.status))
        if self._extracts:
            tasks.append(self._read_on_at_exit)
        try:
            status = await self._worker.run(*tasks, drained=self._drained)
            self._end(status)
        finally:
            self._worker.close()

    # --- the end ------------------------------------------------------------

    def _end(self, status: int) -> None:
        fate = self._worker.fate(self._closed if self.error is None else "")
        if not self._told_to_stop and self._shape is Shape.STREAM and not status:
            self._complete_stream()
        if self.error is None:
            self._reason = "was stopped" if self._told_to_stop else fate
        told = self._told_to_stop and self.error is None
        # What it has not begun to read can't have killed it.
        untouched = (
            self.error is None
            and self._shape is not Shape.STREAM
            and self._worker.unread >= self._writer.written - self._written_before
        )
        loss = self._lose(untouched=untouched)
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

    def _complete_stream(self) -> None:
        """End the round of a worker that has written all and exited well."""
        now = anyio.current_time()
        self._receive_eof(now)
        if self.error is not None or self._closed == "stdin":
            return
        if self._tail:
            # The last line of a file often has no line end. From a worker that failed
            # it could be half a message; from one that ended well it is a message.
            self._dispatch.passed([self._tail])
        self.answered += self._dispatch.finish(now)

    def _lose(self, *, untouched: bool) -> Loss:
        if self._owner.stopping:
            held = self._dispatch.abandon(self._describe(self._dispatch.held))
            return Loss(held=held, retried=0)
        attempt = self._worker.attempt(self._reason)
        return self._dispatch.lose(attempt, self._last_error, untouched=untouched)

    def _describe(self, held: int, tries: int = 1) -> EtlstageError:
        """Return the error of what the worker held, or the one that it failed with."""
        if self._blame is not None:
            return self._worker.blamed(self._blame, tries)
        held = held if self.error is None else 0
        return self._worker.lost(self._reason, held, tries)

    def _last_error(self, attempts: tuple[Attempt, ...]) -> EtlstageError:
        """Return the error of a message that this worker was the last to try."""
        held = 0 if self._shape is Shape.STREAM else 1
        error = self._describe(held, len(attempts))
        error.attempts = attempts
        return error

    def _cancelled(self, reason: str, attempts: tuple[Attempt, ...]) -> EtlstageError:
        """Return the error of a message that took too long, by a worker that lives."""
        error = self._worker.lost(reason, tries=len(attempts))
        error.attempts = attempts
        return error

    def _say_farewell(self) -> bool:
        """Tell the worker to end, in its dialect; return whether there is a way to."""
        farewell = self._stage.dialect.farewell()
        if farewell is None:
            return False
        try:
            self._session.send(farewell)
        except LocalProtocolError:
            return False  # the session is beyond that
        self._flush()
        return True

    # --- bytes --------------------------------------------------------------

    async def _read(self) -> None:
        wire, chunk, turn = self._wire, _CHUNK, 0
        read = wire.read
        # A dialect may have something to say first.
        self._settle(anyio.current_time())
        while True:
            if self._extracts:
                await self._wait_for_consumer()
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
        self._receive_eof(anyio.current_time())
        self._drained.set()
        if not self._worker.told:
            self._closed = self._closed or "stdout"
        # Normally the process exits now; if it doesn't, it is stopped.
        self._worker.stop()

    def _receive(self, data: bytes) -> None:
        now = anyio.current_time()
        self._unanswered_bytes += len(data)
        self._session.receive_data(data, now)
        self._settle(now)

    def _receive_eof(self, now: float) -> None:
        if self._tail is None and self.error is None:
            self._tail = b""
            self._session.receive_eof(now)
            self._settle(now)

    def _ring_session(self, now: float) -> None:
        self._session_timer = None
        self._session.handle_timer(now)
        self._settle(now)

    def _settle(self, now: float) -> None:
        """Act upon what the session has understood, and write what it has to say."""
        for event in self._session.events_received():
            # Nearly all events are of this kind, and lock-step waits for each.
            if type(event) is RepliesCompleted:
                self._take_replies(event.groups, now)
            else:
                self._handle(event, now)
        self._write_on(now)
        timer = self._session.get_timer()
        if timer != self._session_timer:
            self._session_timer = timer
            self._session_due.set(timer)
        if self._metrics is not None:
            self._metrics.in_flight(self.name, self._dispatch.held)
            self._metrics.waiting(self._owner.backlog.messages)
        if self._retiring:
            self._stop_if_retired()

    def _write_on(self, now: float) -> None:
        """Write what the session has to say, be it an answer or what is given next."""
        # More than once: of what was taken, all may have been refused.
        self._pump_all(now)
        self._flush()

    def _flush(self) -> None:
        # What the pipe has no room for stays in the session, where control overtakes.
        writer = self._writer
        if writer.empty or writer.flush():
            chunks = self._session.data_to_send()
            if chunks:
                writer.add(chunks)
                writer.flush()

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

    # --- events -------------------------------------------------------------

    def _handle(self, event: Passed, now: float) -> None:
        match event:
            case RepliesCompleted(groups):
                self._take_replies(groups, now)
            case OutputPassed(messages):
                self._dispatch.passed(messages)
                self._expect_answer(now)
            case MoreRequested():
                self._expect_answer(now)
            case ExchangesEnded(ends) if self._named is not None:
                answered = self._named.ended(ends, self._unanswered_bytes)
                self._take_note(len(ends), answered, now)
            case OutputOf(id_, messages) if self._named is not None:
                self._named.passed_by(id_, messages)
            case ExchangeRefused(id_, code, reason):
                error = self._worker.refused(code, reason)
                answered = self._dispatch.refused_by(id_, error)
                self._take_note(1, answered, now)
            case CommitAsked(position):
                self._owner.commit(position, partial(self._answer_commit, position))
            case Ready():
                self._owner.handle(WorkerReady(self.name, self.pid))
            case LifeSeen():
                self._owner.handle(AliveSeen(self.name))
            case Farewell():
                # It goes by itself; whether that is a fault its exit will tell.
                self._dispatch.retiring = True
            case StreamEnded(tail):
                self._tail = tail
            case ProtocolFailed(error=blame):
                self.fail(f"broke the protocol: {blame}", "protocol", blame)
            case Noise():
                pass
            case (
                ExchangesEnded()
                | OutputOf()
                | MessagesPassed()
                | BatchEnded()
                | ExchangeOpened()
                | ExchangeCancelled()
                | CommitAnswered()
            ):
                raise AssertionError(f"unreachable: a worker's {type(event).__name__}")
            case _:
                assert_never(event)

    def _take_replies(self, groups: Groups, now: float) -> None:
        answered = self._dispatch.answered(groups, self._unanswered_bytes, now)
        self._take_note(len(groups), answered, now)

    def _take_note(self, exchanges: int, answered: Answered, now: float) -> None:
        messages, message_bytes = answered
        size, self._unanswered_bytes = self._unanswered_bytes, 0
        self.answered += messages
        if self._metrics is not None:
            self._metrics.answered(
                self.name,
                exchanges,
                messages,
                message_bytes,
                size,
                now - self._turn_came,
            )
        self._turn_came = now
        self._expect_answer(now)
        if self.answered >= self._max_messages:
            self._max_messages = math.inf
            reason = f"answered {counted(self.answered, 'message')}"
            self._owner.handle(WorkerWorn(self.name, reason))

    def _answer_commit(self, position: object, error: str | None) -> None:
        if self.usable:
            self._session.send(CommitAnswered(position, error))
            self._settle(anyio.current_time())

    # --- extraction ---------------------------------------------------------

    async def _wait_for_consumer(self) -> None:
        """Read no more while outputs lie unread; all that is left once it exited."""
        while self._dispatch.stalled and not self._worker.exited.is_set():
            self._answer_due.set(None)
            self._paused = anyio.Event()
            await self._paused.wait()
            self._paused = None
            self._expect_answer(anyio.current_time())

    async def _read_on_at_exit(self) -> None:
        await self._worker.exited.wait()
        if self._paused is not None:
            self._paused.set()

    def _follow_consumer(self, now: float) -> None:
        if self._named is not None:
            for id_ in self._named.forgotten_ids():
                self._cancel(id_, "nobody waits for it any more")
        elif self._dispatch.forgotten and not self._worker.told:
            # What it writes next would be taken for the answer to the next request.
            self.stop(patient=False)
        if self._paused is not None and not self._dispatch.stalled:
            self._paused.set()

    # --- time ---------------------------------------------------------------

    def _expect_answer(self, now: float) -> None:
        session = self._session
        due = session.owed > 0
        if due and self._asked:
            due = not self._dispatch.awaited(session.room)
        if due:
            self.idle_since = None
        elif self.idle_since is None:
            self.idle_since = now
        limit = self._stage.timeout.message
        if limit is not None:
            since = self._named.oldest if self._named is not None else now
            at = since + limit if due and since is not None else None
            self._answer_due.set(at)

    def _miss_answer(self, now: float) -> None:
        limit = self._stage.timeout.message
        assert limit is not None, "there is no deadline without a limit"
        what = "batch" if self._shape.batches else "message"
        if self._extracts:
            what = "request"
        wrote = self._stage.dialect.silence(self._unanswered_bytes)
        if self._named is None:
            self.fail(f"did not answer a {what} within {limit} s: {wrote}", "silent")
            return
        for id_ in self._named.expired(now, limit):
            reason = f"did not answer a {what} within {limit} s, and it was cancelled"
            self._cancel(id_, reason)
            attempt = self._worker.attempt(reason)
            self._named.lose_one(id_, attempt, partial(self._cancelled, reason))
        self._expect_answer(now)

    def _cancel(self, id_: int, reason: str) -> None:
        self._session.send(ExchangeCancelled(id_, 0, reason))
        self._flush()

    def _stop_if_retired(self) -> None:
        if not self._session.owed and not self._worker.told:
            self.stop()
