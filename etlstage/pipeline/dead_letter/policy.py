"""
What becomes of a message that a stage can't process.

The stage has retried it as often as it may; here it is dead-lettered, or ends the run.
The one place that judges an error budget.
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

_AT_ONCE: Final = 256  # letters
_SOON: Final = 0.05  # seconds: what comes more slowly is written at once
_RATE: Final = 10.0  # letters a second that are logged in the long run
_BURST: Final = 100.0  # letters that are logged at once
_CAUSES: Final = 1000  # that are counted apart


class DeadLetterPolicy:
    """
    Decides about the messages that one stage can't process, and books them.

    Args:
        account: Of the stage.
        policy: What is to become of such messages.
        config: The stage, as plain JSON.
        letters: Where they are kept; None: the first one ends the run.
        judged_of: Messages of which the budget's share is taken, at least.

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
        self._letters = letters if policy.then == "dead_letter" else None
        self._budget = policy.budget
        self._judged_of = judged_of
        self._held: list[DeadLetter] = []
        self._last: Exception | None = None  # why the last of them is one
        self._kept_at = -math.inf
        self._throttle = Throttle(rate=_RATE, burst=_BURST)
        self._unlogged = 0
        self._causes: Counter[tuple[str, str]] = Counter()

    @property
    def keeps(self) -> bool:
        """Whether messages are dead-lettered at all."""
        return self._letters is not None

    async def settle(self, error: Exception, messages: Run, *, place: int) -> None:
        """Do as :meth:`hold`, and wait until the messages are dead-lettered."""
        await self.hold(error, messages, place=place)
        await self.flush()

    async def hold(self, error: Exception, messages: Run, *, place: int) -> None:
        """
        Dead-letter messages, in a moment; raise when that ends the run.

        Where many come at once, they are written some at a time: :meth:`flush` must
        come before anything that counts on them.

        Args:
            error: Why they can't be processed.
            messages: The messages, consecutive ones.
            place: Of the first in the stage's input.

        Raises:
            Exception: ``error`` itself, if it is not about these messages alone, or
                nothing is to be dead-lettered.
            StageError: If there were too many, or they can't be written.

        """
        self._held += await self._letters_of(error, messages, place)
        if self._ripe or anyio.current_time() - self._kept_at >= _SOON:
            await self.flush()

    async def keep(
        self, error: Exception, messages: Run, *, place: int
    ) -> Sequence[DeadLetter]:
        """
        Dead-letter messages ahead of their turn, in which :meth:`count` books them.

        Returns the letters; takes and raises what :meth:`hold` does.
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
            # What ends a stage is one error for all of its messages: the first counts.
            if isinstance(error, EtlstageError) and error.place is None:
                error.place = place
            raise error
        came = letter_time()
        return [
            self._letter(letters, error, message, number, came)
            for number, message in enumerate(messages, place)
        ]

    async def hold_refused(self, answer: Outcome, before: int = 0) -> None:
        """
        Do as :meth:`hold` with those of some messages that their worker refused.

        It stops where that ends the run.

        Args:
            answer: What became of the messages.
            before: Messages in front of the input in which they have their places.

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
        # One object for each, and not its error beside it: see Refusals.
        stage, config, self._last = self._account.stage, self._config, error
        return letters.letter(stage, place, message, error, config=config, time=came)

    @property
    def _ripe(self) -> bool:
        """Whether what is held is as much as is written at once, or ends the run."""
        held = len(self._held)
        return held >= _AT_ONCE or not allows(
            self._budget, self._account, held, self._judged_of
        )

    async def flush(self) -> None:
        """Dead-letter what is held; raise when that ends the run, as :meth:`hold`."""
        held, self._held = self._held, []
        if held:
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
        # Where the host logs to may be gone; the letters are kept all the same.
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
                # Of the letter: the error's own text may hold a secret.
                error=first_clause(letter.error) or letter.kind,
                **({"of_this_cause": count} if count > 1 else {}),
                **({"not_logged_before": unlogged} if unlogged else {}),
            )

    def _fail(self, error: Exception, count: int) -> None:
        # What has no other outcome at the end of a run is unprocessed: not counted here.
        if isinstance(error, OF_A_MESSAGE) and not isinstance(error, WorkerLost):
            self._account.failed += count


def _is_news(count: int) -> bool:
    """Return whether so many letters of one cause are to be logged: powers of ten."""
    return str(count).strip("0") == "1"


def allows(budget: ErrorBudget, account: Account, more: int, judged_of: int) -> bool:
    """Return whether so many more messages may be dead-lettered."""
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
    Do nothing, unless a stage could not process more messages than it may.

    Args:
        account: Of the stage.
        budget: How many it may.
        last: Why the last of them could not be processed.
        look: The command that shows them; None: they are not kept.
        judged_of: Messages of which the budget's share is taken, at least.

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
    """Return now, as dead letters have it."""
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
