"""
Whether a worker that is gone is started again, and when.

What counts is whether a start made progress. A worker that answered something before
it died, or that died of a message that it had read, is started again as often as it
takes: the first at once, the second with more patience the more often that message
has failed. One that dies of neither is given time, and not restarted when that happens
too often: the program itself is at fault.
"""

from __future__ import annotations

import math
from collections import deque

from etlstage.stage.policy import RestartPolicy

__all__ = ("Tally", "wait_time")


def wait_time(attempt: int, policy: RestartPolicy, *, jitter: float = 0.0) -> float:
    """
    Return the delay before a restart, in seconds.

    It is 0 for the first one, then ``delay``, ``2 * delay``, ``4 * delay``...

    Args:
        attempt: Restarts already tried since the worker last answered something.
        policy: Where ``delay`` and ``max_delay`` are.
        jitter: From 0 to 1: takes up to half of the delay away, so that workers
            which died together don't start together.

    Raises:
        ValueError: If ``attempt`` is negative.

    """
    if attempt < 0:
        raise ValueError(f"attempt must be zero or positive, got {attempt}")
    if attempt == 0:
        return 0.0
    # Cap the exponent: ldexp() overflows after about a thousand restarts.
    delay = min(policy.max_delay, math.ldexp(policy.delay, min(attempt - 1, 64)))
    return delay * (1 - jitter / 2)


class Tally:
    """
    Counts the restarts of one worker without progress.

    Args:
        policy: How many there may be.

    """

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._restarts: deque[float] = deque()

    def __len__(self) -> int:
        return len(self._restarts)

    def clear(self) -> None:
        """Start anew: the worker made progress."""
        self._restarts.clear()

    def span(self, now: float) -> float:
        """Return how long ago the oldest restart that counts was, in seconds."""
        return now - self._restarts[0] if self._restarts else 0.0

    def forgive(self, tries: int, *, jitter: float) -> float | None:
        """
        Start anew, and return the delay of the restart; None: there is to be none.

        Args:
            tries: How often the message that is to be tried next has failed.
            jitter: See :func:`wait_time`.

        """
        self._restarts.clear()
        if self._policy.max == 0:
            return None
        return wait_time(max(0, tries - 1), self._policy, jitter=jitter)

    def next_delay(self, now: float, *, useful: bool, jitter: float) -> float | None:
        """
        Count a restart and return its delay; None: there were too many already.

        Args:
            now: The time, in seconds.
            useful: Whether the start that has just ended made progress.
            jitter: See :func:`wait_time`.

        """
        restarts = self._restarts
        if useful:
            restarts.clear()
        while restarts and now - restarts[0] > self._policy.within:
            restarts.popleft()
        if len(restarts) >= self._policy.max:
            return None
        delay = wait_time(len(restarts), self._policy, jitter=jitter)
        restarts.append(now)
        return delay
