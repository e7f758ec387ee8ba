"""
The handling of messages that a stage can't process.

The stage has retried such a message as often as allowed; here the message is
dead-lettered, or ends the run. This is the only place that checks an error budget.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any, Final

import anyio

from etlstage.errors import (
    ContractBroken,
    EtlstageError,
    InputDamaged,
    InvalidMessage,
    RemoteProtocolError,
    SinkFailed,
    StageError,
    WorkerLost,
    WorkerRefusal,
)
from etlstage.messages import Run, counted
from etlstage.pipeline.dead_letter.letter import (
    OTHERS,
    DeadLetter,
    first_clause,
    folded,
)
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.ledger import Account
from etlstage.protocol.base import Dialect
from etlstage.stage import ErrorBudget, ErrorPolicy, Stage
from etlstage.supervisor.diagnostic import Throttle
from etlstage.supervisor.exchange.exchange import Outcome
from etlstage.telemetry.log import Log

__all__ = (
    "OF_A_MESSAGE",
    "DeadLetterPolicy",
    "check_budget",
    "config_of",
    "letter_time",
)

_log = Log()

OF_A_MESSAGE: Final = (
    InputDamaged,
    InvalidMessage,
    WorkerRefusal,
    RemoteProtocolError,
    SinkFailed,
    WorkerLost,
)
"""Errors that concern one message; others concern the whole stage."""

_AT_ONCE: Final = 256  # letters that are written together
_SOON: Final = 0.05  # seconds: letters at longer intervals are written immediately
_RATE: Final = 10.0  # letters logged per second, in the long run
_BURST: Final = 100.0  # letters logged at once
_CAUSES: Final = 1000  # causes that are counted separately


class DeadLetterPolicy:
    """
    Decides about the messages that one stage can't process, and books them.

    Args:
        account: The stage's account.
        policy: What to do with such messages.
        config: The stage, as plain JSON.
        letters: Where to keep dead letters; None: the first such message ends the run.
        judged_of: The least number of messages of which the budget's share is taken.

    """

    def __init__(
        self,
        account: Account,
        policy: ErrorPolicy,
        config: Mapping[str, Any],
        letters: DeadLetters | None,
        *,
        judged_of: int = 0,
    ) -> None:
        self._account = account
        self._config = config
        self._strict = policy.then == "fail"
        self._letters = None if self._strict else letters
        self._budget = policy.budget
        self._judged_of = judged_of
        self._held: list[DeadLetter] = []
        self._last: Exception | None = None  # the error of the last letter
        self._kept_at = -math.inf
        self._throttle = Throttle(rate=_RATE, burst=_BURST)
        self._unlogged = 0
        self._causes: Counter[tuple[str, str]] = Counter()

    @property
    def keeps(self) -> bool:
        """Whether messages are dead-lettered rather than ending the run."""
        return self._letters is not None

    async def settle(self, error: Exception, messages: Run, *, place: int) -> None:
        """Like :meth:`hold`, but return only once the messages are dead-lettered."""
        await self.hold(error, messages, place=place)
        await self.flush()

    async def hold(self, error: Exception, messages: Run, *, place: int) -> None:
        """
        Dead-letter messages, possibly a moment later; raise if that ends the run.

        Letters are written in groups if many come at once, so :meth:`flush` must be
        called before anything that relies on them.

        Args:
            error: Why they can't be processed.
            messages: Consecutive messages.
            place: Place of the first one in the stage's input.

        Raises:
            Exception: ``error`` itself, if it is not about these messages alone, or
                nothing is dead-lettered.
            StageError: If there were too many, or they can't be written.

        """
        self._held += await self._letters_of(error, messages, place)
        if self._ripe or anyio.current_time() - self._kept_at >= _SOON:
            await self.flush()

    async def keep(
        self, error: Exception, messages: Run, *, place: int
    ) -> Sequence[DeadLetter]:
        """
        Dead-letter messages now, to be booked by :meth:`count` when it is their turn.

        Returns the letters; takes the same arguments as :meth:`hold`, and raises the
        same errors, except that the budget is checked by :meth:`count`.
        """
        made = await self._letters_of(error, messages, place)
        await self._write(made)
        return made

    async def _letters_of(
        self, error: Exception, messages: Run, place: int
    ) -> list[DeadLetter]:
        letters = self._letters
        ends_run = isinstance(error, ContractBroken) and error.ends_run
        if letters is None or ends_run or not isinstance(error, OF_A_MESSAGE):
            await self.flush()
            self._fail(error, len(messages))
            # All messages share the error that ends a stage: keep the first place.
            if isinstance(error, EtlstageError) and error.place is None:
                error.place = place
                if isinstance(error, OF_A_MESSAGE):
                    error.story = (self._why(error, place), *error.story)
            raise error
        came = letter_time()
        return [
            self._letter(letters, error, message, number, came)
            for number, message in enumerate(messages, place)
        ]

    def _why(self, error: EtlstageError, place: int) -> str:
        """Return why a message ends the run, with its number if the error lacks it."""
        number = f"message {place + 1}"
        which = "the message" if f"{number} " in str(error) else number
        why = "no dead letters are kept"
        if isinstance(error, ContractBroken) and error.ends_run:
            why = "on_mismatch is fail"
        elif self._strict:
            why = "on_error.then is fail"
        return f"{which} of stage {self._account.stage} ended the run: {why}"

    async def hold_refused(self, answer: Outcome, before: int = 0) -> None:
        """
        Dead-letter the messages of an outcome that their worker refused.

        Like :meth:`hold`, it raises as soon as a message ends the run.

        Args:
            answer: The outcome of the messages.
            before: Number of the stage's messages before those of the submission.

        """
        letters = self._letters
        if not answer.refused:
            return
        assert letters, "a refusal that ends the run has to be held by itself"
        came, start, messages = letter_time(), before + answer.start, answer.messages
        for number, error in answer.refused:
            place, message = start + number, messages[number]
            self._held.append(self._letter(letters, error, message, place, came))
            if self._ripe:
                await self.flush()
        if anyio.current_time() - self._kept_at >= _SOON:
            await self.flush()

    def _letter(
        self,
        letters: DeadLetters,
        error: Exception,
        message: bytes,
        place: int,
        came: str,
    ) -> DeadLetter:
        # Hold one object per letter, without its error, to spare the garbage collector.
        stage, config, self._last = self._account.stage, self._config, error
        return letters.letter(stage, place, message, error, config=config, time=came)

    @property
    def _ripe(self) -> bool:
        """Whether enough letters are held to write them, or too many for the budget."""
        held = len(self._held)
        return held >= _AT_ONCE or not allows(
            self._budget, self._account, held, self._judged_of
        )

    async def flush(self) -> None:
        """Write and book held letters; raise like :meth:`hold` if that ends the run."""
        held, self._held = self._held, []
        if held:
            # They are held no longer: a write that is cancelled would lose them.
            with anyio.CancelScope(shield=True):
                await self._write(held)
            self.count(held)

    async def _write(self, made: Sequence[DeadLetter]) -> None:
        assert self._letters is not None, "it has made these letters"
        try:
            await self._letters.keep(made)
        except StageError:
            lost = sum(letter.kind == WorkerLost.__name__ for letter in made)
            self._account.failed += len(made) - lost
            raise
        self._kept_at = anyio.current_time()

    def count(self, held: Sequence[DeadLetter]) -> None:
        """Book letters that are written; raises StageError if there are too many."""
        letters, account = self._letters, self._account
        assert letters is not None, "they are written"
        account.dead += len(held)
        # The host's log destination may be gone; the letters are kept anyway.
        with suppress(Exception):
            self._log(held)
        try:
            check_budget(
                account,
                self._budget,
                last=str(self._last),
                look=letters.look,
                judged_of=self._judged_of,
            )
        except StageError as over:
            raise over from self._last

    def _log(self, letters: Sequence[DeadLetter]) -> None:
        for letter in letters:
            cause = letter.kind, folded(letter.error)
            if cause not in self._causes and len(self._causes) >= _CAUSES:
                cause = "", OTHERS
            self._causes[cause] += 1
            count = self._causes[cause]
            if not _is_news(count):
                continue
            if not self._throttle.allows(0, self._kept_at):
                self._unlogged += 1
                continue
            unlogged, self._unlogged = self._unlogged, 0
            _log.warning(
                "message dead-lettered",
                stage=letter.stage,
                message=letter.place + 1,
                id=letter.id,
                # The letter's text, as that of the error itself may hold a secret.
                error=first_clause(letter.error) or letter.kind,
                **({"of_this_cause": count} if count > 1 else {}),
                **({"not_logged_before": unlogged} if unlogged else {}),
            )

    def _fail(self, error: Exception, count: int) -> None:
        # Messages not counted here are booked as unprocessed at the end of the run.
        if isinstance(error, OF_A_MESSAGE) and not isinstance(error, WorkerLost):
            self._account.failed += count


def _is_news(count: int) -> bool:
    """Return whether to log a cause's letter with this count: a power of ten."""
    return str(count).strip("0") == "1"


def allows(budget: ErrorBudget, account: Account, more: int, judged_of: int) -> bool:
    """Return whether ``more`` further messages may be dead-lettered."""
    return budget.allows(account.dead + more, max(account.received, judged_of))


def check_budget(
    account: Account,
    budget: ErrorBudget,
    *,
    last: str,
    look: str | None = None,
    judged_of: int = 0,
) -> None:
    """
    Assert that a stage has dead-lettered no more messages than its budget allows.

    Args:
        account: The stage's account.
        budget: How many messages may be dead-lettered.
        last: Why the last of them could not be processed.
        look: The command that shows the letters; None: they are not kept.
        judged_of: The least number of messages of which the budget's share is taken.

    Raises:
        StageError: If there are more.

    """
    if allows(budget, account, 0, judged_of):
        return
    kept = f"; they are kept, see {look}" if look is not None else ""
    raise StageError(
        f"stage {account.stage}: {account.dead:,} of"
        f" {counted(account.received, 'message')} could not be processed, on_error.budget allows {budget}; the last one: {last}"
        f"{kept}",
        stage=account.stage,
    )


_PLAIN: Final = (str, int, float, bool, type(None))


def letter_time() -> str:
    """Return the current time in the format of dead letters."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def config_of(stage: Stage) -> dict[str, Any]:
    """Return a stage as plain JSON, without the values of its environment."""
    plain: dict[str, Any] = _plain(stage)
    plain["worker"]["env"] = sorted(stage.program.env)
    return plain


def _plain(value: Any) -> Any:  # noqa: ANN401 - whatever a stage holds
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Dialect):
        return value.plain()
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return value
