"""
Shows that the replies of a block are all that the worker has to say.

When a worker owes nothing, what it has written may still not be all: a reply that
nobody asked for can be a moment late. Proof is that it waits for more input, for a
program that reads comes back to reading only behind all that it had to write. So one
byte of the next message is written ahead, never the byte that completes it; once it is
read, and stdout is read dry, the block adds up. Where no message waits, the worker must
be quiet for a time that follows its own pace; see ``exchange/pairing.py``.

The same is done before the first message of a process: what a worker writes before it
is asked would be taken for the beginning of its first reply.

A load worker has nothing written ahead: should we be killed then, it might load the
part of a message that it has. There only quiet times are left, too.

A thread that reads ahead, or a program that reads for the worker, takes the byte
early; then it is the same, until the end of the process.
"""

from __future__ import annotations

from typing import Final, Protocol

import anyio
import anyio.lowlevel

from etlstage.messages import StageKind
from etlstage.stage.stage import Stage
from etlstage.supervisor.exchange.dispatch import Dispatcher
from etlstage.supervisor.writer import Writer
from etlstage.transport import Wire

__all__ = ("Verifiable", "Verifier")

_SHOWN: Final = 64  # bytes of what the worker wrote, in an error
# The loop rounds short sleeps up to a millisecond; most workers are faster than that.
_SPINS: Final = 40
# Then it is looked at every so many seconds: an eighth of what it has taken so far.
_SLEEPS: Final = (0.001, 0.25)
_EIGHTH: Final = 0.125
# Until a process that can't be teased, for its first message is empty, has greeted.
_GREETING: Final = 0.1


class Verifiable(Protocol):
    """What a verifier needs of the connection that it belongs to."""

    def take_next(self, now: float) -> list[bytes] | None:
        """Give the worker what it may have next; return the bytes to write."""
        ...

    def read_dry(self) -> None:
        """Read and understand what the worker has written."""
        ...

    def settle_block(self, now: float, *, proven: bool) -> None:
        """Release the block, and go on."""
        ...

    def doubt(self, what: str = "") -> None:
        """Take the block back: it does not add up; say why, but for what was said."""
        ...


class Verifier:
    """
    Proves one block after the other.

    Args:
        connection: What the blocks come from.
        dispatch: Has the block.
        wire: To the worker.
        writer: To the worker.
        stage: Of the worker.

    """

    def __init__(
        self,
        connection: Verifiable,
        dispatch: Dispatcher,
        wire: Wire,
        writer: Writer,
        stage: Stage,
    ) -> None:
        self._connection = connection
        self._dispatch = dispatch
        self._wire = wire
        self._writer = writer
        self._dialect = stage.dialect
        self._teases = stage.kind is not StageKind.LOAD
        self._begun = anyio.Event()
        self._woken = anyio.Event()
        self._rest: list[bytes | memoryview] | None = (
            None  # of the message that comes next
        )
        self._teased = False  # one byte of it was written
        self._since = self._quiet_until = 0.0
        self._patient = False  # until then is as long as it takes
        self.busy: bool = False
        """A block is being proven: nothing else may be given to the worker."""
        self.said: bytes = b""
        """What the worker has written while it owed nothing."""

    @property
    def ahead(self) -> bool:
        """Whether the worker has no whole message of what it was given last."""
        return self._rest is not None

    @property
    def probe(self) -> int:
        """Bytes that were written ahead of what the worker has to answer."""
        return int(self.busy and self._teased)

    def begin(self, now: float, following: list[bytes] | None = None) -> None:
        """
        Begin to prove a block: the worker owes nothing, and has nothing to do.

        Args:
            now: The time, in seconds.
            following: What is to be written behind it, if that is known.

        """
        self.busy = True
        self._since = now
        self.said = b""
        self._teased = False
        block = self._dispatch.block
        quiet = block.quiet(now, step=self._dispatch.step)
        self._quiet_until = now + quiet
        self._patient = quiet >= block.pace
        if following is not None:
            self._write_ahead(following)
            self._quiet_until = now + _GREETING
            self._begun.set()
            return
        block.end()
        left = self._wire.unread()
        if left > self._dialect.slack and not self._dialect.shape.batches:
            self._connection.doubt(
                f"wrote a reply too many: {left} bytes of what it answered are unread"
            )
        elif not self._tease(now) and not quiet and not left:
            self._finish(now, proven=False)
        else:
            self._begun.set()

    def wake(self) -> None:
        """Take note that there may be something to give."""
        self._woken.set()

    def hear(self, data: bytes) -> None:
        """Take note of what the worker writes, although it owes nothing."""
        self.said = (self.said + data)[:_SHOWN]
        if self._teased and self._wire.unread() and not self._dialect.slack:
            self._connection.doubt()

    def stop(self) -> None:
        """Prove nothing more; what was begun to be written is written."""
        if self.busy and self._rest is not None:
            self._write_rest()
        self.busy = False

    def cancel(self) -> None:
        """Prove nothing more; the worker is gone, or of no more use."""
        self.busy = False
        self._woken.set()

    async def run(self) -> None:
        """Prove what is begun, until cancelled."""
        while True:
            await self._begun.wait()
            self._begun = anyio.Event()
            await self._prove()

    async def _prove(self) -> None:
        tries = 0
        while self.busy:
            now = anyio.current_time()
            if self._waits(now):
                self._connection.read_dry()
                if self.busy:
                    self._conclude(now)
                return
            tries += 1
            if tries <= _SPINS:
                await anyio.lowlevel.checkpoint()
            else:
                await self._sleep(now)
            if self._rest is None and self.busy:
                self._tease(anyio.current_time())

    def _waits(self, now: float) -> bool:
        """Return whether the worker has shown that it has nothing more to say."""
        if self._teased:
            return not self._wire.unread()
        return now >= self._quiet_until

    async def _sleep(self, now: float) -> None:
        shortest, longest = _SLEEPS
        nap = min(max(shortest, _EIGHTH * (now - self._since)), longest)
        if not self._teased:
            nap = self._quiet_until - now
        self._woken = anyio.Event()
        with anyio.move_on_after(nap):
            await self._woken.wait()

    def _tease(self, now: float) -> bool:
        """Begin to write what comes next; return whether anything does."""
        if not self._teases or self._dispatch.idle:
            return False
        if self._wire.unread() > self._dialect.slack:
            return False  # a worker that counts its messages has not read EOB
        chunks = self._connection.take_next(now)
        if chunks:
            self._write_ahead(chunks)
        return bool(chunks)

    def _write_ahead(self, chunks: list[bytes]) -> None:
        self._rest = [*chunks]
        first = memoryview(chunks[0])
        # The byte must not be the end of an empty message.
        if (
            self._teases
            and len(first) > 1
            and not self._dialect.speaks(bytes(first[:1]))
        ):
            self._writer.add([first[:1]])
            self._writer.flush()
            self._rest[0] = first[1:]
            self._teased = True

    def _conclude(self, now: float) -> None:
        if self.said and self._dialect.speaks(self.said):
            self._connection.doubt()
        elif self._wire.unread() > self._dialect.slack and not self._teased:
            self._connection.doubt(
                "answered a batch before it had read its EOB; for a worker that closes"
                " full batches by itself set batch.eob_after_full: false"
            )
        else:
            self._dispatch.block.hushed = self._patient and not self._teased
            self._finish(now, proven=self._teased or self._patient)

    def _finish(self, now: float, *, proven: bool) -> None:
        self.busy = False
        if self._rest is not None:
            self._write_rest()
        self._connection.settle_block(now, proven=proven)

    def _write_rest(self) -> None:
        assert self._rest is not None
        rest, self._rest = self._rest, None
        self._writer.add(rest)
        self._writer.flush()
