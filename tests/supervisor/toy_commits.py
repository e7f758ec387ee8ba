"""
A dialect whose exchanges stay open until the worker has committed them.

A worker is started for a share of the input, and is told the position to begin at. It
answers records in order, and asks to have a position stored, which is the number of
records of the share that are done; it may do so once more when it is asked to end. A
frame is a line of JSON.
"""

# ruff: noqa: D102 - the interface documents these
from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, Self

from etlstage.errors import InvalidMessage, LocalProtocolError, RemoteProtocolError
from etlstage.messages import StageKind
from etlstage.protocol import events as e
from etlstage.protocol.base import SEND_EOF, Dialect, Limits, Shape, Side
from etlstage.settings.definition import Section
from etlstage.testing import ScriptedWorker

SHARE: Final = e.Assignment("share", 0)


class CommittingSession:
    """The supervisor's side."""

    in_order: Final = True
    unprompted: Final = True
    sends_farewell: Final = True
    defers_farewell: Final = False

    def __init__(self, share: e.Assignment, batch: int) -> None:
        self.owed = 0
        self._begin = share.position if isinstance(share.position, int) else 0
        self._batch = batch
        self._last = self._ended = 0  # exchanges since this start
        self._ready = False
        self._held = b""
        self._events: list[e.Event] = []
        self._out = [_frame("begin", share.name, self._begin)]

    @property
    def room(self) -> float:
        return self._batch if self._ready and not self.owed else 0

    def reading_paused(self, now: float, /) -> None: ...

    def receive_data(self, data: bytes, now: float, /) -> None:
        *lines, self._held = (self._held + data).split(b"\n")
        for line in lines:
            try:
                self._understand(*json.loads(line))
            except (ValueError, TypeError) as error:
                failed = RemoteProtocolError(f"no frame: {error!r}")
                self._events.append(e.Failed(failed))

    def _understand(self, word: str, position: int = 0) -> None:
        if word == "ready":
            self._ready = True
            self._events.append(e.Ready())
        elif word == "done":
            self.owed -= 1
            self._events.append(e.Alive())
        else:
            self._events.append(e.CommitAsked(self._last, position))

    def receive_eof(self, now: float, /) -> None:
        pass

    def peer_exited(self, clean: bool, now: float) -> None:
        pass

    def events_received(self) -> list[e.Event]:
        events, self._events = self._events, []
        return events

    def send(self, event: e.Event, now: float = 0.0, /) -> None:
        match event:
            case e.Opened(first, messages, each=True):
                if b"!" in messages:
                    place = [*messages].index(b"!")
                    raise InvalidMessage("no record may be '!'", index=place)
                self._last, self.owed = first + len(messages) - 1, len(messages)
                self._out += [_frame("record", m.decode()) for m in messages]
            case e.CommitAnswered(int(position), error):
                done = position - self._begin
                if error is None and done > self._ended:
                    groups: list[tuple[bytes, ...]] = [()] * (done - self._ended)
                    self._events.append(e.Ended(self._ended + 1, groups))
                    self._ended = done
                self._out.append(_frame("stored", error))
            case e.Farewell(why=why):
                self._ready = False
                self._out += [_frame("bye", why.value), SEND_EOF]
            case _:
                raise LocalProtocolError(f"can't send {event}")

    def data_to_send(self) -> list[bytes]:
        out, self._out = self._out, []
        return out

    def get_timer(self) -> float | None:
        return None

    def handle_timer(self, now: float) -> None:
        pass


def _frame(*said: object) -> bytes:
    return json.dumps(said).encode() + b"\n"


class CommittingDialect(Dialect):
    """The dialect as a setting of a stage."""

    name = "committing"
    shape = Shape.COMMITTED
    announces = True

    def open(
        self,
        side: Side,
        limits: Limits,
        *,
        batch: int = 1,
        assignment: e.Assignment | None = None,
        **_opened_for: object,
    ) -> CommittingSession:
        return CommittingSession(assignment or SHARE, batch)

    def silence(self, received: int, *, ready: bool = True) -> str:
        return f"it wrote {received} bytes"

    def plain(self) -> dict[str, object]:
        return {"name": self.name}

    @classmethod
    def section(cls, kind: StageKind) -> Section:
        return Section({}, lambda given: cls())

    @classmethod
    def from_plain(cls, settings: Mapping[str, object]) -> Self:
        return cls()


class Committer:
    """
    A worker that processes what it is given, and commits regularly.

    Args:
        done: Receives each processed record, with its place in the share.
        every: Records between two commits; None: only at the end.
        die_at: The step, counted over all starts from 0, at which it dies; a step is a
            frame read or written.
        poison: A record that kills it.

    Attributes:
        commits: Positions for which it has read the answer.
        steps: The number of steps so far.

    """

    def __init__(
        self,
        done: list[tuple[int, str]],
        *,
        every: int | None = 2,
        die_at: int = -1,
        poison: str = "",
    ) -> None:
        self.commits: list[int] = []
        self.partings: list[str] = []
        self.steps = 0
        self.begin: int | None = None
        """Where its share begins, if that frame was already read."""
        self.done, self._every = done, every
        self._die_at, self._poison = die_at, poison

    async def __call__(self, worker: ScriptedWorker) -> int:
        self._lines: list[bytes] = []
        self._held = b""
        if self.begin is not None:
            self._lines.append(_frame("begin", "", self.begin))
        try:
            return await self._live(worker)
        except Death as death:
            return death.status

    async def _live(self, worker: ScriptedWorker) -> int:
        _, _, place = await self._read(worker)
        committed = place
        await self._write(worker, "ready")
        while frame := await self._read(worker):
            word, what = frame
            if word == "bye":
                self.partings.append(what)
                if place > committed and what != "lost":
                    await self._commit(worker, place)
                return 0
            if what == self._poison:
                raise Death(-11)
            self.done.append((place, what))
            place += 1
            if self._every and place - committed >= self._every:
                await self._commit(worker, place)
                committed = place
            await self._write(worker, "done")
        return 0

    async def _commit(self, worker: ScriptedWorker, place: int) -> None:
        await self._write(worker, "commit", place)
        # Frames that were sent before the answer are read after it.
        ahead: list[bytes] = []
        while (frame := await self._read(worker))[0] != "stored":
            ahead.append(_frame(*frame))
        self._lines[:0] = ahead
        if frame[1] is None:
            self.commits.append(place)

    async def _read(self, worker: ScriptedWorker) -> Any:  # noqa: ANN401 - JSON
        while not self._lines:
            if not (data := await worker.read()):
                return None
            *lines, self._held = (self._held + data).split(b"\n")
            self._lines += lines
        self._step()
        return json.loads(self._lines.pop(0))

    async def _write(self, worker: ScriptedWorker, *said: object) -> None:
        await worker.write(_frame(*said))
        self._step()

    def _step(self) -> None:
        self.steps += 1
        if self.steps == self._die_at + 1:
            raise Death(-9)


class Death(Exception):
    def __init__(self, status: int) -> None:
        self.status = status
