"""Iterators over the messages of a journal: all of them, and the committed ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from io import BytesIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etlstage.errors import ConfigError
from etlstage.sequencing import (
    Clock,
    DesyncDetected,
    Envelope,
    FrameError,
    JournalSpec,
    Message,
    Opaque,
    Publisher,
    ReadCommitted,
    ReadUncommitted,
    ReplayFailed,
    Sequencer,
    UnexpectedEnd,
    build_uuid,
    framing_by_content_type,
    read_committed,
    read_uncommitted,
)
from tests.sequencing.journals import A, B, Memory, Str, spec, to_json

FIXED = "application/x-protobuf-fixed"


class Pieces:
    """A reader of a journal in pieces, each with its offset; None is an empty read."""

    def __init__(
        self,
        pieces: Iterable[tuple[int, bytes] | None],
        of: JournalSpec,
        offset: int = 0,
    ) -> None:
        self._pieces = iter(pieces)
        self.spec = of
        self.offset = offset

    def read(self, size: int) -> bytes | None:
        """Return the next piece."""
        assert size > 0
        piece = next(self._pieces, (self.offset, b""))
        if piece is None:
            return None
        offset, data = piece
        self.offset = offset + len(data)
        return data


class Async:
    """The same reader, with an asynchronous ``read``."""

    def __init__(self, reader: Pieces) -> None:
        self._reader = reader
        self.spec = reader.spec

    @property
    def offset(self) -> int:
        """The offset of the wrapped reader."""
        return self._reader.offset

    async def read(self, size: int) -> bytes | None:
        """Return the next piece."""
        return self._reader.read(size)


def new_str(of: JournalSpec) -> Message:
    """Return a message to read into."""
    assert of.name == "a"
    return Str()


def new_opaque(of: JournalSpec) -> Message:
    """Return a message to read into."""
    return Opaque()


def cut(data: bytes, size: int = 7, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield the data of a journal in pieces, each with its offset."""
    for at in range(0, len(data), size):
        yield offset + at, data[at : at + size]


def frame(producer: bytes, clock: int, flags: int, data: bytes = b"") -> bytes:
    """Return a message in its fixed frame."""
    message, written = Opaque(data), BytesIO()
    message.set_uuid(build_uuid(producer, clock, flags))
    framing_by_content_type(FIXED).marshal(message, written)
    return written.getvalue()


BOTH = b"".join(
    frame(*one) for one in [(A, 1, 1), (B, 1, 1), (A, 2, 1), (B, 2, 1), (B, 3, 2)]
)


def test_all_messages_and_the_committed_ones() -> None:
    """The ring holds nothing, so committed messages come from a replay."""
    found = list(read_uncommitted(Pieces(cut(BOTH), spec(FIXED)), new_opaque))
    assert [(one.journal, one.begin, one.end) for one in found] == [
        ("a", 24 * n, 24 * n + 24) for n in range(5)
    ]
    committed = read_committed(
        Pieces(cut(BOTH), spec(FIXED)),
        new_opaque,
        Sequencer(ring=0),
        lambda _, begin, end: Pieces(
            cut(BOTH[begin:end], 5, begin), spec(FIXED), begin
        ),
    )
    assert [one.begin for one in committed] == [24, 72, 96]


async def test_all_messages_and_the_committed_ones_waiting() -> None:
    """An asynchronous reader yields the same messages."""
    pieces = Async(Pieces(cut(BOTH), spec(FIXED)))
    found = [one.begin async for one in read_uncommitted(pieces, new_opaque)]
    assert found == [0, 24, 48, 72, 96]
    committed = read_committed(
        Async(Pieces(cut(BOTH), spec(FIXED))),
        new_opaque,
        Sequencer(ring=0),
        lambda _, begin, end: Async(
            Pieces(cut(BOTH[begin:end], 5, begin), spec(FIXED), begin)
        ),
    )
    assert [one.begin async for one in committed] == [24, 72, 96]


async def test_replay_that_fails_is_opened_again() -> None:
    """The caller gets the replay's error; the next call starts another replay."""
    opened: list[tuple[str, int, int]] = []

    def replay(journal: str, begin: int, end: int) -> Async:
        opened.append((journal, begin, end))
        data = BOTH[begin:end] if len(opened) > 1 else b"x" * 30
        return Async(Pieces(cut(data, 5, begin), spec(FIXED), begin))

    committed = read_committed(
        Async(Pieces(cut(BOTH), spec(FIXED))), new_opaque, Sequencer(ring=0), replay
    )
    with pytest.raises(ReplayFailed, match=r"^replay reader: .*de-synchronization"):
        await anext(committed)
    assert [one.begin async for one in committed] == [24, 72, 96]
    assert opened == [("a", 24, 96)] * 2


async def test_replay_of_another_iterator_is_not_waited_for() -> None:
    """The second iterator raises, as it would otherwise wait forever."""
    sequencer = Sequencer(ring=0)

    def iterator() -> ReadCommitted:
        return read_committed(
            Async(Pieces(cut(BOTH), spec(FIXED))),
            new_opaque,
            sequencer,
            lambda _, begin, end: Async(
                Pieces(cut(BOTH[begin:end], 5, begin), spec(FIXED), begin)
            ),
        )

    first, second = iterator(), iterator()
    await anext(first)
    with pytest.raises(ReplayFailed, match="belongs to another iterator"):
        await anext(second)


def test_publisher_sequencer_and_reader() -> None:
    """Two publishers share a clock, one of them uses transactions; the ring is 3."""
    journals, clock = Memory(), Clock()
    txn, plain = Publisher(journals, clock), Publisher(journals, clock)
    read = 0

    def pieces() -> Iterator[tuple[int, bytes] | None]:
        nonlocal read
        while True:
            data = journals.data["a"][read:]
            read += len(data)
            yield read - len(data), data

    def replay(_: str, begin: int, end: int) -> Pieces:
        return Pieces([(begin, journals.data["a"][begin:end])], spec(), begin)

    sequencer = Sequencer(ring=3)

    def texts() -> list[str]:
        reader = Pieces(pieces(), spec(), read)
        found = []
        for envelope in read_committed(reader, new_str, sequencer, replay):
            assert isinstance(envelope.message, Str)
            found.append(envelope.message.text)
        return found

    def acknowledge() -> None:
        for intent in txn.build_ack_intents():
            journals.start_append(intent.journal).release(intent.intent)

    txn.publish_uncommitted(Str("one"), to_json)
    assert texts() == []
    plain.publish_committed(Str("two"), to_json)
    assert texts() == ["two"]
    acknowledge()
    assert texts() == ["one", ""]
    for act, text, expected in (
        (txn.publish_uncommitted, "three", []),
        (plain.publish_committed, "four", ["four"]),
        (txn.publish_uncommitted, "five", []),
        (plain.publish_committed, "six", ["six"]),
        (txn.publish_uncommitted, "seven", []),
    ):
        act(Str(text), to_json)
        assert texts() == expected
    acknowledge()
    assert texts() == ["three", "five", "seven", ""]


def test_journal_may_begin_later_and_leave_bytes_out() -> None:
    """Messages have the journal's offsets; empty reads don't end the iteration."""
    one, two, three = (frame(A, n, 0) for n in (1, 2, 3))
    pieces = [
        (1000, one[:9]),
        None,
        (1009, one[9:] + two),
        *[None] * 100,
        (5000, three),
    ]
    found = list(ReadUncommitted(Pieces(pieces, spec(FIXED), 1), new_opaque))
    assert [(one.begin, one.end) for one in found] == [
        (1000, 1024), (1024, 1048), (5000, 5024)
    ]  # fmt: skip


def test_bytes_left_out_within_a_frame() -> None:
    """The incomplete frame is an error, and the messages after it are read."""
    one, two = frame(A, 1, 0), frame(A, 2, 0)
    reader = Pieces([(0, one + two[:9]), (500, two)], spec(FIXED))
    messages = ReadUncommitted(reader, new_opaque)
    assert next(messages).begin == 0
    with pytest.raises(UnexpectedEnd) as caught:
        next(messages)
    assert str(caught.value) == (
        "framing.Unmarshal(offset 24): unexpected EOF: the journal continues at offset"
        " 500"
    )
    assert (caught.value.journal, caught.value.framing) == ("a", FIXED)
    assert [one.begin for one in messages] == [500]


def test_end_within_a_frame() -> None:
    """The error has the text of the real package."""
    reader = Pieces([(1000, b'{"UUID":"0')], spec(), 1000)
    messages = ReadUncommitted(reader, new_str)
    with pytest.raises(UnexpectedEnd) as caught:
        next(messages)
    assert str(caught.value) == "framing.Unmarshal(offset 1000): unexpected EOF"
    assert caught.value.journal == "a"
    with pytest.raises(StopIteration):
        next(messages)


def test_error_of_a_message_is_its_own() -> None:
    """Iteration continues after the error with the next message."""
    data = frame(A, 1, 0) + b"dead bytes" + frame(A, 2, 0)
    messages = ReadUncommitted(Pieces(cut(data), spec(FIXED)), new_opaque)
    assert next(messages).begin == 0
    with pytest.raises(DesyncDetected) as caught:
        next(messages)
    assert caught.value.skipped == b"dead bytes"
    assert (caught.value.offset, caught.value.journal) == (24, "a")
    assert [one.begin for one in messages] == [34]


def test_messages_are_their_own() -> None:
    """Each read gets a new message object, which is made only when it is needed."""
    made: list[Message] = []

    def new(of: JournalSpec) -> Message:
        made.append(Opaque())
        return made[-1]

    found = list(ReadUncommitted(Pieces(cut(BOTH, 3), spec(FIXED)), new))
    assert [one.message for one in found] == made[:5]
    assert len(made) == 6


def test_reader_that_has_nothing_yet_is_polled() -> None:
    """``poll`` returns None, instead of waiting for a message."""
    one = frame(A, 1, 0)
    reader = Pieces([None, (0, one[:9]), None, (9, one[9:])], spec(FIXED))
    messages = ReadUncommitted(reader, new_opaque)
    assert [messages.poll(), messages.poll()] == [None, None]
    found = messages.poll()
    assert found is not None
    assert found.end == 24
    with pytest.raises(EOFError):
        messages.poll()


def test_limit_of_a_frame() -> None:
    """Both iterators apply ``max_frame``, and continue after the error."""
    data = frame(A, 1, 0) + frame(A, 2, 0, b"x" * 10) + frame(A, 3, 0)
    for messages in (
        read_uncommitted(Pieces(cut(data), spec(FIXED)), new_opaque, max_frame=24),
        read_committed(
            Pieces(cut(data), spec(FIXED)),
            new_opaque,
            Sequencer(),
            lambda *_: Pieces((), spec()),
            max_frame=24,
        ),
    ):
        assert next(messages).begin == 0
        with pytest.raises(FrameError, match="34 bytes long, expected no more than 24"):
            next(messages)
        with pytest.raises(DesyncDetected):
            next(messages)
        assert next(messages).begin == 58


@pytest.mark.parametrize("content_type", ["", "text/plain"])
def test_journal_without_a_framing(content_type: str) -> None:
    """It can't be read; the error begins like that of the real package."""
    with pytest.raises(
        ConfigError,
        match=rf"^determining framing: unrecognized content-type \({content_type}\)",
    ):
        ReadUncommitted(Pieces((), spec(content_type)), new_opaque)


@settings(deadline=None)
@given(st.integers(0, len(BOTH)), st.integers(1, 200))
def test_journal_cut_anywhere(at: int, size: int) -> None:
    """Whole messages are delivered; the rest is an error with its offset."""
    found: list[Envelope] = []
    messages = ReadUncommitted(Pieces(cut(BOTH[:at], size), spec(FIXED)), new_opaque)
    if at % 24:
        with pytest.raises(UnexpectedEnd) as caught:
            found.extend(messages)
        assert caught.value.offset == at - at % 24
    else:
        found.extend(messages)
    assert [one.begin for one in messages] == []
    assert len(found) in {0, at // 24}
