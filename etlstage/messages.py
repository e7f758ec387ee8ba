"""
What travels between stages, and what became of it.

A message is opaque bytes.
Messages travel in *runs*, plain lists or, where Spark is at an end, Arrow columns: an
object per message costs more than the message itself, so nothing here wraps a single
one on its way through.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import chain
from typing import Any, NamedTuple, TypeAlias, overload

__all__ = (
    "AnnotatedRun",
    "Groups",
    "Position",
    "Result",
    "Run",
    "StageKind",
    "concatenated",
    "counted",
    "joined",
    "plain",
    "size_of",
)

Run: TypeAlias = Sequence[bytes]
"""Messages that travel together, in order: a list, or a
:class:`~etlstage.columns.Column`."""

Groups: TypeAlias = Sequence[tuple[bytes, ...]]
"""For each of some messages what was made of it: a list, or
:class:`~etlstage.columns.Replies`."""


class AnnotatedRun(Sequence[bytes]):
    """
    Messages with columns beside them: in each a value for every message.

    ::

        AnnotatedRun([b"a", b"b"], key=[7, 8])

    Args:
        messages: However they are held.
        columns: By name; as long as there are messages. ``key`` holds numbers, equal
            for messages that keep their order.

    """

    __slots__ = ("columns", "messages")

    def __init__(self, messages: Run, **columns: Sequence[Any]) -> None:
        self.messages = messages
        self.columns = columns

    def __repr__(self) -> str:
        names = " ".join(sorted(self.columns))
        return f"<AnnotatedRun messages={len(self)} columns={names}>"

    def __len__(self) -> int:
        return len(self.messages)

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> AnnotatedRun: ...
    def __getitem__(self, at: int | slice) -> bytes | AnnotatedRun:
        if isinstance(at, slice):
            columns = {name: column[at] for name, column in self.columns.items()}
            return AnnotatedRun(self.messages[at], **columns)
        return self.messages[at]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.messages)

    @property
    def size(self) -> int:
        """Bytes of the messages."""
        return size_of(self.messages)


def counted(count: int, noun: str) -> str:
    """Return a count in words, such as ``1 message`` or ``4,000 messages``."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def plain(messages: Run) -> Run:
    """Return the messages without what is beside them."""
    # A list, as nearly all are, is spared the look at what kind of sequence it is.
    if type(messages) is list or not isinstance(messages, AnnotatedRun):
        return messages
    return messages.messages


def size_of(messages: Run) -> int:
    """Return how many bytes the messages have, without their markers."""
    # A column knows, and need not be taken apart.
    size: int | None = getattr(messages, "size", None)
    return sum(map(len, messages)) if size is None else size


def joined(groups: Groups) -> Run:
    """Return the messages of all groups, in order, held as they are in there."""
    # Replies in Arrow have them in one column already.
    column: Run | None = getattr(groups, "messages", None)
    return list(chain.from_iterable(groups)) if column is None else column


def concatenated(first: Run, second: Run) -> Run:
    """Return the messages of two runs that are to travel as one."""
    if type(first) is type(second):
        return first + second  # type: ignore[operator,no-any-return]
    return [*first, *second]


class StageKind(Enum):
    """What a stage does with messages."""

    EXTRACT = "extract"
    """Makes messages out of nothing but a request."""
    TRANSFORM = "transform"
    """Turns each message into zero, one or many."""
    LOAD = "load"
    """Puts messages into their final place; normally makes none."""


class Result(NamedTuple):
    """
    What became of one message.

    A worker answers a batch as a whole: the outputs of a batch are those of its
    last message, so that outputs never come before a message they depend on.
    """

    message: bytes
    """The message as it was submitted."""
    outputs: tuple[bytes, ...]
    """What the worker made of it, in the worker's order."""
    error: Exception | None
    """Why there are no outputs, or None when the worker answered."""


class Position(NamedTuple):
    """
    A point in the stream of an extract stage from which it can read on.

    It travels behind the messages that it covers, and is acknowledged when the
    load stage has made all of them durable.
    """

    value: object
    """What the source needs to read on; plain JSON."""
