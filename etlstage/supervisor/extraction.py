"""
The worker of an extract stage: plain or cyclic.

Messages are read only as fast as they are consumed, so a slow load stage stops the
extraction through the pipe. There is nothing to pair, and so nothing to pump.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from etlstage.errors import RemoteProtocolError
from etlstage.messages import Run
from etlstage.protocol.events import (
    MessagesPassed,
    OutputPassed,
    ProtocolFailed,
    RepliesCompleted,
    StreamEnded,
)
from etlstage.protocol.marker import MarkerProtocol, Mode
from etlstage.supervisor.events import (
    SupervisorEvent,
    WorkerExited,
    WorkerFailed,
    WorkerStarted,
)
from etlstage.supervisor.stage import Stage
from etlstage.supervisor.worker import Worker, session

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
    ) -> None:
        self._stage = stage
        self._tasks = tasks
        self._tell = tell
        self._rounds = 0
        # Not a lock: another task may close the round that one task began.
        self._turn = anyio.Semaphore(1)
        self._worker: Worker | None = None
        self._protocol: MarkerProtocol | None = None
        if stage.mode is Mode.CYCLIC:
            self._launch(stdin=True)

    async def round(
        self, start: object, end: object, template: str | None
    ) -> AsyncGenerator[Run, None]:
        """Yield the messages of one round."""
        await self._turn.acquire()
        finished = False
        try:
            rounds = (
                self._plain_round()
                if self._stage.mode is Mode.PLAIN
                else self._cyclic_round(_request(start, end, template))
            )
            async with aclosing(rounds):
                async for run in rounds:
                    yield run
            finished = True
        finally:
            self._turn.release()
            if not finished or self._stage.mode is Mode.PLAIN:
                # In the middle of a reply: what it writes next would be taken for
                # the reply to the next request.
                await self._end(patient=False)

    async def aclose(self) -> None:
        """Stop the worker, if there is one; at once in the middle of a round."""
        await self._end(patient=self._turn.value > 0)

    async def _plain_round(self) -> AsyncGenerator[Run, None]:
        worker, protocol = self._launch(stdin=False)
        while data := await self._read(worker):
            protocol.receive_data(data)
            for run in self._output(worker, protocol):
                yield run
        await self._exit(worker)
        if worker.status:
            raise worker.died()
        protocol.receive_eof()
        # The last line of a file often has no line end. From a worker that failed it
        # could be half a message; from one that ended well it is a message.
        for event in protocol.events_received():
            if isinstance(event, StreamEnded) and event.tail:
                yield [event.tail]

    async def _cyclic_round(self, request: bytes) -> AsyncGenerator[Run, None]:
        worker, protocol = self._current()
        while (stray := worker.process.read_stdout(_CHUNK)) is not None:
            if not stray:
                # It answered all it was asked, and went.
                await self._end(patient=True)
                worker, protocol = self._launch(stdin=True)
                continue
            protocol.receive_data(stray)
            list(self._output(worker, protocol))
        protocol.send(MessagesPassed([request]))
        await self._write(worker, protocol)
        while protocol.owed:
            data = await self._read(worker, self._stage.timeout.message)
            if not data:
                await self._exit(worker)
                raise worker.died(held=1)
            protocol.receive_data(data)
            for run in self._output(worker, protocol):
                yield run

    def _current(self) -> tuple[Worker, MarkerProtocol]:
        if self._worker is None or self._protocol is None:
            return self._launch(stdin=True)
        return self._worker, self._protocol

    def _launch(self, *, stdin: bool) -> tuple[Worker, MarkerProtocol]:
        self._rounds += 1
        worker = Worker(self._stage, f"{self._stage.name}-{self._rounds}", stdin=stdin)
        self._worker, self._protocol = worker, session(self._stage)
        self._tell(WorkerStarted(worker.name, worker.process.pid))
        self._tasks.start_soon(worker.run)
        return self._worker, self._protocol

    async def _exit(self, worker: Worker) -> None:
        with anyio.move_on_after(self._stage.timeout.stop):
            await worker.exited.wait()
        if worker.quit.is_set():
            raise worker.lost("was stopped")
        if worker.status is None:
            raise worker.lost("closed its stdout, but did not exit")

    def _output(self, worker: Worker, protocol: MarkerProtocol) -> Iterator[Run]:
        for event in protocol.events_received():
            if isinstance(event, OutputPassed):
                yield event.messages
            elif isinstance(event, RepliesCompleted):
                # Empty, unless EOP is EOM: then the reply is its only message.
                yield from (list(group) for group in event.groups if group)
            elif isinstance(event, ProtocolFailed):
                raise self._fault(worker, event.error)

    def _fault(self, worker: Worker, error: Exception) -> RemoteProtocolError:
        blamed = worker.blamed(RemoteProtocolError(str(error)))
        self._tell(WorkerFailed(worker.name, worker.process.pid, blamed))
        return blamed

    async def _read(self, worker: Worker, patience: float | None = None) -> bytes:
        # A worker can write faster than its messages are consumed.
        await anyio.lowlevel.checkpoint()
        while (data := worker.process.read_stdout(_CHUNK)) is None:
            if worker.finished.is_set():
                return b""  # whoever holds the pipe open is not the worker
            try:
                with anyio.fail_after(patience):
                    await worker.process.stdout_readable()
            except TimeoutError:
                error = worker.lost(
                    f"wrote nothing for {patience} s, and no EOP; does it flush its"
                    " output?",
                    held=1,
                )
                self._tell(WorkerFailed(worker.name, worker.process.pid, error))
                raise error from None
        return data

    async def _write(self, worker: Worker, protocol: MarkerProtocol) -> None:
        unsent = memoryview(b"".join(protocol.data_to_send()))
        try:
            while unsent:
                unsent = unsent[worker.process.write(unsent) :]
                if unsent:
                    await worker.process.stdin_writable()
        except BrokenPipeError:
            return  # reading finds out why

    async def _end(self, *, patient: bool) -> None:
        worker, self._worker = self._worker, None
        if worker is None:
            return
        with anyio.CancelScope(shield=True):
            worker.stop(patient=patient)
            await worker.finished.wait()
        worker.process.close()
        status = worker.status
        assert status is not None
        self._tell(WorkerExited(worker.name, worker.process.pid, status, 0))


def _request(start: object, end: object, template: str | None) -> bytes:
    if template is not None:
        text = template.replace("{start}", str(start)).replace("{end}", str(end))
        return text.encode()
    if start is None and end is None:
        return b""
    return json.dumps({"start": start, "end": end}).encode()
