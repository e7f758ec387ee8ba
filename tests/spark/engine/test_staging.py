"""Messages that wait to be loaded, in Spark's own files."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from etlstage.errors import StateUnusable
from etlstage.pipeline import DeadLetter
from etlstage.pipeline.delivery import position
from etlstage.spark.engine import staging as staging_module
from etlstage.spark.engine.staging import Keeper, Staging
from etlstage.spark.task.chain import ROWS

pytestmark = pytest.mark.spark


OUTCOME = '{"accounts": [], "letters": 0, "error": null}'


def note(place: int) -> str:
    """Return a letter as a task writes it."""
    letter = DeadLetter(
        id="r-1",
        time=datetime.now(UTC).isoformat(),
        pipeline="p",
        run="r",
        stage="t",
        place=place,
        message=b"m",
        error="refused",
        kind="InvalidMessage",
        attempts=(),
        config={},
    )
    return json.dumps(letter.to_dict())


@pytest.mark.parametrize("at_once", [1, 3000, 1_000_000])
def test_letters_are_read_by_pages(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at_once: int,
) -> None:
    """In pages of limited size, in order, and each letter once."""
    monkeypatch.setattr(staging_module, "_AT_ONCE", at_once)
    wanted = [(p, place) for p in (0, 1, 3) for place in range(9)]
    rows = [(p, place // 4, None, note(place)) for p, place in reversed(wanted)]
    outcomes = [(p, None, None, OUTCOME) for p in (3, 1, 0)]
    messages = [(0, 7, b"a message", None)]
    folder = str(tmp_path / "rows")
    given = spark.createDataFrame([*rows, *outcomes, *messages], ROWS)
    given.repartition(3).write.parquet(folder)
    staging = Staging(folder)
    pages = staging.pages(spark)
    assert len(pages) == {1: 9, 1_000_000: 1}.get(at_once, len(pages))
    assert 1 <= len(pages) <= 9
    found = [item for some in pages for item in staging.letters(spark, some)]
    assert [(partition, letter.place) for partition, letter in found] == wanted
    assert [one.partition for one in staging.outcomes(spark)] == [0, 1, 3]
    (message,) = staging.messages(spark).collect()
    assert (message["place"], message["value"]) == (7, "a message")


def start(state: Path, number: int) -> Keeper:
    """Return what a start of a load keeps its rows with."""
    return Keeper(state, "l", number, "of")


def test_what_another_run_has_removed_is_not_kept(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A run that was taken over may still write to its folder (issue 23)."""
    ours = start(tmp_path, 1).make(None, "rows")
    assert start(tmp_path, 2).find(spark) is None
    (tmp_path / "staging-l-1").mkdir()
    with pytest.raises(StateUnusable, match="another run has taken over the state"):
        ours.keep()
    assert not ours.whole
    assert start(tmp_path, 3).find(spark) is None


def test_rows_that_are_kept_are_found(spark: SparkSession, tmp_path: Path) -> None:
    """By the next start of the same load, as often as it starts."""
    start(tmp_path, 1).make(None, "rows").keep()
    for number in (2, 3):
        found = start(tmp_path, number).find(spark)
        assert found is not None
        assert found.whole
        found.keep()
    assert Keeper(tmp_path, "other", 4, "of").find(spark) is None
    assert [*tmp_path.iterdir()] == []


def test_rows_that_are_kept_while_another_run_looks(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds all of them: they are not removed behind their record (issue 23)."""
    ours = start(tmp_path, 1).make(None, "rows")
    (tmp_path / "staging-l-1").mkdir()

    def load(path: Path) -> object:
        about = position.load(path)
        ours.keep()
        return about

    monkeypatch.setattr(staging_module, "load", load)
    found = start(tmp_path, 2).find(spark)
    assert found is not None
    assert found.whole
    assert (tmp_path / "staging-l-1").is_dir()
