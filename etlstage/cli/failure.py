"""Report failures: one clear line each, a traceback only if asked for."""

from __future__ import annotations

import sys
import textwrap
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from etlstage.errors import ConfigError, EtlstageError, Excerpt, os_reason
from etlstage.telemetry.terminal import harmless

if TYPE_CHECKING:
    from etlstage.pipeline.secret import Secrets

__all__ = (
    "FAILED",
    "REST",
    "SHOWN_LINES",
    "WRONG_USAGE",
    "complain",
    "naming",
    "show_error",
)

FAILED = 1
WRONG_USAGE = 2

_PACKAGE: Final = Path(__file__).parents[1]
_BEFORE: Final = 60
"""Maximum columns of a long line that are shown before the caret."""
_LEAST: Final = 40
"""Minimum width of output in columns, however narrow a terminal is."""
SHOWN_LINES: Final = 3
"""Maximum lines of an error, or of an event, on a terminal."""
REST: Final = " ... (--debug shows all)"


def show_error(error: Exception, *, debug: bool, secrets: Secrets | None = None) -> int:
    """Print an error, without secrets; return the exit code that goes with it."""
    conceal = secrets.conceal if secrets is not None else str
    if isinstance(error, ConfigError):
        for problem, excerpt in zip(error.problems, error.excerpts, strict=True):
            complain(conceal(problem))
            if excerpt is not None:
                _show_excerpt(excerpt)
        return WRONG_USAGE
    if debug:
        trace = "".join(traceback.format_exception(error))
        typer.echo(conceal(trace), err=True, nl=False)
    if isinstance(error, EtlstageError):
        text = conceal(str(error))
        complain(text, lines=None if debug else SHOWN_LINES)
        for line in error.story:
            typer.echo(f"  {harmless(conceal(line))}", err=True)
    else:
        # Not every command has --debug, and a bug report needs the place.
        kind, place = type(error).__name__, _place(error)
        complain(conceal(f"unexpected {kind}: {error}{place}"))
    return FAILED


def _place(error: Exception) -> str:
    """Return the last place in the package that an error came through, or nothing."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if (path := Path(frame.filename)).is_relative_to(_PACKAGE):
            return f" ({path.relative_to(_PACKAGE.parent)}, line {frame.lineno})"
    return ""


@contextmanager
def naming(what: object) -> Iterator[None]:
    """
    Turn the error of a file that the user named into an error of usage.

    Args:
        what: The text before the system's reason.

    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{what}: {os_reason(error)}") from None


def _fitted(text: str, limit: int | None) -> str:
    """Return a text wrapped at words; if too long, its less important end is cut."""
    if not sys.stderr.isatty():
        return text
    from etlstage.cli.screen import Screen  # slower to import than everything here

    width = max(Screen(stderr=True).width, _LEAST)
    lines = [
        part
        for line in ([" ".join(text.split())] if limit else text.splitlines())
        for part in textwrap.wrap(
            line,
            width,
            max_lines=limit,
            placeholder=REST,
            # A long path is best broken by the terminal, which can rejoin it.
            break_long_words=limit is not None,
            break_on_hyphens=False,
        )
    ]
    return "\n".join(lines)


def _show_excerpt(excerpt: Excerpt) -> None:
    """Print the line on a terminal, with a caret below where it is wrong."""
    from rich.cells import cell_len
    from rich.text import Text

    from etlstage.cli.screen import Screen  # slower to import than everything here

    screen = Screen(stderr=True)
    if not screen.watched:
        return
    # The line is as the user wrote it: secrets appear only as references.
    line, before = harmless(excerpt.line), harmless(excerpt.line[: excerpt.column - 1])
    margin = f"{excerpt.number:>6} | "
    room = max(screen.width - len(margin), _LEAST)
    start = 0
    if cell_len(line) > room:
        most = min(_BEFORE, room - 2)  # a character has up to two columns
        start = max(0, len(before) - most)
        while cell_len(before[start:]) > most:
            start += 1
    shown = Text(line[start:])
    shown.truncate(room)
    caret = " " * (len(margin) + cell_len(before[start:]))
    screen.print(Text.assemble((margin, "dim"), shown), soft_wrap=True)
    screen.print(Text(f"{caret}^", "bold red"), soft_wrap=True)


def complain(text: str, *, as_: str = "error", lines: int | None = None) -> None:
    """Print what is wrong; on a terminal in at most ``lines`` lines, unless None."""
    text = f"etlstage: {as_}: {harmless(text, lines=True)}"
    typer.echo(_fitted(text, lines), err=True)
