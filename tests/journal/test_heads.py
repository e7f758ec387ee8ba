"""Heads of frames describe the same frames that reading yields, with fewer reads."""

from __future__ import annotations

import pytest

from etlstage.journal import (
    JournalDamaged,
    Journals,
    MemoryStorage,
    Publisher,
    RunMessage,
)
from etlstage.journal.heads import FrameHead, FrameHeads, heads_of
from etlstage.journal.log import HEAD
from etlstage.sequencing import (
    FIXED_FRAME_WORD,
    DesyncDetected,
    FrameError,
    Opaque,
    UnexpectedEnd,
)

RUNS = "application/x-etlstage-run"
BYTES = "application/x-protobuf-fixed"


class Counting(MemoryStorage):
    """Storage that counts the bytes that are read."""

    read_bytes = 0

    def read(self, path: str, at: int, size: int) -> bytes:
        """Read bytes of a file, and count them."""
        data = super().read(path, at, size)
        self.read_bytes += len(data)
        return data


def opened(content_type: str = RUNS, *, segment: int = 64 << 20) -> Journals:
    """Return a set with one journal in memory."""
    return Journals(
        name="set", storage=Counting(), content_type=content_type, segment=segment
    )


def heads(journals: Journals, begin: int = 0, end: int | None = None) -> FrameHeads:
    """Return the heads of the set's journal."""
    (spec,) = journals.select()
    return FrameHeads(journals.log(spec.name), spec, begin, end)


def one(journals: Journals) -> tuple[str, str]:
    """Return the name and content type of the set's journal."""
    return journals.select()[0].name, journals.content_type


@pytest.mark.parametrize("content_type", [RUNS, BYTES])
@pytest.mark.parametrize("segment", [1000, 64 << 20])
@pytest.mark.parametrize("size", [3, 200_000])
def test_heads_are_those_of_the_frames(
    content_type: str, segment: int, size: int
) -> None:
    """That holds from any starting point; most bytes of large frames are not read."""
    journals = opened(content_type, segment=segment)
    publisher = Publisher(journals, mapping=lambda _: one(journals))
    for n in range(5):
        data = b"%d" % n * size
        publisher.publish_uncommitted(
            RunMessage([data] * n) if content_type == RUNS else Opaque(data)
        )
    for journal, intent in publisher.build_ack_intents():
        journals.append(journal, intent + intent)
    frames = list(journals.read_uncommitted(one(journals)[0]))
    journals.storage.read_bytes = 0  # type: ignore[attr-defined]
    found = list(heads(journals))
    if size > 1000 and segment > size and content_type == RUNS:
        assert journals.storage.read_bytes < 2_000  # type: ignore[attr-defined]
    counts = [0, 1, 2, 3, 4, 0, 0] if content_type == RUNS else [1] * 7
    assert [head.message.messages for head in found] == counts  # type: ignore[attr-defined]
    assert [(e.begin, e.end, e.message.uuid) for e in found] == [
        (e.begin, e.end, e.message.uuid) for e in frames
    ]
    for at, frame in enumerate(frames):
        rest = list(heads(journals, frame.begin, frames[-1].begin))
        assert [e.begin for e in rest] == [e.begin for e in found[at:-1]]
    befores = [head.message.before for head in found]  # type: ignore[attr-defined]
    assert befores == [0, *(frame.end for frame in frames[:-1])]


def test_what_comes_later_is_found() -> None:
    """Only whole groups count: a group that is being written isn't there yet."""
    journals = opened()
    publisher = Publisher(journals, mapping=lambda _: one(journals))
    messages = heads(journals)
    assert messages.poll() is None
    publisher.publish_committed(RunMessage([b"a" * 100_000]))
    assert messages.poll() is not None
    assert messages.poll() is None
    publisher.publish_committed(RunMessage([b"b" * 100_000]))
    file = journals.storage.files["part-000/00000000000000000000.log"]  # type: ignore[attr-defined]
    end = file.pop()
    assert messages.poll() is None
    file.append(end)
    assert messages.poll() is not None


def test_what_is_no_frame_is_an_error() -> None:
    """A group without a frame, one with half a frame, and one with a damaged head."""
    journals = opened()
    journal, _ = one(journals)
    journals.append(journal, b"none")
    with pytest.raises(DesyncDetected):
        heads(journals).poll()
    place = journals.append(journal, b"\x66\x33\x93\x36\xff\0\0\0" + bytes(16)).begin
    with pytest.raises(UnexpectedEnd) as raised:
        heads(journals, place).poll()
    assert isinstance(raised.value, FrameError)
    assert (raised.value.journal, raised.value.offset) == (journal, place)
    file = journals.storage.files["part-000/00000000000000000000.log"]  # type: ignore[attr-defined]
    file[place - HEAD] ^= 1
    with pytest.raises(JournalDamaged):
        heads(journals, place - HEAD).poll()


@pytest.mark.parametrize("content_type", [RUNS, BYTES])
def test_newline_may_follow_the_last_frame(content_type: str) -> None:
    """As for those who read messages, it is no frame (issue 24)."""
    journals = opened(content_type)
    journal, _ = one(journals)
    frame = FIXED_FRAME_WORD + b"\x10\0\0\0" + bytes(16)
    for _ in range(2):
        journals.append(journal, frame + b"\n")
    found = [(head.begin, head.end) for head in heads(journals)]
    messages = journals.read_uncommitted(journal)
    assert found == [(message.begin, message.end) for message in messages]
    assert len(found) == 2


def test_data_before_an_offset_are_not_read() -> None:
    """Groups before the offset are skipped by reading only their heads."""
    journals = opened()
    journal, _ = one(journals)
    for _ in range(20):
        journals.append(journal, bytes(1 << 20))
    last = journals.append(journal, b"last").begin
    reopened = Journals(storage=journals.storage)
    journals.storage.read_bytes = 0  # type: ignore[attr-defined]
    (group,) = reopened.log(journal).groups(last)
    assert group.data == b"last"
    assert journals.storage.read_bytes < 5_000  # type: ignore[attr-defined]


def test_a_head_is_for_sequencing_alone() -> None:
    """A head can't make an acknowledgement."""
    head = FrameHead(RunMessage().uuid, 0, 0)
    head.set_uuid(RunMessage().uuid)
    with pytest.raises(NotImplementedError):
        head.acknowledgement("set/part-000")


def test_messages_without_a_head_are_read() -> None:
    """Where frames have no separate head, the heads look the same."""
    journals = opened("application/x-ndjson")
    publisher = Publisher(journals, mapping=lambda _: one(journals))
    (spec,) = journals.select()
    messages = heads_of(journals, spec, 0)
    assert messages.poll() is None
    for n in range(3):
        publisher.publish_committed({"n": n})
    frames = list(journals.read_uncommitted(spec.name))
    found = [messages.poll() for _ in frames]
    again = list(heads_of(journals, spec, 0, frames[-1].end))
    for heads in (found, again):
        assert all(isinstance(head.message, FrameHead) for head in heads if head)
        assert [h and h.begin for h in heads] == [f.begin for f in frames]
        assert [h and h.message.uuid for h in heads] == [f.message.uuid for f in frames]
    runs = opened()
    assert isinstance(heads_of(runs, runs.select()[0], 0), FrameHeads)


def test_acknowledgement_is_checked_though_its_head_alone_is_wanted() -> None:
    """A damaged clock would commit a different set of messages (issue 24)."""
    journals = opened()
    publisher = Publisher(journals, mapping=lambda _: one(journals))
    publisher.publish_uncommitted(RunMessage([b"one"]))
    ((journal, intent),) = publisher.build_ack_intents()
    begin = journals.append(journal, intent).begin
    publisher.publish_committed(RunMessage([b"two"]))
    storage = journals.storage
    assert isinstance(storage, MemoryStorage)
    (file,) = [data for path, data in storage.files.items() if path.endswith(".log")]
    file[begin + 12] ^= 1
    with pytest.raises(JournalDamaged, match=f"offset {begin - HEAD}"):
        list(heads(journals))
    passed: list[Exception] = []
    found = list(heads_of(journals, journals.select()[0], 0, on_error=passed.append))
    assert len(found) == 2
    assert [str(error) for error in passed] == [str(passed[0])]
    head = found[1].message
    assert isinstance(head, FrameHead)
    # No range of frames spans the damage.
    assert head.before == found[1].begin - HEAD


@pytest.mark.parametrize("content_type", [RUNS, BYTES])
@pytest.mark.parametrize("place", [*range(4), *range(8, 24), 24, 28, 55])
def test_damaged_head_of_a_large_frame_is_an_error(
    content_type: str, place: int
) -> None:
    """A damaged UUID could drop the frame, or commit an open transaction (issue 24)."""
    journals = opened(content_type)
    publisher = Publisher(journals, mapping=lambda _: one(journals))
    data = b"x" * 200_000
    message = RunMessage([data]) if content_type == RUNS else Opaque(data)
    publisher.publish_committed(message)
    assert len(list(heads(journals))) == 1
    file = journals.storage.files["part-000/00000000000000000000.log"]  # type: ignore[attr-defined]
    file[HEAD + place] ^= 1
    with pytest.raises((FrameError, JournalDamaged), match=r"not what|de-sync"):
        list(heads(journals))


def test_frame_that_is_none_is_passed_over_with_its_group() -> None:
    """What follows it in its group may not be a frame either (issue 24)."""
    journals = opened()
    publisher = Publisher(journals, mapping=lambda _: one(journals))
    publisher.publish_committed(RunMessage([b"one"]))
    journals.append(one(journals)[0], b"no frame is this")
    publisher.publish_committed(RunMessage([b"two"]))
    (spec,), passed = journals.select(), list[Exception]()
    found = list(heads_of(journals, spec, 0, on_error=passed.append))
    assert len(found) == 2
    assert [type(error) for error in passed] == [DesyncDetected]
    with pytest.raises(DesyncDetected):
        list(heads(journals))
