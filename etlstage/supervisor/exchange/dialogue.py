"""
An exchange that its caller keeps open: both sides speak when they like.

What the caller says waits here until the connection has room for it, and what the
worker says until the caller takes it; both are bounded, and then the other side waits.
"""

from __future__ import annotations

from collections.abc import Callable

from etlstage.messages import cost_of
from etlstage.supervisor.exchange.round import Round

__all__ = ("Dialogue",)


class Dialogue(Round):
    """
    One exchange of a caller and a worker; it counts as one message.

    Args:
        on_change: Called when something has come, or was taken, and at the end.
        event: What the worker is asked for; empty: as the stage says.
        max_waiting: Bytes that may wait in either direction; when there are more,
            nothing is read, and the caller is to say no more.

    """

    def __init__(
        self, on_change: Callable[[], None], event: str, *, max_waiting: int
    ) -> None:
        super().__init__(on_change, b"", max_unread=max_waiting)
        self.event = event
        self.ended: bool = False
        """The caller has said all."""
        self.expired: bool = False
        """It took too long and was cancelled; its worker lives on."""
        self._input: list[bytes] = []
        self._cost = 0  # bytes of memory that these take
        self._taken = False
        self._end_taken = False

    @property
    def repeatable(self) -> bool:
        """Whether another worker may be asked: what was said once is gone."""
        return super().repeatable and not self._taken

    @property
    def full(self) -> bool:
        """Whether the caller is to wait before it says more."""
        return self._cost > self.max_unread and not self.over

    @property
    def over(self) -> bool:
        """Whether nobody hears what the caller says."""
        return self.finished or self.abandoned

    @property
    def has_input(self) -> bool:
        """Whether there is something for the worker."""
        return bool(self._input) or (self.ended and not self._end_taken)

    def write(self, chunk: bytes) -> None:
        """Add to what the worker is told; it is dropped if the worker has ended."""
        if not self.over:
            self._input.append(chunk)
            self._cost += cost_of([chunk])

    def end(self) -> None:
        """Say no more."""
        self.ended = True

    def take_input(self) -> tuple[list[bytes], bool]:
        """Return, once, what the worker is told, and whether that was all."""
        chunks, self._input, self._cost = self._input, [], 0
        self._taken, self._end_taken = True, self.ended
        self._on_outcome()
        return chunks, self.ended

    def abandon(self) -> None:
        """Drop all that waits, and wake who waits for it."""
        super().abandon()
        self._input, self._cost = [], 0
        self._on_outcome()
