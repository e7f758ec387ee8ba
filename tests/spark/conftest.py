"""Fixtures of the Spark tests: a session, an event loop, and programs to run."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from etlstage.spark import Session
from tests.database import drivers
from tests.spark.driver import Driver, environment, make_session

HERE = Path(__file__).parent
PRELOAD = HERE / "preload"


# First, so that ``-m connect`` finds its marker in place.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Mark the tests that may run over Connect; select those of ``--connect``."""
    for item in items:
        on_spark = HERE in item.path.parents and item.get_closest_marker("spark")
        if on_spark and may_connect(item):
            item.add_marker("connect")
    wanted = "connect" if config.getoption("--connect") else None
    if wanted:
        repeated = {item.path for item in items if may_connect(item)}
        for item in items:
            if item.get_closest_marker("any_client") and item.path not in repeated:
                raise pytest.UsageError(
                    f"{item.nodeid} is for any client, and no other test of its file"
                    " is run with --connect"
                )
    others = [item for item in items if not runs_with(wanted, item)]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if runs_with(wanted, item)]


def may_connect(item: pytest.Item) -> bool:
    """Return whether a test may get a Connect session."""
    # A parameter of that name is not our fixture.
    given = getattr(getattr(item, "callspec", None), "params", ())
    shared = {"session", "spark"} & {*getattr(item, "fixturenames", ())} - {*given}
    marked = map(item.get_closest_marker, ("any_client", "classic"))
    return bool(shared) and not any(marked)


def runs_with(wanted: str | None, item: pytest.Item) -> bool:
    """Return whether a test belongs to a run of this kind."""
    if wanted is None:
        return item.get_closest_marker("connect_only") is None
    return item.get_closest_marker(wanted) is not None


@pytest.fixture
def anyio_backend() -> str:
    """Run async tests on asyncio only, as the tested code runs in Spark."""
    return "asyncio"


@pytest.fixture(scope="session")
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    """Give all tests one session on two cores, over Connect with ``--connect``."""
    where = "remote" if request.config.getoption("--connect") else "master"
    config: dict[str, object] = {"spark.sql.shuffle.partitions": 2}
    # A JVM gets them at launch; the tests that need them report why they are missing.
    with suppress(RuntimeError):
        config["spark.jars"] = drivers()
    session = make_session(**{where: "local[2]"}, config=config)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(PRELOAD), prepend=os.pathsep)
        session.start()
    yield session
    session.stop()


@pytest.fixture
def spark(session: Session) -> SparkSession:
    """Give PySpark's own session."""
    return session.spark


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """Give a driver with two executors, each a process with a single core."""
    place = tmp_path_factory.mktemp("cluster")
    with Driver(place, master="local-cluster[2,1,1024]") as driver:
        driver.run()
        yield driver


@pytest.fixture(scope="session")
def retrying(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """Give a driver on two cores that retries a failed task twice."""
    place = tmp_path_factory.mktemp("retrying")
    path = os.pathsep.join((str(PRELOAD), environment()["PYTHONPATH"]))
    with Driver(place, environ={"PYTHONPATH": path}, master="local[2,3]") as driver:
        yield driver


@pytest.fixture
def wait_for_jobs(session: Session) -> Callable[[bool], None]:
    """
    Wait until a job runs, or until none does.

    The server of Connect has its JVM in this process, too. Its client learns that a
    job was interrupted before Spark has ended it. (A job that is interrupted just
    before Spark 4 submits it may even run to its end.)
    """

    def wait(active: bool) -> None:
        context = SparkContext._active_spark_context
        assert context is not None
        while bool(context.statusTracker().getActiveJobsIds()) is not active:
            time.sleep(0.02)

    return wait


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run source with this Python, first on the PATH, in an empty directory."""
    place = tmp_path / "cwd"
    place.mkdir()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def run(source: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(source)],
            cwd=place,
            env=environment(**{"PATH": path, **environ}),
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )

    return run
