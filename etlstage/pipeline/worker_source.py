"""A worker of kind E as the source of a pipeline."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import anyio

from etlstage.errors import Faults, SourceFailed
from etlstage.messages import Position, Run
from etlstage.pipeline.interfaces import Source
from etlstage.pipeline.offsets import ask_offset, fell_back, steps
from etlstage.protocol.base import Shape
from etlstage.stage import OffsetPolicy, Stage
from etlstage.supervisor import AsyncSupervisor
from etlstage.telemetry import Meter
from etlstage.transport import Launch, launch_worker

__all__ = ("WorkerSource",)


class WorkerSource(Source):
    """
    Extracts with a worker.

    Args:
        stage: The stage, in plain or cyclic mode.
        offsets: Offsets of a cyclic stage; by default the worker keeps them.
        every: Seconds to pause whenever everything is read; the extraction never ends.
            None: a plain stage runs once; a cyclic one runs until everything is read
            that was there when it began or, with offsets kept by the worker, until
            there is nothing new.
        meter: Counts what happens, see :mod:`etlstage.telemetry`.
        launch: Starts the workers; by default, as their dialect requires.

    """

    def __init__(
        self,
        stage: Stage,
        *,
        offsets: OffsetPolicy | None = None,
        every: float | None = None,
        meter: Meter | None = None,
        launch: Launch = launch_worker,
    ) -> None:
        super().__init__(stage.name)
        self._meter = meter
        self._launch = launch
        self._stage = stage
        self._offsets = offsets or OffsetPolicy()
        self._every = every
        self._draining = anyio.Event()
        self._resumed: int | None = None
        self._reached: int | None = None
        self._passed = False  # whether the current round has yielded anything
        self.goes_on: bool = self._by_offset
        self.rereads: bool = self._by_offset

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        """Yield the messages of all rounds and, with offsets, positions after them."""
        supervisor = AsyncSupervisor(
            self._stage, meter=self._meter, launch=self._launch
        )
        self.supervisor: AsyncSupervisor | None = supervisor
        try:
            async with supervisor, aclosing(self._rounds(supervisor)) as rounds:
                async for item in rounds:
                    self.faults: Faults = supervisor.faults
                    yield item
        finally:
            self.faults = supervisor.faults
            self.busy: float = supervisor.busy
        if (doubt := supervisor.doubt) is not None:
            raise doubt

    def resume(self, position: object) -> None:
        """Begin at an offset; raises SourceFailed if the stage can't reach it."""
        start, end = self._offsets.start, self._offsets.end
        expected = ""
        if not isinstance(position, int) or isinstance(position, bool):
            expected = "an integer"
        elif not self._by_offset:
            expected = "none"
        elif isinstance(start, int) and position < (least := min(start, 0)):
            expected = f"{least} or more"
        elif isinstance(end, int) and position > end:
            expected = f"no more than offsets.end, {end}"
        if expected or not isinstance(position, int):
            raise SourceFailed(
                f"stage {self.name}: the recorded position is {position!r}, expected"
                f" {expected}; 'etlstage state reset' starts from the beginning",
                stage=self.name,
            )
        self._resumed = position

    def drain(self) -> bool:
        """
        End after the current round, if a worker has it.

        A plain run has no point at which to end. And a worker that has not started yet,
        or is not ready, may never be: then a round that has yielded nothing is not
        waited for. Once a worker has answered, each round is waited for, as its answer
        may have been received but not passed on.
        """
        self._draining.set()
        supervisor, under_way = self.supervisor, self._passed
        if supervisor is not None:
            under_way |= supervisor.answered or supervisor.slowest is not None
        return self._stage.dialect.shape is Shape.MESSAGE and under_way

    @property
    def _by_offset(self) -> bool:
        cyclic = self._stage.dialect.shape is Shape.MESSAGE
        return cyclic and self._offsets.by == "supervisor"

    def _rounds(
        self, supervisor: AsyncSupervisor
    ) -> AsyncGenerator[Run | Position, None]:
        if self._by_offset:
            return self._rounds_by_offset(supervisor)
        return self._plain_rounds(supervisor)

    async def _plain_rounds(
        self, supervisor: AsyncSupervisor
    ) -> AsyncGenerator[Run | Position, None]:
        runs_once = self._stage.dialect.shape is Shape.STREAM
        while True:
            self._passed = False
            async with aclosing(supervisor.extract_runs()) as runs:
                async for run in runs:
                    self._passed = True
                    yield run
            if self._passed and not runs_once:
                # There may be more input: pause only when everything is read.
                if self._draining.is_set():
                    return
            elif self._every is None or await self._pause():
                return

    async def _rounds_by_offset(
        self, supervisor: AsyncSupervisor
    ) -> AsyncGenerator[Run | Position, None]:
        policy, template = self._offsets, self._offsets.template
        reached = await self._first_offset(supervisor)
        while True:
            end = await self._end(supervisor, reached)
            for start, stop in steps(reached, end, policy.step):
                self._passed = False
                runs = supervisor.extract_runs(start=start, end=stop, template=template)
                async with aclosing(runs):
                    async for run in runs:
                        self._passed = True
                        yield run
                self._reached = reached = stop
                yield Position(stop)
                if self._draining.is_set():
                    return
            if policy.end != "latest" or self._every is None or await self._pause():
                return

    async def _end(self, supervisor: AsyncSupervisor, reached: int) -> int:
        """Return the current end of the offsets."""
        end = self._offsets.end
        if end != "latest":
            return end
        latest = await ask_offset(supervisor, end)
        if self._reached is not None and latest < self._reached:
            remedy = "use 'etlstage state reset'" if self._resumed else "run it again"
            raise fell_back(self.name, latest, reached, remedy)
        return latest

    async def _pause(self) -> bool:
        """Wait until the next check for input; return whether the run drains."""
        with anyio.move_on_after(self._every):
            await self._draining.wait()
        return self._draining.is_set()

    async def _first_offset(self, supervisor: AsyncSupervisor) -> int:
        self._reached = self._resumed
        if self._reached is not None:
            return self._reached
        start = self._offsets.start
        return start if start != "initial" else await ask_offset(supervisor, start)
