"""Record processors that share the shards of a DataFrame."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from structlog.testing import capture_logs

from etlstage.pipeline import Pipeline
from etlstage.shard.cut import Cut
from etlstage.shard.keeper import LeaseKeeper
from etlstage.shard.leased import LeasedSink
from etlstage.shard.sink import ShardedSink
from etlstage.shard.table import SQLiteLeases
from etlstage.spark import DataFrameSource
from etlstage.testing import ScriptedLaunch
from tests.kcl.recipes import COUNT as RECORDS
from tests.kcl.recipes import RECIPES, Recipe
from tests.shard.load import Processors, run_all
from tests.shard.test_leased import STAGE

pytestmark = pytest.mark.spark

COUNT = 300


async def test_runners_share_the_rows(spark: SparkSession, tmp_path: Path) -> None:
    """Each reads all rows in the sort order, whatever the partitions (issue 25)."""
    processors = [Processors(pause=0.0), Processors(pause=0.0)]

    def runner(number: int) -> Pipeline:
        rows = spark.range(0, COUNT, numPartitions=2 + number)
        columns = "id as n", f"{COUNT} - id as at", "concat('u', id % 9) as user"
        return Pipeline(
            name="p",
            source=DataFrameSource(rows.selectExpr(*columns), sort="at"),
            sink=LeasedSink(
                STAGE,
                cut=Cut(4, "/user", sequence="/at", arrival="/at"),
                keeper=LeaseKeeper(f"r{number}", "start", failover=1.0),
                leases=lambda _of: SQLiteLeases(tmp_path / "leases.db", "p"),
                launch=ScriptedLaunch(processors[number]),
            ),
        )

    reports = await run_all(runner(0), runner(1))
    assert [report.error for report in reports] == [None, None]
    numbers = processors[0].numbers | processors[1].numbers
    assert numbers == {n: str(COUNT - n) for n in range(COUNT)}
    for one in processors:
        for done in one.done.values():
            assert done == sorted(done, reverse=True)


@pytest.mark.any_client
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
async def test_recipe(spark: SparkSession, tmp_path: Path, recipe: Recipe) -> None:
    """The scenarios of the published clients, from a DataFrame."""
    launch = recipe.launch()
    rows = spark.range(0, RECORDS, numPartitions=1).selectExpr("id", "'a' as user")
    pipeline = Pipeline(
        name="p",
        source=DataFrameSource(rows),
        sink=ShardedSink(
            recipe.stage(tmp_path), cut=Cut(1, "/user"), why=recipe.why, launch=launch
        ),
    )
    with capture_logs() as log:
        report = await pipeline.run()
    recipe.check(report, launch, log)
