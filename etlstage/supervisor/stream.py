"""
The layer between the callers of a supervisor and its pool: one class per way to ask.

A *submission* holds messages and their outcomes; this module feeds it and waits for it.
:class:`Intake` feeds a stream, as a task of the supervisor, so that a slow input and a
slow consumer do not wait for each other; it reads ahead as far as there is room.
:class:`WorkerSession` is an exchange that its caller keeps open. Dispatchers decide
which worker is given what.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import asynccontextmanager
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final, Self, TypeVar

import anyio
import anyio.lowlevel

from etlstage.errors import InvalidMessage, LocalProtocolError
from etlstage.messages import (
    Position,
    Result,
    Run,
    check_code,
    check_text,
    refuse_one,
    sound,
)
from etlstage.protocol.base import Limits, Shape, Side
from etlstage.stage.policy import Order
from etlstage.stage.stage import Stage
from etlstage.supervisor.exchange.exchange import Outcome
from etlstage.supervisor.exchange.keyed import Lanes
from etlstage.supervisor.exchange.round import Dialogue, Repeat, Round
from etlstage.supervisor.exchange.submission import (
    AnyOrder,
    Collected,
    InputOrder,
    Submission,
)
from etlstage.telemetry.trace import Span
from etlstage.transport.process import Signal

if TYPE_CHECKING:
    from etlstage.supervisor.pool import WorkerPool

__all__ = (
    "Intake",
    "WorkerSession",
    "as_run",
    "extraction",
    "in_runs",
    "results_of",
    "submission_for",
)

# If exchanges end in any order, only one per lane is open: so there are enough lanes
# that a worker rarely has fewer exchanges than it may, and few enough to scan them all.
_LANES: Final = 16  # per worker
_ROUND_UNREAD: Final = 256 * 1024  # bytes of outputs, until no more are read
_SESSION_UNREAD: Final = 256 * 1024  # bytes each way, until the other side waits
_RUN: Final = 1024  # messages taken at once from an iterable
_RUN_BYTES: Final = 1024 * 1024  # about as many bytes; a single message may have more

_T = TypeVar("_T")
_to_result = partial(tuple.__new__, Result)


class Intake:
    """
    Feeds one submission, up to ``max_messages`` and ``max_bytes`` that it holds.

    ``items`` are the caller's input: runs of messages, and positions among them.
    """

    def __init__(
        self,
        pool: WorkerPool,
        submission: Submission | Lanes,
        items: Iterable[Run | Position] | AsyncIterable[Run | Position],
        max_messages: int,
        max_bytes: int,
    ) -> None:
        self.room: Signal = Signal()
        """Set it when there may be room again."""
        self.scope: anyio.CancelScope = anyio.CancelScope()
        self.error: BaseException | None = pool.closed()
        """The error that ended the input; None if the input ended by itself."""
        self.submission: Submission | Lanes = submission
        self._items = items
        self._begun = False
        self._ended = anyio.Event()
        self._pool = pool
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._commits = pool.stage.dialect.shape is Shape.COMMITTED
        self._count = 0  # messages fed
        # Messages, and bytes, that were collected and that the consumer has not taken.
        self._passing = self._passing_bytes = 0

    async def run(self) -> None:
        """Feed until the input ends, or the stream or the supervisor is closed."""
        self._begun = True
        try:
            with self.scope:
                await self._read()
        finally:
            self.submission.close()
            self._ended.set()

    def withhold(self) -> None:
        """Drop what no worker has taken, and all that is read from now on."""
        if not self._ended.is_set():
            self.error = None  # if the supervisor is closed now, nothing is missed
        self.submission.withhold()

    async def stop(self) -> None:
        """Stop, and return when the input is not touched any more."""
        self.scope.cancel()
        # If it has not begun, it touches nothing; asyncio may have cancelled its task.
        if self._begun:
            with anyio.CancelScope(shield=True):
                await self._ended.wait()

    def passing(self, collected: Sequence[Collected]) -> Iterator[Collected]:
        """Yield what was collected; until it is taken, it still needs room."""
        outcomes = [item for item in collected if isinstance(item, Outcome)]
        for outcome in outcomes:
            self._passing += len(outcome.messages)
            self._passing_bytes += outcome.size + outcome.reply_size
        self.room.set()
        for item in collected:
            if isinstance(item, Outcome):
                self._passing -= len(item.messages)
                self._passing_bytes -= item.size + item.reply_size
                self.room.set()
            yield item

    async def _read(self) -> None:
        await anyio.lowlevel.checkpoint_if_cancelled()
        try:
            if isinstance(self._items, AsyncIterable):
                async with _iterating(self._items) as items:
                    async for item in items:
                        await self._feed(item)
            else:
                for item in self._items:
                    await self._feed(item)
        except Exception as error:
            self.error = error
        except anyio.get_cancelled_exc_class() as error:
            if anyio.current_effective_deadline() == -math.inf:
                raise  # this task is cancelled
            self.error = error  # from the input, such as of a task that it waits for
        else:
            self.error = None
        self.submission.close()
        self._pool.kick()
        self._pool.end_if_answered()

    async def _feed(self, item: Run | Position) -> None:
        if isinstance(item, Position):
            self.submission.mark(item)
            self._pool.kick()  # a batch before the position is filled no more
            return
        run, error = sound(item, self._count)
        submission = self.submission
        while self._full:
            if isinstance(submission, Submission):
                submission.feeder_waits = True
            await self.room.wait()
        submission.feed(run, anyio.current_time())
        self._count += len(run)
        self._pool.kick()
        if error is not None:
            raise error

    @property
    def _full(self) -> bool:
        submission = self.submission
        messages, size = submission.held, submission.held_bytes
        if self._commits and isinstance(submission, Submission):
            # Messages that workers have are bounded by the session: to commit them, a
            # worker may need more.
            messages, size = submission.waiting, submission.waiting_bytes
        messages, size = messages + self._passing, size + self._passing_bytes
        return messages >= self._max_messages or size >= self._max_bytes


class WorkerSession:
    """
    One exchange with a worker that stays open: both sides send at any time.

    ::

        async with supervisor.session("echo") as session:
            await session.send(b"one")
            await session.choke()
            async for chunk in session:
                ...

    Iterate over it for the outputs of the worker. The iteration stops when the worker
    has ended its reply. It raises if the session ends otherwise; so does :meth:`send`:

    - WorkerRefusal: the worker rejected the session, and lives on;
    - TimeoutError: it took longer than ``timeout.message``, and was cancelled;
    - WorkerLost, or RemoteProtocolError: its worker died, ended before it had all
      input, or broke the protocol;
    - StageFailed: all workers failed.

    If the session is cancelled, by :meth:`error` or at the end of its block, a reader
    gets a LocalProtocolError after what has come.

    Sessions share the connection to their worker: while the reply of one is not read,
    the others wait for theirs. So read each session in a task of its own.

    Args:
        pool: The pool of the worker.
        event: The event that is requested; empty: as the stage has it.

    """

    def __init__(self, pool: WorkerPool, event: str) -> None:
        self._changed: anyio.Event | None = None
        self.dialogue: Dialogue = Dialogue(
            self._wake, event, max_waiting=_SESSION_UNREAD
        )
        """The exchange that a worker is given."""
        self._pool = pool
        self._stage = pool.stage
        self._heard: deque[bytes] = deque()

    async def send(self, chunk: bytes) -> None:
        """
        Send a chunk; wait while too much is on its way.

        A chunk that is sent after the worker has ended its reply is dropped.

        Raises:
            TypeError: If it is not bytes.
            InvalidMessage: If it is longer than ``max_message``.
            LocalProtocolError: If the input was ended.

        """
        run, error = sound([chunk])
        if error is not None:
            raise error
        if len(run[0]) > (most := self._stage.max_message):
            raise InvalidMessage(
                f"stage {self._stage.name}: chunk is {len(run[0])} bytes long,"
                f" expected no more than {most}; see max_message",
                index=0,
            )
        while self.dialogue.full:
            await self._change()
        self._raise_error()
        if self.dialogue.ended:
            raise LocalProtocolError("can't send: the input of the session was ended")
        self.dialogue.write(run[0])
        self._pool.kick()

    async def choke(self) -> None:
        """End the input; the worker may still answer. Safe to call twice."""
        self.dialogue.end()
        self._pool.kick()

    async def error(self, code: int, reason: str) -> None:
        """
        End the session; the worker is sent the reason, and its output is dropped.

        Args:
            code: Number of the error, of 64 bits with a sign.
            reason: Text of the error.

        Raises:
            TypeError: If the code is not an integer, or the reason is not a text.
            ValueError: If the code is out of range, or the reason can't be encoded as
                UTF-8, or takes more than 64 KiB.

        """
        number = check_code(code)
        check_text("reason", reason)
        self.dialogue.cancel_reason = number, reason
        self.close()

    def close(self) -> None:
        """End the session, unless it has ended."""
        if not self.dialogue.abandoned:
            self._pool.drop(self.dialogue)
            self._pool.kick()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while not self._heard:
            over, stalled = self.dialogue.over, self.dialogue.stalled
            for run in self.dialogue.outputs():
                self._heard.extend(run)
            if stalled:
                self._pool.kick()  # reading can continue
            if self._heard:
                break
            if over:
                self._raise_error()
                if not self.dialogue.finished:
                    raise LocalProtocolError(
                        "can't read all of the reply: the session was cancelled"
                    )
                raise StopAsyncIteration
            await self._change()
        return self._heard.popleft()

    def _raise_error(self) -> None:
        dialogue = self.dialogue
        if dialogue.error is None:
            return
        error = dialogue.error.with_traceback(None)
        if dialogue.expired:
            name, limit = self._stage.name, self._stage.timeout.message
            text = f"stage {name}: the session did not end within {limit} s"
            raise TimeoutError(text) from error
        raise error

    async def _change(self) -> None:
        if self._changed is None:
            self._changed = anyio.Event()
        await self._changed.wait()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None


def submission_for(
    stage: Stage, wake: Callable[[], None], max_bytes: int
) -> Submission | Lanes:
    """
    Return a submission, or lanes, that returns results in the stage's order.

    ``wake`` is called when there are results; up to ``max_bytes`` of them may wait.
    """
    if stage.order is not Order.KEY:
        return Submission(
            wake,
            max_unread=max_bytes,
            max_reply=stage.max_reply,
            order=InputOrder() if stage.order is Order.TOTAL else AnyOrder(),
        )
    count = max(1, stage.pool.max)
    if not stage.dialect.open(Side.SUPERVISOR, Limits()).in_order:
        count *= _LANES
    return Lanes(stage, count, wake, max_unread=max_bytes, max_reply=stage.max_reply)


async def extraction(
    pool: WorkerPool, start: object, end: object, text: str | None
) -> AsyncGenerator[Run, None]:
    """
    Request one round of extraction and yield its outputs.

    ``text`` is the template of the request; the default is JSON.
    """
    if text is not None:
        text = text.replace("{start}", str(start)).replace("{end}", str(end))
    elif start is None and end is None:
        text = ""
    else:
        text = json.dumps({"start": start, "end": end})
    repeat = Repeat.AGAIN if start is None and end is None else Repeat.BEHIND
    if pool.stage.dialect.shape is Shape.STREAM:
        repeat = Repeat.NEVER
    changed, request, name = Signal(), text.encode(), pool.stage.name
    asked = Round(
        changed.set, request, max_unread=_ROUND_UNREAD, repeat=repeat, stage=name
    )
    pool.open(asked)
    try:
        with Span("extract", stage=name):
            while True:
                finished = asked.finished
                for run in asked.outputs():
                    yield run
                if finished:
                    break
                pool.kick()
                await changed.wait()
            if asked.error is not None:
                raise asked.error
    finally:
        pool.drop(asked)
        pool.kick()


def results_of(outcome: Outcome) -> list[Result]:
    """Return the result of each message of an outcome."""
    rows = zip(outcome.messages, outcome.replies, outcome.errors, strict=True)
    return list(map(_to_result, rows))


async def in_runs(
    messages: Iterable[bytes] | AsyncIterable[bytes],
) -> AsyncIterator[Run]:
    """Yield the messages in runs, without waiting for one to be full."""
    if isinstance(messages, AsyncIterable):
        async with _iterating(messages) as rest:
            async for message in rest:
                yield [message]
        return
    refuse_one(messages)
    for run in _pieces(messages):
        yield run
        await anyio.lowlevel.checkpoint()


async def as_run(messages: Iterable[bytes]) -> Run:
    """Return all messages as one run; let other tasks run in between."""
    refuse_one(messages)
    if isinstance(messages, Sequence):
        return messages
    run: list[bytes] = []
    for piece in _pieces(messages):
        run += piece
        await anyio.lowlevel.checkpoint()
    return run


def _pieces(messages: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yield bounded runs of the messages, including those before an error."""
    taken = iter(messages)
    count = 1
    while True:
        run: list[bytes] = []
        try:
            run.extend(islice(taken, count))
        except Exception:
            yield run
            raise
        if not run:
            return
        yield run
        count = _next_count(run, count)


def _next_count(run: list[bytes], count: int) -> int:
    """Return how many messages to take next, by a sample of the sizes in ``run``."""
    some = run[::8]
    try:
        size = sum(map(len, some)) // len(some)
    except TypeError:
        return count  # an item that is no message is reported where it is fed
    return max(1, min(2 * count, _RUN, _RUN_BYTES // max(1, size)))


@asynccontextmanager
async def _iterating(items: AsyncIterable[_T]) -> AsyncIterator[AsyncIterator[_T]]:
    """Iterate; close a generator that is not read to its end: nothing else does."""
    iterator = aiter(items)
    try:
        yield iterator
    finally:
        if isinstance(iterator, AsyncGenerator):
            await iterator.aclose()
