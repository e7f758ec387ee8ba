"""When a worker is restarted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etlstage.stage import RestartPolicy
from etlstage.supervisor.lifecycle.worker import Tally, wait_time

POLICY = RestartPolicy(max=3, within=10.0, delay=0.5, max_delay=3.0)


@pytest.mark.parametrize(
    ("attempt", "delay"),
    [(0, 0.0), (1, 0.5), (2, 1.0), (3, 2.0), (4, 3.0), (9999, 3.0)],
)
def test_delay_doubles_up_to_its_cap(attempt: int, delay: float) -> None:
    """The first restart does not wait; a very high number doesn't overflow."""
    assert wait_time(attempt, POLICY) == delay


@given(st.integers(1, 50), st.floats(0, 1))
def test_jitter_takes_at_most_half_away(attempt: int, jitter: float) -> None:
    """Workers that died together are spread over half of the delay."""
    full = wait_time(attempt, POLICY)

    assert full / 2 <= wait_time(attempt, POLICY, jitter=jitter) <= full


def test_negative_attempt_is_refused() -> None:
    """It is a bug in the caller."""
    with pytest.raises(ValueError, match="attempt must be zero or positive, got -1"):
        wait_time(-1, POLICY)


def test_restarts_without_progress_are_bounded() -> None:
    """Three in a row, with growing delays; then the worker is given up."""
    tally = Tally(POLICY)
    delays = [tally.next_delay(n, useful=False, jitter=0.0) for n in range(4)]

    assert delays == [0.0, 0.5, 1.0, None]
    assert (len(tally), tally.span(3.0)) == (3, 3.0)


def test_useful_start_wipes_the_slate() -> None:
    """Earlier restarts do not count any more, and the next one does not wait."""
    tally = Tally(POLICY)
    for _ in range(3):
        tally.next_delay(0.0, useful=False, jitter=0.0)

    assert tally.next_delay(1.0, useful=True, jitter=0.0) == 0.0
    assert tally.next_delay(1.0, useful=False, jitter=0.0) == 0.5


def test_forgiven_start_wipes_the_slate() -> None:
    """A message is to blame; the delay depends on how often that message has failed."""
    tally = Tally(POLICY)
    for _ in range(3):
        tally.next_delay(0.0, useful=False, jitter=0.0)

    assert [tally.forgive(n, jitter=0.0) for n in range(4)] == [0.0, 0.0, 0.5, 1.0]
    assert len(tally) == 0
    assert Tally(RestartPolicy(max=0)).forgive(1, jitter=0.0) is None


def test_restarts_are_forgotten_with_time() -> None:
    """Those that are longer ago than ``within`` don't count."""
    tally = Tally(POLICY)
    for _ in range(3):
        tally.next_delay(0.0, useful=False, jitter=0.0)

    assert tally.next_delay(10.0, useful=False, jitter=0.0) is None
    assert tally.next_delay(10.1, useful=False, jitter=0.0) == 0.0
    assert tally.span(10.1) == 0.0


def test_no_restarts_at_all() -> None:
    """Not even after a useful start."""
    tally = Tally(RestartPolicy(max=0))

    assert tally.next_delay(0.0, useful=True, jitter=0.0) is None


@pytest.mark.parametrize(
    ("policy", "failed", "wanted"),
    [
        ("permanent", False, True),
        ("permanent", True, True),
        ("transient", False, False),
        ("transient", True, True),
        ("temporary", False, False),
        ("temporary", True, False),
    ],
)
def test_policy_decides_who_is_started_again(
    policy: str, failed: bool, wanted: bool
) -> None:
    """Every worker, those that failed, or none."""
    assert RestartPolicy(policy=policy).wanted(failed=failed, status=1) is wanted  # type: ignore[arg-type]


def test_exit_status_can_forbid_a_restart() -> None:
    """A worker can report that its configuration is wrong."""
    policy = RestartPolicy(never_on=frozenset({78}))

    assert not policy.wanted(failed=True, status=78)
    assert policy.wanted(failed=True, status=1)
