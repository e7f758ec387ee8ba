"""
A single worker, with us in the place of its supervisor.

There is no pool, no retry and no restart: the worker gets exactly the bytes that a test
sends, cut where the test wants it, and everything written and read is recorded.

::

    async with WorkerUnderTest(Stage(name="clean", worker=("./clean.sh",))) as worker:
        (reply,) = await worker.exchange([b"one"], cuts=[2])
        assert reply.outputs == (b"ONE",)
        assert await worker.close() == 0

The dialect decides what is sent; nothing here knows about markers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Final, Self

import anyio

from etlstage.errors import LocalProtocolError
from etlstage.messages import Run, counted
from etlstage.protocol.base import SEND_EOF, DialectSession, Limits, Shape
from etlstage.protocol.events import Added, Event, Farewell, Opened, Ready
from etlstage.stage.stage import Stage
from etlstage.supervisor.contract import checker_of
from etlstage.testing.dialect import kit_of
from etlstage.testing.process import DRAIN, Otherwise, UnderTest
from etlstage.testing.replies import TAIL, Reply, ReplyReader
from etlstage.testing.transcript import Channel, WorkerMisbehaved, cut
from etlstage.transport import Launch, launch_worker

__all__ = ("WorkerMisbehaved", "WorkerUnderTest")

_LOOK: Final = (0.0002, 0.01)  # seconds between checks for unread bytes: first, at most


class WorkerUnderTest(UnderTest):
    """
    Runs one process of a stage and talks to it as its supervisor would.

    Args:
        stage: Command, dialect, environment and limits of the worker.
        launch: Starts the worker; may be a :class:`~etlstage.testing.ScriptedLaunch`.
        timeout: How long each wait may take, in seconds.
        mute: Whether we send nothing by ourselves, such as answers to its heartbeats.

    Raises:
        WorkerStartFailed: If the program can't be run.
        WorkerMisbehaved: By each method that waits, if the worker breaks the protocol,
            exits or takes too long.

    """

    def __init__(
        self,
        stage: Stage,
        *,
        launch: Launch = launch_worker,
        timeout: float = 10.0,
        mute: bool = False,
    ) -> None:
        super().__init__(stage, launch, timeout)
        limits = Limits(stage.max_message, stage.max_reply)
        self._replies = ReplyReader(stage.dialect, limits, stage.kind, stage.batch.size)
        # Every writer holds it. An uncontended acquire must not yield to other tasks.
        self._writing = anyio.Lock(fast_acquire=True)
        self._mute = mute
        self._due = anyio.Event()  # set: the session may have something to send
        self._dismissed = False  # it was asked to end
        pipes = "connection" if stage.dialect.connection is not None else "stdin"
        self._input, self._output = pipes, pipes.replace("stdin", "stdout")

    def __repr__(self) -> str:
        return f"<WorkerUnderTest {self.stage.name!r} {self.fate}>"

    @property
    def session(self) -> DialectSession:
        """The supervisor's side of the conversation."""
        return self._replies.session

    @property
    def events(self) -> list[Event]:
        """All events that the dialect has read from the worker's output."""
        return self._replies.events

    @property
    def last(self) -> int:
        """Number of the last exchange given to the worker."""
        return self._replies.last

    @property
    def ended(self) -> Mapping[int, Reply]:
        """Complete replies to sessions that were not cancelled, by session."""
        return self._replies.ended

    @property
    def broken(self) -> bool:
        """Whether the worker has broken the protocol."""
        return self._replies.fault is not None

    async def __aenter__(self) -> Self:
        await self.start()
        try:
            if not self.session.in_order:
                self.accompany(self._answer)
            if self.stage.program.ready:
                await self.until(lambda: self.alive, "did not report that it is ready")
            if self.stage.dialect.announces:
                silence = self.stage.dialect.silence
                await self.until(
                    lambda: any(isinstance(event, Ready) for event in self.events),
                    lambda: silence(self._replies.heard, ready=False).removeprefix(
                        "it "
                    ),
                )
        except BaseException:
            await self.kill()
            raise
        return self

    # --- what it is given ---------------------------------------------------

    async def feed(self, *pieces: bytes) -> None:
        """Write raw bytes; each piece once the worker has read the previous one."""
        async with self._writing:
            await self._write(pieces)

    async def send(
        self, *events: Event, cuts: Collection[int] = (), offset: int = 0
    ) -> int:
        """
        Send events in the dialect, and return how many bytes were written.

        Args:
            events: What to send, in one write if there are no cuts.
            cuts: Offsets of the bytes at which another write begins;
                :data:`~etlstage.testing.transcript.BYTEWISE`: at every byte.
            offset: Offset of the first byte, in terms of ``cuts``.

        """
        async with self._writing:
            self.examine()
            for event in events:
                try:
                    self.session.send(event, anyio.current_time())
                except LocalProtocolError:
                    if self._dismissed or Channel.STDOUT in self.open:
                        raise
                    # The worker has closed its output, which ended the session.
                    await self.until(lambda: False, "can't be given more")
                self._replies.note(event)
                self._dismissed = self._dismissed or isinstance(event, Farewell)
            wire, ends = self._waiting()
            await self._write([*cut(wire, cuts, offset)] if wire else ())
        self._due.set()
        if ends:
            self.close_stdin()
        return len(wire)

    async def exchange(
        self, messages: Run, *, cuts: Collection[int] = ()
    ) -> list[Reply]:
        """
        Send messages, wait for all replies, and return them.

        Each message is an exchange; in a dialect with batches, all of them are one. A
        worker that fills its own batches gets each message when it asks for it.

        Args:
            messages: The messages, sent at once if the dialect allows it.
            cuts: As for :meth:`send`, counted over everything that is written.

        """
        shape, wait = self.stage.dialect.shape, self.until
        if shape is Shape.ASKED_BATCH:
            offset = 0
            for message in messages:
                await wait(lambda: self.session.room > 0, "did not ask for a message")
                offset += await self.send(self.more(message), cuts=cuts, offset=offset)
            if messages:
                await wait(
                    lambda: not self.session.owed or self.session.room > 0,
                    "neither asked for one more message nor answered its batch",
                )
            if self.session.owed or not messages:
                await self.send(self.no_more(), cuts=cuts, offset=offset)
            return await self.replies()
        named = not (self.session.in_order or shape.batches)
        runs = [[message] for message in messages] if named else [messages]
        replies = []
        while runs:
            count = await self.hand_over(runs, cuts=cuts)
            replies += await self.replies()
            runs = runs[count:]
        return replies

    async def hand_over(
        self, runs: Sequence[Run], *, cuts: Collection[int] = ()
    ) -> int:
        """Send runs at once, each an exchange; return how many there was room for."""
        events = self._replies.opened(runs)
        await self.send(*events, cuts=cuts)
        return len(runs) if self.session.in_order else len(events)

    async def begin(self, message: bytes, written: int) -> None:
        """Open an exchange whose first ``written`` bytes were already written."""
        batches = self.stage.dialect.shape.batches
        event = self.more(message) if batches else Opened(self.last + 1, [message])
        self.session.send(event, anyio.current_time())
        self._replies.note(event)
        await self.feed(b"".join(self.session.data_to_send())[written:])

    def more(self, message: bytes) -> Event:
        """Return the event that adds a message to the open batch, or opens one."""
        if self._replies.filling:
            return Added(self.last, [message])
        return Opened(self.last + 1, [message], each=False, ended=False)

    def no_more(self) -> Event:
        """Return the event that ends the open batch; if none is, an empty batch."""
        if self._replies.filling:
            return Added(self.last, (), ended=True)
        return Opened(self.last + 1, (), each=False)

    # --- what it does -------------------------------------------------------

    async def replies(self, count: int | None = None) -> list[Reply]:
        """
        Wait for the next replies, and return them.

        Args:
            count: How many; by default, all that are outstanding.

        """
        if count is None:
            await self.until(
                lambda: self.session.owed == 0,
                lambda: (
                    f"has {counted(self.session.owed, 'reply', 'replies')} outstanding"
                ),
            )
            count = len(self._replies.complete)
        await self.until(
            lambda: len(self._replies.complete) >= count,
            lambda: (
                f"gave {len(self._replies.complete)} of {counted(count, 'reply', 'replies')}"
            ),
        )
        complete = self._replies.complete
        taken, complete[:count] = complete[:count], []
        return taken

    async def reply_to(self, session: int) -> Reply:
        """Return the reply to a session, once it has ended."""
        await self.until(
            lambda: session in self.ended, f"did not end session {session}"
        )
        return self.ended[session]

    async def outputs(self) -> list[bytes]:
        """Wait for the end of its output; return messages that belong to no reply."""
        await self.until(
            lambda: Channel.STDOUT not in self.open, "did not end its output"
        )
        taken, self._replies.partial = self._replies.partial, []
        return taken

    async def until(self, done: Callable[[], bool], otherwise: Otherwise) -> None:
        """
        Wait for something that the worker has to do while it runs.

        Args:
            done: The condition; evaluated after each change.
            otherwise: Describes the failure, as part of a sentence.

        """
        async with self.deadline(otherwise):
            while not done() or self._replies.fault is not None:
                if self._replies.fault is None and Channel.STDOUT not in self.open:
                    # The exit status is more telling than the end of the output.
                    with anyio.move_on_after(DRAIN):
                        await self.exited()
                    closed = f"closed its {self._output}"
                    fate = self.fate if self.gone else closed
                    why = _failure(otherwise, fate) + self._why_it_left()
                    self.fail(self._replies.fault or why)
                self.examine()
                if await self.idles() and not done():
                    text = _failure(otherwise, "it waits for more input")
                    if self._replies.unfinished:
                        text += (
                            f"; {self.stage.dialect.silence(self._replies.unfinished)}"
                        )
                    self.fail(text)

    async def has_read(self) -> None:
        """Wait until the worker has read everything written to its stdin."""
        pause, most = _LOOK
        async with self.deadline(
            lambda: (
                f"has not read {counted(self.unread(), 'byte')} of its {self._input}"
            )
        ):
            while self.unread() and not self.gone:
                await anyio.sleep(pause)
                pause = min(2 * pause, most)

    async def quiet(self, seconds: float) -> None:
        """Wait; fail if the worker exits, or writes more than heartbeats meanwhile."""
        before, heard = len(self.transcript.of(Channel.STDOUT)), self._replies.heard
        with anyio.move_on_after(seconds):
            while not self.gone:
                await self.changed()
        after = self.transcript.of(Channel.STDOUT)[before:]
        self.examine()
        if self.gone:
            self.fail(self.fate + self._why_it_left())
        if self._replies.heard > heard:
            self.fail(kit_of(self.stage.dialect).unsolicited(after[:TAIL]))

    async def close(self) -> int:
        """Send the farewell, close its stdin, and return the exit status."""
        if self.session.sends_farewell and Channel.STDOUT in self.open:
            await self.send(Farewell())
        self.close_stdin()
        status = await self.exited()
        self.examine()
        return status

    def examine(self) -> None:
        """Raise :class:`WorkerMisbehaved` if the worker has broken the protocol."""
        if self._replies.stray is not None:
            stray = self.transcript.of(Channel.STDOUT)[self._replies.stray :]
            self.fail(kit_of(self.stage.dialect).unsolicited(stray[:TAIL]))
        if self._replies.fault is not None:
            self.fail(self._replies.fault)

    def examine_contract(self, replies: Sequence[Reply]) -> None:
        """Fail if a reply breaks the stage's ``expect``."""
        checker = checker_of(self.stage)
        for number, reply in enumerate(replies, 1):
            if checker is None or reply.refused is not None:
                continue
            if (flaw := checker(reply.outputs)) is not None:
                self.fail(f"gave reply number {number}, which {flaw}")

    # --- how ----------------------------------------------------------------

    def late(self, otherwise: Otherwise) -> str:
        """Return the description of a wait that timed out."""
        text = _failure(otherwise, f"timed out after {self.timeout:g} seconds")
        if self.session.owed:
            text += f"; {self.stage.dialect.silence(self._replies.unfinished)}"
        return text

    async def _write(self, pieces: Sequence[bytes]) -> None:
        for number, piece in enumerate(pieces):
            if number:
                await self.has_read()
            try:
                async with self.deadline(f"does not read its {self._input}"):
                    await self.write(piece)
            except BrokenPipeError:
                with anyio.move_on_after(DRAIN):
                    await self.exited()
                fate = f", and {self.fate}" if self.gone else ""
                self.fail(f"closed its {self._input} before it had read all{fate}")

    def _waiting(self) -> tuple[bytes, bool]:
        """Return the session's pending output, and whether to close stdin after it."""
        wire, ends = b"", False
        while some := self.session.data_to_send():
            wire += b"".join(some)
            ends = ends or SEND_EOF in some
        return wire, ends

    async def _answer(self) -> None:
        """Write what the session sends by itself, such as heartbeats."""
        while not self.broken:
            self._due = anyio.Event()
            if not self._mute:
                with suppress(BrokenPipeError):  # its exit is noticed elsewhere
                    async with self._writing:
                        await self.write(self._waiting()[0])
            timer = self.session.get_timer()
            with anyio.CancelScope(deadline=inf if timer is None else timer):
                await self._due.wait()
            self.session.handle_timer(anyio.current_time())
            self._replies.take_events()
        self.wake()

    def _why_it_left(self) -> str:
        """Return the reason that it announced; empty if it was asked to end."""
        return "" if self._dismissed else self._replies.farewell

    def take(self, data: bytes) -> bool:
        """Receive from its stdout; return whether that keeps to the protocol."""
        self._due.set()
        return self._replies.receive(data, anyio.current_time())


def _failure(otherwise: Otherwise, why: str) -> str:
    return f"{otherwise if isinstance(otherwise, str) else otherwise()}: {why}"
