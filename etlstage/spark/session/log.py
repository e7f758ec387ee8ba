"""
Where Spark's log goes instead of the screen.

The JVM outlives its sessions and its log with it: one file per process, removed at
the end unless a message has named it.
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
"""Where PySpark prints, as JSON on stderr, exceptions that it also raises."""

_path: Path | None = None
_kept: set[Path] = set()


def jvm_log(wanted: Path | None) -> Path | None:
    """
    Return the log of this process's JVM, or None when it was not started by us.

    Args:
        wanted: Where a JVM that is still to be started shall log, by default a
            temporary file of ours.

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
    # A thread of PySpark's shows a traceback when the JVM has ended, which is reported;
    # if it is at that when we end, Python is aborted.
    server = getattr(SparkContext._active_spark_context, "_accumulatorServer", None)
    if server is not None:
        server.handle_error = _unheard


def _unheard(*_: object) -> None:
    pass


def _temporary() -> Path:
    descriptor, name = tempfile.mkstemp(prefix="etlstage-spark-", suffix=".log")
    os.close(descriptor)
    WATCHDOG.add_folder(name)  # should we be killed
    path = Path(name)
    atexit.register(_discard, path)
    return path


def _discard(path: Path) -> None:
    if path not in _kept:
        path.unlink(missing_ok=True)
