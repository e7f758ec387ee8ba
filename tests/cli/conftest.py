from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cli.forked import Forks, environment

UPPER = """\
import sys
for line in sys.stdin.buffer:
    sys.stdout.buffer.write(line.upper() + b"\\0")
    sys.stdout.flush()
"""
KEEP = """\
import sys
with open("loaded.txt", "ab", buffering=0) as file:
    for line in sys.stdin.buffer:
        file.write(line)
        sys.stdout.buffer.write(b"\\0")
        sys.stdout.flush()
"""
PIPELINE = """\
name: letters
extract: {worker: {command: [printf, 'a\\nb\\nc\\n']}}
transform:
  - name: upper
    worker: {command: [python, upper.py]}
load: {worker: {command: [python, keep.py]}}
"""


def command(arguments: Sequence[str | Path]) -> list[str]:
    """Return the command line of etlstage."""
    return [sys.executable, "-m", "etlstage", *map(str, arguments)]


Etlstage = Callable[..., "subprocess.CompletedProcess[str]"]


def run_in(
    folder: Path,
    *arguments: str | Path,
    env: Mapping[str, str] | None = None,
    given: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a directory; wait for its end."""
    return subprocess.run(
        command(arguments),
        cwd=folder,
        env=environment(**(env or {})),
        input=given,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def etlstage(tmp_path: Path, forks: Forks) -> Etlstage:
    """
    Run the command line in a directory of its own; wait for its end.

    The command is forked (see ``Forks``), unless the test sets PYTHONPATH. It has to
    exit with ``code``, if that is given.
    """

    def run(
        *arguments: str | Path,
        env: Mapping[str, str] | None = None,
        given: str = "",
        code: int | None = None,
    ) -> subprocess.CompletedProcess[str]:
        # A fork has its modules imported already: PYTHONPATH would have no effect.
        if "PYTHONPATH" in (env or {}):
            done = run_in(tmp_path, *arguments, env=env, given=given)
        else:
            words = [*map(str, arguments)]
            done = forks.run(words, tmp_path, environment(**(env or {})), given)
        assert code is None or done.returncode == code, done.stderr
        return done

    return run


def write_pipeline(folder: Path) -> Path:
    """Write a pipeline of three workers that needs no Spark."""
    (folder / "upper.py").write_text(UPPER)
    (folder / "keep.py").write_text(KEEP)
    path = folder / "pipeline.yaml"
    path.write_text(PIPELINE)
    return path


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """Write this pipeline into the test's directory."""
    return write_pipeline(tmp_path)


Started = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Started]:
    """Start the command line in a session of its own; kill what is left in the end."""
    started: list[subprocess.Popen[str]] = []

    def run(
        *arguments: str | Path, stdout: int = subprocess.PIPE
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command(arguments),
            cwd=tmp_path,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        with process:
            process.kill()
    for number in left_behind(tmp_path):
        with suppress(ProcessLookupError):  # it has exited since
            os.kill(number, signal.SIGKILL)


def worker(path: Path, text: str) -> None:
    """Write a worker."""
    path.write_text(textwrap.dedent(text))


def left_behind(folder: Path) -> list[int]:
    """Return the ids of the processes whose working directory is ``folder``."""
    found, place = [], os.fspath(folder)
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if os.readlink(f"/proc/{name}/cwd") == place:
                found.append(int(name))
    return found
