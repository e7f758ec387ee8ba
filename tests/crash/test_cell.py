"""A few trials of ``python -m tests.crash``."""

from __future__ import annotations

from random import Random

import pytest

from tests.crash.cell import Cell
from tests.crash.matrix import Case, Kill


def judge(ends: str, *starts: str) -> Cell:
    """Run one trial with few messages and these kills, and check it."""
    told: list[str] = []
    case = Case(order="none", ends=ends, messages=600, epoch=200)
    cell = Cell(case, Random(14), told.append)  # noqa: S311
    cell.trial([[Kill.of(kill) for kill in kills.split()] for kills in starts])
    assert not cell.failures, told
    return cell


@pytest.mark.process
def test_each_message_is_loaded_once_whatever_is_killed() -> None:
    """Kill a worker, and the process at three steps of the commit (issue 14)."""
    starts = (
        "worker:begin:0 process:written:1",
        "process:committed:0",
        "process:aside:0",
    )
    cell = judge("workers", *starts)
    assert sum(cell.killed.values()) == 4


@pytest.mark.process
def test_each_message_is_in_the_journals_once_whatever_is_killed() -> None:
    """Kill a worker, and the process before and after its acknowledgements."""
    starts = "worker:begin:0 process:recorded:1", "process:performed:0"
    cell = judge("journals", *starts)
    assert sum(cell.killed.values()) == 3


@pytest.mark.spark
@pytest.mark.slow  # two starts of Spark, and one of its workers for each
@pytest.mark.timeout(300)
def test_what_was_not_recorded_is_loaded_once_again() -> None:
    """Kill the process after the sink has written, before the record (issue 14)."""
    cell = judge("local", "process:written:0")
    assert cell.killed == {("process", "written"): 1}


@pytest.mark.process
def test_files_are_moved_once_whatever_is_killed() -> None:
    """Kill before the record, after it, and once all is loaded (issues 22 and 23)."""
    starts = (
        "worker:begin:0 process:written:1",
        "process:aside:0",
        "process:recorded:0",
        "process:ended:0",
    )
    cell = judge("files", *starts)
    assert sum(cell.killed.values()) == 5
