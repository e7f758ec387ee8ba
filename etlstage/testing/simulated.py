"""
A scripted worker that does its work, and what a fault plan has.

It is the hostile worker without a process. What takes one (``spin`` aside, which is a
stall here) is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from signal import SIGTERM
from typing import Final

import anyio
import anyio.lowlevel

from etlstage.errors import ConfigError
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import Stage
from etlstage.testing.fault import FaultKind, FaultPlan
from etlstage.testing.hostile.kinds import Act, Exit, Step, as_bytes
from etlstage.testing.hostile.marked import MarkerBytes
from etlstage.testing.hostile.worker import HostileWorker
from etlstage.testing.scripted import ScriptedWorker
from etlstage.testing.worker import DRIVERS
from etlstage.worker.refusal import reason_of

__all__ = ("SimulatedWorker", "Work")

Work = Callable[[bytes], Iterable[bytes]]
"""What a worker makes of a message; what it raises is a refusal."""

_IDLE: Final = 0.05  # seconds without input


class SimulatedWorker:
    """
    One start of a worker.

    Args:
        worker: Its streams.
        stage: What it is a worker of.
        work: What it makes of a message; of a request, if it extracts.
        plan: What goes wrong.
        tell: Called with what goes wrong, in words.
        numbers: How many numbers it extracts, if it is to do so as the hostile worker.

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
        tell: Callable[[str], None] = lambda _: None,
        *,
        numbers: int | None = None,
    ) -> None:
        dialect = stage.dialect
        assert isinstance(dialect, MarkerDialect)
        for fault in plan.faults:
            if fault.kind.inside and fault.kind is not FaultKind.SPIN:
                raise ConfigError(f"fault: {fault.kind.value} can't be simulated")
        # What an extractor is asked for is a message to its work.
        batches = dialect.shape.batches or numbers is not None
        driver = DRIVERS[dialect.mode] if batches else "single"
        self._plain = dialect.mode is Mode.PLAIN
        self._does = HostileWorker(
            plan.due(worker.request.env),
            MarkerBytes(worker.request.env),
            work,
            driver=driver,
            size=stage.batch.size if numbers is None else numbers,
            eob_then_eom=dialect.eob_then_eom,
            reason=lambda error: reason_of(error, dialect.markers),
        )
        self._worker = worker
        self._tell = tell
        self._silent = self._deaf = self._mute = False
        heartbeat = float(worker.request.env.get("ETLSTAGE_HEARTBEAT") or 0)
        # One may be late of three that are given in the time that is allowed.
        self._every = heartbeat / 3

    @property
    def made_up(self) -> bool:
        """Whether no count can show what was wrong."""
        return self._does.made_up

    async def run(self) -> int:
        """Work until the end of the input; return the exit status."""
        try:
            await self._do(self._does.moment("start"))
            self._show_life()
            if self._plain:
                await self._do(self._does.give())
            else:
                while data := await self._read():
                    await self._do(self._does.feed(data))
            await self._do(self._does.moment("end"))
        except BrokenPipeError:
            return 1  # as a program at a broken pipe
        if self._deaf or self._mute:
            await anyio.sleep_forever()
        return 0

    async def _read(self) -> bytes:
        """Read; meanwhile show life, and do what is to be done when idle."""
        if self._deaf:
            await anyio.sleep_forever()
        waits = self._does.waits
        if not (waits or self._every):
            return await self._worker.read()
        while True:
            with anyio.move_on_after(_IDLE if waits else self._every):
                return await self._worker.read()
            self._show_life()
            if waits:
                await self._do(self._does.moment("idle"))

    def _show_life(self) -> None:
        if not self._silent:
            self._worker.show_life()

    async def _do(self, steps: Iterable[Step]) -> None:
        for step in steps:
            match step:
                case bytes() if step and not self._mute:
                    await self._worker.write(step)
                case float():
                    await anyio.sleep(step)
                case str():
                    self._tell(step)
                case Exit(status):
                    raise SystemExit(status)
                case Act():
                    await self._act(step)

    async def _act(self, act: Act) -> None:
        match act.kind:
            case FaultKind.STALL | FaultKind.SPIN:
                await anyio.sleep_forever()
            case FaultKind.STOP:
                self._worker.ignored.add(SIGTERM)
                await anyio.sleep_forever()
            case FaultKind.IGNORE_SIGTERM:
                self._worker.ignored.add(SIGTERM)
            case FaultKind.NEVER_READY:
                self._silent = True
            case FaultKind.STDERR:
                data = as_bytes(act.fault.get("data"))
                line = b"." * 99 if data is None else data
                for _ in range(max(1, act.fault["size"] // (len(line) + 1))):
                    await self._worker.complain(line.decode("latin-1"))
            case FaultKind.CLOSE_STDOUT:
                self._mute = True
                self._worker.close_stdout()
            case FaultKind.CLOSE_STDIN:
                self._deaf = True
                self._worker.close_stdin()
            case _:
                raise AssertionError(f"unreachable: {act.kind}")
