"""
Mappings of messages to journals.

A mapping is any function that returns a journal and its content type for a message;
here are three. A key function writes a message's key into a hasher, FNV-1a of 32 bits.
The partitions are requested for each message. As long as the result is the same object,
the hashes of their names are kept.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from etlstage.errors import EtlstageError
from etlstage.sequencing.message import JournalSpec

__all__ = (
    "EmptyListResponse",
    "Fnv1a",
    "Mapping",
    "MappingKey",
    "Partitions",
    "Unbound",
    "fnv1a32",
    "modulo",
    "random",
    "rendezvous",
)

Mapping: TypeAlias = Callable[[Any], tuple[str, str]]
"""Returns the journal of a message, and its content type."""
Partitions: TypeAlias = Callable[[], Sequence[JournalSpec]]
"""Returns the journals to select from; the same object as long as they are the same."""


class EmptyListResponse(EtlstageError):
    """Raised when there is no journal to select; there may be one later."""

    def __init__(self) -> None:
        super().__init__("empty ListResponse")


def fnv1a32(data: bytes, value: int = 2166136261) -> int:
    """Return the FNV-1a hash of 32 bits, continuing from ``value``."""
    for byte in data:
        value = (value ^ byte) * 16777619 & 0xFFFFFFFF
    return value


class Fnv1a:
    """An FNV-1a hash of the data written to it."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: int = fnv1a32(b"")

    def write(self, data: bytes) -> None:
        """Add ``data`` to the hash."""
        self.value = fnv1a32(data, self.value)


MappingKey: TypeAlias = Callable[[Any, Fnv1a], object]
"""Writes a message's key into the hasher."""


class Unbound(NamedTuple):
    """A mapping that a publisher binds to the journals of its appender."""

    make: Callable[[MappingKey, Partitions], Mapping]
    key: MappingKey

    def bind(self, partitions: Partitions) -> Mapping:
        """Return the mapping to the given journals."""
        return self.make(self.key, partitions)


def modulo(key: MappingKey, partitions: Partitions) -> Mapping:
    """Map a message by its key's hash, modulo the number of journals."""

    def map_(message: object) -> tuple[str, str]:
        journals = _some(partitions)
        return _target(journals[_hash(key, message) % len(journals)])

    return map_


def rendezvous(key: MappingKey, partitions: Partitions) -> Mapping:
    """
    Map a message to the journal whose name's hash matches its key's hash best.

    It takes longer than :func:`modulo`, but when journals are added or removed, only
    few messages change their journal.
    """
    # A pair that is replaced atomically, as several threads may use the mapping.
    known: tuple[Sequence[JournalSpec], list[int]] = ((), [])

    def map_(message: object) -> tuple[str, str]:
        nonlocal known
        journals = _some(partitions)
        of, hashes = known
        if of is not journals:
            hashes = [fnv1a32(one.name.encode()) for one in journals]
            known = journals, hashes
        value = _hash(key, message)
        # If several match equally well, the first one is taken.
        return _target(
            journals[max(range(len(hashes)), key=lambda n: value ^ hashes[n])]
        )

    return map_


def random(
    partitions: Partitions, *, choose: Callable[[int], int] = secrets.randbelow
) -> Mapping:
    """Map each message to any journal; ``choose(n)`` returns a number below ``n``."""

    def map_(message: object) -> tuple[str, str]:
        journals = _some(partitions)
        return _target(journals[choose(len(journals))])

    return map_


def _some(partitions: Partitions) -> Sequence[JournalSpec]:
    journals = partitions()
    if not journals:
        raise EmptyListResponse
    return journals


def _hash(key: MappingKey, message: object) -> int:
    hasher = Fnv1a()
    key(message, hasher)
    return hasher.value


def _target(journal: JournalSpec) -> tuple[str, str]:
    return journal.name, journal.content_type
