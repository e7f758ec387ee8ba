from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from etlstage.errors import ConfigError
from etlstage.telemetry import Meter, OpenTelemetryMeter, StageMetrics


def collected(reader: InMemoryMetricReader) -> dict[str, Any]:
    """Return the real SDK's metrics by name."""
    data = reader.get_metrics_data()
    assert data is not None
    (resource,) = data.resource_metrics
    return {m.name: m for scope in resource.scope_metrics for m in scope.metrics}


@pytest.fixture
def reader() -> InMemoryMetricReader:
    """Return the reader that collects the metrics of ``meter``."""
    return InMemoryMetricReader()


@pytest.fixture
def meter(reader: InMemoryMetricReader) -> Meter:
    """Return a meter on the real SDK."""
    provider = MeterProvider(metric_readers=[reader], shutdown_on_exit=False)
    return OpenTelemetryMeter(provider.get_meter("test"))


def test_counter(meter: Meter, reader: InMemoryMetricReader) -> None:
    """Exporters append ``_total`` themselves; the unit is reported."""
    for labels in ({"stage": "a"}, {"stage": "b"}, {"stage": "a"}):
        meter.counter("in_bytes_total", "What came in.", labels).add(2)
    metric = collected(reader)["in_bytes"]
    assert (metric.unit, metric.description) == ("By", "What came in.")
    assert metric.data.is_monotonic
    assert {p.attributes["stage"]: p.value for p in metric.data.data_points} == {
        "a": 4,
        "b": 2,
    }


def test_gauge(meter: Meter, reader: InMemoryMetricReader) -> None:
    """Gauges go down, too, and several may change one."""
    for amount in (5, -2):
        meter.gauge("waiting", "", {}).add(amount)
    data = collected(reader)["waiting"].data
    assert not data.is_monotonic
    assert [p.value for p in data.data_points] == [3]


def test_histogram(meter: Meter, reader: InMemoryMetricReader) -> None:
    """The bounds are ours, not the SDK's, which are for milliseconds."""
    for value in (0.5, 1, 3):
        meter.histogram("took_seconds", "", {"stage": "a"}, (1, 2)).observe(value)
    metric = collected(reader)["took_seconds"]
    (point,) = metric.data.data_points
    assert metric.unit == "s"
    assert tuple(point.explicit_bounds) == (1, 2)
    assert tuple(point.bucket_counts) == (2, 0, 1)
    assert (point.count, point.sum) == (3, 4.5)


def test_supervisors_share_instruments(
    meter: Meter, reader: InMemoryMetricReader, caplog: pytest.LogCaptureFixture
) -> None:
    """The SDK logs no warning, and adds up the values."""
    for _ in range(2):
        metrics = StageMetrics(meter, "clean")
        metrics.worker_started("clean-1")
        metrics.answered("clean-1", 1, 10, 100, 200)
    assert caplog.records == []
    (point,) = collected(reader)["etlstage_messages"].data.data_points
    assert point.value == 20
    assert point.attributes == {"stage": "clean", "worker": "clean-1"}


def test_default_is_the_process_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the host has not set one up, nothing is measured."""
    asked = []
    from opentelemetry import metrics

    def get_meter(*names: str) -> object:
        asked.append(names)
        return metrics.NoOpMeter("none")

    monkeypatch.setattr(metrics, "get_meter", get_meter)
    labels: Mapping[str, str] = {}
    OpenTelemetryMeter().counter("n_total", "", labels).add(1)
    assert [name for name, _ in asked] == ["etlstage"]


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text names what to install; importing etlstage.telemetry does no harm."""
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError) as caught:
        OpenTelemetryMeter()
    assert str(caught.value) == (
        "OpenTelemetry's API is not installed; run:"
        " pip install 'etlstage[opentelemetry]'"
    )


@pytest.mark.process
def test_import_does_not_need_it() -> None:
    """OpenTelemetry is imported only where it is used."""
    import subprocess

    code = "import sys, etlstage.telemetry; sys.exit('opentelemetry' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
