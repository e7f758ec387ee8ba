"""
Workers that extract, in memory: one that is sound, and one for each planted bug.

A dictionary that all starts of a worker share takes the place of a real one's disk.
"""

from __future__ import annotations

import json
import random
from signal import SIGTERM
from typing import Any, ClassVar, Final

import anyio

from etlstage.testing import ScriptedWorker

__all__ = ("LINES", "Keeper", "Ranges")

LINES: Final = [b"line %d" % number for number in range(200)]


class Ranges:
    """Extracts ranges of offsets, and has no bug."""

    count: ClassVar[int] = 45
    """Number of lines that there are to extract."""

    def __init__(self, worker: ScriptedWorker, disk: dict[Any, int]) -> None:
        self.worker = worker
        self.disk = disk
        self.lines = LINES[: self.count]
        self.asked = 0
        self.rest = b""

    async def run(self) -> int | None:
        """Answer requests until there are no more."""
        while data := await self.worker.read():
            for request in self.split(data):
                self.asked += 1
                await self.do(json.loads(request))
        return None

    def split(self, data: bytes) -> list[bytes]:
        """Return the requests that a read completes."""
        *whole, self.rest = (self.rest + data).split(b"\n")
        return whole

    async def do(self, request: dict[str, Any]) -> None:
        """Answer one request."""
        match request:
            case {"offsets": "initial"}:
                await self.worker.reply(b"0")
            case {"offsets": _}:
                await self.say_latest()
            case _:
                await self.give(request["start"], request["end"])

    async def say_latest(self) -> None:
        """Return where the last line ends."""
        await self.worker.reply(b"%d" % self.latest())

    def latest(self) -> int:
        """Return where the last line ends."""
        return len(self.lines)

    async def give(self, start: int, end: int) -> None:
        """Reply with a range."""
        await self.worker.reply(*self.extract(start, end))

    def extract(self, start: int, end: int) -> list[bytes]:
        """Return the lines of a range."""
        return self.lines[start:end]


class EndInRange(Ranges):
    def extract(self, start: int, end: int) -> list[bytes]:
        return self.lines[start : end + 1]


class StartNotInRange(Ranges):
    def extract(self, start: int, end: int) -> list[bytes]:
        return self.lines[start + 1 : end]


class GoesOn(Ranges):
    at = 0

    def extract(self, start: int, end: int) -> list[bytes]:
        self.at += end - start
        return self.lines[self.at - end + start : self.at]


class NoOrder(Ranges):
    def extract(self, start: int, end: int) -> list[bytes]:
        return random.sample(self.lines[start:end], end - start)


class FallingLatest(Ranges):
    def latest(self) -> int:
        return len(self.lines) - self.asked


class WaveringLatest(Ranges):
    said = 0

    def latest(self) -> int:
        self.said += 1
        return len(self.lines) - (2, 0, 1)[self.said - 1]


class OtherLatest(Ranges):
    def latest(self) -> int:
        self.disk.setdefault(self.worker.pid, len(self.disk))
        return len(self.lines) - self.disk[self.worker.pid]


class LatestInWords(Ranges):
    async def say_latest(self) -> None:
        await self.worker.reply(b"end")


class Strict(Ranges):
    """Has no bug, and dies of a request that no supervisor makes."""

    first: ClassVar[int] = 100

    async def do(self, request: dict[str, Any]) -> None:
        if request == {"offsets": "initial"}:
            await self.worker.reply(b"%d" % self.first)
        else:
            await super().do(request)

    def latest(self) -> int:
        return self.first + len(self.lines)

    def extract(self, start: int, end: int) -> list[bytes]:
        assert self.first <= start < end <= self.latest()
        return self.lines[start - self.first : end - self.first]


class UnknownLatest(Ranges):
    async def say_latest(self) -> None:
        await self.worker.refuse("not known")


class NoInitial(Ranges):
    """Has no bug: ``initial`` is asked for only where a pipeline needs it."""

    async def do(self, request: dict[str, Any]) -> None:
        if request == {"offsets": "initial"}:
            await self.worker.reply()
        else:
            await super().do(request)


class DiesAtInitial(Ranges):
    async def do(self, request: dict[str, Any]) -> None:
        if request == {"offsets": "initial"}:
            raise SystemExit(4)
        await super().do(request)


class NoOffsets(Ranges):
    async def do(self, request: dict[str, Any]) -> None:
        if "offsets" in request:
            await self.worker.reply()
        else:
            await super().do(request)


class GivesOnce(Ranges):
    def __init__(self, worker: ScriptedWorker, disk: dict[Any, int]) -> None:
        super().__init__(worker, disk)
        self.gone: set[int] = set()

    def extract(self, start: int, end: int) -> list[bytes]:
        new = [n for n in range(start, min(end, len(self.lines))) if n not in self.gone]
        self.gone.update(new)
        return [self.lines[n] for n in new]


class SkipsRepeated(Ranges):
    def __init__(self, worker: ScriptedWorker, disk: dict[Any, int]) -> None:
        super().__init__(worker, disk)
        self.seen: list[tuple[int, int]] = []

    def extract(self, start: int, end: int) -> list[bytes]:
        self.seen.append((start, end))
        return self.lines[start:end] if self.seen.count((start, end)) == 1 else []


class MarksOnDisk(Ranges):
    def extract(self, start: int, end: int) -> list[bytes]:
        done = end - start > 20 and (start, end) in self.disk
        self.disk[start, end] = True
        return [] if done else self.lines[start:end]


class TenAPage(Ranges):
    def extract(self, start: int, end: int) -> list[bytes]:
        return self.lines[start : min(end, start + 10)]


class LosesLast(Ranges):
    def extract(self, start: int, end: int) -> list[bytes]:
        return self.lines[start : end - (1 < end - start < 40)]


class RefusesMany(Ranges):
    async def give(self, start: int, end: int) -> None:
        if end - start > 30:
            await self.worker.refuse("too many")
        else:
            await super().give(start, end)


class Resumes(Ranges):
    """Resumes where it was killed, although what it wrote before was discarded."""

    async def give(self, start: int, end: int) -> None:
        before = self.disk.get((start, end), start)
        for at in range(before, end):
            await self.worker.write(self.lines[at] + b"\n")
            self.disk[start, end] = at + 1
            await anyio.sleep(0.01)
        del self.disk[start, end]
        await self.worker.reply()


class ReadIsRequest(Ranges):
    def split(self, data: bytes) -> list[bytes]:
        return [data]


class OneARead(Ranges):
    def split(self, data: bytes) -> list[bytes]:
        return super().split(data)[:1]


class NothingWithoutOutput(Ranges):
    async def give(self, start: int, end: int) -> None:
        if end - start > 1:
            await super().give(start, end)


class OneIsEnough(Ranges):
    async def run(self) -> int | None:
        await self.do(json.loads(await self.worker.read()))
        return 0


class Greets(Ranges):
    async def run(self) -> int | None:
        await self.worker.write(b"extracting\n")
        return await super().run()


class EndsTwice(Ranges):
    async def give(self, start: int, end: int) -> None:
        await super().give(start, end)
        await anyio.sleep(0.1)
        await self.worker.reply()


class Buffers(Ranges):
    """Writes its replies when there are no more requests."""

    async def run(self) -> int | None:
        while data := await self.worker.read():
            self.rest += data
        for request in self.split(b""):
            await self.do(json.loads(request))
        return None


class StaysOn(Ranges):
    async def run(self) -> int | None:
        await super().run()
        await anyio.sleep_forever()
        return None


class Stubborn(Ranges):
    async def run(self) -> int | None:
        self.worker.ignored.add(SIGTERM)
        return await super().run()


class Keeper(Ranges):
    """Keeps the offset, and has no bug: a request confirms the reply before it."""

    sent = 0

    async def run(self) -> int | None:
        """Answer requests; each confirms the reply before it."""
        async for _ in self.worker.messages():
            self.disk["at"] = self.disk.get("at", 0) + self.sent
            await self.give(self.disk["at"], len(self.lines))
        return None

    async def give(self, start: int, end: int) -> None:
        """Reply with what is new."""
        self.sent = end - start
        await super().give(start, end)


class StoresFirst(Keeper):
    async def give(self, start: int, end: int) -> None:
        await super().give(start, end)
        await anyio.sleep(0.1)
        self.disk["at"], self.sent = end, 0


class Grows(Keeper):
    """Has no bug: there are more lines each time that it is started."""

    async def run(self) -> int | None:
        self.disk["size"] = size = self.disk.get("size", self.count) + 1
        self.lines = LINES[:size]
        return await super().run()


class NothingNew(Keeper):
    async def give(self, start: int, end: int) -> None:
        if start < end:
            await super().give(start, end)
