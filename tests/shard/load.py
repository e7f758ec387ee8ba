"""Record processors in memory, and runners in virtual time, without threads."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncGenerator, Callable, Container
from contextlib import aclosing
from typing import Any

import anyio
import anyio.to_thread
import pytest

from etlstage.pipeline import Pipeline, Report
from etlstage.testing import ScriptedWorker, run_virtually

__all__ = ("Processors", "run_all", "virtually")


class Processors:
    """
    Scripted record processors, one process for each shard.

    Args:
        at_end: What the first ``fails`` processors of each shard do at its end: exit
            with that status, or, None, reply without a checkpoint.
        fails: Number of processors of each shard that fail at its end.
        pause: Seconds for each record.
        every: Records between two checkpoints.
        killers: Records at which each processor exits with status 3.

    """

    def __init__(
        self,
        *,
        at_end: int | None = None,
        fails: int = 0,
        pause: float = 0.1,
        every: int = 2,
        killers: Container[int] = (),
    ) -> None:
        self.done: dict[str, list[int]] = {}
        self.numbers: dict[int, str] = {}
        """The sequence number of each record."""
        self.actions: list[tuple[str, str]] = []
        self.errors: list[str | None] = []
        self._at_end, self._fails = at_end, fails
        self._pause, self._every, self._killers = pause, every, killers

    async def __call__(self, worker: ScriptedWorker) -> int:
        """Run as the processor of one shard."""
        async with aclosing(self._lines(worker)) as lines:
            return await self._live(worker, lines)

    async def _live(
        self, worker: ScriptedWorker, lines: AsyncGenerator[Any, None]
    ) -> int:
        shard, since = "", 0
        async for message in lines:
            action = message["action"]
            shard = message.get("shardId", shard)
            self.actions.append((shard, action))
            for record in message.get("records", ()):
                await anyio.sleep(self._pause)
                number = json.loads(base64.b64decode(record["data"]))["n"]
                if number in self._killers:
                    return 3
                last = record["sequenceNumber"]
                assert self.numbers.setdefault(number, last) == last
                self.done.setdefault(shard, []).append(number)
                since += 1
                if since == self._every:
                    since = 0
                    sub = record.get("subSequenceNumber")
                    await self._checkpoint(worker, lines, last, sub)
            fails = self.actions.count((shard, "initialize")) <= self._fails
            if action == "shardEnded" and fails and self._at_end is not None:
                await worker.complain("boom at end")
                return self._at_end
            if action == "shutdownRequested" or (action == "shardEnded" and not fails):
                await self._checkpoint(worker, lines, None)
            await _say(worker, action="status", responseFor=action)
        return 0

    async def _checkpoint(
        self,
        worker: ScriptedWorker,
        lines: AsyncGenerator[Any, None],
        number: str | None,
        sub: int | None = None,
    ) -> None:
        asked = {"sequenceNumber": number, "subSequenceNumber": sub}
        await _say(worker, action="checkpoint", **asked)
        self.errors.append((await anext(lines))["error"])

    @staticmethod
    async def _lines(worker: ScriptedWorker) -> AsyncGenerator[Any, None]:
        held = b""
        while data := await worker.read():
            *lines, held = (held + data).split(b"\n")
            for line in lines:
                yield json.loads(line)


async def _say(worker: ScriptedWorker, **message: object) -> None:
    await worker.write(json.dumps(message).encode() + b"\n")


async def run_all(*runners: Pipeline) -> list[Report]:
    """Return the reports of runners that run at the same time."""
    reports: list[Report] = []

    async def run(one: Pipeline) -> None:
        reports.append(await one.run())

    async with anyio.create_task_group() as tasks:
        for one in runners:
            tasks.start_soon(run, one)
    return reports


async def drained_after(seconds: float, runner: Pipeline) -> Report:
    """Run a runner, drain it after so many seconds, and return its report."""

    async def drain() -> None:
        await anyio.sleep(seconds)
        runner.drain()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(drain)
        (report,) = await run_all(runner)
    return report


def virtually(test: Callable[[], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Run a test in virtual time, with calls of threads made in the event loop."""

    async def run_sync(
        function: Callable[..., Any], *args: object, **_: object
    ) -> object:
        await anyio.sleep(0.01)
        return function(*args)

    def run(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(anyio.to_thread, "run_sync", run_sync)
        run_virtually(test)

    run.__doc__, run.__name__ = test.__doc__, test.__name__
    return run
