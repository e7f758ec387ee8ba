"""
One worker of a T or L stage, its protocol, and the bytes between.

In the common case everything happens in the task that reads: a reply comes in, its
messages are delivered, the next ones are taken and written at once. A second task
writes only while the pipe is full, so that reading never waits for writing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import anyio
import anyio.lowlevel

from etlstage.errors import EtlstageError
from etlstage.protocol.events import MoreRequested, ProtocolFailed, RepliesCompleted
from etlstage.protocol.marker import Mode, State, escape
from etlstage.supervisor.alarm import Alarm
from etlstage.supervisor.events import (
    SupervisorEvent,
    WorkerExited,
    WorkerFailed,
    WorkerStarted,
)
from etlstage.supervisor.feeding import feeder
from etlstage.supervisor.stage import Stage
from etlstage.supervisor.submission import Work
from etlstage.supervisor.worker import Worker, session

__all__ = ("Connection",)

_CHUNK: Final = 65536  # bytes a read; once that many came:
_BIG_CHUNK: Final = 1024 * 1024
_TURN: Final = 16  # reads in a row before other tasks get a turn


class Connection:
    """
    Starts one worker, feeds it, and delivers what it answers.

    Args:
        stage: What to run.
        name: Of the worker, such as ``clean-1``.
        work: Where to take messages from.
        tell: Called with what the host may want to know.

    Raises:
        WorkerStartFailed: If the program can't be run.

    """

    def __init__(
        self,
        stage: Stage,
        name: str,
        work: Work,
        tell: Callable[[SupervisorEvent], None],
    ) -> None:
        self._stage = stage
        self._tell = tell
        self._worker = Worker(stage, name)
        self._process = self._worker.process
        self._protocol = session(stage)
        self._feeder = feeder(stage, self._protocol, work)
        self._unsent: deque[memoryview] = deque()
        self._pipe_full = anyio.Event()
        self._answer_due = Alarm(self._miss_answer)
        self._batch_due = Alarm(self._pump_all)
        self._unanswered_bytes = 0  # read since the last complete reply
        self._told_to_stop = False
        self._lost = 0  # messages that it held when it was given up
        self._closed = ""  # the pipe that the worker closed first
        self._drained = anyio.Event()
        self._batches = stage.mode.batches
        self._asked = stage.mode is Mode.BATCH_WORKER
        self.error: EtlstageError | None = None
        """Why the worker is of no more use, unless it was told to stop."""
        self.finished = anyio.Event()
        """The process is gone, and what it held is answered."""
        tell(WorkerStarted(name, self._process.pid))

    def __repr__(self) -> str:
        return f"<Connection {self._worker!r} owed={self.owed}>"

    @property
    def owed(self) -> int:
        """Exchanges that the worker has not answered."""
        return self._protocol.owed

    @property
    def usable(self) -> bool:
        """Whether the worker may be given messages."""
        return self.error is None and not self._worker.told

    def pump(self, now: float) -> bool:
        """Give the worker what it may have now; return whether there was anything."""
        if not self.usable or (self._unsent and not self._flush()):
            return False
        idle = not self._protocol.owed
        if not self._feeder.feed(now):
            if self._batches:
                self._batch_due.set(self._feeder.due)
            return False
        self._unsent.extend(map(memoryview, self._protocol.data_to_send()))
        self._flush()
        if idle or self._asked:
            self._expect_answer(now)
        return True

    def stop(self) -> None:
        """Let :meth:`run` stop the worker."""
        self._told_to_stop = True
        self._worker.stop()

    async def run(self) -> None:
        """Serve the worker until its process is gone; see :meth:`Worker.run`."""
        try:
            status = await self._worker.run(
                self._read,
                self._write_when_full,
                self._answer_due.run,
                self._batch_due.run,
                drained=self._drained,
            )
            held = self._feeder.held
            if self._told_to_stop:
                self._feeder.abandon(self._worker.lost("was stopped", held))
            elif self.error is None:
                self.error = self._worker.died(held, self._closed)
                self._feeder.abandon(self.error)
            lost = held + self._lost
            self._tell(WorkerExited(self._worker.name, self._process.pid, status, lost))
        finally:
            self._process.close()
            self.finished.set()

    # --- bytes --------------------------------------------------------------

    async def _read(self) -> None:
        process, chunk, turn = self._process, _CHUNK, 0
        while True:
            data = process.read_stdout(chunk)
            if data is None:
                turn = 0
                await process.stdout_readable()
                continue
            if not data:
                break
            chunk = _BIG_CHUNK if len(data) >= _CHUNK else _CHUNK
            if self.error is None:
                self._receive(data)
            turn += 1
            if turn == _TURN:
                turn = 0
                await anyio.lowlevel.checkpoint()
        self._drained.set()
        self._closed = self._closed or "stdout"
        # Normally the process exits now; if it doesn't, it is of no use.
        self._worker.stop()

    def _receive(self, data: bytes) -> None:
        now = anyio.current_time()
        self._unanswered_bytes += len(data)
        self._protocol.receive_data(data)
        for event in self._protocol.events_received():
            if isinstance(event, RepliesCompleted):
                self._feeder.answered(event.groups, self._unanswered_bytes, now)
                self._unanswered_bytes = 0
                self._expect_answer(now)
            elif isinstance(event, ProtocolFailed):
                self._give_up(self._worker.blamed(event.error))
            elif isinstance(event, MoreRequested):
                self._expect_answer(now)
        # More than once: of what was taken, all may have been refused.
        self._pump_all(now)

    def _flush(self) -> bool:
        """Write what the pipe takes; return whether that was all."""
        unsent = self._unsent
        try:
            while unsent:
                written = self._process.write(unsent[0])
                if written < len(unsent[0]):
                    unsent[0] = unsent[0][written:]
                    self._pipe_full.set()
                    return False
                unsent.popleft()
        except BrokenPipeError:
            # Its exit follows, or else it is told to; replies may still come.
            unsent.clear()
            self._closed = self._closed or "stdin"
            self._worker.stop()
        return True

    async def _write_when_full(self) -> None:
        while True:
            await self._pipe_full.wait()
            self._pipe_full = anyio.Event()
            await self._process.stdin_writable()
            if self._flush():
                self._pump_all(anyio.current_time())

    def _pump_all(self, now: float) -> None:
        while self.pump(now):
            pass

    # --- a worker that is of no more use --------------------------------------

    def _expect_answer(self, now: float) -> None:
        limit = self._stage.timeout.message
        if limit is not None:
            due = self._protocol.owed
            if self._asked and self._protocol.state is State.WANTED:
                due = 0  # it asked for more, and waits for us
            self._answer_due.set(now + limit if due else None)

    def _miss_answer(self, now: float) -> None:
        what = "batch" if self._stage.mode.batches else "message"
        if self._unanswered_bytes:
            wrote = (
                f"it wrote {self._unanswered_bytes} bytes without the marker eop"
                f" '{escape(self._stage.markers.eop)}' behind its reply"
            )
        else:
            wrote = "it wrote nothing; does it flush its output after each reply?"
        limit = self._stage.timeout.message
        self._give_up(
            self._worker.lost(f"did not answer a {what} within {limit} s: {wrote}")
        )

    def _give_up(self, error: EtlstageError) -> None:
        self.error = error
        self._lost = self._feeder.held
        others = self._worker.lost("was stopped after an earlier fault")
        self._feeder.abandon(error, others)
        self._tell(WorkerFailed(self._worker.name, self._process.pid, error))
        self._worker.stop(patient=False)
