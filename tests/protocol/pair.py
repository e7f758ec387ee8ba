"""
Both ends of a marker session, connected directly, and ways to check what they send.

Events are named tuples: two of different classes with the same fields are equal. So
comparisons here are made on tuples that include the class name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final, TypeAlias

from etlstage.protocol.base import SEND_EOF, Limits, Side
from etlstage.protocol.events import Failed
from etlstage.protocol.marker import MarkerProtocol, Markers, MarkerState, Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.testing.pair import ProtocolPair, deliver
from tests.protocol.words import (
    Answers,
    Eof,
    Messages,
    Output,
    Word,
    begin,
    event_of,
    note,
    words_of,
)

__all__ = (
    "ConnectionPair",
    "S",
    "W",
    "heard",
    "receive",
    "typed",
    "without_dump",
)

S: Final = Side.SUPERVISOR
W: Final = Side.WORKER

Typed: TypeAlias = tuple[object, ...]


def without_dump(text: str) -> str:
    """Return an error's text without the bytes it shows, whose number may vary."""
    return text.partition(", found ")[0].removesuffix(")")


def typed(events: Iterable[Word]) -> list[Typed]:
    """
    Return events with class names, adjacent runs merged, errors as text.

    A refused exchange has its reason among the replies.
    """
    out: list[Typed] = []
    for event in events:
        name = type(event).__name__
        match event:
            case Failed(error):
                out.append((name, type(error).__name__, str(error)))
            case Messages() | Output() | Answers():
                before: object = []
                if out and out[-1][0] == name:
                    before = out.pop()[1]
                assert isinstance(before, list)
                run: list[object] = [*event[0]]
                if isinstance(event, Answers):
                    for place, reason in event.refusals:
                        assert run[place] == ()
                        run[place] = reason
                out.append((name, [*before, *run]))
            case _:
                out.append((name, *event))
    return out


def heard(protocol: MarkerProtocol) -> list[Typed]:
    """Return the events that a side has received."""
    return typed(words_of(protocol))


def receive(protocol: MarkerProtocol, *chunks: bytes) -> list[Typed]:
    """Receive chunks, which may include ``SEND_EOF``; return their events."""
    dead = protocol.state is MarkerState.ERROR
    begin(protocol)
    deliver(chunks, protocol)
    words = words_of(protocol)
    if (
        SEND_EOF in chunks
        and protocol.side is S
        and protocol.state is not MarkerState.ERROR
    ):
        words.append(Eof(protocol.tail))  # it waits for the worker's exit
    return typed([] if dead else words)


class ConnectionPair(ProtocolPair):
    """Connects both sides of a ``marker`` session, and checks their states."""

    def __init__(
        self,
        mode: Mode,
        markers: Markers | None = None,
        *,
        limits: Limits | None = None,
        eob_then_eom: bool = False,
        bnc_after_eob: bool = True,
    ) -> None:
        dialect = MarkerDialect(
            mode=mode,
            markers=markers or Markers(),
            eob_then_eom=eob_then_eom,
            bnc_after_eob=bnc_after_eob,
        )
        super().__init__(dialect, limits=limits)
        begin(self.end(S))

    def end(self, side: Side) -> MarkerProtocol:
        """Return the session of a side."""
        end = self.supervisor if side is S else self.worker
        assert isinstance(end, MarkerProtocol)
        return end

    def send(self, side: Side, *words: Word, cuts: Collection[int] = ()) -> bytes:
        """Have a side send words, as :meth:`ProtocolPair.send` does with events."""
        wire = b""
        for word in words:
            here = self.end(side)
            event = event_of(here, word)
            wire += super().send(side, event, cuts=cuts)
            note(here, event)
        return wire

    def refusal(self, side: Side, word: Word) -> str:
        """Return why a side may not send a word; check that it sends nothing."""
        return super().refusal(side, event_of(self.end(side), word))

    @property
    def status(self) -> tuple[MarkerState, int]:
        """The state, which both sides must share, and how many EOP are owed."""
        here, there = self.supervisor, self.worker
        assert isinstance(here, MarkerProtocol)
        assert isinstance(there, MarkerProtocol)
        assert here.state is there.state
        return here.state, self.owed
