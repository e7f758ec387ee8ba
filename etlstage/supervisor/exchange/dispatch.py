"""
What one worker is given, and how its answers are paired.

The k-th EOP answers the k-th exchange: here a message, in ``batch.py`` a batch.
There is no I/O; the connection writes what the protocol has queued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from etlstage.errors import Attempt, MessageRefused
from etlstage.messages import Groups, StageKind
from etlstage.protocol.events import MessagesPassed
from etlstage.protocol.marker import MarkerProtocol
from etlstage.stage.stage import Stage
from etlstage.supervisor.exchange.retry import Judgement, judge
from etlstage.supervisor.exchange.submission import (
    Answer,
    Suspect,
    Taken,
    Work,
    split,
    unanswered,
)
from etlstage.supervisor.exchange.window import Window

__all__ = ("SLICE", "Feeder", "Held", "Loss")

# What is done once for a slice costs as much as a thousand short messages do; but a
# buffer of more than half a megabyte the allocator gives back to the kernel at once,
# and to be given fresh pages is dearer than to fill them. A batch of Spark's, 10,000
# rows of about a hundred bytes, is two slices.
SLICE: Final = 640 * 1024  # bytes taken at once
_IN_FLIGHT: Final = 2 * 1024 * 1024  # bytes that a window may hold


class Loss(NamedTuple):
    """What a lost worker held."""

    held: int
    """Messages."""
    retried: int
    """How many of them others are to try."""
    failed: int = 0
    """How many of them have failed for the last time."""
    tries: int = 0
    """How often the one that is suspected now has failed; 0 for a batch, or none."""


class Held:
    """Messages that the worker has, of which the first ``answered`` are answered."""

    __slots__ = ("answered", "size", "taken")

    def __init__(self, taken: Taken) -> None:
        self.taken = taken
        self.answered = 0
        self.size = taken.size

    def rest(self) -> Taken:
        """Return what is not answered."""
        submission, start, messages, _ = self.taken
        done = self.answered
        return Taken(submission, start + done, messages[done:], self.size)


class Feeder:
    """
    Gives single messages, as many ahead as the window allows.

    Args:
        stage: Of the worker.
        protocol: The session with it.
        work: Where to take messages from.
        number: The worker's.

    Attributes:
        due: When :meth:`feed` may have something although nothing new was submitted,
            in seconds, or None.
        retiring: Set it to begin nothing new.

    """

    _batches = False

    def __init__(
        self, stage: Stage, protocol: MarkerProtocol, work: Work, number: int = 0
    ) -> None:
        self.due: float | None = None
        self.retiring = False
        self._stage = stage
        self._protocol = protocol
        self._work = work
        self._number = number
        fixed = stage.window
        if fixed is None and stage.kind is StageKind.LOAD:
            fixed = 1
        self._window = Window(fixed)
        self._held: deque[Held] = deque()
        self._held_bytes = 0
        self._fresh = True  # it was given nothing but suspects
        self._answered_any = False
        self._alone: Suspect | None = None

    @property
    def awaited(self) -> bool:
        """Whether the worker waits for us, and not we for it."""
        return not self._protocol.owed

    @property
    def held(self) -> int:
        """Messages that the worker has and did not answer."""
        return sum(len(h.taken.messages) - h.answered for h in self._held)

    def feed(self, now: float) -> bool:
        """Queue what the worker may have now; return whether there was anything."""
        self.due = None
        owed = self._protocol.owed
        if self._work.suspects:
            if not owed and self._try_suspect():
                return True
            if owed and self._work.gone and self._work.has_suspect(self._number):
                return False  # nobody else may come to try it: get idle
        room = self._window.size - owed
        if room <= 0 or (self._held and self._held_bytes >= _IN_FLIGHT):
            return False
        if self._alone is not None or self.retiring:
            return False
        if not owed:
            self._window.started(now)
        return self._give(room, now)

    def answered(self, groups: Groups, reply_size: int, now: float) -> tuple[int, int]:
        """Deliver replies to the oldest exchanges; return messages and their bytes."""
        self._window.answered(len(groups), now)
        self._answered_any = True
        at = messages = size = 0
        while at < len(groups):
            answer = self._deliver(groups, at, reply_size)
            reply_size = 0
            messages += len(answer.messages)
            size += answer.size
            at += 1 if self._batches else len(answer.messages)
        return messages, size

    def abandon(self, error: Exception) -> int:
        """Deliver ``error`` for all that the worker holds; return how much it was."""
        count = self.held
        for submission, start, messages, size in self._let_go():
            submission.deliver(unanswered(start, messages, size, error))
        return count

    def lose(
        self,
        attempt: Attempt,
        error: Callable[[tuple[Attempt, ...]], Exception],
        *,
        untouched: bool,
    ) -> Loss:
        """
        Let others try what the worker held: it is lost.

        Args:
            attempt: How it was lost.
            error: Makes the error of a message from all attempts at it.
            untouched: Whether the worker had read nothing of what it was given.

        """
        count, suspect = self.held, self._alone
        held = self._let_go()
        if untouched:
            found = Judgement([], held, [])
            if suspect is not None:
                found = Judgement([suspect], [], [])
        else:
            found = judge(
                held,
                suspect,
                attempt,
                retries=self._stage.on_error.retries,
                batches=self._batches,
                first=not self._answered_any,
            )
        for taken in found.innocent:
            taken.submission.give_back(taken)
        # Nobody waits for what a caller that is gone has submitted.
        wanted = [s for s in found.suspects if not s.taken.submission.forgotten]
        # In front: a fresh worker gives its verdict on the first one only.
        self._work.suspects.extendleft(reversed(wanted))
        for (submission, start, messages, size), attempts, _ in found.failed:
            answer = unanswered(start, messages, size, error(attempts))
            submission.deliver(answer)
        tries = max((s.tries for s in found.suspects), default=0)
        failed = len(found.failed)
        return Loss(count, count - failed, failed, tries)

    def _let_go(self) -> list[Taken]:
        held = [h.rest() for h in self._held]
        self._held.clear()
        self._held_bytes = 0
        self._alone = None
        return held

    def _try_suspect(self) -> bool:
        """Give the worker a suspect, if it is fresh or nobody fresh may come."""
        if self.retiring or self._alone is not None:
            return False
        if not self._fresh and not self._work.gone:
            return False
        suspect = self._work.take_suspect(self._number)
        if suspect is None:
            return False
        self._alone = suspect
        self._send(suspect.taken)
        return True

    def _give(self, room: int, now: float) -> bool:
        for submission in self._work.waiting(self._number):
            self._fresh = False
            self._send(submission.take(room, SLICE))
            return True
        return False

    def _send(self, taken: Taken) -> None:
        """Send messages, but for those that contain a marker: these fail."""
        while taken.messages:
            try:
                self._protocol.send(MessagesPassed(taken.messages))
            except MessageRefused as refused:
                before, taken = split(taken, refused.index)
                self._send(before)
                culprit, taken = split(taken, 1)
                self._refuse(culprit, refused)
            else:
                self._sent(taken)
                return

    def _sent(self, taken: Taken) -> None:
        self._held.append(Held(taken))
        self._held_bytes += taken.size

    def _refuse(self, culprit: Taken, refused: MessageRefused) -> None:
        submission, start, messages, size = culprit
        error = MessageRefused(
            f"stage {self._stage.name}: {refused} (message {start + 1} of its input)",
            index=0,
        )
        submission.deliver(unanswered(start, messages, size, error))

    def _deliver(self, groups: Groups, at: int, reply_size: int) -> Answer:
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
            self._alone = None
        if len(groups) != count:
            groups = groups[at : at + count]
        answer = Answer(start, part, groups, size, reply_size)
        submission.deliver(answer)
        return answer
