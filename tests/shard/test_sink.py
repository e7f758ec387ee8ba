"""Shards of an input, each with a committing worker; all in memory."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from itertools import product
from pathlib import Path
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from etlstage.errors import NotCommitted, StateUnusable
from etlstage.messages import Position, Run, StageKind
from etlstage.pipeline import Pipeline, Report
from etlstage.pipeline.interfaces import Sink, Source
from etlstage.pipeline.worker_sink import CommittingSink
from etlstage.protocol.events import FarewellReason
from etlstage.protocol.kcl.settings import KclDialect
from etlstage.shard.cut import Cut
from etlstage.shard.sink import CheckpointFile, ShardedSink
from etlstage.stage import Stage
from etlstage.testing import ScriptedLaunch, ScriptedWorker, run_virtually
from tests.shard.load import Processors, drained_after, run_all
from tests.supervisor.toy_commits import Committer, CommittingDialect

pytestmark = pytest.mark.core

COUNT = 30
MOST_BYTES = 64 * 1024 * 1024
RECORDS = [json.dumps({"user": n % 7, "n": n}).encode() for n in range(COUNT)]


class Records(Source):
    """Source of the records, three a run, with a position after each run."""

    def __init__(self, begin: int = 0) -> None:
        super().__init__("records")
        self.reached: list[int] = []
        self._begin = begin

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        """Yield the records from the beginning on."""
        for n in range(self._begin, COUNT, 3):
            yield RECORDS[n : n + 3]
            yield Position(n + 3)

    async def acknowledge(self, position: Position) -> None:
        """Remember the acknowledged position."""
        assert isinstance(position.value, int)
        self.reached.append(position.value)


class Workers:
    """
    Scripted workers, and what they have done, by shard.

    Args:
        of_first: Settings of the first worker of each shard.

    """

    def __init__(self, **of_first: Any) -> None:  # noqa: ANN401 - passed on
        self.done: dict[str, list[tuple[int, str]]] = {}
        self.partings: list[str] = []
        self._of_first = of_first
        self._starts: Counter[str] = Counter()

    async def __call__(self, worker: ScriptedWorker) -> int:
        """Run as the worker of one shard."""
        held = b""
        while b"\n" not in held:
            held += await worker.read()
        _, shard, begin = json.loads(held)
        self._starts[shard] += 1
        settings = self._of_first if self._starts[shard] == 1 else {}
        committer = Committer(self.done.setdefault(shard, []), **settings)
        committer.begin = begin
        status = await committer(worker)
        self.partings += committer.partings
        return status


async def load(workers: Workers, source: Source, **settings: Any) -> Report:  # noqa: ANN401
    """Return the report of a load that is sharded by user."""
    sink = sharded(workers, **settings)
    return await Pipeline(name="p", source=source, sink=sink).run()


def sharded(workers: Any, **settings: Any) -> ShardedSink:  # noqa: ANN401 - passed on
    """Return a sink that shards by user."""
    stage = Stage(
        name="t", worker=("toy",), dialect=CommittingDialect(), kind=StageKind.LOAD
    )
    launch = ScriptedLaunch(workers)
    return ShardedSink(stage, cut=Cut(3, "/user"), launch=launch, **settings)


def virtually(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Run a test in virtual time."""

    def run() -> None:
        run_virtually(test)

    run.__doc__, run.__name__ = test.__doc__, test.__name__
    return run


def users(workers: Workers) -> dict[str, set[int]]:
    """Return the users whose messages are in each shard."""
    return {
        shard: {json.loads(record)["user"] for _, record in done}
        for shard, done in workers.done.items()
    }


@virtually
async def test_messages_of_a_key_are_in_one_shard() -> None:
    """They come in order, and each worker is notified of its shard's end."""
    workers, source = Workers(), Records()
    report = await load(workers, source)

    assert report.status == "done", report.error
    assert source.reached[-1] == COUNT
    seen = [json.loads(r)["n"] for done in workers.done.values() for _, r in done]
    assert sorted(seen) == [*range(COUNT)]
    for done in workers.done.values():
        numbers = [json.loads(record)["n"] for _, record in done]
        assert numbers == sorted(numbers)
    assert sum(map(len, users(workers).values())) == 7
    assert workers.partings == ["ended"] * 3


@virtually
async def test_shard_goes_on_with_the_next_run() -> None:
    """At the input's end its worker is asked to shut down, not to end its shard."""
    workers = Workers()
    report = await load(workers, Records(), why=FarewellReason.DRAIN)

    assert report.status == "done", report.error
    assert workers.partings == ["drain"] * 3


@virtually
async def test_commits_at_the_end_of_the_input_are_stored() -> None:
    """They are stored as positions if they are not the end of a shard."""
    checkpoints = CheckpointFile(None, {})
    workers = Workers(every=None)
    report = await load(workers, Records(), checkpoints=checkpoints)

    assert report.status == "done", report.error
    for shard, done in workers.done.items():
        assert checkpoints.position(shard) == len(done)


@virtually
async def test_workers_are_killed_at_each_step() -> None:
    """Each shard's first worker is killed; no message is lost, others take over."""
    for step in range(12):
        workers, source = Workers(die_at=step, every=3), Records()
        report = await load(workers, source)

        assert report.status == "done", (step, report.error)
        for done in workers.done.values():
            numbers = [*dict.fromkeys(json.loads(record)["n"] for _, record in done)]
            assert numbers == sorted(numbers), step
        seen = {json.loads(r)["n"] for done in workers.done.values() for _, r in done}
        assert seen == {*range(COUNT)}, step
        assert source.reached == sorted(source.reached)


@virtually
async def test_load_is_drained_at_any_turn() -> None:
    """
    A drain causes no error: before the workers have got a message, while they load,
    and once they have ended.
    """
    loaded: dict[tuple[int, int], set[int]] = {}
    cases = [(0, 1), (COUNT, 1), (0, 0)]
    for (begin, pause), turns in product(cases, range(0, 200, 8)):
        workers, reports = Workers(), list[Report]()

        async def late(
            worker: ScriptedWorker, workers: Workers = workers, pause: int = pause
        ) -> int:
            await anyio.sleep(pause)
            return await workers(worker)

        sink = sharded(late)
        pipeline = Pipeline(name="p", source=Records(begin), sink=sink)

        async def run(
            pipeline: Pipeline = pipeline, reports: list[Report] = reports
        ) -> None:
            reports.append(await pipeline.run())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
            pipeline.drain()
        (report,) = reports
        at = (begin, pause, turns)
        assert report.error is None, (at, report.error)
        done = [
            json.loads(record)["n"]
            for records in workers.done.values()
            for _, record in records
        ]
        assert sorted(done) == [*range(begin, begin + len(done))], at
        last = report.ledger[-1]
        assert last.made == len(done), at
        assert report.ledger[0].made == last.received == last.made + last.unprocessed
        loaded.setdefault((begin, pause), set()).add(len(done))
    assert loaded[COUNT, 1] == loaded[0, 1] == {0}
    assert max(loaded[0, 0]) == COUNT
    assert len(loaded[0, 0]) > 3


@virtually
async def test_position_stays_behind_the_slowest_shard() -> None:
    """What other shards have committed after it is delivered again."""

    class Late(Workers):
        async def __call__(self, worker: ScriptedWorker) -> int:
            first = not self.done
            self._of_first = {"every": None} if first else {"every": 1}
            if first:
                self.done["claimed"] = []
            status = await super().__call__(worker)
            return status if not first else 0

    workers, source = Late(), Records()
    report = await load(workers, source, why=FarewellReason.LOST)

    assert isinstance(report.error, NotCommitted)
    (late,) = (
        shard
        for shard, done in workers.done.items()
        if done and shard == "shardId-000000000000"
    )
    first = min(json.loads(record)["n"] for _, record in workers.done[late])
    assert all(reached <= first for reached in source.reached)
    account = report.ledger[-1]
    assert account.done == first
    assert account.unprocessed == COUNT - first


def uncommitted(
    processors: Processors,
    *,
    sharded: bool,
    **settings: Any,  # noqa: ANN401
) -> Sink:
    """Return a sink whose processors are given no more than 4 uncommitted records."""
    dialect = KclDialect(max_uncommitted=4)
    stage = Stage(name="t", worker=("x",), dialect=dialect, kind=StageKind.LOAD)
    launch = ScriptedLaunch(processors)
    if sharded:
        settings.setdefault("cut", Cut(1, "/user"))
        return ShardedSink(stage, launch=launch, **settings)
    return CommittingSink(stage, launch=launch)


@pytest.mark.parametrize("after", [5, 50])
@pytest.mark.parametrize("sharded", [False, True])
def test_drained_load_waits_for_no_last_commit(*, sharded: bool, after: int) -> None:
    """
    It stops its worker if the input has ended, but may have committed nothing, even if
    records of a stage before were still on their way (issue 25).
    """

    async def slow(worker: ScriptedWorker) -> int:
        held = b""
        while data := await worker.read():
            *lines, held = (held + data).split(b"\n")
            for line in lines:
                await anyio.sleep(1)
                await worker.write(line + b"\n\0")
        return 0

    @virtually
    async def test() -> None:
        processors = Processors(every=COUNT + 1)
        pipeline = Pipeline(
            name="p",
            source=Records(),
            stages=[Stage(name="slow", worker=("x",))],
            sink=uncommitted(processors, sharded=sharded),
            launch=ScriptedLaunch(slow),
        )
        with anyio.fail_after(after + COUNT):
            report = await drained_after(after, pipeline)
        assert report.status == "drained", report.error
        assert [action for _, action in processors.actions][-2:] == [
            "shutdownRequested",
            "leaseLost",
        ]
        last = report.ledger[-1]
        assert (last.received, last.made, last.unprocessed) == (COUNT, 4, COUNT - 4)
        assert "output incomplete" in str(report)

    test()


@pytest.mark.parametrize(
    ("limit", "every", "made"),
    [(10, 4, 10), (3, COUNT + 1, 3), (3, None, 0)],
    ids=["often", "at-end", "never"],
)
@pytest.mark.parametrize("sharded", [False, True])
def test_limited_load_waits_for_its_first_messages(
    *, sharded: bool, limit: int, every: int | None, made: int
) -> None:
    """
    Workers are given all messages before the limit, and may then commit once more, but
    the shard has not ended; what they do not commit is unprocessed (issue 25).
    """

    @virtually
    async def test() -> None:
        processors = Silent() if every is None else Processors(every=every)
        sink = uncommitted(processors, sharded=sharded)
        source = Records()
        pipeline = Pipeline(name="p", source=source, sink=sink, limit=limit)
        with anyio.fail_after(COUNT), capture_logs() as logs:
            (report,) = await run_all(pipeline)
        assert report.error is None
        assert report.status == ("done" if made else "drained")
        warned = {one["event"] for one in logs if one["log_level"] == "warning"}
        assert warned == (set() if made else {"messages not committed"})
        assert [action for _, action in processors.actions][-2:] == [
            "shutdownRequested",
            "leaseLost",
        ]
        last = report.ledger[-1]
        counts = (last.received, last.made, last.unprocessed)
        assert counts == (limit, made, limit - made)
        assert processors.done == {processors.actions[0][0]: [*range(limit)]}
        assert "output incomplete" in str(report)

    test()


class Silent(Processors):
    """They commit nothing."""

    async def _checkpoint(self, *_: object) -> None:
        """Do nothing."""


@pytest.mark.parametrize("sharded", [False, True])
def test_limited_load_can_be_drained(*, sharded: bool) -> None:
    """Even while a worker that commits nothing accepts no more (issue 25)."""

    @virtually
    async def test() -> None:
        sink = uncommitted(Processors(every=COUNT + 1), sharded=sharded)
        pipeline = Pipeline(name="p", source=Records(), sink=sink, limit=10)
        with anyio.fail_after(COUNT):
            report = await drained_after(5, pipeline)
        assert report.status == "drained", report.error
        last = report.ledger[-1]
        assert (last.received, last.made, last.unprocessed) == (10, 4, 6)

    test()


class Large(Records):
    """Five runs of the records, each as large as all that may wait for a worker."""

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        """Yield the runs."""
        record = json.loads(RECORDS[0])
        pad = "x" * (MOST_BYTES // 64)
        records = [
            json.dumps({**record, "n": n, "pad": pad}).encode() for n in range(64)
        ]
        for _ in range(5):
            yield [*records, *RECORDS]


@pytest.mark.parametrize("kind", ["single", "sharded", "restarted"])
def test_write_waits_no_longer_than_a_drain_may_last(kind: str) -> None:
    """
    It waits for a worker that commits nothing, so that the worker takes no more, or
    for a shard that is to begin anew, to end first (issue 25).
    """

    @virtually
    async def test() -> None:
        processors = Processors(every=COUNT + 1)
        settings: dict[str, Any] = {"cut": Cut(3, "/user")}
        if kind == "restarted":
            settings = {"cut": Cut(1, "/user", sequence="/n"), "unsorted": True}
        sink = uncommitted(processors, sharded=kind != "single", **settings)
        pipeline = Pipeline(name="p", source=Large(), sink=sink, drain_limit=30)
        with anyio.fail_after(100):
            report = await drained_after(10, pipeline)
        assert report.status == "drained", report.error
        last = report.ledger[-1]
        assert (last.done, last.dead, last.failed) == (4, 0, 0)
        assert last.received == last.unprocessed + 4 == report.ledger[0].produced

    test()


@virtually
async def test_withheld_workers_are_given_nothing() -> None:
    """Not even the first message, if the drain's limit comes before it (issue 25)."""
    processors = Processors()
    sink = uncommitted(processors, sharded=True)
    async with sink:
        sink.withhold()
        await sink.write(RECORDS)
        await sink.stop()
    assert (sink.account.received, sink.account.done) == (COUNT, 0)
    assert processors.done == {}


@virtually
async def test_checkpoint_after_all_records_covers_no_later_one() -> None:
    """A processor may ask for any at the end of its shard; its input grows (issue 25)."""

    class Ahead(Processors):
        async def _checkpoint(self, *asked: Any) -> None:  # noqa: ANN401 - passed on
            worker, lines, number = asked[:3]
            if number is None:
                await super()._checkpoint(worker, lines, "9" * 50)
            await super()._checkpoint(*asked)

    stage = Stage(name="t", worker=("x",), dialect=KclDialect(), kind=StageKind.LOAD)
    file, numbers = CheckpointFile(None, {}), set[str]()
    for _ in range(2):
        ahead = Ahead(pause=0.0)
        launch = ScriptedLaunch(ahead)
        sink = ShardedSink(stage, cut=Cut(3, "/user"), checkpoints=file, launch=launch)
        report = await Pipeline(name="p", source=Records(), sink=sink).run()
        assert report.status == "done", report.error
        assert set(ahead.errors) == {None}
        assert len(ahead.numbers) == COUNT
        assert numbers.isdisjoint(ahead.numbers.values())
        numbers.update(ahead.numbers.values())


def test_numbers_are_never_used_again(tmp_path: Path) -> None:
    """They aren't used by another run either, which also has the checkpoints."""
    path = tmp_path / "state" / "shards.json"
    file = CheckpointFile(path, {"count": 2})
    file.open()
    assert [file.take(3), file.take(2)] == [1, 4]
    file.store("a", ["5", 0])

    again = CheckpointFile(path, {"count": 2})
    again.open()
    assert again.position("a") == ["5", 0]
    assert again.position("b") is None
    assert again.take(1) > 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "can't read the checkpoints"),
        ('{"format": 1}', "can't read the checkpoints"),
        (
            '{"format": 2, "made": {}, "positions": {}, "next": 1}',
            "have format 2, expected 1",
        ),
        (
            '{"format": 1, "made": {"count": 4}, "positions": {}, "next": 1}',
            "are for shards with count 4, found count 2: set it back, or remove",
        ),
    ],
)
def test_file_of_other_shards_is_refused(tmp_path: Path, text: str, said: str) -> None:
    """The file stays as it is."""
    path = tmp_path / "shards.json"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(StateUnusable, match=said):
        CheckpointFile(path, {"count": 2}).open()
    assert path.read_text() == text


def test_deleted_positions_leave_numbers_used(tmp_path: Path) -> None:
    """A processor may know a number, whatever etlstage has forgotten (issue 26)."""
    path = tmp_path / "shards.json"
    CheckpointFile.forget(path)
    assert not path.exists()
    file = CheckpointFile(path, {"count": 2})
    assert file.take(5) == 1
    file.store("a", ["5", 0])

    CheckpointFile.forget(path)
    again = CheckpointFile(path, {"count": 2})
    again.open()
    assert again.position("a") is None
    assert again.take(1) > 5


@pytest.mark.parametrize("text", ["{", "[]"])
def test_positions_in_a_damaged_file_are_not_deleted(tmp_path: Path, text: str) -> None:
    """The numbers that were used are not known (issue 26)."""
    path = tmp_path / "shards.json"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(StateUnusable, match=r"can't delete .*shards\.json \(.*remove"):
        CheckpointFile.forget(path)
    assert path.read_text() == text


def test_refused_checkpoint_is_not_stored_later(tmp_path: Path) -> None:
    """Neither with that of another shard; numbers are reserved again (issue 25)."""
    path = tmp_path / "shards.json"
    file = CheckpointFile(path, {})
    file.store("a", ["3", 0])
    stored = path.read_bytes()

    path.unlink()
    path.mkdir()
    with pytest.raises(StateUnusable, match="can't store checkpoints in"):
        file.store("a", ["5", 0])
    with pytest.raises(StateUnusable, match="can't store checkpoints in"):
        file.take(2)
    path.rmdir()
    path.write_bytes(stored)

    assert file.position("a") == ["3", 0]
    assert file.take(2) == 1
    file.store("b", ["7", 0])
    again = CheckpointFile(path, {})
    again.open()
    assert [again.position(shard) for shard in "ab"] == [["3", 0], ["7", 0]]
    assert again.take(1) > 2


def test_file_that_cannot_be_written(tmp_path: Path) -> None:
    """The error names the file."""
    (tmp_path / "state").write_text("")
    file = CheckpointFile(tmp_path / "state" / "shards.json", {})
    with pytest.raises(StateUnusable, match="can't store checkpoints in"):
        file.take(1)
