"""
Messages into load workers on the executors, from where the tasks have staged them.

The workers run within a write of the data source, which is where Spark lets a side
effect be. A task that is retried has loaded some messages already: at least once.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame

from etlstage.errors import SinkFailed
from etlstage.messages import counted
from etlstage.pipeline.dead_letter.policy import config_of, letter_time
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.spark.datasource.datasource import write_worker
from etlstage.spark.engine.staging import StagedLoad
from etlstage.spark.errors import explain
from etlstage.spark.session.job import run_job
from etlstage.spark.ship.artifact import place
from etlstage.stage import Stage

__all__ = ("StagedWorker",)


class StagedWorker(StagedLoad):
    """
    Loads what waits in a staging folder with the workers of a stage.

    Args:
        stage: Of kind load; every task has workers of its own.
        dead_letters: Where messages are dead-lettered that they can't load.
        place: Makes of the stage the one that runs in a task.
        log_path: Spark's log, for errors to name.

    """

    def __init__(
        self,
        stage: Stage,
        *,
        dead_letters: DeadLetters,
        place: Callable[[Stage], Stage] = place,
        log_path: Path | None = None,
    ) -> None:
        super().__init__(stage.name)
        self._stage = stage
        self._letters = dead_letters
        self._place = place
        self._log_path = log_path
        self._whole = False

    async def load(self, messages: DataFrame, starts: Mapping[int, int]) -> None:
        """
        Load the messages, those of a partition in order.

        Args:
            messages: As :meth:`Staging.messages` gives them.
            starts: For each partition, the place of its first message among all.

        Raises:
            SinkFailed: If the workers can't load them.

        """
        del starts  # Spark cuts the write in its own way
        spark = messages.sparkSession
        ordered = messages.sortWithinPartitions("partition", "place").select("raw")
        try:
            self.account.received = await run_job(spark, messages.count)
            account = await run_job(
                spark, lambda: write_worker(ordered, self._stage, place=self._place)
            )
        except Exception as error:
            text = explain(error, self._log_path)
            raise SinkFailed(text, stage=self.name) from error
        await self._put_aside(account["letters"])
        self.account.done = account["done"]
        self._whole = True

    def landed(self) -> str:
        """Return how many messages the workers have loaded."""
        complete = "complete" if self._whole else "incomplete"
        return f"{counted(self.account.done, 'message')} loaded; output {complete}"

    async def _put_aside(self, letters: list[dict[str, Any]]) -> None:
        for plain in letters:
            await self._letters.put(
                self.name,
                plain["place"],
                base64.b64decode(plain["message"]),
                SinkFailed(plain["error"], stage=self.name),
                config=config_of(self._stage),
                time=letter_time(),
            )
            self.account.dead += 1
