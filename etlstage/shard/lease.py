"""
The lease of a shard, the events that a keeper handles, and its instructions.

A lease is a row of a table that all runners see. It changes only by compare-and-swap: a
row is replaced if it still has the owner and the counter that were read. Each change
raises the counter, so of two changes of the same row only one succeeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

__all__ = (
    "Answer",
    "CheckpointAsked",
    "Event",
    "FailRunner",
    "Instruction",
    "Lease",
    "LeaveAsked",
    "Left",
    "Read",
    "ReadFailed",
    "Start",
    "Stop",
    "TableRead",
    "TimerRang",
    "WorkerEnded",
    "Write",
    "WriteFailed",
    "WriteRefused",
    "Written",
)


class Lease(NamedTuple):
    """A shard, its committed position, and the runner that may move it."""

    shard: str
    parents: tuple[str, ...] = ()
    """Shards that have to end before this one begins, except those that are gone."""
    position: str | None = None
    """The committed position, as JSON text; None: nothing is committed."""
    ended: bool = False
    """The whole shard is committed, and there will be no more records."""
    owner: str | None = None
    """The runner that may commit, as ``name/start``; a name may start several times."""
    counter: int = 0
    """Number of changes; it keeps rising while the owner is alive."""
    switches: int = 0
    """How often the lease has changed its owner."""
    claimant: str | None = None
    """The runner to which the owner is asked to hand over; empty: to any runner."""


# --- events -----------------------------------------------------------------------


class TableRead(NamedTuple):
    """The table was read, in answer to :class:`Read`."""

    leases: Sequence[Lease]


class ReadFailed(NamedTuple):
    """The table could not be read."""

    why: str = ""


class Written(NamedTuple):
    """The row was replaced, in answer to :class:`Write`."""

    number: int


class WriteRefused(NamedTuple):
    """The row was not replaced, as it had changed."""

    number: int


class WriteFailed(NamedTuple):
    """The outcome is unknown: the row may have been replaced, or may be later."""

    number: int
    why: str = ""


class CheckpointAsked(NamedTuple):
    """A shard's worker asks to commit a position; one request at a time."""

    shard: str
    position: str
    """The position, as JSON text."""
    ended: bool = False
    """The position is the end of the shard."""


class WorkerEnded(NamedTuple):
    """The worker of a shard has exited, whether it was asked to or not."""

    shard: str
    failed: bool = False
    """Another worker of this runner would fail, too."""


class LeaveAsked(NamedTuple):
    """The runner is to hand over all its leases."""


class TimerRang(NamedTuple):
    """The time that the keeper asked for has come."""


Event: TypeAlias = (
    TableRead
    | ReadFailed
    | Written
    | WriteRefused
    | WriteFailed
    | CheckpointAsked
    | WorkerEnded
    | LeaveAsked
    | TimerRang
)


# --- instructions -----------------------------------------------------------------


class Read(NamedTuple):
    """Read the table; answer with TableRead or ReadFailed."""


class Write(NamedTuple):
    """
    Replace a row; answer with Written, WriteRefused or WriteFailed.

    Replace it only if the row still has the shard, owner and counter of ``before``.
    """

    number: int
    before: Lease
    after: Lease


class Start(NamedTuple):
    """Start a worker after the committed position; report its WorkerEnded later."""

    lease: Lease


class Stop(NamedTuple):
    """End the worker; answer with WorkerEnded. It may be repeated, with ``lost``."""

    shard: str
    lost: bool
    """The shard is lost: end the worker at once. Else it may commit once more."""


class Answer(NamedTuple):
    """Answer the worker that asked for a checkpoint."""

    shard: str
    stored: bool
    """Whether the checkpoint was stored; else the lease is no longer ours."""


class FailRunner(NamedTuple):
    """End the runner, with this error."""

    text: str


class Left(NamedTuple):
    """The runner has handed over all its leases."""


Instruction: TypeAlias = Read | Write | Start | Stop | Answer | FailRunner | Left
