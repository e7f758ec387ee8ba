"""Stages: contradictions are refused, and settings left out get a default."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest

from etlstage.errors import ConfigError
from etlstage.messages import StageKind
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import Order, Stage, Timeouts, WorkerProgram
from tests.staged import staged

PLAIN = MarkerDialect(mode=Mode.PLAIN)


def stage(**settings: object) -> Stage:
    """Return a stage that is never started."""
    return staged(("true",), **settings)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"key": "/id"}, "stage t: key: needs order: key"),
        (
            {"kind": StageKind.EXTRACT},
            "stage t: mode single does not fit kind extract",
        ),
        (
            {
                "kind": StageKind.EXTRACT,
                "dialect": PLAIN,
                "timeout": Timeouts(heartbeat=1),
            },
            "stage t: timeout.heartbeat: is not for an extract stage, whose",
        ),
        (
            {"command": ()},
            "worker.command: expected a program and its arguments, got an empty list",
        ),
        ({"workers": 0}, "stage t: workers: expected 1 or more, got 0"),
        ({"name": ""}, "stage: name: expected a name of up to 64 letters"),
    ],
)
def test_stage_that_can_not_be_is_refused(settings: dict[str, Any], text: str) -> None:
    """The text names the stage, the key, and what is wrong."""
    pattern = f"^{re.escape(text)}"
    with pytest.raises(ConfigError, match=pattern):
        stage(**settings)


def test_all_that_is_wrong_is_reported() -> None:
    """One error lists every problem."""
    with pytest.raises(ConfigError) as refused:
        stage(workers=0, key="/id")
    assert len(refused.value.problems) == 2


def test_key_belongs_to_an_order() -> None:
    """With ``order: key`` a key is accepted."""
    assert stage(key="/id", order=Order.KEY).key == "/id"


def test_number_of_workers_is_a_pool() -> None:
    """It neither grows nor shrinks."""
    pool = stage(workers=3).pool
    assert (pool.min, pool.max) == (3, 3)
    assert stage().pool.max == 1


def test_extractor_runs_when_it_is_asked() -> None:
    """There is no worker before that, and never two."""
    pool = stage(kind=StageKind.EXTRACT, dialect=PLAIN).pool
    assert (pool.min, pool.max) == (0, 1)


@pytest.mark.parametrize("words", [["cat", "-u"], ("cat", "-u"), deque(["cat", "-u"])])
def test_command_is_any_sequence_of_texts(words: Sequence[str]) -> None:
    """It is kept as a tuple, whatever becomes of the list (issue 22)."""
    assert Stage(name="t", worker=words).program.command == ("cat", "-u")


@pytest.mark.parametrize("words", ["cat -u", b"cat -u", {"cat"}, iter(["cat"]), 7])
def test_command_that_is_no_sequence_of_texts(words: object) -> None:
    """Of a plain text, the first letter would be the program."""
    with pytest.raises(ConfigError, match=r"such as \[python, clean.py\], got"):
        WorkerProgram(command=words)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"such as \[python, clean.py\], got"):
        Stage(name="t", worker=words)  # type: ignore[arg-type]


def test_type_checkers_take_a_list_for_a_command() -> None:
    """
    The manual and the error for a plain text write a list (issue 22).

    The check is mypy's, of this file: it must accept a list, and must complain about
    items that are not text.
    """
    words: list[str] = ["python", "clean.py"]
    Stage(name="clean", worker=words)
    with pytest.raises(ConfigError):
        Stage(name="clean", worker=[1])  # type: ignore[list-item]


def test_repr_shows_what_differs_from_the_defaults() -> None:
    """With every setting it would add a kilobyte to each traceback (issue 22)."""
    assert repr(stage()) == "Stage(name='t', worker=WorkerProgram(command=('true',)))"
    changed = stage(timeout=Timeouts(stop=2), env={"A": "b"}, workers=1)
    assert repr(changed) == (
        "Stage(name='t', worker=WorkerProgram(command=('true',), env={'A': 'b'}),"
        " timeout=Timeouts(stop=2))"
    )
    assert "eom" not in repr(stage(dialect=MarkerDialect(mode=Mode.BATCH_WORKER)))
