"""
A dialect as different from the marker dialect, and as small, as possible.

Exchanges end in any order, both sides send heartbeats and a farewell, and a worker may
refuse, or ask a question in the middle of its work. A frame is a line of JSON. Its twin
sends the same over a socket.
"""

# ruff: noqa: D102 - the interface documents these
from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Self

from etlstage.errors import LocalProtocolError, RemoteProtocolError
from etlstage.messages import StageKind
from etlstage.protocol import events as e
from etlstage.protocol.base import Dialect, Limits, Shape, Side
from etlstage.settings.definition import Section

if TYPE_CHECKING:  # a process that speaks it starts without anyio
    from etlstage.testing import ScriptedWorker

HEARTBEAT = 10.0  # seconds
FRAMES = {
    "open": e.Opened,
    "out": e.Added,
    "end": e.Ended,
    "cancel": e.Cancelled,
    "ask": e.CommitAsked,
    "answer": e.CommitAnswered,
    "hello": e.Ready,
    "beat": e.Alive,
    "bye": e.Farewell,
}
NAMES = {kind: name for name, kind in FRAMES.items()}


class ToySession:
    """One conversation; control frames overtake data."""

    in_order: Final = False
    unprompted: Final = True
    sends_farewell: Final = True
    defers_farewell: Final = False

    def __init__(self, side: Side, concurrency: int = 3, kind: str = "") -> None:
        self.side, self.concurrency, self.kind = side, concurrency, kind
        self.open: set[int] = set()
        self.ready = side is Side.WORKER
        self._held, self._due = b"", math.inf
        self._events: list[e.Event] = []
        self._out: tuple[list[bytes], list[bytes]] = ([], [])

    @property
    def owed(self) -> int:
        return len(self.open)

    @property
    def room(self) -> float:
        return self.concurrency - len(self.open) if self.ready else 0

    def reading_paused(self, now: float, /) -> None:
        self._due = now + HEARTBEAT

    def receive_data(self, data: bytes, now: float, /) -> None:
        self._due = now + HEARTBEAT
        *lines, self._held = (self._held + data).split(b"\n")
        for line in lines:
            try:
                name, *fields = json.loads(line)
                self._understand(FRAMES[name](*map(_plain, fields)))
            except (ValueError, KeyError, TypeError) as error:
                failed = RemoteProtocolError(f"no frame: {error!r}")
                self._events.append(e.Failed(failed))

    def _understand(self, event: Any) -> None:  # noqa: ANN401 - any event
        if isinstance(event, e.Alive) and self.side is Side.SUPERVISOR:
            self.send(event)
        if isinstance(event, e.Opened):
            self.open.add(event.first)
        if isinstance(event, e.Ended):
            groups = [tuple(group) for group in event.groups]
            event = e.Ended(
                event.first, groups, [e.Refusal(*said) for said in event.refusals]
            )
        if isinstance(event, e.Ended | e.Cancelled):
            self.open -= _ids(event)
        self.ready = self.ready or isinstance(event, e.Ready)
        self._events.append(event)

    def receive_eof(self, now: float, /) -> None:
        self._held = b""

    def peer_exited(self, clean: bool, now: float) -> None:
        """Do nothing: each exchange has an explicit end."""

    def events_received(self) -> list[e.Event]:
        events, self._events = self._events, []
        return events

    def send(self, event: e.Event, now: float = 0.0, /) -> None:
        if isinstance(event, e.Opened) and event.each:
            if self.room < len(event.messages):
                raise LocalProtocolError("no room for so many exchanges")
            for id_, message in enumerate(event.messages, event.first):
                self.send(e.Opened(id_, [message], each=False))
            return
        if isinstance(event, e.Opened):
            if self.room < 1:
                raise LocalProtocolError("no room for one more exchange")
            self.open.add(event.first)
            event = event._replace(event=event.event or self.kind)
        if isinstance(event, e.Farewell):
            event = e.Farewell(event.code, event.reason or "enough")
        if isinstance(event, e.Ended | e.Cancelled):
            self.open -= _ids(event)
        data = isinstance(event, e.Opened | e.Added | e.Ended)
        # Fields that some other dialects need are cut off.
        said = [
            NAMES[type(event)],
            *_text(event[: 3 if isinstance(event, e.Farewell) else 5]),
        ]
        self._out[data].append(json.dumps(said).encode())

    def data_to_send(self) -> list[bytes]:
        control, data = self._out
        self._out = ([], [])
        return [line + b"\n" for line in (*control, *data)]

    def get_timer(self) -> float | None:
        return self._due if self._due < math.inf else None

    def handle_timer(self, now: float) -> None:
        if now >= self._due:
            self._due = math.inf
            error = RemoteProtocolError(f"no heartbeat for {HEARTBEAT:g} s")
            self._events.append(e.Failed(error))


def _ids(event: e.Ended | e.Cancelled) -> set[int]:
    if isinstance(event, e.Ended):
        return {*range(event.first, event.first + len(event.groups))}
    return {event.id}


def _text(value: Any) -> Any:  # noqa: ANN401 - whatever an event holds
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    return [*map(_text, value)] if isinstance(value, list | tuple) else value


def _plain(value: Any) -> Any:  # noqa: ANN401 - whatever a frame holds
    if isinstance(value, dict):
        return bytes.fromhex(value["hex"])
    return [*map(_plain, value)] if isinstance(value, list) else value


class ToyDialect(Dialect):
    """The dialect as a setting of a stage."""

    name = "toy"
    shape = Shape.MESSAGE
    announces = True

    def open(
        self,
        side: Side,
        limits: Limits,
        *,
        kind: StageKind = StageKind.TRANSFORM,
        **_opened_for: object,
    ) -> ToySession:
        return ToySession(side, kind=kind.value)

    def silence(self, received: int, *, ready: bool = True) -> str:
        return f"it wrote {received} bytes" + ("" if ready else " and no hello")

    def plain(self) -> dict[str, object]:
        return {"name": self.name}

    @classmethod
    def section(cls, kind: StageKind) -> Section:
        return Section({}, lambda given: cls())

    @classmethod
    def from_plain(cls, settings: Mapping[str, object]) -> Self:
        return cls()

    def farewell(self) -> e.Event:
        return e.Farewell(0, "enough")


class ToyConnector:
    """Tells a worker its endpoint and its name, which its first frame must contain."""

    def arguments(
        self, *, app: str, identity: str, endpoint: str, locator: str
    ) -> tuple[str, ...]:
        return endpoint, identity

    def identity(self, data: bytes, /) -> str | None:
        line, end, _ = data.partition(b"\n")
        try:
            name, identity, *_ = json.loads(line) if end else ("hello", None)
        except (ValueError, TypeError):
            name = identity = None
        if name != "hello":
            raise RemoteProtocolError("the first frame is no hello")
        return None if identity is None else str(identity)

    def services(self, host: str, port: int) -> None:
        return None


class ToyTwin(ToyDialect):
    """The same dialect, except that its workers connect."""

    name = "toy twin"
    connection = ToyConnector()


class ToyWorker:
    """The worker's side of a session, over a scripted worker."""

    def __init__(self, worker: ScriptedWorker) -> None:
        self.session = ToySession(Side.WORKER)
        self._worker = worker
        self.current = 0

    async def say(self, event: e.Event) -> None:
        """Send an event at once."""
        self.session.send(event)
        await self._worker.write(b"".join(self.session.data_to_send()))

    def events(self) -> _Incoming:
        """Yield events, until the supervisor's farewell or the end of input."""
        return _Incoming(self.session, self._worker)

    def messages(self) -> _Messages:
        """Yield messages one by one, each to be answered by :meth:`reply`."""
        return _Messages(self)

    async def reply(self, *outputs: bytes) -> None:
        """Answer the last message."""
        await self.say(e.Ended(self.current, [outputs]))


class _Incoming:
    """Not a generator, which a script that leaves its loop would have to close."""

    def __init__(self, session: ToySession, worker: ScriptedWorker) -> None:
        self._session, self._worker = session, worker
        self._events: deque[e.Event] = deque()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> e.Event:
        while not self._events:
            if not (data := await self._worker.read()):
                raise StopAsyncIteration
            self._session.receive_data(data, 0.0)
            self._events.extend(self._session.events_received())
        event = self._events.popleft()
        if isinstance(event, e.Farewell):
            raise StopAsyncIteration
        return event


class _Messages:
    def __init__(self, toy: ToyWorker) -> None:
        self._toy, self._events = toy, toy.events()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while not isinstance(event := await anext(self._events), e.Opened):
            pass
        self._toy.current = event.first
        return event.messages[0]
