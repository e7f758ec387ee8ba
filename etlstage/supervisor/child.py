"""
A started worker: its process, its stderr, and its end.

What it is fed and what it answers is not known here; see ``connection.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from signal import SIGKILL, SIGTERM
from typing import Any, Final

import anyio

from etlstage.errors import (
    Attempt,
    EtlstageError,
    RefusedByWorker,
    RemoteProtocolError,
    WorkerLost,
)
from etlstage.messages import StageKind, counted
from etlstage.stage.stage import Stage
from etlstage.supervisor.spawn import command_line, spawn
from etlstage.supervisor.stderr.log import StderrLog
from etlstage.telemetry.terminal import harmless
from etlstage.transport import Launch
from etlstage.transport.base import describe_status

__all__ = ("ChildProcess",)

_DRAIN: Final = (0.1, 1.0)  # seconds for the pipes of a dead process to end
_SHOWN: Final = 5  # events of its story that an error shows


class ChildProcess:
    """
    Runs one process of a stage and sees it to its end.

    Args:
        stage: What to run.
        name: Such as ``clean-1``.
        launch: What starts it.
        start: How often it was started, this time included.
        stdin: Whether the worker is given any.
        farewell: Tells the worker to end, in its dialect, if there is a way to.
        story: Returns the last things that happened to it.
        counted: Called with numbers of lines on its stderr.

    Raises:
        WorkerStartFailed: If the program can't be run.

    """

    def __init__(
        self,
        stage: Stage,
        name: str,
        launch: Launch,
        *,
        start: int = 1,
        stdin: bool = True,
        farewell: Callable[[], bool] = bool,
        story: Callable[[], tuple[str, ...]] = tuple,
        counted: Callable[[int], None] | None = None,
    ) -> None:
        self.name = name
        self.wire, self.child = spawn(stage, name, launch, start=start, stdin=stdin)
        self.quit = anyio.Event()
        """The worker is to go; set it by :meth:`stop`."""
        self.told = False
        """The same, for who looks often."""
        self.exited = anyio.Event()
        """The process is gone and reaped."""
        self.finished = anyio.Event()
        """Behind that, :meth:`run` touches nothing any more."""
        self.status: int | None = None
        """Exit status, negative for a signal, once it is gone."""
        self._stage = stage
        self._farewell = farewell
        self._story = story
        self._stderr = StderrLog(
            self.child.stderr,
            stage=stage.name,
            worker=name,
            pid=self.child.pid,
            counted=counted,
        )
        self._silent = anyio.Event()
        self._patient = True
        self._signalled = False
        self.unread = 0
        """Bytes that it left in its stdin, when it ended by itself."""

    def __repr__(self) -> str:
        return f"<Worker {self.name!r} {self.child!r}>"

    def stop(self, *, patient: bool = True) -> None:
        """
        Let :meth:`run` stop the process: stdin, SIGTERM, SIGKILL.

        Args:
            patient: Whether it may finish by itself, once its stdin is closed.

        """
        self._patient = patient
        self.told = True
        self.quit.set()

    async def run(
        self,
        *tasks: Callable[[], Coroutine[Any, Any, object]],
        drained: anyio.Event | None = None,
    ) -> int:
        """
        Return the exit status when the process is gone and reaped.

        Cancelling has no effect: call :meth:`stop`, after which this is bounded.

        Args:
            tasks: Run as long as the process does.
            drained: What else to wait for, for a moment, behind the exit.

        """
        with anyio.CancelScope(shield=True):
            try:
                status = await self._run(tasks, drained)
                self._stderr.drain()
                self.wire.stop_waiting()
                if self.child.status is not None:
                    self.child.status.stop_waiting()
            except BaseException:
                # An error of ours, for none of theirs is raised: it must neither
                # leave the process behind nor anybody who waits for its end.
                await self._abandon()
                raise
            finally:
                self.exited.set()
                self.finished.set()
        return status

    async def _run(
        self,
        tasks: Iterable[Callable[[], Coroutine[Any, Any, object]]],
        drained: anyio.Event | None,
    ) -> int:
        async with anyio.create_task_group() as group:
            for task in (self._read_stderr, self._stop_when_told, *tasks):
                group.start_soon(task)
            self.status = status = await self.child.wait()
            self._note_unread()
            self.exited.set()
            # What it wrote last is in the pipes. If they don't end now, then
            # somebody in a session of its own has them: a part of this worker.
            for patience in _DRAIN:
                with anyio.move_on_after(patience):
                    await self._silent.wait()
                    if drained is not None:
                        await drained.wait()
                    break
                self.child.kill_heirs()
            group.cancel_scope.cancel()
        return status

    async def _abandon(self) -> None:
        """Kill the process, whatever else goes wrong."""
        with suppress(Exception):
            self.child.signal(SIGKILL)
        with suppress(Exception), anyio.move_on_after(self._stage.timeout.stop):
            await self.child.wait()
        status = self.child.returncode
        self.status = -SIGKILL if status is None else status

    def close(self) -> None:
        """Close what is open to it, once :meth:`run` is over."""
        try:
            self.wire.close()
        finally:
            self.child.close()

    def lost(self, fate: str, held: int = 0, tries: int = 1) -> WorkerLost:
        """
        Return the error for messages that the worker held when it met its fate.

        Args:
            fate: What happened, as a part of a sentence.
            held: How many messages it held.
            tries: How often they were tried.

        """
        what = f" while it held {counted(held, 'message')}" if held else ""
        return WorkerLost(
            self._describe(f"{fate}{what}", tries), stage=self._stage.name
        )

    def fate(self, closed: str = "") -> str:
        """
        Return what became of a worker that is gone without being told to.

        Args:
            closed: The pipe that it closed before; if it went no further by itself,
                this is what it died of.

        """
        assert self.status is not None
        if closed and self._signalled:
            return f"closed its {closed}, but did not exit, and was stopped"
        return describe_status(self.status)

    def blamed(self, error: EtlstageError, tries: int = 1) -> RemoteProtocolError:
        """Return ``error``, a breach of the protocol, with who committed it."""
        return RemoteProtocolError(
            self._describe(f"broke the protocol: {error}", tries)
        )

    def refused(self, code: int, reason: str) -> RefusedByWorker:
        """Return the error of a message to which the worker said no."""
        what = "request" if self._stage.kind is StageKind.EXTRACT else "message"
        said = reason or (f"code {code}" if code else "it gave no reason")
        fate = f"refused the {what}: {harmless(' '.join(said.split()))}"
        error = RefusedByWorker(
            f"stage {self._stage.name}: worker {self.name} (pid {self.child.pid})"
            f" {fate}",
            stage=self._stage.name,
            code=code,
            reason=reason,
        )
        # Its stderr as far as it was read: of refusals there may be thousands a second.
        attempt = Attempt(self.name, self.child.pid, fate, (), self._stderr.tail)
        error.attempts = (attempt,)
        return error

    def attempt(self, fate: str) -> Attempt:
        """Return the record of this worker's failure at what it held."""
        self._stderr.drain()
        stderr = tuple(self._stderr.tail)
        return Attempt(self.name, self.child.pid, fate, self._story(), stderr)

    async def _read_stderr(self) -> None:
        await self._stderr.run()
        self._silent.set()

    async def _stop_when_told(self) -> None:
        await self.quit.wait()
        if self._patient and self._farewell():
            with anyio.move_on_after(self._stage.timeout.stop):
                await self.exited.wait()
                return
        for signal in (None, SIGTERM, SIGKILL) if self._patient else (SIGTERM, SIGKILL):
            if signal is not None:
                self._signalled = True
                self.child.signal(signal)
            # What it has not read is of interest, and gone with the pipe.
            self._note_unread()
            # Behind the signal, if there is one: which of the two it dies of is then
            # no matter of chance.
            self.wire.close_write()
            with anyio.move_on_after(self._stage.timeout.stop):
                await self.exited.wait()
                return

    def _note_unread(self) -> None:
        if not self._signalled:
            self.unread = max(self.unread, self.wire.unread())

    def _describe(self, fate: str, tries: int) -> str:
        self._stderr.drain()
        tail = "; ".join(self._stderr.tail)
        said = f"last stderr lines: {tail}" if tail else "no stderr output"
        again = f", after {tries} tries" if tries > 1 else ""
        story = "; ".join(self._story()[-_SHOWN:])
        return (
            f"stage {self._stage.name}: worker {self.name} (pid {self.child.pid})"
            f" {fate}{again}; {said}{f'; last events: {story}' * bool(story)};"
            f" command: {command_line(self._stage)}"
        )
