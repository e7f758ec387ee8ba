"""
The pytest plugin: fixtures that make workers, supervisors and pipelines.

Pytest loads it wherever etlstage is installed. So this module imports only pytest until
a test requests one of the fixtures.

No fixture is a coroutine: a test uses it in its own event loop, be that of
pytest-asyncio (strict or auto), of anyio (also on trio), or of ``anyio.run()`` in a
synchronous test.
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
    Make workers under test, whose transcripts are shown when the test fails.

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
    Make supervisors with short timeouts.

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
    Run stages between a source and a sink in memory.

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
    # A WorkerMisbehaved error shows its transcript already.
    if not hasattr(call.excinfo.value, "transcript"):
        for name, text in item.stash[_WORKERS].shown():
            item.add_report_section("call", name, text)
