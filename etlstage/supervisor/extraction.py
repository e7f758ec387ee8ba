"""
The worker of an extract stage: plain or cyclic.

Messages are read only as fast as they are consumed, so a slow load stage stops the
extraction through the pipe. There is nothing to pair, and so nothing to pump.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from etlstage.errors import EtlstageError, RemoteProtocolError, WorkerLost
from etlstage.messages import Run
from etlstage.protocol.base import Shape
from etlstage.protocol.events import (
    MessagesPassed,
    OutputPassed,
    ProtocolFailed,
    RepliesCompleted,
    StreamEnded,
)
from etlstage.protocol.marker import MarkerProtocol
from etlstage.stage.stage import Stage
from etlstage.supervisor.child import ChildProcess
from etlstage.supervisor.lifecycle.events import (
    SupervisorEvent,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
    WorkerRestarting,
    WorkerStarted,
)
from etlstage.supervisor.lifecycle.restart import Tally
from etlstage.supervisor.lifecycle.worker import History
from etlstage.supervisor.session import session
from etlstage.transport import Launch, launch_over_pipes
from etlstage.transport.base import describe_status

__all__ = ("Extraction",)

_CHUNK = 1024 * 1024  # bytes a read


class Extraction:
    """
    Runs rounds of extraction, one at a time.

    Raises:
        WorkerStartFailed: If the program of a cyclic stage can't be run.

    """

    def __init__(
        self,
        stage: Stage,
        tasks: TaskGroup,
        tell: Callable[[SupervisorEvent], None],
        launch: Launch = launch_over_pipes,
    ) -> None:
        self._stage = stage
        self._tasks = tasks
        self._tell = tell
        self._starter = launch
        self._name = f"{stage.name}-1"
        self._unready = False
        self._closed = anyio.Event()
        self._useful = False  # a round has ended well since the last failure
        self._starts = 0
        self._tally = Tally(stage.restart)
        self._story = History()
        # Not a lock: another task may close the round that one task began.
        self._turn = anyio.Semaphore(1)
        self._worker: ChildProcess | None = None
        self._protocol: MarkerProtocol | None = None
        if stage.dialect.shape is Shape.MESSAGE:
            self._launch(stdin=True)

    async def round(
        self, start: object, end: object, template: str | None
    ) -> AsyncGenerator[Run, None]:
        """
        Yield the messages of one round.

        A round that fails before its first message is tried again, by a fresh worker;
        later on, that would double what was passed on already.
        """
        await self._turn.acquire()
        finished = passed = False
        tries = 0
        try:
            while not finished:
                try:
                    async with aclosing(self._attempt(start, end, template)) as runs:
                        async for run in runs:
                            passed = True
                            yield run
                    finished = self._useful = True
                except (RemoteProtocolError, WorkerLost):
                    tries += 1
                    delay = None if passed else self._delay(tries)
                    if delay is None:
                        raise
                    await self._end(patient=False)
                    self._tell(WorkerRestarting(self._name, delay))
                    with anyio.move_on_after(delay):
                        await self._closed.wait()
        finally:
            self._turn.release()
            if not finished or self._stage.dialect.shape is Shape.STREAM:
                # In the middle of a reply: what it writes next would be taken for
                # the reply to the next request.
                await self._end(patient=False)

    def _delay(self, tries: int) -> float | None:
        """Return how long to wait before another try, or None if there is none."""
        stage = self._stage
        if self._closed.is_set() or tries > stage.on_error.retries:
            return None
        worker = self._worker
        status = worker.status if worker is not None else None
        if not stage.restart.wanted(failed=True, status=status or 0):
            return None
        now = anyio.current_time()
        self._story.note(now, "failed at a round")
        jitter = random.random()  # noqa: S311 - no secret
        useful, self._useful = self._useful, False
        return self._tally.next_delay(now, useful=useful, jitter=jitter)

    def _attempt(
        self, start: object, end: object, template: str | None
    ) -> AsyncGenerator[Run, None]:
        if self._stage.dialect.shape is Shape.STREAM:
            return self._plain_round()
        return self._cyclic_round(_request(start, end, template))

    async def aclose(self) -> None:
        """Stop the worker, if there is one; at once in the middle of a round."""
        self._closed.set()
        await self._end(patient=self._turn.value > 0)

    async def _plain_round(self) -> AsyncGenerator[Run, None]:
        worker, protocol = self._launch(stdin=False)
        await self._ready(worker)
        while data := await self._read(worker):
            protocol.receive_data(data)
            for run in self._output(worker, protocol):
                yield run
        await self._exit(worker)
        if worker.status:
            raise worker.lost(worker.fate())
        protocol.receive_eof()
        # The last line of a file often has no line end. From a worker that failed it
        # could be half a message; from one that ended well it is a message.
        for event in protocol.events_received():
            if isinstance(event, StreamEnded) and event.tail:
                yield [event.tail]

    async def _cyclic_round(self, request: bytes) -> AsyncGenerator[Run, None]:
        worker, protocol = self._current()
        while (stray := worker.wire.read(_CHUNK)) is not None:
            if not stray:
                # It answered all it was asked, and went.
                await self._end(patient=True)
                worker, protocol = self._launch(stdin=True)
                continue
            protocol.receive_data(stray)
            list(self._output(worker, protocol))
        await self._ready(worker)
        protocol.send(MessagesPassed([request]))
        await self._write(worker, protocol)
        while protocol.owed:
            data = await self._read(worker, self._stage.timeout.message)
            if not data:
                await self._exit(worker)
                raise worker.lost(worker.fate(), held=1)
            protocol.receive_data(data)
            for run in self._output(worker, protocol):
                yield run

    def _current(self) -> tuple[ChildProcess, MarkerProtocol]:
        if self._worker is None or self._protocol is None:
            return self._launch(stdin=True)
        return self._worker, self._protocol

    def _launch(self, *, stdin: bool) -> tuple[ChildProcess, MarkerProtocol]:
        if self._closed.is_set():
            name = self._stage.name
            text = f"stage {name}: the supervisor is closed"
            raise WorkerLost(text, stage=name)
        self._starts += 1
        worker = ChildProcess(
            self._stage,
            self._name,
            self._starter,
            start=self._starts,
            stdin=stdin,
            story=lambda: self._story.tell(anyio.current_time()),
        )
        pid = worker.child.pid
        text = f"started (pid {pid}, start {self._starts})"
        self._story.note(anyio.current_time(), text)
        self._worker, self._protocol = worker, session(self._stage)
        self._unready = self._stage.ready
        self._tell(WorkerStarted(worker.name, pid, self._starts))
        self._tasks.start_soon(worker.run)
        return self._worker, self._protocol

    async def _ready(self, worker: ChildProcess) -> None:
        """Wait until a worker that says when it is ready has said so."""
        limit, status = self._stage.timeout.start, worker.child.status
        with anyio.move_on_after(limit) as scope:
            while self._unready and status is not None:
                data = status.read(_CHUNK)
                if data is None:
                    await status.readable()
                elif not data:
                    return  # it will not say; its stdout tells what becomes of it
                else:
                    self._unready = False
                    self._tell(WorkerReady(worker.name, worker.child.pid))
        if scope.cancelled_caught:
            error = worker.lost(f"was not ready within {limit} s")
            self._tell(WorkerFailed(worker.name, worker.child.pid, error, "start"))
            raise error

    async def _exit(self, worker: ChildProcess) -> None:
        with anyio.move_on_after(self._stage.timeout.stop):
            await worker.exited.wait()
        if worker.quit.is_set():
            raise worker.lost("was stopped")
        if worker.status is None:
            raise worker.lost("closed its stdout, but did not exit")

    def _output(self, worker: ChildProcess, protocol: MarkerProtocol) -> Iterator[Run]:
        for event in protocol.events_received():
            if isinstance(event, OutputPassed):
                yield event.messages
            elif isinstance(event, RepliesCompleted):
                # Empty, unless EOP is EOM: then the reply is its only message.
                yield from (list(group) for group in event.groups if group)
            elif isinstance(event, ProtocolFailed):
                raise self._fault(worker, event.error)

    def _fault(self, worker: ChildProcess, error: EtlstageError) -> RemoteProtocolError:
        blamed = worker.blamed(error)
        self._tell(WorkerFailed(worker.name, worker.child.pid, blamed, "protocol"))
        return blamed

    async def _read(self, worker: ChildProcess, patience: float | None = None) -> bytes:
        # A worker can write faster than its messages are consumed.
        await anyio.lowlevel.checkpoint()
        while (data := worker.wire.read(_CHUNK)) is None:
            if worker.finished.is_set():
                return b""  # whoever holds the pipe open is not the worker
            try:
                with anyio.fail_after(patience):
                    await worker.wire.readable()
            except TimeoutError:
                error = worker.lost(
                    f"wrote nothing for {patience} s, and no EOP; does it flush its"
                    " output?",
                    held=1,
                )
                self._tell(WorkerFailed(worker.name, worker.child.pid, error))
                raise error from None
        return data

    async def _write(self, worker: ChildProcess, protocol: MarkerProtocol) -> None:
        unsent = memoryview(b"".join(protocol.data_to_send()))
        try:
            while unsent:
                unsent = unsent[worker.wire.write(unsent) :]
                if unsent:
                    await worker.wire.writable()
        except BrokenPipeError:
            return  # reading finds out why

    async def _end(self, *, patient: bool) -> None:
        worker, self._worker = self._worker, None
        if worker is None:
            return
        with anyio.CancelScope(shield=True):
            worker.stop(patient=patient)
            await worker.finished.wait()
        worker.close()
        status = worker.status
        assert status is not None
        fate = describe_status(status)
        self._story.note(anyio.current_time(), fate)
        self._tell(WorkerExited(worker.name, worker.child.pid, status, 0, fate=fate))


def _request(start: object, end: object, template: str | None) -> bytes:
    if template is not None:
        text = template.replace("{start}", str(start)).replace("{end}", str(end))
        return text.encode()
    if start is None and end is None:
        return b""
    return json.dumps({"start": start, "end": end}).encode()
