"""Runners that share a load's shards, as processes that are killed and stopped."""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import pytest

from tests.database import postgresql, url_of

pytestmark = pytest.mark.process

COUNT = 600
SHARDS = 8
GATES = 200, 400
PROCESSOR = """\
import base64, fcntl, json, os, sys

def say(**message):
    print(json.dumps(message), flush=True)

def checkpoint(number=None):
    say(action="checkpoint", sequenceNumber=number, subSequenceNumber=None)
    answer = json.loads(sys.stdin.readline())
    note("answer", answer["error"])

def note(*what):
    os.write(notes, (json.dumps([os.getpid(), *what]) + "\\n").encode())

def pass_gates(number):
    # Each is locked until the test opens it.
    for gate in GATES:
        if number >= gate and gate not in passed:
            passed.append(gate)
            print("at gate", gate, file=sys.stderr, flush=True)
            with open(f"gate-{gate}") as file:
                fcntl.flock(file, fcntl.LOCK_SH)

GATES = 200, 400
passed = []
notes = os.open("notes", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for line in sys.stdin:
    message = json.loads(line)
    action = message["action"]
    note(action, message.get("shardId"), message.get("sequenceNumber"))
    if action == "processRecords":
        for record in message["records"]:
            number = record["sequenceNumber"]
            pass_gates(int(number))
            open(f"loaded/{number}", "wb").write(base64.b64decode(record["data"]))
            note("record", int(number))
            if int(number) % 5 == 0:
                checkpoint(number)
    elif action == "shardEnded":
        checkpoint()
    say(action="status", responseFor=action)
"""
FILE = """\
name: clicks
extract: {{files: {{path: clicks.jsonl, format: json}}}}
load:
  worker: {{command: [python, processor.py]}}
  dialect: kcl
  batch: {{size: 20}}
  shards: {{count: {count}, key: /user, leases: "{leases}", failover: 3s}}
"""


@pytest.fixture(params=["sqlite", "postgresql"])
def leases(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return the address of a lease table."""
    with ExitStack() as stack:
        if request.param == "sqlite":
            yield "leases.db"
        else:
            server = stack.enter_context(postgresql())
            yield url_of(server)


class Runner:
    """A runner in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "etlstage", "run", "clicks.yaml"],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:
            self.process.kill()

    def read_until(self, enough: Callable[[dict[str, Any]], bool]) -> None:
        """Read the log up to a matching line."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(json.loads(line))
            if enough(self.log[-1]):
                return
        raise AssertionError(self.log)

    def read_events(self, event: str) -> None:
        """
        Read the log until an event has happened to each shard.

        On a busy machine a runner may lose a shard early, and take it again.
        """
        seen = set[str]()
        while len(seen) < SHARDS:
            self.read_until(lambda line: line["event"] == event)
            line = self.log[-1]
            seen.add(line.get("shard") or line["worker"].rpartition("-")[0])

    def end(self) -> tuple[int, str]:
        """Wait for the end; return the exit status and the report."""
        out, err = self.process.communicate()
        self.log += map(json.loads, err.splitlines())
        return self.process.returncode, out


class Gate:
    """A gate at which workers wait until it is opened."""

    def __init__(self, folder: Path, number: int) -> None:
        self._file = (folder / f"gate-{number}").open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.open()

    def open(self) -> None:
        """Let the workers pass."""
        self._file.close()


def test_runners_are_stopped_and_killed(tmp_path: Path, leases: str) -> None:
    """
    The other runner continues from each checkpoint, and nothing is skipped.

    The stopped runner commits nothing when it is continued; then it takes part again,
    and gets all shards when the other is killed.
    """
    messages = write(tmp_path, leases)
    with ExitStack() as stack:
        first_gate, second_gate = (
            stack.enter_context(Gate(tmp_path, n)) for n in GATES
        )
        first = stack.enter_context(Runner(tmp_path))
        first.read_events("worker wrote to stderr")
        first.process.send_signal(signal.SIGSTOP)
        second = stack.enter_context(Runner(tmp_path))
        second.read_events("shard taken")
        first_gate.open()
        # The first one's workers go on, and ask for checkpoints.
        first.process.send_signal(signal.SIGCONT)
        first.read_events("shard lost")
        second.process.kill()
        first.read_events("shard taken")
        second_gate.open()
        status, report = first.end()

    assert status == 0, report
    assert "output complete" in report
    assert loaded(tmp_path) == messages
    answers = check_lives(tmp_path)
    assert answers >= {None, "ShutdownException"}
    again = subprocess.run(
        [sys.executable, "-m", "etlstage", "run", "clicks.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "0 messages loaded by this runner; output complete" in again.stdout


def write(
    folder: Path, leases: str, processor: str = PROCESSOR, shards: int = SHARDS
) -> list[str]:
    """Write a pipeline and its input; return the messages, sorted."""
    (folder / "loaded").mkdir()
    messages = [f'{{"n":{n},"user":{n % 37}}}' for n in range(COUNT)]
    (folder / "clicks.jsonl").write_text("\n".join(messages))
    (folder / "processor.py").write_text(processor)
    (folder / "clicks.yaml").write_text(FILE.format(count=shards, leases=leases))
    return sorted(messages)


def loaded(folder: Path) -> list[str]:
    """Return the loaded messages, sorted; each sequence number has a file."""
    return sorted(path.read_text() for path in (folder / "loaded").iterdir())


def test_database_is_restarted_in_the_middle(tmp_path: Path) -> None:
    """Work stops in time, and continues after each checkpoint (issue 25)."""
    with ExitStack() as stack:
        server = stack.enter_context(postgresql())
        messages = write(tmp_path, url_of(server))
        first_gate, second_gate = (
            stack.enter_context(Gate(tmp_path, n)) for n in GATES
        )
        runner = stack.enter_context(Runner(tmp_path))
        runner.read_events("worker wrote to stderr")
        server.stop()
        runner.read_events("shard lost")
        first_gate.open()
        server.start()
        runner.read_events("shard taken")
        second_gate.open()
        status, report = runner.end()

    assert status == 0, report
    assert loaded(tmp_path) == messages
    check_lives(tmp_path)


def test_runners_are_killed_at_records(tmp_path: Path) -> None:
    """Before a record, after it, and after its checkpoint: there is never a gap."""
    dying = PROCESSOR.replace(
        "def pass_gates(number):",
        "def pass_gates(number, place=0):\n"
        "    if (number, place) in ((95, 0), (205, 1), (405, 2)):\n"
        "        try:\n"
        "            os.mkdir(f'killed-{number}')\n"
        "        except FileExistsError:\n"
        "            return\n"
        "        os.kill(os.getppid(), 9)\n"
        "    return\n",
    )
    dying = dying.replace(
        '            note("record", int(number))\n',
        '            note("record", int(number))\n'
        "            pass_gates(int(number), 1)\n",
    ).replace(
        "                checkpoint(number)\n",
        "                checkpoint(number)\n"
        "                pass_gates(int(number), 2)\n",
    )
    messages = write(tmp_path, "leases.db", dying, shards=2)
    ends = list[int]()
    while 0 not in ends and len(ends) < 9:
        with Runner(tmp_path) as runner:
            ends.append(runner.end()[0])

    assert ends == [-9, -9, -9, 0]
    assert loaded(tmp_path) == messages
    check_lives(tmp_path, 2)


def check_lives(folder: Path, shards: int = SHARDS) -> set[str | None]:
    """Assert that workers resume at checkpoints; return the answers to checkpoints."""
    notes = [json.loads(line) for line in (folder / "notes").read_text().splitlines()]
    shard_of: dict[int, str] = {}
    records: dict[int, list[int]] = {}
    everything: dict[str, set[int]] = defaultdict(set)
    for pid, what, *more in notes:
        if what == "initialize":
            shard_of[pid] = more[0]
            begin = more[1]
            records[pid] = [int(begin) if begin.isdecimal() else -1]
        elif what == "record":
            records[pid].append(more[0])
            everything[shard_of[pid]].add(more[0])
    for pid, numbers in records.items():
        rising = sorted(everything[shard_of[pid]])
        behind = dict(pairwise([-1, *rising]))
        for before, after in pairwise(numbers):
            assert behind[before] == after, (pid, before, after)
    assert len(everything) == shards
    return {more[0] for _, what, *more in notes if what == "answer"}
