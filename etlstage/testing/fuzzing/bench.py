"""
The processes that cases are played to: one for many cases, or a fresh one for each.

Starting a process takes time, so the next one is started while the current one is in
use. A case that fails in a process that has seen other cases may fail because of them;
``fuzz.py`` finds that out.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple, Self

import anyio
import anyio.abc

from etlstage.stage import Stage
from etlstage.testing.fuzzing.oracle import (
    AnsweredSteps,
    Case,
    CaseFailed,
    Oracles,
    compare,
    converse,
    end,
    judge,
)
from etlstage.testing.fuzzing.steps import Saying, UnderTest, under_test
from etlstage.transport import Launch, launch_worker

__all__ = ("Bench",)


class _Place(NamedTuple):
    """A process, and the event that ends it."""

    stage: Stage
    worker: UnderTest
    left: anyio.Event
    case: Case
    """One of the cases that it was started for."""
    seen: list[Saying]

    def everything(self) -> Case:
        """Return everything that the process has received, as one case."""
        return self.case.having(self.seen)


class Bench:
    """
    Plays cases to the workers of a stage; an async context manager.

    Args:
        stage: Command and dialect.
        oracles: Properties that the replies must have.
        timeout: How long each reply, and the exit, may take, in seconds.
        launch: Starts the workers.

    Attributes:
        timeout: The current timeout, in seconds.
        replies: Number of replies in all cases that passed.
        refused: Number of refusals among them.

    """

    def __init__(
        self,
        stage: Stage,
        oracles: Oracles,
        *,
        timeout: float,
        launch: Launch = launch_worker,
    ) -> None:
        self.timeout = timeout
        self.replies: int = 0
        self.refused: int = 0
        self._launch = launch
        self._stage = stage
        self._oracles = oracles
        self._next: _Place | None = None
        self._kept: _Place | None = None

    async def __aenter__(self) -> Self:
        self._tasks: anyio.abc.TaskGroup = anyio.create_task_group()
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, error: object, *_: object) -> None:
        if error is not None:
            self._tasks.cancel_scope.cancel()
        for place in (self._next, self._kept):
            if place is not None:
                place.left.set()
        await self._tasks.__aexit__(None, None, None)

    async def fresh(self, case: Case) -> CaseFailed | None:
        """Play a case to a fresh process; return its failure, if it failed."""
        stage = case.on(self._stage)
        try:
            exchanged = await judge(
                lambda: self._fresh(stage, case), case, self._oracles
            )
            self._count(exchanged)
        except CaseFailed as failed:
            return failed
        return None

    async def again(self, case: Case) -> tuple[CaseFailed | None, Case]:
        """
        Play a case to the process that has seen the previous cases.

        Returns:
            The failure, if the case failed, and everything the process has received.

        """
        stage = case.on(self._stage)
        if self._kept is None or self._kept.stage != stage:
            await self.renew()
            self._kept = await self._start(stage, case)
        kept = self._kept
        kept.seen.extend(case.steps)
        kept.worker.timeout = self.timeout
        try:
            exchanged = await converse(kept.worker, case.steps)
            await compare(
                lambda: self._fresh(stage, case), kept.worker, exchanged, self._oracles
            )
            self._count(exchanged)
        except CaseFailed as failed:
            kept.left.set()
            self._kept = None
            return failed, kept.everything()
        return None, kept.everything()

    async def renew(self) -> tuple[CaseFailed | None, Case]:
        """End the shared process, if there is one; return the same as :meth:`again`."""
        kept, self._kept = self._kept, None
        if kept is None:
            return None, Case(())
        try:
            await end(kept.worker)
        except CaseFailed as failed:
            return failed, kept.everything()
        finally:
            kept.left.set()
        return None, kept.everything()

    def _count(self, exchanged: AnsweredSteps) -> None:
        for _, replies in exchanged:
            self.replies += len(replies)
            self.refused += sum(reply.refused is not None for reply in replies)

    @asynccontextmanager
    async def _fresh(self, stage: Stage, case: Case) -> AsyncIterator[UnderTest]:
        place, self._next = self._next, None
        if place is not None and place.stage != stage:
            place.left.set()
            place = None
        place = place or await self._start(stage, case)
        self._next = await self._start(stage, case)
        place.worker.timeout = self.timeout
        try:
            yield place.worker
        finally:
            place.left.set()

    async def _start(self, stage: Stage, case: Case) -> _Place:
        worker = under_test(stage, launch=self._launch)
        place = _Place(stage, worker, anyio.Event(), case, [])
        await self._tasks.start(self._host, place)
        return place

    async def _host(
        self, place: _Place, *, task_status: anyio.abc.TaskStatus[None]
    ) -> None:
        async with place.worker:
            task_status.started()
            await place.left.wait()
