"""
What becomes of the messages that a worker was lost with, or refused.

The oldest exchange is the suspect: a worker that answers in order was busy with it. It
is tried again alone. Those behind it were only sent ahead: they go back to where they
came from. A worker with several exchanges under way may have died of any of them: all
are suspects, and each is tried alone. A batch that was lost alone is halved; a message
that was lost more often than it may be, the last time as the only thing that its
process was ever given, has failed. So nothing is blamed for what another message did.

What a worker had not even begun to read can't have killed it, and is no suspect.

A worker that refuses a batch does not say whose fault it is: it is halved, too, until
a single message is refused, and no worker need be fresh for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from etlstage.errors import Attempt
from etlstage.supervisor.exchange.exchange import Exchange

__all__ = ("Judgement", "judge", "refused", "tried")


class Judgement(NamedTuple):
    """What to do with all that a worker held; each message is in one place."""

    suspects: list[Exchange]
    """To be tried alone, in this order."""
    innocent: list[Exchange]
    """To be given again as if nothing had been."""
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
        held: What it had not answered, oldest first; what was tried alone is all of it.
        attempt: How the worker was lost.
        retries: How often a single message may be lost beyond the first time.
        batches: Whether each of ``held`` is one exchange, and not one for each message.
        first: Whether the process was given nothing before what it held.
        concurrent: Whether all of ``held`` were under way at once.

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


def refused(
    exchange: Exchange, attempts: tuple[Attempt, ...], *, retries: int
) -> tuple[Exchange, list[Exchange]]:
    """
    Return an exchange that a worker refused, and what of it is to be tried again.

    It takes note of the refusal.

    Args:
        exchange: All of it was refused.
        attempts: The refusal.
        retries: How often a single message may be refused beyond the first time.

    """
    single = len(exchange.messages) == 1
    exchange.attempts = (*exchange.attempts, *attempts)
    exchange.refusals += single
    again = exchange
    if not single:
        return again, list(again.split((len(exchange.messages) + 1) // 2))
    return again, [again] if again.refusals <= retries else []


def tried(exchange: Exchange, attempt: Attempt) -> Exchange:
    """Return ``exchange`` with one more attempt at it."""
    return replace(
        exchange,
        attempts=(*exchange.attempts, attempt),
        tries=exchange.tries + (len(exchange.messages) == 1),
    )
