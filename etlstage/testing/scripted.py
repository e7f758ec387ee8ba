"""
Workers without processes: each is an async function that communicates in memory.

::

    async def clean(worker: ScriptedWorker) -> int | None:
        async for message in worker.messages():
            if worker.start == 1 and message == b"poison":
                return -SIGSEGV
            await anyio.sleep(0.2)
            await worker.reply(message.upper())
        return 0

    async def main() -> None:
        async with AsyncSupervisor(stage, launch=ScriptedLaunch(clean)) as supervisor:
            results = await supervisor.submit([b"one", b"poison", b"two"])

    run_virtually(main)

The supervisor can't distinguish them from programs: it restarts them after a delay,
misses their heartbeats, and sends them signals. With the clock of ``clock.py``, minutes
of that take milliseconds.

``python -m etlstage.testing.scripted single 1 upper PLAN`` runs a worker as a real
process that follows a fault plan, as written by ``FaultPlan.to_json()``; the other
arguments are those of ``hostile/program.py``.

A worker that fails to start is up to the launch, which is a function like any other::

    def launch(request: LaunchRequest) -> tuple[Wire, Child]:
        if request.start == 2:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        return scripted(request)

"""

from __future__ import annotations

import json
import sys
import traceback
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from functools import cached_property
from signal import SIGKILL, SIGTERM, Signals
from typing import Any, Final, Generic, Self, TypeVar

import anyio
import anyio.lowlevel

from etlstage.errors import ConfigError
from etlstage.protocol.marker import Markers
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import Stage
from etlstage.testing.fault import DRIVERS, FaultKind, FaultPlan
from etlstage.testing.hostile.kinds import (
    Act,
    Exit,
    ReadInput,
    ShowLife,
    Step,
    as_bytes,
)
from etlstage.testing.hostile.marked import repeated
from etlstage.testing.hostile.program import main
from etlstage.testing.hostile.worker import HostileWorker
from etlstage.transport.base import Child, LaunchRequest, Wire
from etlstage.transport.memory import MemoryPipe, MemoryWire, memory_wire
from etlstage.worker.marking import find_markers
from etlstage.worker.refusal import reason_of

__all__ = ("Script", "ScriptedLaunch", "ScriptedWorker", "SimulatedWorker", "Work")

T = TypeVar("T")
_CHUNK: Final = 65536  # bytes per read
# The greatest pid of a process; a greater one is found neither by signals nor in /proc.
_MOST: Final = 2**22


class ScriptedWorker:
    """
    One start of a worker, as its script sees it.

    Attributes:
        request: The launch request: command, environment, names.
        name: Its name, such as ``clean-1``.
        start: How often this worker was started, this time included.
        pid: A number that no process has.
        ignored: Signals that it ignores; SIGKILL can't be ignored.
        signals: Signals that it was sent.
        returncode: Exit status once it has exited, negative for a signal; else None.

    """

    def __init__(
        self,
        request: LaunchRequest,
        pid: int,
        wire: MemoryWire,
        stderr: MemoryPipe,
        status: MemoryPipe | None,
    ) -> None:
        self.request = request
        self.name: str = request.worker
        self.start: int = request.start
        self.pid: int = pid
        self.ignored: set[Signals] = set()
        self.signals: list[Signals] = []
        self.returncode: int | None = None
        self._wire = wire
        self._stderr = stderr
        self._status = status
        self._whole = deque[bytes]()  # messages of stdin that were not yielded
        self._rest = b""  # of stdin: the beginning of a message

    def __repr__(self) -> str:
        fate = "running" if self.returncode is None else f"status={self.returncode}"
        return f"<ScriptedWorker {self.name!r} start={self.start} {fate}>"

    @cached_property
    def _markers(self) -> Markers:
        return find_markers((), self.request.env)

    async def read(self, size: int = _CHUNK) -> bytes:
        """Wait for bytes on stdin, and return them; ``b""`` at its end."""
        while (data := self._wire.read(size)) is None:
            await self._wire.readable()
        return data

    async def write(self, data: bytes) -> None:
        """
        Write all of ``data`` to stdout.

        Raises:
            BrokenPipeError: If the supervisor, or we, closed it.

        """
        await _write(self._wire, data)

    def messages(self) -> AsyncIterator[bytes]:
        """Yield the messages of stdin; not for workers that fill their own batches."""

        async def get() -> bytes | None:
            while not self._whole:
                data = await self.read()
                if not data:
                    return None
                *more, self._rest = (self._rest + data).split(self._markers.eom)
                self._whole.extend(more)
            return self._whole.popleft()

        return Stream(get)

    async def reply(self, *outputs: bytes) -> None:
        """Reply to a message, or a batch, with these outputs."""
        eom, eop = self._markers.eom, self._markers.eop
        if eop == eom:
            eop = b""
        await self.write(b"".join(output + eom for output in outputs) + eop)

    async def refuse(self, reason: str) -> None:
        """Refuse a message, or a batch."""
        err = self._markers.err
        assert err is not None, "a worker that was given no marker err can't refuse"
        await self.write(reason.encode() + err)

    async def complain(self, text: str | bytes) -> None:
        """Write a line to stderr, or bytes as they are."""
        line = text if isinstance(text, bytes) else text.encode() + b"\n"
        await _write(self._stderr, line)

    def show_life(self) -> None:
        """Report that it is ready, later that it is alive, if it has a status pipe."""
        if self._status is not None:
            self._status.write(b"\n")

    def tell(self, **status: object) -> None:
        """Report a status, as ``tell(progress=0.4)`` or ``tell(metric="x", add=3)``."""
        if self._status is not None:
            self._status.write(json.dumps(status).encode() + b"\n")

    def close_stdin(self) -> None:
        """Close stdin."""
        self._wire.close_read()

    def close_stdout(self) -> None:
        """Close stdout."""
        self._wire.close_write()


class Stream(Generic[T]):
    """
    Yields what ``get`` returns, until that is None.

    Not a generator, which a script that leaves its loop would have to close.
    """

    def __init__(self, get: Callable[[], Awaitable[T | None]]) -> None:
        self._get = get

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        got = await self._get()
        if got is None:
            raise StopAsyncIteration
        return got


Script = Callable[[ScriptedWorker], Coroutine[Any, Any, int | None]]
"""What a worker does; it returns its exit status, negative for a signal.

It may also raise ``SystemExit``, with a status, or a text for stderr. Any other
exception has the same effect as in a Python program: the traceback is written to
stderr, and the status is 1."""


class ScriptedLaunch:
    """
    Starts workers that follow a script; see :class:`~etlstage.AsyncSupervisor`.

    Args:
        script: What each worker does.
        pipe_size: Capacity of stdin and stdout, in bytes.

    Attributes:
        workers: All workers that were started, in order.

    """

    def __init__(self, script: Script, *, pipe_size: int = 65536) -> None:
        self.workers: list[ScriptedWorker] = []
        self._script = script
        self._pipe_size = pipe_size

    @property
    def running(self) -> list[ScriptedWorker]:
        """The workers that have not exited."""
        return [worker for worker in self.workers if worker.returncode is None]

    def __call__(self, request: LaunchRequest, /) -> tuple[Wire, Child]:
        """Start a worker."""
        ours, theirs = memory_wire(self._pipe_size)
        if not request.stdin:
            ours.close_write()
        stderr, status = MemoryPipe(), MemoryPipe() if request.status else None
        pid = _MOST + len(self.workers) + 1
        worker = ScriptedWorker(request, pid, theirs, stderr, status)
        self.workers.append(worker)
        return ours, _ScriptedChild(worker, self._script, theirs, stderr, status)


class _ScriptedChild:
    """A scripted worker, as the supervisor sees it."""

    def __init__(
        self,
        worker: ScriptedWorker,
        script: Script,
        wire: MemoryWire,
        stderr: MemoryPipe,
        status: MemoryPipe | None,
    ) -> None:
        self.pid = worker.pid
        self.stderr = stderr
        self.status = status
        self._worker = worker
        self._script = script
        self._wire = wire
        self._alive = anyio.CancelScope()
        self._killed_by = 0
        self._begun = False

    def __repr__(self) -> str:
        return repr(self._worker)

    @property
    def returncode(self) -> int | None:
        return self._worker.returncode

    def signal(self, number: Signals, /) -> None:
        if self.returncode is not None:
            return
        self._worker.signals.append(number)
        if number is SIGKILL or number not in self._worker.ignored:
            self._killed_by = self._killed_by or number
            self._alive.cancel()
            if not self._begun:
                self._end(0)

    def kill(self) -> int:
        self.signal(SIGKILL)
        return 0

    # A script never leaves anything running.

    def kill_heirs(self) -> int:
        return 0

    async def deserted(self) -> None:
        pass

    async def wait(self) -> int:
        # The script runs in the task that waits for it, so it can't be left behind.
        if self.returncode is None:
            self._begun = True
            status = -SIGKILL  # if this task is cancelled before the script runs
            try:
                with self._alive:
                    status = await self._script(self._worker) or 0
            except SystemExit as exit_:
                match exit_.code:
                    case None:
                        status = 0
                    case int() as status:
                        status &= 0xFF  # of which only a byte arrives
                    case text:
                        status = self._fail(f"{text}\n")
            except (Exception, BaseExceptionGroup) as error:
                if isinstance(error, BaseExceptionGroup):
                    _, others = error.split((Exception, SystemExit))
                    if others is not None:  # cancelled, or interrupted
                        raise
                status = self._fail(traceback.format_exc())
            finally:
                self._end(status)
        assert self.returncode is not None
        return self.returncode

    def close(self) -> None:
        self.stderr.close()
        if self.status is not None:
            self.status.close()

    def _fail(self, last_words: str) -> int:
        data = last_words.encode(errors="backslashreplace")
        self.stderr.write(data[-_CHUNK // 2 :])
        return 1

    def _end(self, status: int) -> None:
        # A returned status is negative for a signal.
        status = status & 0xFF if status > 0 else status
        self._worker.returncode = -self._killed_by or status
        # As when a process exits, its ends of the pipes are closed.
        self._wire.close()
        self.stderr.end()
        if self.status is not None:
            self.status.end()


async def _write(pipe: MemoryWire | MemoryPipe, data: bytes) -> None:
    while data := data[pipe.write(data) :]:
        await pipe.writable()


Work = Callable[[bytes], Iterable[bytes]]
"""Returns the outputs for a message; an exception is a refusal."""


class SimulatedWorker:
    """
    One start of a worker that does its work, with the faults of a plan.

    It is the hostile worker without a process. Faults that only a process can have are
    refused, except ``spin``, which is a stall here.

    Args:
        worker: The scripted worker, with its streams.
        stage: The stage of the worker.
        work: Returns the outputs for a message; for a request, if it extracts.
        plan: What goes wrong.
        tell: Called with a description of each fault.
        numbers: How many numbers to extract, if it extracts like the hostile worker.

    Attributes:
        made_up: Whether an extra reply was offset by a missing one, so that no count
            can reveal it.

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
        # For an extracting worker, a request is the message that its work gets.
        batches = dialect.shape.batches or numbers is not None
        self._does = HostileWorker(
            plan.due(worker.request.env),
            worker.request.env,
            work,
            driver=DRIVERS[dialect.mode] if batches else "single",
            size=stage.batch.size if numbers is None else numbers,
            eob_then_eom=dialect.eob_then_eom,
            reason=lambda error: reason_of(error, dialect.markers),
        )
        self._worker = worker
        self._tell = tell

    @property
    def made_up(self) -> bool:
        """Whether an extra reply was offset by a missing one."""
        return self._does.made_up

    async def run(self) -> int:
        """Work until the end; return the exit status, negative for a signal."""
        life, came = self._does.life(), None
        try:
            while not isinstance(step := life.send(came), Exit):
                came = await self._do(step)
        except StopIteration:
            return 0
        except BrokenPipeError:
            return 1  # as a program on a broken pipe
        return step.status

    async def _do(self, step: Step) -> bytes | None:
        """Perform a step; for a read, return the data, or None if none came in time."""
        match step:
            case bytes() if step and not self._does.mute:
                await self._worker.write(step)
            case float():
                await anyio.sleep(step)
            case str():
                self._tell(step)
            case ReadInput(seconds):
                with anyio.move_on_after(seconds or None):
                    return await self._worker.read()
            case ShowLife():
                self._worker.show_life()
            case Act():
                await self._act(step)
        return None

    async def _act(self, act: Act) -> None:
        match act.kind:
            case FaultKind.STALL | FaultKind.SPIN:
                await anyio.sleep_forever()
            case FaultKind.STOP:
                self._worker.ignored.add(SIGTERM)
                await anyio.sleep_forever()
            case FaultKind.IGNORE_SIGTERM:
                self._worker.ignored.add(SIGTERM)
            case FaultKind.STDERR:
                data = as_bytes(act.fault.get("data"))
                line = b"." * 99 if data is None else data
                for block in repeated(line + b"\n", act.fault["size"]):
                    await self._worker.complain(block)
            case FaultKind.CLOSE_STDOUT:
                self._worker.close_stdout()
            case FaultKind.CLOSE_STDIN:
                self._worker.close_stdin()
            case _:
                raise AssertionError(f"unreachable: {act.kind}")


if __name__ == "__main__":
    main(sys.argv[1:])
