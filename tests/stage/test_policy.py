"""Policies: what they refuse, and how a budget counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from etlstage.errors import ConfigError
from etlstage.messages import StageKind
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import (
    BatchPolicy,
    ErrorBudget,
    ErrorPolicy,
    Order,
    RecyclePolicy,
    ResourceLimits,
    Stage,
    Timeouts,
)


def stage(**settings: object) -> Stage:
    """Return a stage that is never started."""
    return Stage(name="t", command=("true",), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("budget", "failed", "received", "allowed"),
    [
        (ErrorBudget(), 0, 0, True),
        (ErrorBudget(), 1, 1, True),
        (ErrorBudget(), 2, 100, False),
        (ErrorBudget(), 2, 200, True),
        (ErrorBudget(share=0), 1, 1000, False),
        (ErrorBudget(share=1), 1000, 1000, True),
        (ErrorBudget(count=2, share=None), 2, 2, True),
        (ErrorBudget(count=2, share=None), 3, 10**6, False),
        (ErrorBudget(count=2, share=0.01), 2, 100, False),
        (ErrorBudget(count=None, share=None), 10**6, 10**6, True),
    ],
)
def test_budget(budget: ErrorBudget, failed: int, received: int, allowed: bool) -> None:
    """Until a hundred came in a share is one of a hundred."""
    assert budget.allows(failed, received) is allowed


@pytest.mark.parametrize(
    ("budget", "text"),
    [
        (ErrorBudget(), "1%"),
        (ErrorBudget(share=0.125), "12.5%"),
        (ErrorBudget(count=1, share=None), "1 message"),
        (ErrorBudget(count=20), "20 messages and 1%"),
        (ErrorBudget(share=None), "no bound"),
    ],
)
def test_budget_as_errors_show_it(budget: ErrorBudget, text: str) -> None:
    """In the words of the pipeline file."""
    assert str(budget) == text


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: BatchPolicy(size=0), "batch.size must be positive, got 0"),
        (lambda: Timeouts(start=0), "timeout.start must be positive, got 0"),
        (lambda: Timeouts(heartbeat=-1), "timeout.heartbeat must be positive, got -1"),
        (lambda: ErrorBudget(count=-1), "budget must be 0 or more, got -1"),
        (lambda: ErrorBudget(share=1.5), "budget must be 0% to 100%, got 150"),
        (
            lambda: ErrorPolicy(retries=-1),
            "on_error.retries must be 0 or more, got -1",
        ),
        (
            lambda: ErrorPolicy(then="drop"),  # type: ignore[arg-type]
            "on_error.then must be dead_letter or fail, got 'drop'",
        ),
        (lambda: ResourceLimits(memory=0), "limits.memory must be positive, got 0"),
        (lambda: ResourceLimits(core=-1), "limits.core must be 0 or more, got -1"),
        (lambda: ResourceLimits(nice=20), "limits.nice must be -20 to 19, got 20"),
        (
            lambda: RecyclePolicy(max_rss=0),
            "recycle.max_rss must be positive, got 0",
        ),
        (
            lambda: RecyclePolicy(variance=1),
            "recycle.variance must be 0 or more and below 1, got 1",
        ),
        (lambda: stage(key="/id"), "stage t: a key needs order: key"),
        (
            lambda: stage(order=Order.KEY, key="id"),
            "stage t: key must be a JSON pointer such as /id, got 'id'",
        ),
        (
            lambda: stage(
                kind=StageKind.EXTRACT,
                dialect=MarkerDialect(mode=Mode.PLAIN),
                timeout=Timeouts(heartbeat=1.0),
            ),
            "stage t: an extract stage has no timeout.heartbeat",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], object], text: str) -> None:
    """When it is made, with the setting, the value, and what was expected."""
    with pytest.raises(ConfigError) as caught:
        make()
    assert text in str(caught.value)


def test_no_core_dump_is_a_limit() -> None:
    """Zero is what most people want."""
    assert ResourceLimits(core=0).core == 0
