"""Jobs and pipelines that Spark runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import pytest

from etlstage.pipeline import Report
from etlstage.pipeline.runner import Runner
from etlstage.spark.errors import explain


def failure(job: Callable[[], object]) -> str:
    """Return the explained error of a job."""
    with pytest.raises(Exception) as raised:  # noqa: PT011 - its text is the point
        job()
    return explain(raised.value)


@asynccontextmanager
async def running(runner: Runner) -> AsyncIterator[list[Report]]:
    """Run a pipeline meanwhile; the list gets its report, at the latest at the end."""
    reports: list[Report] = []

    async def run() -> None:
        reports.append(await runner.run())

    with anyio.fail_after(150):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            yield reports
