"""
``format("etlstage")``: a worker as a data source of Spark.

:func:`register` makes the format known to a session. Spark runs this code in Python
processes of its own, several for one query, and never in the calling process; each
makes objects anew from the options, or unpickles them.

Reading is in ``reader.py``, writing in ``writer.py``, and the options are in
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

    ``etlstage`` reads and writes with workers, ``etlstage-journal`` reads journals and
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

    Spark may repeat a read, as a whole or one partition of it, which must then give the
    same rows: the worker remembers nothing. See docs/how-to/data-source.md for the
    options.
    """

    _bound: ClassVar[Reading | None] = None

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "etlstage"

    def schema(self) -> str:
        """Return the columns of a read without a given schema."""
        return f"value {self._reading().values}"

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch query."""
        return BatchReader(self._reading(), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return the reader of a stream."""
        try:
            return StreamReader(self._reading(), schema)
        except ConfigError as error:
            return RefusedStream(error)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of a batch query."""
        return Writer(self._writing(overwrite), schema)

    def streamWriter(  # noqa: N802 - Spark's name
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        """Return the writer of a stream's batches."""
        writing = self._writing(overwrite)
        checkpoint = checkpoint_of(self.options, "etlstage") if writing.staged else None
        return Writer(writing, schema, streams=True, checkpoint=checkpoint)

    def _reading(self) -> Reading:
        return self._bound or reading(self.options)

    def _writing(self, overwrite: bool) -> Writing:
        if overwrite:
            raise ConfigError(
                "format etlstage: mode is overwrite, or complete, expected append: a"
                " worker can't take back what it has loaded"
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
        offsets: The offsets of a cyclic stage.
        streaming: Whether it is to be a stream, which a plain stage can't be.
        place: Makes the stage that runs in a task from ``stage``.

    Raises:
        ConfigError: If the stage can't be read from like this.

    """
    known = Reading(stage=stage, offsets=offsets, place=place)
    name = f"etlstage_{secrets.token_hex(8)}"

    # The class is local, and so pickled as a whole, with its attributes.
    class Bound(WorkerDataSource):
        _bound = known

        @classmethod
        def name(cls) -> str:
            return name

    spark.dataSource.register(Bound)
    reader = spark.readStream if streaming else spark.read
    return reader.format(name).schema("value binary").load()
