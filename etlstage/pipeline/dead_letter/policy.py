"""
What becomes of a message that a stage can't process.

The stage has retried it as often as it may; here it is dead-lettered, or ends the run.
The one place that judges an error budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any, Final

import structlog

from etlstage.errors import (
    EtlstageError,
    MessageRefused,
    RefusedByWorker,
    RemoteProtocolError,
    SinkFailed,
    StageError,
    WorkerLost,
)
from etlstage.messages import Run
from etlstage.pipeline.dead_letter.record import first_clause
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.ledger import Account
from etlstage.protocol.base import Dialect
from etlstage.stage import ErrorBudget, ErrorPolicy, Stage

__all__ = ("DeadLetterPolicy", "check_budget", "config_of", "letter_time")

_log = structlog.get_logger("etlstage")

OF_A_MESSAGE: Final = (
    MessageRefused,
    RefusedByWorker,
    RemoteProtocolError,
    SinkFailed,
    WorkerLost,
)
"""Errors that say something of their message; others say it of the whole stage."""


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

    @property
    def keeps(self) -> bool:
        """Whether messages are dead-lettered at all."""
        return self._letters is not None

    async def settle(self, error: Exception, messages: Run, *, place: int) -> None:
        """
        Dead-letter messages; raise when that ends the run.

        Args:
            error: Why they can't be processed.
            messages: The messages, consecutive ones.
            place: Of the first in the stage's input.

        Raises:
            Exception: ``error`` itself, if it is not about these messages alone, or
                nothing is to be dead-lettered.
            StageError: If there were too many, or they can't be written.

        """
        letters = self._letters
        if letters is None or not isinstance(error, OF_A_MESSAGE):
            self._fail(error, len(messages))
            # What ends a stage is one error for all of its messages: the first counts.
            if isinstance(error, EtlstageError) and error.place is None:
                error.place = place
            raise error
        for number, message in enumerate(messages):
            try:
                letter = await letters.put(
                    self._account.stage,
                    place + number,
                    message,
                    error,
                    config=self._config,
                    time=letter_time(),
                )
            except StageError:
                self._fail(error, len(messages) - number)
                raise
            self._account.dead += 1
            # Where the host logs to may be gone; the letter is kept all the same.
            with suppress(Exception):
                _log.warning(
                    "message dead-lettered",
                    stage=letter.stage,
                    place=letter.place,
                    id=letter.id,
                    # Of the letter: what the error itself says may hold a secret.
                    error=first_clause(letter.error) or letter.kind,
                )
        try:
            check_budget(
                self._account,
                self._budget,
                last=str(error),
                look=letters.look,
                judged_of=self._judged_of,
            )
        except StageError as over:
            raise over from error

    def _fail(self, error: Exception, count: int) -> None:
        # What has no other outcome at the end of a run is lost: it is not counted here.
        if isinstance(error, OF_A_MESSAGE) and not isinstance(error, WorkerLost):
            self._account.failed += count


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
    if budget.allows(account.dead, max(account.received, judged_of)):
        return
    kept = f"; they are kept, see {look}" if look is not None else ""
    raise StageError(
        f"stage {account.stage}: {account.dead} of {account.received} messages could"
        f" not be processed, on_error.budget allows {budget}; the last one: {last}"
        f"{kept}",
        stage=account.stage,
    )


def letter_time() -> datetime:
    """Return now, as dead letters have it."""
    return datetime.now(UTC)


def config_of(stage: Stage) -> dict[str, Any]:
    """Return a stage as plain JSON, without the values of its environment."""
    return {**_plain(stage), "env": sorted(stage.env)}


def _plain(value: Any) -> Any:  # noqa: ANN401 - whatever a stage holds
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
