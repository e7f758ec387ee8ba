"""
A scripted worker that does its work, and what a fault plan says.

It is the hostile worker without a process: the plan, the moments and the dice are the
same. What takes a process (``grandchild``, ``leak``) is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from signal import SIGABRT, SIGKILL, SIGSEGV, SIGTERM
from typing import Any, Final

import anyio
import anyio.lowlevel

from etlstage.errors import ConfigError
from etlstage.messages import StageKind
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import Stage
from etlstage.testing.fault import FaultKind, FaultPlan
from etlstage.testing.hostile.plan import DueFaults, as_bytes
from etlstage.testing.scripted import ScriptedWorker
from etlstage.worker.refusal import reason_of

__all__ = ("SimulatedWorker", "Work")

Work = Callable[[bytes], Iterable[bytes]]
"""What a worker makes of a message; what it raises is a refusal."""

_IDLE: Final = 0.05  # seconds without input
_BETWEEN: Final = 0.002  # seconds between two parts of a marker
_STATUS: Final = {
    FaultKind.KILL: -SIGKILL,
    FaultKind.SEGFAULT: -SIGSEGV,
    FaultKind.ABORT: -SIGABRT,
}
_SHAPES: Final = frozenset(
    {
        FaultKind.SKIP,
        FaultKind.REFUSE,
        FaultKind.TWICE,
        FaultKind.WRONG_MARKER,
        FaultKind.PARTIAL,
        FaultKind.HUGE,
        FaultKind.FLOOD,
        FaultKind.CUT,
    }
)
_NEVER: Final = frozenset({FaultKind.GRANDCHILD, FaultKind.LEAK})

Fault = Mapping[str, Any]


class SimulatedWorker:
    """
    One start of a worker.

    Args:
        worker: Its streams.
        stage: What it is a worker of.
        work: What it makes of a message.
        plan: What goes wrong.
        tell: Called with what goes wrong, in words.
        answered: Called with the messages of a reply that was written whole.

    Attributes:
        made_up: Whether a reply too many was made up for by one too few, so that no
            count can show it.

    """

    def __init__(
        self,
        worker: ScriptedWorker,
        stage: Stage,
        work: Work,
        plan: FaultPlan,
        tell: Callable[[str], None],
        answered: Callable[[list[bytes]], None],
    ) -> None:
        assert isinstance(stage.dialect, MarkerDialect)
        made = _made(plan)
        self._plan = DueFaults(made["faults"], made["seed"], worker.request.env)
        self._worker = worker
        self._stage = stage
        self._dialect = stage.dialect
        self._markers = stage.dialect.markers
        self._work = work
        self._tell = tell
        self._answered = answered
        self._number = 0  # messages read
        self._batch: list[bytes] = []
        self._spoilt: dict[str, Fault] = {}  # what is wrong with the reply to come
        self._rest = b""
        self._silent = self._deaf = self._mute = False
        self.made_up: bool = False
        self._ahead = False  # a reply too many has closed a batch, if we live on
        heartbeat = float(worker.request.env.get("ETLSTAGE_HEARTBEAT") or 0)
        # One may be late of three that are given in the time that is allowed.
        self._every = heartbeat / 3

    async def run(self) -> int:
        """Work until the end of the input; return the exit status."""
        try:
            await self._misbehave("start")
            self._show_life()
            if self._dialect.mode is Mode.PLAIN:
                await self._write(self._reply_of(self._work(b"")))
                return 0
            while data := await self._read():
                await self._take(data)
            await self._misbehave("end")
        except BrokenPipeError:
            return 1  # as a program that is told so
        if self._deaf or self._mute:
            await anyio.sleep_forever()
        return 0

    # --- input --------------------------------------------------------------

    async def _read(self) -> bytes:
        """Read; meanwhile show life, and do what is to be done when idle."""
        if self._deaf:
            await anyio.sleep_forever()
        idle = "idle" in self._plan and not self._rest and not self._batch
        if not (idle or self._every):
            return await self._worker.read()
        while True:
            with anyio.move_on_after(_IDLE if idle else self._every):
                return await self._worker.read()
            self._show_life()
            if idle:
                await self._misbehave("idle")

    async def _take(self, data: bytes) -> None:
        self._rest += data
        batches = self._dialect.mode in {Mode.BATCH_SUPERVISOR, Mode.BATCH_WORKER}
        eom, eob = self._markers.eom, self._markers.eob
        while self._rest:
            # EOB stands where a message would begin.
            if batches and self._rest.startswith(eob):
                self._rest = self._rest[len(eob) :]
                if self._dialect.eob_then_eom:
                    self._rest = self._rest.removeprefix(eom)
                await self._reply_to_batch()
                continue
            message, found, rest = self._rest.partition(eom)
            if not found:
                return
            self._rest = rest
            await self._take_message(message)

    async def _take_message(self, message: bytes) -> None:
        self._number += 1
        self._batch.append(message)
        await self._misbehave("message", message)
        if self._dialect.mode in {Mode.SINGLE, Mode.CYCLIC}:
            await self._reply_to_batch()
        elif self._dialect.mode is Mode.BATCH_WORKER:
            if len(self._batch) == self._stage.batch.size:
                await self._reply_to_batch()
            else:
                await self._write(self._markers.bnc)

    # --- output -------------------------------------------------------------

    async def _reply_to_batch(self) -> None:
        batch, self._batch = self._batch, []
        spoilt, self._spoilt = self._spoilt, {}
        if self._ahead and len(batch) > 1:
            # A worker that ends its batches itself may end one behind its first
            # message: so the reply too many was taken, and of the two batches that we
            # have been given since, this reply is the only one.
            self.made_up = True
            self._tell(f"its second reply was that to {batch[0]!r}: no count shows it")
        try:
            outputs = [output for message in batch for output in self._work(message)]
        except Exception as error:
            if self._markers.err is None:
                raise
            reason = reason_of(error, self._markers)
            await self._write(reason.encode() + self._markers.err)
            return
        if self._stage.kind is StageKind.LOAD:
            # What it does is done before it says so, or dies.
            self._answered(batch)
        await self._write_reply(outputs, spoilt)

    def _reply_of(self, outputs: Iterable[bytes]) -> bytes:
        return b"".join(output + self._markers.eom for output in outputs)

    async def _write_reply(
        self, outputs: list[bytes], spoilt: Mapping[str, Fault]
    ) -> None:
        eom, eop = self._markers.eom, self._markers.eop
        if eop == eom:
            # Exactly one message, whatever we have.
            outputs, eop = [b"".join(outputs)], b""
        if "skip" in spoilt:
            return
        if "refuse" in spoilt and self._markers.err is not None:
            reason = as_bytes(spoilt["refuse"].get("data")) or b" ".join(outputs)
            await self._write(reason + self._markers.err)
            return
        if "huge" in spoilt:
            outputs = [b"x" * spoilt["huge"]["size"]]
        if "flood" in spoilt:
            outputs = [b"x"] * spoilt["flood"]["size"] + outputs
        if "wrong_marker" in spoilt:
            wrong = as_bytes(spoilt["wrong_marker"].get("data"))
            eop = self._markers.bnc if wrong is None else wrong
        if "partial" in spoilt:
            await self._write(self._reply_of(outputs))
            raise SystemExit(-SIGKILL)
        if "cut" in spoilt:
            for output in outputs:
                await self._write(output)
                await self._cut(eom)
            await self._cut(eop)
        else:
            reply = self._reply_of(outputs) + eop
            await self._write(reply)
            if "twice" in spoilt:
                # What is given meanwhile, byte by byte, lies unread.
                await anyio.lowlevel.checkpoint()
                await self._write(reply)
            driven = self._dialect.mode is Mode.BATCH_WORKER
            self._ahead = self._ahead or (driven and "twice" in spoilt)

    async def _cut(self, marker: bytes) -> None:
        for at in range(len(marker)):
            await anyio.sleep(_BETWEEN)
            await self._write(marker[at : at + 1])

    async def _write(self, data: bytes) -> None:
        if not self._mute:
            await self._worker.write(data)

    def _show_life(self) -> None:
        if not self._silent:
            self._worker.show_life()

    # --- faults -------------------------------------------------------------

    async def _misbehave(self, moment: str, message: bytes = b"") -> None:
        if moment not in self._plan:
            return
        for fault in self._plan.due(moment, self._number, message):
            kind = FaultKind(fault["kind"])
            if kind is not FaultKind.PAUSE:
                at = f" at {message!r}" if moment == "message" else f" at {moment}"
                self._tell(f"fault {kind.value}{at}")
            if kind in _SHAPES:
                self._spoilt[kind.value] = fault
            else:
                await self._do(kind, fault)

    async def _do(self, kind: FaultKind, fault: Fault) -> None:
        data = as_bytes(fault.get("data"))
        match kind:
            case FaultKind.KILL | FaultKind.SEGFAULT | FaultKind.ABORT:
                raise SystemExit(_STATUS[kind])
            case FaultKind.EXIT:
                raise SystemExit(fault["status"])
            case FaultKind.PAUSE:
                await anyio.sleep(fault["seconds"])
            case FaultKind.STALL | FaultKind.SPIN:
                await anyio.sleep_forever()
            case FaultKind.STOP:
                self._worker.ignored.add(SIGTERM)
                await anyio.sleep_forever()
            case FaultKind.IGNORE_SIGTERM:
                self._worker.ignored.add(SIGTERM)
            case FaultKind.NEVER_READY:
                self._silent = True
            case FaultKind.GARBAGE:
                await self._write(data or b"stray print" + self._markers.eom)
            case FaultKind.EXTRA_EOP:
                await self._write(self._markers.eop)
            case FaultKind.STDERR:
                line = b"." * 99 if data is None else data
                for _ in range(max(1, fault["size"] // (len(line) + 1))):
                    await self._worker.complain(line.decode("latin-1"))
            case FaultKind.CLOSE_STDOUT:
                self._mute = True
                self._worker.close_stdout()
            case FaultKind.CLOSE_STDIN:
                self._deaf = True
                self._worker.close_stdin()
            case _:
                raise AssertionError(f"unreachable: {kind}")


@lru_cache(maxsize=64)
def _made(plan: FaultPlan) -> Mapping[str, Any]:
    """Return a plan as the hostile worker reads it."""
    for fault in plan.faults:
        if fault.kind in _NEVER:
            raise ConfigError(f"fault: {fault.kind.value} can't be simulated")
    made: Mapping[str, Any] = json.loads(plan.to_json())
    return made
