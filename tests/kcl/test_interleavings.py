"""
Shards with processors, under any interleaving of what may happen to them.

Batches of any size, checkpoints at any place, errors and slow stores, deaths, lost
leases, requests to shut down, splits, restarts: everything is real but the processors,
which are scripts, and time, which is virtual. Hypothesis draws each event when it is
needed.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from random import Random
from typing import Any, Final

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from etlstage.messages import AnnotatedRun, Run, StageKind
from etlstage.protocol.events import (
    Added,
    Assignment,
    CommitAnswered,
    CommitAsked,
    Event,
    Farewell,
    FarewellReason,
    Opened,
    Ready,
)
from etlstage.protocol.kcl.checkpoint import SHARD_END, ShardPosition, position_of, rank
from etlstage.protocol.kcl.lines import RecordColumn
from etlstage.protocol.kcl.processor import ProcessorSession
from etlstage.protocol.kcl.settings import KclDialect
from etlstage.stage import (
    BatchPolicy,
    ErrorPolicy,
    RestartPolicy,
    Stage,
    Timeouts,
)
from etlstage.supervisor import AsyncSupervisor, CommitRequest
from etlstage.testing import ScriptedLaunch, ScriptedWorker, run_virtually

pytestmark = pytest.mark.core

EXAMPLES: Final = int(os.environ.get("ETLSTAGE_INTERLEAVINGS", "40"))
"""10,000 were run by hand."""
DEATHS: Final = 4
"""In all: a record at which processors die repeatedly would be a dead letter."""


class _Death(Exception):
    pass


class Life:
    """
    One process.

    Args:
        world: The shards, and what happens to them.
        worker: The streams of the process.

    """

    def __init__(self, world: World, worker: ScriptedWorker) -> None:
        self._world = world
        self._worker = worker
        self._session = ProcessorSession()
        self._waiting: list[Event] = []

    async def run(self) -> int:
        """Process records until stdin ends."""
        try:
            while (event := await self._next()) is not None:
                await self._act(event)
        except _Death:
            return 9
        return 0

    async def _act(self, event: Event) -> None:
        world = self._world
        match event:
            case Ready():
                share = self._session.assignment
                assert share is not None
                self._shard = share.name
                # It begins at the last checkpoint, and nowhere else.
                assert position_of(share.position) == world.stored[share.name]
                self._last = world.place(share.name)
                await self._say(event)
            case Opened(messages=AnnotatedRun() as run):
                numbers = [int(n) for n in run.columns[RecordColumn.SEQUENCE]]
                after = self._last + 1
                assert numbers == world.numbers[self._shard][after:][: len(numbers)]
                self._last += len(numbers)
                world.delivered[self._shard] = max(
                    self._last, world.delivered[self._shard]
                )
                for number in numbers:
                    await self._process(number)
                await self._say(Added(0, (), ended=True))
            case Farewell(why=why):
                if why is FarewellReason.DRAIN and world.chance(0.5):
                    await self._ask(None)
                while why is FarewellReason.ENDED and await self._ask(None):
                    self._die(0.1)
                await self._say(event)

    async def _process(self, number: int) -> None:
        if self._world.chance(0.2):
            await self._ask(None if self._world.chance(0.5) else [str(number), 0])
        if self._world.chance(0.1):
            await self._worker.write(b"a print")
        if self._world.chance(0.1):
            await anyio.sleep(self._world.random.random())
        self._die(0.05)

    async def _ask(self, position: object) -> str | None:
        """Ask for a checkpoint; return why it was not stored."""
        await self._say(CommitAsked(0, position))
        answer = await self._next()
        if answer is None:
            raise _Death
        assert isinstance(answer, CommitAnswered)
        return answer.error

    def _die(self, chance: float) -> None:
        if self._world.deaths < DEATHS and self._world.chance(chance):
            self._world.deaths += 1
            raise _Death

    async def _say(self, event: Event) -> None:
        self._session.send(event, 0.0)
        for data in self._session.data_to_send():
            await self._worker.write(data)

    async def _next(self) -> Event | None:
        while not self._waiting:
            if not (data := await self._worker.read()):
                return None
            self._session.receive_data(data, 0.0)
            self._waiting += self._session.events_received()
        return self._waiting.pop(0)


class World:
    """Shards, their stored checkpoints, and what has been delivered."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.deaths = 0
        self.numbers: dict[str, list[int]] = {}
        self.stored: dict[str, ShardPosition] = {}
        self.delivered: dict[str, int] = {}
        """Place of the last record that was delivered."""
        self.acknowledged: dict[str, int] = {}

    def chance(self, share: float) -> bool:
        """Return True with the given probability."""
        # Hypothesis shrinks the number to 0, at which nothing happens.
        return self.random.random() > 1 - share

    def place(self, shard: str) -> int:
        """Return the place of the last record that its checkpoint covers."""
        stored = rank(self.stored[shard])
        return sum((n, 0) <= stored for n in self.numbers[shard]) - 1

    async def run(self, shard: str, numbers: Sequence[int], depth: int = 0) -> None:
        """Process a shard to its end, and then its children."""
        splits = depth < 2 and self.chance(0.4)
        cut = self.random.randint(0, len(numbers)) if splits else len(numbers)
        self.numbers[shard] = [*numbers[:cut]]
        self.stored[shard] = position_of(None)
        self.delivered[shard] = self.acknowledged[shard] = -1
        while self.stored[shard].sequence != SHARD_END:
            await self._run(shard)
        assert self.delivered[shard] == cut - 1
        async with anyio.create_task_group() as tasks:
            for child in range(2 * splits):
                rest = [n for n in numbers[cut:] if n % 2 == child]
                tasks.start_soon(self.run, f"{shard}.{child}", rest, depth + 1)

    async def _run(self, shard: str) -> None:
        """Run one supervisor for a shard, until the shard ends or is lost."""
        supervisor = AsyncSupervisor(
            Stage(
                name="load",
                kind=StageKind.LOAD,
                worker=["no-such-program"],
                dialect=KclDialect(),
                batch=BatchPolicy(size=self.random.randint(1, 5)),
                restart=RestartPolicy(max=1000, delay=0.1),
                on_error=ErrorPolicy(retries=1000),
                timeout=Timeouts(message=60, commit=30),
            ),
            launch=ScriptedLaunch(lambda worker: Life(self, worker).run()),
            commit=self._store,
            assignment=Assignment(shard, self.stored[shard]),
        )
        lost = [FarewellReason.LOST, FarewellReason.DRAIN]
        why = self.random.choice([*[FarewellReason.ENDED] * 3, *lost])
        begin = self.place(shard) + 1
        rest = self.numbers[shard][begin:]
        if why in lost:
            rest = rest[: self.random.randint(0, len(rest))]

        async def runs() -> AsyncIterator[Run]:
            at = 0
            while at < len(rest):
                size = self.random.randint(1, 4)
                part = rest[at : at + size]
                data = [b"%d" % n for n in part]
                yield AnnotatedRun(data, sequence=[*map(str, part)])
                at += size
                if self.chance(0.2):
                    await anyio.sleep(1)
            supervisor.finish(why=why)

        async with supervisor:
            async for outcome in supervisor.answers(runs()):
                if outcome.error is None:
                    end = begin + outcome.start + len(outcome.messages) - 1
                    # In order, none twice, and never before its checkpoint.
                    assert outcome.start + begin == self.acknowledged[shard] + 1
                    self.acknowledged[shard] = end
                    assert end <= self.place(shard) <= self.delivered[shard]
        self.acknowledged[shard] = self.place(shard)

    async def _store(self, request: CommitRequest) -> None:
        assert request.assignment is not None
        shard, position = request.assignment.name, position_of(request.position)
        if self.chance(0.2):
            await anyio.sleep(2 * self.random.random())
        if self.chance(0.1):
            raise RuntimeError("ThrottlingException")
        assert rank(self.stored[shard]) < rank(position)
        self.stored[shard] = position
        assert self.place(shard) <= self.delivered[shard]


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(st.randoms(use_true_random=False), st.integers(0, 12))
@pytest.mark.timeout(0 if EXAMPLES > 100 else 20)
def test_any_interleaving(random: Random, count: int) -> None:
    """No record is skipped, and only records without a checkpoint come again."""

    async def main() -> Any:  # noqa: ANN401
        world = World(random)
        with anyio.fail_after(100_000), capture_logs():
            await world.run("s", range(1, count + 1))
        return world

    world = run_virtually(main)
    assert sorted(n for part in world.numbers.values() for n in part) == [
        *range(1, count + 1)
    ]
