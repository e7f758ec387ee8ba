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
from typing import Any, Final, NoReturn, Self, TypeAlias

from etlstage.protocol.base import Dialect, Shape
from etlstage.protocol.marker import Markers
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import Stage
from etlstage.testing.fuzzing.steps import Saying, UnderTest, shown_steps, step_of
from etlstage.testing.replies import Reply
from etlstage.testing.transcript import WorkerMisbehaved
from etlstage.transport.base import describe_status

__all__ = (
    "AnsweredSteps",
    "Case",
    "CaseFailed",
    "FailureKind",
    "SessionCase",
    "converse",
    "end",
    "fail",
)


_VALUES: Final = re.compile(r"b?'[^']*'|b?\"[^\"]*\"|[0-9,]+|:.*", re.DOTALL)
_SURPLUS: Final = re.compile(r"too many|more than its reply")
_ENDED: Final = re.compile(r"status [0-9]+|SIG[A-Z]+")
_RAISED: Final = re.compile(r"^ {20}([A-Za-z_.]+)(?=:|$)", re.MULTILINE)


class FailureKind(StrEnum):
    """What a worker is found to do; the value is the text of a report."""

    HANGS = "it hangs"
    CRASHES = "it crashes"
    BREAKS = "it breaks the protocol"
    OUTPUTS = "it does not give one output for each message"
    JSON = "it writes what is no JSON"
    EXPECT = "its reply breaks expect"
    IDEMPOTENT = "it changes its own output"
    ORDER_FREE = "its replies depend on the order of the messages"
    STATELESS = "its replies depend on the messages before"
    MODEL = "it differs from the model"

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
    Raised when a case makes a worker fail.

    Attributes:
        kind: What it is found to do.

    """

    def __init__(self, kind: FailureKind, what: str, transcript: str) -> None:
        super().__init__(what, transcript)
        self.kind = kind

    @property
    def signature(self) -> tuple[str, ...]:
        """
        What distinguishes it from another bug, as far as anything does.

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


AnsweredSteps: TypeAlias = list[tuple[Saying, list[Reply]]]
"""What was sent, and the replies to it."""


@dataclass(frozen=True)
class Case:
    """A conversation to be had with a worker, from its start to its end."""

    steps: Sequence[Saying]
    """Each a :class:`Step`, or where exchanges have names, :class:`Calls`."""
    markers: Markers = field(default_factory=Markers)
    """Of a dialect that has some."""

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

    @property
    def fresh(self) -> bool:
        """Whether only a process that has seen nothing else can be given it."""
        return any(step.fresh for step in self.steps)

    def on(self, stage: Stage) -> Stage:
        """Return a stage whose workers speak with the case's markers, if with any."""
        if not isinstance(stage.dialect, MarkerDialect):
            return stage
        return replace(stage, dialect=replace(stage.dialect, markers=self.markers))

    def having(self, steps: Sequence[Saying]) -> Self:
        """Return the same with other steps."""
        return replace(self, steps=(*steps,))

    def written(self, dialect: Dialect) -> Iterator[str]:
        """Yield what is written at once, as text; and the end."""
        first = 1
        for step in self.steps:
            yield step.shown(dialect, first)
            first += step.exchanges
        if dialect.shape is Shape.COMMITTED:
            yield "the end of the shard"
            return
        connected = dialect.connection is not None
        yield "a terminate" if connected else "the end of the input"

    def imports(self) -> Iterator[str]:
        """Yield what a program imports that has it."""
        names = {"Case", "verify"}.union(*(step.names() for step in self.steps))
        if self.markers != Markers():
            yield "from etlstage.protocol.marker import Markers"
        yield f"from etlstage.testing import {', '.join(sorted(names))}"

    def to_plain(self) -> dict[str, Any]:
        """Return what :meth:`from_plain` reads, as plain JSON."""
        steps = [step.to_plain() for step in self.steps]
        return {"steps": steps, "markers": self.markers.to_text()}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Build from plain JSON."""
        steps = tuple(map(step_of, plain["steps"]))
        return cls(steps, Markers.from_text(**plain.get("markers", {})))


SessionCase: TypeAlias = Case
"""The same, by the name that it once had for sessions."""


async def converse(worker: UnderTest, steps: Iterable[Saying]) -> AnsweredSteps:
    """
    Send what a case has, and return the replies to each step.

    Raises:
        CaseFailed: If the worker hangs, crashes or breaks the protocol.

    """
    replies: AnsweredSteps = []
    for step in steps:
        # It may have broken it behind its last reply.
        await _classified(worker, worker.until(lambda: not worker.broken, ""))
        given = await _classified(worker, step.exchange(worker))
        replies.append((step, given))
    return replies


async def end(worker: UnderTest) -> None:
    """
    Have it end, and see it to its end.

    Raises:
        CaseFailed: If that is no good end.

    """
    status = await _classified(worker, worker.close())
    # One that connects is asked to end, and leaves with any status.
    if status < 0 or (status and worker.stage.dialect.connection is None):
        what = f"the worker {describe_status(status)} at the end of its input"
        fail(worker, FailureKind.CRASHES, what)


async def _classified(worker: UnderTest, doing: Awaitable[Any]) -> Any:  # noqa: ANN401
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


def fail(worker: UnderTest, kind: FailureKind, what: str) -> NoReturn:
    """Raise :class:`CaseFailed` with the transcript."""
    try:
        worker.fail("")
    except WorkerMisbehaved as failed:
        raise CaseFailed(kind, what, failed.transcript) from None
