"""The simulated daemon, with real processors."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from etlstage.errors import ConfigError, WorkerStartFailed
from etlstage.messages import AnnotatedRun, StageKind
from etlstage.protocol.kcl.lines import RecordColumn, Version
from etlstage.protocol.kcl.settings import KclDialect
from etlstage.stage import Stage, WorkerProgram
from etlstage.testing import Fault, FaultKind, FaultPlan, Moment
from etlstage.testing.kcl_daemon import StreamRecord, records_of, shards_of, simulate
from tests.kcl.client import CURRENT, downloaded
from tests.kcl.processors import BUFFERING

pytestmark = [pytest.mark.process, pytest.mark.anyio]

SDK = """\
from etlstage.worker import kcl

class Printer(kcl.Processor):
    def process_records(self, records, checkpointer):
        for record in records:
            print(record.data.decode())
        if records:
            checkpointer.checkpoint(records[-1])

    def shutdown_requested(self, checkpointer):
        checkpointer.checkpoint()

kcl.run(Printer())
"""
LINES = [b"one", b"two", b"three", b"four", b"five"]


async def told(
    folder: Path,
    source: str = SDK,
    *faults: Fault,
    shards: int = 1,
    version: Version = Version.V2,
    begin: str | None = None,
    well: bool = True,
    events: bool = False,
    timeout: float = 20,  # noqa: ASYNC109 - of the processor
) -> list[str]:
    """Return the transcript of a processor, with five records."""
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
        faults=FaultPlan(faults),
        begin=begin,
        timeout=timeout,
    )
    assert found is well, "\n".join(lines)
    return [
        line
        for line in lines
        if events or line.lstrip("0123456789 ")[:2] not in ("! ", "- ")
    ]


async def test_both_sides_are_shown_by_name(tmp_path: Path) -> None:
    """Records are decoded, and the checkpoints are listed at the end."""
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
            [Fault(FaultKind.FAIL_CHECKPOINT, number=1, times=2)],
            Version.V2,
            ["> checkpoint 3: ThrottlingException"] * 2
            + ["> checkpoint 3: stored", "> shardEnded"],
        ),
        (
            [Fault(FaultKind.LOSE_LEASE, number=2)],
            Version.V2,
            [
                "> leaseLost",
                "< status leaseLost",
                "checkpointed: shardId-000000000000 3; 2 records not covered",
            ],
        ),
        (
            [Fault(FaultKind.LOSE_LEASE, number=1)],
            Version.V1,
            ["> shutdown ZOMBIE", "< status shutdown"],
        ),
        (
            [Fault(FaultKind.END_SHARD, number=2)],
            Version.LEGACY,
            ["> shutdown TERMINATE"],
        ),
        (
            [
                Fault(FaultKind.REQUEST_SHUTDOWN, number=2),
                Fault(FaultKind.PAUSE, Moment.CHECKPOINT, number=1),
            ],
            Version.V2,
            ["> shutdownRequested", "< checkpoint (all)", "> leaseLost"],
        ),
    ],
)
async def test_faults(
    tmp_path: Path, faults: list[Fault], version: Version, lines: list[str]
) -> None:
    """They happen where the plan has them, in the terms of the version."""
    found = iter(await told(tmp_path, SDK, *faults, version=version))
    for line in lines:
        assert line in found, line


@pytest.mark.parametrize(
    ("fault", "lines"),
    [
        (
            Fault(FaultKind.FAIL_CHECKPOINT, number=1, data=b"NullPointerException"),
            ["> checkpoint 3: NullPointerException", "- exited with status 1"],
        ),
        (
            Fault(FaultKind.LOSE_LEASE, Moment.CHECKPOINT, number=2),
            [
                "< checkpoint 5",
                "> checkpoint 5: ShutdownException",
                "< status processRecords",
                "> leaseLost",
                "checkpointed: shardId-000000000000 3; 2 records not covered",
            ],
        ),
        (
            Fault(FaultKind.REQUEST_SHUTDOWN, Moment.CHECKPOINT, number=1),
            [
                "> checkpoint 3: stored",
                "> shutdownRequested",
                "< status shutdownRequested",
                "> leaseLost",
                "checkpointed: shardId-000000000000 3; 2 records not covered",
            ],
        ),
        (
            Fault(FaultKind.END_SHARD, Moment.CHECKPOINT, number=1),
            [
                "> checkpoint 3: stored",
                "> shardEnded",
                "checkpointed: shardId-000000000000 SHARD_END",
            ],
        ),
        (
            Fault(FaultKind.NO_RECORDS, number=2),
            ["> checkpoint 3: stored", "> processRecords: 0 records"],
        ),
        (
            Fault(FaultKind.MANY_RECORDS, number=2),
            [
                "> processRecords: 10,000 records",
                ">   4 '90c1667d' 'four'",
                ">   ... 9,994 records ...",
                ">   4.9999 '90c1667d' 'four'",
                "> checkpoint 4.9999: stored",
                ">   5 '3cb2cccb' 'five'",
                "checkpointed: shardId-000000000000 SHARD_END",
            ],
        ),
        (
            Fault(FaultKind.RESTART, number=2),
            [
                "> checkpoint 3: stored",
                "- SIGKILL was sent",
                "> initialize shardId-000000000000 from 3",
                "> processRecords: 2 records",
                ">   4 '90c1667d' 'four'",
                "checkpointed: shardId-000000000000 SHARD_END",
            ],
        ),
        (
            # All was checkpointed before: only the end of the shard is left.
            Fault(FaultKind.RESTART, number=3),
            [
                "> checkpoint 5: stored",
                "> initialize shardId-000000000000 from 5",
                "< status initialize",
                "> shardEnded",
                "< checkpoint (all)",
                "checkpointed: shardId-000000000000 SHARD_END",
            ],
        ),
        (
            Fault(FaultKind.RESTART, Moment.CHECKPOINT, number=1),
            ["< checkpoint 3", "> initialize shardId-000000000000 from 3"],
        ),
        (
            Fault(FaultKind.RESTART, Moment.CHECKPOINT, number=1, data=b"1"),
            [
                "< checkpoint 3",
                "> initialize shardId-000000000000 from 1",
                ">   2 '11ca8a66' 'two'",
                "checkpointed: shardId-000000000000 SHARD_END",
            ],
        ),
        (
            Fault(FaultKind.END_INPUT, Moment.ACTION, number=2),
            [
                "> checkpoint 3: stored",
                "- stdin was closed",
                "- exited with status 0",
                "checkpointed: shardId-000000000000 3; 2 records not covered",
            ],
        ),
    ],
)
async def test_what_goes_wrong_with_a_shard(
    tmp_path: Path, fault: Fault, lines: list[str]
) -> None:
    """A fault comes before an action or at a checkpoint; lines are in this order."""
    well = fault.kind is not FaultKind.FAIL_CHECKPOINT
    all_told = await told(tmp_path, SDK, fault, well=well, events=True)
    found = iter(all_told)
    for line in lines:
        assert line in found, (line, all_told)


async def test_failure_while_another_shard_goes_on(tmp_path: Path) -> None:
    """The simulation has failed, even if the last shard to end has not (issue 25)."""
    faults = Fault(FaultKind.KILL, contains=b"one"), Fault(FaultKind.RESTART, number=2)
    found = await told(tmp_path, SDK, *faults, shards=2, well=False)
    assert [line[0] for line in found if " FAIL " in line] == ["1"]
    assert "checkpointed: shardId-000000000000 SHARD_END" in found


@pytest.mark.parametrize("kind", [FaultKind.KILL, FaultKind.END_INPUT])
async def test_fault_in_the_worker_of_a_shard(tmp_path: Path, kind: FaultKind) -> None:
    """It happens in the processor of that shard only (issue 25)."""
    shard = "shardId-000000000001"
    fault = Fault(kind, worker=shard)
    found = await told(tmp_path, SDK, fault, shards=2, well=False)
    failed = [line for line in found if " FAIL " in line]
    assert [line[0] for line in failed] == ["1"]
    assert "checkpointed: shardId-000000000000 SHARD_END" in found


@pytest.mark.parametrize(
    "fault",
    [
        Fault(FaultKind.EXIT, status=9, message=1, start=2),
        Fault(FaultKind.FAIL_CHECKPOINT, data=b"NullPointerException", start=2),
        Fault(FaultKind.END_INPUT, Moment.ACTION, number=3, start=2),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.at}",
)
async def test_fault_in_a_later_start(tmp_path: Path, fault: Fault) -> None:
    """It happens in that start of the shard's processor only (issue 25)."""
    well = fault.kind is FaultKind.END_INPUT
    restart = Fault(FaultKind.RESTART, number=2)
    found = await told(tmp_path, SDK, restart, fault, well=well, events=True)
    again = found.index("> initialize shardId-000000000000 from 3")
    assert "> checkpoint 3: stored" in found[:again]
    assert found[-1] == "checkpointed: shardId-000000000000 3; 2 records not covered"
    status = {FaultKind.EXIT: 9, FaultKind.FAIL_CHECKPOINT: 1, FaultKind.END_INPUT: 0}
    assert f"- exited with status {status[fault.kind]}" in found[again:]


async def test_shard_that_is_split(tmp_path: Path) -> None:
    """Its children begin after its end, and have the rest of its records."""
    found = await told(tmp_path, SDK, Fault(FaultKind.SPLIT_SHARD))
    assert found[2:6] == [
        "0  > shardEnded",
        "0  < checkpoint (all)",
        "0  > checkpoint (all): stored",
        "0  < status shardEnded",
    ]
    assert "1  > initialize shardId-000000000001 from TRIM_HORIZON" in found[6:]
    given = sorted((line[7], line[0]) for line in found if line[3:7] == ">   ")
    assert [number for number, _ in given] == ["1", "2", "3", "4", "5"]
    assert {shard for _, shard in given} == {"1", "2"}
    assert found[-3:] == [f"checkpointed: shardId-{n:012} SHARD_END" for n in range(3)]


async def test_shards_that_are_merged(tmp_path: Path) -> None:
    """The fault ends both, and their child waits for both."""
    fault = Fault(FaultKind.MERGE_SHARDS, number=1)
    found = await told(tmp_path, SDK, fault, shards=2)
    given = [line for line in found if ">   " in line]
    assert [line[7] for line in given] == ["1", "2", "3", "4", "5"]
    assert {line[0] for line in given} == {"2"}
    begun = found.index("2  > initialize shardId-000000000002 from TRIM_HORIZON")
    assert found.index("0  < status shardEnded") < begun
    assert found.index("1  < status shardEnded") < begun
    with pytest.raises(ConfigError, match="no shard other than"):
        await told(tmp_path, SDK, Fault(FaultKind.MERGE_SHARDS))


@pytest.mark.parametrize("kind", [FaultKind.SPLIT_SHARD, FaultKind.MERGE_SHARDS])
async def test_children_are_not_divided_at_checkpoints(
    tmp_path: Path, kind: FaultKind
) -> None:
    """Only the first shards are split or merged, as before actions (issue 25)."""
    shards = 2 if kind is FaultKind.MERGE_SHARDS else 1
    source = SDK.replace("if records:", "for _ in range(2):")  # per action
    fault = Fault(kind, Moment.CHECKPOINT, number=1)
    found = await told(tmp_path, source, fault, shards=shards)
    ended = [line for line in found if line.startswith("checkpointed:")]
    assert ended == [f"checkpointed: shardId-{n:012} SHARD_END" for n in range(3)]


async def test_children_of_a_shard_that_did_not_end(tmp_path: Path) -> None:
    """They are not begun before their parents have ended."""
    source = SDK + "# never checkpoints the end\n"
    source = source.replace(
        "kcl.run(", "Printer.shard_ended = lambda *_: None\nkcl.run("
    )
    fault = Fault(FaultKind.SPLIT_SHARD, number=2)
    found = await told(tmp_path, source, fault, well=False)
    assert any("FAIL the processor answered shardEnded without" in f for f in found)
    assert found[-2:] == [
        f"not started: shardId-{n:012}, no checkpoint at the end of shardId-{0:012}"
        for n in (1, 2)
    ]


async def test_shard_that_begins_again_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with an error: a fault like this needs a number."""
    fault = Fault(FaultKind.RESTART, Moment.CHECKPOINT, data=b"1")
    monkeypatch.setattr("etlstage.testing.kcl_daemon._STARTS", 3)
    with pytest.raises(ConfigError, match="was started 3 times; set number"):
        await told(tmp_path, SDK, fault)


async def test_unanswered_checkpoint(tmp_path: Path) -> None:
    """Stdin is closed in place of the answer, and the SDK exits with an error."""
    found = await told(tmp_path, SDK, Fault(FaultKind.END_INPUT), well=False)
    assert found[-2].startswith("FAIL the processor closed stdout, expected its status")
    assert found[-2].endswith("exited with status 1")


async def test_last_words_of_a_processor_that_hangs(tmp_path: Path) -> None:
    """They are shown before the failure, even without a line end (issue 25)."""
    source = 'import sys\nprint("no licence", end="", file=sys.stderr, flush=True)\n'
    source += "sys.stdin.read()\n"
    found = await told(tmp_path, source, well=False, events=True, timeout=4)
    assert found[1:3] == [
        "! no licence",
        "FAIL the processor did not answer initialize within 4 seconds",
    ]


async def test_restart_from_a_checkpoint(tmp_path: Path) -> None:
    """Records that the checkpoint covers are not given again."""
    found = await told(tmp_path, begin="3")
    assert found[:4] == [
        "> initialize shardId-000000000000 from 3",
        "< status initialize",
        "> processRecords: 2 records",
        ">   4 '90c1667d' 'four'",
    ]
    with pytest.raises(
        ConfigError, match="--from: 'x', 0 is not a position in a shard"
    ):
        await told(tmp_path, begin="x")


async def test_shards_of_the_published_client(tmp_path: Path) -> None:
    """Each has a process, and the records whose keys belong to it."""
    found = await told(tmp_path, BUFFERING, shards=2)
    assert found[-2:] == [
        "checkpointed: shardId-000000000000 SHARD_END",
        "checkpointed: shardId-000000000001 SHARD_END",
    ]
    assert sum(">   " in line for line in found) == 5
    assert "0  < noise: 'initialized at TRIM_HORIZON'" in found


async def test_program_that_is_not_there(tmp_path: Path) -> None:
    """It is an error, not a finding about the processor."""
    stage = Stage(name="w", kind=StageKind.LOAD, worker=["/none"], dialect=KclDialect())
    shards = shards_of(records_of(LINES), 2)
    with pytest.raises(WorkerStartFailed):
        await simulate(stage, shards, size=3, tell=print)


def test_records_of_a_file() -> None:
    """A line is data, or JSON with data, a key and a time (issue 25)."""
    lines = [
        b"plain",
        b'{"data": "x", "key": "k", "time": 5}',
        b'{"base64": "AAE="}',
        b'{"data": {"a": 1}, "key": "k"}',
        b'{"other": 1}',
        b"[" * 100_000,
        b'{"data": "x", "time": 0}',
    ]
    plain, full, binary, nested, other, deep, oldest = records_of(lines)
    assert plain.data == b"plain"
    assert full == StreamRecord(b"x", "k", 5)
    assert binary.data == b"\0\1"
    assert nested == StreamRecord(b'{"a": 1}', "k")
    assert other.data == lines[4]
    assert deep.data == lines[5]
    (shard,) = shards_of([oldest], 1)
    run = shard.run(0, 1)
    assert isinstance(run, AnnotatedRun)
    assert run.columns[RecordColumn.ARRIVAL] == [0]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'{"data": "x", "key": ""}', "record 1: key is ''"),
        (b'{"data": "x", "time": "now"}', "record 1: time is 'now'"),
        (b'{"base64": "?"}', "record 1: base64"),
        (b'{"data": "x", "time": true}', "record 1: time is True"),
        (rb'{"data": "\ud800"}', r"record 1: data has the surrogate '\\ud800'"),
        (rb'{"data": "x", "key": "a\udfff"}', r"record 1: key has the surrogate"),
    ],
)
def test_wrong_record(line: bytes, text: str) -> None:
    """The error names the record by its number (issue 25)."""
    with pytest.raises(ConfigError, match=text):
        records_of([line])
