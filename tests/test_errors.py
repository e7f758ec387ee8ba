"""Texts and attributes of errors."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any, Final

import pytest

from etlstage import errors
from etlstage.errors import (
    Attempt,
    ConfigError,
    EtlstageError,
    Excerpt,
    InputDamaged,
    RepliesDoubtful,
    WorkerRefusal,
    guess,
    os_reason,
)
from etlstage.testing.simulation import SimulationFailed
from etlstage.worker.kcl import LeaseLost, Throttled


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


KEYWORDS: Final = {
    "stage": "t",
    "index": 3,
    "code": 42,
    "reason": "no",
    "data": b"ab",
    "excerpts": [Excerpt("a: b", 1, 4)],
}
CLASSES: Final = [
    known
    for name in errors.__all__
    if isinstance(known := getattr(errors, name), type)
    and issubclass(known, EtlstageError)
]


def pickled(error: object) -> object:
    """Return an object as another process unpickles it."""
    return pickle.loads(pickle.dumps(error))  # noqa: S301 - our own


@pytest.mark.parametrize("copied", [copy.copy, pickled])
@pytest.mark.parametrize("known", CLASSES)
def test_error_is_the_same_in_another_process(
    known: type[EtlstageError], copied: Callable[[object], Any]
) -> None:
    """Its copy has its text and all its attributes (issue 22)."""
    taken = inspect.signature(known.__init__).parameters
    given = {name: value for name, value in KEYWORDS.items() if name in taken}
    error = known(2 if known is RepliesDoubtful else "no\nroom", **given)
    error.story, error.place = ("exited",), 3
    error.attempts = (Attempt("t-1", 7, "exited with status 1"),)
    again = copied(error)
    assert type(again) is known
    assert (str(again), again.args) == (str(error), error.args)
    assert vars(again) == vars(error)
    if isinstance(again, ConfigError):
        assert again.excerpts == (Excerpt("a: b", 1, 4),)


@pytest.mark.parametrize("copied", [copy.copy, pickled])
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            SimulationFailed(3, "lost a", iter(["0 s", "1 s"])),
            "seed 3: lost a\n  0 s\n  1 s",
        ),
        (Throttled("Throttling"), "the checkpoint was not stored: Throttling"),
        (LeaseLost("Shutdown", "it ended"), "the checkpoint was not stored: it ended"),
    ],
)
def test_error_of_the_kits_is_the_same_in_another_process(
    error: Exception, text: str, copied: Callable[[object], Any]
) -> None:
    """Its copy has its text and all its attributes (issue 22)."""
    again = copied(error)
    assert type(again) is type(error)
    assert str(again) == str(error) == text
    assert vars(again) == vars(error)
