"""Reading one journal: its bytes, and all its messages, committed or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from etlstage.journal.errors import JournalDamaged
from etlstage.journal.log import ByteLog, Group, JournalLog
from etlstage.sequencing import (
    Envelope,
    FrameError,
    JournalSpec,
    NewMessage,
    ReadUncommitted,
    UnexpectedEnd,
)

__all__ = ("LogReader", "OnError", "SoundMessages")

T = TypeVar("T")

OnError = Callable[[FrameError | JournalDamaged], object]
"""Called with the error for what is skipped. An exception that it raises propagates
from the reader, whose next call resumes after what was skipped."""


class LogReader:
    """
    Reads the bytes of one journal, without the heads of groups.

    Args:
        log: The journal.
        spec: The journal's spec.
        offset: Where to begin.
        end: Where to end; without it reading never ends, and returns None if there is
            nothing yet.
        on_error: Called with the error for damage that is skipped; without it the error
            is raised.
        heads: Whether to read only the beginnings of groups.
        follow: Whether damage at the end of the journal is skipped only once a sound
            group follows it; not if reading has an ``end``.

    Attributes:
        at: The end of the last group that was looked at.
        whole: Whether a frame never continues in the next group.

    """

    def __init__(
        self,
        log: ByteLog,
        spec: JournalSpec,
        offset: int = 0,
        *,
        end: int | None = None,
        on_error: OnError | None = None,
        heads: bool = False,
        follow: bool = True,
    ) -> None:
        self.spec = spec
        self.offset: int = offset
        self._log = log
        self._end = end
        self._on_error = on_error
        self._heads = heads
        self._follow = follow and end is None
        self.at: int = offset
        # The head of the next group would be within the frame.
        self.whole: bool = isinstance(log, JournalLog)
        self._groups: Iterator[Group] = iter(())
        self._ended = False

    def read(self, size: int) -> bytes | None:
        """Return the rest of a group; ``size`` is ignored, as groups are read whole."""
        while self._end is None or self.at < self._end:
            group = self.group()
            if group is None:
                return b"" if self._end is not None else None
            first = group.end - len(group.data)
            begin = max(self.offset, first)
            stop = group.end if self._end is None else min(group.end, self._end)
            if begin < stop:
                self.offset = stop
                return group.data[begin - first : stop - first]
        return b""

    def group(self) -> Group | None:
        """Return the next group, or None if there is none yet."""
        heads = self._heads
        try:
            group = next(self._groups, None)
            if group is None:
                if self._ended and not self._log.grown(self.at):
                    return None
                self._groups = self._log.groups(self.at, heads=heads)
                group = next(self._groups, None)
                self._ended = group is None
        except JournalDamaged as error:
            self._groups = iter(())
            if self._on_error is None:
                raise
            groups = self._log.groups(error.offset, skip=True, heads=heads)
            group = next(groups, None)
            if group is None and self._follow:
                return None
            # A writer begins a new segment behind damage at the end.
            error.end = self.at = self._log.reach() if group is None else group.begin
            self._on_error(error)
        if group is not None:
            self.at = group.end
        return group


class SoundMessages(ReadUncommitted):
    """
    Iterates over all messages, and skips invalid frames.

    Args:
        reader: Where the messages come from.
        new_message: Creates the messages.
        on_error: Called with the error for each frame that is skipped; without it the
            error is raised.

    """

    def __init__(
        self, reader: LogReader, new_message: NewMessage, on_error: OnError | None
    ) -> None:
        super().__init__(reader, new_message)
        self._on_error = on_error

    def __next__(self) -> Envelope:
        return self._sound(super().__next__)

    def poll(self) -> Envelope | None:
        """Return the next message, or None if the reader has none yet."""
        return self._sound(super().poll)

    def _receive(self, data: bytes | None) -> None:
        held, reader = len(self._buffer), self._reader
        if data == b"" and held and reader.whole and reader.offset != reader.at:
            # Some framings would take what is cut off for the end of a message.
            offset = self._buffer.offset
            self._buffer.jump(reader.offset)
            error = UnexpectedEnd(
                "unexpected EOF", framing=self._spec.content_type, offset=offset
            )
            error.journal, error.end = self._spec.name, offset + held
            raise error
        super()._receive(data)

    def _take(self, end: type[Exception]) -> Envelope | None:
        found, buffer, reader = super()._take(end), self._buffer, self._reader
        whole = reader.whole and reader.offset == reader.at  # up to a group's end
        if found is not None or not len(buffer) or not whole:
            return found
        buffer.feed_end()
        try:
            return super()._take(EOFError)
        except EOFError:
            return None
        except FrameError as error:
            error.end = reader.offset
            raise
        finally:
            buffer.ended = False
            buffer.jump(reader.offset)

    def _sound(self, read: Callable[[], T]) -> T:
        while True:
            try:
                return read()
            except FrameError as error:
                if self._on_error is None:
                    raise
                self._on_error(error)
