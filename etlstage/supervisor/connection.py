"""
The session with one worker, and the bytes between.

The connection alone owns the session of the dialect: it asks the dispatcher what to
send, matches every event that comes back, and tells what has ended. What the process
does beside that is a matter of ``worker.py``; when bytes come and go, of ``reader.py``
and ``writer.py``; how long a worker may take, of ``patience.py``.

In the common case everything happens in the task that reads: a reply comes in, its
messages are delivered, the next ones are taken and written at once. Another task
writes only while the pipe is full, so that reading never waits for writing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import anyio
import anyio.lowlevel

from etlstage.errors import (
    InvalidMessage,
    LocalProtocolError,
    RemoteProtocolError,
)
from etlstage.messages import StageKind
from etlstage.protocol.base import Limits, Shape, Side
from etlstage.protocol.events import (
    Cancelled,
    CommitAnswered,
    Event,
    Failed,
    Ready,
    RepliesCompleted,
)
from etlstage.stage.stage import Stage
from etlstage.supervisor.answers import Answers
from etlstage.supervisor.deadline import Deadline
from etlstage.supervisor.exchange.backlog import Backlog
from etlstage.supervisor.exchange.batch import AskedDispatcher, BatchDispatcher
from etlstage.supervisor.exchange.dispatch import Dispatcher
from etlstage.supervisor.exchange.named import NamedDispatcher
from etlstage.supervisor.exchange.streaming import StreamDispatcher
from etlstage.supervisor.patience import Patience
from etlstage.supervisor.reader import Reader
from etlstage.supervisor.verifier import Verifier
from etlstage.supervisor.writer import Writer
from etlstage.telemetry import StageMetrics
from etlstage.transport import Wire
from etlstage.transport.process import clock

if TYPE_CHECKING:
    from etlstage.supervisor.worker import WorkerProcess

__all__ = ("Connection",)

_DISPATCHERS: Final[dict[Shape, type[Dispatcher]]] = {
    Shape.STREAM: StreamDispatcher,
    Shape.MESSAGE: Dispatcher,
    Shape.BATCH: BatchDispatcher,
    Shape.ASKED_BATCH: AskedDispatcher,
}


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
        host: WorkerProcess,
        stage: Stage,
        backlog: Backlog,
        wire: Wire,
        metrics: StageMetrics | None,
        *,
        number: int = 0,
        max_messages: float = math.inf,
    ) -> None:
        self._clock = clock()  # of all that is asked of anyio, the time most often
        self._host = host
        self._stage = stage
        self._backlog = backlog
        self._wire = wire
        self._metrics = metrics
        self._shape = stage.dialect.shape
        self._asked = self._shape is Shape.ASKED_BATCH
        limits = Limits(stage.max_message, stage.max_reply)
        self._session = stage.dialect.open(
            Side.SUPERVISOR, limits, batch=stage.batch.size, kind=stage.kind
        )
        self._unprompted = self._session.unprompted
        self._named: NamedDispatcher | None = None
        self.dispatch: Dispatcher
        if self._session.in_order:
            self.dispatch = _DISPATCHERS[self._shape](stage, backlog, number)
        else:
            self._named = NamedDispatcher(stage, backlog, number)
            self.dispatch = self._named
        self._writer = Writer(wire, partial(host.broke, "stdin"))
        self._verified = stage.dialect.counts
        self._verifier = Verifier(self, self.dispatch, wire, self._writer, stage)
        self.patience: Patience = Patience(
            host, stage, self._session, self.dispatch, backlog, self._cancel
        )
        """How long the worker may take."""
        self._reader = Reader(
            wire, host, self.dispatch, self._receive, self._wait_for_consumer
        )
        self._batch_due = Deadline(self.pump_all)
        self._session_due = Deadline(self._ring_session)
        self._session_timer: float | None = None
        self._written_before = 0  # bytes, when it was last given something while idle
        self._retiring = False
        self._met = False  # the worker has said who it is, where it does
        self._parting: Event | None = None  # what is to be said as soon as it can be
        self._whole = False  # it has answered all, and nothing came since
        self._left = self._probe = 0  # bytes of that, and ahead of it, left unread
        self._extracts = stage.kind is StageKind.EXTRACT
        self._answers = Answers(
            host,
            stage,
            self._session,
            self.dispatch,
            self.patience,
            metrics,
            committed=self._answer_commit,
            doubt=self.doubt,
            max_messages=max_messages,
        )

    @property
    def owed(self) -> int:
        """Exchanges that the worker has not answered."""
        return self._session.owed

    @property
    def answered(self) -> int:
        """Messages that the worker has answered."""
        return self._answers.messages

    @property
    def ahead(self) -> bool:
        """Whether the worker has no whole message of what it was given last."""
        return self._verifier.ahead

    def unread(self, left: int) -> bool:
        """
        Return whether the worker has not begun to read what it holds.

        Args:
            left: Bytes that it left in its stdin.

        """
        return left >= self._writer.written - self._written_before

    def pump(self, now: float, *, many: bool = False) -> bool:
        """
        Give the worker what it may have now; return whether there was anything.

        Args:
            now: The time, in seconds.
            many: Whether it may be given several exchanges, where these have names.

        """
        if self._named is not None and self._named.lasts:
            self._follow_consumer()
            self._pass_on()
        elif self._extracts or self._reader.paused:
            self._follow_consumer()
        writer = self._writer
        if self.dispatch.idle:
            return False
        if not self._host.usable or (writer.unsent and not writer.flush()):
            return False
        if self._verifier.busy:
            self._verifier.wake()
            return False
        fresh = self._verified and not self.dispatch.block.total
        chunks = self.take_next(now, many=many)
        if chunks is None:
            return False
        if fresh:
            self._verifier.begin(now, chunks)
        else:
            writer.add(chunks)
            self._flush()
        return True

    def take_next(self, now: float, *, many: bool = False) -> list[bytes] | None:
        """Give the worker what it may have next; return the bytes to write."""
        session, dispatch = self._session, self.dispatch
        many = many and self._named is not None
        owed = session.owed
        idle = not owed
        while True:
            room = session.room
            # A batch that was begun is filled.
            if not owed or not self._shape.batches:
                room = min(room, self._answers.left)
            if self._named is not None and not many:
                room = min(room, 1)
            events = dispatch.next(now, owed, room)
            if events is None:
                if self._shape.batches:
                    self._batch_due.set(dispatch.due)
                if not many or not (chunks := session.data_to_send()):
                    return None
                break
            try:
                for event in events:
                    session.send(event)
            except InvalidMessage as error:
                dispatch.refused(error)
            if not many:  # each write is a system call, and wakes the worker
                chunks = session.data_to_send()
                if chunks or self._shape is Shape.STREAM:
                    break  # else of what was taken, nothing may be sent
            elif dispatch.sated:
                chunks = session.data_to_send()
                break
            owed = session.owed
        if idle:
            dispatch.block.turn(now)
            self._written_before = self._writer.written
        if idle or self._asked or self._named is not None:
            self.patience.expect(now)
        return chunks

    def pump_all(self, now: float) -> None:
        """Give the worker all that it may have now, and write what there is to say."""
        # More than once: of what was taken, all may have been refused.
        while self.pump(now, many=True):
            if self.dispatch.sated:
                return  # what there was is written
        self._flush()

    def retire(self) -> None:
        """Give no more messages; stop the worker when it has answered those it has."""
        self._retiring = self.dispatch.retiring = True
        self.pump_all(anyio.current_time())
        self._stop_if_retired()

    async def write(self) -> None:
        """Write what the pipe had no room for, until cancelled."""
        await self._writer.run(self.pump_all)

    async def verify(self) -> None:
        """Prove that replies belong to what they are counted for, until cancelled."""
        await self._verifier.run()

    async def watch(self) -> None:
        """Ring the deadlines until cancelled."""
        await self.patience.due.run(self._batch_due, self._session_due)

    def say_farewell(self) -> bool:
        """
        Tell the worker to end, in its dialect; return whether there is a way to.

        One that has not said who it is is told once it does.
        """
        self._parting = self._stage.dialect.farewell()
        if self._parting is None:
            return False
        now = anyio.current_time()
        self._session.handle_timer(now)  # its own time may count from here
        self._settle(now)
        return self._parting is None or self.unmet

    @property
    def unmet(self) -> bool:
        """Whether the worker was to be told to end, and has not said who it is."""
        return self._parting is not None and not self._met

    def _part(self) -> None:
        assert self._parting is not None
        with suppress(LocalProtocolError):  # not yet, or the session is beyond that
            self._session.send(self._parting)
            self._parting = None

    # --- bytes --------------------------------------------------------------

    async def read(self) -> None:
        """Read to the end of what the worker writes."""
        # A dialect may have something to say first.
        self._settle(anyio.current_time())
        await self._reader.run()
        self._receive_eof(anyio.current_time())

    def catch_up(self, *, sound: bool = True, left: int = 0) -> None:
        """
        Read what a dead process has written, without waiting for more.

        Args:
            sound: Whether it ended as it should.
            left: Bytes that it left in its stdin.

        """
        self._reader.catch_up()
        self._conclude(anyio.current_time(), lambda: None, sound=sound, left=left)
        block = self.dispatch.block
        if block.several and self._whole and not self._host.failed:
            # It may have died of the last one, behind two replies to the first.
            self._backlog.go_in_step(block.messages)

    def read_dry(self) -> None:
        """Read and understand what the worker has written."""
        self._reader.read_dry()

    def read_on(self) -> None:
        """Wait for no consumer any more: the process is gone."""
        self._reader.go_on()

    @property
    def late(self) -> int:
        """Bytes that it wrote after it had failed."""
        return self._reader.late

    def _receive(self, data: bytes) -> None:
        now = self._clock()
        self.patience.received += len(data)
        self._whole = False
        if self._verifier.busy:
            self._verifier.hear(data)
            if self._host.failed:
                return  # what is ahead is not answered: it is not to share the blame
        self._session.receive_data(data, now)
        self._settle(now)

    def _receive_eof(self, now: float) -> None:
        if self._answers.tail is not None or self._host.failed:
            return
        self._answers.tail = b""
        # Of what it dies is known only at its exit.
        left = self._wire.unread()
        self._conclude(
            now, lambda: self._session.receive_eof(now), sound=False, left=left
        )

    def _conclude(
        self, now: float, end: Callable[[], None], *, sound: bool, left: int
    ) -> None:
        """Release what a worker has answered that can say no more, if that was all."""
        if self._host.failed:
            return
        if self._verifier.busy:
            # It had answered all; what is ahead of that is owed until it has exited.
            self._whole, self._probe = True, self._verifier.probe
        self._whole = self._whole or not self._session.owed
        self._left = max(self._left, left - self._probe)
        self._verifier.cancel()
        end()
        self._settle(now)
        if self._whole and self._is_proven(sound=sound) and not self._host.failed:
            self._answers.release(now, proven=True)

    def _is_proven(self, *, sound: bool) -> bool:
        """Return whether what a worker answered that is gone belongs together."""
        dialect, block = self._stage.dialect, self.dispatch.block
        if self._verified and self._left > max(dialect.slack, len(dialect.raw(()))):
            return False  # it has not read all that it is said to have answered
        # One reply too many may have come behind what was released without proof. What
        # is loaded would be loaded twice if it was given back.
        loads = self._stage.kind is StageKind.LOAD
        return sound or not (block.several or (block.unproven and not loads))

    def _wait_for_consumer(self, waits: bool) -> None:
        self.patience.suspend(waits)
        if waits:
            # In a dialect with heartbeats, nobody hears them now.
            self._receive(b"")

    def _ring_session(self, now: float) -> None:
        self._session_timer = None
        self._session.handle_timer(now)
        self._settle(now)

    def _settle(self, now: float) -> None:
        """Act upon what the session has understood, and write what it has to say."""
        for event in self._session.events_received():
            if self._verifier.busy and type(event) is not Failed:
                self.doubt()
                break  # what came with it is taken for no answer either
            # Nearly all events are of this kind, and lock-step waits for each.
            if type(event) is RepliesCompleted:
                self._answers.take_replies(event, now)
            else:
                self._met = self._met or type(event) is Ready
                self._answers.take(event, now)
        if self._parting is not None:
            self._part()
        self.pump_all(now)
        if self._unprompted:
            timer = self._session.get_timer()
            if timer != self._session_timer:
                self._session_timer = timer
                self._session_due.set(timer)
        if self._verified and not self._session.owed:
            self._end_block(now)
        if self._metrics is not None:
            self._metrics.in_flight(self._host.name, self.dispatch.held)
            self._metrics.waiting(self._backlog.messages)
        if self._retiring:
            self._stop_if_retired()

    def _end_block(self, now: float) -> None:
        """Prove what is held back: the worker owes nothing, and is given nothing."""
        self.patience.expect(now)
        if self.dispatch.block.begun and self._host.usable and not self._verifier.busy:
            self._verifier.begin(now)

    def settle_block(self, now: float, *, proven: bool) -> None:
        """Release the block, and go on."""
        self._answers.release(now, proven=proven)
        if self._session.owed:
            self.dispatch.block.turn(now)  # what was written ahead begins the next one
        self._settle(now)

    def stop_verifying(self) -> None:
        """Hold back what is held back: the worker is told to stop, or failed."""
        if self._host.failed:
            self._verifier.cancel()
        else:
            self._verifier.stop()

    def doubt(self, what: str = "") -> None:
        """Take the block back: it does not add up."""
        self.dispatch.block.doubted = True
        what = what or self._stage.dialect.unasked(self._verifier.said)
        self._verifier.cancel()
        error = RemoteProtocolError(what)
        self._host.fail(f"broke the protocol: {what}", "pairing", error)

    def _pass_on(self) -> None:
        """Write what callers add to exchanges that they keep open."""
        assert self._named is not None, "who answers in order keeps nothing open"
        self._flush()
        # What there is no room for stays with the caller, who waits then.
        while not self._writer.unsent and (said := self._named.said()):
            for event in said:
                with suppress(LocalProtocolError):  # the worker was told to end
                    self._session.send(event)
            self._flush()

    def _flush(self) -> None:
        # What the pipe has no room for stays in the session, where control overtakes.
        writer = self._writer
        while writer.flush() and self._unprompted:
            if not (chunks := self._session.data_to_send()):
                return
            writer.add(chunks)

    def _answer_commit(self, position: object, error: str | None) -> None:
        now = anyio.current_time()
        self.patience.stored(now)
        # Also of a worker that was told to end: what it stores last, it stores then.
        if not (self._host.failed or self._host.exited):
            self._session.send(CommitAnswered(position, error))
            self._settle(now)

    # --- extraction ---------------------------------------------------------

    def complete_stream(self) -> None:
        """End the round of a worker that has written all and exited well."""
        now = anyio.current_time()
        self._receive_eof(now)
        if self._host.failed:
            return
        if self._answers.tail:
            # The last line of a file often has no line end. From a worker that failed
            # it could be half a message; from one that ended well it is a message.
            self.dispatch.passed([self._answers.tail])
        self.dispatch.finish(now)
        self._answers.messages += self.dispatch.release().messages

    def _follow_consumer(self) -> None:
        if self._named is not None:
            for cancelled in self._named.unwanted():
                self._session.send(cancelled)
                self._flush()
        elif self.dispatch.forgotten and self._host.usable:
            # What it writes next would be taken for the answer to the next request.
            self._host.stop(patient=False)
        self._reader.follow()

    def _cancel(self, id_: int, reason: str) -> None:
        self._session.send(Cancelled(id_, 0, reason))
        self.pump_all(anyio.current_time())  # there is room for another one

    def _stop_if_retired(self) -> None:
        if self._session.owed or self.dispatch.block.holds:
            return
        if self._host.usable:
            self._host.stop()
