"""
What workers commit: positions, stored by who embeds the supervisor.

A worker may ask, in the middle of its work, to have stored how far it has come in the
share of the input that it was started for. It is answered when that is done, or could
not be. The next start of it goes on behind what was stored last.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeAlias

import anyio

from etlstage.protocol.events import Assignment
from etlstage.stage.stage import Stage
from etlstage.telemetry.log import Log

__all__ = ("CommitRequest", "Commits", "StoreCommit")

_log = Log()


class CommitRequest(NamedTuple):
    """A position that a worker asks to have stored."""

    worker: str
    """Its name, such as ``load-1``."""
    assignment: Assignment | None
    """The share of the input that it was started for, with what was stored before."""
    exchange: int
    """Number of the exchange, in the life of the worker, that was opened last."""
    position: object
    """As its dialect has positions; plain JSON."""


StoreCommit: TypeAlias = Callable[[CommitRequest], Awaitable[None]]
"""Stores a position, durably; what it raises is answered to the worker by its text."""


class Commits:
    """
    Has positions stored, and knows where the next start goes on.

    Args:
        stage: Of the workers.
        store: Stores a position; None: nobody does.
        assignment: The share of the input that the worker has; None: all that comes.

    Attributes:
        assignment: The same, with the position that was stored last.

    """

    def __init__(
        self,
        stage: Stage,
        store: StoreCommit | None = None,
        assignment: Assignment | None = None,
    ) -> None:
        self.assignment: Assignment | None = assignment
        self._stage = stage
        self._store = store

    async def store(
        self,
        worker: str,
        exchange: int,
        position: object,
        answer: Callable[[str | None], None],
    ) -> None:
        """
        Store a position, then call ``answer``, with the error if it failed.

        Args:
            worker: Who asks.
            exchange: Number of the one that was opened last.
            position: Plain JSON.
            answer: What to do then.

        """
        if self._store is None:
            answer(f"no checkpoint store configured for stage {self._stage.name}")
            return
        share, limit = self.assignment, self._stage.timeout.commit
        error: str | None = None
        try:
            with anyio.fail_after(limit):
                await self._store(CommitRequest(worker, share, exchange, position))
        except TimeoutError:
            error = f"not stored within timeout.commit ({limit:g} s)"
        except Exception as failure:
            error = str(failure) or type(failure).__name__
        if error is not None:
            _log.warning(
                "position not stored",
                stage=self._stage.name,
                worker=worker,
                position=position,
                error=error,
            )
        elif share is not None:
            self.assignment = share._replace(position=position)
        answer(error)
