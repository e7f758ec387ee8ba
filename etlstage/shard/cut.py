"""
How an input is divided into shards: each record is assigned to one by partition key.

As in Kinesis, each shard has a range of the keys' hashes. The fields of a record are
found in a message by JSON pointers. A message that lacks one of them is refused before
a worker sees it, since a worker would count it as committed.
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
from etlstage.supervisor.exchange.keyed import point, value_at

__all__ = (
    "LONGEST_KEY",
    "Cut",
    "RecordRun",
    "ShardRecord",
    "number_of",
    "place_of",
    "position_at",
    "wrong_key",
)


LONGEST_KEY: Final = 256
"""Maximum number of characters of a partition key, as in Kinesis."""
_DIGITS: Final = 128
"""Maximum number of digits of a sequence number, as in Kinesis."""
_SHOWN: Final = 40  # characters of a value in an error
_MOST: Final = 10**_DIGITS
_NUMBER: Final = attrgetter("number")
_NONE: Final = (None, None, None)


class ShardRecord(NamedTuple):
    """A message as a record of its shard."""

    shard: int
    """Index of the shard's name in ``Cut.names``."""
    key: str
    number: int
    """The sequence number; -1: the record has none."""
    arrival: int | None = None
    """When the record arrived, in milliseconds since 1970."""
    wrong: str = ""
    """Why no worker may be given the record; empty if one may."""


class Cut:
    """
    A number of shards, and the rule that assigns messages to them.

    Args:
        count: Number of shards.
        key: JSON pointer to the partition key: messages with the same key are in one
            shard, in their order. None: the key is a hash of the message.
        sequence: JSON pointer to a number that rises within a shard; None: the caller
            numbers the messages.
        arrival: JSON pointer to the time of arrival, in milliseconds since 1970 or in
            ISO 8601; None: it is unknown.

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
        """The settings that determine the shards, by name."""
        self.numbers: Final[bool] = sequence is not None
        """Whether messages have numbers of their own."""
        self._key = _tokens(key)
        self._sequence = _tokens(sequence)
        self._arrival = _tokens(arrival)
        self._pointers = key, sequence, arrival

    def record(self, message: bytes, number: int = -1) -> ShardRecord:
        """Return a message as a record, with ``number`` if it has none of its own."""
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
        # JSON may contain half of a surrogate pair.
        text = key.encode(errors="surrogatepass")
        hashed = md5(text, usedforsecurity=False).digest()
        return int.from_bytes(hashed, "big") * len(self.names) >> 128

    def wrong(self, record: ShardRecord, row: int, after: int) -> str:
        """
        Return why a worker can't be given a record; empty: it can.

        Args:
            record: The record.
            row: Its place in the input.
            after: Number of the previous record in its shard; -1: there is none.

        """
        wrong = record.wrong and f"{record.wrong}; correct it, or filter out such rows"
        if not wrong and record.number <= after:
            wrong = (
                f"its sequence number is {record.number}, expected more than {after},"
                f" that of the record before it; sort the input by {self._pointers[1]}"
            )
        return wrong and f"shard {self.names[record.shard]}: row {row + 1}: {wrong}"


class RecordRun:
    """A shard's part of a run, with the columns for workers that commit."""

    def __init__(self) -> None:
        self._messages: list[bytes] = []
        self._records: list[ShardRecord] = []
        self.wrong: list[str] = []
        """For each record, why no worker may be given it; empty if one may."""

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, message: bytes, record: ShardRecord, wrong: str = "") -> None:
        """Add a message, with its record and what is wrong with it."""
        self._messages.append(message)
        self._records.append(record)
        self.wrong.append(wrong)

    def up_to(self, number: int) -> int:
        """Return how many records have at most this number; numbers must rise."""
        return bisect_right(self._records, number, key=_NUMBER)

    def run(self) -> AnnotatedRun:
        """Return the run, with its columns."""
        records = self._records
        columns: dict[str, Sequence[object]] = {
            "sequence": [record.number for record in records],
            "partition": [record.key for record in records],
        }
        # Without the column a worker gets 0, which all clients accept. A record without
        # an arrival, though others have one, is wrong: no worker is given it.
        if any(record.arrival is not None for record in records):
            columns["arrival"] = [record.arrival or 0 for record in records]
        return AnnotatedRun(self._messages, **columns)


def wrong_key(key: str) -> str:
    """Return why a text is not a partition key; empty: it is one."""
    if 0 < len(key) <= LONGEST_KEY:
        return ""
    return (
        f"its partition key is {len(key)} characters long, expected 1 to {LONGEST_KEY}"
    )


def position_at(number: int) -> object:
    """Return the position that covers the records up to a number; plain JSON."""
    return [str(number), 0]


def number_of(position: object) -> int:
    """Return the number of the last record that a position covers; -1: none."""
    return place_of(position)[0]


def place_of(position: object) -> tuple[int, int]:
    """Return the number and the sub-sequence number of that record; (-1, 0): none."""
    match position:
        case [str(sequence), int(sub), *_] if sequence.isdecimal():
            return int(sequence), sub
        case _:
            return -1, 0  # read from the beginning; the dialect skips what is committed


def _tokens(pointer: str | None) -> Sequence[str] | None:
    return None if pointer is None else point(pointer)


def _parsed(message: bytes) -> object:
    try:
        return json.loads(message)
    except (ValueError, RecursionError):
        return None


def _at(value: Any, tokens: Sequence[str]) -> Any:  # noqa: ANN401 - JSON
    """Return the value at a JSON pointer; None: there is none."""
    try:
        return value_at(value, tokens)
    except (ValueError, LookupError):
        return None


def _key_of(value: object) -> str:
    """Return a partition key: text as it is, all else as JSON; empty: there is none."""
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, sort_keys=True)


def _number_at(value: object) -> int:
    """Return a value as a sequence number; -1: it is not one."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return -1
    text = str(value) if isinstance(value, str) or abs(value) < _MOST else ""
    decimal = text.isascii() and text.isdecimal() and len(text) <= _DIGITS
    return int(text) if decimal else -1


def _milliseconds(value: object) -> int | None:
    """Return a value as a time in milliseconds since 1970; None: it is not one."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value if 0 <= value < _MOST else None
    try:
        time = datetime.fromisoformat(value if isinstance(value, str) else "")
    except ValueError:
        return None
    # Spark writes the zone of its session. A time without a zone is taken as UTC.
    return round((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
