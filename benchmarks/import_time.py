"""
How much later does a worker start because of the SDK?

``import etlstage.worker`` in a fresh interpreter against a fresh interpreter alone. The
target is a difference, 15 ms, so the row compares with the bare start plus that.
``etlstage --help``, which imports no Spark, is allowed 0.3 s.
"""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks.harness import Row, paired

ALLOWED = 15  # milliseconds
STARTS = 10
HELP = "import sys; sys.argv = ['etlstage', '--help']; from etlstage.cli import main; main()"


def measure() -> list[Row]:
    """Return milliseconds of both, the bare start with the allowance."""
    ours, theirs = paired(
        lambda: _start("import etlstage.worker"), lambda: _start("pass"), rounds=5
    )
    return [
        Row(
            "import etlstage.worker",
            ours,
            "bare start + 15 ms",
            [milliseconds + ALLOWED for milliseconds in theirs],
            "ms",
            1.0,
            at_most=True,
        ),
        Row(
            "etlstage --help",
            [_start(HELP) for _ in range(5)],
            "what is allowed",
            [300.0] * 5,
            "ms",
            1.0,
            at_most=True,
        ),
    ]


def _start(code: str) -> float:
    started = time.perf_counter()
    for _ in range(STARTS):
        subprocess.run(
            [sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL
        )
    return (time.perf_counter() - started) / STARTS * 1e3
