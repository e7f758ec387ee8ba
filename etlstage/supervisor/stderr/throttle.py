"""
Which lines of a talkative worker are passed on, and which are only counted.

A token bucket that, once it is empty, stays closed until it holds something to speak
of: a flood comes through as a block of lines a second, each block behind a count of
what is missing, not as single lines out of context.
"""

from __future__ import annotations

from typing import Final

__all__ = ("Throttle",)

_BYTES: Final = 1024  # that cost as much as a line
_CLOSED: Final = 1.0  # seconds for which it stays closed, at least


class Throttle:
    """
    Decides about one line after the other.

    Args:
        rate: Lines a second that pass in the long run; a line of several KiB counts
            once per KiB.
        burst: Lines that pass at once after a time of silence.

    Raises:
        ValueError: If one of them is not positive.

    """

    def __init__(self, *, rate: float, burst: float) -> None:
        if rate <= 0 or burst < 1:
            raise ValueError(
                f"rate must be positive and burst 1 or more, got {rate} and {burst}"
            )
        self._rate = rate
        self._burst = burst
        self._tokens = float(burst)
        self._reopen = min(burst, max(1.0, rate * _CLOSED))
        self._closed = False
        self._at: float | None = None

    def allows(self, size: int, now: float) -> bool:
        """
        Return whether a line may pass, and count it if so.

        Args:
            size: Its length, in bytes.
            now: The time, in seconds.

        """
        self._refill(now)
        if self._closed and self._tokens < self._reopen:
            return False
        # What costs more than there ever is passes when the bucket is full.
        cost = min(self._burst, max(1.0, size / _BYTES))
        self._closed = self._tokens < cost
        if self._closed:
            return False
        self._tokens -= cost
        return True

    def _refill(self, now: float) -> None:
        if self._at is not None and now > self._at:
            self._tokens = min(
                self._burst, self._tokens + (now - self._at) * self._rate
            )
        self._at = now if self._at is None else max(now, self._at)
