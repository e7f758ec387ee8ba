"""
Log events with structlog if the host has configured it, else with logging.

Unconfigured, structlog prints to stdout, which belongs to the host: another program may
read the host's output there.
"""

from __future__ import annotations

import logging
import sys
from typing import Final

__all__ = ("NAME", "Log")

NAME: Final = "etlstage"
"""Name of the logger in both libraries."""


class Log:
    """
    A logger that chooses between structlog and ``logging`` at each event.

    With ``logging``, an event is one line: its text, then its values as ``key=value``.
    The record's attribute ``etlstage`` is a mapping of the values, with the text as
    ``event``.

    Args:
        values: Values that all its events have.

    """

    def __init__(self, **values: object) -> None:
        self._values = values

    def bind(self, **values: object) -> Log:
        """Return a logger whose events also have these values."""
        return Log(**(self._values | values))

    def debug(self, event: str, **values: object) -> None:
        """Log a detail that helps to find a fault."""
        self._log(logging.DEBUG, event, values)

    def info(self, event: str, **values: object) -> None:
        """Log a normal event."""
        self._log(logging.INFO, event, values)

    def warning(self, event: str, **values: object) -> None:
        """Log an event that someone may have to look at."""
        self._log(logging.WARNING, event, values)

    def error(self, event: str, **values: object) -> None:
        """Log an event that someone has to look at."""
        self._log(logging.ERROR, event, values)

    def _log(self, level: int, event: str, values: dict[str, object]) -> None:
        values = self._values | values
        # A host that has configured structlog has imported it; others need not.
        structlog = sys.modules.get("structlog")
        if structlog is not None and structlog.is_configured():
            method = logging.getLevelName(level).lower()
            getattr(structlog.get_logger(NAME), method)(event, **values)
            return
        logger = logging.getLogger(NAME)
        if logger.isEnabledFor(level):
            words = [
                event,
                *(f"{key}={_shown(value)}" for key, value in values.items()),
            ]
            extra = {NAME: {**values, "event": event}}
            logger.log(level, "%s", " ".join(words), extra=extra, stacklevel=3)


def _shown(value: object) -> str:
    text = str(value)
    quoted = not text or not text.isprintable() or " " in text or '"' in text
    return repr(text) if quoted else text
