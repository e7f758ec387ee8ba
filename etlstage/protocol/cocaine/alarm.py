"""What is due on one connection, and when; ``session.py`` says what of."""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

__all__ = ("Alarm", "Alarms", "Deadlines")


# Python's and Go's leave when a heartbeat of theirs has no answer for 5 s.
_UNHEARD: Final = 2.0  # seconds


class Deadlines(NamedTuple):
    """How long things may take, in seconds; None: for ever."""

    handshake: float | None = None
    """From the connection to the handshake."""
    heartbeat: float | None = 30.0
    """From one heartbeat of the worker, or anything else that it says, to the next."""
    seal: float = 3.0
    """For open sessions to end, when one side is about to go."""
    terminate: float = 5.0
    """For a worker that said terminate to close the connection."""
    beat: float = 10.0
    """The worker's: from one heartbeat to the next."""
    disown: float = 60.0
    """The worker's: from a heartbeat to the answer."""


class Alarm(Enum):
    """What may be due."""

    # An alarm is set with each read, and that of Enum is Python code.
    if not TYPE_CHECKING:
        __hash__ = object.__hash__

    HANDSHAKE = "it did not say who it is"
    HEARTBEAT = "there was no heartbeat"
    UNHEARD = "nobody reads what it says"
    """It is told that we live: it may beat, and get no answer."""
    SEAL = "its sessions did not end"
    """We say terminate to it all the same."""
    DRAIN = "it said that it terminates, and did not end its sessions"
    TERMINATE = "it said that it terminates, and did not"
    BEGIN = "there is a worker"
    """Its clock begins."""
    BEAT = "the worker has to beat"
    DISOWN = "the supervisor answered no heartbeat"


class Alarms:
    """
    Deadlines by what they are of.

    Args:
        deadlines: How long things may take.

    """

    def __init__(self, deadlines: Deadlines) -> None:
        self._seconds: Final[dict[Alarm, float | None]] = {
            Alarm.HANDSHAKE: deadlines.handshake,
            Alarm.HEARTBEAT: deadlines.heartbeat,
            Alarm.UNHEARD: _UNHEARD,
            Alarm.SEAL: deadlines.seal,
            Alarm.DRAIN: deadlines.seal,
            Alarm.TERMINATE: deadlines.terminate,
            Alarm.BEAT: deadlines.beat,
            Alarm.DISOWN: deadlines.disown,
        }
        self._due: dict[Alarm, float] = {}
        self._now: float | None = None

    def tick(self, now: float) -> bool:
        """Take note of the time; return whether it is the first time that was told."""
        first, self._now = self._now is None, now
        return first

    def begin(self) -> None:
        """Ring as soon as the time is told."""
        self._due[Alarm.BEGIN] = -math.inf

    def set(self, alarm: Alarm) -> None:
        """Begin to wait, or begin anew."""
        seconds = self._seconds[alarm]
        if seconds is not None:
            assert self._now is not None, "what is waited for came at some time"
            self._due[alarm] = self._now + seconds

    def cancel(self, alarm: Alarm) -> bool:
        """Wait for it no more; return whether it was waited for."""
        return self._due.pop(alarm, None) is not None

    def clear(self) -> None:
        """Wait for nothing more."""
        self._due.clear()

    def waits(self, alarm: Alarm) -> bool:
        """Return whether it is waited for."""
        return alarm in self._due

    def next(self) -> float | None:
        """Return when something is due, in seconds, or None."""
        # The clock begins when somebody tells the time.
        return -math.inf if self._now is None else min(self._due.values(), default=None)

    def rung(self) -> list[Alarm]:
        """Return, once, what is due."""
        assert self._now is not None, "the time was told"
        rung = [alarm for alarm, due in self._due.items() if due <= self._now]
        for alarm in rung:
            del self._due[alarm]
        return rung

    def missed(self, alarm: Alarm) -> str:
        """Say what was missed."""
        return f"{alarm.value} within {self._seconds[alarm]:g} s"
