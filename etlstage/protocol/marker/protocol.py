"""
One marker session, seen from either side: moves bytes.

``state.py`` says what is allowed, ``framing.py`` where things end, and
``reader.py`` what the peer's bytes mean. Here is the seam, and what we send.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from etlstage.errors import (
    LocalProtocolError,
    RemoteProtocolError,
)
from etlstage.messages import Groups, Run, plain
from etlstage.protocol.base import SEND_EOF, Limits, Side
from etlstage.protocol.events import (
    BatchEnded,
    Event,
    MessagesPassed,
    MoreRequested,
    OutputPassed,
    ProtocolFailed,
    Refusals,
    RepliesCompleted,
    StreamEnded,
)
from etlstage.protocol.marker.framing import (
    LISTS,
    Framing,
    encode_replies,
)
from etlstage.protocol.marker.markers import Markers
from etlstage.protocol.marker.reader import Reader
from etlstage.protocol.marker.state import Mode, Refused, Session, State, Token

__all__ = ("MarkerProtocol",)


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

    """

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
    def owed(self) -> int:
        """EOP that the worker still has to write."""
        return self._session.owed

    # --- the seam -----------------------------------------------------------

    @property
    def in_order(self) -> bool:
        """The k-th EOP answers the k-th exchange."""
        return True

    @property
    def room(self) -> float:
        """One message when a worker that fills its batches waits for it, else any."""
        if not self._asked:
            return math.inf
        return float(self.state in (State.IDLE, State.WANTED))

    def receive_data(self, data: bytes, _now: float = 0.0, /) -> None:
        """Take bytes that the peer sent; they may be cut anywhere."""
        if self.state is State.ERROR:
            return
        try:
            self._reader.feed(data)
        except RemoteProtocolError as error:
            self._fail(error)

    def receive_eof(self, _now: float = 0.0, /) -> None:
        """Take note that the peer will send no more."""
        if self.state is State.ERROR:
            return
        try:
            self._reader.events.append(StreamEnded(self._reader.tail()))
        except RemoteProtocolError as error:
            self._fail(error)

    def events_received(self) -> list[Event]:
        """Return, once, what has been received since the last call."""
        events, self._reader.events = self._reader.events, []
        return events

    def data_to_send(self) -> list[bytes]:
        """Return, once, the bytes to write; ``SEND_EOF`` among them is a half-close."""
        out, self._out = self._out, []
        return out

    def get_timer(self) -> float | None:
        """Return None: the page knows no time."""
        return None

    def handle_timer(self, now: float) -> None:
        """Do nothing: the page knows no time."""

    def send(self, event: Event) -> None:
        """
        Queue an event for the peer.

        Raises:
            LocalProtocolError: If the state, or our side, does not allow it.
            MessageRefused: If a message contains a marker or is too long; nothing
                of the event has been queued then.

        """
        match event:
            case MessagesPassed(messages) if self.side is Side.SUPERVISOR:
                self._send_messages(messages)
            case BatchEnded(full) if self.side is Side.SUPERVISOR:
                self._pass(Token.EOB)
                if full and not self._eob_after_full:
                    return  # the worker knows
                tail = self.markers.eom if self._eob_then_eom else b""
                self._reader.echoes += bool(tail) and self.mode is Mode.BATCH_WORKER
                self._out.append(self.markers.eob + tail)
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

    def _fail(self, error: RemoteProtocolError) -> None:
        self._session.fail()
        self._reader.events.append(ProtocolFailed(error))

    # --- sending ------------------------------------------------------------

    def _send_messages(self, messages: Run) -> None:
        messages = plain(messages)  # what is beside them does not travel
        framing = self._framing_of(messages)
        wire = self._encode(framing.encode_run, messages)
        if len(messages):
            self._reader.framing = framing
            self._pass(Token.MESSAGE, len(messages))
            self._out.append(wire)

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
