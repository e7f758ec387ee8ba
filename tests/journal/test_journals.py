"""A set of journals: its spec, publishing into it, committed readers, retention."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from operator import itemgetter
from pathlib import Path
from threading import Event, Thread
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from etlstage.errors import ConfigError, EtlstageError
from etlstage.journal import (
    CommittedReader,
    FolderStorage,
    JournalDamaged,
    JournalError,
    Journals,
    LimitReached,
    MemoryStorage,
    OffsetGone,
    Publisher,
    ReaderBusy,
    modulo,
    rendezvous,
)
from etlstage.journal.account import verify
from etlstage.journal.reader import Registered
from etlstage.journal.retention import Retention
from etlstage.sequencing import (
    FIXED_FRAME_WORD,
    NO_UUID,
    AckIntent,
    Clock,
    FrameError,
    JsonMessage,
    UnexpectedEnd,
    clock_at,
)
from tests.patience import HANG

SECOND = 10**9

FORKED = """\
import fcntl, os, sys
from etlstage.journal import Journals

journals = Journals.open(sys.argv[1])
name = journals.partitions()[0].name
journals.append(name, b"before")
ready, is_ready = os.pipe()
go, may_go = os.pipe()
if not os.fork():
    section = journals.start_append(name)
    os.write(is_ready, b".")
    os.read(go, 1)
    section.release(b"child")
    os._exit(0)
os.read(ready, 1)
flock = fcntl.flock
fcntl.flock = lambda fd, how: flock(fd, how | fcntl.LOCK_NB)
try:
    journals.start_append(name).abandon()
except BlockingIOError:
    print("excluded")
fcntl.flock = flock
os.write(may_go, b".")
assert os.wait()[1] == 0
journals.append(name, b"parent")
"""
"""Forks while a set is in use, and appends in both processes."""

HELD = """\
import os, sys
from etlstage.journal import Journals, ReaderBusy

journals = Journals.open(sys.argv[1])
reader = journals.read_committed("billing")
ready, is_ready = os.pipe()
go, may_go = os.pipe()
if not os.fork():
    if sys.argv[2] == "child":
        reader.close()
    os.write(is_ready, b".")
    os.read(go, 1)
    os._exit(0)
os.read(ready, 1)
if sys.argv[2] == "parent":
    reader.close()
try:
    journals.read_committed("billing").close()
    print("free")
except ReaderBusy as error:
    print(str(error).replace(str(os.getpid()), "parent"))
os.write(may_go, b".")
assert os.wait()[1] == 0
"""
"""Forks while a reader is open, closes it in one process, and opens another."""


class Time:
    """A clock that stands still unless it is set."""

    def __init__(self) -> None:
        self.now = 1_000_000 * SECOND

    def __call__(self) -> int:
        """Return the current time, in nanoseconds."""
        return self.now


def memory(storage: MemoryStorage | None = None, **fields: Any) -> Journals:  # noqa: ANN401
    """Return a set of journals in memory."""
    storage = MemoryStorage() if storage is None else storage
    return Journals(storage=storage, **{"name": "orders", **fields})


def publisher(journals: Journals) -> Publisher:
    """Return a publisher that maps messages by a key."""
    return Publisher(journals, Clock(), mapping=modulo(lambda m: m["k"]))


def publish(journals: Journals, *numbers: int) -> None:
    """Publish committed messages."""
    one = publisher(journals)
    for number in numbers:
        one.publish_committed({"k": number})


def numbers(reader: CommittedReader) -> list[int]:
    """Return the numbers of the messages that a reader delivers."""
    return [number_of(envelope.message) for envelope in reader]


def number_of(message: object) -> int:
    """Return the number that was published in a message."""
    assert isinstance(message, JsonMessage)
    number: int = message["k"]
    return number


async def test_one_writes_and_others_read(tmp_path: Path) -> None:
    """Each reader gets each message once, at its own pace, also after a reopening."""
    async with Journals(tmp_path / "orders", partitions=4) as journals:
        writer = publisher(journals)
        for number in range(40):
            await writer.publish_committed({"k": number})
        assert len({spec.name for spec in journals.select()}) == 4
        reader = journals.read_committed(name="billing")
        found = [number_of(e.message) async for e in reader]
        assert sorted(found) == list(range(40))
        # One journal after the other.
        assert found != list(range(40))
    with Journals.open(tmp_path / "orders") as again:
        assert again.name == "orders"
        assert numbers(again.read_committed(name="billing")) == []
        assert sorted(numbers(again.read_committed(name="other"))) == list(range(40))
        publish(again, 40)
        assert numbers(again.read_committed(name="billing")) == [40]
        assert len(numbers(again.read_committed())) == 41
        assert [one.name for one in again.readers()] == ["billing", "other"]


@pytest.mark.process
def test_fork_excludes_parent_and_child_from_each_other(tmp_path: Path) -> None:
    """A set that was in use before a fork has locks of its own in the child (issue 24)."""
    command = [sys.executable, "-c", FORKED, str(tmp_path / "orders")]
    ended = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, timeout=HANG
    )
    assert ended.stdout == "excluded\n"
    with Journals.open(tmp_path / "orders") as journals:
        groups = journals.log("orders/part-000").groups(0)
        assert [group.data for group in groups] == [b"before", b"child", b"parent"]


@pytest.mark.process
@pytest.mark.parametrize(
    ("closes", "found"),
    [("parent", "^free$"), ("child", "'billing' .* is in use by process parent;")],
)
def test_name_is_held_by_the_process_that_took_it(
    tmp_path: Path, closes: str, found: str
) -> None:
    """A child neither keeps the name after its parent, nor releases it (issue 24)."""
    command = [sys.executable, "-c", HELD, str(tmp_path / "orders"), closes]
    ended = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, timeout=HANG
    )
    assert re.search(found, ended.stdout.strip())


def test_child_stores_no_position_of_its_parents_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent has read on since the fork (issue 24)."""
    with Journals.open(tmp_path / "orders") as journals:
        publish(journals, 1)
        reader = journals.read_committed("r")
        assert [reader.poll() is None for _ in range(2)] == [False, True]
        stored = journals.storage.load("readers/r.json")
        child = os.getpid() + 1
        monkeypatch.setattr("os.getpid", lambda: child)
        reader.close()
        assert journals.storage.load("readers/r.json") == stored


def test_transaction_is_read_when_it_is_acknowledged() -> None:
    """Readers get its messages only then, and never the acknowledgements themselves."""
    journals = memory()
    one, two = publisher(journals), publisher(journals)
    one.publish_uncommitted({"k": 1})
    two.publish_committed({"k": 2})
    one.publish_uncommitted({"k": 3})
    reader = journals.read_committed("r", ring=1)
    assert numbers(reader) == [2]
    (intent,) = one.build_ack_intents()
    for _ in range(2):
        journals.append(intent.journal, intent.intent)
    publish(journals, 4)
    assert numbers(journals.read_committed("r", ring=1)) == [1, 3, 4]


def test_publisher_continues_after_a_rollback() -> None:
    """It may publish committed messages, and begin a transaction (issue 24)."""
    journals, opened = memory(), list[AckIntent]()
    writer = Publisher(journals, mapping=modulo(itemgetter("k")), opening=opened.append)
    for rolled_back in (1, 2):
        writer.publish_uncommitted({"k": rolled_back})
        intents = writer.rollback_intents()
        assert intents == opened[-1:]
        for journal, intent in intents:
            journals.append(journal, intent)
        assert writer.rollback_intents() == writer.build_ack_intents() == []
    writer.publish_committed({"k": 3})
    writer.publish_uncommitted({"k": 4})
    for journal, intent in writer.build_ack_intents():
        journals.append(journal, intent)
    assert len(opened) == 3
    assert numbers(journals.read_committed(ring=0)) == [3, 4]


async def test_following_reader_waits_for_more() -> None:
    """It also follows journals that are added meanwhile."""
    storage = MemoryStorage()
    journals = memory(storage)
    found: list[int] = []
    done = anyio.Event()

    async def follow() -> None:
        async with journals.read_committed("r", follow=True) as reader:
            async for envelope in reader:
                found.append(number_of(envelope.message))
                if len(found) == 30:
                    break
        done.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        publish(journals, 0)
        while not found:
            await anyio.lowlevel.checkpoint()
        memory(storage).add_partitions(3)
        other = memory(storage)
        assert len(other.select()) == 4
        publish(other, *range(1, 30))
        with anyio.fail_after(HANG):
            await done.wait()
    assert sorted(found) == list(range(30))
    assert len(journals.select()) == 4


def test_message_counts_as_done_when_the_next_is_asked_for() -> None:
    """A reader that stops in the middle gets its last message again."""
    journals = memory()
    publish(journals, 1, 2, 3)
    with journals.read_committed("r") as reader:
        assert number_of(next(reader).message) == 1
        assert number_of(next(reader).message) == 2
    assert numbers(journals.read_committed("r")) == [2, 3]
    reader.close()


def test_position_may_be_stored_in_the_middle_of_a_transaction() -> None:
    """A reader that resumes there continues with the rest of the transaction."""
    storage = MemoryStorage()
    journals = memory(storage)
    writer = publisher(journals)
    for number in range(5):
        writer.publish_uncommitted({"k": number})
    for intent in writer.build_ack_intents():
        journals.append(intent.journal, intent.intent)
    reader = journals.read_committed("r")
    for _ in range(3):
        next(reader)
    reader.commit()
    # As if the process were killed: nothing more is stored, and the name is free.
    storage._held.clear()
    assert numbers(memory(storage).read_committed("r", ring=0)) == [2, 3, 4]


def test_positions_are_stored_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are stored every ``commit_every`` seconds."""
    journals = memory()
    publish(journals, 1, 2, 3)
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    reader = journals.read_committed("r", commit_every=5)
    before = journals.readers()[0].checkpoint
    next(reader)
    now[0] = 4.9
    next(reader)
    assert journals.readers()[0].checkpoint == before
    now[0] = 5.0
    next(reader)
    assert journals.readers()[0].checkpoint != before


def test_two_readers_of_one_name_are_refused(tmp_path: Path) -> None:
    """The error names the process that holds the name; names must be plain."""
    with Journals.open(tmp_path / "orders") as journals:
        with (
            journals.read_committed("r"),
            pytest.raises(ReaderBusy, match=f"is in use by process {os.getpid()};"),
        ):
            journals.read_committed("r")
        journals.read_committed("r").close()
        for name in ("", "../x", "a b"):
            with pytest.raises(JournalError, match="expected letters"):
                journals.read_committed(name)


@pytest.mark.parametrize(
    ("start", "found"),
    [
        ("beginning", [1, 2, 3]),
        ("end", []),
        (1_000_001.0, [2, 3]),
        (1_000_003.0, []),
        ({"orders/part-000": 0}, [1, 2, 3]),
        ({}, [1, 2, 3]),
    ],
)
def test_where_a_reader_begins(start: Any, found: list[int]) -> None:  # noqa: ANN401
    """``start`` applies only to a reader without a stored position."""
    time = Time()
    journals = memory(now=time)
    for number in (1, 2, 3):
        publish(journals, number)
        time.now += SECOND
    assert numbers(journals.read_committed("r", start=start)) == found
    assert numbers(journals.read_committed("r")) == []


@pytest.mark.parametrize(
    ("start", "error"),
    [
        ("2026-01-01", "start is '2026-01-01', expected 'beginning', 'end', a time in"),
        (
            {"orders/part-001": 3},
            "start: there is no journal 'orders/part-001' (did you",
        ),
        (float("nan"), "start is nan, expected 'beginning', 'end', a time in"),
        (float("inf"), "start is inf, expected 'beginning', 'end', a time in"),
        pytest.param(-(10**400), "start is -1000000000", id="huge"),
        (1e300, "start is 1e+300, expected 'beginning', 'end', a time in"),
    ],
)
def test_place_where_no_reader_begins(start: Any, error: str) -> None:  # noqa: ANN401
    """It is not the beginning (issue 24)."""
    journals = memory()
    for name in (None, "r"):
        with pytest.raises(ConfigError, match=re.escape(error)):
            journals.read_committed(name, start=start)
    assert not list(journals.readers())


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"ring": -1}, "ring is -1, expected a number of messages"),
        ({"ring": 1.5}, "ring is 1.5, expected a number of messages"),
        ({"ring": True}, "ring is True, expected a number of messages"),
        ({"commit_every": -1}, "commit_every is -1, expected 0 or more seconds"),
        ({"commit_every": math.nan}, "commit_every is nan, expected 0 or more seconds"),
        ({"commit_every": "1"}, "commit_every is '1', expected 0 or more seconds"),
        ({"commit_every": False}, "commit_every is False, expected 0 or more seconds"),
        ({"position": 5}, "position is 5, expected a Checkpoint"),
    ],
)
def test_wrong_arguments_of_a_reader(fields: dict[str, Any], error: str) -> None:
    """It is not registered, and keeps nothing (issue 24)."""
    journals = memory()
    with pytest.raises(ConfigError, match=error):
        journals.read_committed("r", **fields)
    assert not journals.readers()
    journals.read_committed("r", ring=0, commit_every=0).close()


def test_reader_begins_at_an_offset_within_a_group() -> None:
    """It may begin wherever a message begins, also in the middle of a group."""
    journals = memory()
    publish(journals, 1, 2, 3)
    (name,) = [spec.name for spec in journals.select()]
    second = list(journals.read_uncommitted(name))[1]
    assert numbers(journals.read_committed(start={name: second.begin})) == [2, 3]
    assert [
        e.begin for e in journals.read_uncommitted(name, second.begin, second.end)
    ] == [second.begin]


def test_frames_that_are_none() -> None:
    """Their error is raised, and the next read skips them; or ``on_error`` gets it."""
    journals = memory()
    publish(journals, 1)
    journals.append("orders/part-000", b"no json\n")
    publish(journals, 2)
    reader = journals.read_committed("r")
    assert number_of(next(reader).message) == 1
    with pytest.raises(FrameError):
        next(reader)
    assert numbers(reader) == [2]
    told: list[EtlstageError] = []
    assert numbers(journals.read_committed(on_error=told.append)) == [1, 2]
    assert [type(error) for error in told] == [FrameError]


def test_frames_that_are_none_within_a_replay() -> None:
    """They are reported once, although they are read twice."""
    journals = memory()
    writer = publisher(journals)
    writer.publish_uncommitted({"k": 1})
    journals.append("orders/part-000", b"no json\n")
    writer.publish_uncommitted({"k": 2})
    for intent in writer.build_ack_intents():
        journals.append(intent.journal, intent.intent)
    told: list[EtlstageError] = []
    assert numbers(journals.read_committed(ring=0, on_error=told.append)) == [1, 2]
    assert len(told) == 1


def test_damage_stops_a_reader_or_is_passed_over() -> None:
    """With ``on_error`` the messages after the damage are read."""
    storage = MemoryStorage()
    journals = memory(storage)
    publish(journals, 1, 2, 3)
    file = storage.files["part-000/" + "0" * 20 + ".log"]
    file[len(file) // 2] ^= 1
    with pytest.raises(JournalDamaged):
        numbers(journals.read_committed())
    told: list[EtlstageError] = []
    assert numbers(journals.read_committed(on_error=told.append)) == [1, 3]
    assert [type(error) for error in told] == [JournalDamaged]


def test_damage_at_the_end_is_reported_when_more_follows() -> None:
    """Until then it may be a torn tail that a writer repairs."""
    storage = MemoryStorage()
    journals = memory(storage)
    publish(journals, 1, 2)
    storage.files["part-000/" + "0" * 20 + ".log"][-1] ^= 1
    told: list[EtlstageError] = []
    reader = journals.read_committed(follow=True, on_error=told.append)
    assert number_of(next(reader).message) == 1
    assert reader.poll() is None
    publish(memory(storage), 3)
    assert number_of(next(reader).message) == 3
    assert len(told) == 1


@pytest.mark.parametrize(("shift", "left"), [(False, [1, 2]), (True, [1])])
def test_damage_at_the_end_is_reported_by_a_reader_that_ends_there(
    shift: bool, left: list[int]
) -> None:
    """It would leave out messages without a trace; it does so once (issue 24)."""
    storage = MemoryStorage()
    journals = memory(storage)
    publish(journals, 1, 2, 3)
    file = storage.files["part-000/" + "0" * 20 + ".log"]
    if shift:
        middle = len(file) // 2
        file[middle:middle] = b"zz"
    else:
        file[-1] ^= 1
    told: list[EtlstageError] = []
    reader = journals.read_committed("r", on_error=told.append)
    assert numbers(reader) == left
    assert reader.poll() is None
    reader.close()
    (error,) = told
    assert isinstance(error, JournalDamaged)
    assert error.end == len(file)
    journals = memory(storage)
    assert not numbers(journals.read_committed("r", on_error=told.append))
    publish(journals, 4)
    assert numbers(journals.read_committed("r", on_error=told.append)) == [4]
    assert len(told) == 1


KINDS: list[tuple[str, object]] = [
    ("application/x-ndjson", {"a": 1}),
    ("text/csv", ["a", "b"]),
    ("application/x-protobuf-fixed", b"bytes"),
]


@pytest.mark.parametrize(("content_type", "value"), KINDS)
def test_values_of_each_content_type(content_type: str, value: object) -> None:
    """Plain values become messages, and are read back as messages."""
    journals = memory(content_type=content_type)
    one = Publisher(journals, mapping=rendezvous(lambda _: b"k"))
    one.publish_committed(value)
    (found,) = journals.read_committed()
    # The published object itself has its UUID by now.
    shown = {"JsonMessage": "value", "CsvRecord": "fields", "Opaque": "data"}
    content: Any = getattr(found.message, shown[type(found.message).__name__])
    assert (content[1:] if isinstance(value, list) else content) == value


def test_intents_of_a_journal_that_is_gone() -> None:
    """The error names the journal, and a similar one that exists."""
    with pytest.raises(
        JournalError,
        match=r"^fetching journal spec: named journal does not exist \(orders/part-0001\)"
        r" \(did you mean 'orders/part-000'\?\)$",
    ):
        memory().append("orders/part-0001", b"x")


def test_journals_are_selected_by_labels() -> None:
    """Without labels the same object is returned as long as nothing changes."""
    storage = MemoryStorage()
    journals = memory(storage, partitions=3, labels={"of": "orders"})
    assert journals.select() is journals.partitions()
    journals.refresh()
    assert journals.select() is journals.partitions()
    assert [s.name for s in journals.select({"partition": "001"})] == [
        "orders/part-001"
    ]
    assert len(journals.select({"of": "orders"})) == 3
    assert journals.select({"of": "x"}) == []


async def test_changes_are_watched() -> None:
    """The watcher yields the journals now, and again after each change."""
    storage = MemoryStorage()
    journals = memory(storage)
    watching = journals.watch(every=0.001)
    assert len(await anext(watching)) == 1
    memory(storage).add_partitions(2)
    with anyio.fail_after(HANG):
        assert len(await anext(watching)) == 3
    await watching.aclose()  # type: ignore[attr-defined]


def test_set_whose_maker_was_killed_is_made(tmp_path: Path) -> None:
    """A killed maker leaves a lock, and a spec that was not written to its end."""
    (tmp_path / "lock").touch()
    (tmp_path / ".spec.json.4711").write_text('{"lay')
    with Journals.open(tmp_path, partitions=2) as journals:
        assert len(journals.partitions()) == 2


def test_set_that_another_process_creates_meanwhile(tmp_path: Path) -> None:
    """It is opened, also if that process already appends to it (issue 24)."""

    class Late(FolderStorage):
        def names(self, folder: str) -> list[str]:
            """Return the names in a folder, once the set has been created."""
            if not (tmp_path / "spec.json").exists():
                with Journals.open(tmp_path) as journals:
                    publish(journals, 1)
            return super().names(folder)

    with Journals.open(tmp_path, storage=Late(tmp_path)) as journals:
        assert numbers(journals.read_committed()) == [1]


def test_folder_that_is_no_set(tmp_path: Path) -> None:
    """It isn't made a set; with ``create=False`` no set is made at all."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(JournalError, match="not a set of journals, and not empty"):
        Journals.open(tmp_path)
    with pytest.raises(JournalError, match="there is no set of journals"):
        Journals.open(tmp_path / "none", create=False)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "",
            "spec.json does not describe a set of journals: Expecting value: .*restore",
        ),
        ("{", "does not describe a set of journals: Expecting .*restore"),
        (
            "{}",
            "does not describe a set of journals: its key 'layout' is missing; rest",
        ),
        (
            '{"layout": 1}',
            "does not describe a set .*: its key 'name' is missing; rest",
        ),
        (
            "[]",
            "does not describe a set .*: its values are not of the right types; rest",
        ),
        (
            '{"layout": 2}',
            "its layout is 2, expected no more than 1: .* newer etlstage",
        ),
    ],
)
def test_spec_that_is_none(tmp_path: Path, text: str, error: str) -> None:
    """The error explains what is wrong, for a newer layout or no text (issue 24)."""
    (tmp_path / "spec.json").write_text(text)
    with pytest.raises(JournalError, match=error):
        Journals.open(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("layout", 0.5), ("name", None), ("content_type", {}), ("content_type", 5)),
        *(("segment", "1MiB"), ("partitions", "2"), ("labels", []), ("labels", None)),
        ("labels", {"a": 5}),
    ],
)
def test_values_of_a_spec_have_types(tmp_path: Path, key: str, value: object) -> None:
    """A spec with a value of another type is refused on opening the set (issue 24)."""
    Journals.open(tmp_path).close()
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(JournalError, match=r"its values are not of the right types"):
        Journals.open(tmp_path)


def test_spec_that_is_lost(tmp_path: Path) -> None:
    """That of a new set with the same name and settings replaces it (issue 24)."""
    path = tmp_path / "set" / "spec.json"
    with Journals.open(path.parent, partitions=2) as journals:
        journals.append("set/part-001", b'{"n": 1}\n')
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(
        JournalError,
        match=r": Unterminated string .*; restore the file, or copy that of a new set"
        " with the same name and settings, without its id$",
    ):
        Journals.open(path.parent)
    Journals.open(tmp_path / "new" / "set", partitions=2).close()
    path.write_bytes((tmp_path / "new" / "set" / "spec.json").read_bytes())
    with Journals.open(path.parent) as journals:
        (found,) = journals.read_uncommitted("set/part-001")
        assert isinstance(found.message, JsonMessage)
        assert found.message["n"] == 1


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"sync": "sometimes"}, "sync is 'sometimes', expected 'commit'"),
        ({"sync": "1x"}, "sync is '1x'"),
        ({"keep": "7 years"}, "keep is '7 years', expected 'read'"),
        ({"keep": "7"}, "keep is '7', expected 'read'"),  # days, or bytes?
        ({"keep": "0d"}, "keep is '0d', expected 'read'"),
        ({"limit": "7d"}, "limit is '7d', expected a size"),
        ({"keep": 7}, "keep is 7, expected 'read'"),
        ({"partitions": 0}, "partitions is 0, expected 1 to 10000"),
        ({"partitions": "2"}, "partitions is '2', expected 1 to 10000"),
        ({"partitions": True}, "partitions is True, expected 1 to 10000"),
        ({"name": 5}, "name is 5, expected text"),
        ({"labels": {"a": 1}}, "labels is {'a': 1}, expected texts by name"),
        ({"labels": ["a"]}, r"labels is \['a'\], expected texts by name"),
        ({"now": 5}, "now is 5, expected a function"),
        ({"segment": 0}, "segment is 0, expected 1 or more bytes"),
        ({"segment": "1MiB"}, "segment is '1MiB', expected 1 or more bytes"),
        ({"content_type": "text/plain"}, "unrecognized content-type"),
        ({"content_type": None}, "content_type is None, expected text"),
    ],
)
def test_wrong_arguments(fields: dict[str, Any], error: str) -> None:
    """The error names the argument, its value, and what is expected."""
    with pytest.raises(ConfigError, match=error):
        memory(**fields)


@pytest.mark.parametrize(
    ("keep", "amount"),
    [
        ("7d", ("seconds", 604_800)),
        ("1.5h", ("seconds", 5400)),
        ("100 GiB", ("bytes", 100 << 30)),
        ("10MB", ("bytes", 10_000_000)),
        ("read", ("read", 0)),
        (None, None),
    ],
)
def test_what_is_kept(keep: str | None, amount: tuple[str, int] | None) -> None:
    """``keep`` is a duration or a size, written as in all other settings."""
    assert Retention.of(keep) == amount


def test_number_of_partitions_is_that_of_the_set() -> None:
    """A different number is refused, rather than silently ignored."""
    storage = MemoryStorage()
    memory(storage, partitions=2)
    assert len(memory(storage, partitions=2).select()) == 2
    with pytest.raises(
        JournalError, match=r"it has 2 partitions, not 3; add_partitions"
    ):
        memory(storage, partitions=3)


@pytest.mark.parametrize("count", [-1, 1.5, 10_000, True, "3", None])
def test_partitions_that_can_not_be_added(tmp_path: Path, count: Any) -> None:  # noqa: ANN401
    """None are removed, and the set stays as it is (issue 24)."""
    with Journals.open(tmp_path / "set", partitions=2) as journals:
        with pytest.raises(
            ConfigError, match=r"^(count|partitions) is (-1|3.5|10002|True|'3'|None),"
        ):
            journals.add_partitions(count)
        with pytest.raises(ConfigError, match=r"^labels is {'a': 1}, expected texts"):
            journals.add_partitions(1, labels={"a": 1})  # type: ignore[dict-item]
        journals.refresh()
    with Journals.open(tmp_path / "set") as journals:
        assert len(journals.partitions()) == 2


def test_set_that_is_closed_closes_its_readers() -> None:
    """A service that has left a loop can begin it again (issue 24)."""
    storage = MemoryStorage()
    with Journals.open(storage=storage) as journals:
        publisher = Publisher(journals, mapping=modulo(lambda m: m["n"]))
        for n in range(3):
            publisher.publish_committed({"n": n})
    for expected in ([0, 1], [1, 2]):
        found = []
        with Journals.open(storage=storage) as journals:
            for envelope in journals.read_committed(name="r"):
                assert isinstance(envelope.message, JsonMessage)
                found.append(envelope.message["n"])
                if len(found) == 2:
                    break
        assert found == expected


def test_set_that_is_closed_takes_no_appends(tmp_path: Path) -> None:
    """Nothing would force their bytes to the disk (issue 24)."""
    with Journals.open(tmp_path / "orders") as journals:
        publish(journals, 1)
    refused = "^orders: the set is closed; open it again to append$"
    with pytest.raises(JournalError, match=refused):
        publish(journals, 2)
    (journal,) = journals.select()
    with pytest.raises(JournalError, match=refused):
        journals.append(journal.name, b"{}")
    journals.close()
    with Journals.open(tmp_path / "orders") as again:
        assert numbers(again.read_committed()) == [1]
        publish(again, 3)
        assert numbers(again.read_committed()) == [1, 3]


def test_append_that_began_before_the_set_was_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It appends nothing, as nothing would force that to the disk (issue 24)."""
    journals = Journals.open(tmp_path / "orders")
    (journal,) = journals.select()
    section = journals.start_append(journal.name)
    refused = "^orders: the set is closed; open it again to append$"
    with ThreadPoolExecutor() as pool:
        waits = Event()
        locked = journals.storage.locked

        def waiting(path: str) -> AbstractContextManager[None]:
            waits.set()
            return locked(path)

        monkeypatch.setattr(journals.storage, "locked", waiting)
        appending = pool.submit(journals.append, journal.name, b"{}\n")
        assert waits.wait(HANG)
        journals.close()
        with pytest.raises(JournalError, match=refused):
            section.release(b"{}\n")
        with pytest.raises(JournalError, match=refused):
            appending.result(HANG)
    with Journals.open(tmp_path / "orders") as again:
        assert again.byte_log(journal.name).appended() == 0


def test_lock_is_taken_anew_if_it_was_closed_meanwhile(tmp_path: Path) -> None:
    """The descriptor may be another file's by then (issue 24)."""
    storage = FolderStorage(tmp_path)
    with storage.locked("lock"):
        storage.close()
        with FolderStorage(tmp_path).locked("lock"):
            pass
    with storage.locked("lock"):
        pass

    class Waiting:
        """A lock for which a thread waits while the storage is closed."""

        def __enter__(self) -> None:
            storage.close()

        def __exit__(self, *_: object) -> None:
            pass

    (_, fd) = storage._locks["lock"]
    storage._locks["lock"] = Waiting(), fd  # type: ignore[assignment]
    with storage.locked("lock"):
        assert FolderStorage(tmp_path).hold("lock") is None


def test_close_waits_for_an_append_that_it_has_to_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the set had nothing to sync before (issue 24)."""
    journals = Journals.open(tmp_path / "orders")
    (journal,) = journals.select()
    log = journals.log(journal.name)
    closing, steps = Thread(target=journals.close), list[str]()
    append, sync = log.append, log.sync

    def appending(now: int, *data: bytes) -> tuple[int, int]:
        closing.start()
        found = append(now, *data)
        steps.append("append")
        return found

    def syncing() -> None:
        steps.append("sync")
        sync()

    monkeypatch.setattr(log, "append", appending)
    monkeypatch.setattr(log, "sync", syncing)
    journals.append(journal.name, b"{}\n")
    closing.join(HANG)
    assert steps == ["append", "sync"]


def test_position_that_is_none() -> None:
    """The error names the file of an invalid position."""
    storage = MemoryStorage()
    storage.replace("readers/r.json", b"[]")
    storage.files.pop("readers/r.json")
    journals = memory(storage)
    storage.replace("readers/r.json", b"[]")
    with pytest.raises(JournalError, match=r"readers/r\.json is not a position"):
        journals.readers()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"states": [', r"Expecting value: line 1 column 13 \(char 12\)"),
        ('{"states": []}', "its key 'offsets' is missing"),
        ('{"states": [5]}', "its values are not of the right types"),
        ("[]", "its values are not of the right types"),
        (
            '{"states": [], "offsets": {}, "needs": {}, "updated": 1, "begun": [1]}',
            "its values are not of the right types",
        ),
    ],
)
def test_place_of_a_position_that_is_none(
    tmp_path: Path, text: str, reason: str
) -> None:
    """The error has the set's place, a plain reason and the remedy (issue 24)."""
    with Journals.open(tmp_path) as journals:
        journals.read_committed("r").close()
        path = tmp_path / "readers" / "r.json"
        path.write_text(text)
        for read in journals.readers, partial(journals.read_committed, "r"):
            with pytest.raises(
                JournalError,
                match=f"^{path} is not a position: {reason}; restore it, or remove it:"
                " the reader then resumes where its state directory has recorded, or"
                " begins anew$",
            ):
                read()
        path.unlink()
        journals.read_committed("r").close()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("offsets", []), ("offsets", 5), ("offsets", None)),
        *(("offsets", {"j": "5"}), ("offsets", {"j": 1.5})),
        *(("needs", []), ("needs", None), ("needs", {"j": {}})),
        *(("states", 5), ("states", [[5, "00", 1, 1]]), ("states", [["j", 5, 1, 1]])),
        *(("states", [["j", "00", "1", 1]]), ("states", [["j", "00", 1, []]])),
        *(("updated", "now"), ("updated", None), ("load", [])),
    ],
)
def test_values_of_a_position_have_types(
    tmp_path: Path, key: str, value: object
) -> None:
    """A reader's position of another shape is an error that names it (issue 24)."""
    with Journals.open(tmp_path) as journals:
        journals.read_committed("r").close()
        path = tmp_path / "readers" / "r.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
        with pytest.raises(
            JournalError, match=r"r\.json is not a position: its values"
        ):
            journals.readers()


def test_file_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    """A folder or a loop of links in place of a file is a JournalError (issue 24)."""
    with Journals.open(tmp_path, name="set") as journals:
        journals.append("set/part-000", b'{"n": 1}\n')
        reader = journals.read_committed("r")
        for name in ("r.json", "r.pid"):
            (tmp_path / "readers" / name).unlink()
            (tmp_path / "readers" / name).mkdir()
        with pytest.raises(JournalError, match=r"/r\.json: can't be read: is a dir"):
            journals.readers()
        (tmp_path / "readers" / "r.json").rmdir()
        reader.close()
        (path,) = (tmp_path / "part-000").glob("*.log")
        path.unlink()
        path.symlink_to(path.name)
        with pytest.raises(JournalError, match=rf"{path}: can't be read: too many"):
            journals.log("set/part-000").size()
        path.unlink()
        path.mkdir()
    with (
        Journals.open(tmp_path) as journals,
        pytest.raises(JournalError, match=rf"{path}: can't be read: is a directory"),
    ):
        list(journals.read_uncommitted("set/part-000"))


# --- sync --------------------------------------------------------------------------


def test_when_it_is_synced() -> None:
    """With each append; after some seconds; or on demand and at the end."""
    time = Time()

    def synced(storage: MemoryStorage) -> int:
        return storage.synced.get("part-000/" + "0" * 20 + ".log", 0)

    storage = MemoryStorage()
    journals = memory(storage, sync="append")
    publish(journals, 1)
    assert synced(storage) == journals.log("orders/part-000").end()
    assert journals.pending_except("") == []

    storage = MemoryStorage()
    journals = memory(storage, sync="2s", now=time)
    publish(journals, 1)
    time.now += 2 * SECOND - 1
    publish(journals, 1)
    assert synced(storage) == 0
    time.now += 1
    publish(journals, 1)
    assert synced(storage) == journals.log("orders/part-000").end()

    storage = MemoryStorage()
    with memory(storage, now=time) as journals:
        publish(journals, 1)
        time.now += 10**6 * SECOND
        publish(journals, 1)
        (pending,) = journals.pending_except("")
        assert journals.pending_except("orders/part-000") == []
        assert synced(storage) == 0
        pending.wait()
        assert synced(storage) == journals.log("orders/part-000").end()
        assert journals.pending_except("") == []
        publish(journals, 1)
    assert synced(storage) == journals.log("orders/part-000").end()


def test_position_does_not_outlive_what_was_read() -> None:
    """Data are synced before a position is stored, or it could point after the end."""
    storage = MemoryStorage()
    writer = memory(storage)
    reader = memory(storage, create=False).read_committed("r", commit_every=None)
    publish(writer, 1, 2, 3)
    assert [reader.poll() is not None for _ in range(2)] == [True, True]
    assert storage.synced == {}
    reader.position()
    assert [*storage.synced.values()] == [writer.log("orders/part-000").end()]
    storage.synced.clear()
    reader.position()
    assert storage.synced == {}
    assert reader.poll() is not None
    storage.faults.append(("sync", OSError(5, "Input/output error"), 0))
    stored = storage.load("readers/r.json")
    with pytest.raises(OSError, match="Input/output"):
        reader.commit()
    assert storage.load("readers/r.json") == stored
    reader.close()


async def test_barrier_may_be_awaited() -> None:
    """Awaiting it doesn't block other tasks."""
    storage = MemoryStorage()
    journals = memory(storage)
    publish(journals, 1)
    for pending in journals.pending_except(""):
        await pending
    assert journals.pending_except("") == []


def test_disk_that_fails_and_recovers() -> None:
    """Nothing half-written counts, and publishing goes on after either error."""
    storage = MemoryStorage()
    journals = memory(storage, sync="append")
    writer = publisher(journals)
    storage.faults.append(("append", OSError(28, "No space left on device"), 7))
    with pytest.raises(OSError, match="No space"):
        writer.publish_committed({"k": 1})
    writer.publish_committed({"k": 2})
    assert numbers(journals.read_committed()) == [2]
    storage.faults.append(("sync", OSError(5, "Input/output error"), 0))
    append = writer.publish_committed({"k": 3})
    assert not append.done
    with pytest.raises(OSError, match="Input/output"):
        append.wait()
    # The message is there, and is synced with the next one.
    writer.publish_committed({"k": 4})
    assert numbers(journals.read_committed()) == [2, 3, 4]
    assert journals.pending_except("") == []


def test_clock_that_is_ahead_costs_no_others_messages() -> None:
    """A reader that stops within a transaction resumes with all of it (issue 24)."""
    journals, day = memory(), 86400 * 10**9
    for days, number in ((2, 0), (0, 1)):
        clock = Clock(clock_at(time.time_ns() + days * day))
        writer = Publisher(journals, clock, mapping=modulo(lambda m: m["k"]))
        writer.publish_uncommitted({"k": number})
        if days:
            for journal, intent in writer.build_ack_intents():
                journals.append(journal, intent)
    with journals.read_committed("r") as reader:
        assert numbers(reader) == [0]
    writer.publish_uncommitted({"k": 2})
    for journal, intent in writer.build_ack_intents():
        journals.append(journal, intent)
    with journals.read_committed("r") as reader:
        assert numbers(reader) == [1, 2]


# --- retention ---------------------------------------------------------------------


def segments(journals: Journals) -> int:
    """Return the number of segments."""
    return len(journals.log("orders/part-000").segments())


def test_all_is_kept_by_default() -> None:
    """Without ``keep`` nothing is dropped, however old."""
    journals = memory(segment=10)
    publish(journals, *range(5))
    assert journals.trim() == {}
    assert segments(journals) == 5


def test_what_all_readers_have_read_is_dropped() -> None:
    """Nothing is without a reader; an open transaction is kept from its beginning."""
    journals = memory(segment=10, keep="read")
    publish(journals, *range(5))
    assert journals.trim() == {}
    numbers(journals.read_committed("a"))
    assert journals.trim() == {"orders/part-000": 4}
    writer = publisher(journals)
    writer.publish_uncommitted({"k": 9})
    publish(journals, *range(5))
    numbers(journals.read_committed("a"))
    journals.trim()
    assert segments(journals) == 6
    for intent in writer.build_ack_intents():
        journals.append(intent.journal, intent.intent)
    assert numbers(journals.read_committed("a", ring=0)) == [9]
    assert journals.trim() == {"orders/part-000": 6}


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("trims", ["an append", "a command"])
def test_reader_that_registers_while_segments_are_dropped(
    trims: str, known: bool
) -> None:
    """The reader begins with what is kept, and nothing of that is dropped."""
    storage = MemoryStorage()
    found: list[Thread] = []

    def register() -> None:
        with memory(storage) as journals:
            journals.read_committed("late", commit_every=None, load="b").close()

    class Dropping(Journals):
        def readers(self) -> list[Registered]:
            """Return the readers, while another one registers at that moment."""
            readers = super().readers()
            if not found:
                found.append(Thread(target=register))
                found[0].start()
                found[0].join(0.3)
            return readers

    if known:
        with memory(storage, keep="1B", segment=10) as journals:
            journals.read_committed("late", commit_every=None, load="a").close()
    with Dropping(storage=storage, name="orders", keep="1B", segment=10) as journals:
        publish(journals, 1)
        found.append(Thread())
        publish(journals, *range(2, 6))
        if known:
            numbers(journals.read_committed("late", load="a"))
        found.clear()
        if trims == "an append":
            publish(journals, 6)
        else:
            journals.trim()
        found[0].join()
        assert numbers(journals.read_committed("late", load="b"))


def test_reader_that_is_about_to_begin_stops_no_writer() -> None:
    """A reader without a position yet has no backlog that could hold up writers."""
    journals = memory(segment=10, keep="read", limit="100B")
    publish(journals, 1, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CommittedReader, "_look", publish_more(journals))
        journals.read_committed("a", start="end", commit_every=None)


def publish_more(journals: Journals) -> Callable[[CommittedReader], None]:
    """Return a function that publishes one more message."""
    return lambda _: publish(journals, 3)


def test_what_is_old_is_dropped_but_not_before_it_is_read() -> None:
    """A segment's age counts from the time of the segment that follows it."""
    time = Time()
    journals = memory(segment=10, keep="1h", now=time)
    for number in range(4):
        publish(journals, number)
        time.now += 1200 * SECOND
    assert segments(journals) == 4
    assert journals.trim() == {"orders/part-000": 1}
    reader = journals.read_committed("a")
    next(reader)
    reader.close()
    time.now += 86400 * SECOND
    assert journals.trim() == {}
    numbers(journals.read_committed("a"))
    assert journals.trim() == {"orders/part-000": 2}
    assert segments(journals) == 1


def test_what_is_too_much_is_dropped_with_each_segment() -> None:
    """The oldest is dropped first, even if a reader without a name needs it."""
    journals = memory(segment=10, keep="300B")
    publish(journals, 0, 1)
    reader = journals.read_committed()
    next(reader)
    publish(journals, *range(2, 50))
    assert journals.trim() == {}
    assert 200 < journals.log("orders/part-000").size() <= 300
    with pytest.raises(OffsetGone):
        numbers(reader)
    assert numbers(journals.read_committed())[-1] == 49


@pytest.mark.parametrize("follow", [True, False])
@pytest.mark.parametrize(
    ("kind", "rest", "reason"),
    [
        ("application/x-ndjson", b'{"k": 1', "unexpected EOF"),
        ("application/x-protobuf-fixed", b"garbage\n", "detected de-synchronization"),
    ],
)
def test_invalid_end_is_reported_once(
    kind: str, rest: bytes, reason: str, *, follow: bool
) -> None:
    """No later append continues a frame, so no reader waits for one (issue 24)."""
    with memory(content_type=kind) as journals:
        journals.append("orders/part-000", rest)
        end = journals.log("orders/part-000").end()
        errors: list[Any] = []
        reader = journals.read_committed(follow=follow, on_error=errors.append)
        assert reader.poll() is None
        assert reader.position().offsets == {"orders/part-000": end}
        message = {"k": 1} if kind == "application/x-ndjson" else b"1"
        to = "orders/part-000", kind
        Publisher(journals).publish_committed(message, lambda _: to)
        assert reader.poll() is not None
        (error,) = errors
        assert (error.offset, error.end) == (end - len(rest), end)
        assert str(error).endswith(reason)
        found = verify(journals, "orders/part-000")
        assert (found.committed, found.damaged) == (1, 1)


def test_record_that_the_end_of_a_range_cuts() -> None:
    """It is an error, although a last record needs no newline (issue 24)."""
    with memory(content_type="text/csv") as journals:
        journals.append("orders/part-000", f"{NO_UUID},12345\n".encode())
        end = journals.log("orders/part-000").end()
        for cut in (1, 3):
            with pytest.raises(UnexpectedEnd):
                next(journals.read_uncommitted("orders/part-000", end=end - cut))


def test_set_is_closed_where_an_append_was_interrupted(tmp_path: Path) -> None:
    """The thread that closes it still has the lock, which is free then (issue 24)."""
    for storage in (FolderStorage(tmp_path / "set"), MemoryStorage()):
        journals = Journals(storage=storage, name="orders")
        name = journals.select()[0].name
        journals.append(name, b"1\n")
        section = journals.start_append(name)
        journals.close()
        with storage.locked(journals.log(name).lock):
            pass
        section.abandon()


@pytest.mark.parametrize("follow", [True, False])
@pytest.mark.parametrize(
    ("kind", "data", "count"),
    [
        ("text/csv", f"{NO_UUID},a\n{NO_UUID},b".encode(), 2),
        (
            "application/x-protobuf-fixed",
            FIXED_FRAME_WORD + b"\x10\0\0\0" + bytes(16) + b"\n",
            1,
        ),
    ],
)
def test_last_newline_is_optional(
    kind: str, data: bytes, count: int, *, follow: bool
) -> None:
    """Each append ends as its framing allows, whatever follows it (issue 24)."""
    with memory(content_type=kind) as journals:
        reader = journals.read_committed(follow=follow)
        for _ in range(2):
            journals.append("orders/part-000", data)
            assert [reader.poll() is not None for _ in range(count + 1)] == [
                *[True] * count,
                False,
            ]
        assert len(list(journals.read_uncommitted("orders/part-000"))) == 2 * count
        found = verify(journals, "orders/part-000")
        assert (found.committed, found.damaged) == (2 * count, 0)


@pytest.mark.parametrize("trims", ["an append", "a command"])
def test_what_another_process_keeps_is_not_dropped(tmp_path: Path, trims: str) -> None:
    """A set that is open follows a changed ``keep`` before it drops (issue 24)."""
    with Journals.open(tmp_path / "orders", keep="read", segment=10) as journals:
        publish(journals, 0, 1)
        with Journals.open(tmp_path / "orders") as others:
            others.set_retention(keep=None, limit=None)
        numbers(journals.read_committed("r"))
        if trims == "an append":
            publish(journals, 2)
        else:
            assert journals.trim() == {}
        assert numbers(journals.read_committed())[:2] == [0, 1]


def test_what_another_process_no_longer_keeps_is_dropped(tmp_path: Path) -> None:
    """An append that begins a segment follows a ``keep`` that was set (issue 24)."""
    with Journals.open(tmp_path / "orders", segment=10) as journals:
        publish(journals, 0, 1)
        numbers(journals.read_committed("r"))
        with Journals.open(tmp_path / "orders") as others:
            others.set_retention(keep="read", limit=None)
        publish(journals, 2)
        assert numbers(journals.read_committed()) == [2]


def test_new_reader_follows_what_another_process_keeps(tmp_path: Path) -> None:
    """It registers before it looks where to begin, so that it misses none (issue 24)."""
    with Journals.open(tmp_path / "orders", segment=10) as journals:
        publish(journals, 0, 1)
        numbers(journals.read_committed("r"))
        with Journals.open(tmp_path / "orders") as others:
            others.set_retention(keep="read", limit=None)
            with pytest.MonkeyPatch.context() as patch:
                look = CommittedReader._look
                patch.setattr(
                    CommittedReader, "_look", lambda one: (look(one), others.trim())
                )
                assert numbers(journals.read_committed("late")) == [0, 1]


@pytest.mark.parametrize("committed", [True, False])
def test_append_succeeds_though_nothing_can_be_dropped(
    caplog: pytest.LogCaptureFixture, committed: bool
) -> None:
    """It is logged; an error would have the message appended again (issue 24)."""
    storage = MemoryStorage()
    journals = memory(storage, segment=10, keep="read")
    writer = publisher(journals)
    publish = writer.publish_committed if committed else writer.publish_uncommitted
    publish({"k": 0})
    storage.files["readers/r.json"] = bytearray(b"{}")
    publish({"k": 1})
    del storage.files["readers/r.json"]
    publish({"k": 2})
    for intent in writer.build_ack_intents():
        journals.append(intent.journal, intent.intent)
    assert numbers(journals.read_committed()) == [0, 1, 2]
    (message,) = caplog.messages
    assert message.startswith("orders/part-000: can't drop what is no longer kept: ")
    assert "readers/r.json is not a position" in message


def test_forgotten_reader_keeps_no_state() -> None:
    """It keeps no segments; the error for a misspelled name suggests a similar one."""
    journals = memory(segment=10, keep="read")
    numbers(journals.read_committed("slow"))
    publish(journals, *range(5))
    numbers(journals.read_committed("fast"))
    assert journals.trim() == {}
    with pytest.raises(
        JournalError, match=r"no reader 'slw' \(did you mean 'slow'\?\)"
    ):
        journals.forget("slw")
    journals.forget("slow")
    assert journals.trim() == {"orders/part-000": 4}


def test_no_one_waits_for_a_transaction_that_is_open() -> None:
    """Read messages aren't backlog, though the open transaction's start is needed."""
    journals = memory(limit="1KiB")
    reader = journals.read_committed("r", follow=True, commit_every=None)
    publisher(journals).publish_uncommitted({"k": 0})
    writer = publisher(journals)
    for number in range(100):
        writer.publish_committed({"k": number})
        assert reader.poll() is not None
        reader.commit(reader.position())
    (known,) = journals.readers()
    assert known.needs["orders/part-000"] == 32
    reader.close()


async def test_writers_wait_for_readers() -> None:
    """The error names the slowest reader; writing goes on once that has read."""
    journals = memory(limit="1KiB")
    publish(journals, *range(100))  # no one reads yet
    journals.read_committed("slow", start="end").close()
    publish(journals, 0)
    numbers(journals.read_committed("fast"))
    writer, published = publisher(journals), 1
    while journals.has_room():
        writer.publish_committed({"k": published})
        published += 1
    expected = r"reader 'slow' has \d+ bytes to read, expected no more than 1024 bytes"
    with pytest.raises(LimitReached, match=expected) as caught:
        writer.publish_committed({"k": published})
    assert caught.value.reader == "slow"
    assert 5 < published < 20
    assert not journals.has_room()
    numbers(journals.read_committed("fast"))
    assert not journals.has_room("orders/part-000")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: journals.room(poll=0.001))
        await anyio.lowlevel.checkpoint()
        assert len(numbers(journals.read_committed("slow"))) == published
        numbers(journals.read_committed("fast"))
    writer.publish_committed({"k": 1})
    assert memory().has_room()


@pytest.mark.parametrize("limit", [None, "1GiB"])
async def test_writer_that_waits_follows_a_limit_of_another_process(
    tmp_path: Path, limit: str | None
) -> None:
    """It goes on once the limit is raised or removed (issue 24)."""
    with Journals.open(tmp_path, limit="1B") as journals:
        journals.read_committed("slow").close()
        publish(journals, 1)
        with pytest.raises(LimitReached):
            publish(journals, 2)
        with anyio.fail_after(HANG):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: journals.room(poll=0.001))
                await anyio.lowlevel.checkpoint()
                with Journals.open(tmp_path) as others:
                    others.set_retention(keep=None, limit=limit)
        publish(journals, 2)
        assert numbers(journals.read_committed()) == [1, 2]


def test_writer_follows_a_limit_that_another_process_lowers(tmp_path: Path) -> None:
    """It does so with its next look at the set (issue 24)."""
    with Journals.open(tmp_path, limit="1GiB") as journals:
        journals.read_committed("slow").close()
        publish(journals, 1)
        with Journals.open(tmp_path) as others:
            others.set_retention(keep=None, limit="1B")
        journals.refresh()
        with pytest.raises(LimitReached):
            publish(journals, 2)


def test_spec_is_plain_json(tmp_path: Path) -> None:
    """People and other programs can read it."""
    Journals.open(tmp_path / "orders", partitions=2, keep="7d", limit="1GiB").close()
    spec = json.loads((tmp_path / "orders" / "spec.json").read_text())
    assert re.fullmatch("[0-9a-f]{16}", spec.pop("id"))
    assert spec == {
        "layout": 1,
        "name": "orders",
        "content_type": "application/x-ndjson",
        "labels": {},
        "partitions": 2,
        "keep": "7d",
        "limit": "1GiB",
        "segment": 64 << 20,
    }


def test_name_is_let_go_where_it_can_not_be_noted_who_has_it() -> None:
    """Otherwise the process would be refused when it tries again."""
    storage = MemoryStorage()
    with Journals.open(storage=storage) as journals:
        storage.faults.append(("replace", OSError("full"), 0))
        with pytest.raises(OSError, match="full"):
            journals.read_committed("r")
        journals.read_committed("r").close()
