"""
Where a sink writes, and what marks its output as complete.

A file format marks complete output with a file ``_SUCCESS``. Only the last epoch of a
run writes it. A marker of an older run is removed before the first epoch, if the path
is on a file system of this machine. Elsewhere it stays until Spark removes it, which
happens with ``overwrite``: after an ``append`` that failed, such a marker covers only
the older files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import rmdir
from pathlib import Path
from tempfile import mkdtemp
from typing import Final, Self

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import BinaryType, DataType, TimestampType

from etlstage.errors import ConfigError, guess, os_reason
from etlstage.files.csv_format import separator
from etlstage.files.lines import BLANKS
from etlstage.pipeline.delivery.place import taken
from etlstage.pipeline.interfaces import Output
from etlstage.settings.units import literal, local_path, of_files
from etlstage.spark.dataframe.database import Database, option
from etlstage.spark.dataframe.read import TIMES
from etlstage.spark.errors import explain, text_of
from etlstage.spark.session.job import over_connect

__all__ = ("Destination", "folder_text")

_MARK: Final = "mapreduce.fileoutputcommitter.marksuccessfuljobs"
_MODES: Final = {
    "append": "append",
    "overwrite": "overwrite",
    # The only name for this mode that Connect knows, too.
    "error": "error",
    "errorifexists": "error",
}


_BUILT_IN: Final = ("csv", "jdbc", "json", "orc", "parquet", "text", "xml")
"""Formats that are always part of Spark."""
_WITH_TIMES: Final = ("csv", "json", "xml")
"""Formats that write times as text."""
_UNTRIMMED: Final = {
    "ignoreLeadingWhiteSpace": "false",
    "ignoreTrailingWhiteSpace": "false",
}
"""Options for writing CSV in full: by default Spark cuts blanks off values."""
_UNQUOTED: Final = ("", "\0")
"""Values of the option ``quote`` that turn quotes off."""
_BLANK: Final = r"^[\x00-\x20]*$"
_FILE_SYSTEM: Final = "spark.hadoop.fs.defaultFS"
_ELSEWHERE: Final = ("HADOOP_CONF_DIR", "SPARK_CONF_DIR")
"""Environment variables that may place a path without a scheme elsewhere."""


@dataclass(frozen=True)
class Destination:
    """
    A path or a table, and how to write it.

    Attributes:
        path: Where the output goes, unless the table or the options have it.
        table: A table of the catalog.
        format: As Spark calls it.
        mode: What the first epoch does about existing output: ``append``,
            ``overwrite`` or ``error``. Later epochs append.
        options: Options of the format; by default times as text have microseconds, and
            CSV has the blanks of its values, in quotes if a line may have no more: if
            there is one column, without ``nullValue`` or ``emptyValue``, or an epoch
            has such a row. Without ``quote`` such a row is lost.
        partition_by: Columns that become directories. When a run has no messages
            Spark then writes nothing but the marker.
        moved_from: What was written before, if a load continues here.

    Raises:
        ConfigError: If the mode is unknown, or ``ignore``.

    """

    path: str | None = None
    table: str | None = None
    format: str = "parquet"
    mode: str = "error"
    options: Mapping[str, str] = field(default_factory=dict)
    partition_by: Sequence[str] = ()
    moved_from: str = ""

    def __post_init__(self) -> None:
        if self.mode == "ignore":
            raise ConfigError(
                "mode 'ignore' is refused: it would silently drop all messages if there "
                "is output already; use append, overwrite or error"
            )
        if self.mode not in _MODES:
            raise ConfigError(
                f"unknown mode {self.mode!r}, expected append, overwrite or error"
            )

    @property
    def marks(self) -> bool:
        """Whether complete output has a marker."""
        return self.table is None and of_files(self.format)

    @property
    def folders(self) -> Sequence[str]:
        """The columns whose values are only in the names of folders, as text."""
        return self.partition_by if self.marks else ()

    @property
    def of_database(self) -> bool:
        """Whether the output is a table of a database, over JDBC."""
        return self.format.lower() == "jdbc" and option(self.options, "dbtable") != ""

    def write(self, frame: DataFrame, *, first: bool, last: bool) -> None:
        """
        Write one epoch; blocks.

        Args:
            frame: The rows.
            first: Whether it is the first of its run, to which the mode applies.
            last: Whether it completes the output.

        """
        if first:
            self._unmark()
        writer = frame.write.options(**self._defaults(frame)).options(**self.options)
        writer = writer.format(self.format)
        writer = writer.mode(_MODES[self.mode] if first else "append")
        if self.partition_by:
            writer = writer.partitionBy(*self.partition_by)
        if self.marks:
            writer = writer.option(_MARK, str(last).lower())
        if self.table is None:
            writer.save(self.path)
            return
        if self.path is not None:
            writer = writer.option("path", self.path)
        writer.saveAsTable(self.table)

    def _defaults(self, frame: DataFrame) -> Mapping[str, str]:
        """Return options for these rows that Spark has otherwise."""
        made = self.format.lower()
        found = dict(TIMES) if made in _WITH_TIMES else {}
        if made == "csv":
            found |= _UNTRIMMED
            if self._has_blank_line(frame):
                found["quoteAll"] = "true"
        return found

    def _has_blank_line(self, frame: DataFrame) -> bool:
        """Return whether a line of CSV without quotes may be blank, and thus no row."""
        options = {key.lower(): value for key, value in self.options.items()}
        if options.get("quote") in _UNQUOTED or "quoteall" in options:
            return False
        names = [name for name in frame.columns if name not in self.partition_by]
        null, empty = options.get("nullvalue", ""), options.get("emptyvalue", '""')
        if len(names) == 1 and not {"nullvalue", "emptyvalue"} & options.keys():
            return True
        if len(names) != 1 and separator(options).strip(BLANKS.decode()):
            return False
        # Only rows that are there justify quotes, which other readers may not expect.
        blank = sf.lit(True)
        for name in names:
            text = sf.col(f"`{name.replace('`', '``')}`").cast("string")
            cell = sf.when(text == "", empty).otherwise(sf.coalesce(text, sf.lit(null)))
            blank &= cell.rlike(_BLANK)
        return not frame.filter(blank).isEmpty()

    def output(self) -> Output:
        """Return what the output is, and where, for reports."""
        what = self.format if self.table is None else "table"
        place = self.table or self.path or option(self.options, "dbtable")
        return Output(what, place or str(self))

    def continuing(self, moved_from: str) -> Self:
        """Return the same destination for a load that continues: nothing is replaced."""
        mode = "append" if self.mode == "append" else "error"
        return replace(self, mode=mode, moved_from=moved_from)

    def objection(self, columns: Sequence[str], *, new: bool = True) -> str | None:
        """
        Return why ``columns`` can't be written, as far as that is known.

        Args:
            columns: Their names.
            new: Whether the mode applies, as existing output is not of the same load.

        """
        path = self.local
        if new and self._must_be_new and path is not None and os.path.exists(path):
            return taken(str(path), self.moved_from)
        unknown = [name for name in self.partition_by if name not in columns]
        if unknown:
            return (
                f"can't partition by {', '.join(unknown)}: the columns are "
                f"{', '.join(columns)}"
            )
        return None

    def taken(self, spark: SparkSession) -> str | None:
        """
        Return why the mode excludes output that is not on this machine; blocks.

        Spark checks the mode when it writes, but the first batch of a stream may be
        written again.
        """
        if not self._must_be_new or self.local is not None:
            return None
        try:
            if not self._exists(spark) or (self.moved_from and self._is_empty(spark)):
                return None
        except Exception as error:
            return f"can't find out whether {self} exists: {explain(error)}"
        remedy = "drop" if self.table is not None or self.of_database else "remove"
        return taken(str(self), self.moved_from, remedy=remedy)

    def _exists(self, spark: SparkSession) -> bool:
        if self.table is not None:
            return spark.catalog.tableExists(self.table)
        if self.of_database and not over_connect(spark):
            with Database(spark, self.options).connected() as connection:
                return connection.columns(option(self.options, "dbtable")) is not None
        # A reader that needs no schema; it looks for the path or the table at once.
        kind = "jdbc" if self.of_database else "binaryFile"
        if kind != "jdbc" and self.path is None and not option(self.options, "path"):
            return False
        try:
            path = None if self.path is None else literal(self.path)
            _ = spark.read.format(kind).options(**self.options).load(path).schema
        except Exception as error:
            # Only of a path in a file system it is known what the error means.
            if not self.marks or "[PATH_NOT_FOUND]" in text_of(error):
                return False
            raise
        return True

    def _is_empty(self, spark: SparkSession) -> bool:
        """Return whether the output is a table without rows."""
        if self.table is not None:
            return spark.table(self.table).isEmpty()
        if not self.of_database:
            return False
        if not over_connect(spark):
            with Database(spark, self.options).connected() as connection:
                return not connection.has_rows(option(self.options, "dbtable"))
        return spark.read.format("jdbc").options(**self.options).load().isEmpty()

    def unmade(self, spark: SparkSession) -> str | None:
        """
        Return why the output can't be made, as far as that is known; blocks.

        It is checked before the first message, as a run may take hours.
        """
        if self.table is None and self.format.lower() not in _BUILT_IN:
            problem = _unknown_format(spark, self.format)
            if problem is not None:
                return problem
        if self.of_database and not over_connect(spark):
            try:
                with Database(spark, self.options).connected():
                    pass
            except Exception as error:
                return explain(error)
        path = self.local
        if path is None or not _here(spark):
            return None
        nearest = next(p for p in (path, *path.absolute().parents) if p.exists())
        try:
            rmdir(mkdtemp(prefix=".etlstage-", dir=nearest))
        except OSError as error:
            return (
                f"can't create {path}: {nearest}: {os_reason(error)}; set another path"
            )
        return None

    @property
    def _must_be_new(self) -> bool:
        return _MODES[self.mode] == "error"

    def _unmark(self) -> None:
        path = self.local
        if path is not None and self.marks and not self._must_be_new:
            (path / "_SUCCESS").unlink(missing_ok=True)

    @property
    def local(self) -> Path | None:
        """The path, if it is on this machine."""
        if self.path is None or self.table is not None:
            return None
        return local_path(self.path)

    def __str__(self) -> str:
        if self.table is not None:
            return f"table {self.table}"
        if self.of_database:
            return f"table {option(self.options, 'dbtable')} of a database"
        return self.path or f"a {self.format} destination"


def folder_text(value: Column, kind: DataType) -> Column:
    """
    Return the text of a value in the name of a folder, as the sink of files has it.

    Spark itself leaves out the offset of a time, so the hour that a clock repeats would
    be one hour, and replaces bytes that are not UTF-8.
    """
    match kind:
        case TimestampType():
            return sf.date_format(value, TIMES["timestampFormat"])
        case BinaryType():
            # Spark breaks Base64 into lines.
            return sf.translate(sf.base64(value), "\r\n", "")
    return value.cast("string")


def _unknown_format(spark: SparkSession, format_: str) -> str | None:
    try:
        # A reader is looked up like a writer, and an empty path is not read.
        _ = spark.read.format(format_).load("").schema
    except Exception as error:
        if "[DATA_SOURCE_NOT_FOUND]" in text_of(error):
            close = guess(format_.lower(), (*_BUILT_IN, "avro"))
            return (
                f"there is no format {format_!r}{close}: a format that is not built into"
                " Spark needs its package in spark.jars.packages"
            )
    return None


def _here(spark: SparkSession) -> bool:
    """Return whether a path without a scheme is on this machine."""
    if over_connect(spark) or any(map(os.environ.get, _ELSEWHERE)):
        return False
    local = str(spark.conf.get("spark.master", "")).startswith("local")
    return local and not spark.conf.get(_FILE_SYSTEM, "")
