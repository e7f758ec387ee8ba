"""
What travels between stages, and what became of it.

A message is opaque bytes.
Messages travel in *runs*, plain lists or, where Spark is at an end, Arrow columns: an
object per message costs more than the message itself, so nothing here wraps a single
one on its way through.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple, TypeAlias

__all__ = (
    "KeyedRun",
    "Position",
    "Result",
    "Run",
    "StageKind",
    "counted",
    "listed",
    "size_of",
)

Run: TypeAlias = list[bytes]
"""Messages that travel together, in order."""


class KeyedRun(list[bytes]):
    """A run whose messages each have a key beside them: a number, from the source."""

    __slots__ = ("keys",)

    def __init__(self, messages: Iterable[bytes], keys: Sequence[int]) -> None:
        super().__init__(messages)
        self.keys = keys
        """As many as there are messages; equal for messages that keep their order."""


def counted(count: int, noun: str) -> str:
    """Return a count in words, such as ``1 message`` or ``4,000 messages``."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def listed(messages: Sequence[bytes]) -> Run:
    """Return the messages as a list; a run that is one, as it is."""
    return messages if isinstance(messages, list) else list(messages)


def size_of(messages: Sequence[bytes]) -> int:
    """Return how many bytes the messages have, without their markers."""
    # A column knows, and need not be taken apart.
    size: int | None = getattr(messages, "size", None)
    return sum(map(len, messages)) if size is None else size


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
