from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs
from structlog.typing import EventDict

import etlstage
from etlstage.telemetry import PrometheusMeter, StageMetrics


def values(meter: PrometheusMeter) -> dict[str, float]:
    """Return samples by name and labels, without ``stage="clean"`` and the prefix."""
    return {
        " ".join(
            [sample.name.removeprefix("etlstage_")]
            + [f"{k}={v}" for k, v in sample.labels.items() if (k, v) != CLEAN]
        ): sample.value
        for family in text_string_to_metric_families(meter.render())
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


CLEAN = ("stage", "clean")


def busy(metrics: StageMetrics) -> None:
    """Let everything happen once."""
    metrics.worker_started("clean-1")
    metrics.workers(1)
    metrics.waiting(7)
    metrics.in_flight("clean-1", 5)
    metrics.answered("clean-1", 2, 20, 300, 4000)
    metrics.took("clean-1", 0.25)
    metrics.stderr_lines("clean-1", 3)
    metrics.worker_failed("clean-1", "silent")
    metrics.worker_exited("clean-1", -9)
    metrics.restarted("clean-1")
    metrics.worker_started("clean-1")
    metrics.retried(5)
    metrics.failed(1)
    metrics.refused("clean-1", 2)
    for found in ({"json": 1}, {"json": 1, "where": 2}, {"json": 4, "where": 2}):
        metrics.mismatched(found)
    metrics.count_own("clean-1", "skipped", 4)
    metrics.noise("clean-1", 6)
    metrics.committed("clean-1", stored=True)
    metrics.committed("clean-1", stored=False)
    metrics.leases(3)
    metrics.behind("s", 8.0)
    metrics.behind("s", 1.5)


def test_everything() -> None:
    """Each metric, with its labels and value."""
    meter = PrometheusMeter()
    busy(StageMetrics(meter, "clean"))
    assert values(meter) == {
        "worker_starts_total worker=clean-1": 2,
        "worker_restarts_total worker=clean-1": 1,
        "worker_exits_total status=SIGKILL worker=clean-1": 1,
        "worker_failures_total reason=silent worker=clean-1": 1,
        "workers_running": 1,
        "exchanges_total worker=clean-1": 2,
        "messages_total worker=clean-1": 20,
        "input_bytes_total worker=clean-1": 300,
        "output_bytes_total worker=clean-1": 4000,
        "first_answer_seconds_sum worker=clean-1": 0.25,
        "first_answer_seconds_count worker=clean-1": 1,
        "messages_in_flight worker=clean-1": 0,
        "messages_waiting": 7,
        "messages_retried_total": 5,
        "messages_failed_total": 1,
        "refusals_total worker=clean-1": 2,
        "mismatches_total expect=json": 4,
        "mismatches_total expect=where": 2,
        "worker_counts_total metric=skipped worker=clean-1": 4,
        "stderr_lines_total worker=clean-1": 3,
        "noise_lines_total worker=clean-1": 6,
        "checkpoints_total outcome=stored worker=clean-1": 1,
        "checkpoints_total outcome=refused worker=clean-1": 1,
        "leases_held": 3,
        "shard_behind_seconds shard=s": 1.5,
    }


def test_table_lists_every_metric() -> None:
    """Metrics are listed by name and kind."""
    meter = PrometheusMeter()
    busy(StageMetrics(meter, "clean"))
    types = re.findall("# TYPE (.*) (.*)", meter.render())
    page = Path(etlstage.__file__).parent / "docs/reference/metrics.md"
    listed = re.findall(r"^\| `(\w+)` \| (\w+) \|", page.read_text(), re.MULTILINE)
    assert set(types) <= set(listed)  # the page also has those of pipelines


@pytest.mark.parametrize(
    ("status", "label"),
    [(0, "0"), (3, "3"), (-15, "SIGTERM"), (-40, "signal 40")],
)
def test_status(status: int, label: str) -> None:
    """Signals are shown by name."""
    meter = PrometheusMeter()
    StageMetrics(meter, "clean").worker_exited("clean-1", status)
    assert values(meter)[f"worker_exits_total status={label} worker=clean-1"] == 1


def test_counters_of_trouble_are_there_before_it() -> None:
    """The first failure is seen as an increase only if there was a 0."""
    meter = PrometheusMeter()
    metrics = StageMetrics(meter, "clean")
    assert values(meter)["messages_failed_total"] == 0
    assert values(meter)["messages_retried_total"] == 0
    metrics.worker_started("clean-1")
    assert values(meter)["worker_restarts_total worker=clean-1"] == 0


def test_supervisors_on_one_meter() -> None:
    """Those of one stage add up; another stage is kept apart."""
    meter = PrometheusMeter()
    first, second, other = (StageMetrics(meter, s) for s in ("clean", "clean", "b"))
    first.waiting(5)
    second.waiting(3)
    first.waiting(4)
    other.waiting(100)
    first.workers(2)
    second.workers(1)
    assert values(meter)["messages_waiting"] == 7
    assert values(meter)["messages_waiting stage=b"] == 100
    assert values(meter)["workers_running"] == 3


def test_end_of_a_stage_leaves_no_gauge_behind() -> None:
    """The values of other supervisors stay."""
    meter = PrometheusMeter()
    first, second = (StageMetrics(meter, "clean") for _ in range(2))
    for metrics in (first, second):
        metrics.waiting(5)
        metrics.workers(2)
        metrics.in_flight("clean-1", 4)
    first.close()
    first.close()
    seen = values(meter)
    assert seen["messages_waiting"] == 5
    assert seen["workers_running"] == 2
    assert seen["messages_in_flight worker=clean-1"] == 4


def test_worker_that_is_gone_holds_nothing() -> None:
    """Its gauge is reset; the next worker of its name starts from zero."""
    meter = PrometheusMeter()
    metrics = StageMetrics(meter, "clean")
    metrics.in_flight("clean-1", 4)
    metrics.worker_exited("clean-1", 1)
    assert values(meter)["messages_in_flight worker=clean-1"] == 0
    metrics.in_flight("clean-1", 3)
    assert values(meter)["messages_in_flight worker=clean-1"] == 3


def test_series_are_bounded() -> None:
    """Workers beyond a number count together: their names are not kept."""
    meter = PrometheusMeter()
    metrics = StageMetrics(meter, "clean")
    for n in range(1000):
        metrics.worker_started(f"clean-{n}")
        metrics.in_flight(f"clean-{n}", 1)
        metrics.worker_exited(f"clean-{n}", 0)
    seen = values(meter)
    assert len(seen) < 4000
    assert seen["worker_starts_total worker=clean-255"] == 1
    assert seen["worker_starts_total worker=other"] == 1000 - 256
    assert seen["worker_exits_total status=0 worker=other"] == 1000 - 256
    assert seen["messages_in_flight worker=other"] == 0


def test_no_meter() -> None:
    """Nothing is counted, and nothing fails."""
    metrics = StageMetrics(None, "clean")
    busy(metrics)
    metrics.close()
    assert repr(metrics) == "<StageMetrics 'clean' meter=None>"


class Broken:
    """A meter whose named methods fail."""

    def __init__(self, *parts: str) -> None:
        self.parts = parts
        self.calls = 0

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (it is any meter)
        def call(*_: object) -> Broken:
            self.calls += 1
            if name in self.parts:
                raise RuntimeError("no space left")
            return self

        return call


@pytest.mark.parametrize(
    "parts", [("gauge",), ("counter",), ("histogram",), ("add",), ("observe",)]
)
def test_broken_meter_is_logged_once(parts: Sequence[str]) -> None:
    """The stage continues without the metrics."""
    with capture_logs() as logs:
        metrics = StageMetrics(Broken(*parts), "clean")
        for _ in range(3):
            busy(metrics)
        metrics.close()
    assert logs == [
        {
            "event": "metrics are incomplete: the meter failed",
            "log_level": "warning",
            "stage": "clean",
            "error": "RuntimeError('no space left')",
        }
    ]


def test_meter_that_fails_from_the_start_is_not_asked_again() -> None:
    """Without instruments there is nothing to count with."""
    meter = Broken("gauge")
    with capture_logs():
        metrics = StageMetrics(meter, "clean")
        calls = meter.calls
        busy(metrics)
    assert meter.calls == calls


def test_log_that_is_gone_hurts_no_one_either() -> None:
    """Meter and log may be the same closed pipe."""

    def broken(logger: object, method: str, event: EventDict) -> EventDict:
        raise BrokenPipeError

    structlog.configure(processors=[broken])
    try:
        busy(StageMetrics(Broken("add"), "clean"))
    finally:
        structlog.reset_defaults()


class Asked:
    """A meter that records the names it is asked for."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def counter(self, name: str, description: str, labels: Mapping[str, str]) -> Asked:
        """Record the name."""
        self.names += [name]
        return self

    gauge = counter

    def histogram(
        self,
        name: str,
        description: str,
        labels: Mapping[str, str],
        bounds: Sequence[float],
    ) -> Asked:
        """Record the name."""
        return self.counter(name, description, labels)

    def add(self, amount: float, /) -> None:
        """Do nothing."""

    observe = add


def test_instruments_are_bound_once() -> None:
    """Frequent events don't ask the meter for instruments."""
    meter = Asked()
    metrics = StageMetrics(meter, "clean")
    for worker in ("clean-1", *(f"x-{n}" for n in range(300))):
        metrics.worker_started(worker)
    metrics.in_flight("clean-1", 1)
    meter.names.clear()
    for worker in ("clean-1", "x-299"):
        metrics.answered(worker, 1, 1, 1, 1)
        metrics.took(worker, 0.1)
        metrics.stderr_lines(worker, 1)
    metrics.in_flight("clean-1", 2)
    metrics.waiting(1)
    metrics.retried(1)
    assert meter.names == []
