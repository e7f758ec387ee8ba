"""A conversation with a real worker, frame by frame, from the supervisor's side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio

from etlstage.protocol.base import Limits, Side
from etlstage.protocol.cocaine.settings import CocaineDialect
from etlstage.protocol.events import (
    Added,
    Ended,
    Event,
    Ready,
)
from etlstage.transport import LaunchRequest, launch_over_socket
from etlstage.transport.process import PipeChild
from etlstage.transport.socket import SocketWire
from tests.patience import HANG

__all__ = ("Talk", "talking")


class Talk:
    """
    What was received from a worker, and what is sent to it.

    Attributes:
        outputs: Chunks by number of the session.
        ended: Numbers of the sessions that have ended, in order.
        refused: Category, code and reason by number of the session.
        events: All events that were received.
        deaf: Whether nothing is written to the worker.

    """

    def __init__(
        self, wire: SocketWire, child: PipeChild, dialect: CocaineDialect
    ) -> None:
        self.wire = wire
        self.child = child
        self.session = dialect.open(Side.SUPERVISOR, Limits())
        self.outputs: dict[int, list[bytes]] = defaultdict(list)
        self.ended: list[int] = []
        self.refused: dict[int, tuple[int, int, str]] = {}
        self.events: list[Event] = []
        self.deaf = False
        self.gone = False
        self._unsent = b""

    def send(self, event: Event) -> None:
        """Queue an event."""
        self.session.send(event)

    async def until(self, condition: Callable[[], object]) -> None:
        """Talk until a condition holds; fail if the worker is gone before."""
        with anyio.fail_after(HANG):
            while not condition():
                assert not self.gone, self.events
                self._write()
                data = self.wire.read(65536)
                if data is None:
                    await self.wire.readable()
                elif data:
                    self.session.receive_data(data, anyio.current_time())
                else:
                    self.session.receive_eof(anyio.current_time())
                    self.gone = True
                for event in self.session.events_received():
                    self._take(event)
            self._write()

    async def exited(self) -> int:
        """Return the exit status."""
        with anyio.fail_after(HANG):
            return await self.child.wait()

    def seen(self, kind: type[Any]) -> bool:
        """Return whether an event of a kind has been received."""
        return any(isinstance(event, kind) for event in self.events)

    def _write(self) -> None:
        while True:
            self._unsent = self._unsent or b"".join(self.session.data_to_send())
            written = len(self._unsent)
            if not self.deaf:
                try:
                    written = self.wire.write(self._unsent)
                except BrokenPipeError:  # it is gone, and that will be read
                    return
            if not written:
                return
            self._unsent = self._unsent[written:]

    def _take(self, event: Event) -> None:
        self.events.append(event)
        match event:
            case Added(id_, messages):
                self.outputs[id_] += messages
            case Ended(first, groups, refusals):
                for _, code, category, reason in refusals:
                    self.refused[first] = category, code, reason
                    return
                for id_, group in enumerate(groups, first):
                    self.outputs[id_] += group
                    self.ended.append(id_)


@asynccontextmanager
async def talking(
    command: Sequence[str], dialect: CocaineDialect | None = None, **env: str
) -> AsyncIterator[Talk]:
    """Yield a conversation with a worker that is ready; it is killed at the end."""
    dialect = dialect or CocaineDialect()
    env = {"PATH": "/usr/bin:/bin"} | env
    request = LaunchRequest(tuple(command), env, stage="app", dialect=dialect)
    wire, child = launch_over_socket(request)
    try:
        talk = Talk(wire, child, dialect)
        await talk.until(lambda: talk.seen(Ready))
        yield talk
    finally:
        child.kill()
        wire.close()
        child.close()
