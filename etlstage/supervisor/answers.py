"""
What a worker has said, and what follows.

The connection has each event matched here: an exchange that has ended is told to the
dispatcher, what concerns the process to its host; and what has been delivered is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, assert_never

from etlstage.errors import EtlstageError, PayloadTooBig
from etlstage.messages import counted
from etlstage.protocol.base import Session
from etlstage.protocol.events import (
    Added,
    Alive,
    BatchEnded,
    Cancelled,
    CommitAnswered,
    CommitAsked,
    Ended,
    Event,
    Failed,
    Farewell,
    MessagesPassed,
    Mispaired,
    MoreRequested,
    Noise,
    Opened,
    OutputPassed,
    Ready,
    Refusal,
    RepliesCompleted,
    StreamEnded,
)
from etlstage.stage.stage import Stage
from etlstage.supervisor.exchange.dispatch import Dispatcher
from etlstage.supervisor.exchange.exchange import Refused
from etlstage.supervisor.exchange.named import NamedDispatcher
from etlstage.supervisor.lifecycle.events import AliveSeen, WorkerWorn
from etlstage.supervisor.patience import Patience
from etlstage.telemetry import StageMetrics

if TYPE_CHECKING:
    from etlstage.supervisor.worker import WorkerProcess

__all__ = ("Answers",)


class Answers:
    """
    Acts upon what one worker says.

    Args:
        host: The worker.
        stage: Of the worker.
        session: With the worker.
        dispatch: Is told what has ended.
        patience: Is told what is due then.
        metrics: What is counted, if anything is.
        committed: Called with a position and how its commit ended, to be said.
        doubt: Called when replies do not add up, with the reason.
        max_messages: Messages after which the worker is worn.

    """

    def __init__(
        self,
        host: WorkerProcess,
        stage: Stage,
        session: Session,
        dispatch: Dispatcher,
        patience: Patience,
        metrics: StageMetrics | None,
        *,
        committed: Callable[[object, str | None], None],
        doubt: Callable[[str], None],
        max_messages: float,
    ) -> None:
        self._host = host
        self._stage = stage
        self._session = session
        self._dispatch = dispatch
        self._named = dispatch if isinstance(dispatch, NamedDispatcher) else None
        self._patience = patience
        self._metrics = metrics
        self._committed = committed
        self._doubt = doubt
        self._verified = stage.dialect.counts
        self._max_messages = max_messages
        self.messages: int = 0
        """How many the worker has answered."""
        self.tail: bytes | None = None
        """What it wrote last, once it can write no more."""

    @property
    def left(self) -> float:
        """How many messages it may be given before it is worn."""
        # Behind so many it is proven, and the worker replaced.
        return self._max_messages - self._dispatch.block.total

    def take(self, event: Event, now: float) -> None:
        """Act upon an event."""
        match event:
            case RepliesCompleted():
                self.take_replies(event, now)
            case OutputPassed(messages):
                self._dispatch.passed(messages)
                self._patience.expect(now)
            case MoreRequested():
                self._patience.expect(now)
            case Ended() if self._named is not None:
                refused = self._refused(event.refusals)
                self._named.ended(event, self._patience.received, now, refused)
                self._take_end(now)
            case Added(id_, messages) if self._named is not None:
                try:
                    self._named.passed_by(id_, messages)
                except PayloadTooBig as blame:
                    self._host.fail(f"broke the protocol: {blame}", "protocol", blame)
            case CommitAsked(position):
                self._patience.storing(now)
                self._host.commit(position, partial(self._committed, position))
            case Ready():
                self._host.announce()
            case Alive():
                self._host.handle(AliveSeen(self._host.name))
            case Farewell(reason=reason, final=True):
                self._host.fail(f"said that none could work: {reason}", "abnormal")
            case Farewell():
                # It goes by itself; whether that is a fault its exit will tell.
                self._dispatch.retiring = True
            case StreamEnded(tail):
                self.tail = tail
            case Mispaired(what):
                self._doubt(what)
            case Failed() if self._verified and not self._session.owed:
                found = getattr(event.error, "found", b"")
                self._doubt(self._stage.dialect.unasked(found))
            case Failed(error=blame):
                self._host.fail(f"broke the protocol: {blame}", "protocol", blame)
            case Noise():
                pass
            case (
                Ended()
                | Added()
                | MessagesPassed()
                | BatchEnded()
                | Opened()
                | Cancelled()
                | CommitAnswered()
            ):
                raise AssertionError(f"unreachable: a worker's {type(event).__name__}")
            case _:
                assert_never(event)

    def take_replies(self, replies: RepliesCompleted, now: float) -> None:
        """Take replies to the oldest exchanges."""
        groups, overhead, refusals = replies
        size = self._patience.received + overhead
        if refusals:
            said = [Refusal(place, 0, 0, reason) for place, reason in refusals]
            self._dispatch.answered(groups, size, now, self._refused(said))
        else:
            self._dispatch.answered(groups, size, now)
        self._take_end(now)

    def _refused(self, refusals: Sequence[Refusal]) -> Refused | None:
        """Return what the worker refused, if anything, and count it."""
        if not refusals:
            return None
        if self._metrics is not None:
            self._metrics.refused(self._host.name, len(refusals))
        return Refused([r.place for r in refusals], refusals, self._error)

    def _error(self, refusal: Refusal) -> EtlstageError:
        return self._host.refused(refusal.code, refusal.category, refusal.reason)

    def _take_end(self, now: float) -> None:
        """Take note that exchanges have ended."""
        self._patience.received = 0
        if self._metrics is not None:
            self._metrics.took(self._host.name, self._dispatch.block.took)
        block = self._dispatch.block
        if self._verified and not block.overfull:
            if self._session.owed:
                self._patience.expect(now)
        else:
            self.release(now, proven=not self._verified)

    def release(self, now: float, *, proven: bool) -> None:
        """Deliver what is held back, known to be right or not, and count it."""
        answered = self._dispatch.release(proven=proven)
        self.messages += answered.messages
        if self._metrics is not None and answered.exchanges:
            self._metrics.answered(self._host.name, *answered)
        self._patience.expect(now)
        # A batch that was refused, and is tried one by one, was answered all the same.
        total = 0 if self._session.owed else self._dispatch.block.total
        if max(self.messages, total) >= self._max_messages:
            self._max_messages = math.inf
            reason = f"answered {counted(max(self.messages, total), 'message')}"
            self._host.handle(WorkerWorn(self._host.name, reason))
