"""
The sessions of one connection: which are open, and what has come of each.

Their numbers rise, and none is used again: a frame for one that has ended is late, and
hits no other. Outside they are known by the numbers of exchanges, which begin with 1.

What must be kept in sync: a session is here until the worker has ended its half, on the
worker's side until both halves have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from etlstage.errors import (
    LocalProtocolError,
    MessageRefused,
    PayloadTooBig,
    RemoteProtocolError,
)
from etlstage.messages import cost_of
from etlstage.protocol.base import Limits
from etlstage.protocol.cocaine.frame import ONE, Words, text_of, unpacked_text
from etlstage.protocol.cocaine.headers import Headers
from etlstage.protocol.cocaine.outgoing import Outgoing
from etlstage.protocol.events import (
    Event,
    ExchangeCancelled,
    ExchangeOpened,
    ExchangeRefused,
    ExchangesEnded,
    Noise,
    OutputOf,
)

__all__ = ("WORKER_CATEGORY", "Sessions", "code_of")

WORKER_CATEGORY: Final = 42
"""Category of the errors that frameworks send."""


class _Session:
    """Which halves have not ended, and what has come that was not told."""

    __slots__ = ("cost", "mine", "parts", "theirs")

    def __init__(self) -> None:
        self.mine = self.theirs = True
        self.parts: list[bytes] = []
        self.cost = 0  # bytes of memory that these take


class Sessions:
    """
    Opens sessions, and tells what comes of them.

    Args:
        ours: We are the supervisor.
        outgoing: What we say.
        events: Where to tell.
        limits: How much the peer may make us hold.
        concat: All chunks of a session are one message.
        packed: A payload is msgpack itself.

    """

    def __init__(
        self,
        outgoing: Outgoing,
        events: list[Event],
        limits: Limits,
        *,
        ours: bool,
        concat: bool,
        packed: bool,
    ) -> None:
        self._ours = ours
        self._outgoing = outgoing
        self._events = events
        self._limits = limits
        self._concat = concat and ours
        self._packed = packed
        self._open: dict[int, _Session] = {}
        self._last = 0  # the highest number there was
        self._touched: dict[int, _Session] = {}  # have parts that were not told
        self._ends: list[tuple[int, tuple[bytes, ...]]] = []

    def __len__(self) -> int:
        return len(self._open)

    @property
    def owed(self) -> int:
        """How many the worker has not ended."""
        if self._ours:
            return len(self._open)
        return sum(session.mine for session in self._open.values())

    # --- what comes -----------------------------------------------------------

    def take(
        self,
        words: Words,
        number: int,
        kind: int,
        arguments: tuple[object, ...],
        headers: Headers,
    ) -> None:
        """Understand a frame about a session."""
        session = self._open.get(number)
        if session is None and not self._ours and kind == words.invoke:
            self._begin(words, number, arguments, headers)
        elif session is None or not session.theirs:
            if number > self._last and self._ours:
                raise RemoteProtocolError(f"there is no session {number}")
            self._drop(kind, number)
        elif kind == words.chunk:
            self._take_chunk(number, session, arguments)
        elif kind == words.choke:
            self._take_choke(number, session)
        elif kind == words.error:
            self._take_error(number, session, arguments)
        else:
            self._drop(kind, number)

    def tell(self) -> None:
        """Tell what has come."""
        if self._touched and not self._concat:
            for number, session in self._touched.items():
                self._events.append(OutputOf(self._id(number), session.parts))
                session.parts = []
        self._touched.clear()
        if self._ends:
            self._events.append(ExchangesEnded(self._ends))
            self._ends = []

    def _drop(self, kind: int, number: int) -> None:
        self._events.append(Noise(b"frame %d for session %d" % (kind, number)))

    def _begin(
        self,
        words: Words,
        number: int,
        arguments: tuple[object, ...],
        headers: Headers,
    ) -> None:
        """Take a new session: on the worker's side."""
        # Before version 1 the numbers rose for all workers together.
        if words is ONE and number <= self._last:
            self._drop(words.invoke, number)
            return
        if not arguments:
            raise RemoteProtocolError("invoke names no event")
        event = text_of(arguments[0], "the event of an invoke")
        self._last = max(number, self._last)
        self._open[number] = _Session()
        self._events.append(ExchangeOpened(self._id(number), [], event, False, headers))

    def _take_chunk(
        self, number: int, session: _Session, arguments: tuple[object, ...]
    ) -> None:
        payload = arguments[0] if arguments else None
        if type(payload) is not bytes:
            raise RemoteProtocolError("a chunk holds no string")
        if self._packed:
            payload = unpacked_text(payload)
            if payload is None:
                self._refuse(number, session)
                return
        if len(payload) > (most := self._limits.max_message_bytes):
            raise PayloadTooBig(
                f"chunk is {len(payload)} bytes long, expected no more than {most};"
                " see max_message"
            )
        session.parts.append(payload)
        self._touched[number] = session
        if self._concat:
            session.cost += cost_of([payload])
            if session.cost > (most := self._limits.max_reply_bytes):
                raise PayloadTooBig(
                    f"reply takes more than {most} bytes of memory; see max_reply"
                )

    def _refuse(self, number: int, session: _Session) -> None:
        """Take a session as refused whose payload can't be read."""
        text = "its payload is no string packed by msgpack"
        if not self._ours:
            raise RemoteProtocolError(text)
        self._events.append(ExchangeRefused(self._id(number), 0, text))
        self._end_theirs(number, session)

    def _take_choke(self, number: int, session: _Session) -> None:
        parts = session.parts
        if self._concat and parts:
            parts = [b"".join(parts)]
        self._ends.append((self._id(number), tuple(parts)))
        self._end_theirs(number, session)

    def _take_error(
        self, number: int, session: _Session, arguments: tuple[object, ...]
    ) -> None:
        category, code, reason = code_of(arguments)
        self.tell()
        id_ = self._id(number)
        if self._ours:
            self._events.append(ExchangeRefused(id_, code, reason, category))
        else:
            self._events.append(ExchangeCancelled(id_, code, reason))
        # In version 0 a choke follows, which is late then.
        self._end_theirs(number, session)

    def _end_theirs(self, number: int, session: _Session) -> None:
        self._touched.pop(number, None)
        session.theirs = False
        session.parts = []
        if self._ours or not session.mine:
            del self._open[number]
        if self._ours and session.mine and self._outgoing.said.error_ends:
            # In version 1 a worker keeps a session until both halves have ended.
            self._outgoing.choke(number)

    # --- what we say ----------------------------------------------------------

    def open(self, event: ExchangeOpened, name: str) -> None:
        """
        Open a session.

        Raises:
            LocalProtocolError: If its number does not rise.
            MessageRefused: If a message is too long.

        """
        number = self._number(event.id)
        if number <= self._last:
            text = f"exchange {event.id} does not come behind all others"
            raise LocalProtocolError(text)
        most = self._limits.max_message_bytes
        for index, message in enumerate(event.messages):
            if len(message) > most:
                text = f"message is {len(message)} bytes long, expected no more than"
                raise MessageRefused(f"{text} {most}; see max_message", index=index)
        self._last = number
        self._open[number] = _Session()
        self._outgoing.invoke(number, name, event.headers)
        self._outgoing.chunks(number, event.messages)
        if event.ended:
            self.end(event.id, ())

    def pass_on(self, id_: int, messages: Sequence[bytes]) -> None:
        """Send messages of a session that goes on."""
        self._mine(id_)
        self._outgoing.chunks(self._number(id_), messages)

    def end(self, id_: int, messages: Sequence[bytes]) -> None:
        """End our half of a session, with these messages."""
        self.pass_on(id_, messages)
        number = self._number(id_)
        self._outgoing.choke(number)
        self._end_mine(number)

    def refuse(self, event: ExchangeRefused) -> None:
        """End our half with an error: on the worker's side."""
        self._mine(event.id)
        number = self._number(event.id)
        self._outgoing.error(number, event.category, event.code, event.reason)
        self._end_mine(number)

    def cancel(self, event: ExchangeCancelled, *, told: bool) -> None:
        """
        Forget a session, if it is open: what still comes of it is late.

        Args:
            event: Which, and why.
            told: Whether the worker is told nothing any more.

        """
        if self._outgoing.words is None:
            return
        number = self._number(event.id)
        session = self._open.pop(number, None)
        self._touched.pop(number, None)
        # Who has heard the end of our half is not to hear any more of it.
        if session is not None and session.mine and not told:
            self._outgoing.error(number, WORKER_CATEGORY, event.code, event.reason)

    def _mine(self, id_: int) -> None:
        session = self._open.get(self._number(id_))
        if session is None or not session.mine:
            raise LocalProtocolError(f"exchange {id_} takes no more from us")

    def _end_mine(self, number: int) -> None:
        session = self._open[number]
        session.mine = False
        if not session.theirs:
            del self._open[number]

    def _id(self, number: int) -> int:
        return number - self._outgoing.said.first + 1

    def _number(self, id_: int) -> int:
        return id_ + self._outgoing.said.first - 1


def code_of(arguments: tuple[object, ...]) -> tuple[int, int, str]:
    """
    Return category, code and reason of an error, or a terminate.

    Raises:
        RemoteProtocolError: If there are none.

    """
    if len(arguments) < 2:
        raise RemoteProtocolError("an error has no code and reason")
    code, reason = arguments[:2]
    pair = code if type(code) is tuple else (WORKER_CATEGORY, code)
    if len(pair) != 2 or not all(type(number) is int for number in pair):
        raise RemoteProtocolError("the code of an error is no number")
    category, number = pair
    return category, number, text_of(reason, "the reason of an error")
