"""The daemon on the terminal, with real processors."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from etlstage.errors import ConfigError, WorkerStartFailed
from etlstage.messages import StageKind
from etlstage.protocol.kcl.lines import Version
from etlstage.protocol.kcl.settings import KclDialect
from etlstage.stage import Stage, WorkerProgram
from etlstage.testing.kcl import ProcessorFaults
from etlstage.testing.kcl_daemon import StreamRecord, records_of, shards_of, simulate
from tests.kcl.client import CURRENT, downloaded
from tests.kcl.processors import BUFFERING

pytestmark = [pytest.mark.process, pytest.mark.timeout(120), pytest.mark.anyio]

SDK = """\
from etlstage.worker import kcl

class Printer(kcl.Processor):
    def process_records(self, records, checkpointer):
        for record in records:
            print(record.data.decode())
        checkpointer.checkpoint(records[-1])

    def shutdown_requested(self, checkpointer):
        checkpointer.checkpoint()

kcl.run(Printer())
"""
LINES = [b"one", b"two", b"three", b"four", b"five"]


@pytest.fixture
def anyio_backend() -> str:
    """Return the event loop."""
    return "asyncio"


async def told(
    folder: Path,
    source: str = SDK,
    *faults: str,
    shards: int = 1,
    version: Version = Version.V2,
    begin: str | None = None,
    well: bool = True,
) -> list[str]:
    """Return what is told of a processor, with five records."""
    file = folder / "processor.py"
    file.write_text(source)
    path = ":".join([os.getcwd(), os.fspath(downloaded(CURRENT))])
    stage = Stage(
        name="worker",
        kind=StageKind.LOAD,
        worker=WorkerProgram(
            command=(sys.executable, os.fspath(file), os.fspath(folder / "e"), ""),
            env={"PYTHONPATH": path},
        ),
        dialect=KclDialect(version=version),
    )
    lines: list[str] = []
    found = await simulate(
        stage,
        shards_of(records_of(LINES), shards),
        size=3,
        tell=lines.append,
        faults=ProcessorFaults.parse(faults),
        begin=begin,
        timeout=20,
    )
    assert found is well, "\n".join(lines)
    return [line for line in lines if line[:2] not in ("! ", "- ")]


async def test_both_sides_are_told_by_name(tmp_path: Path) -> None:
    """Records decoded, and at the end what was checkpointed."""
    assert await told(tmp_path) == [
        "> initialize shardId-000000000000 from TRIM_HORIZON",
        "< status initialize",
        "> processRecords: 3 records",
        ">   1 '7a6c86f1' 'one'",
        ">   2 '11ca8a66' 'two'",
        ">   3 '46c5d8f5' 'three'",
        "< checkpoint 3",
        "> checkpoint 3: stored",
        "< status processRecords",
        "> processRecords: 2 records",
        ">   4 '90c1667d' 'four'",
        ">   5 '3cb2cccb' 'five'",
        "< checkpoint 5",
        "> checkpoint 5: stored",
        "< status processRecords",
        "> shardEnded",
        "< checkpoint (all)",
        "> checkpoint (all): stored",
        "< status shardEnded",
        "checkpointed: shardId-000000000000 SHARD_END",
    ]


@pytest.mark.parametrize(
    ("faults", "version", "lines"),
    [
        (
            ["ThrottlingException@1x2"],
            Version.V2,
            ["> checkpoint 3: ThrottlingException"] * 2
            + ["> checkpoint 3: stored", "> shardEnded"],
        ),
        (
            ["leaseLost@2"],
            Version.V2,
            [
                "> leaseLost",
                "< status leaseLost",
                "checkpointed: shardId-000000000000 3; 2 records not covered",
            ],
        ),
        (["leaseLost@1"], Version.V1, ["> shutdown ZOMBIE", "< status shutdown"]),
        (["shardEnded@2"], Version.LEGACY, ["> shutdown TERMINATE"]),
        (
            ["shutdownRequested@2", "late@1"],
            Version.V2,
            ["> shutdownRequested", "< checkpoint (all)", "> leaseLost"],
        ),
    ],
)
async def test_faults(
    tmp_path: Path, faults: list[str], version: Version, lines: list[str]
) -> None:
    """They happen where they are said to, in the words of the version."""
    found = iter(await told(tmp_path, SDK, *faults, version=version))
    for line in lines:
        assert line in found, line


async def test_unanswered_checkpoint(tmp_path: Path) -> None:
    """Its stdin is closed in place of the answer; the SDK exits then."""
    found = await told(tmp_path, SDK, "eof@1", well=False)
    assert found[-2].startswith("FAIL the processor closed stdout, expected its status")
    assert found[-2].endswith("exited with status 1")


async def test_restart_from_a_checkpoint(tmp_path: Path) -> None:
    """What is covered is not given."""
    found = await told(tmp_path, begin="3")
    assert found[:4] == [
        "> initialize shardId-000000000000 from 3",
        "< status initialize",
        "> processRecords: 2 records",
        ">   4 '90c1667d' 'four'",
    ]
    with pytest.raises(ConfigError, match="--from: 'x', 0 is no position in a shard"):
        await told(tmp_path, begin="x")


async def test_shards_of_the_published_client(tmp_path: Path) -> None:
    """Each has a process, and the records whose keys fall to it."""
    found = await told(tmp_path, BUFFERING, shards=2)
    assert found[-2:] == [
        "checkpointed: shardId-000000000000 SHARD_END",
        "checkpointed: shardId-000000000001 SHARD_END",
    ]
    assert sum(">   " in line for line in found) == 5
    assert "0  < noise: 'initialized at TRIM_HORIZON'" in found


async def test_program_that_is_not_there(tmp_path: Path) -> None:
    """It is an error, and no fault of a processor."""
    stage = Stage(name="w", kind=StageKind.LOAD, worker=["/none"], dialect=KclDialect())
    shards = shards_of(records_of(LINES), 2)
    with pytest.raises(WorkerStartFailed):
        await simulate(stage, shards, size=3, tell=print, faults=ProcessorFaults())


def test_records_of_a_file() -> None:
    """A line is data, or says it in JSON, with a key and a time."""
    lines = [
        b"plain",
        b'{"data": "x", "key": "k", "time": 5}',
        b'{"base64": "AAE="}',
        b'{"data": {"a": 1}, "key": "k"}',
        b'{"other": 1}',
    ]
    plain, full, binary, nested, other = records_of(lines)
    assert plain.data == b"plain"
    assert full == StreamRecord(b"x", "k", 5)
    assert binary.data == b"\0\1"
    assert nested == StreamRecord(b'{"a": 1}', "k")
    assert other.data == lines[-1]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'{"data": "x", "key": ""}', "record 1: key is ''"),
        (b'{"data": "x", "time": "now"}', "record 1: time is 'now'"),
        (b'{"base64": "?"}', "record 1: base64"),
    ],
)
def test_wrong_record(line: bytes, text: str) -> None:
    """It is named by its place."""
    with pytest.raises(ConfigError, match=text):
        records_of([line])


@pytest.mark.parametrize("text", ["x", "leaseLost", "late@0", "nothing@1"])
def test_wrong_fault(text: str) -> None:
    """What was expected is said."""
    with pytest.raises(ConfigError, match="--fault: "):
        ProcessorFaults.parse([text])
