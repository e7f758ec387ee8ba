"""How much memory is held at most, whatever workers and callers do: measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.supervisor.holding import SCENES

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("scene", SCENES)
def test_memory_is_bounded(scene: str) -> None:
    """According to the table on page ``limits``, with default settings (issue 10)."""
    command = [sys.executable, "-m", "tests.supervisor.holding", scene]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr

    took = int(ended.stdout.split()[-1])
    assert took < SCENES[scene][1]
