"""
One process of a stage, from its start until nothing of it is left.

Ownership: the *worker* owns the process, its stderr and its status pipe. It decides how
the process is ended and which message is blamed for its end, and reports all that to
the pool as events. Its *link* owns the bytes and the session: this module does not know
what the process is fed and what it answers. Its *errors* only put into words what has
happened. The *pool* decides, by its lifecycle, when a worker is started and stopped;
its decisions arrive as calls of :meth:`WorkerProcess.stop` or
:meth:`WorkerProcess.fail`.

The end of a process has four steps, each with a time limit: a farewell in its dialect,
the end of its stdin, SIGTERM, SIGKILL. The time of a farewell begins when it is sent;
some dialects send it only once the worker has answered what it works on. After its exit
its output is read to the end, because everything that it wrote itself counts. Then its
end is reported, so that other workers can continue. Processes that it left behind have
``timeout.stop`` to end, and are then killed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import anyio

from etlstage.errors import (
    Attempt,
    EtlstageError,
    FailureCause,
    NotCommitted,
    StageError,
    WorkerLost,
)
from etlstage.messages import StageKind, counted
from etlstage.protocol.base import Shape
from etlstage.protocol.events import FarewellReason
from etlstage.supervisor.diagnostic import StatusReader
from etlstage.supervisor.exchange.retry import Loss
from etlstage.supervisor.failure import WorkerErrors
from etlstage.supervisor.lifecycle.events import (
    AliveSeen,
    RemainsEnded,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
)
from etlstage.supervisor.link import Link
from etlstage.supervisor.process import spawn
from etlstage.supervisor.stderr import LineLog, StderrLog
from etlstage.telemetry.log import Log
from etlstage.transport import Readable
from etlstage.transport.base import describe_status

if TYPE_CHECKING:
    from etlstage.supervisor.pool import WorkerPool

__all__ = ("WorkerProcess",)

_log = Log()

_Task: TypeAlias = Callable[[], Coroutine[Any, Any, object]]

_FROM_OUTSIDE: Final = frozenset({SIGHUP, SIGINT, SIGKILL, SIGTERM})
_DRAIN: Final = (0.1, 1.0)  # seconds for the pipes of a dead process to end
_CHUNK: Final = 4096  # bytes of its status per read
_TURN: Final = 16  # reads in a row


class WorkerProcess:
    """
    Starts one worker process, and serves it until it is gone.

    Args:
        pool: The pool of the stage.
        name: Name of the worker, such as ``clean-1``.
        number: Number of the worker, from 0.
        start: How often the worker was started, this time included.
        max_messages: Messages after which it is worn.

    Raises:
        WorkerStartFailed: If the program can't be run.

    """

    def __init__(
        self,
        pool: WorkerPool,
        name: str,
        *,
        number: int = 0,
        start: int = 1,
        max_messages: float = math.inf,
    ) -> None:
        self._pool = pool
        self._stage = stage = pool.stage
        self._streams = stage.dialect.shape is Shape.STREAM
        self._timeout = stage.timeout.stop
        self.name: str = name
        self.start: int = start
        self._wire, self._child = spawn(
            stage, name, pool.launch, start=start, stdin=not self._streams
        )
        self.pid: int = self._child.pid
        metrics = pool.metrics
        self._stderr = StderrLog(
            self._child.stderr,
            stage=stage.name,
            worker=name,
            pid=self.pid,
            counted=partial(metrics.stderr_lines, name) if metrics else None,
        )
        self.noise: LineLog = LineLog(
            "unexpected output ignored",
            "unexpected output",
            stage=stage.name,
            worker=name,
            pid=self.pid,
            counted=partial(metrics.noise, name) if metrics else None,
        )
        self.errors: WorkerErrors = WorkerErrors(
            stage, name, self.pid, self._stderr, pool.state.history(name)
        )
        self.link: Link = Link(
            pool, self, self._wire, number=number, max_messages=max_messages
        )
        self.error: EtlstageError | None = None
        """Why the worker is of no more use, unless it was stopped."""
        self.usable: bool = False
        """It may be given messages."""
        self.failed: bool = False
        """It was at fault, or is gone: further output is not a reply."""
        self.ended: bool = False
        """Its end was reported; processes that it left behind may still run."""
        self._status = StatusReader()
        self._announced = not stage.program.ready
        # How it is ended:
        self._stop_requested = False  # by the pool
        self._ending = False  # it is to end, or is gone: it is given nothing more
        self._quit = anyio.Event()
        self._patient = True  # it may finish by itself
        self._parting = False  # it was sent a farewell
        self._waiting = anyio.CancelScope()  # cancelled when it is to end quickly
        self._gone = anyio.Event()  # the process is; its descendants may still run
        self._by_us = False  # we ended it
        self._stderr_ended = anyio.Event()
        self._stdout_ended = anyio.Event()
        # What its end is judged by:
        self._reason = ""  # why it is of no more use, as a part of a sentence
        self._breach: EtlstageError | None = None  # how it broke the protocol
        self._closed = ""  # the pipe that it closed first
        self._input_closed = False  # we have closed its stdin
        self._unread = 0  # bytes that it left in its stdin, when it ended by itself
        self._ignored = False  # it had read nothing of what it did not answer
        self._all_read = False
        self._late = 0  # bytes that had come too late by the time its end was reported
        self._doubted = False  # a doubt whether its answers are loaded was reported

    def __repr__(self) -> str:
        owed = self.link.owed
        return f"<WorkerProcess {self.name!r} {self._child!r} owed={owed}>"

    @property
    def exited(self) -> bool:
        """Whether its process is gone."""
        return self._gone.is_set()

    # --- decisions of the pool -----------------------------------------------

    def open(self) -> None:
        """Give the worker messages from now on."""
        self.usable = self.error is None and not self._ending
        self.link.pump_all(anyio.current_time())

    def stop(self, *, patient: bool = True) -> None:
        """
        Let :meth:`run` stop the worker, but not processes that it has left behind.

        ``patient``: the worker may finish by itself once its stdin is closed; and if it
        does, so may the processes that it leaves behind.
        """
        self._stop_requested = True
        if self.exited:
            return
        # A worker in the middle of a round has nothing that it could finish.
        busy = self._stage.kind is StageKind.EXTRACT and self.link.busy
        self._end_process(patient=patient and not busy)
        self.link.give_whole()

    def lose_share(self) -> None:
        """Send that its share is lost, if the worker was asked to end before that."""
        if self._parting and not (self.exited or self.failed):
            self.link.start_farewell(FarewellReason.LOST)

    def kill_remains(self) -> None:
        """Let :meth:`run` kill the processes that the worker left behind, now."""
        self._end_process(patient=False)

    def fail(
        self, reason: str, cause: FailureCause, breach: EtlstageError | None = None
    ) -> None:
        """Declare the worker at fault; ``reason`` is a part of a sentence about it."""
        if self.error is not None:
            return
        if cause == "start" and self._stage.dialect.announces:
            received = self.link.received
            reason += f": {self._stage.dialect.silence(received, ready=False)}"
        self._ignored = cause == "silent" and self.link.unread(self._wire.unread())
        self._reason, self._breach = self._with_hint(reason), breach
        self.error, self.failed, self.usable = self._describe(0), True, False
        self.link.give_whole()
        self._pool.handle(WorkerFailed(self.name, self.pid, self.error, cause))

    def read_available(self) -> bool:
        """Read what has come; return whether the worker may be judged by that alone."""
        if self._child.status is not None:
            self._take_status(self._child.status)
        return self.link.read_available()

    # --- findings of the link --------------------------------------------------

    def pipe_closed(self, pipe: str) -> None:
        """Record that the worker closed a pipe; it is stopped if it does not exit."""
        if pipe == "stdin" and self._input_closed:
            return  # by us, before all was written
        if not self._ending or pipe == "stdin":
            self._closed = self._closed or pipe
        # It exits now, or is stopped; replies may still come.
        self._end_process()

    # --- the process ----------------------------------------------------------

    async def run(self) -> None:
        """
        Serve the worker until it and the processes that it leaves behind have ended.

        Cancelling has no effect: call :meth:`stop`, after which the time is bounded.
        """
        try:
            with anyio.CancelScope(shield=True):
                killed = await self._run()
        finally:
            try:
                self._wire.close()
            finally:
                self._child.close()
        late = self.link.late - self._late
        if killed or late:
            doubt, doubtful = None, 0
            if killed and self._unproven and not self._doubted:
                left = counted(killed, "process", "processes")
                after = f"killed after timeout.stop ({self._timeout:g} s)"
                doubtful, doubt = (
                    self._unproven,
                    self._doubt(f"left {left} behind, {after}"),
                )
            self._pool.handle(
                RemainsEnded(self.name, self.pid, killed, late, doubtful, doubt)
            )

    async def _run(self) -> int:
        """Serve the worker; return how many processes it left behind were killed."""
        try:
            killed = await self._serve()
            self._stderr.drain()
            self._wire.stop_waiting()
            if self._child.status is not None:
                self._child.status.stop_waiting()
        except BaseException:
            # An internal error, as the worker's own are not raised. The process must
            # not be left running, nor tasks left waiting for its end.
            await self._abandon()
            raise
        finally:
            self._gone.set()
        return killed

    async def _serve(self) -> int:
        link, status_pipe = self.link, self._child.status
        async with anyio.create_task_group() as readers:
            readers.start_soon(self._read_stderr)
            readers.start_soon(self._read_stdout)
            async with anyio.create_task_group() as group:
                group.start_soon(self._stop_in_steps)
                group.start_soon(link.write)
                group.start_soon(link.watch)
                group.start_soon(link.prove)
                if status_pipe is not None:
                    group.start_soon(self._read_status, status_pipe)
                status = await self._child.wait()
                until = anyio.current_time() + self._timeout
                self._note_exit(status)
                await self._read_rest(status, until)
                await self.link.stored()  # bounded by timeout.commit
                group.cancel_scope.cancel()
            # Its successor need not wait for processes that it left behind.
            self._end(status)
            killed = await self._outlast(until)
            readers.cancel_scope.cancel()
        return killed

    async def _read_stderr(self) -> None:
        await self._stderr.run()
        self._stderr_ended.set()

    async def _read_stdout(self) -> None:
        await self.link.read()
        self._all_read = True
        # Normally the process exits now; if it doesn't, it is stopped.
        self.pipe_closed("stdout")
        self._stdout_ended.set()

    async def _read_status(self, status: Readable) -> None:
        while self._take_status(status):
            await status.readable()

    def _take_status(self, status: Readable) -> bool:
        """Read reports of the worker; return whether there may be more."""
        for _ in range(_TURN):
            data = status.read(_CHUNK)
            if not data:
                return data is None
            update = self._status.receive(data)
            if update.counts:
                self._pool.count(self.name, update.counts)
            if update.progress is not None:
                self.link.progressed(anyio.current_time())
            if self._announced:
                self._pool.handle(AliveSeen(self.name))
            else:
                self._announced = True
                self._pool.handle(WorkerReady(self.name, self.pid))
        return True

    # --- ending the process ---------------------------------------------------

    def _end_process(self, *, patient: bool = True) -> None:
        self._patient = self._patient and patient
        self._ending, self.usable = True, False
        self._quit.set()
        if not patient:
            self._waiting.cancel()

    async def _stop_in_steps(self) -> None:
        await self._quit.wait()
        if self.exited:
            return
        why = self._pool.farewell_reason
        if self._patient and self.link.start_farewell(why):
            self._parting = True
            # What the worker still has to answer has a deadline of its own.
            if not self._closed:
                await self._wait(math.inf, self.link.parting)
            if self._patient and not self.exited:
                self._log_step("the farewell of its dialect")
                limit = self._stage.timeout.farewell
                limit = self._timeout if limit is None else limit
                await self._wait(limit, self._gone.wait)
        if self._patient and not self.exited:
            # What it has not read can't be found out once the pipe is closed.
            self._note_unread()
            self._close_input()
            if not self._streams:
                self._log_step("the end of its input")
            # A worker that has not connected by now could not be sent a farewell.
            if not self.link.awaits_identity:
                await self._wait(self._timeout, self._gone.wait)
        for signal in (SIGTERM, SIGKILL):
            if self.exited:
                return
            self.errors.signalled = True
            self._log_step(signal.name)
            self._child.signal(signal)
            # After the signal, so that it is not left to chance which of the two the
            # process dies of.
            self._close_input()
            with anyio.move_on_after(self._timeout):
                await self._gone.wait()

    def _close_input(self) -> None:
        self._input_closed = True
        self._wire.close_write()

    def _log_step(self, sent: str) -> None:
        # The host's log may be unwritable; the worker is stopped all the same.
        with suppress(Exception):
            _log.debug(
                "stopping worker",
                stage=self._stage.name,
                worker=self.name,
                pid=self.pid,
                sent=sent,
            )

    async def _wait(self, seconds: float, what: _Task) -> None:
        """Wait, but only ``seconds``, and not once the worker is to end quickly."""
        with anyio.move_on_after(seconds) as self._waiting:
            if self._patient:
                await what()

    # --- after its exit -------------------------------------------------------

    def _note_unread(self) -> None:
        if not self.errors.signalled:
            self._unread = max(self._unread, self._wire.unread())

    def _note_exit(self, status: int) -> None:
        self.errors.status = status
        self._note_unread()
        self.link.exited()
        # In shape STREAM it may have written all of a round that is still to begin.
        if not self._streams:
            self._ending, self.usable = True, False
        # Processes that share its stdin would otherwise wait for more.
        self._close_input()
        self._gone.set()
        self._by_us = self.errors.signalled or not self._patient
        if self._by_us:
            # We ended it, and so we end its whole group.
            self._child.kill()

    async def _read_rest(self, status: int, until: float) -> None:
        """Read what it has written, and what other processes write for it."""
        if self._by_us:
            await self._drain()
            return
        with anyio.move_on_after(_DRAIN[0]):
            await self._both_ended()
            return
        # Another process holds its pipes; they contain what the worker itself wrote.
        if self._owes(status):
            await self._wait(until - anyio.current_time(), self._stdout_ended.wait)

    def _owes(self, status: int) -> bool:
        """Read what is there; return whether other processes may still reply."""
        self.link.catch_up()
        # Replies are not awaited if the worker failed, or had read nothing it held.
        if status or self.error is not None or not self.link.busy:
            return False
        return self._streams or not self.link.unread(self._unread)

    async def _outlast(self, until: float) -> int:
        """Wait for processes that it left behind, then kill them; return how many."""
        if self._by_us:
            return 0

        async def desertion() -> None:
            await self._child.deserted()
            await self._both_ended()

        await self._wait(until - anyio.current_time(), desertion)
        return self._child.kill() + await self._drain()

    async def _drain(self) -> int:
        """Wait for the pipes to end; kill processes that hold them; return how many."""
        killed = 0
        # If the pipes don't end now, a process in a session of its own holds them; it
        # is a part of this worker.
        for seconds in _DRAIN:
            with anyio.move_on_after(seconds):
                await self._both_ended()
                break
            killed += self._child.kill_heirs()
        return killed

    async def _both_ended(self) -> None:
        await self._stderr_ended.wait()
        await self._stdout_ended.wait()

    async def _abandon(self) -> None:
        """Kill the process, whatever else goes wrong."""
        try:
            with suppress(Exception):
                self._child.signal(SIGKILL)
            with suppress(Exception), anyio.move_on_after(self._timeout):
                await self._child.wait()
        finally:
            with suppress(Exception):
                self._child.kill()
        status = self._child.returncode
        self.errors.status = -SIGKILL if status is None else status

    # --- the meaning of its end -----------------------------------------------

    def _end(self, status: int) -> None:
        """Report its end, with what it held and what is blamed for it."""
        if self._child.status is not None:
            self._take_status(self._child.status)
        self.link.catch_up()
        self.noise.finish()
        by_itself = self._failed_by_itself(status)
        clean = not status or (self._stop_requested and not by_itself)
        held_open = ""
        if self._streams:
            clean = not (status or self._stop_requested)
            if clean and not self._all_read:
                clean = False
                held_open = (
                    ", but a process that it had started held its stdout open for"
                    f" {self._timeout:g} s"
                )
        self.link.conclude(clean=clean)
        if self._closed and self.error is None and self.errors.signalled:
            fate = f"closed its {self._closed}, but did not exit, and was stopped"
        else:
            fate = describe_status(status)
        if self.error is None:
            fate = self._with_hint(fate)
        fate += held_open
        if self.error is None:
            self._reason = "was stopped" if self._stop_requested else fate
        stopped = self._stop_requested and self.error is None
        untouched = self._untouched
        doubtful, doubt = self.link.doubtful, None
        mistrust: StageError | None = None
        # No message is to blame if it had read none that it did not answer.
        idle = self.error is None and (untouched or not self.link.owed)
        unexplained = self._ignored or (by_itself and idle)
        if unexplained and self.link.unproven > doubtful:
            doubtful = self.link.unproven
            how = "did not read a message in time" if self._ignored else fate
            mistrust = self.errors.doubtful(how, doubtful)
        unproven, failed = self._unproven, self._stage.dialect.failed
        if stopped and failed(status, stopped=True, held=0, unproven=unproven):
            stopped, doubtful, fate = False, unproven, self.errors.end()
            doubt = self._doubt(f"{fate} while it was stopping")
        elif stopped and self._cut_short(status):
            stopped, fate = False, self.errors.end()
            doubt = self.errors.lost(fate)
        loss = self._lose(untouched=untouched)
        unknown = 0 if untouched else loss.held
        if status and not (stopped or doubt):
            unknown += unproven
        if self.error is None and not stopped:
            self.error = doubt or self._describe(loss.held)
        self.ended, self.failed, self.usable = True, True, False
        self._late = self.link.late
        # What it held was passed on above, before its end is published.
        self._pool.handle(
            WorkerExited(
                self.name,
                self.pid,
                status,
                lost=loss.held,
                answered=self.link.answered,
                retried=loss.retried,
                failed=loss.failed,
                tries=loss.tries,
                progress=loss.progress,
                untouched=untouched,
                unknown=unknown,
                all_answered=self._stage.dialect.shape is Shape.COMMITTED
                and not self.link.owed,
                stopped=stopped,
                late=self.link.late,
                doubtful=doubtful,
                doubt=doubt or mistrust,
                fate=fate,
                cause=self.errors.cause,
            )
        )

    @property
    def _untouched(self) -> bool:
        """Whether it had read nothing of what it held: that can't have killed it."""
        if self._streams:
            return False
        ahead, mispaired = self.link.ahead, self.link.mispaired
        if self._ignored or (ahead and mispaired and not mispaired.exchanges):
            return True
        return self.error is None and (ahead or self.link.unread(self._unread))

    def _failed_by_itself(self, status: int) -> bool:
        """Return whether it failed and was not just stopped."""
        if self._by_us:
            # It had failed before we ended it, if it could not answer any more.
            return self._closed == "stdout"
        if self._stop_requested and status > 0:
            return False  # at the end of its input it may exit with any status
        return status != 0 and -status not in _FROM_OUTSIDE

    @property
    def _unproven(self) -> int:
        """Number of answered messages that only a clean end proves to be loaded."""
        # A worker that was stopped by force had no time to end cleanly.
        if self._stage.kind is not StageKind.LOAD or self._pool.state.forced:
            return 0
        if self._stage.dialect.shape is Shape.COMMITTED:
            return 0  # only what it has committed counts
        return self.link.answered

    def _cut_short(self, status: int) -> bool:
        """Return whether it failed before it had committed the end of its share."""
        pool, commits = self._pool, self._pool.commits
        asked = pool.farewell_reason is FarewellReason.ENDED and not pool.state.forced
        if commits.assignment is None or commits.ended or not asked:
            return False
        held = self.link.dispatch.held
        return self._stage.dialect.failed(status, stopped=False, held=held)

    def _doubt(self, what: str) -> WorkerLost:
        """Return the error for answers that may not be loaded: the worker failed."""
        self._doubted = True
        messages = counted(self._unproven, "message")
        error = self.errors.lost(
            f"{what}; {messages} that it had answered may not have been loaded"
        )
        error.attempts = (self.errors.attempt(what),)
        return error

    def _lose(self, *, untouched: bool) -> Loss:
        link, dispatch = self.link, self.link.dispatch
        if self._pool.state.stopping:
            error = self._not_committed() or self._describe(dispatch.held)
            return Loss(held=dispatch.fail_all(error, link.owed), retried=0)
        return dispatch.lose(
            self.errors.attempt(self._reason),
            self._last_error,
            owed=link.owed,
            untouched=untouched,
            mispaired=link.mispaired and link.mispaired.exchanges,
        )

    def _not_committed(self) -> NotCommitted | None:
        """Return the error for messages that it answered but did not commit, if any."""
        commits = self._stage.dialect.shape is Shape.COMMITTED
        if not commits or self.link.owed:
            return None
        held = counted(self.link.dispatch.held, "message")
        fate = self._reason
        if self.error is None:
            fate = self.errors.end() if self.errors.status else "exited"
        return NotCommitted(
            f"stage {self._stage.name}: worker {self.name} {fate} and had not committed"
            f" {held} that it had answered; the next run delivers them again",
            stage=self._stage.name,
        )

    def _describe(self, held: int, tries: int = 1) -> EtlstageError:
        """Return the error for what the worker held, or the one it failed with."""
        if self._breach is not None:
            fate = self._with_hint(f"broke the protocol: {self._breach}")
            return self.errors.breach(fate, tries)
        held = held if self.error is None else 0
        return self.errors.lost(self._reason, held, tries)

    def _last_error(self, attempts: tuple[Attempt, ...]) -> EtlstageError:
        """Return the error for a message that this worker was the last to try."""
        error = self._describe(0 if self._streams else 1, len(attempts))
        error.attempts = attempts
        return error

    def _with_hint(self, fate: str) -> str:
        """Return ``fate`` with a hint if the worker did not connect as expected."""
        hint = self._wire.mismatch_hint()
        return f"{fate} ({hint})" if hint else fate
