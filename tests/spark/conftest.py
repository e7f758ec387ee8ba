"""What the Spark tests share: one session, one event loop, and programs to run."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from etlstage.spark import Session

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests that start Spark the time it takes."""
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("spark") is not None:
            item.add_marker(pytest.mark.timeout(180))


@pytest.fixture
def anyio_backend() -> str:
    """Run async tests on asyncio alone: what they test happens in Spark."""
    return "asyncio"


@pytest.fixture(scope="session")
def session() -> Iterator[Session]:
    """Give one session on two cores to all tests."""
    session = Session(master="local[2]", config={"spark.sql.shuffle.partitions": 2})
    session.start()
    yield session
    session.stop()


@pytest.fixture
def spark(session: Session) -> SparkSession:
    """Give PySpark's own session."""
    return session.spark


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python source in a process and an empty directory of its own."""
    place = tmp_path / "cwd"
    place.mkdir()

    def run(source: str, **environ: str) -> subprocess.CompletedProcess[str]:
        import os

        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(source)],
            cwd=place,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                **environ,
            },
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )

    return run
