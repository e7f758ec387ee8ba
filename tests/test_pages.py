"""Pages of the manual that are followed from their beginning to their end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.readme import follow, runs_whole

pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have an empty folder, and the python that runs this first on the PATH."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    return tmp_path


@runs_whole("tutorials/first-pipeline.md")
def test_page(page: str, folder: Path) -> None:
    """What it says is what happens (issue 27)."""
    follow(page, folder)
