"""
The plugin for pytest: fixtures that make workers, supervisors and pipelines.

They are there wherever etlstage is installed. So this file imports pytest and nothing
else before a test asks for one of them.

None of them is a coroutine: what a test does with it, it does in its own event loop,
whether that is of pytest-asyncio, strict or auto, of anyio, on trio too, or of
``anyio.run()`` in a test that is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from etlstage.testing.factories import (
        PipelineFactory,
        SupervisorFactory,
        WorkerFactory,
    )

_WORKERS = pytest.StashKey["WorkerFactory"]()


@pytest.fixture
def worker(request: pytest.FixtureRequest) -> WorkerFactory:
    """
    Make a worker under test, of which a failure shows the transcript.

    ::

        async def test_clean(worker):
            async with worker(["./clean.sh"]) as clean:
                (reply,) = await clean.exchange([b"one"], cuts=[2])

    """
    from etlstage.testing.factories import WorkerFactory

    factory = request.node.stash[_WORKERS] = WorkerFactory()
    return factory


@pytest.fixture
def supervisor() -> SupervisorFactory:
    """
    Make a supervisor that is not patient.

    ::

        async def test_restart(supervisor):
            async with supervisor(["./clean.sh"], workers=2) as clean:
                results = await clean.submit([b"one", b"two"])

    """
    from etlstage.testing.factories import SupervisorFactory

    return SupervisorFactory()


@pytest.fixture
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PipelineFactory]:
    """
    Run stages between two ends in memory.

    ::

        async def test_all_of_it(pipeline):
            ran = await pipeline([["./clean.sh"], ["./grade.sh"]], [b"one", b"two"])
            assert ran.outputs == [b"ONE 1", b"TWO 2"]

    """
    from etlstage.testing.factories import PipelineFactory

    factory = PipelineFactory(tmp_path_factory.mktemp("pipeline"))
    yield factory
    factory.close()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Show the input and output of the workers of a test that failed."""
    if call.when != "call" or call.excinfo is None or _WORKERS not in item.stash:
        return
    # The error of a worker that failed shows it already.
    if not hasattr(call.excinfo.value, "transcript"):
        for name, text in item.stash[_WORKERS].shown():
            item.add_report_section("call", name, text)
