"""
A launch that wraps another, and does to any worker what a hostile one does to itself.

It stands between the supervisor and the worker: it counts the messages that pass, holds
replies back, changes or invents them, closes what the worker has not closed, and sends
signals. The words are those of :mod:`etlstage.testing.fault`, and so is the luck: a plan
with a seed has the same faults here as with ``hostile_worker``.

A fault at a message happens when all replies before it have been passed on, whatever the
worker has answered meanwhile: that is dropped. What was sent ahead it may have seen.

Everything that a worker may read next is a queue: bytes, pauses (a float) and acts.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from signal import SIGABRT, SIGKILL, SIGSEGV, SIGSTOP
from typing import Any, Final, TypeAlias

import anyio

from etlstage.errors import ConfigError
from etlstage.protocol.base import Shape, Side
from etlstage.testing.fault import FaultKind, FaultPlan
from etlstage.testing.faulty.spoiler import Replies, Requests
from etlstage.testing.faulty.victim import Occurrence, Status, Victim
from etlstage.testing.hostile.output import SHAPES
from etlstage.testing.hostile.plan import Plan, as_bytes
from etlstage.transport import Child, Launch, LaunchRequest, Wire

__all__ = ("OUTSIDE", "FaultyLaunch")

OUTSIDE: Final = frozenset(FaultKind) - {
    FaultKind.SPIN,
    FaultKind.LEAK,
    FaultKind.GRANDCHILD,
}
"""What can be done to a worker from outside."""

_IDLE: Final = 0.05  # seconds without input

Fault: TypeAlias = dict[str, Any]
Item: TypeAlias = bytes | float | Callable[[], None]


class FaultyLaunch:
    """
    Starts workers that suffer from what a plan says.

    Args:
        launch: What starts them.
        plans: By the name of the stage; workers of others are left alone.

    Attributes:
        happened: What has happened, in order.

    Raises:
        ConfigError: If a fault can't be done from outside.

    """

    def __init__(self, launch: Launch, plans: Mapping[str, FaultPlan]) -> None:
        for stage, plan in plans.items():
            for fault in plan.faults:
                if fault.kind not in OUTSIDE:
                    raise ConfigError(
                        f"stage {stage}: fault {fault.kind.value} happens inside a"
                        " process: it can't be done from outside"
                    )
        self.happened: list[Occurrence] = []
        self._launch = launch
        self._plans = {stage: plan.to_json() for stage, plan in plans.items()}

    def __call__(self, request: LaunchRequest, /) -> tuple[Wire, Child]:
        """Start a worker."""
        inner, child = self._launch(request)
        if request.stage not in self._plans:
            return inner, child
        plan = json.loads(self._plans[request.stage])
        for number, fault in enumerate(plan["faults"]):
            fault["number"] = number
        mine: list[Occurrence] = []

        def note(fault: Fault, message: int) -> None:
            found = Occurrence(
                request.stage, fault["number"], request.worker, request.start, message
            )
            mine.append(found)
            self.happened.append(found)

        faults = Plan(plan["faults"], plan["seed"], request.env)
        victim = Victim(child, mine)
        wire = _FaultyWire(inner, victim, request, faults, note)
        return wire, victim


class _FaultyWire:
    """The conversation, as the supervisor is to see it."""

    def __init__(
        self,
        wire: Wire,
        child: Victim,
        request: LaunchRequest,
        plan: Plan,
        note: Callable[[Fault, int], None],
    ) -> None:
        self._wire = wire
        self._child = child
        self._dialect = request.dialect
        self._plan = plan
        self._note = note
        self._input = Requests(request)
        self._replies = Replies(request)
        self._number = 0  # messages written, or extracted
        self._requests = 0  # complete ones
        self._turns = 0  # replies that were complete
        self._due: deque[tuple[int, Callable[[], None]]] = deque()  # by turns
        self._shapes: deque[tuple[int, Fault]] = deque()  # likewise
        self._queue: deque[Item] = deque()
        self._rest = b""  # of a reply that is not complete
        self._passed = 0  # bytes of it that were passed on
        self._until: float | None = None  # when a pause ends
        self._deaf = False  # nothing that the worker says counts any more
        self._stalled = False
        self._over = False  # it is known how it ends
        self._stdin_open = True
        self._stdout_open = True
        self._input_ended = False
        self._moved = anyio.Event()
        self.unread = wire.unread
        self.writable = wire.writable
        self.close = wire.close
        child.scene = self
        if child.inner.status is not None:
            child.status = Status(child.inner.status, self)
        self._misbehave("start")
        self._advance()

    # --- what the supervisor writes -----------------------------------------

    def write(self, data: memoryview | bytes, /) -> int:
        if not self._stdin_open:
            raise BrokenPipeError
        if self._deaf:
            return len(data)  # to a worker that is as good as dead
        taken = self._wire.write(data)
        for message in self._input.feed(bytes(data[:taken])):
            if message is None:
                self._requests += 1
                continue
            self._number += 1
            self._misbehave("message", message)
            self._requests += self._dialect.shape is not Shape.BATCH
        self._advance()
        if self._queue:
            self.stop_waiting()
        return taken

    def close_write(self) -> None:
        if self._input_ended:
            return
        self._input_ended = True
        if "end" not in self._plan:
            self._end_input()
            return
        self._misbehave("end")
        self._due.append((self._requests, self._end_input))
        self._advance()
        self.stop_waiting()

    def _end_input(self) -> None:
        # Who has closed one of its pipes, or hangs, does not end with its input.
        if self._stdin_open and self._stdout_open and not self._stalled:
            self._wire.close_write()

    # --- what it reads ------------------------------------------------------

    def read(self, size: int, /) -> bytes | None:
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
                rest, self._rest = self._rest[self._passed :], b""
                self._passed, self._over = 0, True
                self._move_on()
                return b"" if self._deaf else rest
            if not self._deaf:
                self._hear(data)
        return b""

    async def readable(self) -> None:
        if self._queue or not self._stdout_open:
            await self.resumed()
            return
        if self.hangs and self._child.inner.returncode is not None:
            await self._moved.wait()
            return
        waits = not self._deaf and self._turns >= self._requests
        if not (waits and "idle" in self._plan):
            await self._wire.readable()
            return
        with anyio.move_on_after(_IDLE):
            await self._wire.readable()
            return
        self._misbehave("idle")
        self._advance()

    def stop_waiting(self) -> None:
        self._move_on()
        self._wire.stop_waiting()

    def _move_on(self) -> None:
        self._moved.set()
        self._moved = anyio.Event()

    async def settled(self) -> None:
        """Wait until it is known how a process that is gone is to have ended."""
        while self.undecided:
            await self._moved.wait()

    @property
    def undecided(self) -> bool:
        """Whether it is not known yet how a process that is gone is to have ended."""
        streams = self._dialect.shape is Shape.STREAM
        return self.hangs or (streams and not (self._over or self._child.released))

    @property
    def hangs(self) -> bool:
        """Whether it is not to end by itself, even if the process does."""
        return self._stalled and not self._child.released

    @property
    def silent(self) -> bool:
        """Whether the worker sends no heartbeat."""
        return self._deaf

    @property
    def pauses(self) -> bool:
        """Whether it is about to go on, and sends none before that."""
        return bool(self._queue) and isinstance(self._queue[0], float)

    async def resumed(self) -> None:
        """Wait until a pause is over, or :meth:`stop_waiting`."""
        if self.pauses and self._until is not None:
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

    def _hear(self, data: bytes) -> None:
        """Take what the worker has written."""
        *replies, self._rest = self._dialect.cut(Side.WORKER, self._rest + data)
        for reply in replies:
            if self._dialect.shape is Shape.STREAM:
                self._number += 1
                self._misbehave("message", reply.removesuffix(self._replies.eom))
                self._advance()
            self._pass_on(reply)
            self._turns += 1
            self._advance()
        if not self._shaped() and self._dialect.shape is not Shape.STREAM:
            self._queue += filter(None, [self._rest[self._passed :]])
            self._passed = len(self._rest)

    def _shaped(self) -> bool:
        """Return whether something is to be wrong with the reply to come."""
        return bool(self._shapes) and self._shapes[0][0] <= self._turns

    def _pass_on(self, reply: bytes) -> None:
        unseen, self._passed = reply[self._passed :], 0
        if not self._shaped():
            self._queue.append(unseen)
            return
        shapes = {f["kind"]: f for turn, f in self._shapes if turn <= self._turns}
        if reply == self._replies.bnc and self._dialect.shape is Shape.ASKED_BATCH:
            # A batch is answered as a whole: what is wrong is so with its reply.
            cut = "cut" in shapes
            self._queue += self._replies.cut(reply) if cut else [reply]
            return
        while self._shaped():
            _, fault = self._shapes.popleft()
            self._note(fault, self._number)
        self._queue += self._replies.spoiled(shapes, reply)
        if "partial" in shapes:
            self._queue.append(partial(self._end, -SIGKILL))

    # --- what goes wrong ----------------------------------------------------

    def _misbehave(self, moment: str, message: bytes = b"") -> None:
        turn = self._turns if self._dialect.shape is Shape.STREAM else self._requests
        for fault in self._plan.due(moment, self._number, message):
            if fault["kind"] in SHAPES:
                self._shapes.append((turn, fault))
            else:
                self._due.append((turn, partial(self._act, fault, self._number)))

    def _advance(self) -> None:
        """Queue what is due now that so many replies are complete."""
        while self._due and self._due[0][0] <= self._turns:
            self._queue.append(self._due.popleft()[1])

    def _act(self, fault: Fault, number: int) -> None:
        self._note(fault, number)
        match FaultKind(fault["kind"]):
            case FaultKind.KILL:
                self._end(-SIGKILL)
            case FaultKind.SEGFAULT:
                self._end(-SIGSEGV)
            case FaultKind.ABORT:
                self._end(-SIGABRT)
            case FaultKind.EXIT:
                self._end(fault["status"])
            case FaultKind.STOP:
                self._child.inner.signal(SIGSTOP)
                self._stall()
            case FaultKind.STALL:
                self._stall()
            case FaultKind.PAUSE:
                self._queue.appendleft(float(fault["seconds"]))
            case FaultKind.GARBAGE:
                stray = as_bytes(fault.get("data"))
                self._queue.appendleft(stray or b"stray print" + self._replies.eom)
            case FaultKind.EXTRA_EOP:
                self._queue.appendleft(self._replies.eop)
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
        self._due.clear()
