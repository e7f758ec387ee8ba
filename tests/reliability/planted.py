"""Plant bugs, one at a time, in a copy of the package, and search for them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.reliability import search

__all__ = ("Bug", "Found", "bugs", "find")

_ROOT: Final = Path(__file__).parents[2]
_ROWS: Final = Path(__file__).with_name("planted.toml")
_HANGS: Final = 900  # seconds; a search that takes longer is in an endless loop


@dataclass(frozen=True)
class Bug:
    """A bug: a replacement in one file of the package."""

    subject: str
    name: str
    file: str
    """Path, relative to the package's folder."""
    old: str
    new: str
    what: str = "pipelines"
    """The kind of run that searches for the bug; see ``RUNS`` of the simulation."""

    def plant(self, package: Path) -> None:
        """Change the file; raise ValueError unless it has the old text exactly once."""
        path = package / self.file
        text = path.read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(
                f"{self.name}: what it replaces is {count} times in {self.file},"
                " expected once"
            )
        path.write_text(text.replace(self.old, self.new))


@dataclass(frozen=True)
class Found:
    """The outcome of the search for a bug."""

    bug: Bug
    seed: int | None
    """The first seed that failed; None: none did."""
    why: str
    """The first line of the failure."""
    seconds: float
    """Processor time of the search."""


def bugs() -> list[Bug]:
    """Return all bugs, in the order of the file."""
    with _ROWS.open("rb") as file:
        return [Bug(**row) for row in tomllib.load(file)["bug"]]


def find(bug: Bug, seeds: int) -> Found:
    """
    Run the simulation with a bug until a seed fails.

    Args:
        bug: The bug to plant.
        seeds: Number of seeds to run at most.

    """
    with TemporaryDirectory(prefix="planted-") as folder:
        for name in ("etlstage", "tests"):
            shutil.copytree(
                _ROOT / name,
                Path(folder, name),
                ignore=shutil.ignore_patterns("__pycache__"),
            )
        bug.plant(Path(folder, "etlstage"))
        command = [sys.executable, "-m", search.__name__, str(seeds), bug.what]
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=_HANGS,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            lines = (late.stdout or b"").decode().splitlines()
            at = json.loads(lines[-1])["at"] if lines else 0
            return Found(bug, at, f"seed {at} does not end", float(_HANGS))
    if done.returncode:
        # The package can't even be imported, or the search itself failed.
        return Found(bug, 0, done.stderr.strip().splitlines()[-1], 0.0)
    last = json.loads(done.stdout.splitlines()[-1])
    return Found(bug, last["seed"], last["why"], last["seconds"])
