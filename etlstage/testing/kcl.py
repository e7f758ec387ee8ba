"""
A daemon for one record processor, without Java and without AWS.

::

    async with ProcessorUnderTest(stage, Assignment("shard-1")) as processor:
        await processor.give([b"one", b"two"])
        assert await processor.end() == 0
        assert processor.stored.sequence == "SHARD_END"

No restart and no pool: a processor is given what a test gives it, and everything that
went both ways is kept. Its checkpoints are judged as the daemon's library does it, and
:class:`ProcessorFaults` says which of them fail.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, NamedTuple, NoReturn, Self

import anyio

from etlstage.errors import ConfigError
from etlstage.messages import Run
from etlstage.protocol.base import SEND_EOF, Limits, Side
from etlstage.protocol.events import (
    Assignment,
    CommitAnswered,
    CommitAsked,
    Failed,
    Farewell,
    FarewellReason,
    Noise,
    Opened,
)
from etlstage.protocol.kcl.checkpoint import ShardPosition, position_of
from etlstage.protocol.kcl.session import KclSession, State
from etlstage.stage.stage import Stage
from etlstage.supervisor.process import command_line
from etlstage.telemetry.terminal import harmless
from etlstage.testing.dialect import kit_of
from etlstage.testing.process import Process
from etlstage.testing.transcript import Channel, Transcript, WorkerMisbehaved
from etlstage.transport import Launch, launch_worker

__all__ = ("MARKS", "Asked", "ProcessorFaults", "ProcessorUnderTest")

MARKS: Final = {
    Channel.STDIN: (Side.SUPERVISOR, ">"),
    Channel.STDOUT: (Side.WORKER, "<"),
}
"""What passes where, and how it is marked."""
_PATTERN: Final = re.compile(r"(\w+)@(\d+)(?:x(\d+))?")
_ENDS: Final = {
    "leaseLost": FarewellReason.LOST,
    "shutdownRequested": FarewellReason.DRAIN,
    "shardEnded": FarewellReason.ENDED,
}


class Asked(NamedTuple):
    """A checkpoint that would have been stored."""

    position: ShardPosition
    error: str | None
    """Name of the exception that it was answered with."""


@dataclass
class ProcessorFaults:
    """
    What goes wrong in the life of a processor, and when.

    Args:
        errors: Names of exceptions, by the number of the checkpoint, from 1, that is
            answered with it.
        late: Seconds that the answer to a checkpoint takes, by its number.
        eof: Checkpoint in place of whose answer stdin is closed; None: none.
        end: Action, from 1, in front of which the life ends, and why; None: no more
            records end it.

    """

    errors: Mapping[int, str] = field(default_factory=dict)
    late: Mapping[int, float] = field(default_factory=dict)
    eof: int | None = None
    end: tuple[int, FarewellReason] | None = None

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Self:
        """
        Return faults as they are written: ``WHAT@N``, or ``WHAT@NxTIMES``.

        Args:
            texts: Such as ``ThrottlingException@2x3``: the second checkpoint, and the
                two behind it; ``late@1``, ``eof@1``, ``leaseLost@3``: in front of the
                third action; so ``shutdownRequested`` and ``shardEnded``.

        Raises:
            ConfigError: If one is something else.

        """
        errors: dict[int, str] = {}
        late: dict[int, float] = {}
        made = cls(errors, late)
        for text in texts:
            found = _PATTERN.fullmatch(text)
            if found is None or found[2] == "0":
                raise ConfigError(
                    f"--fault: expected WHAT@N, as in ThrottlingException@2x3 or"
                    f" leaseLost@3, got {text!r}"
                )
            what, number, times = found[1], int(found[2]), int(found[3] or 1)
            if what in _ENDS:
                made.end = number, _ENDS[what]
            elif what == "eof":
                made.eof = number
            elif what == "late":
                late |= dict.fromkeys(range(number, number + times), 1.0)
            elif what.isidentifier() and what[:1].isupper():
                errors |= dict.fromkeys(range(number, number + times), what)
            else:
                raise ConfigError(
                    f"--fault: unknown fault {what!r}, expected the name of an"
                    f" exception, late, eof, {', '.join(_ENDS)}"
                )
        return made


class ProcessorUnderTest:
    """
    Runs one process for one shard, and talks to it as its daemon would.

    Args:
        stage: Command, dialect and environment of the processor.
        assignment: The shard, and where the processor begins in it.
        faults: What goes wrong.
        launch: What starts it.
        timeout: How long it may take for an action, in seconds.
        on_data: Called with what went one way, as the dialect's reader names it, and
            the channel.

    Attributes:
        asked: Checkpoints that it has asked for and that would have been stored.
        noise: Lines that mean nothing.
        given: Records that it was given.
        faults: What goes wrong.

    """

    def __init__(
        self,
        stage: Stage,
        assignment: Assignment,
        *,
        faults: ProcessorFaults | None = None,
        launch: Launch = launch_worker,
        timeout: float = 10.0,
        on_data: Callable[[Channel, bytes], None] | None = None,
    ) -> None:
        session = stage.dialect.open(
            Side.SUPERVISOR, Limits(), batch=2**31, assignment=assignment
        )
        assert isinstance(session, KclSession)
        self.session: KclSession = session
        self.stage = stage
        self.timeout = timeout
        self.asked: list[Asked] = []
        self.noise: list[bytes] = []
        self.given: int = 0
        self.faults: ProcessorFaults = faults or ProcessorFaults()
        self._process = Process(stage, launch, self._take)
        self._on_data = on_data
        self._shown = 0  # entries of the transcript that were passed on
        self._fault = ""
        self._answers: list[tuple[float, CommitAnswered]] = []
        self._cut = False  # stdin was closed in place of an answer
        self._due = anyio.Event()

    @property
    def stored(self) -> ShardPosition:
        """What was checkpointed last."""
        return self.session.stored

    @property
    def transcript(self) -> Transcript:
        """All that went both ways."""
        return self._process.transcript

    @property
    def said(self) -> list[str]:
        """All that went both ways, by name; ``>`` is in front of what it was sent."""
        reader = kit_of(self.stage.dialect).reader()
        assert reader is not None
        return [
            f"{mark} {text}"
            for entry in self.transcript
            if entry.channel in MARKS
            for side, mark in [MARKS[entry.channel]]
            for text in reader.read(side, entry.data)
        ]

    @property
    def broken(self) -> str:
        """How it has broken the protocol, as a part of a sentence; empty: it has not."""
        return self._fault

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal, once it is gone."""
        return self._process.status

    async def __aenter__(self) -> Self:
        await self._process.start()
        try:
            self._process.accompany(self._write)
            async with self._deadline("did not answer initialize"):
                await self._until(lambda: self.session.state is not State.INITIALIZING)
        except BaseException:
            await self._process.end()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._process.end()
        self._tell()

    async def give(self, records: Run) -> None:
        """
        Give records as one action, and wait for its status.

        Raises:
            WorkerMisbehaved: If it breaks the protocol, exits or takes too long.

        """
        self.begin(records)
        async with self._deadline("did not answer processRecords"):
            await self._until(lambda: self.session.state is not State.PROCESSING)

    def begin(self, records: Run) -> None:
        """Give records as one action, and wait for nothing."""
        first, self.given = self.given + 1, self.given + len(records)
        self.session.send(Opened(first, records), anyio.current_time())
        self._due.set()

    async def changed(self) -> None:
        """Wait until anything has happened."""
        await self._process.changed()

    async def end(self, why: FarewellReason = FarewellReason.ENDED) -> int:
        """
        End its life, and return the exit status.

        Raises:
            WorkerMisbehaved: If it breaks the protocol or takes too long.

        """
        self.session.send(Farewell(why=why), anyio.current_time())
        self._due.set()
        async with self._deadline(f"did not answer {self.session.state.value}"):
            await self._until(lambda: self.session.state is State.ENDED)
        return await self.exited()

    async def exited(self) -> int:
        """Close its stdin, and wait for its exit."""
        if not self._process.closed:
            self._process.close_stdin()
        async with self._deadline("did not exit behind the end of its stdin"):
            while not self._process.gone:
                await self._process.changed()
        assert self.status is not None
        self._tell()
        return self.status

    def fail(self, what: str) -> NoReturn:
        """Raise :class:`WorkerMisbehaved` with what it did, and all that was said."""
        command = f"  command: {harmless(command_line(self.stage))}"
        shown = self.transcript.shown(self.stage.dialect)
        raise WorkerMisbehaved(f"the processor {what}", f"{command}\n{shown}")

    # --- how ----------------------------------------------------------------

    @asynccontextmanager
    async def _deadline(self, otherwise: str) -> AsyncIterator[None]:
        with anyio.move_on_after(self.timeout) as scope:
            yield
        if scope.cancelled_caught:
            self.fail(f"{otherwise} for {self.timeout:g} seconds")

    async def _until(self, done: Callable[[], bool]) -> None:
        while not self._fault and not done():
            await self._process.changed()
            self._tell()
        self._tell()
        if self._fault:
            # How it exited tells more than that its output has ended.
            with anyio.move_on_after(0.5):
                while not self._process.gone:
                    await self._process.changed()
            fate = f"; it {self._process.fate}" if self._process.gone else ""
            self.fail(self._fault + fate)

    def _take(self, data: bytes) -> bool:
        now = anyio.current_time()
        if data:
            self.session.receive_data(data, now)
        else:
            self.session.receive_eof(now)
        self._look(now)
        self._due.set()
        return True

    def _look(self, now: float) -> None:
        for event in self.session.events_received():
            match event:
                case CommitAsked(_, position):
                    self._ask(position_of(position), now)
                case Failed(error=error):
                    self._fault = self._fault or _part(str(error))
                case Farewell(reason=reason):
                    self._fault = self._fault or _part(reason)
                case Noise(data):
                    self.noise += data.splitlines()
                case _:
                    pass

    def _ask(self, position: ShardPosition, now: float) -> None:
        number = len(self.asked) + 1
        error = self.faults.errors.get(number)
        self.asked.append(Asked(position, error))
        if number == self.faults.eof:
            self._cut = True
            return
        late = self.faults.late.get(number, 0.0)
        self._answers.append((now + late, CommitAnswered(position, error)))

    async def _write(self) -> None:
        """Write what there is to be said, when it is time."""
        while True:
            self._due = anyio.Event()
            now = anyio.current_time()
            for at, answer in self._answers.copy():
                if at <= now:
                    self._answers.remove((at, answer))
                    self.session.send(answer, now)
            self._look(now)
            with suppress(BrokenPipeError):  # it is gone, and that is read
                while out := self.session.data_to_send():
                    await self._process.write(b"".join(out))
                    if SEND_EOF in out and not self._process.closed:
                        self._process.close_stdin()
            if self._cut and not self._process.closed:
                self._process.close_stdin()
            self._process.wake()
            wait = min((at for at, _ in self._answers), default=float("inf"))
            with anyio.CancelScope(deadline=wait):
                await self._due.wait()

    def _tell(self) -> None:
        if self._on_data is None:
            return
        entries = self.transcript[self._shown :]
        self._shown = len(self.transcript)
        for entry in entries:
            self._on_data(entry.channel, entry.data)


def _part(text: str) -> str:
    """Return what a processor did as a part of a sentence."""
    return text.partition(": the processor ")[2] or f"broke the protocol: {text}"
