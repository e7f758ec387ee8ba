"""
What a worker is given that is asked for nothing: it writes until it exits.

Its only exchange is a round of extraction, which ends with the process.
"""

from __future__ import annotations

from collections.abc import Sequence

from etlstage.messages import Run
from etlstage.protocol.events import Event
from etlstage.supervisor.exchange.dispatch import Dispatcher
from etlstage.supervisor.exchange.exchange import Exchange

__all__ = ("StreamDispatcher",)


class StreamDispatcher(Dispatcher):
    """Has a worker run, for a round; see :class:`Dispatcher`."""

    _streams = True

    @property
    def held(self) -> int:
        """None: nothing was given to it."""
        return 0

    @property
    def stalled(self) -> bool:
        """Whether no more is to be read: before a round begins, it is nobody's."""
        return not self._held or super().stalled

    def passed(self, outputs: Run) -> None:
        """Pass on outputs; those of a worker that exits before its round are dropped."""
        if self._held:
            super().passed(outputs)

    def next(self, now: float, _owed: int, room: float) -> Sequence[Event] | None:
        """Return nothing to send when a round has begun, None if there is none."""
        return None if self._held else super().next(now, 0, room)

    def _begin(self, exchange: Exchange) -> Sequence[Event]:
        super()._begin(exchange)
        self.sated = False  # who reads has waited for the round, and is to look again
        return ()
