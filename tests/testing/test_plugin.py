"""The plugin for pytest, in a pytest of its own."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path
from typing import Final

import pytest

from etlstage.testing import Fault, FaultKind, FaultPlan, hostile_worker

pytest_plugins = ["pytester"]

# Loaded as a module, so that the tests use this tree, whatever is installed.
OURS: Final = ("-p", "no:etlstage", "-p", "etlstage.testing.plugin")
ASYNCIO: Final = ("-p", "no:anyio", "-o", "asyncio_default_fixture_loop_scope=function")
TESTS: Final = """
import anyio
import pytest
from etlstage import WorkerLost
from etlstage.testing import Reply

pytestmark = {mark}
WORKER = {worker!r}


async def test_worker(worker):
    async with worker(WORKER) as one:
        assert await one.exchange([b"one"], cuts=[2]) == [Reply((b"ONE",))]


async def test_supervisor(supervisor):
    async with supervisor(WORKER, workers=2) as stage:
        results = await stage.submit([b"one", b"poison"])
    assert results[0].outputs == (b"ONE",)
    assert isinstance(results[1].error, WorkerLost)


async def test_pipeline(pipeline):
    async def twice(worker):
        async for message in worker.messages():
            await worker.reply(message, message)

    ran = await pipeline([WORKER, twice], [b"one", b"poison", b"two"])
    assert ran.outputs == [b"ONE", b"ONE", b"TWO", b"TWO"]
    (letter,) = ran.dead
    assert (letter.stage, letter.message) == ("stage1", b"poison")
    assert ran.report.status == "done"
"""
IN_STEP: Final = """
import anyio

def test_without_any_plugin_for_it(worker):
    async def main():
        async with worker({worker!r}) as one:
            await one.exchange([b"one"])
            await one.exchange([b"poison"])

    anyio.run(main)

def test_that_fails_by_itself(worker):
    async def main():
        async with worker({worker!r}, name="mine") as one:
            assert await one.exchange([b"one"]) == []

    anyio.run(main)
"""


@pytest.fixture
def worker() -> list[str]:
    """Return the command of a worker that answers in capitals, but dies of poison."""
    plan = FaultPlan.of(Fault(FaultKind.EXIT, equals=b"poison", status=3))
    return list(hostile_worker(plan, transform="upper"))


@pytest.mark.parametrize(
    ("options", "mark", "count"),
    [
        ((*ASYNCIO, "-o", "asyncio_mode=strict"), "pytest.mark.asyncio", 3),
        ((*ASYNCIO, "-o", "asyncio_mode=auto"), "[]", 3),
        (("-p", "no:asyncio"), "pytest.mark.anyio", 6),
    ],
    ids=["strict", "auto", "anyio"],
)
def test_fixtures(
    pytester: pytest.Pytester,
    worker: list[str],
    options: tuple[str, ...],
    mark: str,
    count: int,
) -> None:
    """They work with each plugin that runs coroutines, and on trio (issue 12)."""
    pytester.makepyfile(TESTS.format(mark=mark, worker=worker))
    names = "@pytest.fixture(params=['asyncio', 'trio'])\ndef anyio_backend(request):"
    pytester.makeconftest(f"import pytest\n{names}\n    return request.param\n")
    ended = pytester.runpytest_subprocess(*OURS, "-W", "error", *options)
    ended.assert_outcomes(passed=count)


def test_failure_shows_what_was_said(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, worker: list[str]
) -> None:
    """It is shown once, also if the worker's own error has it (issue 12)."""
    monkeypatch.delenv("CI", raising=False)  # there pytest's summary has it again
    pytester.makepyfile(IN_STEP.format(worker=worker))
    ended = pytester.runpytest_subprocess(*OURS, "-p", "no:asyncio", "--tb", "short")
    ended.assert_outcomes(failed=2)
    shown = ended.stdout.str()
    assert (
        "WorkerMisbehaved: the worker has 1 reply outstanding: exited with status 3"
        in shown
    )
    assert shown.count("stdin   poison<EOM>") == 1
    assert "Captured worker mine call" in shown
    assert shown.count("stdout  ONE<EOM><EOP>") == 2


def test_entry_point_is_there() -> None:
    """Its name is the one that ``-p no:etlstage`` turns off (issue 12)."""
    project = tomllib.loads(
        Path(__file__).parents[2].joinpath("pyproject.toml").read_text()
    )
    (name,), (module,) = zip(
        *project["project"]["entry-points"]["pytest11"].items(), strict=True
    )
    assert name == "etlstage"
    assert hasattr(importlib.import_module(module), "worker")
