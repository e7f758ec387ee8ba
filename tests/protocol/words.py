"""
The events of the marker dialect, as words without numbers.

So a test shows which side sends what, while the numbers of exchanges are counted here,
and the numbers in received events are compared with that count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

from etlstage.messages import Groups, Run
from etlstage.protocol.base import Side
from etlstage.protocol.events import (
    Added,
    Ended,
    Event,
    Farewell,
    Noise,
    Opened,
    Refusal,
    Wanted,
)
from etlstage.protocol.marker import MarkerProtocol, MarkerState, Mode

__all__ = (
    "Answers",
    "BatchEnd",
    "Eof",
    "Messages",
    "More",
    "Output",
    "Reasons",
    "Word",
    "begin",
    "event_of",
    "note",
    "tell",
    "words_of",
)

Reasons: TypeAlias = Sequence[tuple[int, str]]
"""The place and the reason of each refused exchange."""


class Messages(NamedTuple):
    """Messages: one exchange each, or more messages of a batch."""

    messages: Run


class BatchEnd(NamedTuple):
    """EOB, whether or not a batch is open."""


class More(NamedTuple):
    """BNC."""


class Output(NamedTuple):
    """A part of the next reply."""

    messages: Run


class Answers(NamedTuple):
    """The next replies."""

    groups: Groups
    overhead: int = 0
    refusals: Reasons = ()


class Eof(NamedTuple):
    """The end of a side's output."""

    tail: bytes = b""


Word: TypeAlias = Messages | BatchEnd | More | Output | Answers | Eof | Event


class _Count:
    """The numbers of one session."""

    opened = ended = 0


_counts: WeakKeyDictionary[MarkerProtocol, _Count] = WeakKeyDictionary()


def _count_of(protocol: MarkerProtocol) -> _Count:
    return _counts.setdefault(protocol, _Count())


def event_of(protocol: MarkerProtocol, word: Word) -> Event:
    """Return the event by which a side sends a word next."""
    count = _count_of(protocol)
    filling = protocol.state in (
        MarkerState.FILLING,
        MarkerState.WANTED,
        MarkerState.AHEAD,
    )
    match word:
        case Messages(run) if filling:
            return Added(count.opened, run)
        case Messages(run):
            batch = protocol.mode.batches
            return Opened(count.opened + 1, run, each=not batch, ended=not batch)
        case BatchEnd() if filling:
            return Added(count.opened, (), ended=True)
        case BatchEnd():
            return Opened(count.opened + 1, (), each=False)
        case More():
            return Wanted()
        case Output(run):
            return Added(count.ended + 1, run)
        case Answers(groups, overhead, reasons):
            refusals = [Refusal(place, 0, 0, reason) for place, reason in reasons]
            return Ended(count.ended + 1, groups, refusals, overhead)
        case Eof():
            return Farewell()
        case _:
            return word


def note(protocol: MarkerProtocol, event: Event) -> None:
    """Count what a side has sent or received."""
    count = _count_of(protocol)
    if isinstance(event, Opened):
        assert event.first == count.opened + 1
        count.opened += len(event.messages) if event.each else 1
    elif isinstance(event, Ended):
        assert event.first == count.ended + 1
        count.ended += len(event.groups)
    elif isinstance(event, Added) and protocol.mode is not Mode.PLAIN:
        supervisors = event.id == count.opened
        outputs = event.id == count.ended + 1
        assert supervisors or outputs


def begin(protocol: MarkerProtocol) -> None:
    """Open the round of a plain worker, which writes until it exits."""
    plain = protocol.mode is Mode.PLAIN and protocol.side is Side.SUPERVISOR
    if plain and not _count_of(protocol).opened:
        tell(protocol, Opened(1, (), each=False))


def tell(protocol: MarkerProtocol, word: Word, now: float = 0.0) -> None:
    """Have a side send a word."""
    event = event_of(protocol, word)
    protocol.send(event, now)
    note(protocol, event)


def words_of(
    protocol: MarkerProtocol, events: Iterable[Event] | None = None
) -> list[Word]:
    """Return a side's received or given events as words; check their numbers."""
    out: list[Word] = []
    worker = protocol.side is Side.WORKER
    for event in protocol.events_received() if events is None else events:
        note(protocol, event)
        match event:
            case Opened(_, run, each, ended):
                out += [Messages(run)] if run else []
                out += [BatchEnd()] if ended and not each else []
            case Added(_, run, ended) if worker:
                out += [Messages(run)] if run else []
                out += [BatchEnd()] if ended else []
            case Added(_, run):
                out.append(Output(run))
            case Ended(_, groups, refusals, overhead):
                reasons = [(refusal.place, refusal.reason) for refusal in refusals]
                out.append(Answers(groups, overhead, reasons))
            case Noise(tail) if worker:
                out.append(Eof(tail))
            case Farewell() if worker:
                out += [] if out and isinstance(out[-1], Eof) else [Eof()]
            case _:
                out.append(event)
    return out
