"""Counts of what the journals of a set hold, and the lag of its readers."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from etlstage.errors import EtlstageError
from etlstage.journal.errors import OffsetGone
from etlstage.journal.journals import Journals
from etlstage.journal.reader import Registered
from etlstage.journal.run import RunMessage
from etlstage.sequencing import (
    Envelope,
    Flags,
    MustStartReplay,
    QueueOutcome,
    ReadUncommitted,
    Sequencer,
    flags_of,
)

__all__ = ("JournalCounts", "Lag", "lags", "verify")


@dataclass
class JournalCounts:
    """Counts of one journal's messages, without acknowledgements."""

    journal: str
    bytes: int = 0
    committed: int = 0
    pending: int = 0
    """In open transactions."""
    rolled_back: int = 0
    duplicates: int = 0
    damaged: int = 0
    """Damaged ranges and invalid frames."""

    def as_json(self) -> dict[str, Any]:
        """Return the counts for JSON."""
        return asdict(self)


class Lag(NamedTuple):
    """The lag of a reader in one journal."""

    reader: str
    journal: str
    bytes: int
    messages: int
    """Unread messages, committed or not."""
    seconds: float
    """Seconds since the oldest unread message was appended; 0 if there is none."""


_DUPLICATES = (
    QueueOutcome.CONTINUE_ALREADY_ACKED,
    QueueOutcome.CONTINUE_TXN_CLOCK_LARGER,
    QueueOutcome.OUTSIDE_ALREADY_ACKED,
)


def verify(
    journals: Journals,
    journal: str,
    on_error: Callable[[EtlstageError], object] = lambda _: None,
) -> JournalCounts:
    """Read all of a journal, and count what it holds."""
    while True:
        # If segments are dropped meanwhile, count again without them.
        with suppress(OffsetGone):
            damages: list[EtlstageError] = []
            account = _verified(journals, journal, damages.append)
            for error in damages:
                on_error(error)
            return account


def _verified(
    journals: Journals, journal: str, on_error: Callable[[EtlstageError], object]
) -> JournalCounts:
    account = JournalCounts(journal)
    log = journals.log(journal)
    begin, end = log.first(), log.end()
    account.bytes = log.size()

    def damaged(error: EtlstageError) -> None:
        account.damaged += 1
        on_error(error)

    sequencer = Sequencer()
    # By producer, the number of messages in its open span.
    spans: dict[int, int] = {}
    messages = journals.read_uncommitted(journal, begin, end, on_error=damaged)
    for envelope in messages:
        uuid = envelope.message.uuid
        producer = uuid.int & 0xFFFFFFFFFFFF
        outcome = sequencer.queue_uncommitted(envelope)
        if outcome in _DUPLICATES:
            account.duplicates += _count(envelope)
        elif outcome in (
            QueueOutcome.CONTINUE_BEGIN_SPAN,
            QueueOutcome.CONTINUE_EXTEND_SPAN,
        ):
            spans[producer] = spans.get(producer, 0) + _count(envelope)
        else:
            # Messages of the span that are not delivered are rolled back.
            delivered = _delivered(journals, sequencer, damaged)
            open_ = spans.pop(producer, 0)
            account.committed += delivered
            account.rolled_back += open_ - (delivered - _count(envelope))
    account.pending = sum(spans.values())
    return account


def _delivered(
    journals: Journals, sequencer: Sequencer, on_error: Callable[[EtlstageError], None]
) -> int:
    count = 0
    while True:
        try:
            found = sequencer.deque_committed()
        except MustStartReplay:
            replay: ReadUncommitted = journals.read_uncommitted(
                *sequencer.replay_range(), on_error=lambda _: None
            )
            sequencer.start_replay(replay)
            continue
        if found is None:
            return count
        count += _count(found)


def _count(envelope: Envelope) -> int:
    message = envelope.message
    if flags_of(message.uuid) == Flags.ACK_TXN:
        return 0
    return len(message.run) if isinstance(message, RunMessage) else 1


def lags(journals: Journals) -> list[Lag]:
    """Return the lag of each reader in each journal."""
    now = time.time()
    found = []
    for reader in journals.readers():
        for spec in journals.select():
            while True:
                # The reader may have read on meanwhile, and segments been dropped.
                with suppress(OffsetGone):
                    found.append(_lag(journals, reader, spec.name, now))
                    break
    return found


def _lag(journals: Journals, reader: Registered, journal: str, now: float) -> Lag:
    log = journals.log(journal)
    end = log.end()
    offset = max(reader.checkpoint.offsets.get(journal, 0), log.first())
    first = next(log.groups(offset, skip=True), None)
    seconds = 0.0 if first is None else max(0.0, now - first.time / 1e9)
    messages = journals.read_uncommitted(journal, offset, end, on_error=lambda _: None)
    count = sum(map(_count, messages))
    return Lag(reader.name, journal, end - offset, count, seconds)
