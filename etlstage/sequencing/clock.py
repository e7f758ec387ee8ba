"""
UUIDs of messages: the producer, the time, and the role in a transaction.

A UUID of version 1 (RFC 4122) has a clock, a clock sequence and a node. The node is the
producer. The upper four of the clock sequence's 14 bits extend the clock, and the lower
ten are flags. So the UUIDs of one producer are totally ordered by their clocks.
"""

from __future__ import annotations

import secrets
from enum import KEEP, IntFlag
from threading import Lock
from typing import Final
from uuid import UUID

__all__ = (
    "NO_UUID",
    "Clock",
    "Flags",
    "build_uuid",
    "clock_at",
    "clock_of",
    "flags_of",
    "new_producer_id",
    "parse_uuid",
    "producer_of",
    "seconds_of",
)

NO_UUID: Final = UUID(int=0)
"""UUID of messages that can't hold one; these are delivered at least once."""

_EPOCH: Final = 122192928000000000
"""1970 as the timestamp of a UUID: units of 100 ns since 1582-10-15."""
MAX_CLOCK: Final = (1 << 64) - 1
_MAX_FLAGS: Final = 0x3FF


class Flags(IntFlag, boundary=KEEP):
    """The role of a message in a transaction; other values count as OUTSIDE_TXN."""

    OUTSIDE_TXN = 0
    """In no transaction: committed by itself."""
    CONTINUE_TXN = 1
    """Begins or continues a transaction; an ACK_TXN of no earlier clock commits it."""
    ACK_TXN = 2
    """Commits messages up to its own clock, and rolls back those of larger clocks."""

    def __str__(self) -> str:
        if self.value > 2:
            return f"Flags({self.value:x})"
        return ("OUTSIDE_TXN", "CONTINUE_TXN", "ACK_TXN")[self.value]


class Clock:
    """
    A monotonic clock: 60 bits of timestamp, 4 bits of counter.

    It may be used from several threads.

    Args:
        value: The initial value.
        tick: How far one tick advances the clock: 160 is a microsecond, as in current
            releases of Gazette; 1 is a sixteenth of 100 ns, as in its documentation.

    """

    def __init__(self, value: int = 0, *, tick: int = 160) -> None:
        if not 0 <= value <= MAX_CLOCK:
            raise ValueError(f"a clock has 64 bits, got {value}")
        if tick < 1:
            raise ValueError(f"tick must be positive, got {tick}")
        self._value = value
        self._tick = tick
        self._lock = Lock()

    def __repr__(self) -> str:
        return f"<Clock {self._value}>"

    @property
    def value(self) -> int:
        """The current value."""
        return self._value

    def tick(self) -> int:
        """Advance the clock by one tick, and return the new value."""
        with self._lock:
            self._value = (self._value + self._tick) & MAX_CLOCK
            return self._value

    def untick(self, value: int) -> None:
        """Undo the tick that returned ``value``, unless the clock advanced since."""
        with self._lock:
            if self._value == value:
                self._value = (value - self._tick) & MAX_CLOCK

    def update(self, nanoseconds: int) -> None:
        """Advance the clock to a time in nanoseconds since 1970, unless it is ahead."""
        value = clock_at(nanoseconds)
        with self._lock:
            self._value = max(self._value, value)


def clock_at(nanoseconds: int) -> int:
    """Return the first clock value of a time, in nanoseconds since 1970."""
    # Go divides towards zero: before 1970 the result differs from that of ``//``.
    units = abs(nanoseconds) // 100
    return ((_EPOCH + (units if nanoseconds >= 0 else -units)) << 4) & MAX_CLOCK


def seconds_of(clock: int) -> float:
    """Return the time of a clock value, in seconds since 1970."""
    return ((clock >> 4) - _EPOCH) / 1e7


def build_uuid(producer: bytes, clock: int, flags: int) -> UUID:
    """
    Return the UUID of a message.

    Raises:
        ValueError: If the producer does not have 6 bytes, the clock has more than 64
            bits, or the flags have more than 10.

    """
    if len(producer) != 6:
        raise ValueError(f"a producer id has 6 bytes, got {producer.hex()!r}")
    if not 0 <= clock <= MAX_CLOCK:
        raise ValueError(f"a clock has 64 bits, got {clock}")
    if not 0 <= flags <= _MAX_FLAGS:
        raise ValueError(f"flags have 10 bits, got {flags:#x}")
    return UUID(
        int=((clock >> 4) & 0xFFFFFFFF) << 96
        | ((clock >> 36) & 0xFFFF) << 80
        | ((clock >> 52) | 0x1000) << 64
        | (0x8000 | (clock & 0xF) << 10 | int(flags)) << 48
        | int.from_bytes(producer, "big")
    )


def producer_of(uuid: UUID) -> bytes:
    """Return the producer's id, 6 bytes."""
    return (uuid.int & 0xFFFFFFFFFFFF).to_bytes(6, "big")


def clock_of(uuid: UUID) -> int:
    """Return the clock; for a foreign UUID the value has no meaning."""
    value = uuid.int
    return (
        (value >> 92) & 0xFFFFFFFF0
        | (value >> 44) & 0xFFFF000000000
        # Without the bits of the version.
        | (value >> 12) & 0xFFF0000000000000
        | (value >> 58) & 0xF
    )


def flags_of(uuid: UUID) -> Flags:
    """Return the flags."""
    return Flags((uuid.int >> 48) & _MAX_FLAGS)


def new_producer_id() -> bytes:
    """Return a random id of 47 bits, with the multicast bit, unlike network cards."""
    return (secrets.randbits(48) | 1 << 40).to_bytes(6, "big")


def parse_uuid(text: str) -> UUID:
    """
    Parse a UUID: plain, in braces, as a URN, or as 32 digits.

    Raises:
        ValueError: If the text is none of these.

    """
    plain = text
    if len(text) == 45:
        if text[:9].lower() != "urn:uuid:":
            raise ValueError(f"invalid urn prefix: {text[:9]!r}")
        plain = text[9:]
    elif len(text) == 38 and text[0] == "{" and text[-1] == "}":
        plain = text[1:-1]
    if len(plain) == 36:
        if not all(plain[at] == "-" for at in (8, 13, 18, 23)):
            raise ValueError("invalid UUID format")
        plain = plain[:8] + plain[9:13] + plain[14:18] + plain[19:23] + plain[24:]
    elif len(text) != 32:
        raise ValueError(f"invalid UUID length: {len(text)}")
    # int() would accept blanks, signs and underscores, too.
    if not (plain.isascii() and plain.isalnum()):
        raise ValueError("invalid UUID format")
    try:
        return UUID(int=int(plain, 16))
    except ValueError:
        raise ValueError("invalid UUID format") from None
