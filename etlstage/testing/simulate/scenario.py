"""What one seed runs: a pipeline, what its workers do, and what goes wrong."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from etlstage.errors import ConfigError
from etlstage.messages import StageKind
from etlstage.pipeline.delivery.delivery import Bounds
from etlstage.stage import OffsetPolicy, Stage
from etlstage.testing.fault import FaultPlan
from etlstage.testing.simulate.worker import Work

__all__ = ("Scenario",)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """
    A pipeline in memory.

    ::

        Scenario(
            messages=[b"%d" % n for n in range(10)],
            stages=[Stage(name="clean", worker=("./clean",))],
            work={"clean": lambda message: [message.upper()]},
            faults={"clean": FaultPlan.of(Fault(FaultKind.KILL, probability=0.1))},
        )

    Raises:
        ConfigError: If a stage has no work.

    """

    messages: Sequence[bytes]
    """What is extracted."""
    stages: Sequence[Stage]
    """In their order. Where the first does not extract, or the last does not load, a
    source or a sink in memory does. No program is started: the command is for show."""
    work: Mapping[str, Work]
    """By stage: what its workers make of a message, the same each time."""
    faults: Mapping[str, FaultPlan] = field(default_factory=dict)
    """By stage: what goes wrong."""
    starts_that_fail: Mapping[str, Collection[int]] = field(default_factory=dict)
    """By stage: which starts of its workers fail, from 2 on: the program is missing.
    With the first one the run does."""
    pipe_size: int = 65536
    """Bytes for which a worker's stdin and stdout have room."""
    broken: Literal["", "source", "sink", "flush", "commit", "letters"] = ""
    """Which end in memory fails, if one does; then the run is to fail."""
    broken_at: int = 0
    """At which call, from 0."""
    fatal: Mapping[str, Collection[bytes]] | None = None
    """By stage: the messages that are to be dead-lettered, of a run that succeeds; no
    stage is to dead-letter others. None: that can't be told."""
    may_fail: bool = False
    """Whether the run may fail; else that is a finding."""
    position_every: int = 4
    """Messages between two positions of the source."""
    flushes: bool = False
    """Whether what reaches the sink in memory is durable only when it is flushed."""
    flush_every: float = 60.0
    """Seconds after which it is flushed at the latest."""
    ended: Literal["", "drained", "cancelled"] = ""
    """How the run is ended before its end, if it is."""
    ended_at: float = 0.0
    """When, in virtual seconds."""
    epoch: Bounds | None = None
    """When an epoch ends, if each message is to be loaded once; then what breaks off is
    started again until it is done, or fails by itself."""
    notes: bool = False
    """Whether the sink in memory adds an epoch together with a note, as to a table, and
    does not replace it, as a folder."""
    breaks: Sequence[tuple[str, int] | float] = ()
    """Where starts break off, one each, as if by SIGKILL: at a step of a commit, as
    ``("written", 2)`` at the second such step, or after virtual seconds."""
    seconds: float = 3600.0
    """Virtual seconds in which each start is to be over."""

    def __post_init__(self) -> None:
        for stage in self.stages:
            known = stage.name in self.work or stage.kind is not StageKind.TRANSFORM
            if not known:
                raise ConfigError(f"stage {stage.name} has no work")

    @property
    def source(self) -> Stage | None:
        """The stage that extracts."""
        first = self.stages[0] if self.stages else None
        return first if first and first.kind is StageKind.EXTRACT else None

    @property
    def between(self) -> list[Stage]:
        """The stages that transform, and those that are at the wrong place."""
        first = self.source is not None
        return list(self.stages[first : len(self.stages) - (self.sink is not None)])

    @property
    def sink(self) -> Stage | None:
        """The stage that loads."""
        last = self.stages[-1] if self.stages else None
        return last if last and last.kind is StageKind.LOAD else None

    @property
    def offsets(self) -> OffsetPolicy:
        """Those of the stage that extracts: we keep them."""
        end = len(self.messages)
        return OffsetPolicy(by="supervisor", end=end, step=self.position_every)
