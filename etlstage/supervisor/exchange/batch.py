"""
What one worker is given in batches, and when a batch is closed.

By us, with the end of the batch, when it is ripe; or by a worker that asks for each
message, when it asks for no more or there is none.
"""

from __future__ import annotations

from collections.abc import Sequence

from etlstage.errors import InvalidMessage
from etlstage.messages import Groups
from etlstage.protocol.events import BatchEnded, Event, MessagesPassed
from etlstage.stage.policy import BatchPolicy
from etlstage.supervisor.exchange.dispatch import SLICE, Dispatcher
from etlstage.supervisor.exchange.exchange import Exchange, Outcome
from etlstage.supervisor.exchange.submission import Submission

__all__ = ("AskedDispatcher", "BatchDispatcher", "ripe_at", "take_ripe")


class _Batches(Dispatcher):
    """Pairs each reply with a whole batch."""

    _batches = True

    def _pair(self, groups: Groups, at: int, reply_size: int) -> Outcome:
        held = self._held.popleft()
        self._held_bytes -= held.size
        self._alone = False
        error = None
        if self._refused is not None:
            error = next((error for _, error in self._refused.among(at, at + 1)), None)
        group = groups[at : at + 1] if error is None else ()
        outcome = Outcome(
            held.start, held.messages, group, held.size, reply_size, error
        )
        self.block.hold(held, outcome)
        return outcome


class BatchDispatcher(_Batches):
    """Gives whole batches and closes each: supervisor-driven."""

    def next(self, now: float, owed: int, room: float) -> Sequence[Event] | None:
        """Return a batch that is ripe and its end, or None."""
        self.due = None
        return super().next(now, owed, room)

    def refused(self, error: InvalidMessage) -> None:
        """End the batch in front of the message that can't be sent."""
        exchange = self._take_back()
        before, rest = exchange.split(error.index)
        culprit, behind = rest.split(1)
        # They are a batch of their own, for which there may be no room now.
        behind.submission.give_back(behind)
        if before.left:
            self._again.append(before)
        self._alone = self._alone and bool(before.left)
        self._refuse(culprit, error)

    def _begin(self, exchange: Exchange) -> Sequence[Event]:
        full = len(exchange.messages) >= self._stage.batch.size
        return (*super()._begin(exchange), BatchEnded(full=full))

    def _give(self, _room: int, now: float) -> Sequence[Event] | None:
        batch, self.due = take_ripe(
            self._backlog.in_turn(self._number), self._stage.batch, now
        )
        if batch is None:
            return None
        self._fresh = False
        return self._begin(batch)


class AskedDispatcher(_Batches):
    """Gives one message each time the worker asks: worker-driven."""

    _closes_at = 0.0
    _rest: Exchange | None = None  # of the batch that is tried alone
    _adding = False  # what was sent last goes on with a batch
    _cut = False  # the batch ends, although the worker may have more

    def awaited(self, room: float) -> bool:
        """Return whether the worker waits for us: it asked for more, and may get it."""
        if room <= 0:
            return False
        full = len(self._held[0].messages) >= self._stage.batch.size
        return not (full and self._stage.dialect.asks_when_full)

    def next(self, now: float, owed: int, room: float) -> Sequence[Event] | None:
        """Return a message or the end of the batch, if the worker waits for one."""
        self.due = None
        if room <= 0:
            return None
        self._now = now
        if owed:
            return self._continue(now)
        if not self.block.room(now, step=self.step):
            return None
        if self._retried:
            self._alone = True
            return self._begin(self._retried.popleft())
        if self.retiring:
            return None
        self._closes_at = now + self._stage.batch.seconds
        if self._backlog.suspects:
            if (suspect := self._next_suspect(owed)) is not None:
                return self._begin(suspect)
            if self._awaits_suspect(owed):
                return None
        for submission in self._backlog.in_turn(self._number):
            self._fresh = False
            return self._begin(submission.take(1, SLICE))
        return None

    def refused(self, error: InvalidMessage) -> None:
        """End the batch in front of the message that can't be sent."""
        batch = self._take_back()
        if self._adding:
            before, culprit = batch.split(len(batch.messages) - 1)
            super()._begin(before)
            self._cut = True
        else:
            culprit = batch
            self._alone = False
            self._spare_rest()
        self._refuse(culprit, error)

    def _begin(self, exchange: Exchange) -> Sequence[Event]:
        """Send the first message; of others, each when the worker asks for it."""
        self._adding = self._cut = False
        first, self._rest = exchange.split(1)
        return super()._begin(first)

    def _continue(self, now: float) -> Sequence[Event] | None:
        policy = self._stage.batch
        batch = self._held[0]
        waiting = batch.submission
        if self._cut:
            pass
        elif len(batch.messages) >= policy.size:
            if self._stage.dialect.asks_when_full:
                return None  # that asks for nothing: the replies come next
        elif self._alone:
            if self._rest is not None and self._rest.left:
                more, self._rest = self._rest.split(1)
                return self._add(batch, more)
        elif waiting.waiting and not self.retiring:
            if waiting.can_follow(batch, policy.bytes):
                return self._add(batch, waiting.take(1, SLICE))
        elif not (waiting.closed or self.retiring or now >= self._closes_at):
            self.due = self._closes_at
            return None
        return (BatchEnded(),)

    def _add(self, batch: Exchange, more: Exchange) -> Sequence[Event]:
        self._adding = True
        batch.submission.extend(batch, more)
        self._held_bytes += more.size
        self.block.give(more.left, more.size, self._now)
        return (MessagesPassed(more.messages),)

    def _pair(self, groups: Groups, at: int, reply_size: int) -> Outcome:
        self._spare_rest()
        return super()._pair(groups, at, reply_size)

    def _spare_rest(self) -> None:
        """Give back what the worker did not ask for before it answered."""
        rest, self._rest = self._rest, None
        assert rest is not None, "a batch has a rest until it ends"
        rest.submission.give_back(rest)

    def _let_go(self) -> list[Exchange]:
        held = super()._let_go()
        rest, self._rest = self._rest, None
        if rest is not None and rest.left:
            # What it was to get next is a part of the batch that is tried alone.
            held[-1].submission.extend(held[-1], rest)
        return held


def take_ripe(
    submissions: Sequence[Submission], policy: BatchPolicy, now: float
) -> tuple[Exchange | None, float | None]:
    """Return a batch that is ripe, or else when the next one will be, if ever."""
    due: float | None = None
    for submission in submissions:
        ripe = ripe_at(submission, policy)
        if ripe <= now:
            return submission.take_batch(policy.size, policy.bytes), None
        due = ripe if due is None else min(ripe, due)
    return None, due


def ripe_at(submission: Submission, policy: BatchPolicy) -> float:
    """Return from when on the waiting messages make a batch, in seconds."""
    if (
        submission.bounded
        or submission.waiting >= policy.size
        or submission.waiting_bytes >= policy.bytes
    ):
        return 0.0
    return submission.oldest + policy.seconds
