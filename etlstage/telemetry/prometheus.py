"""
Metrics kept and rendered by prometheus-client, which is imported only when it is used.

Serving the text, with :data:`CONTENT_TYPE`, is up to the host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Final, TypeVar

from etlstage.errors import ConfigError
from etlstage.telemetry.meter import Counter, Gauge, Histogram

if TYPE_CHECKING:
    import prometheus_client
    from prometheus_client import CollectorRegistry, Metric
    from prometheus_client.metrics import MetricWrapperBase

__all__ = ("CONTENT_TYPE", "PrometheusMeter")

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of the text that :meth:`PrometheusMeter.render` returns."""

_FamilyT = TypeVar("_FamilyT", bound="MetricWrapperBase")


class PrometheusMeter:
    """
    Keeps metrics in a registry of prometheus-client; any thread may use it.

    Implements :class:`~etlstage.telemetry.Meter`. A registry can have only one meter,
    which serves any number of supervisors.

    Args:
        registry: Where the metrics are registered, such as the host's own; by default
            one for this meter alone.

    Raises:
        ConfigError: If prometheus-client is not installed.

    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        try:
            from prometheus_client import CollectorRegistry
        except ImportError as error:
            raise ConfigError(
                "prometheus-client is not installed; run:"
                " pip install 'etlstage[prometheus]'"
            ) from error
        self.registry: CollectorRegistry = (
            CollectorRegistry() if registry is None else registry
        )
        self._lock = threading.Lock()
        self._counters: dict[str, prometheus_client.Counter] = {}
        self._gauges: dict[str, prometheus_client.Gauge] = {}
        self._histograms: dict[str, prometheus_client.Histogram] = {}

    def __repr__(self) -> str:
        names = [*self._counters, *self._gauges, *self._histograms]
        return f"<PrometheusMeter metrics={len(names)}>"

    def counter(
        self, name: str, description: str, labels: Mapping[str, str]
    ) -> Counter:
        """
        Return the counter with this name and these labels.

        Raises:
            ValueError: If the name is in use for something else.

        """
        from prometheus_client import Counter as Family

        found = self._series(self._counters, Family, name, description, labels)
        return _Series(found.inc)

    def gauge(self, name: str, description: str, labels: Mapping[str, str]) -> Gauge:
        """Return the gauge with this name and these labels; raises as counter."""
        from prometheus_client import Gauge as Family

        found = self._series(self._gauges, Family, name, description, labels)
        return _Series(found.inc)

    def histogram(
        self,
        name: str,
        description: str,
        labels: Mapping[str, str],
        bounds: Sequence[float],
    ) -> Histogram:
        """Return the histogram with this name and these labels; raises as counter."""
        from prometheus_client import Histogram as Family

        found = self._series(
            self._histograms, Family, name, description, labels, buckets=bounds
        )
        return _Series(found.observe)

    def render(self) -> str:
        """Return all metrics of the registry as text, without ``_created`` series."""
        from prometheus_client import generate_latest
        from prometheus_client.registry import Collector

        registry = self.registry

        # The library only has a process-wide switch; our series must not double.
        class Plain(Collector):
            def collect(self) -> Iterator[Metric]:
                for family in map(copy, registry.collect()):
                    created = f"{family.name}_created"
                    family.samples = [s for s in family.samples if s.name != created]
                    yield family

        return generate_latest(Plain()).decode()

    def _series(
        self,
        families: dict[str, _FamilyT],
        kind: type[_FamilyT],
        name: str,
        description: str,
        labels: Mapping[str, str],
        **settings: Any,  # noqa: ANN401 - what the kind takes
    ) -> _FamilyT:
        with self._lock:
            if name not in families:
                families[name] = kind(
                    name, description, tuple(labels), registry=self.registry, **settings
                )
        return families[name].labels(**labels) if labels else families[name]


class _Series:
    """An instrument with its labels."""

    def __init__(self, record: Callable[[float], None]) -> None:
        self.add = self.observe = record
