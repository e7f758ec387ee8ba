"""
Storage of the rows that tasks return, until they are loaded.

Spark's own writer stores the rows and counts one attempt of each task, whatever was
retried or ran twice. From then on the rows are fixed: workers are not run again when an
executor is lost, nor, with a state directory, when the run is interrupted, as the next
start loads what this one has staged.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from etlstage.disk import sync, sync_all
from etlstage.errors import ConfigError, StateUnusable
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.delivery.delivery import unusable
from etlstage.pipeline.delivery.position import load, store
from etlstage.settings.units import literal, local_path
from etlstage.spark.dataframe.schema import with_text
from etlstage.spark.errors import explain
from etlstage.spark.task.chain import ROWS, Chain, TaskEnd
from etlstage.telemetry.log import Log
from etlstage.transport.watchdog import scratch

__all__ = ("Keeper", "Pages", "Staging", "staging_for")

Pages: TypeAlias = "tuple[tuple[int, int], tuple[int, int]]"
"""The first and the last of some pages, each by its partition and its number."""

_AT_ONCE: Final = 4 * 1024 * 1024  # bytes of letters, about
_WHOLE: Final = ".whole.json"  # ends the name of a note whose folder has all rows
_log = Log()


class Staging:
    """
    A folder of rows, removed when it is not needed any more.

    Args:
        folder: A path, or the URL of a file system that all executors see.
        note: File that records the folder, if the folder may outlive the run.
        of: Identifies what is staged among everything that might be.
        whole: Whether all rows are there already.

    Attributes:
        whole: Whether the next start may load the rows, if this one does not.

    """

    def __init__(
        self,
        folder: str,
        *,
        note: Path | None = None,
        of: str = "",
        whole: bool = False,
    ) -> None:
        self._folder = folder
        self._note = note
        self._of = of
        self.whole: bool = whole

    def keep(self) -> None:
        """
        Record that all rows are there, durably; blocks.

        Raises:
            StateUnusable: If that can't be recorded, or another run has taken over and
                removed the rows.

        """
        path = local_path(self._folder)
        if self._note is None or self.whole:
            return
        # Who takes over removes the note first, and then the rows. So they are all
        # there if there was a note to rename, whatever comes behind it.
        note = self._note.with_suffix(_WHOLE)
        try:
            if path is not None:
                sync_all(path)
            self._note.rename(note)
            sync(note.parent)
        except FileNotFoundError:
            raise StateUnusable(
                f"another run has taken over the state directory {note.parent}, and"
                " removed what this run had staged"
            ) from None
        except OSError as error:
            raise unusable(note.parent, error) from error
        self._note = note
        self.whole = True

    def note(self) -> None:
        """Record the folder, so that a later start can remove it; raises OSError."""
        assert self._note is not None
        store(self._note, {"folder": self._folder, "of": self._of})

    def fill(self, messages: DataFrame, chain: Chain) -> None:
        """Pass ``messages`` through the stages of ``chain``; blocks."""
        made = messages.mapInArrow(chain.run, ROWS)
        made.write.mode("overwrite").option("compression", "lz4").parquet(self._folder)

    def outcomes(self, spark: SparkSession) -> list[TaskEnd]:
        """Return the outcomes of the tasks, in the order of the partitions; blocks."""
        rows = self._notes(spark).where("place is null").collect()
        found = [TaskEnd.from_note(row["partition"], row["note"]) for row in rows]
        return sorted(found, key=lambda outcome: outcome.partition)

    def pages(self, spark: SparkSession) -> list[Pages]:
        """Return the pages of dead letters, in groups to be read one by one; blocks."""
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
        message as ``raw``, binary, and as ``value``, a string, null if it is not
        UTF-8.
        """
        rows = self._rows(spark).where("value is not null")
        return with_text(rows.withColumnRenamed("value", "raw"))

    def remove(self, spark: SparkSession) -> None:
        """Remove the rows, as far as possible; blocks."""
        if self._note is not None:
            self._note.unlink(missing_ok=True)
        path = local_path(self._folder)
        if path is not None:
            shutil.rmtree(path, ignore_errors=True)
            return
        # This also works over Connect; it leaves an empty file or two.
        empty = spark.createDataFrame([], ROWS)
        try:
            empty.write.mode("overwrite").parquet(self._folder)
        except Exception as error:
            # This must not fail a run, nor hide why one has failed.
            _log.warning(
                "staging directory could not be removed",
                folder=self._folder,
                error=explain(error),
            )

    def _notes(self, spark: SparkSession) -> DataFrame:
        rows = self._rows(spark).where("note is not null")
        return rows.select("partition", "place", "note")

    def _rows(self, spark: SparkSession) -> DataFrame:
        return spark.read.schema(ROWS).parquet(literal(self._folder))


def _pages(sizes: list[tuple[int, int, int]]) -> list[Pages]:
    """Group pages, given with their bytes, up to the size that is read at once."""
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


class Keeper(NamedTuple):
    """
    A load for which a staging folder is kept until it is recorded as loaded.

    Each start has its own folder: one that was taken over may still write to its.
    """

    state: Path
    """The state directory."""
    load: str
    """The load, which the folder is named after."""
    start: int
    """Identifies this start of the load."""
    of: str
    """Identifies what is staged among everything that might be."""

    def find(self, spark: SparkSession) -> Staging | None:
        """Return what an earlier start has staged for this load; remove all else."""
        while True:
            try:
                return self._find(spark)
            except FileNotFoundError:
                pass  # a run that was taken over has just renamed its note

    def _find(self, spark: SparkSession) -> Staging | None:
        found: Staging | None = None
        for path in sorted(self.state.glob("staging-*.json"), reverse=True):
            try:
                about = load(path)
                folder, of = about["folder"], about["of"]
            except (ValueError, TypeError, KeyError):
                path.unlink()
                continue
            whole = path.name.endswith(_WHOLE)
            staging = Staging(folder, note=path, of=of, whole=whole)
            ours = path.name.startswith(f"staging-{self.load}-") and of == self.of
            if found is None and whole and ours:
                found = staging
            else:
                path.unlink()
                staging.remove(spark)
        return found

    def make(self, parent: str | None, name: str) -> Staging:
        """Return a new one in ``parent``, which all executors see, or in the state."""
        named = f"{self.load}-{self.start}"
        inside = self.state / f"staging-{named}"
        folder = str(inside) if parent is None else f"{parent}/{name}-{named}"
        staging = Staging(folder, note=inside.with_suffix(".json"), of=self.of)
        staging.note()
        return staging


@contextmanager
def staging_for(
    spark: SparkSession, folder: str | None, name: str, keeper: Keeper | None = None
) -> Iterator[Staging]:
    """
    Make a staging folder, and remove it at the end unless it is to be kept.

    Args:
        spark: The session.
        folder: Its parent, a path or URL that all executors see; None: the system's
            temporary directory, or the keeper's state directory.
        name: Prefix of its name.
        keeper: The load for which it is kept, if it is.

    Raises:
        ConfigError: If ``folder`` is None and Spark is not on this machine alone.
        StateUnusable: If the folder can't be recorded.

    """
    master = str(spark.conf.get("spark.master", ""))
    if folder is None and not master.startswith("local"):
        raise ConfigError(
            f"stages on the executors of {master or 'a server'} need the key"
            " spark.staging: a folder that all of them can access, such as"
            " hdfs:///tmp/etlstage"
        )
    if keeper is not None:
        try:
            staging = keeper.find(spark) or keeper.make(folder, name)
        except OSError as error:
            raise unusable(keeper.state, error) from error
    elif folder is not None:
        staging = Staging(f"{folder}/{name}-{secrets.token_hex(4)}")
    else:
        # A task that was interrupted may still write for a moment.
        with scratch("staging") as temporary:
            yield Staging(f"{temporary}/rows")
        return
    try:
        yield staging
    finally:
        if not staging.whole:
            staging.remove(spark)
