"""A pipeline in memory, whose ends fail, and whose runs are interrupted and go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from etlstage.pipeline.delivery.delivery import Bounds
from etlstage.testing import scenario

__all__ = ("Scenario",)


@dataclass(frozen=True, kw_only=True)
class Scenario(scenario.Scenario):
    """What one seed runs."""

    broken: Literal["", "source", "sink", "flush", "commit", "letters", "state"] = ""
    """Which end in memory fails, if one does; then the run is to fail. With ``state`` it
    is the disk of the state directory: what is recorded may be there all the same, as
    behind an fsync that failed, or not, as when the disk is full."""
    broken_at: int = 0
    """At which call, from 0."""
    broken_for: int = 1
    """How many calls fail."""
    flushes: bool = False
    """Whether what reaches the sink in memory is durable only when it is flushed."""
    flush_every: float = 60.0
    """Seconds after which it is flushed at the latest."""
    ended: Literal["", "drained", "cancelled"] = ""
    """How the run is ended before its end, if it is."""
    ended_at: float = 0.0
    """When, in virtual seconds."""
    drain_limit: float | None = None
    """Virtual seconds behind which a run that is drained processes no more."""
    epoch: Bounds | None = None
    """When an epoch ends, if each message is to be loaded once; then what breaks off is
    started again until it is done, or fails by itself."""
    notes: bool = False
    """Whether the sink in memory adds an epoch together with a note, as to a table, and
    does not replace it, as a folder."""
    strict: bool = False
    """Whether a stage lets the run fail for a message that it would dead-letter. In
    epochs it is started again then, a few times."""
    breaks: Sequence[tuple[str, int] | float] = ()
    """Where starts break off, one each, as if by SIGKILL: at a step of a commit, as
    ``("written", 2)`` at the second such step, or after virtual seconds."""
