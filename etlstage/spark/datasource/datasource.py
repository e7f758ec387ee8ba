"""
``format("etlstage")``: a worker as a data source of Spark.

:func:`register` makes the format known to a session. Spark runs what is here in
Python processes of its own, several for one query, none of them the one that has
called it; each makes objects anew from the options, or gets them pickled.

Reading is in ``reader.py``, writing in ``writer.py``, and which options there are in
``options.py``.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import ClassVar

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from etlstage.errors import ConfigError
from etlstage.spark.datasource.checkpoint import checkpoint_of
from etlstage.spark.datasource.options import Reading, Writing, reading, writing
from etlstage.spark.datasource.reader import BatchReader, RefusedStream, StreamReader
from etlstage.spark.datasource.writer import Writer
from etlstage.spark.journal.datasource import JournalDataSource
from etlstage.spark.ship.artifact import place
from etlstage.stage import OffsetPolicy, Stage

__all__ = ("WorkerDataSource", "read_worker", "register")


def register(spark: SparkSession) -> None:
    """
    Make our formats known to ``spark``, classic or Spark Connect.

    ``etlstage`` has workers read and write, ``etlstage-journal`` reads journals and
    appends to them.

    ::

        register(spark)
        rows = spark.read.format("etlstage").option("command", "./fetch").load()

    etlstage must be installed where Spark's Python workers run.
    """
    spark.dataSource.register(WorkerDataSource)
    spark.dataSource.register(JournalDataSource)


class WorkerDataSource(DataSource):
    """
    Reads rows from an extract worker, and writes rows into a load worker.

    A read may be repeated, as a whole or one partition of it, and must give the same
    rows then: the worker remembers nothing. See docs/how-to/data-source.md for the options.
    """

    _bound: ClassVar[Reading | None] = None

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "etlstage"

    def schema(self) -> str:
        """Return the columns of a read to which no schema was given."""
        return f"value {self._reading().values}"

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return what reads once."""
        return BatchReader(self._reading(), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return what reads a stream, batch after batch."""
        try:
            return StreamReader(self._reading(), schema)
        except ConfigError as error:
            return RefusedStream(error)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return what writes once."""
        return Writer(self._writing(overwrite), schema)

    def streamWriter(  # noqa: N802 - Spark's name
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        """Return what writes the batches of a stream."""
        writing = self._writing(overwrite)
        checkpoint = checkpoint_of(self.options, "etlstage") if writing.staged else None
        return Writer(writing, schema, streams=True, checkpoint=checkpoint)

    def _reading(self) -> Reading:
        return self._bound or reading(self.options)

    def _writing(self, overwrite: bool) -> Writing:
        if overwrite:
            raise ConfigError(
                "format etlstage: mode is overwrite, or complete, expected append: what"
                " a worker has loaded it can't take back"
            )
        return writing(self.options)


def read_worker(
    spark: SparkSession,
    stage: Stage,
    *,
    offsets: OffsetPolicy | None = None,
    streaming: bool = False,
    place: Callable[[Stage], Stage] = place,
) -> DataFrame:
    """
    Return the messages of an extract stage as a DataFrame of one binary column.

    Args:
        spark: The session.
        stage: The stage; its workers run on the executors.
        offsets: Of a cyclic stage.
        streaming: Whether it is to be a stream, which a plain stage can't be.
        place: Makes of the stage the one that runs in a task.

    Raises:
        ConfigError: If the stage can't be read from like this.

    """
    known = Reading(stage=stage, offsets=offsets, place=place)
    name = f"etlstage_{secrets.token_hex(8)}"

    # Not known by a module, and so pickled with all that it is.
    class Bound(WorkerDataSource):
        _bound = known

        @classmethod
        def name(cls) -> str:
            return name

    spark.dataSource.register(Bound)
    reader = spark.readStream if streaming else spark.read
    return reader.format(name).schema("value binary").load()
