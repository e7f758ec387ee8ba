"""
Boundaries in bulk, in Arrow: no Python object for a message.

Does what ``framing.py`` does, for messages that are an Arrow array. Where a message
needs a closer look, because it contains a marker or a reply is broken, ``framing.py``
is asked to take it: what it says about lists holds here too.

No worker imports this module; it is the only one of the core that imports PyArrow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, cast, overload

import pyarrow as pa
import pyarrow.compute as pc

from etlstage.messages import Run
from etlstage.protocol.marker import framing
from etlstage.protocol.marker.markers import Markers

__all__ = ("COLUMNS", "Column", "Replies", "encode_column", "split_column")


class Column(Sequence[bytes]):
    """
    Messages that are one Arrow array.

    Args:
        array: Binary, without nulls.

    """

    __slots__ = ("array",)

    def __init__(self, array: pa.BinaryArray) -> None:
        self.array = array

    def __repr__(self) -> str:
        return f"<Column messages={len(self)} bytes={self.size}>"

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> Column: ...
    def __getitem__(self, at: int | slice) -> bytes | Column:
        if isinstance(at, slice):
            return Column(self.array[at])
        return bytes(self.array[at].as_py())

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.array.to_pylist())

    @property
    def size(self) -> int:
        """Bytes of the messages."""
        return _extent(self.array)

    @property
    def longest(self) -> int:
        """Bytes of the longest message, or 0."""
        return pc.max(pc.binary_length(self.array)).as_py() or 0


class Replies(Sequence[tuple[bytes, ...]]):
    """
    Replies whose messages are one Arrow array.

    Args:
        values: The messages of all replies, binary.
        offsets: Where in ``values`` each reply begins, and where the last one ends;
            None says that each is one message.

    """

    __slots__ = ("_offsets", "_values")

    def __init__(
        self, values: pa.BinaryArray, offsets: pa.Int32Array | None = None
    ) -> None:
        self._values = values
        self._offsets = offsets

    def __repr__(self) -> str:
        return f"<Replies replies={len(self)} messages={len(self.values)}>"

    def __len__(self) -> int:
        if self._offsets is None:
            return len(self._values)
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, at: int) -> tuple[bytes, ...]: ...
    @overload
    def __getitem__(self, at: slice) -> Replies: ...
    def __getitem__(self, at: int | slice) -> tuple[bytes, ...] | Replies:
        if not isinstance(at, slice):
            at = range(len(self))[at]
            return tuple(self[at : at + 1].values.to_pylist())
        start, stop, step = at.indices(len(self))
        assert step == 1, "replies are taken in order"
        count = max(0, stop - start)
        if self._offsets is None:
            return Replies(self._values.slice(start, count))
        return Replies(self._values, self._offsets.slice(start, count + 1))

    @classmethod
    def of(cls, groups: Sequence[tuple[bytes, ...]]) -> Replies:
        """Return ``groups``, a list where a closer look was needed, as Arrow."""
        if isinstance(groups, Replies):
            return groups
        messages = [message for group in groups for message in group]
        ends = pc.cumulative_sum(pa.array(map(len, groups), pa.int32()))
        return cls(pa.array(messages, pa.binary()), _from_zero(ends))

    @property
    def values(self) -> pa.BinaryArray:
        """The messages of all replies, in order."""
        if self._offsets is None:
            return self._values
        first, last = self._offsets[0].as_py(), self._offsets[-1].as_py()
        return self._values.slice(first, last - first)

    @property
    def owners(self) -> pa.Int64Array | None:
        """For each of the values, the number of its reply; None if that is its own."""
        if self._offsets is None:
            return None
        lists = pa.ListArray.from_arrays(self._offsets, self._values)
        return pc.list_parent_indices(lists)


def encode_column(messages: Run | Column, markers: Markers, *, limit: int) -> bytes:
    """Do as :func:`~etlstage.protocol.marker.framing.encode_run`, in bulk."""
    if not isinstance(messages, Column):
        return framing.encode_run(messages, markers, limit=limit)
    wire = _joined_by(messages.array, markers.eom)
    if not _clean(wire, messages, markers) or (
        len(wire) > limit and messages.longest > limit
    ):
        # It knows what to say, and refuses.
        return framing.encode_run(list(messages), markers, limit=limit)
    return wire


def split_column(
    data: bytes, markers: Markers
) -> tuple[Replies | list[tuple[bytes, ...]], bytes]:
    """
    Do as :func:`~etlstage.protocol.marker.framing.split_groups`, in bulk.

    Raises:
        Unterminated: If an EOP follows a message that has no EOM.

    """
    eom, eop = markers.eom, markers.eop
    end = _end_of_last(data, eop)
    if not end:
        return [], data
    if eop == eom:
        return Replies(_split(data[:end], eom)), data[end:]
    values = _split(data[:end], eom + eop)
    body = _content(values)
    # One to one, if that is all there is of them. To search for what is not there is
    # a fraction of the cost of counting what is.
    if (
        len(body) + len(values) * len(eom + eop) == end
        and eom not in body
        and eop not in body
    ):
        return Replies(values), data[end:]
    parts = _split(data[:end], eop)
    counts = pc.count_substring(parts, eom)
    body = _content(parts)
    values = _split(body, eom)
    # Each part that is not empty must end as a message does, and no EOM may lie
    # across two of them, or be read in two ways.
    sound = (
        not _overlaps_itself(eom)
        and len(values) * len(eom) + _extent(values) == len(body)
        and pc.all(
            pc.or_(pc.ends_with(parts, eom), pc.equal(pc.binary_length(parts), 0))
        ).as_py()
    )
    if not sound:
        return framing.split_groups(data, markers)
    ends = pc.cumulative_sum(counts.cast(pa.int32()))
    return Replies(values, _from_zero(ends)), data[end:]


def _joined(groups: Sequence[tuple[bytes, ...]]) -> Run:
    return cast("Run", Column(Replies.of(groups).values))


COLUMNS: Final = framing.Framing(encode_column, cast("Any", split_column), _joined)
"""Messages are a :class:`Column`, and replies to them :class:`Replies`, or lists where
a closer look was needed. Both are sequences, which is all that single mode asks for."""


def _clean(wire: bytes, messages: Column, markers: Markers) -> bool:
    eom = markers.eom
    if len(eom) == 1:
        sound = eom not in _content(messages.array)
    else:
        # A message that ends as EOM begins moves the boundary without adding one.
        sound = not len(messages) or _split(wire, eom).equals(messages.array)
    return (
        sound
        and (markers.eop == eom or markers.eop not in wire)
        and markers.eob not in wire
        and markers.bnc not in wire
    )


def _joined_by(array: pa.BinaryArray, marker: bytes) -> bytes:
    """Return the bytes of all elements, ``marker`` behind each."""
    if not len(array):
        return b""
    bounds = pa.array([0, len(array)], pa.int32())
    joined = pc.binary_join(pa.ListArray.from_arrays(bounds, array), marker)
    return b"".join((joined[0].as_buffer(), marker))


def _split(data: bytes, marker: bytes) -> pa.BinaryArray:
    """Return what ``marker`` ends, and leave out what comes behind the last one."""
    bounds = pa.array([0, len(data)], pa.int32()).buffers()[1]
    whole = pa.Array.from_buffers(pa.binary(), 1, [None, bounds, pa.py_buffer(data)])
    pieces = pc.split_pattern(whole, pattern=marker).values
    return pieces.slice(0, len(pieces) - 1)


def _end_of_last(data: bytes, marker: bytes) -> int:
    """Return where the last ``marker`` ends, counted from the left, or 0."""
    end = data.rfind(marker) + len(marker)
    if end < len(marker):
        return 0
    if _overlaps_itself(marker):
        # From the left, the last one may begin earlier than from the right.
        *_, rest = data.split(marker)
        return len(data) - len(rest)
    return end


def _overlaps_itself(marker: bytes) -> bool:
    return any(marker.startswith(marker[n:]) for n in range(1, len(marker)))


def _extent(array: pa.BinaryArray) -> int:
    """Return how many bytes the elements have."""
    first, last = _bounds(array)
    return last - first


def _bounds(array: pa.BinaryArray) -> tuple[int, int]:
    """Return where in its buffer the first element begins, and the last one ends."""
    if not len(array):
        return 0, 0
    offsets = memoryview(array.buffers()[1]).cast("i")
    return offsets[array.offset], offsets[array.offset + len(array)]


def _content(array: pa.BinaryArray) -> bytes:
    """Return the bytes of all elements, one behind the other."""
    if not len(array):
        return b""
    first, last = _bounds(array)
    data = array.buffers()[2]
    return b"" if data is None else data.slice(first, last - first).to_pybytes()


def _from_zero(ends: pa.Int32Array) -> pa.Int32Array:
    return pa.concat_arrays([pa.array([0], pa.int32()), ends.cast(pa.int32())])
