"""
Runs a pipeline that something is killed in: ``python -m tests.crash.victim``.

Arguments: the pipeline file; the messages of an epoch; what is killed, ``process``,
``worker``, ``jvm`` or ``python``, which is Spark's worker; and when: the step of a commit
and how often it comes before, or ``at`` and seconds. Without the last nothing is killed.
What is killed is told in a file ``kills`` beside the pipeline. The exit code is that of
the run.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from pathlib import Path

import anyio

from etlstage.pipeline import Pipeline
from etlstage.pipeline.delivery.delivery import Bounds

CHILDREN = {"worker": b"crash/stage.py", "jvm": b"java", "python": b"pyspark.daemon"}


def kill(what: str, told: Path) -> None:
    """Kill the whole process, or a child of it by what it runs."""
    if what == "process":
        found = [os.getpid()]
    else:
        found = [p for p in descendants(os.getpid()) if CHILDREN[what] in command(p)]
    if found:
        with told.open("a") as file:
            file.write(f"{what} {' '.join(sys.argv[4:])}\n")
        os.kill(random.choice(found), signal.SIGKILL)  # noqa: S311


def command(pid: int) -> bytes:
    """Return what a process runs."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def descendants(pid: int) -> list[int]:
    """Return the processes that come of a process, by id."""
    found = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = tasks.read_text().split()
        except OSError:
            continue  # it has ended
        for child in children:
            found += [int(child), *descendants(int(child))]
    return found


def main() -> int:
    """Run the pipeline; kill what is to be killed."""
    path, epoch, *kills = sys.argv[1:]
    runner, told = Pipeline.from_yaml(path), Path(path).with_name("kills")
    assert runner._delivery is not None
    # Of load workers no file says it.
    runner._delivery.bounds = Bounds(messages=int(epoch))
    what, when, number = kills or ("", "", "0")
    if when == "at":
        timer = threading.Timer(float(number), kill, [what, told])
        timer.daemon = True
        timer.start()
    elif when:
        left = int(number)

        def at(step: str) -> None:
            nonlocal left
            left -= step == when
            if left < 0:
                left = sys.maxsize
                kill(what, told)

        runner._delivery.at = at
    report = anyio.run(runner.run)
    sys.stdout.write(f"{report.status} {report.error}\n")
    return report.status != "done"


if __name__ == "__main__":
    sys.exit(main())
