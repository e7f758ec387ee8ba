"""Pipelines whose worker writes too much or too little, see ``planted.py``."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.pipeline import Pipeline
from etlstage.testing import MemorySink, MemorySource
from tests.planted import plan

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]


async def run(seed: int, folder: Path) -> str:
    """Run the plan of a seed; return how it ended, or raise an AssertionError."""
    planned = plan(seed)
    letters = DeadLetters(folder, pipeline="p")
    sink = MemorySink()
    pipeline = Pipeline(
        name="p",
        source=MemorySource([planned.messages]),
        stages=[planned.stage],
        sink=sink,
        dead_letters=letters,
    )
    with anyio.fail_after(60):
        report = await pipeline.run()
    letters.close()
    if report.status != "done":
        planned.check_failure(report.error, report.ledger[1].doubtful)
        return report.status
    planned.check(
        sink.messages,
        {letter.message for letter in letters.letters()},
        ordered=planned.ordered,
    )
    return report.status


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_no_row_is_wrong_in_silence(first: int, tmp_path: Path) -> None:
    """In all modes, with all windows, with one worker and with three (issue 10)."""
    for seed in range(first, first + 10):
        anyio.run(run, seed, tmp_path / str(seed))
