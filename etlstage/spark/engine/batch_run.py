"""
A run whose stages are inside Spark's executors.

One job stages what the stages make of the DataFrame, see ``stage_job.py``. A second job
loads that only if the run has not failed by then. So nothing is loaded of a run whose
stages fail, and a task that was retried or ran twice counts once.

With a state directory the run is one epoch. Staged messages are kept until the epoch is
recorded: a start that follows an interrupted one loads them, and runs no worker.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import anyio.to_thread
from pyspark.sql import DataFrame, SparkSession

from etlstage.errors import StageError
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.delivery.delivery import Delivery
from etlstage.pipeline.interfaces import DeadLetterSink
from etlstage.pipeline.report import Status
from etlstage.pipeline.runner import Runner
from etlstage.spark.engine.stage_job import Origin, StageJob
from etlstage.spark.engine.staging import Keeper, Staging, staging_for
from etlstage.spark.session.session import Session
from etlstage.spark.ship.artifact import Shipment
from etlstage.spark.sink import SparkSink
from etlstage.spark.task.chain import Chain
from etlstage.stage import Stage
from etlstage.telemetry.log import Log

__all__ = ("ExecutorPipeline",)

_log = Log()


class ExecutorPipeline(Runner):
    """
    Runs transform stages where the data is.

    Args:
        name: As the report calls it.
        origin: What to read.
        session: The session; released after the run.
        stages: What the messages pass through.
        sink: Where messages are loaded.
        dead_letters: Where messages are dead-lettered that a stage can't process.
        dead_letter_sink: Gets the dead letters at the end of the run.
        staging: Folder, or URL of one, that all executors see. By default one in the
            system's temporary directory, if the executors are on this machine.
        shipment: What was sent to the executors for the stages.
        delivery: Records that all messages are loaded.
        of: Identifies what is read, and what the stages are.
        drain_limit: Seconds for which a run that is drained may still load; after that
            the next start loads what was staged. None: no limit.

    """

    def __init__(
        self,
        *,
        name: str,
        origin: Origin,
        session: Session,
        stages: Sequence[Stage] = (),
        sink: SparkSink,
        dead_letters: DeadLetters,
        dead_letter_sink: DeadLetterSink | None = None,
        staging: str | None = None,
        shipment: Shipment | None = None,
        delivery: Delivery | None = None,
        of: str = "",
        drain_limit: float | None = None,
    ) -> None:
        super().__init__(
            name,
            source=origin.name,
            stages=stages,
            sink=sink,
            dead_letters=dead_letters,
            dead_letter_sink=dead_letter_sink,
            release=session.release,
            delivery=delivery,
            drain_limit=drain_limit,
        )
        self.ledger.awaited = "the tasks on Spark's executors"
        self._origin = origin
        self._input, self._reads_on = origin.input, False
        self._sink = sink
        self._folder = staging
        self._shipment = shipment
        self._letters = dead_letters
        self._session = session
        self._transforming: anyio.CancelScope | None = None
        self._loading: anyio.CancelScope | None = None
        self._drained = False
        self._of = of

    def drain(self) -> None:
        """
        Stop, unless all messages have passed the stages; :meth:`run` returns then.

        A DataFrame is read as a whole or not at all: before that there is nothing to
        load. Loading is cancelled after ``drain_limit`` seconds.
        """
        self._drained = True
        if self._transforming is not None:
            self._transforming.cancel()
        if self._loading is not None:
            self._loading.deadline = anyio.current_time() + self.drain_limit

    async def _run(self) -> Status:
        self._transforming = stopped = anyio.CancelScope()
        keeper, delivery = None, self._delivery
        if (
            record := await self._begin_delivery()
        ) is not None and delivery is not None:
            of = self._of
            keeper = Keeper(delivery.folder.absolute(), record.load, record.fence, of)
        async with self._sink:
            spark = await anyio.to_thread.run_sync(self._session.start)
            with staging_for(spark, self._folder, self.name, keeper) as staging:
                if record is not None and record.ended:
                    staging.whole = False  # an earlier start has loaded all of it
                    return "done"
                with stopped:
                    if self._drained:
                        stopped.cancel()
                    made, starts = await self._staged(spark, staging)
                if stopped.cancelled_caught:
                    if delivery is not None and not staging.whole:
                        delivery.end()
                    return "drained"
                if delivery is not None:
                    await anyio.to_thread.run_sync(staging.keep)
                    delivery.check()
                    delivery.at("begin")
                with anyio.CancelScope() as self._loading:
                    if self._drained:
                        self.drain()
                    await self._load(staging, made, starts)
                if self._loading.cancelled_caught:
                    self._cut = True
                    _log.warning(
                        "draining took too long: loading is aborted",
                        seconds=self.drain_limit,
                    )
                    return "drained"
                if delivery is not None:
                    await self._commit(delivery)
                    staging.whole = False
        return "done"

    async def _staged(
        self, spark: SparkSession, staging: Staging
    ) -> tuple[DataFrame, dict[int, int]]:
        """Run the stages, unless their results are staged, and settle accounts."""
        chain = Chain(self._origin.name, self._stages, self._letters, self._shipment)
        job = StageJob(chain, self.ledger, log_path=self._session.log_path)
        if not staging.whole:
            messages = await anyio.to_thread.run_sync(
                self._origin.messages, self._session
            )
            await job.fill(messages, staging)
        else:
            _log.info("loading what an interrupted start staged")
        if staging.whole and self._shipment is not None:
            # The sink may need it, too.
            await anyio.to_thread.run_sync(self._shipment.send, spark)
        made = await job.messages(spark, staging)
        # Last: a run drained after this would keep letters that will come again.
        starts = await job.settle(spark, staging)
        for account in self.ledger:
            self._tick(account)
        return made, starts

    async def _load(
        self, staging: Staging, messages: DataFrame, starts: dict[int, int]
    ) -> None:
        account = self._sink.account
        try:
            await self._sink.load(messages, starts)
        except StageError:
            # Once the stages are fixed, they must run again.
            staging.whole &= not (account.dead or account.failed)
            raise
        self._tick(account)

    async def _commit(self, delivery: Delivery) -> None:
        delivery.at("written")
        await self._letters.sync()
        record = delivery.next(
            None,
            accounts={account.stage: account.counts for account in self.ledger},
            letters=self._letters.sizes(),
            ended=True,
        )
        await self._sink.commit(record.note)
        delivery.at("committed")
        delivery.keep(record)
        if self._sink.performs:
            await self._sink.perform()
            delivery.at("performed")
