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
    """Return our child processes, including zombies."""
    tasks = Path("/proc/self/task").glob("*/children")
    found: set[str] = set()
    for task in tasks:
        with suppress(FileNotFoundError):  # the thread has ended since
            found.update(task.read_text().split())
    return found


def _of_spark() -> set[str]:
    """
    Return our connections to Java, from Spark tests in this process.

    Each thread has one as soon as it collects a Java object.
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
    """Fail a test that leaves a worker, a zombie or an open file behind."""
    LAUNCHES.clear()
    if request.node.get_closest_marker("process"):
        WATCHDOG.start()  # it stays for the whole run
    files, children = open_files(), _children()
    yield
    assert _children() - children == set()
    assert open_files() - files - _of_spark() == set()
    assert [worker for launch in LAUNCHES for worker in launch.running] == []
