"""How mappings choose the journal of a message."""

from __future__ import annotations

from typing import Any

import pytest

from etlstage.sequencing import (
    EmptyListResponse,
    Fnv1a,
    JournalSpec,
    Mapping,
    fnv1a32,
    modulo,
    random,
    rendezvous,
)
from tests.sequencing.vectors import VECTORS


def partitions(count: int) -> list[JournalSpec]:
    """Return journals with the names that the vectors use."""
    return [JournalSpec(f"a/topic/part-{n:03}", "text/csv") for n in range(count)]


def key(message: str, hasher: Fnv1a) -> None:
    """Hash the whole message, in two pieces."""
    hasher.write(message.encode()[:3])
    hasher.write(message.encode()[3:])


ROWS = [(row, n) for row in VECTORS["mapping"] for n in (1, 2, 3, 8, 400, 443, 500)]


@pytest.mark.parametrize(("row", "count"), ROWS)
def test_journals_are_those_of_the_real_package(
    row: dict[str, Any], count: int
) -> None:
    """Hashes and mappings agree for any key and number of journals."""
    journals = partitions(count)
    assert fnv1a32(row["key"].encode()) == row["fnv1a32"]
    for make, name in (modulo, "modulo"), (rendezvous, "rendezvous"):
        target = make(key, lambda: journals)(row["key"])
        assert target == (row[f"{name}_{count}"], "text/csv")


def test_hashes_of_names_are_kept_while_the_answer_is_the_same_object() -> None:
    """A changed list that is the same object is used with the hashes of the old one."""
    now = [partitions(2)]
    map_ = rendezvous(key, lambda: now[0])
    assert map_("It always")[0].endswith("001")
    now[0][:] = [JournalSpec("x", "y"), JournalSpec("z", "y")]
    assert map_("It always")[0] == "z"
    now[0] = partitions(1)
    assert map_("It always")[0].endswith("000")


def test_first_of_equals_is_taken() -> None:
    """With equal hashes the first journal wins; no broker has two of one name."""
    twins = [JournalSpec("a", "first"), JournalSpec("a", "second")]
    assert rendezvous(key, lambda: twins)("k") == ("a", "first")


def test_any_journal() -> None:
    """A chooser decides; without one every journal is chosen at times."""
    map_ = random(lambda: journals, choose=lambda n: n - 1)
    journals = partitions(3)
    assert map_("k")[0].endswith("002")
    map_ = random(lambda: journals)
    assert {map_("k")[0] for _ in range(200)} == {one.name for one in journals}


@pytest.mark.parametrize(
    "mapping",
    [modulo(key, list), rendezvous(key, list), random(list)],
    ids=["modulo", "rendezvous", "random"],
)
def test_no_journal_to_select(mapping: Mapping) -> None:
    """The error is one after which the caller may try again later."""
    with pytest.raises(EmptyListResponse, match=r"^empty ListResponse$"):
        mapping("k")
