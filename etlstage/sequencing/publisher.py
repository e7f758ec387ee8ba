"""
Publishing: messages get their journal and their UUID, and are appended.

The order is what makes readers right. A UUID is made in the ordered section of the
journal: of two messages in a journal the later has the larger clock, or a reader would
drop it as a duplicate. And what fails leaves nothing: no half of a frame, no tick, no
open transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from time import time_ns
from typing import Any, Protocol

from etlstage.errors import EtlstageError, LocalProtocolError
from etlstage.sequencing.clock import Clock, Flags, build_uuid, new_producer_id
from etlstage.sequencing.framing import Framing, framing_by_content_type
from etlstage.sequencing.mapping import Mapping, Unbound
from etlstage.sequencing.message import (
    AckIntent,
    JournalSpec,
    Message,
    as_message,
)

__all__ = ("Append", "AppendUncertain", "Appender", "OrderedSection", "Publisher")


class AppendUncertain(EtlstageError):
    """Raised when bytes may be appended, or may become so: their UUID is used up."""


class Append(Protocol):
    """Bytes on their way into a journal."""

    @property
    def journal(self) -> str:
        """Which one."""

    @property
    def done(self) -> bool:
        """Whether readers can see them."""

    def wait(self) -> None:
        """Return when that is so; raises the error if it can't become so."""

    def __await__(self) -> Generator[Any, None, None]:
        """Do as :meth:`wait`."""


class OrderedSection(Protocol):
    """
    The right to be the next that appends to a journal.

    It ends with one of its methods.
    """

    def release(self, *data: bytes) -> Append:
        """
        Append ``data``, a frame in its pieces.

        Where it raises an error nothing of that can be read, except for
        :class:`AppendUncertain`.
        """

    def abandon(self) -> None:
        """Append nothing."""


class Appender(Protocol):
    """What can append to journals."""

    def start_append(self, journal: str) -> OrderedSection:
        """Return the right to append, once all that was started before has ended."""

    def partitions(self) -> Sequence[JournalSpec]:
        """Return the journals; the same object as long as they are the same."""

    def pending_except(self, journal: str) -> Sequence[Append]:
        """Return what is not done yet in all journals but that one."""


class Publisher:
    """
    Publishes messages under one producer id.

    Committed messages are for readers at once. Uncommitted ones are in a transaction:
    readers get them once :meth:`build_ack_intents` has been called, what it returned
    was stored, and then was appended.

    Args:
        appender: Appends to journals.
        clock: Of the UUIDs; the caller updates it. Without one there is an own, which
            is updated with each message.
        mapping: Returns the journal of a message, where a call names none.
        producer: The id; random if it is not given.
        now: Returns the time in nanoseconds since 1970, for the own clock.
        opening: Called with what drops the open transaction from a journal, before the
            first message there is appended. Who stores it can drop what a publisher
            leaves that is killed.

    Attributes:
        without_uuid: How many messages were published that can't hold a UUID: they are
            delivered at least once.

    """

    def __init__(
        self,
        appender: Appender,
        clock: Clock | None = None,
        *,
        mapping: Mapping | Unbound | None = None,
        producer: bytes | None = None,
        now: Callable[[], int] = time_ns,
        opening: Callable[[AckIntent], None] | None = None,
    ) -> None:
        self._appender = appender
        self._opening = opening
        self._clock = Clock() if clock is None else clock
        self._now = now if clock is None else None
        if isinstance(mapping, Unbound):
            mapping = mapping.bind(appender.partitions)
        self._mapping = mapping
        self.producer: bytes = new_producer_id() if producer is None else producer
        self.without_uuid: int = 0
        # What acknowledges the open transaction, by journal, in order of first use.
        # With the clock of the first message.
        self._open: dict[str, tuple[Message, Framing, int]] = {}
        self._busy = False
        self._uncertain = False

    def publish_committed(
        self, message: object, mapping: Mapping | None = None
    ) -> Append:
        """
        Append a message that is committed by itself.

        Safe for use from several threads. What is no message is made one, see
        :func:`~etlstage.sequencing.message.as_message`.

        Raises:
            LocalProtocolError: If this publisher's open transaction has messages in
                the journal: readers would drop them.
            Exception: The validator's, the mapping's, the framing's or the appender's;
                then nothing has happened, and it may be tried again.

        """
        return self._publish(message, mapping, Flags.OUTSIDE_TXN)

    def publish_uncommitted(
        self, message: object, mapping: Mapping | None = None
    ) -> Append:
        """
        Append a message of the open transaction, which it may begin.

        Raises:
            LocalProtocolError: If another call has not returned yet, or an append of
                this publisher is uncertain.
            AppendUncertain: If the appender does not know whether it was appended: the
                transaction can't be committed any more, and another publisher begins
                one that can.
            Exception: As for :meth:`publish_committed`.

        """
        if self._busy:
            raise LocalProtocolError(
                "uncommitted messages are published one at a time, and another call has"
                " not returned yet"
            )
        self._check_certain()
        self._busy = True
        try:
            return self._publish(message, mapping, Flags.CONTINUE_TXN)
        finally:
            self._busy = False

    def build_ack_intents(self) -> list[AckIntent]:
        """
        Return what commits the open transaction, and begin another.

        They are to be stored, all of them, before any is appended; and after a crash
        all of them are to be appended again.

        Raises:
            LocalProtocolError: If an append of the transaction is uncertain.

        """
        self._check_certain()
        intents = []
        for journal, (message, framing, _) in self._open.items():
            frame, _ = self._frame(message, framing, Flags.ACK_TXN)
            intents.append(AckIntent(journal, b"".join(frame)))
        self._open = {}
        return intents

    def rollback_intents(self) -> list[AckIntent]:
        """
        Return what drops the open transaction, once appended, in place of what commits it.

        Without it readers keep what they know of the transaction until they forget its
        producer.
        """
        # A UUID of clock 0 is none.
        return [
            self._rollback(journal, *opened)
            for journal, opened in self._open.items()
            if opened[2] != 1
        ]

    def _rollback(
        self, journal: str, message: Message, framing: Framing, first: int
    ) -> AckIntent:
        # Acknowledged is what is before the first message.
        message.set_uuid(build_uuid(self.producer, first - 1, Flags.ACK_TXN))
        frame = _Pieces()
        framing.marshal(message, frame)
        return AckIntent(journal, b"".join(frame.pieces))

    def _check_certain(self) -> None:
        if self._uncertain:
            raise LocalProtocolError(
                "an append of the open transaction is uncertain, so that it can't be"
                " committed; begin another with another publisher"
            )

    def _publish(self, value: object, mapping: Mapping | None, flags: Flags) -> Append:
        message = as_message(value)
        if self._now is not None:
            self._clock.update(self._now())
        # As isinstance() with Validator, which takes longer than all the rest.
        if (validate := getattr(message, "validate", None)) is not None:
            validate()
        mapping = mapping or self._mapping
        if mapping is None:
            raise LocalProtocolError(
                "no mapping: give one to the publisher or the call"
            )
        journal, content_type = mapping(message)
        framing = framing_by_content_type(content_type)
        if flags is Flags.OUTSIDE_TXN and journal in self._open:
            raise LocalProtocolError(
                f"can't publish a committed message to {journal}: it has uncommitted ones"
                " of this publisher, which readers would drop; use another publisher"
            )
        section = self._appender.start_append(journal)
        try:
            frame, clock = self._frame(message, framing, flags)
        except BaseException:
            section.abandon()
            raise
        opens = flags is Flags.CONTINUE_TXN and journal not in self._open
        if opens and self._opening is not None and clock > 1:
            try:
                opened = message.acknowledgement(journal), framing, clock
                self._opening(self._rollback(journal, *opened))
            except BaseException:
                self._clock.untick(clock)
                section.abandon()
                raise
        try:
            append = section.release(*frame)
        except AppendUncertain:
            # Another message under its clock would be dropped as its duplicate.
            self._uncertain = self._uncertain or flags is Flags.CONTINUE_TXN
            raise
        except BaseException:
            self._clock.untick(clock)
            raise
        if not message.uuid.int:
            self.without_uuid += 1
        if opens:
            self._open[journal] = message.acknowledgement(journal), framing, clock
        return append

    def _frame(
        self, message: Message, framing: Framing, flags: Flags
    ) -> tuple[list[bytes], int]:
        clock = self._clock.tick()
        try:
            message.set_uuid(build_uuid(self.producer, clock, flags))
            frame = _Pieces()
            framing.marshal(message, frame)
        except BaseException:
            self._clock.untick(clock)
            raise
        return frame.pieces, clock


class _Pieces:
    """What was written, as it came: joined it would be copied."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.write = self.pieces.append
