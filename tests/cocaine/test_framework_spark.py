"""The published Python framework inside the executors of Spark."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from etlstage import Stage
from etlstage.protocol.cocaine.settings import CocaineDialect
from etlstage.spark import transform
from tests.spark.conftest import session as session
from tests.spark.conftest import spark as spark

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


def test_it_is_a_stage_over_a_dataframe(
    spark: SparkSession, framework: tuple[str, ...]
) -> None:
    """Each task has workers of its own, and a folder of its own for their socket."""
    stage = Stage(name="app", command=framework, dialect=CocaineDialect(event="echo"))
    rows = [(f"row {n}",) for n in range(20)]
    df = spark.createDataFrame(rows, "value string").repartition(2)
    answers = [(row["value"],) for row in transform(df, stage).collect()]
    assert sorted(answers) == sorted(rows)
