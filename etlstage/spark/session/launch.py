"""
Start Spark's JVM without any output on the user's screen.

The JVM inherits PySpark's stderr, and PySpark has no option against that. While the JVM
is being launched, ``JAVA_HOME`` therefore points to a shim: a directory with a
``bin/java`` that is a shell script, which runs the real Java with its output in a log
file. What Spark's Python workers print goes through the JVM and ends in the same file.

The script drops ``--add-modules=jdk.incubator.vector`` if the real Java has no such
module: Spark's launcher always adds it, and the JVM would not start.

The JVM gets a session of its own if the program ``setsid`` exists: a signal to our
process group, as a terminal or ``timeout`` sends it, must not end Spark, which we need
for an orderly exit. The JVM ends with us, because it reads its stdin, but only once it
has started. So the script writes into the shim what the watchdog needs to end the JVM
earlier: its pid, and the file by which PySpark waits for it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from etlstage.spark.session.java import VECTOR_MODULE, Java
from etlstage.transport.guard import STARTED
from etlstage.transport.watchdog import discard_scratch, make_scratch

__all__ = ("launching", "write_java")

# Spark runs java twice: the launcher's Main, whose stdout is the command line of
# the JVM proper, and that command, which starts with $JAVA_HOME/bin/java as the
# launcher saw it.  Only the second may write anything but that command line.
_SHIM: Final = """\
#!/bin/sh
printf '%s\n%s\n' "$$" "$_PYSPARK_DRIVER_CONN_INFO_PATH" >{started} || exit 1
{drop}case " $* " in
  *" org.apache.spark.launcher.Main "*) exec {java} "$@" 2>>{log} ;;
esac
{home}
# Who was killed before has a watchdog that has not seen it.
[ "$PPID" = {parent} ] || exit 1
exec {apart}{java} "$@" >>{log} 2>&1
"""

_DROP: Final = f"""\
left=$#
while [ "$left" -gt 0 ]; do
  word=$1; shift; left=$((left - 1))
  case $word in
    --add-modules={VECTOR_MODULE}) continue ;;
    --add-modules)
      if [ "$1" = {VECTOR_MODULE} ]; then shift; left=$((left - 1)); continue; fi ;;
  esac
  set -- "$@" "$word"
done
"""

_environment: Final = threading.Lock()


@contextmanager
def launching(
    java: Java,
    log_path: Path,
    *,
    python: str | None,
    environ: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """
    Keep a JVM quiet that is launched in this context; then restore the environment.

    Args:
        java: The Java to run.
        log_path: Where stdout and stderr of the JVM are appended.
        python: The interpreter of Spark's Python workers when Spark runs on this
            machine alone; its ports then stay on the loopback interface. None
            leaves all that to the environment.
        environ: More environment variables.

    """
    shim = make_scratch("java")
    try:
        _write_shim(shim, java, log_path)
        changes = {"JAVA_HOME": str(shim), **(environ or {})}
        if python is not None:
            changes |= {
                "PYSPARK_PYTHON": python,
                "PYSPARK_DRIVER_PYTHON": python,
                "SPARK_LOCAL_IP": "127.0.0.1",
            }
        with _changed(changes):
            yield
    finally:
        discard_scratch(shim)


def write_java(home: Path, java: Java) -> None:
    """Make ``home`` a folder that ``JAVA_HOME`` of executors may point to."""
    drop = "" if java.has_vector else _DROP
    command = shlex.quote(str(java.executable))
    _write(home, f'#!/bin/sh\n{drop}exec {command} "$@"\n')


def _write_shim(directory: Path, java: Java, log_path: Path) -> None:
    # Python workers inherit the JVM's environment: give them the user's JAVA_HOME.
    home = os.environ.get("JAVA_HOME")
    script = _SHIM.format(
        drop="" if java.has_vector else _DROP,
        apart=_apart(),
        java=shlex.quote(str(java.executable)),
        log=shlex.quote(str(log_path)),
        started=shlex.quote(str(directory / STARTED)),
        parent=os.getpid(),
        home="unset JAVA_HOME" if not home else f"JAVA_HOME={shlex.quote(home)}",
    )
    _write(directory, script)


def _apart() -> str:
    """Return the prefix that gives a command a session of its own, or an empty text."""
    program = shutil.which("setsid")
    return f"{shlex.quote(program)} " if program else ""


def _write(home: Path, script: str) -> None:
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(script)
    program.chmod(0o700)


@contextmanager
def _changed(changes: Mapping[str, str]) -> Iterator[None]:
    with _environment:
        before = {name: os.environ.get(name) for name in changes}
        os.environ.update(changes)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
