"""
Kill a Spark job at random moments: ``python -m tests.spark.journal.kills``.

The job is a stream from journals through a stage into journals. Its driver, its JVM or
a process of a task is killed, until the number of kills is reached. Then each message
must be there once, although the stage's results differ each time, and it refuses one
message in a hundred.
"""

from __future__ import annotations

import argparse
import json
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

from etlstage.journal import Journals, Publisher, RunMessage
from etlstage.pipeline.journal_source import messages_of
from etlstage.transport.process import descendants
from tests.spark.archive import ARCHIVE, OPTIONS
from tests.spark.driver import environment

JAVA: Final = f"{OPTIONS} -XX:SharedArchiveFile={ARCHIVE}"
RUNS: Final = "application/x-etlstage-run"
EACH: Final = 500
"""Messages for each kill."""
ROLES: Final = ("task",) * 6 + ("worker",) * 6 + ("driver", "jvm")
"""The processes to kill, with their relative frequencies."""
PATIENCE: Final = 300.0
"""Seconds until a job that is not killed has ended."""
WORKER: Final = """\
import json, random
from etlstage import worker

def salt(message):
    n = int(message)
    if n % 100 == 7:
        raise worker.Refuse("no seven")
    yield json.dumps({"n": n, "salt": random.randrange(10**9)}).encode()

worker.transform(salt)
"""
JOB: Final = """\
import sys
from pathlib import Path
from etlstage.spark import register, transform
from etlstage.stage import ErrorPolicy, RestartPolicy, Stage, WorkerProgram
from tests.spark.driver import make_session

# A task that is killed is run again.
spark = make_session(master="local[2,100]").start()
register(spark)
read = spark.readStream.format("etlstage-journal").option("max_messages", 1000)
stage = Stage(
    name="salt",
    worker=WorkerProgram(command=(sys.executable, str(Path("salt.py").absolute()))),
    on_error=ErrorPolicy(retries=50),
    restart=RestartPolicy(max=1000),
)
salted = transform(read.load("in").select("value"), stage, errors="column")
salted = salted.where("error is null").select("value")
writer = salted.writeStream.format("etlstage-journal").trigger(availableNow=True)
query = writer.option("checkpointLocation", "checkpoint").start("out")
Path("started").touch()
query.awaitTermination()
"""


def main() -> int:
    """Run with kills, and check; return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.spark.journal.kills")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))  # noqa: S311
    chosen = parser.parse_args()
    tell(f"seed {chosen.seed}")
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    count = EACH * chosen.kills
    prepare(folder, count)
    kills = run(folder, chosen.kills, random.Random(chosen.seed))  # noqa: S311
    wrong = check(folder, count)
    who = {name: kills.count(name) for name in sorted(set(kills))}
    tell(f"{len(kills)} kills {who}, {count} messages: {wrong or 'each once'}")
    if not wrong:
        shutil.rmtree(folder)
    return int(bool(wrong) or len(kills) < chosen.kills)


def prepare(folder: Path, count: int) -> None:
    """Write the input: of two producers, and a third that never commits."""
    (folder / "salt.py").write_text(WORKER)
    (folder / "job.py").write_text(JOB)
    with Journals.open(folder / "in", partitions=3, content_type=RUNS) as journals:
        names = [spec.name for spec in journals.partitions()]
        publishers = [
            Publisher(journals, mapping=lambda m: (names[m.run[0][-1] % 3], RUNS))
            for _ in range(3)
        ]
        for first in range(0, count, 100):
            run = [b"%d" % n for n in range(first, first + 100)]
            publishers[first // 100 % 2].publish_committed(RunMessage(run))
            # The third never commits its transaction.
            publishers[2].publish_uncommitted(RunMessage([b"%d" % first]))


def run(folder: Path, kills: int, dice: random.Random) -> list[str]:
    """Run the job to its end, with kills in between; return the killed roles."""
    killed: list[str] = []
    while True:
        (folder / "started").unlink(missing_ok=True)
        with (folder / "log").open("ab") as log:
            job = subprocess.Popen(
                [sys.executable, "job.py"],
                cwd=folder,
                env=environment(JDK_JAVA_OPTIONS=JAVA),
                stdout=log,
                stderr=log,
            )
        with job:
            before, early = len(killed), not dice.randrange(5)
            while len(killed) < kills and job.poll() is None:
                time.sleep(dice.uniform(0.5, 4))
                # Until its query runs, a killed process ends the job.
                if early or (folder / "started").exists():
                    killed += kill(job.pid, dice)
            status = job.wait(PATIENCE)
            for process in descendants(job.pid):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        if not status:
            return killed
        assert len(killed) > before, f"fails by itself: {folder / 'log'}"
        tell(f"{len(killed)} kills: {' '.join(killed[-12:])}")


def kill(job: int, dice: random.Random) -> list[str]:
    """Kill the driver, its JVM, or, mostly, a process of a task; return which."""
    roles: dict[str, list[int]] = {"driver": [job]}
    for process in descendants(job):
        roles.setdefault(role_of(process), []).append(process)
    if "task" not in roles:
        return []  # the job has not begun
    role = dice.choice(ROLES)
    if role not in roles:
        return []
    with suppress(ProcessLookupError):
        os.kill(dice.choice(roles[role]), signal.SIGKILL)
        return [role]
    return []


def role_of(process: int) -> str:
    """Return the role of a process of the job."""
    with suppress(OSError):
        command = Path(f"/proc/{process}/cmdline").read_bytes()
        if b"java" in command.split(b"\0")[0]:
            return "jvm"
        if b"salt.py" in command:
            return "worker"
        if b"pyspark.daemon" in command:
            return "task"  # or the daemon that forks them
    return "other"


def check(folder: Path, count: int) -> str:
    """Return what is wrong with the output; empty: nothing."""
    with Journals.open(folder / "out", create=False) as journals:
        runs = [messages_of(envelope.message) for envelope in journals.read_committed()]
    found = [json.loads(message)["n"] for run in runs for message in run]
    wanted = {n for n in range(count) if n % 100 != 7}
    missing, more = wanted - set(found), len(found) - len(set(found))
    if not missing and not more and len(found) == len(wanted):
        return ""
    return f"{len(missing)} missing, {more} twice, in {folder}"


def tell(text: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
