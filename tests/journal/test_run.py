"""Runs of messages in one frame."""

from __future__ import annotations

from io import BytesIO
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etlstage.journal import Journals, MemoryStorage, Publisher, RunMessage
from etlstage.journal.account import lags, verify
from etlstage.journal.run import RunFraming
from etlstage.sequencing import (
    FrameBuffer,
    FrameError,
    NotFrameable,
    Opaque,
    framing_by_content_type,
)

RUN = "application/x-etlstage-run"
U = UUID("83fc2f81-cc5f-11e9-8400-01aaaaaaaa01")


def framed(run: list[bytes]) -> bytes:
    """Return a frame."""
    message, written = RunMessage(run), BytesIO()
    message.set_uuid(U)
    RunFraming().marshal(message, written)
    return written.getvalue()


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=9))
def test_runs_come_back(run: list[bytes]) -> None:
    """A run has one UUID; a run without messages serves as an acknowledgement."""
    buffer, message = FrameBuffer(), RunMessage()
    unmarshal = framing_by_content_type(RUN).unmarshaller(buffer)
    assert not unmarshal(message)
    buffer.feed(framed(run))
    assert unmarshal(message)
    assert (list(message.run), message.uuid) == (run, U)
    assert len(framed([])) == 24
    assert repr(message) == f"<RunMessage {U} messages={len(run)}>"
    assert list(message.acknowledgement("j").run) == []


@pytest.mark.parametrize("at", [24, 40, 44, 52])
def test_damaged_run_is_that_frame_alone(at: int) -> None:
    """Damage is found in the frame's head and in its block's; the next run is read."""
    data = bytearray(framed([b"one"]))
    data[at] ^= 1
    buffer, message = FrameBuffer(), RunMessage()
    buffer.feed(bytes(data) + framed([b"two"]))
    unmarshal = RunFraming().unmarshaller(buffer)
    with pytest.raises(FrameError, match=r"offset 0\).*damaged"):
        unmarshal(message)
    assert unmarshal(message)
    assert list(message.run) == [b"two"]


def test_frames_that_hold_no_run() -> None:
    """A frame too short for a UUID or for a block is an error, as is another type."""
    buffer = FrameBuffer()
    buffer.feed(bytes.fromhex("6633933602000000") + b"xx")
    buffer.feed(bytes.fromhex("6633933614000000") + b"x" * 20)
    unmarshal = RunFraming().unmarshaller(buffer)
    with pytest.raises(FrameError, match="expected a UUID of 16 bytes, got 2"):
        unmarshal(RunMessage())
    with pytest.raises(FrameError, match="its block is incomplete"):
        unmarshal(RunMessage())
    for act in (
        lambda: unmarshal(Opaque()),
        lambda: RunFraming().marshal(Opaque(), BytesIO()),
    ):
        with pytest.raises(NotFrameable, match="Opaque can't be framed as application"):
            act()


def test_open_transaction_is_not_held_in_memory() -> None:
    """Only a few runs are held; the others are read again after the commit."""
    journals = Journals(storage=MemoryStorage(), content_type=RUN)
    writer = Publisher(journals, mapping=lambda _: ("memory/part-000", RUN))
    for _ in range(40):
        writer.publish_uncommitted(RunMessage([b"x"]))
    reader = journals.read_committed()
    assert reader.poll() is None
    (span,) = reader._sequencer._spans.values()
    assert len(span.held) == 16
    for intent in writer.build_ack_intents():
        journals.append(intent.journal, intent.intent)
    assert len(list(reader)) == 40


def test_runs_are_published_and_read() -> None:
    """Each run is one message of the set."""
    journals = Journals(storage=MemoryStorage(), content_type=RUN)
    writer = Publisher(journals, mapping=lambda _: ("memory/part-000", RUN))
    for number in range(3):
        writer.publish_uncommitted(RunMessage([b"%d" % number] * 1000))
    for intent in writer.build_ack_intents():
        journals.append(intent.journal, intent.intent)
    found = [envelope.message for envelope in journals.read_committed()]
    assert [list(one.run) for one in found if isinstance(one, RunMessage)] == [
        [b"%d" % number] * 1000 for number in range(3)
    ]


def test_messages_are_counted_and_not_their_runs() -> None:
    """That holds for what is committed, pending, rolled back, a duplicate or unread."""
    journals = Journals(storage=MemoryStorage(), content_type=RUN)
    name = "memory/part-000"
    assert not list(journals.read_committed("r"))

    def writer() -> Publisher:
        return Publisher(journals, mapping=lambda _: (name, RUN))

    first, second = writer(), writer()
    first.publish_uncommitted(RunMessage([b"a"] * 30))
    (frame,) = [group.data for group in journals.log(name).groups(0)]
    (intent,) = first.build_ack_intents()
    for data in (intent.intent, frame):
        journals.append(name, data)
    first.publish_uncommitted(RunMessage([b"b"] * 7))
    journals.append(name, intent.intent)
    second.publish_committed(RunMessage([b"c"] * 5))
    second.publish_uncommitted(RunMessage([b"d"] * 4))
    counts = verify(journals, name)
    assert (counts.committed, counts.pending) == (30 + 5, 4)
    assert (counts.rolled_back, counts.duplicates) == (7, 30)
    assert [lag.messages for lag in lags(journals)] == [30 + 30 + 7 + 5 + 4]
