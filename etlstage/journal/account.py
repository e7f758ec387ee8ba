"""What is in the journals of a set, counted, and how far its readers are behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from etlstage.errors import EtlstageError
from etlstage.journal.journals import Journals
from etlstage.sequencing import (
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
    """Messages of one journal, acknowledgements left out."""

    journal: str
    bytes: int = 0
    committed: int = 0
    pending: int = 0
    """In transactions that are open."""
    rolled_back: int = 0
    duplicates: int = 0
    damaged: int = 0
    """Places that are not what was written, or no message."""

    def as_json(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)


class Lag(NamedTuple):
    """How far a reader is behind in one journal."""

    reader: str
    journal: str
    bytes: int
    messages: int
    """Those that are there, committed or not."""
    seconds: float
    """Since the oldest that it has not read was appended; 0 if it has read all."""


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
    account = JournalCounts(journal)
    log = journals.log(journal)
    begin, end = log.first(), log.end()
    account.bytes = log.size()

    def damaged(error: EtlstageError) -> None:
        account.damaged += 1
        on_error(error)

    sequencer = Sequencer()
    # By producer, how many messages its open span has.
    spans: dict[int, int] = {}
    messages = journals.read_uncommitted(journal, begin, end, on_error=damaged)
    for envelope in messages:
        uuid = envelope.message.uuid
        producer = uuid.int & 0xFFFFFFFFFFFF
        outcome = sequencer.queue_uncommitted(envelope)
        if outcome in _DUPLICATES:
            account.duplicates += 1
        elif outcome in (
            QueueOutcome.CONTINUE_BEGIN_SPAN,
            QueueOutcome.CONTINUE_EXTEND_SPAN,
        ):
            spans[producer] = spans.get(producer, 0) + 1
        else:
            # Of the span what is not delivered is rolled back.
            delivered = _delivered(journals, sequencer, damaged)
            own = flags_of(uuid) != Flags.ACK_TXN
            open_ = spans.pop(producer, 0)
            account.committed += delivered
            account.rolled_back += open_ - (delivered - own)
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
        count += flags_of(found.message.uuid) != Flags.ACK_TXN


def lags(journals: Journals, *, now: float | None = None) -> list[Lag]:
    """Return how far each reader is behind in each journal."""
    now = time.time() if now is None else now
    found = []
    for reader in journals.readers():
        for spec in journals.select():
            log = journals.log(spec.name)
            end = log.end()
            offset = max(reader.checkpoint.offsets.get(spec.name, 0), log.first())
            first = next(log.groups(offset, skip=True), None)
            seconds = 0.0 if first is None else max(0.0, now - first.time / 1e9)
            count = 0
            messages = journals.read_uncommitted(
                spec.name, offset, end, on_error=lambda _: None
            )
            for envelope in messages:
                count += flags_of(envelope.message.uuid) != Flags.ACK_TXN
            found.append(Lag(reader.name, spec.name, end - offset, count, seconds))
    return found
