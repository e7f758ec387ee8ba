"""
A started worker: its process, its stderr, and its end.

What it is fed and what it answers is not known here; see ``connection.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from functools import partial
from signal import SIGKILL, SIGTERM
from typing import Any, Final, TypeAlias, TypeVar

import anyio

from etlstage.errors import (
    Attempt,
    EtlstageError,
    RemoteProtocolError,
    WorkerLost,
    WorkerRefusal,
)
from etlstage.messages import StageKind, counted
from etlstage.stage.stage import Stage
from etlstage.supervisor.diagnostic import cause_of
from etlstage.supervisor.spawn import command_line, spawn
from etlstage.supervisor.stderr import StderrLog
from etlstage.telemetry.log import Log
from etlstage.telemetry.terminal import harmless
from etlstage.transport import Child, Launch, Wire
from etlstage.transport.base import describe_status

__all__ = ("ChildProcess",)

_log = Log()

_Error = TypeVar("_Error", bound=EtlstageError)
_Task: TypeAlias = Callable[[], Coroutine[Any, Any, object]]

_DRAIN: Final = (0.1, 1.0)  # seconds for the pipes of a dead process to end
_SHOWN: Final = 5  # events of its story that an error shows
_LONGEST: Final = 160  # characters of last words that begin an error
_NOES: Final = 128  # refusals whose words are kept


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
        unmet: Returns whether it could not, for the worker has not said who it is.
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
        unmet: Callable[[], bool] = bool,
        story: Callable[[], tuple[str, ...]] = tuple,
        counted: Callable[[int], None] | None = None,
    ) -> None:
        self.name = name
        self.wire: Wire
        self.child: Child
        self.wire, self.child = spawn(stage, name, launch, start=start, stdin=stdin)
        self.quit: anyio.Event = anyio.Event()
        """The worker is to go; set it by :meth:`stop`."""
        self.told: bool = False
        """The same, or it is gone, for who looks often."""
        self.exited: anyio.Event = anyio.Event()
        """The process is gone; what it has left behind may live."""
        self.status: int | None = None
        """Exit status, negative for a signal, once it is gone."""
        self._stage = stage
        self._asked = stdin
        self._farewell = farewell
        self._unmet = unmet
        self._story = story
        self._stderr = StderrLog(
            self.child.stderr,
            stage=stage.name,
            worker=name,
            pid=self.child.pid,
            counted=counted,
        )
        self._silent = anyio.Event()  # stderr has ended
        self._mute = anyio.Event()  # stdout has
        self._patient = True
        self._signalled = False
        # Of refusals, by code, category and reason: the text, and the attempt.
        self._noes: dict[tuple[int, int, str], tuple[str, tuple[Attempt]]] = {}
        self._by_us = False  # it was we who ended it
        self._waiting = anyio.CancelScope()  # what impatience ends
        self.unread: int = 0
        """Bytes that it left in its stdin, when it ended by itself."""

    def __repr__(self) -> str:
        return f"<Worker {self.name!r} {self.child!r}>"

    def stop(self, *, patient: bool = True) -> None:
        """
        Let :meth:`run` stop the process: farewell, stdin, SIGTERM, SIGKILL.

        Args:
            patient: Whether it may finish by itself, once its stdin is closed; and what
                it leaves behind, once it has ended by itself.

        """
        self._patient = self._patient and patient
        self.told = True
        self.quit.set()
        if not patient:
            self._waiting.cancel()

    async def run(
        self,
        read: _Task,
        *tasks: _Task,
        owes: Callable[[int], bool],
        ended: Callable[[int], None],
    ) -> int:
        """
        See the process, and what it leaves behind, to their end, and reap it.

        Cancelling has no effect: call :meth:`stop`, after which this is bounded.

        Args:
            read: Reads its stdout to the end.
            tasks: Run as long as the process does.
            owes: Reads what is in its stdout, and returns whether, after an exit with
                this status, others may still write there what it owes.
            ended: Called with the exit status, once its output was read.

        Returns:
            How many processes were killed that it had left behind.

        """
        with anyio.CancelScope(shield=True):
            try:
                killed = await self._run(read, tasks, owes, ended)
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
        return killed

    async def _run(
        self,
        read: _Task,
        tasks: Iterable[_Task],
        owes: Callable[[int], bool],
        ended: Callable[[int], None],
    ) -> int:
        async with anyio.create_task_group() as readers:
            readers.start_soon(self._read_stderr)
            readers.start_soon(self._read_stdout, read)
            async with anyio.create_task_group() as group:
                for task in (self._stop_when_told, *tasks):
                    group.start_soon(task)
                self.status = status = await self.child.wait()
                patience = anyio.current_time() + self._stage.timeout.stop
                self._note_exit()
                await self._read_rest(partial(owes, status), patience)
                group.cancel_scope.cancel()
            # Whoever follows it need not wait for what it has left behind.
            ended(status)
            killed = await self._outlast(patience)
            readers.cancel_scope.cancel()
        return killed

    def _note_exit(self) -> None:
        self._note_unread()
        # One that is asked for nothing has perhaps written all of a round that is to
        # begin now.
        self.told = self.told or self._asked
        # Who shares its stdin would else wait for more.
        self.wire.close_write()
        self.exited.set()
        self._by_us = self._signalled or not self._patient
        if self._by_us:
            # We have ended it: that goes for its whole group.
            self.child.kill()

    async def _read_rest(self, owes: Callable[[], bool], patience: float) -> None:
        """Read what it has written, and what others write on its behalf."""
        if self._by_us:
            await self._drain()
            return
        with anyio.move_on_after(_DRAIN[0]):
            await self._both_ended()
            return
        # Somebody else has its pipes: what it wrote itself is in them.
        if owes():
            await self._wait(patience, self._mute.wait)

    async def _outlast(self, patience: float) -> int:
        """Wait for what it has left behind, then kill it; return how many that were."""
        if self._by_us:
            return 0
        await self._wait(patience, self._desertion)
        return self.child.kill() + await self._drain()

    async def _desertion(self) -> None:
        await self.child.deserted()
        await self._both_ended()

    async def _drain(self) -> int:
        """Wait for the end of the pipes; return how many were killed that had them."""
        killed = 0
        # If they don't end now, then somebody in a session of its own has them: a part
        # of this worker.
        for patience in _DRAIN:
            with anyio.move_on_after(patience):
                await self._both_ended()
                break
            killed += self.child.kill_heirs()
        return killed

    async def _both_ended(self) -> None:
        await self._silent.wait()
        await self._mute.wait()

    async def _wait(self, until: float, what: _Task) -> None:
        """Wait for something, but neither too long nor when there is no patience."""
        with anyio.CancelScope(deadline=until) as self._waiting:
            if self._patient:
                await what()

    async def _abandon(self) -> None:
        """Kill the process, whatever else goes wrong."""
        with suppress(Exception):
            self.child.signal(SIGKILL)
        with suppress(Exception), anyio.move_on_after(self._stage.timeout.stop):
            await self.child.wait()
        with suppress(Exception):
            self.child.kill()
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
        text = self._describe(f"{fate}{what}", tries)
        return self._with_story(WorkerLost(text, stage=self._stage.name))

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
        return self.beside(describe_status(self.status))

    def end(self) -> str:
        """Return how a worker has ended that was told to."""
        assert self.status is not None
        if not self._signalled:
            return describe_status(self.status)
        seconds = f"{self._stage.timeout.stop:g} s"
        return (
            f"did not exit within {seconds} of the end of its input and"
            f" {describe_status(self.status)}"
        )

    def blamed(self, error: EtlstageError, tries: int = 1) -> RemoteProtocolError:
        """Return ``error``, a breach of the protocol, with who committed it."""
        text = self._describe(self.beside(f"broke the protocol: {error}"), tries)
        return self._with_story(RemoteProtocolError(text))

    def beside(self, fate: str) -> str:
        """Return what happened, and who else came if the worker did not connect."""
        return "; ".join(filter(None, (fate, self.wire.mismatch_hint())))

    def refused(self, code: int, category: int, reason: str) -> WorkerRefusal:
        """Return the error of a message to which the worker said no."""
        name = self._stage.name
        # A bad column is bad in every row, for the same reason.
        no = (code, category, reason)
        if no not in self._noes:
            if len(self._noes) == _NOES:
                self._noes.clear()
            self._noes[no] = self._describe_no(*no)
        text, attempts = self._noes[no]
        error = WorkerRefusal(
            text, stage=name, code=code, reason=reason, category=category
        )
        error.attempts = attempts
        return error

    def _describe_no(
        self, code: int, category: int, reason: str
    ) -> tuple[str, tuple[Attempt]]:
        what = "request" if self._stage.kind is StageKind.EXTRACT else "message"
        number = f"code {code}" + f", category {category}" * bool(category)
        said = reason or "it gave no reason"
        if code:
            said = f"{reason} ({number})" if reason else number
        fate = f"refused the {what}: {harmless(' '.join(said.split()))}"
        who = f"stage {self._stage.name}: worker {self.name} (pid {self.child.pid})"
        # It has said why. There may be thousands a second: its stderr is in the log.
        return f"{who} {fate}", (Attempt(self.name, self.child.pid, fate),)

    @property
    def cause(self) -> str:
        """The error that ended it, where its stderr says so; else empty."""
        # So Python ends of what nobody has caught. With any other status, a traceback
        # is that of an exception which it has survived.
        if self.status != 1 or self._signalled:
            return ""
        return cause_of(self._stderr.tail)

    def attempt(self, fate: str) -> Attempt:
        """Return the record of this worker's failure at what it held."""
        self._stderr.drain()
        stderr = tuple(self._stderr.tail)
        error = "; ".join(filter(None, (self.cause, fate)))
        return Attempt(self.name, self.child.pid, error, self._story(), stderr)

    async def _read_stderr(self) -> None:
        await self._stderr.run()
        self._silent.set()

    async def _read_stdout(self, read: _Task) -> None:
        await read()
        self._mute.set()

    async def _stop_when_told(self) -> None:
        await self.quit.wait()
        if self.exited.is_set():
            return
        if self._patient and self._farewell():
            self._log_step("the farewell of its dialect")
            await self._wait(self._step(), self.exited.wait)
        if self._patient and not self.exited.is_set():
            # What it has not read is of interest, and gone with the pipe.
            self._note_unread()
            self.wire.close_write()
            if self._asked:
                self._log_step("the end of its input")
            # One that has not come by now would find nobody who told it anything.
            if not self._unmet():
                await self._wait(self._step(), self.exited.wait)
        for signal in (SIGTERM, SIGKILL):
            if self.exited.is_set():
                return
            self._signalled = True
            self._log_step(signal.name)
            self.child.signal(signal)
            # Behind the signal: which of the two it dies of is then no matter of
            # chance.
            self.wire.close_write()
            with anyio.move_on_after(self._stage.timeout.stop):
                await self.exited.wait()

    def _log_step(self, sent: str) -> None:
        # Where the host logs to may be gone; the worker is stopped all the same.
        with suppress(Exception):
            _log.debug(
                "worker is stopped",
                stage=self._stage.name,
                worker=self.name,
                pid=self.child.pid,
                sent=sent,
            )

    def _step(self) -> float:
        """Return when the step of stopping ends that begins now."""
        return anyio.current_time() + self._stage.timeout.stop

    def _note_unread(self) -> None:
        if not self._signalled:
            self.unread = max(self.unread, self.wire.unread())

    def _describe(self, fate: str, tries: int) -> str:
        self._stderr.drain()
        again = f", after {tries} tries" if tries > 1 else ""
        word = f"{self._word}; " if self._word else ""
        who = f"worker {self.name} (pid {self.child.pid})"
        return f"stage {self._stage.name}: {word}{who} {fate}{again}"

    @property
    def _word(self) -> str:
        """What it said last, if it failed by itself: that is why, more often than not."""
        tail = self._stderr.tail
        said = self.cause
        if not said and tail and (self.status or 0) > 0 and not self._signalled:
            # An exception that it has survived is not what it failed of.
            said = "" if cause_of(tail) else tail[-1].strip()
        # Not a part of a longer one: secrets are found as a whole. It is in the story.
        return said if len(said) <= _LONGEST else ""

    def _with_story(self, error: _Error) -> _Error:
        """Tell below an error what is known of the worker."""
        stderr = [f"stderr: {line}" for line in self._stderr.tail]
        error.word = self._word
        error.story = (
            *(stderr or ["no stderr output"]),
            *(f"event: {event}" for event in self._story()[-_SHOWN:]),
            f"command: {command_line(self._stage)}",
        )
        return error
