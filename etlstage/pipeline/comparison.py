"""
Comparison of the results of two runs of one pipeline.

Messages are compared one by one where their order is guaranteed, and otherwise as
multisets, by how often each occurs. Neither way holds all messages in memory.

Messages are divided into buckets by their digest. Two buckets are equal if the sums of
their digests are, which do not depend on the order. Only if two sums differ is a
message looked for: the digests of these buckets are counted, one bucket at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import zip_longest
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from etlstage.pipeline.dead_letter.files import letter_files, read_letters
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.ledger import COUNTS, Ledger

__all__ = (
    "Extra",
    "Messages",
    "excesses",
    "ledger_difference",
    "letter_difference",
    "message_difference",
    "shown",
)

DIGEST: Final = 16
"""Bytes: enough that two messages never have the same digest."""
BUCKET: Final = 1_000_000
"""Approximate number of messages per bucket, and so of digests in memory."""
CUT: Final = 80
BEFORE: Final = 20
"""Characters shown before the place at which two long messages differ."""
# Restarts, which come last, are no outcome of a message.
WORDS: Final = (
    "in",
    "done",
    "dead",
    "failed",
    "unprocessed",
    "out",
    "skipped",
    "doubtful",
)


class Messages(Protocol):
    """Messages that can be read repeatedly."""

    def __iter__(self) -> Iterator[bytes]:
        """Yield the messages, from the first on."""
        ...

    def __len__(self) -> int:
        """Return the number of messages."""
        ...


class Extra(NamedTuple):
    """A message that one side has more often than the other."""

    place: int
    """Place of the occurrence that the other side lacks, counted from 0."""
    message: bytes


def message_difference(
    names: tuple[str, str], first: Messages, second: Messages, *, ordered: bool
) -> str | None:
    """
    Return in one sentence how two outputs differ, None if they don't.

    Args:
        names: Names of the two sides.
        first: The first side's messages.
        second: The second side's messages.
        ordered: Whether the order of messages counts.

    """
    if not ordered:
        found = _first_excess(names, first, second)
        return _lack(*found) if found else None
    difference = _ordered_difference(names, first, second)
    if difference is None or len(first) != len(second) or any(excesses(first, second)):
        return difference
    return f"the messages are the same, their order is not: {difference}"


def letter_difference(names: tuple[str, str], first: Path, second: Path) -> str | None:
    """
    Return in one sentence how the dead letters of two runs differ, or None.

    Args:
        names: Names of the two sides.
        first: State directory of the first run.
        second: State directory of the second run.

    """
    found = _first_excess(names, _Letters(first), _Letters(second))
    if found is None:
        return None
    has, lacks, extra = found
    stage, _, message = extra.message.partition(b"\0")
    return (
        f"{lacks} lacks a dead letter that {has} has: stage {stage.decode()},"
        f" {shown(message)}"
    )


def excesses(first: Messages, second: Messages) -> tuple[Extra | None, Extra | None]:
    """Return a message that ``first`` has more often, and one that ``second`` has."""
    count = 1 + max(len(first), len(second)) // BUCKET
    sums = zip(_sums(first, count), _sums(second, count), strict=True)
    parted = [bucket for bucket, (one, other) in enumerate(sums) if one != other]
    return _excess(first, second, parted, count), _excess(second, first, parted, count)


def ledger_difference(
    names: tuple[str, str], first: Ledger, second: Ledger
) -> str | None:
    """Return in one sentence the first count in which two ledgers differ."""
    for one, other in zip(first, second, strict=True):
        for count, word in zip(COUNTS, WORDS, strict=False):
            mine, theirs = getattr(one, count), getattr(other, count)
            if mine != theirs:
                return (
                    f"stage {one.stage}: {names[0]} has {mine:,} {word},"
                    f" {names[1]} has {theirs:,}"
                )
    return None


def shown(message: bytes, *, start: int = 0) -> str:
    """
    Return a message for humans: quoted, escaped and shortened.

    Args:
        message: The message.
        start: Offset of the byte of interest.

    """
    # Begin at the start of the message if that shows the byte.
    skipped = max(0, start - BEFORE) if start >= CUT - BEFORE else 0
    text = message[skipped : skipped + 4 * CUT].decode(errors="backslashreplace")
    escaped = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    behind = "..." if len(escaped) > CUT or len(message) > skipped + 4 * CUT else ""
    return f"{'...' if skipped else ''}'{escaped[:CUT]}'{behind}"


def _ordered_difference(
    names: tuple[str, str], first: Iterable[bytes], second: Iterable[bytes]
) -> str | None:
    for place, (mine, theirs) in enumerate(zip_longest(first, second)):
        if mine == theirs:
            continue
        if theirs is None:
            return _lack(*names, Extra(place, mine or b""))
        if mine is None:
            return _lack(*names[::-1], Extra(place, theirs))
        pairs = enumerate(zip(mine, theirs, strict=False))
        unequal = (at for at, (one, other) in pairs if one != other)
        start = next(unequal, min(len(mine), len(theirs)))
        return (
            f"message {place + 1:,} differs: {names[0]} has"
            f" {shown(mine, start=start)}, {names[1]} has {shown(theirs, start=start)}"
        )
    return None


def _first_excess(
    names: tuple[str, str], first: Messages, second: Messages
) -> tuple[str, str, Extra] | None:
    """Return who has a message, who lacks it, and the message; None: no difference."""
    has, lacks = names
    mine, theirs = excesses(first, second)
    if mine is not None:
        return has, lacks, mine
    return (lacks, has, theirs) if theirs is not None else None


def _lack(has: str, lacks: str, extra: Extra) -> str:
    return (
        f"{lacks} lacks a message that {has} has (place {extra.place + 1:,}):"
        f" {shown(extra.message)}"
    )


def _digest(message: bytes) -> int:
    return int.from_bytes(blake2b(message, digest_size=DIGEST).digest(), "big")


def _sums(messages: Iterable[bytes], count: int) -> list[int]:
    sums = [0] * count
    for message in messages:
        digest = _digest(message)
        sums[digest % count] += digest
    return sums


def _excess(
    first: Messages, second: Messages, parted: Iterable[int], count: int
) -> Extra | None:
    """Return a message of ``first`` that ``second`` has less often, if there is one."""
    for bucket in parted:
        left = Counter(digest for _, digest, _ in _dealt(second, bucket, count))
        for place, digest, message in _dealt(first, bucket, count):
            if not left[digest]:
                return Extra(place, message)
            left[digest] -= 1
    return None


def _dealt(
    messages: Iterable[bytes], bucket: int, count: int
) -> Iterator[tuple[int, int, bytes]]:
    """Yield place, digest and message for each message of one bucket."""
    for place, message in enumerate(messages):
        digest = _digest(message)
        if digest % count == bucket:
            yield place, digest, message


class _Letters:
    """The dead letters of a run, each as its stage, NUL and its message."""

    def __init__(self, state: Path) -> None:
        self._files = letter_files(state)
        self._count = sum(1 for _ in self)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[bytes]:
        for path in self._files:
            for letter in read_letters(path):
                if isinstance(letter, DeadLetter):
                    yield letter.stage.encode() + b"\0" + letter.message
