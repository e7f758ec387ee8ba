"""
The records of a shard that a processor was given and no checkpoint covers yet.

Here a run of messages becomes records: each has a rising number, and a key.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat
from math import isinf
from typing import Any, Final, NamedTuple

from etlstage.errors import InvalidMessage
from etlstage.messages import AnnotatedRun, Run, plain
from etlstage.protocol.kcl.checkpoint import (
    LONGEST,
    Rank,
    ShardPosition,
    rank,
    rank_of,
)
from etlstage.protocol.kcl.lines import LEAST, MOST, RecordColumn

__all__ = ("LONGEST_KEY", "Uncommitted")

LONGEST_KEY: Final = 256
"""Maximal length of a partition key, in characters, which is that of Kinesis."""


_NUMBERS: Final = {
    RecordColumn.SUB: "sub-sequence number",
    RecordColumn.ARRIVAL: "arrival",
    RecordColumn.BEHIND: "delay behind the end of the shard",
}
"""The columns of whole numbers, which may be missing."""
_WHOLE: Final = {int, type(None)}


class _Given(NamedTuple):
    """Records of one action, from exchange ``first`` on."""

    first: int
    ranks: list[Rank]
    sizes: list[int]


class Uncommitted:
    """
    The records after the last checkpoint, in order.

    Args:
        shard: The name of the shard, for errors.
        stored: The position after which the processor begins: it is committed.

    """

    def __init__(self, shard: str, stored: ShardPosition) -> None:
        self._shard = shard
        self._given: deque[_Given] = deque()
        self._last: Rank = rank(stored)
        self._stored: Rank = self._last
        self.largest: ShardPosition = stored
        """The last record that was given; at first, where the processor begins."""
        self.stored: ShardPosition = stored
        """The committed position."""
        self.count: int = 0
        self.size: int = 0
        """Bytes of their data."""
        self.last: int = 0
        """Number of the exchange that was opened last."""

    def ranks(self, messages: Run) -> list[Rank]:
        """
        Return the positions of records that are about to be given.

        Without a column of sequence numbers, positions are counted from the last one.

        Raises:
            InvalidMessage: If a number is wrong or does not rise, or a key or another
                column is wrong.

        """
        columns = messages.columns if isinstance(messages, AnnotatedRun) else {}
        if RecordColumn.PARTITION in columns:
            self._check_keys(columns[RecordColumn.PARTITION])
        for name, what in _NUMBERS.items():
            self._check_numbers(columns.get(name) or (), what)
        sequences = columns.get(RecordColumn.SEQUENCE)
        if sequences is None:
            # Sentinels are below 0, and the end of a shard above all numbers.
            before = self._last[0]
            begin = 1 if isinf(before) else max(0, int(before)) + 1
            return [(begin + place, 0) for place in range(len(messages))]
        return self._risen(sequences, columns.get(RecordColumn.SUB) or repeat(None))

    def covers(self, ranks: Sequence[Rank]) -> int:
        """Return how many of the records are committed already."""
        return bisect_right(ranks, self._stored)

    def give(self, first: int, messages: Run, ranks: list[Rank]) -> None:
        """Add records that are given as exchanges from ``first`` on."""
        sizes = list(map(len, plain(messages)))
        if not ranks:
            return
        self.last = first + len(ranks) - 1
        self._given.append(_Given(first, ranks, sizes))
        self._last = ranks[-1]
        self.largest = ShardPosition(str(self._last[0]), self._last[1])
        self.count += len(ranks)
        self.size += sum(sizes)

    def commit(self, position: ShardPosition) -> tuple[int, int]:
        """Remove what a position covers; return the first exchange, and how many."""
        self.stored, self._stored = position, rank(position)
        place, first, count = self._stored, self.last + 1, 0
        while self._given:
            given = self._given[0]
            covered = bisect_right(given.ranks, place)
            if covered and not count:
                first = given.first
            count += covered
            self.count -= covered
            self.size -= sum(given.sizes[:covered])
            if covered < len(given.ranks):
                if covered:
                    self._given[0] = _Given(
                        given.first + covered,
                        given.ranks[covered:],
                        given.sizes[covered:],
                    )
                break
            self._given.popleft()
        return first, count

    def _risen(self, sequences: Iterable[Any], subs: Iterable[Any]) -> list[Rank]:
        stored, last = self._stored, self._last
        ranks: list[Rank] = []
        for place, (sequence, sub) in enumerate(zip(sequences, subs, strict=False)):
            try:
                found = rank_of(str(sequence), int(sub or 0))
            except ValueError:  # of too many digits
                found = None
            if found is None or found[0] < 0 or isinf(found[0]):
                raise self._refused(
                    place,
                    f"its sequence number is {_shown(sequence)}, expected a decimal"
                    f" number of at most {LONGEST} digits",
                )
            # Records that a checkpoint covers may come again: they are skipped.
            risen = not ranks or found > ranks[-1]
            if not risen or stored < found <= last:
                before = last if risen else ranks[-1]
                raise self._refused(
                    place,
                    f"its sequence number is {sequence}, {sub or 0}, expected more than"
                    f" {before[0]}, {before[1]} before it; sort by that column",
                )
            ranks.append(found)
        return ranks

    def _check_keys(self, keys: Sequence[Any]) -> None:
        for place, key in enumerate(keys):
            if not isinstance(key, str) or not 0 < len(key) <= LONGEST_KEY:
                found = f"{len(key)} characters" if isinstance(key, str) else repr(key)
                raise self._refused(
                    place,
                    f"its partition key is {found}, expected text of 1 to"
                    f" {LONGEST_KEY} characters",
                )

    def _check_numbers(self, numbers: Sequence[Any], what: str) -> None:
        if set(map(type, numbers)) <= _WHOLE and all(
            LEAST <= number <= MOST for number in numbers if number is not None
        ):
            return
        for place, number in enumerate(numbers):
            if not _is_whole(number):
                raise self._refused(
                    place,
                    f"its {what} is {_shown(number)}, expected a whole number of at"
                    " most 64 bits",
                )

    def _refused(self, place: int, text: str) -> InvalidMessage:
        return InvalidMessage(
            f"shard {self._shard}: record {place}: {text}", index=place
        )


def _is_whole(number: Any) -> bool:  # noqa: ANN401 - of any type
    """Return whether a line can hold a number, which a frame may have as a float."""
    try:
        return number is None or bool(LEAST <= int(number) == number <= MOST)
    except (TypeError, ValueError, OverflowError):
        return False


def _shown(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # Python writes no more than 4,300 digits
        return "a number of too many digits"
