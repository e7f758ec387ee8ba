"""
Scripted workers of dialect ``cocaine``.

::

    async def clean(worker: ScriptedWorker) -> int:
        async with CocaineWorker(worker) as cocaine:
            async for request in cocaine.requests():
                await cocaine.reply(request, *map(bytes.upper, request.messages))
        return 0

    supervisor = AsyncSupervisor(stage, launch=ScriptedLaunch(clean))

"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Final, NamedTuple, Self

import anyio

from etlstage.protocol.base import Side
from etlstage.protocol.cocaine import CocaineSession, CocaineVersion, Deadlines
from etlstage.protocol.events import (
    Added,
    Cancelled,
    Ended,
    Event,
    Farewell,
    Opened,
    Ready,
)
from etlstage.testing.scripted import ScriptedWorker, Stream

__all__ = ("CocaineWorker", "SessionRequest")

_NEVER: Final = 1e9  # seconds
_CATEGORY: Final = 42  # of a worker's errors


class SessionRequest(NamedTuple):
    """A session that was invoked, with all messages sent in it."""

    id: int
    event: str
    messages: tuple[bytes, ...]


class CocaineWorker:
    """
    The worker's side of a connection; it sends heartbeats while it is entered.

    Args:
        worker: The scripted process, whose pipes carry the connection.
        version: Of the protocol.
        beat: Seconds between heartbeats; None: only the first is sent.
        disown: Seconds to wait for the answer to a heartbeat.
        obeys: Whether it answers a terminate, and ends.

    Attributes:
        session: The session of the dialect.
        farewell: The supervisor's terminate, once received.
        cancelled: Sessions that the supervisor has cancelled.

    """

    def __init__(
        self,
        worker: ScriptedWorker,
        version: CocaineVersion = CocaineVersion.ONE,
        *,
        beat: float | None = 10.0,
        disown: float = 60.0,
        obeys: bool = True,
    ) -> None:
        deadlines = Deadlines(beat=_NEVER if beat is None else beat, disown=disown)
        self.session: CocaineSession = CocaineSession(
            Side.WORKER, version, deadlines=deadlines
        )
        self.farewell: Farewell | None = None
        self.cancelled: list[int] = []
        self._worker = worker
        self._obeys = obeys
        self._events: deque[Event] = deque()
        self._whole: deque[SessionRequest] = deque()
        self._asked: dict[int, tuple[str, list[bytes]]] = {}
        self._lock = anyio.Lock()
        self._tasks = anyio.create_task_group()

    async def __aenter__(self) -> Self:
        """Report readiness, and start the heartbeats."""
        await self._tasks.__aenter__()
        await self.say(Ready(self._worker.name))
        self._tasks.start_soon(self._keep_time)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the heartbeats."""
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(kind, error, trace)

    async def say(self, *events: Event) -> None:
        """Send events at once."""
        for event in events:
            self.session.send(event, 0.0)
        async with self._lock:
            while data := self.session.data_to_send():
                await self._worker.write(b"".join(data))

    async def write(self, data: bytes) -> None:
        """Write bytes, whatever they mean."""
        async with self._lock:
            await self._worker.write(data)

    def requests(self) -> AsyncIterator[SessionRequest]:
        """Yield sessions once they are complete, until the end."""
        return Stream(self.next)

    async def next(self) -> SessionRequest | None:
        """Return the next complete session; None at the end."""
        while not self._whole:
            event = await self.hear()
            if event is None:
                return None
            self._understand(event)
        return self._whole.popleft()

    async def hear(self) -> Event | None:
        """Return the supervisor's next event; None at the end."""
        while not self._events:
            data = await self._worker.read()
            if not data:
                return None
            self.session.receive_data(data, anyio.current_time())
            self._events.extend(self.session.events_received())
        event = self._events.popleft()
        if isinstance(event, Farewell):
            self.farewell = event
            if self._obeys:
                await self.say(event)
                return None
        return event

    async def reply(self, request: SessionRequest, *outputs: bytes) -> None:
        """Answer a session, with one chunk for each output."""
        await self.say(Ended(request.id, [outputs]))

    async def refuse(self, request: SessionRequest, code: int, reason: str) -> None:
        """Reject a session."""
        await self.say(Ended.refused(request.id, code, reason, _CATEGORY))

    def _understand(self, event: Event) -> None:
        match event:
            case Opened(id_, event=asked):
                self._asked[id_] = (asked, [])
            case Added(id_, messages, ended):
                self._asked[id_][1].extend(messages)
                if ended:
                    name, whole = self._asked.pop(id_)
                    self._whole.append(SessionRequest(id_, name, tuple(whole)))
            case Cancelled(id_):
                self._asked.pop(id_, None)
                self.cancelled.append(id_)
            case _:
                pass

    async def _keep_time(self) -> None:
        while (timer := self.session.get_timer()) is not None:
            await anyio.sleep_until(timer)
            self.session.handle_timer(anyio.current_time())
            await self.say()
