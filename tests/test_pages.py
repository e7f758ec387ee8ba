"""Pages of the manual that are followed from their beginning to their end."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.examples.languages import ANY_MARKERS
from tests.readme import follow, runs_below, runs_whole

ELSEWHERE: Final = os.environ["PATH"]

pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have an empty folder, and the python that runs this first on the PATH."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    return tmp_path


@runs_whole(
    "tutorials/first-pipeline.md",
    "tutorials/service.md",
    "tutorials/worker-and-tests.md",
    "tutorials/record-processor.md",
)
def test_page(page: str, folder: Path) -> None:
    """What it says is what happens (issue 27)."""
    follow(page, folder)


LANGUAGES: Final = {
    "With the SDK for Python": "python",
    "In plain Python": "python",
    "In the shell": "sh",
    "In awk": "awk",
    "In Node": "node",
    "In C": "cc",
    "In Go": "go",
    "In R": "Rscript",
}
"""What runs or compiles a worker; where a machine lacks it, its test is skipped."""


@runs_below("how-to/write-a-worker.md", *LANGUAGES)
def test_worker(heading: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each language it is checked as it is shown (issue 27)."""
    node = Path(ANY_MARKERS[-1].interpreter[0])  # it may have come as a wheel
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{ELSEWHERE}:{node.parent}")
    if shutil.which(LANGUAGES[heading]) is None:
        pytest.skip(f"needs {LANGUAGES[heading]}")
    follow("how-to/write-a-worker.md", folder, below=heading)
