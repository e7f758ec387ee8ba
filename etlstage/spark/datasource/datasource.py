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
from pathlib import Path
from typing import ClassVar

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from etlstage.errors import ConfigError, SinkFailed
from etlstage.messages import StageKind
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.spark.datasource.options import Reading, Writing, reading, writing
from etlstage.spark.datasource.reader import BatchReader, RefusedStream, StreamReader
from etlstage.spark.datasource.writer import Loaded, StreamWriter, Writer
from etlstage.spark.ship.artifact import place
from etlstage.stage import OffsetPolicy, Stage
from etlstage.transport.watchdog import scratch

__all__ = (
    "WorkerDataSource",
    "bound",
    "read_worker",
    "register",
    "unique_name",
    "write_worker",
)


def register(spark: SparkSession) -> None:
    """
    Make ``format("etlstage")`` known to ``spark``, classic or Spark Connect.

    ::

        register(spark)
        rows = spark.read.format("etlstage").option("command", "./fetch").load()

    etlstage must be installed where Spark's Python workers run.
    """
    spark.dataSource.register(WorkerDataSource)


class WorkerDataSource(DataSource):
    """
    Reads rows from an extract worker, and writes rows into a load worker.

    A read may be repeated, as a whole or one partition of it, and must give the same
    rows then: the worker remembers nothing. See the README for the options.
    """

    _bound: ClassVar[Reading | Writing | None] = None

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "etlstage"

    def schema(self) -> str:
        """Return the columns of a read to which no schema was given."""
        return "value binary" if self._reading().binary else "value string"

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
        return StreamWriter(self._writing(overwrite), schema)

    def _reading(self) -> Reading:
        if isinstance(self._bound, Writing):
            raise ConfigError(f"stage {self._bound.stage.name} can't be read from")
        return self._bound or reading(self.options)

    def _writing(self, overwrite: bool) -> Writing:
        if overwrite:
            raise ConfigError(
                "format etlstage: mode is overwrite, or complete, expected append: what"
                " a worker has loaded it can't take back"
            )
        if isinstance(self._bound, Reading):
            raise ConfigError(f"stage {self._bound.stage.name} can't be written to")
        return self._bound or writing(self.options)


def bound(
    stage: Stage,
    *,
    offsets: OffsetPolicy | None = None,
    partitions: int | None = None,
    report: Path | None = None,
    letters: DeadLetters | None = None,
    place: Callable[[Stage], Stage] = place,
    known_as: str = "",
) -> type[DataSource]:
    """
    Return a data source of ``stage`` alone, with a name of its own and no options.

    Args:
        stage: To read from if it extracts, to write to if it loads.
        offsets: Of a cyclic stage.
        partitions: Tasks of a read, as the option says.
        report: File in which a write that is committed leaves its account. With it,
            messages that fail are dead-lettered as ``stage.on_error`` says.
        letters: Those of the run; only with a report.
        place: Makes of the stage the one that runs in a task.
        known_as: Its name, if it is to replace one before it: a session forgets none.

    Raises:
        ConfigError: If the stage can't be read from or written to like this.

    """
    known: Reading | Writing
    if stage.kind is StageKind.EXTRACT:
        known = Reading(
            stage=stage, offsets=offsets, partitions=partitions, place=place
        )
    else:
        known = Writing(stage=stage, report=report, letters=letters, place=place)
    name = known_as or unique_name()

    # Not known by a module, and so pickled with all that it is.
    class Bound(WorkerDataSource):
        _bound = known

        @classmethod
        def name(cls) -> str:
            return name

    return Bound


def unique_name() -> str:
    """Return what no other data source is called."""
    return f"etlstage_{secrets.token_hex(8)}"


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
        place: As for :func:`bound`.

    Raises:
        ConfigError: If the stage can't be read from like this.

    """
    source = bound(stage, offsets=offsets, place=place)
    spark.dataSource.register(source)
    reader = spark.readStream if streaming else spark.read
    return reader.format(source.name()).schema("value binary").load()


def write_worker(
    frame: DataFrame,
    stage: Stage,
    *,
    letters: DeadLetters,
    place: Callable[[Stage], Stage] = place,
    known_as: str = "",
) -> Loaded:
    """
    Load messages with the workers of a stage, and return their account; blocks.

    Args:
        frame: The columns ``partition`` and ``place``, which dead letters keep, and
            the message, a string, or binary.
        stage: Of kind load; its workers run on the executors.
        letters: Those of the run. They are not stored yet.
        place: As for :func:`bound`.
        known_as: As for :func:`bound`.

    Raises:
        SinkFailed: If Spark's driver is on a machine where we can't see what it writes.

    """
    with scratch("load") as folder:
        _check_seen(folder, frame.sparkSession, stage.name)
        report = folder / "report"
        sink = bound(
            stage, report=report, letters=letters, place=place, known_as=known_as
        )
        spark = frame.sparkSession
        spark.dataSource.register(sink)
        # A write looks for its format in the session that is active in this thread
        # (4.3: the one it belongs to is not asked), and this makes it so.
        spark.createDataFrame([], "value binary")
        frame.write.format(sink.name()).mode("append").save()
        return Loaded.read(report)


def _check_seen(folder: Path, spark: SparkSession, stage: str) -> None:
    """Assert that Spark's driver sees a folder of ours: it leaves the account there."""
    try:
        _ = spark.read.format("binaryFile").load(folder.as_uri()).schema
    except AnalysisException as error:
        raise SinkFailed(
            f"stage {stage}: the Spark Connect server does not see {folder}, in which it"
            " would leave the account of what is loaded: run a server on this machine,"
            " or set TMPDIR to a folder that both see",
            stage=stage,
        ) from error
