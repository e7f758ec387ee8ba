"""Epochs: what an interrupted run leaves, and how the next run continues."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, cast

import anyio
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from etlstage.errors import Faults, SinkFailed, SourceFailed, StateUnusable
from etlstage.files.sink import FileSink
from etlstage.messages import Passed, Position, Run
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.delivery.delivery import Bounds, Delivery, take_over
from etlstage.pipeline.delivery.record import CommitRecord
from etlstage.pipeline.interfaces import Epochs
from etlstage.pipeline.ledger import Ledger
from etlstage.pipeline.loading import Loading
from etlstage.pipeline.pipeline import Pipeline
from etlstage.pipeline.report import Report
from etlstage.stage import ErrorBudget, ErrorPolicy, RecyclePolicy, ReplyContract
from etlstage.testing import (
    MemoryEpochs,
    MemoryEpochSink,
    MemorySource,
    ScriptedLaunch,
    ScriptedWorker,
    run_virtually,
)
from tests.patience import HANG
from tests.pipeline.ends import Wait
from tests.supervisor.workers import stage

STEPS = ["begin", "written", "committed", "aside"]


class Stopped(Exception):
    """Interrupts a run."""


class Numbers(MemorySource):
    """Reads numbers, with a position after each run of them."""

    def __init__(self, count: int, run: int, *, waits: Wait | None = None) -> None:
        items: list[Run | Position] = []
        for start in range(0, count, run):
            end = min(start + run, count)
            items += [b"%d" % n for n in range(start, end)], Position(end)
        super().__init__(items)
        self._waits = waits

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        """Yield runs, and a position after each."""
        async with aclosing(super().runs()) as items:
            async for item in items:
                yield item
                if isinstance(item, Position) and self._waits is not None:
                    await self._waits.here()


def numbers(end: int) -> list[bytes]:
    """Return the first ``end`` messages."""
    return [b"%d" % n for n in range(end)]


async def run(
    folder: Path,
    source: Numbers,
    sink: MemoryEpochSink,
    delivery: Delivery | None = None,
) -> Report:
    """Run once, with epochs of ten messages."""
    bounds = Bounds(messages=10, seconds=3600)
    delivery = delivery or Delivery(folder, exactly_once=True, bounds=bounds)
    made = Pipeline(name="p", source=source, sink=sink, delivery=delivery)
    with anyio.fail_after(HANG):
        return await made.run()


def stop_at(step: str, number: int) -> Callable[[str], None]:
    """Return a callback that interrupts a run at the n-th such step."""
    left = number

    def count(now: str) -> None:
        nonlocal left
        left -= now == step
        if left == 0:
            raise Stopped

    return count


@settings(deadline=None, max_examples=40)
@given(
    noting=st.booleans(),
    size=st.integers(1, 12),
    crashes=st.lists(
        st.tuples(st.sampled_from([*STEPS, "recorded", "ended"]), st.integers(1, 6)),
        max_size=5,
    ),
)
@example(noting=True, size=10, crashes=[("committed", 5)])
@example(noting=True, size=10, crashes=[("committed", 5), ("ended", 1)])
@example(noting=False, size=10, crashes=[("recorded", 5), ("ended", 1), ("ended", 1)])
@example(noting=False, size=1, crashes=[("recorded", 3), ("recorded", 3)])
def test_each_message_is_loaded_once(
    *, noting: bool, size: int, crashes: list[tuple[str, int]]
) -> None:
    """Wherever and however often runs are interrupted; accounts balance (issue 14)."""
    epochs = MemoryEpochs()

    def sink() -> MemoryEpochSink:
        return MemoryEpochSink(epochs, noting=noting)

    async def all_runs(folder: Path) -> Report:
        for step, number in crashes:
            delivery = Delivery(
                folder, exactly_once=True, bounds=Bounds(messages=10, seconds=3600)
            )
            delivery.at = stop_at(step, number)
            report = await run(folder, Numbers(50, size), sink(), delivery)
            if report.status == "done":
                return report
            assert isinstance(report.error, Stopped)
        return await run(folder, Numbers(50, size), sink())

    with tempfile.TemporaryDirectory() as folder:
        report = anyio.run(all_runs, Path(folder))
        record = CommitRecord.latest(Path(folder))
    assert report.status == "done"
    assert (record.resumes, record.last) == (False, {})  # a single load, which is over
    assert epochs.messages == numbers(50)
    assert [(a.received, a.made) for a in report.ledger] == [(0, 50), (50, 50)]
    assert max(map(len, epochs.places.values())) <= max(size, 10)


async def test_load_is_over_with_the_last_that_its_run_does(tmp_path: Path) -> None:
    """If the run is killed before, its record must stay pending (issue 22)."""
    pending = []

    async def release(_: Exception | None) -> None:
        pending.append(CommitRecord.latest(tmp_path).pending)

    made = Pipeline(
        name="p",
        source=Numbers(50, 10),
        sink=MemoryEpochSink(MemoryEpochs()),
        delivery=Delivery(tmp_path, exactly_once=True),
        release=release,
    )
    assert (await made.run()).status == "done"
    assert [*pending, CommitRecord.latest(tmp_path).pending] == [True, False]


@pytest.mark.parametrize("once", [True, False])
async def test_run_that_is_killed_before_its_report_was_written(
    tmp_path: Path, *, once: bool
) -> None:
    """The next start loads nothing twice; until then the directory stays locked."""
    epochs = MemoryEpochs()

    def made() -> Pipeline:
        delivery = Delivery(tmp_path, exactly_once=once)
        sink = MemoryEpochSink(epochs)
        return Pipeline(name="p", source=Numbers(5, 1), sink=sink, delivery=delivery)

    killed = made()
    assert (await killed.run(settle=False)).status == "done"
    assert CommitRecord.latest(tmp_path).pending
    early = await made().run()
    assert "another run uses the state directory" in str(early.error)
    killed._held.close()
    assert CommitRecord.latest(tmp_path).pending
    completing = made()
    assert (await completing.run(settle=False)).status == "done"
    assert epochs.messages == numbers(5)
    for _ in range(2):
        completing.settle()
    loaded = CommitRecord.latest(tmp_path)
    assert not loaded.resumes
    assert (await made().run()).status == "done"
    assert CommitRecord.latest(tmp_path).load != loaded.load


async def test_letters_bear_the_fence_of_their_run(tmp_path: Path) -> None:
    """Once another run has a higher fence, they are not kept (issue 14)."""
    delivery = Delivery(tmp_path, exactly_once=True)
    letters = DeadLetters(tmp_path, pipeline="p")
    pipeline = Pipeline(
        name="p",
        source=Numbers(3, 3),
        sink=MemoryEpochSink(MemoryEpochs()),
        dead_letters=letters,
        delivery=delivery,
    )
    assert (await pipeline.run()).status == "done"
    assert letters.fence == delivery.record.fence == 1


async def test_drained_run_that_only_its_table_has_noted(tmp_path: Path) -> None:
    """The run ended, but its load is incomplete: the next start reads on (issue 14)."""
    epochs, wait = MemoryEpochs(), Wait()
    delivery = Delivery(tmp_path, exactly_once=True, bounds=Bounds(seconds=3600))
    delivery.at = stop_at("committed", 1)
    pipeline = Pipeline(
        name="p",
        source=Numbers(9, 3, waits=wait),
        sink=MemoryEpochSink(epochs, noting=True),
        delivery=delivery,
    )

    async def drain() -> None:
        await wait.reached.wait()
        pipeline.drain()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(drain)
        report = await pipeline.run()
    assert isinstance(report.error, Stopped)
    assert epochs.messages == numbers(3)

    source = Numbers(9, 3)
    report = await run(tmp_path, source, MemoryEpochSink(epochs, noting=True))
    assert (report.status, report.ledger[0].produced) == ("done", 6)
    assert epochs.messages == numbers(9)


class Followed(Numbers):
    """Numbers of which the next run reads those that came since."""

    goes_on = True


async def test_end_that_is_recorded_but_not_moved(tmp_path: Path) -> None:
    """
    Its last epoch is not left behind when the output changes (issue 23).

    One that was moved is known by a link in its old place.
    """

    async def load(
        out: str, count: int, *, once: bool = True, step: str = "none"
    ) -> Report:
        bounds = Bounds(messages=10, seconds=3600)
        delivery = Delivery(tmp_path / "state", exactly_once=once, bounds=bounds)
        delivery.at = stop_at(step, 2)
        source, sink = (
            Followed(count, 5),
            FileSink(tmp_path / out, "text", mode="append"),
        )
        made = Pipeline(name="p", source=source, sink=sink, delivery=delivery)
        with anyio.fail_after(HANG):
            return await made.run()

    def rows(out: str) -> list[int]:
        parts = (tmp_path / out).glob("part-*")
        return sorted(int(row) for part in parts for row in part.read_bytes().split())

    assert isinstance((await load("a", 20, step="recorded")).error, Stopped)
    assert rows("a") == [*range(10)]
    for refused in await load("b", 30), await load("a", 30, once=False):
        assert isinstance(refused.error, StateUnusable)
        assert "complete it with the old settings" in str(refused.error)
        assert str(refused.error).endswith(", which removes nothing that is loaded")
    (tmp_path / "a").rename(tmp_path / "moved")
    refused = await load("moved", 20)
    assert (
        str(refused.error)
        .partition(": ")[2]
        .startswith(
            f"it has loaded into text {tmp_path}/a, not into text {tmp_path}/moved (if it was"
            " moved there, link its old path to the new one); complete it with the old"
            " settings, or delete its record with 'etlstage state reset "
        )
    )
    (tmp_path / "a").symlink_to(tmp_path / "moved")
    assert (await load("moved", 20)).status == "done"
    assert (await load("b", 30)).status == "done"
    assert (rows("a"), rows("b")) == ([*range(20)], [*range(20, 30)])


async def test_next_run_begins_a_new_load(tmp_path: Path) -> None:
    """A source that is read again is loaded again, from epoch 1 on (issue 14)."""
    first, second = MemoryEpochs(), MemoryEpochs()
    for epochs in first, second:
        report = await run(tmp_path, Numbers(5, 5), MemoryEpochSink(epochs))
        assert report.ledger[-1].done == 5
    assert first.messages == second.messages == numbers(5)
    assert first.places.keys() != second.places.keys()


async def test_dead_letters_of_an_epoch_that_is_not_written_cover_no_position(
    tmp_path: Path,
) -> None:
    """At least once, a run that exceeds its budget records nothing (issue 23)."""
    items: list[Run | Position] = []
    for start in range(0, 100, 10):
        run = [b'{"n":%d}' % n if n % 3 else b"no" for n in range(start, start + 10)]
        items += [run, Position(start + 10)]
    state = tmp_path / "state"

    async def loaded(budget: int) -> Report:
        with Delivery(state, exactly_once=False) as delivery:
            position = delivery.record.position
            begin = items.index(Position(position)) + 1 if position else 0
        policy = ErrorPolicy(budget=ErrorBudget(count=budget, share=None))
        letters = DeadLetters(state, pipeline="p")
        sink = FileSink(
            tmp_path / "o",
            format="json",
            mode="append",
            schema="n long",
            on_error=policy,
            dead_letters=letters,
        )
        made = Pipeline(
            name="p",
            source=MemorySource(items[begin:]),
            sink=sink,
            delivery=Delivery(state, exactly_once=False),
            dead_letters=letters,
        )
        with anyio.fail_after(HANG):
            return await made.run()

    assert "on_error.budget" in str((await loaded(20)).error)
    assert (await loaded(50)).status == "done"
    rows = [file.read_text() for file in (tmp_path / "o").glob("*.json")]
    assert "".join(rows).count("n") == 66


async def test_nothing_is_covered_before_the_output_is_replaced(tmp_path: Path) -> None:
    """Else the next start would add to what it is to replace (issue 23)."""
    path = tmp_path / "o"
    path.mkdir()
    (path / "old.txt").touch()
    sink = FileSink(path, format="text", mode="overwrite")
    sink.begin(Epochs("ab", 0, once=False, check=lambda: None))
    async with sink:
        await sink.flush()
        assert sink.covered < 0
        await sink.write([b"new"])
        assert sink.covered < 0
        await sink.flush()
        assert sink.covered == 1
    assert not (path / "old.txt").exists()


async def test_epoch_ends_when_it_is_old(tmp_path: Path) -> None:
    """At the last position reached; nothing is held back for long (issue 14)."""
    wait, epochs = Wait(), MemoryEpochs()
    delivery = Delivery(tmp_path, exactly_once=True, bounds=Bounds(seconds=0.001))
    recorded = anyio.Event()
    delivery.at = lambda step: recorded.set() if step == "recorded" else None
    source, sink = Numbers(3, 3, waits=wait), MemoryEpochSink(epochs)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, tmp_path, source, sink, delivery)
        with anyio.fail_after(HANG):
            await recorded.wait()
        assert delivery.record.position == 3
        wait.released.set()
    assert epochs.messages == numbers(3)


async def test_run_that_was_taken_over_loads_no_more(tmp_path: Path) -> None:
    """Its error tells why (issue 14)."""
    epochs = MemoryEpochs()
    bounds = Bounds(messages=10, seconds=3600)
    delivery = Delivery(tmp_path, exactly_once=True, bounds=bounds)

    def lose(step: str) -> None:
        if step == "recorded":
            take_over(tmp_path)

    delivery.at = lose
    report = await run(tmp_path, Numbers(50, 5), MemoryEpochSink(epochs), delivery)
    assert isinstance(report.error, StateUnusable)
    assert "another run has taken over" in str(report.error)
    assert epochs.messages == numbers(10)


# --- step by step ---------------------------------------------------------------------


class Letters:
    """Stand-in for dead letters that records the step of making them durable."""

    def __init__(self, steps: list[str]) -> None:
        self._steps = steps

    async def sync(self) -> None:
        """Record the step."""
        self._steps.append("letters")

    def size(self, _stage: str) -> int:
        """Return that there are none."""
        return 0

    def sizes(self) -> dict[str, int]:
        """Return that there are none."""
        return {}


class Bench:
    """Loads the items of a test, and collects the ``steps``."""

    def __init__(self, delivery: Delivery, doubtful: int) -> None:
        self.steps: list[str] = []
        self.delivery = delivery
        self.sink = MemoryEpochSink(MemoryEpochs())
        source = Numbers(0, 1)
        source.finished = self._finished  # type: ignore[method-assign]
        delivery.at = self.steps.append
        delivery.begin("r", stages=["extract", "load"], letters={})
        record = delivery.record
        self.sink.begin(Epochs(record.load, 0, once=True, check=delivery.check))
        self.ledger = Ledger.of_pipeline("extract", [], self.sink.account)
        self.loading = Loading(
            self.sink,
            source,
            ledger=self.ledger,
            letters=cast("DeadLetters", Letters(self.steps)),
            delivery=delivery,
            every=3600,
            doubtful=lambda: doubtful,
        )

    async def _finished(self) -> None:
        self.steps.append("finished")

    async def take(self, *items: Any) -> list[list[bytes]]:  # noqa: ANN401 - runs
        """Load items; return the messages of each epoch so far."""
        for item in items:
            await self.loading.take(item)
        return list(self.sink.epochs.places.values())


@contextmanager
def bench(folder: Path, doubtful: int = 0, **bounds: float) -> Iterator[Bench]:
    """Enter a delivery with these bounds, and load into memory."""
    limits = Bounds(**{"messages": 10, "seconds": 3600, **bounds})  # type: ignore[arg-type]
    with Delivery(folder, exactly_once=True, bounds=limits) as delivery:
        yield Bench(delivery, doubtful)


async def test_dead_letters_are_durable_before_the_record(tmp_path: Path) -> None:
    """A crash after the record must not lose any (issue 14)."""
    with bench(tmp_path, messages=2) as made:
        await made.take([b"1", b"2"], Position(2))
        assert made.steps == []
        await made.take([b"3"])
        steps = ["begin", "written", "letters", "committed", "aside", "recorded"]
        assert made.steps == steps


@pytest.mark.parametrize("messages", [2, 10])
async def test_what_is_doubtful_is_no_epoch(tmp_path: Path, messages: int) -> None:
    """The run fails, and the next continues from the last epoch (issue 14)."""
    with bench(tmp_path, doubtful=1, messages=messages) as made:
        await made.take([b"1", b"2"], Position(2), [b"3"])
        await made.loading.end("end")
        assert made.sink.epochs.places == {}
        assert (made.delivery.record.epoch, made.delivery.record.ended) == (0, False)
        assert "finished" not in made.steps


async def test_epoch_has_so_many_bytes_at_most(tmp_path: Path) -> None:
    """It ends at the position before the run that would exceed them (issue 14)."""
    items = ([b"123"], Position(1), [b"45"], Position(2), [b"6789"], Position(3))
    with bench(tmp_path, bytes=6) as made:
        assert await made.take(*items) == [[b"123", b"45"]]
        assert made.delivery.record.position == 2


def test_epoch_that_is_old_ends_behind_the_next_position(tmp_path: Path) -> None:
    """Not earlier: messages after the last position would load twice (issue 14)."""

    async def main() -> None:
        with bench(tmp_path, seconds=10) as made:
            async with anyio.create_task_group() as tasks:
                await made.take([b"1"])
                tasks.start_soon(made.loading.flush_now_and_then, nullcontext)
                await anyio.sleep(15)
                assert await made.take([b"2"]) == []
                assert await made.take(Position(2)) == []
                assert await made.take([b"3"]) == [[b"1", b"2"]]
                await made.loading.end("end")

    run_virtually(main)


def test_epoch_that_could_not_be_committed_is_not_tried_again(tmp_path: Path) -> None:
    """Nor by callers that waited: the sink can't know what was stored (issue 24)."""

    async def main() -> None:
        wait, tries = Wait(), 0

        async def flush() -> None:
            nonlocal tries
            tries += 1
            await wait.here()
            raise SinkFailed("stage load: full", stage="load")

        async def take() -> None:
            with pytest.raises(SinkFailed):
                await made.take([b"3"])

        with bench(tmp_path, messages=2, seconds=1) as made:
            made.sink.flush = flush  # type: ignore[method-assign]
            await made.take([b"1", b"2"], Position(2))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(take)
                await wait.reached.wait()
                tasks.start_soon(made.loading.flush_now_and_then, nullcontext)
                await anyio.sleep(2)
                wait.released.set()
            await made.take([b"3"], Position(3), [b"4"])
            await made.loading.end("", cut=True)
            assert (tries, made.delivery.record.epoch) == (1, 0)

    run_virtually(main)


async def test_source_forgets_what_it_kept_behind_the_record(tmp_path: Path) -> None:
    """After a crash in between, it is still there (issue 14)."""
    with bench(tmp_path) as made:
        await made.take([b"1"], Position(1))
        await made.loading.end("end")
        assert made.steps[-2:] == ["recorded", "finished"]


async def test_report_counts_what_happened_to_workers_in_all_starts(
    tmp_path: Path,
) -> None:
    """Up to the epoch from which the next start resumes (issue 23)."""

    async def script(worker: ScriptedWorker) -> None:
        async for message in worker.messages():
            worker.tell(metric="skipped", add=1)
            await worker.reply(message, message)

    async def start(at: Callable[[str], None] | None = None) -> Report:
        twice = replace(
            stage("echo", window=1),
            expect=ReplyContract(outputs=1),
            on_mismatch="count",
            recycle=RecyclePolicy(max_messages=1, variance=0),
        )
        bounds = Bounds(messages=10, seconds=3600)
        delivery = Delivery(tmp_path, exactly_once=True, bounds=bounds)
        if at is not None:
            delivery.at = at
        made = Pipeline(
            name="p",
            source=Numbers(30, 5),
            stages=[twice],
            sink=MemoryEpochSink(epochs),
            delivery=delivery,
            launch=ScriptedLaunch(script),
        )
        with anyio.fail_after(HANG):
            return await made.run()

    epochs = MemoryEpochs()
    assert isinstance((await start(stop_at("recorded", 2))).error, Stopped)
    assert CommitRecord.latest(tmp_path).position == 10
    report = await start()
    assert report.status == "done"
    (_, account, _) = report.ledger
    assert (account.done, account.mismatches) == (30, {"outputs": 30})
    assert account.skipped >= 30
    assert account.restarts >= 28


@pytest.mark.parametrize("covered", [2, 3])
async def test_run_that_is_drained_between_two_positions(
    tmp_path: Path, covered: int
) -> None:
    """
    The run fails if anything was read after the last position (issue 14).

    Even if no results came of it: there may be dead letters.
    """
    with bench(tmp_path) as made:
        made.ledger[0].produced = covered
        passed = Passed("extract", made.ledger[0].settled(Faults()))
        await made.take([b"1", b"2"], Position(2, passed=(passed,)))
        made.ledger[0].produced = 3
        with nullcontext() if covered == 3 else pytest.raises(SourceFailed):
            await made.loading.end("")
        assert made.delivery.record.ended is (covered == 3)


class Showing(MemoryEpochSink):
    """Makes an epoch visible after its record, as by moving files."""

    def __init__(self, epochs: MemoryEpochs, shown: dict[str, list[bytes]]) -> None:
        super().__init__(epochs)
        self._shown = shown

    @property
    def performs(self) -> bool:
        """Whether :meth:`perform` has work to do: always."""
        return True

    async def perform(self) -> None:
        """Show the recorded epoch, again if necessary."""
        load, done, *_ = self._epoch
        place = f"{load}-{done}"
        if place in self.epochs.places:
            self._shown[place] = self.epochs.places[place]

    async def __aenter__(self) -> Self:
        """Finish what the previous start has left."""
        await self.perform()
        return self


@settings(deadline=None, max_examples=40)
@given(
    size=st.integers(1, 12),
    crashes=st.lists(
        st.tuples(
            st.sampled_from([*STEPS, "recorded", "performed", "ended"]),
            st.integers(1, 6),
        ),
        max_size=6,
    ),
)
@example(size=10, crashes=[("recorded", 5)])
@example(size=10, crashes=[("performed", 5), ("performed", 1)])
def test_what_belongs_behind_the_record_is_done_by_the_next_start(
    *, size: int, crashes: list[tuple[str, int]]
) -> None:
    """Even if the run had ended: nothing is loaded again for it (issue 23)."""
    epochs, shown = MemoryEpochs(), dict[str, list[bytes]]()

    async def all_runs(folder: Path) -> Report:
        for step, number in crashes:
            bounds = Bounds(messages=10, seconds=3600)
            delivery = Delivery(folder, exactly_once=True, bounds=bounds)
            delivery.at = stop_at(step, number)
            report = await run(
                folder, Numbers(50, size), Showing(epochs, shown), delivery
            )
            if report.status == "done":
                return report
            assert isinstance(report.error, Stopped)
            visible = {name.rpartition("-")[2] for name in shown}
            recorded = CommitRecord.latest(folder).epoch
            assert visible <= {f"{n}" for n in range(1, recorded + 1)}
        return await run(folder, Numbers(50, size), Showing(epochs, shown))

    with tempfile.TemporaryDirectory() as folder:
        report = anyio.run(all_runs, Path(folder))
        record = CommitRecord.latest(Path(folder))
    assert report.status == "done"
    assert (record.ended, record.pending) == (True, False)
    assert shown == epochs.places
    assert epochs.messages == numbers(50)
    assert [(a.received, a.made) for a in report.ledger] == [(0, 50), (50, 50)]


@settings(deadline=None, max_examples=60)
@given(
    cuts=st.lists(
        st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(
            lambda c: sum(c) < 9
        ),
        min_size=1,
        max_size=12,
    )
)
async def test_epoch_keeps_to_its_bounds_where_a_source_is_cut(
    cuts: list[list[int]],
) -> None:
    """However many runs a stage makes of a part of the source (issue 23)."""
    with tempfile.TemporaryDirectory() as folder, bench(Path(folder)) as made:
        made.loading._coming = 8, 0
        for number, runs in enumerate(cuts, 1):
            places = await made.take(*([b"x"] * n for n in runs), Position(number))
            assert all(len(place) <= 10 for place in places)
        await made.loading.end("end")
        epochs = list(made.sink.epochs.places.values())
    assert sum(map(len, epochs)) == sum(map(sum, cuts))
    assert max(map(len, epochs)) <= 10
