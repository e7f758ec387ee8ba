"""
What do three stages cost inside Spark's executors, compared to one?

All with the C echo worker, on cached rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from pyspark.sql import DataFrame

from benchmarks.harness import Row, echo_stage, paired
from benchmarks.spark import frame, rate, session
from etlstage import Stage
from etlstage.pipeline import DeadLetters
from etlstage.spark import transform
from etlstage.spark.dataframe.read import messages_of
from etlstage.spark.task.chain import ROWS, Chain

COUNT = 4_000_000

Chained = Callable[[DataFrame, Sequence[Stage]], DataFrame]
"""Passes rows through stages, one after the other."""


def nested(rows: DataFrame, stages: Sequence[Stage]) -> DataFrame:
    """Pass rows through each stage with a ``transform`` of its own."""
    for stage in stages:
        rows = transform(rows, stage)
    return rows


def chained(rows: DataFrame, stages: Sequence[Stage]) -> DataFrame:
    """Pass rows through all stages within one ``mapInArrow``, as engine spark does."""
    letters = DeadLetters(Path("unused"), pipeline="benchmark")
    messages = messages_of(rows, "value")
    made = messages.mapInArrow(Chain("extract", stages, letters).run, ROWS)
    return made.where("value is not null").select("value")


WAYS: dict[str, Chained] = {"engine spark": chained, "a transform each": nested}


def measure(count: int = COUNT, rounds: int = 3) -> list[Row]:
    """Return the seconds of both, for each way to chain."""
    with session() as spark:
        rows = frame(spark, count).cache()
        assert rows.count() == count
        found = []
        for way, through in WAYS.items():
            three, one = paired(
                partial(_seconds, rows, through, 3, count),
                partial(_seconds, rows, through, 1, count),
                rounds=rounds,
            )
            what = f"three stages on executors, {way}"
            found.append(Row(what, three, "one stage", one, "s", 2.5, at_most=True))
    return found


def _seconds(rows: DataFrame, through: Chained, stages: int, count: int) -> float:
    named = [replace(echo_stage(), name=f"echo-{n}") for n in range(stages)]
    return count / rate(through(rows, named), count)
