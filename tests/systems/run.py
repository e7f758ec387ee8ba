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
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from etlstage.transport.process import descendants
from tests.systems.system import System

__all__ = ("Ran", "run")

PATIENCE: Final = 300.0
"""Seconds until a run that nobody kills has ended."""
MANY: Final = 200
"""Starts, of all runs of a system."""
NOT_BEGUN: Final = (
    "interrupted before the run began",
    "interrupted",
    "KeyboardInterrupt",
)
"""How its log ends if a signal came first, be it to Python."""
DRAINED: Final = 4
AGAIN: Final = {DRAINED, 5, 130, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT}
"""Exit codes of runs that are started again: drained, stopped, killed; Python has two of
its own for an interrupt."""
FAILED: Final = 1
"""Of one that failed, as it may where a load worker was killed: nothing is proven."""


@dataclass
class Ran:
    """What became of a system."""

    seed: int
    system: System
    kills: list[str] = field(default_factory=list)
    lives: int = 0
    codes: set[int] = field(default_factory=set)
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
        with _Runs(ran, dice) as runs:
            runs.drive(dice.choice([0, 1, 3, 8]))
    except AssertionError as error:
        ran.wrong = str(error)
    else:
        # Who drains has loaded what it has read, once.
        system, drained = ran.system, ran.codes <= {0, DRAINED}
        ran.wrong = (
            system.check(drained=drained, workers_killed=ran.workers_killed)
            or system.check_order()
        )
    if not ran.wrong:
        shutil.rmtree(folder)
    return ran


class _Runs:
    """
    The runs of a system, each of which is started again until it has loaded all.

    Who reads journals has read all that there is if it was started behind the end of
    who appends.
    """

    def __init__(self, ran: Ran, dice: random.Random) -> None:
        self._ran = ran
        self._dice = dice
        self._files = ran.system.runs
        # Of those that are to go on, by name: the process, and which start it is.
        self._running: dict[str, tuple[subprocess.Popen[bytes], int]] = {}
        self._appended = 0  # at which start the run that appends had ended

    def __enter__(self) -> Self:
        for name in self._files:
            self._start(name)
        return self

    def __exit__(self, *exc: object) -> None:
        for process, _ in self._running.values():
            with process:
                process.kill()

    def drive(self, kills: int) -> None:
        """Kill so often, if there is time, and wait for all to end."""
        while self._running:
            if kills:
                time.sleep(self._dice.random() * self._dice.choice([0.5, 1.5, 3]))
                kills -= self._kill_one()
            else:
                self._await_one()
            for name, (process, start) in sorted(self._running.items()):
                if process.poll() is not None:
                    self._end(name, process.returncode, start)

    def _end(self, name: str, code: int, start: int) -> None:
        begun = not self._log(name).read_text().rstrip().endswith(NOT_BEGUN)
        if begun:
            self._ran.codes.add(code)
        may_fail = self._ran.workers_killed or not begun
        again = code in AGAIN or (code == FAILED and may_fail)
        assert code == 0 or again, f"{name} exits with {code}"
        whole = name == "a" or ("a" not in self._running and start > self._appended)
        del self._running[name]
        if code == 0 and whole:
            if name == "a":
                self._appended = self._ran.lives
            return
        assert self._ran.lives < MANY, f"{name} is started for ever: {code}"
        if code == 0:
            time.sleep(0.5)  # there may be more by then
        self._start(name)

    def _start(self, name: str) -> None:
        self._ran.lives += 1
        with self._log(name).open("ab") as log:
            log.write(b"-- start %d\n" % self._ran.lives)
            log.flush()
            process = subprocess.Popen(
                [sys.executable, "-m", "etlstage", "run", self._files[name]],
                cwd=self._ran.system.folder,
                stdout=log,
                stderr=log,
                # A process in the background of a shell ignores it otherwise.
                preexec_fn=_hear_interrupts,
            )
        self._running[name] = process, self._ran.lives

    def _log(self, name: str) -> Path:
        return self._ran.system.folder / f"log-{name}"

    def _kill_one(self) -> bool:
        process, start = self._running[self._dice.choice(sorted(self._running))]
        if process.poll() is not None:
            return False
        self._ran.kills.append(f"{_kill(process.pid, self._dice)}@{start}")
        return True

    def _await_one(self) -> None:
        limit = time.monotonic() + PATIENCE
        while all(process.poll() is None for process, _ in self._running.values()):
            assert time.monotonic() < limit, "hangs"
            time.sleep(0.01)


def _hear_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _kill(process: int, dice: random.Random) -> str:
    """Kill it, or stop it by a signal, or kill one of its workers; return which."""
    workers = sorted(descendants(process))
    what = dice.choice(["run", "run", "worker", "worker", "TERM", "INT"])
    if what == "worker" and workers:
        with suppress(ProcessLookupError):
            os.kill(dice.choice(workers), signal.SIGKILL)
        return what
    if what in ("TERM", "INT"):
        os.kill(process, signal.Signals[f"SIG{what}"])
        return what
    os.kill(process, signal.SIGKILL)
    return "run"


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
