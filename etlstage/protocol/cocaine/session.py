"""
One connection with a worker, seen from either side: what may follow what, and when.

``frame.py`` has the numbers of each version, and cuts frames from bytes.

A worker connects, says who it is (handshake), and beats for the first time when it may
be given sessions. We answer each beat at once. A session is an exchange: we invoke an
event, send chunks and a choke; the worker sends chunks and a choke, or an error. Each
side ends its own half. Either side says terminate when it is about to go.

Numbers of sessions rise and are never used again, so a frame for one that has ended is
late, and can hit no other. Such frames are dropped: who was cancelled may not know yet.
What never was a session is a fault.

What must be kept in sync: ``_open`` holds a session until the worker has ended its half,
on the worker's side until both halves have ended; ``_due`` has the deadlines by name.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Final, NamedTuple

from etlstage.errors import (
    LocalProtocolError,
    MessageRefused,
    PayloadTooBig,
    RemoteProtocolError,
)
from etlstage.messages import cost_of, counted
from etlstage.protocol.base import Limits, Side
from etlstage.protocol.cocaine.frame import (
    EARLY,
    ONE,
    ZERO,
    Encoding,
    Frames,
    Packer,
    Version,
    Words,
    packed_text,
    text_of,
    unpacked_text,
)
from etlstage.protocol.cocaine.headers import Headers, HeaderTable
from etlstage.protocol.events import (
    Event,
    ExchangeCancelled,
    ExchangeOpened,
    ExchangeRefused,
    ExchangesEnded,
    Farewell,
    LifeSeen,
    Noise,
    OutputOf,
    ProtocolFailed,
    Ready,
    StreamEnded,
)

__all__ = ("ABNORMAL", "NORMAL", "CocaineSession", "Deadlines", "State")

NORMAL: Final = 1
"""Code of a terminate: all is well."""
ABNORMAL: Final = 2
"""Code of a terminate: another worker would fare no better."""
WORKER_CATEGORY: Final = 42
"""Category of the errors that frameworks send."""
_FRAMING: Final = 5  # bytes that msgpack puts in front of a string, at most


class State(Enum):
    """How far a connection has come."""

    CONNECTED = "connected"
    """The worker has not said who it is."""
    SHAKEN = "shaken"
    """It has, and is not ready."""
    ACTIVE = "active"
    """It may be given sessions."""
    SEALED = "sealed"
    """It ends what it has, and is given no more."""
    ENDED = "ended"
    """Terminate has passed, or nothing more comes."""
    ERROR = "error"
    """The peer broke the protocol."""


class Deadlines(NamedTuple):
    """How long things may take, in seconds; None: for ever."""

    handshake: float | None = None
    """From the connection to the handshake."""
    heartbeat: float | None = 30.0
    """From one sign of life of the worker to the next."""
    seal: float = 3.0
    """For open sessions to end, when one side is about to go."""
    terminate: float = 5.0
    """For a worker that said terminate to close the connection."""
    beat: float = 10.0
    """The worker's: from one heartbeat to the next."""
    disown: float = 60.0
    """The worker's: from a heartbeat to the answer."""


_LIMITS: Final = Limits()
_DEADLINES: Final = Deadlines()


class _Open:
    """A session: which halves have not ended, and what has come of it."""

    __slots__ = ("cost", "mine", "parts", "theirs")

    def __init__(self) -> None:
        self.mine = self.theirs = True
        self.parts: list[bytes] = []
        self.cost = 0  # bytes of memory that these take


class CocaineSession:
    """
    A connection, without I/O.

    Args:
        side: Which end we are.
        version: Of the protocol; a worker that is told ``AUTO`` speaks 1.
        limits: How much the peer may make us hold.
        encoding: As what we send strings.
        event: What is invoked; the kind of the stage, if it is empty.
        concurrency: Sessions that a worker may have at once.
        concat: All chunks of a session are one message.
        packed: A payload is msgpack itself.
        soft: A worker that says terminate may end what it has.
        deadlines: How long things may take.

    """

    in_order: bool = False

    def __init__(
        self,
        side: Side,
        version: Version = Version.AUTO,
        *,
        limits: Limits = _LIMITS,
        encoding: Encoding = Encoding.RAW,
        event: str = "",
        concurrency: int = 10,
        concat: bool = False,
        packed: bool = False,
        soft: bool = False,
        deadlines: Deadlines = _DEADLINES,
    ) -> None:
        self.side = side
        self.state: State = State.CONNECTED
        self.identity: str = ""
        """As the worker calls itself."""
        self._ours = side is Side.SUPERVISOR
        self._words = version.words or (None if self._ours else ONE)
        self._guessed = False  # the words may be those of another version yet
        self._limits = limits
        self._event = event
        self._concurrency = concurrency
        self._concat = concat and self._ours
        self._packed = packed
        self._soft = soft
        self._deadlines = deadlines
        self._packer = Packer(encoding)
        self._frames = Frames(limits.max_message_bytes + _FRAMING)
        self._headers = HeaderTable()
        self._open: dict[int, _Open] = {}
        self._last = 0  # the highest session there was
        self._control: list[bytes] = []
        self._data: deque[bytes] = deque()
        self._events: list[Event] = []
        self._touched: dict[int, _Open] = {}  # have parts that were not told
        self._ends: list[tuple[int, tuple[bytes, ...]]] = []
        self._leaving = Farewell()
        self._due: dict[str, float] = {}
        self._now: float | None = None

    def __repr__(self) -> str:
        return f"<CocaineSession {self.side.value} {self.state.name} owed={self.owed}>"

    @property
    def owed(self) -> int:
        """How many exchanges the worker has not ended."""
        if self._ours:
            return len(self._open)
        return sum(item.mine for item in self._open.values())

    @property
    def room(self) -> float:
        """How many more may be opened now."""
        if not self._ours or self.state is not State.ACTIVE:
            return 0
        return max(0, self._concurrency - len(self._open))

    # --- receiving ------------------------------------------------------------

    def receive_data(self, data: bytes, now: float, /) -> None:
        """Take bytes that the peer sent; they may be cut anywhere."""
        self._tick(now)
        if self.state is State.ERROR:
            return
        if "heartbeat" in self._due:
            self._arm("heartbeat", self._deadlines.heartbeat)
        try:
            for frame in self._frames.feed(data):
                self._take(frame)
        except RemoteProtocolError as error:
            # What was whole before that counts.
            self._tell_parts()
            self._fail(error)
        else:
            self._tell_parts()

    def receive_eof(self, now: float, /) -> None:
        """Take note that the peer will send no more."""
        self._tick(now)
        self._due.clear()
        if self.state is not State.ERROR:
            self.state = State.ENDED
            self._events.append(StreamEnded())

    def events_received(self) -> list[Event]:
        """Return, once, what has been received since the last call."""
        events, self._events = self._events, []
        return events

    def _take(self, frame: object) -> None:
        """Understand one frame."""
        if type(frame) is not tuple or len(frame) < 3:
            raise RemoteProtocolError("a frame is no array of 3 elements or more")
        words = self._words or self._guess(frame)
        if words.channel_first:
            number, kind, arguments = frame[:3]
        else:
            kind, number, arguments = frame[:3]
        if type(number) is not int or type(kind) is not int or number < 0:
            raise RemoteProtocolError("a frame does not begin with two numbers")
        if type(arguments) is not tuple:
            raise RemoteProtocolError("the arguments of a frame are no array")
        headers = self._headers.read(frame[3]) if len(frame) > 3 else ()
        if number == words.control:
            self._take_control(words, kind, arguments)
            return
        item = self._open.get(number)
        if item is None and not self._ours and kind == words.invoke:
            item = self._invoked(words, number, arguments, headers)
        elif item is not None and item.theirs:
            self._take_part(words, number, item, kind, arguments)
        elif number <= self._last or not self._ours:
            self._events.append(Noise(b"frame %d for session %d" % (kind, number)))
        else:
            raise RemoteProtocolError(f"there is no session {number}")

    def _guess(self, frame: tuple[object, ...]) -> Words:
        """Return the version that begins like this."""
        self._words = ZERO if frame[0] == 0 else ONE
        self._guessed = self._words is ONE
        return self._words

    # --- control --------------------------------------------------------------

    def _take_control(
        self, words: Words, kind: int, arguments: tuple[object, ...]
    ) -> None:
        if self._ours and self.state is State.CONNECTED:
            if kind != words.handshake or not arguments:
                raise RemoteProtocolError("the first frame is no handshake")
            self._due.pop("handshake", None)
            self.identity = text_of(arguments[0], "the name in a handshake")
            self.state = State.SHAKEN
            return
        if self._guessed and kind == EARLY.heartbeat and not arguments:
            # With one argument less than a terminate has: numbers of another version.
            self._words = words = EARLY
        self._guessed = False
        if kind == words.terminate:
            self._take_terminate(*_code_of(arguments)[1:])
        elif kind == words.heartbeat:
            self._take_heartbeat()
        else:
            self._events.append(Noise(b"frame %d about the connection" % kind))

    def _take_heartbeat(self) -> None:
        if not self._ours:
            self._due.pop("disown", None)
        else:
            self._beat()
            if self.state is State.SHAKEN:
                self.state = State.ACTIVE
                self._arm("heartbeat", self._deadlines.heartbeat)
                self._events.append(Ready(self.identity))
                return
        self._events.append(LifeSeen())

    def _take_terminate(self, code: int, reason: str) -> None:
        self._events.append(Farewell(code, reason))
        if not self._ours:
            if self.state is State.ACTIVE:
                self.state = State.SEALED
            return
        asked = self.state is State.ENDED
        self._end()
        if asked:
            return
        if self._open and self._soft:
            self._due["drain"] = self._after(self._deadlines.seal)
            return
        self._data.clear()
        if self._open:
            held = counted(len(self._open), "session")
            raise RemoteProtocolError(
                f"it said that it terminates while it had {held}: code {code}, {reason}"
            )
        self._due["terminate"] = self._after(self._deadlines.terminate)

    # --- sessions -------------------------------------------------------------

    def _invoked(
        self,
        words: Words,
        number: int,
        arguments: tuple[object, ...],
        headers: Headers,
    ) -> _Open | None:
        """Take a new session: on the worker's side."""
        if not arguments:
            raise RemoteProtocolError("invoke names no event")
        if words is ONE and number <= self._last:
            self._events.append(Noise(b"frame %d for session %d" % (0, number)))
            return None
        event = text_of(arguments[0], "the event of an invoke")
        self._last = max(number, self._last)
        self._open[number] = item = _Open()
        opened = ExchangeOpened(self._id(number), [], event, False, headers)
        self._events.append(opened)
        return item

    def _take_part(
        self,
        words: Words,
        number: int,
        item: _Open,
        kind: int,
        arguments: tuple[object, ...],
    ) -> None:
        if kind == words.chunk:
            self._take_chunk(words, number, item, arguments)
        elif kind == words.choke:
            self._take_choke(words, number, item)
        elif kind == words.error:
            self._take_error(words, number, item, arguments)
        else:
            self._events.append(Noise(b"frame %d for session %d" % (kind, number)))

    def _take_chunk(
        self, words: Words, number: int, item: _Open, arguments: tuple[object, ...]
    ) -> None:
        payload = arguments[0] if arguments else None
        if type(payload) is not bytes:
            raise RemoteProtocolError("a chunk holds no string")
        if self._packed:
            payload = unpacked_text(payload)
            if payload is None:
                self._disown_part(words, number, item)
                return
        if len(payload) > self._limits.max_message_bytes:
            raise PayloadTooBig(
                f"chunk is {len(payload)} bytes long,"
                f" expected no more than {self._limits.max_message_bytes}; see max_message"
            )
        item.parts.append(payload)
        self._touched[number] = item
        if self._concat:
            item.cost += cost_of([payload])
            if item.cost > self._limits.max_reply_bytes:
                raise PayloadTooBig(
                    f"reply takes more than {self._limits.max_reply_bytes} bytes of memory;"
                    " see max_reply"
                )

    def _disown_part(self, words: Words, number: int, item: _Open) -> None:
        """Take a session as refused whose payload can't be read."""
        text = "its payload is no string packed by msgpack"
        if not self._ours:
            raise RemoteProtocolError(text)
        self._events.append(ExchangeRefused(self._id(number), 0, text))
        self._end_theirs(words, number, item)

    def _take_choke(self, words: Words, number: int, item: _Open) -> None:
        parts = [b"".join(item.parts)] if self._concat and item.parts else item.parts
        self._ends.append((self._id(number), tuple(parts)))
        self._end_theirs(words, number, item)

    def _take_error(
        self, words: Words, number: int, item: _Open, arguments: tuple[object, ...]
    ) -> None:
        category, code, reason = _code_of(arguments)
        self._tell_parts()
        if self._ours:
            event: Event = ExchangeRefused(self._id(number), code, reason, category)
        else:
            event = ExchangeCancelled(self._id(number), code, reason)
        self._events.append(event)
        # In version 0 a choke follows, which is late then.
        self._end_theirs(words, number, item)

    def _end_theirs(self, words: Words, number: int, item: _Open) -> None:
        self._touched.pop(number, None)
        item.theirs = False
        item.parts = []
        if not self._ours:
            if not item.mine:
                del self._open[number]
            return
        del self._open[number]
        if item.mine and words.error_ends:
            # In version 1 a session takes its place until both halves have ended.
            self._put(number, words.choke, ())
        self._leave_if_drained()

    def _tell_parts(self) -> None:
        """Tell of all that has come of sessions."""
        if self._touched and not self._concat:
            for number, item in self._touched.items():
                self._events.append(OutputOf(self._id(number), item.parts))
                item.parts = []
        self._touched.clear()
        if self._ends:
            self._events.append(ExchangesEnded(self._ends))
            self._ends = []

    # --- sending --------------------------------------------------------------

    def send(self, event: Event) -> None:
        """Queue an event for the peer."""
        if self._ours and isinstance(event, ExchangeCancelled):
            # It may come at any time: whoever cancels does not know how things are.
            self._send_cancel(event)
        elif self.state in (State.ENDED, State.ERROR):
            raise self._forbidden(event)
        elif isinstance(event, LifeSeen):
            self._beat()
        elif isinstance(event, Farewell):
            self._send_farewell(event)
        elif isinstance(event, ExchangesEnded):
            for id_, messages in event.ends:
                self._send_end(id_, messages)
        elif isinstance(event, OutputOf):
            self._send_chunks(
                self._number(event.id), self._mine(event.id), event.messages
            )
        elif self._ours and isinstance(event, ExchangeOpened):
            self._send_invoke(event)
        elif not self._ours and isinstance(event, Ready):
            self._send_ready(event)
        elif not self._ours and isinstance(event, ExchangeRefused):
            number, item = self._number(event.id), self._mine(event.id)
            self._send_error(number, event.category, event.code, event.reason)
            self._end_mine(number, item)
        else:
            raise self._forbidden(event)

    def _send_invoke(self, event: ExchangeOpened) -> None:
        number = self._number(event.id)
        if self.room < 1 or number <= self._last:
            raise self._forbidden(event)
        for index, message in enumerate(event.messages):
            if len(message) > (most := self._limits.max_message_bytes):
                text = f"message is {len(message)} bytes long, expected no more than"
                raise MessageRefused(f"{text} {most}; see max_message", index=index)
        words = self._said
        self._last = number
        self._open[number] = item = _Open()
        name = (self._event or event.kind).encode()
        headers = [[False, *header] for header in event.headers]
        self._put(number, words.invoke, (name,), *([headers] if headers else []))
        self._send_chunks(number, item, event.messages)
        if event.ended:
            item.mine = False
            self._put(number, words.choke, ())

    def _send_cancel(self, event: ExchangeCancelled) -> None:
        number = event.id + self._words.first - 1 if self._words is not None else 0
        item = self._open.pop(number, None)
        self._touched.pop(number, None)
        # Who has heard the end of our half is not to hear any more of it.
        if item is not None and item.mine and self.state is not State.ERROR:
            self._send_error(number, WORKER_CATEGORY, event.code, event.reason)
        self._leave_if_drained()

    def _send_ready(self, event: Ready) -> None:
        if self.state is not State.CONNECTED:
            raise self._forbidden(event)
        self.identity = event.identity
        self.state = State.ACTIVE
        words = self._said
        self._control.append(
            self._frame(words.control, words.handshake, (event.identity,))
        )
        self._beat()
        # The first time that we are told starts the clock.
        self._due["begin"] = -math.inf

    def _send_end(self, id_: int, messages: Sequence[bytes]) -> None:
        number, item = self._number(id_), self._mine(id_)
        self._send_chunks(number, item, messages)
        self._put(number, self._said.choke, ())
        self._end_mine(number, item)

    def _send_chunks(self, number: int, item: _Open, messages: Iterable[bytes]) -> None:
        chunk, pack = self._said.chunk, self._packer.pack_payload
        first = self._said.channel_first
        for message in messages:
            payload = packed_text(message) if self._packed else message
            frame = (
                (number, chunk, (payload,)) if first else (chunk, number, (payload,))
            )
            self._data.append(pack(frame))

    def _send_error(self, number: int, category: int, code: int, reason: str) -> None:
        words = self._said
        said = (category, code) if words.pairs else code
        self._put(number, words.error, (said, reason.encode()))
        if not words.error_ends:
            self._put(number, words.choke, ())

    def _end_mine(self, number: int, item: _Open) -> None:
        item.mine = False
        if not (item.theirs or self._ours):
            del self._open[number]

    def _send_farewell(self, event: Farewell) -> None:
        if self.state is State.SEALED and self._ours:
            raise self._forbidden(event)
        words = self._said
        self._leaving = event
        if not self._ours or not self._open:
            self._leave(words)
            return
        self.state = State.SEALED
        self._due["seal"] = self._after(self._deadlines.seal)

    def _leave_if_drained(self) -> None:
        if self._open:
            return
        if self.state is State.SEALED:
            self._leave(self._said)
        elif self._due.pop("drain", None) is not None:
            self._due["terminate"] = self._after(self._deadlines.terminate)

    def _leave(self, words: Words) -> None:
        """Say terminate, behind all else."""
        code, reason = self._leaving
        self._put(words.control, words.terminate, (code, reason.encode()))
        self._end()

    def _end(self) -> None:
        self.state = State.ENDED
        self._due.clear()

    @property
    def _said(self) -> Words:
        """How things are said here."""
        if self._words is None:
            raise LocalProtocolError("the worker has not said yet how it speaks")
        return self._words

    def _id(self, number: int) -> int:
        return number - self._said.first + 1

    def _number(self, id_: int) -> int:
        return id_ + self._said.first - 1

    def _mine(self, id_: int) -> _Open:
        """Return a session whose half of ours has not ended."""
        item = self._open.get(self._number(id_))
        if item is None or not item.mine:
            raise LocalProtocolError(f"exchange {id_} takes no more from us")
        return item

    def _forbidden(self, event: Event) -> LocalProtocolError:
        return LocalProtocolError(
            f"can't send {type(event).__name__} in state {self.state.name}"
        )

    def _fail(self, error: RemoteProtocolError) -> None:
        self.state = State.ERROR
        self._due.clear()
        self._control.clear()
        self._data.clear()
        self._events.append(ProtocolFailed(error))

    def _beat(self) -> None:
        words = self._said
        self._control.append(self._frame(words.control, words.heartbeat, ()))

    def _put(self, number: int, kind: int, *rest: object) -> None:
        self._data.append(self._frame(number, kind, *rest))

    def _frame(self, number: int, kind: int, *rest: object) -> bytes:
        order = (number, kind) if self._said.channel_first else (kind, number)
        return self._packer.pack((*order, *rest))

    def data_to_send(self) -> list[bytes]:
        """Return, once, the bytes to write: answers to heartbeats, then the rest."""
        chunks = [*self._control, *self._data]
        self._control.clear()
        self._data.clear()
        return chunks

    # --- time -----------------------------------------------------------------

    def get_timer(self) -> float | None:
        """Return when :meth:`handle_timer` wants to be called, in seconds, or None."""
        if self._now is None:
            return -math.inf
        return min(self._due.values(), default=None)

    def handle_timer(self, now: float) -> None:
        """Take note of the time, in seconds on the caller's clock."""
        self._tick(now)
        for name, due in [*self._due.items()]:
            if due <= now:
                del self._due[name]
                self._ring(name)

    def _tick(self, now: float) -> None:
        first, self._now = self._now is None, now
        if first and self._ours and self.state is State.CONNECTED:
            self._arm("handshake", self._deadlines.handshake)

    def _after(self, seconds: float) -> float:
        assert self._now is not None, "what has a deadline came at a time"
        return self._now + seconds

    def _arm(self, name: str, seconds: float | None) -> None:
        if seconds is not None:
            self._due[name] = self._after(seconds)

    def _ring(self, name: str) -> None:
        """Do what is due."""
        limits = self._deadlines
        match name:
            case "begin":
                self._due["beat"] = self._after(limits.beat)
                self._due["disown"] = self._after(limits.disown)
            case "beat":
                self._beat()
                self._due["beat"] = self._after(limits.beat)
                self._due.setdefault("disown", self._after(limits.disown))
            case "seal":
                self._leave(self._said)
            case "drain":
                held = counted(len(self._open), "session")
                what = f"it said that it terminates, and did not end {held}"
                self._miss(what, limits.seal)
            case "terminate":
                self._miss("it said that it terminates, and did not", limits.terminate)
            case "handshake":
                self._miss("it did not say who it is", limits.handshake)
            case "heartbeat":
                self._miss("there was no sign of life", limits.heartbeat)
            case "disown":
                self._miss("the supervisor answered no heartbeat", limits.disown)
            case _:
                raise AssertionError("unreachable: a deadline without a name")

    def _miss(self, what: str, limit: float | None) -> None:
        assert limit is not None, "there is no deadline without a limit"
        self._fail(RemoteProtocolError(f"{what} within {limit:g} s"))


def _code_of(arguments: tuple[object, ...]) -> tuple[int, int, str]:
    """Return category, code and reason of an error, or a terminate."""
    if len(arguments) < 2:
        raise RemoteProtocolError("an error has no code and reason")
    code, reason = arguments[:2]
    pair = code if type(code) is tuple else (WORKER_CATEGORY, code)
    if len(pair) != 2 or not all(type(number) is int for number in pair):
        raise RemoteProtocolError("the code of an error is no number")
    category, number = pair
    return category, number, text_of(reason, "the reason of an error")
