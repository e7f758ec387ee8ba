"""Texts and attributes of errors."""

from __future__ import annotations

import pytest

from etlstage.errors import (
    InputDamaged,
    RepliesDoubtful,
    WorkerRefusal,
    guess,
    os_reason,
)


def test_close_word_is_what_was_meant() -> None:
    """Only the closest one, and only if it is close."""
    assert guess("wokers", ["window", "workers"]) == " (did you mean 'workers'?)"
    assert guess("wokers", ["mode"]) == ""
    assert guess("wokers", []) == ""


def test_reason_is_a_part_of_a_sentence() -> None:
    """It is the system's reason, or else the text of the exception."""
    assert os_reason(OSError(28, "No space left on device")) == (
        "no space left on device"
    )
    assert os_reason(OSError("Gone")) == "gone"


def test_refusal_has_the_words_of_the_worker() -> None:
    """It has the worker's code, too."""
    error = WorkerRefusal("stage t: no", stage="t", code=42, reason="no")
    assert (error.stage, error.code, error.reason) == ("t", 42, "no")


def test_damage_that_is_passed_over_keeps_its_bytes() -> None:
    """They are needed for its dead letter."""
    error = InputDamaged("stage in: no message", stage="in", data=b"ab")
    assert (error.stage, error.data) == ("in", b"ab")


@pytest.mark.parametrize(
    ("count", "words"), [(1, "1 message"), (4000, "4,000 messages")]
)
def test_doubtful_messages_are_counted(count: int, words: str) -> None:
    """It is not known which of them have the replies of others."""
    error = RepliesDoubtful(count, stage="t")
    assert str(error).startswith(f"stage t: results of {words} may be mismatched: ")
    assert error.stage == "t"
    worker = "stage t: worker t-1 (pid 7) exited with status 1"
    error = RepliesDoubtful(count, stage="t", failed=worker)
    text = f"{worker} soon after its last reply; results of {words} may be mismatched;"
    assert str(error).startswith(text)
