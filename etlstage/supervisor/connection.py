"""
The session with one worker, and the bytes between.

The connection alone owns the session of the dialect: it asks the dispatcher what to
send, matches every event that comes back, and tells what has ended. What the process
does beside that is a matter of ``running.py``.

In the common case everything happens in the task that reads: a reply comes in, its
messages are delivered, the next ones are taken and written at once. Another task
writes only while the pipe is full, so that reading never waits for writing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol, assert_never

import anyio
import anyio.lowlevel

from etlstage.errors import (
    Attempt,
    EtlstageError,
    FailureCause,
    LocalProtocolError,
    MessageRefused,
    PayloadTooBig,
)
from etlstage.messages import StageKind, counted
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
from etlstage.supervisor.deadline import Deadline
from etlstage.supervisor.exchange.backlog import Backlog
from etlstage.supervisor.exchange.batch import AskedDispatcher, BatchDispatcher
from etlstage.supervisor.exchange.dispatch import (
    Answered,
    Dispatcher,
    StreamDispatcher,
)
from etlstage.supervisor.exchange.named import NamedDispatcher
from etlstage.supervisor.lifecycle.events import (
    AliveSeen,
    Event,
    WorkerWorn,
)
from etlstage.supervisor.writer import Writer
from etlstage.telemetry import StageMetrics
from etlstage.transport import Wire

__all__ = ("Connection", "Host")

_CHUNK: Final = 65536  # bytes a read; once that many came:
# Half of what the pipe holds: memory for all of it comes from the kernel, and goes
# back there, with every read, and its pages are cleared each time.
_BIG_CHUNK: Final = 512 * 1024
_MOST: Final = 1024 * 1024  # bytes that a pipe holds
_TURN: Final = 16  # reads in a row before other tasks get a turn

_DISPATCHERS: Final[dict[Shape, type[Dispatcher]]] = {
    Shape.STREAM: StreamDispatcher,
    Shape.MESSAGE: Dispatcher,
    Shape.BATCH: BatchDispatcher,
    Shape.ASKED_BATCH: AskedDispatcher,
}


class Host(Protocol):
    """What a connection needs of the worker that it is the connection to."""

    name: str

    @property
    def usable(self) -> bool:
        """Whether the worker may be given messages."""
        ...

    @property
    def failed(self) -> bool:
        """Whether it was at fault: what it writes then is no reply."""
        ...

    @property
    def exited(self) -> bool:
        """Whether its process is gone."""
        ...

    def handle(self, event: Event) -> None:
        """Take note of what happened, and act upon it."""
        ...

    def commit(self, position: object, answer: Callable[[str | None], None]) -> None:
        """Have a position stored, then call ``answer``, with the error if it failed."""
        ...

    def announce(self) -> None:
        """Take note that the worker says that it is ready."""
        ...

    def stop(self, *, patient: bool = True) -> None:
        """Stop the worker."""
        ...

    def broke(self, pipe: str) -> None:
        """Take note that the worker closed a pipe; it is stopped if it does not exit."""
        ...

    def fail(
        self, reason: str, cause: FailureCause, blame: EtlstageError | None = None
    ) -> None:
        """Declare the worker at fault."""
        ...

    def refused(self, code: int, reason: str) -> EtlstageError:
        """Return the error of a message to which the worker said no."""
        ...

    def cancelled(
        self, reason: str
    ) -> tuple[Attempt, Callable[[tuple[Attempt, ...]], EtlstageError]]:
        """Return the attempt at an exchange that took too long, and its last error."""
        ...


class Connection:
    """
    Feeds one worker, and delivers what it answers.

    Args:
        host: The worker.
        stage: Of the worker.
        backlog: Where messages are taken from.
        wire: To the worker.
        metrics: What is counted, if anything is.
        number: Of the worker, from 0.
        max_messages: Messages after which it is worn.

    """

    def __init__(
        self,
        host: Host,
        stage: Stage,
        backlog: Backlog,
        wire: Wire,
        metrics: StageMetrics | None,
        *,
        number: int = 0,
        max_messages: float = math.inf,
    ) -> None:
        self._host = host
        self._stage = stage
        self._backlog = backlog
        self._wire = wire
        self._metrics = metrics
        self._shape = stage.dialect.shape
        self._asked = self._shape is Shape.ASKED_BATCH
        limits = Limits(stage.max_message, stage.max_reply)
        self._session = stage.dialect.open(Side.SUPERVISOR, limits)
        self._named: NamedDispatcher | None = None
        self.dispatch: Dispatcher
        if self._session.in_order:
            self.dispatch = _DISPATCHERS[self._shape](stage, backlog, number)
        else:
            self._named = NamedDispatcher(stage, backlog, number)
            self.dispatch = self._named
        self._max_messages = max_messages
        self._writer = Writer(wire, partial(host.broke, "stdin"))
        self._answer_due = Deadline(self._miss_answer)
        self._batch_due = Deadline(self.pump_all)
        self._session_due = Deadline(self._ring_session)
        self._session_timer: float | None = None
        self._written_before = 0  # bytes, when it was last given something while idle
        self._unanswered_bytes = 0  # read since the last complete reply
        self._turn_came = 0.0  # when the oldest exchange that is owed became it
        self._retiring = False
        self._tail: bytes | None = None  # what it wrote last, once it can write no more
        self._extracts = stage.kind is StageKind.EXTRACT
        self._paused: anyio.Event | None = None  # reading waits for the consumer
        self.answered: int = 0
        """Messages that the worker has answered."""
        self.idle_since: float | None = anyio.current_time()
        """Since when it has had nothing to do; None while it has."""
        self.late: int = 0
        """Bytes that it wrote after it had failed."""

    @property
    def owed(self) -> int:
        """Exchanges that the worker has not answered."""
        return self._session.owed

    def unread(self, left: int) -> bool:
        """
        Return whether the worker has not begun to read what it holds.

        Args:
            left: Bytes that it left in its stdin.

        """
        return left >= self._writer.written - self._written_before

    def pump(self, now: float) -> bool:
        """Give the worker what it may have now; return whether there was anything."""
        if self._extracts or self._paused is not None:
            self._follow_consumer(now)
        writer = self._writer
        if not self._host.usable or not (writer.empty or writer.flush()):
            return False
        session, dispatch = self._session, self.dispatch
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

    def pump_all(self, now: float) -> None:
        """Give the worker all that it may have now."""
        while self.pump(now):
            pass

    def retire(self) -> None:
        """Give no more messages; stop the worker when it has answered those it has."""
        self._retiring = self.dispatch.retiring = True
        self.pump_all(anyio.current_time())
        self._stop_if_retired()

    async def write(self) -> None:
        """Write what the pipe had no room for, until cancelled."""
        await self._writer.run(self._write_on)

    async def watch(self) -> None:
        """Ring the deadlines until cancelled."""
        await self._answer_due.run(self._batch_due, self._session_due)

    def say_farewell(self) -> bool:
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

    async def read(self) -> None:
        """Read to the end of what the worker writes."""
        wire, chunk, turn = self._wire, _CHUNK, 0
        read = wire.read
        # A dialect may have something to say first.
        self._settle(anyio.current_time())
        while True:
            if self.dispatch.stalled:
                await self._wait_for_consumer()
            data = read(chunk)
            if data is None:
                turn = 0
                await wire.readable()
                continue
            if not data:
                break
            chunk = _BIG_CHUNK if len(data) >= _CHUNK else _CHUNK
            if self._host.failed:
                self.late += len(data)
            else:
                self._receive(data)
            turn += 1
            if turn == _TURN:
                turn = 0
                await anyio.lowlevel.checkpoint()
        self._receive_eof(anyio.current_time())

    def catch_up(self) -> None:
        """Read what a dead process has written, without waiting for more."""
        left = _MOST
        while left > 0 and (data := self._wire.read(left)):
            left -= len(data)
            if self._host.failed:
                self.late += len(data)
            else:
                self._receive(data)

    def _receive(self, data: bytes) -> None:
        now = anyio.current_time()
        self._unanswered_bytes += len(data)
        self._session.receive_data(data, now)
        self._settle(now)

    def _receive_eof(self, now: float) -> None:
        if self._tail is None and not self._host.failed:
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
                self._take_replies(event, now)
            else:
                self._handle(event, now)
        self._write_on(now)
        timer = self._session.get_timer()
        if timer != self._session_timer:
            self._session_timer = timer
            self._session_due.set(timer)
        if self._metrics is not None:
            self._metrics.in_flight(self._host.name, self.dispatch.held)
            self._metrics.waiting(self._backlog.messages)
        if self._retiring:
            self._stop_if_retired()

    def _write_on(self, now: float) -> None:
        """Write what the session has to say, be it an answer or what is given next."""
        # More than once: of what was taken, all may have been refused.
        self.pump_all(now)
        self._flush()

    def _flush(self) -> None:
        # What the pipe has no room for stays in the session, where control overtakes.
        writer = self._writer
        if writer.empty or writer.flush():
            chunks = self._session.data_to_send()
            if chunks:
                writer.add(chunks)
                writer.flush()

    # --- events -------------------------------------------------------------

    def _handle(self, event: Passed, now: float) -> None:
        match event:
            case RepliesCompleted():
                self._take_replies(event, now)
            case OutputPassed(messages):
                self.dispatch.passed(messages)
                self._expect_answer(now)
            case MoreRequested():
                self._expect_answer(now)
            case ExchangesEnded(ends) if self._named is not None:
                answered = self._named.ended(ends, self._unanswered_bytes)
                self._take_note(len(ends), answered, now)
            case OutputOf(id_, messages) if self._named is not None:
                try:
                    self._named.passed_by(id_, messages)
                except PayloadTooBig as blame:
                    self._host.fail(f"broke the protocol: {blame}", "protocol", blame)
            case ExchangeRefused(id_, code, reason):
                error = self._host.refused(code, reason)
                answered = self.dispatch.refused_by(id_, error, now)
                self._take_note(1, answered, now)
            case CommitAsked(position):
                self._host.commit(position, partial(self._answer_commit, position))
            case Ready():
                self._host.announce()
            case LifeSeen():
                self._host.handle(AliveSeen(self._host.name))
            case Farewell():
                # It goes by itself; whether that is a fault its exit will tell.
                self.dispatch.retiring = True
            case StreamEnded(tail):
                self._tail = tail
            case ProtocolFailed(error=blame):
                self._host.fail(f"broke the protocol: {blame}", "protocol", blame)
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

    def _take_replies(self, replies: RepliesCompleted, now: float) -> None:
        groups, overhead = replies
        size = self._unanswered_bytes + overhead
        self._take_note(len(groups), self.dispatch.answered(groups, size, now), now)

    def _take_note(self, exchanges: int, answered: Answered, now: float) -> None:
        messages, message_bytes = answered
        size, self._unanswered_bytes = self._unanswered_bytes, 0
        self.answered += messages
        if self._metrics is not None:
            self._metrics.answered(
                self._host.name,
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
            self._host.handle(WorkerWorn(self._host.name, reason))

    def _answer_commit(self, position: object, error: str | None) -> None:
        if self._host.usable:
            self._session.send(CommitAnswered(position, error))
            self._settle(anyio.current_time())

    # --- extraction ---------------------------------------------------------

    def complete_stream(self) -> None:
        """End the round of a worker that has written all and exited well."""
        now = anyio.current_time()
        self._receive_eof(now)
        if self._host.failed:
            return
        if self._tail:
            # The last line of a file often has no line end. From a worker that failed
            # it could be half a message; from one that ended well it is a message.
            self.dispatch.passed([self._tail])
        self.answered += self.dispatch.finish(now)

    async def _wait_for_consumer(self) -> None:
        """Read no more while outputs lie unread; all that is left once it exited."""
        while self.dispatch.stalled and not self._host.exited:
            self._answer_due.set(None)
            self._paused = anyio.Event()
            await self._paused.wait()
            self._paused = None
            self._expect_answer(anyio.current_time())

    def read_on(self) -> None:
        """Wait for no consumer any more: the process is gone."""
        if self._paused is not None:
            self._paused.set()

    def _follow_consumer(self, now: float) -> None:
        if self._named is not None:
            for id_ in self._named.forgotten_ids():
                self._cancel(id_, "nobody waits for it any more")
        elif self.dispatch.forgotten and self._host.usable:
            # What it writes next would be taken for the answer to the next request.
            self._host.stop(patient=False)
        if self._paused is not None and not self.dispatch.stalled:
            self._paused.set()

    # --- time ---------------------------------------------------------------

    def _expect_answer(self, now: float) -> None:
        session = self._session
        due = session.owed > 0
        if due and self._asked:
            due = not self.dispatch.awaited(session.room)
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
            self._host.fail(
                f"did not answer a {what} within {limit} s: {wrote}", "silent"
            )
            return
        for id_ in self._named.expired(now, limit):
            reason = f"did not answer a {what} within {limit} s, and it was cancelled"
            self._cancel(id_, reason)
            self._named.lose_one(id_, *self._host.cancelled(reason))
        self._expect_answer(now)

    def _cancel(self, id_: int, reason: str) -> None:
        self._session.send(ExchangeCancelled(id_, 0, reason))
        self._flush()

    def _stop_if_retired(self) -> None:
        if not self._session.owed and self._host.usable:
            self._host.stop()
