"""A pipeline in memory, whose ends fail, and whose runs are interrupted and resumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from etlstage.pipeline.delivery.delivery import Bounds
from etlstage.testing import scenario

__all__ = ("Scenario",)


@dataclass(frozen=True, kw_only=True)
class Scenario(scenario.Scenario):
    """The pipeline of one seed, and what goes wrong in it."""

    broken: Literal["", "source", "sink", "flush", "commit", "letters", "state"] = ""
    """Which end in memory fails, if any; the run must fail then. ``state`` is the disk
    of the state directory: the record may be stored nevertheless, as after a failed
    fsync, or not, as when the disk is full."""
    broken_at: int = 0
    """Index of the first call that fails, from 0."""
    broken_for: int = 1
    """Number of calls that fail."""
    flushes: bool = False
    """Whether the sink in memory makes messages durable only when it is flushed."""
    flush_every: float = 60.0
    """Maximal seconds between two flushes."""
    ended: Literal["", "drained", "cancelled"] = ""
    """How the run is ended early, if it is."""
    ended_at: float = 0.0
    """When it is ended, in virtual seconds."""
    drain_limit: float | None = None
    """Virtual seconds after which a drained run processes no more."""
    epoch: Bounds | None = None
    """Bounds of an epoch, if each message must be loaded once; then an interrupted run
    is started again until it is done, or fails by itself."""
    notes: bool = False
    """Whether the sink in memory adds an epoch together with a note, like a table,
    rather than replacing it, like a folder."""
    strict: bool = False
    """Whether a stage fails the run instead of dead-lettering a message. With epochs
    the run is started again then, a few times."""
    breaks: Sequence[tuple[str, int] | float] = ()
    """Where starts are interrupted, one each, as if by SIGKILL: at a step of a commit,
    such as ``("written", 2)`` for the second such step, or after virtual seconds."""
