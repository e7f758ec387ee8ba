"""
Messages into load workers on the executors, from where the tasks have staged them.

The workers run within a write of the data source, which is where Spark lets a side
effect be. A task that is retried has loaded some messages already: at least once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Self

import anyio.to_thread
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from etlstage.errors import SinkFailed
from etlstage.messages import counted
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.dead_letter.policy import check_budget
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.interfaces import Epochs, Output
from etlstage.spark.datasource.datasource import unique_name, write_worker
from etlstage.spark.errors import explain
from etlstage.spark.session.job import run_job
from etlstage.spark.session.session import Session
from etlstage.spark.ship.artifact import place
from etlstage.spark.sink import SparkSink
from etlstage.stage import Stage

__all__ = ("LoadWorkers",)


class LoadWorkers(SparkSink):
    """
    Loads what waits in a staging folder with the workers of a stage.

    Args:
        stage: Of kind load; every task has workers of its own.
        dead_letters: Where messages are dead-lettered that they can't load.
        place: Makes of the stage the one that runs in a task.
        session: That of the messages, if there is a log for errors to name.
        known_as: What Spark calls it: the same for all batches of a stream.

    """

    def __init__(
        self,
        stage: Stage,
        *,
        dead_letters: DeadLetters,
        place: Callable[[Stage], Stage] = place,
        session: Session | None = None,
        known_as: str = "",
    ) -> None:
        super().__init__(stage.name)
        self._stage = stage
        self._letters = dead_letters
        self._place = place
        self._session = session or Session()
        self._known_as = known_as or unique_name()
        self._whole = False

    def __str__(self) -> str:
        return f"stage {self.name}"

    def of_batch(
        self, spark: SparkSession | Session, epochs: Epochs, letters: DeadLetters
    ) -> Self:
        """Return the sink of a batch; one that is run again is loaded again."""
        del epochs
        return type(self)(
            self._stage,
            dead_letters=letters,
            place=self._place,
            session=Session.of(spark),
            known_as=self._known_as,
        )

    async def load(self, messages: DataFrame, starts: Mapping[int, int]) -> None:
        """
        Load the messages, those of a partition in order.

        Args:
            messages: As :meth:`Staging.messages` gives them.
            starts: For each partition, the place of its first message among all.

        Raises:
            SinkFailed: If the workers can't load them.

        """
        spark = messages.sparkSession
        stage, letters = self._stage, self._letters
        try:
            self.account.received, ordered = await run_job(
                spark, partial(_in_order, messages)
            )
            loaded = await run_job(
                spark,
                lambda: write_worker(
                    ordered,
                    stage,
                    letters=letters,
                    place=self._place,
                    known_as=self._known_as,
                ),
            )
        except Exception as error:
            text = explain(error, self._session.log_path)
            raise SinkFailed(text, stage=self.name) from error
        self.account.dead = len(loaded.dead)
        self.account.done = loaded.messages - len(loaded.dead)
        self.account.skipped = loaded.skipped
        self.account.restarts = loaded.restarts
        self.account.failures = loaded.failures
        self._whole = True
        await anyio.to_thread.run_sync(self._adopt, loaded.dead, starts)
        if loaded.dead:
            check_budget(
                self.account,
                stage.on_error.budget,
                last=loaded.dead[-1][1].error,
                look=letters.look,
            )

    def landed(self) -> str:
        """Return how many messages the workers have loaded."""
        complete = "complete" if self._whole else "incomplete"
        return f"{counted(self.account.done, 'message')} loaded; output {complete}"

    def output(self) -> Output:
        """Return that workers have them."""
        return Output("workers", self.name)

    def _adopt(
        self, dead: Sequence[tuple[int, DeadLetter]], starts: Mapping[int, int]
    ) -> None:
        for partition, letter in dead:
            self._letters.adopt(letter, place=starts[partition] + letter.place)


def _in_order(messages: DataFrame) -> tuple[int, DataFrame]:
    """Return how many there are, and those of a partition in one task; blocks."""
    tasks = messages.select("partition", sf.spark_partition_id().alias("task"))
    found = tasks.groupBy("partition").agg(
        sf.count("*"), sf.min("task"), sf.max("task")
    )
    counts = found.collect()
    columns = messages.select("partition", "place", "raw")
    # What has come from one task may be too large to be read by one.
    if any(first != last for _, _, first, last in counts):
        # Ranges are cut by a sample: with twice as many hardly two come together.
        columns = columns.repartitionByRange(2 * len(counts), "partition")
    ordered = columns.sortWithinPartitions("partition", "place")
    return sum(count for _, count, *_ in counts), ordered
