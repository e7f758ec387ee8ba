"""
SDK for record processors: a class, and one call.

::

    from etlstage.worker import kcl

    class Printer(kcl.Processor):
        def process_records(self, records, checkpointer):
            for record in records:
                store(record.data)
            checkpointer.checkpoint()

    if __name__ == "__main__":
        kcl.run(Printer())

It runs under etlstage and under the original daemon, in any version of the protocol.
Records are done when a checkpoint covers them: records after the last checkpoint come
again after a restart, so that nothing is lost that a processor has buffered.

From the call on ``print()``, C libraries and child processes write to stderr. An
exception in a processor ends it with status 1 and the traceback on stderr; its batch
then has no status, and comes again. But :class:`LeaseLost` only ends the action: the
shard belongs to another worker, and ``lease_lost`` is called next. With
``on_error="skip"`` a batch whose processing raised is answered all the same, and
processing continues with the next: the next checkpoint then loses the batch's rest.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Final, Literal, NamedTuple, NoReturn, TypeAlias

from etlstage.errors import RemoteProtocolError
from etlstage.messages import AnnotatedRun
from etlstage.protocol.events import (
    Added,
    CommitAnswered,
    CommitAsked,
    Event,
    Failed,
    Farewell,
    FarewellReason,
    Opened,
    Ready,
)
from etlstage.protocol.kcl.checkpoint import (
    DEPENDENCY,
    ILLEGAL_ARGUMENT,
    INVALID_STATE,
    SHUTDOWN,
    THROTTLING,
    ShardPosition,
    position_of,
)
from etlstage.protocol.kcl.processor import ProcessorSession, Turn
from etlstage.worker.descriptors import complain, read, take_over, write
from etlstage.worker.function import expect_none

__all__ = (
    "CheckpointFailed",
    "CheckpointUnavailable",
    "Checkpointer",
    "DependencyFailed",
    "IllegalCheckpoint",
    "LeaseLost",
    "Processor",
    "Record",
    "Shard",
    "Throttled",
    "run",
)

OnError: TypeAlias = Literal["exit", "skip"]


class CheckpointFailed(Exception):
    """
    Raised when a checkpoint was not stored.

    Attributes:
        name: The name of the exception, as in the daemon's answer.

    """

    def __init__(self, name: str, reason: str = "") -> None:
        super().__init__(name, reason)  # what a copy is made of
        self.name = name
        self._reason = reason

    def __str__(self) -> str:
        return f"the checkpoint was not stored: {self._reason or self.name}"


class Throttled(CheckpointFailed):
    """Raised when the store was overloaded at each try."""


class DependencyFailed(CheckpointFailed):
    """Raised when the store failed at each try."""


class LeaseLost(CheckpointFailed):
    """Raised when another worker has the shard: nothing can be stored any more."""


class CheckpointUnavailable(CheckpointFailed):
    """Raised when there is no checkpointer now, or no store."""


class IllegalCheckpoint(CheckpointFailed):
    """Raised for a number that is invalid, not delivered, or before the stored one."""


_ERRORS: Final[dict[str, type[CheckpointFailed]]] = {
    THROTTLING: Throttled,
    DEPENDENCY: DependencyFailed,
    SHUTDOWN: LeaseLost,
    INVALID_STATE: CheckpointUnavailable,
    ILLEGAL_ARGUMENT: IllegalCheckpoint,
}
_PASSING: Final = (Throttled, DependencyFailed)


class Shard(NamedTuple):
    """The shard of a processor."""

    name: str
    sequence_number: str | None
    """The checkpoint after which it begins, or a word such as ``TRIM_HORIZON``; None:
    an old daemon, which does not send it."""
    sub_sequence_number: int = 0


class Record(NamedTuple):
    """A record of the shard."""

    data: bytes
    partition_key: str
    sequence_number: str
    sub_sequence_number: int | None
    """Its index in an aggregated record; None or 0: the first, or not aggregated."""
    arrival: int | None
    """When it arrived, in milliseconds since 1970; None: unknown."""


class Checkpointer:
    """
    Stores how far a processor has come.

    Args:
        life: Sends the checkpoints, and waits for the answers.
        sleep: Waits for a number of seconds.

    """

    def __init__(self, life: _Life, sleep: Callable[[float], None]) -> None:
        self._life = life
        self._sleep = sleep

    def checkpoint(
        self,
        at: Record | str | None = None,
        sub_sequence_number: int | None = None,
        *,
        tries: int = 5,
        pause: float = 1.0,
    ) -> None:
        """
        Store that all records up to ``at`` are processed.

        At the end of a shard leave the record out: the number of the last one does not
        count if it was stored before.

        Args:
            at: The record, or its sequence number; None: all records so far.
            sub_sequence_number: Belongs to a sequence number given as ``at``.
            tries: How often to try if the store is throttled or fails.
            pause: Seconds before the second try; doubled before each further one.

        Raises:
            CheckpointFailed: If it was not stored; a subclass names the reason.
            ValueError: If ``tries`` is less than 1.

        """
        if tries < 1:
            raise ValueError(f"tries must be 1 or more, got {tries}")
        position: ShardPosition | None = None
        if isinstance(at, Record):
            position = ShardPosition(at.sequence_number, at.sub_sequence_number or 0)
        elif at is not None:
            position = ShardPosition(at, sub_sequence_number or 0)
        try:
            position_of(position)
        except ValueError as error:
            # The session can't send it; the daemon would answer with the same name.
            raise IllegalCheckpoint(ILLEGAL_ARGUMENT, str(error)) from None
        for attempt in range(tries):
            try:
                self._life.ask(position)
            except _PASSING:
                if attempt + 1 == tries:
                    raise
                self._sleep(pause * 2**attempt)
            else:
                return


class Processor:
    """
    Base class for processors of the records of one shard.

    Each method must return None: a result, such as that of an ``async def`` or of a
    generator function, is treated as an exception.
    """

    def initialize(self, shard: Shard) -> None:
        """Prepare; called once, before everything else."""

    def process_records(
        self, records: list[Record], checkpointer: Checkpointer
    ) -> None:
        """Process records; an empty list gives a chance to act after some time."""
        raise NotImplementedError

    def lease_lost(self) -> None:
        """Clean up: another worker has the shard, nothing can be stored any more."""

    def shard_ended(self, checkpointer: Checkpointer) -> None:
        """Finish; without a checkpoint the shards after this one do not begin."""
        checkpointer.checkpoint()

    def shutdown_requested(self, checkpointer: Checkpointer) -> None:
        """Checkpoint, if that is worthwhile: the processor is shut down soon."""


class _Life:
    """One life of a processor, with two functions that move bytes."""

    def __init__(
        self,
        processor: Processor,
        *,
        read: Callable[[], bytes],
        write: Callable[[bytes], None],
        sleep: Callable[[float], None] = time.sleep,
        on_error: OnError = "exit",
    ) -> None:
        self._processor = processor
        self._read = read
        self._write = write
        self._skip = on_error == "skip"
        self._session = ProcessorSession()
        self._checkpointer = Checkpointer(self, sleep)
        self._events: list[Event] = []

    def live(self) -> None:
        """Answer actions until the input ends."""
        while (event := self._next()) is not None:
            self._handle(event)

    def ask(self, position: ShardPosition | None) -> None:
        """Ask for a checkpoint, and wait for the answer."""
        self._send(CommitAsked(0, position))
        event = self._next()
        assert isinstance(event, CommitAnswered)
        if event.error is not None:
            raise _ERRORS.get(event.error, CheckpointFailed)(event.error)

    def _next(self) -> Event | None:
        """Return the next event; None: the input has ended."""
        while not self._events:
            data = self._read()
            if data:
                self._session.receive_data(data, 0.0)
            else:
                self._session.receive_eof(0.0)
            self._events += self._session.events_received()
            if not data and not self._events:
                return None
        event = self._events.pop(0)
        if isinstance(event, Failed):
            raise event.error
        return event

    def _send(self, event: Event) -> None:
        self._session.send(event, 0.0)
        self._write(b"".join(self._session.data_to_send()))

    def _handle(self, event: Event) -> None:
        match event:
            case Ready():
                self._call("initialize", self._shard())
                self._send(Ready())
            case Opened(first, AnnotatedRun() as run):
                self._process(run)
                self._send(Added(first, (), ended=True))
            case Farewell(why=why):
                self._end(why)
                self._send(Farewell(why=why))
            case _:
                raise AssertionError(f"unreachable: {event}")

    def _end(self, why: FarewellReason) -> None:
        checkpointer = self._checkpointer
        if why is FarewellReason.LOST:
            self._call("lease_lost")
            return
        try:
            if why is FarewellReason.ENDED:
                self._call("shard_ended", checkpointer)
            else:
                self._call("shutdown_requested", checkpointer)
        except LeaseLost:
            # As in a batch: leaseLost is next.
            _trace()

    def _process(self, run: AnnotatedRun) -> None:
        columns = (
            run.columns[name] for name in ("partition", "sequence", "sub", "arrival")
        )
        records = list(map(Record, run.messages, *columns))
        try:
            self._call("process_records", records, self._checkpointer)
        except LeaseLost:
            # Nothing can be stored in this life any more: leaseLost is next.
            _trace()
        except Exception:
            # While a checkpoint awaits its answer, nothing can be skipped.
            if not self._skip or self._session.turn is not Turn.OURS:
                raise
            _trace()

    def _call(self, method: str, *arguments: object) -> None:
        result: object = getattr(self._processor, method)(*arguments)
        name = f"{type(self._processor).__qualname__}.{method}()"
        expect_none(name, result, "it must end its work before it returns")

    def _shard(self) -> Shard:
        assignment = self._session.assignment
        assert assignment is not None
        if assignment.position is None:
            return Shard(assignment.name, None)
        return Shard(assignment.name, *position_of(assignment.position))


def run(processor: Processor, *, on_error: OnError = "exit") -> None:
    """
    Process the records of one shard, from stdin, and answer on stdout.

    Args:
        processor: Processes the records.
        on_error: The effect of an exception in ``process_records``: the process ends
            without a status (exit), or the rest of the batch is skipped (skip). An
            exception elsewhere ends it in any case.

    Raises:
        ValueError: If ``on_error`` is something else.
        SystemExit: If the processor raised, or the supervisor broke the protocol.

    """
    if on_error not in ("exit", "skip"):
        raise ValueError(f"on_error must be 'exit' or 'skip', got {on_error!r}")
    source, target = take_over()
    life = _Life(
        processor,
        read=lambda: read(source),
        write=lambda data: write(target, data),
        on_error=on_error,
    )
    try:
        life.live()
    except RemoteProtocolError as error:
        complain(f"the supervisor broke the protocol: {error}")
        _exit()
    except Exception:
        _trace()
        _exit()


def _trace() -> None:
    """Write the traceback of the current exception to stderr."""
    import traceback

    traceback.print_exc(file=sys.stderr)
    sys.stderr.flush()


def _exit() -> NoReturn:
    raise SystemExit(1) from None
