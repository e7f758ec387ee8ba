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
from itertools import repeat
from typing import NamedTuple

from etlstage.errors import Attempt
from etlstage.messages import Groups, Position, Run, concatenated, size_of

__all__ = (
    "Answer",
    "Marks",
    "Submission",
    "Suspect",
    "Taken",
    "Watermark",
    "Work",
    "split",
    "unanswered",
)


class Answer(NamedTuple):
    """What became of some consecutive messages of a submission."""

    start: int
    """Place of the first message in the submission."""
    messages: Run
    groups: Groups
    """What the worker made of the last messages, each; those before have no output.
    A batch is answered as a whole, by the group of its last message."""
    size: int
    """Bytes of the messages."""
    reply_size: int = 0
    """Bytes of the replies, with their markers."""
    error: Exception | None = None
    """Why there are no outputs."""

    @property
    def replies(self) -> Groups:
        """For each message, what the worker made of it."""
        without = len(self.messages) - len(self.groups)
        return [*repeat((), without), *self.groups] if without else self.groups


class Taken(NamedTuple):
    """Messages that a worker took."""

    submission: Submission
    start: int
    messages: Run
    size: int


class Suspect(NamedTuple):
    """Messages that a worker was lost with; they are tried again alone."""

    taken: Taken
    attempts: tuple[Attempt, ...]
    """The workers that were lost with them, oldest first."""
    tries: int = 0
    """How many of these had them as a single message, and not in a batch."""


class Marks:
    """Positions among messages; each is due when all messages before it have ended."""

    def __init__(self) -> None:
        self._marks: deque[tuple[int, Position]] = deque()

    def __len__(self) -> int:
        return len(self._marks)

    def add(self, place: int, position: Position) -> None:
        """Put ``position`` behind the messages before ``place``."""
        self._marks.append((place, position))

    def due(self, low: int) -> list[Position]:
        """Return, once, the positions behind nothing but the first ``low`` messages."""
        due = []
        while self._marks and self._marks[0][0] <= low:
            due.append(self._marks.popleft()[1])
        return due


class Watermark:
    """Counts the messages before the first that has not ended."""

    def __init__(self) -> None:
        self.low = 0
        self._ended: dict[int, int] = {}  # beyond that: where ended ones begin and end

    def rise(self, start: int, count: int) -> None:
        """Take note of ``count`` messages that have ended, from ``start`` on."""
        self._ended[start] = start + count
        while (end := self._ended.pop(self.low, None)) is not None:
            self.low = end


class _Fed:
    """A run of which the first ``at`` messages are taken."""

    __slots__ = ("at", "messages", "size", "start", "time")

    def __init__(self, start: int, messages: Run, size: int, time: float) -> None:
        self.start = start  # place of the first message, taken or not
        self.messages = messages
        self.at = 0
        self.size = size  # bytes of what is left
        self.time = time

    @property
    def next(self) -> int:
        """Place of the first message that is not taken."""
        return self.start + self.at


class Submission:
    """
    One caller's messages: fed in order, taken by any worker, answered in order.

    Args:
        on_answer: Called when :meth:`collect` has something new.
        max_unread: Bytes of replies that may lie here; when there are more, workers
            are given no further messages but the one that is collected next.
        ordered: Whether answers are collected in the order of the messages.
        lane: Number of the only worker that may take from here, or None.

    """

    def __init__(
        self,
        on_answer: Callable[[], None],
        *,
        max_unread: float = math.inf,
        ordered: bool = True,
        lane: int | None = None,
    ) -> None:
        self.lane = lane
        self._on_answer = on_answer
        self._max_unread = max_unread
        self._unread = 0
        self._ordered = ordered
        self._fed: deque[_Fed] = deque()
        self._answers: dict[int, Answer] = {}
        self._next = 0  # place of the first message that was not collected
        self._total = 0
        self._dead: Exception | None = None
        self.forgotten = False
        """Its caller is gone."""
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
        return self.closed and not self.held

    @property
    def stalled(self) -> bool:
        """Whether the consumer must take replies first."""
        return self._unread > self._max_unread

    @property
    def takeable(self) -> bool:
        """Whether a worker may take messages, where there are any."""
        # What a lost worker held may be what the consumer waits for.
        return not self.stalled or self._fed[0].next == self._next

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
        size = size_of(messages)
        start = self._total
        self._total += len(messages)
        self.held += len(messages)
        self.held_bytes += size
        if self._dead is not None:
            self.deliver(unanswered(start, messages, size, self._dead))
            return
        self._fed.append(_Fed(start, messages, size, now))
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
            taken = size_of(messages)
            while len(messages) > 1 and taken > size:
                messages = messages[: len(messages) // 2]
                taken = size_of(messages)
        start = fed.next
        fed.at += len(messages)
        fed.size -= taken
        if fed.at == len(fed.messages):
            self._fed.popleft()
        self.waiting -= len(messages)
        self.waiting_bytes -= taken
        return Taken(self, start, messages, taken)

    def take_batch(self, count: int, size: int) -> Taken:
        """Remove and return as many messages as fit; one always does."""
        batch = self.take(count, size)
        while self._fed and len(batch.messages) < count:
            if not self.can_follow(batch, size):
                break
            room = size - batch.size
            more = self.take(count - len(batch.messages), room)
            batch = batch._replace(
                messages=concatenated(batch.messages, more.messages),
                size=batch.size + more.size,
            )
        return batch

    def can_follow(self, batch: Taken, size: int) -> bool:
        """Return whether the next message can join a batch of up to ``size`` bytes."""
        fed = self._fed[0]
        adjacent = fed.next == batch.start + len(batch.messages)
        return adjacent and batch.size + self.next_size <= size

    def give_back(self, taken: Taken) -> None:
        """Undo a taking: workers take these messages in the order of their places."""
        _, start, messages, size = taken
        if not messages or self.forgotten:
            return
        if self._dead is not None:
            self.deliver(unanswered(start, messages, size, self._dead))
            return
        at = 0
        while at < len(self._fed) and self._fed[at].next < start:
            at += 1
        self._fed.insert(at, _Fed(start, messages, size, -math.inf))
        self.waiting += len(messages)
        self.waiting_bytes += size

    def deliver(self, answer: Answer) -> None:
        """Take an answer from a worker, in whatever order."""
        self._answers[answer.start] = answer
        self.held_bytes += answer.reply_size
        self._unread += answer.reply_size
        if answer.start == self._next or not self._ordered:
            self._on_answer()

    def collect(self) -> list[Answer]:
        """Return, once, the answers whose turn it is, in the order of the messages."""
        if not self._ordered:
            collected, self._answers = list(self._answers.values()), {}
        else:
            collected = []
            while (answer := self._answers.pop(self._next, None)) is not None:
                collected.append(answer)
                self._next += len(answer.messages)
        for answer in collected:
            self.held -= len(answer.messages)
            self.held_bytes -= answer.size + answer.reply_size
            self._unread -= answer.reply_size
        return collected

    def forget(self) -> None:
        """Drop all that waits: a batch that is open is not filled with it."""
        self._fed.clear()
        self.waiting = self.waiting_bytes = 0
        self.closed = self.forgotten = True

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
    return Answer(start, messages, (), size, error=error)


def split(taken: Taken, count: int) -> tuple[Taken, Taken]:
    """Return the first ``count`` messages, and the others."""
    submission, start, messages, size = taken
    first = messages[:count]
    first_size = size_of(first)
    return (
        Taken(submission, start, first, first_size),
        Taken(submission, start + count, messages[count:], size - first_size),
    )


class Work:
    """
    What all callers have submitted and no worker has taken.

    Args:
        workers: How many there are.

    """

    def __init__(self, workers: int = 1) -> None:
        self._workers = workers
        self._submissions: deque[Submission] = deque()
        self._dead: Exception | None = None
        self.suspects: deque[Suspect] = deque()
        """What workers were lost with; a fresh worker tries it, alone."""
        self.gone: set[int] = set()
        """Numbers of the workers that are not started again."""

    def open(self, submission: Submission) -> None:
        """Let the workers take from ``submission``."""
        self._submissions.append(submission)
        if self._dead is not None:
            submission.fail(self._dead)

    def drop(self, submission: Submission) -> None:
        """Forget a submission: its caller is gone, or it is finished."""
        self._submissions.remove(submission)
        submission.forget()
        if self.suspects:
            others = (s for s in self.suspects if s.taken.submission is not submission)
            self.suspects = deque(others)

    @property
    def messages(self) -> int:
        """How many messages wait for a worker."""
        suspects = sum(len(s.taken.messages) for s in self.suspects)
        return suspects + sum(s.waiting for s in self._submissions)

    def waiting(self, worker: int) -> list[Submission]:
        """
        Return what a worker may take messages from; the callers take turns.

        Args:
            worker: Its number.

        """
        self._submissions.rotate(-1)
        return [
            s
            for s in self._submissions
            if s.waiting
            and s.takeable
            and (s.lane is None or self._may(worker, s.lane))
        ]

    def has_suspect(self, worker: int) -> bool:
        """Return whether there is something for worker number ``worker`` to try."""
        lanes = (s.taken.submission.lane for s in self.suspects)
        return any(lane is None or self._may(worker, lane) for lane in lanes)

    def take_suspect(self, worker: int) -> Suspect | None:
        """Remove and return what worker number ``worker`` is to try, if anything."""
        for suspect in self.suspects:
            lane = suspect.taken.submission.lane
            if lane is None or self._may(worker, lane):
                self.suspects.remove(suspect)
                return suspect
        return None

    def fail(self, error: Exception) -> None:
        """Answer everything with ``error``: there is no worker left."""
        self._dead = error
        while self.suspects:
            submission, start, messages, size = self.suspects.popleft().taken
            submission.deliver(unanswered(start, messages, size, error))
        for submission in self._submissions:
            submission.fail(error)

    def _may(self, worker: int, lane: int) -> bool:
        """Return whether a lane is the worker's: its own, or one that it inherited."""
        others = (lane + n for n in range(self._workers))
        heirs = (n % self._workers for n in others)
        return next((n for n in heirs if n not in self.gone), None) == worker
