"""How much a command tells, and how."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from etlstage.cli.screen import Screen

__all__ = ("NORMAL", "Level", "LogFormat", "Verbosity")


class Level(Enum):
    """From what level on events are told."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"

    @property
    def number(self) -> int:
        """As ``logging`` has it."""
        number: int = getattr(logging, self.name)
        return number


class LogFormat(Enum):
    """How events are told."""

    CONSOLE = "console"
    """For people."""
    JSON = "json"
    """An object a line."""


@dataclass(frozen=True)
class Verbosity:
    """How much of a run is told, and how."""

    debug: bool = False
    """Everything: also each step on the way to a message's outcome, and tracebacks."""
    quiet: bool = False
    """Nothing but what is wrong."""
    level: Level = Level.INFO
    format: LogFormat | None = None
    """None: for people on a terminal, JSON everywhere else."""

    def for_people(self, screen: Screen) -> bool:
        """Whether what is told on ``screen`` is for people."""
        if self.format is None:
            return screen.watched
        return self.format is LogFormat.CONSOLE

    @property
    def threshold(self) -> int:
        """The level from which on events are told, as ``logging`` has it."""
        least = logging.WARNING if self.quiet else logging.DEBUG
        wanted = logging.DEBUG if self.debug else self.level.number
        return max(least, wanted)


NORMAL: Final = Verbosity()
