from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from textwrap import dedent
from typing import Protocol

import pytest

import etlstage
from tests.conversation import Conversation

ROOT = Path(etlstage.__file__).parent.parent
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "PYTHONPATH": str(ROOT),
    # Only there while coverage is measured.
    **{name: os.environ[name] for name in os.environ if name.startswith("COVERAGE_")},
}


class Start(Protocol):
    """Starts a worker from its source, in which ``worker`` is already imported."""

    def __call__(
        self, source: str, *arguments: object, env: Mapping[str, str] = ...
    ) -> Conversation:
        """Start it; ``env`` adds to the environment."""
        ...


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts workers, which are stopped after the test."""

    def start(
        source: str, *arguments: object, env: Mapping[str, str] | None = None
    ) -> Conversation:
        script = tmp_path / "stage.py"
        script.write_text("from etlstage import worker\n" + dedent(source))
        command = [sys.executable, str(script), *map(str, arguments)]
        environment = {**ENVIRONMENT, **(env or {})}
        return workers.enter_context(Conversation(command, environment))

    with ExitStack() as workers:
        yield start


class Fence:
    """A named pipe that blocks its reader until the fence is opened."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def open(self) -> None:
        """Wait for a reader, and release it."""
        os.close(os.open(self._path, os.O_WRONLY))


@pytest.fixture
def fence(tmp_path: Path) -> Fence:
    """Return a fence at which a worker can be made to wait."""
    return Fence(tmp_path / "fence")
