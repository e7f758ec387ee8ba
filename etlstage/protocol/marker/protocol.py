"""
One marker session, for either side.

``state.py`` decides what is allowed, ``framing.py`` finds the ends of messages and
replies, and ``reader.py`` interprets the peer's bytes. This file implements the
interface of a session, and writes what our own side sends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from etlstage.errors import (
    LocalProtocolError,
    RemoteProtocolError,
)
from etlstage.messages import Run, plain
from etlstage.protocol.base import SEND_EOF, Limits, Side
from etlstage.protocol.events import (
    Added,
    Ended,
    Event,
    Failed,
    Farewell,
    Noise,
    Opened,
    Wanted,
)
from etlstage.protocol.marker.blocks import Terms, Window
from etlstage.protocol.marker.framing import (
    LISTS,
    ByteFraming,
    encode_replies,
)
from etlstage.protocol.marker.markers import Markers
from etlstage.protocol.marker.proof import Proof, Stand
from etlstage.protocol.marker.reader import MarkerReader
from etlstage.protocol.marker.state import (
    MarkerState,
    Mode,
    Token,
    TokenMachine,
    TransitionDenied,
)

__all__ = ("MarkerProtocol",)

_CLOSES: Final = (
    "; for a worker that closes full batches by itself set"
    " dialect.eob_after_full: false"
)


class MarkerProtocol:
    """
    A session of the stage protocol, without I/O.

    Both sides number exchanges from 1. An exchange is a message, a batch, or a round of
    a worker that writes until it exits: nothing is sent to begin or end a round, which
    ends with the worker's exit.

    Args:
        side: Which end of the session this is.
        mode: The scenario of the stage.
        markers: The five markers.
        limits: How much the peer may make us hold.
        eob_then_eom: An EOM follows each EOB.
        bnc_after_eob: A worker that fills its batches takes this EOM for an empty
            message and answers it, after EOP, with a BNC that asks for nothing.
        eob_after_full: An EOB follows a batch that is full.
        bnc_after_last: The worker also asks after the message that fills its batch.
        batch: Messages that fill a batch.
        framing_of: Returns the framing for messages of a type; replies are stored in
            the form of the messages that were sent last.
        window: How many exchanges may be given ahead of their replies; None: any
            number.
        terms: Given on the supervisor's side, where replies are paired by counting:
            they are released once ``proof.py`` has proven them. None: at once.

    """

    in_order: Final = True
    """The k-th EOP answers the k-th exchange."""
    sends_farewell: Final = False
    defers_farewell: Final = False

    def __init__(
        self,
        side: Side,
        mode: Mode,
        markers: Markers | None = None,
        *,
        limits: Limits | None = None,
        eob_then_eom: bool = False,
        bnc_after_eob: bool = True,
        eob_after_full: bool = True,
        bnc_after_last: bool = False,
        batch: int = 1,
        framing_of: Callable[[Run], ByteFraming] = lambda _messages: LISTS,
        window: Window | None = None,
        terms: Terms | None = None,
    ) -> None:
        self.side = side
        self.markers: Markers = markers or Markers()
        self._limits = limits or Limits()
        self._eob_then_eom = eob_then_eom
        self._eob_after_full = eob_after_full
        self._bnc_after_last = bnc_after_last
        self._batch = batch
        self._session = TokenMachine(mode)
        self._asks = mode is Mode.BATCH_WORKER
        self._echoes = self._asks and eob_then_eom and bnc_after_eob
        self._closes = mode is Mode.BATCH_SUPERVISOR
        self._batches = mode.batches
        self._plain = mode is Mode.PLAIN
        self._filled = 0  # messages of the batch that was opened last
        self._rounds = 0
        replies = side is Side.WORKER and mode is not Mode.PLAIN
        # Only replies are searched for ERR: elsewhere it is ordinary data.
        self._unsendable = self.markers if replies else self.markers.without_err()
        self._framing_of = framing_of
        self._framings: dict[type, ByteFraming] = {}  # by type of the messages
        self._reader = MarkerReader(side, self._session, self.markers, self._limits)
        self._reader.eob_then_eom = eob_then_eom
        self._reader.bnc_after_eob = self._echoes
        self._out: list[bytes] = []
        self._window = window
        self._ended = False
        self.tail: bytes = b""
        """What the peer sent after its last marker, once it has closed its output."""
        self.owed: int = 0
        """Number of EOP that the worker still has to write."""
        self.room: float = math.inf
        """How many exchanges may be opened; messages, if the worker asks for them."""
        self.unprompted: bool = terms is not None
        """Whether the session has bytes or timers of its own: those of a proof."""
        self.wants_unread: bool = False
        """Whether the session needs :meth:`input_unread` now."""
        self._now = 0.0
        self.proof: Proof | None = None
        """Holds replies back until they are proven; None: they are not held back."""
        if terms is not None:
            slack = len(self.markers.eom) if eob_then_eom else 0
            self.proof = Proof(
                terms,
                self.markers,
                self._out,
                batches=mode.batches,
                asks=self._asks,
                slack=slack,
                hint=_CLOSES if self._closes and eob_after_full else "",
            )
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
    def state(self) -> MarkerState:
        """The current state."""
        return self._session.state

    @property
    def _due(self) -> int:
        """Number of unanswered exchanges that were sent to the worker, even in part."""
        # A batch that we close is owed only after its EOB.
        session = self._session
        return session.owed + (self._closes and session.filling)

    # --- the interface of a session -----------------------------------------

    def receive_data(self, data: bytes, now: float = 0.0, /) -> None:
        if self._session.state is MarkerState.ERROR:
            return
        self._now = now
        try:
            self._reader.feed(data)
        except RemoteProtocolError as error:
            self._fail(error)
        if self.proof is not None:
            self._hold(self.proof, data, now)
        self._count()

    def reading_paused(self, now: float, /) -> None:
        """Do nothing: there are no heartbeats."""

    def receive_eof(self, now: float = 0.0, /) -> None:
        if self.proof is not None:
            self._now = now
            self.proof.receive_eof(now, owed=self._due)
            self._count()
        if self.state is MarkerState.ERROR:
            return
        try:
            self.tail = self._reader.tail()
        except RemoteProtocolError as error:
            self._fail(error)
            return
        if self.side is Side.WORKER:
            self._reader.events += [Noise(self.tail)] if self.tail else []
            self._reader.events.append(Farewell())

    def events_received(self) -> list[Event]:
        events, self._reader.events = self._reader.events, []
        if self.proof is not None:
            events, self.proof.released = [*self.proof.released, *events], []
        return events

    def data_to_send(self) -> list[bytes]:
        out = self._out[:]
        self._out.clear()  # the same list: the proof writes to it, too
        return out

    def get_timer(self) -> float | None:
        """Return when to look at the unread input again; there is no other timer."""
        return None if self.proof is None else self.proof.next_look(self._now)

    def handle_timer(self, now: float) -> None:
        """Do nothing: :meth:`input_unread` decides by how much is unread then."""

    def go_in_step(self, step: bool, /) -> None:
        if self.proof is not None:
            self.proof.blocks.step = step
            self._count()

    def bound_replies(self, size: float, /) -> None:
        if self.proof is not None:
            self.proof.blocks.bound = size

    @property
    def ahead(self) -> bool:
        return self.proof is not None and self.proof.ahead

    @property
    def unproven(self) -> int:
        return 0 if self.proof is None else self.proof.unproven

    def input_unread(self, left: int, now: float) -> bool:
        self._now = now
        if self.proof is None:
            return False
        receive = self.proof.input_unread(left, now, owed=self._due)
        self._count()
        return receive

    def output_dry(self, now: float) -> None:
        self._now = now
        if self.proof is not None:
            self.proof.output_dry(now)
            self._count()

    def give_whole(self) -> None:
        if self.proof is not None:
            self.proof.stop()
            self._count()

    def peer_exited(self, clean: bool, now: float = 0.0) -> None:
        """Release the proven replies of a worker that is gone, or end its round."""
        self._now = now
        if self.proof is not None:
            self.proof.peer_exited(now, clean=clean, owed=self._due)
            self._count()
        elif self._reader.round and clean and self.state is not MarkerState.ERROR:
            # Its last message needs no EOM.
            group = (self.tail,) if self.tail else ()
            self._reader.events.append(Ended(self._reader.round, [group]))
            self._reader.round = 0
            self.tail = b""
            self._count()

    def send(self, event: Event, now: float = 0.0, /) -> None:
        self._now = now
        ours = self.side is Side.SUPERVISOR
        # Checked first, and by type: the speed of one message at a time depends on it.
        if type(event) is Opened and ours:
            self._open(event)
        elif type(event) is Added:
            (self._add if ours else self._send_output)(event)
        elif type(event) is Ended and not ours:
            self._send_replies(event)
        elif type(event) is Farewell:
            self._send_eof()
        elif type(event) is Wanted and not ours:
            self._ask(event)
        else:
            kind = type(event).__name__
            raise LocalProtocolError(f"a {self.side.value} can't send {kind}")
        self._count()

    def _hold(self, proof: Proof, data: bytes, now: float) -> None:
        """Hold back ended exchanges; take unsolicited output for a fault."""
        events, self._reader.events = self._reader.events, []
        if proof.proving or proof.stand is Stand.OVER:
            proof.hear(data, events)
            if proof.proving and self._session.state is MarkerState.WANTED:
                # It asks for more after a message of which it has at most a part.
                proof.doubt(proof.unsolicited(self.markers.bnc))
            return
        size = len(data)
        for event in events:
            if type(event) is Ended:
                suspect = self._reader.suspect
                size += event.overhead
                proof.hold(event, size, now, owed=self._due, suspect=suspect)
                size = 0
            elif isinstance(event, Failed) and not self._due:
                proof.doubt(proof.unsolicited(getattr(event.error, "found", b"")))
            elif isinstance(event, Added):
                proof.released.append(event)  # before the end of its exchange
            else:
                self._reader.events.append(event)

    def _fail(self, error: RemoteProtocolError) -> None:
        self._session.fail()
        self._reader.events.append(Failed(error))

    # --- sending ------------------------------------------------------------

    def _open(self, event: Opened) -> None:
        first, messages, each = event[:3]
        session = self._session
        if self._batches or self._plain:
            (self._open_batch if self._batches else self._open_round)(event)
            return
        self._expect("open", first, session.answered + session.owed + 1)
        if not each:
            self._pass(Token.EOB)
        wire, framing = self._framed(messages)
        if wire:
            idle, count = not session.owed, len(messages)
            self._pass(Token.MESSAGE, count)
            self._reader.framing = framing
            self._write(wire, count, idle=idle)

    def _framed(self, messages: Run) -> tuple[bytes, ByteFraming]:
        """Return messages as bytes to write, and the framing of the replies to them."""
        messages = plain(messages)  # columns beside them are not sent
        framing = self._framings.get(type(messages))
        if framing is None:
            framing = self._framings[type(messages)] = self._framing_of(messages)
        limit = self._limits.max_message_bytes
        return framing.encode_run(messages, self._unsendable, limit=limit), framing

    def _open_round(self, event: Opened) -> None:
        if len(event.messages) or event.each:
            self._pass(Token.MESSAGE)
        self._expect("open", event.first, self._rounds + 1)
        if self._reader.round:
            raise LocalProtocolError(
                f"round {self._rounds} is open until the worker exits"
            )
        self._rounds = self._reader.round = event.first

    def _open_batch(self, event: Opened) -> None:
        first, messages, each, ended = event[:4]
        session = self._session
        self._expect("open", first, session.opened + 1)
        if each:
            raise LocalProtocolError(
                "can't open an exchange for each message: a batch is one exchange"
            )
        if session.filling:
            raise LocalProtocolError(
                f"can't open batch {first}: the previous one has not ended"
            )
        if not (ended or len(messages)):
            raise LocalProtocolError(
                f"can't open batch {first}: it has neither a message nor an end"
            )
        self._fill(messages, 0, ended=ended, idle=not self._due)

    def _add(self, event: Added) -> None:
        """Add to the open batch, or end it."""
        id_, messages, ended = event
        session = self._session
        if not session.filling:
            raise LocalProtocolError(f"can't add to exchange {id_}: no batch is open")
        self._expect("add to", id_, session.opened)
        self._fill(messages, self._filled, ended=ended)

    def _fill(
        self, messages: Run, held: int, *, ended: bool, idle: bool = False
    ) -> None:
        """Add messages to a batch that has ``held`` already, and EOB if it ends."""
        (wire, framing), count = self._framed(messages), len(messages)
        if ended and count and self._asks:
            raise LocalProtocolError("can't send EOB after a message: BNC comes first")
        if count:
            self._pass(Token.MESSAGE, count)
            self._reader.framing = framing
        full = held + count >= self._batch
        if ended:
            self._pass(Token.EOB)
        if ended and (self._eob_after_full or not full):  # else the worker closes it
            tail = self.markers.eom if self._eob_then_eom else b""
            self._reader.echoes += self._echoes
            wire += self.markers.eob + tail
        self._filled = held + count
        self._reader.filled = 0 if ended else self._filled
        self._write(wire, count, idle=idle, opens=not held)

    def _write(
        self, wire: bytes, messages: int, *, idle: bool, opens: bool = True
    ) -> None:
        if self.proof is None:
            # The end of a batch that the worker closes itself has no bytes.
            if wire:
                self._out.append(wire)
        else:
            self.proof.give(wire, messages, self._now, idle=idle, opens=opens)

    def _expect(self, what: str, number: int, due: int) -> None:
        if number != due:
            raise LocalProtocolError(
                f"can't {what} exchange {number}: expected number {due}"
            )

    def _send_output(self, event: Added) -> None:
        self._expect("add to", event.id, self._session.answered + 1)
        if event.ended:
            raise LocalProtocolError(
                "can't end an exchange with its output: send Ended"
            )
        limit = self._limits.max_message_bytes
        wire = LISTS.encode_run(event.messages, self._unsendable, limit=limit)
        if self.markers.eop == self.markers.eom and not self._plain:
            raise LocalProtocolError(
                "can't send part of a reply when eop is eom: a reply is one message"
            )
        if event.messages:
            self._pass(Token.OUTPUT)
            self._out.append(wire)

    def _send_replies(self, event: Ended) -> None:
        first, groups, refusals, _ = event
        self._expect("end", first, self._session.answered + 1)
        if refusals and self.markers.err is None:
            raise LocalProtocolError("can't refuse: there is no marker err")
        if self.markers.eop == self.markers.eom:
            refused = {refusal.place for refusal in refusals}
            if any(len(g) != 1 for n, g in enumerate(groups) if n not in refused):
                raise LocalProtocolError("a reply must be one message when eop is eom")
        limit = self._limits.max_message_bytes
        wire = encode_replies(groups, refusals, self._unsendable, limit=limit)
        if groups:
            self._pass(Token.EOP, len(groups))
            self._out.append(wire + self._reader.echoes_owed * self.markers.bnc)
            self._reader.echoes_owed = 0

    def _ask(self, event: Wanted) -> None:
        wanted = event[0]
        if wanted != 1:
            raise LocalProtocolError(
                f"can't ask for {wanted} messages: BNC asks for one"
            )
        self._pass(Token.BNC)
        self._out.append(self.markers.bnc)

    def _send_eof(self) -> None:
        if self.side is Side.SUPERVISOR:
            self._pass(Token.END)
            if self.proof is not None:
                self.proof.stop()
        elif self.owed:
            raise LocalProtocolError(f"can't end: {self.owed} EOP are still owed")
        self._ended = True
        self._out.append(SEND_EOF)

    def _pass(self, token: Token, count: int = 1) -> None:
        if self._ended:
            flow = "input" if self.side is Side.SUPERVISOR else "output"
            raise LocalProtocolError(
                f"can't handle {token.value} after the end of {flow}"
            )
        try:
            self._session.handle(token, count)
        except TransitionDenied as refusal:
            raise LocalProtocolError(str(refusal)) from None

    def _count(self) -> None:
        """Update the plain attributes, which are read at every turn without a call."""
        session, proof, window = self._session, self.proof, self._window
        before, self.owed = self.owed, session.owed
        room = math.inf
        if self._asks:
            waits = session.state in (MarkerState.IDLE, MarkerState.WANTED)
            # A BNC after the message that fills a batch does not ask for more.
            vain = self._bnc_after_last and session.state is MarkerState.WANTED
            room = float(waits and not (vain and self._filled >= self._batch))
        elif self._plain:
            room = float(not self._reader.round)
        elif window is not None:
            if window.fixed:
                pass  # a fixed window does not adapt
            elif not before:
                window.started(self._now)
            elif self.owed < before:
                window.answered(before - self.owed, self._now)
            step = proof is not None and proof.blocks.step
            room = (1 if step else window.size) - self.owed
        if proof is None:
            self.room = room
            return
        if self._batches and session.filling:
            # A batch that was begun is filled, whatever the size of its block.
            room = 0.0 if proof.ahead else room
        elif room >= 1:
            room = min(room, proof.room(self._now))
        self.room = room
        idle = proof.proving or not self.owed
        due = self.owed + (self._closes and session.filling)
        self.wants_unread = idle and proof.wants_unread(due)
