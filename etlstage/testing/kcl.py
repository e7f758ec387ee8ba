"""
A daemon for one record processor, without Java and without AWS.

::

    async with ProcessorUnderTest(stage, Assignment("shard-1")) as processor:
        await processor.give([b"one", b"two"])
        assert await processor.end() == 0
        assert processor.stored.sequence == "SHARD_END"

There is no restart and no pool: a processor gets what a test gives it, and everything
written and read is recorded. Its checkpoints are judged by the rules of the daemon's
library, and a fault plan decides what goes wrong at a checkpoint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from signal import SIGKILL
from typing import Final, NamedTuple, NoReturn, Self

import anyio

from etlstage.messages import AnnotatedRun, Run
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
from etlstage.protocol.kcl.checkpoint import (
    ILLEGAL_ARGUMENT,
    SHUTDOWN,
    THROTTLING,
    ShardPosition,
    position_of,
)
from etlstage.protocol.kcl.lines import RecordColumn, StatusReply, read_reply
from etlstage.protocol.kcl.session import KclSession, State
from etlstage.stage.stage import Stage
from etlstage.testing.dialect import kit_of
from etlstage.testing.fault import FaultKind, FaultPlan, Moment
from etlstage.testing.hostile.kinds import DueFaults
from etlstage.testing.process import Otherwise, UnderTest
from etlstage.testing.transcript import Channel
from etlstage.transport import Launch, launch_worker

__all__ = ("ENDS", "MARKS", "Asked", "ProcessorUnderTest", "sequence_number")

MARKS: Final = {
    Channel.STDIN: (Side.SUPERVISOR, ">"),
    Channel.STDOUT: (Side.WORKER, "<"),
}
"""The side that writes to a channel, and the mark that precedes its messages."""
ENDS: Final = {
    FaultKind.LOSE_LEASE: FarewellReason.LOST,
    FaultKind.REQUEST_SHUTDOWN: FarewellReason.DRAIN,
    FaultKind.END_SHARD: FarewellReason.ENDED,
    FaultKind.SPLIT_SHARD: FarewellReason.ENDED,
    FaultKind.MERGE_SHARDS: FarewellReason.ENDED,
}
"""Faults that end a processor, and the reason it is given."""
_BEFORE: Final = 49590338271490256608559692538361571095921575989136588798
_GAP: Final = 100  # from one sequence number to the next


_NOISE: Final = 1024 * 1024  # bytes


class Asked(NamedTuple):
    """A request for a checkpoint at a valid position, and its result."""

    position: ShardPosition
    error: str | None
    """Name of the exception that it failed with; None: it was stored."""


class ProcessorUnderTest(UnderTest):
    """
    Runs one process for one shard, and talks to it as its daemon would.

    Args:
        stage: Command, dialect and environment of the processor.
        assignment: The shard, and the position in it to begin at.
        faults: What goes wrong at its checkpoints.
        start: How often the shard's processor was started, this time included.
        launch: Starts the processor.
        timeout: How long it may take for an action, in seconds.
        on_data: Called with the channel and the data of each read or write.

    Attributes:
        faults: The faults of this start. Its name as a worker is that of the shard.
        asked: Checkpoints at valid positions that it has asked for.
        noise: Lines of its output that are not messages.
        given: Number of records given to it.
        number: Number of such checkpoints, by which faults are counted; may be set to
            continue the count of an earlier processor of the shard.
        errors: Names of the exceptions that its next checkpoints fail with.
        parted: The fault at a checkpoint that ended it, if any.
        killed: If it was killed by a restart, the checkpoint at which the next
            processor begins; empty: at the last one stored.

    """

    noun = "processor"

    def __init__(
        self,
        stage: Stage,
        assignment: Assignment,
        *,
        faults: FaultPlan | None = None,
        start: int = 1,
        launch: Launch = launch_worker,
        timeout: float = 10.0,
        on_data: Callable[[Channel, bytes], None] | None = None,
    ) -> None:
        super().__init__(stage, launch, timeout)
        session = stage.dialect.open(
            Side.SUPERVISOR, Limits(), batch=2**31, assignment=assignment
        )
        assert isinstance(session, KclSession)
        self.session: KclSession = session
        self.asked: list[Asked] = []
        self.noise: list[bytes] = []
        self._noisy = 0  # bytes of noise
        self._delivered: set[str] = {self.stored.sequence}
        self.given: int = 0
        self.number: int = 0
        self.errors: deque[str] = deque()
        self.parted: FaultKind | None = None
        self.killed: str | None = None
        self._name = assignment.name
        self._start = start
        self.faults: DueFaults = (faults or FaultPlan()).due(
            {"ETLSTAGE_WORKER": assignment.name, "ETLSTAGE_START": str(start)}
        )
        self._on_data = on_data
        self._shown = 0  # transcript entries passed to on_data
        self._fault = ""
        self._left = False  # the fault is that its stdout ended
        self._answers: list[tuple[float, CommitAnswered]] = []
        self._cut = False  # stdin is closed instead of an answer
        self._due = anyio.Event()
        self._waiting: anyio.CancelScope  # has the deadline of the processor

    @property
    def stored(self) -> ShardPosition:
        """The last checkpoint that was stored."""
        return self.session.stored

    @property
    def said(self) -> list[str]:
        """The messages of the transcript, by name; ours begin with ``>``."""
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
        """How it broke the protocol, as part of a sentence; empty: it did not."""
        return "" if self._left else self._fault

    async def __aenter__(self) -> Self:
        self._waiting = anyio.CancelScope()
        await self.start(self._name, start=self._start)
        self.accompany(self._write)
        return self

    async def __aexit__(self, *error: object) -> None:
        await super().__aexit__(*error)
        self._tell()

    async def initialized(self) -> None:
        """
        Wait until it has initialized, which :meth:`give` and :meth:`end` do, too.

        Raises:
            WorkerMisbehaved: If it breaks the protocol, exits or takes too long.

        """
        await self.until(
            lambda: self.session.state is not State.INITIALIZING,
            "did not answer initialize",
        )

    async def give(self, records: Run) -> None:
        """
        Give records as one action, and wait for its status.

        Raises:
            WorkerMisbehaved: If it breaks the protocol, exits or takes too long.

        """
        await self.initialized()
        self.begin(records)
        await self.until(
            lambda: self.session.state is not State.PROCESSING,
            "did not answer processRecords",
        )

    def begin(self, records: Run) -> None:
        """Give records as one action, without waiting."""
        first, self.given = self.given + 1, self.given + len(records)
        if isinstance(records, AnnotatedRun):
            self._delivered.update(records.columns[RecordColumn.SEQUENCE])
        self.session.send(Opened(first, records), anyio.current_time())
        self._due.set()

    async def end(self, why: FarewellReason = FarewellReason.ENDED) -> int:
        """
        Ask it to end, wait for its exit, and return the exit status.

        Raises:
            WorkerMisbehaved: If it breaks the protocol or takes too long.

        """
        await self.initialized()
        self.session.send(Farewell(why=why), anyio.current_time())
        self._due.set()
        await self.until(
            lambda: self.session.state is State.ENDED,
            f"did not answer {self.session.state.value}",
        )
        return await self.exited()

    async def close(self) -> int:
        """
        End it, unless it has ended, and return the exit status.

        Raises:
            WorkerMisbehaved: As :meth:`end`, and if it answered its end twice.

        """
        if self.session.state is State.ENDED:
            status = await self.exited()
        elif self.closed:
            # It was not asked to end, so any exit status is fine, but no signal.
            return min(0, await self.exited())
        else:
            status = await self.end()
        self.blame_surplus()
        return status

    async def restart(self, begin: str = "") -> NoReturn:
        """Kill it; the next one begins at ``begin``, by default the last checkpoint."""
        self.killed = begin
        self.signal(SIGKILL)
        await self.until(lambda: False, "did not exit")
        raise AssertionError("unreachable: it was killed")

    async def exited(
        self, otherwise: str = "did not exit after the end of its stdin"
    ) -> int:
        """Close its stdin, and wait for its exit."""
        if not self.closed:
            self.close_stdin()
        status = await super().exited(otherwise)
        self._tell()
        return status

    async def until(self, done: Callable[[], bool], otherwise: Otherwise) -> None:
        """Wait for something that the processor has to do while it runs."""
        async with self.deadline(otherwise) as self._waiting:
            while not self._fault and not done():
                await self.changed()
                self._tell()
        self._tell()
        if self._fault:
            # Its exit status is more telling than the end of its output.
            with anyio.move_on_after(0.5 if self._left else 0.0):
                while not self.gone:
                    await self.changed()
            self._tell()
            fate = f"; it {self.fate}" if self.gone else ""
            self.fail(self._fault + fate)

    def blame_surplus(self) -> None:
        """
        Fail if it sent a status after that of its last action, until it exited.

        Raises:
            WorkerMisbehaved: If it did.

        """
        # A session that has ended takes everything for noise.
        if any(isinstance(read_reply(line), StatusReply) for line in self.noise):
            self._blame(
                "sent a status after that of its last action, expected one for each"
                " action; is a callback called twice?"
            )

    def blame_illegal(self) -> None:
        """
        Fail if a checkpoint was rejected as an illegal argument, or at no record.

        A daemon takes any number between the last checkpoint and the last record.

        Raises:
            WorkerMisbehaved: If a checkpoint was.

        """
        if illegal := self.refused(ILLEGAL_ARGUMENT):
            self._blame(
                f"asked for a checkpoint at {illegal[0]}, which was not delivered or is"
                f" before the last one: {ILLEGAL_ARGUMENT}"
            )
        for (number, _), _ in self.asked:
            if number.isdecimal() and number not in self._delivered:
                self._blame(
                    f"asked for a checkpoint at {number}, which was not delivered,"
                    " expected the number of a record; is it kept as a double?"
                )

    def _blame(self, fault: str) -> NoReturn:
        # It counts as a fault even if the output has ended as it should.
        self._fault, self._left = fault, False
        self.fail(fault)

    def refused(self, error: str) -> list[str]:
        """Return the checkpoints that failed with the exception of that name."""
        return [
            text.removeprefix("> checkpoint ").partition(":")[0]
            for text in self.said
            if text.startswith("> checkpoint ") and text.endswith(f": {error}")
        ]

    # --- how ----------------------------------------------------------------

    def take(self, data: bytes) -> bool:
        """Receive from its stdout; return whether to continue."""
        now = anyio.current_time()
        if data:
            self.session.receive_data(data, now)
        else:
            self.session.receive_eof(now)
        self._look(now)
        self._due.set()
        return self._noisy <= _NOISE

    def _look(self, now: float) -> None:
        for event in self.session.events_received():
            match event:
                case CommitAsked(_, position):
                    self._ask(position_of(position), now)
                case Failed(error=error):
                    self._fault = self._fault or _part(str(error))
                case Farewell(reason=reason):
                    self._left = not self._fault
                    self._fault = self._fault or _part(reason)
                case Noise(data):
                    self.noise += data.splitlines()
                    self._noisy += len(data)
                    if self._noisy > _NOISE:
                        self._fault = self._fault or (
                            f"wrote over {_NOISE:,} bytes to stdout that are not"
                            " messages: a daemon logs them all"
                        )
                case _:
                    pass

    def _ask(self, position: ShardPosition, now: float) -> None:
        self.number += 1
        error = self.errors.popleft() if self.errors else None
        if error == SHUTDOWN:
            self.session.send(Farewell(why=FarewellReason.LOST), now)
        late, answered = 0.0, True
        for fault in self.faults.due(Moment.CHECKPOINT, self.number, b""):
            match FaultKind(fault["kind"]):
                case FaultKind.FAIL_CHECKPOINT:
                    error = fault.get("data", THROTTLING)
                case FaultKind.PAUSE:
                    late = fault["seconds"]
                    self._waiting.deadline += late
                case FaultKind.END_INPUT:
                    self._cut, answered = True, False
                case FaultKind.RESTART:
                    self.killed = fault.get("data", "")
                case kind if kind in ENDS:
                    self.parted = kind
                    self.session.send(Farewell(why=ENDS[kind]), now)
                    if kind is FaultKind.LOSE_LEASE:
                        error = SHUTDOWN
        self.asked.append(Asked(position, error))
        if self.killed is not None:
            # The checkpoint is stored, but the processor can't read the answer.
            self.session.send(CommitAnswered(position, error), now)
            self.signal(SIGKILL)
        elif answered:
            self._answers.append((now + late, CommitAnswered(position, error)))

    async def _write(self) -> None:
        """Write the session's output, and answer checkpoints when due."""
        while True:
            self._due = anyio.Event()
            now = anyio.current_time()
            for at, answer in self._answers.copy():
                if at <= now:
                    self._answers.remove((at, answer))
                    self.session.send(answer, now)
            self._look(now)
            with suppress(BrokenPipeError):  # its exit is noticed elsewhere
                while out := self.session.data_to_send():
                    await self.write(b"".join(out))
                    if SEND_EOF in out and not self.closed:
                        self.close_stdin()
            if self._cut and not self.closed:
                self.close_stdin()
            self.wake()
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


def sequence_number(place: int) -> str:
    """
    Return the sequence number of a record, by its place in a shard, from 1 on.

    As those of Kinesis, it has 56 digits, and more than one is between two records.
    """
    return str(_BEFORE + _GAP * place)


def _part(text: str) -> str:
    """Return the text of an error as part of a sentence about the processor."""
    return text.partition(": the processor ")[2] or f"broke the protocol: {text}"
