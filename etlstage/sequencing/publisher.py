"""
Publishing: messages get their journal and their UUID, and are appended.

Readers rely on the order: of two messages in a journal the later must have the larger
clock, or a reader would drop it as a duplicate. So a UUID is made in the ordered
section of the journal. A failure leaves nothing behind: no part of a frame, no tick, no
open transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from time import time_ns
from typing import Any, Protocol

from etlstage.errors import EtlstageError, LocalProtocolError
from etlstage.sequencing.clock import Clock, Flags, build_uuid, new_producer_id
from etlstage.sequencing.framing import (
    MAX_FRAME,
    FrameError,
    Framing,
    framing_by_content_type,
)
from etlstage.sequencing.mapping import Mapping, Unbound
from etlstage.sequencing.message import (
    AckIntent,
    JournalSpec,
    Message,
    as_message,
)

__all__ = ("Append", "AppendUncertain", "Appender", "OrderedSection", "Publisher")


class AppendUncertain(EtlstageError):
    """Raised when bytes may have been appended, or may be yet: the UUID is used up."""


class Append(Protocol):
    """An append to a journal, which may be under way."""

    @property
    def journal(self) -> str:
        """Name of the journal."""

    @property
    def done(self) -> bool:
        """Whether the append is complete, by the appender's rules."""

    def wait(self) -> None:
        """Return when the append is complete; raise the error if it fails."""

    def __await__(self) -> Generator[Any, None, None]:
        """Wait asynchronously; see :meth:`wait`."""


class OrderedSection(Protocol):
    """
    The exclusive right to make the next append to a journal.

    It ends with a call of one of its methods.
    """

    def release(self, *data: bytes) -> Append:
        """
        Append ``data``, the pieces of a frame.

        If it raises an error, none of the bytes can be read, except after
        :class:`AppendUncertain`.
        """

    def abandon(self) -> None:
        """Append nothing."""


class Appender(Protocol):
    """Appends to journals."""

    def start_append(self, journal: str) -> OrderedSection:
        """Return the right to append, once all earlier sections have ended."""

    def partitions(self) -> Sequence[JournalSpec]:
        """Return the journals; the same object as long as they are the same."""

    def pending_except(self, journal: str) -> Sequence[Append]:
        """Return the appends to other journals that are not complete yet."""


class Publisher:
    """
    Publishes messages under one producer id.

    Committed messages are delivered to readers at once. Uncommitted ones are in a
    transaction: readers get them after the intents that :meth:`build_ack_intents`
    returns have been stored, and then been appended.

    Args:
        appender: Appends to journals.
        clock: Clock for the UUIDs, which the caller updates. Without it the publisher
            has its own clock, which is updated with each message.
        mapping: Returns the journal of a message, for calls without a mapping.
        producer: The producer's id (default: random).
        now: Returns the time in nanoseconds since 1970, for the publisher's own clock.
        opening: Called with the intent that rolls back the open transaction in a
            journal, before the first message is appended there. A caller that stores
            the intent can roll back the transaction of a publisher that was killed.
        max_frame: Maximum size of a message's frame, in bytes; readers have the same
            limit.

    Attributes:
        without_uuid: Number of published messages that can't hold a UUID, which are
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
        max_frame: int = MAX_FRAME,
    ) -> None:
        self._appender = appender
        self._opening = opening
        self._max_frame = max_frame
        self._clock = Clock() if clock is None else clock
        self._now = now if clock is None else None
        if isinstance(mapping, Unbound):
            mapping = mapping.bind(appender.partitions)
        self._mapping = mapping
        self.producer: bytes = new_producer_id() if producer is None else producer
        self.without_uuid: int = 0
        # By journal, in order of first use: the open transaction's acknowledgement, its
        # framing, and the clock of the first message.
        self._open: dict[str, tuple[Message, Framing, int]] = {}
        self._busy = False
        self._uncertain = False

    def publish_committed(
        self, message: object, mapping: Mapping | None = None
    ) -> Append:
        """
        Append a message that is committed by itself.

        Safe for use from several threads. Other values are converted to messages; see
        :func:`~etlstage.sequencing.message.as_message`.

        Raises:
            LocalProtocolError: If this publisher's open transaction has messages in
                the journal, as readers would drop them; or if there is no mapping.
            FrameError: If the message's frame is larger than ``max_frame``.
            Exception: From the validator, the mapping, the framing or the appender.
                Unless it is an AppendUncertain, nothing has been appended, and the call
                may be repeated.

        """
        return self._publish(message, mapping, Flags.OUTSIDE_TXN)

    def publish_uncommitted(
        self, message: object, mapping: Mapping | None = None
    ) -> Append:
        """
        Append a message to the open transaction; begin one if there is none.

        Raises:
            LocalProtocolError: If another call has not returned yet, or an append of
                the transaction is uncertain.
            AppendUncertain: If the appender does not know whether the message was
                appended. The transaction can't be committed any more; use another
                publisher for the next one.
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
        Return the intents that commit the open transaction, and begin another.

        All of them have to be stored before any is appended. After a crash all of them
        have to be appended again.

        They have to be appended before this publisher's next message, committed or not,
        to any of their journals. Otherwise readers drop the message or the transaction.

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
        Return the intents that roll back the open transaction, and begin another.

        They have to be appended before this publisher's next message, as for a commit.
        Unless they are appended, readers keep the state of the transaction until they
        forget its producer.

        If an append of the transaction is uncertain, it stays open; use another
        publisher for the next one.
        """
        # If the first clock is 1, the acknowledged one is 0, which stands for no UUID.
        kept = {j: opened for j, opened in self._open.items() if opened[2] == 1}
        intents = [
            self._rollback(journal, *opened)
            for journal, opened in self._open.items()
            if journal not in kept
        ]
        if not self._uncertain:
            self._open = kept
        return intents

    def _rollback(
        self, journal: str, message: Message, framing: Framing, first: int
    ) -> AckIntent:
        # Acknowledge only what is before the first message.
        message.set_uuid(build_uuid(self.producer, first - 1, Flags.ACK_TXN))
        frame = _Pieces()
        framing.marshal(message, frame)
        return AckIntent(journal, b"".join(frame.pieces))

    def _check_certain(self) -> None:
        if self._uncertain:
            raise LocalProtocolError(
                "an append of the open transaction is uncertain, so the transaction can't"
                " be committed; begin another one with another publisher"
            )

    def _publish(self, value: object, mapping: Mapping | None, flags: Flags) -> Append:
        message = as_message(value)
        if self._now is not None:
            self._clock.update(self._now())
        # Instead of isinstance() with Validator, which takes longer than all the rest.
        if (validate := getattr(message, "validate", None)) is not None:
            validate()
        mapping = mapping or self._mapping
        if mapping is None:
            raise LocalProtocolError(
                "no mapping: give one to the publisher or the call"
            )
        journal, content_type = mapping(message)
        framing = framing_by_content_type(content_type)
        section = self._appender.start_append(journal)
        # Within the section, as another thread may have opened the transaction before.
        if flags is Flags.OUTSIDE_TXN and journal in self._open:
            section.abandon()
            raise LocalProtocolError(
                f"can't publish a committed message to {journal}: it has uncommitted ones"
                " of this publisher, which readers would drop; use another publisher"
            )
        try:
            frame, clock = self._frame(message, framing, flags)
        except BaseException:
            section.abandon()
            raise
        opens = flags is Flags.CONTINUE_TXN and journal not in self._open
        if opens:
            try:
                opened = message.acknowledgement(journal), framing, clock
                if self._opening is not None and clock > 1:
                    self._opening(self._rollback(journal, *opened))
            except BaseException:
                self._clock.untick(clock)
                section.abandon()
                raise
            # Now, as the next section begins before release() returns.
            self._open[journal] = opened
        try:
            append = section.release(*frame)
        except BaseException as error:
            if not isinstance(error, AppendUncertain):
                if opens:
                    del self._open[journal]
                self._clock.untick(clock)
            elif flags is Flags.CONTINUE_TXN:
                # Keep the clock: another message with it might be dropped as a duplicate.
                self._uncertain = True
            raise
        if not message.uuid.int:
            self.without_uuid += 1
        return append

    def _frame(
        self, message: Message, framing: Framing, flags: Flags
    ) -> tuple[list[bytes], int]:
        clock = self._clock.tick()
        try:
            message.set_uuid(build_uuid(self.producer, clock, flags))
            frame = _Pieces()
            framing.marshal(message, frame)
            self._check_size(sum(map(len, frame.pieces)))
        except BaseException:
            self._clock.untick(clock)
            raise
        return frame.pieces, clock

    def _check_size(self, size: int) -> None:
        if size > self._max_frame:
            raise FrameError(
                f"frame is {size} bytes long, expected no more than {self._max_frame}"
                " bytes (max_frame): readers would skip the message"
            )


class _Pieces:
    """Collects the pieces that are written, as joining them would copy them."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.write = self.pieces.append
