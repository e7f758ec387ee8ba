"""Signs of life, for a supervisor that wants them."""

from __future__ import annotations

import os

__all__ = ("StatusPipe",)


class StatusPipe:
    """
    The file that ``ETLSTAGE_STATUS`` names, if it does.

    Attributes:
        every: How often to give a sign, in seconds; 0.0: once, at the start.

    """

    def __init__(self) -> None:
        self._fd = -1
        self.every: float = 0.0
        path = os.environ.get("ETLSTAGE_STATUS")
        if path:
            self._fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            # One may be late of three that are given in the time that is allowed.
            self.every = float(os.environ.get("ETLSTAGE_HEARTBEAT") or 0) / 3

    def show(self) -> None:
        """Send a heartbeat."""
        if self._fd != -1:
            # Who does not listen is not told.
            try:
                os.write(self._fd, b"\n")
            except OSError:
                self._fd = -1

    def fall_silent(self) -> None:
        """Give no more signs."""
        self._fd = -1
