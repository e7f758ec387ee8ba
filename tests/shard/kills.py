"""
Kill runners and processors at random moments: ``python -m tests.shard.kills``.

The load writes a file for each sequence number. A moment is a number of processed
records, plus up to 20 ms. A killed runner is started again, until everything is loaded:
then there must be no gap, and each processor must have begun after a checkpoint.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from tests.shard.test_runners import PROCESSOR, SHARDS, check_lives, loaded

COUNT: Final = 5_000
BETWEEN: Final = 600  # records between two kills, on average
PATIENCE: Final = 300.0  # seconds without a record
KEEPS: Final = {
    "leases": ("", "leases: leases.db, failover: 3s"),
    "state": ("state: state", "sequence: /n"),
}
FILE: Final = """\
name: clicks
{state}
extract: {{files: {{path: clicks.jsonl, format: json}}}}
load:
  worker: {{command: [python, processor.py]}}
  dialect: kcl
  batch: {{size: 20}}
  restart: {{delay: 10ms, max: 1000}}
  shards: {{count: {shards}, key: /user, {more}}}
"""


def main() -> int:
    """Kill as often as asked, and check; return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.shard.kills")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))  # noqa: S311
    chosen = parser.parse_args()
    dice, done, failures, trial = random.Random(chosen.seed), 0, 0, 0  # noqa: S311
    tell(f"seed {chosen.seed}")
    while done < chosen.kills:
        kept = [*KEEPS][trial % len(KEEPS)]
        trial += 1
        folder = Path(tempfile.mkdtemp(prefix="kills-"))
        kills = run(folder, kept, dice)
        done += len(kills)
        wrong = check(folder)
        failures += bool(wrong)
        if not wrong:
            shutil.rmtree(folder)
        line = f"{done} kills, {kept}: {' '.join(kills)}"
        tell(f"{line}; {folder}: {wrong}" if wrong else line)
    tell(f"{done} kills, {trial} loads, {failures} failures")
    return int(failures > 0)


def run(folder: Path, kept: str, dice: random.Random) -> list[str]:
    """Load everything, with kills in between; return what was killed, and when."""
    messages = [f'{{"n":{n},"user":{n % 37}}}' for n in range(COUNT)]
    (folder / "clicks.jsonl").write_text("\n".join(messages))
    (folder / "processor.py").write_text(PROCESSOR.replace("= 200, 400", "= ()"))
    state, more = KEEPS[kept]
    text = FILE.format(state=state, more=more, shards=SHARDS)
    (folder / "clicks.yaml").write_text(text)
    (folder / "loaded").mkdir()
    kills: list[str] = []
    status = -signal.SIGKILL
    while status == -signal.SIGKILL:
        with (folder / "log").open("ab") as log:
            runner = subprocess.Popen(
                [sys.executable, "-m", "etlstage", "run", "clicks.yaml"],
                cwd=folder,
                stdout=log,
                stderr=log,
            )
        with runner:
            while await_moment(folder, runner, dice):
                kills.append(kill(runner.pid, dice) + str(processed(folder)))
            status = runner.wait()
    assert not status, f"{folder}: exit status {status}"
    return kills


def await_moment(
    folder: Path, runner: subprocess.Popen[bytes], dice: random.Random
) -> bool:
    """Wait for the next moment; return False if the runner ends before it."""
    number = processed(folder) + dice.randint(1, 2 * BETWEEN)
    last, since = -1, time.monotonic()
    while (count := processed(folder)) < number:
        if runner.poll() is not None:
            return False
        if count > last:
            last, since = count, time.monotonic()
        assert time.monotonic() < since + PATIENCE, f"{folder}: hangs"
        time.sleep(0.005)
    time.sleep(dice.random() * 0.02)
    return runner.poll() is None


def kill(runner: int, dice: random.Random) -> str:
    """Kill the runner, or one of its processors; return which."""
    children = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if is_processor(path)
    ]
    if children and dice.randrange(3) == 0:
        with suppress(ProcessLookupError):
            os.kill(dice.choice(children), signal.SIGKILL)
        return "processor@"
    os.kill(runner, signal.SIGKILL)
    return "runner@"


def is_processor(cmdline: Path) -> bool:
    """Return whether a process is a processor of these loads."""
    try:
        ours = os.readlink(cmdline.with_name("cwd"))
        return b"processor.py" in cmdline.read_bytes() and "/kills-" in ours
    except OSError:
        return False


def processed(folder: Path) -> int:
    """Return the number of records loaded so far."""
    return len(os.listdir(folder / "loaded"))


def check(folder: Path) -> str:
    """Return what is wrong with a finished load; empty: nothing."""
    try:
        expected = sorted((folder / "clicks.jsonl").read_text().splitlines())
        assert loaded(folder) == expected, "not all was loaded"
        check_lives(folder)
    except AssertionError as error:
        return str(error) or repr(error)
    return ""


def tell(text: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
