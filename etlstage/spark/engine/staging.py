"""
Where the rows that tasks gave wait until they are loaded.

Spark's own writer puts them there and counts one attempt of each task, whatever was
retried or ran twice; from then on they are what they are, and workers are not run
again because an executor is lost.
"""

from __future__ import annotations

import shutil
from abc import abstractmethod
from typing import Final, TypeAlias

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from etlstage.pipeline.dead_letter.record import DeadLetter
from etlstage.pipeline.interfaces import Landing
from etlstage.settings.units import local_path
from etlstage.spark.dataframe.fit import with_text
from etlstage.spark.errors import explain
from etlstage.spark.task.chain import ROWS, Chain, TaskEnd
from etlstage.telemetry.log import Log

__all__ = ("Pages", "StagedLoad", "Staging")

Pages: TypeAlias = "tuple[tuple[int, int], tuple[int, int]]"
"""The first and the last of some pages, each by its partition and its number."""

_AT_ONCE: Final = 4 * 1024 * 1024  # bytes of letters, about
_log = Log()


class Staging:
    """
    One folder of rows, removed when it is not needed any more.

    Args:
        folder: A path, or the URL of a file system that all executors see.

    """

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def fill(self, messages: DataFrame, chain: Chain) -> None:
        """Pass ``messages`` through the stages of ``chain``; blocks."""
        made = messages.mapInArrow(chain.run, ROWS)
        made.write.mode("overwrite").option("compression", "lz4").parquet(self._folder)

    def outcomes(self, spark: SparkSession) -> list[TaskEnd]:
        """Return what became of the tasks, in the order of the partitions; blocks."""
        rows = self._notes(spark).where("place is null").collect()
        found = [TaskEnd.from_note(row["partition"], row["note"]) for row in rows]
        return sorted(found, key=lambda outcome: outcome.partition)

    def pages(self, spark: SparkSession) -> list[Pages]:
        """Return where the dead letters are, in parts to be read one by one; blocks."""
        letters = self._notes(spark).where("place is not null")
        sizes = letters.groupBy("partition", "place").agg(sf.sum(sf.length("note")))
        return _pages(
            sorted((part, page, size) for part, page, size in sizes.collect())
        )

    def letters(
        self, spark: SparkSession, pages: Pages
    ) -> list[tuple[int, DeadLetter]]:
        """Return the dead letters of some pages, each with its partition; blocks."""
        (first, start), (last, end) = pages
        chosen = self._notes(spark).where(
            f"place is not null and partition between {first} and {last}"
            f" and (partition > {first} or place >= {start})"
            f" and (partition < {last} or place <= {end})"
        )
        found = [
            (partition, page, DeadLetter.from_line(note.encode()))
            for partition, page, note in chosen.collect()
        ]
        found.sort(key=lambda item: (*item[:2], item[2].place))
        return [(partition, letter) for partition, _, letter in found]

    def messages(self, spark: SparkSession) -> DataFrame:
        """
        Return the messages that left the last stage.

        Columns: ``partition`` and ``place``, which together give their order, the
        message as ``raw``, binary, and as ``value``, a string, null where it is no
        UTF-8.
        """
        rows = self._rows(spark).where("value is not null")
        return with_text(rows.withColumnRenamed("value", "raw"))

    def remove(self, spark: SparkSession) -> None:
        """Remove the rows, as far as that can be done; blocks."""
        path = local_path(self._folder)
        if path is not None:
            shutil.rmtree(path, ignore_errors=True)
            return
        # What Spark offers over Connect, too: it leaves an empty file or two.
        empty = spark.createDataFrame([], ROWS)
        try:
            empty.write.mode("overwrite").parquet(self._folder)
        except Exception as error:
            # It is no reason for a run to fail, nor to hide why one has.
            _log.warning(
                "staging directory could not be removed",
                folder=self._folder,
                error=explain(error),
            )

    def _notes(self, spark: SparkSession) -> DataFrame:
        rows = self._rows(spark).where("note is not null")
        return rows.select("partition", "place", "note")

    def _rows(self, spark: SparkSession) -> DataFrame:
        return spark.read.schema(ROWS).parquet(self._folder)


def _pages(sizes: list[tuple[int, int, int]]) -> list[Pages]:
    """Join pages, given with their bytes, as far as they are read at once."""
    found: list[Pages] = []
    room = 0
    for partition, page, size in sizes:
        here = partition, page
        if size <= room:
            found[-1] = found[-1][0], here
            room -= size
        else:
            found.append((here, here))
            room = _AT_ONCE - size
    return found


class StagedLoad(Landing):
    """Loads what waits in a staging folder."""

    @abstractmethod
    async def load(self, messages: DataFrame, starts: dict[int, int]) -> None:
        """
        Load the messages, all of them, and mark the output as complete.

        Args:
            messages: As :meth:`Staging.messages` gives them.
            starts: For each partition, the place of its first message among all.

        Raises:
            StageError: If they can't be loaded.

        """
