"""Workers on executors that write too much or too little, see ``planted.py``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from pathlib import Path

import anyio
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.spark import Session, transform
from etlstage.spark.engine.batch_run import ExecutorPipeline
from etlstage.spark.engine.capture import StagedCapture
from etlstage.spark.engine.stage_job import Origin
from etlstage.spark.errors import explain
from etlstage.testing import MemorySink
from tests.planted import Plan, plan

pytestmark = pytest.mark.spark

SEEDS = (1, 5, 8, 15, 19, 24, 28, 32, 33, 37)
"""Some seeds of each fault that a run survives, all of them quick."""


def frame(planned: Plan, spark: SparkSession) -> DataFrame:
    """Return the messages of a plan, in one or two partitions."""
    rows = spark.range(0, len(planned.messages), 1, 1 + planned.seed % 2)
    return rows.selectExpr("id", "concat('m-', id) as m")


def transformed(planned: Plan, spark: SparkSession) -> DataFrame:
    """Return the results of a plan's stage, with their messages if these are known."""
    stage = planned.stage
    keep = [] if stage.dialect.shape.batches else ["m"]
    made = transform(
        frame(planned, spark), stage, message="m", keep=keep, errors="column"
    )
    m = sf.col("m") if keep else sf.lit(None).cast("string").alias("m")
    return made.select(sf.lit(planned.seed).alias("seed"), m, "value", "error")


def run_in_one_job(plans: Sequence[Plan], spark: SparkSession) -> list[str]:
    """Run stages, each in its own tasks; return how they ended."""
    frames = [transformed(planned, spark) for planned in plans]
    try:
        rows = reduce(DataFrame.union, frames).collect()
    except Exception as error:
        if len(plans) > 1:
            # Any of the stages may have caused it.
            return [end for one in plans for end in run_in_one_job([one], spark)]
        text = explain(error)
        plans[0].check_failure(error, int("doubtful" in text))
        return ["failed"]
    for planned in plans:
        mine = [row for row in rows if row.seed == planned.seed]
        assert len(mine) == len(planned.messages), f"seed {planned.seed}"
        told = [row.m for row in mine if row.m is not None]
        assert not told or told == [m.decode() for m in planned.messages]
        pairs = list(zip(mine, planned.messages, strict=True))
        made = [row.value.encode() for row in mine if row.error is None]
        dead = {message for row, message in pairs if row.error is not None}
        planned.check(made, dead, ordered=True)
    return ["done"] * len(plans)


async def run_pipeline(planned: Plan, spark: SparkSession, folder: Path) -> str:
    """Run the stage of a plan as engine ``spark`` does; return how it ended."""
    letters = DeadLetters(folder, pipeline="p")
    sink = MemorySink()
    pipeline = ExecutorPipeline(
        name="p",
        origin=Origin(read=lambda spark: frame(planned, spark), message="m"),
        session=Session.of(spark),
        stages=[planned.stage],
        sink=StagedCapture(sink),
        dead_letters=letters,
    )
    with anyio.fail_after(120):
        report = await pipeline.run()
    letters.close()
    if report.status != "done":
        planned.check_failure(report.error, report.ledger[1].doubtful)
        assert not sink.messages
        return report.status
    dead = {letter.message for letter in letters.letters()}
    planned.check(sink.messages, dead, ordered=planned.ordered)
    return report.status


@pytest.mark.any_client
def test_no_row_is_wrong_in_silence(spark: SparkSession) -> None:
    """In all modes, with all windows, with one worker and with three (issue 10)."""
    run_in_one_job([plan(seed) for seed in SEEDS], spark)


@pytest.mark.anyio
async def test_no_run_is_wrong_in_silence(spark: SparkSession, tmp_path: Path) -> None:
    """Nor are messages dead-lettered that are not at fault (issue 10)."""
    await run_pipeline(plan(20), spark, tmp_path)
