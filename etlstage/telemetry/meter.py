"""
The interface that a host implements to receive metrics: a meter of instruments.

An instrument is one series: its labels are given once, when it is created. Another
supervisor may ask for the same instrument again, and then adds to the same series.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

__all__ = ("Counter", "Gauge", "GaugeLevel", "Histogram", "Meter")


class Counter(Protocol):
    """A total that only grows."""

    def add(self, amount: float, /) -> None:
        """Add an amount of zero or more."""


class Gauge(Protocol):
    """A level that goes up and down; never set, as several supervisors may share it."""

    def add(self, amount: float, /) -> None:
        """Add an amount, which may be negative."""


class Histogram(Protocol):
    """Counts observations by their size."""

    def observe(self, value: float, /) -> None:
        """Count one observation."""


class Meter(Protocol):
    """
    Creates instruments.

    Names are Prometheus's: they end with the unit, those of counters with ``_total``.
    """

    def counter(
        self, name: str, description: str, labels: Mapping[str, str]
    ) -> Counter:
        """Return the counter with this name and these labels."""

    def gauge(self, name: str, description: str, labels: Mapping[str, str]) -> Gauge:
        """Return the gauge with this name and these labels."""

    def histogram(
        self,
        name: str,
        description: str,
        labels: Mapping[str, str],
        bounds: Sequence[float],
    ) -> Histogram:
        """
        Return the histogram with this name and these labels.

        Args:
            name: Ends with the unit.
            description: For people.
            labels: Labels of this series.
            bounds: Upper bounds of the buckets, inclusive, ascending, without
                infinity.

        """


class GaugeLevel:
    """Our share of a gauge that others move, too."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._value = 0.0

    def set(self, value: float) -> None:
        """Set our share, by moving the gauge by the difference."""
        if value != self._value:
            self._gauge.add(value - self._value)
            self._value = value
