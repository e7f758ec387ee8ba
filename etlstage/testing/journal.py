"""
Journals under Hypothesis: acts of producers, crashes, and what readers must deliver.

This module needs the extra ``testing``. :func:`histories` draws journals as producers
write them, with the messages that a reader must deliver; a :class:`JournalMachine`
checks that any appender and reader deliver exactly what was committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from io import BytesIO
from typing import Any, Final, Literal, NamedTuple, Protocol

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from etlstage.errors import EtlstageError
from etlstage.sequencing import (
    UUID,
    Append,
    Appender,
    AppendUncertain,
    Checkpoint,
    Clock,
    Envelope,
    Flags,
    FrameBuffer,
    JournalSpec,
    JsonMessage,
    Opaque,
    OrderedSection,
    Publisher,
    build_uuid,
    clock_of,
    flags_of,
    framing_by_content_type,
    modulo,
    producer_of,
)

__all__ = (
    "PRODUCERS",
    "CommittedMessages",
    "Crash",
    "Damage",
    "JournalHistory",
    "JournalMachine",
    "ProducerAct",
    "Publication",
    "crashes",
    "damages",
    "histories",
    "publications",
)

PRODUCERS: Final = (
    bytes.fromhex("01aaaaaaaa01"),
    bytes.fromhex("03bbbbbbbb02"),
    bytes.fromhex("056363636303"),
)
"""Ids of the drawn producers."""
_SIZE: Final = 100
_STEP: Final = 102
"""Bytes from one drawn message to the next: its size, and a gap of 2 bytes."""
_JSON: Final = "application/x-ndjson"
_RINGS: Final = 0, 1, 2, 3, 5, 1000


class ProducerAct(Enum):
    """An act of a producer."""

    CONTINUE = "continue"
    """Append a message to the transaction."""
    ACKNOWLEDGE = "acknowledge"
    """Commit the whole transaction."""
    ACKNOWLEDGE_PART = "acknowledge part"
    """Commit the first messages of the transaction, and drop the others."""
    ROLL_BACK = "roll back"
    """Drop the whole transaction."""
    OUTSIDE = "outside"
    """Append a message that commits itself; within a transaction, as CONTINUE does."""
    REPEAT = "repeat"
    """Append the last messages of the transaction again, as after a lost response."""
    NO_UUID = "no UUID"
    """Append a message without a UUID, whose duplicates can't be recognized."""


class Publication(NamedTuple):
    """One act of one producer."""

    producer: bytes
    act: ProducerAct
    number: int
    """How far the clock advances; for ACKNOWLEDGE_PART and REPEAT, a number of
    messages."""


class JournalHistory(NamedTuple):
    """The messages in a journal, and which of them are committed."""

    messages: list[Envelope]
    delivered: list[tuple[bytes, int]]
    """Producer and clock of each message that must be delivered, acknowledgements
    included; for a message without a UUID, an empty producer and the offset."""

    @staticmethod
    def name(found: Envelope) -> tuple[bytes, int]:
        """Return the entry of a message in :attr:`delivered`."""
        uuid = found.message.uuid
        return (producer_of(uuid), clock_of(uuid)) if uuid.int else (b"", found.begin)

    def between(self, begin: int, end: int) -> list[Envelope]:
        """Return the messages that a replay of a range of offsets reads."""
        return [one for one in self.messages if begin <= one.begin < end]

    @classmethod
    def of(cls, writes: Sequence[Publication], journal: str = "j") -> JournalHistory:
        """Return the history that correct producers write with these acts."""
        history = cls([], [])
        producers: dict[bytes, _Producer] = {}
        for id_, act, number in writes:
            if act is ProducerAct.NO_UUID:
                history.delivered.append((b"", len(history.messages) * _STEP))
                found = [Opaque()]
            else:
                one = producers.setdefault(id_, _Producer(id_))
                found = one.perform(act, number, history.delivered)
            for message in found:
                at = len(history.messages) * _STEP
                history.messages.append(Envelope(journal, at, at + _SIZE, message))
        return history


class _Producer:
    """A correct producer."""

    def __init__(self, id_: bytes) -> None:
        self._id = id_
        self._clock = 100
        self._acked = -1
        self._span: list[int] = []

    def perform(
        self, act: ProducerAct, number: int, delivered: list[tuple[bytes, int]]
    ) -> list[Opaque]:
        """Return what it appends; add the messages this commits to ``delivered``."""
        span = self._span
        if act is ProducerAct.CONTINUE or (act is ProducerAct.OUTSIDE and span):
            self._clock += number
            span.append(self._clock)
            return [self._message(self._clock, Flags.CONTINUE_TXN)]
        if act is ProducerAct.REPEAT:
            return [self._message(one, Flags.CONTINUE_TXN) for one in span[-number:]]
        if act is ProducerAct.ACKNOWLEDGE_PART and span:
            # Dropped messages are not published again: their clocks are used up.
            clock = span[min(number, len(span)) - 1]
            commits = [one for one in span if one <= clock]
        elif act is ProducerAct.ROLL_BACK and self._acked >= 0:
            clock, commits = self._acked, []
        elif act in (ProducerAct.ACKNOWLEDGE, ProducerAct.OUTSIDE):
            self._clock += number
            clock, commits = self._clock, [*span, self._clock]
        else:
            return []
        self._acked = clock
        delivered += [(self._id, one) for one in commits]
        span.clear()
        flag = Flags.OUTSIDE_TXN if act is ProducerAct.OUTSIDE else Flags.ACK_TXN
        return [self._message(clock, flag)]

    def _message(self, clock: int, flags: int) -> Opaque:
        message = Opaque()
        message.set_uuid(build_uuid(self._id, clock, flags))
        return message


def publications(max_size: int = 40) -> st.SearchStrategy[list[Publication]]:
    """Draw the acts of three producers, mostly within transactions."""
    acts = st.sampled_from([ProducerAct.CONTINUE] * 4 + list(ProducerAct))
    one = st.builds(Publication, st.sampled_from(PRODUCERS), acts, st.integers(1, 4))
    return st.lists(one, max_size=max_size)


def histories(max_size: int = 40) -> st.SearchStrategy[JournalHistory]:
    """Draw the histories that :func:`publications` write."""
    return publications(max_size).map(JournalHistory.of)


class Crash(NamedTuple):
    """A crash, or a checkpoint, of a reader."""

    after: int
    """Steps since the previous one; reading a message is one step, and so is delivering
    one."""
    lost: bool
    """Whether the reader crashes and resumes from its last checkpoint; else it takes
    one."""
    ring: int
    """Ring size (messages held) of the reader that resumes."""


def crashes(max_size: int = 12) -> st.SearchStrategy[list[Crash]]:
    """Draw checkpoints and crashes, with the ring sizes of the resuming readers."""
    one = st.builds(Crash, st.integers(1, 12), st.booleans(), st.sampled_from(_RINGS))
    return st.lists(one, max_size=max_size)


class Damage(NamedTuple):
    """Damage to a file."""

    kind: Literal["cut", "flip"]
    at: int
    """Number of bytes kept by a cut, or of the bit that is flipped."""

    def inflict(self, data: bytes) -> bytes:
        """Return the damaged file."""
        if self.kind == "cut":
            return data[: self.at]
        place = self.at // 8
        changed = data[place] ^ 1 << self.at % 8
        return data[:place] + bytes([changed]) + data[place + 1 :]


def damages(size: int) -> st.SearchStrategy[Damage]:
    """Draw where a file of ``size`` bytes is cut, or which bit of it is flipped."""
    cuts = st.builds(Damage, st.just("cut"), st.integers(0, size))
    if not size:
        return cuts
    return cuts | st.builds(Damage, st.just("flip"), st.integers(0, 8 * size - 1))


class CommittedMessages(Protocol):
    """
    A reader of committed messages.

    :class:`~etlstage.journal.CommittedReader` is one.
    """

    def poll(self) -> Envelope | None:
        """Return the next message, without acknowledgements; None if there is none."""

    def position(self) -> Checkpoint:
        """Return the position after all messages it has returned, which are done."""

    def close(self) -> None:
        """Close the reader."""


class _Writer:
    """A publisher, its open transaction, and the frames that it may append again."""

    def __init__(self, appender: Appender, producer: bytes) -> None:
        self.journals = _RepeatableAppender(appender)
        self._clock = Clock()
        self._renew(producer)

    def _renew(self, producer: bytes) -> None:
        mapping = modulo(_write_key, self.journals.partitions)
        self.publisher = Publisher(
            self.journals, self._clock, mapping=mapping, producer=producer
        )
        self.open: list[int] = []

    def append(self, journal: str, frame: bytes) -> None:
        """Append a frame, and retry until that is confirmed."""
        for _ in range(10):
            try:
                self.journals.start_append(journal).release(frame)
            except (OSError, EtlstageError):
                continue
            return
        raise AssertionError("an append has failed 10 times in a row")

    def repeat(self, count: int) -> None:
        for journal, frames in self.journals.frames.items():
            kept = list(frames)
            for frame in _repeatable(frames)[-count:]:
                self.append(journal, frame)
            frames[:] = kept

    def roll_back(self) -> None:
        """Drop the open transaction, and continue under the same id."""
        for journal, frames in self.journals.frames.items():
            acknowledged = 0
            for uuid in map(_uuid_of, frames):
                if flags_of(uuid) != Flags.CONTINUE_TXN:
                    acknowledged = clock_of(uuid)
                elif not acknowledged:
                    acknowledged = clock_of(uuid) - 1
            message, written = JsonMessage(), BytesIO()
            producer = self.publisher.producer
            message.set_uuid(build_uuid(producer, acknowledged, Flags.ACK_TXN))
            framing_by_content_type(_JSON).marshal(message, written)
            self.append(journal, written.getvalue())
        self._renew(self.publisher.producer)


class _RepeatableAppender:
    """An appender that waits for each append, and records the frames appended."""

    def __init__(self, appender: Appender) -> None:
        self.appender = appender
        self.frames: dict[str, list[bytes]] = {}

    def start_append(self, journal: str) -> OrderedSection:
        return _RepeatableSection(self, journal, self.appender.start_append(journal))

    def partitions(self) -> Sequence[JournalSpec]:
        return self.appender.partitions()

    def pending_except(self, journal: str) -> Sequence[Append]:
        return self.appender.pending_except(journal)


class _RepeatableSection(NamedTuple):
    kept: _RepeatableAppender
    journal: str
    section: OrderedSection

    def release(self, *data: bytes) -> Append:
        append = self.section.release(*data)
        append.wait()  # what has failed must not be repeated, nor count as committed
        self.kept.frames.setdefault(self.journal, []).append(b"".join(data))
        return append

    def abandon(self) -> None:
        self.section.abandon()


_WRITERS: Final = st.integers(0, 2)


class JournalMachine(RuleBasedStateMachine):
    """
    Checks that a reader delivers what was committed, whichever side crashes.

    ::

        class Orders(JournalMachine):
            def __init__(self):
                super().__init__()
                self.storage = MemoryStorage()

            def open(self):
                return Journals(storage=self.storage, partitions=2)

            def read(self, journals, position):
                return journals.read_committed(position=position)

        TestOrders = Orders.TestCase

    Its rules publish with and without transactions, commit, roll back, append frames
    again, and crash the writers and the reader. Add rules, and invariants, as to any
    machine of Hypothesis. Each message is a JSON object with a number.

    Attributes:
        uncertain: Numbers of messages that may be stored or not: their append was not
            confirmed.

    """

    def open(self) -> Appender:
        """Return an appender; called at the start, and after everything has crashed."""
        raise NotImplementedError

    def read(
        self,
        appender: Any,  # noqa: ANN401 - from open()
        position: Checkpoint | None,
    ) -> CommittedMessages:
        """Return a reader that begins at a position; None: with the first message."""
        raise NotImplementedError

    def close(self, appender: Any) -> None:  # noqa: ANN401 - from open()
        """Release the appender that :meth:`open` returned."""

    def tear(self, appender: Any, writer: int) -> None:  # noqa: ANN401 - from open()
        """Leave behind what a writer leaves that dies during an append."""

    # --- rules --------------------------------------------------------------

    @initialize()
    def start(self) -> None:
        """Open the journals."""
        self._appender = self.open()
        self._count = 0
        self._writers = [self._writer() for _ in range(3)]
        self._reader = self.read(self._appender, None)
        self._position: Checkpoint | None = None
        self._committed: list[int] = []
        self._done: list[tuple[str, bytes, int]] = []
        self._read: list[tuple[str, bytes, int]] = []
        self.uncertain: set[int] = set()

    @rule(writer=_WRITERS)
    def publish_uncommitted(self, writer: int) -> None:
        """Append a message to the transaction of a writer."""
        self._count += 1
        one = self._writers[writer]
        try:
            one.publisher.publish_uncommitted({"k": self._count})
        except AppendUncertain:
            self._writers[writer] = self._writer()
        except (OSError, EtlstageError):
            pass
        else:
            one.open.append(self._count)

    @rule(writer=_WRITERS)
    def commit(self, writer: int) -> None:
        """Commit the transaction of a writer; retry appends that fail."""
        one = self._writers[writer]
        for journal, frame in one.publisher.build_ack_intents():
            one.append(journal, frame)
        self._committed += one.open
        one.open.clear()

    @rule(writer=_WRITERS)
    def publish_committed(self, writer: int) -> None:
        """Append a message outside a transaction, if the writer has none open."""
        one = self._writers[writer]
        if one.open:
            return
        self._count += 1
        try:
            one.publisher.publish_committed({"k": self._count})
        except AppendUncertain:
            self.uncertain.add(self._count)
        except (OSError, EtlstageError):
            pass
        else:
            self._committed.append(self._count)

    @rule(writer=_WRITERS, count=st.integers(1, 5))
    def repeat(self, writer: int, count: int) -> None:
        """Append the last frames of a writer again, in order."""
        self._writers[writer].repeat(count)

    @rule(writer=_WRITERS)
    def roll_back(self, writer: int) -> None:
        """Drop the transaction of a writer, which continues under its id."""
        self._writers[writer].roll_back()

    @rule(writer=_WRITERS)
    def crash_writer(self, writer: int) -> None:
        """Crash a writer, maybe during an append, and replace it by another."""
        self._writers[writer] = self._writer()
        self.tear(self._appender, writer)

    @rule(count=st.integers(1, 4))
    def take(self, count: int) -> None:
        """Read some messages, and store the position."""
        self._take(count)
        self._settle()

    @rule(count=st.integers(1, 4))
    def crash_reader(self, count: int) -> None:
        """Read some messages, and crash the reader before it stores the position."""
        self._take(count)
        self._reader.close()
        self._read.clear()
        self._reader = self.read(self._appender, self._position)

    @rule()
    def crash_all(self) -> None:
        """Crash all writers and the reader, and reopen what is stored."""
        self._reader.close()
        self.close(self._appender)
        self._read.clear()
        self._appender = self.open()
        self._writers = [self._writer() for _ in range(3)]
        self._reader = self.read(self._appender, self._position)

    def teardown(self) -> None:
        """Read all remaining messages, and compare with what was committed."""
        if not hasattr(self, "_reader"):
            return
        try:
            while self._take(100):
                pass
            self._settle()
            numbers = [number for _, _, number in self._done]
            assert len(numbers) == len(set(numbers)), (
                "some messages were delivered twice"
            )
            certain = set(numbers) - self.uncertain
            assert certain == set(self._committed), (
                "the delivered messages are not those committed"
            )
            # A producer's messages are in order within a journal.
            assert sorted(self._done) == sorted(self._done, key=lambda one: one[:2])
        finally:
            self._reader.close()
            self.close(self._appender)

    def _take(self, count: int) -> bool:
        for _ in range(count):
            if (found := self._reader.poll()) is None:
                return False
            message = found.message
            assert isinstance(message, JsonMessage)
            producer = producer_of(message.uuid)
            self._read.append((found.journal, producer, message["k"]))
        return True

    def _settle(self) -> None:
        self._position = self._reader.position()
        self._done += self._read
        self._read.clear()

    def _writer(self) -> _Writer:
        self._count += 1
        return _Writer(self._appender, b"\1" + self._count.to_bytes(5, "big"))


def _uuid_of(frame: bytes) -> UUID:
    buffer, message = FrameBuffer(), JsonMessage()
    buffer.feed(frame)
    framing_by_content_type(_JSON).unmarshaller(buffer)(message)
    return message.uuid


def _repeatable(frames: list[bytes]) -> list[bytes]:
    """
    Return the last frames that may be appended again.

    An acknowledgement that is repeated after later messages were committed rolls those
    back: readers log it as a loss of exactly-once. Retries of an append never do that.
    """
    found: list[bytes] = []
    for frame in reversed(frames):
        if _flags(frame) == Flags.ACK_TXN:
            return found if Flags.OUTSIDE_TXN in map(_flags, found) else [frame, *found]
        found.insert(0, frame)
    return found


def _flags(frame: bytes) -> Flags:
    return flags_of(_uuid_of(frame))


def _write_key(message: JsonMessage, hasher: Any) -> None:  # noqa: ANN401 - Fnv1a
    hasher.write(str(message["k"]).encode())
