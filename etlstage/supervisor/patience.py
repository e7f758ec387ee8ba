"""
How long a worker may take for what it was given.

An answer is due from the moment that its turn has come, or, where exchanges have names,
that it was opened. What is missed then is the fault of the worker, or of one exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import anyio

from etlstage.messages import StageKind, counted
from etlstage.protocol.base import Session, Shape
from etlstage.stage.stage import Stage
from etlstage.supervisor.deadline import Deadline
from etlstage.supervisor.exchange.backlog import Backlog
from etlstage.supervisor.exchange.dispatch import Dispatcher
from etlstage.supervisor.exchange.named import NamedDispatcher
from etlstage.supervisor.host import Host

__all__ = ("Patience",)

_SILENCE: Final = 30.0  # seconds without an answer until that is told


class Patience:
    """
    Waits for the answers of one worker, until it has waited too long.

    Args:
        host: The worker.
        stage: Of the worker.
        session: With it.
        dispatch: What it has.
        backlog: Of the stage.
        cancel: Cancels an exchange by its name, for a reason.

    """

    def __init__(
        self,
        host: Host,
        stage: Stage,
        session: Session,
        dispatch: Dispatcher,
        backlog: Backlog,
        cancel: Callable[[int, str], None],
    ) -> None:
        self._host = host
        self._stage = stage
        self._session = session
        self._dispatch = dispatch
        self._named = dispatch if isinstance(dispatch, NamedDispatcher) else None
        self._asked = stage.dialect.shape is Shape.ASKED_BATCH
        self._backlog = backlog
        self._cancel = cancel
        self._asked_at: float | None = None  # since when an answer is due
        self._paused_at = 0.0
        self.answer_due: Deadline = Deadline(self._miss_answer)
        self.silence_due: Deadline = Deadline(self._tell_silence)
        self.received: int = 0
        """Bytes that have come since the last complete reply."""
        self.idle_since: float | None = anyio.current_time()
        """Since when it has had nothing to do; None while it has."""

    def expect(self, now: float) -> None:
        """Take note of what is due now, and give the worker all its time for that."""
        session = self._session
        if session.owed:
            self.idle_since = None
            if not self._asked or not self._dispatch.awaited(session.room):
                self._expect_from(
                    now if self._named is None else self._named.oldest, now
                )
                return
        elif self._dispatch.block.holds:
            self.idle_since = None
        elif self.idle_since is None:
            self.idle_since = now
        self._expect_nothing()

    def suspend(self, paused: bool) -> None:
        """Expect nothing while reading is paused, and all again when it goes on."""
        now = anyio.current_time()
        if paused:
            self._paused_at = now
            self._expect_nothing()
        else:
            if self._named is not None:
                self._named.postpone(now - self._paused_at, now)
            self.expect(now)

    def _expect_from(self, since: float | None, now: float) -> None:
        if since is None:
            self._expect_nothing()
            return
        self._asked_at = since
        self.silence_due.set(now + _SILENCE)
        limit = self._limit
        if limit is not None:
            self.answer_due.set(since + limit)

    def _expect_nothing(self) -> None:
        if self._asked_at is not None:
            self._asked_at = None
            self.silence_due.set(None)
            self.answer_due.set(None)

    def progressed(self, now: float) -> None:
        """Give the worker more time: it says that it gets on with what it has."""
        if self._named is None:
            self.expect(now)

    def silence(self, now: float) -> tuple[float, int] | None:
        """Return for how long an answer is due, and the bytes of it that have come."""
        if self._asked_at is None:
            return None
        return now - self._asked_at, self.received

    def hurry(self, now: float) -> None:
        """Wait no longer than to stop it, once it is told of, if none has answered."""
        if self._asked_at is None or not self._backlog.hopeless:
            return
        limit, stop = self._stage.timeout.message, self._stage.timeout.stop
        soon = max(self._asked_at + _SILENCE, now + stop)
        self.answer_due.set(
            soon if limit is None else min(self._asked_at + limit, soon)
        )

    @property
    def _limit(self) -> float | None:
        """Seconds that an answer may take."""
        limit = self._stage.timeout.message
        if self._backlog.hopeless:
            return _SILENCE if limit is None else min(limit, _SILENCE)
        return limit

    def _tell_silence(self, now: float) -> None:
        if (silence := self.silence(now)) is not None:
            hint = self._stage.dialect.silence(self.received)
            self._host.silent(silence[0], hint)

    def _miss_answer(self, now: float) -> None:
        limit = self._limit
        assert limit is not None, "there is no deadline without a limit"
        what = "batch" if self._stage.dialect.shape.batches else "message"
        if self._stage.kind is StageKind.EXTRACT:
            what = "request"
        wrote = self._stage.dialect.silence(self.received)
        if self._named is None:
            # One of the replies that came may have been another's: a worker that
            # leaves out an EOP waits for us, and we for it.
            self._backlog.go_in_step(self._dispatch.block.messages)
            if self._dispatch.block.holds:
                missing = counted(self._session.owed, "reply", "replies")
                wrote = f"{missing} missing in its block; {wrote}"
            reason = f"did not answer a {what} within {limit} s: {wrote}"
            hopeless = self._backlog.hopeless
            self._host.fail(reason, "silent")
            if hopeless:
                self._host.despair(reason)
            return
        for id_ in self._named.expired(now, limit):
            reason = f"did not answer a {what} within {limit} s, and it was cancelled"
            self._named.lose_one(id_, *self._host.cancelled(reason))
            self._cancel(id_, reason)
        self.expect(now)
