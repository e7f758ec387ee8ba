"""
What is said to a worker at once, before the replies to all of it are waited for.

A dialect whose exchanges come in order has messages (``Step``), and one whose exchanges
have names has sessions, which overlap (``Calls``). All else about a case, from how it is
drawn to how it is kept, is the same for both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from etlstage.protocol.base import Dialect, DialectSession, Limits, Side
from etlstage.protocol.events import Added, Cancelled, Event, Opened, Ready
from etlstage.testing.conversation import WorkerUnderTest
from etlstage.testing.dialect import kit_of
from etlstage.testing.replies import Reply
from etlstage.testing.transcript import clipped, cut

__all__ = (
    "Call",
    "Calls",
    "Saying",
    "Step",
    "has_sessions",
    "literal",
    "ready",
    "shown_steps",
    "step_of",
)

_UNWANTED: Final = (7, "not wanted any more")
_LIMITS: Final = Limits()
_RUN: Final = re.compile(rb"(.)\1{99,}", re.DOTALL)


class Saying(Protocol):
    """What is said at once, and the replies to it waited for, in any dialect."""

    @property
    def messages(self) -> Sequence[bytes]:
        """All of them."""
        ...

    @property
    def exchanges(self) -> int:
        """How many exchanges with numbers of their own there are."""
        ...

    async def exchange(self, worker: WorkerUnderTest) -> list[Reply]:
        """Say it; return the replies."""
        ...

    def alone(
        self, replies: Sequence[Reply], *, batches: bool
    ) -> Iterator[tuple[Saying, list[Reply]]]:
        """Yield each exchange with its reply."""
        ...

    def uncut(self) -> Saying:
        """Return the same in one write."""
        ...

    def turned(self) -> Saying:
        """Return the same in the opposite order, as far as that is one exchange."""
        ...

    def of(self, outputs: Sequence[bytes], *, batches: bool) -> Saying:
        """Return what says outputs again."""
        ...

    def shown(self, dialect: Dialect, first: int) -> str:
        """
        Return what is written, as text; a bar is where one write ends.

        Args:
            dialect: What is spoken.
            first: Which exchange it begins with, counted from 1.

        """
        ...

    def names(self) -> set[str]:
        """Return what a program imports that has it."""
        ...

    def to_plain(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        ...


@dataclass(frozen=True)
class Step:
    """What is written at once, before the replies to all of it are waited for."""

    messages: Sequence[bytes]
    """In a dialect with batches, those of one batch."""
    cuts: Sequence[int] = ()
    """Before which of the bytes another write begins, counted from 0; each is written
    when the worker has read the one before."""

    def __repr__(self) -> str:
        more = f", cuts={[*self.cuts]}" if self.cuts else ""
        return f"Step([{', '.join(map(literal, self.messages))}]{more})"

    @property
    def exchanges(self) -> int:
        """None is numbered."""
        return 0

    async def exchange(self, worker: WorkerUnderTest) -> list[Reply]:
        """Say it; return the replies."""
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

    def uncut(self) -> Step:
        """Return the same in one write."""
        return replace(self, cuts=())

    def turned(self) -> Step:
        """Return the same with the messages in the opposite order."""
        return replace(self, messages=self.messages[::-1], cuts=())

    def of(self, outputs: Sequence[bytes], *, batches: bool) -> Step:
        """Return what says outputs again."""
        return Step(tuple(outputs))

    def shown(self, dialect: Dialect, first: int) -> str:
        """Return what is written, as text."""
        kit = kit_of(dialect)
        parts = cut(kit.raw(self.messages), self.cuts)
        return " | ".join(clipped(part, kit.shown) for part in parts)

    def names(self) -> set[str]:
        """Return what a program imports that has it."""
        return {"Step"}

    def to_plain(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        messages = [message.decode("latin-1") for message in self.messages]
        return {"messages": messages, "cuts": [*self.cuts]}


@dataclass(frozen=True)
class Call:
    """What is said in one session, and how we end our half of it."""

    chunks: Sequence[bytes] = ()
    cancelled: bool = False
    """With an error, and not with a choke."""

    def __repr__(self) -> str:
        more = ", cancelled=True" if self.cancelled else ""
        return f"Call([{', '.join(map(literal, self.chunks))}]{more})"


@dataclass(frozen=True)
class Calls:
    """Sessions that are begun before the replies to all of them are waited for."""

    calls: Sequence[Call]
    turns: Sequence[int] = ()
    """Which of them, counted from 0, says the next that it has to say: that it begins,
    a chunk, that it ends. What is left comes behind that, one session after the other."""
    cuts: Sequence[int] = ()
    """As :class:`~etlstage.testing.Step` has them."""

    def __repr__(self) -> str:
        more = f", turns={[*self.turns]}" if self.turns else ""
        more += f", cuts={[*self.cuts]}" if self.cuts else ""
        return f"Calls({[*self.calls]}{more})"

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

    def events(self, first: int, kind: str) -> list[Event]:
        """
        Return what is said.

        Args:
            first: Number of the first session.
            kind: Of the stage.

        """
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
        for event in self.events(first, "transform"):
            session.send(event, 0.0)
        return b"".join(iter(lambda: b"".join(session.data_to_send()), b""))

    async def exchange(self, worker: WorkerUnderTest) -> list[Reply]:
        """Say it; return the replies to what was not cancelled."""
        begun = list(dict.fromkeys(self.order))
        events = self.events(worker.last + 1, worker.stage.kind.value)
        await worker.send(*events, cuts=self.cuts)
        replies = iter(await worker.replies())
        found = {n: next(replies) for n in begun if not self.calls[n].cancelled}
        return [found[number] for number in sorted(found)]

    def alone(
        self, replies: Sequence[Reply], *, batches: bool
    ) -> Iterator[tuple[Calls, list[Reply]]]:
        """Yield each session that was not cancelled, with its reply."""
        calls = [call for call in self.calls if not call.cancelled]
        for call, reply in zip(calls, replies, strict=True):
            yield Calls((call,)), [reply]

    def uncut(self) -> Calls:
        """Return the same in one write."""
        return replace(self, cuts=())

    def turned(self) -> Calls:
        """Return the same to be said in another order: a session keeps its own."""
        return Calls(self.calls)

    def of(self, outputs: Sequence[bytes], *, batches: bool) -> Calls:
        """Return what says outputs again."""
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

    def to_plain(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        calls = [
            {
                "chunks": [chunk.decode("latin-1") for chunk in call.chunks],
                "cancelled": call.cancelled,
            }
            for call in self.calls
        ]
        return {"calls": calls, "turns": [*self.turns], "cuts": [*self.cuts]}


def step_of(plain: Mapping[str, Any]) -> Saying:
    """Build from plain JSON."""
    cuts = tuple(plain["cuts"])
    if "calls" not in plain:
        return Step(_encoded(plain["messages"]), cuts)
    calls = [Call(_encoded(c["chunks"]), c["cancelled"]) for c in plain["calls"]]
    return Calls(tuple(calls), tuple(plain["turns"]), cuts)


def _encoded(texts: Sequence[str]) -> tuple[bytes, ...]:
    return tuple(text.encode("latin-1") for text in texts)


def has_sessions(dialect: Dialect) -> bool:
    """Return whether exchanges of a dialect have names, and overlap."""
    return not dialect.open(Side.SUPERVISOR, _LIMITS).in_order


def ready(dialect: Dialect) -> DialectSession:
    """Return our side of a conversation with a worker that may be given sessions."""
    ours, theirs = (dialect.open(side, _LIMITS) for side in Side)
    theirs.send(Ready(), 0.0)
    ours.receive_data(b"".join(theirs.data_to_send()), 0.0)
    ours.data_to_send()  # an answer to its heartbeat
    return ours


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
