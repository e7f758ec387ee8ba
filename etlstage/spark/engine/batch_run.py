"""
A run whose stages are inside Spark's executors.

One job stages what the stages make of the DataFrame, see ``stage_job.py``. Only if the
run has not failed by then, a second job loads it: nothing is loaded of a run that
fails, and a task that was retried or ran twice counts once.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import anyio.to_thread

from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.delivery.delivery import Delivery
from etlstage.pipeline.interfaces import DeadLetterSink
from etlstage.pipeline.report import Status
from etlstage.pipeline.runner import Runner
from etlstage.spark.engine.stage_job import Origin, StageJob, staging_for
from etlstage.spark.engine.staging import StagedLoad
from etlstage.spark.session.session import Session
from etlstage.spark.ship.plan import Shipment
from etlstage.stage import Stage

__all__ = ("ExecutorPipeline",)


class ExecutorPipeline(Runner):
    """
    Runs transform stages where the data is.

    Args:
        name: As the report calls it.
        origin: What to read.
        session: Where; released behind the run.
        stages: What the messages pass through.
        sink: Where they end.
        dead_letters: Where messages are dead-lettered that a stage can't process.
        dead_letter_sink: What is given the dead letters at the end of the run.
        staging: Folder, or URL of one, that all executors see. By default one in the
            system's temporary directory, if the executors are on this machine.
        shipment: What was sent to the executors for the stages.
        delivery: What is to be ours alone during the run.

    """

    def __init__(
        self,
        *,
        name: str,
        origin: Origin,
        session: Session,
        stages: Sequence[Stage] = (),
        sink: StagedLoad,
        dead_letters: DeadLetters,
        dead_letter_sink: DeadLetterSink | None = None,
        staging: str | None = None,
        shipment: Shipment | None = None,
        delivery: Delivery | None = None,
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
        )
        self.ledger.awaited = "the tasks on Spark's executors"
        self._origin = origin
        self._sink = sink
        self._folder = staging
        self._shipment = shipment
        self._letters = dead_letters
        self._session = session
        self._transforming: anyio.CancelScope | None = None
        self._drained = False

    def drain(self) -> None:
        """
        Stop, unless loading has begun; :meth:`run` returns then.

        A DataFrame is read as a whole or not at all: before that there is nothing to
        load.
        """
        self._drained = True
        if self._transforming is not None:
            self._transforming.cancel()

    async def _run(self) -> Status:
        self._transforming = stopped = anyio.CancelScope()
        async with self._sink:
            messages = await anyio.to_thread.run_sync(
                self._origin.messages, self._session
            )
            spark = messages.sparkSession
            passing = StageJob(
                self._origin.name,
                self._stages,
                self.ledger,
                self._letters,
                shipment=self._shipment,
                log_path=self._session.log_path,
            )
            with staging_for(spark, self._folder, self.name) as staging:
                with stopped:
                    if self._drained:
                        stopped.cancel()
                    starts = await passing.transform(messages, staging)
                    for account in self.ledger:
                        self._tick(account)
                if stopped.cancelled_caught:
                    return "drained"
                await self._sink.load(staging.messages(spark), starts)
                self._tick(self._sink.account)
        return "done"
