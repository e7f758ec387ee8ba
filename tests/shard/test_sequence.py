"""Sequence numbers, keys and arrivals taken from the messages."""

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
    """Source of the records, with a given number in each run."""

    def __init__(self, rows: list[bytes], runs_of: int) -> None:
        super().__init__("rows")
        self._rows = rows
        self._runs_of = runs_of

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        """Yield the records."""
        for n in range(0, len(self._rows), self._runs_of):
            yield self._rows[n : n + self._runs_of]

    async def numbered(self, after: int = -1) -> AsyncGenerator[AnnotatedRun, None]:
        """Yield the records with their places."""
        for n in range(after + 1, len(self._rows), 3):
            await anyio.sleep(0.1)
            rows = self._rows[n : n + 3]
            yield AnnotatedRun(rows, sequence=range(n, n + len(rows)))


def wrong_rows() -> list[bytes]:
    """Return the records, with some wrong ones among them."""
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
    """Return a load by a single runner, or by one with leases."""
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
    """Workers get them; a record with a missing or falling number is dead-lettered."""
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
    """Without a budget the run fails, and no worker gets the record."""
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
    The next run begins after each checkpoint, whatever rows come before it.

    It logs how many these are, once for each shard, with leases, too (issue 25). This
    also holds if whole batches of a run are committed, so no worker gets them.
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
        left = [log for log in logs if "records omitted" in log["event"]]
        assert len({log["shard"] for log in left}) == len(left)
        assert sum(log["records"] for log in left) == 17

    run(monkeypatch)
    assert sorted(second.numbers) == [*range(20, COUNT)]


@pytest.mark.parametrize("rows", [RECORDS[3:], RECORDS[:1]])
def test_what_was_committed_with_the_end_of_its_shard_is_left_out(
    rows: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor may checkpoint only there; a shard without records has no position."""
    file = CheckpointFile(None, {})
    first, second = Processors(every=COUNT), Processors(every=COUNT)

    @virtually
    async def run() -> None:
        for processors, given in (first, RECORDS[:20]), (second, rows):
            report = await pipeline("alone", processors, given, file=file).run()
            assert report.status == "done", report.error
        with capture_logs() as logs:
            report = await pipeline("alone", Processors(), RECORDS, file=file).run()
        left = [log["records"] for log in logs if "records omitted" in log["event"]]
        # The checkpoints do not fall either (issue 25).
        assert sum(left) == max(20, 3 + len(rows))

    run(monkeypatch)
    assert sorted(first.numbers) == [*range(20)]
    assert sorted(second.numbers) == [*range(20, 3 + len(rows))]


def test_drained_while_only_workers_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They commit what they processed; the next run gives them only the rest."""
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
    """A runner writes no letters for rows before the checkpoint it took over."""
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


def test_letters_of_one_record_are_given_again_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A retry gives them in the order in which they were written."""
    processors = Processors()
    rows = [*RECORDS[:20], RECORDS[3], *RECORDS[3:30], RECORDS[29], RECORDS[5]]
    sink = ShardedSink(STAGE, cut=CUT, unsorted=True, launch=ScriptedLaunch(processors))
    given = [json.loads(row)["n"] for row in rows]

    @virtually
    async def run() -> None:
        report = await Pipeline(name="p", source=Rows(rows, 7), sink=sink).run()
        assert report.status == "done", report.error
        assert report.ledger[-1].done == len(rows)
        assert "in 3 shards; output complete" in report.landed

    run(monkeypatch)
    done = [number for shard in processors.done.values() for number in shard]
    assert sorted(done) == sorted(given)
    for name, numbers in processors.done.items():
        shard = CUT.names.index(name)
        assert numbers == [
            n
            for n, row in zip(given, rows, strict=True)
            if CUT.record(row).shard == shard
        ]


def test_wrong_rows_of_letters_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a number or a key, they can't be given to a worker by a retry either."""
    letters = DeadLetters(tmp_path, pipeline="p")
    sink = ShardedSink(
        STAGE,
        cut=CUT,
        unsorted=True,
        launch=ScriptedLaunch(Processors()),
        dead_letters=letters,
    )

    @virtually
    async def run() -> None:
        rows = Rows([RECORDS[7], WRONG[5][0], WRONG[20][0], RECORDS[0]], COUNT)
        report = await Pipeline(name="p", source=rows, sink=sink).run()
        assert report.status == "done", report.error

    run(monkeypatch)
    assert sorted(one.place for one in letters.letters()) == [1, 2]


def test_worker_that_fails_before_its_shard_begins_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run fails, as the worker's records are not committed."""
    processors = Processors(at_end=1, fails=9)
    sink = ShardedSink(STAGE, cut=CUT, unsorted=True, launch=ScriptedLaunch(processors))

    @virtually
    async def run() -> None:
        rows = Rows([RECORDS[5], RECORDS[0], RECORDS[5]], 3)
        report = await Pipeline(name="p", source=rows, sink=sink).run()
        assert report.status == "failed"
        assert "not committed" in str(report.error)

    run(monkeypatch)
    assert sum(map(len, processors.done.values())) < 9
