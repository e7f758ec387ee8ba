"""Operators change leases while their owners move them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from etlstage.errors import ConfigError
from etlstage.shard.holder import LeaseHolder
from etlstage.shard.keeper import LeaseKeeper
from etlstage.shard.lease import Lease
from etlstage.shard.operator import find_lease, release, reset, take
from etlstage.shard.table import MemoryLeases

pytestmark = pytest.mark.core

ONE = Lease("s", ("p",), None, False, "a/0", 7, 2)
MOVED = ONE._replace(position='["9", 0]', counter=8)
ENDED = ONE._replace(position='["SHARD_END", 0]', ended=True, counter=8)


class Moving(MemoryLeases):
    """Leases whose first one moves right after it was read."""

    def __init__(self, row: Lease, *later: Lease, looks: int = 1) -> None:
        super().__init__()
        self.add([row])
        self._later = [*later]
        self._looks = looks

    def read(self) -> list[Lease]:
        """Return the rows as they were just before the move."""
        rows = super().read()
        self._looks -= 1
        if self._looks <= 0 and self._later:
            self.swap(rows[0], self._later.pop(0))
        return rows


@pytest.mark.parametrize(
    ("looks", "change", "after"),
    [
        (1, release, MOVED._replace(claimant="", counter=9)),
        (2, release, MOVED._replace(claimant="", counter=9)),
        (2, take, MOVED._replace(owner=None, counter=9)),
        (1, reset, Lease("s", ("p",), counter=9)),
    ],
)
def test_first_checkpoint_is_stored_meanwhile(
    looks: int, change: Callable[[MemoryLeases, str], Lease], after: Lease
) -> None:
    """It is kept, unless the shard is reset (issue 25)."""
    leases = Moving(ONE, MOVED, looks=looks)
    assert change(leases, "s").owner == "a/0"
    assert leases.read() == [after]


async def test_shard_that_is_reset_needs_its_runner_again() -> None:
    """Its runner must load it again, even if it had given it up; its children wait."""
    parent = Lease("p", owner="a/0", switches=1)
    holder = LeaseHolder("load", LeaseKeeper("a", "0"), lambda _: MemoryLeases(), "ps")
    holder.rows.update(p=parent, s=Lease("s", ("p",)))
    assert not holder.is_over("p")
    holder.give_up(parent)
    holder.rows["p"] = parent._replace(owner="b/0", counter=9, switches=2)
    assert holder.all_over
    holder.rows["p"] = Lease("p", counter=10)
    assert not holder.is_over("p")
    assert not holder.is_over("s")


@pytest.mark.parametrize("looks", [1, 2])
@pytest.mark.parametrize("change", [release, take])
def test_shard_ends_meanwhile(
    change: Callable[[MemoryLeases, str], Lease], looks: int
) -> None:
    """It can't be released or taken after its end (issue 25)."""
    leases = Moving(ONE, ENDED, looks=looks)
    with pytest.raises(ConfigError, match="shard s has ended"):
        change(leases, "s")
    assert leases.read() == [ENDED]


@pytest.mark.parametrize(
    ("owner", "why"), [("b/1", "belongs to b/1"), (None, "belongs to no runner")]
)
def test_shard_goes_to_another_meanwhile(owner: str | None, why: str) -> None:
    """Release and take don't apply to a new owner; a reset does to any owner."""
    gone = ONE._replace(owner=owner, counter=8)
    for change in (release, take):
        leases = Moving(ONE, gone)
        with pytest.raises(ConfigError, match=f"has just changed owner and now {why}"):
            change(leases, "s")
        assert leases.read() == [gone]
    leases = Moving(ONE, gone, MOVED._replace(owner="b/1", counter=9))
    reset(leases, "s")
    assert leases.read() == [Lease("s", ("p",), counter=10)]


def test_release_that_is_asked_twice() -> None:
    """The counter moves once, as a second move would look like a renewal (issue 25)."""
    leases = MemoryLeases()
    leases.add([ONE, ONE._replace(shard="t", claimant="b/1")])
    asked = [
        ONE._replace(counter=8, claimant=""),
        ONE._replace(shard="t", claimant="b/1"),
    ]
    for _ in range(2):
        release(leases, "s")
        release(leases, "t")
        assert leases.read() == asked


def test_end_of_a_name_that_several_have() -> None:
    """A full name is that of its shard alone; an ambiguous suffix is refused."""
    leases = MemoryLeases()
    leases.add(map(Lease, ("a-s", "b-s", "s")))
    assert find_lease(leases, "s") == Lease("s")
    with pytest.raises(ConfigError, match=r"several shards end in '-s': a-s, b-s$"):
        find_lease(leases, "-s")
    with pytest.raises(ConfigError, match="no shard 's': no run has started yet"):
        find_lease(MemoryLeases(), "s")
