"""
How long a worker may take for what it was given.

An answer is due from the moment that its turn has come, or, where exchanges have names,
that it was opened. What is missed then is the fault of the worker, or of one exchange.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import anyio

from etlstage.messages import StageKind, counted
from etlstage.protocol.base import Session, Shape
from etlstage.stage.stage import Stage
from etlstage.supervisor.deadline import Deadline
from etlstage.supervisor.exchange.backlog import Backlog
from etlstage.supervisor.exchange.dispatch import Dispatcher
from etlstage.supervisor.exchange.named import NamedDispatcher

if TYPE_CHECKING:
    from etlstage.supervisor.worker import WorkerProcess

__all__ = ("Patience",)

_SILENCE: Final = 30.0  # seconds without an answer until that is told
_TIMES: Final = 10  # as long as the deadline, until a report of progress is told of


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
        host: WorkerProcess,
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
        self._turn_at = 0.0  # the same, whatever progress was reported meanwhile
        self._heard_at = 0.0  # when it was last seen to get on
        # Since when that was not so, or only by its own word, when it was reported.
        self._silent_since: float | None = None
        self._progressing_since: float | None = None
        self._armed = False
        self._paused_at = 0.0
        self._storing = 0  # positions that are being stored for the worker
        self._storing_since = 0.0
        self.due: Deadline = Deadline(self._look)
        self.received: int = 0
        """Bytes that have come since the last complete reply."""
        self.idle_since: float | None = anyio.current_time()
        """Since when it has had nothing to do; None while it has."""

    def expect(self, now: float, *, anew: bool = True) -> None:
        """
        Take note of what is due now, and give the worker all its time for that.

        Args:
            now: The time, in seconds.
            anew: Whether anything has been answered or given; else it only goes on.

        """
        if anew or self._asked_at is None:
            self._turn_at = now
        session = self._session
        if session.owed:
            self.idle_since = None
            if not (self._asked and self._dispatch.awaited(session.room)) and (
                not self._storing
            ):
                named = self._named
                self._asked_at = now if named is None else named.oldest
                self._heard_at = now
                # What is due later than before is seen when it rings too early: with
                # each reply something is due anew.
                if not self._armed:
                    self._arm()
                return
        elif self._dispatch.block.messages:
            self.idle_since = None
        elif self.idle_since is None:
            self.idle_since = now
        self._asked_at = None

    def suspend(self, paused: bool) -> None:
        """Expect nothing while reading is paused, and all again when it goes on."""
        now = anyio.current_time()
        if paused:
            self._paused_at = now
            self._asked_at = None
        else:
            if self._named is not None:
                self._named.postpone(now - self._paused_at, now)
            self.expect(now)

    def storing(self, now: float) -> None:
        """Expect nothing while a position is stored: the worker waits for us."""
        if not self._storing:
            self._storing_since = now
        self._storing += 1
        self.expect(now)

    def stored(self, now: float) -> None:
        """Expect again what was expected before a position was stored."""
        self._storing -= 1
        if not self._storing:
            if self._named is not None:
                self._named.postpone(now - self._storing_since, now)
            self.expect(now)

    def progressed(self, now: float) -> None:
        """Give the worker more time: it says that it gets on with what it has."""
        if self._named is not None:
            return
        self.expect(now, anew=False)
        limit, took = self._stage.timeout.message, now - self._turn_at
        if self._asked_at is None or limit is None:
            return
        if took >= _TIMES * limit and self._progressing_since != self._turn_at:
            self._progressing_since = self._turn_at
            self._host.silent(
                took,
                f"it reports progress, which has begun timeout.message ({limit:g} s)"
                " anew again and again; timeout.total is a limit for that",
                progressing=True,
            )

    def silence(self, now: float) -> tuple[float, int] | None:
        """Return for how long an answer is due, and the bytes of it that have come."""
        asked_at = self._asked_at  # once: another thread may ask
        return None if asked_at is None else (now - asked_at, self.received)

    def hurry(self, now: float) -> None:
        """Wait no longer than to stop it, once it is told of, if none has answered."""
        if self._asked_at is None or not self._backlog.hopeless:
            return
        limit, stop = self._stage.timeout.message, self._stage.timeout.stop
        soon = max(self._asked_at + _SILENCE, now + stop)
        self.due.set(soon if limit is None else min(self._asked_at + limit, soon))

    @property
    def _limit(self) -> float | None:
        """Seconds that an answer may take."""
        limit = self._stage.timeout.message
        if self._named is not None and (total := self._stage.timeout.total) is not None:
            limit = total if limit is None else min(limit, total)
        if self._backlog.hopeless:
            return _SILENCE if limit is None else min(limit, _SILENCE)
        return limit

    @property
    def _total(self) -> float | None:
        """Seconds that it may take with all progress, where that gives more time."""
        return self._stage.timeout.total if self._named is None else None

    @property
    def _answer_at(self) -> float:
        """When an answer is missed, in seconds."""
        assert self._asked_at is not None, "an answer is due"
        limit, total = self._limit, self._total
        at = math.inf if limit is None else self._asked_at + limit
        return at if total is None else min(at, self._turn_at + total)

    def _arm(self) -> None:
        """Ring when the next thing is due, if nothing moves that."""
        self._armed = self._asked_at is not None
        if not self._armed:
            return
        reported = self._silent_since == self._heard_at
        silence = math.inf if reported else self._heard_at + _SILENCE
        self.due.set(min(silence, self._answer_at))

    def _look(self, now: float) -> None:
        self._armed = False
        if (since := self._asked_at) is None:
            return
        missed = self._answer_at <= now
        if missed:
            self._miss_answer(now)
        if self._silent_since != self._heard_at and self._heard_at + _SILENCE <= now:
            self._silent_since = self._heard_at
            self._host.silent(now - since, self._stage.dialect.silence(self.received))
        if not (missed or self._armed):
            self._arm()

    def _miss_answer(self, now: float) -> None:
        limit, total = self._limit, self._total
        if total is not None and now >= self._turn_at + total:
            within = f"{total:g} s (timeout.total), whatever progress it reported"
        else:
            assert limit is not None, "there is no deadline without a limit"
            within = f"{limit} s"
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
            reason = f"did not answer a {what} within {within}: {wrote}"
            hopeless = self._backlog.hopeless
            self._host.fail(reason, "silent")
            if hopeless:
                self._host.despair(reason)
            return
        assert limit is not None, "where exchanges have names it is the only one"
        for id_ in self._named.expired(now, limit):
            reason = f"did not answer a {what} within {limit} s, and it was cancelled"
            self._named.lose_one(id_, *self._host.cancelled(reason))
            self._cancel(id_, reason)
        self.expect(now)
