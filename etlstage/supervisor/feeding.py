"""
What one worker is given, by mode, and how its answers are paired.

The k-th EOP answers the k-th exchange: a message in single mode, else a batch.
Here is no I/O; the connection writes what the protocol has queued.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from etlstage.errors import MessageRefused
from etlstage.messages import StageKind
from etlstage.protocol.events import BatchEnded, MessagesPassed
from etlstage.protocol.marker import MarkerProtocol, Mode, State
from etlstage.supervisor.batching import Window, ripe_at
from etlstage.supervisor.stage import Stage
from etlstage.supervisor.submission import Answer, Taken, Work, unanswered

__all__ = ("Feeder", "feeder")

_SLICE: Final = 256 * 1024  # bytes taken at once
_IN_FLIGHT: Final = 2 * 1024 * 1024  # bytes that a window may hold


class _Held:
    """Messages that the worker has, of which the first ``answered`` are answered."""

    __slots__ = ("answered", "size", "taken")

    def __init__(self, taken: Taken) -> None:
        self.taken = taken
        self.answered = 0
        self.size = taken.size


class Feeder:
    """
    Gives single messages, as many ahead as the window allows.

    Attributes:
        due: When :meth:`feed` may have something although nothing new was submitted,
            in seconds, or None.

    """

    def __init__(self, stage: Stage, protocol: MarkerProtocol, work: Work) -> None:
        self.due: float | None = None
        self._stage = stage
        self._protocol = protocol
        self._work = work
        fixed = stage.window
        if fixed is None and stage.kind is StageKind.LOAD:
            fixed = 1
        self._window = Window(fixed)
        self._held: deque[_Held] = deque()
        self._held_bytes = 0

    @property
    def held(self) -> int:
        """Messages that the worker has and did not answer."""
        return sum(len(h.taken.messages) - h.answered for h in self._held)

    def feed(self, now: float) -> bool:
        """Queue what the worker may have now; return whether there was anything."""
        room = self._window.size - self._protocol.owed
        if room <= 0 or (self._held and self._held_bytes >= _IN_FLIGHT):
            return False
        if not self._protocol.owed:
            self._window.started(now)
        return self._give(room, now)

    def answered(
        self, groups: list[tuple[bytes, ...]], reply_size: int, now: float
    ) -> None:
        """Deliver the replies to the oldest exchanges."""
        self._window.answered(len(groups), now)
        at = 0
        while at < len(groups):
            at += self._deliver(groups, at, reply_size)
            reply_size = 0

    def abandon(self, error: Exception, others: Exception | None = None) -> None:
        """Deliver ``error`` for the oldest exchange, ``others`` for those behind it."""
        while self._held:
            held = self._held.popleft()
            submission, start, messages, _ = held.taken
            start, messages = start + held.answered, messages[held.answered :]
            cut = len(messages) if self._stage.mode.batches or others is None else 1
            first, rest = messages[:cut], messages[cut:]
            size = held.size * cut // len(messages)
            submission.deliver(unanswered(start, first, size, error))
            if rest and others is not None:
                size = held.size - size
                submission.deliver(unanswered(start + cut, rest, size, others))
            error = others or error
        self._held_bytes = 0

    def _give(self, room: int, now: float) -> bool:
        for submission in self._work.waiting():
            self._send(submission.take(room, _SLICE))
            return True
        return False

    def _send(self, taken: Taken) -> None:
        """Send messages, but for those that contain a marker: these fail."""
        while taken.messages:
            try:
                self._protocol.send(MessagesPassed(taken.messages))
            except MessageRefused as refused:
                before, taken = _split(taken, refused.index)
                self._send(before)
                culprit, taken = _split(taken, 1)
                self._refuse(culprit, refused)
            else:
                self._sent(taken)
                return

    def _sent(self, taken: Taken) -> None:
        self._held.append(_Held(taken))
        self._held_bytes += taken.size

    def _refuse(self, culprit: Taken, refused: MessageRefused) -> None:
        submission, start, messages, size = culprit
        error = MessageRefused(
            f"stage {self._stage.name}: {refused} (message {start + 1} of its input)",
            index=0,
        )
        submission.deliver(unanswered(start, messages, size, error))

    def _deliver(
        self, groups: list[tuple[bytes, ...]], at: int, reply_size: int
    ) -> int:
        held = self._held[0]
        submission, start, messages, _ = held.taken
        left = len(messages) - held.answered
        count = min(left, len(groups) - at)
        size = held.size if count == left else held.size * count // left
        part = messages[held.answered : held.answered + count]
        start += held.answered
        held.answered += count
        held.size -= size
        self._held_bytes -= size
        if count == left:
            self._held.popleft()
        if len(groups) != count:
            groups = groups[at : at + count]
        submission.deliver(Answer(start, part, groups, size, reply_size))
        return count


class _BatchFeeder(Feeder):
    """Pairs each reply with a whole batch."""

    def _deliver(
        self, groups: list[tuple[bytes, ...]], at: int, reply_size: int
    ) -> int:
        submission, start, messages, size = self._held.popleft().taken
        self._held_bytes -= size
        batch: list[tuple[bytes, ...]] = [()] * len(messages)
        batch[-1] = groups[at]
        submission.deliver(Answer(start, messages, batch, size, reply_size))
        return 1


class _ClosingFeeder(_BatchFeeder):
    """Gives whole batches and closes each with EOB: supervisor-driven."""

    def _give(self, room: int, now: float) -> bool:
        policy = self._stage.batch
        self.due = None
        for submission in self._work.waiting():
            ripe = ripe_at(submission, policy)
            if ripe <= now:
                self._send(submission.take_batch(policy.size, policy.bytes))
                return True
            self.due = ripe if self.due is None else min(ripe, self.due)
        return False

    def _send(self, taken: Taken) -> None:
        """Send a batch, but only up to a message that contains a marker: it fails."""
        try:
            self._protocol.send(MessagesPassed(taken.messages))
        except MessageRefused as refused:
            before, taken = _split(taken, refused.index)
            culprit, behind = _split(taken, 1)
            # They are a batch of their own, for which there may be no room now.
            behind.submission.give_back(behind)
            super()._send(before)
            self._refuse(culprit, refused)
        else:
            self._sent(taken)

    def _sent(self, taken: Taken) -> None:
        super()._sent(taken)
        self._protocol.send(BatchEnded())


class _AskedFeeder(_BatchFeeder):
    """Gives one message each time the worker asks: worker-driven."""

    _closes_at = 0.0

    def feed(self, now: float) -> bool:
        """Queue a message or EOB, if the worker waits for one."""
        self.due = None
        if self._protocol.state is State.IDLE:
            self._closes_at = now + self._stage.batch.seconds
            return self._give(1, now)
        if self._protocol.state is State.WANTED:
            return self._continue(now)
        return False

    def _give(self, room: int, now: float) -> bool:
        for submission in self._work.waiting():
            self._send(submission.take(1, _SLICE))
            return True
        return False

    def _continue(self, now: float) -> bool:
        policy = self._stage.batch
        held = self._held[0]
        submission, _, messages, size = held.taken
        if len(messages) >= policy.size:
            if policy.bnc_after_last:
                return False  # that BNC asks for nothing: the replies come next
        elif submission.waiting:
            if size + submission.next_size <= policy.bytes:
                return self._add(held, submission.take(1, _SLICE))
        elif not submission.closed and now < self._closes_at:
            self.due = self._closes_at
            return False
        self._protocol.send(BatchEnded())
        return True

    def _add(self, held: _Held, more: Taken) -> bool:
        try:
            self._protocol.send(MessagesPassed(more.messages))
        except MessageRefused as refused:
            self._refuse(more, refused)
            self._protocol.send(BatchEnded())
        else:
            batch = held.taken
            held.taken = batch._replace(
                messages=batch.messages + more.messages, size=batch.size + more.size
            )
            held.size += more.size
            self._held_bytes += more.size
        return True


def feeder(stage: Stage, protocol: MarkerProtocol, work: Work) -> Feeder:
    """Return what feeds a worker of ``stage``."""
    kinds: dict[Mode, type[Feeder]] = {
        Mode.SINGLE: Feeder,
        Mode.BATCH_SUPERVISOR: _ClosingFeeder,
        Mode.BATCH_WORKER: _AskedFeeder,
    }
    return kinds[stage.mode](stage, protocol, work)


def _split(taken: Taken, count: int) -> tuple[Taken, Taken]:
    submission, start, messages, size = taken
    first = messages[:count]
    first_size = sum(map(len, first))
    return (
        Taken(submission, start, first, first_size),
        Taken(submission, start + count, messages[count:], size - first_size),
    )
