"""One drawn system: run until all is loaded, whatever is killed meanwhile."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.systems.system import System

__all__ = ("Ran", "run")

PATIENCE: Final = 120.0
"""Seconds until a run that nobody kills has ended."""
MANY: Final = 200
"""Starts, of all runs of a system."""
AGAIN: Final = {4, 5, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT}
"""Exit codes of runs that are started again: drained, stopped, killed."""
FAILED: Final = 1
"""Of one that failed, as it may where a load worker was killed: nothing is proven."""


@dataclass
class Ran:
    """What became of a system."""

    seed: int
    system: System
    kills: list[str] = field(default_factory=list)
    lives: int = 0
    wrong: str = ""

    @property
    def workers_killed(self) -> bool:
        """Whether one was."""
        return any(kill.startswith("worker") for kill in self.kills)

    def __str__(self) -> str:
        pipelines = " | ".join(_shown(p) for p in self.system.pipelines)
        what = f"{self.seed}: {len(self.system.rows)} through {pipelines}"
        killed = f"; killed {' '.join(self.kills)}" if self.kills else ""
        wrong = f"; WRONG in {self.system.folder}: {self.wrong}" if self.wrong else ""
        return what + killed + wrong


def run(seed: int, parent: Path) -> Ran:
    """Draw a system and run it to its end; its folder is kept if anything is wrong."""
    dice = random.Random(seed)  # noqa: S311
    folder = Path(tempfile.mkdtemp(prefix=f"system-{seed}-", dir=parent))
    ran = Ran(seed, System.draw(folder, dice))
    try:
        _run(ran, dice)
    except AssertionError as error:
        ran.wrong = str(error)
    else:
        system = ran.system
        killed = bool(ran.kills)
        ran.wrong = (
            system.check(killed=killed, workers_killed=ran.workers_killed)
            or system.check_order()
        )
    if not ran.wrong:
        shutil.rmtree(folder)
    return ran


def _run(ran: Ran, dice: random.Random) -> None:
    left = dice.choice([0, 1, 3, 8])
    running = {*ran.system.runs}
    # Who reads journals has read all there is if it began behind the end of who appends.
    begun = dict.fromkeys(running, 0)
    ended = 0 if "a" in running else -1
    with _started(ran) as processes:
        while running:
            pause = dice.random() * dice.choice([0.3, 1, 2])
            if left:
                time.sleep(pause)
                name = dice.choice(sorted(running))
                if processes[name].poll() is None:
                    ran.kills.append(_kill(processes[name].pid, dice, ran.lives))
                    left -= 1
            else:
                _await(processes[name] for name in running)
            for name in sorted(running):
                code = processes[name].poll()
                if code is None:
                    continue
                failed = code == FAILED and ran.workers_killed
                assert code == 0 or code in AGAIN or failed, f"{name} exits with {code}"
                alone = "a" not in running and begun[name] > ended
                if code == 0 and (name == "a" or alone):
                    running.remove(name)
                    ended = ran.lives if name == "a" else ended
                else:
                    assert ran.lives < MANY, f"{name} is started for ever: {code}"
                    time.sleep(0.5 if code == 0 else 0)
                    processes[name] = _start(ran, name)
                    begun[name] = ran.lives


def _await(running: Iterable[subprocess.Popen[bytes]]) -> None:
    """Wait until one of them has ended."""
    processes, limit = [*running], time.monotonic() + PATIENCE
    while all(process.poll() is None for process in processes):
        assert time.monotonic() < limit, "hangs"
        time.sleep(0.01)


@contextmanager
def _started(ran: Ran) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    processes = {}
    try:
        for name in ran.system.runs:
            processes[name] = _start(ran, name)
        yield processes
    finally:
        for process in processes.values():
            with process:
                process.kill()


def _start(ran: Ran, name: str) -> subprocess.Popen[bytes]:
    ran.lives += 1
    with (ran.system.folder / f"log-{name}").open("ab") as log:
        log.write(b"-- start %d\n" % ran.lives)
        log.flush()
        return subprocess.Popen(
            [sys.executable, "-m", "etlstage", "run", ran.system.runs[name]],
            cwd=ran.system.folder,
            stdout=log,
            stderr=log,
            # A process in the background of a shell ignores it otherwise.
            preexec_fn=_hear_interrupts,
        )


def _hear_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _kill(process: int, dice: random.Random, life: int) -> str:
    """Kill it, or stop it by a signal, or kill one of its workers; return which."""
    workers = sorted(_children(process))
    what = dice.choice(["kill", "kill", "worker", "worker", "TERM", "INT"])
    if what == "worker" and workers:
        with suppress(ProcessLookupError):
            os.kill(dice.choice(workers), signal.SIGKILL)
        return f"worker@{life}"
    if what in ("TERM", "INT"):
        os.kill(process, signal.Signals[f"SIG{what}"])
        return f"{what}@{life}"
    os.kill(process, signal.SIGKILL)
    return f"run@{life}"


def _children(process: int) -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == process:
                yield int(path.parent.name)


def _shown(pipeline: dict[str, object]) -> str:
    stages = pipeline["transform"]
    assert isinstance(stages, list)
    words = [_end(pipeline["extract"])]
    for stage in stages:
        how = Path(stage["worker"]["command"][1]).stem
        workers = stage["workers"]
        workers = "1-3" if isinstance(workers, dict) else workers
        edge = "+durable" if "durable" in stage else ""
        words.append(f"{how}*{workers}/{stage['order']}{edge}")
    words.append(_end(pipeline["load"]))
    return " > ".join(words) + f" ({pipeline['delivery']})"


def _end(end: object) -> str:
    assert isinstance(end, dict)
    program = end.get("worker")
    return Path(program["command"][1]).stem if program else next(iter(end))
