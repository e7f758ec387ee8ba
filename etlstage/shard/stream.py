"""Sources with shards of their own, each of which is read separately."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final, NamedTuple

from etlstage.errors import SourceFailed
from etlstage.messages import AnnotatedRun, Position, Run
from etlstage.pipeline.interfaces import Source

__all__ = ("AT_END", "ShardedSource", "ShardsUnavailable", "SourceShard")

AT_END: Final[list[object]] = ["SHARD_END", 0]
"""The beginning of a shard that is not to be read at all."""


class ShardsUnavailable(SourceFailed):
    """Raised when shards can't be listed for now; a later attempt may succeed."""


class SourceShard(NamedTuple):
    """A shard of a stream."""

    name: str
    parents: tuple[str, ...] = ()
    """Shards that were split or merged into this one; some may be gone."""
    closed: bool = False
    """Whether no more records are added."""


class ShardedSource(Source):
    """
    A source of records in shards, some of which end while others begin.

    Attributes:
        follow: Whether to wait for more at the end, until stopped.
        sync: Seconds between two looks for new shards.
        behind: By shard, how many seconds its reader is behind its end.

    """

    follow: bool = True
    sync: float = 60.0

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.behind: dict[str, float] = {}

    @abstractmethod
    def shards(self) -> list[SourceShard]:
        """
        Return all existing shards; blocks.

        Raises:
            ShardsUnavailable: If they can't be listed for now.
            SourceFailed: If they can't be listed.

        """

    @abstractmethod
    def beginning(self, shard: SourceShard) -> object:
        """
        Return where a shard begins if the stream has no checkpoint.

        Plain JSON, ``[sequence number or name, sub-sequence number, ...]``, of which
        the worker gets the first two items; None: the first record.
        """

    @abstractmethod
    def records(
        self, shard: str, position: object
    ) -> AsyncGenerator[AnnotatedRun | None, None]:
        """
        Yield the records of a shard after a position; None once the shard has ended.

        Without :attr:`follow` this also ends where there is nothing more for now, but
        then without None.

        Raises:
            SourceFailed: If the records can't be read.

        """

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        """Yield the records of one shard after the other, as needed for a trial."""
        for shard in self.shards():
            if (begin := self.beginning(shard)) == AT_END:
                continue
            async with aclosing(self.records(shard.name, begin)) as records:
                async for run in records:
                    if run is not None:
                        yield run

    def complete(self) -> None:
        """Let readers end where there is nothing more."""
        self.follow = False
