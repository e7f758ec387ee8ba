"""Messages into a DataFrame, all at once, from where the tasks have staged them."""

from __future__ import annotations

from pyspark.sql import DataFrame

from etlstage.spark.dataframe.landing import FrameLanding
from etlstage.spark.engine.staging import StagedLoad

__all__ = ("StagedSink",)


class StagedSink(FrameLanding, StagedLoad):
    """Loads what waits in a staging folder, as one epoch."""

    async def load(self, messages: DataFrame, starts: dict[int, int]) -> None:
        """
        Load the messages and mark the output as complete.

        Args:
            messages: As :meth:`Staging.messages` gives them.
            starts: For each partition, the place of its first message among all.

        Raises:
            SinkFailed: If Spark can't write, or a message does not fit the schema.
            StageError: If too many do not fit, or can't be dead-lettered.

        """
        await self._prepare()
        with self._failing(""):
            fitted = await self._load(messages, starts, what="", last=True)
        if self._known is not None:
            self._fitted = fitted
            await self._settle_epoch()
        else:
            self._count(fitted)
        self._whole = True
