"""
Does a row cost more when there are more of them?

A stage on executors with the C echo worker, on two partitions of 1, 4 and 16 million
rows together. They are a million cached rows, repeated: the cache could not hold all.
"""

from __future__ import annotations

from functools import partial

from pyspark.sql import DataFrame

from benchmarks.harness import Row, echo_stage, in_turn
from benchmarks.spark import frame, rate, session
from etlstage.spark import transform

MILLION = 1_000_000
TIMES = (1, 4, 16)


def measure(unit: int = MILLION, rounds: int = 3) -> list[Row]:
    """Return nanoseconds per row, beside those of the fewest rows."""
    with session() as spark:
        rows = frame(spark, unit).cache()
        assert rows.count() == unit
        jobs = {str(n): partial(_nanoseconds, rows, unit, n) for n in TIMES}
        found = in_turn(jobs, rounds=rounds)
    least = found["1"]
    return [
        Row(
            f"stage on executors, {n} million rows",
            found[str(n)],
            "1 million rows",
            least,
            "ns/row",
            1.15,
            at_most=True,
        )
        for n in TIMES[1:]
    ]


def _nanoseconds(rows: DataFrame, unit: int, times: int) -> float:
    repeated = rows.selectExpr(f"explode(sequence(1, {times}))", "value")
    made = transform(repeated.select("value"), echo_stage())
    return 1e9 / rate(made, unit * times)
