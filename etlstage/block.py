"""
Blocks of messages on a disk: the one format of all files of messages.

A file is a sequence of blocks. A block is a head of 32 bytes and an Arrow stream of one
record batch: its first column holds messages, other columns hold data about them. The
head holds the number of messages, the number of the first message in the file, and the
checksums, the head's own last. So the number of a message identifies it as long as the
file exists, and all whole blocks can be read from a file whose end was never written. A
whole block that is not what was written raises an error that names it.

::

    "ETB1"  messages: u32  bytes: u64  first: u64  crc of the bytes: u32  of the head: u32

Numbers are little-endian. A checksum of 0 means none: the block is part of something
that has a checksum of all its bytes, and a second one would be half of the cost of a
journal. Executors write blocks without having this package: the function that makes a
block is sent to them by value.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple
from zlib import crc32

import pyarrow as pa

from etlstage.columns import Column, array_of
from etlstage.errors import BlockDamaged
from etlstage.messages import Run, plain

__all__ = ("BLOCK_HEAD", "Block", "Blocks", "block_head", "block_of", "making")

_MAGIC: Final = b"ETB1"
_HEAD: Final = "<4sIQQI"
BLOCK_HEAD: Final = struct.calcsize(_HEAD) + 4
"""Bytes of a block's head."""


class Block(NamedTuple):
    """Consecutive messages of a file."""

    first: int
    """The number of the first of them in the file, counted from 0."""
    batch: pa.RecordBatch

    @property
    def messages(self) -> Column:
        """The messages."""
        return Column(self.batch.column(0))


def making(*, summed: bool = True) -> Callable[[pa.RecordBatch, int], list[bytes]]:
    """
    Return the function that makes a block of a batch, in parts to be written in turn.

    Its arguments are the batch, whose first column is binary, and the number of its
    first message in the file.

    Args:
        summed: Whether there is a checksum of the messages.

    """
    magic, shape = _MAGIC, _HEAD

    def make(batch: pa.RecordBatch, first: int) -> list[bytes]:
        import struct
        from zlib import crc32

        import pyarrow as pa

        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_batch(batch)
        body = sink.getvalue()
        crc = crc32(body) if summed else 0
        head = struct.pack(shape, magic, batch.num_rows, len(body), first, crc)
        return [head + struct.pack("<I", crc32(head)), body]

    return make


_made: Final = making()
_unsummed: Final = making(summed=False)


def block_of(run: Run, first: int, *, summed: bool = True) -> list[bytes]:
    """Return the block of some messages; arguments as for :func:`making`."""
    run = plain(run)
    array = run.array if isinstance(run, Column) else array_of(run, pa.binary())
    made = _made if summed else _unsummed
    return made(pa.record_batch([array], ["message"]), first)


def block_head(head: bytes | memoryview) -> tuple[int, int, int, int]:
    """Return messages, bytes, first and checksum; raises ValueError if damaged."""
    (crc,) = struct.unpack("<I", head[-4:])
    magic, count, size, first, sum_ = struct.unpack(_HEAD, head[:-4])
    if magic != _MAGIC or crc != crc32(head[:-4]):
        raise ValueError("its header is not valid")
    return count, size, first, sum_


class Blocks:
    """
    Iterates over the blocks of a file, one in memory at a time.

    Args:
        read: Reads that many bytes from the file's current position, fewer at its end.
        name: Name of the file, for errors.
        start: The file's current position, in bytes.
        first: The number of the next message, if it is known.

    Attributes:
        end: Where the last whole block ends, in bytes: what follows was never written
            completely, and has to be cut off before more is appended.
        messages: The number that the next message has.

    Raises:
        BlockDamaged: While iterating, if a block is not what was written.

    """

    def __init__(
        self,
        read: Callable[[int], bytes | memoryview],
        *,
        name: str,
        start: int = 0,
        first: int | None = 0,
    ) -> None:
        self._read = read
        self._name = name
        self._first = first
        self.end: int = start
        self.messages: int = first or 0

    def __iter__(self) -> Iterator[Block]:
        while (block := self._next()) is not None:
            yield block

    def _next(self) -> Block | None:
        head = self._read(BLOCK_HEAD)
        if len(head) < BLOCK_HEAD:
            return None
        try:
            count, size, first, sum_ = block_head(head)
        except ValueError as error:
            raise self._damaged(str(error)) from None
        if self._first is not None and first != self.messages:
            raise self._damaged(f"it begins with message {first} instead")
        body = self._read(size)
        if len(body) < size:
            return None
        if sum_ and crc32(body) != sum_:
            raise self._damaged(f"its {count} messages fail their checksum", first)
        with pa.ipc.open_stream(body) as stream:
            batch = stream.read_next_batch()
        self.end += BLOCK_HEAD + size
        self._first = self.messages = first + count
        return Block(first, batch)

    def _damaged(self, why: str, first: int | None = None) -> BlockDamaged:
        number = self.messages if first is None else first
        return BlockDamaged(
            f"{self._name}: the block at byte {self.end}, of message {number} and those"
            f" that follow, is damaged: {why}"
        )
