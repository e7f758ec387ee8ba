"""
Databases of the tests: PostgreSQL in a process of its own, and the drivers of Java.

Missing programs are installed from Debian's packages, by root; other users are shown
what to install. The server refuses to run as root, and is then run by the user of its
package. It is not a child process of the tests; the watchdog of workers ends it with
them, even if they are killed.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import shutil
import socket
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from copy import copy
from pathlib import Path
from typing import Final, Self

from etlstage.transport.watchdog import VARIABLE, WATCHDOG, scratch

__all__ = ("PostgreSQL", "SQLite", "drivers", "install", "postgresql", "url_of")

_JARS: Final = {
    "libpostgresql-jdbc-java": Path("/usr/share/java/postgresql.jar"),
    "libxerial-sqlite-jdbc-java": Path("/usr/share/java/sqlite-jdbc.jar"),
}
_VERSIONS: Final = Path("/usr/lib/postgresql")
_PASSWORD: Final = "the password of tests"  # noqa: S105


def drivers() -> str:
    """Return the drivers for Java as Spark's setting ``spark.jars`` has them."""
    install([name for name, jar in _JARS.items() if not jar.exists()])
    return ",".join(map(str, _JARS.values()))


class SQLite:
    """A database in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        url = f"jdbc:sqlite:{path}"
        self.options = {"url": url, "driver": "org.sqlite.JDBC"}

    def ask(self, statement: str) -> list[str]:
        """Return the rows that a statement gives, each as a line."""
        with closing(sqlite3.connect(self._path)) as base:
            rows = base.execute(statement).fetchall()
            base.commit()
        return ["|".join(map(str, row)) for row in rows]

    def tables(self) -> list[str]:
        """Return the names of all tables."""
        return sorted(self.ask("select name from sqlite_master where type = 'table'"))


class PostgreSQL:
    """
    An empty server on the loopback interface.

    Attributes:
        port: The port it listens on.
        pid: PID of its process, and of the process group.
        database: The database that statements are for.

    """

    user: Final = "etlstage"
    password: Final = _PASSWORD

    def __init__(self, folder: Path, programs: Path) -> None:
        self._folder = folder
        self._programs = programs
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.pid: int = 0
        self.database: str = "postgres"

    @property
    def options(self) -> dict[str, str]:
        """Options with which Spark connects to it."""
        return {
            "url": f"jdbc:postgresql://127.0.0.1:{self.port}/{self.database}",
            "driver": "org.postgresql.Driver",
            "user": self.user,
            "password": self.password,
        }

    def create(self) -> None:
        """Create its data folder."""
        secret = self._folder / "password"
        secret.write_text(_PASSWORD)
        names = "-U", self.user, "-A", "scram-sha-256", "--pwfile", str(secret)
        self._run("initdb", "--no-sync", *names)

    def start(self) -> None:
        """Start it, and return when it answers."""
        listens = f"-p {self.port} -k {self._folder} -c listen_addresses=127.0.0.1 -F"
        log = str(self._folder / "log")
        WATCHDOG.expect()
        try:
            self._run("pg_ctl", "start", "-w", "-o", listens, "-l", log)
            told = self._folder / "data" / "postmaster.pid"
            self.pid = int(told.read_text().split()[0])
        except BaseException:
            WATCHDOG.give_up()
            raise
        WATCHDOG.register(self.pid)

    def stop(self) -> None:
        """Kill it; what was committed is there when it starts again."""
        WATCHDOG.unregister(self.pid)
        self._run("pg_ctl", "stop", "-w", "-m", "immediate")

    def another(self, database: str) -> Self:
        """Return the same server with a new database."""
        self.ask(f'create database "{database}"')
        new = copy(self)
        new.database = database
        return new

    def ask(self, statement: str) -> list[str]:
        """Return the rows that a statement gives, each as a line."""
        done = subprocess.run(
            [
                *(self._programs / "psql", "-h", "127.0.0.1", "-p", str(self.port)),
                *("-U", self.user, "-d", self.database, "-X", "-q", "-A", "-t"),
                *("-v", "ON_ERROR_STOP=1", "-c", statement),
            ],
            env={"PGPASSWORD": _PASSWORD},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    def tables(self) -> list[str]:
        """Return the names of all tables."""
        return sorted(
            self.ask(
                "select relname from pg_class where relkind = 'r'"
                " and relnamespace = 'public'::regnamespace"
            )
        )

    def _run(self, program: str, *arguments: str) -> None:
        # Not to a pipe, which the server would keep open.
        with (self._folder / program).open("w+") as said:
            done = subprocess.run(
                [self._programs / program, "-D", self._folder / "data", *arguments],
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env={**os.environ, VARIABLE: WATCHDOG.mark},
                user=_owner(),
                check=False,
            )
            said.seek(0)
            assert done.returncode == 0, said.read()


@contextmanager
def postgresql() -> Iterator[PostgreSQL]:
    """Start a server, and stop it at the end."""
    if not _programs():
        install(["postgresql"])
    # Not below the folders of pytest, which only their owner may enter.
    with scratch("database") as folder:
        if (owner := _owner()) is not None:
            shutil.chown(folder, owner)
        server = PostgreSQL(folder, _programs()[-1])
        server.create()
        server.start()
        try:
            yield server
        finally:
            server.stop()


def _programs() -> Sequence[Path]:
    """Return the folders of programs, one for each version, the newest last."""
    found = _VERSIONS.glob("*/bin/postgres")
    return sorted(
        (path.parent for path in found), key=lambda path: int(path.parent.name)
    )


def _owner() -> str | None:
    """Return the user who runs the server, if we may not."""
    if os.geteuid():
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    raise RuntimeError(
        "there is neither the user postgres nor nobody to run PostgreSQL"
    )


def install(packages: Sequence[str]) -> None:
    """Install packages of Debian, as root; other users are shown which."""
    if not packages:
        return
    wanted = f"apt-get install {' '.join(packages)}"
    if os.geteuid() or shutil.which("apt-get") is None:
        raise RuntimeError(f"the tests need more than is installed: {wanted}")
    # Several processes of tests may want them at the same time.
    with (Path(tempfile.gettempdir()) / "etlstage-install.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        # The installation of a process that was killed may still be running.
        apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300"]
        for command in (
            [*apt, "update"],
            [*apt, "install", "-y", "--no-install-recommends", *packages],
        ):
            done = subprocess.run(
                command, env=quiet, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr


def url_of(server: PostgreSQL) -> str:
    """Return the URL of a server, for drivers of Python."""
    password = server.password.replace(" ", "%20")
    at = f"127.0.0.1:{server.port}/{server.database}"
    return f"postgresql://{server.user}:{password}@{at}"
