"""
A conversation to be had with a worker: what is written, and where that is cut.

What is asked of every worker is decided here: it answers, keeps to the protocol, and
ends well when its input does. What else must be true, ``oracle.py`` knows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NoReturn, Self, TypeAlias

from etlstage.protocol.marker import Markers
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import Stage
from etlstage.testing.conversation import WorkerFailed, WorkerUnderTest
from etlstage.testing.replies import Reply
from etlstage.transport.base import describe_status

__all__ = ("Case", "CaseFailed", "Kind", "Said", "Step", "converse", "end", "fail")


class Kind(StrEnum):
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
        return self in (Kind.HANGS, Kind.CRASHES, Kind.BREAKS)

    @property
    def label(self) -> str:
        """As a file is named after it."""
        return self.name.lower().replace("_", "-")


class CaseFailed(WorkerFailed):
    """
    Raised when a worker does not stand a case.

    Attributes:
        kind: What it is found to do.

    """

    def __init__(self, kind: Kind, what: str, transcript: str) -> None:
        super().__init__(what, transcript)
        self.kind = kind


@dataclass(frozen=True)
class Step:
    """What is written at once, before the replies to all of it are waited for."""

    messages: Sequence[bytes]
    """In a dialect with batches, those of one batch."""
    cuts: Sequence[int] = ()
    """Before which of the bytes another write begins, counted from 0; each is written
    when the worker has read the one before."""
    full: bool = False
    """They are as many as a batch holds."""

    def __repr__(self) -> str:
        more = f", cuts={[*self.cuts]}" if self.cuts else ""
        more += ", full=True" if self.full else ""
        return f"Step({[*self.messages]}{more})"


Said: TypeAlias = list[tuple[Step, list[Reply]]]
"""What was said, and the replies to it."""


@dataclass(frozen=True)
class Case:
    """A conversation to be had with a worker, from its start to its end."""

    steps: Sequence[Step]
    markers: Markers = field(default_factory=Markers)

    def __repr__(self) -> str:
        steps = ", ".join(map(repr, self.steps))
        same = len(self.steps) > 2 and all(s == self.steps[0] for s in self.steps)
        steps = f"[{self.steps[0]}] * {len(self.steps)}" if same else f"[{steps}]"
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

    def to_plain(self) -> dict[str, Any]:
        """Return what :meth:`from_plain` reads, as plain JSON."""
        steps = [
            {
                "messages": [message.decode("latin-1") for message in step.messages],
                "cuts": [*step.cuts],
                "full": step.full,
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
                step["full"],
            )
            for step in plain["steps"]
        ]
        return cls(tuple(steps), Markers.from_text(**plain["markers"]))


async def converse(worker: WorkerUnderTest, steps: Iterable[Step]) -> Said:
    """
    Say what a case says, and return the replies to each step.

    Raises:
        CaseFailed: If the worker hangs, crashes or breaks the protocol.

    """
    replies = []
    for step in steps:
        # It may have broken it behind its last reply.
        await _classified(worker, worker.until(lambda: not worker.broken, ""))
        given = await _classified(
            worker, worker.exchange(step.messages, full=step.full, cuts=step.cuts)
        )
        replies.append((step, given))
    return replies


async def end(worker: WorkerUnderTest) -> None:
    """
    Close its stdin and see it to its end.

    Raises:
        CaseFailed: If that is no good end.

    """
    status = await _classified(worker, worker.close())
    if status:
        what = f"the worker {describe_status(status)} at the end of its input"
        fail(worker, Kind.CRASHES, what)


async def _classified(worker: WorkerUnderTest, doing: Awaitable[Any]) -> Any:  # noqa: ANN401
    try:
        return await doing
    except CaseFailed:
        raise
    except WorkerFailed as failed:
        broken = worker.broken
        kind = Kind.HANGS if worker.status is None else Kind.CRASHES
        raise CaseFailed(
            Kind.BREAKS if broken else kind, failed.what, failed.transcript
        ) from None


def fail(worker: WorkerUnderTest, kind: Kind, what: str) -> NoReturn:
    """Raise :class:`CaseFailed` with all that went both ways."""
    try:
        worker.fail("")
    except WorkerFailed as failed:
        raise CaseFailed(kind, what, failed.transcript) from None
