"""Passes what executors have staged, in order, to a sink that takes messages."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Self

from pyspark.sql import DataFrame

from etlstage.messages import Position
from etlstage.pipeline.interfaces import Output, Sink
from etlstage.pipeline.ledger import Account
from etlstage.spark.dataframe.source import DataFrameSource
from etlstage.spark.sink import SparkSink

__all__ = ("StagedCapture",)


class StagedCapture(SparkSink):
    """Writes staged messages to a sink, whose account it uses."""

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink.name)
        self.account: Account = sink.account
        self._sink = sink

    def landed(self) -> str:
        """Return, in one line for a human, what was loaded."""
        return self._sink.landed()

    def output(self) -> Output:
        """Return where the messages end."""
        return self._sink.output()

    async def __aenter__(self) -> Self:
        """Open the sink."""
        await self._sink.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the sink."""
        await self._sink.__aexit__(kind, error, trace)

    async def load(self, messages: DataFrame, starts: Mapping[int, int]) -> None:
        """Write the messages, partition by partition."""
        rows = messages.orderBy("partition", "place").select("raw")
        source = DataFrameSource(rows, message="raw", name=self._sink.name)
        try:
            async with aclosing(source.runs()) as runs:
                async for run in runs:
                    assert not isinstance(run, Position)
                    await self._sink.write(run)
        finally:
            await source.aclose()
        await self._sink.finish()
