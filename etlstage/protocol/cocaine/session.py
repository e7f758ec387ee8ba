"""
One connection with a worker, for either side: what may follow what, and when.

``frame.py`` has the numbers of each version, and reads and writes frames;
``sessions.py`` has the open sessions.

A worker connects, identifies itself (handshake), and sends its first heartbeat when it
is ready for sessions. We answer each heartbeat at once. A session is an exchange: we
invoke an event, then send chunks and a choke; the worker sends chunks and a choke, or
an error. Each side ends its own half. Either side sends terminate before it ends.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Final, NamedTuple

from etlstage.errors import LocalProtocolError, RemoteProtocolError
from etlstage.messages import counted
from etlstage.protocol.base import IdentityEnum, Limits, Side
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

# Codes of a terminate: all is well; another worker would fail, too.
_NORMAL, _ABNORMAL = 1, 2
_STOPPING: Final = Farewell(_NORMAL, "the stage is stopping")
_FRAMING: Final = 5  # bytes that msgpack puts before a string, at most
_LIMITS: Final = Limits()
# Python and Go workers exit when a heartbeat has no answer for 5 s.
_UNHEARD: Final = 2.0  # seconds


class Deadlines(NamedTuple):
    """How long things may take, in seconds; None: forever."""

    handshake: float | None = None
    """From the connection to the handshake."""
    heartbeat: float | None = 30.0
    """From one heartbeat of the worker, or anything else that it sends, to the next."""
    seal: float = 3.0
    """For open sessions to end, when one side is about to end."""
    terminate: float = 5.0
    """For a worker that sent terminate to close the connection."""
    beat: float = 10.0
    """On the worker's side: from one heartbeat to the next."""
    disown: float = 60.0
    """On the worker's side: from a heartbeat to its answer."""


class Alarm(IdentityEnum):
    """A deadline; its value describes what has been missed when it passes."""

    HANDSHAKE = "it did not identify itself"
    HEARTBEAT = "there was no heartbeat"
    UNHEARD = "it is not read"
    """We send heartbeats instead of answers, which the worker may be waiting for."""
    SEAL = "its sessions did not end"
    """We send terminate all the same."""
    DRAIN = "it sent a terminate but did not end its sessions"
    TERMINATE = "it sent a terminate but did not exit"
    BEGIN = "there is a worker"
    """Starts the worker's timers."""
    BEAT = "the worker has to beat"
    DISOWN = "the supervisor answered no heartbeat"


class Alarms:
    """The deadlines of one connection."""

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
        """Have ``BEGIN`` due as soon as the time is known."""
        self._due[Alarm.BEGIN] = -math.inf

    def set(self, alarm: Alarm) -> None:
        """Start the time of an alarm, or restart it."""
        seconds = self._seconds[alarm]
        if seconds is not None:
            assert self._now is not None, "the time is known before an alarm is set"
            self._due[alarm] = self._now + seconds

    def cancel(self, alarm: Alarm) -> bool:
        """Cancel an alarm; return whether it was set."""
        return self._due.pop(alarm, None) is not None

    def suspend(self, alarm: Alarm) -> None:
        """Stop the time of an alarm until it is set again."""
        self._due[alarm] = math.inf

    def clear(self) -> None:
        """Cancel all alarms."""
        self._due.clear()

    def waits(self, alarm: Alarm) -> bool:
        """Return whether an alarm is set."""
        return alarm in self._due

    def next(self) -> float | None:
        """Return when the next alarm is due, in seconds, or None."""
        # While the time is not known, be called at once to learn it.
        return -math.inf if self._now is None else min(self._due.values(), default=None)

    def rung(self) -> list[Alarm]:
        """Return, once, the alarms that are due."""
        assert self._now is not None, "the time is known before an alarm is due"
        rung = [alarm for alarm, due in self._due.items() if due <= self._now]
        for alarm in rung:
            del self._due[alarm]
        return rung

    def missed(self, alarm: Alarm) -> str:
        """Return a description of the missed deadline."""
        return f"{alarm.value} within {self._seconds[alarm]:g} s"


_DEADLINES: Final = Deadlines()


class ConnectionState(Enum):
    """The state of a connection."""

    CONNECTED = "connected"
    """The worker has not identified itself."""
    SHAKEN = "shaken"
    """The worker has identified itself, and is not ready."""
    ACTIVE = "active"
    """The worker may be given sessions."""
    SEALED = "sealed"
    """The worker ends its open sessions, and is given no more."""
    ENDED = "ended"
    """Terminate was sent or received, or the peer has closed its end."""
    ERROR = "error"
    """The peer broke the protocol."""


_BEATING: Final = (ConnectionState.ACTIVE, ConnectionState.SEALED)
"""States in which the worker has to beat."""
_OVER: Final = (ConnectionState.ENDED, ConnectionState.ERROR)
"""States in which nothing is sent, unless open sessions may still end."""


class CocaineSession:
    """
    A connection, without I/O.

    Args:
        side: Which end of the connection this is.
        version: The version of the protocol; a worker that is given ``AUTO`` speaks 1.
        limits: How much the peer may make us hold.
        encoding: The msgpack type of strings that we send.
        event: The event that is invoked, unless a caller asks for another one.
        concurrency: Sessions that a worker may have at once.
        concat: All chunks of a session are one message.
        packed: Messages from a worker are msgpack strings inside chunks.
        soft: A worker that sends terminate may end its open sessions.
        deadlines: How long things may take.

    """

    in_order: Final = False
    unprompted: Final = True
    sends_farewell: Final = True
    defers_farewell: Final = False  # waiting for open sessions has its own limit

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
        """The identity that the worker gave."""
        self._ours = ours = side is Side.SUPERVISOR
        self._event = event
        self._concurrency = concurrency
        self._soft = soft
        self._frames = Frames(limits.max_message_bytes + _FRAMING)
        self._headers = HeaderTable()
        self._events: list[Event] = []
        words = version.words or (None if ours else ONE)
        # The framework packs what it writes, and returns what it reads unchanged.
        self._out = Outgoing(words, encoding, packed=packed and not ours)
        self._sessions = Sessions(
            self._out, self._events, limits, ours=ours, concat=concat, packed=packed
        )
        self._alarms = Alarms(deadlines)
        self._farewell = Farewell()  # is sent when all sessions have ended

    def __repr__(self) -> str:
        return f"<CocaineSession {self.side.value} {self.state.name} owed={self.owed}>"

    @property
    def version(self) -> CocaineVersion:
        """The version in use; ``AUTO``: it is not known yet."""
        return next(v for v in CocaineVersion if v.words is self._out.words)

    @property
    def unsent(self) -> int:
        """Bytes of memory that wait for :meth:`data_to_send`."""
        return self._out.unsent

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
        if self.state in _BEATING and self._ours:
            self._alarms.cancel(Alarm.UNHEARD)
            self._alarms.set(Alarm.HEARTBEAT)
        elif self._alarms.cancel(Alarm.UNHEARD):
            self._alarms.set(Alarm.DRAIN)
        try:
            self._sessions.take_all(self._frames.feed(data), self._take)
        except RemoteProtocolError as error:
            # Complete frames before the fault count.
            self._sessions.tell()
            self._fail(error)
        else:
            self._sessions.tell()
            self._leave_if_drained()

    def reading_paused(self, now: float, /) -> None:
        """Await nothing, but send heartbeats: the worker awaits answers to its own."""
        self._tick(now)
        if self.state in _BEATING and self._ours:
            self._alarms.cancel(Alarm.HEARTBEAT)
            self._alarms.set(Alarm.UNHEARD)
        elif self._alarms.waits(Alarm.DRAIN):
            self._alarms.suspend(Alarm.DRAIN)
            self._alarms.set(Alarm.UNHEARD)

    def receive_eof(self, now: float, /) -> None:
        self._tick(now)
        self._alarms.clear()
        if self.state is not ConnectionState.ERROR:
            self.state = ConnectionState.ENDED

    def peer_exited(self, clean: bool, now: float) -> None:
        """Do nothing: every exchange is ended by a frame."""

    def events_received(self) -> list[Event]:
        events = self._events.copy()
        self._events.clear()
        return events

    def _take(self, frame: object) -> None:
        """Parse a frame that :meth:`Sessions.take_all` does not handle."""
        if type(frame) is not tuple or len(frame) < 3:
            raise RemoteProtocolError("a frame is not an array of 3 elements or more")
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
            raise RemoteProtocolError("the arguments of a frame are not an array")
        headers = self._headers.read(frame[3]) if len(frame) > 3 else ()
        if number == words.control:
            self._take_control(words, kind, arguments)
        else:
            self._sessions.take(words, number, kind, arguments, headers)

    def _take_control(
        self, words: Words, kind: int, arguments: tuple[object, ...]
    ) -> None:
        """Handle a frame about the connection."""
        if self._ours and self.state is ConnectionState.CONNECTED:
            if kind != words.handshake or not arguments:
                raise RemoteProtocolError("the first frame is not a handshake")
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
                f"it sent a terminate while it had {counted(held, 'session')}:"
                f" code {code}, {reason}"
            )
        self._alarms.set(Alarm.TERMINATE)

    # --- sending --------------------------------------------------------------

    @property
    def _silent(self) -> bool:
        """Whether nothing is sent any more, as behind a terminate."""
        # A worker that sent terminate may need more to end its open sessions.
        return self.state in _OVER and not self._alarms.waits(Alarm.DRAIN)

    def send(self, event: Event, now: float = 0.0, /) -> None:
        if self._ours and isinstance(event, Cancelled):
            # This is allowed at any time: the caller does not know the state.
            self._cancel(event)
            return
        if self.state in _OVER and (self._silent or not isinstance(event, Added)):
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
        """Send the handshake and the first heartbeat of a worker."""
        self.identity = identity
        self.state = ConnectionState.ACTIVE
        self._out.hello(identity)
        self._out.beat()
        self._alarms.begin()

    def _cancel(self, event: Cancelled) -> None:
        self._sessions.cancel(event, silent=self._silent)
        self._leave_if_drained()

    def _send_farewell(self, event: Farewell) -> None:
        self._farewell = event if event.code else _STOPPING
        if self._ours and len(self._sessions):
            # Frameworks drop their open sessions when a terminate comes.
            self.state = ConnectionState.SEALED
            self._alarms.set(Alarm.SEAL)
        else:
            self._leave()

    def _leave_if_drained(self) -> None:
        if not self._ours or len(self._sessions):
            return
        if self.state is ConnectionState.SEALED:
            self._leave()
        elif self._alarms.waits(Alarm.DRAIN):
            self._alarms.clear()
            self._alarms.set(Alarm.TERMINATE)

    def _leave(self) -> None:
        """Send terminate, after everything else."""
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
        """Act on a deadline that has passed."""
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
    """Return how many sessions the event opens."""
    return len(event.messages) if event.each else 1
