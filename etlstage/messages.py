"""
Messages between stages, and their results.

A message is opaque bytes. Messages travel in *runs*, which are plain lists or, where an
end uses Arrow, columns: an object per message costs more than the message itself, so
nothing here wraps single messages on their way.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import chain, islice
from typing import Any, Final, NamedTuple, TypeAlias, overload

from etlstage import speedups
from etlstage.errors import EtlstageError

__all__ = (
    "MOST_TEXT",
    "OVERHEAD",
    "AnnotatedRun",
    "Groups",
    "Packed",
    "Passed",
    "Position",
    "Result",
    "Run",
    "Singles",
    "StageKind",
    "check_code",
    "check_text",
    "concatenated",
    "cost_of",
    "counted",
    "joined",
    "plain",
    "refuse_one",
    "size_of",
    "sound",
    "text_flaw",
)

Run: TypeAlias = Sequence[bytes]
"""Messages that travel together, in order: a list, or a
:class:`~etlstage.columns.Column`."""

Groups: TypeAlias = Sequence[tuple[bytes, ...]]
"""The outputs of each of some messages: a list, :class:`Singles`, or
:class:`~etlstage.columns.Replies`."""


OVERHEAD: Final = 56
"""Bytes of memory that a message in a list takes besides its own: 33 for its object, up
to 15 to round that to a multiple of 16, and 8 for each reference, in a list and in a
tuple. Bounds include it: short messages take thirty times their size."""

MOST_TEXT: Final = 64 * 1024
"""Maximal length of a name or a reason that is sent to a worker, in bytes."""

_CODES: Final = range(-(2**63), 2**63)  # error codes that a frame can hold


class Packed(Sequence[bytes]):
    """Messages without an object for each of them, such as those of an Arrow array."""

    __slots__ = ()

    @property
    @abstractmethod
    def size(self) -> int:
        """Bytes of the messages."""

    @property
    @abstractmethod
    def cost(self) -> int:
        """Bytes of memory that they take."""

    @property
    @abstractmethod
    def problem(self) -> str | None:
        """Why they are not messages, or None."""


class Singles(Sequence[tuple[bytes, ...]]):
    """
    Replies of one message each, as nearly all are, without a tuple for each of them.

    Args:
        messages: The messages of the replies that have one.
        gaps: Indexes of the replies that have none, in ascending order.

    """

    __slots__ = ("_gaps", "messages")

    def __init__(self, messages: list[bytes], gaps: Sequence[int] = ()) -> None:
        self.messages: list[bytes] = messages
        self._gaps = gaps

    def __repr__(self) -> str:
        return f"<Singles replies={len(self)}>"

    def __eq__(self, other: object) -> bool:
        return list(self) == (list(other) if isinstance(other, Singles) else other)

    def __len__(self) -> int:
        return len(self.messages) + len(self._gaps)

    @overload
    def __getitem__(self, at: int) -> tuple[bytes, ...]: ...
    @overload
    def __getitem__(self, at: slice) -> Singles: ...
    def __getitem__(self, at: int | slice) -> tuple[bytes, ...] | Singles:
        if not isinstance(at, slice):
            at = range(len(self))[at]
            (reply,) = self[at : at + 1]
            return reply
        start, end, _ = at.indices(len(self))
        first, last = (bisect_left(self._gaps, place) for place in (start, end))
        gaps = [gap - start for gap in self._gaps[first:last]]
        return Singles(self.messages[start - first : end - last], gaps)

    def __iter__(self) -> Iterator[tuple[bytes, ...]]:
        replies: Iterator[tuple[bytes, ...]] = zip(self.messages, strict=False)
        return self._with_gaps(replies) if self._gaps else replies

    def _with_gaps(
        self, replies: Iterator[tuple[bytes, ...]]
    ) -> Iterator[tuple[bytes, ...]]:
        at = 0
        for gap in self._gaps:
            yield from islice(replies, gap - at)
            yield ()
            at = gap + 1
        yield from replies


class AnnotatedRun(Sequence[bytes]):
    """
    Messages with columns beside them: in each a value for every message.

    ::

        AnnotatedRun([b"a", b"b"], key=[7, 8])

    Args:
        messages: A run of any type.
        columns: Columns by name, as long as ``messages``. ``key`` holds numbers, equal
            for messages that keep their order. A batch made of two runs has the columns
            that both have, as lists.

    """

    __slots__ = ("columns", "messages")

    def __init__(self, messages: Run, **columns: Sequence[Any]) -> None:
        self.messages: Run = messages
        self.columns: dict[str, Sequence[Any]] = columns

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

    def __add__(self, other: AnnotatedRun) -> AnnotatedRun:
        columns = {
            name: [*column, *other.columns[name]]
            for name, column in self.columns.items()
            if name in other.columns
        }
        return AnnotatedRun(concatenated(self.messages, other.messages), **columns)

    @property
    def size(self) -> int:
        """Bytes of the messages."""
        return size_of(self.messages)


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return a count in words, such as ``1 message`` or ``4,000 messages``."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def sound(run: object, number: int = 0) -> tuple[Run, TypeError | None]:
    """
    Return a caller's messages up to the first invalid one, and the error for that.

    Lists are copied, as the caller may reuse them.

    Args:
        run: What the caller passed.
        number: Number of messages that the caller passed before.

    """
    if isinstance(run, Packed):
        return (run, None) if run.problem is None else ([], TypeError(run.problem))
    if isinstance(run, AnnotatedRun):
        return _annotated(run, number)
    if type(run) is not list and (_is_one(run) or not isinstance(run, Sequence)):
        return [], TypeError(f"expected a run of messages, got {_kind(run)}")
    messages = [*run]
    # This is the fastest way in Python to check the type of each message.
    if (speedups.compiled and speedups.compiled.measure(messages) is not None) or list(
        map(type, messages)
    ).count(bytes) == len(messages):
        return messages, None
    for at, message in enumerate(messages):
        if type(message) is not bytes:
            try:
                messages[at] = bytes(memoryview(message))
            except TypeError:
                text = f"message {number + at + 1} is {_kind(message)}, expected bytes"
                return messages[:at], TypeError(text)
    return messages, None


def refuse_one(messages: object) -> None:
    """Raise TypeError for one message in place of an iterable of messages."""
    if _is_one(messages):
        raise TypeError(
            f"expected an iterable of messages, got {_kind(messages)};"
            " put a single message in a list: [message]"
        )


def check_code(code: object) -> int:
    """
    Return the code of an error that is to be sent, as a plain number.

    Raises:
        TypeError: If it is not an integer.
        ValueError: If it does not fit into 64 bits with a sign.

    """
    if not isinstance(code, int) or isinstance(code, bool):
        raise TypeError(f"code is {_kind(code)}, expected int")
    if (number := int(code)) not in _CODES:
        raise ValueError("code is out of range, expected -2**63 to 2**63 - 1")
    return number


def check_text(what: str, value: object) -> None:
    """
    Check a name or a reason that is to be sent to a worker.

    Raises:
        TypeError: If it is not text.
        ValueError: If it can't be encoded, or is longer than :data:`MOST_TEXT`.

    """
    if not isinstance(value, str):
        raise TypeError(f"{what} is {_kind(value)}, expected str")
    if (flaw := text_flaw(value)) is not None:
        raise ValueError(f"{what} {flaw}")


def text_flaw(text: str) -> str | None:
    """Return why a worker can't be sent a text, as a part of a sentence; or None."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        return "has a surrogate, expected text that can be encoded as UTF-8"
    if size > MOST_TEXT:
        return f"is {size} bytes long, expected no more than {MOST_TEXT}"
    return None


def _is_one(what: object) -> bool:
    return isinstance(what, str | bytes | bytearray | memoryview)


def _kind(what: object) -> str:
    return "None" if what is None else type(what).__name__


def _annotated(run: AnnotatedRun, number: int) -> tuple[Run, TypeError | None]:
    messages, error = sound(run.messages, number)
    columns: dict[str, Sequence[Any]] = {}
    for name, column in run.columns.items():
        try:
            columns[name] = column[: len(messages)]
            fits = len(column) == len(run.messages)
        except TypeError:
            fits = False
        if not fits:
            text = f"column {name} does not hold a value for each of the messages"
            return [], error or TypeError(text)
    return AnnotatedRun(messages, **columns), error


def plain(messages: Run) -> Run:
    """Return the messages without the columns beside them."""
    # Nearly all runs are lists, which skip the slower isinstance() this way.
    if type(messages) is list or not isinstance(messages, AnnotatedRun):
        return messages
    return messages.messages


def size_of(messages: Run) -> int:
    """Return how many bytes the messages have, without their markers."""
    if speedups.compiled and type(messages) is list:
        size = speedups.compiled.measure(messages)
    else:
        # A column knows its size without being taken apart.
        size = getattr(messages, "size", None)
    return sum(map(len, messages)) if size is None else size


def cost_of(messages: Run) -> int:
    """Return how many bytes of memory the messages take."""
    messages = plain(messages)
    if isinstance(messages, Packed):
        return messages.cost
    return size_of(messages) + OVERHEAD * len(messages)


def joined(groups: Groups) -> Run:
    """Return the messages of all groups, in order, as a list or an Arrow column."""
    # Singles, and replies in Arrow, hold their messages in one sequence already.
    messages: Run | None = getattr(groups, "messages", None)
    return list(chain.from_iterable(groups)) if messages is None else messages


def concatenated(first: Run, second: Run) -> Run:
    """Return the messages of two runs that are to travel as one run."""
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
    The result of one message.

    A worker answers a batch as a whole: all outputs of a batch belong to its last
    message, so that outputs never come before a message that they depend on.
    """

    message: bytes
    """The message as it was submitted."""
    outputs: tuple[bytes, ...]
    """What the worker made of it, in the worker's order."""
    error: EtlstageError | None
    """Why there are no outputs, or None when the worker answered."""


class Passed(NamedTuple):
    """What a stage had done when a position left it."""

    stage: str
    counts: Sequence[int]
    """The counts of its account."""
    letters: int = 0
    """Bytes of its dead letters on disk."""


class Position(NamedTuple):
    """
    A point in the stream of an extract stage from which reading can resume.

    It travels after the messages that it covers, and is acknowledged when the load
    stage has made all of them durable.
    """

    value: object
    """What the source needs to resume reading; plain JSON."""
    passed: tuple[Passed, ...] = ()
    """The stages that it has passed."""
