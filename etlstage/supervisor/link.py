"""
The link to one worker: the bytes in both directions, and the session that reads them.

The link is the only owner of the wire, the session, the dispatcher and the deadlines of
one process. The worker (``worker.py``) owns the process and decides what its end means:
the link reports the process's faults to it, and asks it whether the process may be
given more. What concerns the stage goes to the pool: that a worker is ready, alive,
worn or silent, and positions that it wants stored. The dispatcher decides what is given
next and what becomes of it; the session decides what bytes mean and when an exchange
has ended.

In the common case everything happens in the reading task: a reply arrives, its messages
are delivered, and the next ones are taken and written at once. Another task writes only
while the pipe is full, so that reading never waits for writing. A third task rings
deadlines. A fourth observes how the worker's input drains, in dialects where only this
shows whether replies are paired with their messages. That check runs only in tasks of
the worker: a fault that it finds must not be raised in the stack of a submitting
caller.
"""

from __future__ import annotations

import math
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, assert_never, cast

import anyio
import anyio.lowlevel

from etlstage.errors import (
    EtlstageError,
    FailureCause,
    InvalidMessage,
    LocalProtocolError,
    PayloadTooBig,
    RemoteProtocolError,
)
from etlstage.messages import StageKind, counted
from etlstage.protocol.base import DialectSession, Limits, Paired, Shape, Side
from etlstage.protocol.events import (
    Added,
    Alive,
    Cancelled,
    CommitAnswered,
    CommitAsked,
    Ended,
    Event,
    Failed,
    Farewell,
    FarewellReason,
    Mispaired,
    Noise,
    Opened,
    Ready,
    Wanted,
)
from etlstage.supervisor.deadlines import Deadline, ResponseDeadlines
from etlstage.supervisor.exchange.dispatch import Dispatcher
from etlstage.supervisor.exchange.exchange import Refusals
from etlstage.supervisor.lifecycle.events import (
    AliveSeen,
    WorkerReady,
    WorkerSilent,
    WorkerWorn,
)
from etlstage.transport import Wire
from etlstage.transport.base import Pulled
from etlstage.transport.process import clock
from etlstage.transport.write_buffer import WriteBuffer

if TYPE_CHECKING:
    from etlstage.supervisor.pool import WorkerPool
    from etlstage.supervisor.worker import WorkerProcess

__all__ = ("Link",)

_CHUNK: Final = 65536  # bytes per read; after a read of that many:
# Half of what the pipe holds. A buffer for all of it would be allocated from the kernel
# and returned to it with every read, and its pages cleared each time.
_BIG_CHUNK: Final = 512 * 1024
_MOST: Final = 1024 * 1024  # bytes that a pipe holds
_TURN: Final = 16  # reads in a row before other tasks get a turn


class Link:
    """
    Feeds one worker and delivers its replies.

    Attributes:
        dispatch: The exchanges of the worker.
        deadlines: The deadlines for its replies.
        answered: Number of messages that it has answered.
        received: Bytes received since the last complete reply.
        late: Bytes that it wrote after it had failed.
        mispaired: Set once its replies could not be matched to messages.
        all_read: Whether its output has ended, and all of it was read.

    """

    def __init__(
        self,
        pool: WorkerPool,
        worker: WorkerProcess,
        wire: Wire,
        *,
        number: int = 0,
        max_messages: float = math.inf,
    ) -> None:
        self._clock = clock()  # kept: the time is what is asked of anyio most often
        self._pool = pool
        self._worker = worker
        self._stage = stage = pool.stage
        self._backlog = backlog = pool.backlog
        self._wire = wire
        self._metrics = pool.metrics
        shape = stage.dialect.shape
        self._asks = shape is Shape.ASKED_BATCH
        self._batches = shape.batches
        self._commits = shape is Shape.COMMITTED
        self._extracts = stage.kind is StageKind.EXTRACT
        self._session: DialectSession = stage.dialect.open(
            Side.SUPERVISOR,
            Limits(stage.max_message, stage.max_reply),
            batch=stage.batch.size,
            kind=stage.kind,
            assignment=pool.commits.assignment,
            window=stage.window,
            life=backlog.life,
            answer=stage.timeout.message,
        )
        session = self._session
        # `isinstance` with a protocol takes longer here than all else in Python 3.11.
        paired = hasattr(session, "go_in_step")
        self._paired = cast("Paired", session) if paired else None
        self._step, self._bound = False, math.inf  # as the session was given them
        self._in_order = session.in_order
        self._unprompted = session.unprompted and self._paired is None
        self.dispatch: Dispatcher = Dispatcher(
            stage,
            backlog,
            number,
            in_order=session.in_order,
            attempt=worker.errors.attempt,
        )
        self.deadlines: ResponseDeadlines = ResponseDeadlines(
            stage.timeout,
            self._look_for_answer,
            in_order=session.in_order,
            now=anyio.current_time(),
            busy=pool.busy_time,
        )
        self.answered: int = 0
        self.received: int = 0
        self.late: int = 0
        self.doubtful: int = 0
        self.mispaired: Mispaired | None = None
        self.all_read: bool = False
        self._max_messages = max_messages
        self._reply_bytes = 0  # of complete replies whose exchanges have not ended
        self._batch_due = Deadline(self.pump_all)
        self._session_due = Deadline(self._ring_session)
        self._session_timer: float | None = None
        self._outgoing = WriteBuffer(wire)
        self._written_before = 0  # `written` when it was last given messages while idle
        self._given_end = 0  # `written` once the messages given last are all written
        self._going_on: anyio.Event | None = None  # reading waits for the consumer
        self._paused_at = 0.0
        self._storing = 0  # positions that are being stored for the worker
        self._storing_since = 0.0
        self._worked = 0.0  # seconds of work on the current message before it asked
        self._stored: anyio.Event | None = None  # set when all of them are stored
        self._unshown = anyio.Event()  # the pairing of replies is still to be proven
        self._given: anyio.Event | None = None  # wakes `prove` when messages are given
        self._retiring = False
        self._identified = False  # the worker has, if its dialect does that
        self._farewell: Farewell | None = None  # to be sent as soon as possible
        self._parting: anyio.Event | None = None  # set when nothing defers it any more
        self._output_ended = False
        self._chunk = _CHUNK  # bytes to read next
        self._concluding = False  # its process is gone and its output was read

    @property
    def owed(self) -> int:
        """Number of exchanges that the worker has not answered."""
        return self._session.owed

    @property
    def pending(self) -> bool:
        """Whether the worker still has to answer, or is to be given, any message."""
        giving, dispatch = self.dispatch.giving, self.dispatch
        # What an ending worker has not committed is given to another worker.
        left = dispatch.open.count and not self._worker.usable
        return bool(self._session.owed or giving.again or giving.retried or left)

    @property
    def busy(self) -> bool:
        """Whether the worker is in the middle of something."""
        return self._session.owed > 0 or (
            self._extracts and self.dispatch.open.count > 0
        )

    @property
    def ahead(self) -> bool:
        """Whether the worker lacks a part of what it was given last."""
        return self._paired is not None and self._paired.ahead

    @property
    def unproven(self) -> int:
        """Number of delivered messages whose replies are not yet proven theirs."""
        return 0 if self._paired is None else self._paired.unproven

    @property
    def awaits_identity(self) -> bool:
        """Whether a farewell waits for the worker to identify itself."""
        return self._farewell is not None and not self._identified

    def exited(self) -> None:
        """Record that the process is gone; its output may still have to be read."""
        self._outgoing.exited()
        if self._parting is not None:
            self._parting.set()
        if self._extracts and self._going_on is not None:
            self._going_on.set()  # stop waiting for the consumer

    def unread(self, left: int) -> bool:
        """Return whether a worker that left ``left`` bytes read nothing it holds."""
        return left >= self._outgoing.written - self._written_before

    # --- messages for the worker ----------------------------------------------

    def pump(self, now: float, *, many: bool = False) -> bool:
        """
        Give the worker what it may have now; return whether there was anything.

        ``many``: give several exchanges at once where exchanges end in any order.
        """
        dispatch = self.dispatch
        if dispatch.dialogues:
            self._follow_consumer()
            # What a worker that is gone did not get is left for another worker.
            worker = self._worker
            if not (self._output_ended or worker.failed or worker.exited):
                self._write_added()
        elif self._extracts or self._going_on is not None:
            self._follow_consumer()
        if dispatch.giving.idle or self._output_ended or not self._worker.usable:
            return False
        if self._commits and not self._session.room:
            return False
        if self._outgoing.unsent and not self._flush_unsent():
            return False
        return self._give(now, many=many and not self._in_order)

    def pump_all(self, now: float) -> None:
        """Give the worker all that it may have now, and write what there is to send."""
        # More than once: none of the messages taken may have been fit to be sent.
        giving = self.dispatch.giving
        while self.pump(now, many=True):
            # The next turn writes what waits in a session that has just begun, or wakes
            # the reader for such a round.
            if giving.filled and not self.dispatch.dialogues:
                break
            if giving.idle and not self._extracts:
                break  # everything available is written
        else:
            self._flush()
        self.measure()

    def measure(self) -> None:
        """Set the gauges of the messages that the worker has, and of those that wait."""
        if self._metrics is not None:
            self._metrics.in_flight(self._worker.name, self.dispatch.held)
            self._metrics.waiting(self._backlog.messages)

    def retire(self) -> None:
        """Give no more messages; stop the worker when it has answered those it has."""
        self._retiring = self.dispatch.giving.retiring = True
        self.pump_all(anyio.current_time())
        self._stop_if_retired()

    def _give(self, now: float, *, many: bool) -> bool:
        session, dispatch, paired = self._session, self.dispatch, self._paired
        if paired is not None and self._step is not self._backlog.in_step:
            self._step = self._backlog.in_step
            paired.go_in_step(self._step)
        owed = session.owed
        idle = not owed
        given = False
        while True:
            room = session.room
            # A batch that was begun is filled, whatever the limit.
            if not owed or not self._batches:
                room = min(room, self._max_messages - dispatch.given)
            if not (many or self._in_order):
                room = min(room, 1)
            event = dispatch.next(now, owed, room)
            if event is None:
                break
            if paired is not None and self._bound != dispatch.bound:
                self._bound = dispatch.bound
                paired.bound_replies(self._bound)
            try:
                session.send(event, now)
            except InvalidMessage as error:
                dispatch.refused(error)
                owed = session.owed
                continue
            given = True
            if self._commits and not session.owed:
                # All of it was committed earlier, so it has ended already.
                for ended in session.events_received():
                    self._act(ended, now)
                owed = session.owed
                continue
            if not many or dispatch.giving.filled:
                break  # else gather more: each write is a system call, a wake-up
            owed = session.owed
        if self._batches:
            self._batch_due.set(dispatch.giving.due)
        if not given:
            return False
        if idle:
            self._written_before = self._outgoing.written
        self._write(session.data_to_send())
        if self._commits:
            if not session.owed:
                self._pool.end_if_answered()
            self._given_end = self._outgoing.end
        if idle or self._asks or not self._in_order:
            self._arm_deadlines(now)
            if idle and paired is not None and paired.wants_unread:
                self._unshown.set()
                if self._given is not None:
                    self._given.set()
        return True

    def _write_added(self) -> None:
        self._flush()
        # What there is no room for stays with the caller, which then waits.
        dispatch, unsent = self.dispatch, self._outgoing.unsent
        while not unsent and (added := dispatch.next_added()) is not None:
            try:
                self._session.send(added, anyio.current_time())
            except LocalProtocolError:  # a terminate was sent, or its end is near
                error = self._worker.errors.lost("ended before it had all input")
                dispatch.dialogues[added.id].undelivered = error
            self._flush()

    def _follow_consumer(self) -> None:
        if not self._in_order:
            now = anyio.current_time()
            for cancelled in self.dispatch.cancellations():
                self._session.send(cancelled, now)
                self._flush()
                self._note_wear()
        elif self.dispatch.abandoned and self._worker.usable:
            # Its next output would be mistaken for the answer to the next request.
            self._worker.stop(patient=False)
        if self._going_on is not None and not self.dispatch.stalled:
            self._going_on.set()

    def _stop_if_retired(self) -> None:
        # It may still commit what it has answered when it is asked to end.
        pending = self._session.owed if self._commits else self.dispatch.open.count
        if not pending and self._worker.usable:
            self._worker.stop()

    def start_farewell(self, why: FarewellReason) -> bool:
        """
        Ask the worker to end by its dialect's farewell; return whether that is sent.

        A worker that has not identified itself is sent the farewell once it has.
        """
        if not self._session.sends_farewell:
            return False
        self._farewell = Farewell(why=why)
        now = anyio.current_time()
        self._session.handle_timer(now)  # the session's own timeout may start here
        self._settle(now)
        return self._farewell is None or self.awaits_identity

    async def parting(self) -> None:
        """Wait until nothing that the worker works on defers its farewell."""
        if self._session.defers_farewell:
            self._parting = anyio.Event()
            await self._parting.wait()

    def give_whole(self) -> None:
        """Write the rest of what was sent in part: the worker gets nothing more."""
        if self._paired is None or self._worker.failed:
            return
        self._paired.give_whole()
        self._write(self._session.data_to_send())

    # --- bytes to the worker ----------------------------------------------------

    async def write(self) -> None:
        """Write what the pipe had no room for, until cancelled."""
        while True:
            await self._outgoing.room()
            if self._flush_unsent():
                self.pump_all(anyio.current_time())

    def _write(self, chunks: list[bytes]) -> None:
        self._outgoing.queue(chunks)
        self._flush()

    def _flush(self) -> None:
        # Data that the pipe has no room for stays in the session, so that control
        # messages can overtake it.
        while self._flush_unsent() and self._unprompted:
            if not (chunks := self._session.data_to_send()):
                return
            self._outgoing.queue(chunks)

    def _flush_unsent(self) -> bool:
        """Write what the pipe takes; return whether that was all."""
        try:
            return self._outgoing.flush()
        except BrokenPipeError:
            # The session counts it as sent: what was never read just gets no reply.
            self._worker.pipe_closed("stdin")
            return True

    # --- bytes from the worker ----------------------------------------------------

    async def read(self) -> None:
        """Read to the end of what the worker writes."""
        # A dialect may have something to send first.
        self._settle(anyio.current_time())
        await self._read_all()
        if not self._worker.failed:
            self._receive_eof()

    async def _read_all(self) -> None:
        wire = self._wire
        pull = cast("Pulled", wire).pull if hasattr(wire, "pull") else None
        while not self.all_read:
            await self._wait_for_consumer()
            if self._pull():
                await (wire.readable() if pull is None else pull(self._pull))

    def _pull(self) -> bool:
        """Read what has come; return whether to wait for more, and for nothing else."""
        read = self._wire.read
        for _ in range(_TURN):
            if self.dispatch.stalled and not self._worker.exited:
                return False
            data = read(self._chunk)
            if not data:
                self.all_read = data is not None
                return data is None
            self._chunk = _BIG_CHUNK if len(data) >= _CHUNK else _CHUNK
            self._take(data)
        return True

    def read_available(self) -> bool:
        """Read what has come; return whether the worker may be judged by that alone."""
        if self.all_read:
            return True
        waits = self._pull()
        if not waits:
            self._wire.stop_waiting()  # the reading task is to see why
        return waits and not self._worker.failed

    async def _wait_for_consumer(self) -> None:
        """Pause reading until outputs are collected, unless the worker has exited."""
        while self.dispatch.stalled and not self._worker.exited:
            self._paused_at = now = anyio.current_time()
            self.deadlines.pause()
            self._session.reading_paused(now)
            self._going_on = anyio.Event()
            self._settle(now)
            await self._going_on.wait()
            self._going_on = None
            now = anyio.current_time()
            if not self._in_order:
                self.dispatch.postpone(now - self._paused_at, now)
            self._arm_deadlines(now)
            if self._unprompted:
                self._take(b"")  # its own deadlines go on, even if nothing has come

    def catch_up(self) -> None:
        """Read what a dead process has written, without waiting for more."""
        left = _MOST
        while left > 0 and (data := self._wire.read(left)):
            left -= len(data)
            self._take(data)

    def _take(self, data: bytes) -> None:
        if self._worker.failed:
            self.late += len(data)
            return
        now, owed = self._clock(), self._session.owed
        self._understand(data, now)
        if self._commits and owed and not self._session.owed:
            self._look_for_surplus(now)
        self._settle(now)

    def _look_for_surplus(self, now: float) -> None:
        """
        Detect a surplus answer, which would be taken for the next message's.

        A surplus answer that comes after the worker has read the next message looks
        like the answer to that message, unless it names a different one. A position
        that is committed by its number is right even then.
        """
        if self._outgoing.written - self._wire.unread() < self._given_end:
            self._fail_protocol(
                RemoteProtocolError(
                    "sent an answer to an action that it had not read yet, expected one"
                    " for each action; is a callback called twice?"
                )
            )
        while not self._worker.failed and (data := self._wire.read(_CHUNK)):
            self._understand(data, now)

    def _understand(self, data: bytes, now: float) -> None:
        session = self._session
        owed = session.owed
        self.received += len(data)
        session.receive_data(data, now)
        if session.owed < owed:
            self._reply_bytes += self.received
            self.received = 0
            took = now - self.deadlines.turn_at
            if self._in_order and self._backlog.checker is not None:
                self.dispatch.time_oldest(owed, took)
            if self._metrics is not None:
                self._metrics.took(self._worker.name, self._worked + took)
            self._worked = 0.0
            self._arm_deadlines(now)
        elif self._asks and session.room >= 1:
            self._arm_deadlines(now)  # disarms: it asks, and waits for us

    def _receive_eof(self) -> None:
        self._output_ended = True
        now = anyio.current_time()
        if self._paired is not None:
            # The message that it dies of is known only at its exit.
            self._paired.input_unread(self._outgoing.unread(), now)
        self._session.receive_eof(now)
        self._settle(now)

    def conclude(self, *, clean: bool) -> None:
        """
        Deliver the replies of a worker that is gone, as far as its exit proves them.

        ``clean``: it exited as it should, after it had written everything.
        """
        if self._worker.failed:
            return
        now = anyio.current_time()
        if self._paired is not None and not self._output_ended:
            self._paired.input_unread(self._outgoing.unread(), now)
        self._session.peer_exited(clean, now)
        self._concluding = True
        self._settle(now)

    # --- events of the session ------------------------------------------------------

    def _settle(self, now: float) -> None:
        """Act upon the session's events, and write what it has to send."""
        while True:
            for event in self._session.events_received():
                # Nearly all events are of this kind, and lock-step waits for each.
                if type(event) is Ended:
                    self._end(event, now)
                else:
                    self._act(event, now)
            if self._farewell is not None:
                with suppress(LocalProtocolError):  # too early, or too late
                    self._session.send(self._farewell, now)
                    self._farewell = None
            if self._parting is not None and not self._session.defers_farewell:
                self._parting.set()
            self.pump_all(now)
            if self._paired is None or not self._paired.wants_unread:
                break
            if self._worker.failed or not self._look(now):
                break
        if self._unprompted:
            timer = self._session.get_timer()
            if timer != self._session_timer:
                self._session_timer = timer
                self._session_due.set(timer)
        if self._retiring:
            self._stop_if_retired()
        elif self._commits and not self._session.owed:
            held, wanted = self.dispatch.open.count, self._backlog.messages
            if held and wanted and not self._session.room and self._worker.usable:
                self._pool.commits.warn_of_none(self._worker.name, held)
            self._pool.end_if_answered()

    def _act(self, event: Event, now: float) -> None:
        match event:
            case Ended():
                self._end(event, now)
            case Added(id_, messages):
                try:
                    self.dispatch.added(id_, messages)
                except PayloadTooBig as too_big:
                    self._fail_protocol(too_big)
                if self._in_order:
                    self._arm_deadlines(now)
            case CommitAsked(position=position):
                if not self._storing:
                    self._storing_since = now
                    self._worked += now - self.deadlines.turn_at
                self._storing += 1
                self._arm_deadlines(now)  # disarms: the worker waits for us
                answer = partial(self._answer_commit, position)
                self._pool.commit(self._worker.name, event, answer)
            case Ready():
                self._identified = True
                worker = self._worker
                self._pool.handle(WorkerReady(worker.name, worker.pid))
            case Alive():
                self._pool.handle(AliveSeen(self._worker.name))
            case Farewell(reason=reason, final=True):
                self._worker.fail(
                    f"reported a fatal condition for all workers: {reason}", "abnormal"
                )
            case Farewell():
                # It exits by itself; its exit status shows whether that is a fault.
                self.dispatch.giving.retiring = True
            case Mispaired():
                self._handle_mispaired(event)
            case Failed(error=error, final=final):
                self._fail_protocol(error, "abnormal" if final else "protocol")
            case Noise(data):
                self._worker.noise.take(data + b"\n")
            case Opened() | Cancelled() | CommitAnswered() | Wanted():
                raise AssertionError(f"unreachable: a worker's {type(event).__name__}")
            case _:
                assert_never(event)

    def _end(self, event: Ended, now: float) -> None:
        """Deliver the exchanges that have ended, and count them."""
        refusals, read = event.refusals, self._reply_bytes
        self._reply_bytes = 0
        refused = None
        if refusals:
            if self._metrics is not None:
                self._metrics.refused(self._worker.name, len(refusals))
            places, error = [r.place for r in refusals], self._worker.errors.refused
            refused = Refusals(places, refusals, error)
        if not self._in_order:
            self.dispatch.time_each(event, now)
        answered = self.dispatch.ended(event, read + event.overhead, refused)
        self.answered += answered.messages
        if not self.dispatch.open.count:
            self._arm_deadlines(now)  # disarms, unless a status is still to come
        if self._metrics is not None and answered.exchanges:
            self._metrics.answered(self._worker.name, *answered, read)
            if (checker := self._backlog.checker) is not None:
                self._metrics.mismatched(checker.found)
        self._note_wear()

    def _note_wear(self) -> None:
        """Report the worker as worn once it has had as many messages as it may."""
        # What was given counts, too, once nothing is open: a refused batch was answered
        # although it is retried in parts, and cancelled messages never will be.
        total = 0 if self.dispatch.open.count else self.dispatch.given
        if max(self.answered, total) >= self._max_messages:
            self._max_messages = math.inf
            reason = f"answered {counted(max(self.answered, total), 'message')}"
            self._pool.handle(WorkerWorn(self._worker.name, reason))

    def _fail_protocol(
        self, error: EtlstageError, cause: FailureCause = "protocol"
    ) -> None:
        self._worker.fail(f"broke the protocol: {error}", cause, error)

    def _handle_mispaired(self, found: Mispaired) -> None:
        self.doubtful = found.doubtful
        if self._concluding:
            # It may have died of the last message, after two replies to the first.
            self._backlog.go_in_step(self.dispatch.answered(self._session.owed))
            return
        self.mispaired = found
        error = RemoteProtocolError(found.what)
        self._worker.fail(f"broke the protocol: {found.what}", "pairing", error)

    def _answer_commit(self, position: object, error: str | None) -> None:
        now = self._clock()
        if self._metrics is not None:
            self._metrics.committed(self._worker.name, stored=error is None)
        self._storing -= 1
        if not self._storing:
            if not self._in_order:
                self.dispatch.postpone(now - self._storing_since, now)
            self._arm_deadlines(now)
            if self._stored is not None:
                self._stored.set()
                self._stored = None
        # Even if the worker is stopping, or has exited: the position is stored.
        if not self._worker.ended:
            self._session.send(CommitAnswered(position, error), now)
            self._settle(now)

    def _ring_session(self, _now: float) -> None:
        self._session_timer = None
        self._worker.read_available()
        if self._worker.failed or self.all_read:
            return
        now = self._clock()
        self._session.handle_timer(now)
        self._settle(now)

    async def stored(self) -> None:
        """Wait until all positions that the worker asked to store are stored."""
        if self._storing:
            if self._stored is None:
                self._stored = anyio.Event()
            await self._stored.wait()

    # --- the pairing of replies -------------------------------------------------------

    def _look(self, now: float) -> bool:
        """Report the unread input to the session; return whether that moved it on."""
        paired = self._paired
        assert paired is not None
        receive = paired.input_unread(self._outgoing.unread(), now)
        if receive:
            # Measure, then read until dry, then judge: reading after measuring finds
            # everything that the worker wrote before it came back for more.
            while not self._worker.failed and (data := self._wire.read(_CHUNK)):
                self._understand(data, now)
            paired.output_dry(now)
        chunks = self._session.data_to_send()
        if chunks:
            self._write(chunks)
        if not receive and paired.wants_unread:
            self._unshown.set()
            return False
        return True

    async def prove(self) -> None:
        """Observe how the worker's input drains, while it matters, until cancelled."""
        paired = self._paired
        if paired is None:
            return
        while True:
            await self._unshown.wait()
            self._unshown = anyio.Event()
            while paired.wants_unread and not self._worker.failed:
                now, at = self._clock(), self._session.get_timer()
                if at is None or at <= now:
                    await anyio.lowlevel.checkpoint()
                else:
                    self._given = anyio.Event()
                    with anyio.move_on_after(at - now):
                        await self._given.wait()
                    self._given = None
                now = self._clock()
                if not self._worker.failed and paired.wants_unread and self._look(now):
                    self._settle(now)

    # --- deadlines --------------------------------------------------------------------

    async def watch(self) -> None:
        """Ring the deadlines until cancelled."""
        try:
            await self.deadlines.run(self._batch_due, self._session_due)
        finally:
            self.deadlines.close(self._clock())

    def _arm_deadlines(self, now: float) -> None:
        """Restart the worker's time for what is due now; disarm if nothing is."""
        session, since = self._session, None
        asks = self._asks and session.room >= 1
        waits = self._storing or asks or self._going_on is not None
        if session.owed and not waits:
            since = now if self._in_order else self.dispatch.oldest
        self.deadlines.arm(now, since, busy=self.dispatch.open.count > 0)

    def progressed(self, now: float) -> None:
        """Give the worker more time: it reports progress with what it has."""
        if not self._in_order:
            return
        took = self.deadlines.progressed(now)
        if took is not None:
            limit = self._stage.timeout.message
            hint = (
                "it keeps reporting progress, which restarts timeout.message"
                f" ({limit:g} s) each time; timeout.total limits that"
            )
            self._report_silence(took, hint, progressing=True)

    def silence(self, now: float) -> tuple[float, int] | None:
        """Return how many seconds an answer has been due, and its bytes so far."""
        asked_at = self.deadlines.asked_at  # read once: any thread may call this
        return None if asked_at is None else (now - asked_at, self.received)

    def _look_for_answer(self, now: float) -> None:
        deadlines = self.deadlines
        within = deadlines.missed(now)
        if within is not None:
            # It may have come in time, while the event loop was busy.
            if not self._worker.read_available():
                if self.dispatch.stalled:
                    self._arm_deadlines(now)  # until the reading task pauses
                return
            within = deadlines.missed(now)
        if (since := deadlines.asked_at) is None:
            return
        if within is not None:
            self._miss_answer(now, within)
        if deadlines.silent(now):
            self._report_silence(
                now - since, self._stage.dialect.silence(self.received)
            )
        if within is None:
            deadlines.look_again()

    def _report_silence(
        self, seconds: float, hint: str, *, progressing: bool = False
    ) -> None:
        name, pid = self._worker.name, self._worker.pid
        self._pool.publish(WorkerSilent(name, pid, seconds, hint, progressing))

    def _miss_answer(self, now: float, within: str) -> None:
        what = "batch" if self._batches else "message"
        what = "request" if self._extracts else what
        if self._in_order:
            wrote = self._stage.dialect.silence(self.received)
            # One of the replies may belong to another message: a worker that leaves
            # out an EOP waits for us, and we wait for it.
            paired = not self._commits
            answered = self.dispatch.answered(self._session.owed) if paired else 0
            self._backlog.go_in_step(answered)
            if answered:
                missing = counted(self._session.owed, "reply", "replies")
                wrote = f"{missing} missing in its block; {wrote}"
            reason = f"did not answer a {what} within {within}: {wrote}"
            self._worker.fail(reason, "silent")
            return
        limit = self.deadlines.limit
        assert limit is not None, "what is missed has a limit"
        for id_ in self.dispatch.expired(now, limit):
            reason = f"did not answer a {what} within {within}, and it was cancelled"
            self.dispatch.lose_one(id_, *self._worker.errors.cancelled(reason))
            self._session.send(Cancelled(id_, 0, reason), now)
            self._note_wear()
            self.pump_all(now)  # there is room for another message
        self._arm_deadlines(now)
