"""
Messages into a DataFrame, epoch by epoch.

Messages are kept until an epoch is full, then written as one DataFrame: memory
stays bounded and what has landed is durable.  An epoch is checked as a whole, see
``landing.py``.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

from etlstage.columns import Epoch
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.landing import RowSink
from etlstage.spark.dataframe.destination import Destination
from etlstage.spark.dataframe.fit import with_text
from etlstage.spark.dataframe.landing import FrameLanding
from etlstage.spark.dataframe.schema import is_raw
from etlstage.spark.session.session import Session
from etlstage.stage import ErrorPolicy

__all__ = ("DataFrameSink",)

_FILE_BYTES: Final = 32 << 20  # of messages; also what one task of an epoch writes


class DataFrameSink(FrameLanding, RowSink):
    """
    Loads messages into whatever Spark can write.

    Attributes:
        name: As reports and errors call it.
        account: What became of the messages.
        epochs: Epochs that were written.

    """

    def __init__(
        self,
        spark: SparkSession | Session,
        destination: Destination,
        *,
        schema: str | None = None,
        missing: str = "dead_letter",
        extra: str = "ignore",
        name: str = "load",
        epoch_messages: int = 1_000_000,
        epoch_bytes: int = 128 << 20,
        on_error: ErrorPolicy | None = None,
        dead_letters: DeadLetters | None = None,
    ) -> None:
        """
        Take the settings; Spark is not asked for anything yet.

        Args:
            spark: The session; it is not stopped.
            destination: Where the output goes, and how.
            schema: Columns as DDL: messages are JSON objects. By default a message
                is the string ``value``; a schema of one binary column takes
                messages as they are.
            missing: What becomes of a message without a column that the schema does not
                say to be ``NULL``: ``dead_letter``, or ``null``, which is loaded.
            extra: What becomes of one with a field that is no column: ``dead_letter``,
                or ``ignore``.
            name: As reports and errors call it.
            epoch_messages: Messages in an epoch, at most.
            epoch_bytes: Bytes in an epoch, at most, unless a single message has more.
            on_error: What becomes of messages that do not fit the schema.
            dead_letters: Where these go; None: the first one ends the run.

        """
        super().__init__(
            spark,
            destination,
            schema=schema,
            missing=missing,
            extra=extra,
            name=name,
            on_error=on_error,
            dead_letters=dead_letters,
        )
        self._bounds = (epoch_messages, epoch_bytes)
        self._epoch = Epoch()

    @property
    def _marks(self) -> bool:
        return self._destination.marks

    async def _load_epoch(self, *, last: bool) -> int:
        epoch, spark = self._epoch, self._spark
        schema = self._contract.schema if self._contract is not None else None
        assert spark is not None
        # Arrow brings a partition for every 10,000 rows, and each would be a file.
        files = max(1, round(epoch.size / _FILE_BYTES))
        if schema is None or is_raw(schema):
            # There is nothing in them that Spark would have to look at.
            column = epoch.strings() if schema is None else epoch.binary()
            names = ["value"] if schema is None else schema.names
            if not column.null_count:
                table = pa.table([column], names)
                rows = spark.createDataFrame(table, schema or "value string")
                await self._write(rows, last=last, files=files)
                return epoch.messages
        places = pa.array(range(epoch.messages), pa.int64())
        table = pa.table({"place": places, "raw": epoch.binary()})
        # Without a schema of its own an empty table is refused over Connect.
        frame = spark.createDataFrame(table, "place long, raw binary")
        return await self._load(
            with_text(frame.withColumn("partition", sf.lit(0))),
            {0: self.account.done + self._fitted + self.account.dead},
            what=f"epoch {self.epochs + 1}",
            last=last,
            files=files,
        )
