"""
Metrics handed to OpenTelemetry's API, which is imported only when it is used.

Counters lose the suffix ``_total``, which exporters to Prometheus append, and units are
passed in OpenTelemetry's notation as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from etlstage.errors import ConfigError
from etlstage.telemetry.meter import Counter, Gauge, Histogram

if TYPE_CHECKING:
    from opentelemetry import metrics

__all__ = ("OpenTelemetryMeter",)

_UNITS: Final = {"seconds": "s", "bytes": "By"}


class OpenTelemetryMeter:
    """
    Hands metrics to OpenTelemetry.

    Implements :class:`~etlstage.telemetry.Meter`.

    Args:
        meter: OpenTelemetry's meter; by default one named ``etlstage``, of the
            provider that the process has.

    Raises:
        ConfigError: If OpenTelemetry's API is not installed.

    """

    def __init__(self, meter: metrics.Meter | None = None) -> None:
        from importlib.metadata import version  # slower than all of this module

        try:
            from opentelemetry import metrics
        except ImportError as error:
            raise ConfigError(
                "OpenTelemetry's API is not installed; run:"
                " pip install 'etlstage[opentelemetry]'"
            ) from error
        self._meter = meter or metrics.get_meter("etlstage", version("etlstage"))

    def counter(
        self, name: str, description: str, labels: Mapping[str, str]
    ) -> Counter:
        """Return the counter with this name and these labels."""
        name = name.removesuffix("_total")
        made = self._meter.create_counter(name, _unit(name), description)
        return _InstrumentSeries(made.add, labels)

    def gauge(self, name: str, description: str, labels: Mapping[str, str]) -> Gauge:
        """Return the gauge, for OpenTelemetry an up-down counter."""
        made = self._meter.create_up_down_counter(name, _unit(name), description)
        return _InstrumentSeries(made.add, labels)

    def histogram(
        self,
        name: str,
        description: str,
        labels: Mapping[str, str],
        bounds: Sequence[float],
    ) -> Histogram:
        """Return the histogram; the bounds are advice, which a view overrides."""
        made = self._meter.create_histogram(
            name,
            _unit(name),
            description,
            explicit_bucket_boundaries_advisory=bounds,
        )
        return _InstrumentSeries(made.record, labels)


class _InstrumentSeries:
    """An instrument with its labels."""

    def __init__(
        self,
        record: Callable[[float, Mapping[str, str]], None],
        labels: Mapping[str, str],
    ) -> None:
        self._record = record
        self._labels = dict(labels)

    def add(self, amount: float, /) -> None:
        self._record(amount, self._labels)

    observe = add


def _unit(name: str) -> str:
    return _UNITS.get(name.rpartition("_")[2], "")
