"""
``format("etlstage-journal")``: sets of journals as a data source of Spark.

As for :mod:`etlstage.spark.datasource.datasource`, Spark runs this code in Python
processes of its own. The driver plans with ``plan.py`` what tasks read with
``reader.py``, and commits what tasks write with ``writer.py``.
"""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructField, StructType

from etlstage.errors import ConfigError, EtlstageError
from etlstage.spark.datasource.checkpoint import checkpoint_of
from etlstage.spark.datasource.reader import RefusedStream
from etlstage.spark.journal.options import (
    NAME,
    JournalReading,
    JournalWriting,
    read_options,
)
from etlstage.spark.journal.reader import (
    COLUMNS,
    JournalBatchReader,
    JournalStreamReader,
)
from etlstage.spark.journal.writer import JournalWriter

__all__ = ("JournalDataSource",)


class JournalDataSource(DataSource):
    """
    Reads committed messages of journals, each once, and appends rows to journals.

    See docs/how-to/journals.md for the options.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return NAME

    def schema(self) -> StructType:
        """Return the columns of a read without a given schema."""
        return StructType([StructField(*column) for column in COLUMNS.items()])

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch query."""
        return JournalBatchReader(read_options(JournalReading, self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return the reader of a stream."""
        try:
            reading = read_options(JournalReading, self.options)
            return JournalStreamReader(reading, schema)
        except EtlstageError as error:
            return RefusedStream(error)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of a batch query."""
        return JournalWriter(self._writing(overwrite), schema)

    def streamWriter(  # noqa: N802 - Spark's name
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        """Return the writer of a stream's batches."""
        checkpoint = checkpoint_of(self.options, NAME)
        return JournalWriter(self._writing(overwrite), schema, checkpoint)

    def _writing(self, overwrite: bool) -> JournalWriting:
        if overwrite:
            raise ConfigError(
                f"format {NAME}: mode is overwrite, or complete, expected append:"
                " readers may already have read what is in a journal"
            )
        return read_options(JournalWriting, self.options)
