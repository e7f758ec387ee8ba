"""
Messages that are held in Arrow, without a Python object for each of them.

A :class:`Column` is a run of messages, :class:`Replies` are the replies to one. Both
are sequences, so code that does not know them can still work with them.

No worker imports this module.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Final, overload
from zlib import crc32

import pyarrow as pa
import pyarrow.compute as pc

from etlstage import speedups
from etlstage.messages import Groups, Packed, Run

__all__ = (
    "OVERHEAD",
    "Column",
    "Epoch",
    "Replies",
    "array_of",
    "content",
    "extent",
    "from_zero",
    "one_of",
    "strings_of",
)

_CHUNK: Final = 8192
_SPARED: Final = 500_000
"""Number of values that Python converts in the time it takes to import pandas."""
_CODES: Final = {pa.int32(): "i", pa.int64(): "q", pa.float64(): "d"}
_OF: Final = {pa.int32(): int, pa.int64(): int, pa.float64(): float, pa.bool_(): bool}
_KINDS: Final = {bytes: pa.binary(), str: pa.string(), int: pa.int64()}
OVERHEAD: Final = 8
"""Bytes of memory that a message in Arrow takes besides its own, for the offset of its
end and the number of its reply."""


class Column(Packed):
    """
    Messages that are one Arrow array.

    Args:
        array: Binary, without nulls.

    """

    __slots__ = ("array",)

    def __init__(self, array: pa.BinaryArray) -> None:
        self.array: pa.BinaryArray = array

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

    def __add__(self, other: Column) -> Column:
        return Column.joined([self, other])

    @classmethod
    def joined(cls, columns: Iterable[Column]) -> Column:
        """Return the messages of several columns, one after the other."""
        return cls(pa.concat_arrays([column.array for column in columns]))

    @property
    def size(self) -> int:
        """Bytes of the messages."""
        return extent(self.array)

    def fingerprint(self, before: tuple[int, int]) -> tuple[int, int]:
        """Return a checksum of these messages that continues the one before them."""
        if not len(self):
            return before
        sizes = pc.binary_length(self.array).buffers()[1].slice(0, 4 * len(self))
        return crc32(sizes, before[0]), crc32(content(self.array), before[1])

    @property
    def cost(self) -> int:
        """Bytes of memory that they take."""
        return self.size + OVERHEAD * len(self)

    @property
    def problem(self) -> str | None:
        """Why the array does not hold messages, or None."""
        if self.array.type != pa.binary():
            return f"expected an Arrow array of binary, got {self.array.type}"
        if self.array.null_count:
            return f"message is null in {self.array.null_count} of {len(self)}"
        return None

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
            None: each reply is one message.

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
    def of(cls, groups: Groups) -> Replies:
        """Return ``groups`` as Arrow; they are a list where the fast path failed."""
        if isinstance(groups, Replies):
            return groups
        messages = [message for group in groups for message in group]
        ends = pc.cumulative_sum(array_of([*map(len, groups)], pa.int32()))
        return cls(array_of(messages, pa.binary()), from_zero(ends))

    def emptied(self, places: Sequence[int]) -> Replies:
        """Return the replies with some emptied, each of which has one message."""
        kept = bytearray(b"\1" * len(self._values))
        offsets = self._offsets
        first = array_of(places, pa.int64())
        if offsets is not None:
            first = offsets.take(first)
        for place in first.to_pylist():
            kept[place] = 0
        buffers = [None, pa.py_buffer(kept)]
        mask = pa.Array.from_buffers(pa.uint8(), len(kept), buffers)
        before = from_zero(pc.cumulative_sum(mask.cast(pa.int32())))
        values = self._values.filter(mask.cast(pa.bool_()))
        return Replies(values, before if offsets is None else before.take(offsets))

    @property
    def messages(self) -> Column:
        """The messages of all replies, in order."""
        return Column(self.values)

    @property
    def values(self) -> pa.BinaryArray:
        """The messages of all replies, in order."""
        if self._offsets is None:
            return self._values
        first, last = self._offsets[0].as_py(), self._offsets[-1].as_py()
        return self._values.slice(first, last - first)

    @property
    def owners(self) -> pa.Int64Array | None:
        """The number of each value's reply; None: it is the value's own number."""
        if self._offsets is None:
            return None
        lists = pa.ListArray.from_arrays(self._offsets, self._values)
        return pc.list_parent_indices(lists)


class Epoch:
    """
    Messages that are loaded together, in load order.

    A list of bytes takes three times the size of its messages; Arrow takes four bytes
    more for each message.

    Attributes:
        messages: Number of messages.
        size: Number of bytes in the messages.

    """

    def __init__(self) -> None:
        self.messages: int = 0
        self.size: int = 0
        self._pending: list[bytes] = []
        self._chunks: list[pa.Array] = []

    def add(self, run: Run, size: int) -> None:
        """Add ``run``, whose messages have ``size`` bytes."""
        self.messages += len(run)
        self.size += size
        if isinstance(run, Column) and len(run) >= _CHUNK // 16:
            self._settle()
            self._chunks.append(run.array)
            return
        self._pending += run
        # Runs may be as small as one message: a chunk for each would cost more.
        if len(self._pending) >= _CHUNK or size >= _CHUNK * 16:
            self._settle()

    def binary(self) -> pa.ChunkedArray:
        """Return the messages as they are."""
        self._settle()
        return pa.chunked_array(self._chunks, pa.binary())

    def strings(self) -> pa.ChunkedArray:
        """Return the messages as strings, null in place of those not in UTF-8."""
        chunks = [strings_of(chunk) for chunk in self.binary().chunks]
        return pa.chunked_array(chunks, pa.string())

    def _settle(self) -> None:
        if self._pending:
            self._chunks.append(array_of(self._pending, pa.binary()))
            self._pending = []


def strings_of(values: pa.BinaryArray) -> pa.StringArray:
    """Return values as text, null where one is not UTF-8."""
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        return array_of([*map(_text, values.to_pylist())], pa.string())


def _text(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def array_of(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return values as an Arrow array: bytes, text, or any other type of Arrow's."""
    is_text = kind in (pa.binary(), pa.string())
    if is_text and (bounds := _bounds_of(values)) is not None:
        return _made(kind, len(values), None, bounds, b"".join(values))
    # pa.array would import pandas, if installed, to check whether they are a Series.
    _Spared.count += len(values)
    if _Spared.count > _SPARED:
        return pa.array(values, kind)
    if is_text:
        data = [v.encode() if isinstance(v, str) else v or b"" for v in values]
        bounds = array("i", accumulate(map(len, data), initial=0))
        return _made(kind, len(data), _present(values), bounds, b"".join(data))
    of = _OF.get(kind)
    if of is None or not {*map(type, values)} <= {of, type(None)}:
        return pa.array(values, kind)
    if kind == pa.bool_():
        return _made(kind, len(values), _present(values), _bits(values))
    try:
        numbers = array(_CODES[kind], [0 if v is None else v for v in values])
    except OverflowError:
        return pa.array(values, kind)  # which raises Arrow's own error
    return _made(kind, len(values), _present(values), numbers)


class _Spared:
    """Counts the values that were converted without importing pandas."""

    count = 0


def _bounds_of(values: Sequence[Any]) -> Any:  # noqa: ANN401 - None, or a buffer
    compiled = speedups.compiled
    if compiled is None or not isinstance(values, list):
        return None
    return compiled.bounds(values)


def _made(kind: pa.DataType, count: int, *buffers: Any) -> pa.Array:  # noqa: ANN401 - or None
    made = [None if one is None else pa.py_buffer(one) for one in buffers]
    return pa.Array.from_buffers(kind, count, made)


def _present(values: Sequence[object]) -> bytearray | None:
    """Return a bitmap of the values that are not None; None: all are."""
    return _bits([v is not None for v in values]) if None in values else None


def _bits(values: Sequence[bool | None]) -> bytearray:
    """Return a bit for each value."""
    bits = bytearray(-(-len(values) // 8))
    for n, value in enumerate(values):
        bits[n >> 3] |= bool(value) << (n & 7)
    return bits


def one_of(value: bytes | str | int) -> pa.Scalar:
    """Return a value as an Arrow scalar; see :func:`array_of`."""
    return array_of([value], _KINDS[type(value)])[0]


def extent(array: pa.BinaryArray) -> int:
    """Return how many bytes the elements have."""
    first, last = _bounds(array)
    return last - first


def _bounds(array: pa.BinaryArray) -> tuple[int, int]:
    """Return where in its buffer the first element begins, and the last one ends."""
    if not len(array):
        return 0, 0
    offsets = memoryview(array.buffers()[1]).cast("i")
    return offsets[array.offset], offsets[array.offset + len(array)]


def content(array: pa.BinaryArray) -> bytes:
    """Return the bytes of all elements, one after the other."""
    if not len(array):
        return b""
    first, last = _bounds(array)
    data = array.buffers()[2]
    return b"" if data is None else data.slice(first, last - first).to_pybytes()


def from_zero(ends: pa.Int32Array) -> pa.Int32Array:
    """Return the offsets of consecutive pieces, from 0 on, given where each ends."""
    return pa.concat_arrays([array_of([0], pa.int32()), ends.cast(pa.int32())])
