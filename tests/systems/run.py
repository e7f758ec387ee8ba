"""Run one drawn system until everything is loaded, killing processes meanwhile."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from etlstage.transport.process import descendants
from tests.cli.forked import Forked, Forks, environment
from tests.systems.system import System

__all__ = ("Ran", "run")

PATIENCE: Final = 300.0
"""Seconds within which a run must end once nothing is killed any more."""
MANY: Final = 200
"""Maximal number of starts, of all runs of a system together."""
NOT_BEGUN: Final = (
    "interrupted before the run began",
    "interrupted",
    "KeyboardInterrupt",
)
"""How the log ends if a signal arrived before the run began, or before Python did."""
DRAINED: Final = 4
AGAIN: Final = {DRAINED, 5, 130, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT}
"""Exit codes of runs that are started again: drained, stopped, killed; Python itself
has two codes for an interrupt."""
FAILED: Final = 1
"""Exit code of a failed run; allowed where a worker was killed, as a load worker's
death leaves unproven what was loaded."""


@dataclass
class Ran:
    """The outcome of a system."""

    seed: int
    system: System
    kills: list[str] = field(default_factory=list)
    lives: int = 0
    codes: set[int] = field(default_factory=set)
    wrong: str = ""

    @property
    def workers_killed(self) -> bool:
        """Whether any worker was killed."""
        return any(kill.startswith("worker") for kill in self.kills)

    def __str__(self) -> str:
        pipelines = " | ".join(_shown(p) for p in self.system.pipelines)
        what = f"{self.seed}: {len(self.system.rows)} through {pipelines}"
        killed = f"; killed {' '.join(self.kills)}" if self.kills else ""
        wrong = f"; WRONG in {self.system.folder}: {self.wrong}" if self.wrong else ""
        return what + killed + wrong


def run(seed: int, parent: Path, forks: Forks) -> Ran:
    """Draw a system and run it to its end; keep its folder if anything is wrong."""
    dice = random.Random(seed)  # noqa: S311
    folder = Path(tempfile.mkdtemp(prefix=f"system-{seed}-", dir=parent))
    ran = Ran(seed, System.draw(folder, dice))
    try:
        with _Runs(ran, dice, forks) as runs:
            runs.drive(dice.choice([0, 1, 3, 8]))
    except AssertionError as error:
        ran.wrong = str(error)
    else:
        # A drained run has loaded everything it read, once.
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
    The runs of a system, each of which is started again until it has loaded everything.

    A run that reads journals has read all of them only if it was started after the run
    that appends had ended.
    """

    def __init__(self, ran: Ran, dice: random.Random, forks: Forks) -> None:
        self._ran = ran
        self._forks = forks
        self._dice = dice
        self._files = ran.system.runs
        # By name: the process, and the number of its start.
        self._running: dict[str, tuple[Forked, int]] = {}
        self._appended = 0  # number of starts when the run that appends had ended

    def __enter__(self) -> Self:
        for name in self._files:
            self._start(name)
        return self

    def __exit__(self, *exc: object) -> None:
        for process, _ in self._running.values():
            process.kill()
            process.wait()

    def drive(self, kills: int) -> None:
        """Kill that many times, if the runs last long enough; wait for all to end."""
        while self._running:
            if kills:
                time.sleep(self._dice.random() * self._dice.choice([0.5, 1.5, 3]))
                kills -= self._kill_one()
            else:
                self._await_one()
            for name, (process, start) in sorted(self._running.items()):
                if (code := process.poll()) is not None:
                    self._end(name, code, start)

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
            time.sleep(0.5)  # more may have been appended by then
        self._start(name)

    def _start(self, name: str) -> None:
        self._ran.lives += 1
        with self._log(name).open("ab") as log:
            log.write(b"-- start %d\n" % self._ran.lives)
            log.flush()
            words = ["run", self._files[name]]
            folder = self._ran.system.folder
            process = self._forks.start(words, folder, environment(), log)
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


def _kill(process: int, dice: random.Random) -> str:
    """Kill a run, stop it by a signal, or kill one of its workers; return which."""
    workers = sorted(descendants(process))
    what = dice.choice(["run", "run", "worker", "worker", "TERM", "INT"])
    if what == "worker" and workers:
        with suppress(ProcessLookupError):
            os.kill(dice.choice(workers), signal.SIGKILL)
        return what
    number = signal.Signals[f"SIG{what}"] if what in ("TERM", "INT") else signal.SIGKILL
    with suppress(ProcessLookupError):  # it may have ended meanwhile
        os.kill(process, number)
    return "run" if number == signal.SIGKILL else what


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
