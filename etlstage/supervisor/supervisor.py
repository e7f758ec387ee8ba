"""
The supervisor of one stage, for embedding.

No global state, no signal handlers, no event loop policy: it is a context manager,
and what it started is gone when its block ends, however it ends.
"""

from __future__ import annotations

import math
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Iterable,
)
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from itertools import repeat
from types import TracebackType
from typing import Self

import anyio
import structlog
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from etlstage.errors import LocalProtocolError, WorkerLost
from etlstage.messages import Result, Run
from etlstage.supervisor.connection import Connection
from etlstage.supervisor.events import SupervisorEvent, WorkerFailed
from etlstage.supervisor.extraction import Extraction
from etlstage.supervisor.intake import Intake, Signal, in_runs
from etlstage.supervisor.stage import Stage
from etlstage.supervisor.submission import Answer, Submission, Work

__all__ = ("AsyncSupervisor",)

_log = structlog.get_logger("etlstage")
_to_result = partial(tuple.__new__, Result)


class AsyncSupervisor:
    """
    Runs the workers of a stage and passes messages through them.

    ::

        async with AsyncSupervisor(stage) as supervisor:
            results = await supervisor.submit([b"one", b"two"])

    Any number of tasks may submit at the same time.

    Args:
        stage: What to run.
        max_messages: Messages that one :meth:`stream` may hold: read from its input
            and not yet taken by its consumer.
        max_bytes: The same in bytes, replies included.

    Raises:
        WorkerStartFailed: On entering, if the program can't be run.

    """

    def __init__(
        self,
        stage: Stage,
        *,
        max_messages: int = 65536,
        max_bytes: int = 64 * 1024 * 1024,
    ) -> None:
        self.stage = stage
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._work = Work()
        self._connections: list[Connection] = []
        self._listeners: list[MemoryObjectSendStream[SupervisorEvent]] = []
        self._tasks: TaskGroup | None = None
        self._extraction: Extraction | None = None
        self._ended = False

    def __repr__(self) -> str:
        alive = sum(c.usable for c in self._connections)
        return f"<AsyncSupervisor {self.stage.name!r} workers={alive}>"

    async def __aenter__(self) -> Self:
        """Start the workers."""
        if self._tasks is not None:
            raise LocalProtocolError(f"{self!r} was entered already")
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        try:
            self._start()
        except BaseException:
            await self._finish()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the workers, also when the block failed or was cancelled."""
        await self._finish()

    async def aclose(self) -> None:
        """
        Stop the workers and wait until they are gone.

        What they still hold is answered with an error.
        """
        with anyio.CancelScope(shield=True):
            for connection in self._connections:
                connection.stop()
            for connection in self._connections:
                await connection.finished.wait()
            if self._extraction is not None:
                await self._extraction.aclose()

    async def submit(self, messages: Iterable[bytes]) -> list[Result]:
        """
        Pass messages through the workers and return their results in input order.

        Never raises for what a worker does: see :attr:`Result.error`.
        """
        results: list[Result] = []
        async with aclosing(self.answers([list(messages)])) as answers:
            async for answer in answers:
                results.extend(_results(answer))
        return results

    async def stream(
        self, messages: Iterable[bytes] | AsyncIterable[bytes]
    ) -> AsyncGenerator[Result, None]:
        """
        Pass messages through the workers and yield the results in input order.

        The input is read ahead within ``max_messages`` and ``max_bytes``. What it
        raises is raised here, behind the results of what came before.
        """
        async with aclosing(self.answers(in_runs(messages))) as answers:
            async for answer in answers:
                for result in _results(answer):
                    yield result

    async def answers(
        self, runs: Iterable[Run] | AsyncIterable[Run]
    ) -> AsyncGenerator[Answer, None]:
        """Do as :meth:`stream`, a run at a time: for who moves millions of messages."""
        async with self._submission() as (submission, changed):
            tasks = self._running()
            intake = Intake(
                submission,
                runs,
                has_room=self._has_room,
                fed=self._kick,
                closed=self._closed(),
            )
            tasks.start_soon(intake.run)
            try:
                while True:
                    stalled = submission.stalled
                    answers = submission.collect()
                    if stalled:
                        self._kick()
                    for answer in answers:
                        intake.room.set()
                        yield answer
                    if submission.finished:
                        break
                    await changed.wait()
                if intake.error is not None:
                    raise intake.error
            finally:
                intake.scope.cancel()
                # Who closes the stream may close its input next: leave it alone.
                with anyio.CancelScope(shield=True):
                    await intake.ended.wait()

    async def extract(
        self, *, start: object = None, end: object = None
    ) -> AsyncGenerator[bytes, None]:
        """
        Yield the messages of one round of extraction.

        In plain mode a round is one run of the program.
        In cyclic mode it is one request, which carries ``start`` and ``end`` when
        they are given: offsets at the supervisor's side.

        Raises:
            WorkerLost: If the worker died, did not answer in time, or, in plain
                mode, failed; what was yielded before stays valid.
            RemoteProtocolError: If the worker broke the protocol.

        """
        async with aclosing(self.extract_runs(start=start, end=end)) as runs:
            async for run in runs:
                for message in run:
                    yield message

    async def extract_runs(
        self, *, start: object = None, end: object = None, template: str | None = None
    ) -> AsyncGenerator[Run, None]:
        """
        Do as :meth:`extract`, a run at a time.

        Args:
            start: First offset of the round.
            end: End of the round, as the worker understands it.
            template: Text of the request, in which ``{start}`` and ``{end}`` are
                replaced; the default is a JSON object with these two keys.

        """
        self._running()
        if self._extraction is None:
            raise LocalProtocolError(
                f"stage {self.stage.name} is of kind {self.stage.kind.value}:"
                " it can't extract"
            )
        rounds = self._extraction.round(start, end, template)
        async with aclosing(rounds) as runs:
            async for run in runs:
                yield run

    def events(self) -> MemoryObjectReceiveStream[SupervisorEvent]:
        """
        Return a stream of what happens to the workers from now on.

        It ends with the supervisor. Close it when you stop reading.
        """
        send, receive = anyio.create_memory_object_stream[SupervisorEvent](math.inf)
        if self._ended:
            send.close()
        else:
            self._listeners.append(send)
        return receive

    # --- inside -------------------------------------------------------------

    def _start(self) -> None:
        if self.stage.mode.extracts:
            assert self._tasks is not None
            self._extraction = Extraction(self.stage, self._tasks, self._tell)
            return
        for number in range(1, self.stage.workers + 1):
            name = f"{self.stage.name}-{number}"
            connection = Connection(self.stage, name, self._work, self._tell)
            self._connections.append(connection)
            self._running().start_soon(self._serve, connection)

    async def _serve(self, connection: Connection) -> None:
        await connection.run()
        if not any(c.usable for c in self._connections):
            self._work.fail(connection.error or self._closed())

    async def _finish(self) -> None:
        assert self._tasks is not None
        try:
            await self.aclose()
        finally:
            # A stream that was left open would read its input for ever.
            self._tasks.cancel_scope.cancel()
            try:
                await self._tasks.__aexit__(None, None, None)
            finally:
                self._ended = True
                for listener in self._listeners:
                    listener.close()

    def _closed(self) -> WorkerLost:
        name = self.stage.name
        return WorkerLost(f"stage {name}: the supervisor is closed", stage=name)

    def _running(self) -> TaskGroup:
        if self._tasks is None or self._ended:
            raise LocalProtocolError(
                f"{self!r} is not running; use it as `async with AsyncSupervisor(...)`"
            )
        return self._tasks

    @asynccontextmanager
    async def _submission(self) -> AsyncIterator[tuple[Submission, Signal]]:
        if self.stage.mode.extracts:
            raise LocalProtocolError(
                f"stage {self.stage.name} extracts: it takes no messages"
            )
        self._running()
        changed = Signal()
        submission = Submission(changed.set, max_unread=self._max_bytes)
        self._work.open(submission)
        try:
            yield submission, changed
        finally:
            self._work.drop(submission)

    def _kick(self) -> None:
        """Let the workers take what is there, the least busy first."""
        now = anyio.current_time()
        moved = True
        while moved:
            idlest = sorted(self._connections, key=lambda c: c.owed)
            moved = False
            for connection in idlest:
                moved = connection.pump(now) or moved

    def _has_room(self, submission: Submission) -> bool:
        return (
            submission.held < self._max_messages
            and submission.held_bytes < self._max_bytes
        )

    def _tell(self, event: SupervisorEvent) -> None:
        # Where the host logs to may be gone; workers are stopped all the same.
        if isinstance(event, WorkerFailed):
            with suppress(OSError, ValueError):
                _log.warning(
                    "worker failed", stage=self.stage.name, error=str(event.error)
                )
        for listener in self._listeners:
            # Broken when the reader has closed its end.
            try:
                listener.send_nowait(event)
            except anyio.BrokenResourceError:
                listener.close()
                self._listeners = [x for x in self._listeners if x is not listener]


def _results(answer: Answer) -> list[Result]:
    rows = zip(answer.messages, answer.groups, repeat(answer.error), strict=False)
    return list(map(_to_result, rows))
