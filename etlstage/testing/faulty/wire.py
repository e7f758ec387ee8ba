"""
A worker with faults, as its supervisor sees it, in any dialect.

A launch wraps another, and its wire sits between the supervisor and the worker: it
counts the messages that pass, holds replies back, changes or invents them, closes what
the worker has not closed, and sends signals. Faults are those of
:mod:`etlstage.testing.fault`, and random ones are drawn in the same way: a plan with a
seed has the same faults here as with ``hostile_worker``.

What the supervisor reads next is a queue of bytes, pauses (a float) and actions. The
wire of a dialect, in the module with its name, decides what is queued, and when.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from signal import SIGKILL, SIGSTOP, SIGTERM, Signals
from typing import Any, ClassVar, Final, TypeAlias

import anyio

from etlstage.errors import ConfigError
from etlstage.testing.fault import FaultKind, FaultPlan
from etlstage.testing.hostile.kinds import Act, DueFaults, Exit, Step, as_bytes, effect
from etlstage.testing.hostile.marked import repeated
from etlstage.transport import Child, Launch, LaunchRequest, Readable, Wire
from etlstage.transport.base import describe_status

__all__ = (
    "Action",
    "Fault",
    "FaultyLaunch",
    "FaultyWire",
    "Item",
    "Occurrence",
    "Victim",
    "unknown",
)

_IDLE: Final = 0.05  # seconds without input

Fault: TypeAlias = Mapping[str, Any]
"""A fault of a plan, as in JSON."""
Action: TypeAlias = Callable[[], None]
Item: TypeAlias = bytes | float | Action
"""What is read next, a pause in seconds, or what is done before going on."""


@dataclass(slots=True)
class Occurrence:
    """One occurrence of a fault."""

    stage: str
    fault: int
    """Index of the fault in its plan."""
    worker: str
    start: int
    message: int
    """Number of messages written to this process, or extracted by it, so far."""
    fate: str = ""
    """How the worker ended, once it has exited."""


class FaultyWire(ABC):
    """
    The conversation as the supervisor sees it.

    Args:
        wire: The real wire.
        child: The process.
        request: The request by which it was started.
        plan: The faults.
        note: Called with each fault that happens, and the number of messages.

    """

    def __init__(
        self,
        wire: Wire,
        child: Victim,
        request: LaunchRequest,
        plan: DueFaults,
        note: Callable[[Fault, int], None],
    ) -> None:
        self._wire = wire
        self._child = child
        self._dialect = request.dialect
        self._plan = plan
        self._note = note
        self._number = 0  # messages written, or extracted
        self._queue: deque[Item] = deque()
        self._unsent = b""  # to the worker
        self._until: float | None = None  # when a pause ends
        self._deaf = False  # what the worker sends is ignored from now on
        self._stalled = False
        self._over = False  # how it ends is decided
        self._stdin_open = True
        self._stdout_open = True
        self._input_ended = False
        self._end_seen = False
        self._moved = anyio.Event()
        self.unread: Callable[[], int] = wire.unread
        self.mismatch_hint: Callable[[], str] = wire.mismatch_hint
        self.writable: Callable[[], Coroutine[Any, Any, None]] = wire.writable
        self.close: Callable[[], None] = wire.close
        self.follow(request)
        child.scene = self
        if child.inner.status is not None:
            child.status = _WatchedStatus(child.inner.status, self)

    def begin(self) -> None:
        """Inject the faults of the start."""
        self._misbehave("start")

    # --- what a dialect decides ---------------------------------------------

    has: ClassVar[frozenset[str]]
    """Which values of :attr:`FaultKind.about` the dialect supports."""
    longest: ClassVar[float] = math.inf
    """Maximum size of a huge message, in bytes."""
    stray: bytes
    """The bytes of a stray print."""
    eop: bytes = b""
    """The bytes that end a reply, if they are the same for all."""

    @abstractmethod
    def follow(self, request: LaunchRequest) -> None:
        """Prepare to parse the conversation."""

    @property
    @abstractmethod
    def _idle(self) -> bool:
        """Whether no reply is due."""

    @abstractmethod
    def _pass_on(self, data: memoryview | bytes) -> int:
        """Write to the worker; return how many bytes it took."""

    @abstractmethod
    def _hear(self, data: bytes) -> None:
        """Process what the worker has written."""

    @abstractmethod
    def _rest(self) -> bytes:
        """Return, at the end, what the worker has written and was not passed on."""

    @abstractmethod
    def _shape(self, fault: Fault) -> None:
        """Register a fault that changes a reply."""

    def _later(self, act: Action) -> None:
        """Schedule an action for when its turn comes."""
        self._queue.append(act)

    # --- what the supervisor writes -----------------------------------------

    def write(self, data: memoryview | bytes, /) -> int:
        """Write to the worker; see :class:`~etlstage.transport.Wire`."""
        if not self._stdin_open:
            raise BrokenPipeError
        if self._deaf:
            return len(data)  # to a worker that is as good as dead
        taken = self._pass_on(data)
        if self._queue:
            self.stop_waiting()
        return taken

    def close_write(self) -> None:
        """End the worker's input, unless a fault makes the worker outlive it."""
        if self._input_ended:
            return
        self._input_ended = True
        if "end" not in self._plan:
            self._end_input()
            return
        self._see_end()
        self._later(self._end_input)
        self.stop_waiting()

    def _see_end(self) -> None:
        """Inject the faults of the end, once; a worker as good as dead has none."""
        if not (self._end_seen or self._deaf):
            self._end_seen = True
            self._misbehave("end")

    def _end_input(self) -> None:
        # A worker that has closed a pipe, or hangs, does not end with its input.
        if self._stdin_open and self._stdout_open and not self._stalled:
            self._wire.close_write()

    # --- what it reads ------------------------------------------------------

    def read(self, size: int, /) -> bytes | None:
        """Return what the supervisor sees of the worker's output."""
        while self._stdout_open:
            if self._queue:
                head = self._queue[0]
                if isinstance(head, float) and self._waits(head):
                    return None
                self._queue.popleft()
                if isinstance(head, bytes):
                    if len(head) > size:
                        self._queue.appendleft(head[size:])
                    return head[:size]
                if not isinstance(head, float):
                    head()
                continue
            data = self._wire.read(size)
            if data is None:
                return None
            if not data and self.hangs:
                return None
            if not data:
                rest = self._rest()
                self._over = True
                self._move_on()
                return b"" if self._deaf else rest
            if not self._deaf:
                self._hear(data)
        return b""

    async def readable(self) -> None:
        """Wait until there is data, or inject the faults of an idle worker."""
        if self._queue or not self._stdout_open:
            await self.resumed()
            return
        if self.hangs and self._child.inner.returncode is not None:
            await self._moved.wait()
            return
        if self._deaf or not self._idle or "idle" not in self._plan:
            await self._wire.readable()
            return
        with anyio.move_on_after(_IDLE):
            await self._wire.readable()
            return
        self._misbehave("idle")

    def stop_waiting(self) -> None:
        """Wake the tasks that wait."""
        self._move_on()
        self._wire.stop_waiting()

    def _move_on(self) -> None:
        self._moved.set()
        self._moved = anyio.Event()

    async def settled(self) -> None:
        """Wait until the fate to report for an exited process is decided."""
        while self.undecided:
            await self._moved.wait()

    @property
    def undecided(self) -> bool:
        """Whether the fate to report for an exited process is still undecided."""
        return self.hangs

    @property
    def hangs(self) -> bool:
        """Whether the worker seems to hang, even if its process has exited."""
        return self._stalled and not self._child.released

    @property
    def silent(self) -> bool:
        """Whether the worker sends no heartbeat."""
        return self._deaf

    @property
    def pauses(self) -> bool:
        """Whether the worker is in a pause, and sends no heartbeat until it is over."""
        # A pause that has not begun has no end yet that a task could wait for.
        return self._until is not None and anyio.current_time() < self._until

    async def resumed(self) -> None:
        """Wait until a pause is over, or :meth:`stop_waiting`."""
        if self._until is not None:
            with anyio.move_on_after(self._until - anyio.current_time()):
                await self._moved.wait()

    def _waits(self, seconds: float) -> bool:
        now = anyio.current_time()
        if self._until is None:
            self._until = now + seconds
        if now < self._until and not self._child.released:
            return True
        self._until = None
        return False

    # --- what goes wrong ----------------------------------------------------

    def _misbehave(self, moment: str, message: bytes = b"") -> None:
        for fault in self._plan.due(moment, self._number, message):
            if FaultKind(fault["kind"]).shapes:
                self._shape(fault)
            else:
                self._later(partial(self._happen, fault, self._number))

    def _happen(self, fault: Fault, number: int) -> None:
        self._note(fault, number)
        match effect(fault, self.stray, self.eop):
            case Exit(status):
                self._end(status)
            case bytes() | float() as item:
                self._queue.appendleft(item)
            case Act(kind):
                self._act(kind, fault)

    def _act(self, kind: FaultKind, fault: Fault) -> None:
        match kind:
            case FaultKind.STOP:
                self._child.inner.signal(SIGSTOP)
                self._stall()
            case FaultKind.STALL:
                self._stall()
            case FaultKind.STDERR:
                self._child.stderr.say(as_bytes(fault.get("data")), fault["size"])
            case FaultKind.CLOSE_STDOUT:
                self._stdout_open = False
            case FaultKind.CLOSE_STDIN:
                self._stdin_open = False
            case FaultKind.IGNORE_SIGTERM:
                self._child.ignores = True
            case FaultKind.NEVER_READY if self._child.status is not None:
                self._child.status.never = True

    def _noted(self, faults: Iterable[Fault]) -> dict[str, Fault]:
        """Record faults that change a reply; return them by kind."""
        shapes = {fault["kind"]: fault for fault in faults}
        for fault in faults:
            self._note(fault, self._number)
        return shapes

    def _sent(self) -> bool:
        """Write what is still unsent; return whether nothing is left of it."""
        while self._unsent and (written := self._wire.write(self._unsent)):
            self._unsent = self._unsent[written:]
        return not self._unsent

    def _spoils(self, steps: Iterable[Step]) -> None:
        """Queue what is read in place of a reply."""
        for step in steps:
            if isinstance(step, Exit):
                self._queue.append(partial(self._end, step.status))
            elif isinstance(step, float) or (isinstance(step, bytes) and step):
                self._queue.append(step)

    def _end(self, status: int) -> None:
        self._child.die(status)
        self._over = True
        self._turn_deaf()
        self._move_on()

    def _stall(self) -> None:
        self._stalled = True
        self._turn_deaf()

    def _turn_deaf(self) -> None:
        self._deaf = True
        self._queue.clear()


# --- its process ----------------------------------------------------------------------


class Victim:
    """
    The process as the supervisor sees it.

    Args:
        inner: The real process.
        happened: Occurrences of its faults.

    Attributes:
        scene: Its conversation.
        pretended: Exit status that is reported in place of the real one.
        ignores: Whether SIGTERM does nothing to it.
        released: Whether its supervisor has sent it a signal.

    """

    def __init__(self, inner: Child, happened: list[Occurrence]) -> None:
        self.inner = inner
        self.scene: FaultyWire
        self.pretended: int | None = None
        self.ignores: bool = False
        self.released: bool = False
        self.pid: int = inner.pid
        self.stderr: _Stderr = _Stderr(inner.stderr)
        self.status: _WatchedStatus | None = None
        self.kill_heirs: Callable[[], int] = inner.kill_heirs
        self.deserted: Callable[[], Coroutine[Any, Any, None]] = inner.deserted
        self._happened = happened

    def __repr__(self) -> str:
        return repr(self.inner)

    @property
    def returncode(self) -> int | None:
        """Exit status, or the one reported in its place, once it has ended."""
        status = self.inner.returncode
        if status is None or self.scene.undecided:
            return None
        return status if self.pretended is None else self.pretended

    async def wait(self) -> int:
        """Wait for the exit, and return the same status."""
        status = await self.inner.wait()
        await self.scene.settled()
        return status if self.pretended is None else self.pretended

    def signal(self, number: Signals, /) -> None:
        """Send a signal from the supervisor."""
        if number is SIGTERM and self.ignores:
            return
        if self.inner.returncode is not None and self.scene.hangs:
            self.pretended = -number  # it has exited by itself, unnoticed
        self.released = self.released or self.returncode is None
        self.inner.signal(number)
        self.scene.stop_waiting()

    def kill(self) -> int:
        """Kill it for the supervisor."""
        self.released = True
        return self.inner.kill()

    def die(self, status: int) -> None:
        """Kill it, and report that it has ended with ``status``."""
        self.pretended = status
        self.inner.signal(SIGKILL)

    def close(self) -> None:
        """Close what is open, and record how the process ended."""
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


class _WatchedStatus:
    """The worker's signs of life: held back in a pause, and dropped once it hangs."""

    def __init__(self, inner: Readable, scene: FaultyWire) -> None:
        self.never: bool = False
        """Whether all are dropped."""
        self._inner = inner
        self._scene = scene
        self.stop_waiting: Callable[[], None] = inner.stop_waiting

    def read(self, size: int, /) -> bytes | None:
        if self._scene.pauses:
            return None
        data = self._inner.read(size)
        while data and (self.never or self._scene.silent):
            data = self._inner.read(size)
        return data

    async def readable(self) -> None:
        if self._scene.pauses:
            await self._scene.resumed()
        else:
            await self._inner.readable()


def unknown(kind: FaultKind, dialect: str, size: int | None = None) -> str:
    """Return why a worker of a dialect can't have a fault; empty if it can."""
    if dialect not in _WIRES:
        known = " or ".join(sorted(_WIRES))
        return f"{kind.value} is not available in dialect {dialect}, only in {known}"
    longest = _wire(dialect).longest
    if kind is FaultKind.HUGE and size is not None and size > longest:
        return (
            f"{kind.value} has a size of {size:,} bytes, expected at most"
            f" {longest:,} bytes: dialect {dialect} has no longer message"
        )
    if not kind.about or kind.about in _wire(dialect).has:
        return ""
    if kind.about == "a shard":
        return f"{kind.value} is only available in 'etlstage kcl simulate'"
    return f"{kind.value} needs {kind.about}, which dialect {dialect} does not have"


class FaultyLaunch:
    """
    Starts workers that have the faults of a plan.

    Args:
        launch: Starts the real workers.
        plans: Plans by name of the stage; workers of other stages have no faults.

    Attributes:
        happened: Occurrences of faults, in order.

    Raises:
        ConfigError: If a fault can't be done from outside; or, when a worker is
            started, if its dialect can't have the fault.

    """

    def __init__(self, launch: Launch, plans: Mapping[str, FaultPlan]) -> None:
        for stage, plan in plans.items():
            for fault in plan.faults:
                if fault.kind.inside:
                    raise ConfigError(
                        f"stage {stage}: fault {fault.kind.value} happens inside a"
                        " process: it can't be done from outside"
                    )
        self.happened: list[Occurrence] = []
        self._launch = launch
        self._plans = dict(plans)

    def __call__(self, request: LaunchRequest, /) -> tuple[Wire, Child]:
        """Start a worker."""
        if request.stage not in self._plans:
            return self._launch(request)
        faults = self._plans[request.stage]
        for fault in faults.faults:
            if reason := unknown(fault.kind, request.dialect.name, fault.size):
                raise ConfigError(f"stage {request.stage}: fault {reason}")
        inner, child = self._launch(request)
        mine: list[Occurrence] = []

        def note(fault: Fault, message: int) -> None:
            found = Occurrence(
                request.stage, fault["index"], request.worker, request.start, message
            )
            mine.append(found)
            self.happened.append(found)

        victim = Victim(child, mine)
        made = _wire(request.dialect.name)
        wire = made(inner, victim, request, faults.due(request.env), note)
        wire.begin()
        return wire, victim


_WIRES: Final = {"cocaine": "CocaineWire", "kcl": "KclWire", "marker": "MarkerWire"}
"""Wires by the name of their dialect, which is also that of their module."""


def _wire(dialect: str) -> type[FaultyWire]:
    module = import_module(f"{__package__}.{dialect}")
    wire: type[FaultyWire] = getattr(module, _WIRES[dialect])
    return wire
