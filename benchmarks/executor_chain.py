"""
What do three stages cost inside Spark's executors, compared to one?

All with the C echo worker, on cached rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pyspark.sql import DataFrame

from benchmarks.harness import Row, echo_stage, paired
from benchmarks.spark import frame, rate, session
from etlstage import Stage
from etlstage.spark import transform

COUNT = 4_000_000

Chained = Callable[[DataFrame, Sequence[Stage]], DataFrame]
"""Passes rows through stages, one behind the other."""


def nested(rows: DataFrame, stages: Sequence[Stage]) -> DataFrame:
    """Pass rows through each stage with a ``transform`` of its own."""
    for stage in stages:
        rows = transform(rows, stage)
    return rows


WAYS: dict[str, Chained] = {"a transform each": nested}


def measure(count: int = COUNT, rounds: int = 3) -> list[Row]:
    """Return the seconds of both, for each way to chain."""
    with session() as spark:
        rows = frame(spark, count).cache()
        assert rows.count() == count
        found = []
        for way, chained in WAYS.items():
            three, one = paired(
                lambda chained=chained: _seconds(rows, chained, 3, count),  # type: ignore[misc]
                lambda chained=chained: _seconds(rows, chained, 1, count),  # type: ignore[misc]
                rounds=rounds,
            )
            what = f"three stages on executors, {way}"
            found.append(Row(what, three, "one stage", one, "s", 2.5, at_most=True))
    return found


def _seconds(rows: DataFrame, chained: Chained, stages: int, count: int) -> float:
    return count / rate(chained(rows, [echo_stage()] * stages), count)
