"""
A conversation to be had with a worker: what is written, and where that is cut.

What is asked of every worker is decided here: it answers, keeps to the protocol, and
ends well when its input does. What else must be true, ``oracle.py`` knows.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, NoReturn, Protocol, Self, TypeAlias

from etlstage.protocol.base import Dialect
from etlstage.protocol.marker import Markers
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import Stage
from etlstage.testing.conversation import WorkerMisbehaved, WorkerUnderTest
from etlstage.testing.dialect import kit_of
from etlstage.testing.replies import Reply
from etlstage.testing.transcript import clipped, cut
from etlstage.transport.base import describe_status

__all__ = (
    "AnyCase",
    "Case",
    "CaseFailed",
    "FailureKind",
    "Said",
    "Saying",
    "Step",
    "converse",
    "end",
    "fail",
    "literal",
    "shown_steps",
)


_VALUES: Final = re.compile(r"b?'[^']*'|b?\"[^\"]*\"|[0-9,]+|:.*", re.DOTALL)
_SURPLUS: Final = re.compile(r"too many|more than its reply")
_ENDED: Final = re.compile(r"status [0-9]+|SIG[A-Z]+")
_RAISED: Final = re.compile(r"^ {20}([A-Za-z_.]+)(?=:|$)", re.MULTILINE)
_RUN: Final = re.compile(rb"(.)\1{99,}", re.DOTALL)


class FailureKind(StrEnum):
    """What a worker is found to do; the value is how it is told."""

    HANGS = "it hangs"
    CRASHES = "it crashes"
    BREAKS = "it breaks the protocol"
    OUTPUTS = "it does not give one output for each message"
    JSON = "it writes what is no JSON"
    IDEMPOTENT = "it changes its own output"
    ORDER_FREE = "its replies depend on the order of the messages"
    STATELESS = "its replies depend on the messages before"
    MODEL = "it does not do as the model does"

    @property
    def of_any(self) -> bool:
        """Whether it is a fault of any worker, whatever it is meant to do."""
        return self in (FailureKind.HANGS, FailureKind.CRASHES, FailureKind.BREAKS)

    @property
    def label(self) -> str:
        """As a file is named after it."""
        return self.name.lower().replace("_", "-")


class CaseFailed(WorkerMisbehaved):
    """
    Raised when a worker does not stand a case.

    Attributes:
        kind: What it is found to do.

    """

    def __init__(self, kind: FailureKind, what: str, transcript: str) -> None:
        super().__init__(what, transcript)
        self.kind = kind

    @property
    def signature(self) -> tuple[str, ...]:
        """
        What tells it from another bug, as far as anything does.

        Of a crash that is also how the worker ended, and the exception that it wrote
        last; of a breach of the protocol what it is, without the bytes.
        """
        if self.kind is FailureKind.BREAKS:
            surplus = _SURPLUS.search(self.what)
            return self.kind, "surplus" if surplus else _VALUES.sub("", self.what)
        if self.kind is not FailureKind.CRASHES:
            return (self.kind,)
        ended = _ENDED.findall(self.what)
        raised = _RAISED.findall(self.transcript)
        return self.kind, *ended, *raised[-1:]


class Saying(Protocol):
    """What is said at once, and the replies to it waited for, in any dialect."""

    @property
    def messages(self) -> Sequence[bytes]:
        """All of them."""
        ...

    async def exchange(self, worker: WorkerUnderTest) -> list[Reply]:
        """Say it; return the replies."""
        ...

    def alone(
        self, replies: Sequence[Reply], *, batches: bool
    ) -> Iterator[tuple[Saying, list[Reply]]]:
        """Yield each exchange with its reply."""
        ...

    def turned(self) -> Saying:
        """Return the same in the opposite order, as far as that is one exchange."""
        ...

    def of(self, outputs: Sequence[bytes], *, batches: bool) -> Saying:
        """Return what says outputs again."""
        ...


class AnyCase(Protocol):
    """A conversation to be had with a worker of any dialect; see :class:`Case`."""

    @property
    def steps(self) -> Sequence[Saying]:
        """What is said."""
        ...

    @property
    def count(self) -> int:
        """How many messages there are."""
        ...

    def on(self, stage: Stage) -> Stage:
        """Return a stage whose workers it is for."""
        ...

    def having(self, steps: Sequence[Any]) -> Self:
        """Return the same with other steps."""
        ...

    def written(self, dialect: Dialect) -> Iterator[str]:
        """Yield what is written at once, as text; and the end."""
        ...

    def imports(self) -> Iterator[str]:
        """Yield what a program imports that has it."""
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

    def turned(self) -> Step:
        """Return the same with the messages in the opposite order."""
        return replace(self, messages=self.messages[::-1], cuts=())

    def of(self, outputs: Sequence[bytes], *, batches: bool) -> Step:
        """Return what says outputs again."""
        return Step(tuple(outputs))


Said: TypeAlias = list[tuple[Saying, list[Reply]]]
"""What was said, and the replies to it."""


@dataclass(frozen=True)
class Case:
    """A conversation to be had with a worker, from its start to its end."""

    steps: Sequence[Step]
    markers: Markers = field(default_factory=Markers)

    def __repr__(self) -> str:
        steps = shown_steps(self.steps)
        default = Markers()
        given = zip(Markers._fields, self.markers, default, strict=True)
        marked = ", ".join(f"{n}={mine!r}" for n, mine, usual in given if mine != usual)
        return f"Case({steps}, Markers({marked}))" if marked else f"Case({steps})"

    @property
    def count(self) -> int:
        """How many messages there are."""
        return sum(len(step.messages) for step in self.steps)

    def on(self, stage: Stage) -> Stage:
        """Return a stage whose workers speak with the case's markers."""
        assert isinstance(stage.dialect, MarkerDialect)
        return replace(stage, dialect=replace(stage.dialect, markers=self.markers))

    def having(self, steps: Sequence[Any]) -> Self:
        """Return the same with other steps."""
        return replace(self, steps=(*steps,))

    def written(self, dialect: Dialect) -> Iterator[str]:
        """Yield what is written at once, as text; and the end."""
        kit = kit_of(dialect)
        for step in self.steps:
            wire = kit.raw(step.messages)
            parts = cut(wire, step.cuts)
            yield " | ".join(clipped(part, kit.shown) for part in parts)
        yield "the end of the input"

    def imports(self) -> Iterator[str]:
        """Yield what a program imports that has it."""
        names = "Case, Step, verify" if self.steps else "Case, verify"
        if self.markers != Markers():
            yield "from etlstage.protocol.marker import Markers"
        yield f"from etlstage.testing import {names}"

    def to_plain(self) -> dict[str, Any]:
        """Return what :meth:`from_plain` reads, as plain JSON."""
        steps = [
            {
                "messages": [message.decode("latin-1") for message in step.messages],
                "cuts": [*step.cuts],
            }
            for step in self.steps
        ]
        return {"steps": steps, "markers": self.markers.to_text()}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Build from plain JSON."""
        steps = [
            Step(
                tuple(message.encode("latin-1") for message in step["messages"]),
                tuple(step["cuts"]),
            )
            for step in plain["steps"]
        ]
        return cls(tuple(steps), Markers.from_text(**plain["markers"]))


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


async def converse(worker: WorkerUnderTest, steps: Iterable[Saying]) -> Said:
    """
    Say what a case says, and return the replies to each step.

    Raises:
        CaseFailed: If the worker hangs, crashes or breaks the protocol.

    """
    replies: Said = []
    for step in steps:
        # It may have broken it behind its last reply.
        await _classified(worker, worker.until(lambda: not worker.broken, ""))
        given = await _classified(worker, step.exchange(worker))
        replies.append((step, given))
    return replies


async def end(worker: WorkerUnderTest) -> None:
    """
    Have it end, and see it to its end.

    Raises:
        CaseFailed: If that is no good end.

    """
    status = await _classified(worker, worker.close())
    # One that connects is told to end, and leaves with any status.
    if status < 0 or (status and worker.stage.dialect.connection is None):
        what = f"the worker {describe_status(status)} at the end of its input"
        fail(worker, FailureKind.CRASHES, what)


async def _classified(worker: WorkerUnderTest, doing: Awaitable[Any]) -> Any:  # noqa: ANN401
    try:
        return await doing
    except CaseFailed:
        raise
    except WorkerMisbehaved as failed:
        broken = worker.broken
        kind = FailureKind.HANGS if worker.status is None else FailureKind.CRASHES
        raise CaseFailed(
            FailureKind.BREAKS if broken else kind, failed.what, failed.transcript
        ) from None


def fail(worker: WorkerUnderTest, kind: FailureKind, what: str) -> NoReturn:
    """Raise :class:`CaseFailed` with all that went both ways."""
    try:
        worker.fail("")
    except WorkerMisbehaved as failed:
        raise CaseFailed(kind, what, failed.transcript) from None
