"""
How an input is cut into shards: each record falls to one by its partition key.

As Kinesis has it, each shard has a part of the range of the keys' hashes. What makes a
record of a message is found in it by JSON pointers; one that lacks any of that is
refused before a worker sees it, for a worker would count it as committed.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import md5
from operator import attrgetter
from typing import Any, Final, NamedTuple
from zlib import crc32

from etlstage.messages import AnnotatedRun
from etlstage.supervisor.exchange.keyed import point

__all__ = ("LONGEST_KEY", "Cut", "RecordRun", "ShardRecord", "number_of", "wrong_key")


LONGEST_KEY: Final = 256
"""Characters of a partition key, at most, as Kinesis has it."""
_DIGITS: Final = 128
"""Of a sequence number, at most, likewise."""
_SHOWN: Final = 40  # characters of a value in an error
_MOST: Final = 10**_DIGITS
_NUMBER: Final = attrgetter("number")
_NONE: Final = (None, None, None)


class ShardRecord(NamedTuple):
    """What a message is to its shard."""

    shard: int
    """Its place among the names of shards."""
    key: str
    number: int
    """Its sequence number; -1: it has none."""
    arrival: int | None = None
    """When it arrived, in milliseconds since 1970."""
    wrong: str = ""
    """Why no worker may be given it."""


class Cut:
    """
    A number of shards, and what decides where in which a message is.

    Args:
        count: Shards.
        key: A JSON pointer: messages that have the same there are in one shard, in
            their order; None: a hash of the message.
        sequence: To a number that rises within a shard; None: the reader has some.
        arrival: To the time when it arrived, in milliseconds since 1970 or as ISO 8601
            has it; None: it is not known.

    """

    def __init__(
        self,
        count: int,
        key: str | None = None,
        *,
        sequence: str | None = None,
        arrival: str | None = None,
    ) -> None:
        self.names: Final[list[str]] = [f"shardId-{n:012}" for n in range(count)]
        self.made: Final[dict[str, int | str | None]] = {
            "count": count,
            "key": key,
            "sequence": sequence,
        }
        """What makes the shards what they are, by setting."""
        self.numbers: Final[bool] = sequence is not None
        """Whether messages have numbers of their own."""
        self._key = _tokens(key)
        self._sequence = _tokens(sequence)
        self._arrival = _tokens(arrival)
        self._pointers = key, sequence, arrival

    def record(self, message: bytes, number: int = -1) -> ShardRecord:
        """Return what a message is, with a number if it has none of its own."""
        key, arrival, wrong = f"{crc32(message):08x}", None, ""
        key_at, sequence_at, arrival_at = self._pointers
        value = None if self._pointers == _NONE else _parsed(message)
        if self._key is not None:
            key = _key_of(_at(value, self._key))
            wrong = wrong_key(key) if key else f"there is no partition key at {key_at}"
        if self._sequence is not None:
            found = _at(value, self._sequence)
            number = _number_at(found)
            if number < 0 and not wrong:
                wrong = (
                    f"its sequence number at {sequence_at} is {_shown(found)}, expected"
                    f" a decimal number of at most {_DIGITS} digits"
                )
        if self._arrival is not None:
            found = _at(value, self._arrival)
            arrival = _milliseconds(found)
            if arrival is None and not wrong:
                wrong = (
                    f"its arrival at {arrival_at} is {_shown(found)}, expected"
                    " milliseconds since 1970, or a time such as 2026-11-23T18:00:00Z"
                )
        return ShardRecord(self._shard(key), key, number, arrival, wrong)

    def _shard(self, key: str) -> int:
        # JSON may hold half of a surrogate pair.
        text = key.encode(errors="surrogatepass")
        hashed = md5(text, usedforsecurity=False).digest()
        return int.from_bytes(hashed, "big") * len(self.names) >> 128

    def wrong(self, record: ShardRecord, row: int, after: int) -> str:
        """
        Return why a record can't be given; empty: it can.

        Args:
            record: The record.
            row: Its place in the input.
            after: Number of the one before it in its shard; -1: it is the first.

        """
        wrong = record.wrong and f"{record.wrong}; correct it, or filter such rows"
        if not wrong and record.number <= after:
            wrong = (
                f"its sequence number is {record.number}, expected more than {after}"
                f" before it; sort the input by {self._pointers[1]}"
            )
        return wrong and f"shard {self.names[record.shard]}: row {row + 1}: {wrong}"


class RecordRun:
    """What a shard gets of a run; columns as workers that commit have them."""

    def __init__(self) -> None:
        self._messages: list[bytes] = []
        self._records: list[ShardRecord] = []
        self.wrong: list[str] = []
        """Of each record why no worker may be given it; empty: it may."""

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, message: bytes, record: ShardRecord, wrong: str = "") -> None:
        """Add a message, with what it is and what is wrong with it."""
        self._messages.append(message)
        self._records.append(record)
        self.wrong.append(wrong)

    def up_to(self, number: int) -> int:
        """Return how many records have at most that number; numbers rise."""
        return bisect_right(self._records, number, key=_NUMBER)

    def run(self) -> AnnotatedRun:
        """Return it."""
        records = self._records
        columns: dict[str, Sequence[object]] = {
            "sequence": [record.number for record in records],
            "partition": [record.key for record in records],
        }
        # Without a column of them a worker has 0, which all clients bear.
        if records and records[0].arrival is not None:
            columns["arrival"] = [record.arrival or 0 for record in records]
        return AnnotatedRun(self._messages, **columns)


def wrong_key(key: str) -> str:
    """Return why a text is no partition key; empty: it is one."""
    if 0 < len(key) <= LONGEST_KEY:
        return ""
    return f"its partition key is {len(key)} characters, expected 1 to {LONGEST_KEY}"


def number_of(position: object) -> int:
    """Return the number of the last record that a position covers; -1: of none."""
    match position:
        case [str(sequence), *_] if sequence.isdecimal():
            return int(sequence)
        case _:
            return -1  # from the beginning; its dialect leaves out what is committed


def _tokens(pointer: str | None) -> Sequence[str] | None:
    return None if pointer is None else point(pointer)


def _parsed(message: bytes) -> object:
    try:
        return json.loads(message)
    except (ValueError, RecursionError):
        return None


def _at(value: Any, tokens: Sequence[str]) -> Any:  # noqa: ANN401 - JSON
    """Return what is there; None: nothing."""
    try:
        for token in tokens:
            value = value[int(token) if isinstance(value, list) else token]
    except (ValueError, LookupError, TypeError):
        return None
    return value


def _key_of(value: object) -> str:
    """Return a partition key: text as it is, all else as JSON; empty: there is none."""
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, sort_keys=True)


def _number_at(value: object) -> int:
    """Return a sequence number; -1: it is none."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return -1
    text = str(value) if isinstance(value, str) or abs(value) < _MOST else ""
    decimal = text.isascii() and text.isdecimal() and len(text) <= _DIGITS
    return int(text) if decimal else -1


def _milliseconds(value: object) -> int | None:
    """Return a time, in milliseconds since 1970; None: it is none."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value if 0 <= value < _MOST else None
    try:
        time = datetime.fromisoformat(value if isinstance(value, str) else "")
    except ValueError:
        return None
    # Spark writes the zone of its session; without one it is that of the session.
    return round((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
