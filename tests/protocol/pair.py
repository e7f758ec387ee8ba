"""
Two ends of one marker session, back to back, and ways to look at what they say.

Events are named tuples: two of different classes with the same fields are equal.
So nothing here compares events; what is compared names its class.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeAlias

from etlstage.errors import ProtocolError
from etlstage.protocol.base import SEND_EOF, Limits, Side
from etlstage.protocol.events import (
    BatchEnded,
    Event,
    MessagesPassed,
    MoreRequested,
    OutputPassed,
    ProtocolFailed,
    RepliesCompleted,
    StreamEnded,
)
from etlstage.protocol.marker import MarkerProtocol, Markers, Mode, State

__all__ = (
    "Atom",
    "ConnectionPair",
    "S",
    "W",
    "atoms",
    "deliver",
    "receive",
    "typed",
    "without_dump",
)

S: Final = Side.SUPERVISOR
W: Final = Side.WORKER

Typed: TypeAlias = tuple[object, ...]
Atom: TypeAlias = tuple[str, bytes]


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
            case ProtocolFailed(error):
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


def atoms(events: Iterable[Event]) -> list[Atom]:
    """Return single messages and marks: the same however a reply came in parts."""
    out: list[Atom] = []
    for event in events:
        match event:
            case MessagesPassed(messages):
                out += [("message", message) for message in messages]
            case OutputPassed(messages):
                out += [("output", message) for message in messages]
            case RepliesCompleted(groups, _, refusals):
                reasons = dict(refusals)
                for place, group in enumerate(groups):
                    out += [("output", message) for message in group]
                    refused = reasons.get(place)
                    end = ("EOP", b"") if refused is None else ("ERR", refused.encode())
                    out.append(end)
            case BatchEnded():
                out.append(("EOB", b""))
            case MoreRequested():
                out.append(("BNC", b""))
            case StreamEnded(tail):
                out.append(("end", tail))
            case ProtocolFailed(error):
                out.append(("failed", without_dump(str(error)).encode()))
    return out


def deliver(data: Iterable[bytes], protocol: MarkerProtocol) -> bytes:
    """Hand over what ``data_to_send()`` returned; return the bytes."""
    wire = b""
    for chunk in data:
        if chunk == SEND_EOF:
            protocol.receive_eof()
        else:
            protocol.receive_data(chunk)
        wire += chunk
    return wire


def receive(protocol: MarkerProtocol, *chunks: bytes) -> list[Typed]:
    """Hand over chunks, ``SEND_EOF`` among them; return what they meant."""
    deliver(chunks, protocol)
    return typed(protocol.events_received())


class ConnectionPair:
    """Joins a supervisor's side and a worker's side of one session."""

    def __init__(
        self,
        mode: Mode,
        markers: Markers | None = None,
        *,
        limits: Limits | None = None,
        eob_then_eom: bool = False,
    ) -> None:
        self.supervisor, self.worker = (
            MarkerProtocol(
                side, mode, markers, limits=limits, eob_then_eom=eob_then_eom
            )
            for side in (S, W)
        )
        self._sent: dict[Side, list[Atom]] = {S: [], W: []}

    @property
    def status(self) -> tuple[State, int]:
        """Where both sides stand, and how many EOP are owed."""
        here, there = self.supervisor, self.worker
        assert (here.state, here.owed) == (there.state, there.owed)
        return here.state, here.owed

    def send(self, side: Side, *events: Event) -> bytes:
        """
        Send, and check that the other side receives just that; return the bytes.

        Outputs of a reply may stay with the supervisor until the EOP is there.
        """
        here, there = self.supervisor, self.worker
        if side is W:
            here, there = there, here
        for event in events:
            here.send(event)
        sent = self._sent[side]
        sent += atoms(events)
        wire = deliver(here.data_to_send(), there)
        received = atoms(there.events_received())
        assert received == sent[: len(received)]
        del sent[: len(received)]
        assert all(kind == "output" for kind, _ in sent)
        assert self.status == (here.state, here.owed)
        return wire

    def refusal(self, side: Side, event: Event) -> str:
        """Return why ``side`` may not send ``event``; check that it sends nothing."""
        here = self.supervisor if side is S else self.worker
        before = repr(here)
        try:
            here.send(event)
        except ProtocolError as error:
            assert here.data_to_send() == []
            assert repr(here) == before
            return f"{type(error).__name__}: {error}"
        raise AssertionError(f"{event!r} was sent")
