"""
The shards of a stream in Kinesis, and their records.

A shard is polled: a request with its iterator returns records and the next iterator,
which is None at the end of the shard. An iterator lives for five minutes. If a worker
takes longer, reading continues with a new one, after the record that was read last.

The place where reading begins must not change. LATEST would be another place for every
iterator, so the time of the first look at the stream is used instead. After a
checkpoint, reading begins with the checkpointed record itself: it may be an aggregate
of several, of which only some are covered.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from importlib import import_module
from typing import Any, Final, TypeAlias

import anyio
import anyio.to_thread

from etlstage.errors import ConfigError, SourceFailed
from etlstage.messages import AnnotatedRun
from etlstage.shard.kinesis.aggregate import split
from etlstage.shard.stream import AT_END, ShardedSource, ShardsUnavailable, SourceShard
from etlstage.telemetry.log import Log

__all__ = ("KinesisSource", "client_of")

_log = Log()

Client: TypeAlias = Any
"""A client of boto3, which has no type."""
_Call: TypeAlias = Callable[[], Mapping[str, Any]]

_BETWEEN: Final = 0.2
"""Seconds between two reads of a shard: five per second are allowed."""
_RATE: Final = 2 << 20
"""Bytes per second that may be read from a shard."""
_THREADS: Final = 32
_FIRST, _LONGEST = 0.5, 20.0  # seconds between two tries
_TRIES: Final = 5
"""Attempts of a request about the stream, after which the caller may try later. Reads
are retried without a limit, as their failures pass soon."""
_BUSY: Final = (
    "KMSThrottlingException",
    "LimitExceededException",
    "ProvisionedThroughputExceededException",
    "RequestTimeout",
    "Throttling",
    "ThrottlingException",
)
_EXPIRED: Final = "ExpiredIteratorException"
_BROKEN: Final = (
    ConnectionError,
    TimeoutError,
    ssl.SSLEOFError,
    ssl.SSLZeroReturnError,
)
"""Errors of a TLS connection that broke."""


class KinesisSource(ShardedSource):
    """
    Reads a stream.

    Args:
        stream: The stream's name, or its ARN.
        client: Creates the client; called in a thread.
        begin: Where a stream without a checkpoint begins: ``trim_horizon``, with the
            oldest record; ``latest``, with what comes from now on; or a time, in
            seconds since 1970.
        name: Name of the source in reports and errors.
        follow: Whether to wait for more at the end.
        max_records: Maximum number of records of one read.
        idle: Seconds until the next read if there was nothing new.
        sync: Seconds between two looks for new shards.

    """

    def __init__(
        self,
        stream: str,
        client: Callable[[], Client],
        *,
        begin: str | float = "trim_horizon",
        name: str = "extract",
        follow: bool = True,
        max_records: int = 10_000,
        idle: float = 1.0,
        sync: float = 60.0,
    ) -> None:
        super().__init__(name)
        self.follow: bool = follow
        self.sync: float = sync
        self.goes_on: bool = True
        self._stream = {"StreamARN" if ":" in stream else "StreamName": stream}
        self._shown = stream.rpartition("/")[2]
        self._make = client
        self._client: Client = None
        self._begin = begin
        self._max_records = max_records
        self._idle = idle
        self._looked_at: float = 0.0
        self._threads = anyio.CapacityLimiter(_THREADS)

    @property
    def input(self) -> str:
        """Description of the stream, for a human."""
        return f"stream {self._shown} in Kinesis"

    # --- the stream -----------------------------------------------------------------

    def identity(self) -> str:
        """Return the name and time of creation, as a later stream may have the name."""
        of = self._ask("describe_stream_summary", **self._stream)
        made = of["StreamDescriptionSummary"]["StreamCreationTimestamp"]
        return f"{self._shown} of {made.astimezone().timestamp():.0f}"

    def shards(self) -> list[SourceShard]:
        """Return all existing shards; blocks."""
        answer = self._ask("list_shards", **self._stream)
        self._looked_at = _date(answer)
        found = list(answer["Shards"])
        while token := answer.get("NextToken"):
            answer = self._ask("list_shards", NextToken=token)
            found += answer["Shards"]
        return [_shard(each) for each in found]

    def _ask(self, method: str, **arguments: object) -> Mapping[str, Any]:
        """Send a request, with a few retries where they may help; blocks."""
        for tried in range(1, _TRIES + 1):
            try:
                return self._call(method, **arguments)
            except Exception as error:
                if not _passes(error):
                    raise self._failed(error) from error
                if tried == _TRIES:
                    raise self._failed(error, ShardsUnavailable) from error
                time.sleep(_pause(tried))
        raise AssertionError("unreachable: the last try raises")

    def _call(self, method: str, **arguments: object) -> Mapping[str, Any]:
        if self._client is None:
            self._client = self._make()
        answer: Mapping[str, Any] = getattr(self._client, method)(**arguments)
        return answer

    def _failed(
        self, error: Exception, kind: type[SourceFailed] = SourceFailed
    ) -> SourceFailed:
        text = f"stage {self.name}: can't read {self.input}: {error}"
        return kind(text, stage=self.name)

    def beginning(self, shard: SourceShard) -> object:
        """Return where a shard begins if the stream has no checkpoint."""
        if self._begin == "trim_horizon":
            return None
        if self._begin != "latest":
            return ["AT_TIMESTAMP", 0, self._begin]
        return AT_END if shard.closed else ["LATEST", 0, self._looked_at]

    # --- a shard --------------------------------------------------------------------

    async def records(
        self, shard: str, position: object
    ) -> AsyncGenerator[AnnotatedRun | None, None]:
        """Yield a shard's records after a position; None once it has ended."""
        after, start = _start_of(position)
        begin, _ = after
        iterator = await self._iterator(shard, start)
        wait = 0.0
        while iterator is not None:
            await anyio.sleep(wait)
            begun = anyio.current_time()
            try:
                answer = await self._try(
                    shard,
                    "get_records",
                    ShardIterator=iterator,
                    Limit=self._max_records,
                )
            except Exception as error:
                if _code(error) != _EXPIRED:
                    raise self._failed(error) from error
                iterator = await self._iterator(shard, start)
                continue
            iterator = answer.get("NextShardIterator")
            behind = answer.get("MillisBehindLatest")
            self.behind[shard] = (behind or 0) / 1000
            found = answer["Records"]
            if found:
                start = _at(found[-1]["SequenceNumber"])
                if begin >= 0 and begin < int(found[0]["SequenceNumber"]):
                    # The read began with the checkpointed record, which is gone.
                    _log.warning(
                        "records may be lost: the stream no longer has the record of the"
                        " checkpoint, which is older than its retention",
                        stage=self.name,
                        shard=shard,
                        checkpoint=begin,
                        first=found[0]["SequenceNumber"],
                    )
                begin = -1
            run = _run(found, behind, after)
            if len(run):
                after = int(run.columns["sequence"][-1]), run.columns["sub"][-1] or 0
                yield run
            elif iterator and not found and not behind and await self._suffices(shard):
                return
            # Where old records have expired, answers are empty for a while.
            size = sum(len(record["Data"]) for record in found)
            pause = max(_BETWEEN, size / _RATE)
            if not found and not behind:
                pause = max(pause, self._idle)
            wait = max(0.0, begun + pause - anyio.current_time())
        yield None

    async def _suffices(self, shard: str) -> bool:
        """Return whether reading ends where there is nothing more for now."""
        if self.follow:
            return False
        # A closed shard is read on, until its end is reported.
        try:
            found = await anyio.to_thread.run_sync(self.shards, abandon_on_cancel=True)
        except ShardsUnavailable:
            return False
        return not any(each.name == shard and each.closed for each in found)

    async def _iterator(self, shard: str, start: Mapping[str, object]) -> str | None:
        arguments = {**self._stream, "ShardId": shard, **start}
        try:
            answer = await self._try(shard, "get_shard_iterator", **arguments)
        except Exception as error:
            raise self._failed(error) from error
        iterator: str | None = answer["ShardIterator"]
        return iterator

    async def _try(
        self, shard: str, method: str, **arguments: object
    ) -> Mapping[str, Any]:
        """Send a request until it succeeds, or a retry can't help."""
        tried = 0
        call: _Call = partial(self._call, method, **arguments)
        while True:
            try:
                return await anyio.to_thread.run_sync(
                    call, limiter=self._threads, abandon_on_cancel=True
                )
            except Exception as error:
                if not _passes(error):
                    raise
                tried += 1
                pause = _pause(tried)
                _log.warning(
                    "retrying shard read",
                    stage=self.name,
                    shard=shard,
                    error=str(error),
                    seconds=pause,
                )
                await anyio.sleep(pause)


def client_of(region: str | None, endpoint: str | None) -> Client:
    """
    Return a client of the API; blocks.

    Raises:
        ConfigError: If boto3 is not installed.

    """
    try:
        boto3, config = import_module("boto3"), import_module("botocore.config")
    except ImportError as error:
        raise ConfigError("needs boto3: install 'etlstage[kinesis]'") from error
    return boto3.client(
        "kinesis",
        region_name=region,
        endpoint_url=endpoint,
        # We try again ourselves, and log that.
        config=config.Config(
            retries={"total_max_attempts": 1}, max_pool_connections=_THREADS
        ),
    )


def _code(error: Exception) -> str:
    """Return the API's code for an error; empty: it is not an error of the API."""
    response = getattr(error, "response", None) or {}
    code: str = response.get("Error", {}).get("Code", "")
    return code


def _passes(error: Exception) -> bool:
    """Return whether a retry may help: throttling, server errors, the network."""
    response = getattr(error, "response", None)
    if response:
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return _code(error) in _BUSY or status >= 500
    if isinstance(error, ConfigError):
        return False
    exceptions = import_module("botocore.exceptions")
    if isinstance(error, exceptions.SSLError):
        # It also stands for certificates and settings that a retry can't change.
        return any(isinstance(one, _BROKEN) for one in _causes(error))
    return isinstance(error, exceptions.ConnectionError | exceptions.HTTPClientError)


def _causes(error: Exception) -> list[object]:
    """Return an error of botocore with what it wraps, at any depth."""
    found: list[object] = [error, *getattr(error, "kwargs", {}).values()]
    for one in found:  # which grows meanwhile
        if isinstance(one, BaseException):
            wrapped = (one.__cause__, one.__context__, *one.args)
            found += [other for other in wrapped if other not in found]
    return found


def _pause(tried: int) -> float:
    return float(min(_LONGEST, _FIRST * 2 ** min(tried - 1, 10)))


def _date(answer: Mapping[str, Any]) -> float:
    """Return the time by the API's clock, which also stamps arriving records."""
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    if (text := headers.get("date")) is None:
        return float(int(time.time()))
    return parsedate_to_datetime(text).timestamp()


def _shard(found: Mapping[str, Any]) -> SourceShard:
    parents = (found.get("ParentShardId"), found.get("AdjacentParentShardId"))
    numbers = found["SequenceNumberRange"]
    return SourceShard(
        found["ShardId"],
        tuple(parent for parent in parents if parent),
        numbers.get("EndingSequenceNumber") is not None,
    )


def _at(sequence: str) -> dict[str, object]:
    return {
        "ShardIteratorType": "AT_SEQUENCE_NUMBER",
        "StartingSequenceNumber": sequence,
    }


def _start_of(position: object) -> tuple[tuple[int, int], dict[str, object]]:
    """Return the record after which to begin, and the arguments for an iterator."""
    match position:
        case [str(sequence), int(sub)] if sequence.isdecimal():
            return (int(sequence), sub), _at(sequence)
        case [str(), int(), float() | int() as seconds]:
            return (-1, 0), {"ShardIteratorType": "AT_TIMESTAMP", "Timestamp": seconds}
        case _:
            return (-1, 0), {"ShardIteratorType": "TRIM_HORIZON"}


def _run(
    found: list[Mapping[str, Any]], behind: int | None, after: tuple[int, int]
) -> AnnotatedRun:
    """Return the records after a place, with aggregated ones split."""
    data: list[bytes] = []
    sequences: list[str] = []
    subs: list[int | None] = []
    keys: list[str] = []
    arrivals: list[int | None] = []
    for record in found:
        sequence, number = record["SequenceNumber"], int(record["SequenceNumber"])
        arrived = _milliseconds(record.get("ApproximateArrivalTimestamp"))
        parts = split(record["Data"])
        whole = [(record["Data"], record["PartitionKey"])]
        for sub, (part, key) in enumerate(whole if parts is None else parts):
            if (number, sub) > after:
                data.append(part)
                sequences.append(sequence)
                subs.append(None if parts is None else sub)
                keys.append(key)
                arrivals.append(arrived)
    return AnnotatedRun(
        data,
        sequence=sequences,
        sub=subs,
        partition=keys,
        arrival=arrivals,
        behind=[behind] * len(data),
    )


def _milliseconds(moment: datetime | None) -> int | None:
    return None if moment is None else round(moment.timestamp() * 1000)
