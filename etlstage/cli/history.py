"""
The rates of a run over time, from samples of its stages' counts.

Memory is bounded however long a run takes: when there are too many samples, every other
one is dropped, and from then on they are taken half as often.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final, NamedTuple

import anyio

from etlstage.pipeline.ledger import Ledger

__all__ = ("History", "RunSpan")

EVERY: Final = 0.25
MOST: Final = 240
"""Maximum number of samples, as a plot can show no more; if even, the last is kept."""


class RunSpan(NamedTuple):
    """The time between two samples, in seconds from the first."""

    start: float
    end: float
    rates: list[float]
    """Messages per second, of each stage."""


class History:
    """
    Samples a ledger.

    Args:
        ledger: The accounts.

    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._samples: list[tuple[float, list[int]]] = []
        self.every: float = EVERY
        """Seconds from one sample to the next, at present."""

    async def keep(self) -> None:
        """Take samples until cancelled."""
        try:
            while True:
                self.sample(anyio.current_time())
                await anyio.sleep(self.every)
        finally:
            self.sample(anyio.current_time())

    def sample(self, now: float) -> None:
        """Take a sample at the time ``now``, in seconds of any clock."""
        taken = now, [account.processed for account in self._ledger]
        samples = self._samples
        # Rates over a short moment are extreme, and the last sample may come any time.
        if len(samples) > 1 and now - samples[-1][0] < self.every / 2:
            samples[-1] = taken
            return
        samples.append(taken)
        if len(samples) > MOST:
            self._samples = samples[::2]
            self.every *= 2

    def spans(self) -> list[RunSpan]:
        """Return the rates between the samples."""
        begin = self._samples[0][0] if self._samples else 0.0
        return [
            RunSpan(
                start - begin,
                end - begin,
                [(b - a) / (end - start) for a, b in zip(before, after, strict=True)],
            )
            for (start, before), (end, after) in pairwise(self._samples)
            if end > start
        ]
