"""
Runs a pipeline that something is killed in: ``python -m tests.crash.victim``.

Arguments: the pipeline file; what is killed, ``process``, ``worker`` or ``jvm``; and
when: the step of a commit and how often it comes before, or ``at`` and seconds. Without
the last two nothing is killed. The exit code is that of the run.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import anyio

from etlstage.pipeline import Pipeline


def kill(what: str) -> None:
    """Kill the whole process, or a child of it by what it runs."""
    if what == "process":
        os.kill(os.getpid(), signal.SIGKILL)
    wanted = b"java" if what == "jvm" else b"crash/stage.py"
    for pid in descendants(os.getpid()):
        command = Path(f"/proc/{pid}/cmdline")
        if command.exists() and wanted in command.read_bytes():
            os.kill(pid, signal.SIGKILL)
            return


def descendants(pid: int) -> list[int]:
    """Return the processes that come of a process, by id."""
    found = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in tasks.read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


def main() -> int:
    """Run the pipeline; kill what is to be killed."""
    path, what, *when = sys.argv[1:]
    runner = Pipeline.from_yaml(path)
    if when and when[0] == "at":
        timer = threading.Timer(float(when[1]), kill, [what])
        timer.daemon = True
        timer.start()
    elif when:
        left = int(when[1])

        def at(step: str) -> None:
            nonlocal left
            left -= step == when[0]
            if left < 0:
                left = sys.maxsize
                kill(what)

        assert runner._delivery is not None
        runner._delivery.at = at
    report = anyio.run(runner.run)
    sys.stdout.write(f"{report.status} {report.error}\n")
    return report.status != "done"


if __name__ == "__main__":
    sys.exit(main())
