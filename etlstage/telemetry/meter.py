"""
What a host provides to get metrics: a meter, which makes instruments.

An instrument is one series: its labels are given once, when it is made, and it may
be asked for again, by another supervisor. It then adds to the same series.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

__all__ = ("Counter", "Gauge", "GaugeLevel", "Histogram", "Meter")


class Counter(Protocol):
    """Only grows."""

    def add(self, amount: float, /) -> None:
        """Add what is zero or more."""


class Gauge(Protocol):
    """Goes up and down; several supervisors may share one, so it is never set."""

    def add(self, amount: float, /) -> None:
        """Add what may be negative."""


class Histogram(Protocol):
    """Counts observations by their size."""

    def observe(self, value: float, /) -> None:
        """Count one observation."""


class Meter(Protocol):
    """
    Makes instruments.

    Names are Prometheus's: the unit is their end, and ``_total`` that of counters.
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
            name: Its unit is its end.
            description: For people.
            labels: Of this series.
            bounds: Upper bounds of the buckets, inclusive, ascending, without
                infinity.

        """


class GaugeLevel:
    """Our part of a gauge that others move, too."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._value = 0.0

    def set(self, value: float) -> None:
        """Move the gauge by what has changed."""
        if value != self._value:
            self._gauge.add(value - self._value)
            self._value = value
