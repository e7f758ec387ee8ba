"""
Where a checkpoint may stand in a shard, and what a processor that asks is answered.

The rules are those of the Kinesis Client Library (``ShardRecordProcessorCheckpointer``,
``SentinelCheckpoint``): a processor that passes here passes there. Two of them surprise
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
"""The store has too much to do; try again."""
SHUTDOWN: Final = "ShutdownException"
"""The lease is another's."""
INVALID_STATE: Final = "InvalidStateException"
"""There is no checkpointer now, or no store."""
DEPENDENCY: Final = "KinesisClientLibDependencyException"
"""The store failed; try again."""
ILLEGAL_ARGUMENT: Final = "IllegalArgumentException"
"""No number, or one out of range."""

TRIM_HORIZON: Final = "TRIM_HORIZON"
LATEST: Final = "LATEST"
AT_TIMESTAMP: Final = "AT_TIMESTAMP"
SHARD_END: Final = "SHARD_END"

LONGEST: Final = 128
"""Digits of a sequence number, at most. Kinesis documents this many; it gives 56."""

Rank: TypeAlias = tuple[float, int]
"""Orders positions: an int, however long, or infinity; then the sub-sequence number."""

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
    """Which of the records that were put as one."""


class Standing(NamedTuple):
    """What is known of a shard when its processor asks."""

    stored: ShardPosition
    """What was stored last, or where the processor began."""
    largest: ShardPosition
    """The last record that was delivered; ``stored`` if none was."""
    ended: bool = False
    """The processor is at the action that ends the shard."""


class CommitVerdict(NamedTuple):
    """What becomes of a checkpoint that was asked for."""

    position: ShardPosition | None = None
    """To be stored; None: nothing is."""
    error: str | None = None
    """Name of the exception to answer with; None: success."""


_REFUSED: Final = CommitVerdict(error=ILLEGAL_ARGUMENT)
_DONE: Final = CommitVerdict()


def judge(sequence: str | None, sub: int | None, standing: Standing) -> CommitVerdict:
    """
    Return what becomes of a checkpoint.

    Args:
        sequence: What was asked for; None: all that was delivered.
        sub: Its sub-sequence number; None: 0. Without a sequence number it is ignored.
        standing: The shard's.

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
        # The very last number stands for the end, but only if it is news: see above.
        return CommitVerdict(ShardPosition(SHARD_END))
    return CommitVerdict(asked)


def rank_of(sequence: str, sub: int = 0) -> Rank | None:
    """Return what orders a position; None: it is none."""
    if sequence in _SENTINELS:
        return _SENTINELS[sequence], sub
    digits = sequence.isascii() and sequence.isdecimal() and len(sequence) <= LONGEST
    return (int(sequence), sub) if digits and sub >= 0 else None


def rank(position: ShardPosition) -> Rank:
    """
    Return what orders a position that is known to be one.

    Raises:
        ValueError: If it is none.

    """
    found = rank_of(*position)
    if found is None:
        raise ValueError(
            f"{position.sequence!r}, {position.sub} is no position in a shard,"
            f" expected a decimal number or {', '.join(_SENTINELS)}, and 0 or more"
        )
    return found


def position_of(value: object) -> ShardPosition:
    """
    Return a position from plain JSON; None is the beginning of the shard.

    Raises:
        ValueError: If it is none.

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
                f"{value!r} is no position in a shard, expected [sequence number,"
                " sub-sequence number]"
            )
    rank(position)
    return position


def error_name(error: str) -> str:
    """
    Return the name of an exception for what kept us from storing a position.

    Clients compare names; one that is no name is a store that failed, for them.
    """
    return error if error.isascii() and error.isidentifier() else DEPENDENCY
