"""A worker of kind L as the sink of a pipeline."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import structlog

from etlstage.errors import WorkerLost
from etlstage.messages import Run
from etlstage.supervisor import AsyncSupervisor, Stage

__all__ = ("WorkerSink",)

_log = structlog.get_logger("etlstage")


class WorkerSink:
    """
    Loads with workers: a message counts as loaded once it is answered.

    What the worker does with a message before its EOP is its own matter; a run that
    fails may have loaded messages that it reports as lost.
    """

    def __init__(self, stage: Stage) -> None:
        self.name = stage.name
        self.received = 0
        self.loaded = 0
        self.failed = 0
        self._supervisor = AsyncSupervisor(stage)
        self._outputs = 0
        self._finished = False

    async def __aenter__(self) -> Self:
        """Start the workers."""
        await self._supervisor.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the workers."""
        await self._supervisor.__aexit__(kind, error, trace)

    async def write(self, run: Run) -> None:
        """Pass a run through the workers; return when all of it is answered."""
        self.received += len(run)
        error: Exception | None = None
        async for answer in self._supervisor.answers([run]):
            if answer.error is None:
                self.loaded += len(answer.messages)
                self._note_outputs(sum(map(len, answer.groups)))
            else:
                if not isinstance(answer.error, WorkerLost):
                    self.failed += len(answer.messages)
                error = error or answer.error
        if error is not None:
            raise error

    async def flush(self) -> None:
        """Do nothing: what was written was answered."""

    async def finish(self) -> None:
        """Take note that the input was whole."""
        self._finished = True

    def landed(self) -> str:
        """Return how many messages the workers have confirmed."""
        whole = "whole" if self._finished else "not whole"
        return f"{self.loaded} messages confirmed by stage {self.name}; {whole}"

    def _note_outputs(self, count: int) -> None:
        # The page: "L-stage produces empty transformation result".
        if count and not self._outputs:
            _log.warning(
                "load worker writes messages, which go nowhere", stage=self.name
            )
        self._outputs += count
