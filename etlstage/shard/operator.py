"""
Changes of leases by an operator, at the same time as changes by their owners.

Each change is applied to the lease as it is at that moment. So a checkpoint that was
moved since the operator looked is kept, and so is the end of a shard.
"""

from __future__ import annotations

from collections.abc import Callable

from etlstage.errors import ConfigError, guess
from etlstage.shard.lease import Lease
from etlstage.shard.table import NEWS, LeaseTable, News

__all__ = ("find_lease", "release", "reset", "take")


def find_lease(leases: LeaseTable, shard: str) -> Lease:
    """
    Return the lease of a shard, given its name or the end of its name.

    Raises:
        ConfigError: If there is no such shard, or there are several.
        TableGone: If the table can't be read.

    """
    rows = leases.read()
    found = [row for row in rows if row.shard == shard]
    found = found or [row for row in rows if row.shard.endswith(shard)]
    if not rows:
        raise ConfigError(f"there is no shard {shard!r}: no run has started yet")
    names = [row.shard for row in found or rows]
    if not found:
        close = guess(shard, names) or f", expected one of {', '.join(names)}"
        raise ConfigError(f"there is no shard {shard!r}{close}")
    if len(found) > 1:
        raise ConfigError(f"several shards end in {shard!r}: {', '.join(names)}")
    return found[0]


def release(leases: LeaseTable, shard: str) -> Lease:
    """
    Ask the owner of a shard to hand it over; return its lease as it was before.

    An owner that has been asked already is not asked again, as another change of the
    lease would look like a renewal.

    Raises:
        ConfigError: If the shard has no owner, has just got another one, or has ended.
        TableGone: If the owner may or may not have been asked.

    """

    def asked(lease: Lease) -> Lease:
        return lease if lease.claimant is not None else lease._replace(claimant="")

    return _of_owner(leases, shard, asked, NEWS)


def take(leases: LeaseTable, shard: str) -> Lease:
    """
    Take a shard from its owner, which can't commit any more; return the old lease.

    Raises:
        ConfigError: If the shard has no owner, has just got another one, or has ended.
        TableGone: If the shard may or may not have been taken.

    """
    free = News(lag=0)
    return _of_owner(
        leases, shard, lambda lease: lease._replace(owner=None, claimant=None), free
    )


def reset(leases: LeaseTable, shard: str) -> Lease:
    """
    Forget the committed position of a shard, owned or not; return the old lease.

    Raises:
        ConfigError: If there is no such shard.
        TableGone: If the position may or may not be forgotten.

    """
    return _change(
        leases, shard, lambda lease: Lease(lease.shard, lease.parents), News(lag=0)
    )


def _of_owner(
    leases: LeaseTable, shard: str, change: Callable[[Lease], Lease], news: News
) -> Lease:
    """Change the lease of a shard, provided that its current owner keeps it."""
    owner = find_lease(leases, shard).owner

    def changed(lease: Lease) -> Lease:
        if lease.ended or owner is None:
            why = "has ended" if lease.ended else "has no owner"
            raise ConfigError(f"shard {lease.shard} {why}")
        if lease.owner != owner:
            raise ConfigError(
                f"shard {lease.shard} has just changed owner and now belongs to"
                f" {lease.owner or 'no runner'}"
            )
        return change(lease)

    return _change(leases, shard, changed, news)


def _change(
    leases: LeaseTable, shard: str, change: Callable[[Lease], Lease], news: News
) -> Lease:
    """Apply a change to the lease as it is, until that succeeds; return the old one."""
    while True:
        lease = find_lease(leases, shard)
        after = change(lease)
        if after == lease:
            return lease
        if leases.swap(lease, after._replace(counter=lease.counter + 1), news):
            return lease
