"""
What one worker is given in batches, and when a batch is closed.

By us, with EOB, when it is ripe; or by a worker that asks for each message, when it
asks for no more or there is none.
"""

from __future__ import annotations

from etlstage.errors import MessageRefused
from etlstage.messages import Groups, concatenated
from etlstage.protocol.events import BatchEnded, MessagesPassed
from etlstage.protocol.marker import State
from etlstage.stage.policy import BatchPolicy
from etlstage.supervisor.exchange.dispatch import SLICE, Feeder, Held
from etlstage.supervisor.exchange.submission import Answer, Submission, Taken, split

__all__ = ("AskedFeeder", "ClosingFeeder", "ripe_at")


class _BatchFeeder(Feeder):
    """Pairs each reply with a whole batch."""

    _batches = True

    def _deliver(self, groups: Groups, at: int, reply_size: int) -> Answer:
        submission, start, messages, size = self._held.popleft().taken
        self._held_bytes -= size
        self._alone = None
        answer = Answer(start, messages, groups[at : at + 1], size, reply_size)
        submission.deliver(answer)
        return answer


class ClosingFeeder(_BatchFeeder):
    """Gives whole batches and closes each with EOB: supervisor-driven."""

    def _give(self, room: int, now: float) -> bool:
        policy = self._stage.batch
        for submission in self._work.waiting(self._number):
            ripe = ripe_at(submission, policy)
            if ripe <= now:
                self._fresh = False
                self._send(submission.take_batch(policy.size, policy.bytes))
                return True
            self.due = ripe if self.due is None else min(ripe, self.due)
        return False

    def _send(self, taken: Taken) -> None:
        """Send a batch, but only up to a message that contains a marker: it fails."""
        try:
            self._protocol.send(MessagesPassed(taken.messages))
        except MessageRefused as refused:
            before, taken = split(taken, refused.index)
            culprit, behind = split(taken, 1)
            # They are a batch of their own, for which there may be no room now.
            behind.submission.give_back(behind)
            super()._send(before)
            self._refuse(culprit, refused)
        else:
            self._sent(taken)

    def _sent(self, taken: Taken) -> None:
        super()._sent(taken)
        self._protocol.send(BatchEnded())


class AskedFeeder(_BatchFeeder):
    """Gives one message each time the worker asks: worker-driven."""

    _closes_at = 0.0
    _rest: Taken | None = None  # of the batch that is tried alone

    @property
    def awaited(self) -> bool:
        """Whether the worker waits for us: it asked for more, and may get it."""
        if self._protocol.state is not State.WANTED:
            return super().awaited
        full = len(self._held[0].taken.messages) >= self._stage.batch.size
        return not (full and self._stage.dialect.asks_when_full)

    def feed(self, now: float) -> bool:
        """Queue a message or EOB, if the worker waits for one."""
        self.due = None
        if self._protocol.state is State.IDLE:
            if self.retiring:
                return False
            self._closes_at = now + self._stage.batch.seconds
            return (bool(self._work.suspects) and self._try_suspect()) or self._give(
                1, now
            )
        if self._protocol.state is State.WANTED:
            return self._continue(now)
        return False

    def _give(self, room: int, now: float) -> bool:
        return super()._give(1, now)

    def _send(self, taken: Taken) -> None:
        """Send the first message; of others, each when the worker asks for it."""
        first, self._rest = split(taken, 1)
        super()._send(first)

    def _continue(self, now: float) -> bool:
        policy = self._stage.batch
        held = self._held[0]
        batch = held.taken
        if len(batch.messages) >= policy.size:
            if self._stage.dialect.asks_when_full:
                return False  # that BNC asks for nothing: the replies come next
        elif self._alone is not None:
            if self._rest is not None and self._rest.messages:
                more, self._rest = split(self._rest, 1)
                return self._add(held, more)
        elif batch.submission.waiting and not self.retiring:
            if batch.submission.can_follow(batch, policy.bytes):
                return self._add(held, batch.submission.take(1, SLICE))
        elif not (batch.submission.closed or self.retiring or now >= self._closes_at):
            self.due = self._closes_at
            return False
        self._protocol.send(BatchEnded())
        return True

    def _add(self, held: Held, more: Taken) -> bool:
        try:
            self._protocol.send(MessagesPassed(more.messages))
        except MessageRefused as refused:
            self._refuse(more, refused)
            self._protocol.send(BatchEnded())
        else:
            batch = held.taken
            held.taken = batch._replace(
                messages=concatenated(batch.messages, more.messages),
                size=batch.size + more.size,
            )
            held.size += more.size
            self._held_bytes += more.size
        return True

    def _deliver(self, groups: Groups, at: int, reply_size: int) -> Answer:
        rest, self._rest = self._rest, None
        if rest is not None:
            rest.submission.give_back(rest)  # answered before it had all of its batch
        return super()._deliver(groups, at, reply_size)

    def _let_go(self) -> list[Taken]:
        held = super()._let_go()
        rest, self._rest = self._rest, None
        if rest is None or not rest.messages or not held:
            return held
        # What it was to get next is a part of the batch that is tried alone.
        batch = held[-1]
        whole = concatenated(batch.messages, rest.messages)
        return [batch._replace(messages=whole, size=batch.size + rest.size)]


def ripe_at(submission: Submission, policy: BatchPolicy) -> float:
    """Return from when on the waiting messages make a batch, in seconds."""
    if (
        submission.closed
        or submission.waiting >= policy.size
        or submission.waiting_bytes >= policy.bytes
    ):
        return 0.0
    return submission.oldest + policy.seconds
