"""
A recording is played to a worker, and its replies are compared, one by one.

The same input, cut in the same pieces, is written at the same points.

A point of the conversation is defined by how many replies were complete, and whether
the worker had read what was written before. Time plays no part: the pauses of the
recording are not reproduced, and each wait is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from signal import SIGKILL, SIGTERM
from typing import Final, NamedTuple

import anyio

from etlstage.protocol.base import Dialect, Side
from etlstage.stage import Stage
from etlstage.testing.dialect import kit_of
from etlstage.testing.process import Process
from etlstage.testing.recording.recording import RecordedLaunch, Recording
from etlstage.testing.transcript import Channel, Entry
from etlstage.transport import Launch, launch_worker
from etlstage.transport.base import describe_status

__all__ = ("Difference", "differences", "other_end", "play")

_LOOK: Final = 0.001  # seconds between checks whether the worker has read its input


async def play(
    recording: Recording,
    stage: Stage | Sequence[str],
    *,
    grace: float = 10.0,
    launch: Launch = launch_worker,
) -> Recording:
    """
    Play a recording to a worker, and return the new conversation.

    Args:
        recording: The recording to play.
        stage: The stage of the worker, or just its command.
        grace: Seconds that a reply, reading the input, or the exit may take longer than
            in the recording. After that nothing more is written, the worker is stopped,
            and :attr:`Recording.cut` is set.
        launch: Starts the worker.

    Raises:
        WorkerStartFailed: If the worker can't be started.

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


class _Player(Process):
    """One start of a worker, to which a recording is played."""

    def __init__(
        self, recording: Recording, stage: Stage, grace: float, launch: Launch
    ) -> None:
        super().__init__(stage, RecordedLaunch(launch, lambda _: self))
        self._recording = recording
        self._grace = grace
        self._limit = grace  # plus the recorded duration
        self._entries: list[Entry] = []
        self._turns = _Turns(stage.dialect)
        # Bounds the memory that a worker's output may take.
        self._room = len(recording.written(Channel.STDOUT)) + stage.max_reply
        self._ended = max((entry.at for entry in recording.entries), default=0.0)
        self._exit: int | None = None
        self._stopped = False
        self._cut = ""

    # --- recording ----------------------------------------------------------

    def add(self, entry: Entry) -> None:
        if self._room >= 0:
            self._entries.append(entry)

    def end(self, exit_: int | None, *, stopped: bool) -> None:
        self._exit, self._stopped = exit_, stopped

    def take(self, data: bytes) -> bool:
        self._turns.feed(data)
        self._room -= len(data)
        if self._room < 0:
            self._cut = "the worker wrote over max_reply bytes more than recorded"
        return not self._cut

    # --- playing ------------------------------------------------------------

    async def run(self) -> Recording:
        recording = self._recording
        reads = any(e.channel is Channel.STDIN for e in recording.entries)
        await self.start(recording.worker, reads=reads, start=recording.start)
        try:
            await self._feed()
            await self._finish()
        finally:
            await self.kill()
        return replace(
            recording,
            stage=self.stage.name,
            dialect=self.stage.dialect,
            command=tuple(self.stage.program.command),
            entries=tuple(self._entries),
            exit=self._exit,
            stopped=self._stopped,
            cut=self._cut,
        )

    async def _feed(self) -> None:
        """Write the recorded pieces, each at its point; then close stdin."""
        recorded, before = _Turns(self._recording.dialect), 0.0
        for entry in self._recording.entries:
            if entry.channel is Channel.STDOUT:
                recorded.feed(entry.data)
            elif entry.channel is Channel.STDIN:
                self._limit = self._grace + entry.at - before
                before = entry.at
                if not await self._reached(recorded.count, entry):
                    break
                if not entry.data or not await self._written(entry.data):
                    break
        else:
            # The recorded worker died, or was killed, before its stdin was closed.
            self._limit = self._grace + self._ended - before
            await self._until(self._all_answered, "answer")
        self.close_stdin()
        self._limit = self._grace + self._ended - before

    async def _reached(self, turns: int, entry: Entry) -> bool:
        """Wait for the point at which a piece was written; return if it was reached."""
        if not await self._until(lambda: self._turns.count >= turns, "answer"):
            return False
        if entry.ahead:
            return True
        with anyio.move_on_after(self._limit):
            while self.unread() and not self.gone:  # noqa: ASYNC110 - no event
                await anyio.sleep(_LOOK)
            return True
        return self._give_up("read its input")

    async def _written(self, data: bytes) -> bool:
        with anyio.move_on_after(self._limit):
            try:
                await self.write(data)
            except BrokenPipeError:
                return False
            return True
        return self._give_up("read its input")

    async def _finish(self) -> None:
        """Wait for the worker's exit, and stop it if necessary."""
        if not self._cut:
            await self._until(lambda: self.gone, "exit")
        for number in (SIGTERM, SIGKILL):
            if self.gone:
                return
            self.signal(number)
            with anyio.move_on_after(self.stage.timeout.stop):
                while not self.gone:
                    await self.changed()

    async def _until(self, reached: Callable[[], bool], what: str) -> bool:
        """Wait for a condition, until it can't come true; return whether it did."""
        with anyio.move_on_after(self._limit):
            while not (reached() or self.gone or self._cut):
                await self.changed()
        if reached():
            return True
        return False if self.gone or self._cut else self._give_up(what)

    def _all_answered(self) -> bool:
        written = self.transcript.of(Channel.STDIN)
        *requests, _ = kit_of(self.stage.dialect).cut(Side.SUPERVISOR, written)
        return self._turns.count >= len(requests)

    def _give_up(self, what: str) -> bool:
        self._cut = f"the worker did not {what} within {self._limit:g} s"
        return False


_CHANNELS: Final = {Side.SUPERVISOR: Channel.STDIN, Side.WORKER: Channel.STDOUT}


class Difference(NamedTuple):
    """A reply that differs from the recorded one."""

    number: int
    """Number of the request, counted from 1."""
    request: bytes
    """The request; empty: there was none."""
    was: bytes
    """The recorded reply; empty: there was none."""
    now: bytes
    """The new reply; empty: there is none."""


def differences(recorded: Recording, played: Recording) -> Iterator[Difference]:
    """Yield the replies that differ from the recorded ones, in order."""
    requests = _exchanged(recorded, Side.SUPERVISOR)
    was, now = _exchanged(recorded, Side.WORKER), _exchanged(played, Side.WORKER)
    if recorded.cut or (recorded.stopped and _is_partial(recorded)):
        was = was[:-1]
    if recorded.cut or recorded.stopped:
        now = now[: len(was)]  # the rest of the conversation is unknown
    pairs = zip_longest(was, now, fillvalue=b"")
    for number, (one, other) in enumerate(pairs, 1):
        if one != other:
            request = requests[number - 1] if number <= len(requests) else b""
            yield Difference(number, request, one, other)


def other_end(recorded: Recording, played: Recording) -> str:
    """Return how the worker ended, if that differs from the recording; else ``""``."""
    if recorded.stopped and played.stopped:
        return ""  # both had to be
    if played.cut:
        return played.cut
    if recorded.cut or recorded.stopped or None in (recorded.exit, played.exit):
        return ""
    if recorded.exit == played.exit:
        return ""
    assert recorded.exit is not None
    assert played.exit is not None
    was, now = describe_status(recorded.exit), describe_status(played.exit)
    return f"the worker {now}; the recorded one {was}"


def _is_partial(recording: Recording) -> bool:
    *_, rest = kit_of(recording.dialect).cut(
        Side.WORKER, recording.written(Channel.STDOUT)
    )
    return bool(rest)


def _exchanged(recording: Recording, side: Side) -> list[bytes]:
    """Return the requests, or replies, in a form that can be compared."""
    channel = _CHANNELS[side]
    return kit_of(recording.dialect).exchanges(side, recording.written(channel))
