"""
Messages into load workers on the executors, from where the tasks have staged them.

The workers run like stages, at the end of a chain, and the outcomes of their tasks are
staged likewise. A task that is retried may have loaded some messages already, so
messages are loaded at least once.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Self

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from etlstage.errors import SinkFailed
from etlstage.messages import StageKind, counted
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.interfaces import Epochs, Output
from etlstage.pipeline.ledger import Account, Ledger
from etlstage.spark.engine.stage_job import StageJob
from etlstage.spark.engine.staging import staging_for
from etlstage.spark.errors import explain
from etlstage.spark.session.job import run_job
from etlstage.spark.session.session import Session
from etlstage.spark.ship.artifact import Shipment
from etlstage.spark.sink import SparkSink
from etlstage.spark.task.chain import Chain
from etlstage.stage import Stage

__all__ = ("LoadWorkers",)


class LoadWorkers(SparkSink):
    """
    Loads messages of a DataFrame with the workers of a stage.

    Args:
        stage: Of kind load; every task has workers of its own.
        dead_letters: Where messages are dead-lettered that the workers can't load.
        session: The session of the messages, if errors are to name its log.
        shipment: What was sent to the executors for the stage.
        staging: See :func:`staging_for`.

    """

    def __init__(
        self,
        stage: Stage,
        *,
        dead_letters: DeadLetters,
        session: Session | None = None,
        shipment: Shipment | None = None,
        staging: str | None = None,
    ) -> None:
        super().__init__(stage.name)
        self._stage = stage
        self._letters = dead_letters
        self._session = session or Session()
        self._shipment = shipment
        self._staging = staging
        self._whole = False

    def __str__(self) -> str:
        return f"stage {self.name}"

    def of_batch(
        self, spark: SparkSession | Session, epochs: Epochs, letters: DeadLetters
    ) -> Self:
        """Return the sink of a batch; a repeated batch is loaded again."""
        del epochs
        return type(self)(
            self._stage,
            dead_letters=letters,
            session=Session.of(spark),
            shipment=self._shipment,
            staging=self._staging,
        )

    async def load(self, messages: DataFrame, starts: Mapping[int, int]) -> None:
        """Load the messages, those of a partition in order."""
        spark, log_path = messages.sparkSession, self._session.log_path
        try:
            self.account.received, ordered = await run_job(
                spark, partial(_in_order, messages)
            )
        except Exception as error:
            raise SinkFailed(explain(error, log_path), stage=self.name) from error
        staged = Account(f"input of {self.name}", StageKind.EXTRACT)
        loaded = Account(self.name, StageKind.LOAD)
        chain = Chain(
            staged.stage, (), self._letters, self._shipment, self._stage, starts
        )
        job = StageJob(chain, Ledger([staged, loaded]), log_path=log_path)
        try:
            with staging_for(spark, self._staging, self.name) as staging:
                await job.fill(ordered, staging)
                await job.settle(spark, staging)
        finally:
            loaded.received = 0
            self.account.add(loaded.counts)
        self._whole = True

    def landed(self) -> str:
        """Return how many messages the workers have loaded."""
        complete = "complete" if self._whole else "incomplete"
        return f"{counted(self.account.done, 'message')} loaded; output {complete}"

    def output(self) -> Output:
        """Return that the stage's workers get the messages."""
        return Output("workers", self.name)


def _in_order(messages: DataFrame) -> tuple[int, DataFrame]:
    """Count messages, and order them with each partition in one task; blocks."""
    tasks = messages.select("partition", sf.spark_partition_id().alias("task"))
    found = tasks.groupBy("partition").agg(
        sf.count("*"), sf.min("task"), sf.max("task")
    )
    counts = found.collect()
    columns = messages.select("raw", "partition", "place")
    # What one task has written may be too large to be read by one.
    if any(first != last for _, _, first, last in counts):
        # Ranges are cut by a sample: with twice as many, partitions rarely share one.
        columns = columns.repartitionByRange(2 * len(counts), "partition")
    ordered = columns.sortWithinPartitions("partition", "place")
    return sum(count for _, count, *_ in counts), ordered
