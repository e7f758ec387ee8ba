"""
What is sent to a worker at once, before the replies to all of it are waited for.

A dialect whose exchanges come in order has messages (``Step``), one whose exchanges have
names has sessions, which overlap (``Calls``), and one whose workers commit has records,
with what its checkpoints are answered with (``Records``). All else about a case, from how it is
drawn to how it is kept, is the same for both.
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
from etlstage.testing.kcl import ProcessorUnderTest
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
"""A process, and what talks to it as its dialect does."""

_SHARD: Final = Assignment("shardId-000000000000")
_UNWANTED: Final = (7, "not wanted any more")
_LIMITS: Final = Limits()
_RUN: Final = re.compile(rb"(.)\1{99,}", re.DOTALL)


@dataclass(frozen=True, repr=False)
class Saying(ABC):
    """What is sent at once, and the replies to it waited for, in any dialect."""

    if TYPE_CHECKING:

        @property
        def messages(self) -> Sequence[bytes]:
            """All of them."""

    def __repr__(self) -> str:
        return _repr(self)

    @property
    def exchanges(self) -> int:
        """How many exchanges with numbers of their own there are."""
        return 0

    @property
    def fresh(self) -> bool:
        """Whether only a process that has seen nothing else can be given it."""
        return False

    @abstractmethod
    async def exchange(self, worker: UnderTest) -> list[Reply]:
        """Send it; return the replies to what was not cancelled."""

    def alone(
        self, replies: Sequence[Reply], *, batches: bool
    ) -> Iterator[tuple[Saying, list[Reply]]]:
        """Yield each exchange with its reply, where there are replies."""
        yield from ()

    def uncut(self) -> Saying:
        """Return the same in one write."""
        uncut: dict[str, Any] = {"cuts": ()} if hasattr(self, "cuts") else {}
        return replace(self, **uncut)

    def turned(self) -> Saying:
        """Return the same in the opposite order, as far as that is one exchange."""
        return self

    @abstractmethod
    def of(self, outputs: Sequence[bytes], *, batches: bool) -> Saying:
        """Return what sends outputs again."""

    @abstractmethod
    def shown(self, dialect: Dialect, first: int) -> str:
        """
        Return what is written, as text; a bar is where one write ends.

        Args:
            dialect: What is spoken.
            first: Which exchange it begins with, counted from 1.

        """

    def names(self) -> set[str]:
        """Return what a program imports that has it."""
        return {type(self).__name__}

    def to_plain(self) -> dict[str, Any]:
        """Return it as plain JSON; see :func:`step_of`."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


@dataclass(frozen=True, repr=False)
class Step(Saying):
    """What is written at once, before the replies to all of it are waited for."""

    messages: Sequence[bytes]
    """In a dialect with batches, those of one batch."""
    cuts: Sequence[int] = ()
    """Before which of the bytes another write begins, counted from 0; each is written
    when the worker has read the one before."""

    async def exchange(self, worker: UnderTest) -> list[Reply]:
        """Send it; return the replies."""
        assert isinstance(worker, WorkerUnderTest)
        return await worker.exchange(self.messages, cuts=self.cuts)

    def alone(
        self, replies: Sequence[Reply], *, batches: bool
    ) -> Iterator[tuple[Step, list[Reply]]]:
        """Yield each exchange with its reply."""
        if batches:
            yield self, [*replies]
            return
        for message, reply in zip(self.messages, replies, strict=True):
            yield Step((message,)), [reply]

    def turned(self) -> Step:
        """Return the same in the opposite order."""
        return replace(self, messages=self.messages[::-1], cuts=())

    def of(self, outputs: Sequence[bytes], *, batches: bool) -> Step:
        """Return what sends outputs again."""
        return Step(tuple(outputs))

    def shown(self, dialect: Dialect, first: int) -> str:
        """Return what is written, as text."""
        kit = kit_of(dialect)
        parts = cut(kit.raw(self.messages), self.cuts)
        return " | ".join(clipped(part, kit.shown) for part in parts)


@dataclass(frozen=True, repr=False)
class Call:
    """What is sent in one session, and how we end our half of it."""

    chunks: Sequence[bytes] = ()
    cancelled: bool = False
    """With an error, and not with a choke."""

    def __repr__(self) -> str:
        return _repr(self)


@dataclass(frozen=True, repr=False)
class Calls(Saying):
    """Sessions that are begun before the replies to all of them are waited for."""

    calls: Sequence[Call]
    turns: Sequence[int] = ()
    """Which of them, counted from 0, sends the next that it has to send: that it begins,
    a chunk, that it ends. What is left comes behind that, one session after the other."""
    cuts: Sequence[int] = ()
    """As :class:`~etlstage.testing.Step` has them."""

    @property
    def messages(self) -> Sequence[bytes]:
        """All chunks."""
        return [chunk for call in self.calls for chunk in call.chunks]

    @property
    def exchanges(self) -> int:
        """How many sessions there are."""
        return len(self.calls)

    @property
    def order(self) -> list[int]:
        """Whose turn it is, to the end."""
        left = [len(call.chunks) + 2 for call in self.calls]
        order = []
        for number in self.turns:
            if number < len(left) and left[number]:
                left[number] -= 1
                order.append(number)
        return order + [n for n, count in enumerate(left) for _ in range(count)]

    def events(self, first: int) -> list[Event]:
        """Return what is sent, from the session of number ``first`` on."""
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
        """Return what a worker reads of it."""
        session = ready(dialect)
        for event in self.events(first):
            session.send(event, 0.0)
        return b"".join(iter(lambda: b"".join(session.data_to_send()), b""))

    async def exchange(self, worker: UnderTest) -> list[Reply]:
        """Send it; return the replies."""
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
        """Yield each exchange with its reply."""
        calls = [call for call in self.calls if not call.cancelled]
        for call, reply in zip(calls, replies, strict=True):
            yield Calls((call,)), [reply]

    def turned(self) -> Calls:
        """Return the same in another order: a session keeps its own."""
        return Calls(self.calls)

    def of(self, outputs: Sequence[bytes], *, batches: bool) -> Calls:
        """Return what sends outputs again."""
        if batches:
            return Calls((Call(tuple(outputs)),))
        return Calls(tuple(Call((output,)) for output in outputs))

    def only(self, numbers: Sequence[int]) -> Calls:
        """Return the same with some of the sessions."""
        place = {number: at for at, number in enumerate(numbers)}
        turns = tuple(place[number] for number in self.turns if number in place)
        return replace(self, calls=tuple(self.calls[n] for n in numbers), turns=turns)

    def shown(self, dialect: Dialect, first: int) -> str:
        """Return what is written, as text."""
        reader = kit_of(dialect).reader()
        assert reader is not None, "whose exchanges have names has frames"
        pieces = cut(self.wire(dialect, first), self.cuts)
        shown = (reader.read(Side.SUPERVISOR, piece) for piece in pieces)
        return " | ".join("; ".join(frames) or "..." for frames in shown)

    def names(self) -> set[str]:
        """Return what a program imports that has it."""
        return {"Call", "Calls"}


@dataclass(frozen=True, repr=False)
class Records(Saying):
    """What a record processor is given as one action, and what comes behind it."""

    messages: Sequence[bytes] = ()
    errors: Sequence[str] = ()
    """Names of exceptions with which its first checkpoints in the action are answered;
    behind ShutdownException the lease is lost. All others are stored."""
    put_as_one: bool = False
    """They have one sequence number, and sub-sequence numbers."""
    end: str = ""
    """Why its life ends behind the action: lost, drain or ended; eof: the daemon is gone
    without a word; empty: it goes on."""

    @property
    def fresh(self) -> bool:
        """A processor has one life."""
        return True

    async def exchange(self, worker: UnderTest) -> list[Reply]:
        """Send it; return the replies."""
        assert isinstance(worker, ProcessorUnderTest)
        await worker.initialized()
        if worker.session.state is not State.READY or worker.status is not None:
            return []  # its life has ended
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
        """Return the records, from a sequence number on."""
        count = len(self.messages)
        numbers = [first] * count if self.put_as_one else range(first, first + count)
        columns: dict[str, Sequence[Any]] = {
            RecordColumn.SEQUENCE: [str(number) for number in numbers],
            RecordColumn.PARTITION: [f"k\u00e4y-{n}" for n in range(count)],
            RecordColumn.ARRIVAL: [1476889707000] * count,
            RecordColumn.BEHIND: [0] * count,
        }
        if self.put_as_one:
            columns[RecordColumn.SUB] = list(range(count))
        return AnnotatedRun([*self.messages], **columns)

    def of(self, outputs: Sequence[bytes], *, batches: bool) -> Records:
        """Return what sends outputs again."""
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
    """Build from plain JSON."""
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
    """Return what Python reads: the first field, and others that are not empty."""
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
    """Return what talks to a worker of a stage."""
    if stage.dialect.shape is Shape.COMMITTED:
        return ProcessorUnderTest(stage, _SHARD, launch=launch, timeout=timeout)
    return WorkerUnderTest(stage, launch=launch, timeout=timeout)


def has_sessions(dialect: Dialect) -> bool:
    """Return whether exchanges of a dialect have names, and overlap."""
    return not dialect.open(Side.SUPERVISOR, _LIMITS).in_order


def literal(message: bytes) -> str:
    """Return a message as Python has it; what is one byte many times, as a product."""
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
    """Return steps as Python has them; of those that are all the same, one."""
    if len(steps) > 2 and all(step == steps[0] for step in steps):
        return f"[{steps[0]}] * {len(steps)}"
    return f"[{', '.join(map(repr, steps))}]"
