"""Settings of a set of journals: retention, limit of unread bytes, and syncs."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise
from typing import Literal, NamedTuple, Self, TypeAlias

from etlstage.errors import ConfigError
from etlstage.journal.log import JournalLog
from etlstage.settings.problem import Invalid
from etlstage.settings.units import DURATION, SIZE

__all__ = ("Keep", "Retention", "limit_of", "sync_of")

Keep: TypeAlias = str | None
"""What is kept besides what named readers still need: a time (``7d``), a size
(``100GiB``), nothing (``read``), or everything (None).

A size is a maximum: the oldest segments are dropped, each as a whole, until no more than
that is left, or only the newest segment. So a size below that of a segment (64 MiB by
default) may keep nothing of what was read."""


class Retention(NamedTuple):
    """The bound of what is kept."""

    unit: Literal["read", "seconds", "bytes"]
    amount: float = 0

    @classmethod
    def of(cls, keep: Keep) -> Self | None:
        """
        Return the retention for a :data:`Keep`; None if everything is kept.

        Raises:
            ConfigError: If ``keep`` is invalid.

        """
        if keep is None:
            return None
        if keep == "read":
            return cls("read")
        # A number alone could be either.
        if isinstance(keep, str) and keep[-1:].isalpha():
            with suppress(Invalid):
                return cls("seconds", DURATION.read(keep))
            with suppress(Invalid):
                return cls("bytes", SIZE.read(keep))
        raise ConfigError(
            f"keep is {keep!r}, expected 'read', a time such as '7d' or a size such as"
            " '1GiB'"
        )

    def droppable(self, log: JournalLog, need: int | None, now: int) -> int:
        """
        Return the offset up to which segments may be dropped.

        Args:
            log: The journal.
            need: The first offset that a reader needs; None: there are no readers.
            now: Nanoseconds since 1970.

        """
        if self.unit == "read":
            return need or 0
        segments, before = log.segments(), 0
        if self.unit == "bytes":
            left = log.size()
            for one, following in pairwise(segments):
                if left <= self.amount:
                    break
                left -= following - one
                before = following
        else:
            oldest = now - self.amount * 10**9
            for following in segments[1:]:
                # A segment is older than the first group of the next one.
                began = log.age_of(following)
                if began is None or began > oldest:
                    break
                before = following
        return before if need is None else min(before, need)


def limit_of(limit: str | None) -> int | None:
    """Return the bytes of a journal that a reader may have unread; None: no limit."""
    if limit is None:
        return None
    try:
        return SIZE.read(limit)
    except Invalid:
        raise ConfigError(
            f"limit is {limit!r}, expected a size such as '20GiB'"
        ) from None


def sync_of(sync: str) -> int:
    """Return the nanoseconds between two syncs."""
    if sync == "append":
        return 0
    if sync == "commit":
        return 1 << 63
    try:
        return int(DURATION.read(sync) * 10**9)
    except Invalid:
        raise ConfigError(
            f"sync is {sync!r}, expected 'commit', 'append' or a time such as '1s'"
        ) from None
