"""
What can pass between a supervisor and its worker, in the words of any dialect.

The same classes serve both sides: what one side sends, the other receives.
An event carries a *run* of messages, never one: an event per message would cost more
than the message.
They are named tuples and not dataclasses because a worker imports this module at
every start, and :mod:`dataclasses` alone takes longer than all the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, TypeAlias

from etlstage.errors import ProtocolError
from etlstage.messages import Groups, Run

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
    "FarewellReason",
    "Mispaired",
    "Noise",
    "Opened",
    "Ready",
    "Refusal",
    "Wanted",
)


class Assignment(NamedTuple):
    """The share of the input that one worker has, such as a shard."""

    name: str
    position: object = None
    """Where to go on in it: what was committed last, plain JSON. None: the beginning."""


class FarewellReason(Enum):
    """Why a worker is to end."""

    DRAIN = "drain"
    """The stage stops, or its share goes to another: it may commit once more."""
    ENDED = "ended"
    """Its input has no more, for good."""
    LOST = "lost"
    """Its share is another's: it can't commit any more."""


class Wanted(NamedTuple):
    """
    The worker asks for more messages of the exchange that is open.

    Only a worker sends it: a supervisor sees it as room.
    """

    messages: int = 1


class Mispaired(NamedTuple):
    """Replies can't be matched to these exchanges: none of them counts."""

    what: str
    """What the worker did, as a part of a sentence."""
    exchanges: int
    """How many were answered and held back: the oldest that are open."""
    doubtful: int
    """Messages whose replies were released before, or whose effects can't be taken
    back, and may be wrong."""


class Opened(NamedTuple):
    """
    The supervisor opens exchanges, numbered from ``first`` on.

    Numbers rise; one that can't be sent has not been used.
    """

    first: int
    messages: Run
    each: bool = True
    """Each message is an exchange; else all of them are one."""
    ended: bool = True
    """There is no more of them; else :class:`Added` goes on with the one."""
    event: str = ""
    """What the caller asks for, by the worker's name for it; empty: as ever."""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    """What the supervisor sends beside the messages, by name."""


class Added(NamedTuple):
    """More of an exchange that is open, by the side whose half has not ended."""

    id: int
    messages: Run
    ended: bool = False
    """That was all: the supervisor ends its half."""


class Refusal(NamedTuple):
    """The worker rejects an exchange, and lives on."""

    place: int
    """Of the exchange, among those that an :class:`Ended` is about."""
    code: int
    category: int
    """What the code counts, in a dialect that knows several kinds."""
    reason: str


class Ended(NamedTuple):
    """
    The worker has ended exchanges, numbered from ``first`` on.

    A run of them is one event: what ends in any order is sorted by who receives it.
    """

    first: int
    groups: Groups
    """The rest of each reply; empty for one that was refused."""
    refusals: Sequence[Refusal] = ()
    """Rising by their places."""
    overhead: int = 0
    """Bytes of memory that the groups take beside those that were read."""

    @classmethod
    def refused(cls, id_: int, code: int, reason: str, category: int = 0) -> Ended:
        """Return the end of one exchange that the worker rejects."""
        return cls(id_, [()], [Refusal(0, code, category, reason)])


class Cancelled(NamedTuple):
    """The supervisor does not want an exchange any more."""

    id: int
    code: int
    reason: str


class CommitAsked(NamedTuple):
    """The worker asks, in the middle of its work, to have a position stored."""

    id: int
    """The exchange that was opened last when it asked."""
    position: object
    """Plain JSON; None for all that it was given."""
    ended: bool = False
    """It is the end of the worker's share: there is no more behind it."""


class CommitAnswered(NamedTuple):
    """The supervisor has stored a position, or could not."""

    position: object
    error: str | None = None


class Ready(NamedTuple):
    """The worker may be given work."""

    identity: str = ""
    """As the worker calls itself."""


class Alive(NamedTuple):
    """The worker is alive, busy or not."""


class Farewell(NamedTuple):
    """One side is about to end."""

    code: int = 0
    reason: str = ""
    final: bool = False
    """Another worker would fail, too: none is to be started."""
    why: FarewellReason = FarewellReason.DRAIN
    """Why the supervisor has it end."""


class Noise(NamedTuple):
    """Bytes that mean nothing and do no harm."""

    data: bytes


class Failed(NamedTuple):
    """The peer broke the protocol; nothing that it sends from now on is read."""

    error: ProtocolError


Event: TypeAlias = (
    Wanted
    | Mispaired
    | Opened
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
