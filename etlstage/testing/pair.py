r"""
Both sides of a dialect, connected in memory without a transport.

::

    pair = ProtocolPair(MarkerDialect())
    wire = pair.send(Side.SUPERVISOR, Opened(1, [b"one"]), cuts=BYTEWISE)
    assert wire == b"one\n"
    pair.send(Side.WORKER, Ended(1, [(b"ONE",)]))
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TypeAlias

from etlstage.errors import ProtocolError
from etlstage.protocol.base import SEND_EOF, Dialect, DialectSession, Limits, Side
from etlstage.protocol.events import (
    Added,
    Ended,
    Event,
    Failed,
    Farewell,
    Opened,
    Wanted,
)
from etlstage.testing.transcript import cut

__all__ = ("Atom", "ProtocolPair", "atoms", "deliver")

Atom: TypeAlias = tuple[str, int, bytes]
"""A single message, or an end, with its exchange: ``("message", 1, b"one")``."""


def atoms(sender: Side, events: Iterable[Event]) -> list[Atom]:
    """Return single messages and ends, the same however events group them."""
    out: list[Atom] = []
    word = "message" if sender is Side.SUPERVISOR else "output"
    for event in events:
        match event:
            case Opened(first, messages, each, ended):
                for number, message in enumerate(messages):
                    id_ = first + number * each
                    out.append((word, id_, message))
                    out += [("asked", id_, b"")] * each
                out += [("asked", first, b"")] * (ended and not each)
            case Added(id_, messages, ended):
                out += [(word, id_, message) for message in messages]
                out += [("asked", id_, b"")] * ended
            case Ended(first, groups, refusals):
                reasons = {refusal.place: refusal.reason for refusal in refusals}
                for place, group in enumerate(groups):
                    out += [(word, first + place, message) for message in group]
                    refused = reasons.get(place)
                    end = "answered" if refused is None else "refused"
                    out.append((end, first + place, (refused or "").encode()))
            case Wanted():
                pass  # on the supervisor's side it is room, not an event
            case Failed(error):
                out.append(("failed", 0, str(error).encode()))
            case _:
                out.append((type(event).__name__, 0, repr(event).encode()))
    return out


def deliver(
    data: Iterable[bytes], session: DialectSession, *, cuts: Collection[int] = ()
) -> bytes:
    """Pass the result of ``data_to_send()`` to a session, and return the bytes."""
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
    Connects the supervisor's side and the worker's side of a dialect.

    Each side must receive exactly what the other sends, or :meth:`send` raises
    AssertionError.

    Args:
        dialect: The dialect of both sides.
        limits: Size limits that either side enforces.

    Attributes:
        supervisor: The supervisor's session.
        worker: The worker's session.

    """

    def __init__(self, dialect: Dialect, *, limits: Limits | None = None) -> None:
        limits = limits or Limits()
        self.supervisor: DialectSession = dialect.open(Side.SUPERVISOR, limits)
        self.worker: DialectSession = dialect.open(Side.WORKER, limits)
        self._sent: dict[Side, list[Atom]] = {side: [] for side in Side}

    @property
    def owed(self) -> int:
        """Number of open exchanges, on which both sides must agree."""
        assert self.supervisor.owed == self.worker.owed
        return self.supervisor.owed

    def send(self, side: Side, *events: Event, cuts: Collection[int] = ()) -> bytes:
        """
        Send events, check that the other side receives the same, and return the bytes.

        The supervisor's session may hold back outputs until their reply is complete.

        Args:
            side: The side that sends.
            events: The events to send.
            cuts: Offsets at which the bytes are cut;
                :data:`~etlstage.testing.transcript.BYTEWISE`: at every byte.

        """
        here, there = self.supervisor, self.worker
        if side is Side.WORKER:
            here, there = there, here
        for event in events:
            here.send(event, 0.0)
        chunks = here.data_to_send()
        sent = self._sent[side]
        # A worker's farewell that only ends its output is no event on the other side.
        silent = side is Side.WORKER and SEND_EOF in chunks
        sent += atoms(
            side, (e for e in events if not (silent and isinstance(e, Farewell)))
        )
        wire = deliver(chunks, there, cuts=cuts)
        received = atoms(side, there.events_received())
        assert received == sent[: len(received)], f"received {received}, sent {sent}"
        del sent[: len(received)]
        assert all(kind == "output" for kind, *_ in sent), f"{sent} was not received"
        assert self.owed == here.owed
        return wire

    def refusal(self, side: Side, event: Event) -> str:
        """Return why ``side`` may not send ``event``; check that it sends nothing."""
        here = self.supervisor if side is Side.SUPERVISOR else self.worker
        before = repr(here)
        try:
            here.send(event, 0.0)
        except ProtocolError as error:
            assert here.data_to_send() == []
            assert repr(here) == before
            return f"{type(error).__name__}: {error}"
        raise AssertionError(f"{event!r} was sent")
