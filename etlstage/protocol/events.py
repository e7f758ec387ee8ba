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
from typing import NamedTuple, TypeAlias

from etlstage.errors import ProtocolError
from etlstage.messages import Groups, Run

__all__ = (
    "BatchEnded",
    "CommitAnswered",
    "CommitAsked",
    "Event",
    "ExchangeCancelled",
    "ExchangeOpened",
    "ExchangeRefused",
    "ExchangesEnded",
    "ExchangesOpened",
    "Farewell",
    "LifeSeen",
    "MessagesPassed",
    "MoreRequested",
    "Noise",
    "OutputOf",
    "OutputPassed",
    "ProtocolFailed",
    "Ready",
    "Refusals",
    "RepliesCompleted",
    "StreamEnded",
)


Refusals: TypeAlias = Sequence[tuple[int, str]]
"""Which of some exchanges were refused: the place of each, rising, and the reason."""


class MessagesPassed(NamedTuple):
    """The supervisor hands messages to the worker."""

    messages: Run


class BatchEnded(NamedTuple):
    """The supervisor ends the batch that it was filling."""

    full: bool = False
    """It holds as many messages as a batch may."""


class MoreRequested(NamedTuple):
    """The worker asks for one more message for its batch."""


class OutputPassed(NamedTuple):
    """The worker hands over messages of a reply that is not complete yet."""

    messages: Run


class RepliesCompleted(NamedTuple):
    """
    The worker has answered that many exchanges, oldest first.

    Each group holds the messages of one reply, without those that an earlier
    :class:`OutputPassed` carried. To those that it refused the reply is empty.
    """

    groups: Groups
    overhead: int = 0
    """Bytes of memory that these take beside those that were read."""
    refusals: Refusals = ()
    """To which of these exchanges it said no, and lives on."""


class ExchangeOpened(NamedTuple):
    """The supervisor opens an exchange, in a dialect that names them."""

    id: int
    messages: Run
    kind: str
    """What the worker is to do with them: the kind of the stage."""
    ended: bool = True
    """These are all messages of it."""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    """What the supervisor says beside them, by name."""
    event: str = ""
    """What the worker is to do instead of what the settings say, by its name for it."""


class ExchangesOpened(NamedTuple):
    """The supervisor opens an exchange for each message, and ends its half of them."""

    first: int
    """The number of the first; those of the others follow."""
    messages: Run
    kind: str
    """What the worker is to do with each: the kind of the stage."""


class OutputOf(NamedTuple):
    """
    The worker hands over messages of an exchange that goes on.

    So may the supervisor, of one that it has not ended.
    """

    id: int
    messages: Run


class ExchangesEnded(NamedTuple):
    """
    The worker has ended exchanges, in any order.

    Of one that the supervisor has not ended, it may say that it gives no more.
    """

    ends: list[tuple[int, tuple[bytes, ...]]]
    """The number of each, and the rest of its reply."""


class ExchangeRefused(NamedTuple):
    """The worker says no to one exchange that has a name, and lives on."""

    id: int
    code: int
    reason: str
    category: int = 0
    """What the code counts, in a dialect that knows several kinds."""


class ExchangeCancelled(NamedTuple):
    """The supervisor does not want an exchange any more."""

    id: int
    code: int
    reason: str


class CommitAsked(NamedTuple):
    """The worker asks, in the middle of its work, to have a position stored."""

    position: object
    """Plain JSON; None for all that it was given."""


class CommitAnswered(NamedTuple):
    """The supervisor has stored a position, or could not."""

    position: object
    error: str | None = None


class Ready(NamedTuple):
    """The worker may be given work."""

    identity: str = ""
    """As the worker calls itself."""


class LifeSeen(NamedTuple):
    """The worker is alive, busy or not."""


class Farewell(NamedTuple):
    """One side is about to end."""

    code: int = 0
    reason: str = ""
    final: bool = False
    """Another worker would fare no better: there is to be none."""


class Noise(NamedTuple):
    """Bytes that mean nothing and do no harm."""

    data: bytes


class StreamEnded(NamedTuple):
    """One side will send no more."""

    tail: bytes = b""
    """What came after the last complete element."""


class ProtocolFailed(NamedTuple):
    """The peer broke the protocol; nothing that it sends from now on is read."""

    error: ProtocolError


Event: TypeAlias = (
    MessagesPassed
    | BatchEnded
    | MoreRequested
    | OutputPassed
    | RepliesCompleted
    | ExchangeOpened
    | ExchangesOpened
    | OutputOf
    | ExchangesEnded
    | ExchangeRefused
    | ExchangeCancelled
    | CommitAsked
    | CommitAnswered
    | Ready
    | LifeSeen
    | Farewell
    | Noise
    | StreamEnded
    | ProtocolFailed
)
