"""
What becomes of messages that a lost worker held, or that a worker refused.

The oldest exchange is the suspect: a worker that answers in order was busy with it. It
is tried again alone. Exchanges after it were only sent ahead: they go back to where
they came from. A worker with several concurrent exchanges may have died of any of them:
all are suspects, and each is tried alone. A batch that was lost alone is halved. A
message fails if it was lost more often than it may be, the last time as the only
message that its process was ever given. So no message is blamed for what another one
did.

Messages that a worker had not even begun to read can't have killed it: they are not
suspects.

A worker that refuses a batch does not report which message is at fault. So the batch is
halved, too, until a single message is refused; that needs no fresh worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from etlstage.errors import Attempt, EtlstageError
from etlstage.supervisor.exchange.exchange import Exchange, Outcome
from etlstage.supervisor.exchange.round import Round

__all__ = (
    "Judgement",
    "LastError",
    "Loss",
    "carry_out",
    "judge",
    "judge_rounds",
    "refused",
    "tried",
)

LastError: TypeAlias = Callable[[tuple[Attempt, ...]], EtlstageError]
"""Makes the error of a message from all attempts at it."""


class Loss(NamedTuple):
    """What a lost worker held, and what becomes of it."""

    held: int
    """Number of messages."""
    retried: int
    """How many of them other workers are to try."""
    failed: int = 0
    """How many of them have failed for good."""
    tries: int = 0
    """How often the current suspect has failed; 0 for a batch, or if there is none."""
    progress: bool = False
    """Whether a round got outputs that no worker before had given."""


class Judgement(NamedTuple):
    """What to do with all that a worker held; each message is in one place."""

    suspects: list[Exchange]
    """To be tried alone, in this order."""
    innocent: list[Exchange]
    """To be given again as if nothing had happened."""
    failed: list[Exchange]
    """To be ended with an error."""


def judge(
    held: Sequence[Exchange],
    attempt: Attempt,
    *,
    retries: int,
    batches: bool,
    first: bool,
    concurrent: bool = False,
) -> Judgement:
    """
    Return what becomes of what a lost worker held.

    Args:
        held: What it had not answered, oldest first; an exchange that was tried alone
            is the only one.
        attempt: How the worker was lost.
        retries: How often a single message may be lost beyond the first time.
        batches: Whether each of ``held`` is one exchange, and not one for each message.
        first: Whether the process was given nothing before what it held.
        concurrent: Whether the worker processed all of ``held`` concurrently.

    """
    if not held:
        return Judgement([], [], [])
    if concurrent and len(held) > 1:
        return Judgement([tried(exchange, attempt) for exchange in held], [], [])
    oldest, innocent = held[0], list(held[1:])
    if not batches and len(oldest.messages) > 1:
        oldest, behind = oldest.split(1)
        innocent.insert(0, behind)
    again = tried(oldest, attempt)
    count = len(oldest.messages)
    if innocent:
        return Judgement([again], innocent, [])
    if count > 1:
        return Judgement(list(again.split((count + 1) // 2)), [], [])
    if first and again.tries > retries:
        return Judgement([], [], [again])
    return Judgement([again], [], [])


def judge_rounds(
    rounds: Sequence[Exchange], attempt: Attempt, *, retries: int, untouched: bool
) -> tuple[Judgement, bool]:
    """
    Return what becomes of rounds of extraction, and whether one made progress.

    A round may be lost without progress ``retries`` times beyond the first; with
    progress, any number of times.
    """
    found, progress = Judgement([], [], []), False
    for exchange in rounds:
        lost, asked = exchange, exchange.submission
        assert isinstance(asked, Round), "only rounds are requested again"
        repeatable = asked.repeatable
        if repeatable and asked.rewind():
            progress = True
            lost = replace(lost, attempts=(), tries=0)
        if not untouched:
            lost = tried(lost, attempt)
        again = repeatable and lost.tries <= retries
        # A round whose caller is gone is not repeated, and no restart is counted.
        again = again and not lost.submission.abandoned
        (found.innocent if again else found.failed).append(lost)
    return found, progress


def carry_out(
    found: Judgement, held: int, error: LastError, suspects: deque[Exchange]
) -> Loss:
    """
    Carry out a judgement; what is to be tried alone goes to ``suspects``.

    Returns what became of the ``held`` messages; ``error`` makes the errors of those
    that have failed.
    """
    for exchange in found.innocent:
        exchange.submission.give_back(exchange)
    # Messages whose caller is gone are not tried again.
    wanted = [s for s in found.suspects if not s.submission.abandoned]
    # First in the queue: a fresh worker gives a verdict on the first one only.
    suspects.extendleft(reversed(wanted))
    for exchange in found.failed:
        exchange.fail(error(exchange.attempts))
    tries = max((s.tries for s in found.suspects), default=0)
    retried = sum(e.left for e in (*found.innocent, *wanted))
    return Loss(held, retried, len(found.failed), tries)


def refused(
    exchange: Exchange, outcome: Outcome, *, retries: int
) -> tuple[list[Outcome], list[Exchange]]:
    """
    Return what has ended of an exchange with refusals, and what is to be tried again.

    ``outcome`` has the refusals; a single message may be refused ``retries`` times
    beyond the first.
    """
    if outcome.error is None and not retries:
        if exchange.attempts:
            refused = outcome.refused.after(exchange.attempts)
            outcome = outcome._replace(refused=refused)
        return [outcome], []
    ended: list[Outcome] = []
    again: list[Exchange] = []
    for part in outcome.parts():
        if part.error is None:
            ended.append(part)
            continue
        culprit, count = exchange.of(part), len(part.messages)
        culprit.attempts = (*culprit.attempts, *part.error.attempts)
        culprit.refusals += count == 1
        if count > 1:
            again += culprit.split((count + 1) // 2)
        elif culprit.refusals <= retries:
            again.append(culprit)
        else:
            part.error.attempts = culprit.attempts
            ended.append(part)
    return ended, again


def tried(exchange: Exchange, attempt: Attempt) -> Exchange:
    """Return ``exchange`` with one more attempt at it."""
    return replace(
        exchange,
        attempts=(*exchange.attempts, attempt),
        tries=exchange.tries + (len(exchange.messages) == 1),
    )
