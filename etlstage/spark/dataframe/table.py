"""
The epochs of one load, in a table of a database.

The rows of an epoch are written to a staging table, private to the run. One
transaction then adds them to the table and notes in the table ``etlstage_epochs``
that they are there, with the record that belongs to the epoch: a run that was killed
before the record was stored in the state directory finds it there, and resumes after
it. The fence is there, too: a run that was taken over commits nothing more.

``etlstage_epochs`` has one row for each load, beside the table it is about::

    load_id   what the epochs of a load have in common, over all its starts
    fence     of the start that may commit; its staging table has it in its name
    epoch     the last that is in the table
    note      its record, as JSON
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from etlstage.pipeline.delivery.place import taken
from etlstage.pipeline.interfaces import Epochs
from etlstage.spark.dataframe.database import (
    CommitRefused,
    Database,
    DatabaseConnection,
    for_writers,
    option,
    with_option,
)

__all__ = ("EpochTable",)

_EPOCHS: Final = "etlstage_epochs"
_COLUMNS: Final = (
    "load_id VARCHAR(64) NOT NULL PRIMARY KEY, fence BIGINT NOT NULL,"
    " epoch BIGINT NOT NULL, note TEXT NOT NULL"
)
_BEFORE: Final = re.compile(r"""(?:(?:"[^"]*"|`[^`]*`|[^."`])+\.)*""")
"""The schema before the name of a table, with the dot."""
_TIMEOUT: Final = 30  # seconds for the row of a load, which another start may lock


class EpochTable:
    """
    A table into which epochs are loaded once.

    Args:
        options: Options of format jdbc, with ``dbtable``.
        epochs: What was loaded before.

    Raises:
        Exception: From any method: the database's error, or that there is no driver.

    """

    def __init__(self, options: Mapping[str, str], epochs: Epochs) -> None:
        self._options = for_writers(options)
        self._table = option(options, "dbtable")
        before = _BEFORE.match(self._table)
        schema = before[0] if before is not None else ""
        self._epochs = f"{schema}{_EPOCHS}"
        self._load = epochs.load
        self._fence = epochs.start
        self._moved_from = epochs.moved_from
        self._stage = f"{schema}{self._staging(epochs.start)}"
        self._schema = schema
        self._names = ""
        self._staged = False
        self._database: Database | None = None

    @property
    def staging(self) -> dict[str, str]:
        """Options by which Spark writes to the staging table."""
        return with_option(self._options, "dbtable", self._stage)

    def noted(self, spark: SparkSession) -> str | None:
        """
        Fence off all other starts of the load, and return its last note.

        Raises:
            CommitRefused: If another start has fenced off this one.

        """
        self._database = database = Database(spark, self._options)
        with database.connected() as connection:
            if connection.columns(self._epochs) is None:
                return None
            with connection.transaction():
                found = self._fenced(connection)
            if found is None:
                return None
            if found[0] != self._fence:
                left = self._schema + self._staging(found[0])
                # A start that was stopped while writing to it may lock it for long.
                with suppress(Exception):
                    connection.execute(f"DROP TABLE IF EXISTS {left}", timeout=5)
            return found[2]

    def open(
        self, spark: SparkSession, schema: StructType, *, done: int, adds: bool
    ) -> str | None:
        """
        Prepare for the epochs to come; return an objection, if there is one.

        Args:
            spark: The session.
            schema: The columns.
            done: The last epoch that is recorded.
            adds: Whether rows may be added to a table that exists already.

        """
        self.noted(spark)
        database = self._database
        assert database is not None
        with database.connected() as connection:
            columns = connection.columns(self._table)
            if connection.columns(self._epochs) is None:
                connection.execute(f"CREATE TABLE {self._epochs} ({_COLUMNS})")
            found = self._found(connection)
            others = found is None
            if columns is not None and self._moved_from:
                # The load may be known from another table. One without rows is no output.
                others = connection.has_rows(self._table)
            if columns is not None and others and not adds:
                return taken(f"table {self._table}", self._moved_from, remedy="drop")
            if found is None:
                connection.execute(
                    f"INSERT INTO {self._epochs} (load_id, fence, epoch, note)"
                    " VALUES (?, ?, ?, ?)",
                    *(self._load, self._fence, done, ""),
                )
            elif found[1] != done:
                return (
                    f"{self._epochs} has epoch {found[1]} of load {self._load}, but the"
                    f" recorded epoch is {done}: was the database restored to an earlier"
                    " state? After 'etlstage state reset' everything is loaded again"
                )
            if columns is None:
                database.create(connection, self._table, schema)
                columns = connection.columns(self._table) or []
        return self._match(schema.names, columns)

    def stage(self) -> None:
        """Make the staging table, unless the epoch has one."""
        if self._staged:
            return
        assert self._database is not None
        with self._database.connected() as connection:
            connection.execute(f"DROP TABLE IF EXISTS {self._stage}")
            # With the types of the table it accepts whatever the table accepts.
            connection.execute(
                f"CREATE TABLE {self._stage} AS SELECT {self._names} FROM {self._table}"
                " WHERE 1=0"
            )
        self._staged = True

    def commit(self, number: int, note: str, *, rows: int, replaces: bool) -> None:
        """
        Add the staged rows, and store the note: both or neither.

        Args:
            number: Number of the epoch.
            note: What a start is to find that resumes after the epoch.
            rows: How many rows must be staged.
            replaces: Whether they replace all rows of the table.

        Raises:
            CommitRefused: If another start has fenced off this one, or the number of
                staged rows differs.

        """
        assert self._database is not None
        names = self._names
        with self._database.connected() as connection:
            with connection.transaction():
                changed = connection.execute(
                    f"UPDATE {self._epochs} SET epoch = ?, note = ?"
                    " WHERE load_id = ? AND fence = ? AND epoch = ?",
                    *(number, note, self._load, self._fence, number - 1),
                )
                if changed != 1:
                    raise self._taken(self._found(connection))
                if replaces:
                    connection.execute(f"DELETE FROM {self._table}")
                if self._staged:
                    added = connection.execute(
                        f"INSERT INTO {self._table} ({names})"
                        f" SELECT {names} FROM {self._stage}"
                    )
                    if added != rows:
                        raise CommitRefused(
                            f"{added} rows were staged, expected {rows}: Spark has run"
                            " a task again; the next run loads the epoch again"
                        )
            if self._staged:
                connection.execute(f"DROP TABLE {self._stage}")
        self._staged = False

    def close(self) -> None:
        """Remove the staging table."""
        if self._staged and self._database is not None:
            self._staged = False
            with self._database.connected() as connection:
                connection.execute(f"DROP TABLE IF EXISTS {self._stage}")

    def _fenced(self, connection: DatabaseConnection) -> tuple[int, int, str] | None:
        """Raise the fence; return the previous one, the last epoch and its note."""
        found = self._found(connection)
        if found is None:
            return None
        changed = connection.execute(
            f"UPDATE {self._epochs} SET fence = ? WHERE load_id = ? AND fence <= ?",
            *(self._fence, self._load, self._fence),
            timeout=_TIMEOUT,
        )
        if changed != 1:
            raise self._taken(found)
        # The run that we took over from may have committed meanwhile.
        now = self._found(connection)
        return None if now is None else (found[0], *now[1:])

    def _found(self, connection: DatabaseConnection) -> tuple[int, int, str] | None:
        """Return fence, epoch and note of the load, if it has a row."""
        found = connection.row(
            f"SELECT fence, epoch, note FROM {self._epochs} WHERE load_id = ?",
            self._load,
        )
        return None if found is None else (int(found[0]), int(found[1]), str(found[2]))

    def _match(self, wanted: Sequence[str], columns: Sequence[str]) -> str | None:
        """Find each column in the table; return an objection if one is missing."""
        assert self._database is not None
        there = {name.lower(): name for name in columns}
        there |= {name: name for name in columns}
        missing = [
            name for name in wanted if name not in there and name.lower() not in there
        ]
        if missing:
            return (
                f"table {self._table} has no column {', '.join(missing)}: it has"
                f" {', '.join(columns)}; add what is missing, or drop the table"
            )
        names = (there.get(name) or there[name.lower()] for name in wanted)
        self._names = ", ".join(map(self._database.quoted, names))
        return None

    def _staging(self, fence: int) -> str:
        return f"etlstage_{self._load}_{fence}".replace("-", "_")

    def _taken(self, found: tuple[int, int, str] | None) -> CommitRefused:
        about = "its row is missing" if found is None else f"fence {found[0]}"
        return CommitRefused(
            f"another run has taken over the load {self._load} ({about} in"
            f" {self._epochs}, this run has fence {self._fence}): nothing was committed"
        )
