"""
How an input is cut into shards: each record falls to one by its partition key.

As Kinesis has it, each shard has a part of the range of the keys' hashes.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import md5
from typing import Final
from zlib import crc32

from etlstage.messages import AnnotatedRun
from etlstage.supervisor.exchange.keyed import key_text, point

__all__ = ("LONGEST_KEY", "Cut", "RecordRun")


LONGEST_KEY: Final = 256
"""Characters of a partition key, at most, as Kinesis has it."""


class Cut:
    """
    So many shards, and the key that says in which a message is.

    Args:
        count: Shards.
        key: A JSON pointer: messages that have the same there are in one shard, in
            their order; None: a hash of the message.

    """

    def __init__(self, count: int, key: str | None = None) -> None:
        self.names: Final = [f"shardId-{n:012}" for n in range(count)]
        self._tokens = None if key is None else point(key)

    def place(self, message: bytes) -> tuple[int, str]:
        """Return the number of a message's shard, and its partition key."""
        key = self._key(message)
        hashed = int.from_bytes(
            md5(key.encode(), usedforsecurity=False).digest(), "big"
        )
        return hashed * len(self.names) >> 128, key

    def _key(self, message: bytes) -> str:
        if self._tokens is None:
            return f"{crc32(message):08x}"
        # Without a key it is refused, and dead-lettered: no shard is its own.
        return key_text(message, self._tokens) or ""


class RecordRun:
    """What a shard gets of a run; columns as workers that commit have them."""

    def __init__(self) -> None:
        self._messages: list[bytes] = []
        self._keys: list[str] = []
        self._numbers: list[int] = []

    def __len__(self) -> int:
        return len(self._messages)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._messages)

    def add(self, message: bytes, key: str, number: int) -> None:
        """Add a message, with its partition key and its sequence number."""
        self._messages.append(message)
        self._keys.append(key)
        self._numbers.append(number)

    @property
    def last(self) -> int:
        """Number of the last message."""
        return self._numbers[-1]

    def run(self) -> AnnotatedRun:
        """Return it."""
        return AnnotatedRun(
            self._messages, sequence=self._numbers, partition=self._keys
        )
