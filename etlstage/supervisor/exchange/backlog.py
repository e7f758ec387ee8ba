"""
Messages that callers have submitted and no worker has taken.

A submission that keeps the order of keys, a lane, has an owner: the only worker that
takes from it, until that worker is gone or another one owns fewer lanes.
"""

from __future__ import annotations

import math
from collections import Counter, deque

from etlstage.errors import EtlstageError
from etlstage.stage.contract import Checker
from etlstage.supervisor.exchange.exchange import Exchange
from etlstage.supervisor.exchange.submission import Submission

__all__ = ("Backlog",)


class Backlog:
    """
    The messages that wait for the workers of a stage, which are known by number.

    Args:
        checker: Compares replies with the contract of the stage; None: it has none.

    """

    def __init__(self, checker: Checker | None = None) -> None:
        self.checker: Checker | None = checker
        self.submissions: deque[Submission] = deque()
        """The submissions of all callers; only the backlog changes this."""
        self._owners: dict[int, int] = {}  # number of the worker, by id of the lane
        self._dead: EtlstageError | None = None
        self._workers: set[int] = set()
        self._steps = 0.0  # messages that are still to be tried in lock-step
        self.in_step: bool = False
        """The workers are given one exchange at a time, and each is proven."""
        self.life: float = math.inf
        """Messages until a process was lost, on average; recent losses count most."""
        self.answered: bool = False
        """Whether any worker has ever answered."""
        self.unknown_outcomes: int = 0
        """How often a worker may have processed a message that it has not answered."""
        self.suspects: deque[Exchange] = deque()
        """Exchanges that workers were lost with; a fresh worker tries each alone."""
        self.orphaned: bool = False
        """A worker is gone for good: other workers must try what it was to try."""

    def join(self, worker: int) -> None:
        """Let a worker own lanes."""
        self._workers.add(worker)

    def leave(self, worker: int, *, failed: bool = True) -> None:
        """
        Release the lanes of a worker that is not started again.

        ``failed``: it was not let go, and no fresh worker may come in its place.
        """
        self._workers.discard(worker)
        self.orphaned = self.orphaned or failed

    def open(self, submission: Submission) -> None:
        """Let the workers take from ``submission``."""
        self.submissions.append(submission)
        if self._dead is not None:
            submission.fail(self._dead)

    def drop(self, submission: Submission) -> None:
        """Forget a submission: its caller is gone, or it is finished."""
        self.submissions.remove(submission)
        self._owners.pop(id(submission), None)
        submission.abandon()
        if self.suspects:
            others = (s for s in self.suspects if s.submission is not submission)
            self.suspects = deque(others)

    @property
    def occupied(self) -> bool:
        """Whether any submission is open."""
        return bool(self.submissions)

    @property
    def pending(self) -> int:
        """How many messages have not ended."""
        return sum(s.waiting + s.in_flight for s in self.submissions)

    @property
    def messages(self) -> int:
        """How many messages wait for a worker."""
        suspects = sum(s.left for s in self.suspects)
        return suspects + sum(s.waiting for s in self.submissions)

    @property
    def exhausted(self) -> bool:
        """Whether nothing waits for a worker, nor is still to come."""
        ended = all(s.closed and not s.waiting for s in self.submissions)
        return ended and not self.suspects

    @property
    def demand(self) -> int:
        """How many waiting messages one more worker might take."""
        lanes = Counter(self._owners.values())
        suspects = sum(s.left for s in self.suspects if not s.submission.keyed)
        return suspects + sum(
            s.waiting
            for s in self.submissions
            if not s.keyed or self._is_free(s, lanes)
        )

    @property
    def closed(self) -> bool:
        """Whether everything was ended with an error: nothing is tried again."""
        return self._dead is not None

    def go_in_step(self, messages: float = math.inf) -> None:
        """Go in lock-step from now on, or for that many messages."""
        self._steps = max(self._steps, messages)
        self.in_step = self._steps > 0

    def step_on(self, messages: int) -> None:
        """Count messages that were tried in lock-step."""
        if self.in_step:
            self._steps = max(0.0, self._steps - messages)
            self.in_step = self._steps > 0

    def record_loss(self, messages: int) -> None:
        """Record that a process was lost after that many messages."""
        if messages:
            known = self.life < math.inf
            self.life = (self.life + messages) / 2 if known else messages

    def in_turn(self, worker: int) -> list[Submission]:
        """Return the submissions that a worker may take from; callers take turns."""
        self.submissions.rotate(-1)
        turn: list[Submission] = []
        for s in self.submissions:
            if s.waiting and s.takeable and (not s.keyed or self._may_take(worker, s)):
                turn.append(s)  # noqa: PERF401 - a comprehension is one more call
        return turn

    def has_suspect(self, worker: int) -> bool:
        """Return whether there is a suspect for worker number ``worker`` to try."""
        return any(self._may_take(worker, s.submission) for s in self.suspects)

    def take_suspect(self, worker: int) -> Exchange | None:
        """Remove and return the suspect that ``worker`` is to try, if any."""
        for number, suspect in enumerate(self.suspects):
            if self._may_take(worker, suspect.submission):
                del self.suspects[number]
                return suspect
        return None

    def fail(self, error: EtlstageError) -> None:
        """End everything with ``error``, now and later: no worker can take it."""
        self._dead = error
        while self.suspects:
            self.suspects.popleft().fail(error)
        for submission in self.submissions:
            submission.fail(error)

    def _may_take(self, worker: int, submission: Submission) -> bool:
        return not submission.keyed or self._owner(submission, worker) == worker

    def _owner(self, submission: Submission, asking: int) -> int | None:
        """Return the owner of a lane, which keeps it while any message is in flight."""
        owner = self._owners.get(id(submission))
        lanes = Counter(self._owners.values())
        if owner not in self._workers:
            if not self._workers:
                return None
            owner = min(self._workers, key=lambda n: (lanes[n], n != asking, n))
        # Only the asking worker can become the owner: another would not be woken.
        elif self._is_free(submission, lanes, lanes[asking]):
            owner = asking if asking in self._workers else owner
        self._owners[id(submission)] = owner
        return owner

    def _is_free(
        self, submission: Submission, lanes: Counter[int], owned: int = 0
    ) -> bool:
        """Return whether a worker that owns ``owned`` lanes may take over this one."""
        owner = self._owners.get(id(submission))
        if owner not in self._workers:
            return True
        # With a difference of one, a lane would wander between workers.
        return not submission.in_flight and lanes[owner] > owned + 1
