"""
The link to one worker: the bytes both ways, and the session that gives them a meaning.

Who owns what: the link owns the wire, the session, the dispatcher and the deadlines of
one process, and nothing else has them. The worker (``worker.py``) owns the process and
decides what its end means: the link reports to it what the process did wrong, and asks
it whether the process may be given more. What concerns the stage goes to the pool: that
a worker is ready, alive, worn or silent, and positions that it wants stored. What is
given next, and what becomes of it, is decided by the dispatcher; what bytes mean, and
when an exchange has ended, by the session.

In the common case all happens in the task that reads: a reply comes in, its messages
are delivered, the next ones are taken and written at once. Another task writes only
while the pipe is full, so that reading never waits for writing; one rings deadlines;
and one looks how the input of a worker drains, where only that shows whether replies
are paired with what they answer. That look is taken in the tasks of the worker alone:
a fault found in it must not be raised in the stack of who submits.
"""

from __future__ import annotations

import math
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, assert_never

import anyio
import anyio.lowlevel

from etlstage.errors import (
    EtlstageError,
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

if TYPE_CHECKING:
    from etlstage.supervisor.pool import WorkerPool
    from etlstage.supervisor.worker import WorkerProcess

__all__ = ("Link",)

_CHUNK: Final = 65536  # bytes a read; once that many came:
# Half of what the pipe holds: memory for all of it comes from the kernel, and goes
# back there, with every read, and its pages are cleared each time.
_BIG_CHUNK: Final = 512 * 1024
_MOST: Final = 1024 * 1024  # bytes that a pipe holds
_TURN: Final = 16  # reads in a row before other tasks get a turn


class Link:
    """
    Feeds one worker, and delivers what it answers.

    Attributes:
        dispatch: The exchanges of the worker.
        deadlines: How long it may take.
        answered: Messages that it has answered.
        received: Bytes that have come since the last complete reply.
        late: Bytes that it wrote after it had failed.
        mispaired: What was found when its replies could not be matched.

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
        self._clock = clock()  # of all that is asked of anyio, the time most often
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
        self._paired = session if isinstance(session, Paired) else None
        self._step, self._bound = False, math.inf  # as the session has them
        self._in_order = session.in_order
        self._unprompted = session.unprompted and self._paired is None
        self.dispatch: Dispatcher = Dispatcher(
            stage, backlog, number, in_order=session.in_order
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
        self._max_messages = max_messages
        self._reply_bytes = 0  # of replies that came and have not ended
        self._batch_due = Deadline(self.pump_all)
        self._session_due = Deadline(self._ring_session)
        self._session_timer: float | None = None
        self._unsent: deque[memoryview] = deque()  # what the pipe had no room for
        self._full = anyio.Event()
        self._written = 0  # bytes that the pipe took
        self._written_before = 0  # the same, when it was given something while idle
        self._given_end = 0  # the same, once it has all that it was given last
        self._going_on: anyio.Event | None = None  # reading waits for the consumer
        self._paused_at = 0.0
        self._storing = 0  # positions that are being stored for the worker
        self._storing_since = 0.0
        self._worked = 0.0  # seconds at what it is at, before it asked for that
        self._stored: anyio.Event | None = None  # who waits until all of them are
        self._unshown = anyio.Event()  # whether replies are paired is to be shown
        self._given: anyio.Event | None = None  # who sleeps meanwhile is to look
        self._retiring = False
        self._identified = False  # the worker has identified itself, where it does
        self._farewell: Farewell | None = None  # to be sent as soon as it can be
        self._all_read = self._output_ended = False
        self._chunk = _CHUNK  # bytes to read next
        self._left = 0  # bytes in its stdin when its process was gone
        self._unwritable = 0  # bytes for which that was closed already
        self._concluding = False  # its process is gone, and all it wrote was read

    @property
    def owed(self) -> int:
        """Exchanges that the worker has not answered."""
        return self._session.owed

    @property
    def pending(self) -> bool:
        """Whether there is anything that it has to answer, or is to be given."""
        giving, dispatch = self.dispatch.giving, self.dispatch
        # What one that is to go has not committed, another will be given.
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
        """Whether the worker has no whole message of what it was given last."""
        return self._paired is not None and self._paired.ahead

    @property
    def unproven(self) -> int:
        """Messages that were delivered, and may yet turn out to have others' replies."""
        return 0 if self._paired is None else self._paired.unproven

    @property
    def awaits_identity(self) -> bool:
        """Whether a farewell waits for the worker to identify itself."""
        return self._farewell is not None and not self._identified

    def exited(self) -> None:
        """Record that the process is gone; what it wrote may still have to be read."""
        # It can't be measured any more once its stdin is closed.
        self._left = self._wire.unread()
        if self._extracts and self._going_on is not None:
            self._going_on.set()  # no consumer is waited for

    def _unread(self) -> int:
        return max(self._left, self._wire.unread()) + self._unwritable

    def unread(self, left: int) -> bool:
        """Return whether a worker that left so many bytes has read nothing it holds."""
        return left >= self._written - self._written_before

    # --- what it is given -----------------------------------------------------

    def pump(self, now: float, *, many: bool = False) -> bool:
        """
        Give the worker what it may have now; return whether there was anything.

        ``many``: several exchanges, where these end in any order.
        """
        dispatch = self.dispatch
        if dispatch.dialogues:
            self._follow_consumer()
            self._write_added()
        elif self._extracts or self._going_on is not None:
            self._follow_consumer()
        if dispatch.giving.idle or self._output_ended or not self._worker.usable:
            return False
        if self._commits and not self._session.room:
            return False
        if self._unsent and not self._flush_unsent():
            return False
        return self._give(now, many=many and not self._in_order)

    def pump_all(self, now: float) -> None:
        """Give the worker all that it may have now, and write what there is to send."""
        # More than once: of what was taken, all may have been refused.
        giving = self.dispatch.giving
        while self.pump(now, many=True):
            # Who reads for a round that has begun now is woken in the next turn.
            if giving.filled or (giving.idle and not self._extracts):
                return  # what there was is written
        self._flush()

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
            # A batch that was begun is filled.
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
                # All of it was committed before, and has ended already.
                for ended in session.events_received():
                    self._act(ended, now)
                owed = session.owed
                continue
            if not many or dispatch.giving.filled:
                break  # each write is a system call, and wakes the worker
            owed = session.owed
        if self._batches:
            self._batch_due.set(dispatch.giving.due)
        if not given:
            return False
        if idle:
            self._written_before = self._written
        self._write(session.data_to_send())
        if self._commits:
            if not session.owed:
                self._pool.end_if_answered()
            self._given_end = self._written + sum(map(len, self._unsent))
        if idle or self._asks or not self._in_order:
            self._arm_deadlines(now)
            if idle and paired is not None and paired.wants_unread:
                self._unshown.set()
                if self._given is not None:
                    self._given.set()
        return True

    def _write_added(self) -> None:
        self._flush()
        # What there is no room for stays with the caller, who waits then.
        while not self._unsent and (added := self.dispatch.next_added()) is not None:
            with suppress(LocalProtocolError):  # the farewell was sent
                self._session.send(added, anyio.current_time())
            self._flush()

    def _follow_consumer(self) -> None:
        if not self._in_order:
            now = anyio.current_time()
            for cancelled in self.dispatch.cancellations():
                self._session.send(cancelled, now)
                self._flush()
                self._note_wear()
        elif self.dispatch.abandoned and self._worker.usable:
            # What it writes next would be taken for the answer to the next request.
            self._worker.stop(patient=False)
        if self._going_on is not None and not self.dispatch.stalled:
            self._going_on.set()

    def _stop_if_retired(self) -> None:
        # What was answered and is not committed, it may commit when it is to end.
        pending = self._session.owed if self._commits else self.dispatch.open.count
        if not pending and self._worker.usable:
            self._worker.stop()

    def start_farewell(self, why: FarewellReason) -> bool:
        """
        Have the worker end, in its dialect; return whether there is a way to.

        One that has not identified itself is sent the farewell once it has.
        """
        if not self._session.sends_farewell:
            return False
        self._farewell = Farewell(why=why)
        now = anyio.current_time()
        self._session.handle_timer(now)  # its own time may count from here
        self._settle(now)
        return self._farewell is None or self.awaits_identity

    def give_whole(self) -> None:
        """Write all of what the worker was given a part of: it gets nothing more."""
        if self._paired is None or self._worker.failed:
            return
        self._paired.give_whole()
        self._write(self._session.data_to_send())

    # --- bytes to the worker ----------------------------------------------------

    async def write(self) -> None:
        """Write what the pipe had no room for, until cancelled."""
        while True:
            await self._full.wait()
            self._full = anyio.Event()
            await self._wire.writable()
            if self._flush_unsent():
                self.pump_all(anyio.current_time())

    def _write(self, chunks: list[bytes]) -> None:
        self._unsent.extend(map(memoryview, chunks))
        self._flush()

    def _flush(self) -> None:
        # What the pipe has no room for stays in the session, where control overtakes.
        while self._flush_unsent() and self._unprompted:
            if not (chunks := self._session.data_to_send()):
                return
            self._unsent.extend(map(memoryview, chunks))

    def _flush_unsent(self) -> bool:
        """Write what the pipe takes; return whether that was all."""
        unsent = self._unsent
        try:
            while unsent:
                chunk = unsent[0]
                if not chunk:  # SEND_EOF
                    self._wire.close_write()
                    unsent.popleft()
                    continue
                written = self._wire.write(chunk)
                self._written += written
                if written < len(chunk):
                    unsent[0] = chunk[written:]
                    self._full.set()
                    return False
                unsent.popleft()
        except BrokenPipeError:
            # The session takes it for given: what was never read has no reply.
            self._unwritable += sum(map(len, unsent))
            unsent.clear()
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
        pull = wire.pull if isinstance(wire, Pulled) else None
        while not self._all_read:
            await self._wait_for_consumer()
            if self._pull():
                await (wire.readable() if pull is None else pull(self._pull))

    def _pull(self) -> bool:
        """Take what has come; return whether more is waited for, and nothing else."""
        read = self._wire.read
        for _ in range(_TURN):
            if self.dispatch.stalled and not self._worker.exited:
                return False
            data = read(self._chunk)
            if not data:
                self._all_read = data is not None
                return data is None
            self._chunk = _BIG_CHUNK if len(data) >= _CHUNK else _CHUNK
            self._take(data)
        return True

    async def _wait_for_consumer(self) -> None:
        """Read no more while outputs lie unread; all that is left once it exited."""
        while self.dispatch.stalled and not self._worker.exited:
            self._paused_at = now = anyio.current_time()
            self.deadlines.pause()
            self._session.reading_paused(now)
            self._settle(now)
            self._going_on = anyio.Event()
            await self._going_on.wait()
            self._going_on = None
            now = anyio.current_time()
            if not self._in_order:
                self.dispatch.postpone(now - self._paused_at, now)
            self._arm_deadlines(now)

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
        Find an answer too many, which would be taken for that to what is given next.

        One that comes when the worker has read what it is given next looks like the
        answer to that, unless the name of what it answers is another. A position that
        it commits by its number is right all the same.
        """
        if self._written - self._wire.unread() < self._given_end:
            self._fail_protocol(
                RemoteProtocolError(
                    "sent an answer to what it had not read yet, expected one for each;"
                    " is a callback called twice?"
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
            self._arm_deadlines(now)  # nothing: it asks, and waits for us

    def _receive_eof(self) -> None:
        self._output_ended = True
        now = anyio.current_time()
        if self._paired is not None:
            # Of what it dies is known only at its exit.
            self._paired.input_unread(self._unread(), now)
        self._session.receive_eof(now)
        self._settle(now)

    def conclude(self, *, clean: bool) -> None:
        """
        Deliver what a worker has answered that is gone, where its exit shows it right.

        ``clean``: it exited as it should, with all that it had to write.
        """
        if self._worker.failed:
            return
        now = anyio.current_time()
        if self._paired is not None and not self._output_ended:
            self._paired.input_unread(self._unread(), now)
        self._session.peer_exited(clean, now)
        self._concluding = True
        self._settle(now)

    # --- what it means --------------------------------------------------------------

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
                with suppress(LocalProtocolError):  # not yet, or it is beyond that
                    self._session.send(self._farewell, now)
                    self._farewell = None
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
        if self._metrics is not None:
            self._metrics.in_flight(self._worker.name, self.dispatch.held)
            self._metrics.waiting(self._backlog.messages)
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
                self._arm_deadlines(now)  # nothing: the worker waits for us
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
                # It exits by itself; whether that is a fault its exit status shows.
                self.dispatch.giving.retiring = True
            case Mispaired():
                self._handle_mispaired(event)
            case Failed(error=error):
                self._fail_protocol(error)
            case Noise(data):
                self._worker.noise.take(data + b"\n")
            case Opened() | Cancelled() | CommitAnswered() | Wanted():
                raise AssertionError(f"unreachable: a worker's {type(event).__name__}")
            case _:
                assert_never(event)

    def _end(self, event: Ended, now: float) -> None:
        """Deliver what has ended, and count it."""
        refusals, size = event.refusals, self._reply_bytes + event.overhead
        self._reply_bytes = 0
        refused = None
        if refusals:
            if self._metrics is not None:
                self._metrics.refused(self._worker.name, len(refusals))
            places, error = [r.place for r in refusals], self._worker.errors.refused
            refused = Refusals(places, refusals, error)
        if not self._in_order:
            self.dispatch.time_each(event, now)
        answered = self.dispatch.ended(event, size, refused)
        self.answered += answered.messages
        if not self.dispatch.open.count:
            self._arm_deadlines(now)  # nothing, unless a status is still to come
        if self._metrics is not None and answered.exchanges:
            self._metrics.answered(self._worker.name, *answered)
            if (checker := self._backlog.checker) is not None:
                self._metrics.mismatched(checker.found)
        self._note_wear()

    def _note_wear(self) -> None:
        """Report the worker as worn that has had as many messages as it may."""
        # A batch that was refused, and is tried one by one, was answered all the same;
        # and what was cancelled will not be.
        total = 0 if self.dispatch.open.count else self.dispatch.given
        if max(self.answered, total) >= self._max_messages:
            self._max_messages = math.inf
            reason = f"answered {counted(max(self.answered, total), 'message')}"
            self._pool.handle(WorkerWorn(self._worker.name, reason))

    def _fail_protocol(self, error: EtlstageError) -> None:
        self._worker.fail(f"broke the protocol: {error}", "protocol", error)

    def _handle_mispaired(self, found: Mispaired) -> None:
        self.doubtful = found.doubtful
        if self._concluding:
            # It may have died of the last one, behind two replies to the first.
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
        # Also of a worker that is stopping, or has exited: what is stored is stored.
        if not self._worker.ended:
            self._session.send(CommitAnswered(position, error), now)
            self._settle(now)

    def _ring_session(self, now: float) -> None:
        self._session_timer = None
        self._session.handle_timer(now)
        self._settle(now)

    async def stored(self) -> None:
        """Wait until all positions are stored that the worker has asked to store."""
        if self._storing:
            if self._stored is None:
                self._stored = anyio.Event()
            await self._stored.wait()

    # --- whether replies are paired ---------------------------------------------------

    def _look(self, now: float) -> bool:
        """Report to the session what is unread; return whether that has moved it on."""
        paired = self._paired
        assert paired is not None
        receive = paired.input_unread(self._unread(), now)
        if receive:
            # Measured first, then read dry, then judged: what is read behind the
            # measuring was written before the worker came back for more.
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
        """Look how the worker's input drains, while that matters, until cancelled."""
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

    # --- how long it takes ------------------------------------------------------------

    async def watch(self) -> None:
        """Ring the deadlines until cancelled."""
        try:
            await self.deadlines.run(self._batch_due, self._session_due)
        finally:
            self.deadlines.close(self._clock())

    def _arm_deadlines(self, now: float) -> None:
        """Give the worker all its time for what is due now."""
        session, since = self._session, None
        waits = self._storing or (self._asks and session.room >= 1)
        if session.owed and not waits:
            since = now if self._in_order else self.dispatch.oldest
        self.deadlines.arm(now, since, busy=self.dispatch.open.count > 0)

    def progressed(self, now: float) -> None:
        """Give the worker more time: it reports that it gets on with what it has."""
        if not self._in_order:
            return
        took = self.deadlines.progressed(now)
        if took is not None:
            limit = self._stage.timeout.message
            hint = (
                f"it reports progress, which has begun timeout.message ({limit:g} s)"
                " anew again and again; timeout.total is a limit for that"
            )
            self._report_silence(took, hint, progressing=True)

    def silence(self, now: float) -> tuple[float, int] | None:
        """Return for how long an answer is due, and the bytes of it that have come."""
        asked_at = self.deadlines.asked_at  # once: another thread may ask
        return None if asked_at is None else (now - asked_at, self.received)

    def _look_for_answer(self, now: float) -> None:
        deadlines = self.deadlines
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
            # One of the replies that came may have been another's: a worker that
            # leaves out an EOP waits for us, and we for it.
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
            reason = f"did not answer a {what} within {limit} s, and it was cancelled"
            self.dispatch.lose_one(id_, *self._worker.errors.cancelled(reason))
            self._session.send(Cancelled(id_, 0, reason), now)
            self._note_wear()
            self.pump_all(now)  # there is room for another one
        self._arm_deadlines(now)
