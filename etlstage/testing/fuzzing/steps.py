"""
Steps of a case: what is sent to a worker at once, before waiting for the replies.

A dialect whose exchanges are in order has messages (``Step``); one with named exchanges
has sessions, which overlap (``Calls``); and one whose workers checkpoint has records,
with the results of its checkpoints (``Records``). Everything else about a case, from
how it is drawn to how it is stored, is the same for all of them.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from etlstage.messages import AnnotatedRun, counted
from etlstage.protocol.base import Dialect, Limits, Shape, Side
from etlstage.protocol.events import (
    Added,
    Assignment,
    Cancelled,
    Event,
    FarewellReason,
    Opened,
)
from etlstage.protocol.kcl.lines import RecordColumn
from etlstage.protocol.kcl.session import State
from etlstage.stage import Stage
from etlstage.testing.conversation import WorkerUnderTest
from etlstage.testing.dialect import kit_of, ready
from etlstage.testing.kcl import ProcessorUnderTest, sequence_number
from etlstage.testing.replies import Reply
from etlstage.testing.transcript import clipped, cut
from etlstage.transport import Launch, launch_worker

__all__ = (
    "Call",
    "Calls",
    "Records",
    "Saying",
    "Step",
    "UnderTest",
    "has_sessions",
    "literal",
    "shown_steps",
    "step_of",
    "under_test",
)

UnderTest: TypeAlias = WorkerUnderTest | ProcessorUnderTest
"""A process, together with our side of its dialect."""

_SHARD: Final = Assignment("shardId-000000000000")
_UNWANTED: Final = (7, "not wanted any more")
_LIMITS: Final = Limits()
_RUN: Final = re.compile(rb"(.)\1{99,}", re.DOTALL)


@dataclass(frozen=True, repr=False)
class Saying(ABC):
    """A step in any dialect: what is sent before waiting for the replies to it."""

    if TYPE_CHECKING:

        @property
        def messages(self) -> Sequence[bytes]:
            """All messages of the step."""

    def __repr__(self) -> str:
        return _repr(self)

    @property
    def exchanges(self) -> int:
        """Number of exchanges, where they are named by number; else 0."""
        return 0

    @property
    def fresh(self) -> bool:
        """Whether it requires a process that has received nothing before."""
        return False

    @abstractmethod
    async def exchange(self, worker: UnderTest) -> list[Reply]:
        """Send the step; return the replies to exchanges that were not cancelled."""

    def alone(
        self, replies: Sequence[Reply], *, batches: bool
    ) -> Iterator[tuple[Saying, list[Reply]]]:
        """Yield each exchange as its own step, with its reply, if it has replies."""
        yield from ()

    def uncut(self) -> Saying:
        """Return a copy that is sent in one write."""
        uncut: dict[str, Any] = {"cuts": ()} if hasattr(self, "cuts") else {}
        return replace(self, **uncut)

    def turned(self) -> Saying:
        """Return a copy in reverse order, if its order may be changed."""
        return self

    @abstractmethod
    def of(self, outputs: Sequence[bytes], *, batches: bool) -> Saying:
        """Return a step that sends outputs as messages."""

    @abstractmethod
    def shown(self, dialect: Dialect, first: int) -> str:
        """
        Return what is written, as text, with a bar between two writes.

        Args:
            dialect: The dialect of the worker.
            first: Number of the step's first exchange, counted from 1.

        """

    def names(self) -> set[str]:
        """Return the names that a program with the step's repr imports."""
        return {type(self).__name__}

    def to_plain(self) -> dict[str, Any]:
        """Return the step as plain JSON, for :func:`step_of`."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


@dataclass(frozen=True, repr=False)
class Step(Saying):
    """Messages that are written before waiting for the replies to all of them."""

    messages: Sequence[bytes]
    """In a dialect with batches, the messages of one batch."""
    cuts: Sequence[int] = ()
    """Offsets of the bytes at which another write begins; each write waits until the
    worker has read the previous one."""

    async def exchange(self, worker: UnderTest) -> list[Reply]:
        """Send the messages; return the replies."""
        assert isinstance(worker, WorkerUnderTest)
        return await worker.exchange(self.messages, cuts=self.cuts)

    def alone(
        self, replies: Sequence[Reply], *, batches: bool
    ) -> Iterator[tuple[Step, list[Reply]]]:
        """Yield each exchange as its own step, with its reply."""
        if batches:
            yield self, [*replies]
            return
        for message, reply in zip(self.messages, replies, strict=True):
            yield Step((message,)), [reply]

    def turned(self) -> Step:
        """Return a copy with the messages in reverse order."""
        return replace(self, messages=self.messages[::-1], cuts=())

    def of(self, outputs: Sequence[bytes], *, batches: bool) -> Step:
        """Return a step that sends outputs as messages."""
        return Step(tuple(outputs))

    def shown(self, dialect: Dialect, first: int) -> str:
        """Return what is written, as text."""
        kit = kit_of(dialect)
        parts = cut(kit.raw(self.messages), self.cuts)
        return " | ".join(clipped(part, kit.shown) for part in parts)


@dataclass(frozen=True, repr=False)
class Call:
    """What we send in one session, and how we end our half of it."""

    chunks: Sequence[bytes] = ()
    cancelled: bool = False
    """Whether our half is ended by an error instead of a choke."""

    def __repr__(self) -> str:
        return _repr(self)


@dataclass(frozen=True, repr=False)
class Calls(Saying):
    """Sessions that are begun before waiting for the replies to all of them."""

    calls: Sequence[Call]
    turns: Sequence[int] = ()
    """The interleaving: each item is the index of the session that sends its next frame
    (its start, a chunk, or its end). The rest follows, one session after the other."""
    cuts: Sequence[int] = ()
    """As for :class:`~etlstage.testing.Step`."""

    @property
    def messages(self) -> Sequence[bytes]:
        """All chunks, session by session."""
        return [chunk for call in self.calls for chunk in call.chunks]

    @property
    def exchanges(self) -> int:
        """Number of sessions."""
        return len(self.calls)

    @property
    def order(self) -> list[int]:
        """Index of the session that sends each frame, until all have ended."""
        left = [len(call.chunks) + 2 for call in self.calls]
        order = []
        for number in self.turns:
            if number < len(left) and left[number]:
                left[number] -= 1
                order.append(number)
        return order + [n for n, count in enumerate(left) for _ in range(count)]

    def events(self, first: int) -> list[Event]:
        """Return what is sent; the first session to begin has number ``first``."""
        ids: dict[int, int] = {}
        chunks = [iter(call.chunks) for call in self.calls]
        events: list[Event] = []
        for number in self.order:
            if number not in ids:
                ids[number] = first + len(ids)
                events.append(Opened(ids[number], [], each=False, ended=False))
                continue
            chunk = next(chunks[number], None)
            if chunk is not None:
                events.append(Added(ids[number], [chunk]))
            elif self.calls[number].cancelled:
                events.append(Cancelled(ids[number], *_UNWANTED))
            else:
                events.append(Added(ids[number], (), ended=True))
        return events

    def wire(self, dialect: Dialect, first: int = 1) -> bytes:
        """Return the bytes that a worker reads."""
        session = ready(dialect)
        for event in self.events(first):
            session.send(event, 0.0)
        return b"".join(iter(lambda: b"".join(session.data_to_send()), b""))

    async def exchange(self, worker: UnderTest) -> list[Reply]:
        """Send the sessions; return the replies."""
        assert isinstance(worker, WorkerUnderTest)
        begun = list(dict.fromkeys(self.order))
        events = self.events(worker.last + 1)
        await worker.send(*events, cuts=self.cuts)
        replies = iter(await worker.replies())
        found = {n: next(replies) for n in begun if not self.calls[n].cancelled}
        return [found[number] for number in sorted(found)]

    def alone(
        self, replies: Sequence[Reply], *, batches: bool
    ) -> Iterator[tuple[Calls, list[Reply]]]:
        """Yield each session as its own step, with its reply."""
        calls = [call for call in self.calls if not call.cancelled]
        for call, reply in zip(calls, replies, strict=True):
            yield Calls((call,)), [reply]

    def turned(self) -> Calls:
        """Return a copy that does not interleave; each session keeps its order."""
        return Calls(self.calls)

    def of(self, outputs: Sequence[bytes], *, batches: bool) -> Calls:
        """Return a step that sends outputs as messages."""
        if batches:
            return Calls((Call(tuple(outputs)),))
        return Calls(tuple(Call((output,)) for output in outputs))

    def only(self, numbers: Sequence[int]) -> Calls:
        """Return a copy with some of the sessions."""
        place = {number: at for at, number in enumerate(numbers)}
        turns = tuple(place[number] for number in self.turns if number in place)
        return replace(self, calls=tuple(self.calls[n] for n in numbers), turns=turns)

    def shown(self, dialect: Dialect, first: int) -> str:
        """Return what is written, as text."""
        reader = kit_of(dialect).reader()
        assert reader is not None, "a dialect with named exchanges has a reader"
        pieces = cut(self.wire(dialect, first), self.cuts)
        shown = (reader.read(Side.SUPERVISOR, piece) for piece in pieces)
        return " | ".join("; ".join(frames) or "..." for frames in shown)

    def names(self) -> set[str]:
        """Return the names that a program with the step's repr imports."""
        return {"Call", "Calls"}


PROCESSOR_ENDS: Final = ("eof", "lost", "drain", "ended")
"""How a record processor may be ended; what comes first counts as simpler."""


@dataclass(frozen=True, repr=False)
class Records(Saying):
    """An action of a record processor, and what follows it."""

    messages: Sequence[bytes] = ()
    errors: Sequence[str] = ()
    """Names of the exceptions that its first checkpoints in the action fail with; all
    later ones are stored. After ShutdownException the lease is lost."""
    put_as_one: bool = False
    """Whether the records share a sequence number, and have sub-sequence numbers."""
    end: str = ""
    """Why the processor is ended after the action, one of :data:`PROCESSOR_ENDS`; eof:
    the daemon just closes its stdin; empty: the processor continues."""

    @property
    def fresh(self) -> bool:
        """Always true: a process serves one shard once."""
        return True

    async def exchange(self, worker: UnderTest) -> list[Reply]:
        """Send the action, and what follows it; there are no replies."""
        assert isinstance(worker, ProcessorUnderTest)
        await worker.initialized()
        if worker.session.state is not State.READY or worker.status is not None:
            return []  # the processor has ended
        worker.errors = deque(self.errors)
        await worker.give(self.run(worker.given + 1))
        worker.errors.clear()
        if self.end == "eof":
            await worker.exited()
        elif self.end:
            await worker.end(FarewellReason(self.end))
        worker.blame_illegal()
        return []

    def run(self, first: int) -> AnnotatedRun:
        """Return the records; the first is at place ``first`` of its shard."""
        count = len(self.messages)
        places = [first] * count if self.put_as_one else range(first, first + count)
        columns: dict[str, Sequence[Any]] = {
            RecordColumn.SEQUENCE: [sequence_number(place) for place in places],
            RecordColumn.PARTITION: [f"k\u00e4y-{n}" for n in range(count)],
            RecordColumn.ARRIVAL: [1476889707000] * count,
            RecordColumn.BEHIND: [0] * count,
        }
        if self.put_as_one:
            columns[RecordColumn.SUB] = list(range(count))
        return AnnotatedRun([*self.messages], **columns)

    def of(self, outputs: Sequence[bytes], *, batches: bool) -> Records:
        """Return a step that sends outputs as messages."""
        return Records(tuple(outputs))

    def shown(self, dialect: Dialect, first: int) -> str:
        """Return what is written, as text."""
        given = counted(len(self.messages), "record")
        if self.messages:
            given += f" {', '.join(literal(message)[1:] for message in self.messages)}"
        parts = [given + " put as one" * self.put_as_one]
        parts += [f"checkpoint: {error}" for error in self.errors]
        return "; ".join([*parts, *([f"end: {self.end}"] if self.end else [])])


def step_of(plain: Mapping[str, Any]) -> Saying:
    """Build a step from plain JSON; see :meth:`Saying.to_plain`."""
    if "errors" in plain:
        given = {**plain, "errors": tuple(plain["errors"])}
        return Records(**{**given, "messages": _encoded(plain["messages"])})
    cuts = tuple(plain["cuts"])
    if "calls" not in plain:
        return Step(_encoded(plain["messages"]), cuts)
    calls = [Call(_encoded(c["chunks"]), c["cancelled"]) for c in plain["calls"]]
    return Calls(tuple(calls), tuple(plain["turns"]), cuts)


def _plain(value: Any) -> Any:  # noqa: ANN401 - any field of a step
    match value:
        case bytes():
            return value.decode("latin-1")
        case str() | int():
            return value
        case Call():
            return {"chunks": _plain(value.chunks), "cancelled": value.cancelled}
        case _:
            return [_plain(item) for item in value]


def _repr(step: Saying | Call) -> str:
    """Return a Python expression, with the first field and others not empty."""
    first, *others = (field.name for field in fields(step))
    items = (
        literal(x) if isinstance(x, bytes) else repr(x) for x in getattr(step, first)
    )
    text = f"{type(step).__name__}([{', '.join(items)}]"
    for name in others:
        if value := getattr(step, name):
            shown = value if isinstance(value, bool | str) else [*value]
            text += f", {name}={shown!r}"
    return text + ")"


def _encoded(texts: Sequence[str]) -> tuple[bytes, ...]:
    return tuple(text.encode("latin-1") for text in texts)


def under_test(
    stage: Stage, *, launch: Launch = launch_worker, timeout: float = 10.0
) -> UnderTest:
    """Return what runs and drives one worker of a stage."""
    if stage.dialect.shape is Shape.COMMITTED:
        return ProcessorUnderTest(stage, _SHARD, launch=launch, timeout=timeout)
    return WorkerUnderTest(stage, launch=launch, timeout=timeout)


def has_sessions(dialect: Dialect) -> bool:
    """Return whether exchanges of a dialect are named, and may overlap."""
    return not dialect.open(Side.SUPERVISOR, _LIMITS).in_order


def literal(message: bytes) -> str:
    """Return a message as a Python literal, with long runs of a byte as products."""
    pieces, at = [], 0
    for run in _RUN.finditer(message):
        if run.start() > at:
            pieces.append(repr(message[at : run.start()]))
        pieces.append(f"{run[1]!r} * {len(run[0])}")
        at = run.end()
    if at < len(message) or not message:
        pieces.append(repr(message[at:]))
    return " + ".join(pieces)


def shown_steps(steps: Sequence[object]) -> str:
    """Return steps as a Python expression; equal ones as one, multiplied."""
    if len(steps) > 2 and all(step == steps[0] for step in steps):
        return f"[{steps[0]}] * {len(steps)}"
    return f"[{', '.join(map(repr, steps))}]"
