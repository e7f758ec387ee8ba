"""
Which journal a message goes to.

A mapping is any function that returns a journal and its content type for a message; here
are three. A key function writes what is to decide into a hasher, FNV-1a of 32 bits. The
partitions are asked for with each message: as long as the answer is the same object,
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
"""Returns the journals among which a mapping selects; the same object if it can."""


class EmptyListResponse(EtlstageError):
    """Raised when there is no journal to select; there may be one later."""

    def __init__(self) -> None:
        super().__init__("empty ListResponse")


def fnv1a32(data: bytes, value: int = 2166136261) -> int:
    """Return the FNV-1a hash of 32 bits, going on from ``value``."""
    for byte in data:
        value = (value ^ byte) * 16777619 & 0xFFFFFFFF
    return value


class Fnv1a:
    """Hashes what is written into it."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: int = fnv1a32(b"")

    def write(self, data: bytes) -> None:
        """Go on with ``data``."""
        self.value = fnv1a32(data, self.value)


MappingKey: TypeAlias = Callable[[Any, Fnv1a], object]
"""Writes a message's key into the hasher."""


class Unbound(NamedTuple):
    """A mapping whose journals are those of the publisher's appender."""

    make: Callable[[MappingKey, Partitions], Mapping]
    key: MappingKey

    def bind(self, partitions: Partitions) -> Mapping:
        """Return the mapping among some journals."""
        return self.make(self.key, partitions)


def modulo(key: MappingKey, partitions: Partitions) -> Mapping:
    """Map a message to the journal of its key's hash, modulo their number."""

    def map_(message: object) -> tuple[str, str]:
        journals = _some(partitions)
        return _target(journals[_hash(key, message) % len(journals)])

    return map_


def rendezvous(key: MappingKey, partitions: Partitions) -> Mapping:
    """
    Map a message to the journal whose name's hash fits its key's best.

    It takes longer than :func:`modulo`, and when journals are added or removed hardly
    any message changes its journal.
    """
    # A pair that is replaced at once: several threads may map.
    known: tuple[Sequence[JournalSpec], list[int]] = ((), [])

    def map_(message: object) -> tuple[str, str]:
        nonlocal known
        journals = _some(partitions)
        of, hashes = known
        if of is not journals:
            hashes = [fnv1a32(one.name.encode()) for one in journals]
            known = journals, hashes
        value = _hash(key, message)
        # Of several that fit as well the first is taken.
        return _target(
            journals[max(range(len(hashes)), key=lambda n: value ^ hashes[n])]
        )

    return map_


def random(
    partitions: Partitions, *, choose: Callable[[int], int] = secrets.randbelow
) -> Mapping:
    """Map each message to any journal; ``choose`` returns a number below another."""

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
