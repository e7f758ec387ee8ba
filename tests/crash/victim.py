"""
Runs a pipeline that something is killed in: ``python -m tests.crash.victim``.

Arguments: the pipeline file; the messages of an epoch; and any number of kills, each as
``what:when:number``. What is ``process``, ``worker``, ``jvm`` or ``python``, which is
Spark's worker; when is the step of a commit, and the number how often it comes before;
or ``at`` and the seconds since there is such a process, or since the start if it is
this. What is killed is reported in a file ``kills`` in the working
directory, with a 0 behind it where there was nothing of the kind. The exit code is that
of the run; one that hangs shows where, and has :data:`HANGS`.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Final

import anyio

from etlstage.pipeline import Pipeline
from etlstage.pipeline.delivery.delivery import Bounds

CHILDREN: Final = {
    "worker": b"crash/stage.py",
    "jvm": b"java",
    "python": b"pyspark.daemon",
}
PATIENCE: Final = 400  # seconds that a run may take
HANGS: Final = "Timeout ("
"""What is reported by one that takes longer."""


def kill(name: str) -> None:
    """Kill the whole process, or a child of it by what it runs."""
    found = living(name)
    with Path("kills").open("a") as file:
        file.write(f"{name} {len(found)}\n")
    if found:
        os.kill(random.choice(found), signal.SIGKILL)  # noqa: S311


def kill_at(name: str) -> None:
    """Kill it so many seconds after there is such a process, or when there is one."""
    await_life(name)
    time.sleep(float(name.rpartition(":")[2]))
    await_life(name)
    kill(name)


def await_life(name: str) -> None:
    """Wait until there is what is to be killed."""
    while not living(name):
        time.sleep(0.02)


def living(name: str) -> list[int]:
    """Return the processes of which one is to be killed, by id."""
    what = name.partition(":")[0]
    if what == "process":
        return [os.getpid()]
    return [p for p in descendants(os.getpid()) if CHILDREN[what] in command(p)]


def command(pid: int) -> bytes:
    """Return what a process runs."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def descendants(pid: int) -> list[int]:
    """Return the processes that come of a process, by id."""
    found = []
    with suppress(OSError):  # it has ended
        for tasks in Path(f"/proc/{pid}/task").iterdir():
            for child in (tasks / "children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def main() -> int:
    """Run the pipeline; kill what is to be killed."""
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    path, epoch, *kills = sys.argv[1:]
    runner = Pipeline.from_yaml(path)
    assert runner._delivery is not None
    # Of load workers no file has it.
    runner._delivery.bounds = Bounds(messages=int(epoch))
    steps = []
    for name in kills:
        if ":at:" in name:
            threading.Thread(target=kill_at, args=(name,), daemon=True).start()
        else:
            steps.append(name)
    seen = Counter[str]()

    def at(step: str) -> None:
        for name in steps:
            if name.endswith(f":{step}:{seen[step]}"):
                kill(name)
        seen[step] += 1

    runner._delivery.at = at
    report = anyio.run(runner.run)
    sys.stdout.write(f"{report.status} {report.error}\n")
    return report.status != "done"


if __name__ == "__main__":
    sys.exit(main())
