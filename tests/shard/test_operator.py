"""What an operator does to leases while their owners move them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from etlstage.errors import ConfigError
from etlstage.shard.lease import Lease
from etlstage.shard.operator import find_lease, release, reset, take
from etlstage.shard.table import MemoryLeases

pytestmark = pytest.mark.core

ONE = Lease("s", ("p",), None, False, "a/0", 7, 2)
MOVED = ONE._replace(position='["9", 0]', counter=8)
ENDED = ONE._replace(position='["SHARD_END", 0]', ended=True, counter=8)


class Moving(MemoryLeases):
    """Leases of which one is moved when it has been looked at."""

    def __init__(self, row: Lease, *later: Lease, looks: int = 1) -> None:
        super().__init__()
        self.add([row])
        self._later = [*later]
        self._looks = looks

    def read(self) -> list[Lease]:
        """Return it as it was just before."""
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
    """It stays, unless it is to be forgotten (issue 25)."""
    leases = Moving(ONE, MOVED, looks=looks)
    assert change(leases, "s").owner == "a/0"
    assert leases.read() == [after]


@pytest.mark.parametrize("looks", [1, 2])
@pytest.mark.parametrize("change", [release, take])
def test_shard_ends_meanwhile(
    change: Callable[[MemoryLeases, str], Lease], looks: int
) -> None:
    """It is not taken up behind its end (issue 25)."""
    leases = Moving(ONE, ENDED, looks=looks)
    with pytest.raises(ConfigError, match="shard s has ended"):
        change(leases, "s")
    assert leases.read() == [ENDED]


@pytest.mark.parametrize(
    ("owner", "why"), [("b/1", "gone to b/1"), (None, "gone to no runner")]
)
def test_shard_goes_to_another_meanwhile(owner: str | None, why: str) -> None:
    """Of the new owner nothing was asked; what is forgotten is so whoever has it."""
    gone = ONE._replace(owner=owner, counter=8)
    for change in (release, take):
        leases = Moving(ONE, gone)
        with pytest.raises(ConfigError, match=f"shard s has just {why}"):
            change(leases, "s")
        assert leases.read() == [gone]
    leases = Moving(ONE, gone, MOVED._replace(owner="b/1", counter=9))
    reset(leases, "s")
    assert leases.read() == [Lease("s", ("p",), counter=10)]


def test_release_that_is_asked_twice() -> None:
    """Its lease moves once: it would seem to be renewed by its owner (issue 25)."""
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
    """A whole name is that shard's alone."""
    leases = MemoryLeases()
    leases.add(map(Lease, ("a-s", "b-s", "s")))
    assert find_lease(leases, "s") == Lease("s")
    with pytest.raises(ConfigError, match="several shards end in '-s'"):
        find_lease(leases, "-s")
