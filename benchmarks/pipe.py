"""
How much does supervision cost a filter in the shell?

``etlstage pipe`` with the C echo worker against GNU parallel's ``--pipe --keep-order``
with ``cat``, by the processor time of all processes: parallel hands out blocks, and
does not look at messages. Also measured are messages per second, start-up included.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Row, echo_worker, in_turn, messages

COUNT = 4_000_000
MESSAGES_A_SECOND = 2_000_000
OF_PARALLEL = 0.2


def measure() -> list[Row]:
    """
    Return messages per second, and processor time per megabyte of both.

    Raises:
        SystemExit: If there is no GNU parallel.

    """
    if shutil.which("parallel") is None:
        sys.exit("benchmark pipe needs GNU parallel")
    pipe = [sys.executable, "-m", "etlstage", "pipe", "-q", "--", echo_worker()]
    parallel = ["parallel", "--pipe", "--keep-order", "--block", "1M", "-j2", "cat"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "in")
        path.write_bytes(b"".join(m + b"\n" for m in messages(COUNT)))
        size = path.stat().st_size / 1e6
        jobs = {
            "ours": lambda: _run(pipe, path),
            "theirs": lambda: _run(parallel, path),
        }
        ours, theirs = in_turn(jobs, rounds=5).values()
    return [
        Row(
            "etlstage pipe, C echo worker",
            [COUNT / wall for wall, _ in ours],
            "what is wanted",
            [float(MESSAGES_A_SECOND)] * len(ours),
            "messages/s",
            1.0,
        ),
        Row(
            "etlstage pipe: processor time, all processes",
            [cpu / size * 1e3 for _, cpu in ours],
            "parallel --pipe --keep-order cat",
            [cpu / size * 1e3 for _, cpu in theirs],
            "ms/MB",
            OF_PARALLEL,
            at_most=True,
        ),
    ]


def _run(command: Sequence[str], path: Path) -> tuple[float, float]:
    """Return wall and processor seconds of a filter from a file to nowhere."""
    before, started = _children(), time.perf_counter()
    with path.open("rb") as stdin:
        subprocess.run(command, stdin=stdin, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started, _children() - before


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
