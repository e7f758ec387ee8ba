"""
One unit of request and reply, from submission to outcome.

Whatever happens to messages inside a stage happens to an :class:`Exchange`: it waits,
is given to a worker, and is answered, or lost with the worker and tried again. It ends
in exactly one :class:`Outcome`: done, refused or lost.

A worker that answers message by message has thousands of exchanges open at once. There
one object stands for consecutive exchanges, and a cursor moves through it, because an
object for each would cost more than the message.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from etlstage.errors import Attempt, ContractBroken, EtlstageError
from etlstage.messages import Groups, Run, size_of
from etlstage.stage.contract import Broken, Checker
from etlstage.stage.stage import Stage

if TYPE_CHECKING:
    from etlstage.supervisor.exchange.submission import Submission

__all__ = ("NONE_SLOW", "Exchange", "History", "Outcome", "Refusals")

NONE_SLOW: Final[Mapping[int, float]] = MappingProxyType({})
"""No reply took longer than it may."""

History: TypeAlias = tuple[tuple[Attempt, ...], int, int]
"""Attempts, tries and refusals of an exchange."""


class Refusals:
    """
    Which of some messages a worker refused, and why.

    The error of each is made only when it is accessed: a block may hold thousands, and
    the garbage collector has to visit every object that waits.

    Args:
        places: Places of the messages, rising.
        reasons: The worker's reason for each.
        error: Makes the error of a message.

    """

    __slots__ = ("_error", "_reasons", "places")

    def __init__(
        self,
        places: Sequence[int] = (),
        reasons: Sequence[Any] = (),
        error: Callable[[Any], EtlstageError] = EtlstageError,
    ) -> None:
        self.places: Sequence[int] = places
        self._reasons = reasons
        self._error = error

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[tuple[int, EtlstageError]]:
        """Yield the place of each, and a new error."""
        return zip(self.places, map(self._error, self._reasons), strict=True)

    def among(self, start: int, end: int) -> Refusals:
        """Return those from ``start`` to ``end``, with places relative to ``start``."""
        places = self.places
        mine = slice(bisect_left(places, start), bisect_left(places, end))
        counted = [place - start for place in places[mine]]
        return Refusals(counted, self._reasons[mine], self._error)

    def after(self, attempts: tuple[Attempt, ...]) -> Refusals:
        """Return the same for messages at which workers have failed before."""

        def error(reason: object) -> EtlstageError:
            again = self._error(reason)
            again.attempts = (*attempts, *again.attempts)
            return again

        return Refusals(self.places, self._reasons, error)


class Outcome(NamedTuple):
    """What became of some consecutive messages of a submission."""

    start: int
    """Place of the first message in the submission."""
    messages: Run
    groups: Groups
    """The outputs of each of the last messages; those before them have no output.
    A batch is answered as a whole, by the group of its last message."""
    size: int
    """Bytes of the messages."""
    reply_size: int = 0
    """Bytes of memory that the replies take."""
    error: EtlstageError | None = None
    """Why there are no outputs: the messages were refused, or lost."""
    refused: Refusals = Refusals()
    """The refused ones of several messages that a worker answered one by one."""
    mismatches: tuple[tuple[int, str], ...] = ()
    """Places of messages, counted from ``start``, whose replies broke the contract of
    the stage, each with the first promise that it broke."""

    @property
    def failed(self) -> int:
        """How many of the messages were refused, or lost."""
        return len(self.refused) if self.error is None else len(self.messages)

    @property
    def errors(self) -> Iterable[EtlstageError | None]:
        """The error of each message; None for one that was answered."""
        if not self.refused.places:
            return repeat(self.error, len(self.messages))
        errors: list[EtlstageError | None] = [None] * len(self.messages)
        for place, error in self.refused:
            errors[place] = error
        return errors

    def cut(self, start: int, end: int) -> Outcome:
        """Return the outcome of the messages from ``start`` to ``end``."""
        count, error = len(self.messages), self.error
        size, reply_size = (
            whole * end // count - whole * start // count
            for whole in (self.size, self.reply_size)
        )
        groups = self.replies[start:end] if error is None else ()
        messages = self.messages[start:end]
        part = Outcome(self.start + start, messages, groups, size, reply_size, error)
        if self.mismatches:
            inside = ((place - start, name) for place, name in self.mismatches)
            mine = tuple((at, name) for at, name in inside if 0 <= at < len(messages))
            part = part._replace(mismatches=mine)
        return part.refusing(self.refused, start) if self.refused else part

    def refusing(self, refused: Refusals, at: int) -> Outcome:
        """Return the same, with those of ``refused`` from place ``at`` on."""
        mine = refused.among(at, at + len(self.messages))
        if mine and len(self.messages) == 1:
            ((_, error),) = mine
            return self._replace(groups=(), error=error)
        return self._replace(refused=mine)

    def checked(
        self,
        checker: Checker,
        stage: Stage,
        slow: Mapping[int, float] = NONE_SLOW,
        attempts: Callable[[str], tuple[Attempt, ...]] = lambda _: (),
    ) -> Outcome:
        """
        Return the same, but refuse messages whose replies break the contract.

        If mismatches are only counted, no message is refused.

        Args:
            checker: Checks the replies, and counts mismatches.
            stage: Its ``on_mismatch`` decides what becomes of them.
            slow: Seconds that replies took, by their messages' places in the
                submission.
            attempts: Returns the attempts at a message, given how the last one failed.

        """
        if self.error is not None or (not slow and checker.passes(self.replies)):
            return self
        broken: dict[int, Broken] = {}
        for place, outputs in enumerate(self.replies):
            seconds = slow.get(self.start + place, 0.0) if slow else 0.0
            if (flaw := checker(outputs, seconds)) is not None:
                broken[place] = flaw
        errors = dict(self.refused)
        broken = {place: flaw for place, flaw in broken.items() if place not in errors}
        checker.found.update(flaw.promise for flaw in broken.values())
        if not broken:
            return self
        found = tuple((place, flaw.promise) for place, flaw in broken.items())
        outcome = self._replace(mismatches=found)
        if stage.on_mismatch == "count":
            return outcome
        replies = list(self.replies)
        for place, flaw in broken.items():
            fate = f"the reply {flaw}"
            error = ContractBroken(f"stage {stage.name}: {fate}")
            error.attempts = attempts(fate)
            error.promise = flaw.promise
            error.ends_run = stage.on_mismatch == "fail"
            errors[place], replies[place] = error, ()
        places = sorted(errors)
        known = Refusals(places, [errors[place] for place in places], _itself)
        return outcome._replace(groups=replies).refusing(known, 0)

    def parts(self) -> Iterator[Outcome]:
        """Yield the same in pieces, each of which is answered or refused as a whole."""
        at = 0
        for place in self.refused.places:
            if at < place:
                yield self.cut(at, place)
            yield self.cut(place, place + 1)
            at = place + 1
        if not at:
            yield self
        elif at < len(self.messages):
            yield self.cut(at, len(self.messages))

    @property
    def replies(self) -> Groups:
        """The outputs of each message."""
        without = len(self.messages) - len(self.groups)
        return [*repeat((), without), *self.groups] if without else self.groups


def _itself(error: EtlstageError) -> EtlstageError:
    """Return an error that exists already."""
    return error


@dataclass(slots=True)
class Exchange:
    """Messages of one submission that are handed to a worker together."""

    submission: Submission
    start: int
    """Place of the first message in the submission."""
    messages: Run
    size: int
    """Bytes of the messages that are left."""
    attempts: tuple[Attempt, ...] = ()
    """Failed attempts at it, oldest first; if there are any, it is tried alone."""
    tries: int = 0
    """How many of the attempts had it as a single message, and not in a batch."""
    refusals: int = 0
    """How often a worker rejected it, as a single message."""
    at: int = 0
    """Number of leading messages that are done: taken from it, or answered."""
    since: float = 0.0
    """When it was fed, or opened, in seconds."""

    @property
    def left(self) -> int:
        """Number of messages that are not done."""
        return len(self.messages) - self.at

    @property
    def next(self) -> int:
        """Place of the first message that is left."""
        return self.start + self.at

    def take(self, count: int, size: int) -> Exchange:
        """
        Cut off up to ``count`` messages and ``size`` bytes that are left; at least one.

        If that is all of the exchange, the exchange itself is returned.
        """
        messages, taken, at = self.messages, self.size, self.at
        single = len(messages) == 1  # whatever its size: it keeps its history
        if not at and len(messages) <= count and (single or taken <= size):
            return self
        messages = messages[at : at + count]
        taken = size_of(messages)
        while taken > size and len(messages) > 1:
            messages = messages[: len(messages) // 2]
            taken = size_of(messages)
        self.at = at + len(messages)
        self.size -= taken
        return Exchange(self.submission, self.start + at, messages, taken)

    def rest(self) -> Exchange:
        """Return what is left as an exchange of its own."""
        if not self.at:
            return self
        messages = self.messages[self.at :]
        return Exchange(self.submission, self.next, messages, self.size, *self.history)

    def split(self, count: int) -> tuple[Exchange, Exchange]:
        """Return the first ``count`` messages, and the others; none may be done."""
        assert not self.at, "a partly answered exchange can't be split"
        first = self.messages[:count]
        size = size_of(first)
        return (
            Exchange(self.submission, self.start, first, size, *self.history),
            Exchange(
                self.submission,
                self.start + count,
                self.messages[count:],
                self.size - size,
                *self.history,
            ),
        )

    @property
    def history(self) -> History:
        """Its attempts, tries and refusals so far."""
        return self.attempts, self.tries, self.refusals

    def failed(self, error: EtlstageError) -> Outcome:
        """Return the outcome of what is left when it ends with an error."""
        messages = self.messages[self.at :] if self.at else self.messages
        return Outcome(self.next, messages, (), self.size, error=error)

    def fail(self, error: EtlstageError) -> None:
        """End what is left with an error."""
        self.submission.deliver(self.failed(error))

    def of(self, outcome: Outcome) -> Exchange:
        """Return the messages of an outcome, as an exchange with this one's history."""
        return Exchange(
            self.submission,
            outcome.start,
            outcome.messages,
            outcome.size,
            *self.history,
        )
