r"""
Both sides of a dialect, back to back in memory, with nothing between them.

::

    pair = ProtocolPair(MarkerDialect())
    wire = pair.send(Side.SUPERVISOR, MessagesPassed([b"one"]), cuts=BYTEWISE)
    assert wire == b"one\n"
    pair.send(Side.WORKER, RepliesCompleted([(b"ONE",)]))
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TypeAlias

from etlstage.errors import ProtocolError
from etlstage.protocol.base import SEND_EOF, Dialect, Limits, Session, Side
from etlstage.protocol.events import (
    BatchEnded,
    Event,
    Failed,
    MessagesPassed,
    MoreRequested,
    OutputPassed,
    RepliesCompleted,
    StreamEnded,
)
from etlstage.testing.transcript import cut

__all__ = ("Atom", "ProtocolPair", "atoms", "deliver")

Atom: TypeAlias = tuple[str, bytes]
"""A single message, or a mark, as ``("message", b"one")``."""


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
                    end = "answered" if refused is None else "refused"
                    out.append((end, (refused or "").encode()))
            case BatchEnded():
                out.append(("batch ended", b""))
            case MoreRequested():
                out.append(("more requested", b""))
            case StreamEnded(tail):
                out.append(("ended", tail))
            case Failed(error):
                out.append(("failed", str(error).encode()))
            case _:
                out.append((type(event).__name__, repr(event).encode()))
    return out


def deliver(
    data: Iterable[bytes], session: Session, *, cuts: Collection[int] = ()
) -> bytes:
    """Hand over what ``data_to_send()`` returned, and return the bytes."""
    wire = b""
    for chunk in data:
        if chunk == SEND_EOF:
            session.receive_eof(0.0)
        for piece in cut(chunk, cuts, len(wire)):
            session.receive_data(piece, 0.0)
        wire += chunk
    return wire


class ProtocolPair:
    """
    Joins a supervisor's side and a worker's side of one session.

    What one side sends must be just what the other receives, or :meth:`send` raises
    AssertionError.

    Args:
        dialect: What both speak.
        limits: How much either may make the other hold.

    Attributes:
        supervisor: One session.
        worker: The other.

    """

    def __init__(self, dialect: Dialect, *, limits: Limits | None = None) -> None:
        limits = limits or Limits()
        self.supervisor: Session = dialect.open(Side.SUPERVISOR, limits)
        self.worker: Session = dialect.open(Side.WORKER, limits)
        self._sent: dict[Side, list[Atom]] = {side: [] for side in Side}

    @property
    def owed(self) -> int:
        """How many exchanges are open, which both sides know alike."""
        assert self.supervisor.owed == self.worker.owed
        return self.supervisor.owed

    def send(self, side: Side, *events: Event, cuts: Collection[int] = ()) -> bytes:
        """
        Send, check that the other side receives just that, and return the bytes.

        Outputs of a reply may stay with the supervisor until it is complete.

        Args:
            side: Who sends.
            events: What is sent.
            cuts: Before which of the bytes, counted from 0, they are cut;
                :data:`~etlstage.testing.transcript.BYTEWISE` for each of them.

        """
        here, there = self.supervisor, self.worker
        if side is Side.WORKER:
            here, there = there, here
        for event in events:
            here.send(event)
        sent = self._sent[side]
        sent += atoms(events)
        wire = deliver(here.data_to_send(), there, cuts=cuts)
        received = atoms(there.events_received())
        assert received == sent[: len(received)], f"{received} came of {sent}"
        del sent[: len(received)]
        assert all(kind == "output" for kind, _ in sent), f"{sent} did not come"
        assert self.owed == here.owed
        return wire

    def refusal(self, side: Side, event: Event) -> str:
        """Return why ``side`` may not send ``event``; check that it sends nothing."""
        here = self.supervisor if side is Side.SUPERVISOR else self.worker
        before = repr(here)
        try:
            here.send(event)
        except ProtocolError as error:
            assert here.data_to_send() == []
            assert repr(here) == before
            return f"{type(error).__name__}: {error}"
        raise AssertionError(f"{event!r} was sent")
