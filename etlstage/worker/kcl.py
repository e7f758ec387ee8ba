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

It runs under etlstage and under the original daemon, in whichever version that speaks.
What was processed is done when a checkpoint covers it: what came behind the last one
comes again after a restart, so that nothing is lost that a processor has buffered.

From the call on ``print()``, C libraries and child processes write to stderr. An
exception in a processor ends it with status 1 and the traceback on stderr; its batch has
no status then, and comes again. But :class:`LeaseLost` only ends the batch: the shard is
another's, and ``lease_lost`` is next. With ``on_error="skip"`` a batch whose processing raised
is answered, and processing resumes after it: the next checkpoint loses its rest.
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
        name: Of the exception, as the daemon gave it.

    """

    def __init__(self, name: str) -> None:
        super().__init__(f"the checkpoint was not stored: {name}")
        self.name = name


class Throttled(CheckpointFailed):
    """Raised when the store had too much to do, each time that it was tried."""


class DependencyFailed(CheckpointFailed):
    """Raised when the store failed, each time that it was tried."""


class LeaseLost(CheckpointFailed):
    """Raised when the shard is another's: nothing can be stored any more."""


class CheckpointUnavailable(CheckpointFailed):
    """Raised when there is no checkpointer now, or no store."""


class IllegalCheckpoint(CheckpointFailed):
    """Raised when a number is none, was not delivered, or is behind the last one."""


_ERRORS: Final[dict[str, type[CheckpointFailed]]] = {
    THROTTLING: Throttled,
    DEPENDENCY: DependencyFailed,
    SHUTDOWN: LeaseLost,
    INVALID_STATE: CheckpointUnavailable,
    ILLEGAL_ARGUMENT: IllegalCheckpoint,
}
_PASSING: Final = (Throttled, DependencyFailed)


class Shard(NamedTuple):
    """What a processor is for."""

    name: str
    sequence_number: str | None
    """The checkpoint behind which it begins, or a word such as ``TRIM_HORIZON``; None:
    an old daemon does not send it."""
    sub_sequence_number: int = 0


class Record(NamedTuple):
    """What was put into the shard once."""

    data: bytes
    partition_key: str
    sequence_number: str
    sub_sequence_number: int | None
    """Its place among records that were put as one; None or 0: it was put alone."""
    arrival: int | None
    """When it arrived, in milliseconds since 1970; None: it is not known."""


class Checkpointer:
    """
    Stores how far a processor has come.

    Args:
        life: Where to ask.
        sleep: Waits for so many seconds.

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
        Store that all up to a record is processed.

        At the end of a shard leave the record out: the number of the last one does not
        count if it was stored before.

        Args:
            at: The record, or its sequence number; None: all that was delivered.
            sub_sequence_number: To go with a sequence number.
            tries: How often a store is asked that is throttled or fails.
            pause: Before the second try, in seconds; it doubles each time.

        Raises:
            CheckpointFailed: If it was not stored; the class has the reason.

        """
        position: ShardPosition | None = None
        if isinstance(at, Record):
            position = ShardPosition(at.sequence_number, at.sub_sequence_number or 0)
        elif at is not None:
            position = ShardPosition(at, sub_sequence_number or 0)
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
    """What processes the records of one shard; a base for yours."""

    def initialize(self, shard: Shard) -> None:
        """Prepare; called once, before all else."""

    def process_records(
        self, records: list[Record], checkpointer: Checkpointer
    ) -> None:
        """Process records; there may be none, so that it can act by time."""
        raise NotImplementedError

    def lease_lost(self) -> None:
        """Let go: the shard is another's, and nothing can be stored any more."""

    def shard_ended(self, checkpointer: Checkpointer) -> None:
        """Finish; without a checkpoint the shards behind this one don't begin."""
        checkpointer.checkpoint()

    def shutdown_requested(self, checkpointer: Checkpointer) -> None:
        """Store how far it has come, if that is worth it: the life ends soon."""


class _Life:
    """One life of a processor over two functions that move bytes."""

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
        """Return what comes next; None: the input has ended."""
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
        processor, checkpointer = self._processor, self._checkpointer
        match event:
            case Ready():
                processor.initialize(self._shard())
                self._send(Ready())
            case Opened(first, AnnotatedRun() as run):
                self._process(run)
                self._send(Added(first, (), ended=True))
            case Farewell(why=why):
                if why is FarewellReason.LOST:
                    processor.lease_lost()
                elif why is FarewellReason.ENDED:
                    processor.shard_ended(checkpointer)
                else:
                    processor.shutdown_requested(checkpointer)
                self._send(Farewell(why=why))
            case _:
                raise AssertionError(f"unreachable: {event}")

    def _process(self, run: AnnotatedRun) -> None:
        columns = (
            run.columns[name] for name in ("partition", "sequence", "sub", "arrival")
        )
        records = list(map(Record, run.messages, *columns))
        try:
            self._processor.process_records(records, self._checkpointer)
        except LeaseLost:
            # Nothing of this life can be stored any more: leaseLost is next.
            _trace()
        except Exception:
            # Between a question and its answer nothing can be skipped.
            if not self._skip or self._session.turn is not Turn.OURS:
                raise
            _trace()

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
        processor: What processes them.
        on_error: What becomes of an exception in ``process_records``: the process ends
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
    """Write the traceback of what is being handled to stderr."""
    import traceback

    traceback.print_exc(file=sys.stderr)
    sys.stderr.flush()


def _exit() -> NoReturn:
    raise SystemExit(1) from None
