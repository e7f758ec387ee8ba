"""
Faults of a pipeline file: what is to go wrong with its workers in a trial of it.

The kinds are those of ``etlstage.testing``, and each field of its plans is a key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

from etlstage.settings.definition import Definition, broken
from etlstage.settings.kind import Choice, Whole
from etlstage.settings.problem import Problem
from etlstage.settings.units import Count, Duration, Name, Share, SizeOrZero
from etlstage.testing.hostile.kinds import FaultKind, Moment

__all__ = ("FaultKeys",)

_OUTSIDE: Final = {kind.value: kind for kind in FaultKind if not kind.inside}


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultKeys(Definition):
    """One thing that goes wrong with workers, whenever all conditions hold."""

    label: ClassVar[tuple[str, ...]] = ("faults",)
    stage: Name
    """Whose workers."""
    kind: Annotated[FaultKind, Choice("kind", _OUTSIDE)]
    """What happens."""
    at: Moment | None = None
    """When: before anything is written, at a message, when there is nothing to do, when
    the input has ended, or a terminate was sent. Without it when that kind is of use."""
    message: Count | None = None
    """Only at this message of a process, counted from 1."""
    equals: str | None = None
    """Only at messages that are this."""
    contains: str | None = None
    """Only at messages that contain this."""
    probability: Share | None = None
    """At random, by the seed, the worker, its start and the message."""
    start: Count | None = None
    """Only in this start of a worker, counted from 1."""
    worker: Name | None = None
    """Only in the worker of this name, such as clean-1."""
    status: Annotated[int, Whole(0, 255)] = 1
    """For exit: the exit status."""
    seconds: Duration = 0.1
    """For pause: how long."""
    size: SizeOrZero | None = None
    """For stderr and huge: how much; for flood: messages."""
    data: str | None = None
    """For garbage, wrong_marker, refuse, revoke and stderr: what is written."""

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterable[Problem]:
        """Return what contradicts itself."""
        kind = given.get("kind")
        usual = kind.at if isinstance(kind, FaultKind) else Moment.MESSAGE
        if (given.get("at") or usual) is Moment.MESSAGE:
            return
        if isinstance(kind, FaultKind) and kind.shapes:
            yield broken(("at",), f"must be message: {kind} changes a reply")
        for name in ("message", "equals", "contains"):
            if given.get(name) is not None:
                yield broken((name,), "needs at: message")
