"""
A process under test: its pipes, and everything that passes through them.

This module does not interpret the bytes: ``conversation.py`` does that for workers that
reply, ``kcl.py`` for those that checkpoint, ``recording/replay.py`` for recorded ones.
"""

from __future__ import annotations

import os
import platform
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from signal import Signals
from typing import Any, Final, NoReturn, TypeAlias

import anyio
import anyio.abc
import anyio.lowlevel

from etlstage.protocol.base import Shape
from etlstage.stage.stage import Stage
from etlstage.supervisor.process import command_line, spawn
from etlstage.telemetry.terminal import harmless
from etlstage.testing.transcript import Channel, Entry, Transcript, WorkerMisbehaved
from etlstage.transport import Child, Launch, Readable, Wire
from etlstage.transport.base import describe_status
from etlstage.transport.guard import lives
from etlstage.transport.process import descendants

__all__ = ("DRAIN", "Otherwise", "Process", "UnderTest", "waits_for_stdin")

DRAIN: Final = 0.5  # seconds for the pipes of a dead process to end
_CHUNK: Final = 65536  # bytes a read
_IDLE: Final = 0.02  # seconds without output before checking whether a worker is idle
_TURNS: Final = 8  # turns of the event loop, enough to read what is in a pipe
_KEPT: Final = 1024 * 1024  # bytes recorded of output that is not interpreted
# The system call number of read(2), with stdin as its first argument.
_READING: Final = {"x86_64": b"0 0x0 ", "aarch64": b"63 0x0 "}.get(platform.machine())

Otherwise: TypeAlias = str | Callable[[], str]
"""Describes, as part of a sentence, that a process did not do what was waited for."""


class Process(ABC):
    """
    One process of a stage.

    Args:
        stage: The stage.
        launch: Starts the process.

    Attributes:
        stage: The stage.
        transcript: Everything written and read so far.
        open: Those of stdout and stderr that have not ended.
        alive: Whether it has written to its status pipe.
        closed: Whether its stdin was closed.
        gone: Whether it has exited, and all of its output was read.
        status: Exit status, negative for a signal, once it is gone.
        left: Number of processes that it left behind, once it is gone.

    """

    def __init__(self, stage: Stage, launch: Launch) -> None:
        self.stage = stage
        self.transcript: Transcript = Transcript()
        self.open: set[Channel] = set()
        self.alive: bool = False
        self.closed: bool = False
        self.gone: bool = False
        self.status: int | None = None
        self.left: int = 0
        self._launch = launch
        self._changed = anyio.Event()
        self._began = 0.0
        self._wire: Wire
        self._child: Child
        self._tasks: anyio.abc.TaskGroup

    @property
    def fate(self) -> str:
        """A description of its exit status, or "running"."""
        return "running" if self.status is None else describe_status(self.status)

    @abstractmethod
    def take(self, data: bytes) -> bool:
        """Receive from its stdout, ``b""`` at its end; return whether to continue."""

    async def start(
        self, name: str = "", *, reads: bool | None = None, start: int = 1
    ) -> None:
        """
        Start the process, and the tasks that read all of its output.

        Args:
            name: The worker's name; by default that of the stage's first worker.
            reads: Whether it has a stdin; by default, if its dialect needs one.
            start: How often the worker was started, this time included.

        """
        self._began = anyio.current_time()
        if reads is None:
            reads = self.stage.dialect.shape is not Shape.STREAM
        self._wire, self._child = spawn(
            self.stage,
            name or f"{self.stage.name}-1",
            self._launch,
            stdin=reads,
            start=start,
        )
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._watch)
        self.open = {Channel.STDOUT, Channel.STDERR}
        self._tasks.start_soon(self._read, self._wire, Channel.STDOUT)
        self._tasks.start_soon(self._read, self._child.stderr, Channel.STDERR)
        if self._child.status is not None:
            self._tasks.start_soon(self._look_for_life, self._child.status)

    async def kill(self) -> None:
        """Kill the process unconditionally, and close its pipes."""
        # The watching tasks can't do it: if we were cancelled, so were they.
        self._child.kill()
        self._child.kill_heirs()
        self.status = self._child.returncode
        self._tasks.cancel_scope.cancel()
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            self._wire.close()
            self._child.close()

    async def write(self, data: bytes) -> None:
        """
        Write all of ``data`` to its stdin.

        Raises:
            BrokenPipeError: If the process has closed it.

        """
        left = memoryview(data)
        while left:
            if taken := self._wire.write(left):
                self._note(Channel.STDIN, bytes(left[:taken]))
                left = left[taken:]
            if left:
                await self._wire.writable()

    def close_stdin(self) -> None:
        """Close its stdin."""
        self.closed = True
        connects = self.stage.dialect.connection is not None
        what = b"we ended the connection" if connects else b"stdin was closed"
        self._note(Channel.EVENT, what)
        self._wire.close_write()

    def signal(self, number: Signals) -> None:
        """Send a signal to the process and its group."""
        self._note(Channel.EVENT, f"{Signals(number).name} was sent".encode())
        self._child.signal(number)

    def unread(self) -> int:
        """Return the number of bytes in its stdin that it has not read."""
        return self._wire.unread()

    def accompany(self, task: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a task for as long as the process is watched."""
        self._tasks.start_soon(task)

    async def changed(self) -> None:
        """Wait until anything happens."""
        await self._changed.wait()

    async def idles(self) -> bool:
        """Wait for a change; return True if the process provably waits for input."""
        if not lives(self._child.pid):
            await self._changed.wait()  # it has exited, or is not a real process
            return False
        # Set by any change from here on, also between the checks below.
        changed = self._changed
        with anyio.move_on_after(_IDLE):
            await changed.wait()
            return False
        if self.closed or self._wire.unread() or not waits_for_stdin(self._child.pid):
            return False
        # Its earlier output is in the pipe, but we may not have read it yet.
        for _ in range(_TURNS):
            await anyio.lowlevel.checkpoint()
        return not changed.is_set()

    # --- how ----------------------------------------------------------------

    def _note(self, channel: Channel, data: bytes) -> None:
        at = anyio.current_time() - self._began
        self.transcript.append(Entry(channel, data, at))
        self.wake()

    def wake(self) -> None:
        """Wake all tasks in :meth:`changed`."""
        self._changed.set()
        self._changed = anyio.Event()

    async def _read(self, pipe: Readable, channel: Channel) -> None:
        kept, taken = 0, channel is Channel.STDOUT
        while (data := pipe.read(_CHUNK)) != b"":
            if data is None:
                await pipe.readable()
            elif taken:
                taken = self.take(data)
                self._note(channel, data)
            # The volume of stderr, and of stdout after a fault, may be unlimited.
            elif kept < _KEPT:
                self._note(channel, data)
                kept += len(data)
            await anyio.lowlevel.checkpoint()
        self.open.discard(channel)
        if channel is Channel.STDOUT:
            connects = self.stage.dialect.connection is not None
            came = self.transcript.of(Channel.STDOUT)
            ended = b"it closed the connection" if came else b"it did not connect"
            self._note(Channel.EVENT, ended if connects else b"stdout has ended")
            if taken:
                self.take(b"")
        self.wake()

    async def _look_for_life(self, pipe: Readable) -> None:
        while (data := pipe.read(_CHUNK)) != b"":
            if data is None:
                await pipe.readable()
            elif not self.alive:
                self.alive = True
                self.wake()
            await anyio.lowlevel.checkpoint()

    async def _watch(self) -> None:
        status = await self._child.wait()
        self._wire.close_write()
        with anyio.move_on_after(DRAIN):
            await self._child.deserted()
            await self._both_ended()
        self.left = self._child.kill() + self._child.kill_heirs()
        with anyio.move_on_after(DRAIN):
            await self._both_ended()
        self.status, self.gone = status, True
        self._note(Channel.EVENT, describe_status(status).encode())

    async def _both_ended(self) -> None:
        while self.open:
            await self._changed.wait()


class UnderTest(Process):
    """A process, together with our side of its dialect."""

    noun = "worker"

    def __init__(self, stage: Stage, launch: Launch, timeout: float) -> None:
        super().__init__(stage, launch)
        self.timeout = timeout

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def exited(self, otherwise: str = "did not exit") -> int:
        """Wait for its exit, and return the exit status, negative for a signal."""
        async with self.deadline(otherwise):
            while not self.gone:
                await self.changed()
        assert self.status is not None
        return self.status

    def fail(self, what: str) -> NoReturn:
        """Raise :class:`WorkerMisbehaved` with a description and the transcript."""
        command = f"  command: {harmless(command_line(self.stage))}"
        shown = self.transcript.shown(self.stage.dialect)
        raise WorkerMisbehaved(f"the {self.noun} {what}", f"{command}\n{shown}")

    @asynccontextmanager
    async def deadline(self, otherwise: Otherwise) -> AsyncIterator[anyio.CancelScope]:
        """Fail if the block takes longer than ``timeout`` seconds."""
        with anyio.move_on_after(self.timeout) as scope:
            yield scope
        if scope.cancelled_caught:
            self.fail(self.late(otherwise))

    def late(self, otherwise: Otherwise) -> str:
        """Return the description of a wait that timed out."""
        return f"{otherwise} within {self.timeout:g} seconds"


def waits_for_stdin(pid: int) -> bool:
    """
    Return whether a process provably does nothing but read its stdin.

    It has a single thread then, and no children: unless there is something to be read,
    it will not write anything. False if that can't be determined.
    """
    if _READING is None:
        return False
    try:
        if len(os.listdir(f"/proc/{pid}/task")) != 1:
            return False
        reads = Path(f"/proc/{pid}/syscall").read_bytes().startswith(_READING)
    except OSError:
        return False
    return reads and not descendants(pid)
