from __future__ import annotations

import pytest

from etlstage.errors import ConfigError
from etlstage.stage import BatchPolicy, Timeouts
from etlstage.supervisor.exchange.batch import ripe_at
from etlstage.supervisor.exchange.submission import Submission


def filled(*messages: bytes, at: float = 100.0) -> Submission:
    """Return a submission in which messages wait."""
    submission = Submission(lambda: None)
    submission.feed(list(messages), at)
    return submission


# --- when a batch is ripe -------------------------------------------------------------


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


# --- bounds that make no sense --------------------------------------------------------


@pytest.mark.parametrize("name", ["size", "bytes", "seconds"])
@pytest.mark.parametrize("value", [0, -1])
def test_bounds_of_a_batch_are_positive(name: str, value: int) -> None:
    """The text names the key and the value."""
    with pytest.raises(ConfigError, match=rf"batch\.{name}: expected .*, got {value}"):
        BatchPolicy(**{name: value})


@pytest.mark.parametrize("name", ["message", "stop"])
def test_timeouts_are_positive(name: str) -> None:
    """A time of zero would stop every worker."""
    with pytest.raises(
        ConfigError, match=rf"timeout\.{name}: expected more than 0, got 0"
    ):
        Timeouts(**{name: 0})


def test_answers_may_take_for_ever() -> None:
    """None is no bound."""
    assert Timeouts(message=None).message is None
