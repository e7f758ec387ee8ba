"""
What Spark's exceptions mean, in one line.

Spark answers with a condition in brackets, a message, an SQLSTATE, a plan and two
stack traces, in an order that depends on where it failed and on whether Connect is
in between. This module extracts the line that a user can act on.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from py4j.protocol import (  # type: ignore[import-untyped]
    Py4JError,
    Py4JNetworkError,
)

__all__ = ("GONE", "PACKAGES", "explain", "text_of")

GONE: Final[tuple[type[Exception], ...]] = (ConnectionError, Py4JNetworkError)
"""Errors that calls raise when the JVM has ended."""

PACKAGES: Final = (
    "etlstage",
    "anyio",
    "idna",
    "sniffio",
    "typing_extensions",
)
"""Packages that a task imports besides those that Spark's Arrow functions need; the
last two only with some versions of anyio and Python. All are pure Python."""

_CONDITION: Final = re.compile(r"\[([A-Z][A-Z0-9_]+(?:\.[A-Z0-9_]+)*)\] ?([^\n]+)")
_LOST_TASK: Final = re.compile(r"Lost task [^\n]*?\): ([^\n]+)")
_CAUSE: Final = re.compile(r"^Caused by: ([^\n]+)", re.MULTILINE)
_RAISED: Final = re.compile(r"^([A-Za-z_][\w.]*(?:: [^\n]*)?)$", re.MULTILINE)
_OURS: Final = re.compile(r"^etlstage\.errors\.\w+: ")
_CLASS: Final = re.compile(
    # As Java shows it, and as Connect does.
    r"^(?:(?:[a-z]\w*\.)+[A-Z][\w$]*: |\((?:[a-z]\w*\.)+[A-Z][\w$]*\) )"
)
_CAPITAL: Final = re.compile(r"^[A-Z](?=[a-z ])")
_MISSING: Final = re.compile(r"ModuleNotFoundError: No module named '([^'.]+)")
_PYTHONS: Final = re.compile(
    r"PYTHON_VERSION_MISMATCH\] .*version: ([\d.]+) than that in driver: ([\d.]+\d)"
)
_QUERY: Final = re.compile(
    # The error of a stream is between the name of its query and its plan.
    r"\[STREAM_FAILED\] Query [^\n]*?terminated with exception: "
    r"|\n=== Streaming Query ===\n.*?(?=\n\s*JVM stacktrace|\Z)",
    re.DOTALL,
)
_HAVE_JAR: Final = "put its jar into spark.config, as in {{spark.jars: driver.jar}}"
_MEANT: Final = (
    (
        re.compile("Schema must be specified when creating a streaming source"),
        (
            "a stream of files has no schema of its own: set schema, as in 'id long, title"
            " string'"
        ),
    ),
    (
        re.compile("terminated with exception: Option 'basePath' must be a directory"),
        "the path of a stream is a file, expected a folder",
    ),
    (
        re.compile(
            r"terminated with exception: Wrong basePath (\S+) for the root path: (\S+)"
        ),
        (
            "the state belongs to a stream from {1}, not from {0}: set that path, or"
            " another state"
        ),
    ),
    (
        re.compile(r"\[(UNABLE_TO_INFER_SCHEMA)\] Unable to infer schema for (\w+)"),
        (
            "there is no file in the path to infer the schema of {1} from: set schema, as"
            " in 'id long, title string', or another path ({0})"
        ),
    ),
    (
        # The class by which Spark loads it is in the stack trace.
        re.compile(r"ClassNotFoundException: (\S+)\n(?s:.*)\bDriverRegistry\b"),
        "there is no driver {0}: " + _HAVE_JAR,
    ),
    (
        re.compile(r"SparkException: Python worker exited unexpectedly"),
        (
            "a Python process of Spark's executors crashed, or was killed: they may have"
            " too little memory"
        ),
    ),
    (
        re.compile("SQLException: No suitable driver"),
        "there is no driver for this url: set the option driver, and " + _HAVE_JAR,
    ),
)
"""Spark's errors for programmers, reworded for users."""
_TRACEBACK: Final = "Traceback (most recent call last):"
_OF_DATABASE: Final = re.compile(
    # Errors of a database's driver: the last is the cause, and has no values in it.
    r"(?:^|[\s(:])(?:[a-z]\w*\.)+\w*SQL\w*Exception: ([^\n]+)"
)
_CUT_OFF: Final = re.compile(
    # Py4J reports nothing else of a call during which the JVM has ended.
    r"(?:\[CANNOT_PARSE_DATATYPE\] [^\n]*)?An error occurred while calling \S+"
    r"|\S+ does not exist in the JVM"
)
_VAGUE: Final = frozenset({"TASK_WRITE_FAILED", "FAILED_READ_FILE.NO_HINT"})


def explain(error: BaseException, log_path: Path | None = None) -> str:
    """
    Return what went wrong, in one line.

    Args:
        error: What PySpark raised.
        log_path: Spark's log, named where the line alone may not be enough.

    """
    whole = text_of(error)
    text = _QUERY.sub("", whole)
    line = (
        _raised_by_python(text) or _meant(whole) or _known(text) or _of_database(text)
    )
    if line is None:
        line = _unknown(error, text)
        # An error wrapped by another user of the session names the log already.
        if log_path is not None and str(log_path) not in line:
            line = f"{line}; Spark's log is {log_path}"
    return line


def text_of(error: BaseException) -> str:
    """Return the text of an error; the JVM is asked if it was raised there."""
    try:
        if not isinstance(error, GONE):
            text = str(error)
            if not _CUT_OFF.fullmatch(text):
                return text
    except (OSError, Py4JError):
        pass
    return "the JVM of Spark has exited"


def _raised_by_python(text: str) -> str | None:
    """Return the last line of a traceback of a Python worker."""
    _, found, rest = text.partition(_TRACEBACK)
    if not found:
        return None
    # It is followed by stack traces of Java, and the plan of a streaming query.
    python = re.split(r"\n\s*at |\n\s*JVM stacktrace|\n=== ", rest, maxsplit=1)[0]
    raised = _RAISED.findall(python)
    return _remedied(raised[-1]) if raised else None


def _remedied(line: str) -> str:
    """Return ``line``, or what to do about it where that is known."""
    missing, pythons = _MISSING.search(line), _PYTHONS.search(line)
    if missing is not None and missing[1] in PACKAGES:
        return (
            f"etlstage is not on Spark's executors, which have no module {missing[1]!r}:"
            " call etlstage.spark.ship(spark) before transform(), or install it there"
        )
    if pythons is not None:
        theirs, ours = pythons.groups()
        return (
            f"Spark's executors run Python {theirs}, this is Python {ours}: set"
            f" spark.pyspark.python to a Python {ours} on the executors"
        )
    # Our own errors are clear without their class.
    return _OURS.sub("", line)


def _meant(text: str) -> str | None:
    for pattern, meant in _MEANT:
        if (match := pattern.search(text)) is not None:
            return meant.format(*match.groups())
    return None


def _of_database(text: str) -> str | None:
    found = _OF_DATABASE.findall(text)
    return _tidy(found[-1]) if found else None


def _known(text: str) -> str | None:
    """Return message and condition of an error that Spark has a name for."""
    match = _CONDITION.search(text)
    if match is None:
        return None
    condition, line = match[1], _tidy(match[2])
    cause = _root(text)
    if condition in _VAGUE and cause is not None:
        line = f"{line}: {cause}"
    return f"{line} ({condition})"


def _unknown(error: BaseException, text: str) -> str:
    lost = _LOST_TASK.search(text)
    if lost is not None:
        return _root(text) or _tidy(lost[1])
    # Py4J: "An error occurred while calling o1.load.\n: java.lang.X: message".
    _, found, rest = text.partition("\n: ")
    lines = (rest if found else text).strip().splitlines()
    return _root(text) or (_tidy(lines[0]) if lines else type(error).__name__)


def _root(text: str) -> str | None:
    causes = _CAUSE.findall(text)
    return _tidy(causes[-1]) if causes else None


def _tidy(line: str) -> str:
    """Return ``line`` in our style: no class, no SQLSTATE, no final dot."""
    line = _CLASS.sub("", line)
    line = line.partition(" SQLSTATE:")[0].strip().rstrip(".;")
    return _CAPITAL.sub(lambda match: match[0].lower(), line)
