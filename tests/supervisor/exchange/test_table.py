"""Which exchange numbers are open, and which have ended."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from etlstage.supervisor.exchange.exchange import Exchange
from etlstage.supervisor.exchange.submission import Submission
from etlstage.supervisor.exchange.table import OpenRange, Table

CALLER = Submission(lambda: None)


def opened(*counts: int) -> Table:
    """Return a table with ranges of these sizes, numbered from 1."""
    table, first = Table(), 1
    for since, count in enumerate(counts):
        exchange = Exchange(CALLER, 0, [b""] * count, 0)
        table.add(OpenRange(first, count, exchange, float(since)))
        first += count
    return table


def numbers(table: Table) -> list[int]:
    """Return all open numbers."""
    return [number for range_ in table.ranges for number in range_.numbers]


def end(table: Table, first: int, count: int = 1) -> list[tuple[int, int]]:
    """End numbers; return the runs of those that were open."""
    return [(part.first, part.many) for part in table.end(first, count)]


def test_a_whole_range_ends_at_once() -> None:
    """It is one part, and removed."""
    table = opened(3, 2)

    assert end(table, 1, 3) == [(1, 3)]

    assert (numbers(table), table.count) == ([4, 5], 2)
    assert len(table.ranges) == 1


def test_numbers_end_at_the_front_of_a_range() -> None:
    """The rest stays open."""
    table = opened(3)

    assert end(table, 1, 2) == [(1, 2)]

    assert numbers(table) == [3]
    assert [range_.began for range_ in table.ranges] == [1]


def test_numbers_that_end_in_the_middle_are_skipped_by_the_front() -> None:
    """Numbers before and after them stay open."""
    table = opened(4)

    assert end(table, 2, 2) == [(2, 2)]
    assert numbers(table) == [1, 4]
    assert end(table, 1) == [(1, 1)]

    assert (numbers(table), table.count) == ([4], 1)
    assert end(table, 1, 9) == [(4, 1)]
    assert (table.count, len(table.ranges)) == (0, 0)


def test_what_ends_twice_ends_once() -> None:
    """An end of what was never open, or has ended, is late and ignored."""
    table = opened(5)
    end(table, 3)

    assert end(table, 3) == []
    assert end(table, 2, 3) == [(2, 1), (4, 1)]
    assert end(table, 9) == []
    assert end(Table(), 1) == []


def test_a_run_of_ends_goes_through_several_ranges() -> None:
    """It gives one part for each of them."""
    table = opened(2, 2, 2)

    assert end(table, 2, 4) == [(2, 1), (3, 2), (5, 1)]

    assert numbers(table) == [1, 6]


def test_a_number_is_found_as_long_as_it_is_open() -> None:
    """Together with the range that it was opened in."""
    table = opened(1, 3)
    first, second = table.ranges
    end(table, 3)

    found = [table.find(number) for number in range(6)]

    assert found == [None, first, second, None, second, None]


def test_what_was_opened_last_is_taken_back() -> None:
    """For an event that could not be sent."""
    table = opened(1, 3)

    assert table.pop().first == 2

    assert (numbers(table), table.count) == ([1], 1)


def test_nothing_is_open_in_a_table_that_was_cleared() -> None:
    """For a worker that is lost."""
    table = opened(1, 3)
    table.clear()
    assert (numbers(table), table.count) == ([], 0)


@given(
    st.lists(st.integers(1, 5), max_size=6),
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6))),
)
def test_each_number_ends_once(counts: list[int], ends: list[tuple[int, int]]) -> None:
    """Whatever ends, in any order: the same as with a set of numbers."""
    table, model = opened(*counts), set(range(1, sum(counts) + 1))
    for first, count in ends:
        wanted = sorted(model & set(range(first, first + count)))
        parts = table.end(first, count)
        assert [n for p in parts for n in range(p.first, p.first + p.many)] == wanted
        assert all(part.many for part in parts)
        model.difference_update(wanted)
        assert numbers(table) == sorted(model)
        assert table.count == len(model)
        assert all(range_.numbers for range_ in table.ranges)
