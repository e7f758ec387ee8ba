"""Passing one DataFrame through the stages, and accounting for it."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.from_thread
import pytest
from pyspark.sql import DataFrame, SparkSession

from etlstage.errors import StageError
from etlstage.messages import StageKind
from etlstage.pipeline import DeadLetters
from etlstage.pipeline.dead_letter.files import letter_files
from etlstage.pipeline.ledger import Account, Ledger
from etlstage.spark.engine.stage_job import StageJob
from etlstage.spark.engine.staging import Pages, Staging
from etlstage.spark.task.chain import Chain, TaskEnd
from etlstage.stage import Stage

pytestmark = pytest.mark.spark


class CalledOff(Staging):
    """Staging whose run is cancelled while its letters are read."""

    scope: anyio.CancelScope

    def fill(self, messages: DataFrame, chain: Chain) -> None:
        """Leave the folder empty."""

    def outcomes(self, spark: SparkSession) -> list[TaskEnd]:
        """Return the outcome of one task, with a letter."""
        counts = [
            [0, 0, 0, 0, 0, 2, 0, 0],
            [2, 1, 1, 0, 0, 1, 0, 0],
            [1, 1, 0, 0, 0, 0, 0, 0],
        ]
        return [TaskEnd(0, counts, 1, None)]

    def pages(self, spark: SparkSession) -> list[Pages]:
        """Cancel the run."""
        anyio.from_thread.run_sync(self.scope.cancel)
        return [((0, 0), (0, 0))]


async def test_letters_of_a_run_that_is_called_off_are_not_booked(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A signal ends the reading of letters; only what has a letter counts as dead."""
    ledger = Ledger.of_pipeline("e", ["t"], Account("l", StageKind.LOAD))
    letters = DeadLetters(tmp_path, pipeline="p")
    stages = [Stage(name="t", worker=("cat",))]
    passing = StageJob(Chain("e", stages, letters), ledger)
    staging = CalledOff(str(tmp_path / "rows"))
    with anyio.CancelScope() as staging.scope:
        await passing.fill(spark.range(1), staging)
        await passing.settle(spark, staging)
    assert staging.scope.cancelled_caught
    assert not any(count for account in ledger for count in account.counts)
    assert not letter_files(tmp_path)


class Partial(Staging):
    """Staging from which the rows of the second of three tasks were removed."""

    def outcomes(self, spark: SparkSession) -> list[TaskEnd]:
        """Return the outcomes that are left."""
        return [TaskEnd(partition, [[0] * 8] * 3, 0, None) for partition in (0, 2)]


async def test_rows_of_a_task_that_are_missing(
    spark: SparkSession, tmp_path: Path
) -> None:
    """They are not loaded without the others, now or by the next start (issue 23)."""
    ledger = Ledger.of_pipeline("e", ["t"], Account("l", StageKind.LOAD))
    letters = DeadLetters(tmp_path, pipeline="p")
    chain = Chain("e", [Stage(name="t", worker=("cat",))], letters)
    staging = Partial(str(tmp_path / "rows"), whole=True)
    with pytest.raises(
        StageError, match="e: the staged rows of some tasks are missing"
    ):
        await StageJob(chain, ledger).settle(spark, staging)
    assert not staging.whole
