"""The plan has each committed frame once, whenever the query is restarted."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql.types import BinaryType, LongType, StructField, StructType

from etlstage.journal import (
    JournalDamaged,
    JournalError,
    Journals,
    Publisher,
    RunMessage,
)
from etlstage.journal.log import JournalLog
from etlstage.sequencing import AckIntent, Flags, flags_of
from etlstage.spark.journal.options import JournalReading, SetFolder
from etlstage.spark.journal.plan import FrameRange, Offset, Planner
from etlstage.spark.journal.reader import JournalRows

RUNS = "application/x-etlstage-run"


@pytest.fixture(params=[RUNS, "application/x-ndjson"])
def journals(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Journals]:
    """Give a set of two journals with small segments."""
    made = Journals.open(
        tmp_path / "set", partitions=2, content_type=request.param, segment=2000
    )
    with made:
        yield made


def publisher(journals: Journals) -> Publisher:
    """Return a new producer."""
    specs = journals.select()

    def mapping(message: object) -> tuple[str, str]:
        number = int(text(message))
        return specs[number % len(specs)].name, journals.content_type

    return Publisher(journals, mapping=mapping)


def message(journals: Journals, number: int) -> object:
    """Return a message with a number."""
    if journals.content_type == RUNS:
        return RunMessage([b"%d" % number])
    return {"n": number}


def text(message: object) -> str:
    """Return the number of a message."""
    if isinstance(message, RunMessage):
        return next(iter(message.run)).decode()
    return str(message["n"])  # type: ignore[index]


def planner(journals: Journals, **settings: object) -> Planner:
    """Return the planner of a query that starts."""
    path = journals.storage.root  # type: ignore[attr-defined]
    return Planner(JournalReading(path=path, **settings))  # type: ignore[arg-type]


def numbers(journals: Journals, tasks: list[list[FrameRange]]) -> list[int]:
    """Return the numbers in the frames of tasks."""
    found = []
    for journal, begin, end, frames in (part for task in tasks for part in task):
        own = [
            int(text(envelope.message))
            for envelope in journals.read_uncommitted(journal, begin, end)
            if flags_of(envelope.message.uuid) != Flags.ACK_TXN
        ]
        assert len(own) == frames
        found += own
    return found


def acknowledge(journals: Journals, intents: list[AckIntent]) -> None:
    """Append acknowledgement intents."""
    for journal, intent in intents:
        journals.append(journal, intent)


def test_an_open_transaction_is_of_the_batch_that_sees_its_end(
    journals: Journals,
) -> None:
    """Even if the query is restarted meanwhile, with its offset read from text."""
    one, two = publisher(journals), publisher(journals)
    for n in (0, 2, 4):
        one.publish_uncommitted(message(journals, n))
        two.publish_committed(message(journals, 10 + n))
    plan = planner(journals)
    first = plan.next(start := plan.initial())
    assert numbers(journals, first.tasks) == [10, 12, 14]
    assert plan.next(first.end).end == first.end
    acknowledge(journals, one.build_ack_intents())
    again = planner(journals)
    assert numbers(journals, again.between(start, first.end)) == [10, 12, 14]
    second = again.next(first.end)
    assert numbers(journals, second.tasks) == [0, 2, 4]
    assert plan.next(first.end) == second
    assert planner(journals).between(first.end, second.end) == second.tasks
    assert plan.next(second.end).tasks == []


def test_a_batch_ends_behind_what_is_on_the_disk(
    journals: Journals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark stores its end, which must not outlive the data before it."""
    secured: dict[str, int] = {}
    monkeypatch.setattr(
        JournalLog, "secure", lambda log, at: secured.update({log.name: at})
    )
    publisher(journals).publish_committed(message(journals, 1))
    plan = planner(journals)
    batch = plan.next(plan.initial())
    ends = {name: at for name, at in batch.end.items() if name != "set"}
    assert secured == {name: json.loads(at)[0] for name, at in ends.items()}
    secured.clear()
    plan.next(batch.end)
    assert secured == {}


def test_what_is_rolled_back_is_never_read(journals: Journals) -> None:
    """Neither are duplicates; with read_uncommitted it is read."""
    lost, kept = publisher(journals), publisher(journals)
    lost.publish_uncommitted(message(journals, 0))
    kept.publish_uncommitted(message(journals, 2))
    intents = kept.build_ack_intents()
    acknowledge(journals, intents + intents)
    plan = planner(journals)
    batch = plan.next(plan.initial())
    assert numbers(journals, batch.tasks) == [2]
    plan = planner(journals, read_uncommitted=True)
    batch = plan.next(plan.initial())
    assert numbers(journals, batch.tasks) == [0, 2]
    assert plan.next(batch.end).end == batch.end
    lost.publish_uncommitted(message(journals, 4))
    assert numbers(journals, plan.next(batch.end).tasks) == [4]


@pytest.mark.parametrize("seed", range(6))
def test_batches_have_each_message_once(journals: Journals, seed: int) -> None:
    """All committed messages, in order, for any writers, limits and restarts."""
    draw = random.Random(seed)  # noqa: S311 - repeatable
    writers = [publisher(journals) for _ in range(3)]
    opened: dict[int, list[int]] = {n: [] for n in range(3)}
    committed: list[int] = []
    settings = {
        "max_messages": draw.choice([None, 1, 3]),
        "partition_bytes": draw.choice([1, 300, 1 << 20]),
    }
    plan = planner(journals, **settings)
    offset = plan.initial()
    found: list[int] = []
    steps: list[tuple[Offset, Offset]] = []
    for number in range(150):
        writer = draw.randrange(3)
        writers[writer].publish_uncommitted(message(journals, number))
        opened[writer].append(number)
        if draw.random() < 0.2:
            acknowledge(journals, writers[writer].build_ack_intents())
            committed += opened[writer]
            opened[writer] = []
        if draw.random() < 0.05:
            writers[writer], opened[writer] = publisher(journals), []
        if draw.random() < 0.3:
            batch = plan.next(offset)
            found += numbers(journals, batch.tasks)
            steps.append((offset, batch.end))
            offset = batch.end
        if draw.random() < 0.1:
            plan.close()
            plan = planner(journals, **settings)
    while (batch := plan.next(offset)).tasks:
        most = settings["max_messages"]
        assert most is None or sum(r.frames for t in batch.tasks for r in t) <= most
        found += numbers(journals, batch.tasks)
        offset = batch.end
    for parity in (0, 1):
        own = [n for n in committed if n % 2 == parity]
        assert [n for n in found if n % 2 == parity] == own
    again = planner(journals, **settings)
    repeated = [n for at, to in steps for n in numbers(journals, again.between(at, to))]
    assert sorted(repeated) == sorted(found[: len(repeated)])


def test_where_a_query_begins_and_ends(journals: Journals) -> None:
    """It begins at the end or at a time, and ends with the data when it was frozen."""
    writer = publisher(journals)
    writer.publish_committed(message(journals, 0))
    plan = planner(journals, from_="end")
    offset = plan.initial()
    writer.publish_committed(message(journals, 2))
    plan.freeze()
    writer.publish_committed(message(journals, 4))
    journals.add_partitions(1)
    writer.publish_committed(message(journals, 6))
    batch = plan.next(offset)
    assert numbers(journals, batch.tasks) == [2]
    assert plan.next(batch.end).tasks == []
    plan = planner(journals, from_="2100-01-01T00:00:00Z")
    assert plan.next(plan.initial()).tasks == []
    plan = planner(journals, from_="2001-01-01T00:00:00Z")
    assert len(numbers(journals, plan.next(plan.initial()).tasks)) == 4


def test_a_name_registers_what_is_needed(journals: Journals) -> None:
    """From the start of the first batch on; its position follows the commits."""
    writer = publisher(journals)
    writer.publish_committed(message(journals, 0))
    plan = planner(journals, reader="billing")
    offset = plan.initial()
    batch = plan.next(offset)
    (known,) = journals.readers()
    assert set(known.needs.values()) == {0}
    plan.commit(batch.end)
    (known,) = journals.readers()
    assert max(known.needs.values()) > 0
    with pytest.raises(JournalError, match="reader 'billing' of set is in use"):
        planner(journals, reader="billing").next(offset)
    plan.close()
    writer.publish_committed(message(journals, 2))
    again = planner(journals, reader="billing")
    assert numbers(journals, again.next(again.initial()).tasks) == [2]
    again.close()


@pytest.mark.parametrize("read_uncommitted", [False, True])
def test_a_repeated_batch_has_no_other_frames(
    journals: Journals, *, read_uncommitted: bool
) -> None:
    """Retention may drop data of a journal that was added since (issue 24)."""
    settings = {"read_uncommitted": read_uncommitted}
    plan = planner(journals, **settings)
    start = plan.initial()
    assert plan.next(start).tasks == []
    journals.add_partitions(1)
    name = next(spec.name for spec in journals.select() if spec.name not in start)
    writer = Publisher(journals, mapping=lambda _: (name, journals.content_type))
    for n in range(60):
        writer.publish_committed(message(journals, n))
    batch = plan.next(start)
    assert planner(journals, **settings).between(start, batch.end) == batch.tasks
    for n in range(60, 80):
        writer.publish_committed(message(journals, n))
    later = plan.next(batch.end)
    assert numbers(journals, later.tasks) == [*range(60, 80)]
    log = journals.byte_log(name)
    assert isinstance(log, JournalLog)
    assert log.drop(log.segments()[1])
    with pytest.raises(JournalError, match=f"{name}: offset 0 has been dropped"):
        planner(journals, **settings).between(start, batch.end)
    again = planner(journals, **settings).between(batch.end, later.end)
    assert again == later.tasks


def test_a_checkpoint_of_other_journals_is_refused(
    journals: Journals, tmp_path: Path
) -> None:
    """If its frames, or its journals, are not there."""
    publisher(journals).publish_committed(message(journals, 0))
    plan = planner(journals)
    start = without_id(plan.initial())
    end = without_id(plan.next(start).end)
    fewer = Journals.open(tmp_path / "other", name="set")
    with pytest.raises(JournalError, match="has 1 frames, but the journal has only 0"):
        planner(fewer).between(start, end)
    renamed = {f"other/{name}": place for name, place in end.items()}
    with pytest.raises(JournalError, match="in the checkpoint, but does not exist"):
        planner(fewer).between({}, renamed)


def without_id(offset: Offset) -> Offset:
    """Return an offset as it was before offsets had the id of the set."""
    return {name: place for name, place in offset.items() if name != "set"}


def test_checkpoint_of_a_set_made_anew_is_refused(
    journals: Journals, tmp_path: Path
) -> None:
    """An offset without an id is accepted (issue 24)."""
    publisher(journals).publish_committed(message(journals, 0))
    plan = planner(journals, reader="billing")
    start = plan.initial()
    end = plan.next(start).end
    plan.close()
    path, old = tmp_path / "set", journals.id
    path.rename(tmp_path / "old")
    with Journals.open(path, partitions=2, content_type=journals.content_type) as made:
        for number in (2, 4, 6):
            publisher(made).publish_committed(message(made, number))
        refused = (
            f"^set: the checkpoint is of the set with id {old}, but this set has id"
            f" {made.id}: it is not the set that was read; set the path of that one, or"
            " another checkpointLocation to start anew$"
        )
        plan = planner(made, reader="billing")
        with pytest.raises(JournalError, match=refused):
            plan.next(end)
        for first in start, without_id(start):
            with pytest.raises(JournalError, match=refused):
                plan.between(first, end)
        assert made.readers() == []
        plan.close()
        plan = planner(made)
        batch = plan.next(without_id(end))
        assert len(numbers(made, batch.tasks)) == 2
        assert plan.next(batch.end).tasks == []
        plan.close()


def test_set_made_anew_while_a_query_runs_is_refused(
    journals: Journals, tmp_path: Path
) -> None:
    """Its next batch would begin at the offset in the set before (issue 24)."""
    plan = planner(journals)
    end = plan.next(plan.initial()).end
    (tmp_path / "set").rename(tmp_path / "old")
    Journals.open(tmp_path / "set", partitions=2).close()
    with pytest.raises(JournalError, match="is of the set with id"):
        plan.next(end)
    plan.close()


def rows(
    journals: Journals, tasks: list[list[FrameRange]], reading: JournalReading
) -> list[int]:
    """Return the numbers in the rows that tasks read."""
    made = JournalRows(
        SetFolder.seen(reading.path),
        reading,
        StructType([StructField("value", BinaryType())]),
    )
    batches = [batch for task in tasks for batch in made.read(task)]
    return [number_of(value) for one in batches for value in one.column(0).to_pylist()]


def number_of(value: bytes) -> int:
    """Return the number of a message's bytes."""
    return json.loads(value)["n"] if value.startswith(b"{") else int(value)


@pytest.mark.parametrize("on_damage", ["stop", "skip"])
def test_damage_is_passed_over_or_stops(journals: Journals, on_damage: str) -> None:
    """In headers, read by the driver, and in messages, read by tasks (issue 24)."""
    one, other = publisher(journals), publisher(journals)
    for number in range(0, 24, 2):
        one.publish_committed(message(journals, 1000 + number))
    other.publish_uncommitted(message(journals, 1002))
    one.publish_committed(message(journals, 1024))
    for journal, intent in other.build_ack_intents():
        journals.append(journal, intent)
    bad = {1004: 40, 1006: 4, 1016: 40, 1022: 9}
    files = [*journals.storage.root.glob("part-000/*.log")]  # type: ignore[attr-defined]
    # Digits alone may be in a UUID, too.
    before = b"" if journals.content_type == RUNS else b'"n":'
    for number, place in bad.items():
        for file in files:
            data = bytearray(file.read_bytes())
            at = data.find(before + b"%d" % number)
            if at >= 0:
                # A place in its group, whose header has 32 bytes.
                begin = data.rindex(b"ETJ1", 0, at)
                data[begin + place] ^= 1
                file.write_bytes(data)
    root = journals.storage.root  # type: ignore[attr-defined]
    reading = JournalReading(path=root, on_damage=on_damage, max_messages=4)  # type: ignore[arg-type]
    made = Planner(reading)
    offset, found = made.initial(), list[int]()

    def batches() -> None:
        nonlocal offset
        while (batch := made.next(offset)).tasks:
            found.extend(rows(journals, batch.tasks, reading))
            # Planned again from the checkpoint, the batch is the same.
            again = Planner(reading)
            assert again.between(offset, batch.end) == batch.tasks
            again.close()
            offset = batch.end

    if on_damage == "stop":
        with pytest.raises(JournalDamaged):
            batches()
    else:
        batches()
        wanted = [*range(1000, 1026, 2), 1002]
        assert sorted(found) == sorted(n for n in wanted if n not in bad)
    made.close()


def test_task_checks_what_it_reads(tmp_path: Path) -> None:
    """The driver reads the headers of large frames; a task must find all (issue 24)."""
    path = tmp_path / "set"
    with Journals.open(path, content_type=RUNS) as journals:
        (spec,) = journals.select()
        writer = Publisher(journals, mapping=lambda _: (spec.name, RUNS))
        for number in range(3):
            writer.publish_committed(RunMessage([b"%d" % number * (2 << 20)]))
        stops = JournalReading(path=path)
        skips = JournalReading(path=path, on_damage="skip")
        (file,) = path.glob("part-000/*.log")
        data = bytearray(file.read_bytes())
        data[data.index(b"1" * 99) + (1 << 20)] ^= 1
        file.write_bytes(data)
        made = Planner(stops)
        tasks = made.next(made.initial()).tasks
        made.close()
        (planned,) = tasks[0]
        assert planned.frames == 3
        with pytest.raises(JournalDamaged):
            rows(journals, tasks, stops)
        schema = StructType([StructField("offset", LongType())])
        made_rows = JournalRows(SetFolder.seen(path), skips, schema)
        assert sum(batch.num_rows for batch in made_rows.read(tasks[0])) == 2
        sound = journals.read_uncommitted(spec.name, on_error=lambda _: None)
        *_, third = [envelope.begin for envelope in sound]
        more = [planned._replace(begin=third, frames=2)]
        with pytest.raises(JournalError, match=r"1 frames from .* but 2 were planned"):
            list(made_rows.read(more))
        fewer = [planned._replace(frames=1)]
        with pytest.raises(JournalError, match=r"2 frames from .* but 1 were planned"):
            list(made_rows.read(fewer))
