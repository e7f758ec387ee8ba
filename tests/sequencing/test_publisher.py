"""What a publisher appends, in which order, and what remains after an error."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any

import pytest

from etlstage.errors import ConfigError, LocalProtocolError
from etlstage.sequencing import (
    NO_UUID,
    AckIntent,
    AppendUncertain,
    Clock,
    EmptyListResponse,
    Envelope,
    Flags,
    FrameError,
    JsonMessage,
    Message,
    NotFrameable,
    Opaque,
    Publisher,
    Sequencer,
    Unbound,
    clock_of,
    flags_of,
    modulo,
    parse_uuid,
    producer_of,
)
from tests.sequencing.journals import A, Done, Memory, MemorySection, Str, to_json
from tests.sequencing.vectors import VECTORS

JSON = "application/x-ndjson"
ACTS: list[Callable[[Publisher], Callable[..., Any]]] = [
    lambda publisher: publisher.publish_committed,
    lambda publisher: publisher.publish_uncommitted,
]


@pytest.mark.parametrize("row", VECTORS["publisher"], ids=["txn", "committed", "both"])
def test_journals_are_those_of_the_real_package(row: dict[str, Any]) -> None:
    """They are equal byte for byte."""
    journals, clock = Memory(), Clock(tick=row["tick"])
    # Two publishers of one id, as the third trace has committed messages within open
    # transactions.
    producer = bytes.fromhex(row["producer"])
    txn = Publisher(journals, clock, producer=producer)
    plain = Publisher(journals, clock, producer=producer)
    for act, *rest in row["trace"]:
        if act == "build_ack_intents":
            intents = txn.build_ack_intents()
            assert intents == [AckIntent(j, i.encode()) for j, i in rest[0]]
            for intent in intents:
                journals.start_append(intent.journal).release(intent.intent)
            continue
        journal, text, uuid, at = rest
        message = Str(text)
        publisher = plain if act == "publish_committed" else txn
        append = getattr(publisher, act)(message, lambda _, j=journal: (j, JSON))
        assert append.done
        assert append.journal == journal
        assert str(message.uuid) == uuid
        assert clock.value == clock_of(message.uuid) == int(at)
    assert {j: data.decode() for j, data in journals.data.items()} == row["journals"]


def test_publisher_has_an_id_and_a_clock_of_its_own() -> None:
    """By default the clock follows the time."""
    times = iter([12_000_000_300, 12_000_000_300, 13_000_000_000])
    journals = Memory()
    publisher = Publisher(journals, mapping=to_json, now=lambda: next(times))
    messages = [Str("a"), Str("b"), Str("c")]
    for message in messages:
        publisher.publish_committed(message)
    assert [clock_of(message.uuid) for message in messages] == [
        1955086849920000048 + 160,
        1955086849920000048 + 320,
        1955086850080000000 + 160,
    ]
    assert {producer_of(message.uuid) for message in messages} == {publisher.producer}
    assert {flags_of(message.uuid) for message in messages} == {Flags.OUTSIDE_TXN}
    assert Publisher(journals).producer != publisher.producer


def test_a_clock_that_is_given_is_the_callers() -> None:
    """The publisher doesn't update it to the time; 0 is a time like any other."""
    clock, message = Clock(), Str("a")
    Publisher(Memory(), clock, mapping=to_json).publish_committed(message)
    assert clock.value == clock_of(message.uuid) == 160


class Unframeable(Str):
    def marshal_json_to(self, writer: object) -> None:
        """Write UUID and text."""
        raise NotFrameable("half of it")


def no_journals(message: object) -> tuple[str, str]:
    """Raise the error for no journals."""
    raise EmptyListResponse


def to_unknown(message: object) -> tuple[str, str]:
    """Map to a journal of an unknown content type."""
    return "a", "text/plain"


def _unfit() -> Str:
    message = Str("unfit")
    message.error = ValueError("unfit")
    return message


FAILURES = {
    "validator": (_unfit, no_journals, False, ValueError),
    "mapping": (Str, no_journals, False, EmptyListResponse),
    "content type": (Str, to_unknown, False, ConfigError),
    "framing": (Unframeable, to_json, False, NotFrameable),
    "disk": (Str, to_json, True, OSError),
}


@pytest.mark.parametrize("act", ACTS, ids=["committed", "uncommitted"])
@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
def test_error_leaves_nothing(
    failure: tuple[Any, Any, bool, Any], act: Callable[[Publisher], Any]
) -> None:
    """No tick, bytes or transaction remain; the next attempt succeeds."""
    make, mapping, is_full, error = failure
    journals, clock = Memory(), Clock(1000)
    publisher = Publisher(journals, clock)
    journals.error = OSError(28, "No space left on device") if is_full else None
    with pytest.raises(error):
        act(publisher)(make(), mapping)
    assert clock.value == 1000
    assert journals.data == {}
    assert journals.sections == []
    assert publisher.build_ack_intents() == []
    journals.error = None
    act(publisher)(Str("again"), to_json)
    assert clock.value == 1160
    assert journals.data["a"].endswith(b'"Str":"again"}\n')


def test_message_that_no_reader_would_take_is_not_published() -> None:
    """A frame has the readers' limit (issue 24)."""
    journals, clock = Memory(), Clock(1000)
    for act in ACTS:
        Publisher(journals, clock).publish_committed(Str("x" * 30), to_json)
        size, before = len(journals.data.pop("a")), clock.value
        publisher = Publisher(journals, clock, max_frame=size)
        error = f"is {size + 1} bytes long, expected no more than {size} bytes"
        with pytest.raises(FrameError, match=error):
            act(publisher)(Str("x" * 31), to_json)
        assert (clock.value, journals.data.get("a")) == (before, None)
        act(publisher)(Str("y" * 30), to_json)
        assert len(journals.data.pop("a")) == size


def test_append_that_is_uncertain() -> None:
    """Its clock is not used again; its transaction can't be committed."""
    journals, clock = Memory(), Clock(1000)
    journals.error = AppendUncertain("no answer")
    for act, ends in zip(ACTS, (False, True), strict=True):
        publisher = Publisher(journals, clock)
        before = clock.value
        with pytest.raises(AppendUncertain):
            act(publisher)(Str("one"), to_json)
        assert clock.value == before + 160
        if ends:
            with pytest.raises(LocalProtocolError, match="is uncertain"):
                act(publisher)(Str("two"), to_json)
            with pytest.raises(LocalProtocolError, match="another publisher"):
                publisher.build_ack_intents()
        else:
            assert publisher.build_ack_intents() == []


@pytest.mark.parametrize("place", [0, 1])
def test_transaction_with_an_uncertain_append_is_rolled_back(place: int) -> None:
    """The journal may have the message, even if it is the first (issue 24)."""
    journals, told = Memory(), list[AckIntent]()
    publisher = Publisher(journals, Clock(1000), mapping=to_json, opening=told.append)
    for _ in range(place):
        publisher.publish_uncommitted(Str("before"))
    journals.error = AppendUncertain("no answer")
    with pytest.raises(AppendUncertain):
        publisher.publish_uncommitted(Str("one"))
    assert publisher.rollback_intents() == told
    assert [intent.journal for intent in told] == ["a"]
    with pytest.raises(LocalProtocolError, match="it has uncommitted ones"):
        publisher.publish_committed(Str("two"))


def test_committed_within_an_own_transaction_is_refused() -> None:
    """Readers would drop the transaction; in another journal it is allowed."""
    journals = Memory()
    publisher = Publisher(journals, Clock())
    publisher.publish_uncommitted(Str("one"), to_json)
    before = journals.data["a"]
    with pytest.raises(
        LocalProtocolError, match="can't publish a committed message to a"
    ):
        publisher.publish_committed(Str("two"), to_json)
    assert journals.data["a"] == before
    publisher.publish_committed(Str("two"), lambda _: ("b", JSON))
    publisher.build_ack_intents()
    publisher.publish_committed(Str("three"), to_json)


def test_committed_is_refused_if_a_transaction_opens_before_its_section() -> None:
    """Another thread may get the journal's section first (issue 24)."""

    class First(Memory):
        opening = False

        def start_append(self, journal: str) -> MemorySection:
            if self.opening:
                self.opening = False
                publisher.publish_uncommitted(Str("one"), to_json)
            return super().start_append(journal)

    journals = First()
    publisher = Publisher(journals, Clock())
    journals.opening = True
    with pytest.raises(
        LocalProtocolError, match="can't publish a committed message to a"
    ):
        publisher.publish_committed(Str("two"), to_json)
    assert journals.sections == []
    assert journals.data["a"].count(b"\n") == 1


def test_committed_is_refused_as_soon_as_a_transaction_is_appended() -> None:
    """The next section may begin before the append has returned (issue 24)."""

    class Next(Memory):
        def start_append(self, journal: str) -> MemorySection:
            super().start_append(journal)
            return Section(self, journal)

    class Section(MemorySection):
        def release(self, *data: bytes) -> Done:
            append = super().release(*data)
            if flags_of(parse_uuid(data[0][9:45].decode())) == Flags.CONTINUE_TXN:
                with pytest.raises(LocalProtocolError, match="it has uncommitted ones"):
                    publisher.publish_committed(Str("two"), to_json)
            return append

    journals = Next()
    publisher = Publisher(journals, Clock())
    publisher.publish_uncommitted(Str("one"), to_json)
    assert journals.data["a"].count(b"\n") == 1


def test_uncommitted_messages_are_published_one_at_a_time() -> None:
    """A mapping can't publish another one; after that error publishing works again."""
    publisher = Publisher(Memory(), Clock())

    def within(message: object) -> tuple[str, str]:
        publisher.publish_uncommitted(Str("inner"), to_json)
        return "a", JSON

    with pytest.raises(LocalProtocolError, match="one at a time"):
        publisher.publish_uncommitted(Str("outer"), within)
    publisher.publish_uncommitted(Str("next"), to_json)


def test_without_a_mapping_nothing_is_published() -> None:
    """A mapping given to the call takes precedence over the publisher's."""
    journals = Memory()
    with pytest.raises(LocalProtocolError, match="no mapping: give one"):
        Publisher(journals).publish_committed(Str("a"))
    publisher = Publisher(journals, mapping=to_json)
    publisher.publish_committed(Str("a"), lambda _: ("b", JSON))
    assert list(journals.data) == ["b"]


async def test_values_are_published_to_the_journals_of_the_appender() -> None:
    """Objects become messages; a mapping without journals uses the appender's."""
    journals = Memory()
    mapping = Unbound(modulo, lambda message, hasher: hasher.write(message["k"]))
    publisher = Publisher(journals, Clock(), mapping=mapping, producer=A)
    append = publisher.publish_committed({"k": 1} | {"k": b"x"}, to_json_k)
    await append
    assert append.done
    publisher.publish_committed(Key())
    assert journals.data["a"].count(b"\n") == 2


class Key(Str):
    def __getitem__(self, name: str) -> bytes:
        return b"x"


def to_json_k(message: JsonMessage) -> tuple[str, str]:
    """Map to journal a, making the key's bytes text that JSON can hold."""
    message.value["k"] = message["k"].decode()
    return "a", JSON


def test_messages_that_hold_no_uuid_are_counted() -> None:
    """They are counted because they are only delivered at least once."""

    class Without(Str):
        def set_uuid(self, uuid: object) -> None:
            pass

    publisher = Publisher(Memory(), mapping=to_json)
    publisher.publish_committed(Str("a"))
    assert publisher.without_uuid == 0
    publisher.publish_committed(Without("a"))
    publisher.publish_uncommitted(Without("a"))
    assert publisher.without_uuid == 2


def test_intents_are_built_once() -> None:
    """Each journal gets one, of its first message's type and framing."""
    journals, clock = Memory(), Clock()
    publisher = Publisher(journals, clock, producer=A)
    fixed = "application/x-protobuf-fixed"
    for message, journal, kind in (
        (Opaque(b"1"), "b", fixed),
        (JsonMessage({"a": 1}), "a", JSON),
        (Opaque(b"2"), "b", fixed),
    ):
        publisher.publish_uncommitted(message, lambda _, t=(journal, kind): t)  # type: ignore[misc]
    first, second = publisher.build_ack_intents()
    assert first.journal == "b"
    assert first.intent[:8].hex() == "6633933610000000"
    assert first.intent[8:].hex() == "0000002800001000800201aaaaaaaa01"
    assert second.journal == "a"
    assert b'{"_meta":{"uuid":"00000032-' in second.intent
    assert clock.value == 800
    assert publisher.build_ack_intents() == []
    assert clock.value == 800


def _always(target: tuple[str, str], message: object) -> tuple[str, str]:
    return target


def test_intent_is_as_wide_as_the_first_record() -> None:
    """A reader of CSV accepts no record of another width."""
    publisher = Publisher(Memory(), Clock(), mapping=lambda _: ("a", "text/csv"))
    for fields in (["1", "2"], ["1", "2", "3"]):
        publisher.publish_uncommitted(fields)
    (intent,) = publisher.build_ack_intents()
    assert intent.intent.count(b",") == 2


def test_threads_publish_committed_messages() -> None:
    """The clocks rise in each journal, and no message is lost."""
    from threading import Lock

    class Ordered(Memory):
        def __init__(self) -> None:
            super().__init__()
            self.locks = {"a": Lock(), "b": Lock()}

        def start_append(self, journal: str) -> Any:  # noqa: ANN401
            self.locks[journal].acquire()
            section = super().start_append(journal)
            lock = self.locks[journal]

            class Section:
                def release(self, data: bytes) -> object:
                    append = section.release(data)
                    lock.release()
                    return append

            return Section()

    journals = Ordered()
    publisher = Publisher(journals, Clock())

    def run(number: int) -> None:
        for n in range(200):
            target = ("ab"[(n + number) % 2], JSON)
            publisher.publish_committed(Str("x"), partial(_always, target))

    threads = [Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    clocks = [
        [clock_of(parse_uuid(line[9:45].decode())) for line in data.splitlines()]
        for data in journals.data.values()
    ]
    assert all(found == sorted(set(found)) for found in clocks)
    assert sum(map(len, clocks)) == 800


def test_protocols_are_seen_in_messages() -> None:
    """Classes needn't name a protocol to implement it."""
    assert isinstance(Str(), Message)
    assert not isinstance({}, Message)
    assert Str().uuid == NO_UUID


@pytest.mark.parametrize("before", [False, True])
def test_transaction_is_rolled_back(
    caplog: pytest.LogCaptureFixture, *, before: bool
) -> None:
    """Its messages are never read, and another transaction may follow (issue 24)."""
    journals, sequencer, read = Memory(), Sequencer(), []
    publisher = Publisher(journals, mapping=to_json)

    def acknowledge(intents: list[AckIntent]) -> None:
        for journal, intent in intents:
            journals.start_append(journal).release(intent)

    if before:
        publisher.publish_uncommitted(Str("before"))
        acknowledge(publisher.build_ack_intents())
    publisher.publish_uncommitted(Str("one"))
    publisher.publish_uncommitted(Str("two"))
    acknowledge(publisher.rollback_intents())
    publisher.build_ack_intents()
    rolled_back = len(journals.data["a"])
    publisher.publish_uncommitted(Str("three"))
    acknowledge(publisher.build_ack_intents())
    at = 0
    for line in journals.data["a"].splitlines(keepends=True):
        message = Str()
        message.from_json(json.loads(line))
        sequencer.queue_uncommitted(Envelope("a", at, at + len(line), message))
        at += len(line)
        while (found := sequencer.deque_committed()) is not None:
            assert isinstance(found.message, Str)
            read.append(found.message.text)
        if at == rolled_back:
            assert not sequencer.has_pending({})
    assert [text for text in read if text] == ["before", "three"][not before :]
    assert caplog.messages == []


def test_what_drops_a_transaction_is_reported_before_it_begins() -> None:
    """Later the publisher may be dead; each journal is reported once (issue 24)."""
    journals, told = Memory(), list[tuple[AckIntent, int]]()

    def opening(intent: AckIntent) -> None:
        told.append((intent, len(journals.data.get("a", b""))))

    publisher = Publisher(journals, mapping=to_json, opening=opening)
    for _ in range(2):
        publisher.publish_committed(Str("committed"))
        before = len(journals.data["a"])
        publisher.publish_uncommitted(Str("one"))
        publisher.publish_uncommitted(Str("two"))
        assert told == [(intent, before) for intent in publisher.rollback_intents()]
        publisher.build_ack_intents()
        told.clear()


def test_transaction_does_not_begin_where_that_can_not_be_kept() -> None:
    """If ``opening`` fails, it is as if nothing had been published (issue 24)."""
    journals, clock = Memory(), Clock(1000)

    def opening(_: AckIntent) -> None:
        raise OSError(28, "No space left on device")

    publisher = Publisher(journals, clock, mapping=to_json, opening=opening)
    with pytest.raises(OSError, match="No space left"):
        publisher.publish_uncommitted(Str("one"))
    assert clock.value == 1000
    assert publisher.build_ack_intents() == []
    assert not journals.data.get("a")
    publisher.publish_committed(Str("committed"))


def test_transaction_at_the_beginning_of_time_is_not_rolled_back() -> None:
    """A UUID of clock 0 counts as none, so the message is delivered (issue 24)."""
    told: list[AckIntent] = []
    publisher = Publisher(Memory(), Clock(tick=1), mapping=to_json, opening=told.append)
    publisher.publish_uncommitted(Str("one"))
    assert publisher.rollback_intents() == told == []
    assert len(publisher.build_ack_intents()) == 1
