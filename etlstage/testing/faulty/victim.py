"""A worker's process that suffers from faults, as its supervisor is to see it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from signal import SIGKILL, SIGTERM, Signals
from typing import Any, Protocol

from etlstage.testing.hostile.marked import repeated
from etlstage.transport import Child, Readable
from etlstage.transport.base import describe_status

__all__ = ("Occurrence", "Scene", "Victim", "WatchedStatus")


@dataclass(slots=True)
class Occurrence:
    """One time that a fault happened."""

    stage: str
    fault: int
    """Which one of the plan, counted from 0."""
    worker: str
    start: int
    message: int
    """How many messages of this process had been written, or extracted."""
    fate: str = ""
    """What became of the worker, once it is gone."""


class Scene(Protocol):
    """The conversation that goes with it."""

    @property
    def silent(self) -> bool:
        """Whether the worker sends no heartbeat any more."""
        ...

    @property
    def pauses(self) -> bool:
        """Whether it sends none for now."""
        ...

    async def resumed(self) -> None:
        """Wait until a pause is over, or the worker is closed."""
        ...

    @property
    def hangs(self) -> bool:
        """Whether the worker is not to end by itself, even if the process does."""
        ...

    @property
    def undecided(self) -> bool:
        """Whether it is not known yet how a process that is gone is to have ended."""
        ...

    async def settled(self) -> None:
        """Wait until that is known."""
        ...

    def stop_waiting(self) -> None:
        """Wake who waits."""
        ...


class Victim:
    """
    The process.

    Args:
        inner: The real one.
        happened: What happens to it.

    Attributes:
        scene: The conversation that goes with it.
        pretended: Exit status that is reported in place of the real one.
        ignores: Whether SIGTERM does nothing to it.
        released: Whether its supervisor has sent it a signal.

    """

    def __init__(self, inner: Child, happened: list[Occurrence]) -> None:
        self.inner = inner
        self.scene: Scene
        self.pretended: int | None = None
        self.ignores: bool = False
        self.released: bool = False
        self.pid: int = inner.pid
        self.stderr: _Stderr = _Stderr(inner.stderr)
        self.status: WatchedStatus | None = None
        self.kill_heirs: Callable[[], int] = inner.kill_heirs
        self.deserted: Callable[[], Coroutine[Any, Any, None]] = inner.deserted
        self._happened = happened

    def __repr__(self) -> str:
        return repr(self.inner)

    @property
    def returncode(self) -> int | None:
        """Exit status, or what is reported in its place, once it is gone."""
        status = self.inner.returncode
        if status is None or self.scene.undecided:
            return None
        return status if self.pretended is None else self.pretended

    async def wait(self) -> int:
        """Return the same once it is known."""
        status = await self.inner.wait()
        await self.scene.settled()
        return status if self.pretended is None else self.pretended

    def signal(self, number: Signals, /) -> None:
        """Send a signal of the supervisor."""
        if number is SIGTERM and self.ignores:
            return
        if self.inner.returncode is not None and self.scene.hangs:
            self.pretended = -number  # it has ended by itself, unseen
        self.released = self.released or self.returncode is None
        self.inner.signal(number)
        self.scene.stop_waiting()

    def kill(self) -> int:
        """Kill it for the supervisor."""
        self.released = True
        return self.inner.kill()

    def die(self, status: int) -> None:
        """Kill it, as if it had ended with that status."""
        self.pretended = status
        self.inner.signal(SIGKILL)

    def close(self) -> None:
        """Close what is open, and note what became of it."""
        self.inner.close()
        status = self.returncode
        if status is None:
            return
        for occurrence in self._happened:
            occurrence.fate = describe_status(status)


class _Stderr:
    def __init__(self, inner: Readable) -> None:
        self._inner = inner
        self._more: deque[bytes] = deque()
        self.stop_waiting: Callable[[], None] = inner.stop_waiting

    def say(self, data: bytes | None, size: int) -> None:
        """Write so many bytes, in lines."""
        line = (b"." * 99 if data is None else data) + b"\n"
        self._more.extend(repeated(line, size))
        self.stop_waiting()

    def read(self, size: int, /) -> bytes | None:
        if not self._more:
            return self._inner.read(size)
        data = self._more.popleft()
        if len(data) > size:
            self._more.appendleft(data[size:])
        return data[:size]

    async def readable(self) -> None:
        if not self._more:
            await self._inner.readable()


class WatchedStatus:
    """Where it says that it is alive; while it hangs that is not heard."""

    def __init__(self, inner: Readable, scene: Scene) -> None:
        self.never: bool = False
        """Whether nothing ever comes."""
        self._inner = inner
        self._scene = scene
        self.stop_waiting: Callable[[], None] = inner.stop_waiting

    def read(self, size: int, /) -> bytes | None:
        """Return what is there."""
        if self._scene.pauses:
            return None
        data = self._inner.read(size)
        while data and (self.never or self._scene.silent):
            data = self._inner.read(size)
        return data

    async def readable(self) -> None:
        """Wait until there is more."""
        if self._scene.pauses:
            await self._scene.resumed()
        else:
            await self._inner.readable()
