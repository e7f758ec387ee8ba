"""
The events of a session, as the seam of all dialects is going to have them.

Those that differ yet from ``protocol/events.py``; they go when that has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from etlstage.messages import Groups, Run
from etlstage.protocol.events import Alive, CommitAnswered, Failed, Noise, Ready

__all__ = (
    "Added",
    "Alive",
    "Assignment",
    "Cancelled",
    "CommitAnswered",
    "CommitAsked",
    "Ended",
    "Event",
    "Failed",
    "Farewell",
    "Noise",
    "Opened",
    "Ready",
)


class Assignment(NamedTuple):
    """The share of the input that one worker has, and where to go on in it."""

    name: str
    position: object = None
    """What was committed of it; plain JSON. None: nothing."""


class Opened(NamedTuple):
    """A run of messages begins exchanges from number ``first`` on."""

    first: int
    messages: Run
    each: bool = True
    """One exchange each; else all are one."""
    ended: bool = True


class Added(NamedTuple):
    """More of an exchange that is open."""

    id: int
    messages: Run = ()
    ended: bool = False


class Ended(NamedTuple):
    """Exchanges from ``first`` on have ended, a group of outputs each."""

    first: int
    groups: Groups
    refusals: Sequence[tuple[int, str]] = ()
    overhead: int = 0


class Cancelled(NamedTuple):
    """An exchange is not wanted any more."""

    id: int
    reason: str


class CommitAsked(NamedTuple):
    """The worker asks, in the middle of an exchange, to have a position stored."""

    id: int
    position: object


class Farewell(NamedTuple):
    """One side is about to end."""

    reason: str = ""


Event: TypeAlias = (
    Opened
    | Added
    | Ended
    | Cancelled
    | CommitAsked
    | CommitAnswered
    | Ready
    | Alive
    | Farewell
    | Noise
    | Failed
)
