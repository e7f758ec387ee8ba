"""A stream in memory with the part of the Kinesis API that reading needs."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime
from hashlib import md5
from typing import Any, Final

from botocore.exceptions import ClientError

__all__ = ("MemoryKinesis", "aggregated", "refusal")

_MOST: Final = 2**128


class MemoryKinesis:
    """
    A stream in memory, which is its own client.

    Args:
        shards: Initial number of shards.
        clock: Returns the time, in seconds.
        page: Maximal number of shards in a response.

    """

    def __init__(
        self, shards: int = 1, clock: Callable[[], float] = float, *, page: int = 3
    ) -> None:
        self.shards: list[dict[str, Any]] = []
        self.records: dict[str, list[dict[str, Any]]] = {}
        self.fails: dict[str, list[Exception]] = defaultdict(list)
        """By method, the errors of the next calls."""
        self.calls: list[tuple[float, str, str]] = []
        self.created = 0.0
        self._clock, self._page = clock, page
        self._number = 49680526710662916156521500033820025476104273703095762946
        for n in range(shards):
            self._add(_MOST * n // shards, _MOST * (n + 1) // shards - 1)

    def _add(self, start: int, end: int, *parents: str) -> str:
        name = f"shardId-{len(self.shards):012}"
        shard: dict[str, Any] = {
            "ShardId": name,
            "HashKeyRange": {"StartingHashKey": start, "EndingHashKey": end},
            "SequenceNumberRange": {"StartingSequenceNumber": self._next()},
        }
        shard |= dict(
            zip(("ParentShardId", "AdjacentParentShardId"), parents, strict=False)
        )
        self.shards.append(shard)
        self.records[name] = []
        return name

    def _next(self) -> str:
        self._number += 1 << 20
        return str(self._number)

    # --- what a producer does ---------------------------------------------------------

    def put(self, number: int, key: str | None = None) -> None:
        """Put a record that holds a number."""
        self.put_data(json.dumps({"n": number}).encode(), key or str(number))

    def put_data(self, data: bytes, key: str) -> None:
        """Put a record into the open shard of its key."""
        place = int.from_bytes(md5(key.encode()).digest(), "big")  # noqa: S324
        for shard in self.shards:
            of = shard["HashKeyRange"]
            if of["StartingHashKey"] <= place <= of["EndingHashKey"] and not _ended(
                shard
            ):
                self.records[shard["ShardId"]].append(
                    {
                        "SequenceNumber": self._next(),
                        "ApproximateArrivalTimestamp": datetime.fromtimestamp(
                            self._clock(), UTC
                        ),
                        "Data": data,
                        "PartitionKey": key,
                    }
                )

    def split(self, name: str) -> list[str]:
        """Close a shard; return its two children."""
        of = self._close(name)["HashKeyRange"]
        start, end = of["StartingHashKey"], of["EndingHashKey"]
        half = (start + end) // 2
        return [self._add(start, half, name), self._add(half + 1, end, name)]

    def merge(self, first: str, second: str) -> str:
        """Close two shards; return their child."""
        ranges = [self._close(name)["HashKeyRange"] for name in (first, second)]
        start = min(of["StartingHashKey"] for of in ranges)
        end = max(of["EndingHashKey"] for of in ranges)
        return self._add(start, end, first, second)

    def _close(self, name: str) -> dict[str, Any]:
        shard = self._shard(name)
        shard["SequenceNumberRange"]["EndingSequenceNumber"] = self._next()
        return shard

    def _shard(self, name: str) -> dict[str, Any]:
        return next(shard for shard in self.shards if shard["ShardId"] == name)

    # --- the API ----------------------------------------------------------------------

    def describe_stream_summary(self, **_: object) -> dict[str, Any]:
        """Return when the stream was created."""
        self._called("describe_stream_summary")
        at = datetime.fromtimestamp(self.created, UTC)
        return {"StreamDescriptionSummary": {"StreamCreationTimestamp": at}}

    def list_shards(self, NextToken: str = "0", **_: object) -> dict[str, Any]:  # noqa: N803
        """Return a page of the shards."""
        self._called("list_shards")
        begin = int(NextToken)
        end = begin + self._page
        at = datetime.fromtimestamp(self._clock(), UTC)
        date = at.strftime("%a, %d %b %Y %H:%M:%S GMT")
        answer: dict[str, Any] = {
            "Shards": self.shards[begin:end],
            "ResponseMetadata": {"HTTPHeaders": {"date": date}},
        }
        return answer | ({"NextToken": str(end)} if end < len(self.shards) else {})

    def get_shard_iterator(
        self,
        *,
        ShardId: str,  # noqa: N803
        ShardIteratorType: str,  # noqa: N803
        StartingSequenceNumber: str = "0",  # noqa: N803
        Timestamp: float = 0.0,  # noqa: N803
        **_: object,
    ) -> dict[str, Any]:
        """Return an iterator that begins at the first matching record."""
        self._called("get_shard_iterator", ShardId)
        assert ShardIteratorType in (
            "AT_SEQUENCE_NUMBER",
            "AT_TIMESTAMP",
            "TRIM_HORIZON",
        )
        records = self.records[ShardId]
        before = [
            record
            for record in records
            if int(record["SequenceNumber"]) < int(StartingSequenceNumber)
            or record["ApproximateArrivalTimestamp"].timestamp() < Timestamp
        ]
        return {"ShardIterator": f"{ShardId} {len(before)}"}

    def get_records(
        self,
        *,
        ShardIterator: str,  # noqa: N803
        Limit: int,  # noqa: N803
    ) -> dict[str, Any]:
        """Return records, and the iterator of the next ones."""
        shard, place, *again = ShardIterator.split()
        self._called("get_records", shard)
        begin, records = int(place), self.records[shard]
        end = min(begin + Limit, len(records))
        left = len(records) - end
        # Like the real API: an empty response precedes the one with the shard's end.
        tail = not left and begin == end and _ended(self._shard(shard))
        return {
            "Records": records[begin:end],
            "NextShardIterator": None
            if tail and again
            else f"{shard} {end}" + " again" * tail,
            "MillisBehindLatest": 1000 * left,
        }

    def _called(self, method: str, of: str = "") -> None:
        self.calls.append((self._clock(), method, of))
        if fails := self.fails[method]:
            raise fails.pop(0)


def _ended(shard: dict[str, Any]) -> bool:
    return "EndingSequenceNumber" in shard["SequenceNumberRange"]


def refusal(code: str, status: int = 400) -> ClientError:
    """Return the client's error for a call that the API refuses."""
    return ClientError(
        {
            "Error": {"Code": code, "Message": "no"},
            "ResponseMetadata": {"HTTPStatusCode": status},
        },
        "Call",
    )


def aggregated(*parts: tuple[bytes, str]) -> bytes:
    """Return records aggregated into one, as Kinesis's producer library does."""
    keys = [*dict.fromkeys(key for _, key in parts)]
    message = b"".join(_field(1, key.encode()) for key in keys)
    message += _field(2, b"170141183460469231731687303715884105728")
    for data, key in parts:
        record = b"\x08" + _varint(keys.index(key)) + b"\x10\x00" + _field(3, data)
        message += _field(3, record + _field(4, _field(1, b"tag")))
    return b"\xf3\x89\x9a\xc2" + message + md5(message).digest()  # noqa: S324


def _field(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    data = b""
    while value > 0x7F:
        data += bytes([value & 0x7F | 0x80])
        value >>= 7
    return data + bytes([value])
