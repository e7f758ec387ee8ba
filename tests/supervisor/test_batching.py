from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etlstage.errors import ConfigError
from etlstage.supervisor import BatchPolicy, Timeouts
from etlstage.supervisor.batching import Window, ripe_at
from etlstage.supervisor.submission import Submission


def filled(*messages: bytes, at: float = 100.0) -> Submission:
    """Return a submission in which messages wait."""
    submission = Submission(lambda: None)
    submission.feed(list(messages), at)
    return submission


# --- window --------------------------------------------------------------------------


def test_fixed_window_stays() -> None:
    """Whatever the worker's speed is."""
    window = Window(5)
    window.started(0.0)
    window.answered(1000, 0.0)
    window.answered(1000, 999.0)

    assert window.size == 5


def test_window_opens_for_a_fast_worker() -> None:
    """Four times as wide, each time that a whole window was answered at once."""
    window = Window(None)
    window.started(0.0)
    seen = []
    for _ in range(12):
        window.answered(window.size, 0.001)
        seen.append(window.size)
        window.started(0.0)

    assert seen == [4, 16, 64, 256, 1024, 4096, 16384, *[65536] * 5]


def test_window_closes_for_a_slow_worker() -> None:
    """Half as wide, but never shut."""
    window = Window(None)
    window.size = 5
    seen = []
    for now in range(4):
        window.started(now)
        window.answered(window.size, now + 0.06)
        seen.append(window.size)

    assert seen == [2, 1, 1, 1]


def test_window_keeps_a_size_that_fits() -> None:
    """Between half a horizon and a whole one."""
    window = Window(None)
    window.size = 8
    window.started(0.0)
    window.answered(8, 0.03)

    assert window.size == 8


def test_window_is_judged_when_all_of_it_was_answered() -> None:
    """In how many pieces does not matter; the time since the first does."""
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


# --- when a batch is ripe --------------------------------------------------------------


def test_batch_waits_for_the_time_of_its_first_message() -> None:
    """Three seconds from when it was fed."""
    assert ripe_at(filled(b"1", b"2"), BatchPolicy(seconds=3)) == 103.0


@pytest.mark.parametrize(
    "policy", [BatchPolicy(size=2), BatchPolicy(bytes=4), BatchPolicy(size=1)]
)
def test_full_batch_is_ripe(policy: BatchPolicy) -> None:
    """By count or by bytes, at the bound itself."""
    assert ripe_at(filled(b"12", b"34"), policy) == 0.0


def test_batch_below_its_bounds_is_not_ripe() -> None:
    """One message, or one byte, is missing."""
    assert ripe_at(filled(b"12", b"34"), BatchPolicy(size=3, bytes=5)) == 101.0


def test_last_batch_is_ripe() -> None:
    """Nothing more will come."""
    submission = filled(b"1")
    submission.close()

    assert ripe_at(submission, BatchPolicy(seconds=3600)) == 0.0


# --- bounds that make no sense -----------------------------------------------------------


@pytest.mark.parametrize("name", ["size", "bytes", "seconds"])
@pytest.mark.parametrize("value", [0, -1])
def test_bounds_of_a_batch_are_positive(name: str, value: int) -> None:
    """The text names the key and the value."""
    with pytest.raises(ConfigError, match=rf"batch\.{name} must be positive, got"):
        BatchPolicy(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["message", "stop"])
def test_timeouts_are_positive(name: str) -> None:
    """A time of zero would stop every worker."""
    with pytest.raises(ConfigError, match=rf"timeout\.{name} must be positive, got 0"):
        Timeouts(**{name: 0})


def test_answers_may_take_for_ever() -> None:
    """None is no bound."""
    assert Timeouts(message=None).message is None
