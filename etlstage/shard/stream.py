"""A source that has shards of its own, each of which is read by itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final, NamedTuple

from etlstage.messages import AnnotatedRun, Position, Run
from etlstage.pipeline.interfaces import Source

__all__ = ("AT_END", "ShardedSource", "SourceShard")

AT_END: Final[list[object]] = ["SHARD_END", 0]
"""Where a shard begins that is not to be read at all."""


class SourceShard(NamedTuple):
    """A shard as its stream has it."""

    name: str
    parents: tuple[str, ...] = ()
    """Shards that were split or merged to make it; some may be gone."""
    closed: bool = False
    """Nothing is added to it any more."""


class ShardedSource(Source):
    """
    Where records come from shards, which end while others begin.

    Attributes:
        follow: Whether to wait for more where there is no more, until stopped.
        sync: Seconds between two looks for new shards.
        behind: Seconds that the reader of each shard is behind its end.

    """

    follow: bool = True
    sync: float = 60.0

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.behind: dict[str, float] = {}

    @abstractmethod
    def shards(self) -> list[SourceShard]:
        """
        Return all shards that there are; blocks.

        Raises:
            SourceFailed: If they can't be had.

        """

    @abstractmethod
    def beginning(self, shard: SourceShard) -> object:
        """
        Return where a shard begins of a stream that has no checkpoint.

        Plain JSON, ``[sequence number or name, sub-sequence number, ...]``, of which the
        worker gets the first two; None: with its first record.
        """

    @abstractmethod
    def records(
        self, shard: str, position: object
    ) -> AsyncGenerator[AnnotatedRun | None, None]:
        """
        Yield the records of a shard behind a position; None where the shard has ended.

        Without :attr:`follow` there is none where only no more has come yet.

        Raises:
            SourceFailed: If they can't be read.

        """

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        """Yield the records of one shard after the other, as a trial reads them."""
        for shard in self.shards():
            if (begin := self.beginning(shard)) == AT_END:
                continue
            async with aclosing(self.records(shard.name, begin)) as records:
                async for run in records:
                    if run is not None:
                        yield run

    def complete(self) -> None:
        """Let readers end where there is no more."""
        self.follow = False
