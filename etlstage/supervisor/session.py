"""
A conversation with one of the workers, for who embeds a supervisor.

It waits, and nothing else: what passes is bounded and accounted for in
``exchange/dialogue.py``; who is spoken to, the dispatcher decides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Self

import anyio

from etlstage.errors import InvalidMessage, LocalProtocolError
from etlstage.messages import sound
from etlstage.stage.stage import Stage
from etlstage.supervisor.exchange.dialogue import Dialogue

__all__ = ("WorkerSession",)

_WAITING: Final = 256 * 1024  # bytes in each direction, until the other side waits


class WorkerSession:
    """
    One exchange with a worker that stays open: both sides speak when they like.

    ::

        async with supervisor.session("echo") as session:
            await session.send(b"one")
            await session.choke()
            async for chunk in session:
                ...

    Iterate over it for what the worker says. That ends when the worker has said all,
    and raises what else becomes of the session; so does :meth:`send`:

    - WorkerRefusal: the worker said no, and lives on;
    - TimeoutError: it took longer than ``timeout.message``, and was cancelled;
    - WorkerLost, or RemoteProtocolError: its worker died, or broke the protocol;
    - StageFailed: there is no worker left.

    Sessions share the connection to their worker: while the reply of one lies
    unread, the others wait for theirs. So have a task for each of them.

    Args:
        stage: Of the worker.
        event: What the worker is asked for; empty: as the stage says.
        kick: Called when there may be something for the workers.
        drop: Called when nobody waits for it any more.

    """

    def __init__(
        self,
        stage: Stage,
        event: str,
        kick: Callable[[], None],
        drop: Callable[[Dialogue], None],
    ) -> None:
        self._changed: anyio.Event | None = None
        self.dialogue: Dialogue = Dialogue(self._wake, event, max_waiting=_WAITING)
        """What the workers take."""
        self._stage = stage
        self._kick = kick
        self._drop = drop
        self._heard: deque[bytes] = deque()

    async def send(self, chunk: bytes) -> None:
        """
        Send a chunk; wait while too much is on its way.

        What is sent after the worker has ended its reply is dropped.

        Raises:
            TypeError: If it is not bytes.
            InvalidMessage: If it is longer than ``max_message``.
            LocalProtocolError: If the input was ended.

        """
        run, error = sound([chunk])
        if error is not None:
            raise error
        if len(run[0]) > (most := self._stage.max_message):
            raise InvalidMessage(
                f"stage {self._stage.name}: chunk is {len(run[0])} bytes long,"
                f" expected no more than {most}; see max_message",
                index=0,
            )
        while self.dialogue.full:
            await self._change()
        self._raise_error()
        if self.dialogue.ended:
            raise LocalProtocolError("can't send: the input of the session was ended")
        self.dialogue.say(run[0])
        self._kick()

    async def choke(self) -> None:
        """End the input; the worker may still answer. Safe to call twice."""
        self.dialogue.end()
        self._kick()

    async def error(self, code: int, reason: str) -> None:
        """End the session; the worker is told why, and says no more of it."""
        self.dialogue.parting = code, reason
        self.close()

    def close(self) -> None:
        """End the session, unless it has ended: nobody waits for it."""
        if not self.dialogue.forgotten:
            self._drop(self.dialogue)
            self._kick()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while not self._heard:
            over, stalled = self.dialogue.over, self.dialogue.stalled
            for run in self.dialogue.outputs():
                self._heard.extend(run)
            if stalled:
                self._kick()  # what could not be read, can be now
            if self._heard:
                break
            if over:
                self._raise_error()
                raise StopAsyncIteration
            await self._change()
        return self._heard.popleft()

    def _raise_error(self) -> None:
        dialogue = self.dialogue
        if dialogue.error is None:
            return
        error = dialogue.error.with_traceback(None)
        if dialogue.expired:
            name, limit = self._stage.name, self._stage.timeout.message
            text = f"stage {name}: the session did not end within {limit} s"
            raise TimeoutError(text) from error
        raise error

    async def _change(self) -> None:
        if self._changed is None:
            self._changed = anyio.Event()
        await self._changed.wait()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None
