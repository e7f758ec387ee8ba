"""
No kill of any process at any time loses a message or leaves anything behind.

A pipeline of three workers is killed again and again, and resumed each time where the
last run left off. Messages are loaded in order, so each line of the target follows the
line before it, or goes back at most to the last stored position.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random

import pytest

from etlstage.pipeline.delivery.record import CommitRecord
from tests.cli.conftest import left_behind, worker
from tests.cli.forked import Forks, environment
from tests.supervisor.workers import runs

KILLS = 12
STEP = 25
BETWEEN = 150  # messages between two kills, on average
COUNT = KILLS * BETWEEN + 1000
PATIENCE = 100.0  # seconds, on a busy machine

PIPELINE = """\
name: kills
state: state
extract:
  worker: {command: [python3, -S, extract.py]}
  timeout: {stop: 200ms, message: 2s}
  dialect: {mode: cyclic}
  offsets: {by: supervisor, start: 0, step: %d, end: %d}
transform:
  - name: same
    worker: {command: [python3, -S, same.py]}
    timeout: {stop: 200ms, message: 2s}
load:
  worker: {command: [python3, -S, load.py]}
  timeout: {stop: 200ms, message: 2s}
"""
EXTRACT = """\
    import json, sys
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        numbers = range(asked["start"], asked["end"])
        sys.stdout.write("".join(f"{n}\\n" for n in numbers) + "\\0")
        sys.stdout.flush()
    """
# Its children, one of them in a session of its own, outlive it if no one ends them.
SAME = """\
    import subprocess, sys
    for apart in (False, True):
        subprocess.Popen(["sleep", "3600"], start_new_session=apart)
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(line + b"\\0")
        sys.stdout.flush()
    """
LOAD = """\
    import os, sys, time
    target = os.open("loaded", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for line in sys.stdin.buffer:
        time.sleep(0.3 if os.path.exists("slowly") else 0.001)
        os.write(target, line)
        os.write(1, b"\\0")
    """


class Run:
    """One run of the pipeline, with its processes and folders."""

    def __init__(
        self, folder: Path, forks: Forks, text: str = PIPELINE % (STEP, COUNT)
    ) -> None:
        (folder / "pipeline.yaml").write_text(text)
        self.folder = folder
        (folder / "tmp").mkdir(exist_ok=True)
        with (folder / "output").open("ab") as output:
            self.process = forks.start(
                ["run", "pipeline.yaml"],
                folder,
                environment(TMPDIR=str(folder / "tmp")),
                output,
            )
        # A zombie of ours keeps its pid, but has no working folder.
        self._pid = self.process.pid

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self.process.poll() is not None

    def reached(self, target: int) -> bool:
        """Return whether ``target`` lines are loaded, or the run has ended."""
        return self.over or count_loaded(self.folder) >= target

    def watchdogs(self) -> list[int]:
        """Return its watchdogs."""
        mark = f"{self._pid}.".encode()
        return [
            pid
            for pid, words in commands()
            if len(words) > 2
            and words[-2].endswith(b"guard.py")
            and words[-1].startswith(mark)
        ]

    def workers(self) -> list[int]:
        """Return its workers, without their child processes."""
        scripts = (b"extract.py", b"same.py", b"load.py")
        ours = set(left_behind(self.folder))
        return [
            pid for pid, words in commands() if pid in ours and words[-1] in scripts
        ]

    def javas(self) -> list[int]:
        """Return its Java processes."""
        ours = set(left_behind(self.folder))
        return [
            pid
            for pid, words in commands()
            if pid in ours and b"SparkSubmit" in b" ".join(words)
        ]

    def folders(self) -> list[Path]:
        """Return the temporary folders that must not outlive the run."""
        return [p for p in (self.folder / "tmp").glob("etlstage-*-*") if p.is_dir()]

    def spools(self) -> list[Path]:
        """Return those of its folders that hold all messages."""
        return [path for path in self.folders() if "-spool-" in path.name]

    def kill(self) -> None:
        """Kill the run with SIGKILL, and check that nothing of it is left."""
        self.process.kill()
        self.close()

    def close(self) -> None:
        """Wait until the run, its processes and its folders are gone."""
        self.process.wait()
        wait_until(lambda: not left_behind(self.folder))
        wait_until(lambda: not self.watchdogs())
        # Files that Spark itself and Java leave there don't count.
        wait_until(lambda: not self.folders())


def commands() -> Iterator[tuple[int, list[bytes]]]:
    """Yield all processes, and their command lines."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/cmdline", "rb") as file:
            yield int(name), file.read().rstrip(b"\0").split(b"\0")


def wait_until(true: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.005)


def loaded(folder: Path) -> list[int]:
    """Return what has been loaded, in order."""
    with suppress(FileNotFoundError):
        return [int(line) for line in (folder / "loaded").read_text().split("\n")[:-1]]
    return []


def count_loaded(folder: Path) -> int:
    """Return how many lines have been loaded."""
    with suppress(FileNotFoundError):
        return (folder / "loaded").read_bytes().count(b"\n")
    return 0


def position(folder: Path) -> int:
    """Return the last position that was stored."""
    stored = CommitRecord.latest(folder / "state").position
    return stored if isinstance(stored, int) else 0


class Account:
    """Checks that only messages after the last stored position are loaded again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._checked = 0
        self._floor = 0
        self._last = -1

    def check(self, floor: int) -> None:
        """Check the lines loaded since; ``floor`` is how far the next may go back."""
        lines = loaded(self._folder)
        for number in lines[self._checked :]:
            assert self._floor <= number <= self._last + 1, (
                f"{number} behind {self._last}, and position {self._floor}"
            )
            self._last = number
        self._checked, self._floor = len(lines), floor


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Write the workers."""
    for name, text in (("extract", EXTRACT), ("same", SAME), ("load", LOAD)):
        worker(tmp_path / f"{name}.py", text)
    yield tmp_path
    for pid in left_behind(tmp_path):
        with suppress(ProcessLookupError):  # it has exited since
            os.kill(pid, signal.SIGKILL)


def kill_process(run: Run, _random: Random) -> None:
    """Kill the run."""
    run.kill()


def _to_worker(run: Run, random: Random, number: signal.Signals) -> None:
    if workers := sorted(run.workers()):
        with suppress(ProcessLookupError):
            os.kill(random.choice(workers), number)


def kill_worker(run: Run, random: Random) -> None:
    """Kill a worker; another takes its place."""
    _to_worker(run, random, signal.SIGKILL)


def stop_worker(run: Run, random: Random) -> None:
    """Stop a worker: it is killed when its reply is overdue."""
    _to_worker(run, random, signal.SIGSTOP)


def _to_watchdog(run: Run, number: signal.Signals) -> None:
    (slowly := run.folder / "slowly").touch()
    try:
        wait_until(lambda: run.over or run.watchdogs())
        before = run.watchdogs()
        for pid in before:
            os.kill(pid, number)
        # The replacement knows everything from its start.
        wait_until(
            lambda: (
                run.over or ((now := run.watchdogs()) and not set(now) & set(before))
            )
        )
        run.kill()
    finally:
        slowly.unlink()


def kill_watchdog(run: Run, _random: Random) -> None:
    """Kill the watchdog and, once there is another, the run."""
    _to_watchdog(run, signal.SIGKILL)


def stop_watchdog(run: Run, _random: Random) -> None:
    """Stop the watchdog and, once there is another, kill the run."""
    _to_watchdog(run, signal.SIGSTOP)


ACTIONS = (
    *[kill_process] * 5,
    *[kill_worker] * 3,
    stop_worker,
    kill_watchdog,
    stop_watchdog,
)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(5))
def test_kills_lose_nothing_and_leave_nothing(
    folder: Path, forks: Forks, seed: int
) -> None:
    """After twelve kills at random times a run completes (issue 10)."""
    random, account = Random(seed), Account(folder)  # noqa: S311 - to be repeated
    targets = sorted(random.randrange(KILLS * BETWEEN) for _ in range(KILLS))
    run: Run | None = None
    for target in targets:
        action = random.choice(ACTIONS)
        if run is None or run.over:
            if run is not None:
                run.close()
                account.check(position(folder))
            run = Run(folder, forks)
        wait_until(partial(run.reached, target))
        account.check(position(folder))
        action(run, random)
        if run.over:
            account.check(position(folder))
    while True:
        if run is not None:
            run.process.wait()
            run.close()
            account.check(position(folder))
            if run.process.returncode == 0:
                break
        run = Run(folder, forks)
    assert sorted(set(loaded(folder))) == list(range(COUNT))
    assert position(folder) == COUNT


SPARK = """\
name: kills
spark: {master: "local[2]"}
extract: {spark: {format: text, path: input.txt}}
transform:
  - {name: same, worker: {command: [python3, -S, same.py]}, timeout: {stop: 200ms}}
load: {worker: {command: [python3, -S, load.py]}, timeout: {stop: 200ms}}
"""


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(300)
def test_kills_of_a_run_with_spark_leave_nothing(folder: Path, forks: Forks) -> None:
    """Java ends; the watchdog, or else the next run, removes the spool (issue 10)."""
    (folder / "input.txt").write_text("".join(f"{n}\n" for n in range(COUNT)))
    for watched in (True, False):
        run = Run(folder, forks, SPARK)
        # Spark writes the messages there, which takes it a while.
        wait_until(run.spools)
        (java,) = run.javas()
        if not watched:
            # A stopped run can't replace its watchdog, as it would within a second.
            run.process.send_signal(signal.SIGSTOP)
            for pid in run.watchdogs():
                os.kill(pid, signal.SIGKILL)
        run.process.kill()
        run.process.wait()
        wait_until(partial(gone, java))
        if watched:
            run.close()
        else:
            assert run.spools() != []
    # Both were killed, so nothing else ends the workers' children.
    for pid in left_behind(folder):
        os.kill(pid, signal.SIGKILL)
    (folder / "loaded").unlink(missing_ok=True)
    last = Run(folder, forks, SPARK)
    assert last.process.wait() == 0
    last.close()
    assert loaded(folder) == list(range(COUNT))


def gone(pid: int) -> bool:
    """Return whether there is no such process."""
    return not Path(f"/proc/{pid}/cmdline").exists() or not runs(pid)
