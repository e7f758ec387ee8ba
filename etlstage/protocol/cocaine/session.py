"""
One connection with a worker, seen from either side: what may follow what, and when.

``frame.py`` has the numbers of each version, cuts frames from bytes, and writes them;
``sessions.py`` knows what is open.

A worker connects, identifies itself (handshake), and beats for the first time when it may
be given sessions. We answer each beat at once. A session is an exchange: we invoke an
event, send chunks and a choke; the worker sends chunks and a choke, or an error. Each
side ends its own half. Either side sends terminate when it is about to go.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from etlstage.errors import LocalProtocolError, RemoteProtocolError
from etlstage.messages import counted
from etlstage.protocol.base import Limits, Side
from etlstage.protocol.cocaine.frame import (
    ONE,
    ZERO,
    CocaineVersion,
    Encoding,
    Frames,
    HeaderTable,
    Outgoing,
    Words,
    text_of,
)
from etlstage.protocol.cocaine.sessions import Sessions, code_of
from etlstage.protocol.events import (
    Added,
    Alive,
    Cancelled,
    Ended,
    Event,
    Failed,
    Farewell,
    Noise,
    Opened,
    Ready,
)

__all__ = ("CocaineSession", "ConnectionState", "Deadlines")

# Codes of a terminate: all is well, and another worker would fail, too.
_NORMAL, _ABNORMAL = 1, 2
_STOPPING: Final = Farewell(_NORMAL, "the stage is stopping")
_FRAMING: Final = 5  # bytes that msgpack puts in front of a string, at most
_LIMITS: Final = Limits()
# Python's and Go's leave when a heartbeat of theirs has no answer for 5 s.
_UNHEARD: Final = 2.0  # seconds


class Deadlines(NamedTuple):
    """How long things may take, in seconds; None: for ever."""

    handshake: float | None = None
    """From the connection to the handshake."""
    heartbeat: float | None = 30.0
    """From one heartbeat of the worker, or anything else that it sends, to the next."""
    seal: float = 3.0
    """For open sessions to end, when one side is about to go."""
    terminate: float = 5.0
    """For a worker that sent terminate to close the connection."""
    beat: float = 10.0
    """The worker's: from one heartbeat to the next."""
    disown: float = 60.0
    """The worker's: from a heartbeat to the answer."""


class Alarm(Enum):
    """What may be due."""

    # An alarm is set with each read, and that of Enum is Python code.
    if not TYPE_CHECKING:
        __hash__ = object.__hash__

    HANDSHAKE = "it did not identify itself"
    HEARTBEAT = "there was no heartbeat"
    UNHEARD = "it is not read"
    """It gets our heartbeats: it may beat, and get no answer."""
    SEAL = "its sessions did not end"
    """We send it terminate all the same."""
    DRAIN = "it announced its end and did not end its sessions"
    TERMINATE = "it announced its end and did not exit"
    BEGIN = "there is a worker"
    """Its clock begins."""
    BEAT = "the worker has to beat"
    DISOWN = "the supervisor answered no heartbeat"


class Alarms:
    """Deadlines by what they are of."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._seconds: Final[dict[Alarm, float | None]] = {
            Alarm.HANDSHAKE: deadlines.handshake,
            Alarm.HEARTBEAT: deadlines.heartbeat,
            Alarm.UNHEARD: _UNHEARD,
            Alarm.SEAL: deadlines.seal,
            Alarm.DRAIN: deadlines.seal,
            Alarm.TERMINATE: deadlines.terminate,
            Alarm.BEAT: deadlines.beat,
            Alarm.DISOWN: deadlines.disown,
        }
        self._due: dict[Alarm, float] = {}
        self._now: float | None = None

    def tick(self, now: float) -> bool:
        """Record the time; return whether it is the first one."""
        first, self._now = self._now is None, now
        return first

    def begin(self) -> None:
        """Ring as soon as there is a time."""
        self._due[Alarm.BEGIN] = -math.inf

    def set(self, alarm: Alarm) -> None:
        """Wait for it from now on."""
        seconds = self._seconds[alarm]
        if seconds is not None:
            assert self._now is not None, "what is waited for has a beginning"
            self._due[alarm] = self._now + seconds

    def cancel(self, alarm: Alarm) -> bool:
        """Stop waiting for it; return whether it was waited for."""
        return self._due.pop(alarm, None) is not None

    def clear(self) -> None:
        """Stop waiting."""
        self._due.clear()

    def waits(self, alarm: Alarm) -> bool:
        """Return whether it is waited for."""
        return alarm in self._due

    def next(self) -> float | None:
        """Return when something is due, in seconds, or None."""
        # Its clock has not begun: it asks for the time.
        return -math.inf if self._now is None else min(self._due.values(), default=None)

    def rung(self) -> list[Alarm]:
        """Return, once, what is due."""
        assert self._now is not None, "what is due has a time"
        rung = [alarm for alarm, due in self._due.items() if due <= self._now]
        for alarm in rung:
            del self._due[alarm]
        return rung

    def missed(self, alarm: Alarm) -> str:
        """Return what was missed, as a sentence."""
        return f"{alarm.value} within {self._seconds[alarm]:g} s"


_DEADLINES: Final = Deadlines()


class ConnectionState(Enum):
    """How far a connection has come."""

    CONNECTED = "connected"
    """The worker has not identified itself."""
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


class CocaineSession:
    """
    A connection, without I/O.

    Args:
        side: Which end we are.
        version: Of the protocol; a worker that is given ``AUTO`` speaks 1.
        limits: How much the peer may make us hold.
        encoding: As what we send strings.
        event: What is invoked, unless a caller asks for another one.
        concurrency: Sessions that a worker may have at once.
        concat: All chunks of a session are one message.
        packed: What a worker sends is packed once more.
        soft: A worker that sends terminate may end what it has.
        deadlines: How long things may take.

    """

    in_order: Final = False
    unprompted: Final = True
    sends_farewell: Final = True

    def __init__(
        self,
        side: Side,
        version: CocaineVersion = CocaineVersion.AUTO,
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
        self.state: ConnectionState = ConnectionState.CONNECTED
        self.identity: str = ""
        """As the worker calls itself."""
        self._ours = ours = side is Side.SUPERVISOR
        self._event = event
        self._concurrency = concurrency
        self._soft = soft
        self._frames = Frames(limits.max_message_bytes + _FRAMING)
        self._headers = HeaderTable()
        self._events: list[Event] = []
        words = version.words or (None if ours else ONE)
        # The framework packs what it writes, and gives what it reads as it is.
        self._out = Outgoing(words, encoding, packed=packed and not ours)
        self._sessions = Sessions(
            self._out, self._events, limits, ours=ours, concat=concat, packed=packed
        )
        self._alarms = Alarms(deadlines)
        self._farewell = Farewell()  # what is sent when all has ended

    def __repr__(self) -> str:
        return f"<CocaineSession {self.side.value} {self.state.name} owed={self.owed}>"

    @property
    def version(self) -> CocaineVersion:
        """Which version is spoken; ``AUTO``: that is not known yet."""
        return next(v for v in CocaineVersion if v.words is self._out.words)

    @property
    def owed(self) -> int:
        return len(self._sessions)

    @property
    def room(self) -> float:
        if not self._ours or self.state is not ConnectionState.ACTIVE:
            return 0
        return max(0, self._concurrency - len(self._sessions))

    # --- receiving ------------------------------------------------------------

    def receive_data(self, data: bytes, now: float, /) -> None:
        self._tick(now)
        if self.state is ConnectionState.ERROR:
            return
        if self.state is ConnectionState.ACTIVE and self._ours:
            self._alarms.cancel(Alarm.UNHEARD)
            self._alarms.set(Alarm.HEARTBEAT)
        try:
            self._sessions.take_all(self._frames.feed(data), self._take)
        except RemoteProtocolError as error:
            # What was whole before that counts.
            self._sessions.tell()
            self._fail(error)
        else:
            self._sessions.tell()
            self._leave_if_drained()

    def reading_paused(self, now: float, /) -> None:
        """Beat in its place: a worker that is not read can't be missed, but miss us."""
        self._tick(now)
        if self.state is ConnectionState.ACTIVE and self._ours:
            self._alarms.cancel(Alarm.HEARTBEAT)
            self._alarms.set(Alarm.UNHEARD)

    def receive_eof(self, now: float, /) -> None:
        self._tick(now)
        self._alarms.clear()
        if self.state is not ConnectionState.ERROR:
            self.state = ConnectionState.ENDED

    def peer_exited(self, clean: bool, now: float) -> None:
        """Do nothing: each exchange is ended in words."""

    def events_received(self) -> list[Event]:
        events = self._events.copy()
        self._events.clear()
        return events

    def _take(self, frame: object) -> None:
        """Understand a frame that does not go on with a session that is open."""
        if type(frame) is not tuple or len(frame) < 3:
            raise RemoteProtocolError("a frame is no array of 3 elements or more")
        words = self._out.words
        if words is None:
            self._out.words = words = ZERO if frame[0] == 0 else ONE
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
        else:
            self._sessions.take(words, number, kind, arguments, headers)

    def _take_control(
        self, words: Words, kind: int, arguments: tuple[object, ...]
    ) -> None:
        """Understand a frame about the connection."""
        if self._ours and self.state is ConnectionState.CONNECTED:
            if kind != words.handshake or not arguments:
                raise RemoteProtocolError("the first frame is no handshake")
            self._alarms.cancel(Alarm.HANDSHAKE)
            self.identity = text_of(arguments[0], "the name in a handshake")
            self.state = ConnectionState.SHAKEN
            return
        if kind == words.terminate:
            _, code, reason = code_of(arguments)
            self._take_terminate(code, reason)
        elif kind == words.heartbeat:
            self._take_heartbeat()
        else:
            self._events.append(Noise(b"frame %d about the connection" % kind))

    def _take_heartbeat(self) -> None:
        if not self._ours:
            self._alarms.cancel(Alarm.DISOWN)
        else:
            self._out.beat()
            if self.state is ConnectionState.SHAKEN:
                self.state = ConnectionState.ACTIVE
                self._alarms.set(Alarm.HEARTBEAT)
                self._events.append(Ready(self.identity))
                return
        self._events.append(Alive())

    def _take_terminate(self, code: int, reason: str) -> None:
        final = self._ours and code == _ABNORMAL
        self._events.append(Farewell(code, reason, final))
        if not self._ours:
            if self.state is ConnectionState.ACTIVE:
                self.state = ConnectionState.SEALED
            return
        asked = self.state is ConnectionState.ENDED
        self._end()
        if asked:
            return
        held = len(self._sessions)
        if held and self._soft:
            self._alarms.set(Alarm.DRAIN)
            return
        self._out.drop()
        if held:
            raise RemoteProtocolError(
                f"it announced its end while it had {counted(held, 'session')}:"
                f" code {code}, {reason}"
            )
        self._alarms.set(Alarm.TERMINATE)

    # --- sending --------------------------------------------------------------

    def send(self, event: Event, now: float = 0.0, /) -> None:
        if self._ours and isinstance(event, Cancelled):
            # It may come at any time: the caller does not know the state.
            self._cancel(event)
            return
        if self.state in (ConnectionState.ENDED, ConnectionState.ERROR):
            raise self._forbidden(event)
        match event:
            case Opened() if self._ours and self.room >= _count(event):
                self._sessions.open(event, event.event or self._event)
            case Added() if self._ours or not event.ended:
                self._sessions.pass_on(event)
            case Ended() if not self._ours:
                self._sessions.end(event)
            case Ready(identity) if (
                not self._ours and self.state is ConnectionState.CONNECTED
            ):
                self._begin(identity)
            case Alive():
                self._out.beat()
            case Farewell() if (
                not self._ours or self.state is not ConnectionState.SEALED
            ):
                self._send_farewell(event)
            case _:
                raise self._forbidden(event)

    def _begin(self, identity: str) -> None:
        """Send that we are a worker, and ready."""
        self.identity = identity
        self.state = ConnectionState.ACTIVE
        self._out.hello(identity)
        self._out.beat()
        self._alarms.begin()

    def _cancel(self, event: Cancelled) -> None:
        # Nothing is sent behind a terminate.
        silent = self.state in (ConnectionState.ENDED, ConnectionState.ERROR)
        self._sessions.cancel(event, silent=silent)
        self._leave_if_drained()

    def _send_farewell(self, event: Farewell) -> None:
        self._farewell = event if event.code else _STOPPING
        if self._ours and len(self._sessions):
            # Frameworks drop what they have when a terminate comes.
            self.state = ConnectionState.SEALED
            self._alarms.set(Alarm.SEAL)
        else:
            self._leave()

    def _leave_if_drained(self) -> None:
        if not self._ours or len(self._sessions):
            return
        if self.state is ConnectionState.SEALED:
            self._leave()
        elif self._alarms.cancel(Alarm.DRAIN):
            self._alarms.set(Alarm.TERMINATE)

    def _leave(self) -> None:
        """Send terminate, behind all else."""
        self._out.terminate(self._farewell.code, self._farewell.reason)
        self._end()

    def _end(self) -> None:
        self.state = ConnectionState.ENDED
        self._alarms.clear()

    def _forbidden(self, event: Event) -> LocalProtocolError:
        return LocalProtocolError(
            f"can't send {type(event).__name__} in state {self.state.name}"
        )

    def _fail(self, error: RemoteProtocolError) -> None:
        self.state = ConnectionState.ERROR
        self._alarms.clear()
        self._out.clear()
        self._events.append(Failed(error))

    def data_to_send(self) -> list[bytes]:
        """Return, once, the bytes to write: answers to heartbeats, then the rest."""
        return self._out.take()

    # --- time -----------------------------------------------------------------

    def get_timer(self) -> float | None:
        return self._alarms.next()

    def handle_timer(self, now: float) -> None:
        self._tick(now)
        for alarm in self._alarms.rung():
            if self.state is not ConnectionState.ERROR:
                self._ring(alarm)

    def _tick(self, now: float) -> None:
        if self._alarms.tick(now) and self._ours:
            self._alarms.set(Alarm.HANDSHAKE)

    def _ring(self, alarm: Alarm) -> None:
        """Do what is due."""
        match alarm:
            case Alarm.BEGIN:
                self._alarms.set(Alarm.BEAT)
                self._alarms.set(Alarm.DISOWN)
            case Alarm.BEAT:
                self._out.beat()
                self._alarms.set(Alarm.BEAT)
                if not self._alarms.waits(Alarm.DISOWN):
                    self._alarms.set(Alarm.DISOWN)
            case Alarm.UNHEARD:
                self._out.beat()
                self._alarms.set(Alarm.UNHEARD)
            case Alarm.SEAL:
                self._leave()
            case _:
                self._fail(RemoteProtocolError(self._alarms.missed(alarm)))


def _count(event: Opened) -> int:
    """Return how many sessions are to be opened."""
    return len(event.messages) if event.each else 1
