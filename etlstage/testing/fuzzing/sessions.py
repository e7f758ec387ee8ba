"""
Sessions to be had with a worker that has several at once: how they overlap, and where
what is written is cut.

It is what ``case.py`` has, for dialects in which exchanges have names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from etlstage.protocol.base import Dialect, Limits, Session, Side
from etlstage.protocol.events import (
    Added,
    Cancelled,
    Event,
    Opened,
    Ready,
)
from etlstage.stage import Stage
from etlstage.testing.conversation import WorkerUnderTest
from etlstage.testing.dialect import kit_of
from etlstage.testing.fuzzing.case import Case, shown_steps
from etlstage.testing.replies import Reply
from etlstage.testing.transcript import cut

__all__ = ("Call", "Calls", "SessionCase", "case_class", "ready")

_UNWANTED: Final = (7, "not wanted any more")
_LIMITS: Final = Limits()


@dataclass(frozen=True)
class Call:
    """What is said in one session, and how we end our half of it."""

    chunks: Sequence[bytes] = ()
    cancelled: bool = False
    """With an error, and not with a choke."""

    def __repr__(self) -> str:
        more = ", cancelled=True" if self.cancelled else ""
        return f"Call({[*self.chunks]}{more})"


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
        said: list[Event] = []
        for number in self.order:
            if number not in ids:
                ids[number] = first + len(ids)
                said.append(Opened(ids[number], [], each=False, ended=False))
                continue
            chunk = next(chunks[number], None)
            if chunk is not None:
                said.append(Added(ids[number], [chunk]))
            elif self.calls[number].cancelled:
                said.append(Cancelled(ids[number], *_UNWANTED))
            else:
                said.append(Added(ids[number], (), ended=True))
        return said

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
        told = {n: next(replies) for n in begun if not self.calls[n].cancelled}
        return [told[number] for number in sorted(told)]

    def alone(
        self, replies: Sequence[Reply], *, batches: bool
    ) -> Iterator[tuple[Calls, list[Reply]]]:
        """Yield each session that was not cancelled, with its reply."""
        calls = [call for call in self.calls if not call.cancelled]
        for call, reply in zip(calls, replies, strict=True):
            yield Calls((call,)), [reply]

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


@dataclass(frozen=True)
class SessionCase:
    """Sessions to be had with a worker, from its start to its end."""

    steps: Sequence[Calls]

    def __repr__(self) -> str:
        return f"SessionCase({shown_steps(self.steps)})"

    @property
    def count(self) -> int:
        """How many messages there are."""
        return sum(len(step.messages) for step in self.steps)

    def on(self, stage: Stage) -> Stage:
        """Return a stage whose workers it is for."""
        return stage

    def having(self, steps: Sequence[Any]) -> Self:
        """Return the same with other steps."""
        return replace(self, steps=(*steps,))

    def written(self, dialect: Dialect) -> Iterator[str]:
        """Yield what is written at once, as text."""
        reader = kit_of(dialect).reader()
        assert reader is not None, "whose exchanges have names has frames"
        first = 1
        for step in self.steps:
            pieces = cut(step.wire(dialect, first), step.cuts)
            said = (reader.read(Side.SUPERVISOR, piece) for piece in pieces)
            yield " | ".join("; ".join(frames) or "..." for frames in said)
            first += len(step.calls)
        yield "a terminate"

    def imports(self) -> Iterator[str]:
        """Yield what a program imports that has it."""
        names = (
            "Call, Calls, SessionCase, verify" if self.steps else "SessionCase, verify"
        )
        yield f"from etlstage.testing import {names}"

    def to_plain(self) -> dict[str, Any]:
        """Return what :meth:`from_plain` reads, as plain JSON."""
        return {
            "steps": [
                {
                    "calls": [
                        {
                            "chunks": [c.decode("latin-1") for c in call.chunks],
                            "cancelled": call.cancelled,
                        }
                        for call in step.calls
                    ],
                    "turns": [*step.turns],
                    "cuts": [*step.cuts],
                }
                for step in self.steps
            ]
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Build from plain JSON."""
        return cls(
            tuple(
                Calls(
                    tuple(
                        Call(
                            tuple(c.encode("latin-1") for c in call["chunks"]),
                            call["cancelled"],
                        )
                        for call in step["calls"]
                    ),
                    tuple(step["turns"]),
                    tuple(step["cuts"]),
                )
                for step in plain["steps"]
            )
        )


def case_class(dialect: Dialect) -> type[Case | SessionCase]:
    """Return what a case for a worker of a dialect is."""
    in_order = dialect.open(Side.SUPERVISOR, _LIMITS).in_order
    return Case if in_order else SessionCase


def ready(dialect: Dialect) -> Session:
    """Return our side of a conversation with a worker that may be given sessions."""
    ours, theirs = (dialect.open(side, _LIMITS) for side in Side)
    theirs.send(Ready(), 0.0)
    ours.receive_data(b"".join(theirs.data_to_send()), 0.0)
    ours.data_to_send()  # an answer to its heartbeat
    return ours
