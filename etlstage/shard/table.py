"""
Tables of leases: in memory, in SQLite for the processes of one host, or in PostgreSQL.

All have the same three blocking operations. New rows are added in one transaction. A
row is replaced on condition that it has the owner and the counter that it had: this is
a single statement, so the database decides.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from threading import Lock
from time import monotonic, sleep
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import urlsplit

from etlstage.errors import ConfigError, EtlstageError
from etlstage.shard.lease import Lease

__all__ = (
    "LAYOUT",
    "LEASES_FILE",
    "NEWS",
    "TABLE",
    "LeaseTable",
    "MemoryLeases",
    "News",
    "PostgresLeases",
    "SQLiteLeases",
    "TableGone",
    "is_url",
    "open_leases",
    "without_password",
)

TABLE: Final = "etlstage_leases"
"""Default name of the table."""
LEASES_FILE: Final = "leases.db"
"""Name of the file with the leases in a state directory."""
LAYOUT: Final = 1
"""Version of the tables' layout in a database; raised when it changes."""
_NAME: Final = re.compile("[a-z_][a-z0-9_]{0,40}")
_COLUMNS: Final = Lease._fields
_REFUSED: Final = re.compile(
    "authentication failed|no password supplied|no pg_hba.conf entry|file is not a database"
    r"|(?:role|database) \S+ (?:does not exist|is not permitted to log in)"
)
"""Matches errors on first opening a database that a retry won't cure. libpq has no
codes for them. A server may write them in another language, and is then tried again."""
_SWITCH: Final = 0.005  # seconds between two attempts to set a file's mode
_ROW: Final = """\
    shard text primary key,
    parents text not null,
    position text,
    ended integer not null,
    owner text,
    counter bigint not null,
    switches bigint not null,
    claimant text,
    lag bigint,
    moved double precision,
    error text"""


class TableGone(EtlstageError):
    """Raised when the database failed; the operation may have been done or not."""


class News(NamedTuple):
    """What a runner publishes about its shard; None keeps the previous value."""

    lag: int | None = None
    """Number of records that the worker was given and has not committed."""
    moved: float | None = None
    """When the checkpoint was last moved, in seconds since the epoch."""
    error: str | None = None
    """Why the last worker that failed has failed."""


NEWS: Final = News()
"""No news."""


class LeaseTable(Protocol):
    """A table of leases that all runners see."""

    def read(self) -> list[Lease]:
        """
        Return all leases, in the order of their names.

        Raises:
            TableGone: If they can't be read.

        """
        ...

    def add(self, leases: Iterable[Lease], *, all_new: bool = False) -> int:
        """
        Add leases of new shards, all at once; return how many were added.

        Existing leases stay as they are.

        Args:
            leases: The leases.
            all_new: Add none if one of them exists.

        Raises:
            TableGone: If either all of them or none have been added.

        """
        ...

    def swap(self, before: Lease, after: Lease, news: News = NEWS) -> bool:
        """
        Replace a row; return False if it no longer has ``before``'s owner and counter.

        Raises:
            TableGone: If the row may or may not have been replaced.

        """
        ...

    def close(self) -> None:
        """Close the table; safe to call twice."""
        ...


class MemoryLeases:
    """Leases of the threads of one process."""

    def __init__(self) -> None:
        self._rows: dict[str, Lease] = {}
        self._lock = Lock()

    def read(self) -> list[Lease]:
        """Return all leases, in the order of their names."""
        with self._lock:
            return [self._rows[shard] for shard in sorted(self._rows)]

    def add(self, leases: Iterable[Lease], *, all_new: bool = False) -> int:
        """Add leases of new shards, all at once; return how many were added."""
        with self._lock:
            rows = {lease.shard: lease for lease in leases}
            if all_new and not rows.keys().isdisjoint(self._rows):
                return 0
            before = len(self._rows)
            self._rows = rows | self._rows
            return len(self._rows) - before

    def swap(self, before: Lease, after: Lease, news: News = NEWS) -> bool:
        """Replace a row if it still has ``before``'s owner and counter."""
        with self._lock:
            row = self._rows.get(before.shard)
            if row is None or row[4:6] != before[4:6]:
                return False
            self._rows[before.shard] = after
            return True

    def close(self) -> None:
        """Do nothing: nothing is open."""


class _DatabaseLeases:
    """
    Leases in a database, over the interface that all drivers have (PEP 249).

    Args:
        application: Application to which the table belongs. None: open an existing
            table of any application.
        table: Name of the table; a second one, ``<table>_layout``, holds its layout.
        made: Settings that determine the shards, by name; None: accept any.

    Raises:
        ConfigError: If the table is another application's, of other shards, or in
            another layout, or if the database refuses access.
        TableGone: If the database can't be reached.

    """

    mark: str
    """Placeholder for a value in a statement."""
    begin: str = "begin"
    """Statement that begins a transaction of several writes."""
    _errors: type[Exception]
    """Base of the errors that the driver raises."""

    def __init__(
        self, application: str | None, table: str, made: Mapping[str, Any] | None
    ) -> None:
        if not _NAME.fullmatch(table):
            raise ConfigError(
                f"{table!r} is not a table name, expected letters in lower case,"
                " digits and underscores, at most 41"
            )
        self._table = table
        self._lock = Lock()
        self._open_connection: Any = None
        try:
            with self._connection() as connection:
                self._prepare(connection, application, made)
        except TableGone as error:
            self.close()
            if _REFUSED.search(str(error)):
                # Trying again would be useless, and might lock the account.
                raise ConfigError(str(error)) from error
            raise
        except BaseException:
            self.close()
            raise

    def connect(self) -> Any:  # noqa: ANN401 - drivers have no type in common
        """Return a connection on which each statement is a transaction."""
        raise NotImplementedError

    def tables(self, connection: Any) -> set[str]:  # noqa: ANN401
        """Return the names of all tables."""
        raise NotImplementedError

    def ready(self, connection: Any) -> None:  # noqa: ANN401
        """Make the database ready for writes, once its tables are known to be ours."""

    def read(self) -> list[Lease]:
        """Return all leases, in the order of their names."""
        columns = ", ".join(_COLUMNS)
        with self._connection() as connection:
            rows = connection.execute(
                f"select {columns} from {self._table} order by shard"  # noqa: S608
            ).fetchall()
        return [_lease(row) for row in rows]

    def add(self, leases: Iterable[Lease], *, all_new: bool = False) -> int:
        """Add leases of new shards, all at once; return how many were added."""
        rows = {lease.shard: _row(lease) for lease in leases}
        marks = ", ".join([self.mark] * len(_COLUMNS))
        statement = (
            f"insert into {self._table} ({', '.join(_COLUMNS)})"  # noqa: S608
            f" values ({marks}) on conflict (shard) do nothing"
        )
        with self._connection() as connection:
            connection.execute(self.begin)
            # In one order: runners that add the same rows could wait for each other.
            added: int = sum(
                connection.execute(statement, rows[shard]).rowcount
                for shard in sorted(rows)
            )
            if all_new and added < len(rows):
                connection.execute("rollback")
                return 0
            connection.execute("commit")
        return added

    def swap(self, before: Lease, after: Lease, news: News = NEWS) -> bool:
        """Replace a row if it still has ``before``'s owner and counter."""
        sets = ", ".join(
            [
                *(f"{name} = {self.mark}" for name in _COLUMNS),
                *(f"{name} = coalesce({self.mark}, {name})" for name in News._fields),
            ]
        )
        # As null equals nothing, an empty text stands for no owner.
        statement = (
            f"update {self._table} set {sets} where shard = {self.mark}"  # noqa: S608
            f" and coalesce(owner, '') = {self.mark} and counter = {self.mark}"
        )
        place = (before.shard, before.owner or "", before.counter)
        with self._connection() as connection:
            values = (*_row(after), *news, *place)
            return bool(connection.execute(statement, values).rowcount)

    def news(self) -> dict[str, News]:
        """Return what was published about each shard."""
        columns = ", ".join(News._fields)
        with self._connection() as connection:
            rows = connection.execute(
                f"select shard, {columns} from {self._table}"  # noqa: S608
            ).fetchall()
        return {shard: News(*values) for shard, *values in rows}

    def forget(self) -> None:
        """Remove all leases, so that all shards begin at their beginning again."""
        with self._connection() as connection:
            connection.execute(f"delete from {self._table}")  # noqa: S608
            connection.execute(f"delete from {self._table}_layout")  # noqa: S608

    def close(self) -> None:
        """Close the connection; safe to call twice."""
        connection, self._open_connection = self._open_connection, None
        if connection is not None:
            connection.close()

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        """
        Lend the connection to one thread at a time; reconnect after an error.

        Closing it rolls back a transaction.
        """
        with self._lock:
            try:
                if self._open_connection is None:
                    self._open_connection = self.connect()
                yield self._open_connection
            except self._errors as error:
                self._give_up()
                raise TableGone(
                    f"lease table {self._table}: {str(error).strip()}"
                ) from error
            except BaseException:
                self._give_up()
                raise

    def _give_up(self) -> None:
        try:
            self.close()
        except self._errors:
            return  # the connection was already gone

    def _prepare(
        self,
        connection: Any,  # noqa: ANN401
        application: str | None,
        made: Mapping[str, Any] | None,
    ) -> None:
        """Verify that the tables are ours, or absent, before anything is written."""
        layout = f"{self._table}_layout"
        there = self.tables(connection)
        if self._table in there and layout not in there:
            raise ConfigError(
                f"table {self._table} holds no leases of etlstage: give another name"
            )
        if layout in there:
            self._verify(connection, application, made)
        elif application is None:
            raise ConfigError(f"there is no lease table {self._table}")
        self.ready(connection)
        connection.execute(
            f"create table if not exists {layout} (one integer primary key,"
            " application text not null, layout integer, made text not null)"
        )
        if application is not None:
            connection.execute(
                f"insert into {layout} values (1, {self.mark}, {self.mark},"  # noqa: S608
                f" {self.mark}) on conflict (one) do nothing",
                (application, LAYOUT, json.dumps(made or {})),
            )
            # Another runner may have been first.
            self._verify(connection, application, made)
        connection.execute(f"create table if not exists {self._table} (\n{_ROW}\n)")

    def _verify(
        self,
        connection: Any,  # noqa: ANN401
        application: str | None,
        made: Mapping[str, Any] | None,
    ) -> None:
        """Verify that the leases are of this application, layout and shards."""
        found = connection.execute(
            f"select application, layout, made from {self._table}_layout"  # noqa: S608
        ).fetchone()
        # After forget() there is no such row.
        owner, number, of = found or (application, LAYOUT, "{}")
        application = owner if application is None else application
        if (owner, number) != (application, LAYOUT):
            raise ConfigError(
                f"lease table {self._table} belongs to application {owner!r} in layout"
                f" {number}, expected {application!r} in layout {LAYOUT}; give another"
                " name"
            )
        for name, value in json.loads(of).items():
            if made is not None and made.get(name) != value:
                raise ConfigError(
                    f"lease table {self._table} is for shards with {name} {value},"
                    f" found {name} {made.get(name)}: set it back, or start from the"
                    " beginning with 'etlstage shards reset'"
                )


class SQLiteLeases(_DatabaseLeases):
    """
    Leases of the processes of one host.

    Args:
        path: The database file; it is created if missing.
        application: Application to which the table belongs; None: any.
        table: Name of the table.
        made: Settings that determine the shards, by name; None: accept any.
        timeout: Seconds to wait for other writers.

    """

    mark = "?"
    begin = "begin immediate"
    _errors: type[Exception] = sqlite3.Error

    def __init__(
        self,
        path: Path | str,
        application: str | None,
        *,
        table: str = TABLE,
        made: Mapping[str, Any] | None = None,
        timeout: float = 5.0,
    ) -> None:
        self._path = path
        self._timeout = timeout
        self._mode = "rw" if application is None else "rwc"  # c: create the file
        super().__init__(application, table, made)

    def connect(self) -> sqlite3.Connection:
        """Return a connection on which each statement is a transaction."""
        connection = sqlite3.connect(
            f"{Path(self._path).absolute().as_uri()}?mode={self._mode}",
            timeout=self._timeout,
            isolation_level=None,
            check_same_thread=False,
            uri=True,
        )
        connection.execute("pragma synchronous = normal")
        return connection

    def ready(self, connection: sqlite3.Connection) -> None:
        """Switch to a write-ahead log; SQLite doesn't wait for others that do so."""
        # A process that is suspended during a write blocks all others. A write that
        # does not wait for the disk is so short that this is unlikely. What is lost
        # when the host crashes is processed again.
        end = monotonic() + self._timeout
        while True:
            try:
                connection.execute("pragma journal_mode = wal")
            except sqlite3.OperationalError as error:
                busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
                if not busy or monotonic() >= end:
                    raise
                sleep(_SWITCH)
            else:
                return

    def tables(self, connection: sqlite3.Connection) -> set[str]:
        """Return the names of all tables."""
        rows = connection.execute("select name from sqlite_master where type = 'table'")
        return {name for (name,) in rows}


class PostgresLeases(_DatabaseLeases):
    """
    Leases of the processes of many hosts; needs the extra ``postgresql``.

    Args:
        url: ``postgresql://user:password@host/database``, as libpq reads it.
        application: Application to which the table belongs; None: any.
        table: Name of the table, in the connection's schema.
        made: Settings that determine the shards, by name; None: accept any.
        options: Further options of libpq, such as ``connect_timeout``.

    """

    mark = "%s"

    def __init__(
        self,
        url: str,
        application: str | None,
        *,
        table: str = TABLE,
        made: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._url = url
        # A request to a server that is gone must not take longer than a failover.
        self._options = {"connect_timeout": 5, "tcp_user_timeout": 5000} | dict(
            options or {}
        )
        try:
            self._driver = import_module("psycopg")
        except ImportError as error:
            raise ConfigError(
                "leases in PostgreSQL need psycopg: install 'etlstage[postgresql]'"
            ) from error
        self._errors = self._driver.Error
        super().__init__(application, table, made)

    def connect(self) -> Any:  # noqa: ANN401
        """Return a connection on which each statement is a transaction."""
        return self._driver.connect(self._url, autocommit=True, **self._options)

    def tables(self, connection: Any) -> set[str]:  # noqa: ANN401
        """Return the names of all tables that an unqualified name can refer to."""
        rows = connection.execute(
            "select relname from pg_class"
            " where relkind in ('r', 'p', 'v') and pg_table_is_visible(oid)"
        )
        return {name for (name,) in rows}


def open_leases(
    where: str,
    application: str | None,
    **settings: Any,  # noqa: ANN401
) -> SQLiteLeases | PostgresLeases:
    """
    Open the leases at a URL of PostgreSQL, or else in a file of SQLite; blocks.

    Args:
        where: The URL, or the path.
        application: Application to which the table belongs. None: open an existing
            table of any application.
        settings: Passed to the class.

    Raises:
        ConfigError: If the table is missing, another application's, of other shards, or
            in another layout, or if the database refuses access.
        TableGone: If the database can't be reached.

    """
    if is_url(where):
        return PostgresLeases(where, application, **settings)
    if application is None and not os.path.isfile(where):
        raise ConfigError(f"there is no file {where}")
    return SQLiteLeases(where, application, **settings)


def is_url(where: str) -> bool:
    """Return whether ``where`` is a URL of PostgreSQL."""
    return where.startswith(("postgresql://", "postgres://"))


def without_password(where: str) -> str:
    """Return where leases are, without the password, to be shown."""
    if not is_url(where):
        return where
    parts = urlsplit(where)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _row(lease: Lease) -> tuple[object, ...]:
    # Names of parents are joined by line ends.
    if any("\n" in name for name in (lease.shard, *lease.parents)):
        raise ConfigError(f"shard {lease.shard!r}: a name can't contain a line end")
    plain = lease._replace(parents="\n".join(lease.parents))  # type: ignore[arg-type]
    return (*plain[:3], int(lease.ended), *plain[4:])


def _lease(row: Sequence[Any]) -> Lease:
    lease = Lease(*row)
    parents = tuple(str(lease.parents).split("\n")) if lease.parents else ()
    return lease._replace(parents=parents, ended=bool(lease.ended))
