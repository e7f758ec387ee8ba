"""
What becomes of a message that a stage can't process.

The stage has retried it as often as it may; here it is dead-lettered, or ends the run.
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
    MessageRefused,
    RemoteProtocolError,
    SinkFailed,
    StageError,
    WorkerLost,
)
from etlstage.messages import Run
from etlstage.pipeline.dead_letter.record import first_clause
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.protocol.base import Dialect
from etlstage.stage import ErrorPolicy, Stage

__all__ = ("Refusals", "config_of", "letter_time", "over_budget")

_log = structlog.get_logger("etlstage")

OF_A_MESSAGE: Final = (MessageRefused, RemoteProtocolError, SinkFailed, WorkerLost)
"""Errors that say something of their message; others say it of the whole stage."""


class Refusals:
    """
    Keeps the account of what one stage can't process.

    Args:
        stage: Its name.
        policy: What is to become of such messages.
        config: The stage, as plain JSON.
        letters: Where they are dead-lettered; None: the first one ends the run.
        judged_of: Messages of which the budget's share is taken, at least.

    """

    def __init__(
        self,
        stage: str,
        policy: ErrorPolicy,
        config: Mapping[str, Any],
        letters: DeadLetters | None,
        *,
        judged_of: int = 0,
    ) -> None:
        self.dead = 0
        """Messages dead-lettered."""
        self.failed = 0
        """Messages refused, and not dead-lettered."""
        self._stage = stage
        self._policy = policy
        self._config = config
        self._letters = letters
        self._judged_of = judged_of

    @property
    def put_aside(self) -> bool:
        """Whether messages are dead-lettered at all."""
        return self._letters is not None and self._policy.then == "dead_letter"

    async def settle(
        self, error: Exception, messages: Run, *, place: int, received: int
    ) -> None:
        """
        Put messages aside; raise when that ends the run.

        Args:
            error: Why they can't be processed.
            messages: The messages, consecutive ones.
            place: Of the first in the stage's input.
            received: Messages that the stage has taken in so far.

        Raises:
            Exception: ``error`` itself, if it is not about these messages alone, or
                nothing is to be dead-lettered.
            StageError: If there were too many, or they can't be written.

        """
        aside = self._letters if self.put_aside else None
        if aside is None or not isinstance(error, OF_A_MESSAGE):
            self._book(error, len(messages))
            raise error
        for number, message in enumerate(messages):
            try:
                letter = await aside.put(
                    self._stage,
                    place + number,
                    message,
                    error,
                    config=self._config,
                    time=letter_time(),
                )
            except StageError:
                self._book(error, len(messages) - number)
                raise
            self.dead += 1
            # Where the host logs to may be gone; the letter is kept all the same.
            with suppress(Exception):
                _log.warning(
                    "message dead-lettered",
                    stage=self._stage,
                    place=letter.place,
                    id=letter.id,
                    # Of the letter: what the error itself says may hold a secret.
                    error=first_clause(letter.error) or letter.kind,
                )
        known = max(received, self._judged_of)
        if not self._policy.budget.allows(self.dead, known):
            raise over_budget(
                self._stage, self._policy, self.dead, received, str(error), aside
            ) from error

    def _book(self, error: Exception, count: int) -> None:
        # What has no other outcome at the end of a run is lost: it is not counted here.
        if isinstance(error, OF_A_MESSAGE) and not isinstance(error, WorkerLost):
            self.failed += count


def over_budget(
    stage: str,
    policy: ErrorPolicy,
    dead: int,
    received: int,
    last: str,
    letters: DeadLetters,
) -> StageError:
    """
    Return the error of a stage that could not process too many messages.

    Args:
        stage: Its name.
        policy: Whose budget it is.
        dead: Messages dead-lettered.
        received: Messages taken in.
        last: Why the last of them could not be processed.
        letters: Where they are.

    """
    return StageError(
        f"stage {stage}: {dead} of {received} messages could not be processed,"
        f" on_error.budget allows {policy.budget}; the last one: {last};"
        f" they are kept, see {letters.look}",
        stage=stage,
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
