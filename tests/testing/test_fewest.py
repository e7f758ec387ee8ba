from __future__ import annotations

import pytest

from etlstage.testing.fuzzing.shortening import fewest

pytestmark = pytest.mark.core


def test_nothing_is_left_that_is_not_needed() -> None:
    """Needed items may be far apart (issue 12)."""
    for needed in ({0}, {99}, {3, 50}, {0, 1, 99}, set[int]()):
        assert fewest(range(100), needed.issubset) == sorted(needed)
    assert fewest([], lambda _: True) == []


def test_little_has_to_be_tried() -> None:
    """Each try may be the start of a process (issue 12)."""
    tried: list[list[int]] = []

    def enough(left: list[int]) -> bool:
        tried.append(left)
        return 3 in left

    assert fewest(range(1000), enough) == [3]
    assert len(tried) < 25
    assert tried[0] == [*range(500)]  # what comes last is left out first
