"""Pipelines that are cut at durable edges load each message once, despite crashes."""

from __future__ import annotations

import random
import re
import tempfile
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, Self

import anyio
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from etlstage.errors import (
    ConfigError,
    InputDamaged,
    LedgerImbalance,
    SinkFailed,
    StateUnusable,
)
from etlstage.journal import CommittedReader, Journals
from etlstage.journal.errors import OffsetGone
from etlstage.journal.reader import Registered
from etlstage.messages import Position, Run
from etlstage.pipeline.dead_letter.retry import Settled
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.delivery.delivery import Bounds, Delivery
from etlstage.pipeline.delivery.record import CommitRecord
from etlstage.pipeline.divided import DividedPipeline
from etlstage.pipeline.edge import DurableEdge
from etlstage.pipeline.interfaces import Sink
from etlstage.pipeline.journal_sink import JournalSink
from etlstage.pipeline.pipeline import Pipeline
from etlstage.pipeline.report import Report
from etlstage.stage import Order, Stage, WorkerProgram
from etlstage.testing import (
    MemoryEpochs,
    MemoryEpochSink,
    MemorySink,
    MemorySource,
    ScriptedLaunch,
    ScriptedWorker,
)
from tests.patience import HANG
from tests.pipeline.test_journal import committed
from tests.pipeline.test_loading import Numbers, Stopped, numbers, stop_at

STEPS = ["begin", "written", "aside", "recorded", "performed", "ended"]


class Salted(JournalSink):
    """Appends random salt to messages, like a stage whose replies differ each time."""

    async def write(self, run: Run) -> None:
        """Append a run."""
        await super().write([b"%s %d" % (m, random.randrange(10**9)) for m in run])  # noqa: S311


class Drained(Numbers):
    """Ends at a position when drained, as all resumable sources do."""

    draining = False

    def drain(self) -> bool:
        """End at the next position."""
        self.draining = True
        return True

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        """Yield runs, and a position after each."""
        async with aclosing(super().runs()) as items:
            async for item in items:
                yield item
                if self.draining and isinstance(item, Position):
                    return


class Noting(MemorySink):
    """Stores the note of an epoch, as the table of a database does."""

    def __init__(self, note: str = "") -> None:
        super().__init__()
        self.note = note

    async def flush(self) -> None:
        """Count messages that an earlier start has loaded, too."""
        self.account.done = self.account.received

    async def noted(self) -> str:
        """Return the last note."""
        return self.note

    async def commit(self, note: str) -> None:
        """Store the note."""
        self.note = note


class SaltedEdge(DurableEdge):
    """An edge whose first half ends in a :class:`Salted` sink."""

    def sink(self, *, notes: bool = False) -> JournalSink:
        """Return that sink."""
        name = f"{self.stage}/edge"
        return Salted(self.path, name=name, notes=notes, **self._mapped)


def edges_in(state: Path, count: int, **settings: Any) -> list[DurableEdge]:  # noqa: ANN401
    """Return consecutive edges."""
    states = [state, *(state / f"edge-{n}" for n in range(count))]
    return [
        SaltedEdge(f"stage-{n}", states[n], states[n + 1], **settings)
        for n in range(count)
    ]


def divided(
    state: Path,
    sink: Sink,
    *,
    edges: int = 1,
    size: int = 5,
    count: int = 50,
    at: dict[int, Callable[[str], None]] | None = None,
    once: bool = True,
    first: int = 0,
    last: int | None = None,
    **settings: Any,  # noqa: ANN401 - those of an edge
) -> DividedPipeline:
    """Return a pipeline of numbers into a sink, through edges."""
    between = edges_in(state, edges, **settings)
    sources = [
        Drained(count, size),
        *(edge.source((size, 1 << 20)) for edge in between),
    ]
    sinks = [*(edge.sink() for edge in between), sink]
    states = [state, *(edge.behind for edge in between)]
    bounds = Bounds(messages=2 * size, seconds=3600)
    parts = []
    for n, (source, end) in enumerate(zip(sources, sinks, strict=True)):
        delivery = Delivery(states[n], exactly_once=once, bounds=bounds)
        delivery.at = (at or {}).get(n, delivery.at)
        parts.append(Pipeline(name="p", source=source, sink=end, delivery=delivery))
    return DividedPipeline("p", parts, between, first=first, last=last)


async def run(made: DividedPipeline) -> Report:
    """Run the pipeline, with a timeout."""
    with anyio.fail_after(HANG):
        return await made.run()


def plain(messages: list[bytes], edges: int = 1) -> list[bytes]:
    """Return messages without salt, in order; each edge has added one salt."""
    assert all(message.count(b" ") == edges for message in messages)
    return sorted(message.split()[0] for message in messages)


CRASH = st.tuples(
    st.integers(0, 2), st.sampled_from(STEPS), st.integers(1, 5), st.booleans()
)


@settings(deadline=None, max_examples=25)
@given(size=st.integers(1, 12), crashes=st.lists(CRASH, max_size=4))
@example(size=10, crashes=[(0, "recorded", 5, True), (1, "recorded", 1, True)])
@example(size=10, crashes=[(1, "begin", 1, True), (2, "begin", 1, False)])
@example(size=3, crashes=[(2, "recorded", 3, False), (1, "aside", 2, True)])
def test_each_message_is_loaded_once_wherever_parts_break_off(
    *, size: int, crashes: list[tuple[int, str, int, bool]]
) -> None:
    """One part, or all at once, may fail; a stage's replies differ each time."""

    async def all_runs(folder: Path) -> None:
        for part, step, number, whole in [*crashes, (0, "never", 1, False)]:
            scope = anyio.CancelScope()
            count = stop_at(step, number)

            def at(now: str, count: Any = count, scope: Any = scope) -> None:  # noqa: ANN401
                try:
                    count(now)
                except Stopped:
                    scope.cancel()
                    raise

            sink = JournalSink(folder / "out")
            made = divided(
                folder / "state",
                sink,
                edges=2,
                size=size,
                at={part: at if whole else count},
                partitions=2,
            )
            with scope:
                report = await run(made)
            if scope.cancelled_caught:
                continue
            if report.status == "done":
                return
            assert isinstance(report.error, Stopped), report.error

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        anyio.run(all_runs, path)
        assert plain(committed(path / "out"), 2) == sorted(numbers(50))
        for n in (0, 1):
            assert len(committed(path / f"state/edge-{n}/journals")) == 50


async def test_report_names_edges_and_what_waits(tmp_path: Path) -> None:
    """The halves' accounts form one ledger, without those of the journals."""
    sink = MemorySink()
    report = await run(divided(tmp_path, sink, edges=2))
    assert (report.status, len(sink.messages)) == ("done", 50)
    assert [account.stage for account in report.ledger] == ["source", "sink"]
    assert [str(edge) for edge in report.durable] == [
        "edge stage-0 -> stage-1/edge: 50 appended, 50 read, 0 wait",
        "edge stage-1 -> sink: 50 appended, 50 read, 0 wait",
    ]
    assert report.ledger.gaps == [0]


async def test_halves_are_run_one_after_the_other(tmp_path: Path) -> None:
    """Appended messages wait; until they are loaded they are not appended again."""
    for appended in (50, 0):
        report = await run(divided(tmp_path, MemorySink(), last=0))
        assert report.status == "done"
        (edge,) = report.durable
        assert (edge.appended, edge.read, edge.messages) == (appended, 0, 50)
    sink = MemorySink()
    report = await run(divided(tmp_path, sink, first=1))
    assert report.status == "done"
    (edge,) = report.durable
    assert (edge.appended, edge.read, edge.messages) == (0, 50, 0)
    assert plain(sink.messages) == sorted(numbers(50))
    sink = MemorySink()
    assert (await run(divided(tmp_path, sink, first=1))).status == "done"
    assert sink.messages == []


async def test_next_run_is_another_load(tmp_path: Path) -> None:
    """In all parts: output that is replaced is that of the last run."""
    loads = set()
    for _ in range(2):
        sink = MemorySink()
        assert (await run(divided(tmp_path, sink))).status == "done"
        assert len(sink.messages) == 50
        record = CommitRecord.latest(tmp_path / "edge-0")
        loads.add(record.load)
        assert record.epoch == 5
    assert len(loads) == 2
    assert record.last["load"] in loads - {record.load}


async def test_what_was_retried_is_loaded_before_another_load_begins(
    tmp_path: Path,
) -> None:
    """It belongs to the previous load, whose output the next may replace (issue 24)."""
    assert (await run(divided(tmp_path, MemorySink()))).status == "done"
    load = CommitRecord.latest(tmp_path / "edge-0").load
    retried = Pipeline(
        name="p", source=Numbers(3, 1), sink=edges_in(tmp_path, 1)[0].sink()
    )
    assert (await retried.run()).status == "done"
    for expected in (3, 50):
        sink = MemorySink()
        assert (await run(divided(tmp_path, sink))).status == "done"
        assert len(sink.messages) == expected
        again = CommitRecord.latest(tmp_path / "edge-0").load == load
        assert again == (expected == 3)


async def test_part_that_fails_stops_no_other(tmp_path: Path) -> None:
    """The next part loads what was committed; the next run loads all the rest."""
    sink = MemorySink()
    made = divided(tmp_path, sink, at={0: stop_at("recorded", 3)})
    report = await run(made)
    assert isinstance(report.error, Stopped)
    assert len(sink.messages) == 20  # recorded messages are committed by the next start
    assert sink.finished == 0  # its output is not complete
    rest = MemorySink()
    report = await run(divided(tmp_path, rest))
    assert report.status == "done"
    assert rest.finished == 1
    assert plain(sink.messages + rest.messages) == sorted(numbers(50))
    assert report.durable[0].read == 30


def test_halves_are_prepared_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both want the reader registered, and only one can use its name (issue 24)."""
    met = threading.Barrier(2)
    readers, read_committed = Journals.readers, Journals.read_committed

    def meet() -> None:
        with suppress(threading.BrokenBarrierError):
            met.wait(0.5)

    def listed(journals: Journals) -> list[Registered]:
        found = readers(journals)
        meet()
        return found

    def opened(journals: Journals, name: str) -> CommittedReader:
        reader = read_committed(journals, name)
        meet()
        return reader

    monkeypatch.setattr(Journals, "readers", listed)
    monkeypatch.setattr(Journals, "read_committed", opened)
    with ThreadPoolExecutor(2) as threads:
        halves = [
            threads.submit(edge.prepare)
            for edge in (*edges_in(tmp_path, 1), *edges_in(tmp_path, 1))
        ]
    assert [half.result() for half in halves] == [None, None]


async def test_first_half_goes_on_without_the_other(tmp_path: Path) -> None:
    """It runs to its end, as the edge has no limit."""
    made = divided(tmp_path, MemorySink(), at={1: stop_at("begin", 1)})
    report = await run(made)
    assert isinstance(report.error, Stopped)
    (edge,) = report.durable
    assert (edge.appended, edge.messages) == (50, 50)


async def test_first_half_begins_while_the_other_is_run(tmp_path: Path) -> None:
    """The second half has loaded nothing yet, and waits (issue 24)."""
    with Delivery(tmp_path / "edge-0"):
        report = await run(divided(tmp_path, MemorySink(), last=0))
    assert report.status == "done", report.error


@pytest.mark.parametrize("begun", [False, True])
async def test_first_half_begins_while_the_other_is_renewed(
    tmp_path: Path, begun: bool
) -> None:
    """Both may be restarted at once, after the first was killed."""
    assert (await run(divided(tmp_path, MemorySink()))).status == "done"
    (edge,) = edges_in(tmp_path, 1)
    edge.renew()
    with Delivery(edge.behind, exactly_once=True) as delivery:
        if begun:
            delivery.begin("again", stages=[], letters={})
        report = await run(divided(tmp_path, MemorySink(), last=0))
    assert report.status == "done", report.error
    assert report.durable[0].appended == 50


@pytest.mark.parametrize("begun", [False, True])
async def test_first_half_waits_for_the_load_before_to_end(
    tmp_path: Path, begun: bool
) -> None:
    """All of it is loaded already, so a part that started early has nothing to load."""
    assert (await run(divided(tmp_path, MemorySink()))).status == "done"
    (edge,) = edges_in(tmp_path, 1)
    before = CommitRecord.latest(edge.behind).load
    with Delivery(edge.behind, exactly_once=True) as delivery:
        if begun:
            delivery.begin("again", stages=[], letters={})
        reports = []
        made = divided(tmp_path, MemorySink(), last=0)

        async def load() -> None:
            reports.append(await run(made))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load)
            await anyio.sleep(0.5)
            assert not reports
            delivery.end()
            delivery.__exit__()
    assert reports[0].status == "done", reports[0].error
    assert reports[0].durable[0].appended == 50
    assert CommitRecord.latest(edge.behind).load != before


async def test_first_half_that_waits_is_drained(tmp_path: Path) -> None:
    """It has read nothing by then."""
    assert (await run(divided(tmp_path, MemorySink()))).status == "done"
    made = divided(tmp_path, MemorySink(), last=0)
    with Delivery(tmp_path / "edge-0"):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, made)
            await anyio.sleep(0.3)
            made.drain()
    assert made.report("drained").durable[0].appended == 0


async def test_first_half_ends_at_the_limit_without_the_other(tmp_path: Path) -> None:
    """It does not wait for a reader that is gone; the next run loads everything."""
    made = divided(
        tmp_path,
        MemorySink(),
        at={1: stop_at("begin", 1)},
        count=300,
        limit="8KiB",
    )
    report = await run(made)
    assert isinstance(report.error, Stopped)
    (edge,) = report.durable
    assert 0 < edge.appended < 300
    sink = MemorySink()
    report = await run(divided(tmp_path, sink, count=300, limit="8KiB"))
    assert report.status == "done"
    assert plain(sink.messages) == sorted(numbers(300))


async def refuse_seven(worker: ScriptedWorker) -> int:
    """Add an exclamation mark to each message but 7, which is refused."""
    async for message in worker.messages():
        if message == b"7":
            await worker.refuse("no seven")
        else:
            await worker.reply(message + b"!")
    return 0


async def test_limit_is_that_of_the_last_start(tmp_path: Path) -> None:
    """Not that with which the journals were made (issue 24)."""
    limits: tuple[str | None, ...] = ("1MiB", "8KiB", None)
    appended = []
    for limit in limits:
        first = divided(tmp_path, MemorySink(), count=300, last=0, limit=limit)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, first)
            if limit == "8KiB":
                with anyio.fail_after(HANG):
                    while not first.activity:  # noqa: ASYNC110
                        await anyio.sleep(0.01)
                first.drain()
        appended.append(first.report("done").durable[0].appended)
        if limit == "1MiB":
            await run(divided(tmp_path, MemorySink(), first=1, limit=limit))
    assert appended[0] == 300
    assert 0 < appended[1] < 300
    assert sum(appended[1:]) == 300


async def test_report_counts_a_half_that_has_ended(tmp_path: Path) -> None:
    """As it counts all starts of a load (issue 24)."""

    def parts(at: Callable[[str], None] | None) -> DividedPipeline:
        made = DividedPipeline.cut(
            "p",
            state=tmp_path,
            source=Numbers(20, 5),
            stages=[upper("one"), upper("two")],
            sink=MemoryEpochSink(epochs),
            durable={"one": {}},
            bounds=Bounds(messages=5, seconds=3600),
            launch=ScriptedLaunch(refuse_seven),
        )
        if at is not None:
            behind = made._parts[1]._delivery
            assert behind is not None
            behind.at = at
        return made

    epochs = MemoryEpochs()
    await run(parts(stop_at("begin", 1)))
    assert CommitRecord.latest(tmp_path).pending
    report = await run(parts(None))
    assert report.status == "done"
    assert [(a.stage, a.made, a.dead) for a in report.ledger] == [
        ("source", 20, 0),
        ("one", 19, 1),
        ("two", 19, 0),
        ("sink", 19, 0),
    ]
    assert report.dead_letters.messages == 1
    assert report.durable[0].appended == 0
    assert len(epochs.messages) == 19


@pytest.mark.parametrize("changed", [["b", "one"], ["a", "b", "one"], ["one"]])
async def test_half_that_has_ended_may_have_other_stages(
    tmp_path: Path, changed: list[str]
) -> None:
    """It is not run: what waits is loaded, and only that is counted (issue 23)."""

    def parts(before: list[str], epochs: MemoryEpochs) -> DividedPipeline:
        return DividedPipeline.cut(
            "p",
            state=tmp_path,
            source=Numbers(20, 5),
            stages=[upper(name) for name in (*before, "two")],
            sink=MemoryEpochSink(epochs),
            durable={"one": {}},
            bounds=Bounds(messages=5, seconds=3600),
            launch=ScriptedLaunch(refuse_seven),
        )

    killed = parts(["a", "one"], MemoryEpochs())
    behind = killed._parts[1]._delivery
    assert behind is not None
    behind.at = stop_at("begin", 1)
    await run(killed)
    epochs = MemoryEpochs()
    report = await run(parts(changed, epochs))
    assert report.status == "done"
    assert [(a.stage, a.made, a.dead) for a in report.ledger] == [
        ("source", 0, 0),
        *((name, 0, 0) for name in changed),
        ("two", 19, 0),
        ("sink", 19, 0),
    ]
    assert (report.dead_letters.messages, report.durable[0].appended) == (0, 0)
    assert len(epochs.messages) == 19
    assert not CommitRecord.latest(tmp_path).resumes


@pytest.mark.parametrize("before", [{}, {"one": {}}])
async def test_edge_that_was_not_there_is_refused_before_anything_is_stored(
    tmp_path: Path, before: dict[str, Any]
) -> None:
    """The settings with which a run was interrupted still complete it (issue 24)."""

    def made(durable: dict[str, Any]) -> Pipeline | DividedPipeline:
        common: dict[str, Any] = {
            "source": Numbers(20, 5),
            "stages": [upper("one"), upper("two")],
            "sink": MemoryEpochSink(epochs),
            "launch": ScriptedLaunch(refuse_seven),
        }
        if durable:
            return DividedPipeline.cut("p", state=tmp_path, durable=durable, **common)
        delivery = Delivery(tmp_path, exactly_once=True, bounds=Bounds(messages=5))
        letters = DeadLetters(tmp_path, pipeline="p")
        return Pipeline(name="p", dead_letters=letters, delivery=delivery, **common)

    epochs = MemoryEpochs()
    killed = made(before)
    last = killed._parts[-1] if isinstance(killed, DividedPipeline) else killed
    assert last._delivery is not None
    last._delivery.at = stop_at("recorded", 1)
    await killed.run()
    other = made({"two": {}})
    assert isinstance(other, DividedPipeline)
    behind = DividedPipeline("p", other._whole, other._edges, first=1)
    for refused in (other, made({"two": {}}), *([] if before else [behind])):
        report = await refused.run()
        assert "that was interrupted in" in str(report.error)
        assert not (tmp_path / "edge-two").exists()
    report = await made(before).run()
    assert (report.status, len(epochs.messages)) == ("done", 19)


async def test_halves_are_drained_together(tmp_path: Path) -> None:
    """Messages appended by then wait for the next run."""

    class Draining(MemorySink):
        async def write(self, run: Run) -> None:
            await super().write(run)
            made.drain()

    sink = Draining()
    made = divided(tmp_path, sink, count=300)
    report = await run(made)
    assert report.status == "drained", report.error
    rest = MemorySink()
    report = await run(divided(tmp_path, rest, count=300))
    assert report.status == "done"
    assert plain(sink.messages + rest.messages) == sorted(numbers(300))


@pytest.mark.parametrize("once", [True, False])
async def test_drain_at_the_last_message_leaves_only_the_end_of_the_load(
    once: bool, tmp_path: Path
) -> None:
    """The next run reads nothing again, and completes the output (issue 24)."""

    class Ending(MemorySink):
        finished = False

        async def write(self, run: Run) -> None:
            await super().write(run)
            if self.account.received == 50:
                made.drain()

        async def finish(self) -> None:
            await super().finish()
            self.finished = True

    await run(divided(tmp_path, MemorySink(), last=0, once=once))
    sink = Ending()
    made = divided(tmp_path, sink, once=once)
    report = await run(made)
    assert (report.status, sink.finished) == ("drained", False), report.error
    assert plain(sink.messages) == sorted(numbers(50))
    rest = Ending()
    made = divided(tmp_path, rest, once=once)
    assert (await run(made)).status == "done"
    assert (rest.messages, rest.finished) == ([], True)
    again = MemorySink()
    assert (await run(divided(tmp_path, again, once=once))).status == "done"
    assert plain(again.messages) == sorted(numbers(50))


@pytest.mark.parametrize("once", [True, False])
async def test_what_was_not_read_is_read_by_the_next_run(
    once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a drain before the first position, with a second half that failed."""

    class Failing(MemorySink):
        async def __aenter__(self) -> Self:
            raise Stopped

    async def waiting(_: Drained) -> AsyncGenerator[Run | Position, None]:
        await anyio.sleep_forever()
        yield []

    made = divided(tmp_path, Failing(), once=once)
    with monkeypatch.context() as patched:
        patched.setattr(Drained, "drain", MemorySource.drain)
        patched.setattr(Drained, "runs", waiting)
        made.drain()
        assert (await run(made)).status == "failed"
    record = CommitRecord.latest(tmp_path)
    assert (record.ended, record.epoch) == (True, 0)
    sink = MemorySink()
    assert (await run(divided(tmp_path, sink, once=once))).status == "done"
    assert plain(sink.messages) == sorted(numbers(50))


async def test_half_behind_reads_on_while_the_other_is_run(tmp_path: Path) -> None:
    """The second half ends only when no run holds the first one's state."""
    sink = MemorySink()
    behind = divided(tmp_path, sink, first=1)
    with Delivery(tmp_path):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, behind)
            with anyio.fail_after(30):
                # There is no event for this.
                while "reading the journals" not in behind.activity:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()
    assert (await run(divided(tmp_path, MemorySink(), last=0))).status == "done"
    report = await run(divided(tmp_path, sink, first=1))
    assert (report.status, len(sink.messages)) == ("done", 50)


async def test_epoch_that_only_the_sink_has_noted_waits_no_more(
    tmp_path: Path,
) -> None:
    """It was loaded, though the record found at the start is older."""
    killed = Noting()
    made = divided(tmp_path, killed, at={1: stop_at("aside", 2)})
    assert isinstance((await run(made)).error, Stopped)
    again = Noting(killed.note)
    report = await run(divided(tmp_path, again))
    assert (report.status, report.error) == ("done", None)
    assert plain(killed.messages + again.messages) == sorted(numbers(50))


async def test_start_of_one_half_takes_nothing_back_from_the_other(
    tmp_path: Path,
) -> None:
    """It commits recorded messages only while no run is there to do so (issue 24)."""
    count = stop_at("written", 3)

    def at(step: str) -> None:
        try:
            count(step)
        except Stopped:
            edges_in(tmp_path, 1)[0].prepare()

    report = await run(divided(tmp_path, MemorySink(), last=0, at={0: at}))
    assert report.status == "done"
    sink = MemorySink()
    assert (await run(divided(tmp_path, sink, first=1))).status == "done"
    assert plain(sink.messages) == sorted(numbers(50))


async def test_half_behind_loads_what_the_other_has_recorded_last(
    tmp_path: Path,
) -> None:
    """Even if it was killed before acknowledging them; else the load would be over."""
    at = stop_at("recorded", 5)
    report = await run(divided(tmp_path, MemorySink(), last=0, at={0: at}))
    assert isinstance(report.error, Stopped)
    loading = anyio.Event()

    class Heard(MemorySink):
        async def write(self, run: Run) -> None:
            await super().write(run)
            loading.set()

    sink, reports = Heard(), list[Report]()

    async def behind() -> None:
        reports.append(await run(divided(tmp_path, sink, first=1)))

    async with anyio.create_task_group() as tasks:
        with Delivery(tmp_path):
            tasks.start_soon(behind)
            await loading.wait()
    assert reports[0].status == "done"
    assert plain(sink.messages) == sorted(numbers(50))


async def test_what_waits_is_counted_while_the_other_half_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages recorded after a look at the record may be removed, too (issue 24)."""
    assert (await run(divided(tmp_path, MemorySink(), last=0))).status == "done"
    gone = [OffsetGone("part-000", 0, 600)] * 2
    (edge,) = edges_in(tmp_path, 1)
    read = Journals.read_committed

    def removed(journals: Journals, **settings: Any) -> CommittedReader:  # noqa: ANN401
        if gone:
            raise gone.pop()
        return read(journals, **settings)

    monkeypatch.setattr(Journals, "read_committed", removed)
    assert edge.unread().messages == 50
    gone += [OffsetGone("part-000", 0, 600)] * 9
    with pytest.raises(OffsetGone, match="part-000"):
        edge.unread()


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("end", ["never run", "interrupted", "drained"])
async def test_half_behind_an_incomplete_one_completes_nothing(
    tmp_path: Path, end: str, *, once: bool
) -> None:
    """The output would be marked as complete without the rest (issue 24)."""
    if end != "never run":
        at = stop_at("recorded", 1)
        before = divided(tmp_path, MemorySink(), last=0, once=once, at={0: at})
        if end == "drained":
            before = divided(tmp_path, MemorySink(), last=0, once=once)
            before.drain()
        await run(before)
    finished = list[bool]()

    class Marking(MemorySink):
        async def finish(self) -> None:
            finished.append(True)
            await super().finish()

    sink = Marking()
    assert (await run(divided(tmp_path, sink, first=1, once=once))).status == "drained"
    assert finished == []
    rest = Marking()
    assert (await run(divided(tmp_path, rest, once=once))).status == "done"
    assert finished == [True]
    assert sorted(set(plain(sink.messages + rest.messages))) == sorted(numbers(50))


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("end", ["end", "limit", "drained"])
async def test_half_behind_knows_where_a_source_that_reads_on_stopped(
    tmp_path: Path, end: str, *, once: bool
) -> None:
    """A run at the limit is done, but its output is not complete (issue 24)."""
    before = divided(tmp_path, MemorySink(), last=0, once=once)
    (first,) = before._parts
    if end == "limit":  # up to which the source reads, and no further
        first._source, first._left = Drained(10, 5), 10
    first._source.goes_on = first._reads_on = True
    if end == "drained":
        before.drain()
    assert (await run(before)).status == ("drained" if end == "drained" else "done")
    sink = MemorySink()
    behind = divided(tmp_path, sink, first=1, once=once)
    behind._whole[0]._reads_on = True
    report = await run(behind)
    assert report.status == ("drained" if end == "drained" else "done"), report.error
    assert sink.finished == (end == "end")


async def test_half_behind_one_drained_before_an_epoch_completes_nothing(
    tmp_path: Path,
) -> None:
    """At least once, a drained run may have passed on messages (issue 24)."""
    edge, *_ = edges_in(tmp_path, 1)
    edge.prepare()
    for drained in (True, False):
        before = divided(tmp_path, MemorySink(), last=0, once=False)
        (first,) = before._parts
        first._source = MemorySource([[b"1"], [b"2"]])
        if drained:
            before.drain()
        await run(before)
        sink = MemorySink()
        report = await run(divided(tmp_path, sink, first=1, once=False))
        assert report.status == ("drained" if drained else "done"), report.error
        assert sink.finished is not drained


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"partitions": 3, "key": "/id"}, "durable.partitions was 2"),
        ({"partitions": 2, "key": "/n"}, "durable.key was /id"),
        (
            {"partitions": 2, "key": "/id", "mapping": "rendezvous"},
            "mapping was modulo",
        ),
        ({"partitions": 1}, "durable.partitions was 2"),
    ],
)
async def test_mapping_changes_only_while_nothing_waits(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    """Otherwise one key's messages could be in two journals; the error comes first."""
    before: dict[str, Any] = {"partitions": 2, "key": "/id"}
    await run(divided(tmp_path, MemorySink(), last=0, **before))
    report = await run(divided(tmp_path, MemorySink(), **changed))
    assert isinstance(report.error, StateUnusable)
    assert said in str(report.error)
    assert "50 messages wait" in str(report.error)
    await run(divided(tmp_path, MemorySink(), first=1, **before))
    sink = MemorySink()
    assert (await run(divided(tmp_path, sink, **changed))).status == "done"
    assert len(sink.messages) == 50
    with Journals.open(tmp_path / "edge-0" / "journals") as journals:
        assert len(journals.partitions()) == max(2, changed["partitions"])


@pytest.mark.parametrize("part", [0, 1])
async def test_edge_is_busy_until_the_end_of_a_half_is_performed(
    tmp_path: Path, part: int
) -> None:
    """What a half has loaded may not be visible before that (issue 24)."""
    (edge,) = edges_in(tmp_path, 1)
    why = "a run was interrupted: complete it first, with the old settings"
    for at, found in ((stop_at("recorded", 5), why), (stop_at("never", 1), "")):
        await run(divided(tmp_path, JournalSink(tmp_path / "out"), at={part: at}))
        if part:
            edge.settle()  # as if the first half read on where it has ended
        halves = [CommitRecord.latest(half) for half in (edge.before, edge.behind)]
        assert halves[part].ended
        assert halves[1 - part].ended
        assert edge.unread().messages == 0
        assert edge.busy() == found


@pytest.mark.parametrize(
    ("count", "found"), [(0, ""), (5, "5 messages wait: load them first")]
)
async def test_half_that_has_loaded_nothing_is_not_completed(
    tmp_path: Path, count: int, found: str
) -> None:
    """What it has promised is only what waits (issue 24)."""
    (edge,) = edges_in(tmp_path, 1)
    sink = MemorySink()
    await run(divided(tmp_path, sink, count=count, last=0))
    edge.settle()
    with Delivery(edge.behind, exactly_once=True) as delivery:
        delivery.begin("killed", stages=["stage-0/edge", "sink"], letters={})
    assert re.sub(r" \(.*?\)", "", edge.busy()).partition(",")[0] == found
    assert (await run(divided(tmp_path, sink, first=1))).status == "done"
    assert (len(sink.messages), edge.busy()) == (count, "")


async def test_fewer_journals_are_appended_to(tmp_path: Path) -> None:
    """Existing journals stay, as the reader's offsets refer to them."""

    def used() -> list[str]:
        with Journals.open(tmp_path / "edge-0" / "journals") as journals:
            return [envelope.journal[-1] for envelope in journals.read_committed()]

    await run(divided(tmp_path, MemorySink(), partitions=3))
    before = used()
    assert set(before) == {"0", "1", "2"}
    sink = MemorySink()
    assert (await run(divided(tmp_path, sink, partitions=2))).error is None
    assert len(sink.messages) == 50
    assert used().count("2") == before.count("2")
    assert used().count("1") > before.count("1")


@pytest.mark.parametrize(
    ("at", "error"),
    [(0, "journals/part-000: damaged at offset 0"), (None, "the position is offset")],
)
async def test_damage_of_an_edge_has_a_remedy(
    tmp_path: Path, at: int | None, error: str
) -> None:
    """No setting skips it there, and the reader has a fixed name (issue 24)."""
    await run(divided(tmp_path, MemorySink(), last=0))
    if at is None:
        at_second = {1: stop_at("recorded", 2)}
        await run(divided(tmp_path, MemorySink(), first=1, at=at_second))
    (log,) = (tmp_path / "edge-0" / "journals").glob("*/*.log")
    data = bytearray(log.read_bytes())
    data[60] ^= 1
    log.write_bytes(data if at is not None else data[:56])
    report = await run(divided(tmp_path, MemorySink(), first=1))
    assert error in str(report.error)
    assert str(report.error).endswith(
        "; at a durable edge, remove what the load has written, then start from the"
        " beginning with 'etlstage state reset --yes'"
    )


async def test_message_that_is_lost_in_an_edge_fails_the_run(tmp_path: Path) -> None:
    """The ledger must balance over the edge, or the run fails."""
    made = divided(tmp_path, MemorySink())
    source = made._whole[1]._source
    taken = source.runs

    async def fewer() -> Any:  # noqa: ANN401
        async for item in taken():
            assert not isinstance(item, InputDamaged)
            whole = isinstance(item, Position) or b"7" not in plain(list(item))
            yield item if whole else item[1:]

    source.runs = fewer  # type: ignore[method-assign]
    report = await run(made)
    assert isinstance(report.error, LedgerImbalance)
    assert "edge stage-0: 0 waited, and 50 were appended, but 49 were read" in str(
        report.error
    )


async def test_at_least_once_balances_too(tmp_path: Path) -> None:
    """Also after a run that was interrupted."""

    class Broken(MemorySink):
        async def write(self, run: Run) -> None:
            if len(self.messages) > 20:
                raise SinkFailed("broken", stage="memory")
            await super().write(run)

    report = await run(divided(tmp_path, Broken(), once=False))
    assert isinstance(report.error, SinkFailed)
    sink = MemorySink()
    report = await run(divided(tmp_path, sink, once=False))
    assert report.error is None
    assert set(plain(sink.messages)) <= set(numbers(50))


def upper(name: str, **settings: Any) -> Stage:  # noqa: ANN401
    """Return a stage."""
    return Stage(name=name, worker=WorkerProgram(command=("none",)), **settings)


async def test_pipeline_is_cut_in_python_as_in_a_file(tmp_path: Path) -> None:
    """It is cut after the named stages; each part has its own state (issue 24)."""
    found = []
    for _ in range(2):
        sink = MemorySink()
        made = DividedPipeline.cut(
            "p",
            state=tmp_path / "state",
            source=Numbers(20, 5),
            stages=[upper("one"), upper("two", order=Order.NONE), upper("three")],
            sink=sink,
            durable={"one": {}, "two": {"partitions": 2}},
            exactly_once=False,
            launch=ScriptedLaunch(refuse_seven),
        )
        report = await run(made)
        assert (report.status, report.error) == ("done", None)
        found += sink.messages
        folders = ["edge-one", "edge-two"]
        assert sorted(p.name for p in (tmp_path / "state").glob("edge*")) == folders
    wanted = [b"%s!!!" % message for message in numbers(20) if message != b"7"]
    assert sorted(found) == sorted(wanted * 2)
    letters = Settled(tmp_path / "state" / "dead_letters").letters("one")
    assert [letter.message for letter in letters] == [b"7", b"7"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("durable", "text"),
    [
        ({}, "durable: there is no stage ''"),
        ({"two": {}, "on": {}}, r"no stage 'on' \(did you mean 'one'\?\)"),
        (
            {"one": {"partitions": 2}},
            "stage one: durable.partitions: several journals can't keep order total",
        ),
    ],
)
def test_cut_that_is_wrong_is_refused(
    tmp_path: Path, durable: dict[str, dict[str, Any]], text: str
) -> None:
    """With the same texts as for a configuration file (issue 24)."""
    with pytest.raises(ConfigError, match=text):
        DividedPipeline.cut(
            "p",
            state=tmp_path,
            source=Numbers(1, 1),
            stages=[upper("one"), upper("two")],
            sink=MemorySink(),
            durable=durable,
        )
