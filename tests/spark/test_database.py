"""The database server of the tests, where its packages are installed."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

KILLED = """\
import os, signal
from tests.database import postgresql

with postgresql() as server:
    print(server.pid, flush=True)
    input()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.spark
def test_server_ends_with_tests_that_are_killed() -> None:
    """It is not their child, and would run forever (issue 14)."""
    with subprocess.Popen(
        [sys.executable, "-c", KILLED],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as tests:
        assert tests.stdin is not None
        assert tests.stdout is not None
        server = os.pidfd_open(int(tests.stdout.readline()))
        ended = select.poll()
        ended.register(server, select.POLLIN)
        assert not ended.poll(0)
        with suppress(BrokenPipeError):
            tests.communicate("\n")
    assert ended.poll(20_000)
    os.close(server)
