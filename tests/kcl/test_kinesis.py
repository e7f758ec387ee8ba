"""Runners that read a real Kinesis API, with processors of the published client."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest

from tests.kcl.client import CURRENT, downloaded
from tests.kcl.kinesalite import CREDENTIALS, Kinesalite, kinesalite
from tests.kcl.processors import BUFFERING
from tests.shard.stream import aggregated

pytestmark = pytest.mark.process

FILE = """\
name: clicks
{more}
extract:
  kinesis:
    {{stream: clicks, region: us-east-1, endpoint: "{endpoint}", idle: 50ms,
      sync: 500ms, max_records: 50{keys}}}
load:
  worker:
    command: [python, processor.py{worker}]
    env: {{PYTHONPATH: {path}}}
  dialect: kcl
  batch: {{size: 20}}
  shards: {{failover: 1s{shards}}}
"""
NOTING = """\
import base64, json, os
from amazon_kclpy import kcl
from amazon_kclpy.v3 import processor

notes = os.open("notes", os.O_WRONLY)

def note(*what):
    os.write(notes, (json.dumps([os.getppid(), *what]) + "\\n").encode())

class Noting(processor.RecordProcessorBase):
    def initialize(self, given):
        self.shard, self.since = given.shard_id, 0
        note("initialize", self.shard, given.sequence_number)

    def process_records(self, given):
        for record in given.records:
            sub = record.sub_sequence_number
            key = record.partition_key
            data = record.binary_data.decode()
            note("record", self.shard, record.sequence_number, sub, key, data)
            self.since += 1
            if self.since % 7 == 0:
                given.checkpointer.checkpoint(record.sequence_number, sub)

    def lease_lost(self, given):
        note("lost", self.shard)

    def shard_ended(self, given):
        note("ends", self.shard)
        given.checkpointer.checkpoint()
        note("ended", self.shard)

    def shutdown_requested(self, given):
        given.checkpointer.checkpoint()

kcl.KCLProcess(Noting()).run()
"""
"""Checkpoints each seventh record, and writes notes with the runner's PID."""


@pytest.fixture
def server() -> Iterator[Kinesalite]:
    """Run a server."""
    with kinesalite() as found:
        yield found


class Runners:
    """Processes that share a stream, and what their processors have noted."""

    def __init__(self, folder: Path, server: Kinesalite, stack: ExitStack) -> None:
        self.folder = folder
        self._server, self._stack = server, stack
        self.notes: list[list[Any]] = []
        self._held = b""
        os.mkfifo(folder / "notes")
        # Opened for writing, too: so it has no end while there is no processor.
        self._pipe = os.open(folder / "notes", os.O_RDWR)
        stack.callback(os.close, self._pipe)
        fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, 1 << 20)
        (folder / "processor.py").write_text(NOTING)

    def write(
        self, *, keys: str = "", worker: str = "", shards: str = "", more: str = ""
    ) -> None:
        """Write the pipeline file."""
        text = FILE.format(
            endpoint=self._server.endpoint,
            path=os.fspath(downloaded(CURRENT)),
            keys=keys,
            worker=worker,
            shards=shards,
            more=more,
        )
        (self.folder / "clicks.yaml").write_text(text)

    def start(self, *command: str) -> Runner:
        """Start another runner, or another command with the pipeline file."""
        return self._stack.enter_context(Runner(self.folder, command or ("run",)))

    def wait(self, enough: Callable[[list[list[Any]]], bool]) -> None:
        """Read notes until there are enough."""
        while not enough(self.notes):
            ready, _, _ = select.select([self._pipe], [], [], 60)
            assert ready, self.notes[-20:]
            *lines, self._held = (self._held + os.read(self._pipe, 1 << 16)).split(
                b"\n"
            )
            self.notes += map(json.loads, lines)


class Runner:
    """One process of ``etlstage``."""

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "etlstage", *command, "clicks.yaml"],
            cwd=folder,
            env={**os.environ, **CREDENTIALS},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:
            self.process.kill()

    def end(self, how: signal.Signals | None = None) -> tuple[int, str]:
        """Send a signal, if any; return the exit status and all output."""
        if how is not None:
            self.process.send_signal(how)
        out, _ = self.process.communicate()
        return self.process.returncode, out


@pytest.fixture
def runners(tmp_path: Path, server: Kinesalite) -> Iterator[Runners]:
    """Return the starter of runners."""
    with ExitStack() as stack:
        yield Runners(tmp_path, server, stack)


def texts(notes: list[list[Any]]) -> list[str]:
    """Return the data of all records that were processed."""
    return [note[-1] for note in notes if note[1] == "record"]


def check_generations(notes: list[list[Any]], server: Kinesalite) -> None:
    """Assert that children began after their parents, and the order in each life."""
    begun: dict[str, int] = {}
    ended: dict[str, int] = {}
    lives: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for at, (_, what, shard, *more) in enumerate(notes):
        match what:
            case "initialize":
                begun.setdefault(shard, at)
                lives[shard] = []
            case "record":
                lives[shard].append((int(more[0]), more[1] or 0))
                assert lives[shard][-1] == max(lives[shard])
            case "ends" | "ended":  # it may be killed in between, and have ended
                ended[shard] = at
    for shard in server.shards():
        for parent in ("ParentShardId", "AdjacentParentShardId"):
            if parent in shard:
                assert ended[shard[parent]] < begun[shard["ShardId"]]


def test_stream_is_split_and_merged_under_load(
    runners: Runners, server: Kinesalite
) -> None:
    """
    Two runners process every record of every generation, even if one is killed.

    The other continues after its checkpoints.
    """
    server.create(2)
    runners.write(shards=", leases: leases.db")
    put: list[str] = []

    def produce(count: int) -> None:
        new = [str(n) for n in range(len(put), len(put) + count)]
        server.put([(text.encode(), text) for text in new])
        put.extend(new)

    def processed(notes: list[list[Any]]) -> bool:
        return set(texts(notes)) == {*put}

    produce(100)
    first, second = runners.start(), runners.start()
    runners.wait(lambda notes: len({note[0] for note in notes}) == 2)
    server.split("shardId-000000000000")
    produce(100)
    runners.wait(lambda notes: len(texts(notes)) > 150)
    server.merge("shardId-000000000003", "shardId-000000000001")
    produce(100)
    first.end(signal.SIGKILL)
    server.split("shardId-000000000004")
    produce(100)
    runners.wait(processed)
    third = runners.start()
    produce(100)
    runners.wait(processed)
    status, report = second.end(signal.SIGTERM)
    assert status == 4, report
    produce(20)
    runners.wait(processed)
    status, report = third.end(signal.SIGTERM)
    assert status == 4, report
    assert ": drained in " in report
    notes = runners.notes
    check_generations(notes, server)
    assert len(texts(notes)) < 2 * len(put)
    shards = {shard["ShardId"] for shard in server.shards()}
    assert {note[2] for note in notes if note[1] == "initialize"} == shards


def test_records_that_were_put_as_one(runners: Runners, server: Kinesalite) -> None:
    """Each has a sub-sequence number; checkpoints are kept in the state."""
    server.create(1)
    parts = [(str(n).encode(), f"key-{n}") for n in range(25)]
    server.put([(b"first", "a"), (aggregated(*parts), "b"), (b"last", "c")])
    runners.write(keys=", follow: false", more="state: state")
    expected = ["first", *map(str, range(25)), "last"]
    status, report = runners.start().end()
    assert status == 0, report
    assert "27 messages loaded by this runner; output complete" in report
    runners.wait(lambda notes: len(texts(notes)) == 27)
    assert texts(runners.notes) == expected
    numbers = [tuple(note[3:6]) for note in runners.notes if note[1] == "record"]
    assert len({sequence for sequence, _, _ in numbers}) == 3
    assert [sub for _, sub, _ in numbers] == [0, *range(25), 0]
    assert [key for _, _, key in numbers] == ["a", *(key for _, key in parts), "c"]

    server.put([(b"more", "a")])
    status, report = runners.start().end()
    assert status == 0, report
    runners.wait(lambda notes: len(texts(notes)) == 28)
    assert texts(runners.notes)[-1] == "more"


def test_processor_that_is_killed(runners: Runners, server: Kinesalite) -> None:
    """Records that it had buffered are delivered again, to another process."""
    server.create(1)
    server.put([(str(n).encode(), "a") for n in range(30)])
    (runners.folder / "processor.py").write_text(BUFFERING)
    runners.write(keys=", follow: false", worker=', effects, "14"')
    status, report = runners.start().end()
    assert status == 0, report
    assert "30 messages loaded by this runner; output complete" in report
    lines = (runners.folder / "effects").read_text().splitlines()
    found = [line.split()[1] for line in lines]
    assert [*dict.fromkeys(found)] == [str(n) for n in range(30)]
    assert (runners.folder / "effects.died").exists()


def test_run_with_a_state_is_killed(runners: Runners, server: Kinesalite) -> None:
    """The next run has its leases at once, however long the failover is (issue 25)."""
    server.create(2)
    server.put([(str(n).encode(), str(n)) for n in range(100)])
    runners.write(more="state: state")
    path = runners.folder / "clicks.yaml"
    path.write_text(path.read_text().replace("failover: 1s", "failover: 1h"))
    first = runners.start()
    runners.wait(lambda notes: len(texts(notes)) == 100)
    first.end(signal.SIGKILL)
    server.put([(str(n).encode(), str(n)) for n in range(100, 200)])
    second = runners.start()
    runners.wait(lambda notes: len({*texts(notes)}) == 200)
    status, report = second.end(signal.SIGTERM)
    assert status == 4, report
    # At most six records of each shard were after the last checkpoint.
    assert 200 <= len(texts(runners.notes)) <= 212


def test_dead_letter_of_a_stream_is_retried(
    runners: Runners, server: Kinesalite
) -> None:
    """It gets a shard and a number of its own: those of the stream are gone."""
    server.create(1)
    server.put([(str(n).encode(), "a") for n in range(10)])
    picky = NOTING.replace(
        "            note(",
        '            if data in open("bad").read().split():\n'
        "                os._exit(1)\n"
        "            note(",
        1,
    )
    (runners.folder / "processor.py").write_text(picky)
    (runners.folder / "bad").write_text("4 7")
    runners.write(keys=", follow: false", more="state: state")
    with (runners.folder / "clicks.yaml").open("a") as file:
        file.write("  restart: {delay: 10ms}\n  on_error: {retries: 0, budget: 50%}\n")
    status, report = runners.start().end()
    assert status == 0, report
    for bad, expected in ("7", 1), ("", 0):
        (runners.folder / "bad").write_text(bad)
        status, report = runners.start("dlq", "retry").end()
        assert status == expected, report
        assert "1 dead letter passed" in report
    runners.wait(lambda notes: len({*texts(notes)}) == 10)
    found = {note[-1]: note[2:4] for note in runners.notes if note[1] == "record"}
    assert [found[text] for text in "47"] == [
        ["load", str(10**15 + number * 10**9 + 1)] for number in (1, 2)
    ]
    assert {found[text][0] for text in "35689"} == {"shardId-000000000000"}


def test_api_that_can_not_be_reached(runners: Runners, server: Kinesalite) -> None:
    """The run fails with the API's error text."""
    runners.write()
    status, report = runners.start().end()
    assert status == 1, report
    assert "stage extract: can't read stream clicks in Kinesis" in report
    assert "Stream clicks under account 000000000000 not found" in report
