"""
What the callers of one stage want done, from the moment that they ask.

Each of them has a submission of its own in the backlog of the workers, and takes its
results from there. How many messages may be pending is decided here, and when all is
done; what becomes of them is not.
"""

from __future__ import annotations

import json
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
)
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Final

import anyio
from anyio.abc import TaskGroup

from etlstage.errors import LocalProtocolError, Overloaded, WorkerLost
from etlstage.messages import Position, Result, Run, StageKind, counted, sound
from etlstage.protocol.base import Limits, Shape, Side
from etlstage.stage.policy import Order
from etlstage.stage.stage import Stage
from etlstage.supervisor.exchange.backlog import Backlog
from etlstage.supervisor.exchange.exchange import Outcome
from etlstage.supervisor.exchange.keyed import Lanes
from etlstage.supervisor.exchange.round import Repeat, Round
from etlstage.supervisor.exchange.submission import Collected, Submission
from etlstage.supervisor.observers import Observers
from etlstage.supervisor.session import WorkerSession
from etlstage.supervisor.stream import Intake, Signal, as_run
from etlstage.telemetry import StageMetrics
from etlstage.telemetry.trace import Span, span

__all__ = ("Callers", "results_of")

# Of each lane one exchange is open where they end in any order: enough lanes that a
# worker rarely has fewer than it may, and few enough to look at all of them.
_LANES: Final = 16  # a worker
_OUTPUTS_UNREAD: Final = 256 * 1024  # bytes, until no more are read
_to_result = partial(tuple.__new__, Result)


class Callers:
    """
    Opens what is submitted, and collects what became of it.

    Args:
        stage: Whose callers they are.
        kick: Called when there may be something for the workers.
        observers: Who hears of messages without a key.
        metrics: Where failed messages are counted, if anywhere.
        max_messages: See :class:`~etlstage.supervisor.supervisor.AsyncSupervisor`.
        max_bytes: Likewise.
        max_pending: Likewise.

    """

    def __init__(
        self,
        stage: Stage,
        kick: Callable[[], None],
        observers: Observers,
        metrics: StageMetrics | None,
        *,
        max_messages: int,
        max_bytes: int,
        max_pending: int | None,
    ) -> None:
        self.backlog: Backlog = Backlog()
        """Where the workers take from."""
        self.closing: bool = False
        """Nothing new is taken."""
        self._stage = stage
        self._kick = kick
        self._observers = observers
        self._metrics = metrics
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._max_pending = max_pending
        self._intakes: set[Intake] = set()
        self._drained = anyio.Event()  # nothing is under way any more

    async def submit(self, messages: Iterable[bytes]) -> list[Result]:
        """Return the results of messages, in their order."""
        run, error = sound(await as_run(messages))
        if error is not None:
            raise error
        self._admit(len(run))
        results: dict[int, list[Result]] = {}
        failed = 0
        with self._submission("submit") as (submission, changed, noted):
            submission.feed(run, anyio.current_time())
            submission.close()
            self._kick()
            while True:
                stalled = submission.stalled
                for outcome in self._collect(submission):
                    assert isinstance(outcome, Outcome), "no positions were submitted"
                    results[outcome.start] = results_of(outcome)
                    failed += outcome.failed
                if submission.finished:
                    break
                if stalled:
                    self._kick()
                await changed.wait()
            noted.note(messages=len(run), failed=failed)
        return [result for start in sorted(results) for result in results[start]]

    async def ask(self, message: bytes, seconds: float | None) -> tuple[bytes, ...]:
        """Return what was made of a message, and wait for it no longer than that."""
        if self._stage.dialect.shape.batches:
            raise LocalProtocolError(
                f"stage {self._stage.name} answers in batches: which outputs are those"
                " of one message is not known; use submit()"
            )
        with anyio.move_on_after(seconds):
            (result,) = await self.submit([message])
            if result.error is not None:
                # It may be that of others, too: without their tracebacks.
                raise result.error.with_traceback(None)
            return result.outputs
        raise TimeoutError(
            f"stage {self._stage.name}: no result of the message within {seconds} s"
        )

    async def answers(
        self,
        items: Iterable[Run | Position] | AsyncIterable[Run | Position],
        tasks: TaskGroup,
    ) -> AsyncGenerator[Collected, None]:
        """Yield outcomes and positions; a task among ``tasks`` reads the input."""
        with self._submission("stream") as (submission, changed, _):
            intake = Intake(
                submission,
                items,
                has_room=self._has_room,
                fed=self._kick,
                closed=self._closed(),
            )
            self._intakes.add(intake)
            tasks.start_soon(intake.run)
            try:
                while True:
                    stalled = submission.stalled
                    collected = self._collect(submission)
                    if stalled:
                        self._kick()
                    for item in collected:
                        intake.room.set()
                        yield item
                    if submission.finished:
                        break
                    await changed.wait()
                if intake.error is not None:
                    raise intake.error
            finally:
                self._intakes.remove(intake)
                intake.scope.cancel()
                # Who closes the stream may close its input next: leave it alone.
                with anyio.CancelScope(shield=True):
                    await intake.ended.wait()

    async def extract(
        self, start: object, end: object, template: str | None
    ) -> AsyncGenerator[Run, None]:
        """Yield the outputs of one round; see ``AsyncSupervisor.extract_runs()``."""
        changed = Signal()
        asked = Round(
            changed.set,
            _request(start, end, template),
            max_unread=_OUTPUTS_UNREAD,
            repeat=self._repeat(ranged=start is not None or end is not None),
            stage=self._stage.name,
        )
        self._open(asked)
        try:
            with span("extract", stage=self._stage.name):
                while True:
                    finished = asked.finished
                    for run in asked.outputs():
                        yield run
                    if finished:
                        break
                    self._kick()
                    await changed.wait()
                if asked.error is not None:
                    raise asked.error
        finally:
            self._drop(asked)
            self._kick()

    @asynccontextmanager
    async def session(self, event: str) -> AsyncIterator[WorkerSession]:
        """Give a session with a worker; see ``AsyncSupervisor.session()``."""
        stage = self._stage
        if stage.kind is StageKind.EXTRACT:
            raise LocalProtocolError(
                f"stage {stage.name} extracts: it takes no sessions; use extract()"
            )
        if stage.dialect.open(Side.SUPERVISOR, Limits()).in_order:
            raise LocalProtocolError(
                f"stage {stage.name} can't have sessions: a worker of dialect"
                f" {stage.dialect.name} answers one message after the other, and"
                " nothing tells which of them a part of a reply is for; use submit()"
            )
        self._admit(1)
        session = WorkerSession(stage, event, self._kick, self._drop)
        self._open(session.dialogue)
        try:
            with span("session", stage=stage.name):
                self._kick()
                yield session
        finally:
            session.close()

    async def drain(self, seconds: float) -> None:
        """Take nothing new, and wait until all is done, but not for longer."""
        self.closing = True
        for intake in self._intakes:
            intake.scope.cancel()
        with anyio.move_on_after(seconds):
            while self.backlog.occupied:
                await self._drained.wait()

    def fail(self) -> None:
        """End all that was submitted: there are no workers any more."""
        self.backlog.fail(self._closed())

    # --- inside -------------------------------------------------------------

    @contextmanager
    def _submission(
        self, what: str
    ) -> Iterator[tuple[Submission | Lanes, Signal, Span]]:
        if self._stage.kind is StageKind.EXTRACT:
            raise LocalProtocolError(
                f"stage {self._stage.name} extracts: it takes no messages"
            )
        changed = Signal()
        submission: Submission | Lanes
        order, reply = self._stage.order, self._stage.max_reply
        most = self._max_bytes
        if order is Order.KEY:
            count = max(1, self._stage.pool.max)
            if not self._stage.dialect.open(Side.SUPERVISOR, Limits()).in_order:
                count *= _LANES
            submission = Lanes(
                self._stage, count, changed.set, max_unread=most, max_reply=reply
            )
            lanes = submission.lanes
        else:
            submission = Submission(
                changed.set,
                max_unread=most,
                max_reply=reply,
                ordered=order is Order.TOTAL,
            )
            lanes = [submission]
        for lane in lanes:
            self._open(lane)
        try:
            with span(what, stage=self._stage.name) as noted:
                yield submission, changed, noted
        finally:
            stalled = submission.stalled
            for lane in lanes:
                self._drop(lane)
            if stalled:
                self._kick()  # what waited for its consumer waits for nobody now
            if isinstance(submission, Lanes) and submission.unkeyed:
                self._observers.warn_of_unkeyed(submission.unkeyed, self._stage.key)

    def _admit(self, count: int) -> None:
        pending, most = self.backlog.pending, self._max_pending
        if most is not None and pending + count > most:
            name = self._stage.name
            raise Overloaded(
                f"stage {name}: {counted(pending, 'message')} pending, {count:,} more"
                f" would be over max_pending ({most:,}); try again later, raise it, or"
                " have more workers",
                stage=name,
            )

    def _open(self, submission: Submission) -> None:
        self.backlog.open(submission)
        if self.closing:
            submission.fail(self._closed())

    def _drop(self, submission: Submission) -> None:
        self.backlog.drop(submission)
        if not self.backlog.occupied:
            self._drained.set()
            self._drained = anyio.Event()

    def _collect(self, submission: Submission | Lanes) -> list[Collected]:
        collected = submission.collect()
        if self._metrics is not None:
            for item in collected:
                if isinstance(item, Outcome) and item.failed:
                    self._metrics.failed(item.failed)
        return collected

    def _has_room(self, submission: Submission | Lanes) -> bool:
        return (
            submission.held < self._max_messages
            and submission.held_bytes < self._max_bytes
        )

    def _closed(self) -> WorkerLost:
        name = self._stage.name
        return WorkerLost(f"stage {name}: the supervisor is closed", stage=name)

    def _repeat(self, *, ranged: bool) -> Repeat:
        if self._stage.dialect.shape is Shape.STREAM:
            return Repeat.NEVER
        return Repeat.BEHIND if ranged else Repeat.ANEW


def results_of(outcome: Outcome) -> list[Result]:
    """Return what became of each message of an outcome."""
    rows = zip(outcome.messages, outcome.replies, outcome.errors, strict=True)
    return list(map(_to_result, rows))


def _request(start: object, end: object, template: str | None) -> bytes:
    if template is not None:
        text = template.replace("{start}", str(start)).replace("{end}", str(end))
        return text.encode()
    if start is None and end is None:
        return b""
    return json.dumps({"start": start, "end": end}).encode()
