"""
Metrics in memory, rendered as Prometheus's text, version 0.0.4.

The format is that of https://prometheus.io/docs/instrumenting/exposition_formats/.
Serving the text is the host's part; :data:`CONTENT_TYPE` goes with it.
"""

from __future__ import annotations

import math
import re
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final, Literal, TypeAlias, cast

__all__ = ("CONTENT_TYPE", "PrometheusMeter")

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Of what :meth:`PrometheusMeter.render` returns."""

_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL: Final = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_IN_HELP: Final = str.maketrans({"\\": r"\\", "\n": r"\n"})
_IN_LABEL: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})

_Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
_Labels: TypeAlias = tuple[tuple[str, str], ...]
_Sample: TypeAlias = tuple[str, _Labels, float]  # suffix of the name, labels, value
_New: TypeAlias = "Callable[[], _Value | _Histogram]"


class PrometheusMeter:
    """
    Keeps metrics and renders them; any thread may do either.

    Implements :class:`~etlstage.telemetry.Meter`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families: dict[str, _Family] = {}

    def __repr__(self) -> str:
        series = sum(len(family.series) for family in self._families.values())
        return f"<PrometheusMeter series={series}>"

    def counter(
        self, name: str, description: str, labels: Mapping[str, str]
    ) -> _Counter:
        """
        Return the counter with this name, which ends in ``_total``, and these labels.

        Raises:
            ValueError: If the format can't express them, or the name is in use for
                something else.

        """
        if not name.endswith("_total"):
            raise ValueError(f"the name of a counter ends in _total, got {name!r}")
        with self._lock:
            family = self._family("counter", name, description, labels)
            return cast(
                "_Counter", family.series_of(labels, lambda: _Counter(self._lock))
            )

    def gauge(self, name: str, description: str, labels: Mapping[str, str]) -> _Value:
        """
        Return the gauge with this name and these labels.

        Raises:
            ValueError: As for :meth:`counter`.

        """
        with self._lock:
            family = self._family("gauge", name, description, labels)
            return cast("_Value", family.series_of(labels, lambda: _Value(self._lock)))

    def histogram(
        self,
        name: str,
        description: str,
        labels: Mapping[str, str],
        bounds: Sequence[float],
    ) -> _Histogram:
        """
        Return the histogram with this name and these labels.

        Raises:
            ValueError: As for :meth:`counter`; or if the bounds are not ascending, or
                not those that the name has already.

        """
        if "le" in labels:
            raise ValueError("a histogram's label can't be 'le'")
        edges = tuple(map(float, bounds))
        # The last bucket, up to infinity, is always there.
        if not all(a < b for a, b in zip(edges, (*edges[1:], math.inf), strict=True)):
            raise ValueError(f"bounds of {name} are not ascending: {bounds}")
        with self._lock:
            family = self._family("histogram", name, description, labels, edges)
            return cast(
                "_Histogram",
                family.series_of(labels, lambda: _Histogram(self._lock, edges)),
            )

    def render(self) -> str:
        """Return all metrics as text, sorted by name."""
        with self._lock:
            lines = [
                line for _, f in sorted(self._families.items()) for line in f.render()
            ]
        return "".join(f"{line}\n" for line in lines)

    def _family(
        self,
        kind: _Kind,
        name: str,
        description: str,
        labels: Mapping[str, str],
        bounds: tuple[float, ...] = (),
    ) -> _Family:
        if not _NAME.fullmatch(name):
            raise ValueError(f"a metric can't be called {name!r}")
        for label in labels:
            if not _LABEL.fullmatch(label):
                raise ValueError(f"a label of {name} can't be called {label!r}")
        wanted = _Family(kind, name, description, frozenset(labels), bounds)
        family = self._families.setdefault(name, wanted)
        if family.shape != wanted.shape:
            raise ValueError(f"{name} is in use already, as {family}, not {wanted}")
        return family


class _Value:
    """One number."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._value = 0.0

    def add(self, amount: float, /) -> None:
        """Add what may be negative."""
        with self._lock:
            self._value += amount

    def samples(self) -> Iterator[_Sample]:
        """Yield the only one."""
        yield "", (), self._value


class _Counter(_Value):
    """A number that only grows."""

    def add(self, amount: float, /) -> None:
        """
        Add what is zero or more.

        Raises:
            ValueError: If it is less.

        """
        if amount < 0:
            raise ValueError(f"a counter only grows, got {amount}")
        # Not by super(): this is called for every run of messages.
        with self._lock:
            self._value += amount


class _Histogram:
    """Observations, counted by their size."""

    def __init__(self, lock: threading.Lock, bounds: tuple[float, ...]) -> None:
        self._lock = lock
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, /) -> None:
        """Count one observation."""
        bucket = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[bucket] += 1
            self._sum += value

    def samples(self) -> Iterator[_Sample]:
        """Yield the buckets, each with those below it, the sum, and the count."""
        bounds = (*self._bounds, math.inf)
        for bound, count in zip(bounds, accumulate(self._counts), strict=True):
            yield "_bucket", (("le", _number(bound)),), count
        yield "_sum", (), self._sum
        yield "_count", (), sum(self._counts)


class _Family:
    """All series of one name."""

    def __init__(
        self,
        kind: _Kind,
        name: str,
        description: str,
        labels: frozenset[str],
        bounds: tuple[float, ...],
    ) -> None:
        self.shape = (kind, labels, bounds)
        self.series: dict[_Labels, _Value | _Histogram] = {}
        self._name = name
        self._description = description

    def __str__(self) -> str:
        kind, labels, bounds = self.shape
        names = ", ".join(sorted(labels)) or "no label"
        return f"{kind} of {names}" + (f" with bounds {bounds}" if bounds else "")

    def series_of(self, labels: Mapping[str, str], new: _New) -> _Value | _Histogram:
        """Return the series with these labels, made by ``new`` if it is the first."""
        key = tuple(sorted(labels.items()))
        if key not in self.series:
            self.series[key] = new()
        return self.series[key]

    def render(self) -> Iterator[str]:
        """Yield the lines of the text."""
        yield f"# HELP {self._name} {self._description.translate(_IN_HELP)}"
        yield f"# TYPE {self._name} {self.shape[0]}"
        for labels, series in self.series.items():
            for suffix, more, value in series.samples():
                pairs = ",".join(
                    f'{label}="{text.translate(_IN_LABEL)}"'
                    for label, text in (*labels, *more)
                )
                braces = f"{{{pairs}}}" if pairs else ""
                yield f"{self._name}{suffix}{braces} {_number(value)}"


def _number(value: float) -> str:
    """Return ``value`` as Go writes it, near enough."""
    if math.isfinite(value):
        return f"{value:.0f}" if value == int(value) < 2**53 else repr(float(value))
    return "NaN" if math.isnan(value) else f"{'+' if value > 0 else '-'}Inf"
