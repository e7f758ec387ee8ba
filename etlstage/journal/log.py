"""
One journal: an endless log of bytes in segments, appended to in groups.

A segment is a file named by the offset of its first byte. It holds groups. Each group
is a head of 32 bytes and the bytes of one append, which are whole frames of messages::

    "ETJ1"  bytes: u32  offset: u64  time: u64  crc of the bytes: u32  of the head: u32

Numbers are little-endian, the time is in nanoseconds since 1970 and never goes back.
Heads count as bytes of the journal; readers leave them out.

A **writer** holds the journal's lock, and first verifies that the last group is whole.
A group that is shorter than its head declares was never completely written, and is cut.
A group of full length whose bytes are not what was written is damaged. It is not cut;
instead the next group begins a new segment after it. A **reader** needs no lock, and
cuts nothing: it ignores a last group that is not whole yet.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Final, NamedTuple, Protocol
from zlib import crc32

from etlstage.journal.errors import JournalDamaged, OffsetGone
from etlstage.journal.storage import Storage

__all__ = ("HEAD", "MAX_GROUP", "ByteLog", "Group", "JournalLog")

_MAGIC: Final = b"ETJ1"
_SHAPE: Final = struct.Struct("<4sIQQI")
HEAD: Final = _SHAPE.size + 4
"""Size of a group's head, in bytes."""
MAX_GROUP: Final = 128 << 20
"""Bytes that may be appended at once; a head that declares more is damaged."""
_CHUNK: Final = 1 << 20
_LARGE: Final = 1 << 16
_AHEAD: Final = HEAD + 64
"""Bytes to read of a large group when only heads are wanted."""
_MARK: Final = 1 << 20
"""Minimum distance of two remembered group beginnings in a segment, in bytes."""


class Group(NamedTuple):
    """The bytes of one append."""

    begin: int
    """Offset of its head."""
    end: int
    time: int
    """Nanoseconds since 1970."""
    data: bytes
    """The bytes after the head; if only heads are read, whatever was read with them."""


class ByteLog(Protocol):
    """The bytes of one journal; see :class:`JournalLog`."""

    @property
    def name(self) -> str:
        """Name of the journal."""

    @property
    def lock(self) -> str:
        """Path of the lock that a writer must hold."""

    @property
    def rolled(self) -> bool:
        """Whether the last append has begun a new segment."""

    def first(self) -> int:
        """Return the first offset that is kept."""

    def end(self) -> int:
        """Return the end offset of the last whole group."""

    def reach(self) -> int:
        """Return the end offset of the last segment."""

    def appended(self) -> int:
        """Return the approximate end offset."""

    def grown(self, offset: int) -> bool:
        """Return whether there may be more after an offset."""

    def append(self, now: int, *data: bytes) -> tuple[int, int]:
        """Append bytes, and return their begin and end offsets."""

    def sync(self) -> None:
        """Make appended bytes durable, so that they outlive a machine crash."""

    def secure(self, offset: int) -> None:
        """Make all bytes before an offset durable, whichever process appended them."""

    def groups(
        self, offset: int, *, skip: bool = False, heads: bool = False
    ) -> Iterator[Group]:
        """Iterate over the groups from an offset on."""

    def at_time(self, time: int) -> int:
        """Return the begin offset of what was appended at a time, or later."""


class _Bad(Exception):
    """A group is not what was written."""


class JournalLog:
    """
    The segments of one journal.

    Args:
        storage: Where the segments are.
        folder: The journal's folder in the storage.
        name: Name of the journal, for errors.
        segment: Bytes after which a new segment is begun.

    Attributes:
        rolled: Whether the last append has begun a new segment.

    """

    def __init__(
        self, storage: Storage, folder: str, name: str, *, segment: int = 64 << 20
    ) -> None:
        self._storage = storage
        self._folder = folder
        self.name = name
        self._segment = segment
        self.rolled: bool = False
        # After our last append: the last segment, the end offset, the time.
        self._tail: tuple[int, int, int] | None = None
        # The last segment, when groups() last looked.
        self._last: int | None = None
        # By segment, some offsets at which groups begin.
        self._marks: dict[int, list[int]] = {}

    @property
    def lock(self) -> str:
        """Path of the lock that a writer must hold."""
        return f"{self._folder}/lock"

    def segments(self) -> list[int]:
        """Return the first offsets of all segments."""
        names = self._storage.names(self._folder)
        return sorted(
            int(name[:-4])
            for name in names
            if name.endswith(".log") and len(name) == 24
        )

    def first(self) -> int:
        """Return the first offset that is kept."""
        segments = self.segments()
        return segments[0] if segments else 0

    def end(self) -> int:
        """
        Return the end offset of the last whole group, or of damage after it.

        Nothing is cut.
        """
        segments = self.segments()
        if not segments:
            return 0
        last = begin = segments[-1]
        try:
            # The heads are enough for all groups but the last.
            for group in self._whole(last, last, None, last, 1 << 64):
                begin = group.begin
        except JournalDamaged:
            return self.reach()
        end, _, damaged = self._scan(last, begin)
        return self.reach() if damaged else end

    def reach(self) -> int:
        """Return the end offset of the last segment, whole group or not."""
        last = (self.segments() or [0])[-1]
        return last + (self._storage.size(self._path(last)) or 0)

    def grown(self, offset: int) -> bool:
        """
        Return whether there may be more after the offset at which groups ended.

        This takes two looks at the storage, however many segments there are, as the
        next segment is named by the offset at which the last one ends.
        """
        if self._last is None:
            return True
        size = self._storage.size(self._path(self._last))
        if size is None or self._last + size != offset:
            return True
        return self._storage.size(self._path(offset)) is not None

    def appended(self) -> int:
        """Return the approximate end offset, as this process has last seen it."""
        return self.end() if self._tail is None else self._tail[1]

    def size(self) -> int:
        """Return the total size of the segments, in bytes."""
        return sum(self._storage.size(self._path(one)) or 0 for one in self.segments())

    def append(self, now: int, *data: bytes) -> tuple[int, int]:
        """
        Append bytes as a group, and return their begin and end offsets.

        The caller holds the lock.

        Args:
            now: The time in nanoseconds since 1970.
            data: Whole frames, in pieces.

        Raises:
            OSError: If the bytes can't be written; none of them can be read then.

        """
        size, crc = 0, 0
        for piece in data:
            size += len(piece)
            crc = crc32(piece, crc)
        if size > MAX_GROUP:
            raise ValueError(
                f"{self.name}: can't append {size} bytes at once, expected no"
                f" more than {MAX_GROUP}"
            )
        segment, begin, last = self._recovered()
        self.rolled = begin - segment >= self._segment
        if self.rolled:
            self._complete(segment)
            segment = begin
        time = max(now, last)
        head = _SHAPE.pack(_MAGIC, size, begin, time, crc)
        head += struct.pack("<I", crc32(head))
        path = self._path(segment)
        try:
            self._storage.append(path, head, *data)
        except BaseException:
            self._tail = None
            with suppress(OSError):  # else the next append cuts it
                self._storage.truncate(path, begin - segment)
            raise
        end = begin + HEAD + size
        self._tail = segment, end, time
        return begin + HEAD, end

    def sync(self) -> None:
        """Make appended bytes durable, so that they outlive a machine crash."""
        # Also if the last append has failed, as earlier ones have not.
        last = self.segments()[-1:] if self._tail is None else [self._tail[0]]
        for segment in last:
            self._storage.sync(self._path(segment))

    def secure(self, offset: int) -> None:
        """
        Make all bytes before an offset durable, whichever process appended them.

        A reader's position must not outlive the bytes that it has read. Otherwise the
        reader would miss what is appended in their place.
        """
        segments = self.segments()
        if segments and offset > segments[-1]:
            self._storage.sync(self._path(segments[-1]))

    def peek(self, offset: int, size: int) -> bytes:
        """Return bytes from an offset on, or fewer at the end of its segment."""
        segments = self.segments()
        segment = segments[bisect_right(segments, offset) - 1]
        return self._storage.read(self._path(segment), offset - segment, size)

    def groups(
        self, offset: int, *, skip: bool = False, heads: bool = False
    ) -> Iterator[Group]:
        """
        Iterate over whole groups, from the one that holds ``offset``, up to the last.

        Args:
            offset: Where to begin.
            skip: Whether to skip damage, to the next group that is whole.
            heads: Whether to read only heads. The data of a large group is then neither
                read nor verified.

        Raises:
            OffsetGone: If that offset was dropped.
            JournalDamaged: If a group is not what was written.

        """
        segments = self.segments()
        if not segments:
            return
        self._last = segments[-1]
        if offset < segments[0]:
            raise OffsetGone(self.name, offset, segments[0])
        at = bisect_right(segments, offset) - 1
        segments = segments[at:]
        for segment, following in zip(segments, [*segments[1:], None], strict=True):
            start = self._known(segment, offset)
            # Damage before the offset was reported when those bytes were read.
            passed = (1 << 64) if skip else offset
            wanted = (1 << 64) if heads else offset
            for group in self._whole(segment, start, following, passed, wanted):
                if group.end > offset:
                    offset = group.end
                    yield group
            complete = following is not None
            gone = complete and self._storage.size(self._path(segment)) is None
            if gone and offset < (first := self.first()):
                # The segment was dropped while it was read: there would be a gap.
                raise OffsetGone(self.name, offset, first)

    def at_time(self, time: int) -> int:
        """Return the offset of the first group that was appended at a time or later."""
        segments = self.segments()
        low, high = 0, len(segments)
        while low < high:
            middle = (low + high) // 2
            found = self._time_at(segments[middle], segments[middle])
            if found is None or found >= time:
                high = middle
            else:
                low = middle + 1
        for segment in segments[max(low - 1, 0) :]:
            start = self._before(segment, time)
            for group in self._whole(segment, start, None, 1 << 64, 1 << 64):
                if group.time >= time:
                    return group.begin
        return self.end()

    def age_of(self, segment: int) -> int | None:
        """Return the time of a segment's first group, or None if it is unreadable."""
        return self._time_at(segment, segment)

    def drop(self, before: int) -> list[int]:
        """Remove the segments that end at ``before`` or sooner, but never the last."""
        segments = self.segments()
        gone = [one for one, following in pairwise(segments) if following <= before]
        for segment in gone:
            self._storage.remove(self._path(segment))
            self._marks.pop(segment, None)
        return gone

    def _path(self, segment: int) -> str:
        return f"{self._folder}/{segment:020}.log"

    def _recovered(self) -> tuple[int, int, int]:
        """Return the last segment, the end and the time; cut an incomplete group."""
        storage = self._storage
        if self._tail is not None:
            segment, end, time = self._tail
            if (
                storage.size(self._path(segment)) == end - segment
                and storage.size(self._path(end)) is None
            ):
                return self._tail
        segments = self.segments()
        if not segments:
            return 0, 0, 0
        segment = segments[-1]
        end, time, damaged = self._scan(segment, segment)
        if damaged or end == segment:
            time = self._last_time(segments)
        size = segment + (storage.size(self._path(segment)) or 0)
        if damaged:
            # Start a new segment after the damage, so that readers find what follows.
            self._complete(segment)
            return size, size, time
        if size > end:
            storage.truncate(self._path(segment), end - segment)
        return segment, end, time

    def _complete(self, segment: int) -> None:
        """Sync a segment that is complete, so that only the last can lose bytes."""
        self._storage.sync(self._path(segment))

    def _scan(self, segment: int, start: int) -> tuple[int, int, bool]:
        """Return a segment's last whole group's end and time, and if damage follows."""
        end, time = start, 0
        try:
            for group in self._whole(segment, start, None, start):
                end, time = group.end, group.time
        except JournalDamaged:
            return end, time, True
        return end, time, False

    def _last_time(self, segments: list[int]) -> int:
        """Return the time of the last group whose head is sound."""
        time = 0
        for segment in reversed(segments):
            for group in self._whole(segment, segment, None, 1 << 64, 1 << 64):
                time = group.time
            if time:
                break
        return time

    def _time_at(self, segment: int, offset: int) -> int | None:
        """Return the time of the group that begins at an offset, if one does."""
        head = self._storage.read(self._path(segment), offset - segment, HEAD)
        if len(head) < HEAD:
            return None
        try:
            return _parsed(head, offset)[1]
        except _Bad:
            return None

    def _before(self, segment: int, time: int) -> int:
        """
        Return the begin of a group that is before a time, or else of the segment.

        A head contains its own offset, so the next head can be found from any place.
        Hence the bisection needs no index, which could be lost or belong to another
        journal.
        """
        low, high = segment, segment + (self._storage.size(self._path(segment)) or 0)
        while high - low > _MARK:
            middle = (low + high) // 2
            found = self._next_head(segment, middle, within=_LARGE)
            if found is None:
                break  # groups are large: there are few heads
            if (self._time_at(segment, found) or 0) < time:
                low = found
            else:
                high = middle
        return low

    def _known(self, segment: int, offset: int) -> int:
        """Return a known begin of a group at or before ``offset``."""
        marks = self._marks.get(segment, [])
        at = bisect_right(marks, offset)
        return marks[at - 1] if at else segment

    def _mark(self, segment: int, begin: int) -> None:
        marks = self._marks.setdefault(segment, [])
        if not marks or begin >= marks[-1] + _MARK:
            marks.append(begin)

    def _whole(
        self,
        segment: int,
        start: int,
        following: int | None,
        passed: int,
        wanted: int = 0,
    ) -> Iterator[Group]:
        """
        Iterate over the groups of a segment, from the one that begins at ``start``.

        The segment is complete if another one is ``following``, and ends where that
        begins. Damage that ends at or before the offset ``passed`` is skipped. Of large
        groups that end at or before the offset ``wanted`` only the head is read.
        """
        path, at = self._path(segment), start
        read = self._storage.read
        # If only heads are wanted, read little until a group turns out to be small.
        size = _LARGE + 1 if start < wanted else 0
        held, held_at = b"", start
        # The last group that was not sound: its place, its head, checksum of its data.
        bad: tuple[int, bytes, int] | None = None
        full = 0  # size of the segment before ``held`` was read
        while True:
            # ``held`` has the bytes that were read, from the offset ``held_at`` on.
            if len(held) - (at - held_at) < HEAD:
                # Another large group is likely to follow, whose data is read by itself.
                ahead = _CHUNK
                if size > _LARGE:
                    ahead = HEAD if at >= wanted else _AHEAD
                if at < wanted:
                    # If a head is of an incomplete group, the size must not be that of
                    # what replaces the group.
                    full = self._storage.size(path) or 0
                held, held_at = read(path, at - segment, ahead), at
                if len(held) < HEAD:
                    break
            place = at - held_at
            head, data = held[place : place + HEAD], b""
            try:
                size, time, crc = _parsed(head, at)
                place += HEAD
                end = at + HEAD + size
                whole = len(held) - place >= size
                if whole or end <= wanted:
                    data = held[place : place + size]
                if end <= wanted:
                    if whole:
                        # A damaged acknowledgement would commit something else.
                        _check(data, crc)
                    elif full < end - segment:
                        break
                else:
                    if not whole:
                        data = read(path, at + HEAD - segment, size)
                    if len(data) < size:
                        break
                    _check(data, crc)
            except _Bad as error:
                if (seen := (at, head, crc32(data))) != bad:
                    # These may be bytes of an incomplete group, which is being replaced
                    # or was replaced since they were read: read them again.
                    bad, held, held_at = seen, b"", at
                    continue
                found = self._next_head(segment, at + 1)
                over = found or segment + (self._storage.size(path) or 0)
                if at >= passed or over > passed:
                    raise self._damaged(segment, at, str(error)) from None
                if found is None:
                    return
                at, held, held_at = found, b"", found
                continue
            self._mark(segment, at)
            yield Group(at, end, time, data)
            at = end
        if following is None or at < passed:
            return
        if held:
            raise self._damaged(segment, at, "it ends within a group")
        # A segment that was dropped meanwhile has no end.
        if at < following and self._storage.size(path) is not None:
            raise self._damaged(
                segment,
                at,
                f"it ends before offset {following}, where the next one begins",
            )

    def _next_head(
        self, segment: int, start: int, *, within: int | None = None
    ) -> int | None:
        """Return the begin of the next sound head, at most ``within`` bytes on."""
        path, at = self._path(segment), start
        while held := self._storage.read(path, at - segment, within or _CHUNK):
            place = held.find(_MAGIC)
            while place >= 0:
                head = held[place : place + HEAD]
                if len(head) < HEAD:
                    break
                try:
                    _parsed(head, at + place)
                except _Bad:
                    place = held.find(_MAGIC, place + 1)
                else:
                    return at + place
            if within is not None or len(held) < _CHUNK:
                return None
            # A head may straddle the end of what was read.
            at += len(held) - HEAD
        return None

    def _damaged(self, segment: int, at: int, why: str) -> JournalDamaged:
        return JournalDamaged(self.name, f"{segment:020}.log", at, why)


def _check(data: bytes, crc: int) -> None:
    if crc32(data) != crc:
        raise _Bad("its bytes are not what was written")


def _parsed(head: bytes, at: int) -> tuple[int, int, int]:
    """Return size, time and checksum."""
    (own,) = struct.unpack_from("<I", head, _SHAPE.size)
    magic, size, begin, time, crc = _SHAPE.unpack_from(head)
    if magic != _MAGIC or own != crc32(head[: _SHAPE.size]):
        raise _Bad("its head is not what was written")
    if begin != at:
        raise _Bad(f"its head has offset {begin}")
    if size > MAX_GROUP:
        raise _Bad(
            f"its head has a size of {size} bytes, expected no more than {MAX_GROUP}"
        )
    return size, time, crc
