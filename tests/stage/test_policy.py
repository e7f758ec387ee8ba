"""Policies: what they refuse, and how a budget counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from etlstage.errors import ConfigError
from etlstage.stage import (
    BatchPolicy,
    ErrorBudget,
    ErrorPolicy,
    Order,
    PoolPolicy,
    RecyclePolicy,
    ResourceLimits,
    RestartPolicy,
    Stage,
    Timeouts,
)


def stage(**settings: object) -> Stage:
    """Return a stage that is never started."""
    return Stage(name="t", worker=("true",), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("budget", "failed", "received", "allowed"),
    [
        (ErrorBudget(share=0.01), 0, 0, True),
        (ErrorBudget(share=0.01), 1, 1, True),
        (ErrorBudget(share=0.01), 2, 100, False),
        (ErrorBudget(share=0.01), 2, 200, True),
        (ErrorBudget(share=0), 1, 1000, False),
        (ErrorBudget(share=1), 1000, 1000, True),
        (ErrorBudget(count=2), 2, 2, True),
        (ErrorBudget(count=2), 3, 10**6, False),
        (ErrorBudget(count=2, share=0.01), 2, 100, False),
        (ErrorBudget(), 10**6, 10**6, True),
    ],
)
def test_budget(budget: ErrorBudget, failed: int, received: int, allowed: bool) -> None:
    """Before a hundred messages have arrived, a share is one of a hundred."""
    assert budget.allows(failed, received) is allowed


@pytest.mark.parametrize(
    ("budget", "text"),
    [
        (ErrorBudget(share=0.01), "1%"),
        (ErrorBudget(share=0.125), "12.5%"),
        (ErrorBudget(count=1), "1 message"),
        (ErrorBudget(count=20, share=0.01), "20 messages and 1%"),
        (ErrorBudget(), "unlimited"),
    ],
)
def test_budget_as_errors_show_it(budget: ErrorBudget, text: str) -> None:
    """In the words of the pipeline file."""
    assert str(budget) == text


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: BatchPolicy(size=0), "batch.size: expected 1 or more, got 0"),
        (lambda: BatchPolicy(bytes=-1), "batch.bytes: expected more than 0, got -1"),
        (lambda: BatchPolicy(seconds=0), "batch.seconds: expected more than 0, got 0"),
        (lambda: Timeouts(start=0), "timeout.start: expected more than 0, got 0"),
        (lambda: Timeouts(message=0), "timeout.message: expected more than 0, got 0"),
        (lambda: Timeouts(stop=0), "timeout.stop: expected more than 0, got 0"),
        (
            lambda: Timeouts(heartbeat=-1),
            "timeout.heartbeat: expected more than 0, got -1",
        ),
        (
            lambda: ErrorBudget(count=-1),
            "on_error.budget.count: expected 0 or more, got -1",
        ),
        (
            lambda: ErrorBudget(share=1.5),
            "on_error.budget.share: expected a share such as 1% or 0.5%, up to 100%, got 1",
        ),
        (
            lambda: ErrorPolicy(retries=-1),
            "on_error.retries: expected 0 or more, got -1",
        ),
        (
            lambda: ErrorPolicy(then="drop"),  # type: ignore[arg-type]
            "on_error.then: unknown outcome 'drop', expected 'dead_letter' or",
        ),
        (
            lambda: ResourceLimits(memory=0),
            "limits.memory: expected more than 0, got 0",
        ),
        (lambda: ResourceLimits(core=-1), "limits.core: expected more than 0, got -1"),
        (lambda: ResourceLimits(nice=20), "limits.nice: expected 19 or less, got 20"),
        (
            lambda: RecyclePolicy(max_rss=0),
            "recycle.max_rss: expected more than 0, got 0",
        ),
        (
            lambda: RecyclePolicy(variance=1),
            "recycle.variance: expected a share such as 1% or 0.5%, below 100%, got 1",
        ),
        (
            lambda: RestartPolicy(policy="always"),  # type: ignore[arg-type]
            "restart.policy: unknown policy 'always', expected 'permanent' or",
        ),
        (lambda: RestartPolicy(max=-1), "restart.max: expected 0 or more, got -1"),
        (lambda: RestartPolicy(within=0), "restart.within: expected more than 0, got"),
        (lambda: RestartPolicy(delay=0), "restart.delay: expected more than 0, got 0"),
        (
            lambda: RestartPolicy(max_delay=-1),
            "restart.max_delay: expected more than 0, got -1",
        ),
        (
            lambda: RestartPolicy(never_on=frozenset({256})),
            "restart.never_on[0]: expected 255 or less, got 256",
        ),
        (
            lambda: ErrorPolicy(then="fail", budget=ErrorBudget(count=1)),
            "on_error.budget: needs then: dead_letter",
        ),
        (
            lambda: stage(timeout=5),
            "stage t: timeout: expected Timeouts, or a mapping of start, message,",
        ),
        (
            lambda: PoolPolicy(min=3, max=2),
            "workers.min: must be no more than workers.max (2), got 3",
        ),
        (lambda: PoolPolicy(grow_at=0), "workers.grow_at: expected more than 0, got 0"),
        (lambda: stage(workers=[2]), "workers: expected PoolPolicy, or a mapping of"),
        (lambda: stage(workers=1001), "stage t: workers: expected 1000 or less"),
        (
            lambda: stage(order=Order.KEY, key="id"),
            "stage t: key: expected a JSON pointer such as /id, got 'id'",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], object], text: str) -> None:
    """The error names the setting, the value, and what was expected."""
    with pytest.raises(ConfigError) as caught:
        make()
    assert text in str(caught.value)


def test_no_bound_goes_with_any_end() -> None:
    """A caller that judges failures itself may remove the budget of any policy."""
    policy = replace(ErrorPolicy(then="fail"), budget=ErrorBudget())
    assert (policy.then, str(policy.budget)) == ("fail", "unlimited")


def test_no_core_dump_is_a_limit() -> None:
    """Zero is what most people want."""
    assert ResourceLimits(core=0).core == 0


@pytest.mark.parametrize(
    ("workers", "pool", "text"),
    [
        (3, PoolPolicy(min=3, max=3), "3"),
        ("3", PoolPolicy(min=3, max=3), "3"),
        ({"max": 8}, PoolPolicy(min=1, max=8), "1 to 8"),
        (PoolPolicy(min=0, max=2), PoolPolicy(min=0, max=2), "0 to 2"),
    ],
)
def test_number_of_workers_is_a_pool_that_does_not_vary(
    workers: object, pool: PoolPolicy, text: str
) -> None:
    """A number is the short form of two bounds."""
    made = stage(workers=workers).pool
    assert (made, str(made)) == (pool, text)
    assert made.varies == (made.min < made.max)


@pytest.mark.parametrize(
    ("restart", "failed", "status", "wanted"),
    [
        (RestartPolicy(), False, 0, True),
        (RestartPolicy(policy="transient"), False, 0, False),
        (RestartPolicy(policy="transient"), True, 1, True),
        (RestartPolicy(policy="temporary"), True, 1, False),
        (RestartPolicy(never_on=frozenset({3})), True, 3, False),
    ],
)
def test_restart(
    restart: RestartPolicy, *, failed: bool, status: int, wanted: bool
) -> None:
    """A status in ``never_on`` means that a restart won't help."""
    assert restart.wanted(failed=failed, status=status) is wanted


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (BatchPolicy(size=1, seconds=0.5), "up to 1 message, 1MiB or 500ms"),
        (
            Timeouts(start=None, stop=2),
            "never to be ready, 5m for an answer, 2s to stop",
        ),
        (
            RestartPolicy(policy="transient", max=3, within=90),
            "transient, up to 3 without progress in 90s",
        ),
    ],
)
def test_policy_in_a_line(policy: object, text: str) -> None:
    """As etlstage plan shows it."""
    assert str(policy) == text
