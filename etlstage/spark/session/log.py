"""
Where Spark's log goes instead of the screen.

The JVM outlives its sessions, and so does its log: there is one file per process, which
is removed at the end unless a message has named it.
"""

from __future__ import annotations

import atexit
import logging
import os
import tempfile
from pathlib import Path
from typing import Final

from pyspark import SparkContext
from pyspark.logger import PySparkLogger

from etlstage.transport.watchdog import WATCHDOG

__all__ = ("divert", "jvm_log", "keep")

_LOGGERS: Final = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")
"""Loggers by which PySpark prints exceptions that it also raises, as JSON on stderr."""

_path: Path | None = None
_kept: set[Path] = set()


def jvm_log(wanted: Path | None) -> Path | None:
    """
    Return the log of this process's JVM, or None when it was not started by us.

    Args:
        wanted: The log of a JVM that is still to be started, by default a temporary
            file.

    """
    global _path
    if _path is None and getattr(SparkContext, "_gateway", None) is None:
        _path = wanted or _temporary()
    return _path


def keep(path: Path | None) -> None:
    """Leave ``path`` in place at the end of the process: an error names it."""
    if path is not None:
        _kept.add(path)
        WATCHDOG.drop_folder(str(path))


def divert(path: Path) -> None:
    """Send to ``path`` what PySpark itself would print on stderr."""
    for name in _LOGGERS:
        logger = PySparkLogger.getLogger(name)
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
        logger.addHandler(logging.FileHandler(path, delay=True))
    # A thread of PySpark's prints a traceback when the JVM has ended, which is reported
    # anyway; if that thread is printing when we exit, Python aborts.
    server = getattr(SparkContext._active_spark_context, "_accumulatorServer", None)
    if server is not None:
        server.handle_error = _unheard


def _unheard(*_: object) -> None:
    pass


def _temporary() -> Path:
    descriptor, name = tempfile.mkstemp(prefix="etlstage-spark-", suffix=".log")
    os.close(descriptor)
    WATCHDOG.add_folder(name)  # in case we are killed
    path = Path(name)
    atexit.register(_discard, path)
    return path


def _discard(path: Path) -> None:
    if path not in _kept:
        path.unlink(missing_ok=True)
