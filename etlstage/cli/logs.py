"""
Logging of events: for people on a terminal, as JSON lines everywhere else.

The library only emits events; where they go is decided here, once for the process. On a
terminal, events share a console with the progress display, so that neither garbles the
other.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import structlog
from rich.text import Text
from structlog.typing import EventDict, Processor, WrappedLogger

from etlstage.cli.failure import REST, SHOWN_LINES
from etlstage.cli.options import Verbosity
from etlstage.cli.screen import Screen
from etlstage.pipeline.secret import Secrets
from etlstage.telemetry.terminal import harmless

__all__ = ("configure",)

STYLES: Final = {
    "debug": "dim",
    "info": "green",
    "warning": "yellow",
    "error": "bold red",
    "critical": "bold red",
}

WORKER_LINE: Final = "worker wrote to stderr"
RESTARTED: Final = "worker is restarted"
EXITED: Final = "worker exited"


def configure(
    screen: Screen, verbosity: Verbosity, *, secrets: Secrets | None = None
) -> None:
    """
    Set up structlog for this process.

    Args:
        screen: Stderr, where the progress display may be, too.
        verbosity: How much is logged, and how.
        secrets: Texts that must not be shown.

    """
    debug = verbosity.debug
    people = verbosity.for_people(screen)
    common: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.format_exc_info,
        partial(_without_secrets, secrets or Secrets()),
        structlog.processors.add_log_level,
    ]
    if not debug:
        common.insert(0, _without_steps)
    if people:
        now = structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False)
        fitted = partial(_fitted, screen) if screen.watched and not debug else _as_is
        own: list[Processor] = [now, partial(_for_people, fitted)]
    else:
        now = structlog.processors.TimeStamper(fmt="iso", utc=True)
        own = [now, structlog.processors.JSONRenderer(default=str)]
    structlog.configure(
        processors=[*common, *own],
        wrapper_class=structlog.make_filtering_bound_logger(verbosity.threshold),
        logger_factory=lambda *_: (
            _ScreenLogger(screen) if people else structlog.WriteLogger(sys.stderr)
        ),
        cache_logger_on_first_use=False,
    )
    # Other libraries' records are printed as if logging were not set up, except Py4J's
    # tracebacks of calls that also raise: it would set up logging itself to show them.
    if logging.lastResort is not None and not debug:
        logging.lastResort.addFilter(_is_for_us)
        logging.getLogger().addHandler(logging.lastResort)


def _is_for_us(record: logging.LogRecord) -> bool:
    """Return whether no other handler gets a record, and it is not Py4J's."""
    logger = logging.getLogger(record.name)
    while logger.parent is not None:
        if logger.handlers:
            return False
        logger = logger.parent
    return Path(record.pathname).parent.name != "py4j"


def _without_secrets(
    secrets: Secrets, _logger: WrappedLogger, _method: str, event: EventDict
) -> EventDict:
    """Conceal secrets in an event, before its level and time are added."""
    concealed: EventDict = secrets.concealed(event)
    return concealed


def _without_steps(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """
    Drop events that the outcome of a message makes redundant.

    A worker that died from a message is restarted, and the message is tried again: in
    the end it is answered, or an event or the run's error has the reason.
    """
    said = event.get("event")
    if said == RESTARTED or (said == EXITED and event.get("in_flight")):
        raise structlog.DropEvent
    return event


def _as_is(line: Text, _limit: int | None) -> Text:
    """Return a line unchanged, for output of any width."""
    return line


def _fitted(screen: Screen, line: Text, limit: int | None) -> Text:
    """Return a line wrapped at words for a terminal, up to ``limit`` lines."""
    lines = list(line.wrap(screen, screen.width))
    if limit is not None and len(lines) > limit:
        del lines[limit:]
        lines[-1].truncate(screen.width - len(REST))
        lines[-1].append(REST, "dim")
    return Text("\n").join(lines)


def _for_people(
    fitted: Callable[[Text, int | None], Text],
    _logger: WrappedLogger,
    method: str,
    event: EventDict,
) -> tuple[tuple[Text], dict[str, object]]:
    """Return the arguments for a method of the logger."""
    return (_line(method, event, fitted),), {}


def _line(
    method: str, event: EventDict, fitted: Callable[[Text, int | None], Text]
) -> Text:
    level = str(event.pop("level", method))
    line = Text.assemble((f"{event.pop('timestamp', '')} ", "dim"))
    said = str(event.pop("event", ""))
    trace = event.pop("exception", None)
    if said == WORKER_LINE:
        who = event.get("worker", event.get("stage", "worker"))
        line.append(f"{harmless(str(who))} ({event.get('pid')}) ", "cyan")
        line.append(harmless(str(event.get("line", "")), lines=True))
        return fitted(line, None)
    line.append(f"{level} ", STYLES.get(level, ""))
    line.append(harmless(said))
    for key, value in event.items():
        line.append(f" {key}=", "dim")
        line.append(harmless(str(value)))
    line = fitted(line, SHOWN_LINES)
    if trace:
        line.append(f"\n{harmless(str(trace), lines=True)}")
    return line


class _ScreenLogger:
    """Prints events above the progress display."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen

    def msg(self, text: Text) -> None:
        self._screen.print(text, soft_wrap=True)

    debug = info = warning = error = critical = exception = msg
