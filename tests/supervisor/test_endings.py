"""What happens to a supervisor when ``asyncio.run()`` cancels all its tasks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import HANG

ROOT = Path(__file__).parents[2]

RAISED = {
    "returns": "nothing",
    "raises": "ValueError('main fails')",
    "exits": "SystemExit(3)",
    "interrupted": "KeyboardInterrupt()",
}


def run(scene: str, *arguments: str) -> list[str]:
    """Return what a program raised, and the processes that it left."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.supervisor.endings", scene, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG,
    )
    return ended.stdout.splitlines()


@pytest.mark.parametrize("way", RAISED)
def test_program_ends_while_a_task_holds_a_supervisor(way: str) -> None:
    """The worker and its children are killed, and the error is kept (issue 22)."""
    assert run("end", "idle", way) == [RAISED[way], "[]"]


@pytest.mark.parametrize("use", ["submit", "stream", "extract", "listen"])
def test_program_ends_while_a_task_waits(use: str) -> None:
    """Whatever that task waits for (issue 22)."""
    assert run("end", use, "exits") == [RAISED["exits"], "[]"]


@pytest.mark.parametrize("use", ["closing", "failing"])
def test_program_ends_while_workers_are_stopped(use: str) -> None:
    """What is left of their time is not waited for (issue 22)."""
    assert run("end", use, "returns") == [RAISED["returns"], "[]"]


def test_program_ends_when_a_supervisor_was_just_entered() -> None:
    """Tasks that are cancelled before their first step leave nothing (issue 22)."""
    assert run("early") == ["nothing", "[]"] * 8


@pytest.mark.parametrize(
    ("error", "raised"),
    [("exit", "SystemExit(3)"), ("interrupt", "KeyboardInterrupt(3)")],
)
def test_store_ends_the_program(error: str, raised: str) -> None:
    """By an exit or an interrupt, which no worker is answered with (issue 22)."""
    assert run("commit", error) == [raised, "[]"]
