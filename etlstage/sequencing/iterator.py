"""
Iterators over the messages of a journal: all of them, or those that are committed.

Use both with ``for`` if the reader's ``read`` returns bytes, and with ``async for`` if
it is awaitable. An error of one message does not end the iteration: the next call reads
the following message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Protocol, TypeAlias

from etlstage.errors import ConfigError
from etlstage.sequencing.framing import (
    MAX_FRAME,
    FrameBuffer,
    FrameError,
    UnexpectedEnd,
    framing_by_content_type,
)
from etlstage.sequencing.message import Envelope, JournalSpec, NewMessage
from etlstage.sequencing.sequencer import (
    MustStartReplay,
    ReplayFailed,
    ReplayWaits,
    Sequencer,
)

__all__ = (
    "AsyncJournalReader",
    "JournalReader",
    "OpenReplay",
    "ReadCommitted",
    "ReadUncommitted",
    "read_committed",
    "read_uncommitted",
)

_CHUNK = 1 << 18
"""Number of bytes that are requested at a time."""


class JournalReader(Protocol):
    """Reads the bytes of a journal in order; it may skip bytes that are gone."""

    @property
    def spec(self) -> JournalSpec:
        """The journal."""

    @property
    def offset(self) -> int:
        """Offset after the last byte that was returned."""

    def read(self, size: int, /) -> bytes | None:
        """
        Return some bytes, preferably at most ``size``.

        None means that there are none yet, empty bytes mean the end.
        """


class AsyncJournalReader(Protocol):
    """Like :class:`JournalReader`, with an awaitable ``read``."""

    @property
    def spec(self) -> JournalSpec:
        """The journal."""

    @property
    def offset(self) -> int:
        """Offset after the last byte that was returned."""

    def read(self, size: int, /) -> Awaitable[bytes | None]:
        """Wait for bytes; see :meth:`JournalReader.read`."""


_AnyReader: TypeAlias = JournalReader | AsyncJournalReader
OpenReplay: TypeAlias = Callable[[str, int, int], _AnyReader]
"""Returns a reader of a journal from one offset to another, which is read at once."""


class ReadUncommitted:
    """
    Iterates over all messages of a journal, also duplicates and uncommitted ones.

    Args:
        reader: Where the messages come from.
        new_message: Creates the message objects.
        max_frame: Maximum size of a message's frame, in bytes.

    Raises:
        ConfigError: If no framing is known for the journal's content type.
        FrameError: While iterating, for a frame that is not a message.

    """

    def __init__(
        self,
        reader: _AnyReader,
        new_message: NewMessage,
        *,
        max_frame: int = MAX_FRAME,
    ) -> None:
        self._reader: Any = reader
        self._spec = reader.spec
        self._new_message = new_message
        self._buffer = FrameBuffer(reader.offset, max_frame=max_frame)
        try:
            framing = framing_by_content_type(self._spec.content_type)
        except ConfigError as error:
            raise ConfigError(f"determining framing: {error}") from None
        self._unmarshal = framing.unmarshaller(self._buffer)
        self._message: Any = None

    def __iter__(self) -> ReadUncommitted:
        return self

    def __next__(self) -> Envelope:
        while (envelope := self._take(StopIteration)) is None:
            self._receive(self._reader.read(_CHUNK))
        return envelope

    def poll(self) -> Envelope | None:
        """
        Return the next message, or None if the reader has none yet.

        Raises:
            EOFError: If there are no more.

        """
        while (envelope := self._take(EOFError)) is None:
            data = self._reader.read(_CHUNK)
            if data is None:
                return None
            self._receive(data)
        return envelope

    def __aiter__(self) -> ReadUncommitted:
        return self

    async def __anext__(self) -> Envelope:
        while (envelope := self._take(StopAsyncIteration)) is None:
            self._receive(await self._reader.read(_CHUNK))
        return envelope

    def _take(self, end: type[Exception]) -> Envelope | None:
        """Return the next message, or None if the buffer needs more bytes."""
        if self._message is None:
            self._message = self._new_message(self._spec)
        begin = self._buffer.offset
        try:
            if not self._unmarshal(self._message):
                return None
        except EOFError:
            raise end from None
        except FrameError as error:
            error.journal = self._spec.name
            # If a line is too long, the next frame begins after its rest.
            error.end = None if self._buffer.dropping else self._buffer.offset
            self._message = None
            raise
        message, self._message = self._message, None
        return Envelope(self._spec.name, begin, self._buffer.offset, message)

    def _receive(self, data: bytes | None) -> None:
        if data is None:
            return
        buffer = self._buffer
        begin = self._reader.offset - len(data)
        if data and begin != buffer.offset + len(buffer):
            offset, held = buffer.offset, buffer.jump(begin)
            buffer.feed(data)
            if held:
                error = UnexpectedEnd(
                    f"unexpected EOF: the journal continues at offset {begin}",
                    framing=self._spec.content_type,
                    offset=offset,
                )
                error.journal, error.end = self._spec.name, offset + len(held)
                raise error
        elif data:
            buffer.feed(data)
        else:
            buffer.feed_end()


class _Replay:
    """The messages of a replay whose reader has to be awaited."""

    def __init__(self, messages: ReadUncommitted) -> None:
        self._messages = messages
        self._ready: deque[Envelope | Exception] = deque()
        self._ended = False

    def __iter__(self) -> Iterator[Envelope]:
        return self

    def __next__(self) -> Envelope:
        if not self._ready:
            if self._ended:
                raise StopIteration
            raise ReplayWaits
        found = self._ready.popleft()
        if isinstance(found, Exception):
            raise found
        return found

    async def wait(self) -> None:
        """Wait for another message, an error, or the end."""
        try:
            self._ready.append(await anext(self._messages))
        except StopAsyncIteration:
            self._ended = True
        except Exception as error:  # raised by the next call
            self._ready.append(error)


class ReadCommitted:
    """
    Iterates over the committed messages of a journal, each once.

    Acknowledgements are among them.

    Args:
        reader: Where the messages come from.
        new_message: Creates the message objects.
        sequencer: Decides what is committed. It may be shared by several journals, if
            only one of them is iterated at a time, up to its end.
        replay: Opens a reader for a range that has to be read again.
        max_frame: Maximum size of a message's frame, in bytes.

    Raises:
        ConfigError: If no framing is known for the journal's content type.
        FrameError: While iterating, for a frame that is not a message.
        ReplayFailed: While iterating, if a replay fails; the next call restarts it.

    """

    def __init__(
        self,
        reader: _AnyReader,
        new_message: NewMessage,
        sequencer: Sequencer,
        replay: OpenReplay,
        *,
        max_frame: int = MAX_FRAME,
    ) -> None:
        self._messages = ReadUncommitted(reader, new_message, max_frame=max_frame)
        self._sequencer = sequencer
        self._open: Callable[[], ReadUncommitted] = lambda: ReadUncommitted(
            replay(*sequencer.replay_range()), new_message, max_frame=max_frame
        )
        self._replay: _Replay | None = None

    def __iter__(self) -> ReadCommitted:
        return self

    def __next__(self) -> Envelope:
        while True:
            try:
                if (envelope := self._sequencer.deque_committed()) is not None:
                    return envelope
            except MustStartReplay:
                self._sequencer.start_replay(self._open())
            else:
                self._sequencer.queue_uncommitted(next(self._messages))

    def __aiter__(self) -> ReadCommitted:
        return self

    async def __anext__(self) -> Envelope:
        while True:
            try:
                if (envelope := self._sequencer.deque_committed()) is not None:
                    return envelope
            except MustStartReplay:
                self._replay = _Replay(self._open())
                self._sequencer.start_replay(self._replay)
            except ReplayWaits:
                if self._replay is None:
                    raise ReplayFailed(
                        "replay reader: it belongs to another iterator"
                    ) from None
                await self._replay.wait()
            else:
                self._sequencer.queue_uncommitted(await anext(self._messages))


def read_uncommitted(
    reader: _AnyReader, new_message: NewMessage, *, max_frame: int = MAX_FRAME
) -> ReadUncommitted:
    """Return an iterator over all messages; see :class:`ReadUncommitted`."""
    return ReadUncommitted(reader, new_message, max_frame=max_frame)


def read_committed(
    reader: _AnyReader,
    new_message: NewMessage,
    sequencer: Sequencer,
    replay: OpenReplay,
    *,
    max_frame: int = MAX_FRAME,
) -> ReadCommitted:
    """Return an iterator over committed messages; see :class:`ReadCommitted`."""
    return ReadCommitted(reader, new_message, sequencer, replay, max_frame=max_frame)
