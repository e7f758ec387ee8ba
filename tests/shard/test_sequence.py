"""Sequence numbers, keys and arrivals that are in the messages."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import anyio
import pytest
from structlog.testing import capture_logs

from etlstage.errors import InvalidMessage
from etlstage.messages import AnnotatedRun, Position, Run
from etlstage.pipeline import Pipeline, Report
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.delivery.delivery import Delivery
from etlstage.pipeline.delivery.record import CommitRecord
from etlstage.pipeline.interfaces import Source
from etlstage.protocol.events import FarewellReason
from etlstage.shard.cut import Cut
from etlstage.shard.keeper import LeaseKeeper
from etlstage.shard.lease import Lease
from etlstage.shard.leased import LeasedSink
from etlstage.shard.sink import CheckpointFile, ShardedSink
from etlstage.shard.table import LeaseTable, MemoryLeases
from etlstage.stage import ErrorBudget, ErrorPolicy
from etlstage.testing import ScriptedLaunch
from tests.shard.load import Processors, run_all, virtually
from tests.shard.test_leased import STAGE as STRICT

pytestmark = pytest.mark.core

COUNT = 40
STAGE = replace(STRICT, on_error=ErrorPolicy(budget=ErrorBudget(count=9)))
RECORDS = [
    json.dumps({"user": f"u{n % 7}", "n": n, "seq": 10 * n + 10, "at": n}).encode()
    for n in range(COUNT)
]
WRONG = {
    5: (b'{"user": "u5", "n": 5, "at": 5}', "its sequence number at /seq is null"),
    12: (b'{"user": "u5", "n": 12, "seq": 60, "at": 0}', "sequence number is 60, exp"),
    20: (b'{"n": 20, "seq": 210, "at": 20}', "there is no partition key at /user"),
}
CUT = Cut(3, "/user", sequence="/seq", arrival="/at")


class Rows(Source):
    """The records, so many a run."""

    def __init__(self, rows: list[bytes], runs_of: int) -> None:
        super().__init__("rows")
        self._rows = rows
        self._runs_of = runs_of

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        """Yield them."""
        for n in range(0, len(self._rows), self._runs_of):
            yield self._rows[n : n + self._runs_of]

    async def numbered(self, after: int = -1) -> AsyncGenerator[AnnotatedRun, None]:
        """Yield them with their places."""
        for n in range(after + 1, len(self._rows), 3):
            await anyio.sleep(0.1)
            rows = self._rows[n : n + 3]
            yield AnnotatedRun(rows, sequence=range(n, n + len(rows)))


def wrong_rows() -> list[bytes]:
    """Return the records, some of which are not as they should be."""
    rows = [*RECORDS]
    rows[5:6] = [WRONG[5][0]]
    rows.insert(12, WRONG[12][0])
    rows.insert(20, WRONG[20][0])
    return rows


def pipeline(
    kind: str,
    processors: Processors,
    rows: list[bytes],
    *,
    letters: DeadLetters | None = None,
    table: LeaseTable | None = None,
    file: CheckpointFile | None = None,
    why: FarewellReason = FarewellReason.ENDED,
    runs_of: int = 3,
) -> Pipeline:
    """Return a load by a runner of its own, or by one that has leases."""
    sink: ShardedSink | LeasedSink
    launch = ScriptedLaunch(processors)
    if kind == "alone":
        sink = ShardedSink(
            STAGE,
            cut=CUT,
            checkpoints=file,
            launch=launch,
            dead_letters=letters,
            why=why,
        )
    else:
        sink = LeasedSink(
            STAGE,
            cut=CUT,
            keeper=LeaseKeeper("a", "start", failover=3.0),
            leases=lambda _of: table or MemoryLeases(),
            launch=launch,
            dead_letters=letters,
            why=why,
        )
    return Pipeline(name="p", source=Rows(rows, runs_of), sink=sink)


@pytest.mark.parametrize("kind", ["alone", "leased"])
def test_numbers_are_those_of_the_messages(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers see them; what has none, or one that does not rise, is dead-lettered."""
    processors, letters = Processors(), DeadLetters(tmp_path, pipeline="p")

    @virtually
    async def run() -> None:
        (report,) = await run_all(
            pipeline(kind, processors, wrong_rows(), letters=letters)
        )
        assert report.status == "done", report.error
        assert report.ledger[-1].dead == 3

    run(monkeypatch)
    found = sorted((n, seq) for n, seq in processors.numbers.items())
    assert found == [(n, str(10 * n + 10)) for n in range(COUNT) if n != 5]
    for done in processors.done.values():
        assert all(a < b for a, b in pairwise(done))
    said = {letter.place: letter.error for letter in letters.letters()}
    if kind == "alone":
        assert said.keys() == WRONG.keys()
    for place, (_, text) in WRONG.items():
        assert [
            f"row {place + 1}: " in error for error in said.values() if text in error
        ]


@pytest.mark.parametrize("kind", ["alone", "leased"])
def test_a_wrong_number_ends_the_run(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No worker is given it, and its shard has not ended."""
    processors = Processors()

    @virtually
    async def run() -> None:
        (report,) = await run_all(pipeline(kind, processors, wrong_rows()))
        assert report.status == "failed"
        assert isinstance(report.error, InvalidMessage)
        assert "row 6: its sequence number at /seq is null" in str(report.error)

    run(monkeypatch)
    assert 5 not in processors.numbers


@pytest.mark.parametrize("runs_of", [3, COUNT])
@pytest.mark.parametrize("kind", ["alone", "leased"])
def test_what_was_committed_is_left_out(
    kind: str, runs_of: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    The next run begins behind each checkpoint, whatever rows there are in front.

    Also where whole batches of a run are committed, which no worker answers.
    """
    table, file = MemoryLeases(), CheckpointFile(None, {})
    first, second = Processors(), Processors()
    why = FarewellReason.DRAIN

    @virtually
    async def run() -> None:
        made = partial(pipeline, kind, table=table, file=file, why=why, runs_of=runs_of)
        (report,) = await run_all(made(first, RECORDS[:20]))
        assert report.status == "done", report.error
        with capture_logs() as logs:
            (report,) = await run_all(made(second, RECORDS[3:]))
        assert report.status == "done", report.error
        left = [log for log in logs if "left out" in log["event"]]
        assert sum(log["records"] for log in left) == (17 if kind == "alone" else 0)

    run(monkeypatch)
    assert sorted(second.numbers) == [*range(20, COUNT)]


def test_drained_while_only_workers_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They commit what they have, and the next run gives the rest again."""
    file, processors = CheckpointFile(None, {}), Processors(pause=1.0)

    @virtually
    async def run() -> None:
        first = pipeline("alone", processors, RECORDS, file=file, runs_of=COUNT)
        first._delivery = Delivery(tmp_path)
        async with anyio.create_task_group() as tasks:
            reports: list[Report] = []

            async def load() -> None:
                reports.append(await first.run())

            tasks.start_soon(load)
            await anyio.sleep(4.5)
            first.drain()
        (report,) = reports
        assert (report.status, report.error) == ("drained", None)
        assert 0 < len(processors.numbers) < COUNT
        assert "output incomplete" in report.landed
        assert not CommitRecord.latest(tmp_path).pending
        again = await pipeline("alone", processors, RECORDS, file=file).run()
        assert again.status == "done", again.error

    run(monkeypatch)
    assert sorted(processors.numbers) == [*range(COUNT)]
    for done in processors.done.values():
        assert len(done) == len(set(done))


def test_wrong_rows_in_front_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has a shard behind another runner has no letters of what that one has read."""
    table, letters = MemoryLeases(), DeadLetters(tmp_path, pipeline="p")
    name = CUT.names[CUT.record(WRONG[12][0]).shard]
    table.add([Lease(name, position='["70", 0]')])

    @virtually
    async def run() -> None:
        (report,) = await run_all(
            pipeline("leased", Processors(), wrong_rows(), letters=letters, table=table)
        )
        assert report.status == "done", report.error

    run(monkeypatch)
    assert not [one for one in letters.letters() if "/seq is null" in one.error]
