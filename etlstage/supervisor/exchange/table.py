"""
The exchanges that one worker has open, by their numbers.

Exchanges that were opened at once are one range: an exchange for each of its messages,
or one for all of them. Ranges are sorted, so a number is found by bisection. Numbers
that end at the front of a range move its bounds; those in the middle are recorded as
gone, because a range that was cut in two would need two histories.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from operator import attrgetter
from typing import Final, NamedTuple

from etlstage.supervisor.exchange.exchange import Exchange

__all__ = ("OpenRange", "RangePart", "Table")

_FIRST: Final = attrgetter("first")


class OpenRange:
    """
    Exchanges with consecutive numbers that were opened at once.

    Attributes:
        began: Number of the first exchange that was opened.
        first: Number of the first one that is open.
        count: How many numbers there are from ``first`` to the last.
        exchange: Their messages.
        since: When they were opened, in seconds.

    """

    __slots__ = ("_gone", "began", "count", "exchange", "first", "since")

    def __init__(
        self, first: int, count: int, exchange: Exchange, since: float
    ) -> None:
        self.began: int = first
        self.first: int = first
        self.count: int = count
        self.exchange: Exchange = exchange
        self.since: float = since
        self._gone: set[int] = set()

    @property
    def numbers(self) -> list[int]:
        """The numbers that are open."""
        numbers = range(self.first, self.first + self.count)
        return [number for number in numbers if number not in self._gone]

    def within(self, first: int, behind: int) -> bool:
        """Return whether it lies from ``first`` to before ``behind``, wholly open."""
        return not self._gone and first <= self.first <= behind - self.count

    def holds(self, number: int) -> bool:
        """Return whether a number is open."""
        return (
            self.first <= number < self.first + self.count and number not in self._gone
        )

    def end(self, first: int, count: int) -> list[tuple[int, int]]:
        """Close numbers within the range; return the runs of those that were open."""
        gone, ended = self._gone, range(first, first + count)
        runs = _runs(n for n in ended if n not in gone) if gone else [(first, count)]
        if first > self.first:
            gone.update(ended)
            return runs
        self.first += count
        self.count -= count
        if gone:
            gone.difference_update(ended)
            while self.first in gone:
                gone.remove(self.first)
                self.first += 1
                self.count -= 1
        return runs


class RangePart(NamedTuple):
    """Some of the exchanges of a range."""

    of: OpenRange
    first: int
    """Number of the first exchange."""
    many: int


class Table:
    """
    The open exchanges, in the order in which they were opened.

    Attributes:
        count: How many there are.
        ranges: All that are open; only the table changes it.

    """

    def __init__(self) -> None:
        self.count: int = 0
        self.ranges: deque[OpenRange] = deque()

    def add(self, range_: OpenRange) -> None:
        """Open exchanges; their numbers must be higher than all before."""
        self.ranges.append(range_)
        self.count += range_.count

    def pop(self) -> OpenRange:
        """Remove and return the range opened last, of which nothing has ended."""
        range_ = self.ranges.pop()
        self.count -= range_.count
        return range_

    def find(self, number: int) -> OpenRange | None:
        """Return the range in which a number is open."""
        at = bisect_right(self.ranges, number, key=_FIRST) - 1
        if at < 0:
            return None
        range_ = self.ranges[at]
        return range_ if range_.holds(number) else None

    def end(self, first: int, count: int) -> list[RangePart]:
        """Close ``count`` numbers from ``first`` on; return those that were open."""
        parts: list[RangePart] = []
        ranges, behind, at = self.ranges, first + count, 0
        if ranges and first >= ranges[0].first + ranges[0].count:
            at = bisect_right(ranges, first, key=_FIRST) - 1
        while at < len(ranges) and ranges[at].first < behind:
            range_ = ranges[at]
            if range_.within(first, behind):  # the usual case: nothing is left of it
                parts.append(RangePart(range_, range_.first, range_.count))
                self.count -= range_.count
                del ranges[at]
                continue
            start = max(first, range_.first)
            end = min(behind, range_.first + range_.count)
            if start < end:
                for number, many in range_.end(start, end - start):
                    parts.append(RangePart(range_, number, many))
                    self.count -= many
            if range_.count:
                at += 1
            else:
                del ranges[at]
        return parts

    def clear(self) -> None:
        """Close all."""
        self.ranges.clear()
        self.count = 0


def _runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return rising numbers as runs: the first of each, and how many there are."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and sum(runs[-1]) == number:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((number, 1))
    return runs
