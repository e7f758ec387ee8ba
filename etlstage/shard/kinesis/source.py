"""
The shards of a stream in Kinesis, and their records.

A shard is polled: its iterator is asked for records, and answers with the next one; it
is None at the end of the shard. An iterator lives for five minutes, so where a worker
takes longer, another begins behind the record that was read last.

Where reading begins is always the same place: LATEST would be another one with every
iterator, so it is the time at which the stream was looked at first. Records behind a
checkpoint are asked for from the checkpointed record on, since it may be several that
were put as one, of which only some are covered.
"""

from __future__ import annotations

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
from etlstage.shard.stream import AT_END, ShardedSource, SourceShard
from etlstage.telemetry.log import Log

__all__ = ("KinesisSource", "client_of")

_log = Log()

Client: TypeAlias = Any
"""What boto3 makes, which has no types."""
_Call: TypeAlias = Callable[[], Mapping[str, Any]]

_BETWEEN: Final = 0.2
"""Seconds between two reads of a shard: five a second are allowed."""
_RATE: Final = 2 << 20
"""Bytes a second that may be read of a shard."""
_THREADS: Final = 32
_FIRST, _LONGEST = 0.5, 20.0  # seconds between two tries
_TRIES: Final = 5
"""Before anything was read; then it is tried for ever, since what fails is back soon."""
_BUSY: Final = (
    "KMSThrottlingException",
    "LimitExceededException",
    "ProvisionedThroughputExceededException",
    "RequestTimeout",
    "Throttling",
    "ThrottlingException",
)
_EXPIRED: Final = "ExpiredIteratorException"


class KinesisSource(ShardedSource):
    """
    Reads a stream.

    Args:
        stream: Its name, or its ARN.
        client: Makes the client; called in a thread.
        begin: Where a stream begins that has no checkpoint: ``trim_horizon``, with the
            oldest record; ``latest``, with what comes from now on; or a time, in
            seconds since 1970.
        name: As reports and errors call it.
        follow: Whether to wait for more at the end.
        max_records: Records of one read, at most.
        idle: Seconds until it is read again where there was nothing new.
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
        """Which stream it is, for a human."""
        return f"stream {self._shown} in Kinesis"

    # --- the stream -----------------------------------------------------------------

    def identity(self) -> str:
        """Return its name and when it was created: another may have its name later."""
        of = self._ask("describe_stream_summary", **self._stream)
        made = of["StreamDescriptionSummary"]["StreamCreationTimestamp"]
        return f"{self._shown} of {made.astimezone().timestamp():.0f}"

    def shards(self) -> list[SourceShard]:
        """Return all shards that there are; blocks."""
        answer = self._ask("list_shards", **self._stream)
        self._looked_at = _date(answer)
        found = list(answer["Shards"])
        while token := answer.get("NextToken"):
            answer = self._ask("list_shards", NextToken=token)
            found += answer["Shards"]
        return [_shard(each) for each in found]

    def _ask(self, method: str, **arguments: object) -> Mapping[str, Any]:
        """Ask, some times over where that helps; blocks."""
        for tried in range(1, _TRIES + 1):
            try:
                return self._call(method, **arguments)
            except Exception as error:
                if tried == _TRIES or not _passes(error):
                    raise self._failed(error) from error
                time.sleep(_pause(tried))
        raise AssertionError("unreachable: the last try raises")

    def _call(self, method: str, **arguments: object) -> Mapping[str, Any]:
        if self._client is None:
            self._client = self._make()
        answer: Mapping[str, Any] = getattr(self._client, method)(**arguments)
        return answer

    def _failed(self, error: Exception) -> SourceFailed:
        text = f"stage {self.name}: can't read {self.input}: {error}"
        return SourceFailed(text, stage=self.name)

    def beginning(self, shard: SourceShard) -> object:
        """Return where a shard begins of a stream that has no checkpoint."""
        if self._begin == "trim_horizon":
            return None
        if self._begin != "latest":
            return ["AT_TIMESTAMP", 0, self._begin]
        return AT_END if shard.closed else ["LATEST", 0, self._looked_at]

    # --- a shard --------------------------------------------------------------------

    async def records(
        self, shard: str, position: object
    ) -> AsyncGenerator[AnnotatedRun | None, None]:
        """Yield the records of a shard behind a position; None where it has ended."""
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
                    # It is asked for from that record on, which is not there any more.
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
            # Where old records have gone answers are empty for a while.
            size = sum(len(record["Data"]) for record in found)
            pause = max(_BETWEEN, size / _RATE)
            if not found and not behind:
                pause = max(pause, self._idle)
            wait = max(0.0, begun + pause - anyio.current_time())
        yield None

    async def _suffices(self, shard: str) -> bool:
        """Return whether reading ends here, where there is no more for now."""
        if self.follow:
            return False
        # The end of one that was closed is yet to come.
        found = await anyio.to_thread.run_sync(self.shards, abandon_on_cancel=True)
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
        """Ask until there is an answer that another try would not change."""
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
                    "shard is read again in a while",
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
    """Return what the API calls an error; empty: it is none of its."""
    response = getattr(error, "response", None) or {}
    code: str = response.get("Error", {}).get("Code", "")
    return code


def _passes(error: Exception) -> bool:
    """Return whether another try may help: throttled, a fault of theirs, the network."""
    response = getattr(error, "response", None)
    if response:
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return _code(error) in _BUSY or status >= 500
    if isinstance(error, ConfigError):
        return False
    exceptions = import_module("botocore.exceptions")
    return isinstance(
        error, exceptions.ConnectionError | exceptions.HTTPClientError
    ) and not isinstance(error, exceptions.SSLError)


def _pause(tried: int) -> float:
    return float(min(_LONGEST, _FIRST * 2 ** min(tried - 1, 10)))


def _date(answer: Mapping[str, Any]) -> float:
    """Return the time of the API's clock, by which records arrive."""
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
    """Return the record behind which to begin, and how to ask for an iterator."""
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
    """Return the records behind a place, each of those that were put as one."""
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
