"""
One worker, and us in the place of its supervisor.

No pool, no retry, no restart: the worker is given just the bytes that a test wants it
to be given, cut where the test wants it, and everything that went both ways is kept.

::

    async with WorkerUnderTest(Stage(name="clean", command=("./clean.sh",))) as worker:
        (reply,) = await worker.exchange([b"one"], cuts=[2])
        assert reply.outputs == (b"ONE",)
        assert await worker.close() == 0

What is said is the dialect's matter; nothing here knows a marker.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from signal import Signals
from types import TracebackType
from typing import Final, NamedTuple, NoReturn, Self

import anyio
import anyio.abc
import anyio.lowlevel

from etlstage.errors import EtlstageError
from etlstage.messages import Run, counted
from etlstage.protocol.base import SEND_EOF, Limits, Session, Shape, Side
from etlstage.protocol.events import (
    BatchEnded,
    Event,
    MessagesPassed,
    OutputPassed,
    ProtocolFailed,
    Ready,
    RepliesCompleted,
    StreamEnded,
)
from etlstage.stage.stage import Stage
from etlstage.supervisor.spawn import command_line, spawn
from etlstage.telemetry.terminal import harmless
from etlstage.testing.transcript import Channel, Entry, Transcript, cut
from etlstage.transport import Child, Launch, Readable, Wire, launch_worker
from etlstage.transport.base import describe_status
from etlstage.transport.descent import lives, waits_for_stdin

__all__ = ("Reply", "WorkerFailed", "WorkerUnderTest")

_CHUNK: Final = 65536  # bytes a read
_LOOK: Final = (0.0002, 0.01)  # seconds between two looks at what is unread
_IDLE: Final = 0.02  # seconds without a sign, before it is looked what a worker does
_TURNS: Final = 8  # of the event loop, in which what is in a pipe is read
_DRAIN: Final = 0.5  # seconds for the pipes of a dead process to end
_TAIL: Final = 64  # bytes shown of what is not complete
_KEPT: Final = 1024 * 1024  # bytes of what is not judged


class WorkerFailed(EtlstageError, AssertionError):
    """
    Raised when a worker under test does not do what it should.

    Attributes:
        what: What it did, as a part of a sentence.
        transcript: All that went both ways, as text.

    """

    def __init__(self, what: str, transcript: str) -> None:
        super().__init__(f"{what}\n{transcript}" if transcript else what)
        self.what = what
        self.transcript = transcript


class Reply(NamedTuple):
    """What a worker said to one exchange."""

    outputs: tuple[bytes, ...] = ()
    refused: str | None = None
    """Why it said no, if it did."""


class WorkerUnderTest:
    """
    Runs one process of a stage and talks to it as its supervisor would.

    Args:
        stage: Command, dialect, environment, limits of the worker.
        launch: What starts it; a :class:`~etlstage.testing.ScriptedLaunch` will do.
        timeout: How long each wait may take, in seconds.

    Attributes:
        transcript: All that went both ways.
        session: The supervisor's side of the conversation.
        events: All that the worker has said, as its dialect understands it.
        status: Exit status, negative for a signal, once it is gone.
        left: Processes that it has left behind, once it is gone.

    Raises:
        WorkerStartFailed: If the program can't be run.
        WorkerFailed: By whatever waits for the worker: if it breaks the protocol, exits
            or takes too long.

    """

    def __init__(
        self,
        stage: Stage,
        *,
        launch: Launch = launch_worker,
        timeout: float = 10.0,
    ) -> None:
        self.stage = stage
        self.timeout = timeout
        self.transcript: Transcript = Transcript()
        limits = Limits(stage.max_message, stage.max_reply)
        self.session: Session = stage.dialect.open(Side.SUPERVISOR, limits)
        self.events: list[Event] = []
        self.status: int | None = None
        self.left: int = 0
        self._launch = launch
        self._wire: Wire
        self._child: Child
        self._tasks: anyio.abc.TaskGroup
        self._began = 0.0
        self._changed = anyio.Event()
        self._open: set[Channel] = set()  # of what it writes
        self._alive = False  # it has shown so, beside its replies
        self._closed = False  # is its stdin
        self._gone = False  # and all that it has written was read
        self._fault: str | None = None
        # Where what nobody asked for begins: what of it was read at once is chance.
        self._stray: int | None = None
        self._partial: list[bytes] = []  # outputs of a reply that is not complete
        self._unfinished = 0  # bytes behind the last reply
        self._replies: list[Reply] = []  # that nobody has taken

    def __repr__(self) -> str:
        return f"<WorkerUnderTest {self.stage.name!r} {self._fate()}>"

    @property
    def broken(self) -> bool:
        """Whether it has broken the protocol."""
        return self._fault is not None

    async def __aenter__(self) -> Self:
        self._began = anyio.current_time()
        reads = self.stage.dialect.shape is not Shape.STREAM
        name = f"{self.stage.name}-1"
        self._wire, self._child = spawn(self.stage, name, self._launch, stdin=reads)
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._watch)
        for pipe, channel, take in (
            (self._wire, Channel.STDOUT, self._understand),
            (self._child.stderr, Channel.STDERR, None),
        ):
            self._open.add(channel)
            self._tasks.start_soon(self._read, pipe, channel, take)
        if self._child.status is not None:
            self._tasks.start_soon(self._look_for_life, self._child.status)
        try:
            if self.stage.ready:
                await self.until(lambda: self._alive, "did not say that it is ready")
            if self.stage.dialect.announces:
                await self.until(self._is_ready, "did not announce itself")
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._end()

    # --- what it is given ---------------------------------------------------

    async def feed(self, *pieces: bytes) -> None:
        """
        Write bytes to its stdin, whatever they mean; the session is not told.

        Each piece is a write, and the next is written when that one was read.
        """
        for number, piece in enumerate(pieces):
            await self._write(piece)
            if number < len(pieces) - 1:
                await self.has_read()

    async def send(
        self, *events: Event, cuts: Collection[int] = (), offset: int = 0
    ) -> int:
        """
        Say something in the dialect, and return how many bytes that were.

        Args:
            events: What is said, in one write if there are no cuts.
            cuts: Before which of the bytes another write begins, counted from 0;
                :data:`~etlstage.testing.transcript.BYTEWISE` for each of them.
            offset: Where in what ``cuts`` counts the bytes begin.

        """
        self.examine()
        for event in events:
            self.session.send(event)
        wire, ends = b"", False
        for data in self.session.data_to_send():
            wire += data
            ends = ends or data == SEND_EOF
        if wire:
            await self.feed(*cut(wire, cuts, offset))
        if ends:
            self._close_write()
        return len(wire)

    async def exchange(
        self, messages: Run, *, full: bool = False, cuts: Collection[int] = ()
    ) -> list[Reply]:
        """
        Hand over messages and return the replies, once there are all.

        One message is one exchange, or all of them are, as the dialect's settings say.
        A worker that fills its batches is given each message when it asks for it.

        Args:
            messages: What it is given, at once if it may be.
            full: Whether they are as many as a batch holds.
            cuts: As for :meth:`send`; over all that is written.

        """
        shape, wait = self.stage.dialect.shape, self.until
        if shape is Shape.ASKED_BATCH:
            offset = 0
            for message in messages:
                await wait(lambda: self.session.room > 0, "did not ask for a message")
                passed = MessagesPassed([message])
                offset += await self.send(passed, cuts=cuts, offset=offset)
            if messages:
                await wait(
                    lambda: not self.session.owed or self.session.room > 0,
                    "neither asked for one more message nor answered its batch",
                )
            if self.session.owed or not messages:
                await self.send(BatchEnded(full), cuts=cuts, offset=offset)
        else:
            ends = [BatchEnded(full)] if shape.batches else []
            passes = [MessagesPassed(messages)] if messages else []
            await self.send(*passes, *ends, cuts=cuts)
        return await self.replies()

    def close_stdin(self) -> None:
        """Close its stdin, in whatever state the session is."""
        self._close_write()

    def signal(self, number: Signals) -> None:
        """Send a signal to it and its group."""
        self._note(Channel.EVENT, f"{Signals(number).name} was sent".encode())
        self._child.signal(number)

    # --- what it does -------------------------------------------------------

    async def replies(self, count: int | None = None) -> list[Reply]:
        """
        Return the next replies, once there are so many.

        Args:
            count: How many; by default until none is owed.

        """
        if count is None:
            await self.until(
                lambda: self.session.owed == 0,
                lambda: f"owes {counted(self.session.owed, 'reply', 'replies')}",
            )
            count = len(self._replies)
        await self.until(
            lambda: len(self._replies) >= count,
            lambda: (
                f"gave {len(self._replies)} of {counted(count, 'reply', 'replies')}"
            ),
        )
        taken, self._replies = self._replies[:count], self._replies[count:]
        return taken

    async def outputs(self) -> list[bytes]:
        """Wait for the end of what it writes, and return the messages of no reply."""
        await self.until(
            lambda: Channel.STDOUT not in self._open, "did not end its output"
        )
        taken, self._partial = self._partial, []
        return taken

    async def until(
        self, done: Callable[[], bool], otherwise: str | Callable[[], str]
    ) -> None:
        """
        Wait for something that the worker is to do while it lives.

        Args:
            done: Looked at whenever something has happened.
            otherwise: What it did if it did not do that, as a part of a sentence.

        """
        async with self._patience(otherwise):
            while not done() or self._fault is not None:
                if self._fault is None and Channel.STDOUT not in self._open:
                    # That tells more than that its output has ended.
                    with anyio.move_on_after(_DRAIN):
                        await self.exited()
                    fate = self._fate() if self._gone else "closed its stdout"
                    self.fail(self._fault or self._said(otherwise, fate))
                self.examine()
                if await self._idles() and not done():
                    said = self._said(otherwise, "it waits for more input")
                    if self._unfinished:
                        said += f"; {self.stage.dialect.silence(self._unfinished)}"
                    self.fail(said)

    async def has_read(self) -> None:
        """Wait until all that was written to its stdin was read."""
        pause, most = _LOOK
        async with self._patience(
            lambda: f"has not read {counted(self._wire.unread(), 'byte')} of its stdin"
        ):
            while self._wire.unread() and not self._gone:
                await anyio.sleep(pause)
                pause = min(2 * pause, most)

    async def quiet(self, seconds: float) -> None:
        """Wait so long; it must neither write anything to stdout nor exit."""
        before = len(self.transcript.of(Channel.STDOUT))
        with anyio.move_on_after(seconds):
            while not self._gone:
                await self._changed.wait()
        after = self.transcript.of(Channel.STDOUT)[before:]
        self.examine()
        if self._gone:
            self.fail(self._fate())
        if after:
            self.fail(self.stage.dialect.unasked(after[:_TAIL]))

    async def exited(self) -> int:
        """Wait for its end and return the exit status, negative for a signal."""
        async with self._patience("did not exit"):
            while not self._gone:
                await self._changed.wait()
        assert self.status is not None
        return self.status

    async def close(self) -> int:
        """Close its stdin, wait for its end and return the exit status."""
        self._close_write()
        status = await self.exited()
        self.examine()
        return status

    def examine(self) -> None:
        """Raise :class:`WorkerFailed` if it has broken the protocol so far."""
        if self._stray is not None:
            stray = self.transcript.of(Channel.STDOUT)[self._stray :]
            self.fail(self.stage.dialect.unasked(stray[:_TAIL]))
        if self._fault is not None:
            self.fail(self._fault)

    def fail(self, what: str) -> NoReturn:
        """Raise :class:`WorkerFailed` with what it did, and all that went both ways."""
        command = f"  command: {harmless(command_line(self.stage))}"
        shown = self.transcript.shown(self.stage.dialect.shown)
        raise WorkerFailed(f"the worker {what}", f"{command}\n{shown}")

    # --- how ----------------------------------------------------------------

    @asynccontextmanager
    async def _patience(
        self, otherwise: str | Callable[[], str]
    ) -> AsyncIterator[None]:
        with anyio.move_on_after(self.timeout) as scope:
            yield
        if scope.cancelled_caught:
            said = self._said(otherwise, f"for {self.timeout:g} seconds")
            if self.session.owed:
                said += f"; {self.stage.dialect.silence(self._unfinished)}"
            self.fail(said)

    async def _idles(self) -> bool:
        """Wait for something; return whether nothing can come, as far as is known."""
        if not lives(self._child.pid):
            await self._changed.wait()  # it has ended, or is no process at all
            return False
        with anyio.move_on_after(_IDLE):
            await self._changed.wait()
            return False
        if self._closed or self._wire.unread() or not waits_for_stdin(self._child.pid):
            return False
        # What it has written before is in the pipe; we may not have come to read it.
        changed = self._changed
        for _ in range(_TURNS):
            await anyio.lowlevel.checkpoint()
        return not changed.is_set()

    def _said(self, otherwise: str | Callable[[], str], why: str) -> str:
        return f"{otherwise if isinstance(otherwise, str) else otherwise()}: {why}"

    def _fate(self) -> str:
        return "running" if self.status is None else describe_status(self.status)

    async def _write(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            async with self._patience("does not read its stdin"):
                while left:
                    if taken := self._wire.write(left):
                        self._note(Channel.STDIN, bytes(left[:taken]))
                        left = left[taken:]
                    if left:
                        await self._wire.writable()
        except BrokenPipeError:
            with anyio.move_on_after(_DRAIN):
                await self.exited()
            fate = f", and {self._fate()}" if self._gone else ""
            self.fail(f"closed its stdin before it had read all{fate}")

    def _close_write(self) -> None:
        self._closed = True
        self._note(Channel.EVENT, b"stdin was closed")
        self._wire.close_write()

    def _note(self, channel: Channel, data: bytes) -> None:
        seconds = anyio.current_time() - self._began
        self.transcript.append(Entry(channel, data, seconds))
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def _read(
        self, pipe: Readable, channel: Channel, take: Callable[[bytes], None] | None
    ) -> None:
        kept = 0
        while (data := pipe.read(_CHUNK)) != b"":
            if data is None:
                await pipe.readable()
            elif take is not None and self._fault is None:
                take(data)
                self._note(channel, data)
            # What is for people may have no end, nor what comes behind a fault.
            elif kept < _KEPT:
                self._note(channel, data)
                kept += len(data)
            await anyio.lowlevel.checkpoint()
        self._open.discard(channel)
        if channel is Channel.STDOUT:
            self._note(Channel.EVENT, b"stdout has ended")
            if self._fault is None:
                self.session.receive_eof(anyio.current_time())
                self._take_events()
        self._wake()

    async def _look_for_life(self, pipe: Readable) -> None:
        while (data := pipe.read(_CHUNK)) != b"":
            if data is None:
                await pipe.readable()
            elif not self._alive:
                self._alive = True
                self._wake()
            await anyio.lowlevel.checkpoint()

    def _understand(self, data: bytes) -> None:
        owed, dialect = self.session.owed, self.stage.dialect
        self._unfinished += len(data)
        self.session.receive_data(data, anyio.current_time())
        self._take_events()
        if self._fault is None or dialect.shape is Shape.STREAM:
            return
        # The protocol's own words for this are about states.
        if not owed:
            self._fault = dialect.unasked(data[:_TAIL])
            self._stray = len(self.transcript.of(Channel.STDOUT))
        elif not self.session.owed:
            self._fault = f"wrote more than its reply: {dialect.shown(data[-_TAIL:])}"

    def _take_events(self) -> None:
        for event in self.session.events_received():
            self.events.append(event)
            match event:
                case OutputPassed(messages):
                    self._partial += messages
                case RepliesCompleted(groups, _, refusals):
                    said = dict(refusals)
                    self._unfinished = 0
                    for place, group in enumerate(groups):
                        outputs = (*self._partial, *group)
                        self._partial = []
                        self._replies.append(Reply(outputs, said.get(place)))
                case StreamEnded(tail) if tail:
                    shown = self.stage.dialect.shown(tail[:_TAIL])
                    self._fault = f"ended its output with what is not complete: {shown}"
                case ProtocolFailed(error):
                    self._fault = f"broke the protocol: {error}"

    def _is_ready(self) -> bool:
        return any(isinstance(event, Ready) for event in self.events)

    async def _watch(self) -> None:
        status = await self._child.wait()
        self._wire.close_write()
        with anyio.move_on_after(_DRAIN):
            await self._child.deserted()
            await self._both_ended()
        self.left = self._child.kill() + self._child.kill_heirs()
        with anyio.move_on_after(_DRAIN):
            await self._both_ended()
        self.status, self._gone = status, True
        self._note(Channel.EVENT, describe_status(status).encode())

    async def _both_ended(self) -> None:
        while self._open:
            await self._changed.wait()

    async def _end(self) -> None:
        """Kill it, whatever it does, and close all."""
        # Not by those who watch it: whoever has cancelled us has cancelled them, too.
        self._child.kill()
        self._child.kill_heirs()
        self.status = self._child.returncode
        self._tasks.cancel_scope.cancel()
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            self._wire.close()
            self._child.close()
