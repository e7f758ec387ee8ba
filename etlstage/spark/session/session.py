"""
The Spark session of a pipeline: built from settings, or the embedder's own.

A session that we start, we stop; one that was there before, we leave as it was. A
session that we start in local mode stays on the loopback interface, runs its Python
workers with this interpreter and keeps its log off the screen. The JVM itself lives on
until the process ends, as PySpark intends.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import anyio
import anyio.to_thread
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from etlstage.errors import SparkUnavailable
from etlstage.spark.errors import GONE, explain
from etlstage.spark.session.cluster import ClusterHome
from etlstage.spark.session.java import find_java
from etlstage.spark.session.job import over_connect
from etlstage.spark.session.launch import launching
from etlstage.spark.session.log import divert, jvm_log, keep
from etlstage.transport.watchdog import WATCHDOG, discard_scratch, make_scratch

__all__ = ("Session",)

WAREHOUSE: Final = "spark.sql.warehouse.dir"


class Session:
    """
    A Spark session, for as long as the context lasts.

    A session that the process already has is used as it is, without the settings.

    Attributes:
        log_path: Spark's log, or None if we did not start the JVM. It is removed at the
            end of the process unless the context ended with an exception.

    """

    def __init__(
        self,
        spark: SparkSession | None = None,
        *,
        master: str | None = None,
        remote: str | None = None,
        config: Mapping[str, object] | None = None,
        log_path: Path | None = None,
    ) -> None:
        """
        Take the settings; nothing is started yet.

        Args:
            spark: The embedder's session, never stopped here.
            master: Where Spark runs, by default ``local[*]``.
            remote: A Spark Connect server, as ``sc://host``, in place of a master;
                ``local[*]`` starts one in this process.
            config: Spark's own settings; they override the defaults.
            log_path: Where the JVM logs, by default a temporary file.

        """
        if remote is not None and master is not None:
            raise ValueError(
                f"master {master} and remote {remote} can't be used together"
            )
        if remote is not None and not remote.startswith(("sc://", "local")):
            raise ValueError(
                f"remote {remote} is not a server, expected sc://host:port or local[*]"
            )
        self._spark = spark
        self._master = master if master or remote else "local[*]"
        self._remote = remote
        self._config = {key: _text(value) for key, value in (config or {}).items()}
        self._owned = False
        self._lock = threading.Lock()
        self._warehouse: Path | None = None
        self.log_path = log_path

    @classmethod
    def of(cls, spark: SparkSession | Session) -> Session:
        """Return ``spark`` as a :class:`Session`."""
        return spark if isinstance(spark, Session) else cls(spark)

    def __reduce__(self) -> tuple[type[Session], tuple[()]]:
        """Pickle without any state: each process has a session of its own."""
        return Session, ()

    @property
    def spark(self) -> SparkSession:
        """The session itself; only within the context."""
        if self._spark is None:
            raise RuntimeError("the session is not started: use 'async with Session()'")
        return self._spark

    def start(self) -> SparkSession:
        """
        Start the session, or find the one that is there; blocks for seconds.

        Threads may call it at the same time: one of them starts it.

        Raises:
            SparkUnavailable: If there is no usable Java, or Spark does not start.

        """
        with self._lock:
            if self._spark is None:
                self._spark = _running(self._remote)
            if self._spark is None:
                try:
                    self._spark = self._build()
                except BaseException:
                    self._drop_warehouse()
                    raise
                self._owned = True
            return self._spark

    def stop(self, *, failed: bool = False) -> None:
        """
        Stop the session if we have started it; blocks.

        Args:
            failed: Whether Spark's log may still be needed.

        """
        if failed:
            keep(self.log_path)
        if not self._owned or self._spark is None:
            return
        self._owned = False
        spark, self._spark = self._spark, None
        # The JVM may have ended before us.
        with suppress(*GONE):
            spark.stop()
        self._drop_warehouse()

    async def release(self, error: Exception | None) -> None:
        """
        Stop the session if we have started it.

        Args:
            error: Why its users have failed; Spark's log is kept if the text names it.

        """
        failed = self.log_path is not None and str(self.log_path) in str(error)
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(lambda: self.stop(failed=failed))

    async def __aenter__(self) -> Self:
        await anyio.to_thread.run_sync(self.start)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(lambda: self.stop(failed=kind is not None))

    def _build(self) -> SparkSession:
        where = self._remote or self._master
        # Unless we start a JVM, there is neither a Java to find nor a log.
        launch: AbstractContextManager[None] = nullcontext()
        if self._local or self._remote is None:
            self.log_path = jvm_log(self.log_path)
        settings, environ = self._settings(), dict[str, str]()
        if self._local and self._remote is not None:
            environ = _for_server(settings)
            settings = {"spark.remote": self._remote}
        if self.log_path is not None:
            java = find_java()
            if where is not None and where.startswith("local-cluster"):
                home = ClusterHome(java)
                settings, environ = home.settings | settings, environ | home.environ
            launch = launching(
                java, self.log_path, python=self._python, environ=environ
            )
        builder = SparkSession.builder
        for key, value in settings.items():
            builder = builder.config(key, value)
        try:
            with launch:
                spark = builder.getOrCreate()
        except Exception as error:
            keep(self.log_path)
            raise SparkUnavailable(
                f"can't start a Spark session on {where}: "
                f"{explain(error, self.log_path)}"
            ) from error
        if self.log_path is not None:
            divert(self.log_path)
            _have_ended()
        return spark

    def _drop_warehouse(self) -> None:
        if self._warehouse is not None:
            # Only when empty: a table in there is the user's.
            discard_scratch(self._warehouse)

    @property
    def _local(self) -> bool:
        return (self._remote or self._master or "").startswith("local")

    @property
    def _python(self) -> str | None:
        """The interpreter of Spark's Python workers; None leaves it to Spark."""
        if not self._local:
            return None
        return self._config.get("spark.pyspark.python", sys.executable)

    def _settings(self) -> dict[str, str]:
        if self._remote is not None and not self._local:
            return {"spark.remote": self._remote, **self._config}
        settings = {"spark.ui.showConsoleProgress": "false"}
        if self._remote is not None:
            settings["spark.connect.grpc.binding.address"] = "127.0.0.1"
        elif self._master is not None:
            settings["spark.master"] = self._master
        if self._local:
            self._warehouse = make_scratch("warehouse")
            settings |= {
                "spark.ui.enabled": "false",
                "spark.driver.host": "127.0.0.1",
                "spark.driver.bindAddress": "127.0.0.1",
                WAREHOUSE: str(self._warehouse),
            }
        return settings | self._config


def _have_ended() -> None:
    """Let the watchdog end our JVM after us, whatever the JVM is doing then."""
    # PySpark has no other way to its pid; our own server has a gateway, too.
    process = getattr(getattr(SparkContext, "_gateway", None), "proc", None)
    if process is not None:
        WATCHDOG.add_java(process.pid)


def _text(value: object) -> str:
    """Return ``value`` of a YAML file as Spark writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _for_server(settings: dict[str, str]) -> dict[str, str]:
    """
    Return the environment variables that pass settings to our own server.

    Settings given to the builder also go to the client, which warns of each one that
    only a server may have. PySpark's shell passes settings in variables, but of these
    ``spark.sql.*`` go to the client, too. So the static one among these, the warehouse,
    is passed to the JVM.
    """
    warehouse = f"--conf {WAREHOUSE}={shlex.quote(settings.pop(WAREHOUSE))}"
    arguments = os.environ.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell")
    return {
        "PYSPARK_REMOTE_INIT_CONF_LEN": "1",
        "PYSPARK_REMOTE_INIT_CONF_0": json.dumps(settings),
        "PYSPARK_SUBMIT_ARGS": f"{warehouse} {arguments}",
    }


def _running(remote: str | None) -> SparkSession | None:
    try:
        spark = SparkSession.active()
    except PySparkException:
        return None
    if remote is not None and not over_connect(spark):
        raise SparkUnavailable(
            f"remote {remote} was requested, but this process runs a classic session: "
            "stop that session first"
        )
    return spark
