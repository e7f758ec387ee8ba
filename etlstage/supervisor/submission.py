"""
Messages on their way to the workers, and their answers on the way back.

A :class:`Submission` is one caller's messages; :class:`Work` is what all callers have
submitted. Both move runs and counters, know no clock and do no I/O: who waits for
them is told through the callbacks.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from etlstage.messages import Run

__all__ = ("Answer", "Submission", "Taken", "Work", "unanswered")


class Answer(NamedTuple):
    """What became of some consecutive messages of a submission."""

    start: int
    """Place of the first message in the submission."""
    messages: Run
    groups: list[tuple[bytes, ...]]
    """For each message, what the worker made of it."""
    size: int
    """Bytes of the messages."""
    reply_size: int = 0
    """Bytes of the replies, with their markers."""
    error: Exception | None = None
    """Why there are no outputs."""


class Taken(NamedTuple):
    """Messages that a worker took."""

    submission: Submission
    start: int
    messages: Run
    size: int


class _Fed:
    """A run of which the first ``at`` messages are taken."""

    __slots__ = ("at", "messages", "size", "time")

    def __init__(self, messages: Run, size: int, time: float) -> None:
        self.messages = messages
        self.at = 0
        self.size = size  # bytes of what is left
        self.time = time


class Submission:
    """
    One caller's messages: fed in order, taken by any worker, answered in order.

    Args:
        on_answer: Called when :meth:`collect` has something new.
        max_unread: Bytes of replies that may lie here; when there are more, workers
            are given no further messages. Those before the first one that waits are
            all with a worker, so it goes on.

    """

    def __init__(
        self, on_answer: Callable[[], None], *, max_unread: float = math.inf
    ) -> None:
        self._on_answer = on_answer
        self._max_unread = max_unread
        self._unread = 0
        self._fed: deque[_Fed] = deque()
        self._start = 0  # place of the first message that nobody has taken
        self._answers: dict[int, Answer] = {}
        self._next = 0  # place of the first message that was not collected
        self._total = 0
        self._dead: Exception | None = None
        self.closed = False
        """No more will be fed."""
        self.waiting = 0
        """Messages that no worker has taken."""
        self.waiting_bytes = 0
        self.held = 0
        """Messages that were fed and not collected."""
        self.held_bytes = 0
        """Bytes of these messages and of the replies to them."""

    @property
    def finished(self) -> bool:
        """Whether everything was fed, answered and collected."""
        return self.closed and self._next == self._total

    @property
    def stalled(self) -> bool:
        """Whether the consumer must take replies first."""
        return self._unread > self._max_unread

    @property
    def oldest(self) -> float:
        """When the longest waiting message was fed, in seconds."""
        return self._fed[0].time

    @property
    def next_size(self) -> int:
        """Bytes of the message whose turn it is."""
        fed = self._fed[0]
        return len(fed.messages[fed.at])

    def feed(self, messages: Run, now: float) -> None:
        """Append messages."""
        if not messages:
            return
        size = sum(map(len, messages))
        start = self._total
        self._total += len(messages)
        self.held += len(messages)
        self.held_bytes += size
        if self._dead is not None:
            self._start = self._total
            self.deliver(unanswered(start, messages, size, self._dead))
            return
        self._fed.append(_Fed(messages, size, now))
        self.waiting += len(messages)
        self.waiting_bytes += size

    def close(self) -> None:
        """Promise that no more will be fed."""
        self.closed = True
        self._on_answer()

    def take(self, count: int, size: int) -> Taken:
        """Remove and return messages, at most ``count`` and ``size`` bytes, or one."""
        fed = self._fed[0]
        messages, taken = fed.messages, fed.size
        if fed.at or len(messages) > count or taken > size:
            messages = messages[fed.at : fed.at + count]
            taken = sum(map(len, messages))
            while len(messages) > 1 and taken > size:
                messages = messages[: len(messages) // 2]
                taken = sum(map(len, messages))
        fed.at += len(messages)
        fed.size -= taken
        if fed.at == len(fed.messages):
            self._fed.popleft()
        start, self._start = self._start, self._start + len(messages)
        self.waiting -= len(messages)
        self.waiting_bytes -= taken
        return Taken(self, start, messages, taken)

    def take_batch(self, count: int, size: int) -> Taken:
        """Remove and return as many messages as fit; one always does."""
        batch = self.take(count, size)
        while self._fed and len(batch.messages) < count:
            room = size - batch.size
            if self.next_size > room:
                break
            more = self.take(count - len(batch.messages), room)
            batch = batch._replace(
                messages=batch.messages + more.messages, size=batch.size + more.size
            )
        return batch

    def give_back(self, taken: Taken) -> None:
        """Undo the end of what was just taken; it is the first to be taken again."""
        if not taken.messages:
            return
        self._fed.appendleft(_Fed(taken.messages, taken.size, 0.0))
        self._start = taken.start
        self.waiting += len(taken.messages)
        self.waiting_bytes += taken.size

    def deliver(self, answer: Answer) -> None:
        """Take an answer from a worker, in whatever order."""
        self._answers[answer.start] = answer
        self.held_bytes += answer.reply_size
        self._unread += answer.reply_size
        if answer.start == self._next:
            self._on_answer()

    def collect(self) -> list[Answer]:
        """Return, once, the answers whose turn it is, in the order of the messages."""
        collected = []
        while (answer := self._answers.pop(self._next, None)) is not None:
            collected.append(answer)
            self._next += len(answer.messages)
            self.held -= len(answer.messages)
            self.held_bytes -= answer.size + answer.reply_size
            self._unread -= answer.reply_size
        return collected

    def forget(self) -> None:
        """Drop all that waits: a batch that is open is not filled with it."""
        self._fed.clear()
        self.waiting = self.waiting_bytes = 0
        self.closed = True

    def fail(self, error: Exception) -> None:
        """Answer with ``error`` all that waits, and all that is still to come."""
        self._dead = error
        while self._fed:
            _, start, messages, size = self.take(
                len(self._fed[0].messages), sys.maxsize
            )
            self.deliver(unanswered(start, messages, size, error))


def unanswered(start: int, messages: Run, size: int, error: Exception) -> Answer:
    """Return the answer to messages that have none."""
    return Answer(start, messages, [()] * len(messages), size, error=error)


class Work:
    """What all callers have submitted and no worker has taken."""

    def __init__(self) -> None:
        self._submissions: deque[Submission] = deque()
        self._dead: Exception | None = None

    def open(self, submission: Submission) -> None:
        """Let the workers take from ``submission``."""
        self._submissions.append(submission)
        if self._dead is not None:
            submission.fail(self._dead)

    def drop(self, submission: Submission) -> None:
        """Forget a submission: its caller is gone, or it is finished."""
        self._submissions.remove(submission)
        submission.forget()

    def waiting(self) -> list[Submission]:
        """Return the submissions with waiting messages; the callers take turns."""
        self._submissions.rotate(-1)
        return [s for s in self._submissions if s.waiting and not s.stalled]

    def fail(self, error: Exception) -> None:
        """Answer everything with ``error``: there is no worker left."""
        self._dead = error
        for submission in self._submissions:
            submission.fail(error)
