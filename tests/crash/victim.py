"""
Run a pipeline and kill processes of it: ``python -m tests.crash.victim``.

Arguments: the pipeline file; the number of messages in an epoch; and any number of
kills, each as ``what:when:number``. ``what`` is ``process``, ``worker``, ``jvm`` or
``python`` (Spark's worker). ``when`` is a step of the commit, and ``number`` how often
the step comes before; or ``when`` is ``at``, and ``number`` the seconds since there is
such a process (``process``: since the start). Each kill is reported in a file ``kills``
in the working directory, with the number of processes found. The exit code tells
whether the run was done; a run that hangs prints its stacks, after :data:`HANGS`.
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
PATIENCE: Final = 400  # seconds within which a run must end
HANGS: Final = "Timeout ("
"""Printed by a run that takes longer."""


def kill(name: str) -> None:
    """Kill this process, or one of its descendants, chosen by the command it runs."""
    found = living(name)
    with Path("kills").open("a") as file:
        file.write(f"{name} {len(found)}\n")
    if found:
        os.kill(random.choice(found), signal.SIGKILL)  # noqa: S311


def kill_at(name: str) -> None:
    """Kill a process some seconds after one of its kind appears."""
    await_life(name)
    time.sleep(float(name.rpartition(":")[2]))
    await_life(name)
    kill(name)


def await_life(name: str) -> None:
    """Wait until there is a process to kill."""
    while not living(name):
        time.sleep(0.02)


def living(name: str) -> list[int]:
    """Return the ids of the processes that a kill may choose from."""
    what = name.partition(":")[0]
    if what == "process":
        return [os.getpid()]
    return [p for p in descendants(os.getpid()) if CHILDREN[what] in command(p)]


def command(pid: int) -> bytes:
    """Return a process's command line."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def descendants(pid: int) -> list[int]:
    """Return the ids of all descendants of a process."""
    found = []
    with suppress(OSError):  # it has ended
        for tasks in Path(f"/proc/{pid}/task").iterdir():
            for child in (tasks / "children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def main() -> int:
    """Run the pipeline, with the kills of the command line."""
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    path, epoch, *kills = sys.argv[1:]
    runner = Pipeline.from_yaml(path)
    assert runner._delivery is not None
    # With load workers, the pipeline file cannot set this.
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
