"""How many messages are sent in advance."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from etlstage.protocol.marker.blocks import Window


def test_fixed_window_stays() -> None:
    """Whatever the worker's speed."""
    window = Window(5)
    window.started(0.0)
    window.answered(1000, 0.0)
    window.answered(1000, 999.0)

    assert window.size == 5


def test_window_opens_for_a_fast_worker() -> None:
    """It grows fourfold each time a whole window is answered quickly."""
    window = Window(None)
    window.started(0.0)
    seen = []
    for _ in range(12):
        window.answered(window.size, 0.001)
        seen.append(window.size)
        window.started(0.0)

    assert seen == [4, 16, 64, 256, 1024, 4096, 16384, *[65536] * 5]


def test_window_closes_for_a_slow_worker() -> None:
    """It is halved, but never below one message."""
    window = Window(None)
    window.size = 5
    seen = []
    for now in range(4):
        window.started(now)
        window.answered(window.size, now + 0.06)
        seen.append(window.size)

    assert seen == [2, 1, 1, 1]


def test_window_keeps_a_size_that_fits() -> None:
    """If its answers take between half the horizon and the whole."""
    window = Window(None)
    window.size = 8
    window.started(0.0)
    window.answered(8, 0.03)

    assert window.size == 8


def test_window_is_judged_when_all_of_it_was_answered() -> None:
    """In any number of pieces; what counts is the time since the first message."""
    window = Window(None)
    window.size = 8
    window.started(0.0)
    window.answered(3, 0.01)
    window.answered(4, 0.02)
    assert window.size == 8
    window.answered(1, 0.06)

    assert window.size == 4


def test_time_without_work_is_not_counted() -> None:
    """A worker that had nothing to do is not slow."""
    window = Window(None)
    window.started(0.0)
    window.answered(1, 0.001)
    window.started(1000.0)
    window.answered(4, 1000.001)

    assert window.size == 16


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 100_000), st.floats(0, 1)), max_size=50),
)
def test_window_is_always_open(answers: list[tuple[int, float]]) -> None:
    """Never less than one, never more than 65536."""
    window = Window(None)
    now = 0.0
    for count, took in answers:
        window.answered(count, now := now + took)
        assert 1 <= window.size <= 65536
