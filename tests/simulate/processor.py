"""A simulated record processor, which checks its records, and dies at times."""

from __future__ import annotations

import base64
import json
import random
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from etlstage.testing import ScriptedWorker
from etlstage.testing.scripted import Stream

if TYPE_CHECKING:
    from tests.simulate.shards import Runner, ShardSimulation

__all__ = ("NOTHING", "Number", "Processor", "number_in")

Number = tuple[int, int]
"""A record's sequence number, and its place in an aggregated record."""
NOTHING: Final = (-1, 0)
"""The number before the first record of a shard."""


class Processor:
    """One process with a shard."""

    def __init__(
        self, simulation: ShardSimulation, runner: Runner, worker: ScriptedWorker
    ) -> None:
        self._simulation = simulation
        self._runner = runner
        self._worker = worker
        self._chance = random.Random(simulation.chance.getrandbits(64))  # noqa: S311
        self._lines: deque[Any] = deque()
        self._rest = b""
        self._shard = ""
        self._resets = 0
        self._last = NOTHING
        self._held: set[int] = set()
        self._lost = False

    async def run(self) -> int:
        """Run until the end of stdin, or until the process dies."""
        status = await self._live()
        if status:
            self._simulation.killers |= self._held
        return status

    async def _live(self) -> int:
        async for message in Stream(self._next):
            action = message["action"]
            self._held = {_message(record) for record in message.get("records", ())}
            await self._simulation.pause()
            if self._simulation.dies():
                return 3
            if action == "initialize":
                self._shard = message["shardId"]
                self._resets = self._simulation.resets(self._shard)
                self._last = _parsed(
                    message["sequenceNumber"], message.get("subSequenceNumber")
                )
                self._simulation.begin(self._runner, self._shard, self._last)
            elif action == "processRecords":
                for record in message["records"]:
                    if not await self._process(record):
                        return 3
            elif action == "shardEnded" or (
                action == "shutdownRequested" and self._chance.random() < 0.7
            ):
                await self._checkpoint(None)
            if self._simulation.dies():
                return 3
            await self._say(action="status", responseFor=action)
        return 0

    async def _process(self, record: Mapping[str, Any]) -> bool:
        simulation, shard = self._simulation, self._shard
        number = _parsed(record["sequenceNumber"], record.get("subSequenceNumber"))
        message = _message(record)
        may = simulation.expected(shard, self._last)
        if number not in may:
            simulation.violate(
                f"a worker of {shard} is given {number}, expected {may} behind {self._last}"
            )
        self._last = number
        await simulation.pause()
        if simulation.kills(message) or simulation.dies():
            return False
        if self._lost:
            return True
        if self._resets == simulation.resets(shard):
            simulation.process(shard, number)
        commits = 1.0 if simulation.sound else simulation.scenario.commits
        if self._chance.random() < commits:
            sub = record.get("subSequenceNumber")
            await self._checkpoint(record["sequenceNumber"], sub)
        return not simulation.dies()

    async def _checkpoint(self, number: str | None, sub: int | None = None) -> None:
        await self._say(
            action="checkpoint", sequenceNumber=number, subSequenceNumber=sub
        )
        answer = await self._next()
        if answer is None:
            return
        error = answer["error"]
        if error:
            self._lost |= error == "ShutdownException"
        elif number is not None and self._resets == self._simulation.resets(
            self._shard
        ):
            row = self._simulation.committed(self._shard)
            if number_in(row.position) < _parsed(number, sub) and not row.ended:
                self._simulation.violate(
                    f"a worker of {self._shard} has committed {number}.{sub}, and the"
                    f" table has {row.position}"
                )

    async def _next(self) -> Any:  # noqa: ANN401 - JSON
        """Return the next line; None at the end."""
        while not self._lines:
            data = await self._worker.read()
            if not data:
                return None
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._lines.extend(map(json.loads, lines))
        return self._lines.popleft()

    async def _say(self, **message: object) -> None:
        await self._worker.write(json.dumps(message).encode() + b"\n")


def _message(record: Mapping[str, Any]) -> int:
    number: int = json.loads(base64.b64decode(record["data"]))["n"]
    return number


def _parsed(sequence: str | None, sub: int | None) -> Number:
    if sequence is None or not sequence.isdecimal():
        return NOTHING
    return int(sequence), sub or 0


def number_in(position: str | None) -> Number:
    """Return the last record that a stored position covers."""
    match None if position is None else json.loads(position):
        case [str(sequence), int(sub), *_]:
            return _parsed(sequence, sub)
        case [str(sequence), *_]:
            return _parsed(sequence, 0)
    return NOTHING
