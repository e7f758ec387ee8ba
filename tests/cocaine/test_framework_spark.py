"""The published Python framework inside the executors of Spark."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import pytest
from pyspark.sql import SparkSession

from etlstage import Pipeline, Stage
from etlstage.protocol.cocaine.settings import CocaineDialect
from etlstage.spark import transform
from tests.spark.conftest import session as session
from tests.spark.conftest import spark as spark

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


def test_it_is_a_stage_over_a_dataframe(
    spark: SparkSession, framework: tuple[str, ...]
) -> None:
    """Each task has workers of its own, and a folder of its own for their socket."""
    stage = Stage(name="app", worker=framework, dialect=CocaineDialect(event="echo"))
    rows = [(f"row {n}",) for n in range(20)]
    df = spark.createDataFrame(rows, "value string").repartition(2)
    answers = [(row["value"],) for row in transform(df, stage).collect()]
    assert sorted(answers) == sorted(rows)


FILE = """\
name: p
engine: spark
extract:
  spark: {{format: json, path: in.ndjson, schema: "id long, text string"}}
transform:
  - name: app
    worker: {{command: {command}}}
    dialect: {{name: cocaine, event: echo, concurrency: 7}}
load:
  spark: {{format: parquet, path: out, schema: "id long, text string"}}
"""


def test_it_is_a_stage_of_engine_spark(
    spark: SparkSession, framework: tuple[str, ...], tmp_path: Path
) -> None:
    """The dialect in a pipeline file is enough (issue 15)."""
    rows = [(n, f"row {n}") for n in range(300)]
    text = "\n".join(json.dumps({"id": id_, "text": text}) for id_, text in rows)
    (tmp_path / "in.ndjson").write_text(text)
    (tmp_path / "p.yaml").write_text(FILE.format(command=list(framework)))

    report = anyio.run(Pipeline.from_yaml(tmp_path / "p.yaml", spark=spark).run)

    assert (report.status, report.error) == ("done", None)
    assert [a.done for a in report.ledger] == [0, 300, 300]  # the source only produces
    found = spark.read.parquet(str(tmp_path / "out")).collect()
    assert sorted((row.id, row.text) for row in found) == rows
