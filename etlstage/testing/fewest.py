"""
The fewest of many things that still show a fault.

Runs of them are left out, the longest first, as long as what is left is enough. Who
looks whether it is, in this thread or in an event loop, is the caller's matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

__all__ = ("Search", "fewest")

T = TypeVar("T")


class Search(Generic[T]):
    """
    Yields what may be enough.

    Args:
        items: What is known to be enough.

    Attributes:
        left: The fewest that are known to be; set it to what was yielded if that is.

    """

    def __init__(self, items: Sequence[T]) -> None:
        self.left: list[T] = [*items]

    def __iter__(self) -> Iterator[list[T]]:
        """Yield what is left without some of it."""
        size = max(len(self.left) // 2, 1)
        while size:
            # The last first: what comes behind a fault is often nearly all.
            end = len(self.left)
            while end > 0:
                begin = max(end - size, 0)
                yield self.left[:begin] + self.left[end:]
                end = begin
            size //= 2


def fewest(items: Sequence[T], enough: Callable[[list[T]], bool]) -> list[T]:
    """Return the fewest that are enough, as far as leaving out runs of them tells."""
    search = Search(items)
    for candidate in search:
        if enough(candidate):
            search.left = candidate
    return search.left
