"""Workers of dialect ``cocaine``, frame by frame: a sound one, and some with bugs."""

from __future__ import annotations

import json
from typing import Any, Final

import anyio
import msgpack

from etlstage.protocol.cocaine import CocaineVersion
from etlstage.protocol.cocaine.settings import CocaineDialect
from etlstage.testing import ScriptedWorker

__all__ = ("ADVISED", "PLANTED", "Extracting", "Loading", "Refusing", "Worker")


class Worker:
    """
    Answers in capitals; its ``script`` is for a ScriptedLaunch.

    Args:
        worker: Its process, which reads and writes for it.

    """

    def __init__(self, worker: ScriptedWorker) -> None:
        self.worker = worker
        words = self.version.words
        assert words is not None
        self.words = words
        self.open: dict[int, list[bytes]] = {}
        self.frames = msgpack.Unpacker(raw=True, use_list=False)
        self.told: tuple[Any, ...] | None = None

    @property
    def version(self) -> CocaineVersion:
        """The version of the protocol; auto means 1."""
        dialect = self.worker.request.dialect
        assert isinstance(dialect, CocaineDialect)
        auto = dialect.protocol is CocaineVersion.AUTO
        return CocaineVersion.ONE if auto else dialect.protocol

    @classmethod
    async def script(cls, worker: ScriptedWorker) -> int:
        """Run until the end; return the exit status."""
        return await cls(worker).run()

    async def run(self) -> int:
        """Run until the end; return the exit status."""
        await self.hello()
        while data := await self.worker.read():
            for frame in self.cut(data):
                await self.take(*frame)
                if (status := await self.leave()) is not None:
                    return status
        return await self.ended()

    async def say(self, number: int, kind: int, *arguments: object) -> None:
        """Write a frame."""
        first = self.words.channel_first
        frame = (number, kind) if first else (kind, number)
        data = msgpack.packb((*frame, arguments), use_bin_type=False)
        await self.worker.write(data)

    async def hello(self) -> None:
        """Identify itself, and report that it is ready."""
        await self.say(self.words.control, self.words.handshake, "uuid")
        await self.say(self.words.control, self.words.heartbeat)

    def cut(self, data: bytes) -> Any:  # noqa: ANN401 - frames
        """Return the frames that are complete."""
        self.frames.feed(data)
        return self.frames

    async def take(
        self, first: int, second: int, arguments: tuple[Any, ...], *_: object
    ) -> None:
        """Do what a frame asks for."""
        words = self.words
        number, kind = (first, second) if words.channel_first else (second, first)
        if number == words.control:
            await self.control(kind, arguments)
        elif number not in self.open:
            if kind == words.invoke:
                await self.begin(number, arguments[0])
        elif kind == words.chunk:
            self.add(number, arguments[0])
        elif kind == words.choke:
            await self.answer(number, self.open.pop(number))
        elif kind == words.error:
            self.cancel(number)

    async def control(self, kind: int, arguments: tuple[Any, ...]) -> None:
        """Process a frame about the connection."""
        if kind == self.words.terminate:
            self.told = arguments

    async def leave(self) -> int | None:
        """Return the exit status if it is time to exit."""
        if self.told is None or self.open:
            return None
        await self.say(self.words.control, self.words.terminate, *self.told)
        return 0

    async def begin(self, number: int, event: bytes) -> None:
        """Process an invoke."""
        if event == self.worker.request.kind.value.encode():
            self.open[number] = []
        else:
            await self.refuse(number, 200, f"no handler for {event!r}")

    async def refuse(self, number: int, code: int, reason: str) -> None:
        """Answer with an error."""
        said = (42, code) if self.words.pairs else code
        await self.say(number, self.words.error, said, reason)
        if not self.words.error_ends:
            await self.say(number, self.words.choke)

    def add(self, number: int, chunk: bytes) -> None:
        """Process a chunk."""
        self.open[number].append(chunk)

    async def answer(self, number: int, chunks: list[bytes]) -> None:
        """Process a choke."""
        for chunk in chunks:
            await self.say(number, self.words.chunk, chunk.upper())
        await self.say(number, self.words.choke)

    def cancel(self, number: int) -> None:
        """Process an error."""
        del self.open[number]

    async def ended(self) -> int:
        """Return the exit status once the connection has ended."""
        return 0


class Loading(Worker):
    """Replies without outputs."""

    async def answer(self, number: int, chunks: list[bytes]) -> None:
        """Process a choke."""
        await super().answer(number, [])


class Extracting(Worker):
    """Has twenty rows; replies with a range of them, or with all."""

    async def answer(self, number: int, chunks: list[bytes]) -> None:
        """Process a choke."""
        try:
            asked = json.loads(b"".join(chunks) or b"{}")
        except ValueError:
            await self.refuse(number, 100, "it is no request")
            return
        rows = [b"row %d" % n for n in range(20)]
        given = rows[asked.get("start", 0) : asked.get("end", 20)]
        if "offsets" in asked:
            given = [b"20" if asked["offsets"] == "latest" else b"0"]
        await super().answer(number, given)


class Refusing(Worker):
    """Refuses each session as soon as it begins, whatever its event."""

    last = 0

    async def begin(self, number: int, event: bytes) -> None:
        """Refuse it, once."""
        # In version 1, a chunk has the same type as an invoke.
        if number > self.last:
            self.last = number
            await self.refuse(number, 200, f"no handler for {event!r}")


class _Greets(Worker):
    async def hello(self) -> None:
        await super().hello()
        await self.worker.write(b"\x05ready")


class _NeverBeats(Worker):
    async def hello(self) -> None:
        await self.say(self.words.control, self.words.handshake, "uuid")


class _BeatsBeforeItSaysWhoItIs(Worker):
    async def hello(self) -> None:
        await self.worker.write(b"\x93\x01\x01\x90")


class _DiesOfHeartbeats(Worker):
    answers = 0

    async def control(self, kind: int, arguments: tuple[Any, ...]) -> None:
        self.answers += kind == self.words.heartbeat
        assert self.answers < 2
        await super().control(kind, arguments)


class _KnowsOneSession(Worker):
    last = 0

    async def begin(self, number: int, event: bytes) -> None:
        self.last = number
        await super().begin(number, event)

    def add(self, number: int, chunk: bytes) -> None:
        super().add(self.last, chunk)


class _IgnoresUnknownEvents(Worker):
    async def refuse(self, number: int, code: int, reason: str) -> None:
        pass


class _SaysMore(Worker):
    async def answer(self, number: int, chunks: list[bytes]) -> None:
        await super().answer(number, chunks)
        await self.say(number, self.words.chunk, b"more")


class _EndsTwiceBehindAnError(Worker):
    async def answer(self, number: int, chunks: list[bytes]) -> None:
        await self.refuse(number, 1, "no")
        await self.say(number, self.words.choke)


class _Counts(Worker):
    count = 1

    async def answer(self, number: int, chunks: list[bytes]) -> None:
        self.count += 1
        await super().answer(self.count, chunks)


class _Invents(Worker):
    async def answer(self, number: int, chunks: list[bytes]) -> None:
        await super().answer(number + 1, chunks)


class _NumbersAreBytes(Worker):
    async def answer(self, number: int, chunks: list[bytes]) -> None:
        await super().answer(number % 256, chunks)


class _ThreeElements(Worker):
    async def take(
        self, first: int, second: int, arguments: tuple[Any, ...], *more: object
    ) -> None:
        assert not more
        await super().take(first, second, arguments)


class _ReadsAreFrames(Worker):
    def cut(self, data: bytes) -> Any:  # noqa: ANN401
        self.frames = msgpack.Unpacker(raw=True, use_list=False)
        return super().cut(data)


class _TextOnly(Worker):
    def add(self, number: int, chunk: bytes) -> None:
        chunk.decode()
        super().add(number, chunk)


class _NeverEnds(Worker):
    async def answer(self, number: int, chunks: list[bytes]) -> None:
        for chunk in chunks:
            await self.say(number, self.words.chunk, chunk)


class _OneChunk(Worker):
    def add(self, number: int, chunk: bytes) -> None:
        assert not self.open[number]
        super().add(number, chunk)


class _WaitsForAChunk(Worker):
    async def answer(self, number: int, chunks: list[bytes]) -> None:
        if chunks:
            await super().answer(number, chunks)


class _DiesOfErrors(Worker):
    def cancel(self, number: int) -> None:
        raise RuntimeError("cancelled")


class _CancelsAll(Worker):
    def cancel(self, number: int) -> None:
        self.open.clear()


class _IgnoresTerminate(Worker):
    async def leave(self) -> int | None:
        return None


class _Stays(Worker):
    async def ended(self) -> int:
        await anyio.sleep_forever()
        return 0


class _Despairs(Worker):
    async def hello(self) -> None:
        await self.say(self.words.control, self.words.handshake, "uuid")
        await self.say(self.words.control, self.words.terminate, 2, "no key")
        await self.say(self.words.control, self.words.heartbeat)
        raise SystemExit(1)


class _GivesUp(Worker):
    async def answer(self, number: int, chunks: list[bytes]) -> None:
        await super().answer(number, chunks)
        await self.say(self.words.control, self.words.terminate, 1, "tired")
        raise SystemExit


class _EndsAbnormally(Worker):
    async def leave(self) -> int | None:
        if self.told is not None:
            self.told = (2, "so be it")
        return await super().leave()


PLANTED: Final = {
    _Despairs: (
        "announces itself",
        "having announced that no worker could do the work: no key (code 2)",
    ),
    _GivesUp: ("answers", "having announced that it terminates: tired (code 1)"),
    _EndsAbnormally: (
        "terminates on request",
        "(abnormal), which means that no worker could do the work: so be it",
    ),
    _Greets: ("announces itself", "broke the protocol: a frame is not an array"),
    _NeverBeats: ("announces itself", "sent its handshake but no heartbeat"),
    _BeatsBeforeItSaysWhoItIs: (
        "announces itself",
        "the first frame is not a handshake",
    ),
    _NeverEnds: ("answers", "bytes but did not end a session"),
    _Invents: ("answers", "broke the protocol: there is no session 3"),
    _Counts: ("accepts numbers with gaps", "did not end session 126"),
    _NumbersAreBytes: ("accepts numbers with gaps", "did not end session 300"),
    _DiesOfHeartbeats: ("accepts heartbeats at any time", "exited with status 1"),
    _KnowsOneSession: (
        "accepts sessions that overlap",
        "replied to exchange 1 with []",
    ),
    _IgnoresUnknownEvents: (
        "refuses an event that it does not know",
        "does it know the event?",
    ),
    _SaysMore: ("writes nothing after the end", "sent more for session 2"),
    _EndsTwiceBehindAnError: (
        "writes nothing after the end",
        "sent more for session 2",
    ),
    _ThreeElements: ("accepts headers", "exited with status 1"),
    _ReadsAreFrames: ("handles input byte by byte", "exited with status 1"),
    _TextOnly: ("accepts bytes that are no text", "exited with status 1"),
    _OneChunk: ("accepts more chunks than one", "exited with status 1"),
    _WaitsForAChunk: ("accepts a session without chunks", "has 1 reply outstanding"),
    _DiesOfErrors: ("accepts a session that is cancelled", "exited with status 1"),
    _CancelsAll: ("accepts a session that is cancelled", "has 1 reply outstanding"),
    _IgnoresTerminate: ("terminates on request", "did not exit"),
    _Stays: ("ends with its connection", "did not exit"),
}
"""Workers with a bug, each with the check that fails, and why."""


class _GoesWithoutAWord(Worker):
    async def leave(self) -> int | None:
        return None if self.told is None else 0


class _SaysWithItsStatus(Worker):
    async def leave(self) -> int | None:
        status = await super().leave()
        return status if status is None else 3


class _Drops(Worker):
    async def control(self, kind: int, arguments: tuple[Any, ...]) -> None:
        await super().control(kind, arguments)
        if self.told is not None:
            self.open.clear()


class _KnowsNoZero(Worker):
    version = CocaineVersion.ONE


class _HandlesAnything(Worker):
    async def begin(self, number: int, event: bytes) -> None:
        await super().begin(number, b"transform")


class _OneAtATime(Worker):
    def __init__(self, worker: ScriptedWorker) -> None:
        super().__init__(worker)
        self.later: list[tuple[Any, ...]] = []

    async def take(self, first: int, *more: Any) -> None:  # noqa: ANN401
        if self.open and first != self.words.control and first not in self.open:
            self.later.append((first, *more))
            return
        await super().take(first, *more)
        if not self.open:
            later, self.later = self.later, []
            for frame in later:
                await self.take(*frame)


ADVISED: Final = {
    _GoesWithoutAWord: (
        "terminates on request",
        "it exited without a terminate of its own",
    ),
    _SaysWithItsStatus: (
        "terminates on request",
        "it exited with status 3 after a terminate",
    ),
    _Drops: (
        "ends its sessions before it terminates",
        "it drops its open sessions",
    ),
    _HandlesAnything: (
        "refuses an event that it does not know",
        "it handles an event of any name",
    ),
    _OneAtATime: ("answers while others wait", "it handles one session at a time"),
    _KnowsNoZero: ("speaks both versions", "it does not speak version 0"),
}
