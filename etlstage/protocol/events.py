"""
The events that pass between a supervisor and its worker, the same in all dialects.

Both sides use the same classes: what one side sends, the other receives. An event
carries a *run* of messages, never one: an event per message would cost more than the
message. Events are named tuples and not dataclasses because a worker imports this
module at every start, and :mod:`dataclasses` alone takes longer than all the rest.
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
    """Where to resume: the last committed position, plain JSON. None: the beginning."""


class FarewellReason(Enum):
    """Why a worker must end."""

    DRAIN = "drain"
    """The stage stops, or its share moves to another worker: it may commit once."""
    ENDED = "ended"
    """Its share of the input has ended for good."""
    LOST = "lost"
    """Its share belongs to another worker: it can't commit any more."""


class Wanted(NamedTuple):
    """
    The worker asks for more messages of the exchange that is open.

    Only a worker sends this event: a supervisor sees the request as room.
    """

    messages: int = 1


class Mispaired(NamedTuple):
    """Replies can't be matched to exchanges: those that were held back are void."""

    what: str
    """What the worker did, as a part of a sentence."""
    exchanges: int
    """Number of answered exchanges that were held back: the oldest open ones."""
    doubtful: int
    """Number of messages that may have wrong replies, which were released before, or
    wrong effects, which can't be taken back."""


class Opened(NamedTuple):
    """
    The supervisor opens exchanges, numbered from ``first`` on.

    Numbers rise. An event that can't be sent has used no number.
    """

    first: int
    messages: Run
    each: bool = True
    """Each message is an exchange; otherwise all of them are one."""
    ended: bool = True
    """The exchanges are complete; otherwise :class:`Added` continues the only one."""
    event: str = ""
    """Name of the worker's event that the caller invokes; empty: the default."""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    """Names and values of headers that the supervisor sends with the messages."""


class Added(NamedTuple):
    """More of an exchange that is open, by the side whose half has not ended."""

    id: int
    messages: Run
    ended: bool = False
    """The exchange is complete: the supervisor ends its half."""


class Refusal(NamedTuple):
    """The worker rejects an exchange, and continues to run."""

    place: int
    """Index of the exchange in the :class:`Ended` event."""
    code: int
    category: int
    """The category of the code, in a dialect that has several."""
    reason: str


class Ended(NamedTuple):
    """
    The worker has ended exchanges, numbered from ``first`` on.

    One event is for consecutive numbers: the receiver sorts exchanges that end out of
    order.
    """

    first: int
    groups: Groups
    """The rest of each reply; empty for an exchange that was rejected."""
    refusals: Sequence[Refusal] = ()
    """In the order of their places."""
    overhead: int = 0
    """Bytes of memory that the groups take in addition to the bytes that were read."""

    @classmethod
    def refused(cls, id_: int, code: int, reason: str, category: int = 0) -> Ended:
        """Return the end of one exchange that the worker rejects."""
        return cls(id_, [()], [Refusal(0, code, category, reason)])


class Cancelled(NamedTuple):
    """The supervisor cancels an exchange."""

    id: int
    code: int
    reason: str


class CommitAsked(NamedTuple):
    """The worker asks, while it works on an exchange, to have a position stored."""

    id: int
    """The exchange that was opened last when it asked."""
    position: object
    """Plain JSON; None: after everything that it was given."""
    ended: bool = False
    """The position is the end of the worker's share: nothing follows it."""


class CommitAnswered(NamedTuple):
    """The supervisor has stored a position, or has failed to."""

    position: object
    error: str | None = None


class Ready(NamedTuple):
    """The worker may be given work."""

    identity: str = ""
    """The identity that the worker gave."""


class Alive(NamedTuple):
    """The worker is alive, busy or not."""


class Farewell(NamedTuple):
    """One side is about to end."""

    code: int = 0
    reason: str = ""
    final: bool = False
    """Another worker would fail, too: none must be started."""
    why: FarewellReason = FarewellReason.DRAIN
    """Why the supervisor ends the worker."""


class Noise(NamedTuple):
    """Bytes without a meaning in the protocol, which do no harm."""

    data: bytes


class Failed(NamedTuple):
    """The peer broke the protocol; nothing that it sends from now on is read."""

    error: ProtocolError
    final: bool = False
    """Another worker would fail, too: none must be started."""


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
