from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etlstage.supervisor.stderr.throttle import Throttle

STEPS = st.lists(st.tuples(st.floats(0, 3), st.integers(0, 10_000)), max_size=200)


def passed(throttle: Throttle, count: int, now: float, size: int = 80) -> int:
    """Return how many of so many lines pass."""
    return sum(throttle.allows(size, now) for _ in range(count))


def test_burst() -> None:
    """After a silence, and again after the next one."""
    throttle = Throttle(rate=10, burst=100)
    assert passed(throttle, 1000, now=5.0) == 100
    assert passed(throttle, 1000, now=15.0) == 100


def test_flood_passes_in_blocks() -> None:
    """Once it is closed it opens when there is a second's worth, not line by line."""
    throttle = Throttle(rate=10, burst=100)
    passed(throttle, 1000, now=0.0)
    assert [passed(throttle, 100, now=n / 10) for n in range(1, 21)] == [
        *([0] * 9 + [10]),
        *([0] * 9 + [10]),
    ]


def test_slow_writer_is_never_cut() -> None:
    """Below the rate nothing is left out."""
    throttle = Throttle(rate=10, burst=1)
    assert all(throttle.allows(80, now=n * 0.11) for n in range(1000))


def test_long_lines_cost_more() -> None:
    """Otherwise lines of 8 KiB fill the disk."""
    throttle = Throttle(rate=10, burst=100)
    assert passed(throttle, 1000, now=0.0, size=8192) == 12


def test_line_longer_than_everything_passes_when_there_is_room() -> None:
    """It is not left out forever."""
    throttle = Throttle(rate=1, burst=2)
    assert throttle.allows(8192, now=0.0)
    assert not throttle.allows(80, now=0.0)


def test_slow_rate_opens_again() -> None:
    """A second's worth may be less than a line."""
    throttle = Throttle(rate=0.1, burst=1)
    assert [throttle.allows(80, now=n) for n in (0.0, 1.0, 11.0)] == [True, False, True]


def test_clock_that_goes_back_gives_nothing() -> None:
    """The time may come from anywhere."""
    throttle = Throttle(rate=10, burst=10)
    passed(throttle, 100, now=100.0)
    assert passed(throttle, 100, now=0.0) == 0
    assert passed(throttle, 100, now=100.5) == 0
    assert passed(throttle, 100, now=101.0) == 10


@given(STEPS, st.floats(0.1, 1000), st.floats(1, 1000))
def test_never_more_than_burst_and_rate(
    steps: list[tuple[float, int]], rate: float, burst: float
) -> None:
    """However the lines come, in lines and in bytes."""
    throttle = Throttle(rate=rate, burst=burst)
    now, lines, cost = 0.0, 0, 0.0
    for wait, size in steps:
        now += wait
        if throttle.allows(size, now):
            lines += 1
            cost += min(burst, max(1.0, size / 1024))
    assert lines <= cost <= (burst + rate * now) * 1.000001


@pytest.mark.parametrize(("rate", "burst"), [(0, 1), (-1, 1), (1, 0), (1, 0.5)])
def test_bad_settings(rate: float, burst: float) -> None:
    """Nothing would ever pass."""
    with pytest.raises(ValueError, match="rate must be positive and burst 1 or more"):
        Throttle(rate=rate, burst=burst)
