"""
What is kept of a shard, what can happen to it, and what is to be done then.

A lease is a row of a table that all runners see. It is changed in one way: a row takes
the place of another if that is still there, with the owner and the counter that it had.
Each change raises the counter, so of two that were made of one row only one succeeds.
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
    """A shard, how far it was processed, and who may move that."""

    shard: str
    parents: tuple[str, ...] = ()
    """Shards that have to end before this one begins; those that are gone left out."""
    position: str | None = None
    """What is committed, as the text of JSON; None: nothing."""
    ended: bool = False
    """All of it is committed, and there will be no more."""
    owner: str | None = None
    """Runner that may commit, as ``name/start``; a name may start several times."""
    counter: int = 0
    """Changes; it rises while the owner lives."""
    switches: int = 0
    """How often it has had another owner than before."""
    claimant: str | None = None
    """Runner to which the owner is asked to hand it over; empty: to any."""


# --- what happens -----------------------------------------------------------------


class TableRead(NamedTuple):
    """The table was read, in answer to :class:`Read`."""

    leases: Sequence[Lease]


class ReadFailed(NamedTuple):
    """It could not be read."""

    why: str = ""


class Written(NamedTuple):
    """A row has taken the place of the one before, in answer to :class:`Write`."""

    number: int


class WriteRefused(NamedTuple):
    """The row before was no longer there."""

    number: int


class WriteFailed(NamedTuple):
    """It may have been written, or be written yet."""

    number: int


class CheckpointAsked(NamedTuple):
    """The worker of a shard asks to have a position committed; one at a time."""

    shard: str
    position: str
    """As the text of JSON."""
    ended: bool = False
    """It is the end of the shard."""


class WorkerEnded(NamedTuple):
    """The worker of a shard is gone, asked or not."""

    shard: str
    failed: bool = False
    """Another one would fail here, too."""


class LeaveAsked(NamedTuple):
    """The runner is to hand over all that it has."""


class TimerRang(NamedTuple):
    """It is as late as the keeper asked for."""


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


# --- what is to be done -----------------------------------------------------------


class Read(NamedTuple):
    """Read the table; answer with TableRead or ReadFailed."""


class Write(NamedTuple):
    """
    Put a row in the place of another; answer with Written, WriteRefused, WriteFailed.

    Only if there is a row with the shard, owner and counter of ``before``.
    """

    number: int
    before: Lease
    after: Lease


class Start(NamedTuple):
    """Start a worker behind what is committed; answer with WorkerEnded some time."""

    lease: Lease


class Stop(NamedTuple):
    """End the worker; answer with WorkerEnded. A second one is more urgent."""

    shard: str
    lost: bool
    """At once: the shard is another's. Else it may commit once more."""


class Answer(NamedTuple):
    """Answer the worker that asked for a checkpoint."""

    shard: str
    stored: bool
    """False: the shard is another's."""


class FailRunner(NamedTuple):
    """End the runner, with that error."""

    text: str


class Left(NamedTuple):
    """The runner has handed over all that it had."""


Instruction: TypeAlias = Read | Write | Start | Stop | Answer | FailRunner | Left
