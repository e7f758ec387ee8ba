"""
Messages into a DataFrame, all at once, from where the tasks have staged them.

They are checked as a whole before Spark touches the destination, as an epoch is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as sf
from pyspark.sql.types import StructType

from etlstage.errors import SinkFailed, StageError
from etlstage.spark.dataframe.schema import fitted, is_raw, reason
from etlstage.spark.dataframe.sink import DataFrameSink
from etlstage.spark.engine.staging import StagedLoad
from etlstage.spark.errors import explain
from etlstage.spark.session.job import run_job

__all__ = ("StagedSink",)

_AT_ONCE: Final = 10_000  # misfits collected; more of them come in turns


class StagedSink(DataFrameSink, StagedLoad):
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
        spark = messages.sparkSession
        judged = self._judged(messages)
        try:
            counts = await run_job(spark, lambda: _counts(judged))
            self.account.received, misfits = int(counts[0]), int(counts[1])
            if misfits:
                await self._take_out(judged, misfits, starts)
            rows = self._rows(judged.where(~sf.col("misfit")))
            await run_job(
                spark, lambda: self._destination.write(rows, first=True, last=True)
            )
        except SinkFailed as error:
            self._error = error
            raise
        except StageError:
            raise
        except Exception as error:
            self._error = self._failure(
                f"can't write to {self._destination}: {explain(error, self._session.log_path)}"
            )
            raise self._error from error
        self.account.done = self.account.received - self.account.dead
        self.epochs = 1
        self._whole = True

    def _judged(self, messages: DataFrame) -> DataFrame:
        schema = self._schema
        if schema is None:
            return messages.withColumn("misfit", sf.col("value").isNull())
        if is_raw(schema):
            return messages.withColumn("misfit", sf.lit(False))
        return fitted(messages, schema)

    def _rows(self, judged: DataFrame) -> DataFrame:
        schema = self._schema
        if schema is None:
            return judged.select("value")
        if is_raw(schema):
            return judged.select(sf.col("raw").alias(schema.names[0]))
        fields = [sf.col("row").getField(name).alias(name) for name in schema.names]
        return judged.select(*fields)

    async def _take_out(
        self, judged: DataFrame, count: int, starts: dict[int, int]
    ) -> None:
        """Put aside what does not fit; raises when it is too much."""
        keeps = self._policy.keeps
        wanted = self._ddl or "value string"
        async for row in _misfits(judged, at_once=_AT_ONCE if keeps else 1):
            place = starts[row["partition"]] + row["place"]
            made = None if row["row"] is None else row["row"].asDict()
            message = bytes(row["raw"])
            why = reason(message, made, self._schema or StructType())
            if not keeps:
                self.account.failed = count
                raise self._failure(
                    f"{count} of {self.account.received} messages do not fit the schema"
                    f" '{wanted}': message {place + 1} is the first, {why};"
                    " nothing is loaded"
                )
            error = self._failure(
                f"message {place + 1} does not fit the schema '{wanted}': {why}"
            )
            await self._policy.settle(error, [message], place=place)


def _counts(judged: DataFrame) -> Row:
    found = judged.agg(sf.count(sf.lit(1)), sf.count_if(sf.col("misfit")))
    return found.collect()[0]


async def _misfits(judged: DataFrame, *, at_once: int) -> AsyncIterator[Row]:
    """Yield the messages that do not fit, in order, so many collected at a time."""
    found = judged.where("misfit")
    if "row" not in found.columns:
        found = found.withColumn("row", sf.lit(None))
    partition, place = sf.col("partition"), sf.col("place")
    part = found
    while True:
        rows = await run_job(judged.sparkSession, _top(part, at_once).collect)
        for row in rows:
            yield row
        if len(rows) < at_once:
            return
        last = rows[-1]
        part = found.where(
            (partition > last["partition"])
            | ((partition == last["partition"]) & (place > last["place"]))
        )


def _top(misfits: DataFrame, count: int) -> DataFrame:
    columns = misfits.select("partition", "place", "raw", "row")
    return columns.orderBy("partition", "place").limit(count)
