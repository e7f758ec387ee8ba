"""One journal: groups, segments, torn tails, damage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from etlstage.journal import (
    FolderStorage,
    JournalDamaged,
    Journals,
    MemoryStorage,
    OffsetGone,
)
from etlstage.journal.account import lags
from etlstage.journal.log import HEAD, MAX_GROUP, JournalLog
from etlstage.journal.messages import LogReader
from etlstage.journal.storage import Storage
from etlstage.sequencing import JournalSpec


@pytest.fixture(params=["folder", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    """Return a storage for journals, of each kind in turn."""
    place = FolderStorage(tmp_path) if request.param == "folder" else MemoryStorage()
    yield place
    place.close()


def log(storage: Storage, *, segment: int = 1 << 20) -> JournalLog:
    """Return the journal, as another process would open it."""
    return JournalLog(storage, "part-000", "set/part-000", segment=segment)


def data(journal: JournalLog, offset: int = 0, *, skip: bool = False) -> list[bytes]:
    """Return the data of the groups."""
    return [group.data for group in journal.groups(offset, skip=skip)]


def tried(journal: JournalLog) -> tuple[list[bytes], JournalDamaged | None]:
    """Return the data of the groups before any damage, and the error of the damage."""
    found: list[bytes] = []
    try:
        found.extend(group.data for group in journal.groups(0))
    except JournalDamaged as error:
        return found, error
    return found, None


def test_an_offset_within_damage_is_damaged() -> None:
    """A damaged group that starts before the offset and contains it isn't skipped."""
    storage = MemoryStorage()
    journal = log(storage)
    places = [journal.append(0, b"%d" % n * 10)[0] for n in range(3)]
    path = "part-000/00000000000000000000.log"
    for flipped in (places[1] + 5, places[1] - 5):
        storage.files[path][flipped] ^= 1
        with pytest.raises(JournalDamaged) as raised:
            data(log(storage), places[1])
        assert raised.value.offset == places[1] - HEAD
        assert data(log(storage), places[2] - HEAD) == [b"2" * 10]
    storage.truncate(path, places[2] - HEAD)
    assert data(log(storage), places[2] - HEAD) == []
    with pytest.raises(JournalDamaged):
        data(log(storage), places[1])


def test_groups_come_back(storage: Storage) -> None:
    """Reading returns the appended groups with their offsets and times."""
    journal = log(storage)
    assert (data(journal), journal.end(), journal.first()) == ([], 0, 0)
    assert journal.append(10, b"one") == (HEAD, HEAD + 3)
    assert journal.append(5, b"second") == (2 * HEAD + 3, 2 * HEAD + 9)
    other = log(storage)
    groups = list(other.groups(0))
    assert [group.data for group in groups] == [b"one", b"second"]
    assert [(group.begin, group.end) for group in groups] == [(0, 35), (35, 73)]
    # A group's time is never before that of the group before it.
    assert [group.time for group in groups] == [10, 10]
    assert other.end() == journal.appended() == other.appended() == 73
    assert data(other, 34) == [b"one", b"second"]
    assert data(other, 35) == [b"second"]
    assert data(other, 73) == []


def test_segments_are_named_by_their_offset(storage: Storage) -> None:
    """A new segment begins once the last has reached the segment size."""
    journal = log(storage, segment=80)
    for number in range(5):
        journal.append(number, b"%08d" % number)
    assert journal.segments() == [0, 80, 160]
    assert min(storage.names("part-000")) == "0" * 20 + ".log"
    assert data(log(storage)) == [b"%08d" % number for number in range(5)]
    assert data(log(storage), 100) == [b"%08d" % number for number in (2, 3, 4)]
    assert journal.size() == 200


def test_writers_take_turns(storage: Storage) -> None:
    """Each sees what the other appended, including a new segment."""
    one, two = log(storage, segment=70), log(storage, segment=70)
    for number in range(6):
        (one, two)[number % 2].append(number, b"%d" % number)
    assert data(one) == [b"%d" % number for number in range(6)]
    assert one.segments() == [0, 99]


def test_tail_that_was_read_torn_and_is_another_now_is_no_damage(
    storage: Storage,
) -> None:
    """A reader may have read the torn tail before it was replaced (issue 24)."""
    writer = log(storage)
    writer.append(0, b"one")
    end = writer.append(0, b"torn" * 10)[1]
    path = "part-000/00000000000000000000.log"
    storage.truncate(path, end - 4)
    groups = log(storage).groups(0)
    assert next(groups).data == b"one"
    log(storage).append(1, b"another" * 10)
    assert next(groups).data == b"another" * 10


@pytest.mark.parametrize("heads", [False, True])
def test_tail_that_is_replaced_while_it_is_read_is_no_damage(heads: bool) -> None:
    """A group has one head, even if head and data are read separately (issue 24)."""

    class Replaced(MemoryStorage):
        def read(self, path: str, at: int, size: int) -> bytes:
            """Return bytes of a file, and then replace the torn tail."""
            found = super().read(path, at, size)
            if at in torn:
                torn.clear()
                log(self).append(1, b"another" * 100)
            return found

    storage, torn = Replaced(), list[int]()
    begin = log(storage).append(0, b"one" * 100)[1]
    end = log(storage).append(0, b"torn" * 100)[1]
    storage.truncate("part-000/00000000000000000000.log", end - 4)
    torn.append(begin)
    reader = LogReader(log(storage), JournalSpec("j", ""), begin, heads=heads)
    found = [reader.group() for _ in range(2)]
    ends = [group.end for group in found if group is not None]
    assert ends == [log(storage).end()] == [begin + HEAD + 700]


@pytest.mark.parametrize("left", range(1, HEAD + 6))
def test_torn_tail_is_cut_by_the_next_writer(storage: Storage, left: int) -> None:
    """A reader doesn't cut the torn tail; it doesn't see it either."""
    log(storage).append(1, b"whole")
    log(storage).append(1, b"torn..")
    path = "part-000/" + "0" * 20 + ".log"
    storage.truncate(path, 37 + left - 1)
    assert data(log(storage)) == [b"whole"]
    assert log(storage).end() == 32 + 5
    assert storage.size(path) == 37 + left - 1
    assert log(storage).append(1, b"next") == (37 + HEAD, 37 + HEAD + 4)
    assert data(log(storage)) == [b"whole", b"next"]


def test_reader_does_not_mind_what_is_cut_under_it(storage: Storage) -> None:
    """The reader waits before the torn group, and reads what replaces it."""
    journal = log(storage)
    journal.append(1, b"whole")
    path = "part-000/" + "0" * 20 + ".log"
    storage.append(path, b"ETJ1 half of a head")
    reader = log(storage)
    assert data(reader, 37) == []
    log(storage).append(1, b"next")
    assert data(reader, 37) == [b"next"]


def test_flipped_bit_is_found_wherever_it_is() -> None:
    """The error has its offset; groups before are read, those after with ``skip``."""
    for bit in range(8 * (HEAD + 3)):
        storage = MemoryStorage()
        journal = log(storage)
        for part in (b"one", b"two", b"six"):
            journal.append(1, part)
        storage.files["part-000/" + "0" * 20 + ".log"][35 + bit // 8] ^= 1 << bit % 8
        found, error = tried(log(storage))
        assert found == [b"one"]
        if error is None:
            # A length that now reaches beyond the end looks like a torn tail.
            continue
        assert (error.journal, error.offset) == ("set/part-000", 35)
        where = "damaged at offset 35, in segment 00000000000000000000.log"
        assert where in str(error)
        assert data(log(storage), skip=True) == [b"one", b"six"]
        assert data(log(storage), 70) == [b"six"]
        log(storage).append(1, b"new")
        assert data(log(storage), skip=True) == [b"one", b"six", b"new"]


def test_damage_at_the_end_is_not_cut() -> None:
    """A reader may have seen the group; the next append begins a new segment."""
    storage = MemoryStorage()
    log(storage).append(1, b"one")
    file = storage.files["part-000/" + "0" * 20 + ".log"]
    file[-1] ^= 1
    assert log(storage).append(1, b"two") == (35 + HEAD, 35 + HEAD + 3)
    assert log(storage).segments() == [0, 35]
    assert len(file) == 35
    with pytest.raises(JournalDamaged, match="its bytes are not what was written"):
        data(log(storage))
    assert data(log(storage), skip=True) == [b"two"]


def test_segment_that_ends_within_a_group_is_damaged() -> None:
    """It is damaged only if another segment follows; otherwise its tail is torn."""
    storage = MemoryStorage()
    journal = log(storage, segment=30)
    journal.append(1, b"one")
    journal.append(1, b"two")
    del storage.files["part-000/" + "0" * 20 + ".log"][-1]
    with pytest.raises(JournalDamaged, match=r"at offset 0, .*ends within a group"):
        data(log(storage))
    assert data(log(storage), skip=True) == [b"two"]


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.binary(min_size=1, max_size=60), min_size=4, max_size=12),
    st.integers(40, 150),
    st.data(),
)
def test_segment_that_has_lost_its_end_or_is_gone(
    parts: list[bytes], segment: int, draw: st.DataObject
) -> None:
    """No gap before the next segment is read over, wherever it begins (issue 24)."""
    storage = MemoryStorage()
    journal = log(storage, segment=segment)
    for part in parts:
        journal.append(1, part)
    *complete, _ = journal.segments()
    assume(complete)
    path = f"part-000/{draw.draw(st.sampled_from(complete)):020}.log"
    file = storage.files[path]
    if path != min(storage.files) and draw.draw(st.booleans()):
        del storage.files[path]
    else:
        del file[draw.draw(st.integers(0, len(file) - 1)) :]
    found, error = tried(log(storage))
    assert found == parts[: len(found)]
    assert error is not None
    rest = data(log(storage), skip=True)
    assert rest[: len(found)] == found
    assert rest[len(found) :] == parts[len(parts) - (len(rest) - len(found)) :]
    # What follows can be read by a reader that has skipped the gap.
    following = [end for end in journal.segments() if end > error.offset]
    assert data(log(storage), following[0]) == rest[len(found) :]


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=8),
    st.integers(40, 300),
    st.data(),
)
def test_journal_cut_anywhere(
    parts: list[bytes], segment: int, draw: st.DataObject
) -> None:
    """Whole groups are still read, in order, and the next append follows them."""
    storage = MemoryStorage()
    journal = log(storage, segment=segment)
    for part in parts:
        journal.append(1, part)
    last = journal.segments()[-1]
    file = storage.files[f"part-000/{last:020}.log"]
    del file[draw.draw(st.integers(0, len(file))) :]
    found = data(log(storage))
    assert found == parts[: len(found)]
    log(storage, segment=segment).append(1, b"next")
    assert data(log(storage)) == [*found, b"next"]


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=8),
    st.integers(40, 300),
    st.data(),
)
def test_any_flipped_bit(parts: list[bytes], segment: int, draw: st.DataObject) -> None:
    """Nothing is ever read that was not written."""
    storage = MemoryStorage()
    journal = log(storage, segment=segment)
    for part in parts:
        journal.append(1, part)
    path = draw.draw(st.sampled_from(sorted(storage.files)))
    bit = draw.draw(st.integers(0, 8 * len(storage.files[path]) - 1))
    storage.files[path][bit // 8] ^= 1 << bit % 8
    found, error = tried(log(storage))
    if error is not None:
        assert error.offset <= int(path[9:29]) + bit // 8
    assert found == parts[: len(found)]
    assert len(found) < len(parts)
    rest = data(log(storage), skip=True)
    assert len(rest) >= len(found)
    remaining = iter(parts)
    assert all(one in remaining for one in rest)


@pytest.mark.parametrize("written", [0, 1, HEAD - 1, HEAD, HEAD + 2])
@pytest.mark.parametrize("cuts", [True, False])
def test_full_disk_leaves_nothing(written: int, cuts: bool) -> None:
    """This holds whether or not the incomplete group can be cut at once."""
    storage = MemoryStorage()
    journal = log(storage)
    journal.append(1, b"one")
    storage.faults.append(("append", OSError(28, "No space left on device"), written))
    if not cuts:
        storage.faults.append(("truncate", OSError(5, "Input/output error"), 0))
    with pytest.raises(OSError, match="No space left"):
        journal.append(1, b"two")
    assert data(log(storage)) == [b"one"]
    storage.faults.clear()
    journal.sync()
    assert min(storage.synced.values()) >= HEAD + 3
    journal.append(1, b"three")
    assert data(log(storage)) == [b"one", b"three"]


def test_sync_is_of_the_last_segment(storage: Storage) -> None:
    """Before the first append there is nothing to sync."""
    journal = log(storage)
    journal.sync()
    journal.append(1, b"one")
    journal.sync()
    if isinstance(storage, MemoryStorage):
        assert storage.synced == {"part-000/" + "0" * 20 + ".log": 35}
        storage.faults.append(("sync", OSError(5, "Input/output error"), 0))
        with pytest.raises(OSError, match="Input/output"):
            journal.sync()
        journal.sync()


def test_only_the_last_segment_can_lose_bytes() -> None:
    """A segment is synced before the next one begins: readers take a gap for damage."""
    storage = MemoryStorage()
    journal = log(storage, segment=30)
    journal.append(1, b"one")
    storage.faults.append(("sync", OSError(5, "Input/output error"), 0))
    with pytest.raises(OSError, match="Input/output"):
        journal.append(1, b"two")
    assert (data(journal), storage.synced) == ([b"one"], {})
    journal.append(1, b"two")
    first = "part-000/" + "0" * 20 + ".log"
    assert storage.synced == {first: 35}
    # So is a damaged segment before a new one begins.
    storage = MemoryStorage()
    log(storage).append(1, b"one")
    storage.files[first][-1] ^= 1
    log(storage).append(1, b"two")
    assert storage.synced == {first: 35}


def test_reader_forces_to_the_disk_what_it_has_read(storage: Storage) -> None:
    """It syncs only what it read, whoever appended it, and no dropped segments."""
    journal = log(storage, segment=30)
    for part in (b"one", b"two"):
        journal.append(1, part)
    if isinstance(storage, MemoryStorage):
        storage.synced.clear()
        log(storage, segment=30).secure(35)
        assert storage.synced == {}
        log(storage, segment=30).secure(36)
        assert storage.synced == {"part-000/" + f"{35:020}" + ".log": 35}
    storage.sync("part-000/" + f"{70:020}" + ".log")
    log(storage, segment=30).secure(70)
    log(storage).secure(0)
    assert journal.segments() == [0, 35]


def test_what_was_dropped_is_gone(storage: Storage) -> None:
    """The error has the requested and the first offset; the last segment stays."""
    journal = log(storage, segment=30)
    for part in (b"one", b"two", b"six"):
        journal.append(1, part)
    assert journal.drop(34) == []
    assert journal.drop(35) == [0]
    assert (journal.first(), journal.size()) == (35, 70)
    with pytest.raises(OffsetGone) as caught:
        data(journal)
    assert (caught.value.asked, caught.value.first) == (0, 35)
    assert data(journal, 35) == [b"two", b"six"]
    assert journal.drop(1000) == [35]
    assert journal.segments() == [70]
    assert journal.append(1, b"new")[0] == 105 + HEAD


def test_reader_that_falls_behind_while_it_reads(storage: Storage) -> None:
    """The reader gets an error, instead of silently skipping what was dropped."""
    journal = log(storage, segment=70)
    for part in (b"one", b"two", b"six", b"ten", b"end"):
        journal.append(1, part)
    groups = log(storage).groups(0)
    assert next(groups).data == b"one"
    journal.drop(140)
    with pytest.raises(OffsetGone) as caught:
        list(groups)
    assert (caught.value.asked, caught.value.first) == (70, 140)


@pytest.mark.parametrize(
    ("time", "offset"),
    [(0, 0), (10, 0), (11, 35), (20, 35), (21, 70), (30, 70), (50, 140), (51, 175)],
)
def test_offset_of_a_time(storage: Storage, time: int, offset: int) -> None:
    """It is that of the first group at or after the time, or the journal's end."""
    journal = log(storage, segment=50)
    for number in range(1, 6):
        journal.append(10 * number, b"%03d" % number)
    assert journal.at_time(time) == offset
    assert journal.age_of(70) == 30


@pytest.mark.parametrize("damaged", [None, HEAD, 2 * HEAD + 20])
def test_times_do_not_go_back(damaged: int | None) -> None:
    """Not even after a failed roll, or damage, if the clock was set back (issue 24)."""
    storage = MemoryStorage()
    journal = log(storage, segment=150)
    for time in (1000, 2000, 3000):
        journal.append(time, b"x" * 20)
    if damaged is None:
        storage.faults.append(("append", OSError(28, "No space left on device"), 0))
        with pytest.raises(OSError, match="No space"):
            journal.append(4000, b"y" * 20)
        assert journal.segments() == [0, 156]
    else:
        storage.files["part-000/" + "0" * 20 + ".log"][damaged] ^= 1
    journal = log(storage, segment=150)
    journal.append(500, b"z" * 20)
    assert [group.time for group in journal.groups(156)] == [3000]
    assert journal.at_time(2500) == 104


def test_time_of_what_is_damaged() -> None:
    """A damaged group has no known time; later groups are still found by theirs."""
    storage = MemoryStorage()
    journal = log(storage, segment=50)
    assert journal.age_of(0) is None
    for number in range(1, 6):
        journal.append(10 * number, b"%03d" % number)
    storage.files["part-000/" + f"{70:020}" + ".log"][9] ^= 1
    assert journal.age_of(70) is None
    assert journal.at_time(50) == 140


def test_groups_are_bounded(storage: Storage) -> None:
    """A group's size is limited, so a head's field can always hold it."""
    with pytest.raises(ValueError, match="can't append 134217729 bytes at once"):
        log(storage).append(1, bytes(MAX_GROUP + 1))


def test_large_groups_and_many(storage: Storage) -> None:
    """Groups may span several reads; later ones are found by marks."""
    journal = log(storage, segment=1 << 30)
    parts = [
        bytes([n]) * size for n, size in enumerate([3 << 20, 10, 1 << 20, 700_000])
    ]
    parts += [b"%07d" % n for n in range(3000)]
    ends = [journal.append(1, part)[1] for part in parts]
    reader = log(storage)
    assert data(reader) == parts
    assert len(reader._marks[0]) > 2
    for number in (0, 1, 2, 3, 2000):
        assert next(iter(reader.groups(ends[number]))).data == parts[number + 1]


class Counting(MemoryStorage):
    """Counts listings of folders and reads of files."""

    def __init__(self) -> None:
        super().__init__()
        self.looks: Counter[str] = Counter()
        self.read_files: Counter[str] = Counter()
        """Number of bytes read, by path."""

    def names(self, folder: str) -> list[str]:
        """Count, and list."""
        self.looks["names"] += 1
        return super().names(folder)

    def read(self, path: str, at: int, size: int) -> bytes:
        """Count, and read."""
        self.looks["read"] += 1
        found = super().read(path, at, size)
        self.read_files[path] += len(found)
        return found


@pytest.mark.parametrize("size", [1000, 1 << 20])
def test_time_is_found_without_reading_what_is_before_it(size: int) -> None:
    """A binary search finds it, whatever the size of the groups (issue 24)."""
    storage = Counting()
    journal = log(storage, segment=1 << 30)
    count = (32 << 20) // size
    begins = [journal.append(n, bytes(size))[0] - HEAD for n in range(count)]
    for number in (0, 1, 7, len(begins) // 2, len(begins) - 1):
        storage.read_files.clear()
        assert log(storage).at_time(number) == begins[number]
        assert storage.read_files.total() < 3 << 20
    assert log(storage).at_time(len(begins)) == journal.end()


@pytest.mark.parametrize("damaged", range(0, 4000, 450))
def test_time_is_found_beside_damage(damaged: int) -> None:
    """A damaged group is passed over, as it has no time."""
    storage = MemoryStorage()
    journal = log(storage, segment=1 << 30)
    begins = [journal.append(n, bytes(1000))[0] - HEAD for n in range(4000)]
    (file,) = storage.files.values()
    file[begins[damaged] + 9] ^= 1
    for number in (0, damaged - 1, damaged, damaged + 1, 3999):
        wanted = max(number, 0)
        wanted += wanted == damaged
        assert log(storage).at_time(number) == begins[wanted]


def test_reader_at_the_end_of_ten_thousand_segments_reads_the_last() -> None:
    """That holds for a reader without a stored position and with one (issue 24)."""
    storage = Counting()
    with Journals(storage=storage, segment=1) as journals:
        (spec,) = journals.partitions()
        made = journals.log(spec.name)
        for number in range(10_000):
            made.append(number, b"{}\n")
        last = f"part-000/{made.segments()[-1]:020}.log"
    with Journals(storage=storage) as journals:
        storage.looks.clear()
        storage.read_files.clear()
        for _ in range(2):
            reader = journals.read_committed("r", start="end", follow=True)
            assert reader.poll() is None
            assert [lag.bytes for lag in lags(journals)] == [0]
            reader.close()
        assert set(storage.read_files) == {last}
        assert storage.looks["names"] < 30


def test_idle_reader_looks_at_one_segment_of_ten_thousand() -> None:
    """The next segment's name is known in advance; times are found by binary search."""
    storage = Counting()
    looks = storage.looks
    journal = log(storage, segment=1)
    for number in range(10_000):
        journal.append(number, b"one")
    end = 35 * 10_000
    assert journal.end() == end
    reader = LogReader(log(storage, segment=1), JournalSpec("j", ""), end)
    assert reader.read(0) is None
    looks.clear()
    for _ in range(100):
        assert reader.read(0) is None
    assert not looks
    journal.append(10_000, b"two")
    assert reader.read(0) == b"two"
    assert reader.read(0) is None
    looks.clear()
    assert log(storage).at_time(7_000) == 35 * 7_000
    assert looks["names"] == 1
    assert looks["read"] < 30


def test_idle_reader_sees_what_is_behind_damage(storage: Storage) -> None:
    """The next append begins another segment, where the damaged one ends."""
    log(storage).append(1, b"one")
    reader = LogReader(log(storage), JournalSpec("j", ""))
    assert reader.read(0) == b"one"
    assert reader.read(0) is None
    path = f"part-000/{0:020}.log"
    storage.append(path, b"x" * 40)
    with pytest.raises(JournalDamaged):
        reader.read(0)
    skipping = LogReader(
        log(storage), JournalSpec("j", ""), 35, on_error=lambda _: None
    )
    assert skipping.read(0) is None
    assert skipping.read(0) is None
    log(storage).append(1, b"two")
    assert skipping.read(0) == b"two"
