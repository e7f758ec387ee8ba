"""
Where events go: for people on a terminal, as JSON lines everywhere else.

The library only emits events; what becomes of them is decided here, once, for the
process. On a terminal they share a console with the progress display, so that
neither tears the other.
"""

from __future__ import annotations

import json
import logging
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, cast

from rich.text import Text

from etlstage.cli.failure import REST, SHOWN_LINES
from etlstage.cli.options import Verbosity
from etlstage.cli.screen import Screen
from etlstage.pipeline.secret import Secrets
from etlstage.telemetry.log import NAME
from etlstage.telemetry.terminal import harmless

__all__ = ("configure", "silence")

STYLES: Final = {
    "debug": "dim",
    "info": "green",
    "warning": "yellow",
    "error": "bold red",
}

WORKER_LINE: Final = "worker wrote to stderr"
RESTARTED: Final = "worker is restarted"
EXITED: Final = "worker exited"


def configure(
    screen: Screen, verbosity: Verbosity, *, secrets: Secrets | None = None
) -> None:
    """
    Set up logging for this process.

    Args:
        screen: Stderr, where the progress display may be, too.
        verbosity: How much is logged, and how.
        secrets: What is not to be shown.

    """
    logger = logging.getLogger(NAME)
    logger.handlers[:] = [_LogHandler(screen, verbosity, secrets or Secrets())]
    logger.setLevel(verbosity.threshold)
    logger.propagate = logger.disabled = False
    # What libraries log is printed as if nothing were set up, but for Py4J's tracebacks
    # of calls that also raise: it would set up logging itself, to show them.
    if logging.lastResort is not None and not verbosity.debug:
        logging.lastResort.addFilter(_is_for_us)
        logging.getLogger().addHandler(logging.lastResort)


def silence() -> None:
    """Log nothing: the findings of a command show what its workers did."""
    logging.getLogger(NAME).disabled = True


class _LogHandler(logging.Handler):
    """Prints events: above the progress display, or as JSON."""

    def __init__(self, screen: Screen, verbosity: Verbosity, secrets: Secrets) -> None:
        super().__init__()
        self._screen, self._secrets = screen, secrets
        self._debug = verbosity.debug
        self._people = verbosity.for_people(screen)

    def emit(self, record: logging.LogRecord) -> None:
        """Print an event, without secrets."""
        event: dict[str, object] = getattr(record, NAME)
        if not self._debug and _is_step(event):
            return
        event = dict(cast("dict[str, object]", self._secrets.concealed(event)))
        level = record.levelname.lower()
        time = datetime.fromtimestamp(record.created, UTC)
        if self._people:
            line = self._line(f"{time.astimezone():%H:%M:%S}", level, event)
            self._screen.print(line, soft_wrap=True)
        else:
            when = time.isoformat(timespec="microseconds").replace("+00:00", "Z")
            event |= {"level": level, "timestamp": when}
            # A full disk ends a log, not a run.
            with suppress(OSError):
                sys.stderr.write(json.dumps(event, default=str) + "\n")
                sys.stderr.flush()

    def _line(self, time: str, level: str, event: dict[str, object]) -> Text:
        line = Text.assemble((f"{time} ", "dim"))
        words = str(event.pop("event"))
        if words == WORKER_LINE:
            worker = event.get("worker", event.get("stage", "worker"))
            line.append(f"{harmless(str(worker))} ({event.get('pid')}) ", "cyan")
            line.append(harmless(str(event.get("line", "")), lines=True))
            return self._fitted(line, None)
        line.append(f"{level} ", STYLES.get(level, ""))
        line.append(harmless(words))
        for key, value in event.items():
            line.append(f" {key}=", "dim")
            line.append(harmless(str(value)))
        return self._fitted(line, SHOWN_LINES)

    def _fitted(self, line: Text, limit: int | None) -> Text:
        """Return a line in as many as a terminal needs for it, broken at words."""
        if self._debug or not self._screen.watched:
            return line
        lines = list(line.wrap(self._screen, self._screen.width))
        if limit is not None and len(lines) > limit:
            del lines[limit:]
            lines[-1].truncate(self._screen.width - len(REST))
            lines[-1].append(REST, "dim")
        return Text("\n").join(lines)


def _is_step(event: dict[str, object]) -> bool:
    """
    Return whether the outcome of a message will tell an event.

    A worker that died of its message is started again, and the message tried again:
    in the end it is answered, or an event or the run's error says why not.
    """
    words = event.get("event")
    return words == RESTARTED or (words == EXITED and bool(event.get("held")))


def _is_for_us(record: logging.LogRecord) -> bool:
    """Return whether no other handler has a record, and Py4J has not logged it."""
    logger = logging.getLogger(record.name)
    while logger.parent is not None:
        if logger.handlers:
            return False
        logger = logger.parent
    return Path(record.pathname).parent.name != "py4j"
