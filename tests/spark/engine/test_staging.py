"""What waits to be loaded, in Spark's own files."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from etlstage.pipeline import DeadLetter
from etlstage.spark.engine.staging import Staging
from etlstage.spark.executor.chain import ROWS

pytestmark = pytest.mark.spark


def note(place: int) -> str:
    """Return a letter as a task notes it."""
    letter = DeadLetter(
        id="r-1",
        time=datetime.now(UTC).isoformat(),
        pipeline="p",
        run="r",
        stage="t",
        place=place,
        message=b"m",
        error="refused",
        kind="MessageRefused",
        attempts=(),
        config={},
    )
    return json.dumps(letter.to_dict())


def test_letters_are_read_page_by_page(spark: SparkSession, tmp_path: Path) -> None:
    """By partition and page, and within a page by the place of the message."""
    wanted = [(p, place) for p in (0, 1, 3) for place in range(9)]
    rows = [(p, place // 4, None, note(place)) for p, place in reversed(wanted)]
    outcomes = [(p, None, None, '{"accounts": [], "error": null}') for p in (3, 1, 0)]
    messages = [(0, 7, b"a message", None)]
    folder = str(tmp_path / "rows")
    given = spark.createDataFrame([*rows, *outcomes, *messages], ROWS)
    given.repartition(3).write.parquet(folder)
    staging = Staging(folder)
    letters = [(partition, one.place) for partition, one in staging.letters(spark)]
    assert letters == wanted
    assert [one.partition for one in staging.outcomes(spark)] == [0, 1, 3]
    (message,) = staging.messages(spark).collect()
    assert (message["place"], message["value"]) == (7, "a message")
