"""The published client under the supervisor, and as the load worker of a pipeline."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from etlstage.errors import NotCommitted
from etlstage.messages import Position, Run, StageKind
from etlstage.pipeline import Pipeline, Report
from etlstage.pipeline.interfaces import Source
from etlstage.pipeline.worker_sink import CommittingSink
from etlstage.protocol.kcl.checkpoint import position_of
from etlstage.protocol.kcl.lines import Version
from etlstage.protocol.kcl.settings import KclDialect
from etlstage.stage import BatchPolicy, RestartPolicy, Stage, Timeouts, WorkerProgram
from etlstage.supervisor import (
    Assignment,
    AsyncSupervisor,
    CommitRequest,
    Outcome,
)
from etlstage.telemetry import PrometheusMeter
from tests.kcl.client import CURRENT, OLD, downloaded
from tests.kcl.processors import BUFFERING, PRINTING, SILENT

pytestmark = [pytest.mark.process, pytest.mark.anyio]

RECORDS = [b"%d" % n for n in range(10)]
SHARD = Assignment("shardId-000000000000")


def stage(source: str, folder: Path, *arguments: str, batch: int = 5) -> Stage:
    """Return a stage with a processor of the current client."""
    file = folder / "processor.py"
    file.write_text(source)
    return Stage(
        name="load",
        kind=StageKind.LOAD,
        worker=WorkerProgram(
            command=(sys.executable, os.fspath(file), *arguments),
            env={"PYTHONPATH": os.fspath(downloaded(CURRENT))},
        ),
        dialect=KclDialect(),
        batch=BatchPolicy(size=batch),
    )


class Life:
    """
    A load of ten records by a processor, and its results.

    Args:
        folder: Where the processor writes the records that it has processed.
        die_at: Step of its first process at which it is killed; empty: at none.

    """

    def __init__(self, folder: Path, die_at: str = "") -> None:
        self.effects = folder / f"effects-{die_at}"
        arguments = os.fspath(self.effects), str(die_at)
        self.stage = stage(BUFFERING, folder, *arguments)
        self.asked: list[CommitRequest] = []
        self.outcomes: list[Outcome] = []

    async def run(self) -> None:
        """Give all records, and end the shard."""
        supervisor = AsyncSupervisor(self.stage, commit=self._store, assignment=SHARD)

        async def runs() -> AsyncIterator[Run]:
            yield RECORDS[:7]
            yield RECORDS[7:]
            supervisor.finish()

        async with supervisor:
            self.outcomes = [item async for item in supervisor.answers(runs())]

    async def _store(self, request: CommitRequest) -> None:
        self.asked.append(request)

    @property
    def positions(self) -> list[object]:
        """Sequence numbers that were stored."""
        return [position_of(request.position).sequence for request in self.asked]

    @property
    def ended(self) -> list[int]:
        """Places of records that have ended well."""
        return [
            outcome.start + place
            for outcome in self.outcomes
            if outcome.error is None
            for place in range(len(outcome.messages))
        ]

    @property
    def processed(self) -> list[int]:
        """Records that it has processed, in its order, with repeats."""
        return [int(line.split()[1]) for line in self.effects.read_text().splitlines()]


@pytest.mark.parametrize(
    "die_at", ["", *map(str, (1, 2, 5, 6, 7, 8, 11, 12, 13, 14, 15, 16))]
)
async def test_nothing_is_lost_at_any_place_of_death(
    tmp_path: Path, die_at: str
) -> None:
    """After a kill its output has no gap, and repeats only what had no checkpoint."""
    life = Life(tmp_path, die_at)
    await life.run()

    assert life.positions == ["4", "8", "SHARD_END"]
    assert life.ended == [*range(10)]
    assert [*dict.fromkeys(life.processed)] == [*range(10)]
    repeated = len(life.processed) - 10
    assert repeated in (0, 4)
    assert (tmp_path / f"effects-{die_at}.died").exists() is bool(die_at)


async def test_death_at_the_end_of_a_shard(tmp_path: Path) -> None:
    """Records without a checkpoint are unprocessed, and have not failed."""
    life = Life(tmp_path, die_at="end")
    await life.run()

    assert life.ended == [*range(8)]
    (error,) = {type(o.error): o.error for o in life.outcomes if o.error}.values()
    assert isinstance(error, NotCommitted)
    assert str(error).endswith(
        " was killed by SIGKILL and had not committed 2 messages that it had answered;"
        " the next run delivers them again"
    )


async def test_prints_are_counted_and_logged_so_many(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are no failure; above a rate they are counted, and not logged one by one."""
    meter = PrometheusMeter()
    supervisor = AsyncSupervisor(
        stage(PRINTING, tmp_path), commit=stored, assignment=SHARD, meter=meter
    )

    async def runs() -> AsyncIterator[Run]:
        yield RECORDS[:1]
        supervisor.finish()

    with caplog.at_level("INFO", logger="etlstage"):
        async with supervisor:
            (outcome,) = [item async for item in supervisor.answers(runs())]

    assert outcome.error is None
    assert (
        'etlstage_noise_lines_total{stage="load",worker="shardId-000000000000-1"} 2000'
        in (meter.render())
    )
    logged = [
        r for r in caplog.records if "unexpected output ignored" in r.getMessage()
    ]
    assert 1000 <= len(logged) < 2000
    assert {record.levelname for record in logged} == {"ERROR"}
    assert "unexpected output rate limit reached" in caplog.text


async def test_processor_that_never_checkpoints(tmp_path: Path) -> None:
    """It gets as many records as may be uncommitted; the error explains the failure."""
    effects = tmp_path / "effects"
    dialect = KclDialect(max_uncommitted=3, commit_overdue=0.2)
    supervisor = AsyncSupervisor(
        replace(
            stage(SILENT, tmp_path, os.fspath(effects)),
            dialect=dialect,
            restart=RestartPolicy(policy="temporary"),
        ),
        commit=stored,
        assignment=SHARD,
    )
    async with supervisor:
        results = await supervisor.submit(RECORDS)

    assert effects.read_text().split() == ["1", "2", "3"]
    for result in results:
        assert "3 records (3 bytes) without a checkpoint 0.2 s" in str(result.error)
        assert "or max_uncommitted_bytes was reached" in str(result.error)


TWICE = """\
import os, select, signal, sys

def status(name):
    return b'{"action":"status","responseFor":"%s"}\\n' % name

def next_line():
    data = b""
    while not data.endswith(b"\\n"):
        data += os.read(0, 1)

next_line()
os.write(1, status(b"initialize"))
next_line()
answer = status(b"processRecords")
if sys.argv[1] == "at once":
    # What is read at once ends with the first of them.
    os.write(1, b"x" * (65535 - len(answer)) + b"\\n" + 2 * answer)
else:
    os.write(1, answer)
    select.select([0], [], [])
    os.write(1, answer)
    signal.pause()
while True:
    next_line()
    os.write(1, b'{"action":"checkpoint"}\\n')
    next_line()
    os.write(1, answer)
"""
"""Answers its first action twice, and later ones correctly."""


@pytest.mark.parametrize(
    ("when", "what"),
    [
        ("at once", "with no action in flight, expected one for each action; is a"),
        (
            "unread",
            "an answer to an action that it had not read yet, expected one for each",
        ),
    ],
)
async def test_second_status_is_not_that_of_the_next_action(
    tmp_path: Path, when: str, what: str
) -> None:
    """Its checkpoint would cover a record that it has not received."""
    made = replace(
        stage(TWICE, tmp_path, when, batch=1),
        restart=RestartPolicy(policy="temporary"),
        timeout=Timeouts(message=5),
    )
    asked: list[CommitRequest] = []

    async def store(request: CommitRequest) -> None:
        asked.append(request)

    async with AsyncSupervisor(made, commit=store, assignment=SHARD) as supervisor:
        results = await supervisor.submit(RECORDS[:3])

    assert not asked
    for result in results:
        assert what in str(result.error)


async def stored(_request: CommitRequest) -> None:
    """Count a position as stored."""


class Numbers(Source):
    """The records, each followed by a position."""

    def __init__(self) -> None:
        super().__init__("numbers")
        self.reached = 0

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        """Yield the records that are left."""
        for n in range(self.reached, 10):
            yield [RECORDS[n]]
            yield Position(n + 1)

    async def acknowledge(self, position: Position) -> None:
        """Record the position."""
        assert isinstance(position.value, int)
        assert position.value > self.reached
        self.reached = position.value


@pytest.mark.parametrize("die_at", ["", "6", "14", "end"])
async def test_position_of_a_source_follows_checkpoints(
    tmp_path: Path, die_at: str
) -> None:
    """An interrupted run resumes from the last checkpoint."""
    life, source = Life(tmp_path, die_at), Numbers()
    first = await load(life, source)
    if die_at == "end":
        assert isinstance(first.error, NotCommitted)
        assert first.ledger[-1].unprocessed == 2
        assert source.reached == 8
        first = await load(life, source)

    assert first.status == "done", first.error
    assert source.reached == 10
    assert [*dict.fromkeys(life.processed)] == [*range(10)]


@pytest.mark.parametrize(
    ("client", "version"), [(CURRENT, Version.V2), (OLD, Version.V1)]
)
async def test_samples_of_the_published_clients(
    tmp_path: Path, client: str, version: Version
) -> None:
    """Unmodified, they load a pipeline's messages, and checkpoint when they like."""
    folder = downloaded(client)
    made = stage("", tmp_path)
    command = sys.executable, os.fspath(folder / "samples" / "sample_kclpy_app.py")
    program = replace(
        made.program, command=command, env={"PYTHONPATH": os.fspath(folder)}
    )
    made = replace(made, worker=program, dialect=KclDialect(version=version))
    source = Numbers()
    report = await Pipeline(name="p", source=source, sink=CommittingSink(made)).run()

    assert report.status == "done", report.error
    assert source.reached == 10


async def load(life: Life, source: Numbers) -> Report:
    """Load the records that are left; return the report."""
    sink = CommittingSink(life.stage)
    return await Pipeline(name="p", source=source, sink=sink).run()
