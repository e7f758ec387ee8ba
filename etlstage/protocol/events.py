"""
What can pass between a supervisor and its worker, in the words of any dialect.

The same classes serve both sides: what one side sends, the other receives.
An event carries a *run* of messages, never one: an event per message would cost more
than the message.
They are named tuples and not dataclasses because a worker imports this module at
every start, and :mod:`dataclasses` alone takes longer than all the rest.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from etlstage.errors import ProtocolError
from etlstage.messages import Groups, Run

__all__ = (
    "BatchEnded",
    "Event",
    "MessagesPassed",
    "MoreRequested",
    "OutputPassed",
    "ProtocolFailed",
    "RepliesCompleted",
    "StreamEnded",
)


class MessagesPassed(NamedTuple):
    """The supervisor hands messages to the worker."""

    messages: Run


class BatchEnded(NamedTuple):
    """The supervisor ends the batch that it was filling."""


class MoreRequested(NamedTuple):
    """The worker asks for one more message for its batch."""


class OutputPassed(NamedTuple):
    """The worker hands over messages of a reply that is not complete yet."""

    messages: Run


class RepliesCompleted(NamedTuple):
    """
    The worker has answered that many exchanges, oldest first.

    Each group holds the messages of one reply, without those that an earlier
    :class:`OutputPassed` carried.
    """

    groups: Groups


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
    | StreamEnded
    | ProtocolFailed
)
