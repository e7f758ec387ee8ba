"""
A database, as the driver's JVM reaches it: with Spark's own options and dialects.

Spark writes rows in a transaction for each task, and offers none across tasks. So
statements that must take effect together are executed here, over a connection that
Spark makes as for its own writers; Spark's dialects define how names and types are
written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from etlstage.spark.session.job import over_connect

__all__ = (
    "CommitRefused",
    "Database",
    "DatabaseConnection",
    "create_unknown",
    "for_writers",
    "option",
    "with_option",
)

_NO_TABLE: Final = ("42P01", "42S02", "42S03", "42S04", "42Y07")
"""SQLSTATEs of databases for a missing table; SQLite has only a text."""


class CommitRefused(Exception):
    """An epoch can't be loaded, or was not; the text has the reason."""


class Database:
    """
    A database that a session can write to.

    Args:
        spark: A session with our own JVM.
        options: Options of format jdbc.

    Raises:
        CommitRefused: If the session is one over Spark Connect.

    """

    def __init__(self, spark: SparkSession, options: Mapping[str, str]) -> None:
        if over_connect(spark):
            raise CommitRefused(
                "over Spark Connect an epoch can't be loaded in a transaction: use a"
                " session with a JVM of its own"
            )
        # PySpark offers no other access to these.
        java: Any = spark._jvm
        self._session: Any = spark._jsparkSession
        jdbc = java.org.apache.spark.sql.execution.datasources.jdbc
        scala = java.org.apache.spark.api.python.PythonUtils
        self._utils = jdbc.JdbcUtils
        self._options = jdbc.JdbcOptionsInWrite(scala.toScalaMap(dict(options)))
        dialects = java.org.apache.spark.sql.jdbc.JdbcDialects
        self._dialect = dialects.get(self._options.url())

    @property
    def known(self) -> bool:
        """Whether Spark has a dialect for the database."""
        return not str(self._dialect.getClass().getName()).endswith(".NoopDialect$")

    def quoted(self, name: str) -> str:
        """Return the name of a column, quoted for a statement."""
        text: str = self._dialect.quoteIdentifier(name)
        return text

    @contextmanager
    def connected(self) -> Iterator[DatabaseConnection]:
        """Open a connection on which each statement is a transaction of its own."""
        made = self._dialect.createConnectionFactory(self._options).apply(-1)
        try:
            yield DatabaseConnection(made)
        finally:
            made.close()

    def create(
        self, connection: DatabaseConnection, table: str, schema: StructType
    ) -> None:
        """Create a table with the types that Spark's dialect has for the columns."""
        java = self._session.parseDataType(schema.json())
        self._utils.createTable(connection.java, table, java, False, self._options)


def option(options: Mapping[str, str], name: str) -> str:
    """Return an option, in whatever case its name is; empty: there is none."""
    return next((v for k, v in options.items() if k.lower() == name), "")


def with_option(options: Mapping[str, str], name: str, value: str) -> dict[str, str]:
    """Return the options with one replaced; others keep their case for the driver."""
    return {**{k: v for k, v in options.items() if k.lower() != name}, name: value}


def for_writers(options: Mapping[str, str]) -> Mapping[str, str]:
    """Return the options with no more writers than the database can have."""
    if option(options, "url").startswith("jdbc:sqlite:"):
        return with_option(options, "numpartitions", "1")
    return options


def create_unknown(
    spark: SparkSession, options: Mapping[str, str], schema: StructType
) -> bool:
    """
    Create a missing table if Spark would not; return whether it was created.

    Without a dialect for a database Spark can't tell a missing table from other errors.
    """
    if over_connect(spark):
        return False
    database = Database(spark, options)
    if database.known:
        return False
    with database.connected() as connection:
        table = option(options, "dbtable")
        if connection.columns(table) is not None:
            return False
        database.create(connection, table, schema)
        return True


class DatabaseConnection(NamedTuple):
    """A connection to a database."""

    java: Any

    def execute(self, statement: str, *values: str | int, timeout: int = 0) -> int:
        """
        Execute a statement, and return how many rows it has changed.

        Args:
            statement: With a question mark for each value.
            values: The values.
            timeout: Seconds that it may take; 0: no limit.

        """
        prepared = self._prepared(statement, values)
        try:
            prepared.setQueryTimeout(timeout)
            return int(prepared.executeUpdate())
        finally:
            prepared.close()

    def row(self, query: str, *values: str | int) -> tuple[Any, ...] | None:
        """Return the first row of a query."""
        prepared = self._prepared(query, values)
        try:
            found = prepared.executeQuery()
            if not found.next():
                return None
            count = found.getMetaData().getColumnCount()
            return tuple(found.getObject(i + 1) for i in range(count))
        finally:
            prepared.close()

    def has_rows(self, table: str) -> bool:
        """Return whether a table that exists has any rows."""
        prepared = self._prepared(f"SELECT 1 FROM {table}", ())
        try:
            prepared.setMaxRows(1)
            return bool(prepared.executeQuery().next())
        finally:
            prepared.close()

    def columns(self, table: str) -> list[str] | None:
        """Return the names of the columns of a table; None: there is no such table."""
        try:
            # Some databases look for the table here, others when the query is executed.
            prepared = self._prepared(f"SELECT * FROM {table} WHERE 1=0", ())
            try:
                about = prepared.executeQuery().getMetaData()
                return [
                    about.getColumnName(i + 1) for i in range(about.getColumnCount())
                ]
            finally:
                prepared.close()
        except Py4JJavaError as error:
            raised = error.java_exception
            text = str(raised.getMessage()).lower()
            if "no such table" in text or _state(raised) in _NO_TABLE:
                return None
            raise

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Execute the statements of this context in one transaction."""
        self.java.setAutoCommit(False)
        try:
            yield
            self.java.commit()
        except BaseException:
            # What has failed may be the connection itself.
            with suppress(Exception):
                self.java.rollback()
            raise
        self.java.setAutoCommit(True)

    def _prepared(self, statement: str, values: Sequence[str | int]) -> Any:  # noqa: ANN401
        prepared = self.java.prepareStatement(statement)
        for i, value in enumerate(values):
            if isinstance(value, int):
                prepared.setLong(i + 1, value)
            else:
                prepared.setString(i + 1, value)
        return prepared


def _state(raised: Any) -> str:  # noqa: ANN401
    """Return the SQLSTATE of what Java raised."""
    return str(raised.getSQLState()) if hasattr(raised, "getSQLState") else ""
