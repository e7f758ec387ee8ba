"""
Heads of frames: what a sequencer has to know of messages, without reading them.

Fixed frames begin with their length, followed by a UUID for the content types that
journals read themselves. So a reader that plans what others are to read looks at only a
few bytes of a run, however large it is. A damaged UUID would commit something else, or
drop a message. So a run has a checksum of its UUID; groups of other frames are read and
verified as a whole.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, Self
from uuid import UUID
from zlib import crc32

from etlstage.block import BLOCK_HEAD, block_head
from etlstage.journal.errors import JournalDamaged
from etlstage.journal.journals import Journals
from etlstage.journal.log import HEAD, Group, JournalLog
from etlstage.journal.messages import LogReader, OnError, SoundMessages
from etlstage.journal.run import RunFraming
from etlstage.sequencing import (
    FIXED_FRAME_HEADER_LENGTH,
    FIXED_FRAME_WORD,
    DesyncDetected,
    Envelope,
    FixedFraming,
    FrameError,
    JournalSpec,
    ReadUncommitted,
    UnexpectedEnd,
)

__all__ = ("FrameHead", "FrameHeads", "MessageHeads", "heads_of")

_UUID: Final = FIXED_FRAME_HEADER_LENGTH + 16
_SIZE: Final = _UUID + BLOCK_HEAD
"""Size of a head, with that of the block, which has the number of its messages."""


class FrameHead:
    """A message of which only the head is known."""

    __slots__ = ("before", "messages", "uuid")

    def __init__(self, uuid: UUID, messages: int, before: int) -> None:
        self.uuid: UUID = uuid
        self.messages: int = messages
        """Number of messages in the frame."""
        self.before: int = before
        """Where the previous frame ends, or the reader began; only heads of groups are
        in between."""

    def set_uuid(self, uuid: UUID) -> None:
        """Set the UUID."""
        self.uuid = uuid

    def acknowledgement(self, journal: str) -> Self:
        """Refuse: a head can't be published."""
        raise NotImplementedError


class MessageHeads:
    """Presents messages that are read as a whole as heads."""

    def __init__(self, messages: ReadUncommitted, offset: int) -> None:
        self._messages = messages
        self._before = offset

    def __iter__(self) -> Iterator[Envelope]:
        return map(self._head, self._messages)

    def poll(self) -> Envelope | None:
        """Return the next head, or None if there is none yet."""
        found = self._messages.poll()
        return None if found is None else self._head(found)

    def _head(self, found: Envelope) -> Envelope:
        head = FrameHead(found.message.uuid, 1, self._before)
        self._before = found.end
        return found._replace(message=head)


class FrameHeads:
    """
    Iterates over the heads of all fixed frames of a journal.

    Args:
        log: The journal.
        spec: The journal's spec.
        offset: Where to begin.
        end: Where to end; without it :meth:`poll` also returns what comes later.
        on_error: Called with the error for what is skipped; without it the error is
            raised.

    Raises:
        FrameError: While iterating, where no frame begins.

    """

    def __init__(
        self,
        log: JournalLog,
        spec: JournalSpec,
        offset: int,
        end: int | None = None,
        on_error: OnError | None = None,
    ) -> None:
        self._log = log
        self._spec = spec
        self._at = self._before = offset
        self._end = end
        self._on_error = on_error
        passed = None if on_error is None else self._pass_over
        self._runs = spec.content_type == RunFraming.content_type
        self._groups = LogReader(
            log,
            spec,
            offset,
            on_error=passed,
            heads=self._runs,
            follow=end is None,
        )
        self._found: Iterator[Envelope] = iter(())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Envelope:
        if (found := self.poll()) is None:
            raise StopIteration
        return found

    def poll(self) -> Envelope | None:
        """Return the next head, or None if there is none yet."""
        while True:
            try:
                found = next(self._found, None)
            except FrameError as error:
                if self._on_error is None:
                    raise
                self._pass_over(error)
                continue
            if found is not None:
                break
            if (group := self._groups.group()) is None:
                return None
            self._found = self._frames(group)
        return None if self._end is not None and found.begin >= self._end else found

    def _frames(self, group: Group) -> Iterator[Envelope]:
        begin = at = max(self._at, group.begin + HEAD)
        held = group.data[begin - group.begin - HEAD :]
        while at < group.end:
            head = held[at - begin : at - begin + _SIZE]
            if len(head) < min(_SIZE, group.end - at):
                head = self._log.peek(at, min(_SIZE, group.end - at))
            if head == b"\n":  # it may follow the last frame
                break
            end = at + FIXED_FRAME_HEADER_LENGTH
            end += int.from_bytes(head[4:FIXED_FRAME_HEADER_LENGTH], "little")
            self._check(head, at, end, group.end)
            count = self._messages(head, at, end, group.end)
            uuid = UUID(bytes=head[FIXED_FRAME_HEADER_LENGTH:_UUID])
            found = FrameHead(uuid, count, self._before)
            self._at = self._before = end
            yield Envelope(self._spec.name, at, end, found)
            at = end
        self._at = group.end

    def _pass_over(self, error: FrameError | JournalDamaged) -> None:
        """Skip an error's range, so that no range of frames spans it."""
        assert error.end is not None
        assert self._on_error is not None
        self._before = error.end
        self._on_error(error)

    def _check(self, head: bytes, at: int, end: int, stop: int) -> None:
        error: DesyncDetected | UnexpectedEnd
        if not head.startswith(FIXED_FRAME_WORD):
            error = DesyncDetected(head, offset=at)
        elif len(head) < _UUID or end > stop:
            error = UnexpectedEnd("unexpected EOF", offset=at)
        else:
            return
        raise self._located(error, stop)

    def _messages(self, head: bytes, at: int, end: int, stop: int) -> int:
        """Return the number of messages in a frame: 0 for a run without a block."""
        if not self._runs or end - at == _UUID:
            return int(not self._runs)
        error: Exception | None = None
        try:
            count, size, sum_, _ = block_head(head[_UUID:])
        except (ValueError, struct.error) as why:
            error = why
        # As everywhere in blocks, a checksum of 0 means that there is none.
        own = crc32(head[_UUID - 16 : _UUID])
        if error or end - at != _SIZE + size or sum_ not in (0, own):
            text = "its head is not what was written"
            raise self._located(FrameError(text, offset=at), stop) from error
        return count

    def _located(self, error: FrameError, stop: int) -> FrameError:
        error.framing, error.journal = self._spec.content_type, self._spec.name
        error.end = stop
        return error


def heads_of(
    journals: Journals,
    spec: JournalSpec,
    offset: int,
    end: int | None = None,
    on_error: OnError | None = None,
) -> FrameHeads | MessageHeads:
    """
    Return the heads of a journal's frames; if these have none, messages are read.

    Args:
        journals: The set.
        spec: The journal's spec.
        offset: Where to begin.
        end: Where to end; without it there may be more later.
        on_error: Called with the error for what is skipped; without it the error is
            raised.

    """
    log = journals.log(spec.name)
    if spec.content_type in (RunFraming.content_type, FixedFraming.content_type):
        return FrameHeads(log, spec, offset, end, on_error)
    reader = LogReader(log, spec, offset, end=end, on_error=on_error)
    messages = SoundMessages(reader, journals.new_message, on_error)
    return MessageHeads(messages, offset)
