"""
What all tests share: their groups, and the option for Spark over Spark Connect.

Each test is in one group. ``spark`` is marked in the test; so is ``process`` or
``core`` where the folder's group is wrong for it. A test that starts a process is not
in ``core``.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal

import pytest
import structlog
from hypothesis import settings

from etlstage.testing.clock import Backend, virtual_time
from tests.cli.forked import Forks, environment
from tests.spark.archive import ARCHIVE, OPTIONS

_JAVA: Final = OPTIONS + (
    f" -XX:SharedArchiveFile={ARCHIVE}" if ARCHIVE.exists() else ""
)
os.environ.setdefault("JDK_JAVA_OPTIONS", _JAVA)

pytest.register_assert_rewrite("tests.manual.fences")

# Signals that nohup ignores would be ignored by our children, too. So we ignore them by
# a handler, which a program that we start does not inherit.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# ``.ci/run`` judges a commit repeatably; pytest alone explores. On a shared machine,
# the time of an example is not a property of the code.
settings.register_profile("exploring", deadline=None)
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("exploring")

HERE: Final = Path(__file__).parent
GROUPS: Final = ("core", "process", "spark")
OF_PROCESSES: Final = (
    "cli",
    "examples",
    "simulate",
    "supervisor",
    "systems",
    "testing",
    "transport",
    "worker",
)
"""Folders whose tests start processes by default."""
WITHOUT: Final = (
    "supervisor/exchange",
    "supervisor/lifecycle",
    "supervisor/test_diagnostic.py",
)
"""Exceptions in these folders, which only decide and do nothing."""
MEASURED: Final = (
    *("protocol", "sequencing", "settings", "stage"),
    *("config/test_hostile.py", "config/test_loader.py", "config/test_plan.py"),
    "config/test_schema.py",
    *("supervisor/exchange", "supervisor/lifecycle", "supervisor/test_diagnostic.py"),
    *("supervisor/test_batches.py", "supervisor/test_commits.py"),
    *("supervisor/test_verifier.py", "pipeline/test_launch.py"),
    *("pipeline/test_ledger.py", "shard/test_keeper.py", "shard/test_table.py"),
    *("test_block.py", "test_columns.py", "test_errors.py", "test_messages.py"),
)
"""Tests by which the coverage of the core is measured."""
ON_BOTH_LOOPS: Final = (
    "supervisor/test_stop.py",
    "transport/test_process.py",
    "transport/test_socket.py",
)
"""Tests of processes that run on asyncio and on trio; others run on asyncio alone."""
STARTS: Final = frozenset(
    {"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
    | {"subprocess.Popen"}
)
"""Python's audit events for the start of a process."""


class _Audit:
    """Watches for processes that a test of the core starts."""

    running = ""

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.running and event in STARTS:
            raise AssertionError(
                f"{self.running} starts a process: mark it with 'process'"
            )


_AUDIT: Final = _Audit()
sys.addaudithook(_AUDIT)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--connect``, for ``tests/spark/conftest.py``, and ``--update``."""
    parser.addoption(
        "--connect",
        action="store_true",
        help="run the tests that use a Spark session, and these alone, with one over"
        " Spark Connect; a process can't have both",
    )
    parser.addoption(
        "--update",
        action="store_true",
        help="write what the commands on README and the pages print into them",
    )


# First, so that ``-m core`` finds its marker in place.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Put each test into a group."""
    left_out = []
    for item in items:
        said = [group for group in GROUPS if item.get_closest_marker(group)]
        if len(said) > 1:
            raise pytest.UsageError(f"{item.nodeid} is in {' and '.join(said)}")
        if not said:
            item.add_marker(_group(item.path))
        has = [name for name in (*GROUPS, "slow") if item.get_closest_marker(name)]
        if _is_in(MEASURED, item.path) and not item.get_closest_marker("no_cover"):
            item.add_marker(pytest.mark.measured)
            has.append("measured")
        else:
            has.append("not measured")
        if missing := {*has} - _may_have(item.path):
            raise pytest.UsageError(
                f"{item.nodeid}: nothing in its file shows that it is"
                f" {' and '.join(missing)}, so '-m' leaves it out"
            )
        if not _is_for_its_loop(item):
            left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in {*left_out}]


def pytest_ignore_collect(
    collection_path: Path, config: pytest.Config
) -> Literal[True] | None:
    """Leave out files that show that ``-m`` selects none of their tests."""
    wanted = str(config.option.markexpr)
    group, half = wanted.partition(" ")[0], re.search(r"(not )?measured$", wanted)
    if group not in (*GROUPS, "slow") or not collection_path.match("test_*.py"):
        return None
    has = _may_have(collection_path)
    return None if group in has and (half is None or half[0] in has) else True


@lru_cache
def _may_have(path: Path) -> frozenset[str]:
    """Return the group of a file, or of its folder, and the marks that it mentions."""
    marks = re.findall(r"\bmark\.(\w+)", text := path.read_text())
    if "in_memory" in text:  # the mark core, by tests/supervisor/acts.py
        marks.append("core")
    if measured := _is_in(MEASURED, path):
        marks.append("measured")
    # By name, or by tests/protocol/strategies.py.
    if not measured or "no_cover" in marks or "unmeasured" in text:
        marks.append("not measured")
    whole = re.search(
        r"^pytestmark = .*\bmark\.(core|process|spark)\b", text, re.MULTILINE
    )
    return frozenset({*marks, whole[1] if whole else _group(path)})


def _is_for_its_loop(item: pytest.Item) -> bool:
    """Return whether a test is to be run on the event loop of its parameter."""
    call = getattr(item, "callspec", None)
    if call is None or call.params.get("anyio_backend") != "trio":
        return True
    # Processes do the same on both, except where they are started, read and stopped.
    return not item.get_closest_marker("process") or _is_in(ON_BOTH_LOOPS, item.path)


@lru_cache  # a file has up to thousands of tests
def _is_in(names: tuple[str, ...], path: Path) -> bool:
    """Return whether a file is one of ``names``, or in a folder among them."""
    return any(map(path.relative_to(HERE).is_relative_to, names))


def _group(path: Path) -> str:
    if _is_in(OF_PROCESSES, path):
        return "core" if _is_in(WITHOUT, path) else "process"
    return "core"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Fail a test of the core that starts a process, fixtures included."""
    _AUDIT.running = item.nodeid if item.get_closest_marker("core") else ""
    try:
        return (yield)
    finally:
        _AUDIT.running = ""


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str | tuple[str, dict[str, Any]]:
    """Run on both event loops, on a virtual clock if that is how a test is marked."""
    loop: Backend = request.param
    return virtual_time(loop) if request.node.get_closest_marker("virtual") else loop


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the paths that are synced to disk, in order, by their names then."""
    paths: list[Path] = []

    def fsync(fd: int, real: Callable[[int], None] = os.fsync) -> None:
        paths.append(Path(f"/proc/self/fd/{fd}").readlink())
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    return paths


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Yield the process from which commands are forked."""
    with Forks(environment()) as running:
        yield running


@pytest.fixture(autouse=True)
def unconfigured() -> Iterator[None]:
    """Reset the logs, so that the next tests don't print what they log."""
    yield
    if structlog.is_configured():
        structlog.reset_defaults()
    # Undo what a command of etlstage sets up.
    logger = logging.getLogger("etlstage")
    logger.handlers.clear()
    logger.propagate, logger.disabled = True, False
    logger.setLevel(logging.NOTSET)
