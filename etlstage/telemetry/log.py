"""
Where events are logged: with structlog if the host has set it up, else with logging.

Structlog that is not configured prints on stdout, which is the host's: its program may
print there what another reads.
"""

from __future__ import annotations

import logging
import sys
from typing import Final

__all__ = ("NAME", "Log")

NAME: Final = "etlstage"
"""The name of the logger, in both."""


class Log:
    """
    A logger that decides at each event where it goes.

    With ``logging``, an event is one line: its words, then its values as ``key=value``.
    As a mapping, values and words (as ``event``) are the record's attribute ``etlstage``.

    Args:
        values: What all its events have.

    """

    def __init__(self, **values: object) -> None:
        self._values = values

    def bind(self, **values: object) -> Log:
        """Return a logger whose events have these values, too."""
        return Log(**(self._values | values))

    def debug(self, event: str, **values: object) -> None:
        """Log what helps to find a fault."""
        self._log(logging.DEBUG, event, values)

    def info(self, event: str, **values: object) -> None:
        """Log what is as it should be."""
        self._log(logging.INFO, event, values)

    def warning(self, event: str, **values: object) -> None:
        """Log what somebody may have to look at."""
        self._log(logging.WARNING, event, values)

    def error(self, event: str, **values: object) -> None:
        """Log what somebody has to look at."""
        self._log(logging.ERROR, event, values)

    def _log(self, level: int, event: str, values: dict[str, object]) -> None:
        values = self._values | values
        # A host that has set it up has imported it; who has not does not pay for that.
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
