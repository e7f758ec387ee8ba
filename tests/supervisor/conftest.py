from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from etlstage.transport.watchdog import WATCHDOG
from tests.supervisor.acts import LAUNCHES
from tests.supervisor.workers import open_files


def _children() -> set[str]:
    """Return our children, zombies too."""
    tasks = Path("/proc/self/task").glob("*/children")
    found: set[str] = set()
    for task in tasks:
        with suppress(FileNotFoundError):  # a thread that has ended since
            found.update(task.read_text().split())
    return found


def _of_spark() -> set[str]:
    """
    Return our connections to Java, of tests of Spark in this process.

    Each thread has one as soon as an object of Java's is collected in it.
    """
    context = getattr(sys.modules.get("pyspark"), "SparkContext", None)
    gateway: Any = getattr(context, "_gateway", None)
    port = gateway.gateway_parameters.port if gateway else None
    found = set()
    for file in open_files():
        number, _, what = file.partition(" ")
        if port is not None and what.startswith("socket:"):
            with suppress(OSError), socket.socket(fileno=os.dup(int(number))) as ours:
                if ours.family == socket.AF_INET and ours.getpeername()[1] == port:
                    found.add(file)
    return found


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let a test fail that leaves a worker, a zombie or an open file behind."""
    LAUNCHES.clear()
    if request.node.get_closest_marker("process"):
        WATCHDOG.start()  # it is ours for good
    files, children = open_files(), _children()
    yield
    assert _children() - children == set()
    assert open_files() - files - _of_spark() == set()
    assert [worker for launch in LAUNCHES for worker in launch.running] == []
