"""A stream in Kinesis as the source of record processors; only a run imports boto3."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from etlstage.config.end import End, Site, SourceKeys
from etlstage.protocol.base import Shape
from etlstage.settings.definition import broken
from etlstage.settings.kind import Whole
from etlstage.settings.problem import Loc, Problem
from etlstage.settings.units import Argument, Duration

if TYPE_CHECKING:
    from etlstage.config.model import ExtractKeys, PipelineKeys
    from etlstage.config.presence import Look
    from etlstage.pipeline.interfaces import Source

__all__ = ("KINESIS", "KinesisSourceKeys")

_EXPECTED: Final = (
    "is {got}, expected trim_horizon, latest, seconds since 1970, or a time such as"
    " 2026-11-23T18:00:00Z"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class KinesisSourceKeys(SourceKeys):
    """
    A stream in Kinesis; each of its shards has a record processor.

    Credentials are found as by boto3.
    """

    sharded: ClassVar[bool] = True
    stream: Argument
    """Name or ARN of the stream."""
    from_: Argument = "trim_horizon"
    """Where to begin without checkpoints: at the oldest record (trim_horizon), with
    records that arrive from now on (latest), or at a time such as 2026-11-23T18:00:00Z,
    or in seconds since 1970."""
    region: Argument | None = None
    """AWS region; by default the one that boto3 finds."""
    endpoint: Argument | None = None
    """URL of another service with the same API, such as http://127.0.0.1:4567."""
    follow: bool = True
    """Whether to wait for more records at the end, until stopped."""
    max_records: Annotated[int, Whole(1, 10_000)] = 10_000
    """Maximum number of records in one read; that of an action is batch.size."""
    idle: Duration = 1.0
    """Pause before a shard that had no new records is read again."""
    sync: Duration = 60.0
    """Time between two searches for new shards; they are also searched for when a shard
    ends."""

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterable[Problem]:
        """Yield a problem if ``from`` is not a place to begin."""
        start = given.get("from_", given.get("from"))
        if isinstance(start, str):
            try:
                _begin(start)
            except (ValueError, OverflowError):
                yield Problem(("from",), _EXPECTED, start)

    def missing(self, loc: Loc, look: Look) -> Iterator[Problem]:
        """Yield a problem if boto3 is not installed."""
        if find_spec("boto3") is None:
            yield broken(loc, "needs boto3: pip install 'etlstage[kinesis]'")

    def text(self) -> str:
        """Return which stream it is."""
        return f"stream {self.stream} in Kinesis"

    def about(self, stage: ExtractKeys, site: Site) -> Iterator[tuple[str, str]]:
        """Yield which stream it is, and where reading begins."""
        yield "stream", self.stream
        where = self.endpoint or self.region
        yield from [("at", where)] if where else []
        yield "from", f"{self.from_}, if there is no checkpoint"
        yield "end", "waits for more" if self.follow else "ends once all was read"

    def source(self, stage: ExtractKeys, site: Site) -> Source:
        """Return the source that reads the stream."""
        from etlstage.shard.kinesis.source import KinesisSource, client_of

        return KinesisSource(
            self.stream,
            partial(client_of, self.region, self.endpoint),
            begin=_begin(self.from_),
            name=stage.name,
            follow=self.follow,
            max_records=self.max_records,
            idle=self.idle,
            sync=self.sync,
        )

    def wrong(self, stage: ExtractKeys, pipeline: PipelineKeys) -> Iterator[Problem]:
        """Yield stages that can't follow a stream: all but processors that commit."""
        load = pipeline.load.stage
        if load is None or load.dialect.shape is not Shape.COMMITTED:
            text = (
                "needs load.worker with dialect: kcl, whose record processors"
                " checkpoint the stream"
            )
            yield broken(("extract", "kinesis"), text)
        if pipeline.transform:
            text = (
                "can't be used with transform stages: processors checkpoint the"
                " stream's own records; transform in the processor, or after it"
            )
            yield broken(("extract", "kinesis"), text)
        if stage.every is not None:
            yield broken(("extract", "every"), "is not for streams: use kinesis.idle")

    def goes_on(self, stage: ExtractKeys) -> bool:
        """Return True: checkpoints are kept."""
        return True

    def tried(self) -> KinesisSourceKeys:
        """Return the keys for reading only up to the end."""
        return replace(self, follow=False)


def _begin(text: str) -> str | float:
    if text in ("trim_horizon", "latest"):
        return text
    try:
        seconds = float(text)
    except ValueError:
        return datetime.fromisoformat(text).astimezone().timestamp()
    datetime.fromtimestamp(0, UTC) + timedelta(seconds=seconds)  # raises if too far
    return seconds


KINESIS: Final = End("kinesis", KinesisSourceKeys)
"""Streams of AWS, or of services with its API."""
