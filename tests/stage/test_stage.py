"""A stage: what contradicts itself is refused, and what is left out is decided."""

from __future__ import annotations

import re
from typing import Any

import pytest

from etlstage.errors import ConfigError
from etlstage.messages import StageKind
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import Order, Stage, Timeouts

PLAIN = MarkerDialect(mode=Mode.PLAIN)


def stage(**settings: object) -> Stage:
    """Return a stage that is never started."""
    values: dict[str, Any] = {"name": "t", "command": ("true",), **settings}
    return Stage(**values)


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
            "stage t: command: expected a program and its arguments, got an empty list",
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


def test_all_that_is_wrong_is_told() -> None:
    """At once."""
    with pytest.raises(ConfigError) as refused:
        stage(workers=0, key="/id")
    assert len(refused.value.problems) == 2


def test_key_belongs_to_an_order() -> None:
    """Then it is fine."""
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
