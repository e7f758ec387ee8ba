"""A worker of kind E as the source of a pipeline."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import anyio

from etlstage.errors import SourceFailed
from etlstage.messages import Position, Run
from etlstage.pipeline.delivery.position import PositionFile
from etlstage.pipeline.interfaces import Source
from etlstage.protocol.base import Shape
from etlstage.stage import OffsetPolicy, Stage
from etlstage.supervisor import AsyncSupervisor

__all__ = ("WorkerSource",)


class WorkerSource(Source):
    """
    Extracts with a worker.

    Args:
        stage: The stage, in plain or cyclic mode.
        offsets: Of a cyclic stage; by default the worker keeps them.
        every: Seconds between the end of a round and the next, forever. None:
            a plain stage runs once, a cyclic one until there is nothing new.
        state: Directory in which the supervisor keeps its offset. None: each run
            starts from ``offsets.start``.

    """

    def __init__(
        self,
        stage: Stage,
        *,
        offsets: OffsetPolicy | None = None,
        every: float | None = None,
        state: Path | None = None,
    ) -> None:
        super().__init__(stage.name)
        self._stage = stage
        self._offsets = offsets or OffsetPolicy()
        self._every = every
        self._draining = anyio.Event()
        self._file = PositionFile(state, stage.name) if state is not None else None

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        """Yield the messages of all rounds, and the position behind each."""
        async with (
            AsyncSupervisor(self._stage) as supervisor,
            aclosing(self._rounds(supervisor)) as rounds,
        ):
            async for item in rounds:
                yield item

    def drain(self) -> bool:
        """End behind the round that is under way; a plain run has no such point."""
        self._draining.set()
        return self._stage.dialect.shape is Shape.MESSAGE

    async def acknowledge(self, position: Position) -> None:
        """Store the offset: all before it is durable downstream."""
        if self._file is not None:
            # A small file, and the loop must not run on before it is there.
            self._file.store(position.value)

    def _rounds(
        self, supervisor: AsyncSupervisor
    ) -> AsyncGenerator[Run | Position, None]:
        if (
            self._stage.dialect.shape is Shape.MESSAGE
            and self._offsets.by == "supervisor"
        ):
            return self._rounds_by_offset(supervisor)
        return self._plain_rounds(supervisor)

    async def _plain_rounds(
        self, supervisor: AsyncSupervisor
    ) -> AsyncGenerator[Run | Position, None]:
        while True:
            found = False
            async with aclosing(supervisor.extract_runs()) as runs:
                async for run in runs:
                    found = True
                    yield run
            if await self._pause():
                return
            if self._every is None and (
                self._stage.dialect.shape is Shape.STREAM or not found
            ):
                return

    async def _rounds_by_offset(
        self, supervisor: AsyncSupervisor
    ) -> AsyncGenerator[Run | Position, None]:
        policy = self._offsets
        start = self._first_offset()
        while policy.end is None or start < policy.end:
            end = start + policy.step
            if policy.end is not None:
                end = min(end, policy.end)
            found = False
            async with aclosing(self._round(supervisor, start, end)) as runs:
                async for run in runs:
                    found = True
                    yield run
            if found or policy.end is not None:
                start = end
                yield Position(end)
            elif self._every is None:
                return
            if await self._pause():
                return

    async def _pause(self) -> bool:
        """Wait until the next round is due; return whether there shall be none."""
        with anyio.move_on_after(self._every or 0):
            await self._draining.wait()
        return self._draining.is_set()

    def _round(
        self, supervisor: AsyncSupervisor, start: int, end: int
    ) -> AsyncGenerator[Run, None]:
        template = self._offsets.template
        return supervisor.extract_runs(start=start, end=end, template=template)

    def _first_offset(self) -> int:
        stored = self._file.load() if self._file is not None else None
        if stored is None:
            return self._offsets.start
        if not isinstance(stored, int):
            raise SourceFailed(
                f"stage {self.name}: the stored position is {stored!r},"
                " expected an integer",
                stage=self.name,
            )
        return stored
