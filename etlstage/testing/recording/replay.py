"""
A recording played to a worker: the same input, cut alike, at the same points.

A point of the conversation is how many replies were complete, and whether the worker
had read what was written before. No clock decides: the pauses of the recording are not
kept, and each wait is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from signal import SIGKILL, SIGTERM
from typing import Final

import anyio

from etlstage.protocol.base import Dialect, Side
from etlstage.stage import Stage
from etlstage.supervisor.process import spawn
from etlstage.testing.dialect import kit_of
from etlstage.testing.recording.recorder import RecordedLaunch
from etlstage.testing.recording.recording import Recording
from etlstage.testing.transcript import Channel, Entry
from etlstage.transport import (
    Child,
    Launch,
    LaunchRequest,
    Readable,
    Wire,
    launch_worker,
)

__all__ = ("play",)

_CHUNK: Final = 1024 * 1024  # bytes a read
_LOOK: Final = 0.001  # seconds between two looks whether the worker has read
_REST: Final = 1.0  # seconds for the pipes of a dead worker to end


async def play(
    recording: Recording,
    stage: Stage | Sequence[str],
    *,
    grace: float = 10.0,
    launch: Launch = launch_worker,
) -> Recording:
    """
    Play a recording to a worker, and return what is sent now.

    Args:
        recording: What to play.
        stage: Whom to play it to, or only its command.
        grace: Seconds that each of these may take longer than it was recorded: a
            reply, reading the input, the exit. After that no more is written, and the
            worker is stopped; :attr:`Recording.cut` is set.
        launch: What starts the worker.

    Raises:
        WorkerStartFailed: If it can't be started.

    """
    if not isinstance(stage, Stage):
        stage = recording.stage_of(stage)
    player = _Player(recording, stage, grace, launch)
    return await player.run()


class _Turns:
    """Counts the complete replies of a worker."""

    def __init__(self, dialect: Dialect) -> None:
        self.count = 0
        self._kit = kit_of(dialect)
        self._rest = b""

    def feed(self, data: bytes) -> None:
        *whole, self._rest = self._kit.cut(Side.WORKER, self._rest + data)
        self.count += len(whole)


class _Player:
    """One start of a worker, and a recording to be played to it."""

    def __init__(
        self, recording: Recording, stage: Stage, grace: float, launch: Launch
    ) -> None:
        self._recording = recording
        self._stage = stage
        self._grace = grace
        self._limit = grace  # and as long as it took when it was recorded
        self._launch = RecordedLaunch(launch, self._begin)
        self._entries: list[Entry] = []
        self._turns = _Turns(stage.dialect)
        # Sizes are bounded before memory is taken.
        self._room = len(recording.written(Channel.STDOUT)) + stage.max_reply
        self._ended = max((entry.at for entry in recording.entries), default=0.0)
        self._changed = anyio.Event()
        self._over: set[Channel] = set()
        self._exit: int | None = None
        self._stopped = False
        self._gone = False
        self._cut = ""
        self._wire: Wire
        self._child: Child

    # --- what is noted ------------------------------------------------------

    def _begin(self, _request: LaunchRequest) -> _Player:
        return self

    def add(self, entry: Entry) -> None:
        self._entries.append(entry)

    def end(self, exit_: int | None, *, stopped: bool) -> None:
        self._exit, self._stopped = exit_, stopped

    # --- what is done -------------------------------------------------------

    async def run(self) -> Recording:
        recording, stage = self._recording, self._stage
        stdin = any(e.channel is Channel.STDIN for e in recording.entries)
        worker = recording.worker or f"{stage.name}-1"
        self._wire, self._child = spawn(
            stage, worker, self._launch, stdin=stdin, start=recording.start
        )
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch)
                tasks.start_soon(self._listen, self._wire, Channel.STDOUT)
                tasks.start_soon(self._listen, self._child.stderr, Channel.STDERR)
                if self._child.status is not None:
                    tasks.start_soon(self._listen, self._child.status, Channel.STATUS)
                await self._feed()
                await self._finish()
                tasks.cancel_scope.cancel()
        finally:
            self._child.kill()
            self._wire.close()
            self._child.close()
        return replace(
            recording,
            stage=stage.name,
            dialect=stage.dialect,
            command=tuple(stage.program.command),
            entries=tuple(self._entries),
            exit=self._exit,
            stopped=self._stopped,
            cut=self._cut,
        )

    async def _feed(self) -> None:
        """Write what was written, each piece at its point; then close stdin."""
        recorded, before = _Turns(self._recording.dialect), 0.0
        for entry in self._recording.entries:
            if entry.channel is Channel.STDOUT:
                recorded.feed(entry.data)
            elif entry.channel is Channel.STDIN:
                self._limit = self._grace + entry.at - before
                before = entry.at
                if not await self._reached(recorded.count, entry):
                    break
                if not entry.data or not await self._write(entry.data):
                    break
        else:
            # The recorded worker died, or was killed, before its stdin was closed.
            self._limit = self._grace + self._ended - before
            await self._until(self._all_answered, "answer")
        self._wire.close_write()
        self._limit = self._grace + self._ended - before

    async def _reached(self, turns: int, entry: Entry) -> bool:
        """Wait for the point at which a piece was written."""
        if not await self._until(lambda: self._turns.count >= turns, "answer"):
            return False
        if entry.ahead:
            return True
        with anyio.move_on_after(self._limit):
            while self._wire.unread() and not self._gone:  # noqa: ASYNC110 - no event
                await anyio.sleep(_LOOK)
            return True
        return self._give_up("read its input")

    async def _write(self, data: bytes) -> bool:
        rest = memoryview(data)
        with anyio.move_on_after(self._limit):
            while rest:
                try:
                    taken = self._wire.write(rest)
                except BrokenPipeError:
                    return False
                rest = rest[taken:]
                if not taken:
                    await self._wire.writable()
            return True
        return self._give_up("read its input")

    async def _finish(self) -> None:
        """See the worker to its end."""
        if not self._cut:
            await self._until(lambda: self._gone, "exit")
        for signal in (SIGTERM, SIGKILL):
            if self._gone:
                return
            self._child.signal(signal)
            with anyio.move_on_after(self._stage.timeout.stop):
                while not self._gone:
                    await self._changed.wait()

    async def _until(self, reached: Callable[[], bool], what: str) -> bool:
        """Wait for something, or until nothing more can come."""
        with anyio.move_on_after(self._limit):
            while not (reached() or self._gone or self._cut):
                await self._changed.wait()
        if reached():
            return True
        return False if self._gone or self._cut else self._give_up(what)

    def _all_answered(self) -> bool:
        written = b"".join(
            entry.data for entry in self._entries if entry.channel is Channel.STDIN
        )
        *requests, _ = kit_of(self._stage.dialect).cut(Side.SUPERVISOR, written)
        return self._turns.count >= len(requests)

    def _give_up(self, what: str) -> bool:
        self._cut = f"the worker did not {what} within {self._limit:g} s"
        return False

    # --- what comes ---------------------------------------------------------

    async def _watch(self) -> None:
        await self._child.wait()
        # Whom it has left behind may hold its pipes for long.
        with anyio.move_on_after(_REST):
            while not self._over.issuperset({Channel.STDOUT, Channel.STDERR}):
                await self._changed.wait()
        self._gone = True
        self._tell()

    async def _listen(self, pipe: Readable, channel: Channel) -> None:
        while (data := pipe.read(_CHUNK)) != b"":
            if data is None:
                await pipe.readable()
                continue
            if channel is Channel.STDOUT:
                self._turns.feed(data)
                self._room -= len(data)
                if self._room < 0:
                    self._cut = "the worker wrote without end"
            self._tell()
            await anyio.lowlevel.checkpoint()
            if self._cut:
                return
        self._over.add(channel)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
