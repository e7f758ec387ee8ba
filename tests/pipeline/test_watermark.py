from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from etlstage.pipeline.watermark import Watermark


def test_outcomes_in_order_raise_it() -> None:
    """As far as there is no gap."""
    mark = Watermark()
    assert mark.low == 0
    mark.rise(0, 3)
    mark.rise(3, 1)
    assert mark.low == 4


def test_gap_holds_it_down() -> None:
    """However much has its outcome behind it."""
    mark = Watermark()
    mark.rise(2, 5)
    mark.rise(8, 1)
    assert mark.low == 0
    mark.rise(0, 2)
    assert mark.low == 7
    mark.rise(7, 1)
    assert mark.low == 9


@given(st.lists(st.integers(1, 4), max_size=8), st.randoms())
def test_in_any_order_it_comes_to_the_end(sizes: list[int], random: Random) -> None:
    """And is never above a message without an outcome."""
    places = [(sum(sizes[:n]), size) for n, size in enumerate(sizes)]
    random.shuffle(places)
    mark = Watermark()
    done: set[int] = set()
    for start, size in places:
        mark.rise(start, size)
        done.update(range(start, start + size))
        assert done.issuperset(range(mark.low))
        assert mark.low not in done
