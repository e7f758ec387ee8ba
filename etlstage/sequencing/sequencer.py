"""
Sequencing: select the committed messages among those read, each of them once.

**Spans.** The messages that a producer has written to a journal since its last
acknowledgement are a span. Three numbers are kept for each producer and journal: the
acknowledged clock (``last``), the largest clock seen (``top``), and the offset where
the span begins (``begin``, -1 for none). A message with a clock up to ``last`` was
delivered before; one with a clock up to ``top`` is a duplicate within the span. An
acknowledgement above ``last`` commits the messages up to its own clock; any other rolls
back the whole span.

**The ring.** The last messages are held. If a committed span is held as a whole, it is
delivered from the ring. Otherwise its first messages are read again, in a *replay* from
the begin of the span to the first message that is held. A message takes the place of
the oldest before it is evaluated, so a ring of n can deliver n - 1 messages and their
acknowledgement. Producers do not wait for each other, whatever spans are open.

**Checkpoints.** Offsets are how far journals have been read, states what is known of
producers. A delivered message is covered by a checkpoint once the next was requested.
The acknowledgement of a span is read again until the whole span has been delivered.

Effects of a faulty producer: a message with clock 0 within its own open span is
delivered twice if the span is replayed. Clocks that are out of order within a partially
acknowledged span are delivered by a replay, but not from the ring.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Final, NamedTuple

from etlstage.errors import EtlstageError, LocalProtocolError
from etlstage.sequencing.clock import MAX_CLOCK, clock_of
from etlstage.sequencing.message import Envelope

__all__ = (
    "Checkpoint",
    "MustStartReplay",
    "ProducerState",
    "QueueOutcome",
    "ReplayFailed",
    "ReplayRange",
    "ReplayWaits",
    "Sequencer",
)

_LOG: Final = logging.getLogger("etlstage.sequencing")


class QueueOutcome(Enum):
    """The outcome of queueing a message."""

    OUTSIDE_ALREADY_ACKED = "outsideAlreadyAcked"
    """A duplicate."""
    OUTSIDE_COMMIT = "outsideCommit"
    """The message is to be dequeued."""
    CONTINUE_ALREADY_ACKED = "continueAlreadyAcked"
    """A duplicate of a committed message."""
    CONTINUE_TXN_CLOCK_LARGER = "continueRingClockLarger"
    """A duplicate within its span, which has a larger or equal clock."""
    CONTINUE_BEGIN_SPAN = "continueBeginSpan"
    """The message is pending, the first of its span."""
    CONTINUE_EXTEND_SPAN = "continueExtendSpan"
    """The message is pending."""
    ACK_ROLLBACK = "ackRollback"
    """The span is dropped."""
    ACK_EMPTY = "ackEmpty"
    """The acknowledgement is to be dequeued; there was no span."""
    ACK_COMMIT_RING = "ackCommitRing"
    """The span is to be dequeued; all of it is held."""
    ACK_COMMIT_REPLAY = "ackCommitReplay"
    """The span is to be dequeued; a replay has to be started first."""


class ProducerState(NamedTuple):
    """The state of one producer in one journal, in a checkpoint."""

    journal: str
    producer: bytes
    last_ack: int
    """Clock up to which the producer's messages are acknowledged and delivered."""
    begin: int
    """Offset of its first message above that clock; -1 for none."""


class Checkpoint(NamedTuple):
    """The position to resume from."""

    offsets: dict[str, int]
    """How far each journal has been read."""
    states: list[ProducerState]


class ReplayRange(NamedTuple):
    """A range that has to be read again."""

    journal: str
    begin: int
    end: int
    """Offset after the last byte."""


class MustStartReplay(EtlstageError):
    """Raised when messages to be dequeued are no longer held."""

    def __init__(self) -> None:
        super().__init__("must start reader")


class ReplayFailed(EtlstageError):
    """Raised when a replay fails, or returns messages outside its range."""


class ReplayWaits(EtlstageError):
    """Raised when a replay has no message yet; the dequeue may be retried."""


class _Span:
    """The state of one producer in one journal."""

    __slots__ = (
        "begin",
        "held",
        "journal",
        "known",
        "last",
        "producer",
        "top",
        "warned",
    )

    def __init__(
        self,
        journal: str,
        producer: int,
        last: int,
        *,
        begin: int = -1,
        known: bool = True,
    ) -> None:
        self.journal = journal
        self.producer = producer
        self.last = last
        # Whether that is the clock of an acknowledgement, and not assumed because what
        # comes before the first message was not read.
        self.known = known
        self.top = last
        self.begin = begin
        # The span's messages in the ring: running number, clock, envelope.
        self.held: deque[tuple[int, int, Envelope]] = deque()
        self.warned = False


class Sequencer:
    """
    Turns messages as they are read into messages that are committed.

    Queue each message that is read from any of the journals. Before the next one is
    queued, dequeue until nothing is left.

    Args:
        offsets: The offsets of a checkpoint to resume from.
        states: The producers' states of that checkpoint.
        ring: Number of messages to hold.

    Attributes:
        without_uuid: Number of messages without a UUID, which are delivered at least
            once.

    """

    def __init__(
        self,
        offsets: Mapping[str, int] | None = None,
        states: Iterable[ProducerState] = (),
        *,
        ring: int = 8192,
    ) -> None:
        self.without_uuid: int = 0
        self._offsets: dict[str, int] = dict(offsets or {})
        self._spans: dict[tuple[str, int], _Span] = {}
        for journal, producer, last_ack, begin in states:
            number = int.from_bytes(producer, "big")
            self._spans[journal, number] = _Span(journal, number, last_ack, begin=begin)
        # Spans that were begun since the last checkpoint.
        self._pending: set[_Span] = set()
        self._size = max(ring, 1)
        # The span of each message in the ring, oldest first; and the oldest's number.
        self._ring: deque[_Span] = deque()
        self._oldest = 0
        # The span that is being dequeued, where its acknowledgement ends, and the clock
        # of its message that was returned last and is not done yet.
        self._emit: _Span | None = None
        self._emit_end = 0
        self._delivered: int | None = None
        self._replay: Iterator[Envelope] | None = None
        self._replay_wanted = False

    def queue_uncommitted(self, envelope: Envelope) -> QueueOutcome:
        """
        Queue the next message that was read.

        Raises:
            LocalProtocolError: If messages are left to dequeue.

        """
        if self._emit is not None:
            raise LocalProtocolError("committed messages remain to dequeue")
        journal, begin, end, message = envelope
        value = message.uuid.int
        # Inlined clock_of() and flags_of(): calls would take a third of the time.
        clock = (
            (value >> 92) & 0xFFFFFFFF0
            | (value >> 44) & 0xFFFF000000000
            | (value >> 12) & 0xFFF0000000000000
            | (value >> 58) & 0xF
        )
        flags = (value >> 48) & 0x3FF
        if len(self._ring) == self._size:
            held = self._ring[0].held
            if held and held[0][0] == self._oldest:
                held.popleft()
        if not clock:
            self.without_uuid += 1
            return self._outside(_Span(journal, -1, 0), 1, envelope)
        producer = value & 0xFFFFFFFFFFFF
        span = self._spans.get((journal, producer))
        if span is None:
            span = _Span(journal, producer, clock - 1, known=False)
            self._spans[journal, producer] = span
        if flags == 1:
            if clock > span.top:
                outcome = QueueOutcome.CONTINUE_EXTEND_SPAN
                if span.begin < 0:
                    outcome = QueueOutcome.CONTINUE_BEGIN_SPAN
                    span.begin = begin
                    self._pending.add(span)
                self._hold(span, clock, envelope)
            elif clock <= span.last:
                outcome = QueueOutcome.CONTINUE_ALREADY_ACKED
            else:
                outcome = QueueOutcome.CONTINUE_TXN_CLOCK_LARGER
            self._offsets[journal] = end
            return outcome
        if flags == 2:
            return self._acknowledge(span, clock, envelope)
        if flags and not span.warned:
            span.warned = True
            _LOG.error(
                "%s: producer %012x sent flags %#x at offset %d: handled as OUTSIDE_TXN",
                *(journal, producer, flags, begin),
            )
        return self._outside(span, clock, envelope)

    def deque_committed(self) -> Envelope | None:
        """
        Return the next committed message, or None if there is none.

        The acknowledgement of a span is the last of its messages.

        Raises:
            MustStartReplay: If :meth:`start_replay` has to be called first.
            ReplayFailed: If the replay failed, or returned messages outside its range.
            ReplayWaits: If the replay has no message yet.

        """
        self.finish_message()
        span = self._emit
        if span is None:
            return None
        if self._replay_wanted:
            raise MustStartReplay
        while (found := self._next(span)) is not None:
            clock, envelope = found
            # Skip duplicates, and what the acknowledgement does not cover.
            if clock and not span.last < clock <= span.top:
                continue
            span.begin = envelope.begin
            self._delivered = clock
            return envelope
        self._offsets[span.journal] = self._emit_end
        self._end(span)
        self._emit = None
        return None

    def finish_message(self) -> None:
        """Mark the message that was returned last as done, as the next dequeue does."""
        if self._emit is not None and self._delivered is not None:
            # A message with clock 0 does not acknowledge the messages before it.
            self._emit.last = self._delivered or self._emit.last
            self._delivered = None
            if self._emit.producer < 0:  # without a UUID no state has that it is done
                self._offsets[self._emit.journal] = self._emit_end

    def replay_range(self) -> ReplayRange:
        """
        Return the range that a replay has to read.

        Raises:
            LocalProtocolError: If no replay is to be started.

        """
        span = self._emit
        if span is None or not self._replay_wanted:
            raise LocalProtocolError("there is no replay to start")
        return ReplayRange(span.journal, span.begin, span.held[0][2].begin)

    def start_replay(self, messages: Iterable[Envelope]) -> None:
        """
        Supply the messages of the replay's range, as they are read from the journal.

        Raises:
            LocalProtocolError: If no replay is to be started.

        """
        self.replay_range()
        self._replay = iter(messages)
        self._replay_wanted = False

    def has_pending(self, since: Mapping[str, int] | None = None) -> bool:
        """
        Return whether spans are open that were begun since the last checkpoint.

        Args:
            since: Offsets by journal; if given, return whether spans are open that
                begin at these offsets or later.

        """
        if since is None:
            return bool(self._pending)
        return any(
            span.begin >= since.get(span.journal, 0) for span in self._spans.values()
        )

    def producer_states(self, horizon: float = 0) -> list[ProducerState]:
        """
        Return the states of all producers; see :meth:`checkpoint`.

        Raises:
            LocalProtocolError: If messages are left to dequeue.

        """
        if self._emit is not None:
            raise LocalProtocolError("messages remain to dequeue")
        return self.checkpoint(horizon).states

    def checkpoint(self, horizon: float = 0, now: int = MAX_CLOCK) -> Checkpoint:
        """
        Return the position to resume from; the last returned message is not done yet.

        Args:
            horizon: Seconds after which producers are forgotten: those whose clock is
                older than the newest of their journal by more than this; 0: never. If a
                forgotten producer repeats a message, it is not known as a duplicate.
            now: The newest clock that counts; by default any. With one that is ahead of
                the others by more than ``horizon``, these would be forgotten.

        """
        if horizon:
            self._prune(round(horizon * 1e9) // 100 << 4, now)
        self._pending.clear()
        states = [
            ProducerState(
                span.journal, span.producer.to_bytes(6, "big"), span.last, span.begin
            )
            for span in self._spans.values()
        ]
        return Checkpoint(dict(self._offsets), states)

    def _prune(self, age: int, now: int) -> None:
        newest: dict[str, int] = {}
        for span in self._spans.values():
            newest[span.journal] = max(newest.get(span.journal, 0), min(span.last, now))
        old = [s for s in self._spans.values() if s.top < newest[s.journal] - age]
        for span in old:
            del self._spans[span.journal, span.producer]
            if span.begin >= 0:
                _LOG.error(
                    "%s: producer %012x has been silent for longer than the horizon, by"
                    " the messages' clocks: its open span, from offset %d on, is"
                    " dropped",
                    *(span.journal, span.producer, span.begin),
                )

    def _hold(self, span: _Span, clock: int, envelope: Envelope) -> None:
        ring = self._ring
        if len(ring) == self._size:
            ring.popleft()
            self._oldest += 1
        span.held.append((self._oldest + len(ring), clock, envelope))
        ring.append(span)
        span.top = clock

    def _outside(self, span: _Span, clock: int, envelope: Envelope) -> QueueOutcome:
        if clock <= span.last:
            if span.begin == envelope.begin:
                # A checkpoint was made after this message was delivered, and before its
                # span ended.
                self._end(span)
            self._offsets[envelope.journal] = envelope.end
            return QueueOutcome.OUTSIDE_ALREADY_ACKED
        # After a checkpoint that was made while this message was dequeued, the span
        # begins with the message itself.
        if 0 <= span.begin < envelope.begin:
            _LOG.error(
                "%s: producer %012x committed a message at offset %d within its open"
                " span: the span, from offset %d on, is dropped",
                *(span.journal, span.producer, envelope.begin, span.begin),
            )
            span.begin = -1
            span.held.clear()
        self._commit(span, clock, envelope)
        return QueueOutcome.OUTSIDE_COMMIT

    def _acknowledge(self, span: _Span, clock: int, envelope: Envelope) -> QueueOutcome:
        if clock <= span.last:
            if clock < span.last and span.known:
                _LOG.error(
                    "%s: loss of exactly-once semantics: producer %012x acknowledged"
                    " clock %d at offset %d, and %d before",
                    *(span.journal, span.producer, clock, envelope.begin, span.last),
                )
            span.last = span.top = clock
            self._end(span)
            self._offsets[envelope.journal] = envelope.end
            return QueueOutcome.ACK_ROLLBACK
        if span.begin < 0:
            outcome = QueueOutcome.ACK_EMPTY
        elif span.held and span.held[0][2].begin == span.begin:
            outcome = QueueOutcome.ACK_COMMIT_RING
        else:
            outcome = QueueOutcome.ACK_COMMIT_REPLAY
        self._commit(span, clock, envelope)
        return outcome

    def _commit(self, span: _Span, clock: int, envelope: Envelope) -> None:
        if span.begin < 0:
            span.begin = envelope.begin
        self._hold(span, clock, envelope)
        self._emit, self._emit_end = span, envelope.end
        self._replay_wanted = span.begin != span.held[0][2].begin

    def _end(self, span: _Span) -> None:
        span.begin, span.known = -1, True
        span.held.clear()
        self._pending.discard(span)

    def _next(self, span: _Span) -> tuple[int, Envelope] | None:
        while self._replay is not None:
            try:
                envelope = next(self._replay, None)
                if envelope is not None:
                    _check(envelope, span)
            except ReplayWaits:
                raise
            except Exception as error:
                # The replay may be restarted, from the message that was returned last.
                self._replay, self._replay_wanted = None, True
                if isinstance(error, ReplayFailed):
                    raise
                raise ReplayFailed(f"replay reader: {error}") from error
            if envelope is None:
                self._replay = None
                break
            uuid = envelope.message.uuid
            if uuid.int & 0xFFFFFFFFFFFF == span.producer:
                return clock_of(uuid), envelope
        if not span.held:
            return None
        _, clock, envelope = span.held.popleft()
        return clock, envelope


def _check(envelope: Envelope, span: _Span) -> None:
    """Refuse a message of a replay that is outside the replay's range."""
    journal, begin, end, _ = envelope
    stop = span.held[0][2].begin
    if journal != span.journal:
        wrong = f"of wrong journal ({journal}; expected {span.journal})"
    elif begin < span.begin:
        wrong = f"has wrong Begin ({begin}; expected >= {span.begin})"
    elif end > stop:
        wrong = f"has wrong End ({end}; expected <= {stop})"
    else:
        return
    raise ReplayFailed(f"replay {wrong}")
