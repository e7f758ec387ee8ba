"""
What becomes of the messages that a lost worker held.

The oldest exchange is the suspect: a worker answers in order, so this is what it was
busy with. It is tried again alone. Those behind it were only sent ahead: they go back
to where they came from. A batch that was lost alone is halved; a message that was
lost more often than it may be, the last time as the only thing that its process was
ever given, has failed. So nothing is ever blamed for what another message did.

What a worker had not even begun to read can't have killed it, and is no suspect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from etlstage.errors import Attempt
from etlstage.supervisor.exchange.submission import Suspect, Taken, split

__all__ = ("Judgement", "judge")


class Judgement(NamedTuple):
    """What to do with all that a worker held; each message is in one place."""

    suspects: list[Suspect]
    """To be tried alone, in this order."""
    innocent: list[Taken]
    """To be given again as if nothing had been."""
    failed: list[Suspect]
    """To be answered with an error."""


def judge(
    held: Sequence[Taken],
    suspect: Suspect | None,
    attempt: Attempt,
    *,
    retries: int,
    batches: bool,
    first: bool,
) -> Judgement:
    """
    Return what becomes of what a lost worker held.

    Args:
        held: What it had not answered, oldest first.
        suspect: What was tried alone: then it is all that was held.
        attempt: How the worker was lost.
        retries: How often a single message may be lost beyond the first time.
        batches: Whether one element of ``held`` is one exchange, and not one message.
        first: Whether the process was given nothing before what it held.

    """
    if not held:
        return Judgement([], [], [])
    oldest, innocent = held[0], list(held[1:])
    if not batches and len(oldest.messages) > 1:
        oldest, behind = split(oldest, 1)
        innocent.insert(0, behind)
    before = suspect or Suspect(oldest, ())
    attempts = (*before.attempts, attempt)
    count = len(oldest.messages)
    again = Suspect(oldest, attempts, before.tries + (count == 1))
    if innocent:
        return Judgement([again], innocent, [])
    if count > 1:
        halves = split(oldest, (count + 1) // 2)
        return Judgement([Suspect(half, attempts) for half in halves], [], [])
    if first and again.tries > retries:
        return Judgement([], [], [again])
    return Judgement([again], [], [])
