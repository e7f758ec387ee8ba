"""Journals as sinks and sources of pipelines: each message passes once."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from itertools import cycle
from pathlib import Path

import anyio
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from etlstage.errors import InputDamaged, SinkFailed, SourceFailed
from etlstage.journal import (
    CommittedReader,
    Journals,
    Publisher,
    ReaderBusy,
    RunMessage,
    modulo,
)
from etlstage.messages import Position, Run
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.dead_letter.retry import Settled
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.delivery.delivery import Bounds, Delivery, take_over
from etlstage.pipeline.delivery.record import CommitRecord
from etlstage.pipeline.interfaces import Epochs, Sink, Source
from etlstage.pipeline.journal_sink import JournalSink, note_of, noted
from etlstage.pipeline.journal_source import JournalSource
from etlstage.pipeline.pipeline import Pipeline
from etlstage.pipeline.report import Report
from etlstage.sequencing import FIXED_FRAME_HEADER_LENGTH, AckIntent, Checkpoint
from etlstage.telemetry import PrometheusMeter
from etlstage.testing import (
    MemoryEpochs,
    MemoryEpochSink,
    MemorySink,
    MemorySource,
)
from tests.patience import HANG
from tests.pipeline.ends import ScriptedSource, Wait, unreadable
from tests.pipeline.test_loading import Numbers, Stopped, numbers, stop_at

RUN = "application/x-etlstage-run"
STEPS = ["begin", "written", "aside", "recorded", "intent", "performed"]


async def once(
    state: Path,
    source: Source,
    sink: Sink,
    at: Callable[[str], None] | None = None,
    messages: int = 10,
) -> Report:
    """Run once with exactly-once delivery, in epochs of a few messages."""
    bounds = Bounds(messages=messages, seconds=3600)
    delivery = Delivery(state, exactly_once=True, bounds=bounds)
    if at is not None:
        delivery.at = at
    made = Pipeline(name="p", source=source, sink=sink, delivery=delivery)
    with anyio.fail_after(HANG):
        return await made.run()


async def plainly(
    source: Source, sink: Sink, state: Path | None = None, limit: int | None = None
) -> Report:
    """Run with at-least-once delivery, or without a state; expect success."""
    delivery = None if state is None else Delivery(state)
    made = Pipeline(name="p", source=source, sink=sink, delivery=delivery, limit=limit)
    with anyio.fail_after(HANG):
        report = await made.run()
    assert report.error is None, report.error
    return report


def committed(path: Path, **settings: object) -> list[bytes]:
    """Return all committed messages, journal by journal."""
    found: dict[str, list[bytes]] = {}
    with Journals.open(path, create=False) as journals:
        for envelope in journals.read_committed(**settings):  # type: ignore[arg-type]
            assert isinstance(envelope.message, RunMessage)
            found.setdefault(envelope.journal, []).extend(envelope.message.run)
    return [message for name in sorted(found) for message in found[name]]


def in_transactions(path: Path, runs: list[int]) -> list[bytes]:
    """Append two transactions of runs of so many messages; return the messages."""
    wanted: list[bytes] = []
    with Journals.open(path, partitions=2, content_type=RUN) as journals:
        specs = journals.partitions()
        for half in (0, 1):
            targets = cycle((spec.name, RUN) for spec in specs)
            publisher = Publisher(journals, mapping=partial(_next, targets))
            for n, count in enumerate(runs):
                run = [b"%d-%d-%d" % (half, n, m) for m in range(count)]
                publisher.publish_uncommitted(RunMessage(run))
                wanted += run
            for intent in publisher.build_ack_intents():
                journals.append(intent.journal, intent.intent)
    return wanted


async def test_runs_of_an_epoch_are_held_up_to_a_megabyte(tmp_path: Path) -> None:
    """Plus one more run; an epoch may have any number of them (issue 27)."""
    held = list[int]()

    class Measured(JournalSink):
        def _write(self) -> None:
            held.append(self._size)
            super()._write()

    runs = [[b"x" * 300_000]] * 12
    sink = Measured(tmp_path / "set")
    await once(tmp_path / "state", MemorySource(runs), sink, messages=12)
    assert 1_000_000 < max(held) < 1_400_000
    assert len(committed(tmp_path / "set")) == 12


class Faulty(JournalSink):
    """May also fail between two acknowledgements."""

    def __init__(self, path: Path, at: Callable[[str], None]) -> None:
        super().__init__(path, partitions=3)
        self._at = at

    def _acknowledge(self) -> None:
        append = self._journals.append

        def broken(journal: str, data: bytes) -> object:
            self._at("intent")
            return append(journal, data)

        self._journals.append = broken  # type: ignore[assignment, method-assign]
        super()._acknowledge()
        self._journals.append = append  # type: ignore[method-assign]


@settings(deadline=None, max_examples=40)
@given(
    size=st.integers(1, 12),
    crashes=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(1, 6)), max_size=5),
)
@example(size=10, crashes=[("recorded", 5)])
@example(size=4, crashes=[("intent", 2), ("intent", 1), ("performed", 1)])
def test_each_message_is_committed_once_wherever_a_run_breaks_off(
    *, size: int, crashes: list[tuple[str, int]]
) -> None:
    """Even between two acknowledgements; readers never see part of an epoch."""

    async def all_runs(folder: Path) -> None:
        for step, number in [*crashes, ("never", 1)]:
            at = stop_at(step, number)
            sink = Faulty(folder / "set", at)
            report = await once(folder / "state", Numbers(50, size), sink, at)
            if report.status == "done":
                return
            assert isinstance(report.error, Stopped), report.error

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        anyio.run(all_runs, path)
        assert sorted(committed(path / "set")) == sorted(numbers(50))
        assert CommitRecord.latest(path / "state").ended


@settings(deadline=None, max_examples=30)
@given(
    runs=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    crashes=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(1, 4)), max_size=5),
    bound=st.integers(1, 12),
)
@example(runs=[3] * 9, crashes=[("recorded", 2), ("begin", 1)], bound=5)
def test_each_message_is_read_once_wherever_a_run_breaks_off(
    *, runs: list[int], crashes: list[tuple[str, int]], bound: int
) -> None:
    """Even in the middle of the writer's transaction."""

    async def all_runs(folder: Path) -> None:
        for step, number in [*crashes, ("never", 1)]:
            at = stop_at(step, number)
            source = JournalSource(folder / "in", reader="r", cut=(bound, 1 << 20))
            sink = Faulty(folder / "out", at)
            report = await once(folder / "state", source, sink, at, messages=bound)
            if report.status == "done":
                return
            assert isinstance(report.error, Stopped), report.error

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        wanted = in_transactions(path / "in", runs)
        anyio.run(all_runs, path)
        assert sorted(committed(path / "out")) == sorted(wanted)
        with Journals.open(path / "in") as journals:
            (reader,) = journals.readers()
            ends = {s.name: journals.log(s.name).end() for s in journals.select()}
            assert reader.needs == ends


async def test_next_run_reads_what_came_since(tmp_path: Path) -> None:
    """The set is empty first: its beginning is recorded, too."""
    path, state = tmp_path / "set", tmp_path / "state"
    Journals.open(path, content_type=RUN).close()
    seen = []
    for rest in ([], [[b"a", b"b"]], [], [[b"c"], [b"d"]]):
        runs: Sequence[Run] = rest
        await plainly(MemorySource(runs), JournalSink(path))
        sink = MemorySink()
        source = JournalSource(path, reader="r", start="end")
        await plainly(source, sink, state)
        seen.append(sink.messages)
    assert seen == [[], [b"a", b"b"], [], [b"c", b"d"]]


async def test_without_a_state_the_name_has_where_to_go_on(tmp_path: Path) -> None:
    """It continues by the reader's name; readers of other names begin anew."""
    path, seen = tmp_path / "set", []
    for message in (b"a", b"b"):
        await plainly(MemorySource([[message]]), JournalSink(path))
        for reader in ("one", message.decode()):
            sink = MemorySink()
            await plainly(JournalSource(path, reader=reader), sink)
            seen.append(sink.messages)
    assert seen == [[b"a"], [b"a"], [b"b"], [b"a", b"b"]]


@pytest.mark.parametrize("state", [True, False])
@given(
    runs=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    limits=st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
@example(runs=[3, 1], limits=[1, 1, 3, 9])
@settings(deadline=None, max_examples=30)
def test_limited_runs_read_on_where_they_stopped(
    *, runs: list[int], limits: list[int], state: bool
) -> None:
    """Each message is loaded once, though a limit may divide a run (issue 24)."""

    async def check(path: Path, wanted: list[bytes]) -> None:
        seen: list[bytes] = []
        for limit in [*limits, len(wanted)]:
            sink = MemorySink()
            source = JournalSource(path / "in", reader="r")
            await plainly(source, sink, path / "state" if state else None, limit)
            assert len(sink.messages) == min(limit, len(wanted) - len(seen))
            seen += sink.messages
        assert sorted(seen) == sorted(wanted)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        anyio.run(check, path, in_transactions(path / "in", runs))


async def test_frame_that_a_limit_divides_is_on_the_disk_before_its_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash of the machine, nothing else stands in its place (issue 24)."""
    steps: list[str] = []
    fsync, kept = os.fsync, Delivery.keep

    def noted_fsync(fd: int) -> None:
        steps.append(Path(os.readlink(f"/proc/self/fd/{fd}")).suffix)
        fsync(fd)

    def noted_keep(self: Delivery, record: CommitRecord) -> None:
        assert isinstance(record.position, dict)
        steps.append("begun" if "begun" in record.position else "before")
        kept(self, record)

    with Journals.open(tmp_path / "set", content_type=RUN) as journals:
        (spec,) = journals.partitions()
        publisher = Publisher(journals, mapping=lambda _: (spec.name, RUN))
        await publisher.publish_committed(RunMessage([b"a", b"b", b"c"]))
        monkeypatch.setattr(os, "fsync", noted_fsync)
        monkeypatch.setattr(Delivery, "keep", noted_keep)
        source = JournalSource(tmp_path / "set", reader="r")
        await plainly(source, MemorySink(), tmp_path / "state", 1)
    assert ".log" in steps[: steps.index("begun")]


@pytest.mark.parametrize("exactly_once", [True, False])
async def test_run_that_has_recorded_nothing_yet_begins_where_it_began(
    tmp_path: Path, exactly_once: bool
) -> None:
    """At the end as it was then: later messages are not skipped (issue 24)."""
    path, state = tmp_path / "set", tmp_path / "state"

    class Broken(MemorySink):
        async def write(self, run: Run) -> None:
            raise Stopped

    class Appended(JournalSource):
        async def runs(self) -> AsyncGenerator[Run | Position | InputDamaged, None]:
            async with aclosing(super().runs()) as items:
                yield await anext(items)  # the position where it begins
                await plainly(MemorySource([[b"a"]]), JournalSink(path))
                self.complete()
                async for item in items:
                    yield item

    await plainly(MemorySource([[b"before"]]), JournalSink(path))
    for sink in (Broken(), MemorySink()):
        source = Appended(path, reader="r", start="end", follow=True)
        delivery = Delivery(state, exactly_once=exactly_once)
        made = Pipeline(name="p", source=source, sink=sink, delivery=delivery)
        with anyio.fail_after(HANG):
            report = await made.run()
    assert report.error is None, report.error
    assert sink.messages == [b"a", b"a"]


async def test_state_that_is_forgotten_begins_anew(tmp_path: Path) -> None:
    """Whatever position is known under the reader's name."""
    path = tmp_path / "set"
    await plainly(MemorySource([[b"a"]]), JournalSink(path))
    for state in ("one", "two"):
        sink = MemorySink()
        await plainly(JournalSource(path, reader="r"), sink, tmp_path / state)
        assert sink.messages == [b"a"]


async def test_follower_reads_what_comes_until_it_is_drained(tmp_path: Path) -> None:
    """In order; the run ends with a position."""
    path = tmp_path / "set"
    writer = JournalSink(path)
    await plainly(MemorySource([[b"a"]]), writer)

    class Draining(MemorySink):
        async def write(self, run: Run) -> None:
            await super().write(run)
            if self.messages[-1] == b"a":
                await plainly(MemorySource([[b"b"], [b"c"]]), JournalSink(path))
            elif self.messages[-1] == b"c":
                made.drain()

    sink = Draining()
    source = JournalSource(path, reader="r", follow=True)
    made = Pipeline(
        name="p", source=source, sink=sink, delivery=Delivery(tmp_path / "state")
    )
    with anyio.fail_after(HANG):
        report = await made.run()
    assert (report.status, sink.messages) == ("drained", [b"a", b"b", b"c"])
    assert "journals" in source.input
    assert "reading" in source.activity
    sink = MemorySink()  # type: ignore[assignment]
    await plainly(JournalSource(path, reader="r"), sink, tmp_path / "state")
    assert sink.messages == []


@pytest.mark.parametrize("mapping", ["modulo", "rendezvous"])
async def test_messages_of_a_key_are_in_one_journal_in_order(
    tmp_path: Path, mapping: str
) -> None:
    """Messages without a key, too."""
    messages = [b'{"c": %d, "n": %d}' % (n % 7, n) for n in range(200)]
    messages[50:60] = [b"no json %d" % n for n in range(10)]
    sink = JournalSink(tmp_path / "s", key="/c", partitions=4, mapping=mapping)  # type: ignore[arg-type]
    await plainly(MemorySource([messages[:120], messages[120:]]), sink)
    assert sink.landed() == (
        f"200 messages appended to journals in {tmp_path / 's'}; output complete"
    )
    homes: dict[object, set[str]] = {}
    last: dict[object, int] = {}
    used = set()
    with Journals.open(tmp_path / "s") as journals:
        for envelope in journals.read_committed():
            used.add(envelope.journal)
            for message in envelope.message.run:  # type: ignore[attr-defined]
                key, at = None, messages.index(message)
                if message.startswith(b"{"):
                    key = json.loads(message)["c"]
                homes.setdefault(key, set()).add(envelope.journal)
                assert last.get(key, -1) < at
                last[key] = at
    assert len(homes) == 8
    assert len(used) > 1
    assert all(len(names) == 1 for names in homes.values())


async def test_line_of_json_keeps_its_bytes(tmp_path: Path) -> None:
    """
    Digits, spaces and the order of members are the writer's (issue 24).

    So is a number that is no 64-bit float: the line is sound JSON.
    """
    meta = b'{"_meta": {"uuid": "00000000-0000-0000-0000-000000000000"}, '
    lines = [
        meta + b'"sum": 0.12345678901234567891, "one": 1.0, "b": -0.0, "a": "<"}',
        meta + b'"most": 1e400}',
    ]
    with Journals.open(tmp_path / "json") as journals:
        journals.append(journals.select()[0].name, b"\r\n".join(lines) + b"\n")
    sink = MemorySink()
    await plainly(JournalSource(tmp_path / "json", reader="r"), sink)
    assert sink.messages == lines


async def test_messages_of_other_sets_are_read_as_they_stand(tmp_path: Path) -> None:
    """JSON comes with its UUID, records without; small messages come together."""
    with Journals.open(tmp_path / "json") as journals:
        publisher = Publisher(journals, mapping=modulo(lambda m: m["n"]))
        for n in range(3):
            publisher.publish_committed({"n": n})
    sink = MemorySink()
    await plainly(JournalSource(tmp_path / "json", reader="r"), sink)
    assert [json.loads(message)["n"] for message in sink.messages] == [0, 1, 2]
    for kind, value, wanted in (
        ("text/csv", ["a", "b,c"], b'a,"b,c"'),
        ("application/x-protobuf-fixed", b"raw", b"raw"),
    ):
        path = tmp_path / kind.replace("/", "-")
        with Journals.open(path, content_type=kind) as journals:
            (spec,) = journals.partitions()
            target = spec.name, spec.content_type
            Publisher(journals, mapping=lambda _, to=target: to).publish_committed(  # type: ignore[misc]
                value
            )
        sink = MemorySink()
        await plainly(JournalSource(path, reader="r"), sink)
        assert sink.messages == [wanted]


async def test_large_frames_pass_in_runs(tmp_path: Path) -> None:
    """Runs are bounded, however much was appended at once."""
    path = tmp_path / "set"
    run = numbers(20_000)
    with Journals.open(path, content_type=RUN) as journals:
        (spec,) = journals.partitions()
        publisher = Publisher(journals, mapping=lambda _: (spec.name, RUN))
        publisher.publish_committed(RunMessage(run))
        publisher.publish_committed(RunMessage([bytes(5 << 20)] * 2))
    source, sizes, found = JournalSource(path, reader="r"), [], []
    async for item in source.runs():
        if not isinstance(item, Position | InputDamaged):
            sizes.append(len(item))
            found += list(item)
    await source.aclose()
    assert found == [*run, *[bytes(5 << 20)] * 2]
    assert max(sizes) == 8192
    assert sizes[-2:] == [1, 1]


async def test_message_beyond_a_frame_is_refused(tmp_path: Path) -> None:
    """Otherwise it would be appended but never read."""
    source = MemorySource([[bytes(64 << 20)]])
    report = await Pipeline(
        name="p", source=source, sink=JournalSink(tmp_path / "set")
    ).run()
    assert isinstance(report.error, SinkFailed)
    assert "expected no more than 67104768 bytes in a journal" in str(report.error)


async def test_epoch_waits_for_readers(tmp_path: Path) -> None:
    """It begins when they have read on, or when the run drains."""
    path = tmp_path / "set"
    sink = JournalSink(path, limit="1KiB")
    await plainly(MemorySource([[b"a" * 2000]]), sink)
    with Journals.open(path) as journals, journals.read_committed("r"):
        pass
    states = []
    for hurries in (False, True):
        sink = JournalSink(path)
        made = Pipeline(name="p", source=MemorySource([[b"b"]]), sink=sink)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(made.run)
            with anyio.fail_after(HANG):
                while not sink.activity:
                    await anyio.lowlevel.checkpoint()
            states.append(sink.activity)
            if hurries:
                made.drain()
                continue
            with Journals.open(path) as journals:
                assert len(list(journals.read_committed("r"))) == 1
        with Journals.open(path) as journals, journals.read_committed("r") as reader:
            # Read on after it, so that the next epoch has to wait again.
            assert not hurries or next(reader)
        if not hurries:
            with Journals.open(path) as journals:
                journals.forget("r")
                await plainly(MemorySource([[b"c" * 2000]]), JournalSink(path))
                with journals.read_committed("r"):
                    pass
    assert set(states) == {f"waiting for readers of {path} (limit)"}
    assert [m[:1] for m in committed(path)] == [b"a", b"b", b"c", b"b"]


async def test_epoch_that_waits_follows_the_limit_of_another_process(
    tmp_path: Path,
) -> None:
    """It begins once the set's limit is removed (issue 24)."""
    path = tmp_path / "set"
    await plainly(MemorySource([[b"a" * 2000]]), JournalSink(path, limit="1KiB"))
    with Journals.open(path) as journals:
        journals.read_committed("r").close()
    sink = JournalSink(path)
    made = Pipeline(name="p", source=MemorySource([[b"b"]]), sink=sink)
    with anyio.fail_after(HANG):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(made.run)
            while not sink.activity:
                await anyio.lowlevel.checkpoint()
            with Journals.open(path) as journals:
                journals.set_retention(keep=None, limit=None)
    assert [m[:1] for m in committed(path)] == [b"a", b"b"]


async def test_run_that_fails_reports_what_it_has_appended(tmp_path: Path) -> None:
    """With at-least-once delivery it stays appended."""
    sink = JournalSink(tmp_path / "s")
    source = ScriptedSource([[b"a", b"b"], [b"c"], unreadable()])
    report = await Pipeline(name="p", source=source, sink=sink).run()
    assert report.status == "failed"
    appended = committed(tmp_path / "s")
    assert appended[:2] == [b"a", b"b"]
    assert report.ledger[-1].done == len(appended)
    assert sink.landed().endswith("output incomplete")


async def test_position_waits_until_what_is_before_it_is_on_the_disk(
    tmp_path: Path,
) -> None:
    """It is stored after a flush, not once its messages are appended (issue 24)."""
    wait = Wait()
    source = ScriptedSource(
        [[b"a"], Position(1), [b"b"], Position(2), [b"c"], Position(3), wait]
    )
    sink = JournalSink(tmp_path / "s")
    made = Pipeline(name="p", source=source, sink=sink)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(made.run)
        with anyio.fail_after(HANG):
            await wait.reached.wait()
        assert committed(tmp_path / "s")[:2] == [b"a", b"b"]
        assert not source.stored.is_set()
        wait.released.set()
    assert source.stored.is_set()


@pytest.mark.parametrize("exactly", [False, True])
@pytest.mark.parametrize("failing", [1, 2])
async def test_append_that_is_not_on_the_disk_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exactly: bool, failing: int
) -> None:
    """Even if a later fsync succeeds, as the kernel reports an error once (issue 24)."""
    fsync, count = os.fsync, 0

    def failing_once(fd: int) -> None:
        nonlocal count
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".log"):
            count += 1
            if count == failing:
                raise OSError(5, "Input/output error")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", failing_once)
    source = MemorySource([[b"a"], [b"b"]])
    sink = JournalSink(tmp_path / "set", sync="append")
    delivery = Delivery(tmp_path / "state", exactly_once=exactly)
    made = Pipeline(name="p", source=source, sink=sink, delivery=delivery)
    report = await made.run()
    assert isinstance(report.error, SinkFailed)
    assert "Input/output error" in str(report.error)


async def test_runner_that_was_taken_over_commits_nothing(tmp_path: Path) -> None:
    """Its record fails, so its acknowledgements are not appended."""
    state = tmp_path / "state"

    def taking(step: str) -> None:
        if step == "written":
            take_over(state)

    sink = JournalSink(tmp_path / "set")
    report = await once(state, Numbers(20, 10), sink, taking)
    assert "taken over" in str(report.error)
    assert committed(tmp_path / "set") == []
    await once(state, Numbers(20, 10), JournalSink(tmp_path / "set"))
    assert committed(tmp_path / "set") == numbers(20)


@pytest.mark.parametrize("exactly", [False, True])
@pytest.mark.parametrize("other", ["b/set", "a/set"])
async def test_position_is_not_one_in_other_journals(
    tmp_path: Path, other: str, *, exactly: bool
) -> None:
    """Of the same name, or made anew at the same path (issue 24)."""

    async def run(path: str) -> Report:
        source = JournalSource(tmp_path / path, reader="r")
        sink: Sink = MemoryEpochSink(MemoryEpochs()) if exactly else MemorySink()
        delivery = Delivery(tmp_path / "state", exactly_once=exactly)
        return await Pipeline(
            name="p", source=source, sink=sink, delivery=delivery
        ).run()

    await plainly(Numbers(20, 10), JournalSink(tmp_path / "a/set"))
    assert (await run("a/set")).error is None
    (tmp_path / "a").rename(tmp_path / "kept")
    await plainly(Numbers(40, 10), JournalSink(tmp_path / other))
    report = await run(other)
    assert (
        f"can't read the journals in {tmp_path / other}: set: the position is in"
        in (str(report.error))
    )
    await plainly(Numbers(5, 5), JournalSink(tmp_path / "kept/set"))
    report = await run("kept/set")
    assert (report.error, report.ledger[0].produced) == (None, 5)


async def test_position_is_one_in_journals_without_an_id(tmp_path: Path) -> None:
    """As in sets that were made before sets had one (issue 24)."""
    found, path = [], tmp_path / "set" / "spec.json"
    for known in (False, True, False):
        await plainly(Numbers(20, 10), JournalSink(path.parent))
        spec = json.loads(path.read_text())
        path.write_text(json.dumps({**spec, "id": "ab" if known else ""}))
        sink = MemorySink()
        await plainly(JournalSource(path.parent, reader="r"), sink, tmp_path / "state")
        found += sink.messages
    assert found == numbers(20) * 3


async def test_reader_that_was_taken_over_lets_its_name_go(tmp_path: Path) -> None:
    """Even while it is alive but stopped; its position no longer counts."""
    state, epochs = tmp_path / "state", MemoryEpochs()
    await plainly(Numbers(20, 10), JournalSink(tmp_path / "set", sync="append"))

    def source() -> JournalSource:
        return JournalSource(tmp_path / "set", reader="r", cut=(1, 1 << 20))

    class Stopping(MemoryEpochSink):
        async def perform(self) -> None:
            take_over(state)
            next_run = await once(state, source(), MemoryEpochSink(epochs), messages=4)
            assert next_run.error is None

        performs = True

    report = await once(state, source(), Stopping(epochs), messages=4)
    assert "taken over" in str(report.error)
    assert epochs.messages == numbers(20)
    with Journals.open(tmp_path / "set", create=False) as journals:
        (log,) = [journals.log(spec.name) for spec in journals.select()]
        (reader,) = journals.readers()
        assert reader.checkpoint.offsets == {log.name: log.end()}
        with journals.read_committed("r"), pytest.raises(ReaderBusy):
            journals.read_committed("r", load="other")


async def test_writer_that_was_taken_over_appends_nothing_more(tmp_path: Path) -> None:
    """Not even at least once, where each run is committed at once (issue 24)."""
    state = tmp_path / "state"

    class Taken(Numbers):
        async def runs(self) -> AsyncGenerator[Run | Position, None]:
            async with aclosing(super().runs()) as items:
                async for item in items:
                    if item == [b"3"]:
                        take_over(state)
                    yield item

    made = Pipeline(
        name="p",
        source=Taken(20, 1),
        sink=JournalSink(tmp_path / "set"),
        delivery=Delivery(state),
    )
    with anyio.fail_after(HANG):
        report = await made.run()
    assert "taken over" in str(report.error)
    assert committed(tmp_path / "set") == numbers(3)


async def test_start_takes_back_what_one_before_it_has_appended(
    tmp_path: Path,
) -> None:
    """Else readers would need it and all after it; others' appends are left alone."""
    with Journals.open(tmp_path / "set", content_type=RUN) as journals:
        journals.read_committed("r").close()
    state, other = tmp_path / "state", tmp_path / "other"
    for folder in (other, state, state):
        sink = JournalSink(tmp_path / "set")
        report = await once(folder, Numbers(20, 10), sink, stop_at("written", 1))
        assert report.status == "failed"
    await once(state, Numbers(20, 10), JournalSink(tmp_path / "set"))
    assert committed(tmp_path / "set", name="r") == numbers(20)
    with Journals.open(tmp_path / "set", create=False) as journals:
        (reader,) = journals.readers()
        begun = [state.begin >= 0 for state in reader.checkpoint.states]
        assert begun == [True, False, False, False]
        (left,) = journals.storage.names("open")
        assert left == f"{CommitRecord.latest(other).load}-1"


@pytest.mark.parametrize("exactly", [True, False])
@pytest.mark.parametrize("end", [True, False])
async def test_what_was_read_is_on_the_disk_before_its_position_is_recorded(
    exactly: bool, end: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each epoch, and at the end of the run."""
    await plainly(Numbers(40, 10), JournalSink(tmp_path / "set"))
    steps = list[tuple[str, object]]()

    def secure(_: CommittedReader, position: Checkpoint) -> None:
        steps.append(("secured", position.offsets))

    def keep(self: Delivery, record: CommitRecord) -> None:
        steps.append(("recorded", record.position["offsets"]))  # type: ignore[index]
        kept(self, record)

    kept = Delivery.keep
    monkeypatch.setattr(CommittedReader, "secure", secure)
    monkeypatch.setattr(Delivery, "keep", keep)
    cut = (1 << 16, 1 << 20) if end else (1, 1 << 20)
    source = JournalSource(tmp_path / "set", reader="r", cut=cut)
    state, sink = tmp_path / "state", MemoryEpochSink(MemoryEpochs())
    if exactly:
        await once(state, source, sink, messages=1)
    else:
        await plainly(source, MemorySink(), state)
    recorded = [offsets for step, offsets in steps if step == "recorded" and offsets]
    assert recorded
    for offsets in recorded:
        before = steps[: steps.index(("recorded", offsets))]
        assert ("secured", offsets) in before


def test_what_a_crash_has_left_of_a_note_is_passed_over() -> None:
    """The note is not synced: a page may be zeros, and its end may be missing."""
    line = note_of(AckIntent("set/part-000", b"ack"))
    assert noted(line + line) == [["set/part-000", "61636b"]] * 2
    for left in (b"\0" * 40 + line, line[:-9], line[9:], b"\xff\n", b"7\n"):
        assert noted(left + b"\n" + line) == [["set/part-000", "61636b"]]


async def test_what_is_rolled_back_is_before_a_position(tmp_path: Path) -> None:
    """Otherwise the reader would retain it, and writers would wait for the reader."""
    state = tmp_path / "state"
    for step in ("written", "recorded"):
        sink = JournalSink(tmp_path / "set")
        await once(state, Numbers(20, 10), sink, stop_at(step, 1))
    source = JournalSource(tmp_path / "set", reader="r")
    await plainly(source, kept := MemorySink())
    assert kept.messages == []
    with Journals.open(tmp_path / "set", create=False) as journals:
        (reader,) = journals.readers()
        end = journals.log("set/part-000").end()
        assert reader.checkpoint.offsets == {"set/part-000": end}


async def test_acknowledgements_of_a_journal_that_is_gone_are_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning names the journal."""
    sink = JournalSink(tmp_path / "set")
    intent = "00" * (FIXED_FRAME_HEADER_LENGTH + 16)
    sink.begin(_epochs([["set/part-007", intent]]))
    async with sink:
        pass
    assert "set/part-007" in caplog.text


@pytest.mark.parametrize("intents", [[1], [["a", "xx"]], [["a", "00"]], {"a": 1}, 7])
def test_record_of_something_else_is_refused(intents: object) -> None:
    """Its intents are not those that journals have recorded."""
    with pytest.raises(SinkFailed, match="state reset"):
        JournalSink(Path("set")).begin(_epochs(intents))


@pytest.mark.parametrize(
    "position",
    [
        7,
        {},
        {"offsets": {}, "states": [1]},
        {"offsets": {"set/part-000": "5"}, "states": []},
        {"offsets": {}, "states": [], "begun": [1]},
        None,
    ],
)
def test_position_of_something_else_is_refused(position: object) -> None:
    """The error comes before anything is read."""
    with pytest.raises(SourceFailed, match="state reset"):
        JournalSource(Path("set"), reader="r").resume(position)


async def test_position_of_another_set_is_refused(tmp_path: Path) -> None:
    """As if the set had been removed and created again."""
    state = tmp_path / "state"
    await plainly(MemorySource([[b"a"]]), JournalSink(tmp_path / "one" / "set"))
    source = JournalSource(tmp_path / "one" / "set", reader="r")
    await plainly(source, MemorySink(), state)
    Journals.open(tmp_path / "two" / "set", content_type=RUN).close()
    source = JournalSource(tmp_path / "two" / "set", reader="r")
    report = await Pipeline(
        name="p", source=source, sink=MemorySink(), delivery=Delivery(state)
    ).run()
    assert isinstance(report.error, SourceFailed)
    assert "it is not the journal that was read" in str(report.error)


async def test_set_of_other_messages_is_refused(tmp_path: Path) -> None:
    """So are a set with other partitions, and a folder that is no set."""
    Journals.open(tmp_path / "json").close()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    for sink, text in (
        (JournalSink(tmp_path / "json"), "their content type is application/x-ndjson"),
        (JournalSink(tmp_path / "json", partitions=3), "it has 1 partition, not 3"),
        (JournalSink(tmp_path / "other"), "it is not a set of journals"),
    ):
        report = await Pipeline(name="p", source=MemorySource([]), sink=sink).run()
        assert isinstance(report.error, SinkFailed)
        assert text in str(report.error)


@pytest.mark.parametrize("skips", [False, True])
async def test_damage_stops_the_source_or_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, skips: bool
) -> None:
    """As the setting demands."""
    path = tmp_path / "set"
    await plainly(MemorySource([[b"one"], [b"two"], [b"three"]]), JournalSink(path))
    (file,) = path.glob("part-000/*.log")
    data = bytearray(file.read_bytes())
    data[data.index(b"two")] ^= 1
    file.write_bytes(data)
    sink = MemorySink()
    source = JournalSource(path, reader="r", skips=skips)
    report = await Pipeline(name="p", source=source, sink=sink).run()
    if skips:
        assert sink.messages == [b"one", b"three"]
        assert "damaged at offset" in caplog.text
        # Without dead letters it is only counted.
        assert [account.skipped for account in report.ledger] == [1, 0]
    else:
        assert "damaged at offset" in str(report.error)


async def test_invalid_message_is_named_with_its_journal(tmp_path: Path) -> None:
    """So is the setting with which the pipeline reads on (issue 24)."""
    path = tmp_path / "set"
    with Journals.open(path, partitions=2) as journals:
        journals.append("set/part-001", b"no json\n")
    source = JournalSource(path, reader="r")
    report = await Pipeline(name="p", source=source, sink=MemorySink()).run()
    assert str(report.error).startswith(
        f"stage extract: can't read the journals in {path}: set/part-001: invalid"
        " application/x-ndjson at offset 32: "
    )
    assert "; 'on_damage: skip' reads what follows; " in str(report.error)


@settings(deadline=None, max_examples=12)
@given(
    bad=st.sets(st.integers(0, 5)),
    lines=st.sets(st.integers(0, 5)),
    crashes=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(1, 4)), max_size=3),
    bound=st.integers(1, 4),
)
@example(bad={1, 2, 4}, lines={0, 2, 5}, crashes=[("aside", 2)], bound=2)
def test_damage_that_is_passed_over_is_one_dead_letter_for_each_place(
    *,
    bad: set[int],
    lines: set[int],
    crashes: list[tuple[str, int]],
    bound: int,
) -> None:
    """Wherever runs are interrupted, none is lost and none comes twice (issue 24)."""

    async def all_runs(folder: Path) -> list[int]:
        counts: list[int] = []
        for step, number in [*crashes, ("never", 1)]:
            at = stop_at(step, number)
            source = JournalSource(
                folder / "in", reader="r", skips=True, cut=(bound, 1 << 20)
            )
            sink = Faulty(folder / "out", at)
            delivery = Delivery(
                folder / "state",
                exactly_once=True,
                bounds=Bounds(messages=bound, seconds=3600),
            )
            delivery.at = at
            letters = DeadLetters(folder / "state", pipeline="p")
            with anyio.fail_after(HANG):
                report = await Pipeline(
                    name="p",
                    source=source,
                    sink=sink,
                    dead_letters=letters,
                    delivery=delivery,
                ).run()
            # A run that finds everything loaded reads nothing.
            counts = report.ledger[0].counts[:3] if report.ledger.moving else counts
            if report.status == "done":
                return counts
            assert isinstance(report.error, Stopped), report.error
        raise AssertionError("unreachable: nothing stops the last one")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        with Journals.open(path / "in") as journals:
            (spec,) = journals.partitions()
            publisher = Publisher(
                journals, mapping=lambda _: (spec.name, spec.content_type)
            )
            for n in range(6):
                publisher.publish_committed({"number": n, "word": "x" * n})
                if n in lines:
                    journals.append(spec.name, b"no json %d\n" % n)
            # Damage at the end needs something after it.
            publisher.publish_committed({"number": 6})
        (file,) = (path / "in").glob("part-000/*.log")
        data = bytearray(file.read_bytes())
        for n in bad:
            data[data.index(b'"number":%d,' % n)] ^= 1
        file.write_bytes(data)
        counts = anyio.run(all_runs, path)
        found = [json.loads(message)["number"] for message in committed(path / "out")]
        assert sorted(found) == [n for n in range(7) if n not in bad]
        letters = [
            letter
            for letter in Settled(path / "state" / "dead_letters").letters("extract")
            if isinstance(letter, DeadLetter)
        ]
        # Consecutive damaged groups are one place.
        places = [n for n in bad if n - 1 not in bad or n - 1 in lines]
        assert len(letters) == len(places) + len(lines)
        assert counts == [len(letters), 0, len(letters)]
        assert len({letter.id for letter in letters}) == len(letters)
        whole = b"".join(letter.message for letter in letters)
        for n in bad:
            assert b'"word":"%s"' % (b"x" * n) in whole
        for n in lines:
            assert b"no json %d\n" % n in whole
        for letter in letters:
            assert letter.kind == "InputDamaged"
            assert "in/part-000: " in letter.error
            assert "offset" in letter.error


async def test_letter_of_damage_has_as_much_as_is_bounded(tmp_path: Path) -> None:
    """A group may be large, but the letter has no more than a mebibyte of it."""
    path = tmp_path / "set"
    messages = [[b"one"], [bytes(3 << 20)], [b"three"]]
    await plainly(MemorySource(messages), JournalSink(path))
    (file,) = path.glob("part-000/*.log")
    data = bytearray(file.read_bytes())
    data[data.index(bytes(1000)) + 500] ^= 1
    file.write_bytes(data)
    source = JournalSource(path, reader="r", skips=True)
    (damage,) = [item async for item in source.runs() if isinstance(item, InputDamaged)]
    await source.aclose()
    assert len(damage.data) == 1 << 20
    assert data.find(damage.data) > 0


@pytest.mark.parametrize("broken", [False, True])
async def test_what_waits_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, broken: bool
) -> None:
    """In bytes and seconds; a failing meter does no harm (issue 24)."""
    path, meter = tmp_path / "set", PrometheusMeter()
    if broken:
        meter.gauge = None  # type: ignore[assignment, method-assign]
    await plainly(MemorySource([[b"one"], [b"two"]]), JournalSink(path))
    (file,) = path.glob("part-000/*.log")
    size = file.stat().st_size
    shown: list[str] = []

    class Observing(MemorySink):
        async def write(self, run: Run) -> None:
            await super().write(run)
            await plainly(MemorySource([run]), JournalSink(path))
            with Journals.open(path) as journals:
                *_, last = journals.log("set/part-000").groups(0)
            monkeypatch.setattr("time.time", lambda: last.time / 1e9 + 40)
            await source.observe()
            monkeypatch.undo()
            shown.append(meter.render())

    source = JournalSource(path, reader="r", meter=meter)
    await source.observe()
    assert meter.render() == ""
    async with aclosing(source.runs()) as items:
        async for item in items:
            if not isinstance(item, Position | InputDamaged):
                await Observing().write(item)
                break
    name = 'etlstage_journal_unread_bytes{reader="r",stage="extract"}'
    added = file.stat().st_size - size
    since = name.replace("bytes", "seconds")
    if not broken:
        assert f"{name} {float(added)}" in shown[0]
        assert f"{since} 40.0" in shown[0]
    await source.aclose()
    assert broken or f"{name} 0.0" in meter.render()
    assert broken or f"{since} 0.0" in meter.render()


async def test_source_is_observed_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if no messages come (issue 24)."""
    monkeypatch.setattr("etlstage.pipeline.pipeline._LOOK", 0.001)
    Journals.open(tmp_path / "set", content_type=RUN).close()

    class Observed(JournalSource):
        async def observe(self) -> None:
            made.drain()

    source = Observed(tmp_path / "set", reader="r", follow=True)
    made = Pipeline(name="p", source=source, sink=MemorySink())
    with anyio.fail_after(HANG):
        assert (await made.run()).status == "drained"


async def test_name_is_for_one_reader_at_a_time(tmp_path: Path) -> None:
    """A second reader's error names the reader."""
    path = tmp_path / "set"
    await plainly(MemorySource([[b"a"]]), JournalSink(path))
    with Journals.open(path) as journals, journals.read_committed("r"):
        source = JournalSource(path, reader="r")
        report = await Pipeline(name="p", source=source, sink=MemorySink()).run()
    assert "reader 'r' of set is in use" in str(report.error)
    await source.aclose()


async def test_disk_that_is_full_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run continues."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    sink, state = JournalSink(tmp_path / "set"), tmp_path / "state"
    with monkeypatch.context() as patched:
        patched.setattr("etlstage.journal.storage.FolderStorage.append", full)
        report = await once(state, Numbers(20, 10), sink)
    assert "can't append to the journals" in str(report.error)
    again = await once(state, Numbers(20, 10), JournalSink(tmp_path / "set"))
    assert again.status == "done"
    assert committed(tmp_path / "set") == numbers(20)


def _next(targets: Iterator[tuple[str, str]], _: object) -> tuple[str, str]:
    return next(targets)


def _epochs(intents: object) -> Epochs:
    return Epochs("load", 1, once=True, check=lambda: None, intents=intents)
