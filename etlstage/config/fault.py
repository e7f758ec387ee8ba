"""
Faults of a pipeline file: what is to go wrong with its workers in a trial of it.

The words are those of ``etlstage.testing.fault``, one key a field, so that whoever
knows a plan in Python knows the file; what does it is no matter of the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal

from etlstage.settings.definition import Definition, broken
from etlstage.settings.kind import Whole
from etlstage.settings.problem import Problem
from etlstage.settings.units import Count, Duration, Name, Share, SizeOrZero

__all__ = ("FaultKeys",)

_MOMENTS: Final = {
    "never_ready": "start",
    "ignore_sigterm": "start",
    "extra_eop": "idle",
    "lose_terminate": "end",
}
"""When a fault happens that does not say it; all others do at messages."""
_OF_REPLIES: Final = (
    *("partial", "skip", "twice", "wrong_marker", "refuse", "huge", "flood", "cut"),
    "revoke",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultKeys(Definition):
    """One thing that goes wrong with workers, whenever all conditions hold."""

    label: ClassVar[tuple[str, ...]] = ("faults",)
    stage: Name
    """Whose workers."""
    kind: Literal[
        "kill",
        "segfault",
        "abort",
        "exit",
        "partial",
        "stall",
        "stop",
        "pause",
        "skip",
        "never_ready",
        "twice",
        "extra_eop",
        "garbage",
        "wrong_marker",
        "refuse",
        "huge",
        "flood",
        "cut",
        "stderr",
        "close_stdout",
        "close_stdin",
        "ignore_sigterm",
        "lose_heartbeats",
        "lose_answers",
        "lose_terminate",
        "revoke",
        "disconnect",
    ]
    """What happens."""
    at: Literal["start", "message", "idle", "end"] | None = None
    """When: before anything is written, at a message, when there is nothing to do, when
    the input has ended, or a terminate was sent. Without it when that kind is of use."""
    message: Count | None = None
    """Only at this message of a process, counted from 1."""
    equals: str | None = None
    """Only at messages that are this."""
    contains: str | None = None
    """Only at messages that contain this."""
    probability: Share | None = None
    """At random; the dice depend on the seed, the worker, its start and the message."""
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
        if (given.get("at") or _MOMENTS.get(str(kind), "message")) == "message":
            return
        if kind in _OF_REPLIES:
            yield broken(("at",), f"must be message: {kind} changes a reply")
        for name in ("message", "equals", "contains"):
            if given.get(name) is not None:
                yield broken((name,), "needs at: message")
