"""
Judges checkpoints: where they may be in a shard, and how a processor is answered.

The rules are those of the Kinesis Client Library (``ShardRecordProcessorCheckpointer``,
``SentinelCheckpoint``): a processor that works here works there. Two of them surprise
everybody. The last record's number, checkpointed before the end of the shard and again
at it, is "already done": the answer is success, nothing is stored, and the shard has
not ended. And a client that turns its missing number into the text ``None`` is refused.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple, TypeAlias

__all__ = (
    "AT_TIMESTAMP",
    "DEPENDENCY",
    "ILLEGAL_ARGUMENT",
    "INVALID_STATE",
    "LATEST",
    "LONGEST",
    "SHARD_END",
    "SHUTDOWN",
    "THROTTLING",
    "TRIM_HORIZON",
    "CommitVerdict",
    "ShardPosition",
    "Standing",
    "error_name",
    "judge",
    "position_of",
    "rank",
    "rank_of",
)

THROTTLING: Final = "ThrottlingException"
"""The store is overloaded; try again."""
SHUTDOWN: Final = "ShutdownException"
"""The lease belongs to another worker."""
INVALID_STATE: Final = "InvalidStateException"
"""There is no checkpointer now, or no store."""
DEPENDENCY: Final = "KinesisClientLibDependencyException"
"""The store failed; try again."""
ILLEGAL_ARGUMENT: Final = "IllegalArgumentException"
"""Not a number, or a number out of range."""

TRIM_HORIZON: Final = "TRIM_HORIZON"
LATEST: Final = "LATEST"
AT_TIMESTAMP: Final = "AT_TIMESTAMP"
SHARD_END: Final = "SHARD_END"

LONGEST: Final = 128
"""Maximal digits of a sequence number, as Kinesis documents them; it assigns 56."""

Rank: TypeAlias = tuple[float, int]
"""Orders positions: an int of any length, or infinity; then the sub-sequence number."""

_SENTINELS: Final[dict[str, float]] = {
    AT_TIMESTAMP: -3,
    TRIM_HORIZON: -2,
    LATEST: -1,
    SHARD_END: math.inf,
}


class ShardPosition(NamedTuple):
    """A position in a shard; as plain JSON it is ``[sequence, sub]``."""

    sequence: str
    """A decimal number, or a sentinel."""
    sub: int = 0
    """Index among the records that were aggregated into one."""


class Standing(NamedTuple):
    """What is known about a shard when its processor asks for a checkpoint."""

    stored: ShardPosition
    """The position that was stored last, or where the processor began."""
    largest: ShardPosition
    """The position of the last record that was given; if there is none, ``stored``."""
    ended: bool = False
    """The processor is working on the action that ends the shard."""


class CommitVerdict(NamedTuple):
    """The decision on a checkpoint."""

    position: ShardPosition | None = None
    """The position to store; None: nothing is stored."""
    error: str | None = None
    """Name of the exception to answer with; None: success."""


_REFUSED: Final = CommitVerdict(error=ILLEGAL_ARGUMENT)
_DONE: Final = CommitVerdict()


def judge(sequence: str | None, sub: int | None, standing: Standing) -> CommitVerdict:
    """
    Return the decision on a checkpoint.

    Args:
        sequence: The sequence number asked for; None: everything given so far.
        sub: Its sub-sequence number; None: 0. Without a sequence number it is ignored.
        standing: What is known about the shard.

    """
    stored, largest, ended = standing
    most = ShardPosition(SHARD_END) if ended else largest
    if sequence is None:
        asked, place = most, rank(most)
    else:
        asked = ShardPosition(sequence, sub or 0)
        known = rank_of(*asked)
        if known is None:
            return _REFUSED
        place = known
        if not rank(stored) <= place <= rank(most):
            return _REFUSED
    if place == rank(stored):
        return _DONE
    if ended and place == rank(largest):
        # The last number means the end, but only if it is not stored yet: see above.
        return CommitVerdict(ShardPosition(SHARD_END))
    return CommitVerdict(asked)


def rank_of(sequence: str, sub: int = 0) -> Rank | None:
    """Return the rank of a position; None: it is not a position."""
    if sequence in _SENTINELS:
        return _SENTINELS[sequence], sub
    digits = sequence.isascii() and sequence.isdecimal() and len(sequence) <= LONGEST
    return (int(sequence), sub) if digits and sub >= 0 else None


def rank(position: ShardPosition) -> Rank:
    """
    Return the rank of a position.

    Raises:
        ValueError: If it is not a position.

    """
    found = rank_of(*position)
    if found is None:
        raise ValueError(
            f"{position.sequence!r}, {position.sub} is not a position in a shard,"
            f" expected a decimal number or {', '.join(_SENTINELS)}, and a"
            " sub-sequence number of 0 or more"
        )
    return found


def position_of(value: object) -> ShardPosition:
    """
    Return a position from plain JSON; None is the beginning of the shard.

    Raises:
        ValueError: If it is not a position.

    """
    match value:
        case None:
            return ShardPosition(TRIM_HORIZON)
        case str(sequence):
            position = ShardPosition(sequence)
        case [str(sequence), int(sub)]:
            position = ShardPosition(sequence, sub)
        case _:
            raise ValueError(
                f"{value!r} is not a position in a shard, expected [sequence number"
                " as text, sub-sequence number]"
            )
    rank(position)
    return position


def error_name(error: str) -> str:
    """
    Return the name of an exception for an error while storing a position.

    Clients compare names; an error that is not a name means a failed store to them.
    """
    return error if error.isascii() and error.isidentifier() else DEPENDENCY
