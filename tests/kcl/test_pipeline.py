"""A pipeline file whose load worker is a processor of the published client."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kcl.client import CURRENT, downloaded
from tests.kcl.processors import BUFFERING

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

FILE = """\
name: clicks
extract: {worker: {command: [seq, "0", "9"]}}
load:
  worker:
    command: [python, processor.py, effects, %r]
    env: {PYTHONPATH: %s}
  dialect: {name: kcl, version: v2}
  batch: {size: 5}
"""


@pytest.mark.parametrize("die_at", ["", "14"])
def test_file_with_an_unmodified_processor(tmp_path: Path, die_at: str) -> None:
    """It runs, and loads all, also when the processor is killed in between."""
    (tmp_path / "processor.py").write_text(BUFFERING)
    path = os.fspath(downloaded(CURRENT))
    (tmp_path / "clicks.yaml").write_text(FILE % (die_at, path))
    for command in ["run"] if die_at else ["validate", "plan", "run"]:
        ended = subprocess.run(
            [sys.executable, "-m", "etlstage", command, "clicks.yaml"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr

    assert "10 messages loaded; output complete" in ended.stdout
    lines = (tmp_path / "effects").read_text().splitlines()
    assert [*dict.fromkeys(lines)] == [f"{n + 1} {n}" for n in range(10)]
