"""
Aggregated records: several that the producer library (KPL) has put as one.

An aggregated record is four magic bytes, a protobuf message, and the MD5 of that.
Anything else is an ordinary record, as its data may begin with the same four bytes by
chance.

Only keys and data are read here::

    message AggregatedRecord {
      repeated string partition_key_table     = 1;
      repeated string explicit_hash_key_table = 2;
      repeated Record records                 = 3;
    }
    message Record {
      required uint64 partition_key_index     = 1;
      optional uint64 explicit_hash_key_index = 2;
      required bytes  data                    = 3;
      repeated Tag    tags                    = 4;
    }

The client library drops records that belong to another shard by their hash key, as its
own producer puts them again. Other producers don't, so such records are kept here.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import md5
from typing import Final

__all__ = ("MAGIC", "split")

MAGIC: Final = b"\xf3\x89\x9a\xc2"
_DIGEST: Final = 16  # bytes
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types


def split(data: bytes) -> list[tuple[bytes, str]] | None:
    """Return data and partition key of each inner record; None: not aggregated."""
    if not data.startswith(MAGIC) or len(data) <= len(MAGIC) + _DIGEST:
        return None
    message, digest = data[len(MAGIC) : -_DIGEST], data[-_DIGEST:]
    if md5(message, usedforsecurity=False).digest() != digest:
        return None
    try:
        return _records(message)
    except (ValueError, IndexError):
        return None


def _records(message: bytes) -> list[tuple[bytes, str]]:
    keys: list[str] = []
    records: list[bytes] = []
    for number, value in _fields(message):
        if isinstance(value, bytes) and number == 1:
            keys.append(value.decode())
        elif isinstance(value, bytes) and number == 3:
            records.append(value)
    return [_record(record, keys) for record in records]


def _record(message: bytes, keys: list[str]) -> tuple[bytes, str]:
    match dict(_fields(message)):
        case {1: int(index), 3: bytes(data)}:
            return data, keys[index]
        case _:
            raise ValueError("a field is missing")


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield tag >> 3, value
            continue
        if kind == _BYTES:
            size, at = _varint(message, at)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if at + size > len(message):
            raise ValueError("a field is cut off")
        yield tag >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return a number encoded with 7 bits per byte, and the index after it."""
    value = 0
    for place in range(10):
        byte = message[at + place]
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise ValueError("a number has no end")
