"""What is said to a worker without anybody's wish: that we live, and when time is up."""

from __future__ import annotations

from contextlib import suppress
from math import inf

import anyio

from etlstage.protocol.base import SEND_EOF
from etlstage.testing.process import Process
from etlstage.testing.replies import ReplyReader

__all__ = ("Answers",)


class Answers:
    """
    Writes what a session says by itself, between what others have it say.

    Args:
        said: The conversation.
        process: The worker.
        mute: Whether nothing is said so.

    Attributes:
        writing: Who has it may write.

    """

    def __init__(self, said: ReplyReader, process: Process, *, mute: bool) -> None:
        # Who is alone is not to let others do something first.
        self.writing: anyio.Lock = anyio.Lock(fast_acquire=True)
        self._said = said
        self._process = process
        self._mute = mute
        self._due = anyio.Event()

    def wake(self) -> None:
        """Look whether there is something to be said."""
        self._due.set()

    def waiting(self) -> tuple[bytes, bool]:
        """Return what the session wants to be written; and whether to end there."""
        wire, ends = b"", False
        while some := self._said.session.data_to_send():
            wire += b"".join(some)
            ends = ends or SEND_EOF in some
        return wire, ends

    async def run(self) -> None:
        """Go on as long as there is any sense in it."""
        session = self._said.session
        while self._said.fault is None:
            self._due = anyio.Event()
            if not self._mute:
                with suppress(BrokenPipeError):  # it is gone, and that is read
                    async with self.writing:
                        await self._process.write(self.waiting()[0])
            timer = session.get_timer()
            with anyio.CancelScope(deadline=inf if timer is None else timer):
                await self._due.wait()
            session.handle_timer(anyio.current_time())
            self._said.take_events()
        self._process.wake()
