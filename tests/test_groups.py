"""The groups of the tests, and what a test of the core may not do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

STARTS: dict[str, Callable[[], object]] = {
    "subprocess": lambda: subprocess.run([sys.executable, "-V"], check=True),
    "fork": os.fork,
    "posix_spawn": lambda: os.posix_spawn(sys.executable, [sys.executable], {}),
}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_core_starts_no_process(start: Callable[[], object]) -> None:
    """A test that starts one fails, and the error names the mark to set."""
    with pytest.raises(
        AssertionError, match=r"\[\w+\] starts a process: mark it with 'process'"
    ):
        start()


@pytest.mark.process
def test_others_may() -> None:
    """The mark of a test counts for more than its folder."""
    subprocess.run([sys.executable, "-V"], check=True)
