"""
The keys of faults: what is to go wrong with workers in a trial.

A pipeline file has faults for its stages; a fault plan is a separate file for one
worker. The kinds are those of ``etlstage.testing``, and each field of its plans is a
key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

from etlstage.config.reading import read
from etlstage.settings.definition import Definition, Section, broken
from etlstage.settings.kind import Choice, Whole
from etlstage.settings.problem import Invalid, Problem
from etlstage.settings.units import Count, Duration, Name, Share, SizeOrZero
from etlstage.testing.fault import Fault, FaultPlan
from etlstage.testing.hostile.kinds import FaultKind, Moment

__all__ = ("FaultKeys", "StageFaultKeys", "fault_plan")

_OUTSIDE: Final = {kind.value: kind for kind in FaultKind if not kind.inside}


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultKeys(Definition):
    """One thing that goes wrong with workers, whenever all conditions hold."""

    label: ClassVar[tuple[str, ...]] = ("faults",)
    kind: Annotated[FaultKind, Choice("kind", _OUTSIDE)]
    """What happens."""
    at: Moment | None = None
    """When it happens: before the worker has read anything (start), at a message, when
    there is nothing to do (idle), when the input has ended or a terminate was sent
    (end), before an action of a record processor, or at its checkpoint. The default
    depends on the kind."""
    message: Count | None = None
    """Only at this message of a process, counted from 1."""
    number: Count | None = None
    """Only at this action, or checkpoint, counted from 1 for a process, or for a shard
    in a simulation of shards."""
    times: Count | None = None
    """Number of actions, or checkpoints, at which it happens, from number on; by
    default one."""
    equals: str | None = None
    """Only at messages equal to this text."""
    contains: str | None = None
    """Only at messages that contain this text."""
    probability: Share | None = None
    """Probability at each message; determined by the seed, the worker, its start and
    the message's number."""
    start: Count | None = None
    """Only in this start of a worker, counted from 1."""
    worker: Name | None = None
    """Only in the worker of this name, such as clean-1; in a simulation of shards, only
    in the worker of the shard of this name."""
    status: Annotated[int, Whole(0, 255)] = 1
    """Exit status, for exit."""
    seconds: Duration = 0.1
    """Length of the pause, for pause."""
    size: SizeOrZero | None = None
    """Bytes, for stderr and huge; number of messages, for flood; number of records, for
    many_records."""
    data: str | None = None
    """What is written, for garbage, wrong_marker and stderr; the reason, for refuse and
    revoke; the name of an exception, for fail_checkpoint; a checkpoint, for restart."""

    @property
    def fault(self) -> Fault:
        """The fault as a fault plan has it."""
        given = {name: getattr(self, name) for name in _NAMES}
        for name in ("equals", "contains", "data"):
            if given[name] is not None:
                given[name] = given[name].encode()
        return Fault(**given)

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterable[Problem]:
        """Return the contradictions among the given values."""
        kind = given.get("kind")
        if not isinstance(kind, FaultKind):
            return
        at = given.get("at") or kind.at
        counted = at in (Moment.ACTION, Moment.CHECKPOINT)
        if given.get("number") is not None and not counted:
            yield broken(("number",), "needs at: action or checkpoint")
        if given.get("times") is not None and given.get("number") is None:
            yield broken(("times",), "needs number")
        if at not in kind.moments:
            may = " or ".join(each for each in Moment if each in kind.moments)
            why = f": {kind} changes a reply" if kind.shapes else f" for {kind}"
            yield broken(("at",), f"must be {may}{why}")
        if at is Moment.MESSAGE:
            return
        for name in ("message", "equals", "contains"):
            if given.get(name) is not None:
                yield broken((name,), "needs at: message")


_NAMES: Final = tuple(field.name for field in fields(FaultKeys))


@dataclass(frozen=True, kw_only=True, slots=True)
class StageFaultKeys(FaultKeys):
    """One thing that goes wrong with workers of a stage."""

    stage: Name
    """Name of the stage whose workers are affected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _PlanKeys(Definition):
    """The keys of a fault plan."""

    faults: tuple[FaultKeys, ...] = ()
    seed: Annotated[int, Whole(0)] = 0


def fault_plan(path: Path) -> FaultPlan:
    """
    Return the plan that is written in a file: ``faults``, and perhaps ``seed``.

    Raises:
        ConfigError: If anything in it is wrong; one line for each.

    """
    document = read(path)
    try:
        keys = Section.of(_PlanKeys).read(document.data)
    except Invalid as error:
        document.finish(error.problems)
        raise
    document.check()
    return FaultPlan(tuple(each.fault for each in keys.faults), keys.seed)
