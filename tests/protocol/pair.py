"""
Two ends of one marker session, back to back, and ways to look at what they say.

Events are named tuples: two of different classes with the same fields are equal.
So nothing here compares events; what is compared names its class.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeAlias

from etlstage.protocol.base import Limits, Side
from etlstage.protocol.events import (
    Event,
    Failed,
    MessagesPassed,
    OutputPassed,
    RepliesCompleted,
)
from etlstage.protocol.marker import MarkerProtocol, Markers, Mode, State
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.testing.pair import ProtocolPair, deliver

__all__ = (
    "ConnectionPair",
    "S",
    "W",
    "receive",
    "typed",
    "without_dump",
)

S: Final = Side.SUPERVISOR
W: Final = Side.WORKER

Typed: TypeAlias = tuple[object, ...]


def without_dump(text: str) -> str:
    """Return an error's text without the bytes it shows: more of them may be there."""
    return text.partition(", found ")[0].removesuffix(")")


def typed(events: Iterable[Event]) -> list[Typed]:
    """
    Return events with their class names, neighbouring runs merged, errors as text.

    Among replies the reason stands where one was refused.
    """
    out: list[Typed] = []
    for event in events:
        name = type(event).__name__
        match event:
            case Failed(error):
                out.append((name, type(error).__name__, str(error)))
            case MessagesPassed() | OutputPassed() | RepliesCompleted():
                before: object = []
                if out and out[-1][0] == name:
                    before = out.pop()[1]
                assert isinstance(before, list)
                run: list[object] = [*event[0]]
                if isinstance(event, RepliesCompleted):
                    for place, reason in event.refusals:
                        assert run[place] == ()
                        run[place] = reason
                out.append((name, [*before, *run]))
            case _:
                out.append((name, *event))
    return out


def receive(protocol: MarkerProtocol, *chunks: bytes) -> list[Typed]:
    """Hand over chunks, ``SEND_EOF`` among them; return what they meant."""
    deliver(chunks, protocol)
    return typed(protocol.events_received())


class ConnectionPair(ProtocolPair):
    """Joins both sides of one session of the stage protocol, and looks at its state."""

    def __init__(
        self,
        mode: Mode,
        markers: Markers | None = None,
        *,
        limits: Limits | None = None,
        eob_then_eom: bool = False,
    ) -> None:
        dialect = MarkerDialect(
            mode=mode, markers=markers or Markers(), eob_then_eom=eob_then_eom
        )
        super().__init__(dialect, limits=limits)

    @property
    def status(self) -> tuple[State, int]:
        """Where both sides stand, and how many EOP are owed."""
        here, there = self.supervisor, self.worker
        assert isinstance(here, MarkerProtocol)
        assert isinstance(there, MarkerProtocol)
        assert here.state is there.state
        return here.state, self.owed
