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

from tests.cli.forked import Forks

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


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """Run async tests on one event loop: what they test is not the loop."""
    return "asyncio"


def environment(**more: str) -> dict[str, str]:
    """Return a plain environment in which etlstage is found."""
    names = ("PATH", "HOME", "JAVA_HOME", "JDK_JAVA_OPTIONS")
    kept = {n: os.environ[n] for n in names if n in os.environ}
    found = os.pathsep.join(filter(None, map(os.path.abspath, sys.path)))
    return kept | {"PYTHONPATH": found, "LANG": "C.UTF-8"} | more


def command(arguments: Sequence[str | Path]) -> list[str]:
    """Return the command line of etlstage."""
    return [sys.executable, "-m", "etlstage", *map(str, arguments)]


Etlstage = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Give the process that forks what is run without more ado."""
    with Forks(environment()) as running:
        yield running


@pytest.fixture
def etlstage(tmp_path: Path, forks: Forks) -> Etlstage:
    """Run the command line in a directory of its own; wait for its end."""

    def run(
        *arguments: str | Path,
        env: Mapping[str, str] | None = None,
        given: str = "",
    ) -> subprocess.CompletedProcess[str]:
        if env is None:
            words = [*map(str, arguments)]
            return forks.run(words, tmp_path, environment(), given)
        return subprocess.run(
            command(arguments),
            cwd=tmp_path,
            env=environment(**env),
            input=given,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """Write a pipeline of three workers that needs no Spark."""
    (tmp_path / "upper.py").write_text(UPPER)
    (tmp_path / "keep.py").write_text(KEEP)
    path = tmp_path / "pipeline.yaml"
    path.write_text(PIPELINE)
    return path


Started = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Started]:
    """Start the command line in its own process group; kill what is left of it."""
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
        os.kill(number, signal.SIGKILL)


def worker(path: Path, text: str) -> None:
    """Write a worker."""
    path.write_text(textwrap.dedent(text))


def left_behind(folder: Path) -> list[int]:
    """Return the ids of processes that work in ``folder``."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "cwd").readlink() == folder:
                found.append(int(process.name))
    return found
