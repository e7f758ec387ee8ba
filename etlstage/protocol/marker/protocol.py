"""
One marker session, seen from either side: moves bytes.

``state.py`` says what is allowed, ``framing.py`` where things end, and
``reader.py`` what the peer's bytes mean. Here is the seam, and what we send.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from etlstage.errors import (
    LocalProtocolError,
    RemoteProtocolError,
)
from etlstage.messages import Groups, Run, plain
from etlstage.protocol.base import SEND_EOF, Limits, Side
from etlstage.protocol.events import (
    BatchEnded,
    Event,
    Failed,
    MessagesPassed,
    MoreRequested,
    OutputPassed,
    Refusals,
    RepliesCompleted,
    StreamEnded,
)
from etlstage.protocol.marker.blocks import Terms
from etlstage.protocol.marker.framing import (
    LISTS,
    Framing,
    encode_replies,
)
from etlstage.protocol.marker.markers import Markers
from etlstage.protocol.marker.proof import Proof, Stand
from etlstage.protocol.marker.reader import Reader
from etlstage.protocol.marker.state import Mode, Refused, Session, State, Token

__all__ = ("MarkerProtocol",)

_FILLING: Final = frozenset({State.FILLING, State.WANTED, State.AHEAD})
"""A batch is open."""


class MarkerProtocol:
    """
    A session of the stage protocol, without I/O.

    Args:
        side: Which end we are.
        mode: The scenario of the stage.
        markers: The five markers.
        limits: How much the peer may make us hold.
        eob_then_eom: An EOM follows each EOB. A worker that fills its batches takes
            this for an empty message and answers it, behind EOP, with a BNC that
            asks for nothing.
        eob_after_full: An EOB follows a batch that is full.
        framing_of: Returns how to find boundaries in messages that are held so;
            replies are held as the messages were that went out last.
        terms: At the supervisor's side, where replies are counted: replies are
            released when ``proof.py`` has shown that they add up. None: at once.

    """

    in_order: Final = True
    """The k-th EOP answers the k-th exchange."""

    def __init__(
        self,
        side: Side,
        mode: Mode,
        markers: Markers | None = None,
        *,
        limits: Limits | None = None,
        eob_then_eom: bool = False,
        eob_after_full: bool = True,
        framing_of: Callable[[Run], Framing] = lambda _messages: LISTS,
        terms: Terms | None = None,
    ) -> None:
        self.side = side
        self.markers: Markers = markers or Markers()
        self._limits = limits or Limits()
        self._eob_then_eom = eob_then_eom
        self._eob_after_full = eob_after_full
        self._session = Session(mode)
        self._asked = mode is Mode.BATCH_WORKER
        replies = side is Side.WORKER and mode is not Mode.PLAIN
        # Only in replies is ERR searched for: in all else it is a byte like any other.
        self._unsendable = self.markers if replies else self.markers.without_err()
        self._framing_of = framing_of
        self._reader = Reader(side, self._session, self.markers, self._limits)
        self._reader.eob_then_eom = eob_then_eom
        self._out: list[bytes] = []
        self._ended = False
        self.owed: int = 0
        """EOP that the worker still has to write."""
        self.room: float = math.inf
        """One message when a worker that fills its batches waits for it, else any."""
        self.unprompted: bool = terms is not None
        """Whether it has bytes or timers of its own: those of a proof."""
        self._now = 0.0
        self.proof: Proof | None = None
        """What holds replies back, if anything does."""
        if terms is not None:
            slack = len(self.markers.eom) if eob_then_eom else 0
            self.proof = Proof(terms, self.markers, batches=mode.batches, slack=slack)
        self._count()

    def __repr__(self) -> str:
        return (
            f"<MarkerProtocol {self.side.value} {self._session.mode.value}"
            f" {self.state.value} owed={self.owed}>"
        )

    @property
    def mode(self) -> Mode:
        """The scenario of the session."""
        return self._session.mode

    @property
    def state(self) -> State:
        """Where the session stands."""
        return self._session.state

    @property
    def _due(self) -> int:
        """Exchanges that the worker has begun to be given, and has not answered."""
        # The batch that is open is owed only behind its EOB, if we end it.
        open_ = not self._asked and self.state in _FILLING
        return self._session.owed + open_

    # --- the seam -----------------------------------------------------------

    def receive_data(self, data: bytes, now: float = 0.0, /) -> None:
        """Take bytes that the peer sent; they may be cut anywhere."""
        if self._session.state is State.ERROR:
            return
        try:
            self._reader.feed(data)
        except RemoteProtocolError as error:
            self._fail(error)
        if self.proof is not None:
            self._hold(self.proof, data, now)
        self._count()

    def receive_eof(self, now: float = 0.0, /) -> None:
        """Take note that the peer will send no more."""
        if self.proof is not None:
            self._now = now
            self.proof.receive_eof(owed=self._due)
            self._count()
        if self.state is State.ERROR:
            return
        try:
            self._reader.events.append(StreamEnded(self._reader.tail()))
        except RemoteProtocolError as error:
            self._fail(error)

    def events_received(self) -> list[Event]:
        """Return, once, what has been received since the last call."""
        events, self._reader.events = self._reader.events, []
        if self.proof is not None:
            events, self.proof.released = [*self.proof.released, *events], []
        return events

    def data_to_send(self) -> list[bytes]:
        """Return, once, the bytes to write; ``SEND_EOF`` among them is a half-close."""
        out, self._out = self._out, []
        return out if self.proof is None else [*self.proof.data_to_send(), *out]

    def get_timer(self) -> float | None:
        """Return when to look at what is unread again: else the page knows no time."""
        return None if self.proof is None else self.proof.next_look(self._now)

    def handle_timer(self, now: float) -> None:
        """Do nothing: what follows depends on how much is unread then."""

    @property
    def wants_unread(self) -> bool:
        """Whether :meth:`input_unread` is of use now."""
        return self.proof is not None and self.proof.wants_unread(self._due)

    def input_unread(self, left: int, now: float) -> bool:
        """
        Take how many bytes the peer has not read of what was written to it.

        Returns:
            Whether to receive all that it has written now, whatever comes; then call
            :meth:`output_dry`.

        """
        self._now = now
        if self.proof is None:
            return False
        receive = self.proof.input_unread(left, now, owed=self._due)
        self._count()
        return receive

    def output_dry(self, now: float) -> None:
        """Judge what is held back: all that the peer had written was received."""
        self._now = now
        if self.proof is not None:
            self.proof.output_dry(now)
            self._count()

    def peer_exited(self, clean: bool, now: float) -> None:
        """Release, of what is held back, what is right of a peer that is gone."""
        self._now = now
        if self.proof is not None:
            self.proof.peer_exited(clean=clean, owed=self._due)
            self._count()

    def send(self, event: Event, now: float = 0.0, /) -> None:
        """
        Queue an event for the peer.

        Raises:
            LocalProtocolError: If the state, or our side, does not allow it.
            InvalidMessage: If a message contains a marker or is too long; nothing
                of the event has been queued then.

        """
        self._now = now
        match event:
            case MessagesPassed(messages) if self.side is Side.SUPERVISOR:
                self._send_messages(messages)
            case BatchEnded(full) if self.side is Side.SUPERVISOR:
                self._pass(Token.EOB)
                if full and not self._eob_after_full:
                    return  # the worker knows
                tail = self.markers.eom if self._eob_then_eom else b""
                self._reader.echoes += bool(tail) and self.mode is Mode.BATCH_WORKER
                self._write(self.markers.eob + tail, 0, idle=False)
            case RepliesCompleted(groups, _, refusals) if self.side is Side.WORKER:
                self._send_replies(groups, refusals)
            case OutputPassed(messages) if self.side is Side.WORKER:
                self._send_output(messages)
            case MoreRequested() if self.side is Side.WORKER:
                self._pass(Token.BNC)
                self._out.append(self.markers.bnc)
            case StreamEnded(tail):
                self._send_eof(tail)
            case _:
                raise LocalProtocolError(
                    f"a {self.side.value} can't send {type(event).__name__}"
                )
        if self.proof is not None:
            self._count()

    def _hold(self, proof: Proof, data: bytes, now: float) -> None:
        """Hold back what has ended; take for a fault what was not asked for."""
        self._now = now
        events, self._reader.events = self._reader.events, []
        if proof.proving or proof.stand is Stand.OVER:
            proof.hear(data, events)
            return
        size = len(data)
        for event in events:
            if isinstance(event, RepliesCompleted):
                count = len(event.groups)
                proof.hold(event, count, size + event.overhead, now, owed=self._due)
                size = 0
            elif isinstance(event, Failed) and not self._due:
                proof.doubt(self.markers.unasked(getattr(event.error, "found", b"")))
            else:
                self._reader.events.append(event)

    def _fail(self, error: RemoteProtocolError) -> None:
        self._session.fail()
        self._reader.events.append(Failed(error))

    # --- sending ------------------------------------------------------------

    def _send_messages(self, messages: Run) -> None:
        messages = plain(messages)  # what is beside them does not travel
        framing = self._framing_of(messages)
        wire = self._encode(framing.encode_run, messages)
        if len(messages):
            self._reader.framing = framing
            idle = not self._due
            self._pass(Token.MESSAGE, len(messages))
            self._write(wire, len(messages), idle=idle)

    def _write(self, wire: bytes, messages: int, *, idle: bool) -> None:
        if self.proof is None:
            self._out.append(wire)
        else:
            self.proof.give(wire, messages, self._now, idle=idle)

    def _send_output(self, messages: Run) -> None:
        wire = self._encode(LISTS.encode_run, messages)
        if self.markers.eop == self.markers.eom and self.mode is not Mode.PLAIN:
            raise LocalProtocolError(
                "can't send part of a reply when eop is eom: a reply is one message"
            )
        if messages:
            self._pass(Token.OUTPUT)
            self._out.append(wire)

    def _send_replies(self, groups: Groups, refusals: Refusals) -> None:
        if refusals and self.markers.err is None:
            raise LocalProtocolError("can't refuse: there is no marker err")
        if self.markers.eop == self.markers.eom:
            refused = {place for place, _ in refusals}
            if any(len(g) != 1 for n, g in enumerate(groups) if n not in refused):
                raise LocalProtocolError("a reply must be one message when eop is eom")
        limit = self._limits.max_message_bytes
        wire = encode_replies(groups, refusals, self._unsendable, limit=limit)
        if groups:
            self._pass(Token.EOP, len(groups))
            self._out.append(wire + self._echoes())

    def _echoes(self) -> bytes:
        echoes, self._reader.echoes_owed = self._reader.echoes_owed, 0
        return echoes * self.markers.bnc

    def _send_eof(self, tail: bytes) -> None:
        if tail:
            raise LocalProtocolError(
                f"can't end with {len(tail)} bytes that are no message"
            )
        if self.side is Side.SUPERVISOR:
            self._pass(Token.END)
            if self.proof is not None:
                self.proof.stop()
        elif self.owed:
            raise LocalProtocolError(f"can't end: {self.owed} EOP are still owed")
        self._ended = True
        self._out.append(SEND_EOF)

    def _encode(self, encode: Callable[..., bytes], what: object) -> bytes:
        return encode(what, self._unsendable, limit=self._limits.max_message_bytes)

    def _pass(self, token: Token, count: int = 1) -> None:
        if self._ended:
            flow = "input" if self.side is Side.SUPERVISOR else "output"
            raise LocalProtocolError(
                f"can't handle {token.value} after the end of {flow}"
            )
        try:
            self._session.handle(token, count)
        except Refused as refusal:
            raise LocalProtocolError(str(refusal)) from None
        self._count()

    def _count(self) -> None:
        """Keep what is asked of every session at every turn where it costs no call."""
        session, proof = self._session, self.proof
        self.owed = session.owed
        if self._asked:
            self.room = float(session.state in (State.IDLE, State.WANTED))
        if proof is None:
            return
        room = self.room if self._asked else math.inf
        if self.mode.batches and session.state in _FILLING:
            # A batch that was begun is filled, however large its block is.
            self.room = 0.0 if proof.ahead else room
        else:
            self.room = min(room, proof.room(self._now))
